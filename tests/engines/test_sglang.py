"""SGLang's own FlashAttention backend on paged_attn.fa3, against dense attention in float64 (make test-engines)."""

import itertools
from types import SimpleNamespace

import kernels
import pytest
import sglang_backend
import torch
from dense import causal, dense
from sglang_engine import HEAD_DIM, Q_HEADS, Engine, Setup

KERNEL = kernels.get_kernel("org/paged-attn", version=1, trust_remote_code=True)
torch.set_default_device(sglang_backend.DEVICE)
BACKEND = sglang_backend.import_backend(KERNEL.fa3)

from sglang.kernels.ops.attention import flash_attention_v3  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

PAGE_SIZES = [1, 16]
LENGTHS = {
    "decode": ([5, 16, 0, 133], [1, 1, 1, 1]),
    "extend": ([0, 0, 0], [7, 33, 1]),
    "extend with prefix": ([20, 3, 64], [9, 40, 1]),
    "mixed": ([30, 0, 17], [1, 21, 1]),
}
MODES = {"decode": ForwardMode.DECODE, "mixed": ForwardMode.MIXED}
LAYERS = {
    "plain": {},
    "window": {"window": 11},
    "softcap": {"softcap": 1.5},
    "sinks": {},
    "window and sinks": {"window": 6},
    "multi-query": {"kv_heads": 1},
    "bfloat16": {"dtype": torch.bfloat16},
    "8 bits": {"dtype": torch.bfloat16, "cache_dtype": torch.float8_e4m3fn},
}
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 8e-3}


@pytest.fixture
def engine():
    """Makes engines; restores SGLang's settings after the test."""
    made = []

    def make(lengths, **setup):
        torch.manual_seed(0)
        made.append(Engine(BACKEND, Setup(**setup), lengths))
        return made[-1]

    yield make
    for one in reversed(made):
        one.close()


def draw(engine, tokens, heads, dim=HEAD_DIM, scale=1.0):
    return (torch.randn(tokens, heads, dim) * scale).to(engine.setup.dtype)


def judge(out, expected, dtype=torch.float32):
    assert not out.isnan().any()
    error = (out.double() - expected.reshape(out.shape)).abs().max() / expected.abs().max()
    assert error < TOLERANCE[dtype], f"error {error:.1e}"


def stored(x, scale, engine):
    """What the cache keeps of a key or value."""
    if engine.setup.cache_dtype is None:
        return x
    return (x / scale).to(engine.setup.cache_dtype).double() * scale


def fill(engine):
    """Keys and values of every request's prefix, written into the cache: what the cache keeps of them."""
    kept = []
    for b, length in enumerate(engine.lengths):
        k, v = (draw(engine, length, engine.setup.kv_heads) for _ in range(2))
        engine.write(engine.slots(b, 0, length), k, v)
        kept.append((k, v))
    return kept


def forward(engine, batch, *arguments, **keywords):
    decode = batch.forward_mode == ForwardMode.DECODE
    function = engine.backend.forward_decode if decode else engine.backend.forward_extend
    return function(*arguments, engine.layer, batch, **keywords)


