"""What the emulator counts: no byte of K and V is loaded twice, and lanes exchange little."""

import subprocess
import sys
from pathlib import Path

import metal_build

COUNT = Path(__file__).resolve().parents[2] / "benchmarks" / "count_metal.py"
# Of the names of cases: a short context, groups of 1, 2, 4 and 8, 16 rows, an 8-bit cache.
PARTS = ["B4", "B1 32/8 D128, 1024", "64/8", "4 tokens", "8192 keys, fp8"]


def test_keys_and_values_are_loaded_once():
    command = [sys.executable, COUNT, "--ours", *PARTS]
    run = subprocess.run(command, env=metal_build.environment("count"), capture_output=True, text=True, check=True)
    rows = [line.split("|")[1:-1] for line in run.stdout.splitlines()[2:]]
    assert len(rows) >= len(PARTS)
    for name, _, loaded, _, _, exchanges, _, _, _, dispatches in rows:
        assert 0.99 < float(loaded) < 1.05, name
        assert float(exchanges) < (1.5 if "50 keys" in name else 0.8), name
        assert int(dispatches) <= 2, name
