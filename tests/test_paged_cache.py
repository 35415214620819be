"""PagedCache in transformers' generate(): the tokens of a DynamicCache, and what happens to the pages; the attention
function that it sets, with other caches."""

import copy
import itertools
import logging
import pickle
import sys
from types import SimpleNamespace

import pytest
import small_models
import torch
from small_models import CHANGES_AFTER_STORING, MODELS, SHARED_KEYS, WINDOW_OF_THE_MASK

# The short run of CI (-m kernels_ci) collects this file too, and has no transformers.
transformers = pytest.importorskip("transformers")

WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "samples of one prompt": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 4},
    "several beams": {"num_beams": 4, "num_return_sequences": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},  # takes tokens back
}
NEW_TOKENS = 20


@pytest.fixture
def paged_cache(paged_attn):
    return paged_attn.integrations.PagedCache


def text(model, lengths):
    """Prompts, padded on the left."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    for row, length in zip(ids, lengths, strict=True):
        row[len(row) - length :] = torch.randint(1, 300, (length,), generator=generator)
    return {"input_ids": ids.to(model.device), "attention_mask": (ids > 0).long().to(model.device)}


def generate(model, inputs, cache, **options):
    torch.manual_seed(3)
    options = {"max_new_tokens": NEW_TOKENS} | options
    return model.generate(**inputs, past_key_values=cache, **options).tolist()


def expected(model, inputs, **options):
    model.set_attn_implementation("eager")
    return generate(model, inputs, transformers.DynamicCache(), **options)


@pytest.mark.parametrize("kind, config", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("lengths", [[17, 17], [5, 33, 18]], ids=["equal", "padded"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_tokens_of_a_dynamic_cache(make_model, paged_cache, kind, config, lengths, page_size):
    model = make_model(kind, **config)
    inputs = text(model, lengths)
    tokens = expected(model, inputs)
    assert generate(model, inputs, paged_cache(model, page_size=page_size)) == tokens


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("page_size", [4, 16])
def test_ways_of_generating(make_model, paged_cache, way, page_size):
    model = make_model()
    inputs = text(model, [18] if way == "prompt lookup" else [5, 18])
    tokens = expected(model, inputs, **WAYS[way])
    cache = paged_cache(model, page_size=page_size)
    assert generate(model, inputs, cache, **WAYS[way]) == tokens
    cache.reset()
    assert cache.pages.used == 0
    # The pool is used again.
    pool = cache.layers[0].keys.data_ptr()
    assert generate(model, inputs, cache, **WAYS[way]) == tokens
    assert cache.layers[0].keys.data_ptr() == pool


def test_beams_share_pages(make_model, paged_cache):
    model = make_model()
    inputs = text(model, [64])
    cache = paged_cache(model, page_size=4)
    generate(model, inputs, cache, num_beams=4, max_new_tokens=12)
    rows = cache.pages.rows
    # Four beams of 64 + 11 tokens: the prompt's pages were computed once for each, and only the first beam's survived.
    assert len({row[0] for row in rows}) == 1
    assert cache.pages.used < 4 * (76 // 4) / 2
    counts = torch.bincount(torch.tensor(rows).flatten(), minlength=len(cache.pages.owners))
    assert counts.tolist() == cache.pages.owners


def test_samples_continue_one_prompt_without_copying_it(make_model, paged_cache):
    """The prompt is computed once; its pages serve all samples, and only the last, unfinished one is copied."""
    model = make_model()
    inputs = text(model, [38])
    samples = {name: x.repeat(5, 1) for name, x in inputs.items()}
    tokens = expected(model, samples, do_sample=True)
    cache = paged_cache(model, page_size=16)
    with torch.no_grad():
        model(inputs["input_ids"][:, :-1], past_key_values=cache)
    assert cache.pages.used == 3
    cache.batch_repeat_interleave(5)
    assert cache.pages.used == 3 and cache.batch_size == 5
    first = cache.pages.rows[0][:2]
    assert generate(model, samples, cache, do_sample=True) == tokens
    assert all(row[:2] == first for row in cache.pages.rows)
    assert cache.pages.used == 2 + 5 * 2  # 38 + 19 tokens are 4 pages each
    cache.batch_select_indices(torch.tensor([0, 3]))
    assert cache.pages.used == 2 + 2 * 2
    cache.crop(-30)  # 27 tokens: the two shared pages
    assert cache.pages.used == 2 and cache.get_seq_length() == 27
    cache.reset()
    assert cache.pages.used == 0 and cache.get_seq_length() == 0


def test_the_pool_grows_by_a_quarter(make_model, paged_cache):
    """So that long texts do not copy it for every page."""
    pages = paged_cache(make_model(), page_size=1).pages
    sizes = [0]
    for _ in range(200):
        pages.extend(1, 1, [])
        sizes += [len(pages.owners)] if len(pages.owners) > sizes[-1] else []
    assert all(larger - size >= size // 4 for size, larger in zip(sizes, sizes[1:]))


@pytest.mark.parametrize("max_length, told", [(None, -1), (40, 40)])
def test_transformers_is_told_the_longest_text(make_model, paged_cache, max_length, told):
    cache = paged_cache(make_model(), max_length=max_length)
    assert cache.get_max_length() == told


def test_a_first_pass_taken_back_leaves_no_rows(make_model, paged_cache):
    """The next one may have another batch."""
    pages = paged_cache(make_model(), page_size=4).pages
    pages.extend(2, 9, [])
    pages.undo(0, [])
    assert pages.used == 0
    pages.extend(3, 1, [])
    assert len(pages.rows) == 3


def test_a_fork_does_not_see_what_the_other_writes(make_model, paged_cache):
    model = make_model()
    ids = text(model, [21])["input_ids"]
    cache = paged_cache(model, page_size=8)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        cache.batch_repeat_interleave(3)
        new = torch.tensor([[7], [8], [9]], device=model.device)
        forked = model(new, past_key_values=cache).logits[:, -1]
        again = model(new.flip(0), past_key_values=cache).logits[:, -1]
        model.set_attn_implementation("eager")
        for row in range(3):
            whole = torch.cat([ids[0], new[row], new.flip(0)[row]])[None]
            logits = model(whole).logits[0]
            torch.testing.assert_close(forked[row], logits[-2], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(again[row], logits[-1], rtol=1e-4, atol=1e-4)


def test_static_shapes(make_model, paged_cache):
    """With max_length and num_pages, no tensor that a step reads moves or changes its shape."""
    model = make_model()
    inputs = text(model, [5, 18])
    tokens = expected(model, inputs)
    cache = paged_cache(model, page_size=4, num_pages=24, max_length=48)
    seen = set()
    original = cache.extend

    def extend(*arguments):
        original(*arguments)
        tensors = [cache.table, cache.before, cache.after]
        tensors += [x for layer in cache.layers if layer.keys is not None for x in (layer.keys, layer.values)]
        if len(tensors) == 7:
            seen.add(tuple((x.data_ptr(), x.shape) for x in tensors))

    cache.extend = extend
    assert generate(model, inputs, cache) == tokens
    assert len(seen) == 1


def test_other_caches_with_this_attention(make_model, paged_cache):
    """PagedCache leaves the model with an attention function that serves every cache."""
    model = make_model()
    inputs = text(model, [5, 18])
    tokens = expected(model, inputs)
    paged_cache(model)
    assert generate(model, inputs, transformers.DynamicCache()) == tokens
    assert generate(model, inputs, None, cache_implementation="static", disable_compile=True) == tokens
    equal = text(model, [9, 9])
    with torch.no_grad():
        ours = model(**equal, use_cache=False).logits
        model.set_attn_implementation("eager")
        torch.testing.assert_close(ours, model(**equal, use_cache=False).logits, rtol=1e-4, atol=1e-4)


def static_cache(model):
    return transformers.StaticCache(config=model.config, max_cache_len=80)


@pytest.mark.parametrize("kind, config", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("length", [5, 17])
def test_a_static_cache_without_padding(make_model, paged_cache, kind, config, length):
    """generate() drops the mask then, and the empty slots must not count as keys."""
    model = make_model(kind, **config)
    inputs = text(model, [length, length])
    tokens = expected(model, inputs)
    paged_cache(model)
    assert generate(model, inputs, static_cache(model), disable_compile=True) == tokens
    assert generate(model, inputs, static_cache(model), disable_compile=True, prefill_chunk_size=7) == tokens


def test_a_compiled_static_cache_without_padding(make_model, paged_cache, device, emulated):
    if emulated:
        pytest.skip("no compiler for the emulated device")
    model = make_model()
    inputs = text(model, [17, 17])
    tokens = expected(model, inputs)
    paged_cache(model)
    compiling = transformers.CompileConfig(fullgraph=False, backend="eager", mode=None)
    compiling._compile_all_devices = True
    assert generate(model, inputs, static_cache(model), compile_config=compiling) == tokens
    torch.compiler.reset()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_compiled_model(make_model, paged_cache, device, backend):
    """Around the cache: what it does with pages stays in Python, and with fullgraph=True that is an error."""
    if device != "cpu":
        pytest.skip("nothing of it depends on the device")
    model = make_model(num_hidden_layers=1)
    ids = text(model, [20, 20])["input_ids"]
    model.set_attn_implementation("eager")
    whole = logits(model, ids)
    cache = paged_cache(model, page_size=4)
    torch.compiler.reset()
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        for tokens in (slice(0, 9), slice(9, 17), slice(17, 18), slice(18, 19), slice(19, 20)):
            close(compiled(ids[:, tokens], past_key_values=cache).logits, whole[:, tokens])
    cache.reset()
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="PagedCache chooses pages in Python: compile without fullgraph=True"):
        logits(torch.compile(model, backend=backend, fullgraph=True), ids, past_key_values=cache)
    torch.compiler.reset()


def test_a_static_cache_without_any_mask(make_model, paged_cache):
    """Also where the model is called without generate()."""
    model = make_model("Mistral", sliding_window=8)
    ids = text(model, [20, 20])["input_ids"]
    model.set_attn_implementation("eager")
    whole = logits(model, ids)
    paged_cache(model)
    cache = static_cache(model)
    for tokens in (slice(0, 5), slice(5, 6), slice(6, 15), slice(15, 16), slice(16, 20)):
        close(logits(model, ids[:, tokens], past_key_values=cache), whole[:, tokens])


LONGER_MASKS = pytest.mark.parametrize("behind", [0, 1])


def longer_mask(ids, behind, left=3, columns=24):
    """A mask with columns for tokens that are yet to come. Row 0 is padded on the left."""
    mask = torch.ones(len(ids), columns, dtype=torch.int64, device=ids.device)
    mask[:, ids.shape[1] :] = behind
    mask[0, :left] = 0
    return mask


@LONGER_MASKS
@pytest.mark.parametrize("kind, config", [MODELS["llama"], MODELS["gemma 3, both kinds of layers"]])
@pytest.mark.parametrize("cache", ["dynamic", "static", "full static", "paged"])
@pytest.mark.parametrize("left", [0, 3])
def test_a_mask_longer_than_the_text(make_model, paged_cache, kind, config, cache, behind, left):
    """Its columns are positions."""
    model = make_model(kind, **config)
    ids = text(model, [20, 20])["input_ids"]

    def whole():
        caches = {
            "dynamic": lambda: transformers.DynamicCache(config=model.config),
            "static": lambda: static_cache(model),
            "full static": lambda: transformers.StaticCache(config=model.config, max_cache_len=24),
            "paged": lambda: paged_cache(model),
        }
        own = caches[cache if model.config._attn_implementation == "paged_attn" else "dynamic"]()
        results = []
        for tokens in (slice(0, 10), slice(10, 11), slice(11, 17), slice(17, 18)):
            mask = longer_mask(ids[:, : tokens.stop], behind, left)
            results.append(logits(model, ids[:, tokens], attention_mask=mask, past_key_values=own))
        return torch.cat(results, 1)[:, left:]

    model.set_attn_implementation("eager")
    eager = whole()
    paged_cache(model)
    close(whole(), eager)


@LONGER_MASKS
def test_a_mask_longer_than_the_text_in_a_graph(make_model, paged_cache, device, behind):
    """Where the count of a static cache is not read, it is an error."""
    if device != "cpu":
        pytest.skip("elsewhere the check ends the process, or there is no compiler")
    model = make_model()
    ids = text(model, [11, 11])["input_ids"]
    paged_cache(model)
    cache = static_cache(model)
    eager = logits(model, ids, attention_mask=longer_mask(ids, behind, columns=11), past_key_values=static_cache(model))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    first, last = ids[:, :10], ids[:, 10:]
    logits(model, first, attention_mask=longer_mask(first, behind, columns=10), past_key_values=cache)
    with torch.no_grad():
        ours = compiled(last, attention_mask=longer_mask(ids, behind, columns=11), past_key_values=cache).logits
    close(ours, eager[:, -1:])
    refused = pytest.raises(RuntimeError, match="attention_mask: expected no column for later tokens in a compiled")
    # torch leaves the grad mode of a compiled no_grad behind where an error ends the graph.
    with torch.set_grad_enabled(torch.is_grad_enabled()), torch.no_grad(), refused:
        compiled(last, attention_mask=longer_mask(ids, behind, columns=20), past_key_values=cache)
    torch.compiler.reset()


@pytest.mark.parametrize("lengths", [[17, 17], [5, 18]], ids=["equal", "padded"])
def test_autocast(make_model, paged_cache, device, lengths):
    """Rotated queries and keys become float32 there, values do not."""
    if device != "cpu":
        pytest.skip("rounding of bfloat16 elsewhere may choose other tokens")
    model = make_model()
    inputs = text(model, lengths)
    with torch.autocast(device, dtype=torch.bfloat16):
        model.set_attn_implementation("sdpa")
        tokens = generate(model, inputs, transformers.DynamicCache())
        plain = logits(model, **inputs, use_cache=False)
        assert generate(model, inputs, paged_cache(model)) == tokens
        assert generate(model, inputs, transformers.DynamicCache()) == tokens
        ours = logits(model, **inputs, use_cache=False)
    there = inputs["attention_mask"] > 0
    torch.testing.assert_close(ours[there], plain[there], rtol=0.05, atol=0.1)


@pytest.mark.parametrize("number", [int, torch.tensor])
def test_tokens_are_taken_back(make_model, paged_cache, number):
    """transformers 5.17 passes the number as a tensor."""
    model = make_model()
    ids = text(model, [21])["input_ids"]
    cache = paged_cache(model, page_size=8)
    with torch.no_grad():
        whole = model(ids, past_key_values=cache).logits[0]
        for kept in (19, 12):
            cache.crop(number(kept - cache.get_seq_length()))
            assert [layer.get_seq_length() for layer in cache.layers] == [kept] * len(cache.layers)
            assert cache.pages.used == -(-kept // 8)
            again = model(ids[:, kept:], past_key_values=cache).logits[0]
            torch.testing.assert_close(again, whole[kept:], rtol=1e-4, atol=1e-4)


def test_too_few_pages(make_model, paged_attn, paged_cache):
    model = make_model()
    cache = paged_cache(model, page_size=4, num_pages=6)
    with pytest.raises(
        paged_attn.integrations.OutOfPages, match=r"^num_pages: expected at least 8 for 2 rows of 16 tokens, got 6"
    ):
        generate(model, text(model, [9, 9]), cache)
    assert cache.pages.used == 6 and cache.get_seq_length() == 12


@pytest.mark.parametrize("settings, message", [
    ({"page_size": 0}, "page_size: expected an integer of at least 1, got 0"),
    ({"page_size": None}, "page_size: expected an integer of at least 1, got None"),
    ({"page_size": 8.0}, r"page_size: expected an integer of at least 1, got 8\.0"),
    ({"num_pages": -1}, "num_pages: expected an integer of at least 1, got -1"),
    ({"max_length": 0}, "max_length: expected an integer of at least 1, got 0"),
])  # fmt: skip
def test_sizes_are_checked_at_once(make_model, paged_cache, settings, message):
    model = make_model()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=message):
        paged_cache(model, **settings)
    assert model.config._attn_implementation == before


def test_a_dtype_that_does_not_fit(make_model, paged_cache):
    model = make_model()
    cache = paged_cache(model, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"dtype: expected None, torch\.float32 or an 8-bit float, got torch\.float16"):
        generate(model, text(model, [5]), cache)
    assert cache.pages.used == 0 and cache.get_seq_length() == 0
    for dtype in (torch.float8_e4m3fn, torch.float32):
        cache = paged_cache(model, dtype=dtype)
        generate(model, text(model, [5]), cache)
        assert all(x.dtype == dtype for layer in cache.layers for x in (layer.keys, layer.values))


def test_more_tokens_than_there_are_are_taken_back(make_model, paged_cache):
    """As from a DynamicCache: at most everything."""
    model = make_model()
    inputs = text(model, [5, 18])
    cache = paged_cache(model, page_size=4)
    tokens = generate(model, inputs, cache)
    cache.crop(-1000)
    assert cache.get_seq_length() == 0 and cache.pages.used == 0
    assert generate(model, inputs, cache) == tokens


def test_errors_name_what_was_expected(make_model, paged_cache):
    model = make_model()
    inputs = text(model, [5, 9])
    with pytest.raises(ValueError, match="max_length: expected at least 9, got 8"):
        generate(model, inputs, paged_cache(model, max_length=8))
    right = {name: x.flip(1) for name, x in inputs.items()}
    with pytest.raises(ValueError, match="padding on the left only, got other in row 0"), torch.no_grad():
        model(**right, past_key_values=paged_cache(model))
    cache = paged_cache(model)
    generate(model, inputs, cache)
    with pytest.raises(ValueError, match="batch: expected 2, as in the cache, got 1"), torch.no_grad():
        model(inputs["input_ids"][:1], past_key_values=cache)
    cache = paged_cache(model)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"attn_implementation: expected 'paged_attn' .* got 'sdpa'"):
        generate(model, inputs, cache)
    with pytest.raises(ValueError, match="tokens_to_remove: expected 0 or less, got 2"):
        cache.crop(2)


@pytest.mark.parametrize("settings", [{}, {"num_pages": 20, "max_length": 80}], ids=["growing", "fixed"])
@pytest.mark.parametrize("rest", ["continued", "reset", "forked"])
def test_a_cache_outlives_inference_mode(make_model, paged_cache, settings, rest):
    """It is filled there, and written elsewhere."""
    model = make_model()
    inputs = text(model, [17])
    tokens = expected(model, inputs)
    cache = paged_cache(model, page_size=8, **settings)
    with torch.inference_mode():
        logits(model, inputs["input_ids"][:, :-1], past_key_values=cache)
        if rest == "reset":
            cache.reset()
    if rest == "forked":
        cache.batch_repeat_interleave(2)
        inputs, tokens = {name: x.repeat(2, 1) for name, x in inputs.items()}, tokens * 2
    assert generate(model, inputs, cache) == tokens
    cache.crop(-NEW_TOKENS)
    with torch.inference_mode():
        assert generate(model, inputs, cache) == tokens


def test_a_deep_copy_is_of_the_same_model(make_model, paged_cache):
    """It holds the same tokens, in pages of its own, and sees when the model's attention is another one."""
    model, inputs = make_model(), text(make_model(), [12, 12])
    wanted = expected(model, inputs)
    cache = paged_cache(model)
    with torch.no_grad():
        model(inputs["input_ids"][:, :8], past_key_values=cache)
    copies = [copy.deepcopy(cache) for _ in range(2)]
    assert all(layer.cache is copies[0] for layer in copies[0].layers)
    assert generate(model, inputs, copies[0]) == wanted
    assert cache.get_seq_length() == copies[1].get_seq_length() == 8
    model.set_attn_implementation("sdpa")
    for one in (cache, copies[1]):
        with pytest.raises(ValueError, match=r"attn_implementation: expected 'paged_attn' .* got 'sdpa'"):
            generate(model, inputs, one)


