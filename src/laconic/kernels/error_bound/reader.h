// Reads an untrusted wire of error-bounded floats. See README.md.
#pragma once

#include "laconic/kernels/error_bound/marks.h"

namespace laconic::LACONIC_TARGET {

// Where the sections of a wire begin, after its headers and marks were checked.
class Reader {
 public:
  Reader(ConstBytes wire, std::int64_t n) : n_(n), blocks_(blocks_of(n)) {
    const std::uint8_t* const end = wire.data() + wire.size();
    if (wire.size() < head + blocks_) throw WireError("the wire ends inside the headers");
    std::memcpy(&bound_, wire.data(), 4);
    floor_ = wire.data()[4];
    header_ = wire.data() + head;
    tag_ = header_ + blocks_;
    std::int64_t tagged_blocks = 0, exact = 0;
    for (std::int64_t b = 0; b < blocks_; ++b) {
      const std::uint8_t mode = header_[b] >> 5;
      if (mode > raw || ((mode == zero || mode == raw) && (header_[b] & 31)))
        throw WireError("a header says what no block is");
      tagged_blocks += mode == tagged;
      exact += mode == raw ? 4 * size(b) : 0;
    }
    if (end - tag_ < tag_bytes * tagged_blocks) throw WireError("the wire ends inside the tags");
    mark_ = tag_ + tag_bytes * tagged_blocks;
    const std::uint8_t *tag = tag_, *mark = mark_;
    std::int64_t low = 0;
    for (std::int64_t b = 0; b < blocks_; ++b) {
      Marks marks;
      read_marks(b, tag, mark, end, marks);
      low += low_nbytes(header_[b] & 15, marks.count());
    }
    low_ = mark;
    if (end - low_ < low + exact) throw WireError("the wire ends before its last section");
    unary_ = low_ + low;
    exact_ = end - exact;
    unary_nbytes_ = exact_ - unary_;
  }

  // Calls each(b, marks) for every block in order.
  template <class Each>
  void marks_of(Each each) {
    const std::uint8_t *tag = tag_, *mark = mark_;
    for (std::int64_t b = 0; b < blocks_; ++b) {
      Marks marks;
      read_marks(b, tag, mark, nullptr, marks);
      each(b, marks);
    }
  }

  int size(std::int64_t b) const { return static_cast<int>(std::min<std::int64_t>(block, n_ - b * block)); }
  std::uint8_t mode(std::int64_t b) const { return header_[b] >> 5; }
  const std::uint8_t* exact() const { return exact_; }

  void decode(float* out) {
    const float step = bound_ * 1.9921875f;
    const std::uint8_t *low = low_, *exact = exact_;
    marks_of([&](std::int64_t b, const Marks& marks) {
      const int n = size(b);
      float* to = out + b * block;
      if (mode(b) == zero) {
        std::fill_n(to, n, 0.0f);
      } else if (mode(b) == raw) {
        std::memcpy(to, exact, 4 * static_cast<std::size_t>(n));
        exact += 4 * n;
        for (int i = 0; i < n; ++i)
          if ((std::bit_cast<std::uint32_t>(to[i]) & 0x7FFFFFFF) >= infinity)
            throw WireError("a raw float is not finite");
      } else {
        coded(b, marks, low, step, n, to);
      }
    });
    if (word_ || ahead_ < unary_nbytes_ || (unary_nbytes_ && !unary_[unary_nbytes_ - 1]))
      throw WireError("the unary section goes on after the last symbol");
  }

 private:
  void read_marks(std::int64_t b, const std::uint8_t*& tag, const std::uint8_t*& mark, const std::uint8_t* end,
                  Marks& marks) const {
    const std::uint8_t kind = mode(b);
    if (kind == plain) return marks.first(size(b));
    if (kind == marked) {
      if (end && end - mark < mark_bytes) throw WireError("the wire ends inside the marks");
      std::memcpy(marks.word, mark, mark_bytes);
      mark += mark_bytes;
    } else if (kind == tagged) {
      std::uint32_t mixed, full;
      std::memcpy(&mixed, tag, 4);
      std::memcpy(&full, tag + 4, 4);
      tag += tag_bytes;
      if (end && end - mark < std::popcount(mixed)) throw WireError("the wire ends inside the marks");
      bool wrong = mixed & full;
      std::uint8_t bytes[mark_bytes];
      for (int i = 0; i < mark_bytes; ++i) bytes[i] = full >> i & 1 ? 255 : 0;
      for (std::uint32_t left = mixed; left; left &= left - 1) {
        wrong |= *mark == 0 || *mark == 255;
        bytes[std::countr_zero(left)] = *mark++;
      }
      if (wrong) throw WireError("a byte of marks has the wrong tag");
      std::memcpy(marks.word, bytes, mark_bytes);
    }
    if (size(b) < block) {
      Marks inside;
      inside.first(size(b));
      for (int w = 0; w < words; ++w)
        if (marks.word[w] & ~inside.word[w]) throw WireError("a mark lies behind the last element");
    }
  }

