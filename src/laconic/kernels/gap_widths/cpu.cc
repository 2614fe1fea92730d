// Gaps between positions in a few widths of bits each, the best that this tensor's gaps allow. See README.md.
#include "laconic/kernels/bitpack/bits.h"

namespace laconic::LACONIC_TARGET {
namespace {

constexpr std::int64_t longest = std::int64_t{1} << 31;  // elements of a segment, so gaps have up to 31 bits
constexpr int lengths = 32;                              // 0 .. 31

// How many gaps have each bit length.
struct Histogram {
  std::int64_t counts[lengths] = {};

  void add(std::uint32_t gap) { ++counts[std::bit_width(gap)]; }
};

// 2^flag_bits widths, ascending; a gap takes the first that holds it.
struct Plan {
  int flag_bits = 0;
  int widths[8] = {};

  int count() const { return 1 << flag_bits; }
  int header_bits() const { return 2 + 5 * count(); }

  // Unit of each bit length.
  void fill(std::uint8_t* unit_of) const {
    for (int length = 0, unit = 0; length <= widths[count() - 1]; ++length) {
      unit += length > widths[unit];
      unit_of[length] = static_cast<std::uint8_t>(unit);
    }
  }

  // The widths with the fewest bits in all; the fewest widths, then the least widths among equals.
  static Plan best(const Histogram& histogram) {
    std::int64_t upto[lengths];  // gaps of this length and less
    std::int64_t sum = 0;
    int last = 0;
    for (int length = 0; length < lengths; ++length) {
      upto[length] = sum += histogram.counts[length];
      if (histogram.counts[length]) last = length;
    }
    std::int64_t cost[8][lengths];  // of all gaps up to length w, in j + 1 widths that end with w
    int before[8][lengths] = {};    // the width before that
    for (int w = 0; w <= last; ++w) cost[0][w] = upto[w] * w;
    for (int j = 1; j < 8; ++j)
      for (int w = j; w <= last; ++w) {
        cost[j][w] = INT64_MAX;
        for (int v = j - 1; v < w; ++v) {
          const std::int64_t with = cost[j - 1][v] + (upto[w] - upto[v]) * w;
          if (with < cost[j][w]) {
            cost[j][w] = with;
            before[j][w] = v;
          }
        }
      }
    Plan best;
    std::int64_t least = INT64_MAX;
    for (int flag_bits = 0; flag_bits < 4 && (1 << flag_bits) <= last + 1; ++flag_bits) {
      Plan plan;
      plan.flag_bits = flag_bits;
      const std::int64_t total = plan.header_bits() + sum * flag_bits + cost[plan.count() - 1][last];
      if (total >= least) continue;
      least = total;
      for (int j = plan.count() - 1, w = last; j >= 0; w = before[j--][w]) plan.widths[j] = w;
      best = plan;
    }
    return best;
  }

  bool operator==(const Plan&) const = default;
};

struct Counted {
  const std::int64_t* counts;
  const std::int64_t* sizes;
  std::int64_t segments;

