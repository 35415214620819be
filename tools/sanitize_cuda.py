"""Runs tests under compute-sanitizer's four tools; needs a GPU.

    python tools/sanitize_cuda.py [--tool NAME] [arguments of pytest; default: every feature once]

Nothing is prepared for the tools: what they see is what a call does. initcheck reports that a block polls words of the
workspace before another has written them. That is how partials travel (paged_decode_cuda/exchange.cuh), so reports from
load_word are counted apart; every other report of any tool is a failure.
"""

import argparse
import os
import re
import subprocess
import sys

TOOLS = {
    "memcheck": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # torch's cache hides the ends of tensors
    "racecheck": {},
    "synccheck": {},
    "initcheck": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
}
SELECTION = ["-q", "-x", "tests/test_decode.py::test_feature_alone"]
POLLING = "load_word"


def reports(output):
    """The first lines of every report: what happened, and where."""
    lines = [line.removeprefix("=========").strip() for line in output.splitlines() if line.startswith("=========")]
    for i, line in enumerate(lines):
        if re.match(r"(Invalid|Uninitialized|Error|Race|Barrier error|Potential|Misaligned)", line):
            yield line, lines[i + 1] if i + 1 < len(lines) else ""


def outcome(output):
    """pytest's last line, which lies before the summary of the sanitizer."""
    lines = [line for line in output.splitlines() if not line.startswith("========= ")]
    return ([line for line in lines if re.search("passed|failed|error", line)] or ["no test ran"])[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", choices=TOOLS, action="append", help="one of the tools; several times for several")
    args, selection = parser.parse_known_args()
    selection = selection or SELECTION
    failed = False
    for tool in args.tool or TOOLS:
        environment = TOOLS[tool]
        command = ["compute-sanitizer", "--tool", tool, "--kernel-name", "kns=paged_attn", "--target-processes", "all"]
        command += ["--print-limit", "1000", sys.executable, "-m", "pytest", *selection]
        result = subprocess.run(
            command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        found = list(reports(result.stdout))
        polling = [report for report in found if tool == "initcheck" and POLLING in report[1]]
        others = [report for report in found if report not in polling]
        tests = outcome(result.stdout)
        print(f"{tool}: {len(others)} reports, {len(polling)} of polling; {tests}", flush=True)
        for what, where in others[:20]:
            print(f"    {what} | {where}")
        failed |= bool(others) or " passed" not in tests or bool(re.search("failed|error", tests))
    sys.exit(failed)


if __name__ == "__main__":
    main()
