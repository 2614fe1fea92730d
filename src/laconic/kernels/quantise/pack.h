// Codes [sign 1 | level bits - 1] as bytes and back, a block at a time: in `bits` bits each, or ternary ones five to a
// byte.
#pragma once

#include "laconic/kernels/bitpack/ternary.h"
#include "laconic/kernels/philox/dither.h"

namespace laconic::LACONIC_TARGET {

// A block of codes is a whole number of bytes, so every block starts at one. Code is the least of uint8 and uint16 that
// holds a code: eight or four of them lie in a word of 64 bits.
template <class Code>
struct Packing {
  static constexpr int block = Dither::block, lanes = 8 / sizeof(Code), width = 8 * sizeof(Code);
  static constexpr std::uint64_t ones = ~std::uint64_t{0} / ((std::uint64_t{1} << width) - 1);  // 1 in every lane

  int bits;
  std::uint64_t mask;  // the low bits of every lane

  explicit Packing(int bits) : bits(bits), mask(ones * low()) {}

  std::int64_t nbytes(std::int64_t n) const { return (n * bits + 7) / 8; }

  // Bytes that may be written or read beyond a block.
  static constexpr std::int64_t slack = 8;

  // Writes the bytes of `count` codes; `codes` has a whole block, of which the rest is zero. `end`: of the wire.
  void pack(const Code* codes, std::int64_t count, std::uint8_t* to, const std::uint8_t* end) const {
    if (count == block && end - to >= nbytes(block) + slack) return pack_block(codes, to);
    std::uint8_t bytes[block * sizeof(Code) + slack];
    pack_block(codes, bytes);
    std::memcpy(to, bytes, static_cast<std::size_t>(nbytes(count)));
  }

  // Reads the bytes of `count` codes into a whole block, of which the rest becomes anything.
  void unpack(const std::uint8_t* from, std::int64_t count, const std::uint8_t* end, Code* codes) const {
    if (count == block && end - from >= nbytes(block) + slack) return unpack_block(from, codes);
    std::uint8_t bytes[block * sizeof(Code) + slack] = {};
    std::memcpy(bytes, from, static_cast<std::size_t>(nbytes(count)));
    unpack_block(bytes, codes);
  }

 private:
#if defined(__AVX512BW__)
  // 64 codes of 4 or 2 bits: neighbours are joined by products with powers of 2.
  static void pack_nibbles(const std::uint8_t* codes, std::uint8_t* bytes) {
    for (int i = 0; i < block; i += 64) {
      const __m512i pairs = _mm512_maddubs_epi16(_mm512_loadu_si512(codes + i), _mm512_set1_epi16(16 << 8 | 1));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes + i / 2), _mm512_cvtepi16_epi8(pairs));
    }
  }
  static void pack_pairs(const std::uint8_t* codes, std::uint8_t* bytes) {
    for (int i = 0; i < block; i += 64) {
      const __m512i pairs = _mm512_maddubs_epi16(_mm512_loadu_si512(codes + i), _mm512_set1_epi16(4 << 8 | 1));
      const __m512i fours = _mm512_madd_epi16(pairs, _mm512_set1_epi32(16 << 16 | 1));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + i / 4), _mm512_cvtepi32_epi8(fours));
    }
  }
