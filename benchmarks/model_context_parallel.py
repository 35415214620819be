"""Context parallelism on paper: the time of one layer's attention in a decode step, on several GPUs.

    python benchmarks/model_context_parallel.py

time(ranks) = START + bytes of the keys and values / (ranks * READ) + exchange(ranks) + merge

exchange(ranks) = latency(ranks) + (ranks - 1) * message / link, for every rank receives a message from every other.
merge: the operator merge_parts, or five small kernels of PyTorch, as one H200 measures them in a CUDA graph. The
numbers are those below. Peers: GPUs of one host write into each other's memory, and one kernel exchanges and merges.
Its words carry as many bytes of tags as of results. Only its time on two GPUs was measured with several of them.
"""

KV_HEADS, Q_HEADS, HEAD_DIM, BYTES = 8, 32, 128, 2  # Llama 3.1 8B, one request, bfloat16
READ = 4.2e12  # bytes/s of an H200: 128k keys in 126.8 us (docs/history.md, H200: decode, 2026-11-21)
START = 5e-6  # an attention call without keys
# latency of an all-gather of a few KB, and bytes/s of a GPU's link
LINKS = {2: (12e-6, 450e9), 8: (18e-6, 450e9), 64: (60e-6, 50e9)}  # NVLink in one host; 400 Gb/s between hosts
# Of a token of 32 heads, by the number of parts.
MERGES = {
    "merge_parts": {2: 2.5e-6, 8: 4.8e-6, 64: 27.0e-6},
    "PyTorch": {2: 9.4e-6, 8: 11.7e-6, 64: 17.8e-6},
}
# Exchange and merge. On two GPUs 2.7 to 6.4 us were measured; on eight, 2.3 us more for merging 8 parts is assumed.
PEERS = {2: 5.0e-6, 8: 7.3e-6}


def seconds(keys: int, ranks: int, merge) -> float:
    read = keys * KV_HEADS * HEAD_DIM * 2 * BYTES / (ranks * READ)
    if ranks == 1:
        return START + read
    latency, link = LINKS[ranks]
    message = Q_HEADS * (HEAD_DIM * BYTES + 4)
    if merge is PEERS:
        return START + read + (ranks - 1) * 2 * message / link + merge[ranks]
    return START + read + latency + (ranks - 1) * message / link + merge[ranks]


def main():
    print("| keys | one GPU, us | merge | 2 GPUs | 8 GPUs | 64 GPUs |\n| --- | --- | --- | --- | --- | --- |")
    for keys in (1 << 15, 1 << 17, 1 << 20, 1 << 23):
        alone = seconds(keys, 1, None)
        for merge, cost in [("Peers", PEERS), *MERGES.items()]:
            times = [seconds(keys, ranks, cost) if ranks in cost else None for ranks in LINKS]
            shown = " | ".join(f"{time * 1e6:.0f} us, {alone / time:.2f} x" if time else "–" for time in times)
            print(f"| {keys // 1024}k | {alone * 1e6:.0f} | {merge} | {shown} |")


if __name__ == "__main__":
    main()
