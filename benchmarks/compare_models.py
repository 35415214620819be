"""The attention of models on a GPU, in the steps of an engine, beside FlashAttention 3.

    python benchmarks/compare_models.py [--models REGEX] [--rounds N] [--save JSON]

Every call is the one that an engine makes: bfloat16, pages of 16 in random order, `cu_seqlens_q`. Every time is that of
a call inside a CUDA graph over copies of the inputs, 24 at most, larger than L2 together. (What a window of 128 keys
sees is not, nor is one request of Falcon.) The replays of all take turns. A row is a model, a column a step: our time
in us and, in brackets, FlashAttention 3's over ours. Its time is the better of two: with its plan made in the call, and
once for all layers of a step, outside of the timed call.

    FlashAttention 3    PEERS_DIR/fa3.so: `_vllm_fa3_C.abi3.so` of the vllm wheel (0.26.0, for torch 2.11 and CUDA 13)
"""

import argparse
import json
import math
import os
import re
import statistics
from pathlib import Path

import torch
from compare_prefill import Inputs, fa3, ours
from cuda_cases import MODELS, STEPS, model_cases
from cuda_providers import KERNEL, measure
from tqdm import tqdm

MOST_COPIES = 24
PROVIDERS = {"ours": ours, "FA3": fa3, "FA3 planned": lambda x: fa3(x, planned=True)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", help="JSON file of the results")
    arguments = parser.parse_args()
    os.environ.setdefault("LOCAL_KERNELS", f"{KERNEL}={Path(__file__).resolve().parent.parent}")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n\n| model | {' | '.join(STEPS)} |")
    print("| --- |" + " --- |" * len(STEPS))
    rows, ratios = [], {step: [] for step in STEPS}
    for model in tqdm([model for model in MODELS if re.search(arguments.models, model)], "models"):
        cells = []
        for case in model_cases(model):
            rows.append(row := measure(Inputs(case, MOST_COPIES), PROVIDERS, arguments.rounds) | {"model": model})
            own, *peers = row["us"].values()
            cells.append(f"{own:.1f} ({min(peers) / own:.2f})" if peers else f"{own:.1f} (–)")
            if peers:
                ratios[case.name].append(min(peers) / own)
        tqdm.write(f"| {model} | {' | '.join(cells)} |")
        if arguments.save:
            Path(arguments.save).write_text(json.dumps(rows, indent=1))
    means = [f"{math.exp(statistics.fmean(map(math.log, r))):.2f}" if r else "–" for r in ratios.values()]
    print(f"| geometric mean | {' | '.join(means)} |")
    worst = max((d for row in rows for name, d in row["difference"].items()), default=0.0)
    print(f"\nLargest relative difference between FlashAttention 3's result and ours: {worst:.1e}")
    for failed in {str(row["failed"]) for row in rows if row["failed"]}:
        print(f"Left out: {failed}")


if __name__ == "__main__":
    main()
