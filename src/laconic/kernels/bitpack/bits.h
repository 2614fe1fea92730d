// Bit packing: eight codes of B bits are exactly B bytes, so a loop over groups of eight has constant shifts.
// See README.md.
#pragma once

#include "laconic/kernels/native/frame.h"

#include <array>
#include <utility>

namespace laconic::LACONIC_TARGET {

inline std::uint64_t load64(const std::uint8_t* from) {
  std::uint64_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

template <int B>
constexpr std::uint64_t mask = (std::uint64_t{1} << B) - 1;

// The low B bits of each byte of a word: where the codes of eight lanes lie, for pext and pdep.
template <int B>
constexpr std::uint64_t lanes = 0x0101010101010101u * (mask<B> & 255);

// Writes the B bytes of eight codes, and up to seven more: `to` has room for B + 7.
template <int B>
void pack8(const std::int32_t* codes, std::uint8_t* to) {
#if defined(__AVX2__) && defined(__BMI2__)
  if constexpr (B <= 8) {
    const __m256i eight = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    const __m256i low = _mm256_shuffle_epi8(  // the low byte of each lane, to the front of each half
        eight, _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
    const __m128i bytes = _mm_unpacklo_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    const std::uint64_t word = _pext_u64(static_cast<std::uint64_t>(_mm_cvtsi128_si64(bytes)), lanes<B>);
    std::memcpy(to, &word, sizeof word);
    return;
  }
#endif
  std::uint64_t word = 0;
  int fill = 0;  // bits in `word`; constant once unrolled
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    word |= (static_cast<std::uint32_t>(codes[i]) & mask<B>) << fill;
    fill += B;
    if (fill >= 32) {
      const auto half = static_cast<std::uint32_t>(word);
      std::memcpy(to, &half, sizeof half);
      to += sizeof half;
      word >>= 32;
      fill -= 32;
    }
  }
  const auto half = static_cast<std::uint32_t>(word);
  std::memcpy(to, &half, sizeof half);
}

// Reads the B bytes of eight codes, and up to seven more.
template <int B>
void unpack8(const std::uint8_t* from, std::int32_t* codes) {
#if defined(__AVX2__) && defined(__BMI2__)
  if constexpr (B <= 8) {
    const __m128i bytes = _mm_cvtsi64_si128(static_cast<long long>(_pdep_u64(load64(from), lanes<B>)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm256_cvtepu8_epi32(bytes));
    return;
  }
#endif
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    codes[i] = static_cast<std::int32_t>(load64(from + i * B / 8) >> (i * B % 8) & mask<B>);
}

template <int B>
void pack(const std::int32_t* codes, std::int64_t n, std::uint8_t* wire, std::int64_t nbytes) {
  std::int64_t i = 0, at = 0;
  for (; i + 8 <= n && at + B + 7 <= nbytes; i += 8, at += B) pack8<B>(codes + i, wire + at);
  for (; i < n; i += 8, at += B) {  // too near the end to write past the group
    std::int32_t some[8] = {};
    std::uint8_t bytes[B + 7] = {};
    std::copy_n(codes + i, std::min<std::int64_t>(8, n - i), some);
    pack8<B>(some, bytes);
    std::copy_n(bytes, std::min<std::int64_t>(B, nbytes - at), wire + at);
  }
}

template <int B>
void unpack(const std::uint8_t* wire, std::int64_t nbytes, std::int32_t* codes, std::int64_t n) {
  std::int64_t i = 0, at = 0;
  for (; i + 8 <= n && at + B + 7 <= nbytes; i += 8, at += B) unpack8<B>(wire + at, codes + i);
  for (; i < n; i += 8, at += B) {
    std::int32_t some[8];
    std::uint8_t bytes[B + 7] = {};
    std::copy_n(wire + at, std::min<std::int64_t>(B, nbytes - at), bytes);
    unpack8<B>(bytes, some);
    std::copy_n(some, std::min<std::int64_t>(8, n - i), codes + i);
  }
}

template <int... B>
constexpr auto packers(std::integer_sequence<int, B...>) {
  return std::array{&pack<B + 1>...};
}

template <int... B>
constexpr auto unpackers(std::integer_sequence<int, B...>) {
  return std::array{&unpack<B + 1>...};
}

using Widths = std::make_integer_sequence<int, 32>;

// Codes int32 (n,) of this many bits to `nbytes` bytes, at least (n * bits + 7) / 8; what follows may be overwritten.
inline auto packer(int bits) {
  static constexpr auto table = packers(Widths{});
  return table[static_cast<std::size_t>(bits - 1)];
}

// And back: `nbytes` may be more than the n codes fill.
inline auto unpacker(int bits) {
  static constexpr auto table = unpackers(Widths{});
  return table[static_cast<std::size_t>(bits - 1)];
}

}  // namespace laconic::LACONIC_TARGET
