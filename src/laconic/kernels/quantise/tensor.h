// One tensor in chunks of elements and blocks of any size: its scales, its codes, and back.
#pragma once

#include "laconic/kernels/quantise/form.h"
#include "laconic/kernels/quantise/round.h"

namespace laconic::LACONIC_TARGET {

// Hands out the codes of x (n,) by chunks. next(from, count) is the scale of a block, put(codes, count) takes
// one chunk of them. False where a scale is not finite or, if `look`, an element is not.
template <class Code, class Grid, class Next, class Put>
bool encode_tensor(const float* x, std::int64_t n, Blocks blocks, Grid grid, int bits, std::uint64_t key, bool look,
                   Next next, Put put) {
  const Dither dither(key);
  alignas(64) std::uint16_t carry[Dither::chunk];
  alignas(64) Code codes[Dither::chunk] = {};
  std::int64_t block_end = 0;
  Rounding<Grid> by(grid, bits, 0);
  float floor = 0;
  for (std::int64_t first = 0; first < n; first += Dither::chunk) {
    const std::int64_t end = std::min(first + Dither::chunk, n);
    fetch(x + first, Dither::chunk / 2);
    dither.carry(static_cast<std::uint64_t>(first / Dither::chunk), carry);
    fetch(x + first + Dither::chunk / 2, Dither::chunk / 2);  // not all at once: there are few places to wait in
    for (std::int64_t from = first, to; from < end; from = to) {
      if (from == block_end) {
        block_end = blocks.end(from, n);
        const Scale now = next(from, block_end - from);
        if (!std::isfinite(now.scale)) return false;
        by = Rounding<Grid>(grid, bits, now.scale);
        floor = now.floor;
      }
      to = std::min(end, block_end);
      if (look && largest(x + from, to - from) >= infinite) return false;
      const std::int64_t at = from - first;
      encode(x + from, static_cast<int>(to - from), by, dither, from, carry + at, codes + at);
      if (floor > 0)
        for (std::int64_t i = from; i < to; ++i) codes[i - first] = std::fabs(x[i]) < floor ? 0 : codes[i - first];
    }
    put(codes, end - first);
  }
  return true;
}

// out (n,) += alpha * values. get(count) is the next chunk of codes, next() the scale of the next block.
template <class Code, class Grid, class Next, class Get>
void decode_tensor(float* out, std::int64_t n, Blocks blocks, Grid grid, int bits, float alpha, Next next, Get get) {
  std::int64_t block_end = 0;
  float scale = 0;
  for (std::int64_t first = 0; first < n; first += Dither::chunk) {
    const std::int64_t end = std::min(first + Dither::chunk, n);
    const Code* codes = get(end - first);
    for (std::int64_t from = first, to; from < end; from = to) {
      if (from == block_end) {
        block_end = blocks.end(from, n);
        scale = next();
      }
      to = std::min(end, block_end);
      add(codes + (from - first), static_cast<int>(to - from), scale, grid, bits, alpha, out + from);
    }
  }
}

}  // namespace laconic::LACONIC_TARGET
