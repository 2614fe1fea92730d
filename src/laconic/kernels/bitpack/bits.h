// The one bit packer. Code i of b bits lies in bits [i b, (i + 1) b) of a run; bit j is bit j % 8 of byte j / 8.
//
//     packer<Code>(bits), unpacker<Code>(bits)    codes of one width, which lie in memory as Code
//     PackedWriter, PackedReader                  the same, a chunk of codes at a time
//     BitWriter, BitReader                        codes of any widths, one at a time
//
// Eight codes of B bits are exactly B bytes, so a loop over groups of eight has constant shifts. See README.md.
#pragma once

#include "laconic/kernels/native/frame.h"

#include <array>
#include <utility>

namespace laconic::LACONIC_TARGET {

constexpr std::int64_t packed_nbytes(std::int64_t n, std::int64_t bits) { return (n * bits + 7) / 8; }

inline std::uint64_t load64(const void* from) {
  std::uint64_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

// Eight bytes from byte `at`, with zeros where the `nbytes` bytes have ended.
inline std::uint64_t load64(const std::uint8_t* from, std::int64_t nbytes, std::int64_t at) {
  if (at + 8 <= nbytes) return load64(from + at);
  std::uint64_t word = 0;
  if (at < nbytes) std::memcpy(&word, from + at, static_cast<std::size_t>(nbytes - at));
  return word;
}

template <int B>
constexpr std::uint64_t mask = (std::uint64_t{1} << B) - 1;

// The low B bits of each Code in a word, for pext and pdep.
template <int B, class Code>
constexpr std::uint64_t lanes = ~std::uint64_t{0} / mask<8 * sizeof(Code)> * mask<B>;

// Writes the B bytes of eight codes, and up to seven more: `to` has room for B + 7.
template <int B, class Code>
void pack8(const Code* codes, std::uint8_t* to) {
#if defined(__BMI2__)
  if constexpr (sizeof(Code) == 1) {
    const std::uint64_t word = _pext_u64(load64(codes), lanes<B, Code>);
    std::memcpy(to, &word, sizeof word);
    return;
  }
  if constexpr (sizeof(Code) == 2 && B > 8) {  // the second half starts at a byte, or in the middle of one
    constexpr int bytes = 4 * B / 8, rest = 4 * B % 8;
    const std::uint64_t first = _pext_u64(load64(codes), lanes<B, Code>);
    std::uint64_t second = _pext_u64(load64(codes + 4), lanes<B, Code>);
    if constexpr (rest != 0) second = second << rest | first >> 8 * bytes;
    std::memcpy(to, &first, sizeof first);
    std::memcpy(to + bytes, &second, sizeof second);
    return;
  }
#endif
#if defined(__AVX2__) && defined(__BMI2__)
  if constexpr (sizeof(Code) == 4 && B <= 8) {
    const __m256i eight = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    const __m256i low = _mm256_shuffle_epi8(  // the low byte of each lane, to the front of each half
        eight, _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
    const __m128i bytes = _mm_unpacklo_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    const std::uint64_t eight_bytes = static_cast<std::uint64_t>(_mm_cvtsi128_si64(bytes));
    return pack8<B>(reinterpret_cast<const std::uint8_t*>(&eight_bytes), to);
  }
#endif
  std::uint64_t word = 0;
  int fill = 0;  // bits in `word`; constant once unrolled
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    word |= (static_cast<std::uint32_t>(codes[i]) & mask<B>) << fill;
    fill += B;
    if (fill >= 32) {
      const auto half = static_cast<std::uint32_t>(word);
      std::memcpy(to, &half, sizeof half);
      to += sizeof half;
      word >>= 32;
      fill -= 32;
    }
  }
  const auto half = static_cast<std::uint32_t>(word);
  std::memcpy(to, &half, sizeof half);
}

// Reads the B bytes of eight codes, and up to seven more.
template <int B, class Code>
void unpack8(const std::uint8_t* from, Code* codes) {
#if defined(__BMI2__)
  if constexpr (sizeof(Code) == 1) {
    const std::uint64_t word = _pdep_u64(load64(from), lanes<B, Code>);
    std::memcpy(codes, &word, sizeof word);
    return;
  }
  if constexpr (sizeof(Code) == 2 && B > 8) {
    const std::uint64_t first = _pdep_u64(load64(from), lanes<B, Code>);
    const std::uint64_t second = _pdep_u64(load64(from + 4 * B / 8) >> 4 * B % 8, lanes<B, Code>);
    std::memcpy(codes, &first, sizeof first);
    std::memcpy(codes + 4, &second, sizeof second);
    return;
  }
#endif
#if defined(__AVX2__) && defined(__BMI2__)
  if constexpr (sizeof(Code) == 4 && B <= 8) {
    const __m128i bytes = _mm_cvtsi64_si128(static_cast<long long>(_pdep_u64(load64(from), lanes<B, std::uint8_t>)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm256_cvtepu8_epi32(bytes));
    return;
  }
#endif
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) codes[i] = static_cast<Code>(load64(from + i * B / 8) >> (i * B % 8) & mask<B>);
}

#if defined(__AVX512BW__)
// Codes of 4 or 2 bits, 64 at a time: neighbours are joined by products with powers of 2. Writes 8 B bytes.
template <int B>
void pack64(const std::uint8_t* codes, std::uint8_t* to) {
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_loadu_si512(codes), _mm512_set1_epi16(1 << (8 + B) | 1));
  if constexpr (B == 4) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi16_epi8(pairs));
  } else {
    const __m512i fours = _mm512_madd_epi16(pairs, _mm512_set1_epi32(16 << 16 | 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(fours));
  }
}
#endif

