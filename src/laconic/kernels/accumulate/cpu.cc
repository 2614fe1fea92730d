// Residual and velocity updates: one pass, and nothing that is not finite is ever written. See README.md.
#include "laconic/kernels/native/frame.h"

namespace laconic::LACONIC_TARGET {
namespace {

constexpr std::uint32_t exponent = 0x7F800000u;  // [sign 1 | exponent 8 | mantissa 23]: all ones is Inf or NaN

inline bool finite(float x) { return (std::bit_cast<std::uint32_t>(x) & exponent) != exponent; }

bool all_finite(ConstFloats x, const Segments& segments) {
  nb::gil_scoped_release released;
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

template <bool keep>
using Grad = std::conditional_t<keep, float*, const float*>;

template <bool keep>
bool accumulate_segment(float* __restrict r, Grad<keep> __restrict g, std::int64_t n, float a, float d) {
  std::uint32_t bad = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const float old = r[i], updated = d * old + a * g[i];
    const bool good = finite(updated);
    r[i] = good ? updated : old;
    if constexpr (keep) g[i] = good ? old : std::bit_cast<float>(exponent);
    bad |= static_cast<std::uint32_t>(!good);
  }
  return bad == 0;
}

template <bool keep>
bool accumulate(Floats residual, Array<std::conditional_t<keep, float, const float>> grad, const Segments& segments,
                double scale, double decay) {
  nb::gil_scoped_release released;
  const auto a = static_cast<float>(scale), d = static_cast<float>(decay);
  bool clean = true;
  for (std::int64_t s = 0; s < segments.count; ++s) {
    const std::int64_t start = segments.starts[s];
    clean &= accumulate_segment<keep>(residual.data() + start, grad.data() + start, segments.sizes[s], a, d);
  }
  return clean;
}

// Where an entry waits, lead times its new u is added now, and kept times it stays.
struct Momentum {
  float factor, lead, kept;
};

constexpr float longest = 0.98f;  // momentum; with more, nothing is added ahead

// `fresh` may be `v`: each entry is read before it is written.
template <bool nesterov, bool ahead>
bool velocity_segment(float* __restrict u, const float* v, float* __restrict g, float* fresh, std::int64_t n,
                      Momentum momentum, float a) {
  const auto [m, lead, kept] = momentum;
  std::uint32_t bad = 0;
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) {
    const float old_u = u[i], old_v = v[i], scaled = a * g[i];
    float new_u = nesterov ? m * (old_u + scaled) : m * old_u + scaled;
    float new_v = nesterov ? (old_v + new_u) + scaled : old_v + new_u;
    if constexpr (ahead) {
      const bool waits = std::abs(old_v) > 0.25f * std::abs(new_u);
      new_v = waits ? new_v + lead * new_u : new_v;
      new_u = waits ? kept * new_u : new_u;
    }
    const bool good = finite(new_u) & finite(new_v);  // `&&` is a branch, and the loop is then not vectorised
    u[i] = good ? new_u : old_u;
    g[i] = good ? old_u : std::bit_cast<float>(exponent);
    fresh[i] = good ? new_v : old_v;
    bad |= static_cast<std::uint32_t>(!good);
  }
  return bad == 0;
}

bool velocity(Floats velocity, ConstFloats residual, Floats grad, Floats fresh, const Segments& segments,
              ConstFloats momentum, double scale, bool nesterov, double ahead) {
  nb::gil_scoped_release released;
  const auto share = static_cast<float>(ahead);
  auto* step = share == 0 ? (nesterov ? &velocity_segment<true, false> : &velocity_segment<false, false>)
                          : (nesterov ? &velocity_segment<true, true> : &velocity_segment<false, true>);
  bool clean = true;
  for (std::int64_t s = 0; s < segments.count; ++s) {
    const std::int64_t start = segments.starts[s];
    const float m = momentum.data()[s];
    const bool is_short = m <= longest;
    const Momentum of{m, is_short ? share * m / (1 - m) : 0.0f, is_short ? static_cast<float>(1 - ahead) : 1.0f};
    clean &= step(velocity.data() + start, residual.data() + start, grad.data() + start, fresh.data() + start,
                  segments.sizes[s], of, static_cast<float>(scale));
  }
  return clean;
}

constexpr std::int64_t line = 16;  // floats in 64 bytes, which memory moves at once

// Two floats a word, without their signs, for -0 is zero.
inline bool all_zero(const float* x) {
  std::uint64_t words[line / 2];
  std::memcpy(words, x, sizeof words);
  std::uint64_t any = 0;
  for (const std::uint64_t word : words) any |= word;
  return (any & 0x7FFFFFFF7FFFFFFFu) == 0;
}

inline void add_where_nonzero(float* __restrict x, const float* __restrict y, std::int64_t n, float a) {
  for (std::int64_t i = 0; i < n; ++i) x[i] = y[i] == 0 ? x[i] : x[i] + a * y[i];
}

// Looks at 64 lines of y at once, so that the few lines of x that are wanted come from memory side by side.
void add_sparse(Floats x, ConstFloats y, double alpha) {
  nb::gil_scoped_release released;
  constexpr std::int64_t page = 64 * line;
  const auto a = static_cast<float>(alpha);
  const std::int64_t n = x.size(), whole = n - n % page;
  for (std::int64_t at = 0; at < whole; at += page) {
    std::uint64_t wanted = 0;
    for (std::int64_t i = 0; i < 64; ++i) {
      if (all_zero(y.data() + at + i * line)) continue;
      wanted |= std::uint64_t{1} << i;
      __builtin_prefetch(x.data() + at + i * line, 1);
    }
    for (; wanted != 0; wanted &= wanted - 1) {
      const std::int64_t from = at + std::countr_zero(wanted) * line;
      add_where_nonzero(x.data() + from, y.data() + from, line, a);
    }
  }
  add_where_nonzero(x.data() + whole, y.data() + whole, n - whole, a);
}

}  // namespace

LACONIC_KERNELS(m) {
  m.def("add_sparse_", &add_sparse);
  m.def("all_finite", &all_finite);
  m.def("accumulate_", &accumulate<false>);
  m.def("accumulate_keeping_", &accumulate<true>);
  m.def("velocity_", &velocity);
}

}  // namespace laconic::LACONIC_TARGET
