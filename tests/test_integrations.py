"""transformers with this kernel: the same tokens as transformers' own attention, and the block-table helper."""

import functools
import inspect
from collections import Counter

import pytest
import torch
from small_models import MODELS
from torch._dynamo.utils import counters

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


def set_attention(model, attention):
    if model._compatible_flash_implementations is not None:  # GPT-OSS: another name is replaced by the first of these
        model._compatible_flash_implementations = [KERNEL_FLASH]
    model.set_attn_implementation(attention, allow_all_kernels=True)


def generate(model, attention, prompts, **options):
    set_attention(model, attention)
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    torch.manual_seed(3)  # of sampling
    out = model.generate(ids, attention_mask=mask, **({"max_new_tokens": 8, "do_sample": False} | options))
    return out[:, longest:].tolist()


# Later releases put a flash kernel in the place of sdpa unless told otherwise; for earlier ones the name tells.
SETTINGS = inspect.signature(transformers.ContinuousBatchingConfig).parameters
SWITCHES = "auto_switch_to_flash" in SETTINGS
PAGE_SIZE = {"page_size" if "page_size" in SETTINGS else "block_size": 16}  # 5.17 has the second name


def generate_batch(model, attention, prompts=PROMPTS, generation=None, **options):
    if SWITCHES:
        options["auto_switch_to_flash"] = False
    elif attention == "sdpa":
        attention = "paged|sdpa"
    set_attention(model, attention)
    torch.manual_seed(3)  # of sampling
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": -1} | (generation or {})
    results = model.generate_batch(
        prompts,
        generation_config=transformers.GenerationConfig(**settings),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            # Asynchronous batching (transformers' default with CUDA graphs) gave wrong tokens now and then while other
            # processes kept the GPU busy, with attention written in PyTorch just the same.
            num_blocks=32,
            max_batch_tokens=64,
            use_async_batching=False,
            **PAGE_SIZE,
            **options,
        ),
    )
    assert [r.error for r in results.values()] == [None] * len(prompts) * settings.get("num_return_sequences", 1)
    return [r.generated_tokens for r in results.values()]


# ---- generate() ----


@pytest.mark.parametrize("kind, config", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("padded", [False, True], ids=["equal", "padded"])
def test_generate_gives_the_tokens_of_eager_attention(make_model, calls, kind, config, padded):
    model = make_model(kind, **config)
    prompts = PROMPTS if padded else [p[:4] * 6 for p in PROMPTS]
    expected = generate(model, "eager", prompts)
    assert not calls
    assert generate(model, KERNEL_FLASH, prompts) == expected
    assert ("flash_attn_varlen_func" if padded else "flash_attn_func") in calls


@pytest.mark.parametrize("samples", [1, 3])
def test_generate_samples_the_same_tokens(make_model, calls, samples):
    """Sampling, and several samples of each prompt, with the random numbers of one seed."""
    model, options = make_model("Llama"), {"do_sample": True, "top_k": 20, "num_return_sequences": samples}
    expected = generate(model, "eager", PROMPTS, **options)
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS) * samples
    assert generate(model, KERNEL_FLASH, PROMPTS, **options) == expected
    assert calls


def test_generate_streams(make_model, calls, device):
    """Every token reaches the streamer when it is made."""
    model, came = make_model("Llama"), []

    class Streamer(transformers.generation.streamers.BaseStreamer):
        def put(self, value):
            came.append((value.flatten().tolist(), sum(calls.values())))

        def end(self):
            came.append("end")

    tokens = generate(model, KERNEL_FLASH, PROMPTS[:1], streamer=Streamer())
    assert came.pop() == "end" and came.pop(0)[0] == PROMPTS[0]
    assert [[token] for token in tokens[0]] == [value for value, _ in came]
    made = [count for _, count in came]
    # On an emulated mps device the last two tokens came together (transformers 5.22.2).
    together = 1 if device == "mps" else 0
    assert made == sorted(made) and len(set(made)) >= len(made) - together, "tokens came late, together"