def test_pages_are_not_pickled(make_model, paged_cache):
    cache = paged_cache(make_model())
    for copying in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match=r"^PagedCache: expected copy.deepcopy .*, got pickle or copy$"):
            copying(cache)


def test_attention_that_cannot_be_replaced_is_refused(device, paged_cache):
    config = transformers.BloomConfig(vocab_size=300, hidden_size=32, n_layer=1, n_head=2)
    model = transformers.BloomForCausalLM(config)
    with pytest.raises(ValueError, match=r"^model: expected attention that can be replaced .*, got BloomForCausalLM$"):
        paged_cache(model.to(device))


def test_a_cache_of_a_smaller_model_is_refused(make_model, paged_cache):
    """As where those of target and draft were exchanged."""
    model, draft = make_model(), make_model(num_hidden_layers=1)
    paged_cache(model)
    cache = paged_cache(draft)
    with pytest.raises(ValueError, match=r"^past_key_values: expected a PagedCache of this model, got one of 1 layers"):
        generate(model, text(model, [5]), cache)
    assert cache.get_seq_length() == 0 and cache.pages.used == 0


def test_layers_of_another_kind_are_refused(make_model, paged_cache):
    model = make_model()
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ValueError, match=r"model: expected layers of .* got chunked_attention"):
        paged_cache(model)


