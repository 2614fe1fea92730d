// 24 uniform bits an element for half a Philox word: 16 bits that nearly always decide, 8 that break ties.
// See README.md.
#pragma once

#include "laconic/kernels/philox/philox.h"

namespace laconic::LACONIC_TARGET {

struct Dither {
  static constexpr std::int64_t block = 128;  // elements whose upper bits are made together
  static constexpr std::uint64_t lower_key = 0xD1B54A32D192ED03u;

  Philox upper_bits, lower_bits;

  explicit Dither(std::uint64_t key) : upper_bits(key), lower_bits(key ^ lower_key) {}

  // U(i) >> 8 for the elements i of [128 number, 128 number + 128).
  void upper(std::uint64_t number, std::uint16_t* out) const {
    std::uint32_t words[block / 2];
    upper_bits.blocks16(16 * number, words);
    std::memcpy(out, words, sizeof words);  // the low half of a word first: little-endian, as every wire
  }

  // U(i) & 255: asked where U(i) >> 8 equals the upper bits of a threshold, once in 65,536.
  std::uint32_t lower(std::uint64_t i) const { return lower_bits.word(i / 4) >> 8 * (i % 4) & 255; }
};

}  // namespace laconic::LACONIC_TARGET
