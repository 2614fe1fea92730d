// Order statistics of magnitudes: the k-th largest of an array, or of a whole tensor without a copy of it.
#pragma once

#include "laconic/kernels/select/scan.h"

namespace laconic::LACONIC_TARGET {

// Counts by the digit bits [shift, shift + width) of the magnitudes whose higher bits equal `prefix`.
struct Histogram {
  std::vector<std::int64_t> bins;

  Histogram() : bins(std::size_t{1} << 11) {}

  // The digit that holds the k-th largest; k becomes its rank among the entries of that digit.
  std::uint32_t digit_of(std::int64_t& k) const {
    auto digit = static_cast<std::uint32_t>(bins.size());
    while (digit-- > 0) {
      if (k <= bins[digit]) return digit;
      k -= bins[digit];
    }
    return 0;
  }
};

// The k-th largest of bits (n,), 1 <= k <= n. Reorders them.
inline std::uint32_t kth_largest(std::uint32_t* bits, std::int64_t n, std::int64_t k) {
  if (n > 1024) {
    Histogram histogram;
    for (std::int64_t i = 0; i < n; ++i) ++histogram.bins[bits[i] >> 20];
    const std::uint32_t digit = histogram.digit_of(k);
    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      bits[kept] = bits[i];
      kept += (bits[i] >> 20) == digit;
    }
    n = kept;
  }
  std::nth_element(bits, bits + (k - 1), bits + n, std::greater<>());
  return bits[k - 1];
}

// The k-th largest magnitude of x (n,), 1 <= k <= n: three radix passes over digits of 11, 10 and 10 bits.
inline std::uint32_t kth_largest_of(const float* x, std::int64_t n, std::int64_t k) {
  std::uint32_t found = 0;
  int known = 31;  // the bits from here up are found
  for (const int width : {11, 10, 10}) {
    const int shift = known - width;
    const std::uint32_t digits = (1u << width) - 1;
    Histogram even, odd;  // two, so that runs of equal digits do not wait for each other's store
    for (std::int64_t i = 0; i < n; ++i) {
      const std::uint32_t bits = bits_of(x[i]);
      Histogram& histogram = i & 1 ? odd : even;
      histogram.bins[(bits >> shift) & digits] += (bits >> known) == (found >> known);
    }
    for (std::size_t i = 0; i < even.bins.size(); ++i) even.bins[i] += odd.bins[i];
    found |= even.digit_of(k) << shift;
    known = shift;
  }
  return found;
}

}  // namespace laconic::LACONIC_TARGET
