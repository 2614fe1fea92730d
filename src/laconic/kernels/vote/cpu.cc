// Majorities of bits, 64 at a time: the counts of 64 votes stand in bit planes. See README.md.
#include "laconic/kernels/native/frame.h"

namespace laconic::LACONIC_TARGET {
namespace {

constexpr std::int64_t words = 64;  // of 64 bits, counted together
constexpr std::int64_t strip = 8 * words;  // bytes
constexpr int planes = 32;  // enough to count 2^32 - 1 voters

void majority(ConstBytes votes, std::int64_t voters, ConstBytes ties, Bytes winners) {
  nb::gil_scoped_release released;
  const std::int64_t m = winners.size();
  const int used = std::bit_width(static_cast<std::uint32_t>(voters));
  const auto half = static_cast<std::uint32_t>(voters / 2);
  std::uint64_t count[planes][words], carry[words], more[words], level[words];
  for (std::int64_t at = 0; at < m; at += strip) {
    const auto nbytes = static_cast<std::size_t>(std::min(strip, m - at));
    std::memset(count, 0, sizeof count[0] * used);
    for (std::int64_t voter = 0; voter < voters; ++voter) {
      std::memcpy(carry, votes.data() + voter * m + at, nbytes);
      for (int p = 0; p < used; ++p)  // ripple: count += carry
        for (int w = 0; w < words; ++w) {
          const std::uint64_t old = count[p][w];
          count[p][w] = old ^ carry[w];
          carry[w] &= old;
        }
    }
    std::fill_n(more, words, 0);
    std::fill_n(level, words, ~std::uint64_t{0});
    for (int p = used - 1; p >= 0; --p) {  // compare with half the voters, from the top
      const std::uint64_t bit = half >> p & 1 ? ~std::uint64_t{0} : 0;
      for (int w = 0; w < words; ++w) {
        more[w] |= level[w] & count[p][w] & ~bit;
        level[w] &= ~(count[p][w] ^ bit);
      }
    }
    if (voters % 2 == 0) {
      std::memcpy(carry, ties.data() + at, nbytes);
      for (int w = 0; w < words; ++w) more[w] |= level[w] & carry[w];
    }
    std::memcpy(winners.data() + at, more, nbytes);
  }
}

}  // namespace

LACONIC_KERNELS(m) { m.def("majority", &majority); }

}  // namespace laconic::LACONIC_TARGET