# ---- A pass that ends early


def logits(model, input_ids, **options):
    with torch.no_grad():
        return model(torch.as_tensor(input_ids, device=model.device), **options).logits


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("turn", ["first", "second"])
def test_after_an_error_in_attention_the_pass_can_be_tried_again(make_model, paged_cache, turn):
    model = make_model()
    ids = text(model, [20, 20])["input_ids"]
    cache = paged_cache(model, page_size=8)
    start = 0
    if turn == "second":
        start = 11
        logits(model, ids[:1, :start], past_key_values=cache)
        cache.batch_repeat_interleave(2)  # the error comes when the last page has been copied
        ids[1, :start] = ids[0, :start]
    mask = torch.ones_like(ids)
    mask[1, 17:] = 0
    used = cache.pages.used
    for _ in range(2):
        with pytest.raises(ValueError, match="attention_mask: expected padding on the left only, got other in row 1"):
            logits(model, ids[:, start:], past_key_values=cache, attention_mask=mask)
        assert [layer.get_seq_length() for layer in cache.layers] == [start] * 2
        assert cache.pages.used == used
    again = logits(model, ids[:, start:], past_key_values=cache)
    assert cache.get_seq_length() == 20
    counts = torch.bincount(torch.tensor(cache.pages.rows).flatten(), minlength=len(cache.pages.owners))
    assert counts.tolist() == cache.pages.owners
    model.set_attn_implementation("eager")
    close(again, logits(model, ids)[:, start:])


@pytest.mark.parametrize("start", [0, 11])
@pytest.mark.parametrize("end", ["before attention", "after the first layer"])
def test_after_an_error_elsewhere_a_pass_is_not_mixed_with_the_next(make_model, paged_cache, start, end):
    """The first call after it says so, and the cache is back where it was."""
    model = make_model()
    ids = text(model, [20, 20])["input_ids"]
    ids[1, :start] = ids[0, :start]
    cache = paged_cache(model, page_size=8)
    if start:
        logits(model, ids[:1, :start], past_key_values=cache)
        cache.batch_repeat_interleave(2)

    def stop(*_):
        raise KeyboardInterrupt

    if end == "before attention":
        key = torch.ones(2, 2, 20 - start, 16, device=model.device)
        with torch.no_grad():
            cache.update(key, key.clone(), 0)
    else:
        hook = model.model.layers[0].mlp.register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            logits(model, ids[:, start:], past_key_values=cache)
        hook.remove()
    words = rf"past_key_values: expected every layer to attend once in each pass, .* holds {start} tokens again"
    with pytest.raises(ValueError, match=words):
        logits(model, ids[:, start:], past_key_values=cache)
    assert [layer.get_seq_length() for layer in cache.layers] == [start] * 2
    again = logits(model, ids[:, start:], past_key_values=cache)
    model.set_attn_implementation("eager")
    close(again, logits(model, ids)[:, start:])


def interrupted(line, function, *arguments):
    """Ctrl-C before the given line, counted from the first one that runs in paged_cache.py. False: there are fewer."""
    lines, tracer = itertools.count(1), sys.gettrace()

    def trace(frame, event, _):
        if not frame.f_code.co_filename.endswith("paged_cache.py") or "tests" in frame.f_code.co_filename:
            return None
        if event == "line" and next(lines) == line:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        function(*arguments)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(tracer)
    return False


def store(cache, rows, device):
    """A pass by hand: new tokens of every row, each a number."""
    numbers = torch.tensor(rows, dtype=torch.float32, device=device)[:, None, :, None].expand(-1, 2, -1, 16)
    for i, layer in enumerate(cache.layers):
        cache.update(numbers.clone(), -numbers, i)
        layer.attended()


def stored(cache):
    """What the rows of every layer hold."""
    found = []
    for layer in cache.layers:
        keys, values = (x[torch.tensor(cache.pages.rows)].flatten(1, 2)[:, :, 0, 0] for x in (layer.keys, layer.values))
        assert torch.equal(keys[:, : layer.length], -values[:, : layer.length])
        found.append(keys[:, : layer.length].tolist())
    assert found[0] == found[-1]
    return found[0]


