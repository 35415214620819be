"""The examples and the commands of README and docs: each is run with small sizes, or named with what runs it."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import documents
import pytest
import torch
from conftest import REPOSITORY

COMMAND = re.compile(
    r"(?:[A-Z_]+=(?:<[^>]*>|\S+) )*"  # its environment
    r"(?:make|python|pip|cmake|nix|kernel-builder|vllm serve|apt|apt-get|[\w/.]+\.py|\S+/(?:python|torchrun))(?: \S.*)?"
)

EXAMPLES = {
    "generate.py": "examples/generate.py --dtypes float32 --requests 3 --max-prompt 60 --new-tokens 4",
    "engine.py": "examples/engine.py --requests 3 --prompt 1 60 --new-tokens 4",
    "several_ranks.py": "-m torch.distributed.run --nproc-per-node 2 examples/several_ranks.py --keys 512 --rounds 1",
}
SHADER_CHECK = (
    "tools/metal_emulator/msl.py paged_decode_metal/paged_decode.metal --check -I torch-ext -I paged_decode_metal"
)
# As the pages print it -> the same program here.
RUN = {
    "make run": EXAMPLES["generate.py"],
    "python tests/fuzz.py --calls 100000 --jobs 16 --device cuda": "tests/fuzz.py --calls 6 --jobs 2",
    "fuzz.py --seed N --calls 1": "tests/fuzz.py --seed 3 --calls 1",
    "python tools/explain.py --batch 8 --kv-len 1024 4096 16384": "tools/explain.py --batch 2 --kv-len 64",
    "python tools/plant_faults.py": "tools/plant_faults.py --list",
    "python benchmarks/generate_caches.py --device cuda --lengths 1024 8192 32768": (
        "benchmarks/generate_caches.py --lengths 64 --new-tokens 2"
    ),
}
COMPARE_TRANSFORMERS = "python benchmarks/compare_transformers.py"
# What runs it instead, or what it needs.
ELSEWHERE = {
    "make": "builds; every test needs it",
    "make PYTHON=python3.12": "another interpreter",
    "make build": "every test needs it",
    "make build BACKEND=cpu": "every test needs it",
    ".venv/bin/python": "what runs this",
    "make compile-cuda": ".ci/run",
    "make format lint": ".ci/run lints",
    "make run BACKEND=cpu": "make run",
    "make clean": "would remove the build that is tested",
    "MODEL=<hub id> make run": "weights of the Hub",
    "make test": "runs this",
    'make test PYTEST="-k name"': "runs this",
    'make test PYTEST="-k window"': "runs this",
    "make test-metal": "part of make test",
    "make test-sanitize": "another build",
    "make test-races": "another build",
    "make test-engines": "6 GB of engines",
    "make test-sglang": "an engine",
    "make test-vllm": "an engine",
    'make test-vllm PYTEST="-k server"': "an engine",
    "pip install ./engines/vllm": "make test-vllm",
    "pip install transformers": "pip",
    "vllm serve --attention-backend CUSTOM": "make test-vllm",
    "vllm serve <model>": "an engine and a model",
    "vllm serve <model> --attention-backend CUSTOM": "an engine, a GPU and a model",
    "python -m sglang.launch_server --model-path <model> --attention-backend fa3": "SGLang's server, never run",
    "python benchmarks/compare_vllm.py serve --requests 12 --context 1024 --new-tokens 64 --rounds 5": "an engine",
    "python docs/pictures/draw.py": "test_pictures.py draws each",
    "python docs/pictures/data.py NAME < TABLE": "test_pictures.py",
    "python -m pytest tests/test_decode.py": "tools/metal_emulator/run.py",
    "python tests/arm/count.py": "test_arm.py builds and runs what it counts",
    "python tools/local_build.py --backend cuda": "make compile-cuda",
    "python tools/metal_emulator/metal_build.py": "tools/metal_emulator/run.py",
    "metal_build.py --variant NAME": "test_metal_variants.py",
    "msl.py --check": "the emulator's own tests",
    "python tools/sanitize_cuda.py": "a GPU and compute-sanitizer",
    "PAGED_ATTN_TEST_DEVICE=cuda python -m pytest tests": "a GPU",
    "VLLM_CPU_SO=.../vllm/_C.abi3.so python benchmarks/compare_mla.py --rounds 7": "vLLM",
    "VLLM_CPU_SO=<_C_AVX512.abi3.so> python benchmarks/compare_cpu.py --rounds 5 --batch 0.08": "vLLM",
    "PEERS_DIR=<folder of fa3.so> python benchmarks/compare_cuda.py --rounds 7": "a GPU",
    "PEERS_DIR=<folder of fa3.so> python benchmarks/compare_cuda_mla.py --rounds 9": "a GPU",
    "PEERS_DIR=<folder of fa3.so> python benchmarks/compare_models.py --rounds 5": "a GPU",
    "python benchmarks/compare_float32.py --rounds 3": "a GPU",
    "PEERS_DIR=<folder of fa3.so> python benchmarks/compare_prefill.py --rounds 7": "a GPU",
    COMPARE_TRANSFORMERS: "a GPU",
    f"{COMPARE_TRANSFORMERS} --contexts 4096 --samples 10 100 --new-tokens 20 --graphs yes": "a GPU",
    f"{COMPARE_TRANSFORMERS} --contexts 4096 --samples 500 --new-tokens 20 --graphs yes --cache-gb 90": "a GPU",
    f"{COMPARE_TRANSFORMERS} --contexts 8192 16384 --ways sdpa --sdpa 16384 --no-prompt-attention": "a GPU",
    "python benchmarks/engine_steps.py --rounds 1 --step-tokens 8192 16384": "a GPU",
    "python benchmarks/find_slow_calls.py": "minutes",
    "METAL_VARIANT=count OMP_NUM_THREADS=1 python benchmarks/count_metal.py": "minutes",
    "LOCAL_KERNELS=org/paged-attn=<variant> PAGED_ATTN_TEST_DEVICE=cuda python -m pytest tests": "a GPU",
    f"python {SHADER_CHECK}": "the emulator's own tests",
}
PROGRAMS_OF_OTHERS = ("apt", "cmake", "kernel-builder", "nix", "python setup.py build_kernel")


def printed():
    lines = {line for page in documents.pages() for line in page.shell}
    return {line for line in lines if COMMAND.fullmatch(line) and not line.startswith(PROGRAMS_OF_OTHERS)}


def test_every_command_is_run_or_says_what_runs_it():
    scripts_alone = {line for line in printed() if re.fullmatch(r"[\w/.]+\.py", line)}  # a file that prose names
    # These need the peers.
    prints_options = {line for line in printed() if line.startswith("python benchmarks/compare_cpu.py")}
    assert printed() - scripts_alone - prints_options == {*RUN, *ELSEWHERE}


def test_scripts_are_given_to_python():
    """Most are not executable. Prose may name one by its file alone."""
    called = {line for line in printed() if re.match(r"(?:[A-Z_]+=(?:<[^>]*>|\S+) )*[\w.]+/[\w/.]*\.py \S", line)}
    assert called == set()


def test_every_example_is_run():
    assert {path.name for path in (REPOSITORY / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.parametrize("words", sorted({*EXAMPLES.values(), *RUN.values()}))
def test_runs(words, device):
    run = start(words, device)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]


@pytest.mark.parametrize("ranks, words", [(2, ""), (3, "expected a number that divides 8 kv_heads, got 3")])
def test_several_ranks_without_keys_or_heads(device, ranks, words):
    """A page for one of two ranks; and as many ranks as the heads cannot be shared out to."""
    program = EXAMPLES["several_ranks.py"].replace("node 2", f"node {ranks}").replace("--keys 512", "--keys 10")
    run = start(program, device)
    assert (run.returncode != 0) == bool(words) and words in run.stderr, run.stdout[-2000:] + run.stderr[-2000:]


def test_compare_cpu_takes_a_case_that_no_provider_is_for(device):
    words = "benchmarks/compare_cpu.py --cases 64.resident --providers torch.write --rounds 1"
    run = start(words, device)
    assert run.returncode == 0 and "| B1 32/8 D128 64 resident | bf16 | –" in run.stdout, run.stderr[-2000:]


SMALL = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 20,
}  # fmt: skip


def generate_with(config, folder, device):
    """examples/generate.py with a random model of this kind, saved as one of the Hub."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    torch.manual_seed(0)
    config = getattr(transformers, config)(**SMALL, initializer_range=0.1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({chr(i): i for i in range(128)}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return start(f"{EXAMPLES['generate.py']} --model {folder}", device)


def test_generate_takes_a_model_with_windows(device, tmp_path):
    run = generate_with("MistralConfig", tmp_path, device)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert "no block tables: transformers has none" in run.stdout and "org/paged-attn varlen" in run.stdout


def test_generate_refuses_a_model_without_sdpa(device, tmp_path):
    run = generate_with("Gemma2Config", tmp_path, device)
    assert run.returncode == 1
    assert "cannot run this model with sdpa in torch.float32 (ValueError Gemma2" in run.stderr.splitlines()[-1]


def test_the_engine_refuses_a_request_larger_than_its_pool(device):
    run = start("examples/engine.py --pages 3 --requests 2 --prompt 8 8 --new-tokens 4 --no-check", device)
    assert "num_pages: expected at least 4 for request 0 of 48 + 4 tokens, got 3" in run.stderr, run.stderr[-2000:]


def test_steps_are_those_of_the_fastest_round(monkeypatch):
    """Of benchmarks/engine_steps.py: times of steps belong to the tokens per second beside them."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    import engine_steps

    seconds = iter([0.5, 0.25, 0.75])

    def run(engine, requests):
        engine.trace[:] = [{"seconds": next(seconds)}]
        return engine.trace[0]["seconds"]

    monkeypatch.setattr(engine_steps, "run", run)
    assert engine_steps.fastest(SimpleNamespace(trace=[]), list, 3) == (0.25, [{"seconds": 0.25}])


@pytest.mark.parametrize("kind, options", [("Qwen2", {}), ("Llama", {"attention_bias": True})], ids=str)
def test_the_engine_refuses_a_model_whose_weights_it_does_not_read(kind, options, device, tmp_path):
    """Nothing else would say so where tokens are not compared, as in 16 bits."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(**SMALL, **options)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    run = start(f"examples/engine.py --model {tmp_path} --dtype bfloat16", device)
    assert run.returncode == 1
    refusal = f"model: expected a LlamaForCausalLM with silu and without biases, got {kind}ForCausalLM"
    assert refusal in run.stderr.splitlines()[-1], run.stderr[-2000:]


def start(words, device):
    if device == "mps":
        pytest.skip("on a Mac by hand: the emulated GPU is in the process of its tests alone")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words.split()]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
