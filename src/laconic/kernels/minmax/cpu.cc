// Min-max quantisation: extremes, rounding and packing in one pass; unpacking and addition in another. See README.md.
#include "laconic/kernels/bitpack/bits.h"
#include "laconic/kernels/philox/dither.h"
#include "laconic/kernels/quantise/norm.h"

namespace laconic::LACONIC_TARGET {
namespace {

constexpr std::int64_t clean = -1;  // else the number of the first tensor that holds NaN or Inf
constexpr float farthest = 0x1p126f;

// Floats as integers of the same order, and back.
inline std::int32_t ordered(std::int32_t bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); }

// What a block's levels count from and by. On the wire as it lies in memory.
struct Range {
  float unit = 0, low = 0;
};

// The range of n > 0 elements with levels up to `most`. False where one is not finite.
bool measure(const float* __restrict x, std::int64_t n, float most, Range& range) {
  constexpr auto top = static_cast<std::int32_t>(infinite);
  std::int32_t least = INT32_MAX, greatest = INT32_MIN;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int32_t at = ordered(std::bit_cast<std::int32_t>(x[i]));
    least = std::min(least, at);
    greatest = std::max(greatest, at);
  }
  if (greatest >= top || least <= ~top) return false;
  const auto end = [](std::int32_t at) {
    return std::min(std::max(std::bit_cast<float>(ordered(at)), -farthest), farthest) + 0.0f;  // no -0
  };
  range.low = end(least);
  range.unit = (end(greatest) - range.low) / most;
  return true;
}

// What turns elements of one block into levels.
struct Rounding {
  Range range;
  float most;

  float place(float x) const { return std::min(std::max((x - range.low) / range.unit, 0.0f), most); }

  void nearest(const float* __restrict x, int count, std::uint8_t* __restrict levels) const {
    const Rounding by = *this;
    for (int i = 0; i < count; ++i)
      levels[i] = static_cast<std::uint8_t>(static_cast<std::int32_t>(std::min(by.place(x[i]) + 0.5f, by.most)));
  }

  std::int32_t fixed(float x) const { return static_cast<std::int32_t>(place(x) * 65536); }

  // `carry` holds 65535 - (U(i) >> 8). True if some fraction was equal to U(i) >> 8.
  bool random(const float* __restrict x, int count, const std::uint16_t* __restrict carry,
              std::uint8_t* __restrict levels) const {
    const Rounding by = *this;
    std::int32_t most_fraction = 0;
    for (int i = 0; i < count; ++i) {
      const std::int32_t dithered = by.fixed(x[i]) + carry[i];
      most_fraction = std::max(most_fraction, dithered & 0xFFFF);
      levels[i] = static_cast<std::uint8_t>(dithered >> 16);
    }
    return most_fraction == 0xFFFF;
  }

  // Looks at 8 more bits of those whose fraction was equal. `first`: the place of x[0] in its tensor.
  void settle(const float* x, int count, const std::uint16_t* carry, const Dither& dither, std::int64_t first,
              std::uint8_t* levels) const {
    for (int i = 0; i < count; ++i) {
      const std::int32_t y = fixed(x[i]);
      if ((y & 0xFFFF) + carry[i] != 0xFFFF) continue;
      const float below = place(x[i]) * 65536 - static_cast<float>(y);
      if (dither.lower(static_cast<std::uint64_t>(first + i)) < static_cast<std::uint32_t>(below * 256))
        levels[i] = static_cast<std::uint8_t>((y >> 16) + 1);
    }
  }
};

template <bool stochastic>
bool encode_tensor(const float* x, std::int64_t n, std::int64_t block, int width, std::uint64_t key,
                   std::uint8_t* head, const std::uint8_t* wire_end) {
  const Dither dither(key);
  alignas(64) std::uint16_t carry[Dither::chunk];
  alignas(64) std::uint8_t levels[Dither::chunk];
  PackedWriter<std::uint8_t> writer(head + 8 * ((n + block - 1) / block), wire_end, width);
  Rounding by{{}, static_cast<float>((1 << width) - 1)};
  std::int64_t block_end = 0;
  for (std::int64_t first = 0; first < n; first += Dither::chunk) {
    const std::int64_t end = std::min(first + Dither::chunk, n);
    fetch(x + first, Dither::chunk);
    if constexpr (stochastic) dither.carry(static_cast<std::uint64_t>(first / Dither::chunk), carry);
    for (std::int64_t from = first, to; from < end; from = to) {
      if (from == block_end) {
        block_end = std::min(from + block, n);
        if (!measure(x + from, block_end - from, by.most, by.range)) return false;
        std::memcpy(head, &by.range, sizeof by.range);
        head += sizeof by.range;
      }
      to = std::min(end, block_end);
      const auto count = static_cast<int>(to - from);
      std::uint8_t* into = levels + (from - first);
      if (by.range.unit == 0) {
        std::memset(into, 0, static_cast<std::size_t>(count));
      } else if constexpr (stochastic) {
        const std::uint16_t* drawn = carry + (from - first);
        if (by.random(x + from, count, drawn, into)) by.settle(x + from, count, drawn, dither, from, into);
      } else {
        by.nearest(x + from, count, into);
      }
    }
    writer.put(levels, end - first);
  }
  return true;
}

