// Functions of scalars and vectors. Included behind the vectors, those of vectors.h or those of check.h.
#pragma once

namespace metal {

// As Apple's: for float and half, not for bfloat.
#define MTL_MATH(name, expression)                      \
  METAL_FUNC float name(float x) { return expression; } \
  METAL_FUNC half name(half h) {                        \
    float x = float(h);                                 \
    return half(expression);                            \
  }                                                     \
  template <class T, int N>                             \
  METAL_FUNC vec<T, N> name(vec<T, N> v) {              \
    for (int i = 0; i < N; i++) v[i] = name(v[i]);      \
    return v;                                           \
  }                                                     \
  static_assert(true)
#define MTL_ALL_MATH                 \
  MTL_MATH(exp, ::expf(x));          \
  MTL_MATH(exp2, ::exp2f(x));        \
  MTL_MATH(exp10, ::powf(10.f, x));  \
  MTL_MATH(log, ::logf(x));          \
  MTL_MATH(log2, ::log2f(x));        \
  MTL_MATH(log10, ::log10f(x));      \
  MTL_MATH(sqrt, ::sqrtf(x));        \
  MTL_MATH(rsqrt, 1.f / ::sqrtf(x)); \
  MTL_MATH(tanh, ::tanhf(x));        \
  MTL_MATH(sin, ::sinf(x));          \
  MTL_MATH(cos, ::cosf(x));          \
  MTL_MATH(tan, ::tanf(x));          \
  MTL_MATH(sinh, ::sinhf(x));        \
  MTL_MATH(cosh, ::coshf(x));        \
  MTL_MATH(asin, ::asinf(x));        \
  MTL_MATH(acos, ::acosf(x));        \
  MTL_MATH(atan, ::atanf(x));        \
  MTL_MATH(asinh, ::asinhf(x));      \
  MTL_MATH(acosh, ::acoshf(x));      \
  MTL_MATH(atanh, ::atanhf(x));      \
  MTL_MATH(floor, ::floorf(x));      \
  MTL_MATH(ceil, ::ceilf(x));        \
  MTL_MATH(rint, ::rintf(x));        \
  MTL_MATH(round, ::roundf(x));      \
  MTL_MATH(trunc, ::truncf(x));      \
  MTL_MATH(fabs, ::fabsf(x));        \
  MTL_MATH(fract, x - ::floorf(x))
MTL_ALL_MATH;

METAL_FUNC float pow(float a, float b) { return ::powf(a, b); }
METAL_FUNC half pow(half a, half b) { return half(::powf(a, b)); }
METAL_FUNC float powr(float a, float b) { return ::powf(a, b); }
METAL_FUNC float divide(float a, float b) { return a / b; }
METAL_FUNC float atan2(float a, float b) { return ::atan2f(a, b); }
METAL_FUNC float fmod(float a, float b) { return ::fmodf(a, b); }
METAL_FUNC float ldexp(float a, int b) { return ::ldexpf(a, b); }
METAL_FUNC float sign(float x) { return x > 0 ? 1.f : x < 0 ? -1.f : x; }
METAL_FUNC float copysign(float a, float b) { return ::copysignf(a, b); }
METAL_FUNC float mix(float a, float b, float t) { return a + (b - a) * t; }
METAL_FUNC float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
METAL_FUNC half fma(half a, half b, half c) { return half(__builtin_fma(double(a), double(b), double(c))); }
METAL_FUNC bfloat fma(bfloat a, bfloat b, bfloat c) {
  return bfloat(float(__builtin_fma(double(float(a)), double(float(b)), double(float(c)))));
}
template <class T, int N>
METAL_FUNC vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  for (int i = 0; i < N; i++) a[i] = fma(a[i], b[i], c[i]);
  return a;
}
template <class T>
METAL_FUNC T mad(T a, T b, T c) {
  return fma(a, b, c);
}
METAL_FUNC bool isnan(float x) { return x != x; }
METAL_FUNC bool isnan(half x) { return x != x; }
METAL_FUNC bool isnan(bfloat x) { return float(x) != float(x); }
METAL_FUNC bool isinf(float x) { return __builtin_fabsf(x) == __builtin_inff(); }
METAL_FUNC bool isinf(half x) { return isinf(float(x)); }
METAL_FUNC bool isinf(bfloat x) { return isinf(float(x)); }
METAL_FUNC bool isfinite(float x) { return !isnan(x) && !isinf(x); }
#define MTL_MIN_MAX(T)                                                     \
  METAL_FUNC constexpr T max(T a, T b) { return a > b || b != b ? a : b; } \
  METAL_FUNC constexpr T min(T a, T b) { return a < b || b != b ? a : b; } \
  METAL_FUNC constexpr T clamp(T x, T l, T h) { return min(max(x, l), h); }
