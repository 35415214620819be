// The vectors of MSL for plain C++: as clang's own, with swizzles, packed forms and MSL's conversions.
#pragma once
#include "swizzles.h"
#include "types.h"

namespace metal {

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
#define MTL_ASSIGN(o)                           \
  template <class V>                            \
  METAL_FUNC Swz& operator o## = (const V& v) { \
    return *this = vec<T, K>(*this) o v;        \
  }                                             \
  static_assert(true)
  MTL_ASSIGN(+);
  MTL_ASSIGN(-);
  MTL_ASSIGN(*);
  MTL_ASSIGN(/);
#undef MTL_ASSIGN
#define MTL_OPERATOR(o)                                                                                 \
  template <class V>                                                                                    \
  friend METAL_FUNC auto operator o(const Swz& a, const V& b) {                                         \
    return vec<T, K>(a) o b;                                                                            \
  }                                                                                                     \
  friend METAL_FUNC vec<T, K> operator o(const vec<T, K>& a, const Swz& b) { return a o vec<T, K>(b); } \
  friend METAL_FUNC vec<T, K> operator o(T a, const Swz& b) { return a o vec<T, K>(b); }                \
  static_assert(true)
  MTL_OPERATOR(+);
  MTL_OPERATOR(-);
  MTL_OPERATOR(*);
  MTL_OPERATOR(/);
#undef MTL_OPERATOR
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
  METAL_FUNC constexpr vec(T a, const vec<T, 2>& c) : d{a, c[0], c[1]} {}
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
  METAL_FUNC constexpr vec(T l, const vec<T, 3>& h) : d{l, h[0], h[1], h[2]} {}
  METAL_FUNC constexpr vec(const vec<T, 2>& l, T c, T e) : d{l[0], l[1], c, e} {}
  METAL_FUNC constexpr vec(T l, T c, const vec<T, 2>& h) : d{l, c, h[0], h[1]} {}
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
  }                                                                                           \
  static_assert(true)
MTL_BIN(+);
MTL_BIN(-);
MTL_BIN(*);
MTL_BIN(/);
MTL_BIN(%);
MTL_BIN(&);
MTL_BIN(|);
MTL_BIN(^);
MTL_BIN(<<);
MTL_BIN(>>);
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
  }                                                                                              \
  static_assert(true)
MTL_CMP(<);
MTL_CMP(>);
MTL_CMP(<=);
MTL_CMP(>=);
MTL_CMP(==);
MTL_CMP(!=);
MTL_CMP(&&);
MTL_CMP(||);
template <class T, int N>
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

#define MTL_VECTORS(T)                    \
  using T##2 = vec<T, 2>;                 \
  using T##3 = vec<T, 3>;                 \
  using T##4 = vec<T, 4>;                 \
  using packed_##T##2 = packed_vec<T, 2>; \
  using packed_##T##3 = packed_vec<T, 3>; \
  using packed_##T##4 = packed_vec<T, 4>
MTL_FOR_SCALARS(MTL_VECTORS);

}  // namespace metal

#define MTL_GLOBAL(T)         \
  using metal::T##2;          \
  using metal::T##3;          \
  using metal::T##4;          \
  using metal::packed_##T##2; \
  using metal::packed_##T##3; \
  using metal::packed_##T##4
using metal::vec;
MTL_FOR_SCALARS(MTL_GLOBAL);
