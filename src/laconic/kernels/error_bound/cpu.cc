// Error-bounded floats: quantise, mark and Rice-code a block of 256 at a time; the way back is in reader.h.
#include "laconic/kernels/error_bound/reader.h"

namespace laconic::LACONIC_TARGET {
namespace {

// The largest k <= 15 with 2 count 2^k <= 2 total + count.
int rice(std::int32_t total, int count) {
  if (count == 0) return 0;
  const auto ratio = static_cast<std::uint32_t>(2 * total + count) / static_cast<std::uint32_t>(2 * count);
  const int k = std::bit_width(ratio) - 1;
  return std::clamp(k, 0, 15);
}

struct Unary {
  std::uint8_t* to;
  std::uint64_t held = 0;
  std::int64_t fill = 0;

  void flush() {
    std::memcpy(to, &held, 8);
    to += 8;
    held = 0;
    fill -= 64;
  }
  void put(const std::int32_t* symbols, int count, int k) {
    for (int i = 0; i < count; ++i) {
      fill += symbols[i] >> k;
      while (fill >= 64) flush();
      held |= std::uint64_t{1} << fill;
      ++fill;
    }
  }
  std::uint8_t* finish() {
    while (fill >= 64) flush();
    std::memcpy(to, &held, 8);
    return to + (fill + 7) / 8;
  }
};

void put_low(const std::int32_t* symbols, int count, int k, std::uint8_t* to) {
  if (k == 0) return;
  const std::int64_t room = low_nbytes(k, count) + 16;
  if (k <= 8) {
    std::uint8_t codes[block];
    for (int i = 0; i < count; ++i) codes[i] = static_cast<std::uint8_t>(symbols[i] & ((1 << k) - 1));
    packer<std::uint8_t>(k)(codes, count, to, room);
  } else {
    std::uint16_t codes[block];
    for (int i = 0; i < count; ++i) codes[i] = static_cast<std::uint16_t>(symbols[i] & ((1 << k) - 1));
    packer<std::uint16_t>(k)(codes, count, to, room);
  }
}

struct Scale {
  float bound, step, inverse;
};

// Bins of 256 elements, as q << 1 | whether it is below zero; `given`: bits of |x|.
struct Bins {
  alignas(64) std::int32_t code[block], given[block];
  std::int32_t total = 0, below = 0;  // sum of all q; how many are below zero
  bool fits = true, finite = true;    // false where the bound would break

