// The shaders of the Metal backend. Which dimensions and rows have a kernel of their own stands here and in kernel_for()
// of paged_decode_metal.mm; everything else, dtypes too, is a function constant.
#include "append.h"
#include "attend.h"
#include "fetch.h"
#include "merge.h"
#include "prefill.h"

using namespace paged_attn;

// clang-format off
#define ATTEND(dims, dims_v, lanes, rows, qv)                             \
  template [[host_name("attend_d" #dims "_r" #rows)]] [[kernel]]          \
  decltype(attend<dims, dims_v, lanes, rows, qv>) attend<dims, dims_v, lanes, rows, qv>;

// Accumulators: at most 64 numbers a lane, so lane groups grow with dimensions times rows.
ATTEND(64, 64, 8, 1, false)
ATTEND(64, 64, 8, 4, false)
ATTEND(64, 64, 8, 8, false)
ATTEND(128, 128, 8, 1, false)
ATTEND(128, 128, 8, 4, false)
ATTEND(128, 128, 16, 8, false)
ATTEND(256, 256, 8, 1, false)
ATTEND(256, 256, 16, 4, false)
ATTEND(256, 256, 32, 8, false)
ATTEND(768, 512, 32, 4, true)

#define PREFILL(type, T, dims) \
  template [[host_name("prefill_" #type "_d" #dims)]] [[kernel]] decltype(prefill<T, dims>) prefill<T, dims>;

PREFILL(f16, half, 64)
PREFILL(f16, half, 128)
PREFILL(bf16, bfloat, 64)
PREFILL(bf16, bfloat, 128)
// clang-format on