  Counted(const ConstLongs& counts, const ConstLongs& sizes, std::int64_t indices)
      : counts(counts.data()), sizes(sizes.data()), segments(counts.size()) {
    if (counts.size() != sizes.size()) throw std::invalid_argument("one count a segment is needed");
    std::int64_t total = 0;
    for (std::int64_t s = 0; s < segments; ++s) {
      if (this->sizes[s] > longest) throw std::invalid_argument("a segment is too long for int32 positions");
      if (this->counts[s] < 0 || this->counts[s] > this->sizes[s])
        throw WireError("a count lies outside 0 .. the size of its tensor");
      total += this->counts[s];
    }
    if (total != indices) throw WireError("the counts do not add up to the number of positions");
  }
};

// Calls each(gap) for the gaps before k ascending positions.
template <class Each>
void gaps(const std::int32_t* index, std::int64_t k, Each each) {
  std::int64_t next = 0;  // the least position that can follow
  for (std::int64_t i = 0; i < k; ++i) {
    each(static_cast<std::uint32_t>(index[i] - next));
    next = index[i] + std::int64_t{1};
  }
}

// `wire` has room for 1 + 4 k bytes of each segment; returns the bytes used.
std::int64_t gap_widths_encode(ConstInts indices, ConstLongs counts, ConstLongs sizes, Bytes wire) {
  nb::gil_scoped_release released;
  const Counted in(counts, sizes, indices.size());
  if (wire.size() < in.segments + 4 * indices.size()) throw std::invalid_argument("the wire is too short");
  const std::int32_t* index = indices.data();
  std::uint8_t* to = wire.data();
  for (std::int64_t s = 0; s < in.segments; index += in.counts[s], ++s) {
    const std::int64_t k = in.counts[s];
    if (k == 0) continue;
    Histogram histogram;
    gaps(index, k, [&](std::uint32_t gap) { histogram.add(gap); });
    const Plan plan = Plan::best(histogram);
    std::uint8_t unit_of[lengths] = {};
    plan.fill(unit_of);
    BitWriter bits(to);
    bits.put(static_cast<std::uint32_t>(plan.flag_bits), 2);
    for (int i = 0; i < plan.count(); ++i) bits.put(static_cast<std::uint32_t>(plan.widths[i]), 5);
    if (plan.flag_bits)
      gaps(index, k, [&](std::uint32_t gap) { bits.put(unit_of[std::bit_width(gap)], plan.flag_bits); });
    gaps(index, k, [&](std::uint32_t gap) { bits.put(gap, plan.widths[unit_of[std::bit_width(gap)]]); });
    to = bits.finish();
  }
  return to - wire.data();
}

void gap_widths_decode(ConstBytes bytes, ConstLongs counts, ConstLongs sizes, Ints indices) {
  nb::gil_scoped_release released;
  const Counted in(counts, sizes, indices.size());
  std::int32_t* index = indices.data();
  const std::uint8_t* wire = bytes.data();
  std::int64_t left = bytes.size();
  for (std::int64_t s = 0; s < in.segments; index += in.counts[s], ++s) {
    const std::int64_t k = in.counts[s];
    if (k == 0) continue;
    BitReader flags(wire, left);
    Plan plan;
    plan.flag_bits = static_cast<int>(flags.take(2));
    for (int i = 0; i < plan.count(); ++i) plan.widths[i] = static_cast<int>(flags.take(5));
    const std::int64_t first = plan.header_bits() + k * plan.flag_bits;  // bit of the first gap
    if (first > 8 * left) throw WireError("the wire ends before the last gap");
    std::int64_t all = first;
    BitReader ahead = flags;
    for (std::int64_t i = 0; i < k; ++i) all += plan.widths[ahead.take(plan.flag_bits)];
    const std::int64_t used = (all + 7) >> 3;
    if (used > left) throw WireError("the wire ends before the last gap");
    BitReader values(wire, used);
    values.skip(first);
    Histogram histogram;
    std::int64_t next = 0;
    bool snug = true;  // each gap is in the first width that holds it
    for (std::int64_t i = 0; i < k; ++i) {
      const std::uint32_t unit = flags.take(plan.flag_bits);
      const std::uint32_t gap = values.take(plan.widths[unit]);
      histogram.add(gap);
      snug &= unit == 0 || std::bit_width(gap) > static_cast<unsigned>(plan.widths[unit - 1]);
      next += gap;
      index[i] = static_cast<std::int32_t>(next);
      if (next++ >= in.sizes[s]) throw WireError("a position lies outside its tensor");
    }
    if (!values.ended()) throw WireError("the bits after the last gap must be zero");
    if (!snug || !(plan == Plan::best(histogram))) throw WireError("these gaps fit better widths than the wire's");
    wire += used;
    left -= used;
  }
  if (left) throw WireError("the wire goes on after the last gap");
}

}  // namespace

LACONIC_KERNELS(m) {
  m.def("gap_widths_encode", &gap_widths_encode);
  m.def("gap_widths_decode", &gap_widths_decode);
}

}  // namespace laconic::LACONIC_TARGET
