"""README and docs/ beside the sources: messages, functions, arguments, variables, links, files, commands, snippets."""

import inspect
import os
import re
import shlex
import subprocess
import sys
import textwrap

import documents
import messages
import pytest
import torch
from conftest import REPOSITORY
from documents import Page

PAGES = documents.pages()
FILES = documents.tracked_files()
ERRORS, USAGE, ENGINES = Page("docs/errors.md"), Page("docs/usage.md"), Page("docs/engines.md")

# ---- Error messages


def test_messages_of_a_sample():
    """The extraction itself: every way in which the sources make a message."""
    python = textwrap.dedent("""
        def f(a):
            rows = f"{a} rows"
            if a:
                raise ValueError(f"a: expected {rows} of " f"{a!r}, got None")
            raise reworded(RuntimeError("not ours"))
    """)
    assert list(messages._python_messages(python)) == ["a: expected <> rows of <>, got None"]
    cxx = textwrap.dedent("""
        namespace { void f(int x) {
          // fail("a comment");
          const std::string more = x ? " and more" : "";
          if (x) fail("x: expected \\"one\\" of " + str(x) + (x > 1 ? "a" : std::string("b")) + more);
          bad_value("y", 0, x, "at least " + str(x));
          check(t, "z", {type}, {&batch, &heads}, like);
        }
        }
        std::string unsupported_reason(const Problem& p) {
          if (x) return "device: expected " + str(x);
          return "";
        }
    """)
    assert set(filter(None, messages._cxx_messages(cxx))) == {
        *(f'x: expected "one" of <>{end}{more}' for end in "ab" for more in ("", " and more")),
        "y[<>]: expected at least <>, got <>",
        "z: expected <> [<>], got <> [<>]",
        "device: expected <>",
    }


def test_every_message_is_explained():
    """docs/errors.md has the messages of the sources, each once, and no other."""
    ours = ERRORS.text[: ERRORS.text.index("## Messages of others")]
    found = [re.sub(r"<[^<>]*>", messages.HOLE, span) for span in re.findall(r"^\| `([^`]+)` \|", ours, re.M)]
    sources = messages.messages()
    missing = {text: path for text, path in sources.items() if text not in found}
    assert not missing, f"messages that docs/errors.md lacks: {missing}"
    unknown = [text for text in found if text not in sources]
    assert not unknown, f"messages of docs/errors.md that no source has: {unknown}"
    assert len(found) == len(set(found)), "a message stands twice in docs/errors.md"
    assert not re.findall(r"^\|.*\| +\|.*", ours, re.M), "a cause, or what to do, is empty"


def test_every_reason_is_explained():
    """What explain() gives as a reason stands in docs/slow.md."""
    section = Page("docs/slow.md").text
    spans = documents.SPAN.findall(section[section.index("## Every reason") :])
    written = {re.sub(r"<[^<>]*>", messages.HOLE, span) for span in spans}
    sources = messages.reasons()
    assert len(sources) > 30
    missing = {text: path for text, path in sources.items() if text not in written}
    assert not missing, f"reasons that docs/slow.md lacks: {missing}"


# ---- Functions, arguments, variables

# Modules, and the page that has their functions.
MODULES = {"fa3": ENGINES, "integrations": ENGINES}


def argument_names(function):
    names = [name for name, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_POSITIONAL]
    return [name for name in names if name not in ("others", "keywords")]


def words_of(text):
    """Names in code spans: `q`, but also every name in `cache(a, b=1)`."""
    return {word for span in documents.SPAN.findall(text) for word in re.findall(r"\w+", span)}


def test_every_function_is_documented(paged_attn):
    """By a heading in docs/usage.md with each argument below, or below flash_attn_with_kvcache if it means the same."""
    shared = words_of(USAGE.section("flash_attn_with_kvcache"))
    for name in (name for name in paged_attn.__all__ if name not in MODULES):
        function = getattr(paged_attn, name)
        words = words_of(USAGE.section(name))
        if name.startswith("flash_attn"):
            words |= shared
        missing = [argument for argument in argument_names(function) if argument not in words]
        assert not missing, f"docs/usage.md, {name}: nothing about {missing}"


def test_no_argument_is_made_up(paged_attn):
    """The table of arguments in docs/usage.md has only those that exist."""
    table = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", USAGE.section("flash_attn_with_kvcache"), re.M)
    names = [name for row in table for name in re.findall(r"\w+", row)]
    assert len(names) > 30
    assert set(names) == set(argument_names(paged_attn.flash_attn_with_kvcache))


@pytest.mark.parametrize("module", MODULES)
def test_every_function_of_a_module_is_documented(paged_attn, module):
    pytest.importorskip("transformers", reason="PagedCache needs transformers")
    words = {word for page in PAGES for word in words_of(page.text)}
    functions = getattr(paged_attn, module)
    for name in functions.__all__:
        assert name in words, f"{module}.{name} is on no page"
    if module == "integrations":
        missing = [name for name in argument_names(functions.PagedCache) if name not in words]
        assert not missing, f"PagedCache: nothing about {missing}"


