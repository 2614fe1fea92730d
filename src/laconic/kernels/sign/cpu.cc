// Signs and mean magnitudes, of blocks or of whole tensors, in one pass over memory. See README.md.
#include "laconic/kernels/native/frame.h"
#include "laconic/kernels/philox/philox.h"
#include "laconic/kernels/sign/signs.h"

namespace laconic::LACONIC_TARGET {
namespace {

constexpr std::int64_t chunk = 4096;  // elements that stay in the cache between their sum and their signs

// Sum of magnitudes, in 16 lanes that are folded in one order: the same bits on every target.
double magnitudes(const float* x, std::int64_t n) {
  double lanes[16] = {};
  std::int64_t i = 0;
#if defined(__AVX512F__)
  __m512d low = _mm512_setzero_pd(), high = low;
  for (; i + 16 <= n; i += 16) {
    const __m512 sixteen = _mm512_abs_ps(_mm512_loadu_ps(x + i));
    low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(sixteen)));
    high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(sixteen, 1)));
  }
  _mm512_storeu_pd(lanes, low);
  _mm512_storeu_pd(lanes + 8, high);
#else
  for (; i + 16 <= n; i += 16)
    for (int j = 0; j < 16; ++j) lanes[j] += std::fabs(x[i + j]);
#endif
  for (; i < n; ++i) lanes[i % 16] += std::fabs(x[i]);
  for (int width = 8; width; width /= 2)
    for (int j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  return lanes[0];
}

// Writes ceil(n / 8) bytes: bit j of byte i is set where x[8 i + j] is 0, as -0.0 is.
void pack_zeros(const float* x, std::int64_t n, std::uint8_t* to) {
  std::int64_t i = 0;
#if defined(__AVX512F__)
  const __m512 zero = _mm512_setzero_ps();
  for (; i + 16 <= n; i += 16) {
    const std::uint16_t word = _mm512_cmp_ps_mask(_mm512_loadu_ps(x + i), zero, _CMP_EQ_OQ);
    std::memcpy(to + i / 8, &word, sizeof word);
  }
#elif defined(__AVX2__)
  const __m256 zero = _mm256_setzero_ps();
  for (; i + 8 <= n; i += 8)
    to[i / 8] = static_cast<std::uint8_t>(_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(x + i), zero, _CMP_EQ_OQ)));
#endif
  for (; i < n; i += 8) {
    const int count = static_cast<int>(std::min<std::int64_t>(8, n - i));
    std::uint32_t byte = 0;
    for (int j = 0; j < count; ++j) byte |= static_cast<std::uint32_t>(x[i + j] == 0) << j;
    to[i / 8] = static_cast<std::uint8_t>(byte);
  }
}

// The signs of [begin, end), at most one chunk from a multiple of 32 on; those of zeros are bits of `coins`, if given.
void pack_tossed(const float* x, std::int64_t begin, std::int64_t end, const Philox* coins, std::uint8_t* signs) {
  const std::int64_t count = end - begin, nbytes = sign_bytes(count);
  pack_signs(x + begin, count, signs);
  if (!coins) return;
  std::uint8_t zero[chunk / 8];
  pack_zeros(x + begin, count, zero);
  for (std::int64_t at = 0; at < nbytes; at += 4) {
    const auto size = static_cast<std::size_t>(std::min<std::int64_t>(4, nbytes - at));
    std::uint32_t wanted = 0, bits = 0;
    std::memcpy(&wanted, zero + at, size);
    if (!wanted) continue;
    std::memcpy(&bits, signs + at, size);
    bits = (bits & ~wanted) | (coins->word(static_cast<std::uint64_t>(begin / 32 + at / 4)) & wanted);
    std::memcpy(signs + at, &bits, size);
  }
}

// Blocks of so many elements, the last one shorter; 0 stands for the whole of a tensor.
struct Blocks {
  std::int64_t block;

  std::int64_t length(std::int64_t n) const { return block ? block : n; }
  std::int64_t count(std::int64_t n) const { return n ? (n - 1) / length(n) + 1 : 0; }
  std::int64_t mean_bytes(std::int64_t n) const { return 4 * count(n); }
  std::int64_t nbytes(std::int64_t n) const { return mean_bytes(n) + sign_bytes(n); }

  // Means float32 (count,), at any byte, and signs of one tensor; false if some x is NaN or Inf: so is its mean then.
  bool encode(const float* x, std::int64_t n, const Philox* coins, std::uint8_t* means, std::uint8_t* signs) const {
    bool finite = true;
    double sum = 0;
    std::int64_t first = 0;  // of the present block
    for (std::int64_t at = 0; at < n; at += chunk) {
      const std::int64_t end = std::min(at + chunk, n);
      for (std::int64_t from = at; from < end;) {
        const std::int64_t last = std::min(first + length(n), n), to = std::min(last, end);
        sum += magnitudes(x + from, to - from);
        if (to == last) {
          const auto mean = static_cast<float>(sum / static_cast<double>(last - first));
          std::memcpy(means, &mean, sizeof mean);
          means += sizeof mean;
          finite &= std::isfinite(sum);
          sum = 0;
          first = last;
        }
        from = to;
      }
      pack_tossed(x, at, end, coins, signs + at / 8);
    }
    return finite;
  }