template <int B, class Code>
void pack(const Code* codes, std::int64_t n, std::uint8_t* wire, std::int64_t nbytes) {
  std::int64_t i = 0, at = 0;
#if defined(__AVX512BW__)
  if constexpr (sizeof(Code) == 1 && (B == 2 || B == 4))
    for (; i + 64 <= n; i += 64, at += 8 * B) pack64<B>(codes + i, wire + at);
#endif
  for (; i + 8 <= n && at + B + 7 <= nbytes; i += 8, at += B) pack8<B>(codes + i, wire + at);
  for (; i < n; i += 8, at += B) {  // too near the end to write past the group
    Code some[8] = {};
    std::uint8_t bytes[B + 7] = {};
    std::copy_n(codes + i, std::min<std::int64_t>(8, n - i), some);
    pack8<B>(some, bytes);
    std::copy_n(bytes, std::min<std::int64_t>(B, nbytes - at), wire + at);
  }
}

template <int B, class Code>
void unpack(const std::uint8_t* wire, std::int64_t nbytes, Code* codes, std::int64_t n) {
  std::int64_t i = 0, at = 0;
  for (; i + 8 <= n && at + B + 7 <= nbytes; i += 8, at += B) unpack8<B>(wire + at, codes + i);
  for (; i < n; i += 8, at += B) {
    Code some[8];
    std::uint8_t bytes[B + 7] = {};
    std::copy_n(wire + at, std::min<std::int64_t>(B, nbytes - at), bytes);
    unpack8<B>(bytes, some);
    std::copy_n(some, std::min<std::int64_t>(8, n - i), codes + i);
  }
}

template <class Code, int... B>
constexpr auto packers(std::integer_sequence<int, B...>) {
  return std::array{&pack<B + 1, Code>...};
}

template <class Code, int... B>
constexpr auto unpackers(std::integer_sequence<int, B...>) {
  return std::array{&unpack<B + 1, Code>...};
}

template <class Code>
using Widths = std::make_integer_sequence<int, 8 * sizeof(Code)>;

