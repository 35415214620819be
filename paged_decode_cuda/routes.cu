#include "routes.h"

#include "decode/route.h"
#include "fallback/route.h"
#include "float32/route.h"
#include "mla/route.h"
#include "prefill/route.h"
#include "prefill_mma/route.h"

namespace paged_attn {

const Route kRoutes[] = {
    make_route<mla_why_not, plan_mla, mla_numbers, add_mla>("mla"),
    make_route<wide_heads_why_not, plan_mla, mla_numbers, add_mla>("wide_heads"),
    make_route<prefill_why_not, plan_prefill, prefill_numbers, add_prefill>("prefill"),
    make_route<float32_why_not, plan_float32, float32_numbers, add_float32>("float32"),
    make_route<prefill_mma_why_not, plan_prefill_mma, prefill_mma_numbers, add_prefill_mma>("prefill_mma"),
    make_route<decode_basic_why_not, plan_decode_basic, decode_numbers, add_decode>("decode_basic"),
    make_route<decode_why_not, plan_decode, decode_numbers, add_decode>("decode"),
    make_route<fallback_why_not, plan_fallback, fallback_numbers, add_fallback>("fallback"),
    {},
};

const Route& find_route(const Problem& p, const DeviceLimits& limits) {
  const Route* route = kRoutes;
  while (*route->why_not(p, limits) != '\0') ++route;
  return *route;
}

}  // namespace paged_attn
