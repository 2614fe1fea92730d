// A keyed permutation of [0, n) in O(1) memory: a Feistel network over the next power of four, walked until it is
// back below n (Black and Rogaway 2002). See README.md.
#pragma once

#include "laconic/kernels/philox/philox.h"

#include <numeric>

namespace laconic::LACONIC_TARGET {

// Ascending order, by bytes from the lowest; `most` bounds the values.
inline void sort_ascending(std::int32_t* values, std::int64_t n, std::uint32_t most) {
  if (n < 256) return std::sort(values, values + n);
  std::vector<std::int32_t> other(n);
  std::int32_t *from = values, *to = other.data();
  for (int shift = 0; shift < 32 && most >> shift; shift += 11) {
    std::int64_t ends[2049] = {};
    for (std::int64_t i = 0; i < n; ++i) ++ends[1 + ((static_cast<std::uint32_t>(from[i]) >> shift) & 2047)];
    std::partial_sum(ends, ends + 2049, ends);
    for (std::int64_t i = 0; i < n; ++i) to[ends[(static_cast<std::uint32_t>(from[i]) >> shift) & 2047]++] = from[i];
    std::swap(from, to);
  }
  if (from != values) std::copy(from, from + n, values);
}

struct Permutation {
  std::uint64_t n;
  int half;
  std::uint32_t round_keys[12];  // with 8 rounds, pairs of positions below 8 were seen not to be uniform

  Permutation(std::uint64_t key, std::int64_t n)
      : n(n), half(std::max(1, (static_cast<int>(std::bit_width(static_cast<std::uint64_t>(n - 1))) + 1) / 2)) {
    for (int i = 0; i < 3; ++i) Philox(key).block(i, round_keys + 4 * i);
  }

  // The finaliser of MurmurHash3.
  static std::uint32_t mixed(std::uint32_t word) {
    word = (word ^ (word >> 16)) * 0x85EBCA6Bu;
    word = (word ^ (word >> 13)) * 0xC2B2AE35u;
    return word ^ (word >> 16);
  }

  std::uint64_t once(std::uint64_t value) const {
    const std::uint32_t mask = (1u << half) - 1;
    auto left = static_cast<std::uint32_t>(value >> half), right = static_cast<std::uint32_t>(value) & mask;
    for (const std::uint32_t round_key : round_keys) {
      const std::uint32_t next = left ^ (mixed(right + round_key) & mask);
      left = right;
      right = next;
    }
    return (std::uint64_t{left} << half) | right;
  }

  // Where 0 .. k-1 go, ascending. All of [0, n) for k = n.
  void first(std::int64_t k, std::int32_t* out) const {
    if (k == static_cast<std::int64_t>(n)) return std::iota(out, out + k, 0);
    for (std::int64_t i = 0; i < k; ++i) {
      std::uint64_t value = once(i);
      while (value >= n) value = once(value);
      out[i] = static_cast<std::int32_t>(value);
    }
    sort_ascending(out, k, static_cast<std::uint32_t>(n - 1));
  }
};

}  // namespace laconic::LACONIC_TARGET
