// Stochastic rounding of a chunk to codes, and codes back to values. See README.md.
//
// Adding 65535 - (U(i) >> 8) to a fixed-point number carries into its level where the fraction is larger than
// U(i) >> 8. Where both are equal, which leaves a fraction of 65535, 8 more bits decide.
#pragma once

#include "laconic/kernels/philox/dither.h"
#include "laconic/kernels/quantise/grid.h"

namespace laconic::LACONIC_TARGET {

// What turns elements of one block into codes [sign 1 | level bits - 1]. Where `small`, they have been enlarged.
template <class Grid>
struct Rounding {
  Grid grid;
  int bits;
  float most, inv;
  bool small;

  Rounding(Grid grid, int bits, float scale)
      : grid(grid), bits(bits), most(grid.most()), inv(inverse(scale, most)), small(scale != 0 && scale < tiny) {}

  float scaled(float x) const { return std::min(std::fabs(x) * inv, most); }

  // A code from the dithered fixed-point number of x.
  template <class Code>
  Code code(std::int32_t dithered, float x) const {
    const std::uint32_t sign = std::bit_cast<std::uint32_t>(x) >> 31;
    return static_cast<Code>(static_cast<std::uint32_t>(dithered >> 16) | sign << (bits - 1));
  }

  // `carry` holds 65535 - (U(i) >> 8). True if some fraction was equal to U(i) >> 8.
  template <class Code>
  bool round(const float* __restrict x, int count, const std::uint16_t* __restrict carry,
             Code* __restrict codes) const {
    std::int32_t most_fraction = 0;
    for (int i = 0; i < count; ++i) {
      const std::int32_t dithered = grid.fixed(scaled(x[i])) + carry[i];
      most_fraction = std::max(most_fraction, dithered & 0xFFFF);
      codes[i] = code<Code>(dithered, x[i]);
    }
    return most_fraction == 0xFFFF;
  }

#if defined(__AVX512F__)
  template <class Code>
  bool round_chunk(const float* __restrict x, const std::uint16_t* __restrict carry, Code* __restrict codes) const {
    const __m512 factor = _mm512_set1_ps(inv), limit = _mm512_set1_ps(most);
    const __m512i sign = _mm512_set1_epi32(INT32_MIN), ones = _mm512_set1_epi16(-1);
    const __m512i swap = _mm512_set1_epi16(static_cast<short>(0x8000 ^ 1 << (bits - 1)));  // bit 15 to bit bits - 1
    const __m512i odd = _mm512_add_epi16(  // of both vectors' words: 1, 3, ..., 63
        _mm512_maskz_set1_epi16(0xFFFF0000u, 32),
        _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1,  //
                         31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1));
    __m512i most_words = _mm512_setzero_si512();
    const auto dithered = [&](int at) {  // [sign 1 | level 15 | fraction 16]
      const __m512 v = _mm512_loadu_ps(x + at);
      const __m512 y = _mm512_min_ps(limit, _mm512_mul_ps(_mm512_abs_ps(v), factor));
      const __m256i some = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(carry + at));
      const __m512i sum = _mm512_add_epi32(grid.fixed(y), _mm512_cvtepu16_epi32(some));
      most_words = _mm512_max_epu16(most_words, sum);  // no level is 65535
      return _mm512_ternarylogic_epi32(sum, _mm512_castps_si512(v), sign, 0xF8);  // a | b & c
    };
    for (int at = 0; at < Dither::chunk; at += 32) {
      const __m512i first = dithered(at), second = dithered(at + 16);
      const __m512i upper = _mm512_permutex2var_epi16(first, odd, second);
      const __m512i code = _mm512_ternarylogic_epi32(upper, _mm512_srai_epi16(upper, 15), swap, 0x78);  // a ^ b & c
      if constexpr (sizeof(Code) == 1)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + at), _mm512_cvtepi16_epi8(code));
      else
        _mm512_storeu_si512(codes + at, code);
    }
    return _mm512_cmpeq_epi16_mask(most_words, ones) != 0;
  }
#else
  template <class Code>
  bool round_chunk(const float* x, const std::uint16_t* carry, Code* codes) const {
    return round(x, Dither::chunk, carry, codes);
  }
#endif
};

// Codes of the elements of a chunk, or of fewer, from `first` on.
template <class Grid, class Code>
void encode(const float* x, int count, const Rounding<Grid>& by, const Dither& dither, std::int64_t first,
            const std::uint16_t* carry, Code* codes) {
  float larger[Dither::chunk];
  if (by.small) {
    for (int i = 0; i < count; ++i) larger[i] = x[i] * enlarge;
    x = larger;
  }
  const bool ties = count == Dither::chunk ? by.round_chunk(x, carry, codes) : by.round(x, count, carry, codes);
  if (!ties) return;
  std::uint8_t tied[Dither::chunk];
  for (int i = 0; i < count; ++i) tied[i] = (by.grid.fixed(by.scaled(x[i])) & 0xFFFF) + carry[i] == 0xFFFF;
  for (int i = 0; i < count; ++i) {
    const float y = by.scaled(x[i]);
    if (tied[i] && dither.lower(static_cast<std::uint64_t>(first + i)) < by.grid.finer(y))
      codes[i] = by.template code<Code>(by.grid.fixed(y) + 65536, x[i]);
  }
}

// out[i] += alpha * value of codes[i].
template <class Grid, class Code>
void add(const Code* __restrict codes, int count, float scale, Grid grid, int bits, float alpha,
         float* __restrict out) {
  const std::uint32_t level = (1u << (bits - 1)) - 1;
  const auto loop = [&](int n) {
    for (int i = 0; i < n; ++i) {
      const std::uint32_t code = codes[i];
      const float size = grid.value(static_cast<std::int32_t>(code & level)) * scale;
      const auto signed_size = std::bit_cast<float>(std::bit_cast<std::uint32_t>(size) | code >> (bits - 1) << 31);
      out[i] += alpha * signed_size;
    }
  };
  if (count == Dither::chunk)
    loop(Dither::chunk);
  else
    loop(count);
}

}  // namespace laconic::LACONIC_TARGET
