// From |x| to the two levels around it and back. See README.md.
//
// An element becomes y = |x| inv, in units of 2^-16, and y a fixed-point number [level 15 | fraction 16]. `finer` are
// the next 8 bits of the fraction.
#pragma once

#include "laconic/kernels/native/frame.h"

namespace laconic::LACONIC_TARGET {

constexpr float one = 65536;     // of the fixed-point numbers
constexpr float tiny = 0x1p-60f;  // blocks of a smaller scale are enlarged by `enlarge`, for 1 / scale to be a float
constexpr float enlarge = 0x1p100f;

// Levels 0..s mean 0, 1/s, ..., 1.
struct Uniform {
  std::int32_t levels;

  float most() const { return one * static_cast<float>(levels); }
  std::int32_t fixed(float y) const { return static_cast<std::int32_t>(y); }
#if defined(__AVX512F__)
  __m512i fixed(__m512 y) const { return _mm512_cvttps_epi32(y); }
#endif
  std::uint32_t finer(float y) const {
    const std::int32_t floor = fixed(y) & ~0xFFFF;
    return static_cast<std::uint32_t>((y - static_cast<float>(floor)) * 256) & 255;
  }
  float value(std::int32_t level) const { return static_cast<float>(level) / static_cast<float>(levels); }
  float signed_value(std::int32_t level) const { return value(level); }
};

// Levels 0..s mean 0, 2^(1-s), ..., 1/2, 1: above the least power the bits of a float are [exponent | fraction].
struct Powers {
  std::int32_t levels;

  float most() const { return one; }
  std::int32_t least() const { return (127 + 16 + 1 - levels) << 23; }  // bits of y at level 1
  float lowest() const { return std::bit_cast<float>((127 + levels - 1) << 23); }
  std::int32_t fixed(float y) const {
    const auto bits = std::bit_cast<std::int32_t>(y);
    const auto below = static_cast<std::int32_t>(std::min(y * lowest(), one));
    return bits >= least() ? (bits - (least() - (1 << 23))) >> 7 : below;
  }
#if defined(__AVX512F__)
  __m512i fixed(__m512 y) const {
    const __m512i bits = _mm512_castps_si512(y), level1 = _mm512_set1_epi32(least());
    const __m512i above = _mm512_srai_epi32(_mm512_sub_epi32(bits, _mm512_set1_epi32(least() - (1 << 23))), 7);
    const __mmask16 below = _mm512_cmplt_epi32_mask(bits, level1);
    return _mm512_mask_cvttps_epi32(above, below, _mm512_mul_ps(y, _mm512_set1_ps(lowest())));
  }
#endif
  std::uint32_t finer(float y) const {
    const auto bits = std::bit_cast<std::uint32_t>(y);
    if (static_cast<std::int32_t>(bits) >= least()) return bits << 1 & 255;
    return static_cast<std::uint32_t>(y * lowest() * 256) & 255;
  }
  float value(std::int32_t level) const {
    return level ? std::bit_cast<float>((127 + level - levels) << 23) : 0.0f;
  }
  float signed_value(std::int32_t level) const { return level < 0 ? -value(-level) : value(level); }
};

// The factor from |x| to y. It is rounded up where |x| = scale would not reach the highest level: the largest entry of
// a block is sent as it is.
inline float inverse(float scale, float most) {
  if (scale == 0) return 0;
  const float z = scale < tiny ? scale * enlarge : scale;
  const float inv = most / z;
  return inv * z < most ? std::bit_cast<float>(std::bit_cast<std::uint32_t>(inv) + 1) : inv;
}

}  // namespace laconic::LACONIC_TARGET
