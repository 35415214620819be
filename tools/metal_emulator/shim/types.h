// The scalar types of MSL and what metal_stdlib says about types.
#pragma once
#undef assert
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>
#include "runtime.h"

#define __METAL__ 1
#define __METAL_VERSION__ 400
#define __METAL_MACOS__ 1
using half = _Float16;
using bfloat = __bf16;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
#define METAL_FUNC inline __attribute__((__always_inline__))
#pragma clang diagnostic ignored "-Wunknown-attributes"
#pragma clang diagnostic ignored "-Wuser-defined-literals"
#pragma clang diagnostic ignored "-Wunknown-pragmas"
#pragma clang diagnostic ignored "-Wduplicate-decl-specifier"
#pragma clang diagnostic ignored "-Wignored-attributes"
constexpr half operator""h(long double v) { return half(v); }
constexpr half operator"" H(long double v) { return half(v); }
constexpr bfloat operator"" bf(long double v) { return bfloat(float(v)); }

namespace metal {

using ::bfloat;
using ::half;
using ::int16_t;
using ::int32_t;
using ::int64_t;
using ::int8_t;
using ::size_t;
using ::uint;
using ::uint16_t;
using ::uint32_t;
using ::uint64_t;
using ::uint8_t;
using std::bool_constant;
using std::conditional;
using std::conditional_t;
using std::decay_t;
using std::declval;
using std::enable_if;
using std::enable_if_t;
using std::false_type;
using std::integral_constant;
using std::is_convertible_v;
using std::is_enum_v;
using std::is_integral;
using std::is_integral_v;
using std::is_pointer_v;
using std::is_same;
using std::is_same_v;
using std::is_signed_v;
using std::is_unsigned_v;
using std::is_void_v;
using std::make_signed_t;
using std::make_unsigned_t;
using std::remove_cv_t;
using std::remove_reference_t;
using std::true_type;
template <class T>
struct is_floating_point
    : std::bool_constant<std::is_floating_point_v<T> || is_same_v<T, half> || is_same_v<T, bfloat>> {};
template <class T>
inline constexpr bool is_floating_point_v = is_floating_point<T>::value;
template <class T>
inline constexpr bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;
template <class T>
struct numeric_limits : std::numeric_limits<T> {};
template <>
struct numeric_limits<half> {
  static constexpr bool is_specialized = true, has_infinity = true;
  static constexpr half max() { return half(65504.f); }
  static constexpr half lowest() { return half(-65504.f); }
  static constexpr half min() { return half(6.103515625e-05f); }
  static constexpr half epsilon() { return half(0.0009765625f); }
  static constexpr half infinity() { return half(__builtin_inff()); }
  static constexpr half quiet_NaN() { return half(__builtin_nanf("")); }
};
template <>
struct numeric_limits<bfloat> {
  static constexpr bool is_specialized = true, has_infinity = true;
  static constexpr bfloat max() { return bfloat(3.3895313892515355e38f); }
  static constexpr bfloat lowest() { return bfloat(-3.3895313892515355e38f); }
  static constexpr bfloat min() { return bfloat(1.1754943508222875e-38f); }
  static constexpr bfloat epsilon() { return bfloat(0.0078125f); }
  static constexpr bfloat infinity() { return bfloat(__builtin_inff()); }
  static constexpr bfloat quiet_NaN() { return bfloat(__builtin_nanf("")); }
};

}  // namespace metal

#ifndef INFINITY
#define INFINITY __builtin_inff()
#endif
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.693147180559945309417f
#define M_PI_F 3.14159265358979323846f

// X(T) for every scalar type that has vectors.
#define MTL_FOR_SCALARS(X) \
  X(float);                \
  X(half);                 \
  X(bfloat);               \
  X(int);                  \
  X(uint);                 \
  X(short);                \
  X(ushort);               \
  X(char);                 \
  X(uchar);                \
  X(long);                 \
  X(ulong);                \
  X(bool)
