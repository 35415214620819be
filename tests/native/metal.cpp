// The plans of Metal's routes for Python, and where the threadgroups of their grids work: the shader's own code.
#define paged_attn paged_attn_metal  // other types of the same names as other devices'
#define PD_POSITION int              // as the shader has it

#include "module.h"

#include "item_host.h"    // how device.h, tables.h and item.h find the item of a threadgroup
#include "routes_host.h"  // routes.mm, on the stand-ins beside it

using namespace paged_attn;

namespace {

const Route& route_named(const std::string& name) {
  for (const Route& route : routes())
    if (name == route.name) return route;
  throw std::runtime_error("no route " + name);
}

// What item.h reads of the arguments, as call.mm and use_plan() set it.
Arguments arguments_of(const Problem& p, const Plan& plan) {
  Arguments a = {};
  a.batch = static_cast<int32_t>(p.batch);
  a.kv_heads = static_cast<int32_t>(p.kv_heads);
  a.group = static_cast<int32_t>(p.group);
  a.q_len = p.cu_seqlens_q ? 0 : static_cast<int32_t>(p.max_q_len);
  a.total_q = static_cast<int32_t>(p.total_q);
  a.seqlen_k = static_cast<int32_t>(p.seqlen_k);
  a.capacity = static_cast<int32_t>(pd_min(capacity_of(p), kMaxKeys));
  a.window_left = static_cast<int32_t>(pd_min(p.window_left, kMaxKeys));
  a.window_right = static_cast<int32_t>(pd_min(p.window_right, kMaxKeys));
  a.attention_chunk = static_cast<int32_t>(pd_min(p.attention_chunk, kMaxKeys));
  a.seqlen_new = static_cast<int32_t>(p.append.seqlen_new);
  a.num_splits = static_cast<int32_t>(pd_min(p.num_splits, INT32_MAX));
  a.max_splits = static_cast<int32_t>(plan.max_splits);
  a.split_keys = static_cast<int32_t>(plan.split_keys);
  a.wanted_splits = static_cast<int32_t>(plan.wanted_splits);
  a.split_rows = static_cast<int32_t>(plan.split_rows);
  a.packed_row_tiles = static_cast<int32_t>(plan.packed_row_tiles);
  return a;
}

Tables tables_of(const Problem& p) {
  has_block_table = p.cache.block_table.given;
  has_batch_idx = p.cache.cache_batch_idx.given;
  has_seqlens = p.cache_seqlens.given;
  has_leftpad = p.cache_leftpad.given;
  has_cu_seqlens_q = p.cu_seqlens_q.given;
  has_cu_seqlens_k = p.cache.cu_seqlens_k.given;
  has_new = p.append.k.given;
  has_cu_seqlens_new = p.append.cu_seqlens_k_new.given;
  page_size = static_cast<int>(p.cache.page_size);
  return {p.cache.block_table, p.cache.cache_batch_idx, p.cache_seqlens,          p.cache_leftpad,
          p.cu_seqlens_q,      p.cache.cu_seqlens_k,    p.append.cu_seqlens_k_new};
}

// What the grid of a kernel works on: (b, kv_head, first row, rows, first key, end of keys, split, splits). The rules
// which threadgroups go on and which have nothing to do are those of attend() and prefill().
py::list work_of(const Problem& p, const Plan& plan, const Dispatch& dispatch, bool prefill) {
  const Arguments a = arguments_of(p, plan);
  const Tables tables = tables_of(p);
  has_splits = plan.max_splits > 1;
  const int rows = static_cast<int>(prefill ? plan.prefill_rows : plan.rows);
  const int packed_row_tiles = prefill ? a.total_q * a.group / rows + a.batch : a.packed_row_tiles;
  const bool goes_on = !prefill && has_cu_seqlens_q && packed_row_tiles == 0;
  py::list found;
  const auto add = [&](ItemIndex index, uint32_t head) {
    const Item item = load_item(a, tables, index, static_cast<int>(head), rows);
    if (item.rows == 0 || index.split >= item.splits) return false;
    const bool many = item.request.q_len * a.group > kVectorRows;
    if (prefill ? !many : many && plan.prefill_rows > 0) return false;
    const KvRange keys = has_splits ? split_keys(item.keys, index.split, item.splits, kSimdWidth) : item.keys;
    found.append(
        py::make_tuple(item.b, head, item.first_row, item.rows, keys.begin, keys.end, index.split, item.splits));
    return goes_on;
  };
  const MTLSize grid = dispatch.threadgroups;
  for (uint32_t z = 0; z < grid.depth; ++z)
    for (uint32_t y = 0; y < grid.height; ++y)
      for (uint32_t x = 0; x < grid.width; ++x) {
        ItemIndex index = find_item(a, tables, {x, y, z}, rows, packed_row_tiles);
        while (index.b < a.batch && add(index, y)) ++index.row_tile;
      }
  return found;
}

}  // namespace

void bind_metal(py::module_& m) {
  m.def("why_not", [](const py::dict& d) {
    Made made;
    fill(made, d);
    py::dict reasons;
    for (const Route& route : routes()) reasons[route.name] = route.why_not(made.p);
    return reasons;
  });
  m.def("plan", [](const py::dict& d, const std::string& name) {
    Made made;
    fill(made, d);
    const Route& route = route_named(name);
    const Plan plan = route.plan(made.p);
    py::dict r;
    r["rows"] = plan.rows;
    r["dims"] = plan.dims;
    r["simdgroups"] = plan.simdgroups;
    r["prefill_rows"] = plan.prefill_rows;
    r["max_splits"] = plan.max_splits;
    r["split_rows"] = plan.split_rows;
    r["packed_row_tiles"] = plan.packed_row_tiles;
    py::list dispatches;
    for (const Dispatch& dispatch : route.dispatches(made.p, plan)) {
      const MTLSize& grid = dispatch.threadgroups;
      dispatches.append(py::make_tuple(dispatch.kernel, grid.width, grid.height, grid.depth, dispatch.threads));
    }
    r["dispatches"] = dispatches;
    return r;
  });
  m.def("deal", [](const py::dict& d, const std::string& name) {
    Made made;
    fill(made, d);
    const Problem& p = made.p;
    const Route& route = route_named(name);
    const Plan plan = route.plan(p);
    py::dict kernels;
    for (const Dispatch& dispatch : route.dispatches(p, plan)) {
      if (dispatch.kernel == "merge") continue;
      kernels[dispatch.kernel.c_str()] = work_of(p, plan, dispatch, dispatch.kernel.rfind("prefill", 0) == 0);
    }
    return kernels;
  });
}
