"""PagedCache in transformers' generate(): the tokens of a DynamicCache, and what happens to the pages."""

import functools

import pytest
import small_models
import torch
from small_models import MODELS

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
def make_model(device):
    return functools.partial(small_models.make, transformers, device)


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


def test_too_few_pages(make_model, paged_cache):
    model = make_model()
    cache = paged_cache(model, page_size=4, num_pages=6)
    with pytest.raises(RuntimeError, match=r"num_pages: expected at least 8 for 2 rows of 16 tokens, got 6"):
        generate(model, text(model, [9, 9]), cache)
    assert cache.pages.used == 6 and cache.get_seq_length() == 12


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


def test_layers_of_another_kind_are_refused(make_model, paged_cache):
    model = make_model()
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ValueError, match=r"model: expected layers of .* got chunked_attention"):
        paged_cache(model)
