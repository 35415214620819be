// metal_stdlib as plain C++20 for clang >= 17 (x86-64). Only what compute kernels use.
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
#include "swizzles.h"

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

// ------------------------------------------------------------------ vectors
template <class T, int N>
struct vec;
template <class T, int K, int... I>
struct Swz {  // lives in a union over T[N]
  T d[1];
  METAL_FUNC operator vec<T, K>() const {
    const T* p = d;
    return vec<T, K>(p[I]...);
  }
  METAL_FUNC Swz& operator=(const vec<T, K>& v) {
    T* p = d;
    int j = 0;
    ((p[I] = v[j++]), ...);
    return *this;
  }
  METAL_FUNC Swz& operator=(const Swz& o) { return *this = vec<T, K>(o); }
  template <int... J>
  METAL_FUNC Swz& operator=(const Swz<T, K, J...>& o) {
    return *this = vec<T, K>(o);
  }
#define MTL_OPA(o)                              \
  template <class V>                            \
  METAL_FUNC Swz& operator o## = (const V& v) { \
    return *this = vec<T, K>(*this) o v;        \
  }
  MTL_OPA(+) MTL_OPA(-) MTL_OPA(*) MTL_OPA(/)
#undef MTL_OPA
};
template <class T>
concept Scalar = is_arithmetic_v<T>;
#define MTL_VEC_COMMON(N)                                                       \
  vec() = default;                                                              \
  METAL_FUNC constexpr vec(const vec& o) {                                      \
    for (int i = 0; i < N; i++) d[i] = o.d[i];                                  \
  }                                                                             \
  METAL_FUNC constexpr vec& operator=(const vec& o) {                           \
    for (int i = 0; i < N; i++) d[i] = o.d[i];                                  \
    return *this;                                                               \
  }                                                                             \
  template <Scalar S>                                                           \
  METAL_FUNC constexpr vec(S s) : vec(s, std::make_index_sequence<N>{}) {}      \
  template <Scalar S, size_t... I>                                              \
  METAL_FUNC constexpr vec(S s, std::index_sequence<I...>) : d{(I, T(s))...} {} \
  template <class U>                                                            \
  METAL_FUNC constexpr explicit vec(const vec<U, N>& o)                         \
    requires(!is_same_v<U, T>)                                                  \
  {                                                                             \
    for (int i = 0; i < N; i++) d[i] = T(o.d[i]);                               \
  }                                                                             \
  METAL_FUNC constexpr T& operator[](int i) { return d[i]; }                    \
  METAL_FUNC constexpr const T& operator[](int i) const { return d[i]; }
#define MTL_SC(S) std::type_identity_t<T> S
template <class T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  union {
    T d[2];
    struct {
      T x, y;
    };
    struct {
      T r, g;
    };
    MTL_SWZ2
  };
  MTL_VEC_COMMON(2)
  METAL_FUNC constexpr vec(T a, T b) : d{a, b} {}
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  union {
    T d[3];
    struct {
      T x, y, z;
    };
    struct {
      T r, g, b;
    };
    MTL_SWZ3
  };
  MTL_VEC_COMMON(3)
  METAL_FUNC constexpr vec(T a, T b_, T c) : d{a, b_, c} {}
  METAL_FUNC constexpr vec(const vec<T, 2>& a, T c) : d{a[0], a[1], c} {}
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  union {
    T d[4];
    struct {
      T x, y, z, w;
    };
    struct {
      T r, g, b, a;
    };
    MTL_SWZ4
  };
  MTL_VEC_COMMON(4)
  METAL_FUNC constexpr vec(T a_, T b_, T c, T e) : d{a_, b_, c, e} {}
  METAL_FUNC constexpr vec(const vec<T, 2>& l, const vec<T, 2>& h) : d{l[0], l[1], h[0], h[1]} {}
  METAL_FUNC constexpr vec(const vec<T, 3>& l, T h) : d{l[0], l[1], l[2], h} {}
};
#define MTL_BIN(op)                                                                           \
  template <class T, int N>                                                                   \
  METAL_FUNC constexpr vec<T, N> operator op(const vec<T, N>& a, const vec<T, N>& b) {        \
    vec<T, N> r;                                                                              \
    for (int i = 0; i < N; i++) r.d[i] = T(a.d[i] op b.d[i]);                                 \
    return r;                                                                                 \
  }                                                                                           \
  template <class T, int N>                                                                   \
  METAL_FUNC constexpr vec<T, N> operator op(const vec<T, N>& a, std::type_identity_t<T> b) { \
    vec<T, N> r;                                                                              \
    for (int i = 0; i < N; i++) r.d[i] = T(a.d[i] op b);                                      \
    return r;                                                                                 \
  }                                                                                           \
  template <class T, int N>                                                                   \
  METAL_FUNC constexpr vec<T, N> operator op(std::type_identity_t<T> a, const vec<T, N>& b) { \
    vec<T, N> r;                                                                              \
    for (int i = 0; i < N; i++) r.d[i] = T(a op b.d[i]);                                      \
    return r;                                                                                 \
  }                                                                                           \
  template <class T, int N, class U>                                                          \
  METAL_FUNC constexpr vec<T, N>& operator op## = (vec<T, N> & a, const U& b) {               \
    return a = a op b;                                                                        \
  }
