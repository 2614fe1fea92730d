// Philox4x32-10 (Salmon et al. 2011): 128 random bits from a 64-bit key and a block number. See README.md.
#pragma once

#include "laconic/kernels/native/frame.h"

namespace laconic::LACONIC_TARGET {

struct Philox {
  static constexpr std::uint32_t multiplier0 = 0xD2511F53u, multiplier1 = 0xCD9E8D57u;
  static constexpr std::uint32_t weyl0 = 0x9E3779B9u, weyl1 = 0xBB67AE85u;
  static constexpr int rounds = 10;

  std::uint32_t keys0[rounds], keys1[rounds];  // of each round, in memory, from where a vector is filled for nothing

  explicit Philox(std::uint64_t key) {
    auto k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
    for (int round = 0; round < rounds; ++round, k0 += weyl0, k1 += weyl1) keys0[round] = k0, keys1[round] = k1;
  }

  // The four words of one block.
  void block(std::uint64_t number, std::uint32_t* out) const {
    auto c0 = static_cast<std::uint32_t>(number), c1 = static_cast<std::uint32_t>(number >> 32);
    std::uint32_t c2 = 0, c3 = 0;
    for (int round = 0; round < rounds; ++round) {
      const std::uint64_t p0 = std::uint64_t{multiplier0} * c0, p1 = std::uint64_t{multiplier1} * c2;
      c0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ keys0[round];
      c1 = static_cast<std::uint32_t>(p1);
      c2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ keys1[round];
      c3 = static_cast<std::uint32_t>(p0);
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
  }

  // Word i of the stream.
  std::uint32_t word(std::uint64_t i) const {
    std::uint32_t four[4];
    block(i / 4, four);
    return four[i % 4];
  }

  // The words of so many blocks, a multiple of 8: the more at once, the less each waits for its own rounds.
  template <int count>
  void blocks(std::uint64_t first, std::uint32_t* out) const {
#if defined(__AVX512F__)
    wide<count / 8>(first, out);
#else
#if defined(__AVX2__)
    if (static_cast<std::uint32_t>(first) <= 0xFFFFFFFFu - count) {
      for (int i = 0; i < count; i += 8) wide8(first + i, out + 4 * i);
      return;
    }
#endif
    for (int i = 0; i < count; ++i) block(first + i, out + 4 * i);
#endif
  }

  // Calls sink(i, word) for elements [offset, offset + n) of the stream.
  template <class Sink>
  void stream(std::uint64_t offset, std::int64_t n, Sink sink) const {
    std::uint32_t words[64];
    std::uint64_t number = offset / 4;
    auto skip = static_cast<std::int64_t>(offset % 4);
    for (std::int64_t done = 0; done < n; number += 16, skip = 0) {
      blocks<16>(number, words);
      if (skip == 0 && done + 64 <= n) {
        for (int i = 0; i < 64; ++i) sink(done + i, words[i]);
        done += 64;
        continue;
      }
      const std::int64_t count = std::min(64 - skip, n - done);
      for (std::int64_t i = 0; i < count; ++i) sink(done + i, words[skip + i]);
      done += count;
    }
  }

 private:
#if defined(__AVX512F__)
  // One block a lane of 64 bits, as two pairs of words: (c0, c1) and (c2, c3), the first of each in the low half, where
  // it is multiplied. A product then holds its pair the other way round, [high | low], with the second word of the
  // other pair and the key to be xored to its high half alone. So a round is three instructions a pair. Not inlined,
  // for then the keys are read where they are used, rather than held in registers that others need.
  template <int groups>
  [[gnu::noinline]] void wide(std::uint64_t first, std::uint32_t* out) const {
    const __m512i m0 = _mm512_set1_epi64(multiplier0), m1 = _mm512_set1_epi64(multiplier1);
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // so that unpacking leaves the blocks in order
    __m512i a[groups], b[groups];
    for (int i = 0; i < groups; ++i) {
      a[i] = _mm512_add_epi64(_mm512_set1_epi64(static_cast<long long>(first + 8 * i)), order);
      b[i] = _mm512_setzero_si512();
    }
#pragma GCC unroll 10
    for (int round = 0; round < rounds; ++round) {
      const __m512i k0 = _mm512_set1_epi32(static_cast<int>(keys0[round]));
      const __m512i k1 = _mm512_set1_epi32(static_cast<int>(keys1[round]));
      for (int i = 0; i < groups; ++i) {
        const __m512i p0 = _mm512_mul_epu32(a[i], m0), p1 = _mm512_mul_epu32(b[i], m1);
        a[i] = turned(_mm512_mask_ternarylogic_epi32(p1, 0xAAAA, a[i], k0, 0x96));  // 0x96: a ^ b ^ c
        b[i] = turned(_mm512_mask_ternarylogic_epi32(p0, 0xAAAA, b[i], k1, 0x96));
      }
    }
    for (int i = 0; i < groups; ++i) {
      _mm512_storeu_si512(out + 32 * i, _mm512_unpacklo_epi64(a[i], b[i]));
      _mm512_storeu_si512(out + 32 * i + 16, _mm512_unpackhi_epi64(a[i], b[i]));
    }
  }

  static __m512i turned(__m512i pair) { return _mm512_shuffle_epi32(pair, _MM_PERM_CDAB); }
#elif defined(__AVX2__)
  // One block a lane of 32 bits, numbered so that transposing each 4 x 4 words leaves the blocks in order.
  static void multiply(__m256i c, __m256i by, __m256i& high, __m256i& low) {
    const __m256i even = _mm256_mul_epu32(c, by), odd = _mm256_mul_epu32(_mm256_srli_epi64(c, 32), by);
    high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
    low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  }

  void wide8(std::uint64_t first, std::uint32_t* out) const {
    const __m256i m0 = _mm256_set1_epi32(static_cast<int>(multiplier0));
    const __m256i m1 = _mm256_set1_epi32(static_cast<int>(multiplier1));
    const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    __m256i c0 = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(first)), order);
    __m256i c1 = _mm256_set1_epi32(static_cast<int>(first >> 32)), c2 = _mm256_setzero_si256(), c3 = c2;
    for (int round = 0; round < rounds; ++round) {
      __m256i high0, low0, high1, low1;
      multiply(c0, m0, high0, low0);
      multiply(c2, m1, high1, low1);
      c0 = _mm256_xor_si256(_mm256_xor_si256(high1, c1), _mm256_set1_epi32(static_cast<int>(keys0[round])));
      c2 = _mm256_xor_si256(_mm256_xor_si256(high0, c3), _mm256_set1_epi32(static_cast<int>(keys1[round])));
      c1 = low1;
      c3 = low0;
    }
    const __m256i a = _mm256_unpacklo_epi32(c0, c1), b = _mm256_unpackhi_epi32(c0, c1);
    const __m256i c = _mm256_unpacklo_epi32(c2, c3), d = _mm256_unpackhi_epi32(c2, c3);
    auto* to = reinterpret_cast<__m256i*>(out);
    _mm256_storeu_si256(to, _mm256_unpacklo_epi64(a, c));
    _mm256_storeu_si256(to + 1, _mm256_unpackhi_epi64(a, c));
    _mm256_storeu_si256(to + 2, _mm256_unpacklo_epi64(b, d));
    _mm256_storeu_si256(to + 3, _mm256_unpackhi_epi64(b, d));
  }
#endif
};

}  // namespace laconic::LACONIC_TARGET
