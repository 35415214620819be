"""Draws the pictures of the documents: `python docs/pictures/draw.py [NAME ...]` writes docs/pictures/*.svg, and
without a name the tables of docs/data/ into the pages.

Nothing is placed by a number that the package would know better: masks come from the tests' reference, plans from the
planners themselves, sizes from the headers of the kernels, times from docs/data/.
"""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
sys.path += [str(FOLDER), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import data  # noqa: E402
import house  # noqa: E402
import of_cpu  # noqa: E402
import of_cuda  # noqa: E402
import of_engine  # noqa: E402
import of_metal  # noqa: E402
import of_results  # noqa: E402
import of_routes  # noqa: E402
import of_usage  # noqa: E402

PICTURES = {
    "pages": of_usage.pages,
    "append": of_usage.append,
    "masks": of_usage.masks,
    "decode": of_results.decode,
    "prefill": of_results.prefill,
    "decode_cpu": of_results.decode_cpu,
    "roofline": of_results.roofline,
    "roofline_cpu": of_results.roofline_cpu,
    "splitting": of_cuda.splitting,
    "dealing": of_cuda.dealing,
    "decode_kernel": of_cuda.decode_kernel,
    "prefill_kernel": of_cuda.prefill_kernel,
    "boxes_and_pieces": of_cuda.boxes_and_pieces,
    "mla_block": of_cuda.mla_block,
    "cutting": of_cpu.cutting,
    "threadgroup": of_metal.threadgroup,
    "which_route": of_routes.which_route,
    "engine_time": of_results.engine_time,
    "call_time": of_results.call_time,
    "batching": of_engine.batching,
    **house.PICTURES,
}


def main() -> None:
    for name in sys.argv[1:] or PICTURES:
        (FOLDER / f"{name}.svg").write_text(PICTURES[name]().svg())
        print(FOLDER / f"{name}.svg")
    if not sys.argv[1:]:
        for path in data.pages():
            path.write_text(data.with_tables(path.read_text()))


if __name__ == "__main__":
    main()
