// Small codes and the few numbers that they stand for: rank groups and powers of a base. See README.md.
#include "laconic/kernels/bitpack/bits.h"
#include "laconic/kernels/codebook/ranks.h"

namespace laconic::LACONIC_TARGET {
namespace {

constexpr std::uint32_t infinity = 0x7F800000u;
constexpr std::uint32_t magnitude = 0x7FFFFFFFu;

// The least b with 2^b >= entries.
int bits_for(std::int64_t entries) { return std::bit_width(static_cast<std::uint64_t>(entries - 1)); }

std::uint32_t bits_of(float x) { return std::bit_cast<std::uint32_t>(x); }

// Bits of the largest |x|: from `infinity` on, some x is not finite.
std::uint32_t largest_bits(const float* x, std::int64_t n) {
  std::uint32_t most = 0;
  for (std::int64_t i = 0; i < n; ++i) most = std::max(most, bits_of(x[i]) & magnitude);
  return most;
}

bool all_finite(ConstFloats x, const Segments& segments) {
  for (std::int64_t s = 0; s < segments.count; ++s)
    if (largest_bits(x.data() + segments.starts[s], segments.sizes[s]) >= infinity) return false;
  return true;
}

// [book float32 (min(levels, n),) | sign and level of each]: magnitudes in groups of equal count, largest first.
struct Hierarchy {
  std::int64_t levels;

  std::int64_t entries(std::int64_t n) const { return std::min(levels, n); }
  int bits(std::int64_t n) const { return 1 + bits_for(entries(n)); }

  void encode(const float* x, std::int64_t n, float* book, Ranks& ranks, BitWriter& codes) const {
    const std::int64_t groups = entries(n);
    ranks.take(n, [x](std::int64_t i) { return magnitude - (bits_of(x[i]) & magnitude); });
    ranks.split(0, n, groups);
    ranks.means(book, [](std::uint32_t key) { return std::bit_cast<float>(magnitude - key); });
    const int width = bits(n);
    for (std::int64_t i = 0; i < n; ++i) {
      const std::uint32_t sign = bits_of(x[i]) >> 31 << (width - 1);
      codes.put(sign | ranks.group_of(magnitude - (bits_of(x[i]) & magnitude)), width);
    }
  }

  // What each code stands for; false where a code means nothing.
  bool read(const float* book, std::int64_t n, std::vector<float>& values, std::vector<std::uint8_t>& known) const {
    const std::size_t half = std::size_t{1} << (bits(n) - 1);
    for (std::int64_t level = 0; level < entries(n); ++level) {
      if (!(book[level] >= 0 && bits_of(book[level]) < infinity)) return false;
      values[level] = book[level];
      values[half + level] = -book[level];
      known[level] = known[half + level] = 1;
    }
    return true;
  }
};

// [book float32 (min(bins, n),) | bin of each]: values in groups of about equal count, none with both signs.
struct Quantile {
  std::int64_t bins;

  std::int64_t entries(std::int64_t n) const { return std::min(bins, n); }
  int bits(std::int64_t n) const { return bits_for(entries(n)); }

  // Orders like x, with -0 as 0.
  static std::uint32_t key(float x) {
    const std::uint32_t bits = bits_of(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
  }

  void encode(const float* x, std::int64_t n, float* book, Ranks& ranks, BitWriter& codes) const {
    const std::int64_t all = entries(n);
    std::int64_t below = 0;  // entries under zero
    for (std::int64_t i = 0; i < n; ++i) below += x[i] < 0;
    std::int64_t groups = (2 * all * below + n) / (2 * n);  // their share of the bins
    if (below > 0 && below < n) groups = std::clamp<std::int64_t>(groups, 1, all - 1);
    ranks.take(n, [x](std::int64_t i) { return key(x[i]); });
    if (groups) ranks.split(0, below, groups);
    if (groups < all) ranks.split(below, n - below, all - groups);
    ranks.means(book, [](std::uint32_t key) {
      return std::bit_cast<float>(key >> 31 ? key & magnitude : ~key);
    });
    if (const int width = bits(n))
      for (std::int64_t i = 0; i < n; ++i) codes.put(ranks.group_of(key(x[i])), width);
  }

  bool read(const float* book, std::int64_t n, std::vector<float>& values, std::vector<std::uint8_t>& known) const {
    for (std::int64_t bin = 0; bin < entries(n); ++bin) {
      if ((bits_of(book[bin]) & magnitude) >= infinity) return false;
      values[bin] = book[bin];
      known[bin] = 1;
    }
    return true;
  }
};

// [largest float32 | sign and level of each]: level l > 0 means largest * powers[l - 1], level 0 nothing.
struct Powers {
  const float* factors;  // of the levels: lower bounds when encoding, values when decoding
  std::int64_t levels;

