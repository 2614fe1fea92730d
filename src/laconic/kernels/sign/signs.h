// Sign bits of floats, eight in a byte: bit j of byte i is set where float 8 i + j is negative (-0.0 is).
#pragma once

#include "laconic/kernels/native/frame.h"

namespace laconic::LACONIC_TARGET {

constexpr std::uint32_t sign_bit = 0x80000000u;

inline std::int64_t sign_bytes(std::int64_t n) { return (n + 7) / 8; }

// Writes ceil(n / 8) bytes; the bits after the last are zero.
inline void pack_signs(const float* x, std::int64_t n, std::uint8_t* wire) {
  std::int64_t i = 0;
#if defined(__AVX512F__)
  const auto mask = [](const float* from) -> std::uint64_t {
    return _mm512_movepi32_mask(_mm512_castps_si512(_mm512_loadu_ps(from)));
  };
  for (; i + 64 <= n; i += 64) {
    const std::uint64_t word = mask(x + i) | mask(x + i + 16) << 16 | mask(x + i + 32) << 32 | mask(x + i + 48) << 48;
    std::memcpy(wire + i / 8, &word, sizeof word);
  }
#elif defined(__AVX2__)
  for (; i + 8 <= n; i += 8) wire[i / 8] = static_cast<std::uint8_t>(_mm256_movemask_ps(_mm256_loadu_ps(x + i)));
#endif
  for (; i < n; i += 8) {
    const int count = static_cast<int>(std::min<std::int64_t>(8, n - i));
    std::uint32_t byte = 0;
    for (int j = 0; j < count; ++j) byte |= std::bit_cast<std::uint32_t>(x[i + j]) >> 31 << j;
    wire[i / 8] = static_cast<std::uint8_t>(byte);
  }
}

// The sign bit of element i, where a float has it.
inline std::uint32_t sign_of(const std::uint8_t* signs, std::int64_t i) {
  return static_cast<std::uint32_t>(signs[i / 8]) << (31 - i % 8) & sign_bit;
}

// Refuses a wire in which bits after the last sign are set.
inline void check_signs(const std::uint8_t* signs, std::int64_t n) {
  if (n % 8 && signs[n / 8] >> (n % 8))
    throw WireError("the %lld bits after the last of %lld signs must be zero", 8 - n % 8, n);
}

#if defined(__AVX2__)
// The sign bit in each lane j whose bit j is set.
inline __m256i sign_lanes(std::uint8_t byte) {
  const __m256i places = _mm256_setr_epi32(1 << 31, 1 << 30, 1 << 29, 1 << 28, 1 << 27, 1 << 26, 1 << 25, 1 << 24);
  return _mm256_and_si256(_mm256_mullo_epi32(_mm256_set1_epi32(byte), places), _mm256_set1_epi32(1 << 31));
}
#endif

// out[i] += value or, where bit i is set, -= value, for i in [begin, end).
inline void add_signed(const std::uint8_t* signs, std::int64_t begin, std::int64_t end, float value, float* out) {
  const auto plus = std::bit_cast<std::uint32_t>(value);
  std::int64_t i = begin;
  for (; i < end && i % 8; ++i) out[i] += std::bit_cast<float>(plus ^ sign_of(signs, i));
#if defined(__AVX512F__)
  const __m512 values = _mm512_set1_ps(value);
  for (; i + 16 <= end; i += 16) {
    std::uint16_t bits;
    std::memcpy(&bits, signs + i / 8, sizeof bits);
    const __m512 old = _mm512_loadu_ps(out + i);
    _mm512_storeu_ps(out + i, _mm512_mask_sub_ps(_mm512_add_ps(old, values), bits, old, values));
  }
#elif defined(__AVX2__)
  const __m256 values = _mm256_set1_ps(value);
  for (; i + 8 <= end; i += 8) {
    const __m256 flipped = _mm256_xor_ps(values, _mm256_castsi256_ps(sign_lanes(signs[i / 8])));
    _mm256_storeu_ps(out + i, _mm256_add_ps(_mm256_loadu_ps(out + i), flipped));
  }
#else
  for (; i + 8 <= end; i += 8) {
    const std::uint32_t byte = signs[i / 8];
    for (int j = 0; j < 8; ++j) out[i + j] += std::bit_cast<float>(plus ^ (byte << (31 - j) & sign_bit));
  }
#endif
  for (; i < end; ++i) out[i] += std::bit_cast<float>(plus ^ sign_of(signs, i));
}

}  // namespace laconic::LACONIC_TARGET
