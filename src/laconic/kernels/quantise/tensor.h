// One tensor in blocks of elements and buckets of any size: its scales, its codes, and back.
#pragma once

#include "laconic/kernels/quantise/norm.h"
#include "laconic/kernels/quantise/round.h"

namespace laconic::LACONIC_TARGET {

// Runs of `size` elements that share a scale, the last one shorter; 0 stands for the whole tensor.
struct Buckets {
  std::int64_t size;

  std::int64_t count(std::int64_t n) const { return n == 0 ? 0 : size == 0 ? 1 : (n + size - 1) / size; }
  std::int64_t end(std::int64_t from, std::int64_t n) const { return size == 0 ? n : std::min(from + size, n); }
};

// What a bucket is quantised with: elements smaller than `floor` become 0.
struct Measure {
  float scale = 0, floor = 0;
};

// Hands out the codes of x (n,) by blocks. next(from, count) is the measure of a bucket, put(codes, count) takes a
// block, of which the rest is zero. False where a scale is not finite or, if `look`, an element is not.
template <class Code, class Grid, class Next, class Put>
bool encode_tensor(const float* x, std::int64_t n, Buckets buckets, Grid grid, int bits, std::uint64_t key, bool look,
                   Next next, Put put) {
  const Dither dither(key);
  alignas(64) std::uint16_t carry[Dither::block];
  alignas(64) Code codes[Dither::block] = {};
  std::int64_t bucket_end = 0;
  Rounding<Grid> by(grid, bits, 0);
  float floor = 0;
  for (std::int64_t first = 0; first < n; first += Dither::block) {
    const std::int64_t end = std::min(first + Dither::block, n);
    fetch(x + first, Dither::block / 2);
    dither.carry(static_cast<std::uint64_t>(first / Dither::block), carry);
    fetch(x + first + Dither::block / 2, Dither::block / 2);  // not all at once: there are few places to wait in
    for (std::int64_t from = first, to; from < end; from = to) {
      if (from == bucket_end) {
        bucket_end = buckets.end(from, n);
        const Measure now = next(from, bucket_end - from);
        if (!std::isfinite(now.scale)) return false;
        by = Rounding<Grid>(grid, bits, now.scale);
        floor = now.floor;
      }
      to = std::min(end, bucket_end);
      if (look && largest(x + from, to - from) >= infinite) return false;
      const std::int64_t at = from - first;
      encode(x + from, static_cast<int>(to - from), by, dither, from, carry + at, codes + at);
      if (floor > 0)
        for (std::int64_t i = from; i < to; ++i) codes[i - first] = std::fabs(x[i]) < floor ? 0 : codes[i - first];
    }
    if (end - first < Dither::block) std::fill(codes + (end - first), codes + Dither::block, Code{0});
    put(codes, end - first);
  }
  return true;
}

// out (n,) += alpha * values. get(count) is the next block of codes, next() the scale of the next bucket.
template <class Code, class Grid, class Next, class Get>
void decode_tensor(float* out, std::int64_t n, Buckets buckets, Grid grid, int bits, float alpha, Next next, Get get) {
  std::int64_t bucket_end = 0;
  float scale = 0;
  for (std::int64_t first = 0; first < n; first += Dither::block) {
    const std::int64_t end = std::min(first + Dither::block, n);
    const Code* codes = get(end - first);
    for (std::int64_t from = first, to; from < end; from = to) {
      if (from == bucket_end) {
        bucket_end = buckets.end(from, n);
        scale = next();
      }
      to = std::min(end, bucket_end);
      add(codes + (from - first), static_cast<int>(to - from), scale, grid, bits, alpha, out + from);
    }
  }
}

}  // namespace laconic::LACONIC_TARGET
