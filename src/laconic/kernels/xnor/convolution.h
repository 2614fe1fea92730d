// The shape of a convolution, its patches of bits, and what padding with zeros does to counts.
//
// A padded entry is 0, and a bit can only say -1 or 1. So it is counted as -1, and the sum of the weights that it met is
// added again: that depends on the place in the image and on the output channel alone, and is in `base`.
#pragma once

#include "laconic/kernels/xnor/bits.h"

namespace laconic::LACONIC_TARGET {

// Taps [begin, end) of a kernel lie in the image.
struct Taps {
  std::int64_t begin, end;
  bool operator==(const Taps&) const = default;
};

// One direction: `size` entries, `taps` of the kernel, `out` results.
struct Axis {
  std::int64_t size, taps, stride, padding, dilation;

  std::int64_t out() const { return (size + 2 * padding - dilation * (taps - 1) - 1) / stride + 1; }

  std::int64_t start(std::int64_t o) const { return o * stride - padding; }

  Taps inside(std::int64_t o) const {
    const std::int64_t first = start(o);
    const std::int64_t begin = first >= 0 ? 0 : (-first + dilation - 1) / dilation;
    const std::int64_t end = first >= size ? 0 : std::min(taps, (size - 1 - first) / dilation + 1);
    return {std::min(begin, std::max<std::int64_t>(end, 0)), std::max<std::int64_t>(end, 0)};
  }
};

struct Convolution {
  static constexpr char python[] = "laconic.kernels.xnor.shape.ConvShape";

  std::int64_t images = 0, channels = 0, outputs = 0;
  Axis y{}, x{};

  bool read(PyObject* object) noexcept {
    return attribute(object, "images", &images) && attribute(object, "channels", &channels) &&
           attribute(object, "outputs", &outputs) && read(object, &y, "height", "taps_y", "stride_y", "padding_y",
                                                          "dilation_y") &&
           read(object, &x, "width", "taps_x", "stride_x", "padding_x", "dilation_x");
  }

  std::int64_t pixels() const { return y.size * x.size; }
  std::int64_t results() const { return y.out() * x.out(); }
  std::int64_t taps() const { return y.taps * x.taps; }

 private:
  static bool read(PyObject* object, Axis* axis, const char* size, const char* taps, const char* stride,
                   const char* padding, const char* dilation) noexcept {
    return attribute(object, size, &axis->size) && attribute(object, taps, &axis->taps) &&
           attribute(object, stride, &axis->stride) && attribute(object, padding, &axis->padding) &&
           attribute(object, dilation, &axis->dilation);
  }
};

// panel[(tap, group)][c]: bits of the patches of `valid` results from `first` on, of one image's planes.
template <class Word>
void gather(const Convolution& shape, const Word* planes, std::int64_t groups, std::int64_t first, std::int64_t valid,
            int width, Word* panel) {
  const std::int64_t across = shape.x.out(), pixels = shape.pixels();
  for (std::int64_t c = 0; c < valid;) {  // results in one row of the image
    const std::int64_t oy = (first + c) / across, ox = (first + c) % across;
    const std::int64_t count = std::min(valid - c, across - ox);
    for (std::int64_t ty = 0; ty < shape.y.taps; ++ty) {
      const std::int64_t iy = shape.y.start(oy) + ty * shape.y.dilation;
      for (std::int64_t tx = 0; tx < shape.x.taps; ++tx) {
        Word* to = panel + (ty * shape.x.taps + tx) * groups * width + c;
        const std::int64_t ix = shape.x.start(ox) + tx * shape.x.dilation, stride = shape.x.stride;
        const bool inside = iy >= 0 && iy < shape.y.size;
        const std::int64_t begin = !inside ? count : std::clamp<std::int64_t>(ix >= 0 ? 0 : (-ix + stride - 1) / stride, 0, count);
        const std::int64_t end = !inside || ix >= shape.x.size ? begin : std::clamp<std::int64_t>((shape.x.size - 1 - ix) / stride + 1, begin, count);
        for (std::int64_t g = 0; g < groups; ++g, to += width) {
          std::fill(to, to + begin, Word{0});
          if (begin < end) {
            const Word* from = planes + g * pixels + iy * shape.x.size + ix;
            if (stride == 1)
              std::memcpy(to + begin, from + begin, static_cast<std::size_t>(end - begin) * sizeof(Word));
            else
              for (std::int64_t i = begin; i < end; ++i) to[i] = from[i * stride];
          }
          std::fill(to + end, to + count, Word{0});
        }
      }
    }
    c += count;
  }
}

// base[p], p < results: entries of the kernel, plus the weights' sum where they meet padding. `bits` uint8 (taps, b) is
// one output channel's, `sums` has (y.taps + 1) * (x.taps + 1) places.
inline void base_of(const Convolution& shape, const std::uint8_t* bits, std::int64_t* sums, float* base) {
  const std::int64_t nbytes = row_bytes(shape.channels), line = shape.x.taps + 1;
  std::fill_n(sums, line, 0);
  for (std::int64_t ty = 0; ty < shape.y.taps; ++ty) {
    std::int64_t along = 0;
    sums[(ty + 1) * line] = 0;
    for (std::int64_t tx = 0; tx < shape.x.taps; ++tx, bits += nbytes) {
      std::int64_t ones = 0;
      for (std::int64_t i = 0; i < nbytes; ++i) {
        const bool partial = i + 1 == nbytes && shape.channels % 8;
        ones += std::popcount(static_cast<std::uint8_t>(bits[i] & (partial ? (1 << shape.channels % 8) - 1 : 255)));
      }
      along += 2 * ones - shape.channels;
      sums[(ty + 1) * line + tx + 1] = sums[ty * line + tx + 1] + along;
    }
  }
  const std::int64_t total = sums[shape.y.taps * line + shape.x.taps], entries = shape.channels * shape.taps();
  const std::int64_t across = shape.x.out(), down = shape.y.out();
  for (std::int64_t oy = 0; oy < down; ++oy, base += across) {
    const Taps ys = shape.y.inside(oy);
    if (oy && ys == shape.y.inside(oy - 1)) {
      std::copy_n(base - across, across, base);
      continue;
    }
    for (std::int64_t ox = 0; ox < across; ++ox) {
      const Taps xs = shape.x.inside(ox);
      const std::int64_t met = sums[ys.end * line + xs.end] - sums[ys.begin * line + xs.end] -
                               sums[ys.end * line + xs.begin] + sums[ys.begin * line + xs.begin];
      base[ox] = static_cast<float>(entries + total - met);
    }
  }
}

}  // namespace laconic::LACONIC_TARGET
