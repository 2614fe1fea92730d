// Products of matrices with thin factors. Each sum has one order, whatever the target and the buffer. See README.md.
#include "laconic/kernels/native/frame.h"

namespace laconic::LACONIC_TARGET {
namespace {

constexpr std::int64_t lanes = 32;   // sums along a row that go on side by side
constexpr std::int64_t block = 256;  // rows whose sums are added up before they join those of the rows above
constexpr std::int64_t tile = 512;   // columns whose sums stay in the cache
constexpr double spent = 0x1p-40;    // of its squared length: where no more is left of a column, it is dependent

// One matrix and its factors; columns of a factor are contiguous.
template <class Entry, class Left, class Right>
struct Product {
  Entry* matrix;
  std::int64_t rows, cols;
  Left* left;    // rank columns of `rows`
  Right* right;  // rank columns of `cols`
};

template <class T>
T folded(T (&sums)[lanes]) {
  for (std::int64_t width = lanes / 2; width; width /= 2)
    for (std::int64_t l = 0; l < width; ++l) sums[l] += sums[l + width];
  return sums[0];
}

template <class T>
using Wide __attribute__((vector_size(64))) = T;  // the compiler splits it where registers are narrower

// sums of a[j] * b[k][j] over j for `count` <= 4 columns b, in lanes; b[k] is `stride` after b[k - 1].
template <int count, class T>
void dots(const T* a, const T* b, std::int64_t n, std::int64_t stride, T* out, std::int64_t step) {
  constexpr int width = 64 / sizeof(T), wides = lanes / width;
  Wide<T> sums[count][wides] = {};
  std::int64_t j = 0;
  for (; j + lanes <= n; j += lanes) {
#pragma GCC unroll 4
    for (int w = 0; w < wides; ++w) {
      Wide<T> x, y;
      std::memcpy(&x, a + j + w * width, sizeof x);
#pragma GCC unroll 4
      for (int k = 0; k < count; ++k) {
        std::memcpy(&y, b + k * stride + j + w * width, sizeof y);
        sums[k][w] += x * y;
      }
    }
  }
  for (int k = 0; k < count; ++k) {
    T last[lanes];
    std::memcpy(last, sums[k], sizeof last);
    for (std::int64_t i = j; i < n; ++i) last[i - j] += a[i] * b[k * stride + i];
    out[k * step] = folded(last);
  }
}

// The same for any number of columns.
template <class T>
void all_dots(const T* a, const T* b, std::int64_t columns, std::int64_t n, std::int64_t stride, T* out,
              std::int64_t step) {
  for (; columns >= 4; columns -= 4, b += 4 * stride, out += 4 * step) dots<4>(a, b, n, stride, out, step);
  if (columns == 3) dots<3>(a, b, n, stride, out, step);
  if (columns == 2) dots<2>(a, b, n, stride, out, step);
  if (columns == 1) dots<1>(a, b, n, stride, out, step);
}

// sums[j] += M[i][j] * weights[i] over `rows` <= 256 rows in their order, for `n` <= 512 columns of the matrix.
void weighted(const float* matrix, std::int64_t cols, std::int64_t rows, std::int64_t n, const float* weights,
              float* __restrict sums) {
  std::int64_t i = 0;
  for (; i + 4 <= rows; i += 4) {
    const float *a = matrix + i * cols, *b = a + cols, *c = b + cols, *d = c + cols;
    const float p = weights[i], q = weights[i + 1], r = weights[i + 2], s = weights[i + 3];
    for (std::int64_t j = 0; j < n; ++j) sums[j] = sums[j] + a[j] * p + b[j] * q + c[j] * r + d[j] * s;
  }
  for (; i < rows; ++i)
    for (std::int64_t j = 0; j < n; ++j) sums[j] += matrix[i * cols + j] * weights[i];
}

// What the dataclass of that name in matrices.py says.
struct Matrices {
  static constexpr char python[] = "laconic.kernels.Matrices";

  std::vector<std::int64_t> starts, rows, cols;
  std::int64_t rank = 0;

  bool read(PyObject* matrices) noexcept {
    return attribute(matrices, "starts", &starts) && attribute(matrices, "rows", &rows) &&
           attribute(matrices, "cols", &cols) && attribute(matrices, "rank", &rank);
  }

