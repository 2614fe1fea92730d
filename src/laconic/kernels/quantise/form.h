// What the dataclasses Form and Measure of form.py say.
#pragma once

#include "laconic/kernels/bitpack/bits.h"
#include "laconic/kernels/bitpack/ternary.h"
#include "laconic/kernels/quantise/grid.h"
#include "laconic/kernels/quantise/norm.h"

namespace laconic::LACONIC_TARGET {

// Runs of `size` elements that share a scale, the last one shorter; 0 stands for the whole tensor.
struct Blocks {
  std::int64_t size = 0;

  std::int64_t count(std::int64_t n) const { return n == 0 ? 0 : size == 0 ? 1 : (n + size - 1) / size; }
  std::int64_t end(std::int64_t from, std::int64_t n) const { return size == 0 ? n : std::min(from + size, n); }
};

// What stands for the numbers in a wire, by its codec's options.
struct Form {
  static constexpr char python[] = "laconic.kernels.Form";

  std::int64_t levels = 0;
  Blocks blocks;
  std::int64_t powers = 0, base3 = 0;  // base3: of levels = 1 only

  bool read(PyObject* form) noexcept {
    return attribute(form, "levels", &levels) && attribute(form, "block", &blocks.size) &&
           attribute(form, "powers", &powers) && attribute(form, "base3", &base3);
  }

  int bits() const { return 1 + std::bit_width(static_cast<unsigned>(levels)); }
  std::int64_t codes_nbytes(std::int64_t n) const { return base3 ? Ternary::nbytes(n) : packed_nbytes(n, bits()); }
  std::int64_t nbytes(std::int64_t n) const { return 4 * blocks.count(n) + codes_nbytes(n); }

  // Calls run(grid, Code) with the least type that holds a code.
  template <class Run>
  auto with(Run run) const {
    const auto most = static_cast<std::int32_t>(levels);
    if (powers) return run(Powers{most}, std::uint8_t{});  // up to 127
    return bits() <= 8 ? run(Uniform{most}, std::uint8_t{}) : run(Uniform{most}, std::uint16_t{});
  }
};

// What a block is quantised with: elements smaller than `floor` become 0.
struct Scale {
  float scale = 0, floor = 0;
};

// The scales and floors of a message, one a block: given, or measured, or none.
struct Measure {
  static constexpr char python[] = "laconic.kernels.Measure";

  std::int64_t norm = 0;
  double clip = 0;
  const float *scales = nullptr, *floors = nullptr;  // null where not given

  bool read(PyObject* measure) noexcept {
    void *given[2] = {};
    std::int64_t count = 0;
    const bool fine = attribute(measure, "number", &norm) && attribute(measure, "clip", &clip) &&
                      attribute(measure, "scales", Kind::float32, given, &count) &&
                      attribute(measure, "floors", Kind::float32, given + 1, &count);
    scales = static_cast<const float*>(given[0]);
    floors = static_cast<const float*>(given[1]);
    return fine;
  }

  float measured(const float* x, std::int64_t count) const {
    return scale_of(static_cast<Norm>(norm), static_cast<float>(clip), x, count);
  }
  // Of the next block.
  Scale next(const float* x, std::int64_t count) {
    return {scales ? *scales++ : measured(x, count), floors ? *floors++ : 0};
  }
};

}  // namespace laconic::LACONIC_TARGET
