// Quantisers: norm, stochastic rounding and packing in one pass; unpacking and addition in another. See README.md.
#include "laconic/kernels/quantise/pack.h"
#include "laconic/kernels/quantise/tensor.h"

namespace laconic::LACONIC_TARGET {
namespace {

constexpr std::int64_t clean = -1;  // else the number of the first tensor that holds NaN or Inf

// What stands for the numbers in a wire, by its codec's options.
struct Form {
  int levels;
  Buckets buckets;
  bool powers, base3;  // base3: of levels = 1 only

  int bits() const { return 1 + std::bit_width(static_cast<unsigned>(levels)); }
  std::int64_t codes_nbytes(std::int64_t n) const { return base3 ? Ternary::nbytes(n) : (n * bits() + 7) / 8; }
  std::int64_t nbytes(std::int64_t n) const { return 4 * buckets.count(n) + codes_nbytes(n); }

  // Calls run(grid, Code) with the least type that holds a code.
  template <class Run>
  auto with(Run run) const {
    if (powers) return run(Powers{levels}, std::uint8_t{});  // up to 127
    return bits() <= 8 ? run(Uniform{levels}, std::uint8_t{}) : run(Uniform{levels}, std::uint16_t{});
  }
};

float load(const std::uint8_t* from) {
  float value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// The scales and floors of a message, one a bucket: given, or measured, or none.
struct Measures {
  Norm norm;
  float clip;
  const float *scales, *floors;  // null where not given

  Measures(int norm, double clip, const ConstFloats& scales, const ConstFloats& floors)
      : norm(static_cast<Norm>(norm)),
        clip(static_cast<float>(clip)),
        scales(scales.size() ? scales.data() : nullptr),
        floors(floors.size() ? floors.data() : nullptr) {}

  bool given() const { return scales != nullptr; }
  Measure of(const float* x, std::int64_t count) {
    return {scales ? *scales++ : scale_of(norm, clip, x, count), floors ? *floors++ : 0};
  }
};

std::int64_t quantise(ConstFloats x, ConstLongs starts, ConstLongs sizes, ConstLongs keys, int levels,
                      std::int64_t bucket, bool powers, bool base3, int norm, double clip, ConstFloats scales,
                      ConstFloats floors, Bytes wire) {
  nb::gil_scoped_release released;
  const Segments segments(starts, sizes);
  const Form form{levels, {bucket}, powers, base3};
  Measures measures(norm, clip, scales, floors);
  return form.with([&]<class Grid, class Code>(Grid grid, Code) {
    std::uint8_t* wire_at = wire.data();
    const std::uint8_t* wire_end = wire_at + wire.size();
    for (std::int64_t s = 0; s < segments.count; ++s) {
      const std::int64_t n = segments.sizes[s];
      const float* part = x.data() + segments.starts[s];
      std::uint8_t* head = wire_at;
      std::uint8_t* body = head + 4 * form.buckets.count(n);
      const auto measure = [&](std::int64_t from, std::int64_t count) {
        const Measure found = measures.of(part + from, count);
        std::memcpy(head, &found.scale, sizeof found.scale);
        head += sizeof found.scale;
        return found;
      };
      const auto encoded = [&](auto writer) {
        const auto put = [&](const Code* codes, std::int64_t count) { writer.put(codes, count); };
        const auto key = static_cast<std::uint64_t>(keys.data()[s]);
        const bool good =
            encode_tensor<Code>(part, n, form.buckets, grid, form.bits(), key, measures.given(), measure, put);
        writer.end();
        return good;
      };
      if (!(base3 ? encoded(Base3Writer<Code>(body)) : encoded(BitWriter<Code>(body, wire_end, form.bits())))) return s;
      wire_at += form.nbytes(n);
    }
    return clean;
  });
}

std::int64_t quantise_levels(ConstFloats x, ConstLongs starts, ConstLongs sizes, ConstLongs keys, int levels,
                             std::int64_t bucket, bool powers, int norm, double clip, ConstFloats scales,
                             ConstFloats floors, Floats made, Ints out) {
  nb::gil_scoped_release released;
  const Segments segments(starts, sizes);
  const Form form{levels, {bucket}, powers, false};
  Measures measures(norm, clip, scales, floors);
  const std::uint32_t mask = (1u << (form.bits() - 1)) - 1;
  return form.with([&]<class Grid, class Code>(Grid grid, Code) {
    float* scale_at = made.data();
    std::int32_t* to = out.data();
    for (std::int64_t s = 0; s < segments.count; ++s) {
      const float* part = x.data() + segments.starts[s];
      const auto measure = [&](std::int64_t from, std::int64_t count) {
        const Measure found = measures.of(part + from, count);
        *scale_at++ = found.scale;
        return found;
      };
      const auto put = [&](const Code* codes, std::int64_t count) {
        for (std::int64_t i = 0; i < count; ++i) {
          const auto level = static_cast<std::int32_t>(codes[i] & mask);
          to[i] = codes[i] > mask ? -level : level;
        }
        to += count;
      };
      const auto key = static_cast<std::uint64_t>(keys.data()[s]);
      if (!encode_tensor<Code>(part, segments.sizes[s], form.buckets, grid, form.bits(), key, measures.given(), measure,
                               put))
        return s;
    }
    return clean;
  });
}

// Raises WireError for bytes that no encoder can have made.
void check(ConstBytes wire, const Segments& segments, const Form& form) {
  std::int64_t total = 0;
  for (std::int64_t s = 0; s < segments.count; ++s) total += form.nbytes(segments.sizes[s]);
  if (total != wire.size()) throw WireError("a message of %lld bytes is expected, got %lld", total, wire.size());
  const std::uint8_t* at = wire.data();
  for (std::int64_t s = 0; s < segments.count; ++s) {
    const std::int64_t n = segments.sizes[s];
    for (std::int64_t b = form.buckets.count(n); b > 0; --b, at += 4)
      if (std::bit_cast<std::uint32_t>(load(at)) >= infinite)
        throw WireError("the scale of a bucket of tensor %lld is negative or not finite", s, 0);
    if (form.base3) {
      Ternary::check(at, n);
    } else {
      const std::int64_t used = n * form.bits() % 8;
      if (used && at[form.codes_nbytes(n) - 1] >> used)
        throw WireError("the last bits of tensor %lld must be zero", s, 0);
      if (!std::has_single_bit(static_cast<unsigned>(form.levels) + 1)) form.with([&]<class Code>(auto, Code) {
        BitReader<Code> reader(at, wire.data() + wire.size(), form.bits());
        const auto mask = static_cast<Code>((1u << (form.bits() - 1)) - 1);
        Code most = 0;
        for (std::int64_t left = n; left > 0; left -= Dither::block) {
          const Code* codes = reader.get(std::min(left, Dither::block));
          for (std::int64_t i = 0; i < Dither::block; ++i) most = std::max(most, static_cast<Code>(codes[i] & mask));
        }
        if (most > form.levels) throw WireError("there are levels up to %lld, got %lld", form.levels, most);
      });
    }
    at += form.codes_nbytes(n);
  }
}

void dequantise_add(ConstBytes wire, ConstLongs starts, ConstLongs sizes, Floats out, double alpha, int levels,
                    std::int64_t bucket, bool powers, bool base3) {
  nb::gil_scoped_release released;
  const Segments segments(starts, sizes);
  const Form form{levels, {bucket}, powers, base3};
  check(wire, segments, form);
  form.with([&]<class Grid, class Code>(Grid grid, Code) {
    const std::uint8_t* head = wire.data();
    for (std::int64_t s = 0; s < segments.count; ++s) {
      const std::int64_t n = segments.sizes[s];
      const std::uint8_t* body = head + 4 * form.buckets.count(n);
      const std::uint8_t* next = body + form.codes_nbytes(n);
      const auto scale = [&head] {
        head += 4;
        return load(head - 4);
      };
      const auto decode = [&](auto reader) {
        decode_tensor<Code>(out.data() + segments.starts[s], n, form.buckets, grid, form.bits(),
                            static_cast<float>(alpha), scale, [&](std::int64_t count) { return reader.get(count); });
      };
      if (base3)
        decode(Base3Reader<Code>(body, n));
      else
        decode(BitReader<Code>(body, wire.data() + wire.size(), form.bits()));
      head = next;
    }
  });
}

// On the uniform grid levels may be of any size, as sums are.
void levels_add(ConstInts signed_levels, ConstFloats scales, ConstLongs starts, ConstLongs sizes, Floats out,
                double alpha, int levels, std::int64_t bucket, bool powers) {
  nb::gil_scoped_release released;
  const Segments segments(starts, sizes);
  const Form form{levels, {bucket}, powers, false};
  const auto factor = static_cast<float>(alpha);
  form.with([&](auto grid, auto) {
    const std::int32_t* from = signed_levels.data();
    const float* scale = scales.data();
    for (std::int64_t s = 0; s < segments.count; ++s) {
      const std::int64_t n = segments.sizes[s];
      float* __restrict to = out.data() + segments.starts[s];
      for (std::int64_t first = 0, end; first < n; first = end, ++scale) {
        end = form.buckets.end(first, n);
        for (std::int64_t i = first; i < end; ++i) to[i] += factor * (grid.signed_value(from[i]) * *scale);
      }
      from += n;
    }
  });
}

void norms(ConstFloats x, ConstLongs starts, ConstLongs sizes, std::int64_t bucket, int norm, double clip, Floats out) {
  nb::gil_scoped_release released;
  const Segments segments(starts, sizes);
  const Buckets buckets{bucket};
  float* to = out.data();
  for (std::int64_t s = 0; s < segments.count; ++s) {
    const float* part = x.data() + segments.starts[s];
    for (std::int64_t from = 0, end; from < segments.sizes[s]; from = end) {
      end = buckets.end(from, segments.sizes[s]);
      *to++ = scale_of(static_cast<Norm>(norm), static_cast<float>(clip), part + from, end - from);
    }
  }
}

}  // namespace

LACONIC_KERNELS(m) {
  m.def("quantise", &quantise);
  m.def("quantise_levels", &quantise_levels);
  m.def("dequantise_add_", &dequantise_add);
  m.def("levels_add_", &levels_add);
  m.def("norms", &norms);
}

}  // namespace laconic::LACONIC_TARGET
