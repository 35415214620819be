// The plans of CUDA's routes for Python, and how its kernels deal the keys to thread blocks: the device's own code, run
// by a warp of fibers.
#define paged_attn paged_attn_cuda  // other types of the same names as other devices'
#define PD_POSITION int32_t         // as nvcc has it

#include "module.h"

#include "balance.cuh"  // a copy beside the stand-in for ptx.cuh
#include "paged_decode_cuda/decode/plan.h"
#include "paged_decode_cuda/fallback_plan.h"
#include "paged_decode_cuda/layout.h"

using namespace paged_attn;

namespace {

DeviceLimits limits_of(const py::dict& d) {
  const int shared = static_cast<int>(number(d, "shared_per_block", 227 * 1024));
  return {static_cast<int>(number(d, "processors", 132)), shared,
          static_cast<int>(number(d, "shared_per_processor", shared + 1024))};
}

struct Planned {
  std::string route;
  Plan work;
  int64_t blocks, workspace_bytes, shared_bytes, block_bytes, warps, blocks_per_processor;
};

Planned planned(const std::string& route, const Problem& p, const DeviceLimits& limits) {
  if (route == "fallback") {
    const FallbackPlan plan = plan_fallback(p, limits);
    return {route, plan.work, plan.blocks, plan.workspace_bytes, 0, 0, kFallbackWarps, 0};
  }
  const DecodePlan plan = route == "decode_basic" ? plan_decode_basic(p, limits) : plan_decode(p, limits);
  return {route, plan.work, plan.blocks, plan.workspace_bytes, plan.shared_bytes, plan.instance.block_bytes, plan.warps,
          plan.blocks_per_processor};
}

using WhyNot = const char* (*)(const Problem&, const DeviceLimits&);
const std::vector<std::pair<const char*, WhyNot>> kOrder = {
    {"decode_basic", decode_basic_why_not}, {"decode", decode_why_not}, {"fallback", fallback_why_not}};

// The segments of one thread block: (item, head, first tile, end, how many parts are behind it).
py::list segments_of(const Problem& p, const Plan& plan, int block, int64_t blocks) {
  Walker walker = {};
  Dealing dealing = {};
  warp::run(block, static_cast<int>(blocks), [&](int lane) {
    Walker w = {};
    Dealing d = {};
    if (plan.blocks_each.divisor > 0) expect_even_stretch(p, plan, w);
    if (plan.balanced) {
      find_stretch(p, plan, w, d);
    } else {
      find_split(p, plan, w, d);
    }
    if (lane == 0) {
      walker = w;
      dealing = d;
    }
  });
  py::list found;
  Segment segment;
  Item item;
  while (walker.next(p, plan, dealing, segment, item))
    found.append(py::make_tuple(item.b, item.first_row, item.rows, segment.head, segment.tile, segment.tile_end,
                                item.first_tile, item.first_tile + item.tiles, segment.first,
                                parts_behind(item, segment, dealing), dealing.length));
  return found;
}

}  // namespace

void bind_cuda(py::module_& m) {
  m.attr("kMaxKeys") = kMaxKeys;
  m.def("why_not", [](const py::dict& d, const py::dict& device) {
    Made made;
    fill(made, d);
    py::dict reasons;
    for (const auto& [name, why_not] : kOrder) reasons[name] = why_not(made.p, limits_of(device));
    return reasons;
  });
  m.def("plan", [](const py::dict& d, const py::dict& device, const std::string& route) {
    Made made;
    fill(made, d);
    const Planned plan = planned(route, made.p, limits_of(device));
    py::dict r;
    r["blocks"] = plan.blocks;
    r["workspace_bytes"] = plan.workspace_bytes;
    r["shared_bytes"] = plan.shared_bytes;
    r["block_bytes"] = plan.block_bytes;
    r["warps"] = plan.warps;
    r["blocks_per_processor"] = plan.blocks_per_processor;
    r["balanced"] = plan.work.balanced;
    r["items"] = plan.work.items;
    r["rows_per_tile"] = plan.work.rows_per_tile;
    r["tile_keys"] = int64_t{1} << plan.work.tile_shift;
    r["min_units"] = plan.work.min_units;
    r["pair_cost"] = plan.work.pair_cost;
    r["max_splits"] = plan.work.max_splits.divisor;
    r["row_tiles"] = plan.work.row_tiles.divisor;
    return r;
  });
  m.def("deal", [](const py::dict& d, const py::dict& device, const std::string& route) {
    Made made;
    fill(made, d);
    const Planned plan = planned(route, made.p, limits_of(device));
    py::list blocks;
    for (int64_t block = 0; block < plan.blocks; ++block)
      blocks.append(segments_of(made.p, plan.work, static_cast<int>(block), plan.blocks));
    return blocks;
  });
  m.def("divide", [](int64_t divisor, int n) { return FastDivisor(divisor).divide(n); });
}