@pytest.mark.parametrize("kind, config", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("padded", [False, True], ids=["equal", "padded"])
def test_generate_with_a_static_cache(make_model, calls, kind, config, padded):
    """The name decides: without "flash" in it transformers drops a mask without padding, and empty slots count."""
    if not padded and transformers.__version__.startswith(("5.18.", "5.19.", "5.20.")):
        pytest.skip("these drop such a mask under every name")
    model = make_model(kind, **config)
    prompts = PROMPTS if padded else [p[:4] * 5 for p in PROMPTS]
    expected = generate(model, "eager", prompts)
    options = {"cache_implementation": "static", "disable_compile": True}
    assert generate(model, KERNEL_FLASH, prompts, **options) == expected
    assert calls


def test_generate_with_a_compiled_static_cache(make_model, calls, device, emulated):
    """transformers keeps what it loads from the Hub out of the graph, so the graph breaks around the kernel."""
    if emulated:
        pytest.skip("no compiler for the emulated device")
    model = make_model("Llama")
    expected = generate(model, "sdpa", PROMPTS)
    compiling = transformers.CompileConfig(fullgraph=False, backend="eager", mode=None)
    compiling._compile_all_devices = True
    graphs = counters["stats"]["unique_graphs"]
    tokens = generate(model, KERNEL_FLASH, PROMPTS, cache_implementation="static", compile_config=compiling)
    torch.compiler.reset()
    assert tokens == expected
    assert counters["stats"]["unique_graphs"] > graphs and set(calls) == {"flash_attn_varlen_func"}


def test_packed_sequences_do_not_see_each_other(make_model, calls):
    model = make_model("Llama")
    packed = torch.tensor([PROMPTS[0] + PROMPTS[1]], device=model.device)
    positions = torch.cat([torch.arange(len(p)) for p in PROMPTS[:2]])[None].to(model.device)
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([p], device=model.device)).logits[0] for p in PROMPTS[:2]])
        model.set_attn_implementation(KERNEL_FLASH, allow_all_kernels=True)
        logits = model(packed, position_ids=positions, use_cache=False).logits[0]
    assert set(calls) == {"flash_attn_varlen_func"}
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_images_of_pixtral(device, calls, emulated):
    """Several images in one row. The name decides: without "flash" in it they come with a mask that no kernel takes."""
    if emulated:
        pytest.skip("the emulated device has no convolutions")
    config = transformers.PixtralVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=64, patch_size=8,
        initializer_range=0.15,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.PixtralVisionModel(config).to(device).eval()
    pixels, sizes = torch.randn(2, 3, 64, 64, device=device), torch.tensor([[64, 64], [32, 48]])
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(pixels, image_sizes=sizes).last_hidden_state
        model.set_attn_implementation(KERNEL_FLASH, allow_all_kernels=True)
        states = model(pixels, image_sizes=sizes).last_hidden_state
    assert set(calls) == {"flash_attn_varlen_func"}
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize("kind, config", MODELS.values(), ids=MODELS)
def test_continuous_batching_of_every_family(make_model, calls, kind, config):
    if kind == "Gemma2":
        pytest.skip("transformers' own sdpa, which is the yardstick here, leaves the softcap of Gemma 2 out")
    model = make_model(kind, **config)
    expected = [generate(model, "eager", [prompt])[0] for prompt in PROMPTS]
    assert generate_batch(model, KERNEL_FLASH) == expected
    assert calls


def test_block_tables_sample_the_same_tokens(make_model, paged_attn, calls):
    model, sampling = make_model("Llama"), {"do_sample": True, "top_k": 20}
    expected = generate_batch(model, "sdpa", generation=sampling)
    assert expected != generate_batch(model, "sdpa")
    with paged_attn.integrations.transformers_block_tables():
        assert generate_batch(model, KERNEL_FLASH, generation=sampling) == expected
    assert calls["flash_attn_with_kvcache"] > 0


def test_block_tables_with_forks(make_model, paged_attn, calls):
    """Several sequences of one prompt: transformers computes the prompt once and forks its pages."""
    if "page_size" not in SETTINGS:
        pytest.skip("transformers 5.17 gives back the first sequence of each prompt only")
    model, several = make_model("Llama"), {"num_return_sequences": 3, "do_sample": True, "top_k": 20}
    expected = generate_batch(model, "sdpa", generation=several)
    assert len({tuple(tokens) for tokens in expected}) == 3 * len(PROMPTS)
    with paged_attn.integrations.transformers_block_tables():
        assert generate_batch(model, KERNEL_FLASH, generation=several) == expected
    assert calls["flash_attn_with_kvcache"] > 0


def test_block_tables_with_a_shared_prefix(make_model, paged_attn, calls):
    """Prompts that begin with the same two pages, which transformers gives to one request after the other."""
    model, start = make_model("Llama"), list(range(100, 132))
    prompts = [start + prompt for prompt in PROMPTS]
    expected = [generate(model, "eager", [prompt])[0] for prompt in prompts]
    with paged_attn.integrations.transformers_block_tables():
        assert generate_batch(model, KERNEL_FLASH, prompts, allow_block_sharing=True) == expected
    assert calls["flash_attn_with_kvcache"] > 0


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


def test_with_blocks_that_overlap(paged_attn, closed_gate):
    """As those of two threads do: the path stays open until the last one ends."""
    blocks = [paged_attn.integrations.transformers_block_tables() for _ in range(2)]
    for block in blocks:
        block.__enter__()
    blocks[0].__exit__(None, None, None)
    assert getattr(initialization, GATE) is not closed_gate
    blocks[1].__exit__(None, None, None)
    assert getattr(initialization, GATE) is closed_gate


def test_the_with_block_closes_after_an_error(paged_attn, closed_gate):
    with pytest.raises(ZeroDivisionError), paged_attn.integrations.transformers_block_tables():
        raise ZeroDivisionError
    assert getattr(initialization, GATE) is closed_gate


@pytest.mark.parametrize("version", ["4.57.1", "5.2.0", "5.99.0", "6.0.0.dev0"])
def test_unknown_transformers_is_refused(paged_attn, closed_gate, monkeypatch, version):
    monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(RuntimeError, match=rf"knows transformers 5\.17\.x.*; got {version}"):
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
