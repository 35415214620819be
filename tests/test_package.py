"""The package as `kernels` sees it: build.toml, loading by name, what it exports and what it imports."""

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import conftest
import jinja2
import pytest
import torch
from conftest import KERNEL, REPOSITORY
from kernels.compat import tomllib

CONTRACT = {
    "flash_attn_with_kvcache": """q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx
        cache_leftpad block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits
        return_softmax_lse * page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q max_seqlen_k rotary_seqlens qv q_v
        q_descale k_descale v_descale attention_chunk s_aux sinks scheduler_metadata pack_gqa sm_margin deterministic
        out ver""",
    "kv_paged_write": """k v k_cache v_cache block_table cache_seqlens * cu_seqlens_k_new slot_mapping k_descale
        v_descale""",
    "flash_attn_func": """q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic
        return_attn_probs *""",
    "flash_attn_varlen_func": """q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale
        causal window_size softcap alibi_slopes deterministic return_attn_probs block_table *""",
    "merge_attn_states": "out_a lse_a out_b lse_b",
    "get_scheduler_metadata": "",
    "empty_paged_cache": "num_pages page_size kv_heads head_dim head_dim_v * dtype device interleave",
    "cpu_isa": "",
}
MODULES = {"integrations"}
DEFAULTS = {
    "causal": False, "window_size": (-1, -1), "softcap": 0.0, "rotary_interleaved": True, "num_splits": 0,
    "return_softmax_lse": False, "attention_chunk": 0, "sm_margin": 0, "deterministic": False, "dropout_p": 0.0,
    "return_attn_probs": False,
}  # fmt: skip


@pytest.mark.kernels_ci
def test_everything_promised_is_exported(paged_attn):
    assert set(CONTRACT) | MODULES <= set(paged_attn.__all__)
    for name in paged_attn.__all__:
        assert inspect.getdoc(getattr(paged_attn, name)), f"{name} has no docstring"
    public = {n for n, x in vars(paged_attn).items() if inspect.isfunction(x) and not n.startswith("_")}
    assert public == {n for n in paged_attn.__all__ if not inspect.ismodule(getattr(paged_attn, n))}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", CONTRACT)
def test_signature(paged_attn, name):
    """The contract's parameters in its order, its keyword-only ones after the star.

    `others` are keywords of other kernels, refused by name unless they ask for nothing (test_errors.py).
    """
    parameters = inspect.signature(getattr(paged_attn, name)).parameters
    ordered, _, keyword_only = CONTRACT[name].partition("*")
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional[: len(ordered.split())] == ordered.split()
    if "*" in CONTRACT[name]:
        assert positional == ordered.split()
    for n in keyword_only.split():
        assert parameters[n].kind is inspect.Parameter.KEYWORD_ONLY, n
    assert {n for n, p in parameters.items() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)} <= {"others"}
    for n, p in parameters.items():
        if n in DEFAULTS:
            assert p.default == DEFAULTS[n], n


def test_build_toml():
    """The parser that `kernels` ships accepts it."""
    from kernels._rust import Build

    Build.open(REPOSITORY)
    described = tomllib.loads((REPOSITORY / "build.toml").read_text())
    assert described["general"]["name"] == "paged-attn"
    assert described["general"]["version"] == 1
    assert described["general"]["edition"] == 5
    assert described["general"]["hub"]["repo-id"] == KERNEL


def test_build_toml_names_every_source():
    described = tomllib.loads((REPOSITORY / "build.toml").read_text())
    named = set(described["torch"]["src"]).union(*(section["src"] for section in described["kernel"].values()))
    folders = [REPOSITORY / "torch-ext", *REPOSITORY.glob("paged_decode_*")]
    suffixes = {".cpp", ".h", ".cu", ".cuh", ".mm", ".metal"}
    present = {f.relative_to(REPOSITORY).as_posix() for d in folders for f in d.rglob("*") if f.suffix in suffixes}
    assert named == present - {"torch-ext/registration.h"}  # kernel-builder's, where create-pyproject has run


def test_build_toml_names_what_shaders_include():
    """In the section of Metal: CMake compiles a shader again only for these."""
    section = tomllib.loads((REPOSITORY / "build.toml").read_text())["kernel"]["paged_decode_metal"]
    pending = [source for source in section["src"] if source.endswith(".metal")]
    seen = set(pending)
    while pending:
        source = REPOSITORY / pending.pop()
        folders = [source.parent, *(REPOSITORY / folder for folder in section["include"])]
        for name in re.findall(r'^#include "(.+)"', source.read_text(), re.MULTILINE):
            found = next(folder / name for folder in folders if (folder / name).exists())
            path = found.relative_to(REPOSITORY).as_posix()
            pending += [path] if path not in seen else []
            seen.add(path)
    assert seen <= set(section["src"])


