// Sums of packed integers, packed again; and the values that packed levels mean. Chunks of integers stay in the first
// cache. See README.md.
#include "laconic/kernels/quantise/form.h"

namespace laconic::LACONIC_TARGET {
namespace {

constexpr std::int64_t chunk = 1024;  // integers, which fill whole bytes at any number of bits

int width_of(std::int64_t most) { return std::bit_width(static_cast<std::uint64_t>(most)); }

// n packed integers of 0..most, chunk by chunk.
class Codes {
 public:
  Codes(const std::uint8_t* wire, std::int64_t n, int bits, std::uint32_t most)
      : wire(wire), n(n), nbytes(packed_nbytes(n, bits)), bits(bits), most(most), unpack(unpacker<std::int32_t>(bits)) {}

  // Reads those from `first` on, `count` of them, or as many as a chunk has; false where one is more than `most`.
  bool read(std::int64_t first, std::int32_t* __restrict codes) const {
    const std::int64_t at = first * bits / 8, count = std::min(chunk, n - first);
    unpack(wire + at, nbytes - at, codes, count);
    std::uint32_t largest = 0;
    for (std::int64_t i = 0; i < count; ++i) largest = std::max(largest, static_cast<std::uint32_t>(codes[i]));
    return largest <= most && (first + count < n || rest_is_zero());
  }

 private:
  bool rest_is_zero() const {
    const std::int64_t used = n * bits % 8;
    return used == 0 || wire[nbytes - 1] >> used == 0;
  }

  const std::uint8_t* wire;
  std::int64_t n, nbytes;
  int bits;
  std::uint32_t most;
  decltype(unpacker<std::int32_t>(1)) unpack;
};

// Returns the first rank whose integers are damaged, or -1.
std::int64_t packed_sum(ConstBytes wires, std::int64_t ranks, std::int64_t n, std::int64_t most, Bytes sums) {
  nb::gil_scoped_release released;
  const int bits = width_of(most), sum_bits = width_of(ranks * most);
  const std::int64_t nbytes = packed_nbytes(n, bits);
  const auto pack = packer<std::int32_t>(sum_bits);
  std::int32_t codes[chunk], total[chunk];
  for (std::int64_t first = 0; first < n; first += chunk) {
    const std::int64_t count = std::min(chunk, n - first), at = first * sum_bits / 8;
    std::fill_n(total, count, 0);
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      if (!Codes(wires.data() + rank * nbytes, n, bits, static_cast<std::uint32_t>(most)).read(first, codes))
        return rank;
      for (std::int64_t i = 0; i < count; ++i) total[i] += codes[i];
    }
    pack(total, count, sums.data() + at, sums.size() - at);
  }
  return -1;
}

// out += alpha * (code - zero) / levels * scale, zero = ranks * levels. Returns false, with out half done, where the
// codes are damaged.
bool packed_levels_add(ConstBytes wire, ConstFloats scales, const Segments& segments, Floats out, const Form& form,
                       double alpha, std::int64_t ranks) {
  nb::gil_scoped_release released;
  const std::int64_t zero = ranks * form.levels;
  std::int64_t n = 0;
  for (std::int64_t s = 0; s < segments.count; ++s) n += segments.sizes[s];
  const Codes source(wire.data(), n, width_of(2 * zero), static_cast<std::uint32_t>(2 * zero));
  const auto factor = static_cast<float>(alpha), one = static_cast<float>(form.levels);
  const auto middle = static_cast<std::int32_t>(zero);
  std::int32_t codes[chunk];
  std::int64_t at = 0;  // of all codes
  const float* scale = scales.data();
  for (std::int64_t s = 0; s < segments.count; ++s) {
    const std::int64_t size = segments.sizes[s];
    float* to = out.data() + segments.starts[s];
    for (std::int64_t from = 0; from < size; ++scale) {
      const std::int64_t end = form.blocks.end(from, size);
      const float z = *scale;
      while (from < end) {
        const std::int64_t have = at % chunk;
        if (have == 0 && !source.read(at, codes)) return false;
        const std::int64_t count = std::min(end - from, chunk - have);
        float* __restrict into = to + from;
        for (std::int64_t i = 0; i < count; ++i)
          into[i] += factor * (static_cast<float>(codes[have + i] - middle) / one * z);
        from += count;
        at += count;
      }
    }
  }
  return true;
}

}  // namespace

LACONIC_KERNELS(m) {
  m.def("packed_sum", &packed_sum);
  m.def("packed_levels_add_", &packed_levels_add);
}

}  // namespace laconic::LACONIC_TARGET
