// What the CPU's kernels carve from the scratch memory that they ask for, for Python: with the settings of a processor
// that fetches by itself, whose tiles are the longest.
#define PD_LANES 4
#include "../../paged_decode_cpu/attend.h"
#include "module.h"

namespace paged_attn {

namespace {

int64_t carved(const Problem& p, const Item& item) {
  switch (p.cache.dtype) {
    case DType::kFloat32: return Scratch<OpsF32<DType::kFloat32>>(p, item, nullptr).bytes;
    case DType::kFloat16: return Scratch<OpsF32<DType::kFloat16>>(p, item, nullptr).bytes;
    case DType::kBFloat16: return Scratch<OpsF32<DType::kBFloat16>>(p, item, nullptr).bytes;
    case DType::kFloat8E4M3: return Scratch<OpsF32<DType::kFloat8E4M3>>(p, item, nullptr).bytes;
    case DType::kFloat8E5M2: return Scratch<OpsF32<DType::kFloat8E5M2>>(p, item, nullptr).bytes;
  }
  return 0;
}

}  // namespace

}  // namespace paged_attn

using namespace paged_attn;

void bind_scratch(py::module_& m) {
  // (bytes asked for, bytes carved by an item and then by a token of it that is done once more)
  m.def("bytes", [](const py::dict& d, int64_t heads, int64_t rows, bool small) {
    Made made;
    fill(made, d);
    Item item = {};
    item.kv_head_end = heads;
    item.row_end = rows;
    item.small = small;
    item.walk = {.reads_ahead_from = 2048, .long_tiles = true};
    const Item token = rows_of(item, 0, 0, pd_min(rows, made.p.group));
    return py::make_tuple(scratch_bytes_f32(made.p, item), carved(made.p, item) + carved(made.p, token));
  });
}
