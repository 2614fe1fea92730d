// Accumulate: residual and velocity updates, one pass each. See README.md.
#include "laconic/kernels/native/frame.h"

namespace laconic::LACONIC_TARGET {
namespace {

bool all_finite(ConstFloats x, ConstLongs starts, ConstLongs sizes) {
  nb::gil_scoped_release released;
  const Segments segments(starts, sizes);
  constexpr std::uint32_t exponent = 0x7F800000u;
  for (std::int64_t s = 0; s < segments.count; ++s) {
    const float* begin = x.data() + segments.starts[s];
    std::uint32_t bad = 0;
    for (std::int64_t i = 0; i < segments.sizes[s]; ++i) {
      const auto bits = std::bit_cast<std::uint32_t>(begin[i]);
      bad |= static_cast<std::uint32_t>((bits & exponent) == exponent);
    }
    if (bad) return false;
  }
  return true;
}

}  // namespace

LACONIC_KERNELS(m) { m.def("all_finite", &all_finite); }

}  // namespace laconic::LACONIC_TARGET