  std::int64_t entries(std::int64_t) const { return 1; }
  int bits(std::int64_t) const { return 1 + std::bit_width(static_cast<std::uint64_t>(levels)); }

  void encode(const float* x, std::int64_t n, float* book, Ranks&, BitWriter& codes) const {
    book[0] = std::bit_cast<float>(largest_bits(x, n));
    const int width = bits(n), steps = width - 1;
    std::vector<std::int32_t> bounds(std::size_t{1} << steps, std::int32_t{0x7FFFFFFF});
    bounds[0] = 0;
    for (std::int64_t l = 0; l < levels; ++l)  // at least 1, so that zero stays zero
      bounds[l + 1] = std::max(std::int32_t{1}, std::bit_cast<std::int32_t>(book[0] * factors[l]));
    constexpr std::int64_t chunk = 64;
    std::int32_t size[chunk], level[chunk];
    for (std::int64_t begin = 0; begin < n; begin += chunk) {
      const std::int64_t count = std::min(chunk, n - begin);
      for (std::int64_t i = 0; i < chunk; ++i) {
        size[i] = i < count ? static_cast<std::int32_t>(bits_of(x[begin + i]) & magnitude) : 0;
        level[i] = 0;
      }
      for (int step = 1 << steps >> 1; step; step >>= 1)
        for (std::int64_t i = 0; i < chunk; ++i) level[i] += bounds[level[i] + step] <= size[i] ? step : 0;
      for (std::int64_t i = 0; i < count; ++i) {
        const std::uint32_t sign = level[i] ? bits_of(x[begin + i]) >> 31 << steps : 0;
        codes.put(sign | static_cast<std::uint32_t>(level[i]), width);
      }
    }
  }