  void coded(std::int64_t b, const Marks& marks, const std::uint8_t*& low, float step, int n, float* to) {
    const int count = marks.count(), k = header_[b] & 15, used = k * count & 7;
    const std::int64_t nbytes = low_nbytes(k, count);
    if (used && low[nbytes - 1] >> used) throw WireError("the bits after the low bits of a block must be zero");
    alignas(64) std::int32_t symbols[block + 16] = {};
    take_unary(symbols, count);
    const std::int32_t most = 65536 >> k;
    std::int32_t largest = 0;
    for (int i = 0; i < count; ++i) largest = std::max(largest, symbols[i]);
    if (largest >= most) throw WireError("a bin's number is too large");
    if (k == 0) {
      for (int i = 0; i < count; ++i) symbols[i] += 1;
    } else if (k <= 8) {
      std::uint8_t codes[block];
      unpacker<std::uint8_t>(k)(low, exact_ - low, codes, count);
      for (int i = 0; i < count; ++i) symbols[i] = (symbols[i] << k) + codes[i] + 1;
    } else {
      std::uint16_t codes[block];
      unpacker<std::uint16_t>(k)(low, exact_ - low, codes, count);
      for (int i = 0; i < count; ++i) symbols[i] = (symbols[i] << k) + codes[i] + 1;
    }
    low += nbytes;
    alignas(64) std::int32_t all[block];
    spread(symbols, marks, all);
    const std::int32_t below = header_[b] >> 4 & 1, whole = mode(b) == plain && floor_;
    const std::int32_t least = whole ? 0 : floor_;
    const auto half = floor_ ? 0 : std::bit_cast<std::int32_t>(bound_ * 0.5f);  // nonzero values retain their sign
    for (int i = 0; i < n; ++i) {  // with masks, so that it becomes vectors
      const std::int32_t symbol = all[i] - 1, sign = symbol & below;
      const std::int32_t q = ((symbol + sign * whole) >> below) + least;
      const auto centre = std::bit_cast<std::int32_t>(static_cast<float>(q) * step);
      const std::int32_t size = centre | (half & -static_cast<std::int32_t>(q == 0));
      const std::int32_t set = -static_cast<std::int32_t>(all[i] != 0);
      to[i] = std::bit_cast<float>((size | sign << 31) & set);
    }
  }

  // Zeros before each of the next `count` ones, at most 2^30 of them.
  void take_unary(std::int32_t* symbols, int count) {
    std::int64_t before = taken_;  // the bit after the last one
    for (int i = 0; i < count; ++i) {
      while (word_ == 0) {
        if (ahead_ >= unary_nbytes_) throw WireError("the unary section ends before the last symbol");
        base_ = 8 * ahead_;
        word_ = load64(unary_, unary_nbytes_, ahead_);
        ahead_ += 8;
      }
      const std::int64_t one = base_ + std::countr_zero(word_);
      word_ &= word_ - 1;
      symbols[i] = static_cast<std::int32_t>(std::min<std::int64_t>(one - before, 1 << 20));
      before = one + 1;
    }
    taken_ = before;
  }

  std::int64_t n_, blocks_;
  float bound_ = 0;
  std::int32_t floor_ = 0;
  const std::uint8_t *header_, *tag_, *mark_, *low_, *unary_, *exact_;
  std::int64_t unary_nbytes_ = 0, ahead_ = 0, base_ = 0, taken_ = 0;
  std::uint64_t word_ = 0;
};

}  // namespace laconic::LACONIC_TARGET