  void make(const float* __restrict x, const Scale scale, std::int32_t floor) {
    // Bits of floats that are not negative have their order: comparisons of integers become vectors, of floats not.
    const auto bound = std::bit_cast<std::int32_t>(scale.bound), far = std::bit_cast<std::int32_t>(65536.0f);
    std::int32_t sum = 0, negative = 0, worst = 0, most = 0, largest = 0;
    for (int i = 0; i < block; ++i) {
      const auto bits = std::bit_cast<std::int32_t>(x[i]);
      const std::int32_t size_bits = bits & 0x7FFFFFFF;
      const float size = std::bit_cast<float>(size_bits);
      const std::int32_t place = std::min(std::bit_cast<std::int32_t>(size * scale.inverse), far);
      const std::int32_t nearest = static_cast<std::int32_t>(std::bit_cast<float>(place) + 0.5f);
      const std::int32_t q = nearest & -static_cast<std::int32_t>(size_bits > bound);
      const float error = static_cast<float>(q) * scale.step - size;
      worst = std::max(worst, std::bit_cast<std::int32_t>(error) & 0x7FFFFFFF);
      most = std::max(most, q);
      const std::int32_t seen = (q & -floor) | (size_bits & (floor - 1));
      const std::int32_t sign = (bits >> 31) & static_cast<std::int32_t>(seen > 0);
      negative += sign;
      largest = std::max(largest, size_bits);
      code[i] = 2 * q + sign;
      given[i] = size_bits;
      sum += q;
    }
    total = sum;
    below = negative;
    fits = worst <= bound && most <= top;
    finite = largest < static_cast<std::int32_t>(infinity);
  }
};

struct Sections {
  std::uint8_t *header, *tag, *mark, *low, *exact;
  Unary unary;
};

void encode_block(const float* x, int n, const Scale scale, int floor, Sections& to, bool& finite) {
  alignas(64) float padded[block] = {};
  if (n < block) {
    std::copy_n(x, n, padded);
    x = padded;
  }
  Bins bins;
  bins.make(x, scale, floor);
  finite &= bins.finite;
  Marks marks;
  mark(floor ? bins.code : bins.given, marks);
  const int c = marks.count(), below = bins.below > 0;
  const std::int32_t every = (bins.total << below) + (floor ? -bins.below : bins.below);
  const int k_plain = rice(every, n);
  const bool all = floor ? (n - c) * (1 + k_plain) <= n : c == n;
  const int k = all ? k_plain : rice(((bins.total - floor * c) << below) + bins.below, c);
  std::uint32_t mixed, full;
  marks.tags(mixed, full);
  const int stored = std::popcount(mixed);
  const bool short_tags = tag_bytes + stored < mark_bytes;
  if (all) {
    Marks every;
    every.first(n);
    marks = every;
  }
  alignas(64) std::int32_t symbols[block + 16];
  const int count = squeeze(bins.code, marks, symbols);
  const std::int32_t least = all ? 0 : floor << below, zigzag = all && floor ? 2 : 0;  // 0, -1, 1, -2, 2
  std::int32_t high = 0;
  for (int i = 0; i < count; ++i) {
    symbols[i] = ((symbols[i] - zigzag * (symbols[i] & 1)) >> (1 - below)) - least;
    high += symbols[i] >> k;
  }
  const std::int64_t low = low_nbytes(k, count);
  const std::int64_t mark_size = all ? 0 : short_tags ? tag_bytes + stored : mark_bytes;
  if (!bins.fits || 8 * (mark_size + low) + high + count >= 32 * n) {
    *to.header++ = raw << 5;
    std::memcpy(to.exact, x, 4 * static_cast<std::size_t>(n));
    to.exact += 4 * n;
    return;
  }
  if (c == 0) {
    *to.header++ = zero << 5;
    return;
  }
  const std::uint8_t mode = all ? plain : short_tags ? tagged : marked;
  *to.header++ = static_cast<std::uint8_t>(mode << 5 | below << 4 | k);
  if (mode == marked) {
    std::memcpy(to.mark, marks.word, mark_bytes);
    to.mark += mark_bytes;
  } else if (mode == tagged) {
    std::memcpy(to.tag, &mixed, 4);
    std::memcpy(to.tag + 4, &full, 4);
    to.tag += tag_bytes;
    std::uint8_t bytes[mark_bytes];
    std::memcpy(bytes, marks.word, sizeof bytes);
    for (std::uint32_t left = mixed; left; left &= left - 1) *to.mark++ = bytes[std::countr_zero(left)];
  }
  put_low(symbols, count, k, to.low);
  to.low += low;
  to.unary.put(symbols, count, k);
}

// `wire` has room for every section at its largest, and gets them side by side. Returns the bytes used.
std::int64_t error_bound_encode(ConstFloats x, double bound, double step, double inverse, int floor, Bytes wire) {
  nb::gil_scoped_release released;
  const std::int64_t n = x.size(), blocks = blocks_of(n);
  const std::int64_t each = 1 + tag_bytes + mark_bytes + 1024 + 1024 + 4 * block + 64;
  if (wire.size() < 64 + blocks * each) throw std::invalid_argument("the wire is too short");
  const Scale scale{static_cast<float>(bound), static_cast<float>(step), static_cast<float>(inverse)};
  std::uint8_t* const start = wire.data();
  std::memcpy(start, &scale.bound, 4);
  start[4] = static_cast<std::uint8_t>(floor);
  std::uint8_t* const headers = start + head;
  std::uint8_t* const tags = headers + blocks;
  std::uint8_t* const marks = tags + tag_bytes * blocks;
  std::uint8_t* const lows = marks + mark_bytes * blocks;
  std::uint8_t* const unaries = lows + 1024 * blocks + 16;
  std::uint8_t* const exacts = unaries + 1024 * blocks + 16;
  Sections to{headers, tags, marks, lows, exacts, Unary{unaries}};
  bool finite = true;
  for (std::int64_t b = 0; b < blocks && finite; ++b) {
    const auto count = static_cast<int>(std::min<std::int64_t>(block, n - b * block));
    encode_block(x.data() + b * block, count, scale, floor, to, finite);
  }
  if (!finite) return unfit;
  std::uint8_t* at = to.tag;
  const auto move = [&](const std::uint8_t* from, const std::uint8_t* end) {
    std::memmove(at, from, static_cast<std::size_t>(end - from));
    at += end - from;
  };
  const std::uint8_t* const unary_end = to.unary.finish();
  move(marks, to.mark);
  move(lows, to.low);
  move(unaries, unary_end);
  move(exacts, to.exact);
  return at - start;
}

void error_bound_decode(ConstBytes wire, Floats out) {
  nb::gil_scoped_release released;
  Reader(wire, out.size()).decode(out.data());
}

// A byte of 1 for each element that was not zero; the symbols are not read.
void error_bound_support(ConstBytes wire, Bytes out) {
  nb::gil_scoped_release released;
  Reader reader(wire, out.size());
  const std::uint8_t* exact = reader.exact();
  reader.marks_of([&](std::int64_t b, const Marks& marks) {
    const int n = reader.size(b);
    std::uint8_t* to = out.data() + b * block;
    const bool floats = reader.mode(b) == raw;
    for (int i = 0; i < n; ++i) {
      if (floats) {
        float value;
        std::memcpy(&value, exact, 4);
        exact += 4;
        to[i] = value != 0;
      } else {
        to[i] = marks.word[i / 64] >> (i % 64) & 1;
      }
    }
  });
}

}  // namespace

LACONIC_KERNELS(m) {
  m.def("error_bound_encode", &error_bound_encode);
  m.def("error_bound_decode", &error_bound_decode);
  m.def("error_bound_support", &error_bound_support);
}

}  // namespace laconic::LACONIC_TARGET
