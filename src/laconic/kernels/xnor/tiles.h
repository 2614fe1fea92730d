// The inner loops: how many bits differ between a few rows and a panel of columns.
//
// A panel holds the words of `vectors * unit` columns, [word][column], so that one register has the same word of
// `unit` columns, and each row's word is spread over a register. No sum runs across a register's lanes.
// `tile<rows, vectors>(row, panel, words, base, base_step, out, step)` writes
// out[r * step + c] = base[r * base_step + c] - 2 * differing bits, exact while counts are below 2^23.
#pragma once

#include "laconic/kernels/native/frame.h"

namespace laconic::LACONIC_TARGET {

// Any CPU: a popcount a word of 64 bits.
struct Portable {
  using Word = std::uint64_t;
  static constexpr int unit = 4, most = 1, rows = 4;

  static bool runs() { return true; }

  template <int R, int V>
  static void tile(const std::uint8_t* const* row, const Word* panel, std::int64_t words, const float* base,
                   std::int64_t base_step, float* out, std::int64_t step) {
    std::int32_t counts[R][unit * V] = {};
    for (std::int64_t k = 0; k < words; ++k, panel += unit * V)
      for (int r = 0; r < R; ++r) {
        Word a;
        std::memcpy(&a, row[r] + k * 8, sizeof a);
        for (int c = 0; c < unit * V; ++c) counts[r][c] += std::popcount(a ^ panel[c]);
      }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < unit * V; ++c)
        out[r * step + c] = base[r * base_step + c] - 2.0f * static_cast<float>(counts[r][c]);
  }
};

#if defined(__AVX2__)
// differing[a][b]: how many of four bits differ between a and b. A row's four bits choose a line, and a byte shuffle
// looks 32 columns' four bits up in it: no exclusive or, and no shift by row.
struct Differing {
  std::uint8_t of[16][16];

  constexpr Differing() : of() {
    for (int a = 0; a < 16; ++a)
      for (int b = 0; b < 16; ++b) of[a][b] = static_cast<std::uint8_t>(std::popcount(static_cast<unsigned>(a ^ b)));
  }
};
alignas(64) inline constexpr Differing differing;

struct Lookup {
  using Word = std::uint8_t;
  static constexpr int unit = 32, most = 2, rows = 4;
  static constexpr std::int64_t chunk = 31;  // words of 8 bits that a byte counts: 31 * 8 < 256

  static bool runs() { return true; }

  template <int R, int V>
  static void tile(const std::uint8_t* const* row, const Word* panel, std::int64_t words, const float* base,
                   std::int64_t base_step, float* out, std::int64_t step) {
    const __m256i low = _mm256_set1_epi8(15);
    __m256i counts[R][4 * V];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < 4 * V; ++c) counts[r][c] = _mm256_setzero_si256();
    for (std::int64_t begin = 0; begin < words; begin += chunk) {
      const std::int64_t end = std::min(words, begin + chunk);
      __m256i sums[R][V];
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sums[r][v] = _mm256_setzero_si256();
      for (std::int64_t k = begin; k < end; ++k, panel += unit * V) {
        __m256i first[V], second[V];
        for (int v = 0; v < V; ++v) {
          const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel + unit * v));
          first[v] = _mm256_and_si256(b, low);
          second[v] = _mm256_and_si256(_mm256_srli_epi16(b, 4), low);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const unsigned a = row[r][k];
          const __m256i one = line(a & 15), other = line(a >> 4);
          for (int v = 0; v < V; ++v)
            sums[r][v] = _mm256_add_epi8(sums[r][v], _mm256_add_epi8(_mm256_shuffle_epi8(one, first[v]),
                                                                     _mm256_shuffle_epi8(other, second[v])));
        }
      }
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) {
          alignas(32) std::uint8_t bytes[unit];
          _mm256_store_si256(reinterpret_cast<__m256i*>(bytes), sums[r][v]);
          for (int c = 0; c < 4; ++c)
            counts[r][4 * v + c] = _mm256_add_epi32(
                counts[r][4 * v + c],
                _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes + 8 * c))));
        }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < 4 * V; ++c) {
        const __m256 twice = _mm256_cvtepi32_ps(_mm256_slli_epi32(counts[r][c], 1));
        _mm256_storeu_ps(out + r * step + 8 * c,
                         _mm256_sub_ps(_mm256_loadu_ps(base + r * base_step + 8 * c), twice));
      }
  }

 private:
  static __m256i line(unsigned four) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(differing.of[four])));
  }
};
#endif

#if defined(__AVX512F__)
#define LACONIC_POPCOUNT __attribute__((target("avx512vpopcntdq")))

// VPOPCNTDQ: three instructions for 512 pairs of bits. Not every CPU with AVX-512 has it, so `runs` asks.
struct Popcount {
  using Word = std::uint32_t;
  static constexpr int unit = 16, most = 4, rows = 4;

  static bool runs() { return __builtin_cpu_supports("avx512vpopcntdq"); }

  template <int R, int V>
  LACONIC_POPCOUNT static void tile(const std::uint8_t* const* row, const Word* panel, std::int64_t words,
                                    const float* base, std::int64_t base_step, float* out, std::int64_t step) {
    __m512i counts[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) counts[r][v] = _mm512_setzero_si512();
    for (std::int64_t k = 0; k < words; ++k, panel += unit * V) {
      __m512i b[V];
      for (int v = 0; v < V; ++v) b[v] = _mm512_loadu_si512(panel + unit * v);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        std::int32_t word;
        std::memcpy(&word, row[r] + k * 4, sizeof word);
        const __m512i a = _mm512_set1_epi32(word);
        for (int v = 0; v < V; ++v)
          counts[r][v] = _mm512_add_epi32(counts[r][v], _mm512_popcnt_epi32(_mm512_xor_si512(a, b[v])));
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) {
        const __m512 twice = _mm512_cvtepi32_ps(_mm512_slli_epi32(counts[r][v], 1));
        _mm512_storeu_ps(out + r * step + unit * v,
                         _mm512_sub_ps(_mm512_loadu_ps(base + r * base_step + unit * v), twice));
      }
  }
};
#endif

}  // namespace laconic::LACONIC_TARGET