def test_sglang_loads_this_kernel():
    loaded = flash_attention_v3._load_fa3_kernels()
    assert loaded["flash_attn_with_kvcache"] is KERNEL.fa3.flash_attn_with_kvcache
    assert loaded["flash_attn_varlen_func"] is KERNEL.fa3.flash_attn_varlen_func


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_decode_and_extend(engine, lengths, layer, page_size):
    prefix, new = LENGTHS[lengths]
    one = engine(prefix, page_size=page_size, **LAYERS[layer])
    setup = one.setup
    cached = fill(one)
    q = draw(one, sum(new), Q_HEADS, scale=2.0)
    k, v = (draw(one, sum(new), setup.kv_heads) for _ in range(2))
    sinks = torch.linspace(-2, 4, Q_HEADS) if "sinks" in layer else None
    batch = one.batch(MODES.get(lengths, ForwardMode.EXTEND), new)
    keywords = {} if sinks is None else {"sinks": sinks}
    out, lse = forward(one, batch, q.clone(), k.clone(), v.clone(), return_lse=True, **keywords)

    if setup.cache_dtype is not None:
        q = q.to(setup.cache_dtype)
    expected = []
    for b, (begin, end) in enumerate(itertools.pairwise([0, *itertools.accumulate(new)])):
        keys, values = (
            stored(torch.cat([old, fresh[begin:end]]), scale, one)
            for old, fresh, scale in zip(cached[b], (k, v), (one.layer.k_scale, one.layer.v_scale))
        )
        seen = causal(prefix[b], new[b], setup.window)
        expected.append(dense(q[begin:end], keys, values, seen, one.layer.scaling, setup.softcap, sinks))
    judge(out, torch.cat([o for o, _ in expected]), setup.dtype)
    judge(lse, torch.cat([s for _, s in expected]), setup.dtype)


def test_output_goes_where_it_is_asked(engine):
    one = engine([9, 3])
    fill(one)
    batch = one.batch(ForwardMode.DECODE)
    q, k, v = draw(one, 2, Q_HEADS), draw(one, 2, 2), draw(one, 2, 2)
    expected = forward(one, batch, q, k, v).clone()
    batch._attn_output = torch.full((2, Q_HEADS * HEAD_DIM), torch.nan)
    out = forward(one, batch, q, k, v)
    assert out.data_ptr() == batch._attn_output.data_ptr()
    assert torch.equal(batch._attn_output, expected)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("lengths", ["decode", "extend", "extend with prefix"])
def test_local_attention(engine, lengths, page_size):
    prefix, new = LENGTHS[lengths]
    one = engine(prefix, page_size=page_size, chunk=32)
    cached = fill(one)
    q, k, v = (draw(one, sum(new), heads) for heads in (Q_HEADS, 2, 2))
    out = forward(one, one.batch(MODES.get(lengths, ForwardMode.EXTEND), new), q, k, v)
    expected = []
    for b, (begin, end) in enumerate(itertools.pairwise([0, *itertools.accumulate(new)])):
        keys, values = (torch.cat([old, fresh[begin:end]]) for old, fresh in zip(cached[b], (k, v)))
        seen = causal(prefix[b], new[b], chunk=32)
        expected.append(dense(q[begin:end], keys, values, seen, one.layer.scaling)[0])
    judge(out, torch.cat(expected))


@pytest.mark.parametrize("new", [[1, 1], [6, 3]], ids=["decode", "extend"])
def test_cross_attention(engine, new):
    """Text attends to the encoder's keys, which stand before the text in the table of each request."""
    encoder = [13, 40]
    one = engine([n + 4 for n in encoder], encoder=True, cross=True)
    k, v = draw(one, sum(encoder), 2), draw(one, sum(encoder), 2)
    slots = torch.cat([one.slots(b, 0, n) for b, n in enumerate(encoder)])
    one.lengths = [4, 4]
    extend = new != [1, 1]
    mode = ForwardMode.EXTEND if extend else ForwardMode.DECODE
    batch = one.batch(mode, new, encoder_lens=torch.tensor(encoder), encoder_out_cache_loc=slots)
    q = draw(one, sum(new), Q_HEADS)
    if not extend:
        one.write(slots, k, v)
    out = forward(one, batch, q, *((k, v) if extend else (None, None)))
    expected, first = [], 0
    for b, (begin, end) in enumerate(itertools.pairwise([0, *itertools.accumulate(new)])):
        keys, values = (x[first : first + encoder[b]] for x in (k, v))
        first += encoder[b]
        seen = torch.ones(end - begin, len(keys), dtype=torch.bool)
        expected.append(dense(q[begin:end], keys, values, seen, one.layer.scaling)[0])
    judge(out, torch.cat(expected))


