"""vLLM's own engine with the plugin of engines/vllm, on the CPU: the tokens of vLLM's own attention.

    make test-vllm

The models are small and random, with weights large enough that attention decides the tokens: each is run once more with
scores scaled by 0.9, which must change them.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

# One process, so that attention can be watched and exchanged.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import openai
import paged_attn_vllm
import pytest
import torch
import transformers
from paged_attn_vllm.backend import PagedAttnImpl, kernel
from paged_attn_vllm.merge import merge_attn_states
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.cache_utils import Cache, DynamicLayer
from vllm import LLM, SamplingParams
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.ops.merge_attn_states import _merge_attn_states_torch as own_merge_attn_states

VOCABULARY = 400
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
MODELS = {
    "Llama": {},
    "Qwen3": {},
    "Gemma3Text": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "GptOss": {
        "sliding_window": 24,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
CLASSES = {"Gemma3Text": "Gemma3ForCausalLM"}


@pytest.fixture(scope="session")
def make_model(tmp_path_factory):
    """The directory of a random model with a tokenizer of one word per token."""
    made = {}

    def make(kind):
        if kind not in made:
            torch.manual_seed(0)
            config = getattr(transformers, f"{kind}Config")(**SIZES, **MODELS[kind])
            model = getattr(transformers, CLASSES.get(kind, f"{kind}ForCausalLM"))(config).float()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith("sinks"):
                        parameter.normal_(1.0, 2.0)
            made[kind] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(made[kind])
            words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w3"))
            words.pre_tokenizer = pre_tokenizers.Whitespace()
            transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2").save_pretrained(made[kind])
        return str(made[kind])

    return make


def prompts(lengths, seed=0, shared=0):
    """Random prompts; the first `shared` tokens are the same in all."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()  # noqa: E731
    start = draw(shared)
    return [{"prompt_token_ids": start + draw(n - shared)} for n in lengths]


@pytest.fixture
def run(monkeypatch):
    """Tokens of each prompt and how often each function of the kernel was called, for vLLM's own attention ("vllm"),
    ours ("paged_attn") or ours with scores times 0.9 ("scaled")."""

    def run(model, attention, requests, new_tokens=24, rounds=1, **options):
        calls = Counter()
        with monkeypatch.context() as patch:
            AttentionBackendEnum.CPU_ATTN.clear_override()
            selector._cached_get_attn_backend.cache_clear()
            if attention == "vllm":
                patch.setattr(paged_attn_vllm, "register", lambda: None)
            else:
                paged_attn_vllm.register()
            for name in ("flash_attn_varlen_func", "kv_paged_write"):
                patch.setattr(kernel(), name, counted(getattr(kernel(), name), name, calls))
            if attention == "scaled":
                patch.setattr(PagedAttnImpl, "__init__", scaled(PagedAttnImpl.__init__))
            options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "block_size": 32} | options
            llm = LLM(model, seed=0, disable_log_stats=True, **options)
            for _ in range(rounds):
                results = llm.generate(
                    requests, SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True), use_tqdm=False
                )
            tokens = [list(result.outputs[0].token_ids) for result in results]
            cached = [result.num_cached_tokens for result in results]
            del llm
        AttentionBackendEnum.CPU_ATTN.clear_override()
        return tokens, calls, cached

    return run


def counted(function, name, calls):
    def count(*arguments, **keywords):
        calls[name] += 1
        return function(*arguments, **keywords)

    return count


def scaled(make):
    def make_scaled(impl, *arguments, **keywords):
        make(impl, *arguments, **keywords)
        impl.scale *= 0.9

    return make_scaled


@pytest.fixture(scope="session")
def own_tokens():
    """What vLLM's own attention generated, by the settings that asked for it."""
    return {}


MIXED = prompts([5, 130, 61, 33, 1, 90])
SHARED = prompts([150, 200, 170, 129, 180, 220, 140, 160], seed=1, shared=128)


@pytest.fixture
def expect(make_model, run, own_tokens):
    def expect(kind, requests, **options):
        key = (kind, str(requests), str(options))
        if key not in own_tokens:
            own_tokens[key], calls, _ = run(make_model(kind), "vllm", requests, **options)
            assert not calls
        return own_tokens[key]

    return expect


@pytest.mark.parametrize("kind", MODELS)
def test_float32_tokens_are_those_of_vllm(make_model, run, expect, kind):
    expected = expect(kind, MIXED)
    tokens, calls, _ = run(make_model(kind), "paged_attn", MIXED)
    assert calls["flash_attn_varlen_func"] > 0 and calls["kv_paged_write"] > 0
    assert tokens == expected
    other, _, _ = run(make_model(kind), "scaled", MIXED)
    different = sum(a != b for a, b in zip(other, expected, strict=True))
    assert different >= len(MIXED) / 2, "the test is blind: attention decides nothing"


def nearest(x, dtype):
    return x.to(dtype).float()


def toward_zero(x, dtype):
    """vLLM's own attention cuts off the bits that do not fit: the neighbour below where rounding went up."""
    rounded = x.to(dtype)
    up = rounded.float().abs() > x.abs()
    return (rounded.view(torch.uint8) - up.to(torch.uint8)).view(dtype).float()