MTL_BIN(+)
MTL_BIN(-) MTL_BIN(*) MTL_BIN(/) MTL_BIN(%) MTL_BIN(&) MTL_BIN(|) MTL_BIN(^) MTL_BIN(<<) MTL_BIN(>>)
#define MTL_CMP(op)                                                                              \
  template <class T, int N>                                                                      \
  METAL_FUNC constexpr vec<bool, N> operator op(const vec<T, N>& a, const vec<T, N>& b) {        \
    vec<bool, N> r;                                                                              \
    for (int i = 0; i < N; i++) r.d[i] = a.d[i] op b.d[i];                                       \
    return r;                                                                                    \
  }                                                                                              \
  template <class T, int N>                                                                      \
  METAL_FUNC constexpr vec<bool, N> operator op(const vec<T, N>& a, std::type_identity_t<T> b) { \
    vec<bool, N> r;                                                                              \
    for (int i = 0; i < N; i++) r.d[i] = a.d[i] op b;                                            \
    return r;                                                                                    \
  }
    MTL_CMP(<) MTL_CMP(>) MTL_CMP(<=) MTL_CMP(>=) MTL_CMP(==) MTL_CMP(!=) MTL_CMP(&&)
        MTL_CMP(||) template <class T, int N>
        METAL_FUNC constexpr vec<T, N> operator-(const vec<T, N>& a) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r.d[i] = -a.d[i];
  return r;
}
template <class T, int N>
METAL_FUNC constexpr vec<T, N> operator~(const vec<T, N>& a) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r.d[i] = ~a.d[i];
  return r;
}
template <int N>
METAL_FUNC constexpr vec<bool, N> operator!(const vec<bool, N>& a) {
  vec<bool, N> r;
  for (int i = 0; i < N; i++) r.d[i] = !a.d[i];
  return r;
}
template <class T, int N>
struct packed_vec {
  T d[N];  // no alignment beyond T
  packed_vec() = default;
  METAL_FUNC packed_vec(const vec<T, N>& v) {
    for (int i = 0; i < N; i++) d[i] = v[i];
  }
  METAL_FUNC operator vec<T, N>() const {
    vec<T, N> r;
    for (int i = 0; i < N; i++) r[i] = d[i];
    return r;
  }
  METAL_FUNC T& operator[](int i) { return d[i]; }
  METAL_FUNC const T& operator[](int i) const { return d[i]; }
};
#define MTL_VT(T)                         \
  using T##2 = vec<T, 2>;                 \
  using T##3 = vec<T, 3>;                 \
  using T##4 = vec<T, 4>;                 \
  using packed_##T##2 = packed_vec<T, 2>; \
  using packed_##T##3 = packed_vec<T, 3>; \
  using packed_##T##4 = packed_vec<T, 4>;