def test_device_is_detected(tmp_path, monkeypatch):
    """From the builds and from torch, in every layout that `kernels` takes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for folder, backend in (("a", "cpu"), ("b/variant", "cuda"), ("c/build/variant", "cpu")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "metadata.json").write_text(json.dumps({"backend": {"type": backend}}))
        monkeypatch.setenv("LOCAL_KERNELS", f"other/kernel={tmp_path}:{KERNEL}={tmp_path / folder[0]}")
        assert conftest.detect_device() == backend
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("LOCAL_KERNELS", f"{KERNEL}={tmp_path / 'b'}")
    with pytest.raises(pytest.UsageError, match=r"expected a build for this machine, found \['cuda'\]"):
        conftest.detect_device()


def test_short_run_needs_only_torch_kernels_and_pytest(device, tmp_path, emulated):
    """kernel-builder's ci-test has no other package, and of the repository only Python's files of tests/ and torch-ext/
    beside the kernels. It collects every file.
    """
    if emulated:
        pytest.skip("the emulated GPU is built with ninja")
    code = """
import sys
sys.modules |= dict.fromkeys(["accelerate", "matplotlib", "ninja", "tomlkit", "transformers"])  # cannot be imported
import pytest
sys.exit(pytest.main(["--collect-only", "--quiet", "-p", "no:cacheprovider", "-m", "kernels_ci", sys.argv[1]]))
"""
    for path in (path for folder in ("tests", "torch-ext") for path in (REPOSITORY / folder).rglob("*.py")):
        copy = tmp_path / path.relative_to(REPOSITORY)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    command = [sys.executable, "-c", code, tmp_path / "tests"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    assert "test_package.py::test_everything_promised_is_exported" in run.stdout


def test_example(device):
    if device != ("cuda" if torch.cuda.is_available() else "cpu"):
        pytest.skip("it takes the device that a user's process has")
    run = subprocess.run([sys.executable, REPOSITORY / "example.py"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"{device}: out (2, 1, 32, 128), equal to")


def test_found_by_name_from_the_environment(device, emulated):
    """LOCAL_KERNELS and get_kernel in a fresh process, without a network; nothing beyond torch comes along, and of
    torch not its compiler, which takes a second or more."""
    if emulated:
        pytest.skip("a fresh process has no fake mps device")
    backend = {"mps": "metal"}.get(device, device)
    code = f"""
import sys, kernels
before = set(sys.modules)
paged_attn = kernels.get_kernel({KERNEL!r}, version=1, backend={backend!r}, trust_remote_code=True)
import torch
out = paged_attn.flash_attn_func(*(torch.ones(1, 2, 1, 8, device={device!r}) for _ in range(3)))
assert (out == 1).all()
print(*sorted(set(sys.modules) - before))
"""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    beyond = {"transformers", "numpy.distutils", "triton", "sympy", "torch._dynamo"}
    assert not beyond & set(run.stdout.split())


def test_imports_only_torch_and_the_standard_library(paged_attn):
    """At import; a function may import the library that it serves."""
    for path in Path(paged_attn.__file__).parent.glob("**/*.py"):
        for node in ast.parse(path.read_text()).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in names:
                root = name.partition(".")[0]
                assert root == "torch" or root in sys.stdlib_module_names, f"{path.name} imports {name}"


def test_operators_are_registered_under_the_name_of_this_build(paged_attn):
    """Two builds in one process must not meet."""
    namespace = paged_attn._ops.ops.name
    assert namespace.startswith("_paged_attn_")
    assert paged_attn._ops.add_op_namespace_prefix("x") == f"{namespace}::x"


def test_builds_of_other_python_have_other_names(tmp_path, monkeypatch):
    """`kernels` keeps modules under the name of the build: under one name, the second would run the first one's."""
    monkeypatch.syspath_prepend(REPOSITORY / "tools")
    local_build = pytest.importorskip("local_build")
    shutil.copy(REPOSITORY / "build.toml", tmp_path)
    shutil.copytree(REPOSITORY / "torch-ext", tmp_path / "torch-ext")
    monkeypatch.setattr(local_build, "ROOT", tmp_path)
    before = local_build.source_digest([], "")
    assert local_build.source_digest([], "") == before
    with (tmp_path / "torch-ext" / "paged_attn" / "integrations" / "peers.py").open("a") as module:
        module.write("\n")
    assert local_build.source_digest([], "") != before


