"""transformers with this kernel: the same tokens as transformers' own attention, and the block-table helper."""

import functools
from collections import Counter

import pytest
import torch

# Not in the environment of kernel-builder's ci-test, which collects this file too.
transformers = pytest.importorskip("transformers")
initialization = pytest.importorskip("transformers.generation.continuous_batching.initialization")

KERNEL = "org/paged-attn"
KERNEL_FLASH = f"{KERNEL}:flash_attn_2"
FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
GATE = "ensure_decode_fast_path_is_available"
PROMPTS = [list(range(1, 20)), list(range(5, 9)), list(range(30, 80))]


@pytest.fixture
def calls(paged_attn, monkeypatch):
    """Counts the calls that transformers makes of each function."""
    counts = Counter()

    def count(function):
        @functools.wraps(function)  # transformers reads the signature
        def counted(*args, **kwargs):
            counts[function.__name__] += 1
            return function(*args, **kwargs)

        return counted

    for name in FUNCTIONS:
        monkeypatch.setattr(paged_attn, name, count(getattr(paged_attn, name)))
    # transformers keeps the functions it loaded last; make it look again.
    monkeypatch.setattr(transformers.modeling_flash_attention_utils, "_loaded_implementation", None)
    yield counts
    transformers.modeling_flash_attention_utils._loaded_implementation = None


@pytest.fixture
def closed_gate(paged_attn):
    """The gate is transformers' own before and after the test."""
    if torch.cuda.is_available():
        pytest.skip("transformers opens block tables on CUDA itself")
    before = getattr(initialization, GATE)
    assert before.__module__ == initialization.__name__
    yield before
    paged_attn.integrations.disable_transformers_block_tables()
    assert getattr(initialization, GATE) is before


SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    # Attention that decides which token comes next, so that a wrong result shows in the tokens.
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.fixture
def make_model(device):
    def make(kind: str, **config):
        torch.manual_seed(0)
        config_class = getattr(transformers, f"{kind}Config")
        model = getattr(transformers, f"{kind}ForCausalLM")(config_class(**SIZES, **config))
        return model.to(device).eval()

    return make


def generate(model, attention, prompts, **options):
    model.set_attn_implementation(attention, allow_all_kernels=True)
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, **options)
    return out[:, longest:].tolist()


def generate_batch(model, attention, **options):
    model.set_attn_implementation(attention, allow_all_kernels=True)
    results = model.generate_batch(
        PROMPTS,
        generation_config=transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            # Asynchronous batching (transformers' default with CUDA graphs) gave wrong tokens now and then while other
            # processes kept the GPU busy, with attention written in PyTorch just the same.
            page_size=16,
            num_blocks=32,
            max_batch_tokens=64,
            auto_switch_to_flash=False,
            use_async_batching=False,
            **options,
        ),
    )
    assert [r.error for r in results.values()] == [None] * len(PROMPTS)
    return [r.generated_tokens for r in results.values()]


# ---- generate() ----

MODELS = {
    "llama": ("Llama", {}),
    "mistral, sliding window": ("Mistral", {"sliding_window": 8}),
    "gemma 2, softcap": ("Gemma2", {"sliding_window": 8, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}),
    "gpt-oss, sinks": ("GptOss", {"sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1}),
}


@pytest.mark.parametrize("kind, config", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("padded", [False, True], ids=["equal", "padded"])
def test_generate_gives_the_tokens_of_eager_attention(make_model, calls, kind, config, padded):
    model = make_model(kind, **config)
    prompts = PROMPTS if padded else [p[:4] * 6 for p in PROMPTS]
    expected = generate(model, "eager", prompts)
    assert not calls
    assert generate(model, KERNEL, prompts) == expected
    assert ("flash_attn_varlen_func" if padded else "flash_attn_func") in calls


def test_generate_with_a_static_cache(make_model, calls):
    model = make_model("Llama")
    expected = generate(model, "sdpa", PROMPTS)
    assert generate(model, KERNEL, PROMPTS, cache_implementation="static", disable_compile=True) == expected
    assert set(calls) == {"flash_attn_varlen_func"}


def test_packed_sequences_do_not_see_each_other(make_model, calls):
    model = make_model("Llama")
    packed = torch.tensor([PROMPTS[0] + PROMPTS[1]], device=model.device)
    positions = torch.cat([torch.arange(len(p)) for p in PROMPTS[:2]])[None].to(model.device)
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([p], device=model.device)).logits[0] for p in PROMPTS[:2]])
        model.set_attn_implementation(KERNEL, allow_all_kernels=True)
        logits = model(packed, position_ids=positions, use_cache=False).logits[0]
    assert set(calls) == {"flash_attn_varlen_func"}
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


# ---- Continuous batching ----


def test_block_tables_are_closed_unless_asked_for(make_model, paged_attn, calls, closed_gate):
    model = make_model("Llama")
    expected = generate_batch(model, "sdpa")
    assert generate_batch(model, KERNEL_FLASH) == expected
    assert set(calls) == {"flash_attn_varlen_func"}

    with paged_attn.integrations.transformers_block_tables():
        pass
    calls.clear()
    assert generate_batch(model, KERNEL_FLASH) == expected
    assert set(calls) == {"flash_attn_varlen_func"}


