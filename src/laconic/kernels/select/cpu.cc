// Selection: exact top-k, DGC's sampled top-k, a threshold, random positions. See README.md.
#include "laconic/kernels/native/frame.h"
#include "laconic/kernels/philox/philox.h"
#include "laconic/kernels/select/permute.h"
#include "laconic/kernels/select/rank.h"
#include "laconic/kernels/select/scan.h"

namespace laconic::LACONIC_TARGET {
namespace {

// Scratch of one call, used again for each segment.
struct Scratch {
  std::vector<std::int32_t> index;
  std::vector<std::uint32_t> bits;
  std::vector<std::uint32_t> copy;
};

// Entries that reach the floor go to scratch, as long as there are at most `most`. True if they all fit.
bool collect(const float* x, std::int64_t n, std::uint32_t floor, std::int64_t most, Scratch& scratch) {
  scratch.index.clear();
  scratch.bits.clear();
  return scan(x, n, floor, [&](const Passed& passed) {
    if (static_cast<std::int64_t>(scratch.index.size()) + passed.count > most) return false;
    scratch.index.insert(scratch.index.end(), passed.index, passed.index + passed.count);
    scratch.bits.insert(scratch.bits.end(), passed.bits, passed.bits + passed.count);
    return true;
  });
}

// The k largest collected entries to `out`; all of them if there are no more than k.
std::int64_t best(Scratch& scratch, std::int64_t k, std::int32_t* out) {
  const auto found = static_cast<std::int64_t>(scratch.index.size());
  if (found <= k) {
    std::copy(scratch.index.begin(), scratch.index.end(), out);
    return found;
  }
  scratch.copy.assign(scratch.bits.begin(), scratch.bits.end());
  const std::uint32_t threshold = kth_largest(scratch.copy.data(), found, k);
  std::int64_t ties = k, count = 0;
  for (const std::uint32_t bits : scratch.bits) ties -= bits > threshold;
  for (std::int64_t i = 0; i < found; ++i) {
    if (scratch.bits[i] < threshold || (scratch.bits[i] == threshold && ties-- <= 0)) continue;
    out[count++] = scratch.index[i];
  }
  return count;
}

// Exact, without scratch that grows with k: radix passes for the threshold, one more to write.
std::int64_t topk_by_radix(const float* x, std::int64_t n, std::int64_t k, std::int32_t* out) {
  const std::uint32_t threshold = k < n ? std::max(kth_largest_of(x, n, k), 1u) : 1u;
  std::int64_t larger = 0, count = 0;
  if (k < n)
    scan(x, n, threshold + 1, [&](const Passed& passed) { return larger += passed.count, true; });
  std::int64_t ties = k - larger;
  scan(x, n, threshold, [&](const Passed& passed) {
    for (std::int64_t i = 0; i < passed.count; ++i)
      if (passed.bits[i] > threshold || ties-- > 0) out[count++] = passed.index[i];
    return true;
  });
  return count;
}

// Exact: a floor that a sample says about 1.5 k entries reach, one pass to collect them, and the best k of them.
// If the sample misled, the floor is lowered once; then radix passes decide.
std::int64_t topk_segment(const float* x, std::int64_t n, std::int64_t k, std::int32_t* out, Scratch& scratch) {
  constexpr std::int64_t small = 1024;
  if (k <= 0 || n <= 0) return 0;
  if (n <= small) {
    collect(x, n, 1, n, scratch);
    return best(scratch, k, out);
  }
  if (k >= n / 4) return topk_by_radix(x, n, k, out);
  const std::int64_t samples = std::max({small / 2, std::min<std::int64_t>(n / 64, 4096), n / 256});
  const std::int64_t stride = n / samples;
  std::vector<std::uint32_t> sample(samples);
  for (std::int64_t i = 0; i < samples; ++i)  // one of each stride, at a place that hops about
    sample[i] = bits_of(x[i * stride + (i * 0x9E3779B97F4A7C15ull >> 32) % stride]);
  const double expected = static_cast<double>(samples) * k / n;
  auto rank = static_cast<std::int64_t>(expected + 4 * std::sqrt(expected) + 4);
  for (int attempt = 0; attempt < 2 && rank < samples; ++attempt, rank *= 4) {
    scratch.copy = sample;
    const std::uint32_t floor = std::max(kth_largest(scratch.copy.data(), samples, rank), 1u);
    const bool fits = collect(x, n, floor, 2 * stride * rank + k, scratch);
    if (!fits) break;
    if (static_cast<std::int64_t>(scratch.index.size()) >= k) return best(scratch, k, out);
  }
  return topk_by_radix(x, n, k, out);
}

// See laconic.kernels.sampled_topk. Where k or more pass the threshold, their best k are the exact top k, so a
// threshold that far too many pass is answered by the exact selection.
std::int64_t sampled_segment(const float* x, std::int64_t n, std::int64_t k, std::int64_t stride,
                             std::int64_t samples, std::int64_t rank, std::uint64_t key, double lower,
                             std::int64_t rounds, std::int32_t* out, Scratch& scratch) {
  if (k <= 0 || stride == 0) return topk_segment(x, n, k, out, scratch);
  std::uint32_t word[4];
  Philox(key).block(0, word);
  const auto start = static_cast<std::int64_t>((std::uint64_t{word[0]} * stride) >> 32);
  scratch.copy.resize(samples);
  for (std::int64_t i = 0; i < samples; ++i) scratch.copy[i] = bits_of(x[start + i * stride]);
  std::uint32_t level = kth_largest(scratch.copy.data(), samples, rank);
  for (std::int64_t left = rounds; left >= 0; --left) {
    if (!collect(x, n, level, 2 * k + 1024, scratch)) break;
    const auto found = static_cast<std::int64_t>(scratch.index.size());
    if (found > k || static_cast<double>(found) >= lower * static_cast<double>(k) || level <= 1)
      return best(scratch, k, out);
    if (left) level = std::bit_cast<std::uint32_t>(std::bit_cast<float>(level) * static_cast<float>(lower));
  }
  return topk_segment(x, n, k, out, scratch);
}

// counts[s] and the total, of a selection that writes each segment's indices behind those of the one before.
template <class Select>
std::int64_t each_segment(const Segments& segments, std::int32_t* out, std::int64_t* counts, Select select) {
  std::int64_t total = 0;
  for (std::int64_t s = 0; s < segments.count; ++s) total += counts[s] = select(s, out + total);
  return total;
}

std::int64_t topk(ConstFloats x, const Segments& segments, ConstLongs ks, Ints indices, Longs counts) {
  nb::gil_scoped_release released;
  Scratch scratch;
  return each_segment(segments, indices.data(), counts.data(), [&](std::int64_t s, std::int32_t* out) {
    return topk_segment(x.data() + segments.starts[s], segments.sizes[s], ks.data()[s], out, scratch);
  });
}

std::int64_t sampled_topk(ConstFloats x, const Segments& segments, ConstLongs ks, ConstLongs strides,
                          ConstLongs samples, ConstLongs ranks, ConstLongs keys, double lower, std::int64_t rounds,
                          Ints indices, Longs counts) {
  nb::gil_scoped_release released;
  Scratch scratch;
  return each_segment(segments, indices.data(), counts.data(), [&](std::int64_t s, std::int32_t* out) {
    return sampled_segment(x.data() + segments.starts[s], segments.sizes[s], ks.data()[s], strides.data()[s],
                           samples.data()[s], ranks.data()[s], static_cast<std::uint64_t>(keys.data()[s]), lower,
                           rounds, out, scratch);
  });
}

// The total may exceed the room in `indices`: then what did not fit was counted, and not written.
std::int64_t above(ConstFloats x, const Segments& segments, ConstFloats threshold, Ints indices,
                   Longs counts) {
  nb::gil_scoped_release released;
  std::int64_t total = 0;
  for (std::int64_t s = 0; s < segments.count; ++s) {
    const std::int64_t before = total;
    const std::uint32_t floor = bits_of(threshold.data()[s]);
    scan(x.data() + segments.starts[s], segments.sizes[s], floor, [&](const Passed& passed) {
      if (total + passed.count <= indices.size())
        std::copy(passed.index, passed.index + passed.count, indices.data() + total);
      total += passed.count;
      return true;
    });
    counts.data()[s] = total - before;
  }
  return total;
}

void random_indices(ConstLongs sizes, ConstLongs ks, ConstLongs keys, Ints indices, Longs counts) {
  nb::gil_scoped_release released;
  std::int32_t* out = indices.data();
  for (std::int64_t s = 0; s < sizes.size(); ++s) {
    const std::int64_t n = sizes.data()[s], k = std::clamp<std::int64_t>(ks.data()[s], 0, n);
    Permutation(static_cast<std::uint64_t>(keys.data()[s]), n).first(k, out);
    counts.data()[s] = k;
    out += k;
  }
}

}  // namespace

LACONIC_KERNELS(m) {
  m.def("topk", &topk);
  m.def("sampled_topk", &sampled_topk);
  m.def("above", &above);
  m.def("random_indices", &random_indices);
}

}  // namespace laconic::LACONIC_TARGET
