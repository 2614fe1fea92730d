// Products of signs, by counting the bits that differ. See README.md.
#include "laconic/kernels/xnor/block.h"
#include "laconic/kernels/xnor/convolution.h"

namespace laconic::LACONIC_TARGET {
namespace {

void xnor_pack(ConstFloats x, std::int64_t n, Bytes bits) {
  nb::gil_scoped_release released;
  const std::int64_t rows = n ? x.size() / n : 0;
  for (std::int64_t i = 0; i < rows; ++i) pack_row(x.data() + i * n, n, bits.data() + i * row_bytes(n));
}

// panel[k][c] = word k of row c < valid, each of n bits; other columns are 0.
template <class Word>
void fill_panel(const std::uint8_t* rows, std::int64_t n, std::int64_t valid, int width, Word* panel) {
  constexpr std::int64_t size = sizeof(Word);
  const std::int64_t nbytes = row_bytes(n), whole = n / (8 * size), words = words_of<Word>(n);
  for (std::int64_t k = 0; k < words; ++k, panel += width) {
    const std::uint8_t* from = rows + k * size;
    for (std::int64_t c = 0; c < valid; ++c, from += nbytes)
      if (k < whole)
        std::memcpy(panel + c, from, size);
      else
        read_words(from, n - 8 * size * whole, panel + c);
    std::fill(panel + valid, panel + width, Word{0});
  }
}

// x (m, n) times the signs (outputs, n): rows are x, columns the outputs.
template <class Kernel>
void multiply(const float* x, std::int64_t m, std::int64_t n, const std::uint8_t* bits, std::int64_t outputs,
              float* out) {
  using Word = typename Kernel::Word;
  const std::int64_t words = words_of<Word>(n), row_step = 8 * words_of<std::uint64_t>(n), nbytes = row_bytes(n);
  constexpr int most = widest<Kernel>;
  Scratch<std::uint8_t> rows(m * row_step);
  for (std::int64_t i = 0; i < m; ++i) {
    std::uint8_t* row = rows.data() + i * row_step;
    std::memset(row + nbytes, 0, static_cast<std::size_t>(row_step - nbytes));
    pack_row(x + i * n, n, row);
  }
  Scratch<Word> panel(words * most);
  alignas(64) float base[most];
  std::fill_n(base, most, static_cast<float>(n));
  for (std::int64_t j = 0; j < outputs; j += most) {
    const std::int64_t valid = std::min<std::int64_t>(most, outputs - j);
    const int width = width_for<Kernel>(valid);
    fill_panel(bits + j * nbytes, n, valid, width, panel.data());
    const Block<Kernel> block{rows.data(), m, row_step, panel.data(), words, base, 0};
    block.multiply(width, valid, out + j, outputs);
  }
}

// Rows are the outputs, columns the places of an image.
template <class Kernel>
void convolve(const Convolution& shape, const float* x, const std::uint8_t* bits, float* out) {
  using Word = typename Kernel::Word;
  constexpr int most = widest<Kernel>;
  constexpr std::int64_t size = 8 * sizeof(Word);
  const std::int64_t groups = words_of<Word>(shape.channels), words = shape.taps() * groups;
  const std::int64_t results = shape.results(), nbytes = row_bytes(shape.channels);
  const std::int64_t base_step = results + most;  // a tile reads a whole panel's width
  Scratch<Word> rows(shape.outputs * words), planes(groups * shape.pixels()), panel(words * most);
  Scratch<float> base(shape.outputs * base_step);
  Scratch<std::int64_t> sums((shape.y.taps + 1) * (shape.x.taps + 1));
  for (std::int64_t o = 0; o < shape.outputs; ++o) {
    const std::uint8_t* from = bits + o * shape.taps() * nbytes;
    base_of(shape, from, sums.data(), base.data() + o * base_step);
    std::fill_n(base.data() + o * base_step + results, most, 0.0f);
    for (std::int64_t t = 0; t < shape.taps(); ++t)
      read_words(from + t * nbytes, shape.channels, rows.data() + o * words + t * groups);
  }
  std::fill_n(panel.data(), words * most, Word{0});  // what no place fills is not used, but read
  for (std::int64_t i = 0; i < shape.images; ++i) {
    for (std::int64_t g = 0; g < groups; ++g)
      pack_plane(x + (i * shape.channels + g * size) * shape.pixels(), std::min(size, shape.channels - g * size),
                 shape.pixels(), planes.data() + g * shape.pixels());
    for (std::int64_t p = 0; p < results; p += most) {
      const std::int64_t valid = std::min<std::int64_t>(most, results - p);
      const int width = width_for<Kernel>(valid);
      gather(shape, planes.data(), groups, p, valid, width, panel.data());
      const Block<Kernel> block{reinterpret_cast<const std::uint8_t*>(rows.data()),
                                shape.outputs,
                                words * std::int64_t{sizeof(Word)},
                                panel.data(),
                                words,
                                base.data() + p,
                                base_step};
      block.multiply(width, valid, out + i * shape.outputs * results + p, results);
    }
  }
}

// Calls work(kernel) with the best of this target's kernels that runs here. `popcount`: VPOPCNTDQ is wanted.
template <class Work>
void with_kernel([[maybe_unused]] bool popcount, Work work) {
#if defined(__AVX512F__)
  if (popcount && Popcount::runs()) return work(Popcount{});
#endif
#if defined(__AVX2__)
  return work(Lookup{});
#else
  return work(Portable{});
#endif
}

void xnor_matmul(ConstFloats x, std::int64_t m, std::int64_t n, ConstBytes bits, std::int64_t outputs, Floats out,
                 bool popcount) {
  nb::gil_scoped_release released;
  with_kernel(popcount, [&](auto kernel) {
    multiply<decltype(kernel)>(x.data(), m, n, bits.data(), outputs, out.data());
  });
}

void xnor_conv2d(ConstFloats x, const Convolution& shape, ConstBytes bits, Floats out, bool popcount) {
  nb::gil_scoped_release released;
  with_kernel(popcount, [&](auto kernel) { convolve<decltype(kernel)>(shape, x.data(), bits.data(), out.data()); });
}

}  // namespace

LACONIC_KERNELS(m) {
  m.def("xnor_pack", &xnor_pack);
  m.def("xnor_matmul", &xnor_matmul);
  m.def("xnor_conv2d", &xnor_conv2d);
}

}  // namespace laconic::LACONIC_TARGET
