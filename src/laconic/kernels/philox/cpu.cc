// Random words and uniform floats of a key's stream.
#include "laconic/kernels/native/frame.h"
#include "laconic/kernels/philox/philox.h"

namespace laconic::LACONIC_TARGET {
namespace {

void philox(Ints out, std::uint64_t key, std::uint64_t offset) {
  nb::gil_scoped_release released;
  std::int32_t* data = out.data();
  Philox(key).stream(offset, out.size(), [data](std::int64_t i, std::uint32_t word) {
    data[i] = static_cast<std::int32_t>(word);
  });
}

void uniform(Floats out, std::uint64_t key, std::uint64_t offset) {
  nb::gil_scoped_release released;
  float* data = out.data();
  Philox(key).stream(offset, out.size(), [data](std::int64_t i, std::uint32_t word) {
    data[i] = static_cast<float>(static_cast<std::int32_t>(word >> 8)) * 0x1p-24f;
  });
}

}  // namespace

LACONIC_KERNELS(m) {
  m.def("philox", &philox);
  m.def("uniform", &uniform);
}

}  // namespace laconic::LACONIC_TARGET