def eight_bit_layer(dtype, rounding):
    class EightBitLayer(DynamicLayer):
        def update(self, key_states, value_states, *arguments, **keywords):
            return super().update(rounding(key_states, dtype), rounding(value_states, dtype))

    return EightBitLayer


@pytest.mark.parametrize("attention, rounding", [("paged_attn", nearest), ("vllm", toward_zero)], ids=["ours", "own"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_8_bit_cache(make_model, run, dtype, attention, rounding):
    """The tokens of transformers with keys and values brought to 8 bits: we round to the nearest value, vLLM's own
    attention toward zero, and nothing else tells the two apart."""
    cache = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}[dtype]
    model = transformers.AutoModelForCausalLM.from_pretrained(make_model("Llama"), dtype=torch.float32)
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    expected = []
    for request in MIXED:
        ids = torch.tensor([request["prompt_token_ids"]])
        past = Cache(layer_class_to_replicate=eight_bit_layer(dtype, rounding))
        expected.append(model.generate(ids, past_key_values=past, max_new_tokens=24)[0, ids.shape[1] :].tolist())
    try:
        tokens, calls, _ = run(make_model("Llama"), attention, MIXED, kv_cache_dtype=cache)
    except ValueError as error:  # vLLM 0.33's own attention, on some processors
        if attention != "vllm" or "not supported by the CPU attention backend on this host" not in str(error):
            raise
        pytest.skip(str(error))
    assert (calls["kv_paged_write"] > 0) == (attention == "paged_attn")
    assert tokens == expected


def test_shared_prefixes_chunked_prefill_and_small_pages(make_model, run, expect):
    """Eight requests with a common start, prompts computed 48 tokens at a time beside those that decode already. In the
    second round every prompt's pages are in the cache."""
    expected = expect("Llama", SHARED)
    options = {"enable_prefix_caching": True, "max_num_batched_tokens": 48, "max_num_seqs": 5, "block_size": 16}
    tokens, _, cached = run(make_model("Llama"), "paged_attn", SHARED, rounds=2, **options)
    assert all(count >= 128 for count in cached)
    assert tokens == expected


def test_compiled(make_model, run, expect):
    """torch.compile around the layers, as vLLM runs by default."""
    tokens, calls, _ = run(make_model("Llama"), "paged_attn", MIXED, enforce_eager=False)
    assert calls["flash_attn_varlen_func"] > 0
    assert tokens == expect("Llama", MIXED)


@pytest.mark.parametrize("with_prefix", [None, 3])
def test_merge_as_vllm_calls_it(with_prefix):
    torch.manual_seed(0)
    prefix, suffix = torch.randn(2, 6, 4, 32).unbind()
    prefix_lse, suffix_lse = (torch.randn(2, 4, 6) * 3).unbind()
    prefix_lse[:, 1], suffix_lse[:, 2] = torch.inf, -torch.inf
    results = []
    for merge in (own_merge_attn_states, merge_attn_states):
        output, lse = torch.full_like(prefix, torch.nan), torch.full_like(prefix_lse, torch.nan)
        merge(output, prefix, prefix_lse, suffix, suffix_lse, lse, with_prefix)
        results.append((output, lse))
    torch.testing.assert_close(*results)


def test_a_refused_merge_has_written_nothing():
    prefix, suffix = torch.zeros(2, 6, 4, 32).unbind()
    lse = torch.zeros(4, 6)
    output, output_lse = torch.full_like(prefix, torch.nan), torch.full_like(lse, torch.nan)
    with pytest.raises(ValueError, match="out_b: expected "):
        merge_attn_states(output, prefix, lse, suffix[:, :3], lse, output_lse, 3)
    assert output.isnan().all() and output_lse.isnan().all()


def test_server_with_streaming_clients(make_model, expect, tmp_path):
    """The server in processes of its own, where only the entry point brings the plugin."""
    expected = expect("Llama", MIXED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "server.log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", make_model("Llama")]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "512",
    ]
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)
        wait_for(client, server, log)
        with ThreadPoolExecutor(len(MIXED)) as pool:
            answers = list(pool.map(lambda request: stream(client, request["prompt_token_ids"]), MIXED))
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(60)
    assert paged_attn_vllm.BACKEND in log.read_text()
    assert [words for words, _ in answers] == [[f"w{token}" for token in tokens] for tokens in expected]
    assert all(pieces > 1 for _, pieces in answers)


def wait_for(client, server, log, seconds=300):
    for _ in range(seconds):
        assert server.poll() is None, log.read_text()[-4000:]
        try:
            client.models.list()
            return
        except openai.APIConnectionError:
            time.sleep(1)
    raise AssertionError(f"no answer in {seconds} s: {log.read_text()[-4000:]}")


# Every token is a word of the answer, the end token too.
AS_IN_EXPECTED = {"ignore_eos": True, "skip_special_tokens": False}


def stream(client, prompt):
    """The words of an answer and in how many pieces they came."""
    model = client.models.list().data[0].id
    answer = client.completions.create(
        model=model, prompt=prompt, max_tokens=24, temperature=0.0, stream=True, extra_body=AS_IN_EXPECTED
    )
    pieces = [part.choices[0].text for part in answer if part.choices]
    return "".join(pieces).split(), len(pieces)
