// What every native kernel file starts from: array types, segments, the binding macro.
//
// A kernel file is compiled once per target into namespace laconic::LACONIC_TARGET (portable, avx2, avx512), and
// binds its functions with LACONIC_KERNELS(target). Python has checked dtype, contiguity, device and bounds of
// everything but the wire; native code checks the wire. Release the GIL with `nb::gil_scoped_release`.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>
#include <vector>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace nb = nanobind;

namespace laconic {

enum class Kind { float32, int32, int64, uint8 };

template <class T>
constexpr Kind kind_of = std::is_same_v<T, float>          ? Kind::float32
                         : std::is_same_v<T, std::int32_t> ? Kind::int32
                         : std::is_same_v<T, std::int64_t> ? Kind::int64
                                                           : Kind::uint8;

// A contiguous CPU tensor, borrowed from its owner for the length of one call.
template <class T>
struct Array {
  T* begin = nullptr;
  std::int64_t count = 0;

  T* data() const { return begin; }
  std::int64_t size() const { return count; }
};
using Floats = Array<float>;
using ConstFloats = Array<const float>;
using Ints = Array<std::int32_t>;
using ConstInts = Array<const std::int32_t>;
using Longs = Array<std::int64_t>;
using ConstLongs = Array<const std::int64_t>;
using Bytes = Array<std::uint8_t>;
using ConstBytes = Array<const std::uint8_t>;

// Address and length of a torch tensor if it is contiguous, on the CPU and of this dtype. It asks the tensor's own
// methods: 0.4 us a tensor, against 5 us through DLPack, and no link against torch.
bool borrow(PyObject* tensor, Kind kind, void** data, std::int64_t* count) noexcept;

// Becomes laconic.core.errors.WireError in Python. Its code is in module.cc: no std::string is built in a kernel file,
// where the compiler would make wide versions of the library's shared functions.
struct WireError : std::runtime_error {
  explicit WireError(const char* message);
  WireError(const char* format, std::int64_t first, std::int64_t second);  // two %lld
  ~WireError() override;
};

// What an attribute of a Python object holds, for the dataclasses that kernels take; false where it is something else.
bool attribute(PyObject* object, const char* name, std::int64_t* value) noexcept;
bool attribute(PyObject* object, const char* name, double* value) noexcept;
bool attribute(PyObject* object, const char* name, std::vector<std::int64_t>* values) noexcept;       // a tuple
bool attribute(PyObject* object, const char* name, Kind kind, void** data, std::int64_t* count) noexcept;  // or None

// A struct that is filled from the Python class `python` by `read`, when it is an argument of a native function.
template <class T>
concept Dataclass = requires(T value, PyObject* object) {
  T::python;
  { value.read(object) } noexcept -> std::same_as<bool>;
};

// Ranges [start(i), start(i) + size(i)) of a flat buffer.
struct Segments {
  static constexpr char python[] = "laconic.core.layout.Segments";

  const std::int64_t* starts = nullptr;
  const std::int64_t* sizes = nullptr;
  std::int64_t count = 0;

  bool read(PyObject* object) noexcept;
};

// A Python class whose static methods are the functions of one target.
struct Target {
  nb::object home;

  template <class Function>
  void def(const char* name, Function function) {
    nb::cpp_function_def(function, nb::scope(home), nb::name(name));
  }
};

using Binder = void (*)(Target&);

// Collects the binders of one target; module.cc calls them.
void enlist(const char* target, Binder binder);

struct Enlisted {
  Enlisted(const char* target, Binder binder) { enlist(target, binder); }
};

}  // namespace laconic

namespace nanobind::detail {

template <class T>
struct type_caster<laconic::Array<T>> {
  NB_TYPE_CASTER(laconic::Array<T>, const_name("torch.Tensor"))

  bool from_python(handle source, std::uint8_t, cleanup_list*) noexcept {
    void* data = nullptr;
    if (!laconic::borrow(source.ptr(), laconic::kind_of<std::remove_const_t<T>>, &data, &value.count)) return false;
    value.begin = static_cast<T*>(data);
    return true;
  }
};

template <laconic::Dataclass T>
struct type_caster<T> {
  NB_TYPE_CASTER(T, const_name(T::python))

  bool from_python(handle source, std::uint8_t, cleanup_list*) noexcept { return value.read(source.ptr()); }
};

}  // namespace nanobind::detail

#define LACONIC_TEXT2(x) #x
#define LACONIC_TEXT(x) LACONIC_TEXT2(x)

#ifdef LACONIC_TARGET
#define LACONIC_KERNELS(target)                                                                \
  static void bind_kernels(::laconic::Target& target);                                         \
  static const ::laconic::Enlisted enlisted(LACONIC_TEXT(LACONIC_TARGET), &bind_kernels);      \
  static void bind_kernels(::laconic::Target& target)
#endif
