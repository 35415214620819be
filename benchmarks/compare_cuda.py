"""Decode and cache writes on a GPU, beside a kernel that only reads the same pages and beside other attention kernels.

    python benchmarks/compare_cuda.py [--cases REGEX] [--providers REGEX] [--save JSON]
    python benchmarks/compare_cuda.py --load JSON
    python docs/pictures/data.py decode_h200 < TABLE   the printed table into docs/data/, for page and picture

Every time is that of a call inside a CUDA graph: the graph runs the call on several copies of the inputs whose pages
are disjoint and larger than L2 together (what a write of 64 tokens touches of them is not), and the replays of all
providers take turns. Peers are left out where missing:

    FlashAttention 3    PEERS_DIR/fa3.so: `_vllm_fa3_C.abi3.so` of the vllm wheel (0.26.0, for torch 2.11 and CUDA 13)
    cuDNN               the Python package nvidia-cudnn-frontend
"""

import argparse
import json
import math
import os
import re
import statistics
import sys
import time
from pathlib import Path

import torch
from cpu_cases import Case, Inputs
from cuda_cases import decode_cases
from cuda_providers import KERNEL, PEERS, PROVIDERS, Replay, read_pages, sample
from tqdm import tqdm

COPY_BYTES = 300e6  # all copies of a case: several times the L2 of any GPU
READ_BYTES = 4 << 30
HOST_CALLS = 400

# The best of FlashAttention 2 and 3, FlashInfer's five backends, cuDNN, XQA and vLLM's Triton kernel, measured before
# on another H200 by the same method: case -> (us, us of the floor there, who).
RECORDED = {
    "B1 1k": (8.7, 3.2, "XQA"),
    "B1 8k": (16.4, 9.8, "XQA"),
    "B1 32k": (40.6, 31.7, "cuDNN"),
    "B1 128k": (130.1, 118.1, "cuDNN"),
    "B8 8k": (68.7, 60.4, "FA3"),
    "B64 4k": (244.6, 232.8, "FA3"),
    "B256 1k": (248.9, 233.1, "cuDNN"),
    "B64 4k, page 256": (240.8, 230.9, "FA3"),
    "B64 4k, page 1": (248.7, 238.2, "cuDNN"),
    "B64 64/8 4k": (245.4, 233.0, "FA3"),
    "B32 32/32 4k": (476.5, 461.8, "cuDNN"),
    "B64 16/2 D64 4k": (40.4, 32.1, "FA3"),
    "B32 16/8 D256 4k": (245.8, 231.9, "FlashInfer"),
    "B16 8/1 16k": (40.7, 32.1, "FA3"),
    "B64 128..32k": (291.2, 246.4, "FlashInfer"),
    "63 x 256, 1 x 64k": (94.7, 74.7, "FA3"),
    "B32 4k, 4 tokens": (127.9, 118.2, "FlashInfer"),
    "B64 4k, fp8": (156.0, 118.3, "XQA"),
    "B1 32k, fp8": (33.6, 17.4, "FA3"),
    "B8 8k, fp8": (54.7, 31.8, "FA3"),
    "write 64 tokens": (2.1, None, "vLLM"),
    "write 8192 tokens": (20.3, None, "FlashInfer"),
    "write 8192 tokens, fp8": (74.4, None, "vLLM"),
}


# ---- Measuring ----


def measure(case, providers, rounds):
    copies = max(2, min(48, math.ceil(COPY_BYTES / case.bytes)))
    x = Inputs(case, 16 if case.kind == "write" else copies, "cuda")
    if case.cache_dtype:  # values that every provider holds exactly
        x.q = x.q.to(torch.float8_e4m3fn).to(x.q.dtype)
    row = {"case": vars(case), "us": {}, "spread": {}, "error": {}, "failed": {}}
    expected = x.reference()
    if case.kind == "write":
        expected = expected.to(x.k_cache.dtype).float()

    def look(name, out):
        if name != "floor":
            got = x.written() if case.kind == "write" else out.float().view_as(expected)
            row["error"][name] = ((got - expected).norm() / expected.norm()).item()

    chosen = {name: PROVIDERS[name] for name in providers}
    for name, times in sample(x, chosen, rounds, row["failed"], look, own=("ours", "floor")).items():
        row["us"][name] = statistics.median(times)
        row["spread"][name] = [min(times), max(times)]
    return row


