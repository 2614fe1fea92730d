// Rows of bits times a panel of columns: tiles, and the remainders at the edges.
#pragma once

#include "laconic/kernels/xnor/tiles.h"

namespace laconic::LACONIC_TARGET {

template <class Kernel>
constexpr int widest = Kernel::unit * Kernel::most;  // columns of a panel

// The columns of the panel for `left` of them: so many registers, each of them `unit` wide.
template <class Kernel>
int width_for(std::int64_t left) {
  int vectors = 1;
  while (vectors < Kernel::most && vectors * Kernel::unit < left) vectors *= 2;
  return vectors * Kernel::unit;
}

// out[i * step + c] = base[i * base_step + c] - 2 * differing bits, for rows i < m and columns c < valid. Row i is
// `row_step` bytes after the one before it. `base` can be read for a whole panel.
template <class Kernel>
class Block {
 public:
  using Word = typename Kernel::Word;

  const std::uint8_t* rows;
  std::int64_t m, row_step;
  const Word* panel;
  std::int64_t words;
  const float* base;
  std::int64_t base_step;

  void multiply(int width, std::int64_t valid, float* out, std::int64_t step) const {
    switch (width / Kernel::unit) {
      case 1: return by<1>(valid, out, step);
      case 2:
        if constexpr (Kernel::most >= 2) return by<2>(valid, out, step);
        break;
      case 4:
        if constexpr (Kernel::most >= 4) return by<4>(valid, out, step);
    }
  }

 private:
  template <int V>
  void by(std::int64_t valid, float* out, std::int64_t step) const {
    std::int64_t i = 0;
    for (; i + Kernel::rows <= m; i += Kernel::rows) at<Kernel::rows, V>(i, valid, out, step);
    for (; i < m; ++i) at<1, V>(i, valid, out, step);
  }

  template <int R, int V>
  void at(std::int64_t i, std::int64_t valid, float* out, std::int64_t step) const {
    constexpr int width = Kernel::unit * V;
    const std::uint8_t* row[R];
    for (int r = 0; r < R; ++r) row[r] = rows + (i + r) * row_step;
    const float* from = base + i * base_step;
    if (valid == width) {
      Kernel::template tile<R, V>(row, panel, words, from, base_step, out + i * step, step);
      return;
    }
    alignas(64) float whole[R * width];
    Kernel::template tile<R, V>(row, panel, words, from, base_step, whole, width);
    for (int r = 0; r < R; ++r) std::copy_n(whole + r * width, valid, out + (i + r) * step);
  }
};

}  // namespace laconic::LACONIC_TARGET