MTL_VT(float)
MTL_VT(half) MTL_VT(bfloat) MTL_VT(int) MTL_VT(uint) MTL_VT(short) MTL_VT(ushort) MTL_VT(char) MTL_VT(uchar)
    MTL_VT(long) MTL_VT(ulong) MTL_VT(bool)

    // ------------------------------------------------------------------ scalar and vector functions
    template <class T, class F>
    METAL_FUNC T mtl_f1(T a, F f) {
  return T(f(float(a)));
}
#define MTL_FN1(name, expr)                        \
  METAL_FUNC float name(float x) { return expr; }  \
  METAL_FUNC half name(half h) {                   \
    float x = float(h);                            \
    return half(expr);                             \
  }                                                \
  METAL_FUNC bfloat name(bfloat h) {               \
    float x = float(h);                            \
    return bfloat(expr);                           \
  }                                                \
  template <class T, int N>                        \
  METAL_FUNC vec<T, N> name(vec<T, N> v) {         \
    for (int i = 0; i < N; i++) v[i] = name(v[i]); \
    return v;                                      \
  }
#define MTL_MATH1                                                                                                      \
  MTL_FN1(exp, ::expf(x))                                                                                              \
  MTL_FN1(exp2, ::exp2f(x)) MTL_FN1(exp10, ::powf(10.f, x)) MTL_FN1(log, ::logf(x)) MTL_FN1(log2, ::log2f(x))          \
      MTL_FN1(log10, ::log10f(x)) MTL_FN1(sqrt, ::sqrtf(x)) MTL_FN1(rsqrt, 1.f / ::sqrtf(x)) MTL_FN1(tanh, ::tanhf(x)) \
          MTL_FN1(sin, ::sinf(x)) MTL_FN1(cos, ::cosf(x)) MTL_FN1(tan, ::tanf(x)) MTL_FN1(sinh, ::sinhf(x))            \
              MTL_FN1(cosh, ::coshf(x)) MTL_FN1(asin, ::asinf(x)) MTL_FN1(acos, ::acosf(x)) MTL_FN1(atan, ::atanf(x))  \
                  MTL_FN1(asinh, ::asinhf(x)) MTL_FN1(acosh, ::acoshf(x)) MTL_FN1(atanh, ::atanhf(x))                  \
                      MTL_FN1(floor, ::floorf(x)) MTL_FN1(ceil, ::ceilf(x)) MTL_FN1(rint, ::rintf(x))                  \
                          MTL_FN1(round, ::roundf(x)) MTL_FN1(trunc, ::truncf(x)) MTL_FN1(fabs, ::fabsf(x))            \
                              MTL_FN1(fract, x - ::floorf(x))
MTL_MATH1
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
#define MTL_MM(T)                                                          \
  METAL_FUNC constexpr T max(T a, T b) { return a > b || b != b ? a : b; } \
  METAL_FUNC constexpr T min(T a, T b) { return a < b || b != b ? a : b; } \
  METAL_FUNC constexpr T clamp(T x, T l, T h) { return min(max(x, l), h); }
MTL_MM(float)
MTL_MM(half) MTL_MM(bfloat) MTL_MM(int) MTL_MM(uint) MTL_MM(short) MTL_MM(ushort) MTL_MM(char) MTL_MM(uchar)
    MTL_MM(long) MTL_MM(ulong) MTL_MM(signed char) template <class T, int N>
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
template <class T, int N>
METAL_FUNC vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) {
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
MTL_MATH1
}  // namespace fast
namespace precise {
using metal::clamp;
using metal::divide;
using metal::fma;
using metal::isnan;
using metal::max;
using metal::min;
using metal::pow;
MTL_MATH1
}  // namespace precise
using std::swap;

// ------------------------------------------------------------------ synchronization
enum class mem_flags {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
#define MTL_SITE mtl::Site site = mtl::Site::current()
inline void threadgroup_barrier(mem_flags f, MTL_SITE) { mtl::threadgroup_barrier(int(f), site); }
inline void simdgroup_barrier(mem_flags f, MTL_SITE) { mtl::simdgroup_barrier(int(f), site); }
enum memory_order { memory_order_relaxed = 0, memory_order_seq_cst = 5 };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };

// ------------------------------------------------------------------ simdgroup functions (active lanes only)
template <class T>
struct Lanes : private mtl::Unwatched {
  mtl::Exchange x;
  METAL_FUNC Lanes(const T& v, const char* op, const mtl::Site& s)
      : x(mtl::simd_exchange((const void*)&v, sizeof(T), op, s)) {}
  METAL_FUNC bool on(uint i) const { return i < 32 && (x.active >> i & 1); }
  METAL_FUNC T at(uint i) const {
    T t;
    memcpy((void*)&t, x.values + size_t(i) * mtl::Exchange::kMaxBytes, sizeof t);
    return t;
  }
  // shuffling from an inactive or absent lane is undefined in MSL: give a NaN pattern
  METAL_FUNC T from(int i) const {
    if (i >= 0 && on(uint(i))) return at(uint(i));
    T t;
    memset((void*)&t, 0xff, sizeof t);
    return t;
  }
};
template <class T, class F>
inline T mtl_reduce(const Lanes<T>& L, F f) {  // butterfly order, like hardware, not left to right
  T r;
  if (*L.x.has_result) {
    memcpy((void*)&r, L.x.result, sizeof r);
    return r;
  }  // another lane computed it
  T v[32];
  uint on = L.x.active;
  for (uint i = 0; i < 32; i++) v[i] = L.at(i);
  for (uint m = 1; m < 32; m <<= 1)
    for (uint i = 0; i < 32; i += 2 * m) {
      bool a = on >> i & 1, b = on >> (i + m) & 1;
      if (a && b)
        v[i] = f(v[i], v[i + m]);
      else if (b) {
        v[i] = v[i + m];
        on |= 1u << i;
      }
    }
  memcpy(L.x.result, (void*)&v[0], sizeof(T));
  *L.x.has_result = true;
  return v[0];
}
#define MTL_RED(name, expr)                                                        \
  template <class T>                                                               \
  inline T name(T v, MTL_SITE) {                                                   \
    return mtl_reduce(Lanes<T>(v, #name, site), [](T a, T b) { return T(expr); }); \
  }
MTL_RED(simd_sum, a + b)
MTL_RED(simd_product, a* b) MTL_RED(simd_max, max(a, b)) MTL_RED(simd_min, min(a, b)) MTL_RED(simd_or, a | b)
    MTL_RED(simd_and, a& b) MTL_RED(simd_xor, a ^ b)
#define MTL_SHUF(name, argt, idx)        \
  template <class T>                     \
  inline T name(T v, argt d, MTL_SITE) { \
    Lanes<T> L(v, #name, site);          \
    int l = int(L.x.lane);               \
    (void)l;                             \
    return L.from(idx);                  \
  }
        MTL_SHUF(simd_shuffle, ushort, int(d)) MTL_SHUF(simd_broadcast, ushort, int(d))
            MTL_SHUF(simd_shuffle_xor, ushort, l ^ int(d)) MTL_SHUF(simd_shuffle_rotate_down, ushort, (l + d) & 31)
                MTL_SHUF(simd_shuffle_rotate_up, ushort, (l - d) & 31) template <class T>
                inline T simd_shuffle_down(T v, ushort d, MTL_SITE) {
  Lanes<T> L(v, "simd_shuffle_down", site);
  int i = int(L.x.lane) + d;
  return i < 32 ? L.from(i) : v;
}
template <class T>
inline T simd_shuffle_up(T v, ushort d, MTL_SITE) {
  Lanes<T> L(v, "simd_shuffle_up", site);
  int i = int(L.x.lane) - d;
  return i >= 0 ? L.from(i) : v;
}
template <class T>
inline T simd_shuffle_and_fill_up(T v, T f, ushort d, MTL_SITE) {
  struct P {
    T a, b;
  } p{v, f};
  Lanes<P> L(p, "simd_shuffle_and_fill_up", site);
  int i = int(L.x.lane) - d;
  return i >= 0 ? L.from(i).a : L.from(i + 32).b;
}
template <class T>
inline T simd_shuffle_and_fill_down(T v, T f, ushort d, MTL_SITE) {
  struct P {
    T a, b;
  } p{v, f};
  Lanes<P> L(p, "simd_shuffle_and_fill_down", site);
  int i = int(L.x.lane) + d;
  return i < 32 ? L.from(i).a : L.from(i - 32).b;
}
template <class T>
inline T simd_broadcast_first(T v, MTL_SITE) {
  Lanes<T> L(v, "simd_broadcast_first", site);
  return L.at(uint(__builtin_ctz(L.x.active)));
}
template <class T>
inline T simd_prefix_inclusive_sum(T v, MTL_SITE) {
  Lanes<T> L(v, "simd_prefix_inclusive_sum", site);
  T s = T(0);
  for (uint i = 0; i <= L.x.lane; i++)
    if (L.on(i)) s += L.at(i);
  return s;
}
template <class T>
inline T simd_prefix_exclusive_sum(T v, MTL_SITE) {
  Lanes<T> L(v, "simd_prefix_exclusive_sum", site);
  T s = T(0);
  for (uint i = 0; i < L.x.lane; i++)
    if (L.on(i)) s += L.at(i);
  return s;
}
inline bool simd_all(bool v, MTL_SITE) {
  return mtl_reduce(Lanes<bool>(v, "simd_all", site), [](bool a, bool b) { return a && b; });
}
inline bool simd_any(bool v, MTL_SITE) {
  return mtl_reduce(Lanes<bool>(v, "simd_any", site), [](bool a, bool b) { return a || b; });
}
inline bool simd_is_first(MTL_SITE) {
  Lanes<char> L(0, "simd_is_first", site);
  return L.x.lane == uint(__builtin_ctz(L.x.active));
}
template <class T>
inline T quad_sum(T v, MTL_SITE) {
  Lanes<T> L(v, "quad_sum", site);
  uint b = L.x.lane & ~3u;
  return T((L.at(b) + L.at(b + 1)) + (L.at(b + 2) + L.at(b + 3)));
}
template <class T>
inline T quad_max(T v, MTL_SITE) {
  Lanes<T> L(v, "quad_max", site);
  uint b = L.x.lane & ~3u;
  return max(max(L.at(b), L.at(b + 1)), max(L.at(b + 2), L.at(b + 3)));
}
template <class T>
inline T quad_shuffle_xor(T v, ushort m, MTL_SITE) {
  Lanes<T> L(v, "quad_shuffle_xor", site);
  return L.from(int(L.x.lane ^ m));
}

// ------------------------------------------------------------------ simdgroup_matrix, 8x8, two elements a lane
// Lane layout as MLX relies on through thread_elements(): qid = lane / 4; row = (qid & 4) + (lane / 2) % 4; col = (qid
// & 2) * 2 + (lane % 2) * 2
template <class T, int R, int C>
struct simdgroup_matrix {
  static_assert(R == 8 && C == 8);
  vec<T, 2> e;
  simdgroup_matrix() = default;
  METAL_FUNC explicit simdgroup_matrix(T diag) {
    for (int i = 0; i < 2; i++) e[i] = row(lane()) == col(lane()) + i ? diag : T(0);
  }
  METAL_FUNC vec<T, 2>& thread_elements() { return e; }
  METAL_FUNC const vec<T, 2>& thread_elements() const { return e; }
  static METAL_FUNC int lane() { return int(mtl::ids().thread_index_in_simdgroup); }
  static METAL_FUNC int row(int l) { return ((l / 4) & 4) + (l / 2) % 4; }
  static METAL_FUNC int col(int l) { return ((l / 4) & 2) * 2 + (l % 2) * 2; }
};
template <class T, int R, int C>
METAL_FUNC simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T v) {
  simdgroup_matrix<T, R, C> m;
  m.e = vec<T, 2>(v);
  return m;
}
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;
template <class T>
inline void mtl_mat_sync(const simdgroup_matrix<T, 8, 8>&, const char* op, const mtl::Site& s) {
  char c = 0;
  auto x = mtl::simd_exchange(&c, 1, op, s);
  if (x.active != ~0u) mtl::fail("%s with inactive lanes (mask %08x)", op, x.active);
}
template <class T>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const T* src, ulong stride = 8, ulong2 origin = ulong2(0, 0),
                           bool transpose = false, MTL_SITE) {
  mtl_mat_sync(m, "simdgroup_load", site);
  using M = simdgroup_matrix<T, 8, 8>;
  int l = M::lane();
  for (int i = 0; i < 2; i++) {
    long r = M::row(l), c = M::col(l) + i;
    if (transpose) std::swap(r, c);
    m.e[i] = src[(long(origin.y) + r) * long(stride) + long(origin.x) + c];
  }
}
template <class T>
inline void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, T* dst, ulong stride = 8, ulong2 origin = ulong2(0, 0),
                            bool transpose = false, MTL_SITE) {
  mtl_mat_sync(m, "simdgroup_store", site);
  using M = simdgroup_matrix<T, 8, 8>;
  int l = M::lane();
  for (int i = 0; i < 2; i++) {
    long r = M::row(l), c = M::col(l) + i;
    if (transpose) std::swap(r, c);
    dst[(long(origin.y) + r) * long(stride) + long(origin.x) + c] = m.e[i];
  }
}
template <class D, class A, class B, class Cc>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                          const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<Cc, 8, 8>& c,
                                          MTL_SITE) {
  struct P {
    vec<A, 2> a;
    vec<B, 2> b;
  } p{a.e, b.e};
  Lanes<P> L(p, "simdgroup_multiply_accumulate", site);
  if (L.x.active != ~0u) mtl::fail("simdgroup_multiply_accumulate with inactive lanes (mask %08x)", L.x.active);
  using M = simdgroup_matrix<D, 8, 8>;
  int l = M::lane(), r = M::row(l), c0 = M::col(l);
  auto lane_of = [](int row, int col) { return (row & 4) * 4 + (col & 4) * 2 + (row & 3) * 2 + ((col >> 1) & 1); };
  for (int i = 0; i < 2; i++) {
    float s = float(c.e[i]);
    for (int k = 0; k < 8; k++)
      s += float(L.at(uint(lane_of(r, k))).a[k & 1]) * float(L.at(uint(lane_of(k, c0 + i))).b[(c0 + i) & 1]);
    d.e[i] = D(s);
  }
}
template <class D, class A, class B>
inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                               const simdgroup_matrix<B, 8, 8>& b, MTL_SITE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)), site);
}

