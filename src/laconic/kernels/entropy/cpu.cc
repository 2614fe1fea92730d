// Golomb-Rice and LEB128 codes of the gaps between ascending positions. See README.md.
#include "laconic/kernels/bitpack/bits.h"

namespace laconic::LACONIC_TARGET {
namespace {

constexpr std::int64_t longest = std::int64_t{1} << 31;  // elements of a segment

struct Counted {
  const std::int64_t* counts;
  const std::int64_t* sizes;
  std::int64_t segments;

  Counted(const ConstLongs& counts, const ConstLongs& sizes)
      : counts(counts.data()), sizes(sizes.data()), segments(counts.size()) {
    if (counts.size() != sizes.size()) throw std::invalid_argument("one count a segment is needed");
    for (std::int64_t s = 0; s < segments; ++s) {
      if (this->sizes[s] > longest) throw std::invalid_argument("a segment is too long for int32 positions");
      if (this->counts[s] < 0 || this->counts[s] > this->sizes[s])
        throw WireError("a count lies outside 0 .. the size of its tensor");
    }
  }

  Counted(const ConstLongs& counts, const ConstLongs& sizes, std::int64_t indices) : Counted(counts, sizes) {
    std::int64_t total = 0;
    for (std::int64_t s = 0; s < segments; ++s) total += this->counts[s];
    if (total != indices) throw WireError("the counts do not add up to the number of positions");
  }
};

// Low bits of each gap: the least r with 2^r >= 0.48125 (n / k - 1/2).
int parameter(std::int64_t k, std::int64_t n) {
  int r = 0;
  while (k && ((320 * k) << r) < 77 * (2 * n - k)) ++r;
  return r;
}

bool ascending(ConstInts indices, ConstLongs counts, ConstLongs sizes) {
  nb::gil_scoped_release released;
  const Counted in(counts, sizes, indices.size());
  const std::int32_t* index = indices.data();
  bool fine = true;
  for (std::int64_t s = 0; s < in.segments; index += in.counts[s], ++s) {
    const std::int64_t k = in.counts[s];
    if (k == 0) continue;
    fine &= index[0] >= 0 && index[k - 1] < in.sizes[s];
    for (std::int64_t i = 1; i < k; ++i) fine &= index[i] > index[i - 1];
  }
  return fine;
}

std::int64_t low_total(const Counted& in) {
  std::int64_t total = 0;
  for (std::int64_t s = 0; s < in.segments; ++s)
    total += packed_nbytes(in.counts[s], parameter(in.counts[s], in.sizes[s]));
  return total;
}

// The most bytes that these counts can take: the high parts of a segment's gaps add up to (n - k) >> r at most.
std::int64_t most_nbytes(const Counted& in) {
  std::int64_t unary = 0;
  for (std::int64_t s = 0; s < in.segments; ++s)
    if (const std::int64_t k = in.counts[s]) unary += k + ((in.sizes[s] - k) >> parameter(k, in.sizes[s]));
  return low_total(in) + ((unary + 7) >> 3);
}

std::int64_t rice_most(ConstLongs counts, ConstLongs sizes) {
  nb::gil_scoped_release released;
  return most_nbytes(Counted(counts, sizes));
}

// Fills the front of `wire`, which is long enough for any positions with these counts; returns the bytes used.
std::int64_t rice_encode(ConstInts indices, ConstLongs counts, ConstLongs sizes, Bytes wire) {
  nb::gil_scoped_release released;
  const Counted in(counts, sizes, indices.size());
  if (most_nbytes(in) > wire.size()) throw std::invalid_argument("the wire is too short");
  const std::int64_t split = low_total(in);
  std::uint8_t* low = wire.data();
  std::uint8_t* unary = wire.data() + split;
  std::fill(unary, wire.data() + wire.size(), std::uint8_t{0});
  const std::int32_t* index = indices.data();
  std::int64_t bit = 0;  // of the unary stream
  for (std::int64_t s = 0; s < in.segments; ++s) {
    const int r = parameter(in.counts[s], in.sizes[s]);
    const std::uint64_t mask = (std::uint64_t{1} << r) - 1;
    std::uint64_t held = 0;  // low bits that have not left yet, `fill` of them
    int fill = 0;
    std::int64_t next = 0;  // the least position that can follow
    for (std::int64_t i = 0; i < in.counts[s]; ++i, ++index) {
      const auto gap = static_cast<std::uint64_t>(*index - next);
      next = *index + std::int64_t{1};
      held |= (gap & mask) << fill;
      fill += r;
      if (fill >= 32) {
        const auto half = static_cast<std::uint32_t>(held);
        std::memcpy(low, &half, 4);
        low += 4;
        held >>= 32;
        fill -= 32;
      }
      bit += static_cast<std::int64_t>(gap >> r);
      unary[bit >> 3] |= static_cast<std::uint8_t>(1 << (bit & 7));
      ++bit;
    }
    for (; fill > 0; fill -= 8, held >>= 8) *low++ = static_cast<std::uint8_t>(held);
  }
  return split + ((bit + 7) >> 3);
}

void rice_decode(ConstBytes bytes, ConstLongs counts, ConstLongs sizes, Ints indices) {
  nb::gil_scoped_release released;
  const Counted in(counts, sizes, indices.size());
  const std::uint8_t* wire = bytes.data();
  const std::int64_t nbytes = bytes.size();
  const std::int64_t split = low_total(in);
  if (nbytes < split) throw WireError("the wire ends inside the low bits of the gaps");

  std::int32_t* index = indices.data();
  std::int64_t at = 0;                      // byte where this segment's low bits start
  std::int64_t ahead = split;               // byte after the unary word at hand
  std::int64_t base = -64, used = 0;        // bit of the unary stream where that word starts; bits taken so far
  std::uint64_t word = 0;                   // its unread bits
  for (std::int64_t s = 0; s < in.segments; ++s) {
    const std::int64_t k = in.counts[s], n = in.sizes[s];
    if (k == 0) continue;
    const int r = parameter(k, n);
    const std::uint64_t mask = (std::uint64_t{1} << r) - 1;
    const std::uint64_t most = static_cast<std::uint64_t>((n - k) >> r);
    std::uint64_t sum = 0, high = 0;  // of low parts plus one each, and of high parts
    std::int64_t low = 0;             // bit of the segment's low bits
    for (std::int64_t i = 0; i < k; ++i) {
      while (word == 0) {
        if (ahead >= nbytes) throw WireError("the wire ends before the last gap");
        word = load64(wire, nbytes, ahead);
        ahead += 8;
        base += 64;
      }
      const std::int64_t one = base + std::countr_zero(word);
      word &= word - 1;
      high = static_cast<std::uint64_t>(one - used - i);  // zeros between: the high parts so far
      sum += (load64(wire, nbytes, at + (low >> 3)) >> (low & 7) & mask) + 1;
      low += r;
      index[i] = static_cast<std::int32_t>((high << r) + sum - 1);
      if (i + 1 == k) used = one + 1;
    }
    // Positions ascend by construction, so the last one speaks for all of them.
    if (high > most || (high << r) + sum > static_cast<std::uint64_t>(n))
      throw WireError("a position lies outside its tensor");
    at += packed_nbytes(k, r);
    if ((low & 7) && wire[at - 1] >> (low & 7))
      throw WireError("the bits after the low bits of a tensor's gaps must be zero");
    index += k;
  }
  if (word != 0 || nbytes != split + ((used + 7) >> 3)) throw WireError("the wire goes on after the last gap");
}

// At most five bytes a gap; `wire` has room for them. Returns the bytes used.
std::int64_t delta_encode(ConstInts indices, ConstLongs counts, ConstLongs sizes, Bytes wire) {
  nb::gil_scoped_release released;
  const Counted in(counts, sizes, indices.size());
  if (wire.size() < 5 * indices.size()) throw std::invalid_argument("the wire is too short");
  std::uint8_t* to = wire.data();
  const std::int32_t* index = indices.data();
  for (std::int64_t s = 0; s < in.segments; ++s) {
    std::int64_t next = 0;
    for (std::int64_t i = 0; i < in.counts[s]; ++i, ++index) {
      auto gap = static_cast<std::uint64_t>(*index - next);
      next = *index + std::int64_t{1};
      for (; gap >= 128; gap >>= 7) *to++ = static_cast<std::uint8_t>(gap | 128);
      *to++ = static_cast<std::uint8_t>(gap);
    }
  }
  return to - wire.data();
}

void delta_decode(ConstBytes wire, ConstLongs counts, ConstLongs sizes, Ints indices) {
  nb::gil_scoped_release released;
  const Counted in(counts, sizes, indices.size());
  const std::uint8_t* at = wire.data();
  const std::uint8_t* const end = at + wire.size();
  std::int32_t* index = indices.data();
  for (std::int64_t s = 0; s < in.segments; ++s) {
    std::int64_t next = 0;
    for (std::int64_t i = 0; i < in.counts[s]; ++i) {
      std::uint64_t gap = 0;
      int shift = 0;
      for (bool more = true; more; shift += 7) {
        if (at == end) throw WireError("the wire ends before the last gap");
        if (shift == 35 || (shift && *at == 0)) throw WireError("a gap has more bytes than it needs");
        more = *at & 128;
        gap |= static_cast<std::uint64_t>(*at++ & 127) << shift;
      }
      next += static_cast<std::int64_t>(gap);
      if (next >= in.sizes[s]) throw WireError("a position lies outside its tensor");
      *index++ = static_cast<std::int32_t>(next++);
    }
  }
  if (at != end) throw WireError("the wire goes on after the last gap");
}

}  // namespace

LACONIC_KERNELS(m) {
  m.def("ascending", &ascending);
  m.def("rice_most", &rice_most);
  m.def("rice_encode", &rice_encode);
  m.def("rice_decode", &rice_decode);
  m.def("delta_encode", &delta_encode);
  m.def("delta_decode", &delta_decode);
}

}  // namespace laconic::LACONIC_TARGET
