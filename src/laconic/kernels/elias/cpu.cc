// Elias omega codes of integers from 1. See README.md.
#include "laconic/kernels/bitpack/bits.h"

namespace laconic::LACONIC_TARGET {
namespace {

struct Code {
  std::uint64_t bits = 0;  // the first bit of the code is the highest of `length`
  int length = 1;
};

constexpr Code code_of(std::uint32_t value) {
  Code code;  // the zero at the end
  while (value > 1) {
    code.bits |= std::uint64_t{value} << code.length;
    const int width = std::bit_width(value);
    code.length += width;
    value = static_cast<std::uint32_t>(width - 1);
  }
  return code;
}

// Codes of small values; longer ones are made when needed.
constexpr auto small = [] {
  std::array<Code, 256> codes{};
  for (std::uint32_t value = 1; value < codes.size(); ++value) codes[value] = code_of(value);
  return codes;
}();

// Bits of the code of a value, by its bit length.
constexpr auto length_of_width = [] {
  std::array<std::uint8_t, 33> lengths{};
  for (int width = 1; width < 32; ++width)
    lengths[width] = static_cast<std::uint8_t>(code_of(std::uint32_t{1} << (width - 1)).length);
  return lengths;
}();

struct Found {
  std::uint32_t value = 0;
  int length = 0;  // 0: no such code
};

// The code at the top of a word that holds at least 57 bits; the longest code has 42.
constexpr Found parse(std::uint64_t word) {
  std::uint32_t value = 1;
  int used = 0;
  while (word >> 63) {
    if (value > 30) return {};  // the group has 32 bits or more, the value no 31
    const int width = static_cast<int>(value) + 1;
    value = static_cast<std::uint32_t>(word >> (64 - width));
    word <<= width;
    used += width;
  }
  return {value, used + 1};
}

constexpr int peeked = 11;  // bits that the table of short codes looks at
struct Short {
  std::uint16_t value;
  std::uint8_t length;  // 0: the code is longer
};
constexpr auto shorts = [] {
  std::array<Short, std::size_t{1} << peeked> table{};
  for (std::uint64_t top = 0; top < table.size(); ++top) {
    const Found found = parse(top << (64 - peeked));
    if (found.length && found.length <= peeked)
      table[top] = {static_cast<std::uint16_t>(found.value), static_cast<std::uint8_t>(found.length)};
  }
  return table;
}();

std::uint64_t swapped(std::uint64_t word) { return __builtin_bswap64(word); }

// Bits of the codes of all values; -1 if one is below 1.
std::int64_t elias_bits(ConstInts values) {
  nb::gil_scoped_release released;
  std::int64_t sum = 0;
  std::int32_t least = 1;
  for (std::int64_t i = 0; i < values.size(); ++i) {
    const std::int32_t value = values.data()[i];
    least = std::min(least, value);
    sum += length_of_width[std::bit_width(static_cast<std::uint32_t>(value))];
  }
  return least < 1 ? -1 : sum;
}

// `wire` has 8 bytes more than the codes fill.
void elias_encode(ConstInts values, Bytes wire) {
  nb::gil_scoped_release released;
  std::uint8_t* to = wire.data();
  std::uint64_t held = 0;  // its low `fill` bits have not left yet
  int fill = 0;
  for (std::int64_t i = 0; i < values.size(); ++i) {
    const auto value = static_cast<std::uint32_t>(values.data()[i]);
    const Code code = value < small.size() ? small[value] : code_of(value);
    held = held << code.length | code.bits;
    fill += code.length;
    const std::uint64_t word = swapped(held << (64 - fill));
    std::memcpy(to, &word, sizeof word);
    to += fill >> 3;
    fill &= 7;
  }
}

void elias_decode(ConstBytes bytes, Ints values) {
  nb::gil_scoped_release released;
  const std::uint8_t* wire = bytes.data();
  const std::int64_t nbytes = bytes.size();
  std::int64_t bit = 0;
  for (std::int64_t i = 0; i < values.size(); ++i) {
    const std::uint64_t word = swapped(load64(wire, nbytes, bit >> 3)) << (bit & 7);
    const Short known = shorts[word >> (64 - peeked)];
    if (known.length) {
      values.data()[i] = known.value;
      bit += known.length;
      continue;
    }
    const Found found = parse(word);
    if (!found.length) throw WireError("a code is of 2^31 or more");
    values.data()[i] = static_cast<std::int32_t>(found.value);
    bit += found.length;
  }
  if (bit > 8 * nbytes) throw WireError("the wire ends before the last code");
  if (nbytes != (bit + 7) >> 3 || ((bit & 7) && wire[nbytes - 1] & (255 >> (bit & 7))))
    throw WireError("the wire goes on after the last code");
}

}  // namespace

LACONIC_KERNELS(m) {
  m.def("elias_bits", &elias_bits);
  m.def("elias_encode", &elias_encode);
  m.def("elias_decode", &elias_decode);
}

}  // namespace laconic::LACONIC_TARGET