  void check(const std::uint8_t* means, const std::uint8_t* signs, std::int64_t n) const {
    for (std::int64_t b = 0; b < count(n); ++b) {
      std::uint32_t bits;
      std::memcpy(&bits, means + 4 * b, sizeof bits);
      if (bits >= 0x7F800000u) throw WireError("mean magnitude %lld of %lld is negative or not finite", b, count(n));
    }
    check_signs(signs, n);
  }

  void add(const std::uint8_t* means, const std::uint8_t* signs, std::int64_t n, float* out, float alpha) const {
    for (std::int64_t b = 0; b < count(n); ++b) {
      float mean;
      std::memcpy(&mean, means + 4 * b, sizeof mean);
      add_signed(signs, b * length(n), std::min((b + 1) * length(n), n), alpha * mean, out);
    }
  }
};

// A key a segment, or none at all.
bool sign_encode(ConstFloats x, const Segments& segments, ConstLongs keys, std::int64_t block, Bytes wire) {
  nb::gil_scoped_release released;
  const Blocks blocks{block};
  std::uint8_t* to = wire.data();
  bool finite = true;
  for (std::int64_t s = 0; s < segments.count; to += blocks.nbytes(segments.sizes[s++])) {
    const std::int64_t n = segments.sizes[s];
    const Philox coins(keys.size() ? static_cast<std::uint64_t>(keys.data()[s]) : 0);
    finite &= blocks.encode(x.data() + segments.starts[s], n, keys.size() ? &coins : nullptr, to,
                            to + blocks.mean_bytes(n));
  }
  return finite;
}

void sign_add(ConstBytes wire, const Segments& segments, std::int64_t block, Floats out, double alpha) {
  nb::gil_scoped_release released;
  const Blocks blocks{block};
  const auto each = [&](auto visit) {  // visit(means, signs, n, number)
    const std::uint8_t* from = wire.data();
    for (std::int64_t s = 0; s < segments.count; from += blocks.nbytes(segments.sizes[s++]))
      visit(from, from + blocks.mean_bytes(segments.sizes[s]), segments.sizes[s], s);
  };
  each([&](auto means, auto signs, std::int64_t n, std::int64_t) { blocks.check(means, signs, n); });
  each([&](auto means, auto signs, std::int64_t n, std::int64_t s) {
    blocks.add(means, signs, n, out.data() + segments.starts[s], static_cast<float>(alpha));
  });
}

void signs_and_means(ConstFloats x, const Segments& segments, Bytes signs, Floats means) {
  nb::gil_scoped_release released;
  std::uint8_t* to = signs.data();
  std::fill_n(means.data(), means.size(), 0.0f);  // those of tensors without elements
  for (std::int64_t s = 0; s < segments.count; to += sign_bytes(segments.sizes[s++]))
    Blocks{0}.encode(x.data() + segments.starts[s], segments.sizes[s], nullptr,
                     reinterpret_cast<std::uint8_t*>(means.data() + s), to);
}

void zeros(ConstFloats x, const Segments& segments, Bytes bits) {
  nb::gil_scoped_release released;
  std::uint8_t* to = bits.data();
  for (std::int64_t s = 0; s < segments.count; to += sign_bytes(segments.sizes[s++]))
    pack_zeros(x.data() + segments.starts[s], segments.sizes[s], to);
}

void signed_add(ConstBytes signs, ConstFloats values, const Segments& segments, Floats out, double alpha) {
  nb::gil_scoped_release released;
  const std::uint8_t* from = signs.data();
  for (std::int64_t s = 0; s < segments.count; from += sign_bytes(segments.sizes[s++]))
    check_signs(from, segments.sizes[s]);
  from = signs.data();
  for (std::int64_t s = 0; s < segments.count; from += sign_bytes(segments.sizes[s++])) {
    const float value = static_cast<float>(alpha) * values.data()[s];
    add_signed(from, 0, segments.sizes[s], value, out.data() + segments.starts[s]);
  }
}

}  // namespace

LACONIC_KERNELS(m) {
  m.def("sign_encode", &sign_encode);
  m.def("sign_add_", &sign_add);
  m.def("signs", &signs_and_means);
  m.def("signed_add_", &signed_add);
  m.def("zeros", &zeros);
}

}  // namespace laconic::LACONIC_TARGET