#endif

  // Members are copied first: bytes that are written could be theirs, as far as a compiler knows.
  void pack_block(const Code* codes, std::uint8_t* bytes) const {
#if defined(__AVX512BW__)
    if constexpr (sizeof(Code) == 1) {
      if (bits == 4) return pack_nibbles(codes, bytes);
      if (bits == 2) return pack_pairs(codes, bytes);
    }
#endif
    const Packing by = *this;
    for (int at = 0, group = 0; at < block; at += 8, group += by.bits) {
      std::uint64_t words[sizeof(Code)];
      std::memcpy(words, codes + at, sizeof words);
      for (std::uint64_t& word : words) word = by.packed(word);
      std::memcpy(bytes + group, words, 8);
      if constexpr (sizeof(Code) == 2) {  // the second half starts bits / 2 bytes further, or in the middle of a byte
        const int used = lanes * by.bits;
        if (used % 8) words[1] = words[1] << 4 | bytes[group + used / 8];
        std::memcpy(bytes + group + used / 8, words + 1, 8);
      }
    }
  }

  void unpack_block(const std::uint8_t* bytes, Code* codes) const {
    const Packing by = *this;
    for (int at = 0, group = 0; at < block; at += 8, group += by.bits) {
      std::uint64_t words[sizeof(Code)];
      std::memcpy(words, bytes + group, 8);
      if constexpr (sizeof(Code) == 2) {
        const int used = lanes * by.bits;
        std::memcpy(words + 1, bytes + group + used / 8, 8);
        words[1] >>= used % 8;
      }
      for (std::uint64_t& word : words) word = by.unpacked(word);
      std::memcpy(codes + at, words, sizeof words);
    }
  }

#if defined(__BMI2__)
  std::uint64_t packed(std::uint64_t word) const { return _pext_u64(word, mask); }
  std::uint64_t unpacked(std::uint64_t word) const { return _pdep_u64(word, mask); }
#else
  std::uint64_t packed(std::uint64_t word) const {
    std::uint64_t out = 0;
    for (int lane = 0; lane < lanes; ++lane) out |= (word >> lane * width & low()) << lane * bits;
    return out;
  }
  std::uint64_t unpacked(std::uint64_t word) const {
    std::uint64_t out = 0;
    for (int lane = 0; lane < lanes; ++lane) out |= (word >> lane * bits & low()) << lane * width;
    return out;
  }
#endif
  std::uint64_t low() const { return (std::uint64_t{1} << bits) - 1; }
};

template <class Code>
class BitWriter {
 public:
  BitWriter(std::uint8_t* to, const std::uint8_t* wire_end, int bits) : to(to), wire_end(wire_end), packing(bits) {}

  void put(const Code* codes, std::int64_t count) {
    packing.pack(codes, count, to, wire_end);
    to += packing.nbytes(count);
  }
  std::uint8_t* end() { return to; }

 private:
  std::uint8_t* to;
  const std::uint8_t* wire_end;
  Packing<Code> packing;
};

template <class Code>
class BitReader {
 public:
  BitReader(const std::uint8_t* from, const std::uint8_t* wire_end, int bits)
      : from(from), wire_end(wire_end), packing(bits) {}

  const Code* get(std::int64_t count) {
    packing.unpack(from, count, wire_end, codes);
    from += packing.nbytes(count);
    return codes;
  }

 private:
  const std::uint8_t* from;
  const std::uint8_t* wire_end;
  Packing<Code> packing;
  Code codes[Dither::block];
};

// The level of a ternary code [sign 1 | level 1], and back.
inline std::int32_t ternary_level(std::uint32_t code) {
  return (code & 1) ? 1 - static_cast<std::int32_t>(code & 2) : 0;
}
inline std::uint32_t ternary_code(std::int32_t level) { return static_cast<std::uint32_t>(level) & 3; }  // 1 or [1 | 1]

// Five blocks are a whole number of bytes: levels wait until so many are there.
template <class Code>
class Base3Writer {
 public:
  explicit Base3Writer(std::uint8_t* to) : to(to) {}

  void put(const Code* codes, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) levels[waiting + i] = ternary_level(codes[i]);
    waiting += count;
    if (waiting == room) flush();
  }
  std::uint8_t* end() {
    flush();
    return to;
  }

 private:
  static constexpr std::int64_t room = Ternary::group * Dither::block;

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
    at += Dither::block;
    return codes;
  }

 private:
  static constexpr std::int64_t room = Ternary::group * Dither::block;

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
  Code codes[Dither::block];
};

}  // namespace laconic::LACONIC_TARGET
