// The shaders of the Metal backend. Which dimensions and rows have a kernel of their own stands here and in
// the plans of routes.mm; everything else, dtypes too, is a function constant.
//
// Fast math, but with infinities and NaN: else the compiler may drop every test for them, even one by bits.
#pragma METAL fp math_mode(relaxed)

#include "append.h"
#include "attend.h"
#include "fetch.h"
#include "merge.h"
#include "merge_parts.h"
#include "prefill.h"

// clang-format off
#define ATTEND(dims, dims_v, lanes, rows, qv)                             \
  template [[host_name("attend_d" #dims "_r" #rows)]] [[kernel]]          \
  decltype(attend<dims, dims_v, lanes, rows, qv>) attend<dims, dims_v, lanes, rows, qv>;

// Accumulators: at most 64 numbers a lane, so lane groups grow with dimensions times rows.
ATTEND(64, 64, 8, 1, false)
ATTEND(64, 64, 8, 2, false)
ATTEND(64, 64, 8, 4, false)
ATTEND(64, 64, 8, 8, false)
ATTEND(128, 128, 8, 1, false)
ATTEND(128, 128, 8, 2, false)
ATTEND(128, 128, 8, 4, false)
ATTEND(128, 128, 16, 8, false)
ATTEND(256, 256, 8, 1, false)
ATTEND(256, 256, 8, 2, false)
ATTEND(256, 256, 16, 4, false)
ATTEND(256, 256, 32, 8, false)
ATTEND(512, 512, 32, 4, false)
ATTEND(768, 512, 32, 4, true)

#define PREFILL(type, T, dims, rows)                                      \
  template [[host_name("prefill_" #type "_d" #dims "_r" #rows)]] [[kernel]] \
  decltype(prefill<T, dims, rows>) prefill<T, dims, rows>;

PREFILL(f16, half, 64, 16)
PREFILL(f16, half, 64, 32)
PREFILL(f16, half, 128, 16)
PREFILL(f16, half, 128, 32)
PREFILL(bf16, bfloat, 64, 16)
PREFILL(bf16, bfloat, 64, 32)
PREFILL(bf16, bfloat, 128, 16)
PREFILL(bf16, bfloat, 128, 32)
// clang-format on