def test_block_tables_decode_with_the_same_tokens(make_model, paged_attn, calls):
    model = make_model("Llama")
    expected = generate_batch(model, "sdpa")
    with paged_attn.integrations.transformers_block_tables():
        assert generate_batch(model, KERNEL_FLASH) == expected
    assert calls["flash_attn_with_kvcache"] > calls["flash_attn_varlen_func"] > 0


def test_continuous_batching_with_sliding_windows(make_model, paged_attn, calls):
    model = make_model("Mistral", sliding_window=8)
    expected = generate_batch(model, "sdpa")
    with paged_attn.integrations.transformers_block_tables():
        assert generate_batch(model, KERNEL_FLASH) == expected
    assert set(calls) == {"flash_attn_varlen_func"}


def test_block_tables_with_padded_batches(make_model, paged_attn, calls, monkeypatch):
    """transformers pads batches when it compiles: padded rows come with length -1 and an empty table."""
    model = make_model("Llama")
    expected = generate_batch(model, "sdpa")
    # The padding is what matters here, and tracing the model takes long.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    with paged_attn.integrations.transformers_block_tables():
        # Three requests in a batch of four.
        tokens = generate_batch(model, KERNEL_FLASH, max_requests_per_batch=4, default_compile_level=1)
    assert tokens == expected
    assert calls["flash_attn_with_kvcache"] > 0


def test_the_user_can_still_turn_block_tables_off(make_model, paged_attn, calls):
    model = make_model("Llama")
    with paged_attn.integrations.transformers_block_tables():
        generate_batch(model, KERNEL_FLASH, max_blocks_per_request=0)
    assert set(calls) == {"flash_attn_varlen_func"}


# ---- The helper ----


def blocks_left(model, attention) -> int:
    """What the gate leaves of max_blocks_per_request = 4."""
    model.set_attn_implementation(attention, allow_all_kernels=True)
    batching = transformers.ContinuousBatchingConfig(max_blocks_per_request=4)
    getattr(initialization, GATE)(model.config, batching, False)
    return batching.max_blocks_per_request


def test_only_this_kernel_passes_the_gate(make_model, paged_attn, closed_gate):
    with paged_attn.integrations.transformers_block_tables():
        assert blocks_left(make_model("Llama"), KERNEL_FLASH) == 4
        assert blocks_left(make_model("Llama"), "sdpa") == 0
        # Such layers have no block table in transformers.
        assert blocks_left(make_model("Mistral", sliding_window=8), KERNEL_FLASH) == 0


def test_another_kernel_keeps_the_rule_of_transformers(make_model, paged_attn, closed_gate, monkeypatch):
    def other_kernel(q, k_cache, v_cache, block_table=None):
        raise NotImplementedError

    with paged_attn.integrations.transformers_block_tables():
        monkeypatch.setattr(paged_attn, "flash_attn_with_kvcache", other_kernel)
        model = make_model("Llama")
        model.set_attn_implementation(f"{KERNEL}:flash_attn_3", allow_all_kernels=True)
        monkeypatch.undo()
        batching = transformers.ContinuousBatchingConfig(max_blocks_per_request=4)
        getattr(initialization, GATE)(model.config, batching, False)
    transformers.modeling_flash_attention_utils._loaded_implementation = None
    assert batching.max_blocks_per_request == 0


def test_enabling_twice_and_nesting(paged_attn, closed_gate):
    helper = paged_attn.integrations
    helper.disable_transformers_block_tables()
    assert getattr(initialization, GATE) is closed_gate
    helper.enable_transformers_block_tables()
    opened = getattr(initialization, GATE)
    assert opened is not closed_gate
    helper.enable_transformers_block_tables()
    with helper.transformers_block_tables():
        pass
    assert getattr(initialization, GATE) is opened
    helper.disable_transformers_block_tables()
    assert getattr(initialization, GATE) is closed_gate


def test_the_with_block_closes_after_an_error(paged_attn, closed_gate):
    with pytest.raises(ZeroDivisionError), paged_attn.integrations.transformers_block_tables():
        raise ZeroDivisionError
    assert getattr(initialization, GATE) is closed_gate


@pytest.mark.parametrize("version", ["4.57.1", "5.2.0", "5.99.0", "6.0.0.dev0"])
def test_unknown_transformers_is_refused(paged_attn, closed_gate, monkeypatch, version):
    monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(RuntimeError, match=rf"knows transformers 5\.18\.x.*; got {version}"):
        paged_attn.integrations.enable_transformers_block_tables()
    assert getattr(initialization, GATE) is closed_gate


def test_a_changed_gate_is_refused(paged_attn, monkeypatch):
    monkeypatch.setattr(initialization, GATE, lambda config: None)
    with pytest.raises(RuntimeError, match=f"{GATE}.*missing or was changed"):
        paged_attn.integrations.enable_transformers_block_tables()
    monkeypatch.delattr(initialization, GATE)
    with pytest.raises(RuntimeError, match=f"{GATE}.*missing or was changed"):
        paged_attn.integrations.enable_transformers_block_tables()


def test_a_later_replacement_is_not_overwritten(paged_attn, closed_gate):
    paged_attn.integrations.enable_transformers_block_tables()
    ours = getattr(initialization, GATE)
    setattr(initialization, GATE, lambda config, cb_config, user_requested: None)
    with pytest.raises(RuntimeError, match="replaced again"):
        paged_attn.integrations.disable_transformers_block_tables()
    setattr(initialization, GATE, ours)
