"""vLLM's attention layer, selector and metadata with the plugin's backend, without the engine, against dense attention.

Part of make test-vllm on the CPU. On a GPU, where the backend is CUSTOM, it needs only vLLM's Python files.
"""

import pytest
import torch
from absent_operators import DEVICE
from dense import causal, dense
from paged_attn_vllm.backend import PagedAttnBackend, PagedAttnMetadataBuilder
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention.chunked_local_attention import create_chunked_local_attention_backend
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm_layer import NAME, Layer

HEADS, KV_HEADS, HEAD_SIZE = 8, 2, 64
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# New tokens of four requests in each step: prompts, prompts beside single tokens, single tokens, drafts.
STEPS = [(40, 1, 17, 5), (1, 23, 1, 1), (1, 1, 1, 1), (3, 3, 3, 3), (1, 1, 1, 1)]
LAYERS = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "pages of 64": {"dtype": torch.bfloat16, "block_size": 64},
    "window": {"dtype": torch.float32, "per_layer_sliding_window": 9},
    "softcap": {"dtype": torch.float32, "logits_soft_cap": 2.0},
    "sinks": {"dtype": torch.float32, "sinks": torch.linspace(-1, 3, HEADS, device=DEVICE)},
    "alibi": {"dtype": torch.float32, "alibi_slopes": [2.0 ** -(i + 1) for i in range(HEADS)]},
    "8 bits": {"dtype": torch.bfloat16, "cache_dtype": "fp8"},
}


def draw(tokens, heads, dtype):
    return torch.randn(tokens, heads, HEAD_SIZE, device=DEVICE).to(dtype)


def expected(keys, values, q, new, options):
    """Dense attention of the last `new` tokens of a request."""
    window = options.get("per_layer_sliding_window", 0) - 1
    seen = causal(len(keys) - new, new, window if window > 0 else -1).to(DEVICE)
    bias = None
    if slopes := options.get("alibi_slopes"):
        distance = torch.arange(len(keys)) - torch.arange(len(keys) - new, len(keys))[:, None]
        bias = (torch.tensor(slopes)[None, :, None] * distance[:, None]).to(DEVICE)
    softcap = options.get("logits_soft_cap", 0.0)
    return dense(q, keys, values, seen, HEAD_SIZE**-0.5, softcap, options.get("sinks"), bias)[0]


