// The instances of the kernel of few rows for one dtype.
#pragma once

#include "few_rows_kernel.cuh"
#include "instances.h"

namespace paged_attn {

template <typename Shape>
const void* find_few_rows_mla_kernel(bool basic) {
  return basic ? reinterpret_cast<const void*>(&basic_few_rows_mla_kernel<Shape>)
               : reinterpret_cast<const void*>(&few_rows_mla_kernel<Shape>);
}

template <typename Type, bool kLatents>
const void* find_few_rows_mla_kernel(int rows, bool basic) {
  return rows <= FewRowsSizes<2, kLatents>::kRows ? find_few_rows_mla_kernel<FewRowsShape<Type, 2, kLatents>>(basic)
                                                  : find_few_rows_mla_kernel<FewRowsShape<Type, 4, kLatents>>(basic);
}

template <typename Type>
const void* find_few_rows_mla_kernel(int rows, bool latents, bool basic) {
  return latents ? find_few_rows_mla_kernel<Type, true>(rows, basic)
                 : find_few_rows_mla_kernel<Type, false>(rows, basic);
}

}  // namespace paged_attn
