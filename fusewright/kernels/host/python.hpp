// Makes an entry point a built-in function of Python that takes integers and None. A call costs 0.1
// us, while ctypes takes 0.8 us to convert six arguments. The functions of Python's stable ABI are
// declared here, because its headers may not be installed; the process that loads the library has
// them. They are weak, so that a program in C++ alone can link this text, too.
#pragma once

#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

struct _object;
extern "C" {
extern __attribute__((weak)) _object _Py_NoneStruct;
extern __attribute__((weak)) _object* PyExc_TypeError;
__attribute__((weak)) void PyErr_SetString(_object*, const char*);
__attribute__((weak)) _object* PyErr_Occurred();
__attribute__((weak)) void* PyLong_AsVoidPtr(_object*);
__attribute__((weak)) long long PyLong_AsLongLong(_object*);
__attribute__((weak)) _object* PyLong_FromLong(long);
__attribute__((weak)) void* PyEval_SaveThread();
__attribute__((weak)) void PyEval_RestoreThread(void*);
}

namespace fw {

template <class T>
T argument(_object* given) {
  if constexpr (std::is_pointer_v<T>) {
    return given == &_Py_NoneStruct ? nullptr : PyLong_AsVoidPtr(given);
  } else {
    return static_cast<T>(PyLong_AsLongLong(given));
  }
}

// Other Python threads may run while the kernel runs.
template <auto kEntry, class... T, std::size_t... kAt>
_object* called_with(int (*)(T...), _object* const* given, std::index_sequence<kAt...>) {
  const std::tuple<T...> arguments{argument<T>(given[kAt])...};
  if (PyErr_Occurred() != nullptr) return nullptr;
  void* const thread = PyEval_SaveThread();
  const int code = kEntry(std::get<kAt>(arguments)...);
  PyEval_RestoreThread(thread);
  return PyLong_FromLong(code);
}

template <auto kEntry, class... T>
_object* called(int (*entry)(T...), _object* const* given, std::ptrdiff_t count) {
  if (count == static_cast<std::ptrdiff_t>(sizeof...(T))) {
    return called_with<kEntry>(entry, given, std::index_sequence_for<T...>{});
  }
  PyErr_SetString(PyExc_TypeError, "a kernel was given too few or too many arguments");
  return nullptr;
}

}  // namespace fw

#define FW_CALLED(ENTRY)                                                                      \
  extern "C" _object* ENTRY##_called(_object*, _object* const* given, std::ptrdiff_t count) { \
    return fw::called<ENTRY>(ENTRY, given, count);                                            \
  }
