"""The two pictures of docs/architecture.md: the house, and the way of one call through each device.

Names of functions, operators, headers, files and routes are read from the sources. A step names the file it stands in
and a function there; `python docs/pictures/draw.py` fails where one of them is gone.
"""

import ast
import re
from pathlib import Path

from svg import Picture

ROOT = Path(__file__).resolve().parent.parent.parent

DEVICES = {"cpu": ("CPU", "a"), "cuda": ("CUDA", "b"), "metal": ("Metal", "c")}  # backend: title, colour


def source(path):
    return (ROOT / path).read_text()


def found(pattern, text, where):
    names = list(dict.fromkeys(re.findall(pattern, text)))
    assert names, f"{where}: expected a match of {pattern}"
    return names


def functions():
    """What the package exports, without its modules."""
    tree = ast.parse(source("torch-ext/paged_attn/__init__.py"))
    exported = next(n.value for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "__all__")
    return [name for name in ast.literal_eval(exported) if name != "integrations"]


def operators():
    path = "torch-ext/torch_binding.cpp"
    return found(r'ops\.impl\("(\w+)"', source(path), path)


def headers_of_spec():
    return sorted(path.name for path in (ROOT / "torch-ext/spec").glob("*.h"))


def routes(backend):
    """The names that explain() can answer with, best first."""
    if backend == "cuda":
        path = "paged_decode_cuda/routes.cu"
        return found(r'make_route<[^>]*>\("(\w+)"\)', source(path), path)
    if backend == "metal":
        path = "paged_decode_metal/routes.mm"
        return found(r'\{"(\w+)", \w+, \w+, \w+\}', source(path), path)
    text = "".join(path.read_text() for path in sorted((ROOT / "paged_decode_cpu").glob("*.[hc]*")))
    names = found(r'"((?:tiles|packed|in_place)_[a-z_]+\d+)"', text, "paged_decode_cpu")
    return sorted(names, key=lambda name: ["tiles", "packed", "in"].index(name.split("_")[0]))


def wrapped(names, room, separator=" · "):
    """Lines of names, at most `room` characters long."""
    lines = [""]
    for name in names:
        longer = lines[-1] + separator + name if lines[-1] else name
        if len(longer) > room and lines[-1]:
            lines.append(name)
        else:
            lines[-1] = longer
    return lines


def panel(p, x, y, width, height, fill, title, lines, role="ink"):
    p.box(x, y, width, height, fill)
    p.text(x + 12, y + 20, title, bold=True)
    for i, line in enumerate(lines):
        p.text(x + 12, y + 39 + 16 * i, line, role=role)


ROOMS = {
    "cpu": [
        ("plan.cpp, paged_decode_cpu.cpp", "items, splits; threads"),
        ("isa.cpp, kernel_*.cpp", "one per instruction set"),
        ("attend.h", "the loop over tiles of keys"),
        ("tile.h, ops_*.h, vec.h", "products, numbers, registers"),
        ("kv_write.cpp, write.h", "new tokens"),
    ],
    "cuda": [
        ("backend.cu, routes.cu", "append, then a route"),
        ("decode/", "few rows, matrix unit"),
        ("prefill/", "many rows on Hopper"),
        ("fallback/", "everything else"),
        ("balance.cuh, exchange.cuh", "dealing keys, merging"),
    ],
    "metal": [
        ("paged_decode_metal.mm, routes.mm", "steps and routes"),
        ("attend.h", "few rows"),
        ("prefill.h", "many rows"),
        ("item.h, tables.h", "where a threadgroup works"),
        ("append.h, merge.h", "new tokens, merging"),
    ],
}


def house():
    p = Picture("The house: what stands where, and who compiles what", 900)
    p.box(20, 14, 860, 30, "empty", "transformers · SGLang · vLLM · your own code: engines/, examples/")
    p.arrow((450, 46), (450, 60))
    panel(p, 20, 62, 860, 76, "d", "torch-ext/paged_attn/: names, defaults, the results' memory",
          wrapped(functions(), 125))  # fmt: skip
    p.arrow((280, 140), (280, 156))
    left = ["arguments.h: their order, once; torch_binding.cpp: the schemas of the operators",
            *wrapped(operators(), 76),
            "op_attend.cpp, op_write.cpp: all checks; unset is neutral, no flag"]  # fmt: skip
    panel(p, 20, 158, 520, 136, "d", "torch-ext/*.h, *.cpp: arguments in, one Problem out", left)
    columns = wrapped(headers_of_spec(), 40)
    panel(p, 580, 158, 300, 136, "new", "torch-ext/spec/: what a call means",
          [*columns, "", "no torch, no CUDA, no Metal:", "every device compiles these files"])  # fmt: skip
    p.arrow((578, 226), (542, 226))
    p.arrow((450, 296), (450, 310))
    p.box(20, 312, 860, 28, "empty", "backend.h: what a device implements. A build links exactly one of the three.")
    width = 276
    for i, (backend, (_, colour)) in enumerate(DEVICES.items()):
        x = 20 + i * (width + 16)
        p.arrow((x + width / 2, 342), (x + width / 2, 356))
        panel(p, x, 358, width, 240, colour, f"paged_decode_{backend}/", [])
        for j, (files, what) in enumerate(ROOMS[backend]):
            p.text(x + 12, 398 + 29 * j, files, bold=True, size=11)
            p.text(x + 12, 411 + 29 * j, what, size=11)
        p.text(x + 12, 544, "routes, best first:", role="ink", size=11)
        for j, line in enumerate(wrapped(routes(backend), 44)):
            p.text(x + 12, 560 + 15 * j, line, bold=True, size=11)
    for i, (name, what) in enumerate([
        ("tests/", "reference.py is the truth"),
        ("tools/", "build, emulated Apple GPU"),
        ("benchmarks/", "beside other kernels"),
        ("docs/", "one page per question"),
    ]):  # fmt: skip
        x = 20 + i * 218
        p.box(x, 620, 206, 50, "empty")
        p.text(x + 12, 640, name, bold=True)
        p.text(x + 12, 658, what)
    return p


