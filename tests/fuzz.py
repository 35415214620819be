"""Random calls of every public function against the float64 reference.

    python tests/fuzz.py --seed 123 --calls 1        one call, printed as code
    python tests/fuzz.py --calls 100000 --jobs 16 --device cuda --package build/torch-stable-abi211-cu130-x86_64-linux

Call k of a run is the call of seed + k, whatever else ran, so a number reproduces it. `--package` loads a build
directory without the `kernels` package. A worker that dies or hangs is replaced; its call is named.
"""

import argparse
import collections
import importlib.util
import multiprocessing
import operator
import os
import sys
import time
import traceback
from pathlib import Path

import fuzz_calls
import fuzz_faults
import fuzz_judge
import torch
from tqdm import tqdm

SPOILED = 0.08  # of the calls
HANGS_AFTER = 90.0  # seconds in one call
DEVICE_LOST = 75  # the exit status of a worker that needs a new process


def draw(seed):
    call, dice = fuzz_calls.draw(seed)
    may_be = not call.latent_alone and not isinstance(call, fuzz_calls.MergeCall)
    if may_be and dice.chance(SPOILED):
        fuzz_faults.break_call(call, dice)
    return call


def load(device, package=None):
    """The package, from a build directory or through `kernels` as the tests load it."""
    if package is None:
        import conftest
        import kernels

        backend = {"cpu": "cpu", "cuda": "cuda", "mps": "metal"}[torch.device(device).type]
        return kernels.get_kernel(conftest.KERNEL, version=1, backend=backend, trust_remote_code=True)
    init = Path(package).resolve() / "__init__.py"
    spec = importlib.util.spec_from_file_location("paged_attn", init, submodule_search_locations=[str(init.parent)])
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def invoke(function, arguments, threads=1):
    """(result, error). Fresh memory holds NaN, so that what a kernel leaves unwritten is seen.

    Everything else of a run is many small operations, which lose time when spread over threads.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(threads)
    try:
        return function(**arguments), None
    except Exception as error:
        return None, error
    finally:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(False)


def checks_values(device):
    return device == "cpu" or os.environ.get("PAGED_ATTN_CHECK", "0") not in ("", "0")


def routes(paged_attn, call, arguments):
    """The route of a call, where the package tells."""
    if not hasattr(paged_attn, "explain") or call.function != "flash_attn_with_kvcache" or call.fault:
        return []
    return [f"route {paged_attn.explain(**arguments).route}"]


def may_be_narrow(arguments, taken):
    """Whether the weights of a call may be 8-bit: e4m3 throughout, and the route prefill of a Hopper GPU."""
    tensors = [arguments.get(name) for name in ("q", "k_cache", "k")]
    given = [x for x in tensors if isinstance(x, torch.Tensor)]
    if not given or not all(x.is_cuda and x.dtype == torch.float8_e4m3fn for x in given):
        return False
    return torch.cuda.get_device_capability() == (9, 0) and taken in ([], ["route prefill"])


def may_be_off_by_softcap(arguments):
    """Whether softcap may be computed with an error that is a part of softcap: prompts of 16 and 8 bits, on CUDA."""
    q = arguments.get("q")
    return isinstance(q, torch.Tensor) and q.is_cuda and q.itemsize < 4 and arguments.get("softcap", 0.0) <= 64


def run_call(paged_attn, call, device, most_threads=3):
    """Makes the call and judges it: (error in units of what is allowed, routes). Raises fuzz_judge.Wrong."""
    arguments, storage = call.on(device)
    function, given = operator.attrgetter(call.function)(paged_attn), call.given(arguments)
    result, error = invoke(function, given, 1 + call.seed % most_threads)
    looked_at = checks_values(device) or not call.by_value
    if call.fault and looked_at:
        fuzz_judge.judge_refusal(call, error, arguments, storage)
        return 0.0, []
    if (
        call.fault and not call.harmless
    ):  # a GPU does not look at values: it may write anything, but only where the caches are
        if error is not None:
            raise fuzz_judge.Wrong(f"{type(error).__name__} for values that are not looked at: {error}")
        fuzz_judge.judge_guards(call, storage)
        return 0.0, []
    if error is not None:
        raise fuzz_judge.Wrong(f"{type(error).__name__}: {error}") from error
    taken = routes(paged_attn, call, arguments)
    allowed = may_be_narrow(arguments, taken), may_be_off_by_softcap(arguments)
    worst = fuzz_judge.judge(call, result, arguments, storage, *allowed)
    again = call.arguments.get("deterministic") and "k_cache" in call.arguments and "k" not in call.arguments
    if again:
        repeated, _ = invoke(function, given)
        for a, b in zip(as_tuple(result), as_tuple(repeated)):
            fuzz_judge.same_bytes("the same call again, deterministic", b.cpu(), a.cpu())
    return worst, taken


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def report(call, error):
    return f"seed {call.seed}: {error}\n{call.code()}"


def work(options, first, count, stride, progress, results):
    """A worker: every stride-th call from first on; progress = [seed under way, since when]."""
    torch.set_num_threads(1)
    paged_attn = load(options.device, options.package)
    covered, worst = collections.Counter(), (0.0, -1)
    for seed in range(first, first + count, stride):
        if time.monotonic() > options.end:
            break
        covered["calls"] += 1
        progress[0], progress[1] = seed, time.monotonic()
        call = draw(seed)
        if options.sizes == "small" and "small" not in call.features and not call.fault:
            continue
        try:
            error, taken = run_call(paged_attn, call, options.device, options.threads)
        except Exception as wrong:
            kind = "" if isinstance(wrong, fuzz_judge.Wrong) else traceback.format_exc()
            results.put(("wrong", seed, f"{wrong}{kind}"))
            if "CUDA error" in str(wrong):  # which every later call of this process would repeat
                results.put(("done", covered, worst))
                results.close()
                results.join_thread()
                os._exit(DEVICE_LOST)
            continue
        covered.update([*call.features, *taken])
        worst = max(worst, (error, seed))
    progress[1] = float("inf")
    results.put(("done", covered, worst))


class Pool:
    """Workers that share the seeds; one that dies or hangs is started again behind the call it was at."""

    def __init__(self, options):
        self.options, self.context = options, multiprocessing.get_context("spawn")
        self.results = self.context.Queue()
        self.wrong, self.covered, self.worst = [], collections.Counter(), (0.0, -1)
        self.workers = {}
        for job in range(options.jobs):
            self.start(job, options.seed + job)

    def start(self, job, first):
        end = self.options.seed + self.options.calls
        if first >= end:
            self.workers.pop(job, None)
            return
        progress = self.context.Array("d", [first, float("inf")], lock=False)
        arguments = (self.options, first, end - first, self.options.jobs, progress, self.results)
        process = self.context.Process(target=work, args=arguments, daemon=True)
        process.start()
        self.workers[job] = process, progress

    def take_results(self):
        while True:
            try:
                kind, a, b = self.results.get(timeout=0.2)
            except Exception:
                return
            if kind == "wrong":
                self.wrong.append((a, b))
                print(f"seed {a}: {b}"[: self.options.width], flush=True)
            else:
                self.covered.update(a)
                self.worst = max(self.worst, b)

    def run(self):
        reached = {}
        bar = tqdm(total=self.options.calls, unit="call", disable=None)
        while self.workers:
            self.take_results()
            for job, (process, progress) in list(self.workers.items()):
                seed = int(progress[0])
                reached[job] = (seed - self.options.seed) // self.options.jobs
                bar.update(sum(reached.values()) - bar.n)
                if process.exitcode == 0:
                    self.workers.pop(job)
                elif process.exitcode == DEVICE_LOST:
                    self.start(job, seed + self.options.jobs)
                elif process.exitcode is not None:
                    self.fail(job, seed, f"the process died ({process.exitcode})")
                elif time.monotonic() - progress[1] > HANGS_AFTER:
                    process.kill()
                    self.fail(job, seed, f"no answer for {HANGS_AFTER:.0f} s")
        self.take_results()
        bar.close()

    def fail(self, job, seed, what):
        self.wrong.append((seed, what))
        print(f"seed {seed}: {what}", flush=True)
        self.start(job, seed + self.options.jobs)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first call (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=3, help="at most, of torch (default: %(default)s)")
    parser.add_argument(
        "--device", default=os.environ.get("PAGED_ATTN_TEST_DEVICE", "cpu"), help="default: %(default)s"
    )
    parser.add_argument("--package", help="a build directory, loaded without the kernels package")
    parser.add_argument("--sizes", choices=("all", "small"), default="all", help="small: for an emulated device")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop then, wherever the calls are")
    parser.add_argument("--width", type=int, default=400, help="characters of a report (default: %(default)s)")
    return parser.parse_args()


def main():
    options = parse_arguments()
    options.end = time.monotonic() + options.seconds
    if options.calls == 1:
        call = draw(options.seed)
        print(call.code())
        worst, taken = run_call(load(options.device, options.package), call, options.device, options.threads)
        print(f"right; error {worst:.2f} of what is allowed; {', '.join([*taken, *sorted(call.features)])}")
        return 0
    start = time.monotonic()
    pool = Pool(options)
    pool.run()
    calls = pool.covered.pop("calls", 0)
    for name, count in sorted(pool.covered.items()):
        print(f"{count:8} {name}")
    print(f"largest error {pool.worst[0]:.2f} of what is allowed, seed {pool.worst[1]}")
    print(f"{calls} calls, {len(pool.wrong)} wrong, {time.monotonic() - start:.0f} s")
    if pool.wrong:
        print("seeds:", *sorted(seed for seed, _ in pool.wrong)[:200])
    return 1 if pool.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
