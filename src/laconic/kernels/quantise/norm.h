// What a block is measured by: sums in double, the largest by its bits, so that NaN and Inf are never lost.
#pragma once

#include "laconic/kernels/native/frame.h"

namespace laconic::LACONIC_TARGET {

// Asks for the memory that a stream of floats will be read from next: the CPU alone asks for less than it could get.
inline void fetch(const float* x, std::int64_t count) {
  constexpr std::int64_t ahead = 1536, line = 16;
  for (std::int64_t i = 0; i < count; i += line) __builtin_prefetch(x + ahead + i);
}

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

struct Moments {
  float deviation, root_mean_square, largest;  // of a population; max |x|. Not finite where x is not
};

// Of n > 0 elements, in one pass: sums of d = x - x[0] lose nothing where x is nearly constant, and are exactly 0 where
// it is constant.
inline Moments moments_of(const float* __restrict x, std::int64_t n) {
  constexpr int lanes = 16;
  const double shift = x[0];
  double sums[lanes] = {}, squares[lanes] = {};
  std::uint32_t most[lanes] = {};
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    fetch(x + i, lanes);
    for (int lane = 0; lane < lanes; ++lane) {
      const double d = x[i + lane] - shift;
      sums[lane] += d;
      squares[lane] += d * d;
      most[lane] = std::max(most[lane], std::bit_cast<std::uint32_t>(x[i + lane]) & 0x7FFFFFFFu);
    }
  }
  double sum = 0, square = 0;
  for (std::int64_t rest = i; rest < n; ++rest) sum += x[rest] - shift, square += (x[rest] - shift) * (x[rest] - shift);
  for (int lane = 0; lane < lanes; ++lane) sum += sums[lane], square += squares[lane];
  const auto size = static_cast<double>(n);
  const std::uint32_t top = std::max(*std::max_element(most, most + lanes), largest(x + i, n - i));
  const double variance = std::max(0.0, (square - sum * sum / size) / size), mean = shift + sum / size;
  return {rounded(std::sqrt(variance)), rounded(std::sqrt(variance + mean * mean)), std::bit_cast<float>(top)};
}

// The scale of n > 0 elements; not finite where one of them is not. `clip` limits it to so many standard deviations,
// but no less than the root mean square; 0 does not.
inline float scale_of(Norm norm, float clip, const float* x, std::int64_t n) {
  if (clip > 0) {
    const Moments of = moments_of(x, n);
    const float limit = std::max(clip * of.deviation, of.root_mean_square);  // 0 of nothing but zeros and denormals
    return limit > 0 && limit < of.largest ? limit : of.largest;
  }
  if (norm == Norm::max) return std::bit_cast<float>(largest(x, n));
  if (norm == Norm::l2) return rounded(std::sqrt(sum(x, n, [](double v) { return v * v; })));
  return rounded(sum(x, n, [](double v) { return std::fabs(v); }) / static_cast<double>(n));
}

}  // namespace laconic::LACONIC_TARGET
