// laconic._native: one class a target (portable, avx2, avx512), each with the same functions, and what this CPU can
// run; `Target` is the last of them, for annotations. Python picks the class; see laconic/kernels/__init__.py. Beside
// them, what Python cannot do about its own end.
#include "laconic/kernels/native/frame.h"

#include <chrono>
#include <cstdio>
#include <exception>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

namespace laconic {
namespace {

std::vector<std::pair<std::string, Binder>>& binders() {
  static std::vector<std::pair<std::string, Binder>> list;
  return list;
}

std::vector<std::string> compiled() {
  std::vector<std::string> names;
  std::stringstream text(LACONIC_TARGETS);
  for (std::string name; std::getline(text, name, ',');) names.push_back(name);
  return names;
}

#if defined(__x86_64__)
#define LACONIC_FEATURE(list, name) \
  if (__builtin_cpu_supports(name)) list += list.empty() ? name : "," name
#endif

std::string features() {
  std::string list;
#if defined(__x86_64__)
  __builtin_cpu_init();
  LACONIC_FEATURE(list, "avx2");
  LACONIC_FEATURE(list, "bmi");
  LACONIC_FEATURE(list, "bmi2");
  LACONIC_FEATURE(list, "avx512f");
  LACONIC_FEATURE(list, "avx512bw");
  LACONIC_FEATURE(list, "avx512dq");
  LACONIC_FEATURE(list, "avx512vl");
  LACONIC_FEATURE(list, "avx512vpopcntdq");
#endif
  return list;
}

bool supported(const std::string& target) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  if (target == "avx2") return avx2;
  if (target == "avx512")
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
  return target == "portable";
}

PyObject* name_of(const char* text) { return PyUnicode_InternFromString(text); }

// True if `tensor.name` (or `tensor.name()`) is exactly `expected`.
bool has(PyObject* tensor, PyObject* name, bool call, PyObject* expected) {
  PyObject* got = call ? PyObject_CallMethodObjArgs(tensor, name, nullptr) : PyObject_GetAttr(tensor, name);
  if (!got) PyErr_Clear();
  const bool same = got == expected;
  Py_XDECREF(got);
  return same;
}

// The integer that `tensor.name()` returns.
bool ask(PyObject* tensor, PyObject* name, std::int64_t* answer) {
  PyObject* got = PyObject_CallMethodObjArgs(tensor, name, nullptr);
  if (got) *answer = PyLong_AsLongLong(got);
  Py_XDECREF(got);
  if (!PyErr_Occurred()) return got != nullptr;
  PyErr_Clear();
  return false;
}

PyObject* dtype_of(Kind kind) {
  static PyObject* const dtypes[] = {
      nb::module_::import_("torch").attr("float32").inc_ref().ptr(),
      nb::module_::import_("torch").attr("int32").inc_ref().ptr(),
      nb::module_::import_("torch").attr("int64").inc_ref().ptr(),
      nb::module_::import_("torch").attr("uint8").inc_ref().ptr(),
  };
  return dtypes[static_cast<int>(kind)];
}

}  // namespace

bool borrow(PyObject* tensor, Kind kind, void** data, std::int64_t* count) noexcept {
  static PyObject* const dtype = name_of("dtype");
  static PyObject* const is_cpu = name_of("is_cpu");
  static PyObject* const is_contiguous = name_of("is_contiguous");
  static PyObject* const data_ptr = name_of("data_ptr");
  static PyObject* const numel = name_of("numel");
  std::int64_t address = 0;
  if (!has(tensor, dtype, false, dtype_of(kind)) || !has(tensor, is_cpu, false, Py_True) ||
      !has(tensor, is_contiguous, true, Py_True) || !ask(tensor, data_ptr, &address) || !ask(tensor, numel, count))
    return false;
  *data = reinterpret_cast<void*>(static_cast<std::uintptr_t>(address));
  return true;
}

