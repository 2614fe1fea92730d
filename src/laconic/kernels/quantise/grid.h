// From |x| to the two levels around it and back. See README.md.
//
// An element becomes y = |x| inv, and y a fixed-point number [level 15 | fraction 16]: adding 65535 - U(i) >> 8 to it
// carries into the level where the fraction is larger than U(i) >> 8. Where both are equal, 8 more bits decide.
#pragma once

#include "laconic/kernels/philox/dither.h"

namespace laconic::LACONIC_TARGET {

constexpr float one = 65536;     // of the fixed-point numbers
constexpr float tiny = 0x1p-60f;  // buckets of a smaller scale are enlarged by `enlarge`, for 1 / scale to be a float
constexpr float enlarge = 0x1p100f;

// Levels 0..s mean 0, 1/s, ..., 1.
struct Uniform {
  std::int32_t levels;

  float most() const { return one * static_cast<float>(levels); }
  std::int32_t fixed(float y) const { return static_cast<std::int32_t>(y); }
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
// a bucket is sent as it is.
inline float inverse(float scale, float most) {
  if (scale == 0) return 0;
  const float z = scale < tiny ? scale * enlarge : scale;
  const float inv = most / z;
  return inv * z < most ? std::bit_cast<float>(std::bit_cast<std::uint32_t>(inv) + 1) : inv;
}

// Codes of up to 128 elements from `first` on, [sign 1 | level bits - 1]; upper[i] is U(first + i) >> 8.
template <class Grid, class Code>
void encode(const float* __restrict x, int count, float scale, Grid grid, int bits, const Dither& dither,
            std::int64_t first, const std::uint16_t* __restrict upper, Code* __restrict codes) {
  float larger[Dither::block];
  if (scale != 0 && scale < tiny) {
    for (int i = 0; i < count; ++i) larger[i] = x[i] * enlarge;
    x = larger;
  }
  const float inv = inverse(scale, grid.most()), most = grid.most();
  const auto scaled = [=](float v) { return std::min(std::fabs(v) * inv, most); };
  const auto code = [=](std::int32_t level, float v) {
    return static_cast<Code>(static_cast<std::uint32_t>(level) |
                             (std::bit_cast<std::uint32_t>(v) >> 31) << (bits - 1));
  };
  std::int32_t ties = 0;
  const auto loop = [&](int n) {
    for (int i = 0; i < n; ++i) {
      const std::int32_t dithered = grid.fixed(scaled(x[i])) + (0xFFFF - upper[i]);
      ties = std::max(ties, dithered & 0xFFFF);
      codes[i] = code(dithered >> 16, x[i]);
    }
  };
  if (count == Dither::block)
    loop(Dither::block);
  else
    loop(count);
  if (ties != 0xFFFF) return;
  for (int i = 0; i < count; ++i) {
    const float y = scaled(x[i]);
    if ((grid.fixed(y) & 0xFFFF) == upper[i] && dither.lower(first + i) < grid.finer(y))
      codes[i] = code((grid.fixed(y) >> 16) + 1, x[i]);
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
  if (count == Dither::block)
    loop(Dither::block);
  else
    loop(count);
}

}  // namespace laconic::LACONIC_TARGET
