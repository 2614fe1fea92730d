// Philox4x32-10 (Salmon et al. 2011): 128 random bits from a 64-bit key and a block number. See README.md.
#pragma once

#include <algorithm>
#include <cstdint>

namespace laconic::LACONIC_TARGET {

struct Philox {
  std::uint32_t k0, k1;

  explicit Philox(std::uint64_t key)
      : k0(static_cast<std::uint32_t>(key)), k1(static_cast<std::uint32_t>(key >> 32)) {}

  // Words 4 * (first + lane) .. + 3 of the stream, lane by lane. The lanes are independent: compilers vectorise.
  template <int lanes>
  void blocks(std::uint64_t first, std::uint32_t* out) const {
    std::uint32_t c0[lanes], c1[lanes], c2[lanes], c3[lanes];
    for (int i = 0; i < lanes; ++i) {
      c0[i] = static_cast<std::uint32_t>(first + i);
      c1[i] = static_cast<std::uint32_t>((first + i) >> 32);
      c2[i] = c3[i] = 0;
    }
    std::uint32_t r0 = k0, r1 = k1;
    for (int round = 0; round < 10; ++round) {
      for (int i = 0; i < lanes; ++i) {
        const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * c0[i];
        const std::uint64_t p1 = std::uint64_t{0xCD9E8D57u} * c2[i];
        c0[i] = static_cast<std::uint32_t>(p1 >> 32) ^ c1[i] ^ r0;
        c1[i] = static_cast<std::uint32_t>(p1);
        c2[i] = static_cast<std::uint32_t>(p0 >> 32) ^ c3[i] ^ r1;
        c3[i] = static_cast<std::uint32_t>(p0);
      }
      r0 += 0x9E3779B9u;
      r1 += 0xBB67AE85u;
    }
    for (int i = 0; i < lanes; ++i) {
      out[4 * i] = c0[i];
      out[4 * i + 1] = c1[i];
      out[4 * i + 2] = c2[i];
      out[4 * i + 3] = c3[i];
    }
  }

  // Calls sink(i, word) for elements [offset, offset + n) of the stream.
  template <class Sink>
  void stream(std::uint64_t offset, std::int64_t n, Sink sink) const {
    constexpr int lanes = 16;
    std::uint32_t words[4 * lanes];
    std::uint64_t block = offset / 4;
    auto skip = static_cast<int>(offset % 4);
    for (std::int64_t done = 0; done < n; block += lanes) {
      blocks<lanes>(block, words);
      const auto count = static_cast<int>(std::min<std::int64_t>(4 * lanes - skip, n - done));
      for (int i = 0; i < count; ++i) sink(done + i, words[skip + i]);
      done += count;
      skip = 0;
    }
  }
};

}  // namespace laconic::LACONIC_TARGET
