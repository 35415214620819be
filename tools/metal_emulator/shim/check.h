// metal_stdlib for the check: clang's own vectors, which may live in any address space, and declarations where nothing
// is executed. Stricter than metal.h: an address space or a conversion that Apple's compiler refuses is refused.
#pragma once
#define __mtl_device __attribute__((address_space(1)))
#define __mtl_constant __attribute__((address_space(2)))
#define __mtl_threadgroup __attribute__((address_space(3)))

#include "types.h"

namespace metal {

template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
template <class V, class... A>
V mtl_make(A...);  // what msl.py makes of float4(x)
#define MTL_VECTORS(T)    \
  using T##2 = vec<T, 2>; \
  using T##3 = vec<T, 3>; \
  using T##4 = vec<T, 4>
MTL_FOR_SCALARS(MTL_VECTORS);

}  // namespace metal

#define MTL_GLOBAL(T) \
  using metal::T##2;  \
  using metal::T##3;  \
  using metal::T##4
using metal::mtl_make;
using metal::vec;
MTL_FOR_SCALARS(MTL_GLOBAL);

#include "functions.h"
//
#include "simdgroup.h"

namespace metal {

template <class T, int R, int C>
struct simdgroup_matrix {
  static_assert(R == 8 && C == 8);
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
  vec<T, 2>& thread_elements();
};
template <class T, int R, int C>
simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T v);
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;
#define MTL_LOAD_STORE(AS)                                                                                 \
  template <class T>                                                                                       \
  void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const AS T* src, ulong stride = 8, ulong2 origin = 0,  \
                      bool transpose = false);                                                             \
  template <class T>                                                                                       \
  void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, AS T* dst, ulong stride = 8, ulong2 origin = 0, \
                       bool transpose = false)
MTL_LOAD_STORE(__mtl_device);
MTL_LOAD_STORE(__mtl_threadgroup);

template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                   const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c);
template <class D, class A, class B>
void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                        const simdgroup_matrix<B, 8, 8>& b);
template <class T>
struct atomic {
  T v;
};
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;
using atomic_bool = atomic<bool>;
#define MTL_ATOMIC(space, name) \
  template <class T>            \
  T name(volatile space atomic<T>*, std::type_identity_t<T>, memory_order)
#define MTL_ATOMICS(space)                                                                      \
  template <class T>                                                                            \
  T atomic_load_explicit(const volatile space atomic<T>*, memory_order);                        \
  template <class T>                                                                            \
  void atomic_store_explicit(volatile space atomic<T>*, std::type_identity_t<T>, memory_order); \
  MTL_ATOMIC(space, atomic_fetch_add_explicit);                                                 \
  MTL_ATOMIC(space, atomic_fetch_sub_explicit);                                                 \
  MTL_ATOMIC(space, atomic_fetch_max_explicit);                                                 \
  MTL_ATOMIC(space, atomic_fetch_min_explicit);                                                 \
  MTL_ATOMIC(space, atomic_fetch_or_explicit);                                                  \
  MTL_ATOMIC(space, atomic_fetch_and_explicit);                                                 \
  MTL_ATOMIC(space, atomic_exchange_explicit);                                                  \
  static_assert(true)
MTL_ATOMICS(__mtl_device);
MTL_ATOMICS(__mtl_threadgroup);

}  // namespace metal

namespace mtl {
template <class T, int I>
struct FunctionConstant {
  const char* name;
  operator T() const;
};
template <auto F>
struct DerivedConstant {
  operator decltype(F())() const;
};
}  // namespace mtl
#define is_function_constant_defined(x) true
#define assert(x) ((void)0)