  bool read(const float* book, std::int64_t n, std::vector<float>& values, std::vector<std::uint8_t>& known) const {
    if (bits_of(book[0]) >= infinity) return false;
    const std::size_t half = std::size_t{1} << (bits(n) - 1);
    known[0] = 1;
    for (std::int64_t l = 1; l <= levels; ++l) {
      values[l] = book[0] * factors[l - 1];
      values[half + l] = -values[l];
      known[l] = known[half + l] = 1;
    }
    return true;
  }
};

template <class Kind>
std::int64_t nbytes(const Kind& kind, std::int64_t n) {
  return n ? 4 * kind.entries(n) + packed_nbytes(n, kind.bits(n)) : 0;
}

template <class Kind>
std::int64_t total(const Kind& kind, const Segments& segments) {
  std::int64_t sum = 0;
  for (std::int64_t s = 0; s < segments.count; ++s) sum += nbytes(kind, segments.sizes[s]);
  return sum;
}

// One wire after the other; false, with nothing said about `wire`, where x is not finite.
template <class Kind>
bool encode(const Kind& kind, ConstFloats x, const Segments& segments, Bytes wire) {
  if (wire.size() != total(kind, segments)) throw std::invalid_argument("the wire has another size");
  if (!all_finite(x, segments)) return false;
  Ranks ranks;
  std::vector<float> book;
  std::uint8_t* to = wire.data();
  for (std::int64_t s = 0; s < segments.count; ++s) {
    const std::int64_t n = segments.sizes[s];
    if (n == 0) continue;
    const std::int64_t head = 4 * kind.entries(n);
    book.resize(kind.entries(n));
    BitWriter codes(to + head);
    kind.encode(x.data() + segments.starts[s], n, book.data(), ranks, codes);
    codes.finish();
    std::memcpy(to, book.data(), head);
    to += nbytes(kind, n);
  }
  return true;
}

enum class Pass { check, add };

// Reads a message from end to end: to check it, or to add its decoded values after the check.
template <Pass pass, class Kind>
void read(const Kind& kind, ConstBytes wire, const Segments& segments, Floats out, float alpha) {
  constexpr std::int64_t chunk = 512;
  const std::uint8_t* from = wire.data();
  std::vector<float> book, values;
  std::vector<std::uint8_t> known;
  for (std::int64_t s = 0; s < segments.count; ++s) {
    const std::int64_t n = segments.sizes[s];
    if (n == 0) continue;
    const std::int64_t head = 4 * kind.entries(n), end = nbytes(kind, n);
    const int width = kind.bits(n);
    book.resize(kind.entries(n));
    std::memcpy(book.data(), from, head);
    values.assign(std::size_t{1} << width, 0.0f);
    known.assign(std::size_t{1} << width, 0);
    if (!kind.read(book.data(), n, values, known)) throw WireError("a codebook holds numbers that are no means");
    if (const auto used = n * width % 8; used && from[end - 1] >> used)
      throw WireError("the bits after the last code must be zero");
    for (float& value : values) value *= alpha;
    PackedReader<std::uint16_t, chunk> codes(from + head, wire.data() + wire.size(), std::max(width, 1));
    const std::uint16_t first_bin[chunk] = {};  // a book of one entry needs no codes
    float* to = pass == Pass::add ? out.data() + segments.starts[s] : nullptr;
    bool fine = true;
    for (std::int64_t begin = 0; begin < n; begin += chunk) {
      const std::int64_t count = std::min(chunk, n - begin);
      const std::uint16_t* code = width ? codes.get(count) : first_bin;
      for (std::int64_t i = 0; i < count; ++i) {
        if constexpr (pass == Pass::check) fine &= known[code[i]];
        else to[begin + i] += values[code[i]];
      }
    }
    if (!fine) throw WireError("a code is not in its codebook");
    from += end;
  }
}

// All of the wire is checked before the first write.
template <class Kind>
void add(const Kind& kind, ConstBytes wire, const Segments& segments, Floats out, float alpha) {
  if (wire.size() != total(kind, segments)) throw WireError("the codes of these tensors have another length");
  read<Pass::check>(kind, wire, segments, out, alpha);
  read<Pass::add>(kind, wire, segments, out, alpha);
}

bool hierarchy_encode(ConstFloats x, const Segments& segments, std::int64_t levels, Bytes wire) {
  nb::gil_scoped_release released;
  return encode(Hierarchy{levels}, x, segments, wire);
}

void hierarchy_add_(ConstBytes wire, const Segments& segments, std::int64_t levels, Floats out,
                    float alpha) {
  nb::gil_scoped_release released;
  add(Hierarchy{levels}, wire, segments, out, alpha);
}

bool quantile_encode(ConstFloats x, const Segments& segments, std::int64_t bins, Bytes wire) {
  nb::gil_scoped_release released;
  return encode(Quantile{bins}, x, segments, wire);
}

void quantile_add_(ConstBytes wire, const Segments& segments, std::int64_t bins, Floats out, float alpha) {
  nb::gil_scoped_release released;
  add(Quantile{bins}, wire, segments, out, alpha);
}

bool powers_encode(ConstFloats x, const Segments& segments, ConstFloats bounds, Bytes wire) {
  nb::gil_scoped_release released;
  return encode(Powers{bounds.data(), bounds.size()}, x, segments, wire);
}

void powers_add_(ConstBytes wire, const Segments& segments, ConstFloats powers, Floats out, float alpha) {
  nb::gil_scoped_release released;
  add(Powers{powers.data(), powers.size()}, wire, segments, out, alpha);
}

}  // namespace

LACONIC_KERNELS(m) {
  m.def("hierarchy_encode", &hierarchy_encode);
  m.def("hierarchy_add_", &hierarchy_add_);
  m.def("quantile_encode", &quantile_encode);
  m.def("quantile_add_", &quantile_add_);
  m.def("powers_encode", &powers_encode);
  m.def("powers_add_", &powers_add_);
}

}  // namespace laconic::LACONIC_TARGET
