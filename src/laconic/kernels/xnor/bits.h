// Bits of floats: 1 where x >= 0 (so -0.0 is 1, and NaN is 0), along a row or across channels.
#pragma once

#include "laconic/kernels/native/frame.h"

namespace laconic::LACONIC_TARGET {

inline std::int64_t row_bytes(std::int64_t n) { return (n + 7) / 8; }

// Memory of one call, aligned for the widest register.
template <class T>
class Scratch {
 public:
  explicit Scratch(std::int64_t count)
      : begin_(static_cast<T*>(::operator new(static_cast<std::size_t>(count) * sizeof(T), alignment))) {}
  ~Scratch() { ::operator delete(begin_, alignment); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  T* data() const { return begin_; }

 private:
  static constexpr std::align_val_t alignment{64};
  T* begin_;
};

// Writes ceil(n / 8) bytes: bit j of byte i is that of x[8 i + j]; those after the last are 0.
inline void pack_row(const float* x, std::int64_t n, std::uint8_t* to) {
  std::int64_t i = 0;
#if defined(__AVX512F__)
  const __m512 zero = _mm512_setzero_ps();
  const auto mask = [&](const float* from) -> std::uint64_t {
    return _mm512_cmp_ps_mask(_mm512_loadu_ps(from), zero, _CMP_GE_OQ);
  };
  for (; i + 64 <= n; i += 64) {
    const std::uint64_t word = mask(x + i) | mask(x + i + 16) << 16 | mask(x + i + 32) << 32 | mask(x + i + 48) << 48;
    std::memcpy(to + i / 8, &word, sizeof word);
  }
#elif defined(__AVX2__)
  const __m256 zero = _mm256_setzero_ps();
  for (; i + 8 <= n; i += 8)
    to[i / 8] = static_cast<std::uint8_t>(_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(x + i), zero, _CMP_GE_OQ)));
#endif
  for (; i < n; i += 8) {
    const int count = static_cast<int>(std::min<std::int64_t>(8, n - i));
    std::uint32_t byte = 0;
    for (int j = 0; j < count; ++j) byte |= static_cast<std::uint32_t>(x[i + j] >= 0) << j;
    to[i / 8] = static_cast<std::uint8_t>(byte);
  }
}

// plane[p] = the bits of x[c][p] over c < count, the first the lowest: a word a pixel.
template <class Word>
void pack_plane(const float* x, std::int64_t count, std::int64_t pixels, Word* plane) {
  std::memset(plane, 0, static_cast<std::size_t>(pixels) * sizeof(Word));
  for (std::int64_t c = 0; c < count; ++c, x += pixels)
    for (std::int64_t p = 0; p < pixels; ++p)
      plane[p] = static_cast<Word>(plane[p] | static_cast<Word>(x[p] >= 0) << c);
}

// The words of `bits` bits, from ceil(bits / 8) bytes; what follows the last bit is taken as 0. Little-endian.
template <class Word>
void read_words(const std::uint8_t* bytes, std::int64_t bits, Word* words) {
  const std::int64_t nbytes = row_bytes(bits), count = (nbytes + std::int64_t{sizeof(Word)} - 1) / std::int64_t{sizeof(Word)};
  if (!count) return;
  words[count - 1] = 0;
  auto* to = reinterpret_cast<std::uint8_t*>(words);
  std::memcpy(to, bytes, static_cast<std::size_t>(nbytes));
  if (bits % 8) to[nbytes - 1] &= static_cast<std::uint8_t>((1 << bits % 8) - 1);
}

template <class Word>
std::int64_t words_of(std::int64_t bits) {
  constexpr std::int64_t size = 8 * sizeof(Word);
  return (bits + size - 1) / size;
}

}  // namespace laconic::LACONIC_TARGET
