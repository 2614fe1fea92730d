// Base 3: five levels of {-1, 0, 1} in a byte. See README.md.
#pragma once

#include <array>

#include "laconic/kernels/native/frame.h"

namespace laconic::LACONIC_TARGET {

struct Ternary {
  static constexpr int group = 5;        // levels in a byte
  static constexpr int bytes = 243;      // 3^5
  static constexpr std::int64_t chunk = group * 1024;  // levels that stay in the cache as digits

  static constexpr std::int64_t nbytes(std::int64_t n) { return (n + group - 1) / group; }

  // Five digits, one a byte of the word, times their places: byte 4 of the product. No byte below carries, for
  // 2 (1 + 3 + 9 + 27 + 81) = 242.
  static std::uint8_t join(const std::uint8_t* digits) {
    std::uint64_t word;
    std::memcpy(&word, digits, sizeof word);
    constexpr std::uint64_t places = 81 | 27 << 8 | 9 << 16 | 3ull << 24 | 1ull << 32;
    return static_cast<std::uint8_t>((word & 0xFFFFFFFFFFu) * places >> 32);
  }

  // Levels to bytes; false if some level is none of -1, 0, 1.
  static bool pack(const std::int32_t* levels, std::int64_t n, std::uint8_t* wire) {
    std::uint8_t digits[chunk + 8] = {};
    std::uint32_t bad = 0;
    for (std::int64_t at = 0; at < n; at += chunk) {
      const std::int64_t count = std::min(chunk, n - at);
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int32_t level = levels[at + i];
        bad |= static_cast<std::uint32_t>(level) + 1 > 2;
        digits[i] = static_cast<std::uint8_t>(level & 3) - static_cast<std::uint8_t>(level < 0);  // -1: 3 - 1
      }
      std::fill_n(digits + count, 8, 0);
      for (std::int64_t i = 0; i < count; i += group) *wire++ = join(digits + i);
    }
    return bad == 0;
  }

  // The five levels of every byte, in eight bytes of their own.
  using Table = std::array<std::array<std::int8_t, 8>, 256>;
  static constexpr Table table = [] {
    Table made{};
    for (int byte = 0; byte < bytes; ++byte)
      for (int i = 0, rest = byte; i < group; ++i, rest /= 3)
        made[byte][i] = static_cast<std::int8_t>(rest % 3 == 2 ? -1 : rest % 3);
    return made;
  }();

  static void check(const std::uint8_t* wire, std::int64_t n) {
    const std::int64_t m = nbytes(n);
    std::uint8_t most = 0;
    for (std::int64_t i = 0; i < m; ++i) most = std::max(most, wire[i]);
    if (most >= bytes) throw WireError("five levels make a byte of at most 242, got %lld", most, 0);
    constexpr int ends[] = {bytes, 3, 9, 27, 81};  // of the last byte, by how many digits it has
    if (m && wire[m - 1] >= ends[n % group]) throw WireError("digits after the last of %lld levels must be zero", n, 0);
  }

  // Bytes to levels. `check` has seen the wire.
  static void unpack(const std::uint8_t* wire, std::int64_t n, std::int32_t* levels) {
    std::int8_t some[chunk + 8];
    for (std::int64_t at = 0; at < n; at += chunk) {
      const std::int64_t count = std::min(chunk, n - at);
      for (std::int64_t i = 0; i < count; i += group) std::memcpy(some + i, table[*wire++].data(), 8);
      for (std::int64_t i = 0; i < count; ++i) levels[at + i] = some[i];
    }
  }
};

}  // namespace laconic::LACONIC_TARGET