def test_encoder_only(engine):
    from sglang.srt.layers.radix_attention import AttentionType

    new = [9, 30]
    one = engine([0, 0])
    one.layer.attn_type = AttentionType.ENCODER_ONLY
    q, k, v = (draw(one, sum(new), heads) for heads in (Q_HEADS, 2, 2))
    out = forward(one, one.batch(ForwardMode.EXTEND, new), q, k, v)
    parts = zip(q.split(new), k.split(new), v.split(new))
    everything = [torch.ones(n, n, dtype=torch.bool) for n in new]
    judge(out, torch.cat([dense(*part, seen, one.layer.scaling)[0] for part, seen in zip(parts, everything)]))


# ---- Speculative decoding ----


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_verify_of_a_chain(engine, page_size):
    prefix, tokens = [21, 0, 64], 4
    one = engine(prefix, page_size=page_size, topk=1, draft_tokens=tokens, draft_steps=3)
    cached = fill(one)
    q, k, v = (draw(one, tokens * 3, heads) for heads in (Q_HEADS, 2, 2))
    spec = SimpleNamespace(ragged_verify_layout=None, draft_token_num=tokens)
    out = forward(one, one.batch(ForwardMode.TARGET_VERIFY, [tokens] * 3, spec_info=spec), q, k, v)
    expected = [
        dense(
            q[b * tokens : (b + 1) * tokens],
            *(torch.cat([old, new[b * tokens : (b + 1) * tokens]]) for old, new in zip(cached[b], (k, v))),
            causal(prefix[b], tokens),
            one.layer.scaling,
        )[0]
        for b in range(3)
    ]
    judge(out, torch.cat(expected))


