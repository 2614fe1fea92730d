// Read and write chosen entries; every index is checked before the first write. See README.md.
#include "laconic/kernels/native/frame.h"

namespace laconic::LACONIC_TARGET {
namespace {

// Indices, counts and segments that have been found to fit each other.
struct Chosen {
  Segments segments;
  const std::int32_t* indices;
  const std::int64_t* counts;

  Chosen(const Segments& segments, const ConstInts& indices, const ConstLongs& counts)
      : segments(segments), indices(indices.data()), counts(counts.data()) {
    const std::int32_t* at = this->indices;
    for (std::int64_t s = 0; s < segments.count; at += this->counts[s++]) {
      const std::int64_t size = segments.sizes[s];
      std::uint32_t bad = 0;  // a negative index reads as a large one
      for (std::int64_t i = 0; i < this->counts[s]; ++i) bad |= static_cast<std::uint32_t>(at[i]) >= size;
      if (bad) throw WireError("an index lies outside its tensor: segment %lld has %lld elements", s, size);
    }
  }

  // Calls visit(position in the buffer, number of the index).
  template <class Visit>
  void each(Visit visit) const {
    std::int64_t number = 0;
    for (std::int64_t s = 0; s < segments.count; ++s) {
      const std::int64_t start = segments.starts[s], end = number + counts[s];
      for (; number < end; ++number) visit(start + indices[number], number);
    }
  }
};

void gather(ConstFloats x, const Segments& segments, ConstInts indices, ConstLongs counts, Floats out) {
  nb::gil_scoped_release released;
  const float* from = x.data();
  float* to = out.data();
  Chosen(segments, indices, counts).each([=](std::int64_t at, std::int64_t i) { to[i] = from[at]; });
}

void scatter_add(Floats out, const Segments& segments, ConstInts indices, ConstLongs counts,
                 ConstFloats values, double alpha) {
  nb::gil_scoped_release released;
  float* to = out.data();
  const float* from = values.data();
  const auto a = static_cast<float>(alpha);
  Chosen(segments, indices, counts).each([=](std::int64_t at, std::int64_t i) { to[at] += a * from[i]; });
}

void scatter_zero(Floats out, const Segments& segments, ConstInts indices, ConstLongs counts) {
  nb::gil_scoped_release released;
  float* to = out.data();
  Chosen(segments, indices, counts).each([=](std::int64_t at, std::int64_t) { to[at] = 0.0f; });
}

}  // namespace

LACONIC_KERNELS(m) {
  m.def("gather", &gather);
  m.def("scatter_add_", &scatter_add);
  m.def("scatter_zero_", &scatter_zero);
}

}  // namespace laconic::LACONIC_TARGET