VARIABLE = re.compile(r"\b(?:PAGED_ATTN_[A-Z_]*[A-Z]|METAL_(?:CXX|VARIANT))\b")
# Set by one test for the programs that it starts.
INSIDE_TESTS = {"PAGED_ATTN_ROOT"}


def test_every_environment_variable_is_documented():
    sources = [name for name in FILES if not name.endswith((".md", ".svg")) and name != "tests/test_documents.py"]
    read = {name for path in sources for name in VARIABLE.findall((REPOSITORY / path).read_text(errors="ignore"))}
    written = {name for page in PAGES for name in VARIABLE.findall(page.text)}
    assert read - INSIDE_TESTS - written == set(), "on no page"
    assert written - read == set(), "read by nothing"
    users = {"PAGED_ATTN_CHECK", "PAGED_ATTN_CPU_ISA"}
    assert users <= set(VARIABLE.findall(USAGE.text)) and users <= set(VARIABLE.findall(Page("README.md").text))


def test_readme_has_the_engines_of_their_page():
    rows = re.findall(r"^\| [^-].* \|$", ENGINES.text[: ENGINES.text.index("make test-engines")], re.M)
    assert len(rows) > 8 and set(rows[1:]) <= set(Page("README.md").text.splitlines())


# ---- Links, files, names

