// Random words, uniform floats and dither of a key's stream.
#include "laconic/kernels/native/frame.h"
#include "laconic/kernels/philox/dither.h"
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

void dither24(Ints out, std::uint64_t key, std::uint64_t offset) {
  nb::gil_scoped_release released;
  std::int32_t* data = out.data();
  const std::uint64_t end = offset + static_cast<std::uint64_t>(out.size());
  const Dither dither(key);
  std::uint16_t upper[Dither::chunk];
  std::uint32_t lower[Dither::chunk / 4];
  for (std::uint64_t number = offset / Dither::chunk; number * Dither::chunk < end; ++number) {
    const std::uint64_t first = number * Dither::chunk;
    dither.upper(number, upper);
    dither.lower_bits.blocks<Dither::chunk / 16>(Dither::chunk / 16 * number, lower);
    for (std::uint64_t i = std::max(first, offset); i < std::min(first + Dither::chunk, end); ++i) {
      const std::uint64_t at = i - first;
      data[i - offset] = static_cast<std::int32_t>(upper[at] << 8 | (lower[at / 4] >> 8 * (at % 4) & 255));
    }
  }
}

}  // namespace

LACONIC_KERNELS(m) {
  m.def("philox", &philox);
  m.def("uniform", &uniform);
  m.def("dither24", &dither24);
}

}  // namespace laconic::LACONIC_TARGET