def test_extension_exports_only_its_entry(paged_attn):
    """Two builds in one process share what both export: the second one would run functions of the first."""
    extension = Path(paged_attn.__file__).parent / f"{paged_attn._ops.ops.name}.abi3.so"
    options = ["--extern-only"] if sys.platform == "darwin" else ["--dynamic", "--format=bsd"]
    listing = subprocess.run(["nm", "--defined-only", *options, extension], check=True, capture_output=True, text=True)
    symbols = [line.split()[-2:] for line in listing.stdout.splitlines()]
    ours = [name.lstrip("_") for _, name in symbols if "paged_attn" in name]
    assert ours == [f"PyInit_{paged_attn._ops.ops.name}"]
    assert not [name for kind, name in symbols if kind == "u"], "unique in the whole process, whatever the visibility"


def test_extension_is_of_the_stable_abi(paged_attn):
    """Of Python 3.9 and later. That glibc 2.28 has all its symbols only a build of kernel-builder can promise, with its
    own compiler.
    """
    from kernel_abi_check import ObjectFile

    extension = Path(paged_attn.__file__).parent / f"{paged_attn._ops.ops.name}.abi3.so"
    assert ObjectFile(str(extension)).check_python_abi("3.9") == []
    other = Path(torch.__file__).parent / "lib" / f"libtorch_python.{'dylib' if sys.platform == 'darwin' else 'so'}"
    assert ObjectFile(str(other)).check_python_abi("3.9") != [], "the check sees what is no part of it"


@pytest.mark.parametrize("variant", sorted((REPOSITORY / "build").glob("torch*")), ids=lambda path: path.name)
def test_built_variant_is_complete(variant):
    """Also of a backend that this machine cannot run."""
    from kernels._rust import Metadata

    parsed = Metadata.read_from_file(variant / "metadata.json")
    assert parsed.python_depends == parsed.kernel_depends == []
    metadata = json.loads((variant / "metadata.json").read_text())
    extension = variant / f"{metadata['id']}.abi3.so"
    platform = variant.name.split("-")[-3].rstrip("0123456789")
    assert metadata["backend"]["type"] == {"cu": "cuda"}.get(platform, platform)
    described = tomllib.loads((REPOSITORY / "build.toml").read_text())
    archs = {arch for section in described["kernel"].values() for arch in section.get("cuda-capabilities", [])}
    assert metadata["backend"].get("archs") == (sorted(archs) if platform == "cu" else None)
    assert [path.name for path in variant.glob("*.so")] == [extension.name]
    assert extension.stat().st_size < 64e6, "people download it"
    assert f"PyInit_{metadata['id']}".encode() in extension.read_bytes()
    modules = {path.stem for path in variant.glob("*.py")} | {metadata["id"]}
    modules |= {path.parent.name for path in variant.glob("*/__init__.py")}
    assert {"__init__", "_ops"} < modules
    for path in variant.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                names = [node.module] if node.module else [alias.name for alias in node.names]
                assert set(names) <= modules, f"{path.name} imports {names}"


def test_card(paged_attn, device):
    """CARD.md, filled in as kernel-builder does it, and its example."""
    described = tomllib.loads((REPOSITORY / "build.toml").read_text())["general"]
    template = jinja2.Environment(trim_blocks=True).from_string((REPOSITORY / "CARD.md").read_text())
    card = template.render(
        repo_id=KERNEL,
        version=described["version"],
        functions=paged_attn.__all__,
        license=described["license"].lower(),
        has_benchmark=(REPOSITORY / "benchmarks" / "benchmark.py").exists(),
        source=described["source"],
    )
    assert "{{" not in card and "{%" not in card
    assert "license: apache-2.0\n" in card and f"`kernels benchmark {KERNEL} --version 1`" in card
    for name in paged_attn.__all__:
        assert f"- `{name}`\n" in card
    if device == "cpu":
        code = re.search("```python\n(.+?)```", card, re.DOTALL)[1]
        names = {}
        exec(code, names)
        assert names["out"].shape == (2, 1, 32, 128)