MTL_MIN_MAX(float);
MTL_MIN_MAX(half);
MTL_MIN_MAX(bfloat);
MTL_MIN_MAX(int);
MTL_MIN_MAX(uint);
MTL_MIN_MAX(short);
MTL_MIN_MAX(ushort);
MTL_MIN_MAX(char);
MTL_MIN_MAX(uchar);
MTL_MIN_MAX(long);
MTL_MIN_MAX(ulong);
MTL_MIN_MAX(signed char);
template <class T, int N>
METAL_FUNC vec<T, N> max(vec<T, N> a, vec<T, N> b) {
  for (int i = 0; i < N; i++) a[i] = max(a[i], b[i]);
  return a;
}
template <class T, int N>
METAL_FUNC vec<T, N> min(vec<T, N> a, vec<T, N> b) {
  for (int i = 0; i < N; i++) a[i] = min(a[i], b[i]);
  return a;
}
template <class T, int N>
METAL_FUNC vec<T, N> clamp(vec<T, N> a, std::type_identity_t<T> l, std::type_identity_t<T> h) {
  for (int i = 0; i < N; i++) a[i] = clamp(a[i], l, h);
  return a;
}
METAL_FUNC float fmax(float a, float b) { return max(a, b); }
METAL_FUNC float fmin(float a, float b) { return min(a, b); }
METAL_FUNC float max3(float a, float b, float c) { return max(max(a, b), c); }
METAL_FUNC constexpr int abs(int a) { return a < 0 ? -a : a; }
METAL_FUNC constexpr short abs(short a) { return a < 0 ? -a : a; }
METAL_FUNC constexpr long abs(long a) { return a < 0 ? -a : a; }
METAL_FUNC float abs(float a) { return ::fabsf(a); }
METAL_FUNC half abs(half a) { return half(::fabsf(a)); }
METAL_FUNC bfloat abs(bfloat a) { return bfloat(::fabsf(float(a))); }
template <class T, int N>
METAL_FUNC vec<T, N> abs(vec<T, N> a) {
  for (int i = 0; i < N; i++) a[i] = abs(a[i]);
  return a;
}
METAL_FUNC float saturate(float a) { return clamp(a, 0.f, 1.f); }
template <class T>
METAL_FUNC T select(T a, T b, bool c) {
  return c ? b : a;
}
// M: bool, or the integer that a comparison of clang's vectors gives
template <class T, class M, int N>
METAL_FUNC vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<M, N> c) {
  for (int i = 0; i < N; i++)
    if (c[i]) a[i] = b[i];
  return a;
}
template <int N>
METAL_FUNC bool all(vec<bool, N> a) {
  for (int i = 0; i < N; i++)
    if (!a[i]) return false;
  return true;
}
template <int N>
METAL_FUNC bool any(vec<bool, N> a) {
  for (int i = 0; i < N; i++)
    if (a[i]) return true;
  return false;
}
METAL_FUNC bool all(bool a) { return a; }
METAL_FUNC bool any(bool a) { return a; }
template <class T, int N>
METAL_FUNC T dot(vec<T, N> a, vec<T, N> b) {
  T s = a[0] * b[0];
  for (int i = 1; i < N; i++) s = T(s + a[i] * b[i]);
  return s;
}
template <class T>
METAL_FUNC int popcount(T a) {
  return __builtin_popcountll((unsigned long long)std::make_unsigned_t<T>(a));
}
METAL_FUNC uint clz(uint a) { return a ? __builtin_clz(a) : 32; }
METAL_FUNC uint ctz(uint a) { return a ? __builtin_ctz(a) : 32; }
template <class T>
METAL_FUNC T mulhi(T a, T b) {
  return T((int64_t(a) * int64_t(b)) >> 32);
}
template <class D, class S>
METAL_FUNC D as_type(const S& s) {
  static_assert(sizeof(D) == sizeof(S));
  D d;
  memcpy(&d, &s, sizeof d);
  return d;
}
template <class T>
METAL_FUNC constexpr void mtl_unused(T&&) {}
namespace fast {
using metal::clamp;
using metal::divide;
using metal::fma;
using metal::isnan;
using metal::max;
using metal::min;
using metal::pow;
MTL_ALL_MATH;
}  // namespace fast
namespace precise {
using namespace fast;
// Correctly rounded also where fast math would multiply by the reciprocal.
METAL_FUNC float divide(float x, float y) {
#pragma clang fp reciprocal(off)
  return x / y;
}
}  // namespace precise
using std::swap;

}  // namespace metal
using metal::as_type;
