// metal_stdlib as C++20 for clang, as far as compute kernels use it.
#pragma once
#include "types.h"
#include "vectors.h"
//
#include "functions.h"
//
#include "simdgroup.h"
//
#include "matrix.h"

namespace metal {
template <class D, class T, int K, int... I>
METAL_FUNC D as_type(const Swz<T, K, I...>& s) {
  return as_type<D>(vec<T, K>(s));
}
}  // namespace metal

// ------------------------------------------------------------------ what translated sources and their wrappers use
namespace mtl {

template <class T, int I>
struct FunctionConstant {
  const char* name;
  METAL_FUNC operator T() const {
    if (!function_constants[I].set) fail("function constant %d, %s, is read but was not set", I, name);
    T value;
    memcpy(&value, function_constants[I].value, sizeof value);
    return value;
  }
};
template <class T, int I>
bool is_defined(const FunctionConstant<T, I>&) {
  return function_constants[I].set;
}

template <auto F>
struct DerivedConstant {
  METAL_FUNC operator decltype(F())() const { return F(); }
};

// A kernel's parameter of type T: an id by value, a buffer or threadgroup memory by pointer or reference.
template <class T>
struct Argument {
  template <class S>
  static T id(const S& s) {
    if constexpr (!std::is_same_v<S, Dim3>)
      return T(s);
    else if constexpr (std::is_integral_v<T>)
      return T(s.x);
    else if constexpr (sizeof(T) / sizeof(std::declval<T>()[0]) == 2)
      return T(s.x, s.y);
    else
      return T(s.x, s.y, s.z);
  }
};
template <class T>
struct Argument<T*> {
  static constexpr bool writable = !std::is_const_v<T>;
  static constexpr size_t fixed_size = 0, alignment = alignof(T);
  static T* buffer(int index) { return static_cast<T*>(mtl::buffer(index)); }
  static T* threadgroup(int index) { return static_cast<T*>(threadgroup_dynamic(index, alignof(T))); }
};
template <>
struct Argument<void*> {
  static constexpr bool writable = true;
  static constexpr size_t fixed_size = 0, alignment = 1;
  static void* buffer(int index) { return mtl::buffer(index); }
};
template <>
struct Argument<const void*> {
  static constexpr bool writable = false;
  static constexpr size_t fixed_size = 0, alignment = 1;
  static const void* buffer(int index) { return mtl::buffer(index); }
};
template <class T>
struct Argument<T&> {
  static constexpr bool writable = !std::is_const_v<T>;
  static constexpr size_t fixed_size = sizeof(T), alignment = alignof(T);
  static T& buffer(int index) { return *static_cast<T*>(mtl::buffer(index)); }
};

template <class F>
struct Parameters;
template <class... A>
struct Parameters<void(A...)> {
  template <int I>
  using at = std::tuple_element_t<I, std::tuple<A...>>;
  static constexpr int count = sizeof...(A);
};

}  // namespace mtl
#define assert(x) ((x) ? void(0) : mtl::fail("assert(%s) at line %d", #x, __LINE__))
#define is_function_constant_defined(x) mtl::is_defined(x)