@pytest.mark.parametrize("kind", LAYERS)
def test_layer(kind):
    torch.manual_seed(0)
    options = LAYERS[kind]
    dtype = options["dtype"]
    layer = Layer(HEADS, KV_HEADS, HEAD_SIZE, **options)
    assert layer.attention.get_attn_backend() is PagedAttnBackend
    kept = [([], []) for _ in layer.lengths]
    for new in STEPS:
        q, k, v = (draw(sum(new), heads, dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
        out = layer.forward(layer.common(new), q, k, v).view(-1, HEADS, HEAD_SIZE)
        assert out.dtype == dtype and not out.isnan().any()
        if kind == "8 bits":
            k, v = (x.to(torch.float8_e4m3fn).double() for x in (k, v))
        begin = 0
        for request, count in enumerate(new):
            rows = slice(begin, begin + count)
            begin += count
            for store, fresh in zip(kept[request], (k, v), strict=True):
                store.append(fresh[rows])
            layer.lengths[request] += count
            truth = expected(*(torch.cat(store) for store in kept[request]), q[rows], count, options)
            error = (out[rows].double() - truth).abs().max() / truth.abs().max()
            assert error < TOLERANCE[dtype], f"error {error:.1e}"


@pytest.mark.parametrize("cache_dtype", ["int8_per_token_head", "fp8_per_token_head", "fp8_inc", "nvfp4"])
def test_other_cache_dtypes_are_refused(cache_dtype):
    with pytest.raises(ValueError, match=r"kv[_-]cache[_-]dtype"):
        Layer(HEADS, KV_HEADS, HEAD_SIZE, torch.bfloat16, cache_dtype=cache_dtype)


@pytest.mark.parametrize("cache_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_16_bit_cache_has_the_dtype_of_the_model(dtype, cache_dtype):
    """Another one is refused when the model is made, not by its first request."""
    if str(dtype) == f"torch.{cache_dtype}":
        layer = Layer(HEADS, KV_HEADS, HEAD_SIZE, dtype, cache_dtype=cache_dtype)
        assert layer.attention.kv_cache_torch_dtype == dtype
        return
    with pytest.raises(ValueError, match=f"kv_cache_dtype: expected the model's dtype .* got {cache_dtype}"):
        Layer(HEADS, KV_HEADS, HEAD_SIZE, dtype, cache_dtype=cache_dtype)


def test_vllm_accepts_one_scale_for_each_head():
    """On a GPU vLLM asks a backend for all that a layer needs."""
    needs = AttentionSelectorConfig(HEAD_SIZE, torch.bfloat16, "fp8", 16, use_per_head_quant_scales=True)
    reasons = PagedAttnBackend.validate_configuration(device_capability=DeviceCapability(9, 0), **needs._asdict())
    assert reasons == []


def test_one_scale_for_each_head():
    """Keys and values are stored as value / scale, so large ones fit into 8 bits."""
    torch.manual_seed(0)
    layer = Layer(HEADS, KV_HEADS, HEAD_SIZE, torch.bfloat16, cache_dtype="fp8")
    k_scale, v_scale = torch.tensor([[0.5, 2.0], [4.0, 0.25]], device=DEVICE)
    layer.attention._k_scale, layer.attention._v_scale = k_scale, v_scale
    q, k, v = (draw(9, heads, torch.bfloat16) for heads in (HEADS, KV_HEADS, KV_HEADS))
    out = layer.forward(layer.common((9, 0, 0, 0)), q, k, v).view(-1, HEADS, HEAD_SIZE)
    stored = [
        (x.float() / scale[:, None]).to(torch.float8_e4m3fn).double() * scale[:, None]
        for x, scale in ((k, k_scale), (v, v_scale))
    ]
    truth = expected(*stored, q, 9, {})
    assert (out.double() - truth).abs().max() / truth.abs().max() < TOLERANCE[torch.bfloat16]


def test_chunked_local_attention():
    """vLLM makes a request of each chunk, and hands over a number of NumPy."""
    torch.manual_seed(0)
    chunk, new = 16, (40, 1, 17, 5)
    layer = Layer(HEADS, KV_HEADS, HEAD_SIZE, torch.float32)
    backend = create_chunked_local_attention_backend(PagedAttnBackend, chunk)
    spec = layer.attention.get_kv_cache_spec(layer.config)
    with set_current_vllm_config(layer.config):
        layer.builder = backend.get_builder_cls()(spec, [NAME], layer.config, torch.device(DEVICE))
    common = layer.common(new)
    assert type(layer.builder.build(0, common).max_query_len) is int
    q, k, v = (draw(sum(new), heads, torch.float32) for heads in (HEADS, KV_HEADS, KV_HEADS))
    out = layer.forward(common, q, k, v).view(-1, HEADS, HEAD_SIZE)
    for rows in torch.arange(sum(new)).split(new):
        seen = causal(0, len(rows), chunk=chunk).to(DEVICE)
        truth = dense(q[rows], k[rows], v[rows], seen, HEAD_SIZE**-0.5)[0]
        assert (out[rows].double() - truth).abs().max() < TOLERANCE[torch.float32] * truth.abs().max()


def test_a_changed_table_keeps_what_vllm_added():
    """Metadata of a layer that only sees the tokens whose logits are asked for (kv_sharing_fast_prefill)."""
    layer = Layer(HEADS, KV_HEADS, HEAD_SIZE, torch.float32)
    backend = create_fast_prefill_custom_backend("FastPrefill", PagedAttnBackend)
    spec = layer.attention.get_kv_cache_spec(layer.config)
    builder = backend.get_builder_cls()(spec, [NAME], layer.config, torch.device(DEVICE))
    common = layer.common((40, 1, 17, 5))
    common.logits_indices_padded = torch.tensor([39, 40, 57, 62], dtype=torch.int32, device=DEVICE)
    common.num_logits_indices = common.max_logits_per_req = 4
    metadata = builder.build(0, common)
    changed = builder.update_block_table(metadata, layer.table.flip(0), common.slot_mapping)
    assert changed.num_logits_indices == 4 and changed.logits_indices_padded is common.logits_indices_padded
    assert torch.equal(changed.block_table, layer.table.flip(0)[:, :3])


def test_padding_is_left_alone():
    """Rows past num_actual_tokens: vLLM pads a batch to the size of a captured graph."""
    torch.manual_seed(0)
    layer = Layer(HEADS, KV_HEADS, HEAD_SIZE, torch.float32)
    q, k, v = (draw(4, heads, torch.float32) for heads in (HEADS, KV_HEADS, KV_HEADS))
    common = layer.common((1, 1, 1, 1))
    whole = layer.forward(common, q, k, v)
    longer = [torch.cat([x, torch.full_like(x, torch.nan)]) for x in (q, k, v)]
    assert torch.equal(layer.forward(common, *longer)[:4], whole)


def test_warming_up_gives_zeros():
    """vLLM then runs the model without metadata, over memory that may hold anything."""
    layer = Layer(HEADS, KV_HEADS, HEAD_SIZE, torch.float32)
    q, k, v = (draw(4, heads, torch.float32) for heads in (HEADS, KV_HEADS, KV_HEADS))
    out = torch.full_like(q, torch.nan)
    layer.attention.impl.forward(layer.attention, q, k, v, layer.attention.kv_cache, None, out)
    assert (out == 0).all()


def test_one_causal_for_each_request_is_refused():
    layer = Layer(HEADS, KV_HEADS, HEAD_SIZE, torch.float32)
    common = layer.common((1, 1, 1, 1))
    common.causal = torch.ones(4, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match="causal: expected one value for the whole batch"):
        layer.builder.build(0, common)


def test_other_masks_are_refused():
    layer = Layer(HEADS, KV_HEADS, HEAD_SIZE, torch.float32)
    common = layer.common((5, 5, 5, 5))
    common.mm_req_doc_ranges = {}
    layer.builder.build(0, common)
    common.mm_req_doc_ranges = {0: [(0, 4)]}
    with pytest.raises(NotImplementedError, match="mm_req_doc_ranges: expected None, got ranges of tokens that see"):
        layer.builder.build(0, common)
    common.mm_req_doc_ranges, common.rswa_prefix_lens = None, torch.ones(4, dtype=torch.int32, device=DEVICE)
    with pytest.raises(NotImplementedError, match=r"rswa_prefix_lens: expected None, got a tensor"):
        layer.builder.build(0, common)


def test_the_table_is_as_wide_as_the_longest_request():
    """The kernel then knows how few keys a request may have."""
    layer = Layer(HEADS, KV_HEADS, HEAD_SIZE, torch.float32)
    common = layer.common((40, 1, 17, 5))
    metadata = layer.builder.build(0, common)
    assert torch.equal(metadata.block_table, layer.table[:, :3])
    other = layer.builder.update_block_table(metadata, layer.table.flip(0), common.slot_mapping)
    assert torch.equal(other.block_table, layer.table.flip(0)[:, :3])


@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA graphs need a GPU")
def test_cuda_graph():
    """A captured step of single tokens, replayed while lengths, tables and slots change in their tensors."""
    torch.manual_seed(0)
    assert PagedAttnMetadataBuilder._cudagraph_support is AttentionCGSupport.ALWAYS
    layer = Layer(HEADS, KV_HEADS, HEAD_SIZE, torch.bfloat16)
    prompts = (40, 1, 17, 5)
    layer.forward(layer.common(prompts), *(draw(sum(prompts), heads, torch.bfloat16) for heads in (8, 2, 2)))
    layer.lengths = list(prompts)
    common = layer.common((1, 1, 1, 1))
    common.max_seq_len = 256
    inputs = [draw(4, heads, torch.bfloat16) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    layer.forward(common, *inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.forward(common, *inputs)
    for _ in range(20):
        fresh = layer.common((1, 1, 1, 1))
        fresh.max_seq_len = common.max_seq_len
        common.seq_lens.copy_(fresh.seq_lens), common.slot_mapping.copy_(fresh.slot_mapping)
        for tensor in inputs:
            tensor.normal_()
        graph.replay()
        assert torch.equal(out, layer.forward(fresh, *inputs))
        layer.lengths = [length + 1 for length in layer.lengths]
