"""Counts the instructions that each path of Arm takes per key, in qemu: the difference between two calls that differ in
their number of keys alone. Prints a table; says nothing about time.

    python tests/arm/count.py
"""

import subprocess
import sys

import arm_build

sys.path.append(str(arm_build.ROOT / "tests"))

PATHS = ("portable", "neon", "neon_fp16", "neon_bf16")
KEYS = (256, 512)
# q_len, group: one kv_head, head_dim 128.
SHAPES = {
    "decode, group 1": (1, 1),
    "decode, group 4": (1, 4),
    "decode, group 8": (1, 8),
    "prefill, 240 rows": (240, 1),
}
DTYPES = (("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3fn"),
          ("float16", "float8_e4m3fn"), ("bfloat16", "float8_e5m2"))  # fmt: skip


def calls():
    """Runs in a process of its own: what that prints for each call comes from the plugin."""
    import conftest
    import kernels
    import torch

    torch.set_num_threads(1)
    paged_attn = kernels.get_kernel(conftest.KERNEL, version=1, backend="cpu", trust_remote_code=True)

    def call(q_dtype, kv_dtype, q_len, group, n):
        q = torch.randn(1, q_len, group, 128).to(getattr(torch, q_dtype))
        k, v = (torch.randn(1, n, 1, 128).to(getattr(torch, kv_dtype)) for _ in range(2))
        paged_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=n, num_splits=1)

    call(*DTYPES[0], 1, 1, KEYS[0])  # has what the process begins with
    for types in DTYPES:
        for shape in SHAPES.values():
            for n in KEYS:
                call(*types, *shape, n)


def counts(isa):
    plugin = arm_build.OUT / "count_plugin.so"
    arm_build.checked(
        ["gcc", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", arm_build.ARM / "count_plugin.c", "-o", plugin]
    )
    environment = arm_build.environment("max", isa, options=f"-plugin {plugin}")
    environment |= {"PAGED_ATTN_TEST_DEVICE": "cpu"}
    run = subprocess.run([sys.executable, __file__, "calls"], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    totals = [int(line.split()[1]) for line in run.stderr.splitlines() if line.startswith("instructions ")]
    each = [b - a for a, b in zip(totals, totals[1:])]
    return [(more - fewer) / (KEYS[1] - KEYS[0]) for fewer, more in zip(each[::2], each[1::2])]


def main():
    table = {isa: counts(isa) for isa in PATHS}
    print(f"| q, cache | shape | {' | '.join(PATHS)} |\n| --- | --- |{' --- |' * len(PATHS)}")
    rows = [(f"{q}, {kv}", shape) for q, kv in DTYPES for shape in SHAPES]
    for i, (types, shape) in enumerate(rows):
        print(f"| {types} | {shape} | {' | '.join(f'{table[isa][i]:.0f}' for isa in PATHS)} |")


if __name__ == "__main__":
    calls() if sys.argv[1:] else main()