FILE = re.compile(
    r"(?<![\w/.<*{-])(?:[\w.-]+/)*[\w.-]*\w\.(?:py|cpp|h|cuh|cu|mm|metal|md|toml|svg|png|yml|txt|nix|lock)(?![\w.])"
)
# No file of the repository.
ELSEWHERE = {
    "torch.mm": "a function",
    "CMakeLists.txt": "kernel-builder create-pyproject",
    "setup.py": "kernel-builder create-pyproject",
    "torch-ext/registration.h": "kernel-builder create-pyproject",
    "roofline.svg": "tools/explain.py --plot",
    "file.metal": "the reader, in tools/metal_emulator/README.md",
    "kernels.lock": "of SGLang's cache",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in page.links:
        path, _, anchor = link.partition("#")
        if path.startswith("http"):
            continue
        target = (page.path.parent / path).resolve() if path else page.path
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in Page(str(target.relative_to(REPOSITORY))).anchors, f"{page.name}: {link}"


def exists(name, page):
    if (page.path.parent / name).exists() or name in ELSEWHERE:
        return True
    return any(path == name or path.endswith("/" + name) for path in FILES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_exist(page):
    """Every file that a page names is in the repository: from its root, beside the page, or by its name alone."""
    text = re.sub(r"https?://\S+", "", page.text)
    missing = sorted({name for name in FILE.findall(text) if not exists(name, page)})
    assert not missing, f"{page.name} names {missing}"


CONSTANT = re.compile(r"\bk[A-Z][A-Za-z0-9]+\b")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_constants_exist(page):
    code = [name for name in FILES if name.endswith((".h", ".cpp", ".cu", ".cuh", ".mm", ".metal"))]
    known = {name for path in code for name in CONSTANT.findall((REPOSITORY / path).read_text())}
    assert set(CONSTANT.findall(page.text)) <= known


def test_the_index_has_every_page():
    for folder in ("docs/", "docs/lab/"):
        listed = {link.partition("#")[0] for link in Page(folder + "README.md").links}
        inside = {page.name.removeprefix(folder) for page in PAGES if page.name.startswith(folder)}
        assert {name for name in inside if "/" not in name} - {"README.md"} <= listed, folder


WIDTH = 120


def test_lines_of_prose_fit():
    """Outside of tables and code blocks. A line of one word, such as a link that does not fit, may be longer."""
    for name in (name for name in FILES if name.endswith(".md")):
        prose = documents.INDENTED.sub("", Page(name).prose)
        lines = [line for line in prose.splitlines() if not line.lstrip().startswith(("|", "![", "<!--"))]
        long = [line for line in lines if len(line) > WIDTH and " " in line.strip()]
        assert not long, f"{name}: more than {WIDTH} columns: {long}"


# ---- Commands

# Programs of others.
OTHERS = {"setup.py": "kernel-builder create-pyproject writes it"}
SCRIPT = re.compile(r"(?:^|\s)((?:[\w.]+/)*\w+\.py)\b(.*)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page):
    """Targets and variables of make; scripts and their options."""
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = set(re.search(r"^\.PHONY: (.+)$", makefile, re.M)[1].split())
    variables = set(re.findall(r"\b[A-Z_]{3,}\b", makefile)) | {"MODEL"}  # examples/generate.py reads it
    for line in page.shell:
        if make := re.match(r"""(?:[A-Z_]+=\S+ )*make((?: [A-Z_]+=(?:"[^"]*"|\S+)| [\w-]+)+)$""", line):
            for word in shlex.split(make[1]):
                name, is_variable, _ = word.partition("=")
                assert name in (variables if is_variable else targets), f"{page.name}: {line}"
        script = SCRIPT.search(line)
        if script and script[1] not in OTHERS and "--" in script[2]:
            source = next(REPOSITORY / path for path in FILES if path.endswith(script[1])).read_text()
            for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", script[2].split(" python ")[0]):
                assert f'"{option}"' in source or option == "--help", f"{page.name}: {line}"


@pytest.mark.parametrize("target", ["build", "run", "test", "lint", "format", "bench", "clean"])
def test_make_knows_what_to_do(target):
    """The commands of a target, without running them."""
    variables = [f"PYTHON={sys.executable}", "BACKEND=cpu"]
    run = subprocess.run(["make", "--dry-run", target, *variables], cwd=REPOSITORY, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


MACHINES = {"Linux aarch64": "aarch64-linux", "Darwin arm64": "aarch64-darwin", "Darwin x86_64": "x86_64-darwin"}


@pytest.mark.parametrize("machine", MACHINES)
def test_make_names_the_variant_that_it_builds(machine, tmp_path):
    """As local_build.py names it, on Linux and on a Mac."""
    system, processor = machine.split()
    uname = tmp_path / "uname"
    uname.write_text(f"#!/bin/sh\ncase $1 in -s) echo {system};; -m) echo {processor};; esac\n")
    uname.chmod(0o755)
    (tmp_path / "more.mk").write_text("named: ; @echo $(LOCAL_KERNELS)\n")
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_KERNELS"}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    command = ["make", "--silent", "-f", "Makefile", "-f", tmp_path / "more.mk", "named", "BACKEND=cpu"]
    run = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    variant = f"torch-stable-abi211-cpu-{MACHINES[machine]}"
    assert run.stdout.strip() == f"org/paged-attn={REPOSITORY}/build/{variant}", run.stderr


# ---- Python snippets

TENSORS = """
    import torch
    q = torch.randn(2, 1, 8, 64)
    k_cache, v_cache = paged_attn.empty_paged_cache(8, 16, 2, 64, dtype=torch.float32)
    k_cache.normal_(), v_cache.normal_()
    table, lengths = torch.randperm(8).int().view(2, 4), torch.tensor([50, 7], dtype=torch.int32)
"""
MODEL = """
    import kernels, torch, transformers
    from transformers import AutoModelForCausalLM, GenerationConfig
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
                 num_key_value_heads=2)
    config = transformers.LlamaConfig(**sizes)
    model = transformers.LlamaForCausalLM(config)
    name = str(folder)
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, max_new_tokens=2)
    model.save_pretrained(name)
    prompt = torch.randint(1, 64, (1, 20))
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    kernel = paged_attn
"""
BATCHING = """
    from transformers import ContinuousBatchingConfig
    prompts = [[1, 2, 3], [4, 5]]
    # transformers 5.17 has another name for it.
    size = {"page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size": 16}
    settings = ContinuousBatchingConfig(num_blocks=8, use_async_batching=False, **size)
    config = model.generation_config
"""
# What a page takes for granted before its snippets. The snippets of a page share their names, as its reader does.
BEFORE = {
    "docs/slow.md": TENSORS,
    "docs/usage.md": TENSORS,
    "docs/transformers.md": MODEL + BATCHING,
}
# What a reader fills in.
FILLED_IN = {
    "generation_config=..., progress_bar=True": "generation_config=config, continuous_batching_config=settings",
    "generate_batch(...)": "generate_batch(prompts, generation_config=config, continuous_batching_config=settings)",
    "max_new_tokens=100": "max_new_tokens=2",
}
# Snippets that cannot run here: a piece of each, and the reason.
NOT_RUN = {
    "aoti_load_package": "needs a model that was compiled; test_compile.py runs this",
    "cp.attention": "needs several ranks; test_context_parallel.py has them",
    "_load_fa3_kernels": "needs SGLang; test_sglang.py asks the same",
    "torch.cuda.CUDAGraph": "needs a GPU; test_cuda.py replays graphs with other lengths",
}
SNIPPETS = [page for page in PAGES if page.fenced("python")]


@pytest.mark.parametrize("page", SNIPPETS, ids=lambda page: page.name)
def test_snippets_run(paged_attn, page, device, tmp_path):
    if device == "mps":
        pytest.skip("the snippets make tensors of the CPU, or of CUDA")
    if "transformers" in BEFORE.get(page.name, ""):
        pytest.importorskip("transformers")
    names = {"paged_attn": paged_attn, "folder": tmp_path}
    with torch.device(device):
        exec(textwrap.dedent(BEFORE.get(page.name, "")), names)
        for snippet in page.fenced("python"):
            for placeholder, filled in FILLED_IN.items():
                snippet = snippet.replace(placeholder, filled)
            if not any(piece in snippet for piece in NOT_RUN):
                exec(snippet.replace('backend="cpu"', f'backend="{device}"'), names)
    if page.name == "README.md":
        assert names["out"].shape == (2, 1, 32, 128) and names["out"].isfinite().all()


def test_no_snippet_is_left_out_without_reason():
    snippets = "".join(snippet for page in PAGES for snippet in page.fenced("python"))
    assert all(piece in snippets for piece in NOT_RUN)