# Something that an interrupt may come into, of two rows that share the numbers 0 to 5, and what they may hold then.
STEPS = {
    "tokens": (lambda cache, device: store(cache, [[6, 7, 8], [16, 17, 18]], device), [[6, 7, 8], [16, 17, 18]]),
    "rows": (lambda cache, _: cache.reorder_cache(torch.tensor([1, 1])), [[], []]),
    "fewer tokens": (lambda cache, _: cache.crop(-3), [[], []]),
    "nothing": (lambda cache, _: cache.reset(), [[], []]),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("start", [0, 6])
def test_after_an_interrupt_anywhere_no_wrong_key_is_read(make_model, paged_cache, device, step, start):
    """The cache holds what it held or what it was to hold, or the first call says that a pass ended early. No page has
    two owners that do not know of each other."""
    act, added = STEPS[step]
    model = make_model()
    for line in itertools.count(1):
        cache = paged_cache(model, page_size=4)
        before = [list(range(start))] * 2
        if start:
            store(cache, before[:1], device)
            cache.batch_repeat_interleave(2)
            for layer in cache.layers:  # a page that should have been copied does not hold these numbers by chance
                layer.keys[cache.pages.free] = layer.values[cache.pages.free] = torch.nan
        if not interrupted(line, act, cache, device):
            break
        for last_try in (False, True):
            length = cache.get_seq_length()
            held = [(old + new)[:length] for old, new in zip(before, added, strict=True)]
            assert all(len(row) == length for row in held)
            try:
                store(cache, [[20], [30]], device)
            except ValueError as error:
                assert "expected every layer to attend once in each pass" in str(error) and not last_try
            else:
                break
        assert stored(cache) == [held[0] + [20], held[1] + [30]], line
        if step == "tokens":
            owned = [page for row in cache.pages.rows for page in row]
            assert [owned.count(page) for page in range(len(cache.pages.owners))] == cache.pages.owners
            assert sorted(cache.pages.free) == sorted(set(range(len(cache.pages.owners))) - set(owned))
    assert line > 10


@pytest.mark.parametrize("choose", ["reorder_cache", "batch_select_indices", "batch_repeat_interleave"])
def test_rows_are_not_chosen_after_a_pass_that_ended_early(make_model, paged_cache, choose):
    """Pages that two rows share were copied in that pass. No page is handed out twice afterwards."""
    model = make_model()
    ids = text(model, [30])["input_ids"]
    cache = paged_cache(model, page_size=4)
    logits(model, ids[:, :6], past_key_values=cache)
    cache.batch_repeat_interleave(2)
    key = torch.ones(2, 2, 3, 16, device=model.device)
    with torch.no_grad():
        cache.update(key, key.clone(), 0)
    argument = 1 if choose == "batch_repeat_interleave" else torch.tensor([0])
    with pytest.raises(ValueError, match=r"past_key_values: expected every layer .* holds 6 tokens again"):
        getattr(cache, choose)(argument)
    getattr(cache, choose)(argument)
    rows = len(cache.pages.rows)
    logits(model, ids[:, 6:7].repeat(rows, 1), past_key_values=cache)
    again = logits(model, ids[:, 7:].repeat(rows, 1), past_key_values=cache)
    owned = [page for row in cache.pages.rows for page in row]
    assert [owned.count(page) for page in range(len(cache.pages.owners))] == cache.pages.owners
    assert not set(owned) & set(cache.pages.free)
    model.set_attn_implementation("eager")
    close(again[:1], logits(model, ids)[:, 7:])


def test_a_cache_whose_rows_are_all_gone(make_model, paged_cache):
    """It still has a length: new rows would read pages that nobody wrote."""
    model = make_model()
    ids = text(model, [9, 9])["input_ids"]
    cache = paged_cache(model, page_size=4)
    whole = logits(model, ids, past_key_values=cache)
    cache.batch_select_indices(torch.zeros(2, dtype=torch.bool))
    assert cache.pages.used == 0 and cache.get_seq_length() == 9
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^batch: expected 0, as in the cache, got 2$"):
            logits(model, ids[:, :4], past_key_values=cache)
        assert cache.pages.used == 0 and cache.get_seq_length() == 9
    cache.reset()
    close(logits(model, ids, past_key_values=cache), whole)


@pytest.mark.parametrize("choose, name", [("reorder_cache", "beam_idx"), ("batch_select_indices", "indices")])
def test_rows_that_a_cache_does_not_have(make_model, paged_cache, choose, name):
    model = make_model()
    ids = text(model, [9, 9])["input_ids"]
    cache = paged_cache(model)
    getattr(cache, choose)(torch.tensor([1, 0]))  # none has been stored, as with transformers' own caches
    whole = logits(model, ids, past_key_values=cache)
    before = [list(row) for row in cache.pages.rows]
    with pytest.raises(ValueError, match=rf"^{name}: expected numbers or a mask of 2 rows, got \[1, 2\]$"):
        getattr(cache, choose)(torch.tensor([1, 2], device=model.device))
    assert cache.pages.rows == before
    getattr(cache, choose)(torch.tensor([1, 1], device=model.device))
    cache.crop(-9)
    close(logits(model, ids[[1, 1]], past_key_values=cache), whole[[1, 1]])
    if choose == "batch_select_indices":
        with pytest.raises(ValueError, match=r"^indices: expected numbers or a mask of 2 rows, got \[True\]$"):
            cache.batch_select_indices(torch.tensor([True]))


def test_a_pass_that_ended_early_is_not_cropped(make_model, paged_cache):
    model = make_model()
    ids = text(model, [20])["input_ids"]
    cache = paged_cache(model)
    logits(model, ids[:, :10], past_key_values=cache)
    key = torch.ones(1, 2, 5, 16, device=model.device)
    with torch.no_grad():
        cache.update(key, key.clone(), 0)
    with pytest.raises(ValueError, match=r"past_key_values: expected every layer .* holds 10 tokens again"):
        cache.crop(-2)
    cache.crop(-2)
    assert cache.get_seq_length() == 8


def test_a_model_with_attention_of_its_own_is_refused(make_model, paged_cache):
    """Its second layer stores keys, and nobody attended to those of the first."""
    model = make_model()
    cache = paged_cache(model)
    key, value = torch.ones(2, 1, 2, 5, 16, device=model.device)
    with torch.no_grad():
        cache.update(key, value, 0)
        with pytest.raises(ValueError, match="past_key_values: expected every layer to attend once in each pass"):
            cache.update(key, value, 1)
    assert cache.get_seq_length() == 0 and cache.pages.used == 0


def test_a_model_on_several_devices_is_refused(make_model, paged_cache, device):
    cache = paged_cache(make_model())
    key = torch.ones(1, 2, 5, 16, device=device)
    with torch.no_grad():
        cache.update(key, key.clone(), 0)
        cache.layers[0].attended()
        with pytest.raises(ValueError, match=f"model: expected all layers on one device, got keys on {key.device}"):
            cache.update(key.to("meta"), key.to("meta"), 1)
    assert cache.get_seq_length() == 0 and cache.pages.used == 0


# ---- Models that store other keys or values than they attend to


@pytest.mark.parametrize("kind, config", CHANGES_AFTER_STORING.values(), ids=CHANGES_AFTER_STORING)
def test_keys_and_values_that_were_not_stored_are_refused(make_model, paged_cache, kind, config):
    model = make_model(kind, **config)
    inputs = text(model, [17])
    tokens = expected(model, inputs)
    cache = paged_cache(model)
    with pytest.raises(ValueError, match=f"key and value: expected the tensors .* got others .made by {kind}Attention"):
        generate(model, inputs, cache)
    assert cache.get_seq_length() == 0 and cache.pages.used == 0
    # Other caches have all keys, whatever the model makes of them.
    assert generate(model, inputs, transformers.DynamicCache()) == tokens


@pytest.mark.parametrize("kind, config", SHARED_KEYS.values(), ids=SHARED_KEYS)
@pytest.mark.parametrize("lengths", [[17, 17], [5, 18]], ids=["equal", "padded"])
def test_layers_that_share_keys(make_model, paged_cache, kind, config, lengths):
    model = make_model(kind, **config)
    inputs = text(model, lengths)
    tokens = expected(model, inputs)
    assert generate(model, inputs, paged_cache(model, page_size=4)) == tokens


def bart(device, layers=2):
    sizes = {"encoder_layers": 1, "decoder_layers": layers, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = transformers.BartConfig(
        vocab_size=100, d_model=64, encoder_ffn_dim=64, decoder_ffn_dim=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2, init_std=0.3, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.BartForConditionalGeneration(config).to(device).eval()


@pytest.mark.parametrize("of_decoder", [5, 7])
def test_cross_attention(device, paged_cache, of_decoder):
    """Its keys are not those of new tokens, so they need a cache of their own."""
    model = bart(device, layers=1)
    ids, own = torch.arange(3, 10)[None].to(device), torch.arange(20, 20 + of_decoder)[None].to(device)
    model.set_attn_implementation("eager")
    whole = logits(model, ids, decoder_input_ids=own)
    with pytest.raises(ValueError, match=r"EncoderDecoderCache\(PagedCache\(model\), DynamicCache\(\)\)"):
        logits(model, ids, decoder_input_ids=own, past_key_values=paged_cache(model))
    cache = transformers.EncoderDecoderCache(paged_cache(model), transformers.DynamicCache())
    for tokens in (slice(0, 3), slice(3, 4), slice(4, of_decoder)):
        close(logits(model, ids, decoder_input_ids=own[:, tokens], past_key_values=cache), whole[:, tokens])


def nllb_moe(device):
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = transformers.NllbMoeConfig(
        vocab_size=300, d_model=64, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=128, decoder_ffn_dim=128,
        num_experts=2, init_std=0.15, max_position_embeddings=256, pad_token_id=0, eos_token_id=None,
        forced_eos_token_id=None, **heads,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.NllbMoeForConditionalGeneration(config).to(device).eval()
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, pad_token_id=0, decoder_start_token_id=2, bos_token_id=1, eos_token_id=None
    )
    return model


def test_a_static_cache_of_a_decoder_without_a_mask(device, paged_attn):
    model = nllb_moe(device)
    inputs = text(model, [11, 11])
    model.set_attn_implementation("eager")
    tokens = generate(model, inputs, None)
    assert generate(model, inputs, None, cache_implementation="static", disable_compile=True) == tokens
    paged_attn.integrations.PagedCache(model)
    assert generate(model, inputs, None, cache_implementation="static", disable_compile=True) == tokens


def bigbird_pegasus(device):
    sizes = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_layers": 1, "decoder_layers": 2}
    config = transformers.BigBirdPegasusConfig(
        vocab_size=300, d_model=64, decoder_ffn_dim=128, max_position_embeddings=256, init_std=0.15, pad_token_id=0,
        bos_token_id=None, eos_token_id=None, num_hidden_layers=2, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BigBirdPegasusForCausalLM(config).to(device).eval()
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    return model


def test_a_decoder_that_does_not_say_that_it_is_causal(device, paged_cache):
    """Its mask alone says so."""
    model = bigbird_pegasus(device)
    for lengths in ([17], [11, 17], [1]):
        inputs = text(model, lengths)
        tokens = expected(model, inputs)
        assert generate(model, inputs, paged_cache(model)) == tokens


def test_an_encoder_decoder_that_does_not_say_that_it_is_causal(device, paged_cache):
    model = nllb_moe(device)
    one = text(model, [11, 11])
    several = one | {"decoder_input_ids": torch.full((2, 4), 7, device=device)}
    for inputs in (one, several):
        model.set_attn_implementation("eager")
        tokens = generate(model, inputs, None)
        cache = transformers.EncoderDecoderCache(paged_cache(model), transformers.DynamicCache())
        assert generate(model, inputs, cache) == tokens


# ---- What masks say beyond padding and windows


def llama4(device, chunk):
    own = {
        "attention_chunk_size": chunk, "intermediate_size_mlp": 128, "num_local_experts": 2, "num_experts_per_tok": 1,
        "no_rope_layers": [1, 1], "layer_types": ["chunked_attention", "full_attention"],
    }  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**(small_models.SIZES | own)))
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    return model.to(device).eval()


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_chunks(make_model, paged_cache, device, kind):
    """Served while one chunk holds all keys, then refused."""
    model = llama4(device, chunk=20)
    paged_cache(make_model())  # registers the attention function

    def cache():
        return static_cache(model) if kind == "static" else transformers.DynamicCache(config=model.config)

    def tokens(attention, length, **options):
        model.set_attn_implementation(attention)
        return generate(model, text(model, length), cache(), disable_compile=True, **options)

    for lengths in ([12, 12], [5, 12]):
        assert tokens("paged_attn", lengths, max_new_tokens=8) == tokens("eager", lengths, max_new_tokens=8)
    with pytest.raises(ValueError, match="attention_chunk_size: expected at least 21, a chunk for all keys, got 20"):
        tokens("paged_attn", [12, 12])


def gemma3_with_images(device):
    texts = small_models.SIZES | MODELS["gemma 3, both kinds of layers"][1] | {"sliding_window": 32}
    images = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=texts, vision_config=images | {"image_size": 32, "patch_size": 8}, image_token_index=290,
        boi_token_index=291, eoi_token_index=292, mm_tokens_per_image=4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).to(device).eval()
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.15)
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    return model