def test_kernels_benchmark(device, tmp_path):
    """`kernels benchmark <this directory>` finds every script, and each workload equals its reference."""
    # `kernels` looks for the backend that torch was built for, with or without a GPU.
    if device != ("cuda" if torch.version.cuda else "cpu"):
        pytest.skip("it takes the backend that a user's torch has")
    output = tmp_path / "results.json"
    command = [sys.executable, "-c", "from kernels.cli import main; main()", "benchmark", REPOSITORY]
    command += ["--iterations=1", "--warmup=0", f"--output={output}"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for script in (REPOSITORY / "benchmarks").glob("benchmark*.py"):
        assert f"Running {script.name}..." in run.stderr
    results = json.loads(output.read_text())["results"]
    assert len(results) > 10
    assert all(result["verified"] for result in results)
    assert run.stderr.count("x faster") == len(results)


@pytest.mark.parametrize(
    "more, name",
    [
        (["--q-len", "40", "--dtype", "fp16"], "1 x 40 of 64 tokens, 32/8 heads of 128, fp16"),
        (["--cache-dtype", "e5m2", "--head-dim-v", "64"], "1 x 1 of 64 tokens, 32/8 heads of 128/64, bf16, e5m2 cache"),
        (["--mla", "--q-heads", "16"], "1 x 1 of 64 tokens, 16/1 heads of 576/512, bf16"),
    ],
)
def test_explain_takes_every_kind_of_call(device, monkeypatch, capsys, more, name):
    monkeypatch.syspath_prepend(str(REPOSITORY / "tools"))
    import explain

    monkeypatch.setattr(explain, "ROTATED_BYTES", 1 << 20)
    monkeypatch.setattr(explain, "ROUNDS", 1)
    explain.main(["--device", device, "--kv-len", "64", *more])
    printed = capsys.readouterr().out
    assert f"{name}\n  route     " in printed and "% of the limit" in printed


MASKS = [
    {},
    {"causal": False},
    {"window_size": (5, 2), "causal": False},
    {"window_size": (4, 0)},
    {"attention_chunk": 7},
    {"attention_chunk": 5, "window_size": (2, -1)},
]


@pytest.mark.parametrize("mask", MASKS)
def test_explain_counts_what_is_seen(mask, monkeypatch):
    """Bytes and operations of tools/explain.py are those of the keys that the reference lets a query see."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "tools"))
    from explain import Shape
    from reference import visible_keys

    shape = Shape(3, 9, 30, 8, 2, 64, 32, 16, "bf16", "", keywords=mask)
    left, right = mask.get("window_size", (-1, -1))
    right = 0 if mask.get("causal", True) else right
    seen = [visible_keys(q_pos, 30, 0, left, right, mask.get("attention_chunk", 0)) for q_pos in range(21, 30)]
    assert shape.flops == 3 * 8 * 2 * (64 + 32) * sum(map(len, seen))
    keys = len(set().union(*seen))
    assert shape.bytes == 3 * 2 * (keys * 2 * (64 + 32) + 9 * 8 * (64 + 32))


def test_explain_from_the_command_line(device, tmp_path, emulated):
    """tools/explain.py: route, plan, floor and time of each length, and the plot."""
    if emulated:
        pytest.skip("a fresh process has no fake mps device")
    picture = tmp_path / "roofline.svg"
    command = [sys.executable, REPOSITORY / "tools" / "explain.py", "--device", device, "--kv-len", "64", "300"]
    command += ["--keyword", "softcap=30.0", "--plot", picture]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for word in ("route", "plan", "work", "floor", "measured"):
        assert len(re.findall(rf"^  {word} +\S", run.stdout, re.MULTILINE)) == 2, word
    assert "1 x 1 of 300 tokens" in run.stdout and "<svg" in picture.read_text()
    run = subprocess.run([*command, "--q-len", "100"], capture_output=True, text=True)
    assert run.returncode == 2 and "--kv-len: expected at least q_len = 100, got 64" in run.stderr


def test_functions_say_what_they_raise(paged_attn):
    pytest.importorskip("transformers")  # which PagedCache needs
    parallel = paged_attn.integrations.context_parallel
    functions = [getattr(paged_attn, name) for name in paged_attn.__all__]
    functions += [getattr(paged_attn.fa3, name) for name in paged_attn.fa3.__all__]
    functions += [parallel.attention, parallel.start, parallel.finish, parallel.next_owner]
    functions += [paged_attn.integrations.PagedCache]
    for function in functions:
        if not inspect.ismodule(function):
            assert "Raises:" in function.__doc__, function
    for function in (*(getattr(paged_attn.fa3, name) for name in paged_attn.fa3.__all__), parallel.finish):
        assert "Args:" in function.__doc__ and "Returns:" in function.__doc__, function