  // Calls visit(product) for each matrix.
  template <class Entry, class Left, class Right, class Visit>
  void each(Entry* x, Left* left, Right* right, Visit visit) const {
    for (std::size_t i = 0; i < starts.size(); ++i) {
      visit(Product<Entry, Left, Right>{x + starts[i], rows[i], cols[i], left, right});
      left += rank * rows[i];
      right += rank * cols[i];
    }
  }
};

void times(ConstFloats x, const Matrices& matrices, ConstFloats right, Floats left) {
  nb::gil_scoped_release released;
  matrices.each(x.data(), left.data(), right.data(), [=, rank = matrices.rank](const auto& it) {
    for (std::int64_t i = 0; i < it.rows; ++i)
      all_dots(it.matrix + i * it.cols, it.right, rank, it.cols, it.cols, it.left + i, it.rows);
  });
}

void transposed_times(ConstFloats x, const Matrices& matrices, ConstFloats left, Floats right) {
  nb::gil_scoped_release released;
  matrices.each(x.data(), left.data(), right.data(), [=, rank = matrices.rank](const auto& it) {
    std::fill_n(it.right, rank * it.cols, 0.0f);
    for (std::int64_t i = 0; i < it.rows; i += block)
      for (std::int64_t j = 0; j < it.cols; j += tile)
        for (std::int64_t k = 0; k < rank; ++k) {
          const std::int64_t n = std::min(tile, it.cols - j);
          float sums[tile] = {};
          weighted(it.matrix + i * it.cols + j, it.cols, std::min(block, it.rows - i), n,
                   it.left + k * it.rows + i, sums);
          float* to = it.right + k * it.cols + j;
          for (std::int64_t l = 0; l < n; ++l) to[l] += sums[l];
        }
  });
}

void product_add(Floats x, const Matrices& matrices, ConstFloats left, ConstFloats right, double alpha) {
  nb::gil_scoped_release released;
  const auto a = static_cast<float>(alpha);
  matrices.each(x.data(), left.data(), right.data(), [=, rank = matrices.rank](const auto& it) {
    for (std::int64_t i = 0; i < it.rows; ++i)
      for (std::int64_t j = 0; j < it.cols; j += tile) {
        const std::int64_t n = std::min(tile, it.cols - j);
        const float *q = it.right + j, *p = it.left + i;
        float* __restrict to = it.matrix + i * it.cols + j;
        float sums[tile];
        for (std::int64_t l = 0; l < n; ++l) sums[l] = *p * q[l];
        for (std::int64_t k = 1; k < rank; ++k) {
          p += it.rows;
          q += it.cols;
          for (std::int64_t l = 0; l < n; ++l) sums[l] += *p * q[l];
        }
        for (std::int64_t l = 0; l < n; ++l) to[l] += sums[l] * a;
      }
  });
}

// Gram-Schmidt in float64 on `rank` columns of n; a column that depends on those before it becomes zero.
void orthonormalise(float* columns, std::int64_t rank, std::int64_t n, std::vector<double>& room) {
  room.assign(columns, columns + rank * n);
  std::vector<double> before(rank), shares(rank);
  for (std::int64_t k = 0; k < rank; ++k) all_dots(&room[k * n], &room[k * n], 1, n, n, &before[k], 1);
  for (std::int64_t k = 0; k < rank; ++k) {
    double *column = &room[k * n], squared;
    all_dots(column, column, 1, n, n, &squared, 1);
    const bool kept = squared > spent * before[k];
    const double length = std::sqrt(squared);
    for (std::int64_t i = 0; i < n; ++i) column[i] = kept ? column[i] / length : 0.0;
    all_dots(column, column + n, rank - k - 1, n, n, shares.data(), 1);
    for (std::int64_t l = 1; l < rank - k; ++l)
      for (std::int64_t i = 0; i < n; ++i) column[l * n + i] -= shares[l - 1] * column[i];
  }
  for (std::int64_t i = 0; i < rank * n; ++i) columns[i] = static_cast<float>(room[i]);
}

void orthonormal(Floats packed, std::int64_t rank, ConstLongs lengths) {
  nb::gil_scoped_release released;
  std::vector<double> room;
  float* columns = packed.data();
  for (std::int64_t b = 0; b < lengths.size(); ++b) {
    const std::int64_t n = lengths.data()[b];
    if (n) orthonormalise(columns, rank, n, room);
    columns += rank * n;
  }
}

}  // namespace

LACONIC_KERNELS(m) {
  m.def("lowrank_times", &times);
  m.def("lowrank_transposed_times", &transposed_times);
  m.def("lowrank_product_add_", &product_add);
  m.def("lowrank_orthonormal_", &orthonormal);
}

}  // namespace laconic::LACONIC_TARGET