# A step: what happens, and where: a file and a word that stands in it.
SHARED = [
    ("The function: second names, neutral keywords", "torch-ext/paged_attn/attention.py", "flash_attn_with_kvcache"),
    ("Defaults, memory for out and lse, the shortest operator", "torch-ext/paged_attn/_call.py", "run"),
    ("Every shape, dtype and range: one Problem", "torch-ext/op_attend.cpp", "problem_of"),
]
WAYS = {
    "cpu": [
        ("Lengths, pages: checked, always", "torch-ext/spec/check_tables.cpp", "check_values"),
        ("New tokens: places first, then bytes", "paged_decode_cpu/kv_write.cpp", "place_tokens"),
        ("Plan: items, splits, longest first", "paged_decode_cpu/plan.cpp", "make_plan"),
        ("Threads take items from a counter", "paged_decode_cpu/paged_decode_cpu.cpp", "run_plan"),
        ("Tile by tile: scores, softmax, values", "paged_decode_cpu/attend.h", "attend_as"),
        ("The last of a block's splits merges", "paged_decode_cpu/attend.h", "merge_partials"),
        ("Sink, normalise, out and lse", "paged_decode_cpu/item_rows.h", "finish_row"),
    ],
    "cuda": [
        ("The host sees no lengths", "paged_decode_cuda/backend.cu", "run_attention"),
        ("New tokens, rotated queries: a launch", "paged_decode_cuda/append.cuh", "append_kernel"),
        ("The first route that fits, its plan", "paged_decode_cuda/routes.cu", "find_route"),
        ("A block finds its stretch of keys", "paged_decode_cuda/balance.cuh", "find_stretch"),
        ("Tiles through shared memory, mma", "paged_decode_cuda/decode/kernel.cuh", "decode_kernel"),
        ("Partials travel to the first block", "paged_decode_cuda/exchange.cuh", "add_partials"),
        ("Sink, normalise, out and lse", "paged_decode_cuda/rows.cuh", "finish_row"),
    ],
    "metal": [
        ("The host sees no lengths", "paged_decode_metal/paged_decode_metal.mm", "run_attention"),
        ("New tokens, rotated queries: a dispatch", "paged_decode_metal/append.h", "append"),
        ("The first route that fits, its plan", "paged_decode_metal/routes.mm", "routes"),
        ("A threadgroup finds its item and split", "paged_decode_metal/item.h", "find_item"),
        ("Tile by tile: scores, softmax, values", "paged_decode_metal/attend.h", "walk_keys"),
        ("Partials of split rows: a dispatch", "paged_decode_metal/merge.h", "merge"),
        ("Sink, normalise, out and lse", "paged_decode_metal/item.h", "finish_row"),
    ],
}


def step(p, x, y, width, fill, what, path, name):
    assert re.search(rf"\b{name}\b", source(path)), f"{path}: expected {name}, a step of the way of a call"
    p.box(x, y, width, 42, fill)
    p.text(x + 10, y + 17, what)
    short = path.removeprefix("torch-ext/").removeprefix("paged_attn/")
    p.text(x + 10, y + 33, f"{re.sub('^paged_decode_[a-z]+/', '', short)}: {name}", size=11, bold=True)


def call():
    p = Picture("The way of one call through each device", 900)
    for i, (what, path, name) in enumerate(SHARED):
        step(p, 240, 14 + 54 * i, 420, "d", what, path, name)
        if i:
            p.arrow((450, 3 + 54 * i), (450, 12 + 54 * i))
    width = 276
    for i, (backend, steps) in enumerate(WAYS.items()):
        title, colour = DEVICES[backend]
        x = 20 + i * (width + 16)
        p.arrow((450, 166), (450, 173), (x + width / 2, 173), (x + width / 2, 192))
        p.text(x, 190, title, bold=True)
        for j, (what, path, name) in enumerate(steps):
            y = 196 + 54 * j
            step(p, x, y, width, colour, what, path, name)
            if j:
                p.arrow((x + width / 2, y - 11), (x + width / 2, y - 2))
    p.text(20, 590, "Bold: the file and the function to begin reading at. A call without new tokens skips the second "
           "step, one whose keys are not cut the sixth.", role="ink")  # fmt: skip
    return p


PICTURES = {"house": house, "call": call}
