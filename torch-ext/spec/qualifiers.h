// What differs between the compilers of the devices: qualifiers of functions and locals, integer widths, exp2 and log2.
// A device defines what differs for it before it includes a file of this folder (paged_decode_metal/device.h).
#pragma once

#ifndef __METAL_VERSION__  // which has these types built in
#include <stdint.h>
#endif

#ifndef PD_FN
#ifdef __CUDACC__
#define PD_FN static __host__ __device__ __forceinline__
#else
#define PD_FN static inline
#endif
#endif

// Of a method. Inlined always: of a copy compiled for several instruction sets of the CPU the linker keeps only one.
#if defined(__CUDACC__)
#define PD_METHOD __host__ __device__ __forceinline__
#elif defined(__METAL_VERSION__)
#define PD_METHOD inline
#else
#define PD_METHOD [[gnu::always_inline]] inline
#endif

// Positions of keys. Narrower where 64-bit integers are slow or cost registers: CUDA refuses requests of 2^30 keys.
#ifndef PD_POSITION
#ifdef __CUDACC__
#define PD_POSITION int32_t
#else
#define PD_POSITION int64_t
#endif
#endif

// Exponentials, and the m of a partial result that has seen no key (state.h).
#ifndef PD_EMPTY
#include <math.h>
#define PD_EMPTY -INFINITY
#define PD_EXP2 exp2f
#define PD_LOG2 log2f
#define PD_THREAD  // the address space of local variables
#endif
