// Natural compression: the exponent, rounded by the mantissa's own bits. See README.md.
#include "laconic/kernels/native/frame.h"
#include "laconic/kernels/philox/dither.h"
#include "laconic/kernels/sign/signs.h"

namespace laconic::LACONIC_TARGET {
namespace {

// [sign 1 | exponent 8 | mantissa 23]
constexpr std::uint32_t mantissa = 0x7FFFFFu, largest = 254, lowest = 18, most_code = 127;

constexpr std::uint32_t raised(std::uint32_t bits, bool up) { return std::min((bits >> 23 & 255) + up, largest); }

// A byte of the wire: the exponent or, of 8 bits, the sign and the exponent minus the lowest one.
template <int bits>
constexpr std::uint8_t code_of(std::uint32_t exponent, std::uint32_t x) {
  if constexpr (bits == 9) return static_cast<std::uint8_t>(exponent);
  const std::uint32_t code = std::min(exponent > lowest ? exponent - lowest : 0, most_code);
  return static_cast<std::uint8_t>(code | x >> 31 << 7);
}

constexpr int chunk = Dither::chunk;  // elements that are rounded together

struct Seen {
  std::uint32_t largest;  // exponent: 255 is NaN or Inf
  bool tie;               // somewhere 16 bits do not decide
};

// Codes of a chunk, those of ties not settled yet.
template <int bits>
Seen round_chunk(const float* from, const std::uint16_t* upper, std::uint8_t* to) {
#if defined(__AVX512F__)
  // 32 elements at a time, in words of 16 bits: the upper one has sign, exponent and 7 bits of the mantissa.
  const auto all = [](std::uint32_t value) { return _mm512_set1_epi16(static_cast<short>(value)); };
  alignas(64) std::uint16_t number[32];
  for (int i = 0; i < 32; ++i) number[i] = static_cast<std::uint16_t>(2 * i);
  const __m512i even = _mm512_load_si512(number), odd = _mm512_add_epi16(even, all(1));
  __m512i exponents = _mm512_setzero_si512();
  __mmask32 ties = 0;
  for (int i = 0; i < chunk; i += 32) {
    const __m512i low = _mm512_loadu_si512(from + i), high = _mm512_loadu_si512(from + i + 16);
    const __m512i word = _mm512_permutex2var_epi16(low, odd, high);
    const __m512i threshold =
        _mm512_permutex2var_epi16(_mm512_srli_epi32(low, 7), even, _mm512_srli_epi32(high, 7));
    const __m512i half = _mm512_loadu_si512(upper + i), exponent = _mm512_srli_epi16(_mm512_slli_epi16(word, 1), 8);
    exponents = _mm512_max_epu16(exponents, exponent);
    ties |= _mm512_cmpeq_epi16_mask(half, threshold);
    __m512i code = _mm512_mask_add_epi16(exponent, _mm512_cmplt_epu16_mask(half, threshold), exponent, all(1));
    code = _mm512_min_epu16(code, all(largest));
    if constexpr (bits == 8) {
      code = _mm512_min_epu16(_mm512_subs_epu16(code, all(lowest)), all(most_code));
      code = _mm512_or_si512(code, _mm512_and_si512(_mm512_srli_epi16(word, 8), all(128)));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm512_cvtepi16_epi8(code));
  }
  return {_mm512_cmpgt_epu16_mask(exponents, all(largest)) ? 255u : largest, ties != 0};
#else
  std::uint32_t x[chunk], magnitude = 0, same = 0;
  std::memcpy(x, from, sizeof x);
  for (int i = 0; i < chunk; ++i) {
    const std::uint32_t threshold = (x[i] & mantissa) >> 7;  // of 24 bits, mantissa << 1, the upper 16
    same |= upper[i] == threshold;
    magnitude = std::max(magnitude, x[i] << 1);
    to[i] = code_of<bits>(raised(x[i], upper[i] < threshold), x[i]);
  }
  return {magnitude >> 24, same != 0};
#endif
}

// Codes of the elements from `chunk` number on; false if one is NaN or Inf.
template <int bits>
bool encode_chunk(const float* from, const Dither& dither, std::uint64_t number, std::uint8_t* to) {
  std::uint16_t upper[chunk];
  dither.upper(number, upper);
  const Seen seen = round_chunk<bits>(from, upper, to);
  for (int i = 0; seen.tie && i < chunk; ++i) {
    const auto x = std::bit_cast<std::uint32_t>(from[i]);
    if (upper[i] == (x & mantissa) >> 7)
      to[i] = code_of<bits>(raised(x, dither.lower(chunk * number + i) < (x & 127) << 1), x);
  }
  return seen.largest <= largest;
}

template <int bits>
std::int64_t nbytes(std::int64_t n) {
  return bits == 9 ? n + sign_bytes(n) : n;
}

template <int bits>
bool encode(const float* x, std::int64_t n, std::uint64_t key, std::uint8_t* wire) {
  const Dither dither(key);
  std::uint8_t* to = wire + nbytes<bits>(n) - n;
  bool finite = true;
  std::int64_t at = 0;
  for (; at + chunk <= n; at += chunk) {
    finite &= encode_chunk<bits>(x + at, dither, at / chunk, to + at);
    if constexpr (bits == 9) pack_signs(x + at, chunk, wire + at / 8);
  }
  if (at < n) {  // the rest, with zeros behind it
    float some[chunk] = {};
    std::uint8_t codes[chunk];
    std::copy_n(x + at, n - at, some);
    finite &= encode_chunk<bits>(some, dither, at / chunk, codes);
    std::copy_n(codes, n - at, to + at);
    if constexpr (bits == 9) pack_signs(x + at, n - at, wire + at / 8);
  }
  return finite;
}

void check(const std::uint8_t* wire, std::int64_t n) {
  check_signs(wire, n);
  std::uint8_t most = 0;
  for (std::int64_t i = 0; i < n; ++i) most = std::max(most, wire[sign_bytes(n) + i]);
  if (most > largest) throw WireError("an exponent is at most %lld, got %lld", largest, most);
}

// The bits of the float of a code, whose sign lies in bit j of a byte.
template <int bits>
constexpr std::uint32_t decoded(std::uint32_t code, std::uint32_t byte, int j) {
  if constexpr (bits == 9) return code << 23 | (byte << (31 - j) & sign_bit);
  const std::uint32_t above = code & most_code;
  return (code << 24 & sign_bit) | (above ? above + lowest : 0) << 23;
}

template <int bits>
void add(const std::uint8_t* wire, std::int64_t n, float* out, float alpha) {
  const std::uint8_t* codes = wire + nbytes<bits>(n) - n;
  std::int64_t i = 0;
#if defined(__AVX512F__)
  for (; bits == 9 && i + 16 <= n; i += 16) {
    std::uint16_t signs;
    std::memcpy(&signs, wire + i / 8, sizeof signs);
    const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
    const __m512i x = _mm512_slli_epi32(code, 23);
    const __m512i value = _mm512_mask_or_epi32(x, signs, x, _mm512_set1_epi32(static_cast<int>(sign_bit)));
    const __m512 added = _mm512_mul_ps(_mm512_set1_ps(alpha), _mm512_castsi512_ps(value));
    _mm512_storeu_ps(out + i, _mm512_add_ps(_mm512_loadu_ps(out + i), added));
  }
#elif defined(__AVX2__)
  for (; bits == 9 && i + 8 <= n; i += 8) {
    const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
    const __m256i value = _mm256_or_si256(_mm256_slli_epi32(code, 23), sign_lanes(wire[i / 8]));
    const __m256 added = _mm256_mul_ps(_mm256_set1_ps(alpha), _mm256_castsi256_ps(value));
    _mm256_storeu_ps(out + i, _mm256_add_ps(_mm256_loadu_ps(out + i), added));
  }
#endif
  for (; i + 8 <= n; i += 8) {
    const std::uint32_t byte = bits == 9 ? wire[i / 8] : 0;
    for (int j = 0; j < 8; ++j) out[i + j] += alpha * std::bit_cast<float>(decoded<bits>(codes[i + j], byte, j));
  }
  for (int j = 0; i + j < n; ++j)
    out[i + j] += alpha * std::bit_cast<float>(decoded<bits>(codes[i + j], bits == 9 ? wire[i / 8] : 0, j));
}

template <int bits>
bool encode_all(const ConstFloats& x, const Segments& segments, const ConstLongs& keys, std::uint8_t* to) {
  bool finite = true;
  for (std::int64_t s = 0; s < segments.count; to += nbytes<bits>(segments.sizes[s++]))
    finite &= encode<bits>(x.data() + segments.starts[s], segments.sizes[s],
                           static_cast<std::uint64_t>(keys.data()[s]), to);
  return finite;
}

template <int bits>
void add_all(const std::uint8_t* wire, const Segments& segments, const Floats& out, float alpha) {
  const std::uint8_t* from = wire;
  for (std::int64_t s = 0; bits == 9 && s < segments.count; from += nbytes<bits>(segments.sizes[s++]))
    check(from, segments.sizes[s]);
  from = wire;
  for (std::int64_t s = 0; s < segments.count; from += nbytes<bits>(segments.sizes[s++]))
    add<bits>(from, segments.sizes[s], out.data() + segments.starts[s], alpha);
}

bool natural_encode(ConstFloats x, const Segments& segments, ConstLongs keys, int bits, Bytes wire) {
  nb::gil_scoped_release released;
  return (bits == 9 ? &encode_all<9> : &encode_all<8>)(x, segments, keys, wire.data());
}

void natural_add(ConstBytes wire, const Segments& segments, int bits, Floats out, double alpha) {
  nb::gil_scoped_release released;
  (bits == 9 ? &add_all<9> : &add_all<8>)(wire.data(), segments, out, static_cast<float>(alpha));
}

}  // namespace

LACONIC_KERNELS(m) {
  m.def("natural_encode", &natural_encode);
  m.def("natural_add_", &natural_add);
}

}  // namespace laconic::LACONIC_TARGET