def read_rate():
    """GB/s at which this GPU reads 4 GiB."""
    k, v = (torch.zeros(READ_BYTES // 2 // 65536, 16384, dtype=torch.int32, device="cuda") for _ in range(2))
    pages = torch.randperm(len(k), dtype=torch.int32, device="cuda")
    return READ_BYTES / Replay(read_pages(k, v, [pages])).median(9) * 1e-3


def host_times(providers):
    """Microseconds until a call without a graph is issued, the GPU idle or not; the best of five loops."""
    x, times = Inputs(Case("host", "bf16", [128]), 1, "cuda"), {}
    for name in providers:
        try:
            (call,) = PROVIDERS[name](x)
            loops = []
            for _ in range(6):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(HOST_CALLS):
                    call()
                loops.append((time.perf_counter() - start) / HOST_CALLS * 1e6)
            times[name] = min(loops[1:])
        except Exception as error:
            print(f"host time of {name}: {error}", file=sys.stderr)
    return times


# ---- Printing ----


def best_peer(row):
    return min(((row["us"][name], name) for name in PEERS if name in row["us"]), default=(None, None))


def recorded_peer(row):
    """The recorded time as it would be here, and whose it is. Machines of a kind differ, as their floors do."""
    us, floor, who = RECORDED[row["case"]["name"]]
    return us * row["us"]["floor"] / floor if floor and "floor" in row["us"] else us, who


def table(results):
    head = [
        "case",
        "floor us",
        "ours us",
        "% of read rate",
        "best peer here us",
        "x",
        "recorded peer us, its floor",
        "x of it",
    ]
    lines, ratios, errors = [head, ["---"] * len(head)], [], {}
    for row in results["rows"]:
        case, us = Case(**row["case"]), row["us"]
        ours, (peer, who) = us["ours"], best_peer(row)
        recorded, recorded_floor, _ = RECORDED[case.name]
        scaled, recorded_who = recorded_peer(row)
        ratios.append(min(peer or math.inf, scaled) / ours)
        share = 100 * case.bytes / ours * 1e-3 / results["read_rate"]
        lines.append([
            case.name, f"{us['floor']:.1f}" if "floor" in us else "–", f"{ours:.1f}",
            f"{share:.0f}" if case.kind != "write" else "–",
            f"{peer:.1f} ({who})" if peer else "–", f"{peer / ours:.2f}" if peer else "–",
            f"{recorded} ({recorded_who})" + (f", {recorded_floor}" if recorded_floor else ""), f"{scaled / ours:.2f}",
        ])  # fmt: skip
        for name, error in row["error"].items():
            key = name + (" with fp8 caches" if case.cache_dtype else "")
            errors[key] = max(errors.get(key, 0.0), error)
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    text += (
        "\n\nx: the peer's time over ours; a recorded one is scaled by the floors. Geometric mean of the better peer's"
    )
    text += f" x: {math.exp(statistics.fmean(map(math.log, ratios))):.3f}"
    return f"{text}\nLargest relative errors: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="")
    parser.add_argument("--providers", default="")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--save", help="JSON file of the results")
    parser.add_argument("--load", help="print saved results instead of measuring")
    arguments = parser.parse_args()
    if arguments.load:
        results = json.loads(Path(arguments.load).read_text())
    else:
        root = Path(__file__).resolve().parent.parent
        os.environ.setdefault("LOCAL_KERNELS", f"{KERNEL}={root}")
        providers = ["ours", *(n for n in PROVIDERS if n != "ours" and re.search(arguments.providers, n))]
        results = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
        results |= {"read_rate": read_rate(), "host_us": host_times([n for n in providers if n != "floor"]), "rows": []}
        for case in tqdm([case for case in decode_cases() if re.search(arguments.cases, case.name)], "cases"):
            results["rows"].append(row := measure(case, providers, arguments.rounds))
            times = ", ".join(f"{name} {us:.1f}" for name, us in row["us"].items())
            tqdm.write(f"{case.name}: {times} us; {row['failed']}", file=sys.stderr)
            if arguments.save:
                Path(arguments.save).write_text(json.dumps(results, indent=1))
    print(
        f"{results['device']}, torch {results['torch']}, CUDA {results['cuda']}; reads {results['read_rate']:.0f} GB/s"
    )
    print(f"Host time of a call, us: { {name: round(us, 1) for name, us in results['host_us'].items()} }\n")
    print(table(results))


if __name__ == "__main__":
    main()