@pytest.mark.parametrize("page_size, layer", [(1, "plain"), (16, "plain"), (1, "softcap"), (1, "latent")])
def test_verify_of_a_tree(engine, page_size, layer):
    """topk 2: the prefix and the tree are attended to apart and merged; a token sees its ancestors only."""
    prefix, tokens = [21, 5, 64], 5
    parents = [-1, 0, 0, 1, 2]
    tree = torch.eye(tokens, dtype=torch.bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            tree[token] |= tree[parent]
    options = {"plain": {}, "softcap": {"softcap": 1.0}, "latent": {"latent": (128, 32), "kv_heads": 1}}[layer]
    one = engine(prefix, page_size=page_size, topk=2, draft_tokens=tokens, draft_steps=3, **options)
    mask = torch.cat([torch.cat([torch.ones(tokens, n, dtype=torch.bool), tree], 1).flatten() for n in prefix])
    batch = one.batch(
        ForwardMode.TARGET_VERIFY,
        [tokens] * 3,
        spec_info=SimpleNamespace(custom_mask=mask, draft_token_num=tokens),
        spec_algorithm=SpeculativeAlgorithm.EAGLE,
    )
    if layer == "latent":
        cached = fill_latent(one)
        q, k = draw(one, tokens * 3, Q_HEADS, 160), draw(one, tokens * 3, 1, 160)
        out = forward_latent(one, batch, q, k)
    else:
        cached = fill(one)
        q, k, v = (draw(one, tokens * 3, heads) for heads in (Q_HEADS, 2, 2))
        out = forward(one, batch, q, k, v)
    expected = []
    for b, length in enumerate(prefix):
        part = slice(b * tokens, (b + 1) * tokens)
        if layer == "latent":
            keys = torch.cat([cached[b], k[part]])
            values = keys[..., :128]
        else:
            keys, values = (torch.cat([old, new[part]]) for old, new in zip(cached[b], (k, v)))
        seen = torch.cat([torch.ones(tokens, length, dtype=torch.bool), tree], 1)
        expected.append(dense(q[part], keys, values, seen, one.layer.scaling, one.setup.softcap)[0])
    judge(out, torch.cat(expected))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_draft_of_a_chain(engine, page_size):
    """topk 1: step 1 of the draft sees the prefix and the tokens drafted before."""
    prefix = [21, 7, 64]
    one = engine([n + 1 for n in prefix], page_size=page_size, topk=1, draft_steps=3, step=1)
    cached = fill(one)
    one.lengths = prefix
    slots = torch.cat([one.slots(b, n + 1, n + 2) for b, n in enumerate(prefix)])
    batch = one.batch(ForwardMode.DECODE, slots=slots, spec_info=SimpleNamespace())
    q, k, v = (draw(one, 3, heads) for heads in (Q_HEADS, 2, 2))
    out = forward(one, batch, q, k, v)
    expected = [
        dense(
            q[b : b + 1],
            *(torch.cat([old, new[b : b + 1]]) for old, new in zip(cached[b], (k, v))),
            causal(n + 1, 1),
            one.layer.scaling,
        )[0]
        for b, n in enumerate(prefix)
    ]
    judge(out, torch.cat(expected))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_draft_of_a_tree(engine, page_size):
    """topk 2, step 1: each branch sees the prefix and its own two tokens. With pages of 16 SGLang gives every branch
    a page of its own that begins with a copy of the prefix's last, unfinished page."""
    prefix, topk, steps = [21, 7, 64], 2, 3
    one = engine(prefix, page_size=page_size, topk=topk, draft_steps=steps, step=1)
    cached = fill(one)
    slots = torch.zeros(len(prefix) * topk, steps, dtype=torch.int64)
    for branch in range(len(prefix) * topk):
        b = branch // topk
        if page_size == 1:
            slots[branch] = torch.tensor([one.spare_pages.pop() for _ in range(steps)])
            continue
        page, tail = one.spare_pages.pop() * page_size, prefix[b] % page_size
        slots[branch] = page + tail + torch.arange(steps)
        if tail:
            one.write(page + torch.arange(tail), *(x[prefix[b] - tail :] for x in cached[b]))
    batch = one.batch(ForwardMode.DECODE, [topk] * 3, slots=slots.flatten(), spec_info=SimpleNamespace())
    first = [draw(one, len(slots), 2) for _ in range(2)]
    one.write(slots[:, 0], *first)
    q, k, v = (draw(one, len(slots), heads) for heads in (Q_HEADS, 2, 2))
    batch.out_cache_loc = slots[:, 1].contiguous()
    out = forward(one, batch, q, k, v)
    expected = []
    for branch in range(len(slots)):
        old = cached[branch // topk]
        keys, values = (
            torch.cat([o, f[branch : branch + 1], n[branch : branch + 1]]) for o, f, n in zip(old, first, (k, v))
        )
        seen = torch.ones(1, len(keys), dtype=torch.bool)
        expected.append(dense(q[branch : branch + 1], keys, values, seen, one.layer.scaling)[0])
    judge(out, torch.cat(expected))


# ---- Multi-head latent attention ----


def fill_latent(engine):
    kept = []
    for b, length in enumerate(engine.lengths):
        k = draw(engine, length, 1, sum(engine.setup.latent))
        engine.write(engine.slots(b, 0, length), k)
        kept.append(k)
    return kept


def forward_latent(engine, batch, q, k):
    """As SGLang's DeepSeek layers call the backend: the latent and the rotary part apart."""
    rank, rotary = engine.setup.latent
    parts = {}
    if rotary:
        parts = {"q_rope": q[..., rank:].contiguous(), "k_rope": k[..., rank:].contiguous()}
        q, k = q[..., :rank].contiguous(), k[..., :rank].contiguous()
    return forward(engine, batch, q, k, k, **parts)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("latent", [(512, 64), (256, 32)], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_latent_attention(engine, lengths, latent, page_size):
    prefix, new = LENGTHS[lengths]
    one = engine(prefix, page_size=page_size, latent=latent, kv_heads=1)
    cached = fill_latent(one)
    q, k = draw(one, sum(new), Q_HEADS, sum(latent)), draw(one, sum(new), 1, sum(latent))
    out = forward_latent(one, one.batch(MODES.get(lengths, ForwardMode.EXTEND), new), q, k)
    expected = []
    for b, (begin, end) in enumerate(itertools.pairwise([0, *itertools.accumulate(new)])):
        keys = torch.cat([cached[b], k[begin:end]])
        seen = causal(prefix[b], new[b])
        expected.append(dense(q[begin:end], keys, keys[..., : latent[0]], seen, one.layer.scaling)[0])
    judge(out, torch.cat(expected))


def test_latent_attention_in_chunks_of_the_prefix(engine):
    """Long prompts: keys and values of 192 and 128 are made from the latent ones, chunk by chunk of the prefix, and
    the parts are merged."""
    prefix, new = [40, 0, 23], [6, 11, 3]
    chunks = [[16, 0, 16], [24, 0, 7]]
    one = engine(prefix, latent=(128, 64), kv_heads=1)
    one.layer.tp_k_head_num = one.layer.tp_v_head_num = Q_HEADS
    one.layer.head_dim = one.layer.qk_head_dim = 192
    one.layer.v_head_dim = 128
    q, k = draw(one, sum(new), Q_HEADS, 192), draw(one, sum(new), Q_HEADS, 192)
    v = draw(one, sum(new), Q_HEADS, 128)
    cached = [(draw(one, n, Q_HEADS, 192), draw(one, n, Q_HEADS, 128)) for n in prefix]
    cumulative = [torch.tensor([0, *itertools.accumulate(chunk)], dtype=torch.int32) for chunk in chunks]
    batch = one.batch(ForwardMode.EXTEND, new)
    batch.mha_return_lse, batch.mha_one_shot, batch.attn_attend_prefix_cache = True, False, False
    out, lse = forward(one, batch, q, k, v, save_kv_cache=False)
    batch.prefix_chunk_cu_seq_lens, batch.prefix_chunk_max_seq_lens = cumulative, [max(chunk) for chunk in chunks]
    batch.attn_attend_prefix_cache = True
    for index, chunk in enumerate(chunks):
        begins = [sum(c[b] for c in chunks[:index]) for b in range(3)]
        keys, values = (torch.cat([cached[b][i][begins[b] : begins[b] + chunk[b]] for b in range(3)]) for i in range(2))
        batch.prefix_chunk_idx = index
        part, part_lse = forward(one, batch, q, keys, values, save_kv_cache=False)
        out, lse = BACKEND.merge_state_v2(out, lse, part, part_lse)
    expected = []
    for b, (begin, end) in enumerate(itertools.pairwise([0, *itertools.accumulate(new)])):
        keys, values = (torch.cat([old, fresh[begin:end]]) for old, fresh in zip(cached[b], (k, v)))
        expected.append(dense(q[begin:end], keys, values, causal(prefix[b], new[b]), one.layer.scaling))
    judge(out, torch.cat([o for o, _ in expected]))
    judge(lse, torch.cat([s for _, s in expected]))


@pytest.mark.parametrize("lengths", ["decode", "extend with prefix"])
@pytest.mark.parametrize("rank", [256, 512])
def test_latent_attention_without_a_rotary_part(engine, lengths, rank):
    prefix, new = LENGTHS[lengths]
    one = engine(prefix, latent=(rank, 0), kv_heads=1)
    cached = fill_latent(one)
    q, k = draw(one, sum(new), Q_HEADS, rank), draw(one, sum(new), 1, rank)
    out = forward_latent(one, one.batch(MODES.get(lengths, ForwardMode.EXTEND), new), q, k)
    expected = []
    for b, (begin, end) in enumerate(itertools.pairwise([0, *itertools.accumulate(new)])):
        keys = torch.cat([cached[b], k[begin:end]])
        expected.append(dense(q[begin:end], keys, keys, causal(prefix[b], new[b]), one.layer.scaling)[0])
    judge(out, torch.cat(expected))
