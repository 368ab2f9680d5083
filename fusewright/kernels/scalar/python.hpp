// Makes an entry point a built-in function of Python that takes tensors, integers and None, and
// raises an error if the kernel fails. A call costs 0.1 us, and ctypes takes 0.8 us to convert six
// arguments. The functions of Python's stable ABI are declared here, because its headers may not be
// installed; the process that loads the library has them. They are weak, so that a program in C++
// alone can link this text, too.
#pragma once

#include <cstddef>
#include <cstdio>
#include <tuple>
#include <type_traits>
#include <utility>

struct _object;
extern "C" {
extern __attribute__((weak)) _object _Py_NoneStruct, PyLong_Type;
extern __attribute__((weak)) _object *PyExc_TypeError, *PyExc_RuntimeError;
__attribute__((weak)) _object *PyObject_Type(_object*), *PyErr_Occurred(), *PyLong_FromLong(long);
__attribute__((weak)) _object* PyObject_CallMethodObjArgs(_object*, _object*, ...);
__attribute__((weak)) _object* PyObject_CallFunctionObjArgs(_object*, ...);
__attribute__((weak)) _object* PyUnicode_InternFromString(const char*);
__attribute__((weak)) void PyErr_SetString(_object*, const char*), PyEval_RestoreThread(void*);
__attribute__((weak)) void Py_DecRef(_object*), *PyLong_AsVoidPtr(_object*), *PyEval_SaveThread();
__attribute__((weak)) long long PyLong_AsLongLong(_object*);
const char* fw_error_text(int code);
}

namespace fw {

// The address of a tensor's data, or an address that is given as a number.
static inline void* address(_object* given) {
  if (PyErr_Occurred() != nullptr) return nullptr;  // of an argument before
  static _object* const data_ptr = PyUnicode_InternFromString("data_ptr");
  _object* const type = PyObject_Type(given);
  Py_DecRef(type);
  if (type == &PyLong_Type) return PyLong_AsVoidPtr(given);
  _object* const number = PyObject_CallMethodObjArgs(given, data_ptr, nullptr);
  if (number == nullptr) return nullptr;
  void* const found = PyLong_AsVoidPtr(number);
  Py_DecRef(number);
  return found;
}

template <class T>
T argument(_object* given) {
  if constexpr (std::is_pointer_v<T>) {
    return static_cast<T>(given == &_Py_NoneStruct ? nullptr : address(given));
  } else {
    return static_cast<T>(PyLong_AsLongLong(given));
  }
}

inline _object* failed(const char* name, int code) {
  char words[512];
  const char* const text = fw_error_text(code);
  std::snprintf(words, sizeof(words), "kernel %s failed with code %d: %s", name, code,
                text != nullptr ? text : "unknown error");
  PyErr_SetString(PyExc_RuntimeError, words);
  return nullptr;
}

// An entry returns this if the library lacks what few calls need. Then `self` makes the call.
constexpr int kRare = -1;

// Other Python threads may run while the kernel runs.
template <auto kEntry, class... T, std::size_t... kAt>
_object* called_with(int (*)(T...), const char* name, _object* self, _object* const* given,
                     std::index_sequence<kAt...>) {
  const std::tuple<T...> arguments{argument<T>(given[kAt])...};
  if (PyErr_Occurred() != nullptr) return nullptr;
  void* const thread = PyEval_SaveThread();
  const int code = kEntry(std::get<kAt>(arguments)...);
  PyEval_RestoreThread(thread);
  if (code == kRare) return PyObject_CallFunctionObjArgs(self, given[kAt]..., nullptr);
  return code == 0 ? PyLong_FromLong(code) : failed(name, code);
}

template <auto kEntry, class... T>
_object* called(int (*entry)(T...), const char* name, _object* self, _object* const* given,
                std::ptrdiff_t count) {
  if (count == static_cast<std::ptrdiff_t>(sizeof...(T))) {
    return called_with<kEntry>(entry, name, self, given, std::index_sequence_for<T...>{});
  }
  PyErr_SetString(PyExc_TypeError, "a kernel was given too few or too many arguments");
  return nullptr;
}

}  // namespace fw

// The first lines of an entry point, whose last arguments all entry points have.
#define FW_ENTRY(NAME, ...)                                                                       \
  extern "C" int NAME(__VA_ARGS__, void* workspace, int where, void* stream);                     \
  extern "C" _object* NAME##_called(_object* self, _object* const* given, std::ptrdiff_t count) { \
    return fw::called<NAME>(NAME, #NAME, self, given, count);                                     \
  }                                                                                               \
  extern "C" int NAME(__VA_ARGS__, void* workspace, int where, void* stream)