// Codes (n,) of this many bits to `nbytes` bytes, at least packed_nbytes(n, bits); what follows may be overwritten.
template <class Code>
auto packer(int bits) {
  static constexpr auto table = packers<Code>(Widths<Code>{});
  return table[static_cast<std::size_t>(bits - 1)];
}

// And back: `nbytes` may be more than the n codes fill.
template <class Code>
auto unpacker(int bits) {
  static constexpr auto table = unpackers<Code>(Widths<Code>{});
  return table[static_cast<std::size_t>(bits - 1)];
}

// Packs a run chunk by chunk; each but the last has a multiple of 8 codes. `end`: of what may be overwritten.
template <class Code>
class PackedWriter {
 public:
  PackedWriter(std::uint8_t* to, const std::uint8_t* end, int bits)
      : to_(to), end_(end), bits_(bits), pack_(packer<Code>(bits)) {}

  void put(const Code* codes, std::int64_t count) {
    pack_(codes, count, to_, end_ - to_);
    to_ += packed_nbytes(count, bits_);
  }
  void finish() {}

 private:
  std::uint8_t* to_;
  const std::uint8_t* end_;
  int bits_;
  decltype(packer<Code>(1)) pack_;
};

// And back, in chunks of at most `chunk` codes. `end`: of what may be read.
template <class Code, std::int64_t chunk>
class PackedReader {
 public:
  PackedReader(const std::uint8_t* from, const std::uint8_t* end, int bits)
      : from_(from), end_(end), bits_(bits), unpack_(unpacker<Code>(bits)) {}

  const Code* get(std::int64_t count) {
    unpack_(from_, end_ - from_, codes_, count);
    from_ += packed_nbytes(count, bits_);
    return codes_;
  }

 private:
  const std::uint8_t* from_;
  const std::uint8_t* end_;
  int bits_;
  decltype(unpacker<Code>(1)) unpack_;
  Code codes_[chunk];
};

// Writes no byte that holds no bit of a code.
class BitWriter {
 public:
  explicit BitWriter(std::uint8_t* to) : to_(to) {}

  void put(std::uint32_t code, int width) {
    held_ |= static_cast<std::uint64_t>(code) << fill_;
    fill_ += width;
    if (fill_ >= 32) {
      const auto half = static_cast<std::uint32_t>(held_);
      std::memcpy(to_, &half, 4);
      to_ += 4;
      held_ >>= 32;
      fill_ -= 32;
    }
  }

  // Ends on a whole byte; returns one past it.
  std::uint8_t* finish() {
    for (; fill_ > 0; fill_ -= 8, held_ >>= 8) *to_++ = static_cast<std::uint8_t>(held_);
    held_ = 0;
    fill_ = 0;
    return to_;
  }

 private:
  std::uint8_t* to_;
  std::uint64_t held_ = 0;  // bits that have not left yet, `fill_` of them
  int fill_ = 0;
};

// Reads zeros where the bytes have ended.
class BitReader {
 public:
  BitReader(const std::uint8_t* from, std::int64_t nbytes) : from_(from), nbytes_(nbytes) {}

  std::uint32_t take(int width) {
    const std::uint64_t word = load64(from_, nbytes_, bit_ >> 3) >> (bit_ & 7);
    bit_ += width;
    return static_cast<std::uint32_t>(word & ((std::uint64_t{1} << width) - 1));
  }

  void skip(std::int64_t bits) { bit_ += bits; }

  // True if the last byte is the one that holds the last bit taken, and what follows in it is zero.
  bool ended() const {
    if (nbytes_ != (bit_ + 7) >> 3) return false;
    return !(bit_ & 7) || !(from_[nbytes_ - 1] >> (bit_ & 7));
  }

 private:
  const std::uint8_t* from_;
  std::int64_t nbytes_;
  std::int64_t bit_ = 0;
};

}  // namespace laconic::LACONIC_TARGET
