// One pass over |x|: the entries whose magnitude reaches a floor, in order.
//
// Magnitudes are compared as integers: the bits of |x| order like |x|. Only floor <= bits <= infinity passes, so
// NaN never does, and neither does 0, since every floor is at least 1.
#pragma once

#include "laconic/kernels/native/frame.h"

namespace laconic::LACONIC_TARGET {

constexpr std::uint32_t infinity = 0x7F800000u;
constexpr std::uint32_t magnitude = 0x7FFFFFFFu;

// Bits of |x|, 0 for NaN.
inline std::uint32_t bits_of(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x) & magnitude;
  return bits > infinity ? 0 : bits;
}

constexpr std::int64_t chunk = 2048;

// Entries that passed, of one chunk; room for the tail of a full-width store.
struct Passed {
  std::int32_t index[chunk + 64];
  std::uint32_t bits[chunk + 64];
  std::int64_t count = 0;

  void put(std::int64_t i, std::uint32_t b) {
    index[count] = static_cast<std::int32_t>(i);
    bits[count++] = b;
  }
};

// Elements [begin, end) of x, at most one chunk.
inline void scan_chunk(const float* x, std::int64_t begin, std::int64_t end, std::uint32_t floor, Passed& passed) {
  passed.count = 0;
  std::int64_t i = begin;
#if defined(__AVX512F__)
  const __m512i low = _mm512_set1_epi32(static_cast<int>(floor));
  const __m512i span = _mm512_set1_epi32(static_cast<int>(infinity - floor));
  const __m512i mask = _mm512_set1_epi32(static_cast<int>(magnitude));
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (; i + 64 <= end; i += 64) {
    __m512i bits[4];
    __mmask16 hit[4];
    for (int j = 0; j < 4; ++j) {
      bits[j] = _mm512_and_si512(_mm512_loadu_si512(x + i + 16 * j), mask);
      hit[j] = _mm512_cmple_epu32_mask(_mm512_sub_epi32(bits[j], low), span);
    }
    if (!(hit[0] | hit[1] | hit[2] | hit[3])) continue;
    for (int j = 0; j < 4; ++j) {
      const __m512i index = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(i + 16 * j)));
      _mm512_storeu_si512(passed.index + passed.count, _mm512_maskz_compress_epi32(hit[j], index));
      _mm512_storeu_si512(passed.bits + passed.count, _mm512_maskz_compress_epi32(hit[j], bits[j]));
      passed.count += std::popcount(static_cast<unsigned>(hit[j]));
    }
  }
#elif defined(__AVX2__)
  const __m256i below = _mm256_set1_epi32(static_cast<int>(floor - 1));  // signed compares: all bits are < 2^31
  const __m256i top = _mm256_set1_epi32(static_cast<int>(infinity));
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(magnitude));
  for (; i + 32 <= end; i += 32) {
    __m256i bits[4], hit[4];
    for (int j = 0; j < 4; ++j) {
      bits[j] = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i + 8 * j)), mask);
      hit[j] = _mm256_andnot_si256(_mm256_cmpgt_epi32(bits[j], top), _mm256_cmpgt_epi32(bits[j], below));
    }
    const __m256i any = _mm256_or_si256(_mm256_or_si256(hit[0], hit[1]), _mm256_or_si256(hit[2], hit[3]));
    if (_mm256_testz_si256(any, any)) continue;
    for (int j = 0; j < 4; ++j) {
      auto left = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(hit[j])));
      for (; left; left &= left - 1) {
        const std::int64_t at = i + 8 * j + std::countr_zero(left);
        passed.put(at, std::bit_cast<std::uint32_t>(x[at]) & magnitude);
      }
    }
  }
#else
  for (; i + 32 <= end; i += 32) {
    std::uint32_t any = 0;
    for (int j = 0; j < 32; ++j) {
      const auto bits = static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(x[i + j]) & magnitude);
      any |= static_cast<std::uint32_t>(bits >= static_cast<std::int32_t>(floor));
    }
    if (!any) continue;
    for (std::int64_t j = i; j < i + 32; ++j)
      if (const std::uint32_t bits = bits_of(x[j]); bits >= floor) passed.put(j, bits);
  }
#endif
  for (; i < end; ++i)
    if (const std::uint32_t bits = bits_of(x[i]); bits >= floor) passed.put(i, bits);
}

// Calls sink(passed) for each chunk of x (n,) in which something passes, until it returns false.
template <class Sink>
bool scan(const float* x, std::int64_t n, std::uint32_t floor, Sink sink) {
  Passed passed;
  if (floor > infinity) return true;
  for (std::int64_t at = 0; at < n; at += chunk) {
    scan_chunk(x, at, std::min(at + chunk, n), std::max(floor, 1u), passed);
    if (passed.count && !sink(passed)) return false;
  }
  return true;
}

}  // namespace laconic::LACONIC_TARGET
