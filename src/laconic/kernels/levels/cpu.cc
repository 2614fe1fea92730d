// Levels apart from their zeros, and places as running sums of steps. See README.md.
#include "laconic/kernels/bitpack/bits.h"

namespace laconic::LACONIC_TARGET {
namespace {

constexpr std::int64_t furthest = 0x7FFFFFFF;  // a place is an int32

// How many levels of each segment are not zero.
void nonzero_counts(ConstInts levels, ConstLongs sizes, Longs counts) {
  nb::gil_scoped_release released;
  const std::int32_t* level = levels.data();
  for (std::int64_t s = 0; s < sizes.size(); ++s) {
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < sizes.data()[s]; ++i) count += level[i] != 0;
    counts.data()[s] = count;
    level += sizes.data()[s];
  }
}

// Positions and magnitudes have room for 16 more, signs are as long as they need.
void split_levels(ConstInts levels, ConstLongs sizes, Ints indices, Ints magnitudes, Bytes signs) {
  nb::gil_scoped_release released;
  const std::int32_t* level = levels.data();
  std::int32_t* index = indices.data();
  std::int32_t* magnitude = magnitudes.data();
  BitWriter negative(signs.data());
  for (std::int64_t s = 0; s < sizes.size(); ++s) {
    const std::int64_t n = sizes.data()[s];
    std::int64_t i = 0;
#if defined(__AVX512F__)
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (; i + 16 <= n; i += 16) {
      const __m512i some = _mm512_loadu_si512(level + i);
      const __mmask16 kept = _mm512_test_epi32_mask(some, some);
      const __m512i place = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(i)));
      _mm512_storeu_si512(index, _mm512_maskz_compress_epi32(kept, place));
      _mm512_storeu_si512(magnitude, _mm512_maskz_compress_epi32(kept, _mm512_abs_epi32(some)));
      const int count = std::popcount(static_cast<unsigned>(kept));
      negative.put(_pext_u32(_mm512_movepi32_mask(some), kept), count);
      index += count;
      magnitude += count;
    }
#endif
    for (; i < n; ++i) {
      *index = static_cast<std::int32_t>(i);
      *magnitude = level[i] < 0 ? -level[i] : level[i];
      const int kept = level[i] != 0;
      negative.put(level[i] < 0, kept);
      index += kept;
      magnitude += kept;
    }
    level += n;
  }
  negative.finish();
}

// The inverse, of positions that have been checked; `levels` is zero. False if a magnitude is not from 1 to `most`.
bool join_levels(ConstInts indices, ConstLongs counts, ConstLongs sizes, ConstInts magnitudes, ConstBytes signs,
                 std::int32_t most, Ints levels) {
  nb::gil_scoped_release released;
  const std::int32_t* index = indices.data();
  std::int32_t* level = levels.data();
  std::int64_t at = 0;
  bool fine = true;
  for (std::int64_t s = 0; s < sizes.size(); ++s) {
    for (const std::int64_t end = at + counts.data()[s]; at < end; ++at) {
      const std::int32_t magnitude = magnitudes.data()[at];
      fine &= magnitude >= 1 && magnitude <= most;
      level[index[at]] = signs.data()[at >> 3] >> (at & 7) & 1 ? -magnitude : magnitude;
    }
    level += sizes.data()[s];
  }
  return fine;
}

// Where steps from -1 lead in each range, and how far in all. What lies too far stays at the furthest place.
void places_of(ConstInts steps, ConstLongs counts, Ints places, Longs sums) {
  nb::gil_scoped_release released;
  std::int64_t at = 0;
  for (std::int64_t s = 0; s < counts.size(); ++s) {
    std::int64_t sum = 0;
    for (const std::int64_t end = at + counts.data()[s]; at < end; ++at) {
      sum += steps.data()[at];
      places.data()[at] = static_cast<std::int32_t>(std::min(sum - 1, furthest));
    }
    sums.data()[s] = sum;
  }
}

// The inverse.
void steps_of(ConstInts places, ConstLongs counts, Ints steps) {
  nb::gil_scoped_release released;
  std::int64_t at = 0;
  for (std::int64_t s = 0; s < counts.size(); ++s) {
    std::int32_t before = -1;
    for (const std::int64_t end = at + counts.data()[s]; at < end; ++at) {
      steps.data()[at] = places.data()[at] - before;
      before = places.data()[at];
    }
  }
}

}  // namespace

LACONIC_KERNELS(m) {
  m.def("nonzero_counts", &nonzero_counts);
  m.def("split_levels", &split_levels);
  m.def("join_levels", &join_levels);
  m.def("places_of", &places_of);
  m.def("steps_of", &steps_of);
}

}  // namespace laconic::LACONIC_TARGET