// ------------------------------------------------------------------ atomics
template <class T>
struct atomic {
  T v;
};
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;
using atomic_bool = atomic<bool>;
template <class T>
METAL_FUNC T atomic_load_explicit(const volatile atomic<T>* a, memory_order) {
  T r;
  __atomic_load(const_cast<T*>(&a->v), &r, __ATOMIC_RELAXED);
  return r;
}
template <class T>
METAL_FUNC void atomic_store_explicit(volatile atomic<T>* a, std::type_identity_t<T> x, memory_order) {
  __atomic_store(const_cast<T*>(&a->v), &x, __ATOMIC_RELAXED);
}
template <class T>
METAL_FUNC bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* a, T* e, std::type_identity_t<T> x,
                                                      memory_order, memory_order) {
  return __atomic_compare_exchange(const_cast<T*>(&a->v), e, &x, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
template <class T, class F>
METAL_FUNC T mtl_rmw(volatile atomic<T>* a, F f) {
  T o = atomic_load_explicit(a, memory_order_relaxed);
  while (!atomic_compare_exchange_weak_explicit(a, &o, f(o), memory_order_relaxed, memory_order_relaxed)) {
  }
  return o;
}
#define MTL_AT(name, expr)                                                            \
  template <class T>                                                                  \
  METAL_FUNC T name(volatile atomic<T>* a, std::type_identity_t<T> x, memory_order) { \
    return mtl_rmw(a, [x](T o) { return T(expr); });                                  \
  }
MTL_AT(atomic_fetch_add_explicit, o + x)
MTL_AT(atomic_fetch_sub_explicit, o - x) MTL_AT(atomic_fetch_max_explicit, max(o, x))
    MTL_AT(atomic_fetch_min_explicit, min(o, x)) MTL_AT(atomic_fetch_or_explicit, o | x)
        MTL_AT(atomic_fetch_and_explicit, o& x) MTL_AT(atomic_exchange_explicit, x)
}  // namespace metal
using metal::vec;
#define MTL_G(T)              \
  using metal::T##2;          \
  using metal::T##3;          \
  using metal::T##4;          \
  using metal::packed_##T##2; \
  using metal::packed_##T##3; \
  using metal::packed_##T##4;
MTL_G(float)
MTL_G(half) MTL_G(bfloat) MTL_G(int) MTL_G(uint) MTL_G(short) MTL_G(ushort) MTL_G(char) MTL_G(uchar) MTL_G(long)
    MTL_G(ulong) MTL_G(bool) using metal::as_type;
#ifndef INFINITY
#define INFINITY __builtin_inff()
#endif
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.693147180559945309417f
#define M_PI_F 3.14159265358979323846f
#undef M_LOG2E_H
#ifndef HUGE_VALF
#define HUGE_VALF __builtin_huge_valf()
#endif

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
