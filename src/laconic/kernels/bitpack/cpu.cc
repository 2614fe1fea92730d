// Bit packing, and five ternary levels in a byte. See README.md.
#include "laconic/kernels/bitpack/bits.h"
#include "laconic/kernels/bitpack/ternary.h"

namespace laconic::LACONIC_TARGET {
namespace {

void check(std::int64_t n, int bits, std::int64_t nbytes) {
  if (bits < 1 || bits > 32) throw std::invalid_argument("bits must be in 1..32");
  if (nbytes != packed_nbytes(n, bits)) throw WireError("codes and bytes do not fit together");
}

void pack_bits(ConstInts codes, int bits, Bytes wire) {
  check(codes.size(), bits, wire.size());
  nb::gil_scoped_release released;
  packer<std::int32_t>(bits)(codes.data(), codes.size(), wire.data(), wire.size());
}

void unpack_bits(ConstBytes wire, int bits, Ints codes) {
  check(codes.size(), bits, wire.size());
  nb::gil_scoped_release released;
  unpacker<std::int32_t>(bits)(wire.data(), wire.size(), codes.data(), codes.size());
}

void fit(std::int64_t n, std::int64_t nbytes) {
  if (nbytes != Ternary::nbytes(n)) throw WireError("%lld levels and %lld bytes do not fit together", n, nbytes);
}

bool pack_ternary(ConstInts levels, Bytes wire) {
  fit(levels.size(), wire.size());
  nb::gil_scoped_release released;
  return Ternary::pack(levels.data(), levels.size(), wire.data());
}

void unpack_ternary(ConstBytes wire, Ints levels) {
  fit(levels.size(), wire.size());
  nb::gil_scoped_release released;
  Ternary::check(wire.data(), levels.size());
  Ternary::unpack(wire.data(), levels.size(), levels.data());
}

}  // namespace

LACONIC_KERNELS(m) {
  m.def("pack_bits", &pack_bits);
  m.def("unpack_bits", &unpack_bits);
  m.def("pack_ternary", &pack_ternary);
  m.def("unpack_ternary", &unpack_ternary);
}

}  // namespace laconic::LACONIC_TARGET
