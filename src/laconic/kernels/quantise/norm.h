// What a bucket is measured by: sums in double, the largest by its bits, so that NaN and Inf are never lost.
#pragma once

#include "laconic/kernels/native/frame.h"

namespace laconic::LACONIC_TARGET {

enum class Norm { max, l2, mean };

constexpr std::uint32_t infinite = 0x7F800000u;  // bits of |x|, from which on x is Inf or NaN

// Bits of the largest |x|: of floats without sign they are ordered as the values, with NaN above Inf.
inline std::uint32_t largest(const float* __restrict x, std::int64_t n) {
  std::uint32_t most = 0;
  for (std::int64_t i = 0; i < n; ++i) most = std::max(most, std::bit_cast<std::uint32_t>(x[i]) & 0x7FFFFFFFu);
  return most;
}

// The sum of f(x) in double, in sixteen parts that a vector adds at once.
template <class F>
double sum(const float* __restrict x, std::int64_t n, F f) {
  constexpr int lanes = 16;
  double parts[lanes] = {}, rest = 0;
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes)
    for (int lane = 0; lane < lanes; ++lane) parts[lane] += f(static_cast<double>(x[i + lane]));
  for (; i < n; ++i) rest += f(static_cast<double>(x[i]));
  for (const double part : parts) rest += part;
  return rest;
}

// The float next to a double that may be too large for one, or NaN where x held NaN or Inf.
inline float rounded(double value) {
  constexpr double most = 0x1.fffffep127;
  return static_cast<float>(std::isfinite(value) ? std::min(value, most) : std::nan(""));
}

// The scale of n > 0 elements; not finite where one of them is not.
inline float scale_of(Norm norm, const float* x, std::int64_t n) {
  if (norm == Norm::max) return std::bit_cast<float>(largest(x, n));
  if (norm == Norm::l2) return rounded(std::sqrt(sum(x, n, [](double v) { return v * v; })));
  return rounded(sum(x, n, [](double v) { return std::fabs(v); }) / static_cast<double>(n));
}

struct Moments {
  float deviation, largest;  // population standard deviation, and max |x|; 0 of nothing, not finite where x is not
};

// In one pass: sums of d = x - x[0] lose nothing where x is nearly constant, and are exactly 0 where it is constant.
inline Moments moments_of(const float* __restrict x, std::int64_t n) {
  if (n == 0) return {0, 0};
  constexpr int lanes = 16, block = 512;
  const double shift = x[0];
  double sums[lanes] = {}, squares[lanes] = {};
  std::uint32_t most = 0;
  for (std::int64_t first = 0; first < n; first += block) {
    const auto count = static_cast<int>(std::min<std::int64_t>(block, n - first));
    most = std::max(most, largest(x + first, count));
    for (int i = 0; i < count; i += lanes) {
      const int some = std::min(lanes, count - i);
      for (int lane = 0; lane < some; ++lane) {
        const double d = x[first + i + lane] - shift;
        sums[lane] += d;
        squares[lane] += d * d;
      }
    }
  }
  double sum = 0, square = 0;
  for (int lane = 0; lane < lanes; ++lane) sum += sums[lane], square += squares[lane];
  const auto size = static_cast<double>(n);
  return {rounded(std::sqrt(std::max(0.0, (square - sum * sum / size) / size))), std::bit_cast<float>(most)};
}

}  // namespace laconic::LACONIC_TARGET
