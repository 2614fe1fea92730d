// Quantisers: norm, stochastic rounding and packing in one pass; unpacking and addition in another. See README.md.
#include "laconic/kernels/quantise/base3.h"
#include "laconic/kernels/quantise/tensor.h"

namespace laconic::LACONIC_TARGET {
namespace {

constexpr std::int64_t clean = -1;  // else the number of the first tensor that holds NaN or Inf

float load(const std::uint8_t* from) {
  float value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

std::int64_t quantise(ConstFloats x, const Segments& segments, ConstLongs keys, const Form& form, Measure measure,
                      Bytes wire) {
  nb::gil_scoped_release released;
  const bool given = measure.scales != nullptr;
  return form.with([&]<class Grid, class Code>(Grid grid, Code) {
    std::uint8_t* wire_at = wire.data();
    const std::uint8_t* wire_end = wire_at + wire.size();
    for (std::int64_t s = 0; s < segments.count; ++s) {
      const std::int64_t n = segments.sizes[s];
      const float* part = x.data() + segments.starts[s];
      std::uint8_t* head = wire_at;
      std::uint8_t* body = head + 4 * form.blocks.count(n);
      const auto next = [&](std::int64_t from, std::int64_t count) {
        const Scale found = measure.next(part + from, count);
        std::memcpy(head, &found.scale, sizeof found.scale);
        head += sizeof found.scale;
        return found;
      };
      const auto encoded = [&](auto writer) {
        const auto put = [&](const Code* codes, std::int64_t count) { writer.put(codes, count); };
        const auto key = static_cast<std::uint64_t>(keys.data()[s]);
        const bool good = encode_tensor<Code>(part, n, form.blocks, grid, form.bits(), key, given, next, put);
        writer.finish();
        return good;
      };
      const bool good = form.base3 ? encoded(Base3Writer<Code>(body))
                                   : encoded(PackedWriter<Code>(body, wire_end, form.bits()));
      if (!good) return s;
      wire_at += form.nbytes(n);
    }
    return clean;
  });
}

std::int64_t quantise_levels(ConstFloats x, const Segments& segments, ConstLongs keys, const Form& form,
                             Measure measure, Floats made, Ints out) {
  nb::gil_scoped_release released;
  const bool given = measure.scales != nullptr;
  const std::uint32_t mask = (1u << (form.bits() - 1)) - 1;
  return form.with([&]<class Grid, class Code>(Grid grid, Code) {
    float* scale_at = made.data();
    std::int32_t* to = out.data();
    for (std::int64_t s = 0; s < segments.count; ++s) {
      const float* part = x.data() + segments.starts[s];
      const auto next = [&](std::int64_t from, std::int64_t count) {
        const Scale found = measure.next(part + from, count);
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
      if (!encode_tensor<Code>(part, segments.sizes[s], form.blocks, grid, form.bits(), key, given, next, put)) return s;
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
    for (std::int64_t b = form.blocks.count(n); b > 0; --b, at += 4)
      if (std::bit_cast<std::uint32_t>(load(at)) >= infinite)
        throw WireError("the scale of a block of tensor %lld is negative or not finite", s, 0);
    if (form.base3) {
      Ternary::check(at, n);
    } else {
      const std::int64_t used = n * form.bits() % 8;
      if (used && at[form.codes_nbytes(n) - 1] >> used)
        throw WireError("the last bits of tensor %lld must be zero", s, 0);
      if (!std::has_single_bit(static_cast<unsigned>(form.levels) + 1)) form.with([&]<class Code>(auto, Code) {
        PackedReader<Code, Dither::chunk> reader(at, wire.data() + wire.size(), form.bits());
        const auto mask = static_cast<Code>((1u << (form.bits() - 1)) - 1);
        Code most = 0;
        for (std::int64_t left = n; left > 0; left -= Dither::chunk) {
          const std::int64_t count = std::min(left, Dither::chunk);
          const Code* codes = reader.get(count);
          for (std::int64_t i = 0; i < count; ++i) most = std::max(most, static_cast<Code>(codes[i] & mask));
        }
        if (most > form.levels) throw WireError("there are levels up to %lld, got %lld", form.levels, most);
      });
    }
    at += form.codes_nbytes(n);
  }
}

void dequantise_add(ConstBytes wire, const Segments& segments, Floats out, const Form& form, double alpha) {
  nb::gil_scoped_release released;
  check(wire, segments, form);
  form.with([&]<class Grid, class Code>(Grid grid, Code) {
    const std::uint8_t* head = wire.data();
    for (std::int64_t s = 0; s < segments.count; ++s) {
      const std::int64_t n = segments.sizes[s];
      const std::uint8_t* body = head + 4 * form.blocks.count(n);
      const std::uint8_t* next = body + form.codes_nbytes(n);
      const auto scale = [&head] {
        head += 4;
        return load(head - 4);
      };
      const auto decode = [&](auto reader) {
        decode_tensor<Code>(out.data() + segments.starts[s], n, form.blocks, grid, form.bits(),
                            static_cast<float>(alpha), scale, [&](std::int64_t count) { return reader.get(count); });
      };
      if (form.base3)
        decode(Base3Reader<Code>(body, n));
      else
        decode(PackedReader<Code, Dither::chunk>(body, wire.data() + wire.size(), form.bits()));
      head = next;
    }
  });
}

// On the uniform grid levels may be of any size, as sums are.
void levels_add(ConstInts signed_levels, ConstFloats scales, const Segments& segments, Floats out, const Form& form,
                double alpha) {
  nb::gil_scoped_release released;
  const auto factor = static_cast<float>(alpha);
  form.with([&](auto grid, auto) {
    const std::int32_t* from = signed_levels.data();
    const float* scale = scales.data();
    for (std::int64_t s = 0; s < segments.count; ++s) {
      const std::int64_t n = segments.sizes[s];
      float* __restrict to = out.data() + segments.starts[s];
      for (std::int64_t first = 0, end; first < n; first = end, ++scale) {
        end = form.blocks.end(first, n);
        for (std::int64_t i = first; i < end; ++i) to[i] += factor * (grid.signed_value(from[i]) * *scale);
      }
      from += n;
    }
  });
}

void norms(ConstFloats x, const Segments& segments, const Measure& measure, std::int64_t block, Floats out) {
  nb::gil_scoped_release released;
  const Blocks blocks{block};
  float* to = out.data();
  for (std::int64_t s = 0; s < segments.count; ++s) {
    const float* part = x.data() + segments.starts[s];
    for (std::int64_t from = 0, end; from < segments.sizes[s]; from = end) {
      end = blocks.end(from, segments.sizes[s]);
      *to++ = measure.measured(part + from, end - from);
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
