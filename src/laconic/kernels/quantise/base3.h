// Codes [sign 1 | level 1] in base 3, five to a byte, a chunk at a time, like PackedWriter and PackedReader.
#pragma once

#include "laconic/kernels/bitpack/ternary.h"
#include "laconic/kernels/philox/dither.h"

namespace laconic::LACONIC_TARGET {

// The level of a ternary code [sign 1 | level 1], and back.
inline std::int32_t ternary_level(std::uint32_t code) {
  return (code & 1) ? 1 - static_cast<std::int32_t>(code & 2) : 0;
}
inline std::uint32_t ternary_code(std::int32_t level) { return static_cast<std::uint32_t>(level) & 3; }  // 1 or [1 | 1]

// Five chunks are a whole number of bytes: levels wait until so many are there.
template <class Code>
class Base3Writer {
 public:
  explicit Base3Writer(std::uint8_t* to) : to(to) {}

  void put(const Code* codes, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) levels[waiting + i] = ternary_level(codes[i]);
    waiting += count;
    if (waiting == room) flush();
  }
  void finish() { flush(); }

 private:
  static constexpr std::int64_t room = Ternary::group * Dither::chunk;

  void flush() {
    Ternary::pack(levels, waiting, to);
    to += Ternary::nbytes(waiting);
    waiting = 0;
  }

  std::uint8_t* to;
  std::int32_t levels[room];
  std::int64_t waiting = 0;
};

template <class Code>
class Base3Reader {
 public:
  Base3Reader(const std::uint8_t* from, std::int64_t n) : from(from), left(n) {}

  const Code* get(std::int64_t count) {
    if (at == room) fill();
    for (std::int64_t i = 0; i < count; ++i) codes[i] = static_cast<Code>(ternary_code(levels[at + i]));
    at += Dither::chunk;
    return codes;
  }

 private:
  static constexpr std::int64_t room = Ternary::group * Dither::chunk;

  void fill() {
    const std::int64_t count = std::min(room, left);
    Ternary::unpack(from, count, levels);
    from += Ternary::nbytes(count);
    left -= count;
    at = 0;
  }

  const std::uint8_t* from;
  std::int64_t left, at = room;
  std::int32_t levels[room];
  Code codes[Dither::chunk];
};

}  // namespace laconic::LACONIC_TARGET
