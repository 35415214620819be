// simdgroup matrices and atomics.
#pragma once

namespace metal {

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
#define MTL_ATOMIC(name, expression)                                                  \
  template <class T>                                                                  \
  METAL_FUNC T name(volatile atomic<T>* a, std::type_identity_t<T> x, memory_order) { \
    return mtl_rmw(a, [x](T o) { return T(expression); });                            \
  }                                                                                   \
  static_assert(true)
MTL_ATOMIC(atomic_fetch_add_explicit, o + x);
MTL_ATOMIC(atomic_fetch_sub_explicit, o - x);
MTL_ATOMIC(atomic_fetch_max_explicit, max(o, x));
MTL_ATOMIC(atomic_fetch_min_explicit, min(o, x));
MTL_ATOMIC(atomic_fetch_or_explicit, o | x);
MTL_ATOMIC(atomic_fetch_and_explicit, o& x);
MTL_ATOMIC(atomic_exchange_explicit, x);

}  // namespace metal