// What the dataclass MinMaxForm of form.py says.
struct MinMaxForm {
  static constexpr char python[] = "laconic.kernels.MinMaxForm";

  std::vector<std::int64_t> widths;  // of levels, one a tensor
  std::int64_t block = 0, stochastic = 0;

  bool read(PyObject* form) noexcept {
    return attribute(form, "widths", &widths) && attribute(form, "block", &block) &&
           attribute(form, "stochastic", &stochastic);
  }

  std::int64_t head_nbytes(std::int64_t n) const { return 8 * ((n + block - 1) / block); }
  std::int64_t nbytes(std::int64_t n, std::int64_t s) const { return head_nbytes(n) + packed_nbytes(n, widths[s]); }
};

std::int64_t minmax_encode(ConstFloats x, const Segments& segments, ConstLongs keys, const MinMaxForm& form, Bytes wire) {
  nb::gil_scoped_release released;
  std::uint8_t* at = wire.data();
  const std::uint8_t* end = at + wire.size();
  for (std::int64_t s = 0; s < segments.count; ++s) {
    const std::int64_t n = segments.sizes[s];
    const auto width = static_cast<int>(form.widths[s]);
    const auto key = static_cast<std::uint64_t>(keys.data()[s]);
    const float* part = x.data() + segments.starts[s];
    const auto encode = form.stochastic ? encode_tensor<true> : encode_tensor<false>;
    if (!encode(part, n, form.block, width, key, at, end)) return s;
    at += form.nbytes(n, s);
  }
  return clean;
}

Range load(const std::uint8_t* from) {
  Range range;
  std::memcpy(&range, from, sizeof range);
  return range;
}

// Raises WireError for bytes that no encoder can have made. Python has checked their number.
void check(ConstBytes wire, const Segments& segments, const MinMaxForm& form) {
  const std::uint8_t* at = wire.data();
  for (std::int64_t s = 0; s < segments.count; ++s) {
    const std::int64_t n = segments.sizes[s];
    const std::uint8_t* head = at;
    const auto most = static_cast<float>((std::int64_t{1} << form.widths[s]) - 1);
    for (std::int64_t b = form.head_nbytes(n) / 8; b > 0; --b, head += 8) {
      const Range range = load(head);
      if (std::bit_cast<std::uint32_t>(range.unit) >= infinite || !std::isfinite(range.low))
        throw WireError("a unit of tensor %lld is negative, or a unit or minimum not finite", s, 0);
      if (!std::isfinite(range.low + most * range.unit))
        throw WireError("a range of tensor %lld has no finite end", s, 0);
    }
    at += form.nbytes(n, s);
    const std::int64_t used = n * form.widths[s] % 8;
    if (used && at[-1] >> used) throw WireError("the last bits of tensor %lld must be zero", s, 0);
  }
}

void add(const std::uint8_t* __restrict levels, int count, Range range, float alpha, float* __restrict out) {
  for (int i = 0; i < count; ++i) out[i] += (range.low + static_cast<float>(levels[i]) * range.unit) * alpha;
}

void minmax_add(ConstBytes wire, const Segments& segments, Floats out, const MinMaxForm& form, double alpha) {
  nb::gil_scoped_release released;
  check(wire, segments, form);
  const std::uint8_t* at = wire.data();
  for (std::int64_t s = 0; s < segments.count; ++s) {
    const std::int64_t n = segments.sizes[s];
    const std::uint8_t* head = at;
    float* to = out.data() + segments.starts[s];
    PackedReader<std::uint8_t, Dither::chunk> reader(at + form.head_nbytes(n), wire.data() + wire.size(),
                                   static_cast<int>(form.widths[s]));
    Range range;
    std::int64_t block_end = 0;
    for (std::int64_t first = 0; first < n; first += Dither::chunk) {
      const std::int64_t end = std::min(first + Dither::chunk, n);
      const std::uint8_t* levels = reader.get(end - first);
      for (std::int64_t from = first, next; from < end; from = next) {
        if (from == block_end) {
          block_end = std::min(from + form.block, n);
          range = load(head);
          head += sizeof range;
        }
        next = std::min(end, block_end);
        add(levels + (from - first), static_cast<int>(next - from), range, static_cast<float>(alpha), to + from);
      }
    }
    at += form.nbytes(n, s);
  }
}

}  // namespace

LACONIC_KERNELS(m) {
  m.def("minmax_encode", &minmax_encode);
  m.def("minmax_add_", &minmax_add);
}

}  // namespace laconic::LACONIC_TARGET