namespace {

// Calls read(value) with a new reference to an attribute.
template <class Read>
bool with_attribute(PyObject* object, const char* name, Read read) {
  PyObject* value = PyObject_GetAttrString(object, name);
  const bool fine = value && read(value) && !PyErr_Occurred();
  Py_XDECREF(value);
  PyErr_Clear();
  return fine;
}

}  // namespace

bool attribute(PyObject* object, const char* name, std::int64_t* value) noexcept {
  return with_attribute(object, name, [=](PyObject* got) { return *value = PyLong_AsLongLong(got), true; });
}

bool attribute(PyObject* object, const char* name, double* value) noexcept {
  return with_attribute(object, name, [=](PyObject* got) { return *value = PyFloat_AsDouble(got), true; });
}

bool attribute(PyObject* object, const char* name, std::vector<std::int64_t>* values) noexcept {
  return with_attribute(object, name, [=](PyObject* got) {
    if (!PyTuple_Check(got)) return false;
    for (Py_ssize_t i = 0; i < PyTuple_Size(got); ++i) values->push_back(PyLong_AsLongLong(PyTuple_GetItem(got, i)));
    return true;
  });
}

bool attribute(PyObject* object, const char* name, Kind kind, void** data, std::int64_t* count) noexcept {
  return with_attribute(object, name, [=](PyObject* got) { return got == Py_None || borrow(got, kind, data, count); });
}

bool Segments::read(PyObject* object) noexcept {
  void *first = nullptr, *second = nullptr;
  if (!attribute(object, "starts_tensor", Kind::int64, &first, &count) ||
      !attribute(object, "sizes_tensor", Kind::int64, &second, &count))
    return false;
  starts = static_cast<const std::int64_t*>(first);
  sizes = static_cast<const std::int64_t*>(second);
  return true;
}

namespace {

std::string formatted(const char* format, long long first, long long second) {
  char text[200];
  std::snprintf(text, sizeof text, format, first, second);
  return text;
}

}  // namespace

WireError::WireError(const char* message) : std::runtime_error(message) {}
WireError::WireError(const char* format, std::int64_t first, std::int64_t second)
    : std::runtime_error(formatted(format, first, second)) {}
WireError::~WireError() = default;

namespace {

std::terminate_handler others = nullptr;  // the handler installed before
std::thread::id last;                     // the thread that ends Python

// A thread whose exit has no exception behind it came back to Python too late: it waits for the end of the process, which
// is near. What else ends so, such as a joinable std::thread that is destroyed, is only a minute late.
void park() {
  if (std::this_thread::get_id() != last && !std::current_exception())
    std::this_thread::sleep_for(std::chrono::minutes(1));
  others();
}

// Called by the thread that is about to end Python. Python makes a thread exit that asks for the GIL later, and C++ code
// that does not let itself be unwound then ends the process (SIGABRT). From Python 3.14 on such threads are parked.
void park_late_threads() {
  last = std::this_thread::get_id();
  if (others) return;
  others = std::get_terminate();
  std::set_terminate(park);
}

}  // namespace

void enlist(const char* target, Binder binder) { binders().emplace_back(target, binder); }

}  // namespace laconic

NB_MODULE(_native, module) {
  using namespace laconic;
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const WireError& error) {
      PyErr_SetString(nb::module_::import_("laconic.core.errors").attr("WireError").ptr(), error.what());
    }
  });
  for (const std::string& target : compiled()) {
    if (!supported(target)) continue;
    nb::dict names;
    names["__module__"] = module.attr("__name__");
    Target home{nb::handle(reinterpret_cast<PyObject*>(&PyType_Type))(target.c_str(), nb::make_tuple(), names)};
    for (const auto& [name, binder] : binders())
      if (name == target) binder(home);
    module.attr(target.c_str()) = module.attr("Target") = home.home;
  }
  module.def("park_late_threads", &park_late_threads);
  module.attr("compiled") = nb::str(LACONIC_TARGETS);
  module.attr("features") = nb::str(features().c_str());
}
