// Bits that mark the elements of a block of 256 that have a symbol, and the units of the wire. See README.md.
#pragma once

#include "laconic/kernels/bitpack/bits.h"

namespace laconic::LACONIC_TARGET {

constexpr int block = 256, mark_bytes = block / 8, tag_bytes = 8, words = block / 64, head = 5, top = 32767;
constexpr std::int64_t unfit = -1;  // of what holds NaN or Inf
constexpr std::uint8_t zero = 0, plain = 1, marked = 2, tagged = 3, raw = 4;
constexpr std::uint32_t infinity = 0x7F800000;

inline std::int64_t blocks_of(std::int64_t n) { return (n + block - 1) / block; }
inline std::int64_t low_nbytes(int k, int count) { return (static_cast<std::int64_t>(k) * count + 7) / 8; }

struct Marks {
  std::uint64_t word[words] = {};

  int count() const {
    int sum = 0;
    for (const auto each : word) sum += std::popcount(each);
    return sum;
  }
  // Bits of the bytes that are neither 0 nor 255, and of those that are 255.
  void tags(std::uint32_t& mixed, std::uint32_t& full) const {
    std::uint8_t byte[mark_bytes];
    std::memcpy(byte, word, sizeof byte);
    mixed = full = 0;
    for (int i = 0; i < mark_bytes; ++i) {
      full |= static_cast<std::uint32_t>(byte[i] == 255) << i;
      mixed |= static_cast<std::uint32_t>(byte[i] != 255 && byte[i] != 0) << i;
    }
  }
  void first(int n) {  // the marks of n elements, all set
    for (int w = 0; w < words; ++w) {
      const int left = std::clamp(n - 64 * w, 0, 64);
      word[w] = left == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << left) - 1;
    }
  }
};

// One bit for each element that is not zero.
inline void mark(const std::int32_t* __restrict of, Marks& marks) {
  for (int w = 0; w < words; ++w) {
    std::uint64_t word = 0;
#if defined(__AVX512F__)
    for (int i = 0; i < 4; ++i) {
      const __m512i some = _mm512_loadu_si512(of + 64 * w + 16 * i);
      word |= static_cast<std::uint64_t>(_mm512_test_epi32_mask(some, some)) << 16 * i;
    }
#else
    for (int i = 0; i < 64; ++i) word |= static_cast<std::uint64_t>(of[64 * w + i] != 0) << i;
#endif
    marks.word[w] = word;
  }
}

// The marked elements, one after the other; `to` has room for 16 more than a block.
inline int squeeze(const std::int32_t* __restrict from, const Marks& marks, std::int32_t* __restrict to) {
  int count = 0;
  for (int i = 0; i < block; i += 16) {
    const auto mask = static_cast<std::uint16_t>(marks.word[i / 64] >> (i % 64));
#if defined(__AVX512F__)
    _mm512_storeu_si512(to + count, _mm512_maskz_compress_epi32(mask, _mm512_loadu_si512(from + i)));
    count += std::popcount(mask);
#else
    for (int j = 0; j < 16; ++j) {
      to[count] = from[i + j];
      count += mask >> j & 1;
    }
#endif
  }
  return count;
}

// And back; unmarked elements become 0.
inline void spread(const std::int32_t* __restrict from, const Marks& marks, std::int32_t* __restrict to) {
  for (int i = 0; i < block; i += 16) {
    const auto mask = static_cast<std::uint16_t>(marks.word[i / 64] >> (i % 64));
#if defined(__AVX512F__)
    _mm512_storeu_si512(to + i, _mm512_maskz_expand_epi32(mask, _mm512_loadu_si512(from)));
    from += std::popcount(mask);
#else
    for (int j = 0; j < 16; ++j) {
      const int bit = mask >> j & 1;
      to[i + j] = *from & -bit;
      from += bit;
    }
#endif
  }
}

}  // namespace laconic::LACONIC_TARGET
