// Codes of any width up to 32 bits in a run of bits, lowest bit of a byte first: as `bitpack` packs them.
#pragma once

#include "laconic/kernels/native/frame.h"

namespace laconic::LACONIC_TARGET {

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
    const std::int64_t at = bit_ >> 3;
    std::uint64_t word = 0;
    if (at + 8 <= nbytes_) {
      std::memcpy(&word, from_ + at, 8);
    } else if (at < nbytes_) {
      std::memcpy(&word, from_ + at, static_cast<std::size_t>(nbytes_ - at));
    }
    const std::uint64_t code = word >> (bit_ & 7) & ((std::uint64_t{1} << width) - 1);
    bit_ += width;
    return static_cast<std::uint32_t>(code);
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
