"""Plants faults on purpose, one at a time, and reports which of them the tests catch.

    python tools/plant_faults.py                     every fault of the CPU, the shared layer and the planners
    python tools/plant_faults.py --group metal       on the emulated Apple GPU
    python tools/plant_faults.py --group amx         with emulated tiles of Intel's matrix unit
    python tools/plant_faults.py --group cuda        on a machine with a GPU
    python tools/plant_faults.py --only tail --list
    python tools/plant_faults.py --done caught.txt --seconds 240    some now, the others later

Each is a small change of one file in a scratch copy of the tree, built incrementally, with the tests that must fail on
it. A fault is caught if a test fails; an error before the tests, as of code that does not compile, catches none. One
that does not apply any more is to be written anew (test_suite.py looks). docs/testing.md tells what was found.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Fault:
    name: str
    group: str  # native: no build but that of the tests; python: no build; cpu, amx, metal, cuda: that backend
    file: str
    old: str
    new: str
    tests: str  # arguments of pytest in tests/


RANGES, STATE, SCORE, REQUEST = (f"torch-ext/spec/{name}.h" for name in ("ranges", "state", "score", "request"))
CPU, CPU_PLAN, ATTEND = (f"paged_decode_cpu/{name}" for name in ("paged_decode_cpu.cpp", "plan.cpp", "attend.h"))
PLAN, BALANCE, ITEMS = (f"paged_decode_cuda/{name}" for name in ("decode/plan.cpp", "balance.cuh", "items.cuh"))
METAL_ITEM, METAL_ROUTES = "paged_decode_metal/item.h", "paged_decode_metal/routes.mm"
ATTENTION, CALL = "torch-ext/paged_attn/attention.py", "torch-ext/paged_attn/_call.py"
LONG_QUERIES = "paged_decode_cuda/plan.cpp"
PREFILL_PLAN, PREFILL_ORDER = "paged_decode_cuda/prefill/plan.cpp", "paged_decode_cuda/prefill/schedule.cuh"
PREFILL_CUTS = "paged_decode_cuda/prefill/cuts.cuh"
DECODE_LOADER = "paged_decode_cuda/decode/loader.cuh"
WGMMA_KERNEL, WGMMA_ROWS, WGMMA_LOADER, WGMMA_WIDE_END = (
    f"paged_decode_cuda/decode/wgmma_{name}.cuh" for name in ("kernel", "rows", "loader", "wide_end")
)
LATENT_ROWS = "paged_decode_cuda/mla/few_rows_products.cuh"
ANY_KERNEL, ANY_LOADER, ANY_PRODUCTS, ANY_PLAN = (
    f"paged_decode_cuda/fallback/{name}" for name in ("kernel.cuh", "loader.cuh", "products.cuh", "plan.cpp")
)
PLAN_CUTS, PLAN_TILES = (f"paged_decode_cuda/prefill/plan_{name}.cpp" for name in ("cuts", "tiles"))
FA3, MERGE = "torch-ext/paged_attn/fa3.py", "torch-ext/paged_attn/merge.py"
PAGES, AMX = "torch-ext/paged_attn/integrations/paged_cache.py", "paged_decode_cpu/ops_amx.h"
CUDA_PLANS, PREFILL_PLANS = "test_cuda_plans.py", "test_prefill_plans.py"

FAULTS = [
    # What a call means
    Fault("causal off by one", "native", RANGES, "q_pos + window_right + 1)", "q_pos + window_right)", "test_spec.py"),
    Fault(
        "left window off by one", "native", RANGES, "q_pos - window_left)", "q_pos - window_left + 1)", "test_spec.py"
    ),
    Fault(
        "chunks from slot 0",
        "native",
        RANGES,
        "leftpad + chunk_of(q_pos - leftpad) * attention_chunk",
        "chunk_of(q_pos) * attention_chunk",
        "test_spec.py",
    ),
    Fault(
        "a share lost",
        "native",
        RANGES,
        "(units + num_splits - 1) / num_splits",
        "units / num_splits",
        "test_spec.py test_plans.py",
    ),
    Fault(
        "a share twice",
        "native",
        RANGES,
        "s.begin = pd_earlier(r.end, pd_later(r.begin, begin));",
        "s.begin = pd_earlier(r.end, pd_later(r.begin, begin - align));",
        "test_spec.py test_plans.py",
    ),
    Fault(
        "sink without weight",
        "native",
        STATE,
        "(sink_m == PD_EMPTY ? 0.f : pd_rescale(sink_m, new_m))",
        "0.f",
        "test_spec.py",
    ),
    Fault(
        "two empty parts make NaN",
        "native",
        STATE,
        "from == to ? 1.f : PD_EXP2(from - to)",
        "PD_EXP2(from - to)",
        "test_spec.py",
    ),
    Fault("lse in log2 units", "native", STATE, "(m + PD_LOG2(l)) * PD_LN2", "(m + PD_LOG2(l))", "test_spec.py"),
    Fault(
        "softcap after the slope",
        "native",
        SCORE,
        "  return s - distance * slope;",
        "  s = s - distance * slope;\n  return softcap != 0.f ? pd_tanh(s * (1.f / softcap)) * softcap : s;",
        "test_spec.py",
    ),
    Fault("padded entries count", "native", REQUEST, "r.old_len = r.new_len = 0;", "r.old_len = 0;", "test_spec.py"),
    Fault(
        "rows of the batch ignored",
        "native",
        REQUEST,
        "c.cache_batch_idx ? c.cache_batch_idx[b] : b",
        "b",
        "test_spec.py",
    ),
    Fault(
        "one page too many is fine",
        "native",
        "torch-ext/spec/check_tables.h",
        "page < c.num_pages",
        "page <= c.num_pages",
        "test_spec.py",
    ),
    Fault(
        "one page too many leaves no mark",
        "native",
        "torch-ext/spec/check_tables.cpp",
        "pd_min(c.num_pages - 1,",
        "pd_min(c.num_pages,",
        "test_spec.py",
    ),
    Fault(
        "a message renamed",
        "native",
        "torch-ext/spec/check_tables.cpp",
        'bad_value("cache_leftpad"',
        'bad_value("leftpad"',
        "test_spec.py",
    ),
    # Planners
    Fault(
        "always one split",
        "native",
        CPU_PLAN,
        "return pd_max(pd_max(1, least), pd_min(pd_ceil_div(cost_of(item), pd_max(task_cost, 1)), most));",
        "return 1;",
        "test_plans.py",
    ),
    Fault(
        "the batch decides deterministic cuts",
        "native",
        CPU_PLAN,
        "if (p.deterministic || p.num_splits > 0) return Cut::kFixed;",
        "if (p.num_splits > 0) return Cut::kFixed;",
        "test_plans.py",
    ),
    Fault(
        "keys that no row sees count",
        "native",
        CPU_PLAN,
        "of_request.push_back(keys.end - keys.begin);",
        "of_request.push_back(r.kv_len);",
        "test_plans.py",
    ),
    Fault(
        "every split is worth its merge",
        "native",
        CPU_PLAN,
        "if (splits == 1 || task_cost < best.task_cost)",
        "if (splits >= 1)",
        "test_plans.py",
    ),
    Fault(
        "partial results without a bound",
        "native",
        CPU_PLAN,
        "pd_min(splits, most_splits(p, item.batch))",
        "splits",
        "test_plans.py",
    ),
    Fault(
        "partial results overlap",
        "native",
        CPU_PLAN,
        "plan.partial_floats += work.num_splits *",
        "plan.partial_floats += (work.num_splits - 1) *",
        "test_plans.py",
    ),
    Fault(
        "the last rows of an item forgotten",
        "native",
        CPU_PLAN,
        "work.item.row_end = end;",
        "work.item.row_end = end - (end > 200);",
        "test_plans.py",
    ),
    Fault(
        "Metal: a tile of rows nobody owns",
        "native",
        METAL_ITEM,
        "* group / rows + b; }",
        "* group / rows; }",
        "test_plans.py",
    ),
    Fault(
        "Metal: a share of the keys lost",
        "native",
        METAL_ITEM,
        "split = 1 + (x - packed_row_tiles)",
        "split = (x - packed_row_tiles)",
        "test_plans.py",
    ),
    Fault(
        "Metal: rows past max_seqlen_q dropped",
        "native",
        METAL_ROUTES,
        "p.total_q * p.group / rows + p.batch",
        "p.total_q * p.group / rows",
        "test_plans.py",
    ),
    Fault(
        "CUDA: shared memory of another GPU",
        "native",
        PLAN,
        "(limits.shared_per_block - instance.block_bytes - instance.query_bytes)",
        "(227 * 1024 - instance.block_bytes - instance.query_bytes)",
        CUDA_PLANS,
    ),
    Fault(
        "CUDA: partials behind a segment miscounted",
        "native",
        BALANCE,
        "(rest - 1) / dealing.length + 1",
        "rest / dealing.length + 1",
        CUDA_PLANS,
    ),
    Fault(
        "CUDA: the last unit of a stretch lost",
        "native",
        BALANCE,
        "walker.left = max(0, end - position);",
        "walker.left = max(0, end - position - 1);",
        CUDA_PLANS,
    ),
    Fault(
        "CUDA: a route closed",
        "native",
        PLAN,
        'if (!c.block_table) return "no block_table";',
        'return "no block_table";',
        CUDA_PLANS,
    ),
    Fault(
        "halves of a group: the second half reads the keys of the next KV head",
        "native",
        DECODE_LOADER,
        "segment.head >> plan.key_head_shift",
        "segment.head",
        "test_decode_host.py",
    ),
    Fault(
        "warpgroups: weights in one buffer",
        "native",
        WGMMA_KERNEL,
        "turn ^= Shape::kWeightBytes;",
        "turn ^= 0;",
        "test_decode_host.py",
    ),
    Fault(
        "warpgroups: keys of the next block are seen",
        "native",
        WGMMA_ROWS,
        "min(static_cast<int>(keys.end), end_key)",
        "static_cast<int>(keys.end)",
        "test_decode_host.py",
    ),
    Fault(
        "warpgroups: a wide item takes the factor of its own sums for those of the other consumer",
        "native",
        WGMMA_WIDE_END,
        "look_up(tables().own[1 - Shape::consumer()], factors);",
        "look_up(tables().own[Shape::consumer()], factors);",
        "test_decode_host.py",
    ),
    Fault(
        "warpgroups: weights of the next segment while somebody reads what was given",
        "native",
        WGMMA_WIDE_END,
        "WgmmaRows<Shape>::sync();  // what was given",
        "__syncwarp();  // what was given",
        "test_decode_host.py",
    ),
    Fault(
        "warpgroups: pages of the batch before",
        "native",
        WGMMA_LOADER,
        "unit + now.kTiles * Shape::kUnits, end_unit",
        "unit, end_unit",
        "test_decode_host.py",
    ),
    Fault(
        "fallback: of two tiles in turns a row has one reference score",
        "native",
        ANY_PRODUCTS,
        "references[odd * Shape::kRows + lane_row(r, half)];",
        "references[lane_row(r, half)];",
        "test_fallback_host.py",
    ),
    Fault(
        "fallback: warps that share dimensions overwrite each other's sums",
        "native",
        ANY_KERNEL,
        "own.dim, part > 0)",
        "own.dim, false)",
        "test_fallback_host.py",
    ),
    Fault(
        "fallback: the end reads behind the sums of the last row",
        "native",
        ANY_KERNEL,
        "min(quad, plan.partial_quads - 1)",
        "quad",
        "test_fallback_host.py",
    ),
    Fault(
        "fallback: the last numbers of a row are those of the next one",
        "native",
        ANY_LOADER,
        "const int left = row ? bytes - at : 0;",
        "const int left = row ? (bytes - at + 15) / 16 * 16 : 0;",
        "test_fallback_host.py",
    ),
    Fault(
        "fallback: rows that begin at multiples of 8 bytes are loaded by 16",
        "native",
        ANY_PLAN,
        "row * bytes % grain == 0;",
        "true;",
        "test_fallback_host.py",
    ),
    Fault(
        "latents: a part is free before it is added",
        "native",
        LATENT_ROWS,
        "products_wait<kBehind>();\n    release();",
        "release();",
        "test_mla_host.py",
    ),
    Fault(
        "latents: weights of the next tile while somebody multiplies these",
        "native",
        LATENT_ROWS,
        "turn ^= Shape::kWeightBytes;",
        "turn = 0;",
        "test_mla_host.py",
    ),
    Fault(
        "latents: two lanes trade the wrong row",
        "native",
        LATENT_ROWS,
        "odd ? first_row : second_row, 4",
        "odd ? second_row : first_row, 4",
        "test_mla_host.py",
    ),
    Fault(
        "prefill: one row more for the decode kernel",
        "native",
        LONG_QUERIES,
        "longest_query(p) * p.group <= most",
        "longest_query(p) * p.group <= most + p.group",
        PREFILL_PLANS,
    ),
    Fault(
        "prefill: a hint of all tokens is believed",
        "native",
        LONG_QUERIES,
        "const bool says_nothing = p.cu_seqlens_q && said == p.total_q && p.batch > 1;",
        "const bool says_nothing = false;",
        PREFILL_PLANS,
    ),
    Fault(
        "prefill: a box begins inside the swizzle",
        "native",
        PREFILL_PLAN,
        "rows % kSwizzledRows == 0",
        "rows % (kSwizzledRows / 2) == 0",
        PREFILL_PLANS,
    ),
    Fault(
        "deterministic: lengths of packed requests choose the kernel",
        "native",
        LONG_QUERIES,
        "return p.deterministic && p.cu_seqlens_q;",
        "return false;",
        "test_prefill_plans.py test_cuda_plans.py test_mla_host.py",
    ),
    Fault(
        "prefill: deterministic and splits, as many as memory allows for the batch",
        "native",
        PREFILL_PLAN,
        "if (p.deterministic && splits > 1)",
        "if (p.deterministic && splits > kPartialTiles)",
        PREFILL_PLANS,
    ),
    Fault(
        "prefill: deterministic depends on the batch",
        "native",
        PREFILL_PLAN,
        "if (!p.deterministic && tiles * splits * kFewTiles",
        "if (tiles * splits * kFewTiles",
        PREFILL_PLANS,
    ),
    Fault(
        "prefill: the last section of kv_heads is taken for whole",
        "native",
        PREFILL_ORDER,
        "min(together, pieces - section_begin)",
        "together",
        PREFILL_PLANS,
    ),
    Fault(
        "prefill: row tiles of lower buckets again",
        "native",
        PREFILL_ORDER,
        "own.below + own.in_bucket - 1 - up",
        "own.in_bucket - 1 - up",
        PREFILL_PLANS,
    ),
    Fault(
        "prefill: a row tile with no key is nobody's",
        "native",
        PREFILL_ORDER,
        "own.rows = plan.tile_rows.divide(max(0, rows));",
        "own.rows = min(last.kv_len, plan.tile_rows.divide(max(0, rows)));",
        PREFILL_PLANS,
    ),
    Fault(
        "prefill: a block's first tile is of the first request's heads",
        "native",
        PREFILL_ORDER,
        "const int piece = index - (ends - own.rows * pieces),",
        "const int piece = index,",
        PREFILL_PLANS,
    ),
    Fault(
        "prefill: tiles in any order where blocks have several",
        "native",
        PREFILL_ORDER,
        "one_bucket || all <= plan.blocks_in_grid",
        "one_bucket || all <= 9 * plan.blocks_in_grid",
        PREFILL_PLANS,
    ),
    Fault(
        "prefill: tiles of many keys in any order",
        "native",
        PREFILL_ORDER,
        "known.longest * Shape::kKeys > kFewKeysOfTile",
        "known.longest * Shape::kKeys > 9 * kFewKeysOfTile",
        PREFILL_PLANS,
    ),
    Fault(
        "prefill: tiles of whole tokens are counted as full ones",
        "native",
        PLAN_TILES,
        "const int64_t tiles = most_tiles(p, instance.tile_rows);",
        "const int64_t tiles = most_tiles(p, instance.rows);",
        PREFILL_PLANS,
    ),
    Fault(
        "prefill: few tiles are cut for those that there may be",
        "native",
        PLAN_CUTS,
        "cut_to_fill(p, times, likely, keys",
        "cut_to_fill(p, times, tiles, keys",
        PREFILL_PLANS,
    ),
    Fault(
        "prefill: a multiprocessor takes most of the blocks that add partials",
        "native",
        PREFILL_PLAN,
        "pd_max(pd_ceil_div(plan.combine_blocks, processors), 2)",
        "pd_max(pd_ceil_div(plan.combine_blocks, processors), 16)",
        PREFILL_PLANS,
    ),
    Fault(
        "prefill: a long request has no more splits than others",
        "native",
        PREFILL_CUTS,
        "splits < 1.25f * static_cast<float>(plan.splits);",
        "splits < 125.f * static_cast<float>(plan.splits);",
        PREFILL_PLANS,
    ),
    Fault(
        "prefill: short requests have as many splits as the longest",
        "native",
        PREFILL_CUTS,
        "if (splits * tiles_of_rows <= grid) return;",
        "return;",
        PREFILL_PLANS,
    ),
    Fault(
        "prefill: many requests in no order",
        "native",
        PREFILL_ORDER,
        "number = bucket_of(known.longest, own.most, splits);",
        "number = kFirstBucket - 1;",
        PREFILL_PLANS,
    ),
    Fault(
        "prefill: rows whose keys are whole are added too",
        "native",
        "paged_decode_cuda/prefill/shape.cuh",
        "return !cut && split_rate != kWhole;",
        "return false;",
        "test_prefill_host.py",
    ),
    Fault(
        "prefill: a warp lets the next kernel start before it is said that cuts are not yet known",
        "native",
        "paged_decode_cuda/prefill/kernel.cuh",
        "if (!writes || threadIdx.x == 0) let_successor_start();",
        "let_successor_start();",
        "test_prefill_host.py",
    ),
    Fault(
        "prefill: a block without a first tile multiplies one",
        "native",
        PREFILL_ORDER,
        "return take_none(work);  // so far",
        "return false;",
        "test_prefill_host.py -k falls",
    ),
    # Python
    Fault(
        "dropout swallowed",
        "python",
        CALL,
        " or dropout_p:\n",
        ":\n",
        "test_errors.py -k dropout",
    ),
    Fault(
        "real values of unknown features swallowed",
        "python",
        CALL,
        "if value is not None and value is not False:",
        "if False:",
        "test_keywords.py test_fuzz.py -k 'not by_hand'",
    ),
    Fault(
        "causal forgets itself",
        "python",
        CALL,
        "        if causal:\n            window_right = 0\n",
        "",
        "test_decode.py -k causal",
    ),
    Fault(
        "the scale of qv",
        "python",
        CALL,
        "(head_dim if qv is None else head_dim + head_dim_v) or 1",
        "head_dim or 1",
        "test_decode.py -k qv",
    ),
    Fault(
        "fa3: the scale of the values for the keys",
        "python",
        FA3,
        "qv, q_descale, k_descale, v_descale,\n        rotary_cos,",
        "qv, q_descale, v_descale, v_descale,\n        rotary_cos,",
        "test_fa3.py",
    ),
    Fault(
        "fa3: values as keys without their scale",
        "python",
        FA3,
        "return qv, v_cache, None, v_descale",
        "return qv, v_cache, None, None",
        "test_fa3.py",
    ),
    Fault(
        "fa3: lse by heads and tokens",
        "python",
        FA3,
        "lse.T if s_merged is None else s_merged",
        "lse if s_merged is None else s_merged",
        "test_fa3.py",
    ),
    Fault(
        "fa3: tokens past seqused_k count",
        "python",
        FA3,
        "q, k, v, out, return_lse, seqused_k, page_table",
        "q, k, v, out, return_lse, None if page_table is None else seqused_k, page_table",
        "test_fa3.py",
    ),
    Fault(
        "merge: two empty parts make NaN",
        "python",
        MERGE,
        "torch.where(lse_b == larger, 1.0, torch.exp(lse_b - larger))",
        "torch.exp(lse_b - larger)",
        "test_splits.py -k merge",
    ),
    Fault(
        "pages: a fork writes into a shared page",
        "python",
        PAGES,
        "if self.owners[old] > 1:",
        "if self.owners[old] > 99:",
        "test_paged_cache.py -k fork",
    ),
    Fault(
        "pages: none is ever free again",
        "python",
        PAGES,
        "            if self.owners[page] == 0:\n",
        "            if self.owners[page] < 0:\n",
        "test_paged_cache.py -k samples_continue",
    ),
    Fault(
        "pages: cropped by a page too many",
        "python",
        PAGES,
        "        keep = -(-length // self.page_size)\n        with",
        "        keep = length // self.page_size\n        with",
        "test_paged_cache.py -k samples_continue",
    ),
    # The CPU
    Fault(
        "q_descale ignored",
        "cpu",
        "paged_decode_cpu/scratch.h",
        "p.scale * q_descale *",
        "p.scale *",
        "test_decode.py -k q_e4m3",
    ),
    Fault(
        "tokens of no request left alone",
        "cpu",
        CPU,
        "  clear_unclaimed(p);\n",
        "",
        "test_decode.py test_fuzz.py -k 'spare or random_calls'",
    ),
    Fault(
        "the last split not merged",
        "cpu",
        ATTEND,
        "      for (int64_t i = 0; i < count; ++i) {",
        "      for (int64_t i = 0; i < count - 1; ++i) {",
        "test_splits.py -k any_number",
    ),
    Fault(
        "slopes of another head",
        "cpu",
        ATTEND,
        "(item.row_begin + r) % p.group];",
        "r % p.group];",
        "test_decode.py -k many_rows_know",
    ),
    Fault(
        "wrong tail lanes",
        "cpu",
        "paged_decode_cpu/vec.h",
        "  memcpy(padded, source, n * dtype_bytes(kType));\n  return",
        "  memcpy(padded, source, (n >= 4 && n <= 6 ? n - 1 : n) * dtype_bytes(kType));\n  return",
        "test_decode.py -k test_tail",
    ),
    Fault(
        "packed products never",
        "cpu",
        "paged_decode_cpu/ops_f32.h",
        "kLanes == 16 ? (kFp8 ? 16 : 24) : kLanes == 8 ? 20 : 12",
        "1 << 20",
        "test_explain.py",
    ),
    Fault(
        "descale of the first kv_head for all",
        "cpu",
        "paged_decode_cpu/write.h",
        "c.k_descale_stride_head, w.batch, h)",
        "c.k_descale_stride_head, w.batch, 0)",
        "test_append.py -k descale",
    ),
    Fault(
        "8-bit keys stored by their values",
        "cpu",
        "paged_decode_cpu/write.h",
        "if (!rotated && a.dtype == c.dtype) {",
        "if (!rotated && a.dtype == c.dtype && dtype_bytes(c.dtype) > 1) {",
        "test_append.py -k byte_for_byte",
    ),
    Fault(
        "CPU: sums that are not finite stay as they are",
        "cpu",
        "paged_decode_cpu/attend.h",
        "if (add_lanes(bit_cast<f32v>(zero)) != 0.f)",
        "if (false)",
        "test_edges.py -k infinite_values_that_some",
    ),
    # The CPU's matrix unit, in emulated tiles
    Fault(
        "AMX: masks forgotten where only a factor is wanted",
        "amx",
        AMX,
        "if (whole) return",
        "if (true) return",
        "test_amx.py -k 'edges_of_tiles and 33'",
    ),
    Fault(
        "AMX: the largest score of a negative scale",
        "amx",
        AMX,
        " && s.scales[h].score > 0.f;",
        ";",
        "test_amx.py -k 'edges_of_tiles and scale'",
    ),
    Fault(
        "AMX: half of the probabilities are not in the sum",
        "amx",
        AMX,
        "store<DType::kFloat32>(l, sum + sum1);",
        "store<DType::kFloat32>(l, sum);",
        "test_amx.py -k 'many_tiles'",
    ),
    Fault(
        "AMX: scores without the product of the second pieces",
        "amx",
        AMX,
        "kRightPieces, true> kScoreProducts",
        "kRightPieces, false> kScoreProducts",
        "test_amx.py -k 'many_tiles and float16'",
    ),
    # Metal, on the emulated GPU
    Fault(
        "Metal: q_descale ignored",
        "metal",
        METAL_ITEM,
        "return has_q_descale ? descale_at(operands.q_descale",
        "return false ? descale_at(operands.q_descale",
        "test_decode.py -k q_e4m3",
    ),
    Fault(
        "Metal: tokens of no request left alone",
        "metal",
        METAL_ITEM,
        "  if (!has_cu_seqlens_q) return;\n",
        "  return;\n",
        "test_decode.py -k spare",
    ),
    Fault(
        "Metal: prefill closed",
        "metal",
        METAL_ROUTES,
        'if (p.qv) return "expected no qv, got one";\n  if (widest_dim(p) > kPrefillDims)',
        'return "closed";\n  if (widest_dim(p) > kPrefillDims)',
        "test_metal.py",
    ),
    Fault(
        "Metal: the barrier that ends the loop over rows",
        "metal",
        "paged_decode_metal/attend.h",
        "    threadgroup_barrier(mem_flags::mem_threadgroup);  // the next",
        "    // the next",
        "'test_metal_variants.py::test_every_feature[tsan]'",
    ),
    # CUDA, on a GPU
    Fault(
        "CUDA: softcap loses small scores",
        "cuda",
        "paged_decode_cuda/ptx.cuh",
        "  return x * above * fast_reciprocal(below);",
        "  return 1.f - 2.f / (exp2f(2.f * PD_LOG2E * x) + 1.f);",
        "test_edges.py -k softcap",
    ),
    Fault(
        "CUDA: q not rotated without a new token",
        "cuda",
        "paged_decode_cuda/backend.cu",
        "return appends(p) && p.rotary.cos;",
        "return appends(p) && p.rotary.cos && p.append.total_new;",
        "test_decode.py -k rotary_without",
    ),
]


# A build whose processor is said to have tiles, see test_amx.py.
EMULATED_TILES = "g++ -include {tests}/amx/emulated_tiles.h -DPD_MIN_TILE_ROWS=1"


def does_not_apply(fault, folder=ROOT):
    """Why, or ""."""
    count = (folder / fault.file).read_text().count(fault.old)
    return "" if count == 1 else f"{fault.name}: expected the text once in {fault.file}, found it {count} times"


class Scratch:
    """A copy of the tree without what is ignored; builds stay from fault to fault."""

    def __init__(self, folder):
        self.folder, self.isa = folder, ""
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in listed.split():
            target = folder / name
            content = (ROOT / name).read_bytes()
            if not target.exists() or target.read_bytes() != content:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)

    def plant(self, fault):
        """Plants it; what is returned takes it out again."""
        if reason := does_not_apply(fault, self.folder):
            sys.exit(reason)
        path = self.folder / fault.file
        if fault.group == "cpu" and path.suffix == ".h":
            return self.plant_for_one_isa(fault, path)
        before = path.read_text()
        path.write_text(before.replace(fault.old, fault.new))
        return lambda: path.write_text(before)

    def plant_for_one_isa(self, fault, path):
        """In copies of the headers that only the kernels of this processor include: one file is compiled, not five."""
        copies = path.parent / "planted"
        shutil.copytree(path.parent, copies, dirs_exist_ok=True, ignore=shutil.ignore_patterns(copies.name))
        (copies / path.name).write_text(path.read_text().replace(fault.old, fault.new))
        kernels = path.parent / f"kernel_{self.isa}.cpp"
        before = kernels.read_text()
        kernels.write_text(f'#include "{copies.name}/{kernels.name}"\n')
        return lambda: kernels.write_text(before)

    def build(self, group):
        """The build directory."""
        if group == "metal":
            command = [sys.executable, "tools/metal_emulator/metal_build.py"]
        elif group == "amx":
            cxx = EMULATED_TILES.format(tests=self.folder / "tests")
            out = self.folder / "build-emulated-amx"
            command = [sys.executable, "tools/local_build.py", "--backend", "cpu", "--cxx", cxx, "--out", out]
        else:
            command = [sys.executable, "tools/local_build.py", "--backend", "cuda" if group == "cuda" else "cpu"]
        run = subprocess.run(command, cwd=self.folder, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(run.stdout[-3000:] + run.stderr[-3000:])
        build = run.stdout.strip().splitlines()[-1]
        if group == "cpu" and not self.isa:
            self.isa = self.isa_of(build)
        return build

    def isa_of(self, build):
        """The instruction set whose kernels run here."""
        environment = os.environ | {"LOCAL_KERNELS": f"org/paged-attn={build}", "PAGED_ATTN_TEST_DEVICE": "cpu"}
        command = [sys.executable, "-c", "import test_isa; print(test_isa.answer())"]
        run = subprocess.run(command, cwd=self.folder / "tests", env=environment, capture_output=True, text=True)
        return run.stdout.split()[0]

    def test(self, fault, build, limit):
        """Whether the tests fail, and the first that does. An error of the tests themselves is none of them."""
        device = {"metal": "mps", "cuda": "cuda"}.get(fault.group, "cpu")
        environment = os.environ | {
            "LOCAL_KERNELS": f"org/paged-attn={build}", "PAGED_ATTN_TEST_DEVICE": device, "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        words = f"{sys.executable} -m pytest -q -x -p no:cacheprovider --tb=line {fault.tests}"
        run = subprocess.run(
            words, cwd=self.folder / "tests", env=environment, shell=True, capture_output=True, text=True, timeout=limit
        )
        if run.returncode not in (0, 1):
            raise RuntimeError(run.stdout[-2000:] + run.stderr[-2000:])
        failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if failed and failed[0].startswith("ERROR"):
            raise RuntimeError(f"{failed[0]}\n{run.stdout[-2000:]}")
        return run.returncode == 1, failed[0][:150] if failed else run.stdout.strip().splitlines()[-1]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--group", nargs="*", default=["native", "python", "cpu"], help="default: %(default)s")
    parser.add_argument("--only", default="", help="faults whose names hold this")
    parser.add_argument("--scratch", type=Path, default=ROOT / "build" / ".faults", help="default: build/.faults")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th from the I-th on, for N scratch copies at once")
    parser.add_argument(
        "--done", type=Path, help="a file of the names that were caught: they are skipped, others added"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="plant nothing more after so many")
    parser.add_argument("--limit", type=float, default=900, help="seconds for the tests of a fault")
    parser.add_argument("--list", action="store_true", help="list them, plant none")
    return parser.parse_args()


def main():
    options = parse_arguments()
    chosen = [f for f in FAULTS if f.group in options.group and options.only in f.name]
    done = options.done.read_text().splitlines() if options.done and options.done.exists() else []
    chosen = [f for f in chosen if f.name not in done]
    part, parts = (int(number) for number in options.part.split("/"))
    chosen = chosen[part::parts]
    if options.list:
        for fault in chosen:
            print(f"{fault.group:7} {fault.name:45} {fault.file}: {fault.tests}")
        return 0
    scratch = Scratch(options.scratch)
    builds, survived, planted, end = {}, [], 0, time.monotonic() + options.seconds
    for kind in sorted({"cpu" if f.group == "python" else f.group for f in chosen if f.group != "native"}):
        builds[kind] = scratch.build(kind)
    for fault in tqdm(chosen, unit="fault", disable=None):
        start = time.monotonic()
        if start > end:
            break
        planted += 1
        undo = scratch.plant(fault)
        try:
            build = "" if fault.group == "native" else scratch.build(fault.group)
            caught, how = scratch.test(fault, build, options.limit)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            caught, how = False, f"could not be tried: {str(error)[-600:]}"
        finally:
            undo()
        survived += [] if caught else [fault.name]
        if caught and options.done:
            with options.done.open("a") as file:
                file.write(f"{fault.name}\n")
        verdict = "caught" if caught else "SURVIVED"
        print(f"{verdict:8} {fault.name} ({time.monotonic() - start:.0f} s): {how}", flush=True)
    print(f"{planted} planted, {planted - len(survived)} caught; survived: {', '.join(survived) or 'none'}")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