@pytest.mark.parametrize("paged", [True, False])
def test_image_tokens_that_see_each_other(device, paged_cache, paged, emulated):
    if emulated:
        pytest.skip("the emulated device has no convolutions")
    model = gemma3_with_images(device)
    ids = torch.tensor([[5, 6, 7, 291, 290, 290, 290, 290, 292, 8, 9]], device=device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": (ids == 290).long()}
    pixels = torch.randn(1, 3, 32, 32, device=device)

    def cache():
        own = paged_cache(model)
        return own if paged else transformers.DynamicCache()

    with pytest.raises(ValueError, match=r"mask_function: expected tokens .* got others \(of an image"):
        generate(model, inputs | {"pixel_values": pixels}, cache())
    # Without an image the same model is served.
    texts = inputs | {"input_ids": ids.clamp(max=200), "token_type_ids": torch.zeros_like(ids)}
    tokens = expected(model, texts)
    assert generate(model, texts, cache()) == tokens


def random_weights(model):
    """Attention that shows in the result. Models of speech have other initial weights than SIZES asks for."""
    torch.manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
    return model.eval()


ENCODER_SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def moonshine_streaming():
    from transformers.models.moonshine_streaming import modeling_moonshine_streaming as models

    windows = {"num_key_value_heads": 4, "sliding_windows": [[4, 2], [3, 3]]}
    return models.MoonshineStreamingEncoder(models.MoonshineStreamingEncoderConfig(**(ENCODER_SIZES | windows)))


def t5gemma2_config():
    from transformers.models.t5gemma2 import configuration_t5gemma2

    texts = ENCODER_SIZES | {"vocab_size": 300, "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16}
    texts |= {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "dropout_rate": 0.0}
    images = ENCODER_SIZES | {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    config = configuration_t5gemma2.T5Gemma2EncoderConfig(text_config=texts, vision_config=images)
    config.text_config.attention_dropout = config.text_config.dropout_rate = 0.0
    return config


def t5gemma2():
    from transformers.models.t5gemma2 import modeling_t5gemma2

    return modeling_t5gemma2.T5Gemma2TextEncoder(t5gemma2_config().text_config, eoi_token_index=299)


def encoded(model, ids, **options):
    with torch.no_grad():
        return model(ids, **options).last_hidden_state


@pytest.mark.parametrize("left", [0, 5])
def test_an_encoder_with_a_window_of_its_own(device, paged_attn, left):
    """T5Gemma 2 has another limit on either side."""
    model = random_weights(t5gemma2()).to(device)
    ids = text(model, [40, 40 - left])["input_ids"]
    mask = (ids > 0).long()
    model.set_attn_implementation("eager")
    eager = encoded(model, ids, attention_mask=mask)
    paged_attn.integrations.register_attention()
    model.set_attn_implementation("paged_attn")
    close(encoded(model, ids, attention_mask=mask)[mask > 0], eager[mask > 0])


def test_an_encoder_with_windows_of_its_layers(device, paged_attn, emulated):
    if emulated:
        pytest.skip("the emulated device has no convolutions")
    model = random_weights(moonshine_streaming()).to(device)
    sound = torch.randn(1, 80 * 160, generator=torch.Generator().manual_seed(6)).to(device)
    options = {"attention_mask": torch.ones_like(sound, dtype=torch.int64)}
    model.set_attn_implementation("eager")
    eager = encoded(model, sound, **options)
    paged_attn.integrations.register_attention()
    model.set_attn_implementation("paged_attn")
    close(encoded(model, sound, **options), eager)


def t5gemma():
    texts = ENCODER_SIZES | {"vocab_size": 300, "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16}
    texts |= {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.T5GemmaConfig(encoder=texts, decoder=texts, is_encoder_decoder=False)
    return transformers.T5GemmaEncoderModel(config)


def modernbert():
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    sizes = ENCODER_SIZES | {"vocab_size": 300, "local_attention": 8, "num_hidden_layers": 3}
    return transformers.ModernBertModel(transformers.ModernBertConfig(**sizes, **tokens, global_attn_every_n_layers=3))


@pytest.mark.parametrize("make", [t5gemma, modernbert])
@pytest.mark.parametrize("left", [None, 0, 5])
def test_windows_to_both_sides(device, paged_attn, make, left):
    """Of eager attention: ModernBert gives its flash attention one more than its mask says, T5Gemma does not."""
    model = random_weights(make()).to(device)
    ids = text(model, [20, 20 - (left or 0)])["input_ids"]
    exists = ids > 0
    mask = None if left is None else exists.long()
    model.set_attn_implementation("eager")
    eager = encoded(model, ids, attention_mask=mask)
    paged_attn.integrations.register_attention()
    model.set_attn_implementation("paged_attn")
    close(encoded(model, ids, attention_mask=mask)[exists], eager[exists])


@pytest.mark.parametrize("make, fullgraph", [(t5gemma, False), (modernbert, True)])
def test_windows_to_both_sides_in_a_graph(device, paged_attn, make, fullgraph, emulated):
    if emulated:
        pytest.skip("no compiler for the emulated device")
    model = random_weights(make()).to(device)
    ids = text(model, [20])["input_ids"]
    model.set_attn_implementation("eager")
    eager = encoded(model, ids)
    paged_attn.integrations.register_attention()
    model.set_attn_implementation("paged_attn")
    close(encoded(torch.compile(model, fullgraph=fullgraph, backend="eager"), ids), eager)
    torch.compiler.reset()


def test_windows_to_both_sides_of_packed_sequences(device, paged_attn):
    model = random_weights(modernbert()).to(device)
    parts = [torch.arange(5, 16, device=device)[None], torch.arange(30, 39, device=device)[None]]
    model.set_attn_implementation("eager")
    alone = torch.cat([encoded(model, part) for part in parts], 1)
    cu = torch.tensor([0, 11, 20], dtype=torch.int32, device=device)
    positions = torch.cat([torch.arange(11), torch.arange(9)]).to(device)[None]
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 11, "max_length_k": 11}
    paged_attn.integrations.register_attention()
    model.set_attn_implementation("paged_attn")
    close(encoded(model, torch.cat(parts, 1), position_ids=positions, **lengths), alone)


@pytest.mark.parametrize("lengths", [[17, 17], [5, 18]], ids=["equal", "padded"])
def test_a_decoder_made_to_see_both_sides(make_model, paged_attn, lengths):
    model = make_model("Mistral", sliding_window=4)
    model.config.is_causal = False
    inputs = text(model, lengths)
    exists = inputs["attention_mask"] > 0
    model.set_attn_implementation("eager")
    eager = logits(model, **inputs, use_cache=False)
    paged_attn.integrations.register_attention()
    model.set_attn_implementation("paged_attn")
    close(logits(model, **inputs, use_cache=False)[exists], eager[exists])


@pytest.mark.parametrize("lengths", [[17, 17], [5, 18]], ids=["equal", "padded"])
def test_a_model_of_embeddings(device, paged_attn, lengths):
    """EmbeddingGemma: all tokens see each other, in layers with windows the near ones, said by a function beside the
    causal mask."""
    kind, config = MODELS["gemma 3, both kinds of layers"]
    model = small_models.make(transformers, device, kind, **config, use_bidirectional_attention=True)
    inputs = text(model, lengths)
    exists = inputs["attention_mask"] > 0
    model.set_attn_implementation("eager")
    eager = logits(model, **inputs)
    cache = paged_attn.integrations.PagedCache(model)
    close(logits(model, **inputs)[exists], eager[exists])
    with pytest.raises(ValueError, match="is_causal: expected True with a PagedCache, got False from Gemma3Attention"):
        logits(model, **inputs, past_key_values=cache)


def test_a_function_beside_the_causal_mask(make_model, paged_cache):
    """A window is served, anything else refused."""
    from transformers.masking_utils import create_causal_mask, packed_sequence_mask_function, sliding_window_overlay

    model = make_model()
    ids = text(model, [12, 12])["input_ids"]
    embeddings = model.get_input_embeddings()(ids)

    rotation = model.model.rotary_emb(embeddings, torch.arange(12, device=model.device)[None])

    def results(function):
        mask = create_causal_mask(model.config, embeddings, None, None, and_mask_function=function)
        with torch.no_grad():
            return model.model.layers[0].self_attn(embeddings, rotation, mask)[0]

    model.set_attn_implementation("eager")
    eager = results(sliding_window_overlay(5))
    paged_cache(model)
    close(results(sliding_window_overlay(5)), eager)
    with pytest.raises(ValueError, match="mask_function: expected tokens that see all keys or a window of them"):
        results(packed_sequence_mask_function(torch.arange(12, device=ids.device).expand(2, -1) // 6))


def test_a_mask_that_limits_nothing_is_none(make_model, paged_cache):
    """Also where transformers is told to make one: models join it to others, as they do with flash attention."""
    from transformers.masking_utils import create_bidirectional_mask

    model = make_model()
    paged_cache(model)
    states = torch.zeros(2, 12, 64, device=model.device)
    assert create_bidirectional_mask(model.config, states, None, allow_is_bidirectional_skip=False) is None


@pytest.mark.parametrize("kind, config", WINDOW_OF_THE_MASK.values(), ids=WINDOW_OF_THE_MASK)
@pytest.mark.parametrize("cache", ["dynamic", "sliding", "static", "paged"])
@pytest.mark.parametrize("lengths", [[19, 19], [11, 19]], ids=["equal", "padded"])
def test_a_window_that_only_the_mask_has(make_model, paged_cache, kind, config, cache, lengths):
    model = make_model(kind, **config)
    inputs = text(model, lengths)
    caches = {
        "dynamic": transformers.DynamicCache,
        "sliding": lambda: transformers.DynamicCache(config=model.config),
        "static": lambda: static_cache(model),
        "paged": lambda: paged_cache(model, page_size=4),
    }

    def whole(own):
        results = []
        for tokens in (slice(0, 9), slice(9, 16), slice(16, 17), slice(17, 19)):
            mask = inputs["attention_mask"][:, : tokens.stop]
            ids = inputs["input_ids"][:, tokens]
            results.append(logits(model, ids, attention_mask=mask, past_key_values=own))
        return torch.cat(results, 1)[inputs["attention_mask"] > 0]

    model.set_attn_implementation("eager")
    eager = whole(transformers.DynamicCache())
    paged_cache(model)
    close(whole(caches[cache]()), eager)


def test_the_window_of_a_mask_counts(make_model, paged_cache):
    """As in eager attention, where a layer names another one."""
    model = make_model("Mistral", sliding_window=6)
    ids = text(model, [19, 19])["input_ids"]
    model.set_attn_implementation("eager")
    eager = logits(model, ids, use_cache=False)
    paged_cache(model)
    layer = model.model.layers[1].self_attn
    layer.config = copy.copy(model.config)
    layer.config.sliding_window = 3
    close(logits(model, ids, use_cache=False), eager)


def test_an_encoder_that_limits_keys_otherwise(device, paged_attn):
    """Chains of a protein. One chain is no limit."""
    model = random_weights(transformers.EsmcModel(transformers.EsmcConfig(**ENCODER_SIZES))).to(device)
    ids = torch.arange(4, 24, device=device)[None]
    chains = (torch.arange(20, device=device) >= 10).long()[None]
    model.set_attn_implementation("eager")
    eager = encoded(model, ids, sequence_id=torch.zeros_like(chains))
    paged_attn.integrations.register_attention()
    model.set_attn_implementation("paged_attn")
    close(encoded(model, ids, sequence_id=torch.zeros_like(chains)), eager)
    between = torch.tensor([[0] * 8 + [1] * 4 + [0] * 8], device=device)
    for sequence_id in (chains, between):
        with pytest.raises(ValueError, match="mask_function: expected tokens that see all keys or a window of them"):
            encoded(model, ids, sequence_id=sequence_id)


# Of 12 tokens: what each sees of the others, by query and key. One row of each is unlike its neighbours.
NOT_WINDOWS = {
    "a gap in the middle": lambda q, k: (q != 6) | (k != 3),
    "one row sees less on the left": lambda q, k: (k >= q - 4 + 1 * (q == 9)) & (k <= q + 4),
    "one row sees more on the left": lambda q, k: (k >= q - 4 - 1 * (q == 9)) & (k <= q + 4),
    "one row sees less on the right": lambda q, k: (k >= q - 4) & (k <= q + 4 - 1 * (q == 2)),
    "one row sees more on the right": lambda q, k: (k >= q - 4) & (k <= q + 4 + 1 * (q == 2)),
}


def mask_of(paged_attn, seen, queries, keys):
    """What the mask function of this package makes of a mask of positions alone, as of an encoder."""
    make_mask = sys.modules[f"{paged_attn.__name__}.integrations.transformers_attention"].make_mask
    return make_mask(
        1, queries, keys, mask_function=lambda row, head, q, k: seen(q, k), use_vmap=True,
        allow_is_bidirectional_skip=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", NOT_WINDOWS)
def test_masks_with_a_row_of_its_own(paged_attn, name):
    assert mask_of(paged_attn, lambda q, k: (k >= q - 4) & (k <= q + 4), 12, 12).paged_window == (4, 4)
    with pytest.raises(ValueError, match="mask_function: expected tokens that see all keys or a window of them"):
        mask_of(paged_attn, NOT_WINDOWS[name], 12, 12)


def test_windows_that_the_kernel_counts_from_elsewhere(paged_attn):
    """The kernel has the last query at the last key. Without a limit that does not matter."""
    with pytest.raises(ValueError, match="mask_function: expected tokens that see all keys or a window of them"):
        mask_of(paged_attn, lambda q, k: (k >= q - 4) & (k <= q + 4), 12, 16)
    mask = mask_of(paged_attn, lambda q, k: (k >= 0) & (q >= 0), 12, 16)
    assert mask is None or mask.paged_window == (-1, -1)


def test_a_causal_mask_with_tokens_that_see_later_ones(paged_attn):
    """The first three are of an image. Who makes such a mask says that it may not be skipped."""
    make_mask = sys.modules[f"{paged_attn.__name__}.integrations.transformers_attention"].make_mask

    def seen(row, head, q, k):
        return (k <= q) | ((q < 3) & (k < 3))

    with pytest.raises(ValueError, match="mask_function: expected tokens that see all keys or a window of them"):
        make_mask(1, 12, 12, mask_function=seen, allow_is_causal_skip=False)


# ---- Masks, packed sequences, and what models pass beside


def half_padded(model, cache, where, inference=False):
    """A prompt and one more token, with row 1 shorter: its padding stands on the right or in the middle."""
    ids = torch.randint(1, 300, (2, 12), generator=torch.Generator().manual_seed(4)).to(model.device)
    mask = torch.ones_like(ids)
    mask[1, slice(8, 12) if where == "right" else slice(3, 5)] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    longer = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    with torch.inference_mode(inference), torch.no_grad():
        one = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
        position = positions[:, -1:] + 1 if where == "middle" else torch.tensor([[12], [8]], device=model.device)
        two = model(ids[:, :1], attention_mask=longer, position_ids=position, past_key_values=cache).logits
    return torch.cat([one[0], one[1][mask[1] > 0], two[:, 0]])


@pytest.mark.parametrize("where", ["right", "middle"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_other_padding_with_other_caches(make_model, paged_cache, where, kind):
    model = make_model()
    paged_cache(model)

    def cache():
        if kind == "dynamic":
            return transformers.DynamicCache()
        return transformers.StaticCache(config=model.config, max_cache_len=32)

    ours = half_padded(model, cache(), where)
    close(half_padded(model, cache(), where, inference=True), ours)
    model.set_attn_implementation("eager")
    close(ours, half_padded(model, cache(), where))


def test_windows_and_padding_on_the_right(make_model, paged_cache):
    model = make_model("Mistral", sliding_window=8)
    ids = text(model, [12, 12])["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    paged_cache(model)
    ours = logits(model, ids, attention_mask=mask, use_cache=False)
    model.set_attn_implementation("eager")
    close(ours[mask > 0], logits(model, ids, attention_mask=mask, use_cache=False)[mask > 0])


@pytest.mark.parametrize("of_decoder", [1, 5, 7])
def test_an_encoder_with_padding_on_the_right(device, paged_attn, of_decoder):
    """Also as many decoder tokens as there are columns in the encoder's mask, which says nothing about them."""
    model = bart(device)
    generator = torch.Generator().manual_seed(5)
    ids, own = (torch.randint(3, 90, (2, n), generator=generator).to(device) for n in (7, of_decoder))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    options = {"attention_mask": mask, "decoder_input_ids": own, "use_cache": False}
    model.set_attn_implementation("eager")
    whole = logits(model, ids, **options)
    paged_attn.integrations.PagedCache(model)
    close(logits(model, ids, **options), whole)


def packed(model):
    """Two sequences in one row, and the logits of each alone."""
    one, two = [5, 6, 7, 8, 9], [20, 21, 22, 23, 24, 25, 26]
    device = model.device
    model.set_attn_implementation("eager")
    alone = torch.cat([logits(model, [part], use_cache=False)[0] for part in (one, two)])
    positions = torch.tensor([[*range(5), *range(7)]], device=device)
    cu = torch.tensor([0, 5, 12], dtype=torch.int32, device=device)
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 7, "max_length_k": 7}
    return [one + two], {"position_ids": positions}, {"position_ids": positions} | lengths, alone


def test_packed_sequences(make_model, paged_cache):
    model = make_model()
    ids, by_positions, by_lengths, alone = packed(model)
    cache = paged_cache(model)
    for options in (by_positions, by_lengths):
        close(logits(model, ids, use_cache=False, **options)[0], alone)
        close(logits(model, ids, past_key_values=transformers.DynamicCache(), **options)[0], alone)
    # One position after the other is no packing, wherever it begins.
    later = torch.arange(3, 15, device=model.device)[None]
    ours = logits(model, ids, position_ids=later, use_cache=False)
    close(logits(model, ids, position_ids=later, past_key_values=cache), ours)
    model.set_attn_implementation("eager")
    close(ours, logits(model, ids, position_ids=later, use_cache=False))


def test_packed_sequences_in_several_rows(make_model, paged_cache):
    model = make_model()
    ids = text(model, [12, 12])["input_ids"]
    positions = torch.tensor([[*range(5), *range(7)], [*range(3), *range(9)]], device=model.device)
    model.set_attn_implementation("eager")
    eager = logits(model, ids, position_ids=positions, use_cache=False)
    cache = paged_cache(model)
    close(logits(model, ids, position_ids=positions, use_cache=False), eager)
    # The same positions in every row, and rows that are no packing beside one that is.
    mixed = torch.stack([positions[0], torch.arange(12, device=model.device)])
    for some in (positions[:1], mixed):
        ours = logits(model, ids, position_ids=some, use_cache=False)
        model.set_attn_implementation("eager")
        close(ours, logits(model, ids, position_ids=some, use_cache=False))
        model.set_attn_implementation("paged_attn")
    with pytest.raises(ValueError, match="position_ids: expected one sequence a row with a PagedCache"):
        logits(model, ids, position_ids=positions, past_key_values=cache)


@pytest.mark.parametrize("inference", [False, True])
def test_positions_changed_in_place(make_model, paged_cache, inference):
    """What was seen of a tensor in one pass does not stand for the next."""
    model = make_model()
    ids, by_positions, _, alone = packed(model)
    paged_cache(model)
    with torch.inference_mode(inference):
        positions = torch.arange(12, device=model.device)[None]
        logits(model, ids, position_ids=positions, use_cache=False)
        positions.copy_(by_positions["position_ids"])
        close(logits(model, ids, position_ids=positions, use_cache=False)[0], alone)


@pytest.mark.parametrize("inference", [False, True])
def test_positions_changed_in_place_where_the_first_layer_does_not_attend(device, paged_attn, inference, emulated):
    if emulated:
        pytest.skip("the emulated device has no convolutions")
    model = bamba(device)
    ids, by_positions, _, _ = packed(model)
    paged_attn.integrations.register_attention()
    model.set_attn_implementation("paged_attn")
    with torch.inference_mode(inference):
        positions = torch.arange(12, device=model.device)[None]
        logits(model, ids, position_ids=positions, use_cache=False)
        positions.copy_(by_positions["position_ids"])
        wanted = logits(model, ids, position_ids=positions.clone(), use_cache=False)
        close(logits(model, ids, position_ids=positions, use_cache=False), wanted)


def bamba(device):
    """Its first layer is a state space, its second one attends."""
    config = transformers.BambaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.BambaForCausalLM(config).to(device).eval()


def test_from_pretrained_by_name(make_model, paged_attn, device, tmp_path):
    """Without a PagedCache."""
    make_model().save_pretrained(tmp_path)
    paged_attn.integrations.register_attention()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="paged_attn").to(device)
    inputs = text(model, [5, 9])
    tokens = generate(model, inputs, transformers.StaticCache(model.config, 64))
    assert tokens == expected(model, inputs)


def test_what_pages_cannot_hold_is_refused(make_model, paged_cache):
    model = make_model()
    ids, by_positions, by_lengths, _ = packed(model)
    cache = paged_cache(model)
    several = "position_ids: expected one sequence a row with a PagedCache or with earlier keys, got several"
    for options, message in (
        (by_positions, several),
        (by_lengths, "cu_seq_lens_q: expected None with a PagedCache"),
        ({"attention_mask": torch.ones(1, 1, 12, 12) > 0}, r"attention_mask: expected None or \(1, keys\), got shape"),
    ):
        with pytest.raises(ValueError, match=message):
            logits(model, ids, past_key_values=cache, **options)
        assert cache.get_seq_length() == 0 and cache.pages.used == 0
    logits(model, ids, past_key_values=cache)
    mask = torch.ones(1, 5, dtype=torch.int64, device=model.device)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="attention_mask: expected 17 keys a row, got 5"):
        logits(model, [[1, 2, 3, 4, 5]], past_key_values=cache, attention_mask=mask)
    # Earlier keys of another cache belong to one of the sequences at most.
    dynamic = transformers.DynamicCache()
    logits(model, ids, past_key_values=dynamic)
    with pytest.raises(ValueError, match=several):
        logits(model, ids, past_key_values=dynamic, **by_positions)


@pytest.mark.parametrize("turn", ["right", "middle", "earlier"])
def test_padding_of_a_later_turn(make_model, paged_cache, turn):
    model = make_model()
    ids = text(model, [12, 12])["input_ids"]
    cache, other = paged_cache(model), transformers.DynamicCache()
    for one in (cache, other):
        logits(model, ids, past_key_values=one)
    mask = torch.ones(2, 16, dtype=torch.int64, device=model.device)
    mask[1, {"right": slice(14, 16), "middle": slice(13, 14), "earlier": slice(5, 6)}[turn]] = 0
    with pytest.raises(ValueError, match="attention_mask: expected padding on the left only, got other in row 1"):
        logits(model, ids[:, :4], past_key_values=cache, attention_mask=mask)
    assert cache.get_seq_length() == 12
    mask[1] = 1
    mask[1, :3] = 0
    ours = logits(model, ids[:, :4], past_key_values=cache, attention_mask=mask)
    model.set_attn_implementation("eager")
    close(ours, logits(model, ids[:, :4], past_key_values=other, attention_mask=mask))


@pytest.fixture
def attend(make_model, paged_cache):
    """The attention function itself, with a layer and tensors."""
    model = make_model()
    paged_cache(model)
    function = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["paged_attn"]
    q, k, v = torch.randn(3, 2, 4, 6, 16, device=model.device)

    def call(mask=None, **options):
        with torch.no_grad():
            return function(model.model.layers[0].self_attn, q, k, v, mask, **options)[0]

    return call


@pytest.mark.parametrize(
    "name",
    ["position_bias", "attention_bias", "head_mask", "indices", "block_indices", "cache", "block_table", "k_cache"],
)
def test_keywords_that_would_change_the_result(attend, name):
    plain = attend()
    assert torch.equal(attend(**{name: None}), plain)
    with pytest.raises(ValueError, match=rf"{name}: expected None or False .*, got a tensor of shape \(2, 3\)"):
        attend(**{name: torch.zeros(2, 3)})


@pytest.mark.parametrize("kept", [1, 3])
def test_masks_for_the_last_queries_of_a_prompt(attend, device, kept):
    """transformers 5.23 gives layers that share keys the last queries of a prompt, and takes their rows of a mask as
    below. A mask of keys holds for all queries."""
    make_mask = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["paged_attn"]
    padded = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6], dtype=torch.bool, device=device)
    config = SimpleNamespace(num_kv_shared_layers=2)
    mask = make_mask(2, 6, 6, attention_mask=padded, config=config)
    assert torch.equal(attend(mask), attend(padded))
    rows = mask[:, :, slice(-kept, None), :]
    assert torch.equal(rows[:, 1:], padded[:, 1:]) and torch.equal(attend(rows), attend(padded))
    bidirectional = {"allow_is_bidirectional_skip": True, "local_size": 2, "mask_function": window_of_2}
    mask = make_mask(2, 6, 6, config=config, **bidirectional)
    assert mask[:, :, slice(-kept, None), :].paged_window == mask.paged_window == (2, 2)


def window_of_2(batch, head, query, key):
    return (query - key).abs() <= 2


def test_keywords_that_do_not_fit_together(attend):
    cu = torch.tensor([0, 12], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seq_lens_q and cu_seq_lens_k: expected both or neither, got only one"):
        attend(cu_seq_lens_q=cu)
    with pytest.raises(ValueError, match="cu_seq_lens_q: expected None beside an attention_mask"):
        attend(torch.ones(2, 6), cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    with pytest.raises(ValueError, match=r"attention_mask: expected None or \(2, keys\), got shape \(2, 1, 6, 6\)"):
        attend(torch.ones(2, 1, 6, 6))
    with pytest.raises(ValueError, match=r"attention_mask: expected None or \(2, keys\), got shape \(1, 6\)"):
        attend(torch.ones(1, 6))
    with pytest.raises(ValueError, match=r"dropout: expected 0\.0 .*, got 0\.5"):
        attend(dropout=0.5)
    with pytest.raises(ValueError, match=r"sliding_window: expected a mask .*, got only sliding_window=5"):
        attend(is_causal=False, sliding_window=5)
    close(attend(is_causal=False, sliding_window=6), attend(is_causal=False))


def test_masks_that_a_model_joins_are_refused(device, paged_attn):
    """What they say beyond padding is lost: one is causal."""
    encoder = t5gemma2_config()
    decoder = encoder.text_config.to_dict() | {"model_type": "t5gemma2_decoder"}
    config = transformers.T5Gemma2Config(encoder=encoder, decoder=decoder, eoi_token_index=299, image_token_index=298)
    model = random_weights(transformers.T5Gemma2ForConditionalGeneration(config)).to(device)
    paged_attn.integrations.register_attention()
    model.set_attn_implementation("paged_attn")
    ids = torch.randint(3, 290, (2, 9), device=device)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    words = "^module: expected .* one source, got T5Gemma2MergedAttention, which joins two masks$"
    with torch.no_grad(), pytest.raises(ValueError, match=words):
        model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids, decoder_attention_mask=mask)


@pytest.mark.parametrize("length", [12, 8])
def test_layers_that_are_causal_by_their_mask(device, paged_attn, length):
    """They say is_causal = False, with padding and without."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Aimv2TextConfig(vocab_size=300, max_position_embeddings=64, eos_token_id=2, **sizes)
    model = random_weights(transformers.Aimv2TextModel(config)).to(device)
    ids = torch.randint(3, 300, (2, 12), device=device)
    mask = torch.ones_like(ids)
    mask[1, length:] = 0
    model.set_attn_implementation("eager")
    eager = encoded(model, ids, attention_mask=mask)
    paged_attn.integrations.register_attention()
    model.set_attn_implementation("paged_attn")
    close(encoded(model, ids, attention_mask=mask)[mask > 0], eager[mask > 0])


def test_layers_that_do_not_say_whether_they_are_causal(device, paged_attn):
    """Their masks are None where nothing is padded, so nobody knows."""
    sizes = ENCODER_SIZES | {"vocab_size": 300, "pad_token_id": 0}
    model = random_weights(transformers.SplinterModel(transformers.SplinterConfig(**sizes))).to(device)
    ids = text(model, [5, 9])["input_ids"]
    mask = (ids > 0).long()
    model.set_attn_implementation("eager")
    eager = encoded(model, ids, attention_mask=mask)
    paged_attn.integrations.register_attention()
    model.set_attn_implementation("paged_attn")
    words = "^is_causal: expected True or False, as an attribute of SplinterSelfAttention or a keyword, got neither$"
    for given in (mask, torch.ones_like(mask)):
        with pytest.raises(ValueError, match=words):
            encoded(model, ids, attention_mask=given)
    for layer in model.encoder.layer:
        layer.attention.self.is_causal = False
    close(encoded(model, ids, attention_mask=mask)[mask > 0], eager[mask > 0])


def test_a_layer_with_a_mask_of_its_own_is_told_of_the_mask(device, paged_attn):
    """Though it does not say whether it is causal either."""
    sizes = ENCODER_SIZES | {"vocab_size": 300, "pad_token_id": 0}
    model = random_weights(transformers.LayoutLMModel(transformers.LayoutLMConfig(**sizes))).to(device)
    paged_attn.integrations.register_attention()
    model.set_attn_implementation("paged_attn")
    with pytest.raises(ValueError, match=r"^attention_mask: expected None or \(2, keys\), got shape \(2, 1, 1, 9\)$"):
        encoded(model, torch.ones(2, 9, dtype=torch.int64, device=device))


def test_attentions_are_not_given(make_model, paged_cache):
    """Which is said once, as transformers' flash attention says it."""
    model = make_model()
    paged_cache(model)
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("transformers.integrations.paged_attn")
    logger.addHandler(handler)
    logging.Logger.warning_once.cache_clear()
    try:
        for _ in range(2):
            with torch.no_grad():
                model(torch.tensor([[5, 6, 7]], device=model.device), output_attentions=True)
    finally:
        logger.removeHandler(handler)
    assert len(said) == 1 and said[0].startswith("`paged_attn` attention does not support `output_attentions=True`.")


def test_position_bias_of_a_model(device, paged_cache):
    config = transformers.MT5Config(
        vocab_size=100, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4, pad_token_id=0,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.MT5ForConditionalGeneration(config).to(device).eval()
    paged_cache(model)
    with pytest.raises(ValueError, match=r"position_bias: expected None or False .*, got a tensor of shape \(1, 4, 7"):
        logits(model, [[3, 4, 5, 6, 7, 8, 9]], decoder_input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device))


def test_in_a_graph(attend, device):
    """Nothing waits for the device there, and other padding is an error all the same."""
    if device != "cpu":
        pytest.skip("elsewhere the check ends the process, or there is no compiler")
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    left = torch.ones(2, 6, dtype=torch.bool)
    left[1, :2] = False
    close(compiled(left), attend(left))
    close(compiled(), attend())
    refused = pytest.raises(RuntimeError, match="attention_mask: expected padding on the left only in a compiled model")
    # torch leaves the grad mode of a compiled no_grad behind where an error ends the graph.
    with torch.set_grad_enabled(torch.is_grad_enabled()), refused:
        compiled(left.flip(1))
    torch.compiler.reset()
