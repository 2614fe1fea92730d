// Residual and velocity updates: one pass, and nothing that is not finite is ever written. See README.md.
#include "laconic/kernels/native/frame.h"

namespace laconic::LACONIC_TARGET {
namespace {

constexpr std::uint32_t exponent = 0x7F800000u;  // [sign 1 | exponent 8 | mantissa 23]: all ones is Inf or NaN

inline bool finite(float x) { return (std::bit_cast<std::uint32_t>(x) & exponent) != exponent; }

bool all_finite(ConstFloats x, ConstLongs starts, ConstLongs sizes) {
  nb::gil_scoped_release released;
  const Segments segments(starts, sizes);
  constexpr std::int64_t block = 8192;
  for (std::int64_t s = 0; s < segments.count; ++s) {
    const float* begin = x.data() + segments.starts[s];
    for (std::int64_t at = 0; at < segments.sizes[s]; at += block) {
      const std::int64_t end = std::min(at + block, segments.sizes[s]);
      std::uint32_t bad = 0;
      for (std::int64_t i = at; i < end; ++i) bad |= static_cast<std::uint32_t>(!finite(begin[i]));
      if (bad) return false;
    }
  }
  return true;
}

bool accumulate(Floats residual, ConstFloats grad, ConstLongs starts, ConstLongs sizes, double scale, double decay) {
  nb::gil_scoped_release released;
  const Segments segments(starts, sizes);
  const auto a = static_cast<float>(scale), d = static_cast<float>(decay);
  std::uint32_t bad = 0;
  for (std::int64_t s = 0; s < segments.count; ++s) {
    float* __restrict r = residual.data() + segments.starts[s];
    const float* __restrict g = grad.data() + segments.starts[s];
    for (std::int64_t i = 0; i < segments.sizes[s]; ++i) {
      const float old = r[i], updated = d * old + a * g[i];
      const bool good = finite(updated);
      r[i] = good ? updated : old;
      bad |= static_cast<std::uint32_t>(!good);
    }
  }
  return bad == 0;
}

template <bool nesterov>
bool velocity_segment(float* __restrict u, float* __restrict v, const float* __restrict g, std::int64_t n, float m,
                      float a) {
  std::uint32_t bad = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const float old_u = u[i], old_v = v[i], scaled = a * g[i];
    const float new_u = nesterov ? m * (old_u + scaled) : m * old_u + scaled;
    const float new_v = nesterov ? (old_v + new_u) + scaled : old_v + new_u;
    const bool good = finite(new_u) & finite(new_v);  // `&&` is a branch, and the loop is then not vectorised
    u[i] = good ? new_u : old_u;
    v[i] = good ? new_v : old_v;
    bad |= static_cast<std::uint32_t>(!good);
  }
  return bad == 0;
}

bool velocity(Floats velocity, Floats residual, ConstFloats grad, ConstLongs starts, ConstLongs sizes,
              ConstFloats momentum, double scale, bool nesterov) {
  nb::gil_scoped_release released;
  const Segments segments(starts, sizes);
  bool clean = true;
  for (std::int64_t s = 0; s < segments.count; ++s) {
    const std::int64_t start = segments.starts[s];
    auto* step = nesterov ? &velocity_segment<true> : &velocity_segment<false>;
    clean &= step(velocity.data() + start, residual.data() + start, grad.data() + start, segments.sizes[s],
                  momentum.data()[s], static_cast<float>(scale));
  }
  return clean;
}

}  // namespace

LACONIC_KERNELS(m) {
  m.def("all_finite", &all_finite);
  m.def("accumulate_", &accumulate);
  m.def("velocity_", &velocity);
}

}  // namespace laconic::LACONIC_TARGET
