// Barriers, and functions over the lanes of a simdgroup. Only active lanes take part.
#pragma once

namespace metal {

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
#define MTL_REDUCE(name, expression)                                                     \
  template <class T>                                                                     \
  inline T name(T v, MTL_SITE) {                                                         \
    return mtl_reduce(Lanes<T>(v, #name, site), [](T a, T b) { return T(expression); }); \
  }                                                                                      \
  static_assert(true)
MTL_REDUCE(simd_sum, a + b);
MTL_REDUCE(simd_product, a* b);
MTL_REDUCE(simd_max, max(a, b));
MTL_REDUCE(simd_min, min(a, b));
MTL_REDUCE(simd_or, a | b);
MTL_REDUCE(simd_and, a& b);
MTL_REDUCE(simd_xor, a ^ b);

// `from`: the lane whose value lane l receives
#define MTL_SHUFFLE(name, from_lane)            \
  template <class T>                            \
  inline T name(T v, ushort d, MTL_SITE) {      \
    Lanes<T> lanes(v, #name, site);             \
    [[maybe_unused]] int l = int(lanes.x.lane); \
    return lanes.from(from_lane);               \
  }                                             \
  static_assert(true)
MTL_SHUFFLE(simd_shuffle, int(d));
MTL_SHUFFLE(simd_broadcast, int(d));
MTL_SHUFFLE(simd_shuffle_xor, l ^ int(d));
MTL_SHUFFLE(simd_shuffle_rotate_down, (l + d) & 31);
MTL_SHUFFLE(simd_shuffle_rotate_up, (l - d) & 31);
MTL_SHUFFLE(quad_shuffle_xor, l ^ int(d));

template <class T>
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

}  // namespace metal
