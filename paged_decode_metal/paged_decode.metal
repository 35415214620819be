// The shaders of the Metal backend. Which dtypes, dimensions and rows have a kernel of their own stands here and in
// kernel_name() of paged_decode_metal.mm; everything else is a function constant.
#include "append.h"
#include "attend.h"
#include "fetch.h"
#include "merge.h"
#include "prefill.h"

using namespace paged_attn;

// Accumulators: at most 64 numbers a lane, so lane groups grow with dimensions times rows.
// clang-format off
#define ATTEND(type, T, dims, dims_v, lanes, rows, qv)                                                            \
  template [[host_name("attend_" #type "_d" #dims "_r" #rows)]] [[kernel]]                                        \
  decltype(attend<T, dims, dims_v, lanes, rows, qv>) attend<T, dims, dims_v, lanes, rows, qv>;

#define ATTEND_SHAPES(type, T)              \
  ATTEND(type, T, 64, 64, 8, 1, false)      \
  ATTEND(type, T, 64, 64, 8, 4, false)      \
  ATTEND(type, T, 64, 64, 8, 8, false)      \
  ATTEND(type, T, 128, 128, 8, 1, false)    \
  ATTEND(type, T, 128, 128, 8, 4, false)    \
  ATTEND(type, T, 128, 128, 16, 8, false)   \
  ATTEND(type, T, 256, 256, 8, 1, false)    \
  ATTEND(type, T, 256, 256, 16, 4, false)   \
  ATTEND(type, T, 256, 256, 32, 8, false)   \
  ATTEND(type, T, 768, 512, 32, 4, true)

ATTEND_SHAPES(f32, float)
ATTEND_SHAPES(f16, half)
ATTEND_SHAPES(bf16, bfloat)
ATTEND_SHAPES(fp8, uchar)

#define PREFILL(type, T, dims) \
  template [[host_name("prefill_" #type "_d" #dims)]] [[kernel]] decltype(prefill<T, dims>) prefill<T, dims>;

PREFILL(f16, half, 64)
PREFILL(f16, half, 128)
PREFILL(bf16, bfloat, 64)
PREFILL(bf16, bfloat, 128)
// clang-format on
