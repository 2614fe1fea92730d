// 24 uniform bits an element for half a Philox word: 16 bits that nearly always decide, 8 that break ties.
// See README.md.
#pragma once

#include "laconic/kernels/philox/philox.h"

namespace laconic::LACONIC_TARGET {

struct Dither {
  static constexpr std::int64_t chunk = 256;  // elements whose upper bits are made together
  static constexpr std::uint64_t lower_key = 0xD1B54A32D192ED03u;

  Philox upper_bits, lower_bits;

  explicit Dither(std::uint64_t key) : upper_bits(key), lower_bits(key ^ lower_key) {}

  // U(i) >> 8 for the elements i of [chunk * number, chunk * (number + 1)).
  void upper(std::uint64_t number, std::uint16_t* out) const {
    alignas(64) std::uint32_t words[chunk / 2];
    upper_bits.blocks<chunk / 8>(chunk / 8 * number, words);
    std::memcpy(out, words, sizeof words);  // the low half of a word first: little-endian, as every wire
  }

  // 65535 - (U(i) >> 8) for the same elements: what makes a fraction of 16 bits carry where it is larger.
  void carry(std::uint64_t number, std::uint16_t* out) const {
    alignas(64) std::uint32_t words[chunk / 2];
    upper_bits.blocks<chunk / 8>(chunk / 8 * number, words);
    for (std::uint32_t& word : words) word = ~word;
    std::memcpy(out, words, sizeof words);
  }

  // U(i) & 255: asked where U(i) >> 8 equals the upper bits of a threshold, once in 65,536.
  std::uint32_t lower(std::uint64_t i) const { return lower_bits.word(i / 4) >> 8 * (i % 4) & 255; }
};

}  // namespace laconic::LACONIC_TARGET
