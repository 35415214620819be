"""merge_with_peers, the operator behind `Peers`: GPUs that write their results into each other's memory.

One rank at a time finds in its memory what the others would have written, and leaves its own words in theirs: no GPU
waits for another here. On CUDA that is the operator. Elsewhere it is the kernel's own source on the host, with other
instructions to move words; there all ranks also run side by side, as threads. test_context_parallel.py has GPUs for
ranks.
"""

import ctypes
import re
import shutil
import subprocess

import pytest
import torch
from conftest import REPOSITORY

HEADS, MAX_TOKENS, MOST_PEERS = 12, 6, 16
CALLS = [(1, "all"), (5, "all"), (6, "own"), (1, "own"), (3, "all"), (6, "all"), (2, "own"), (6, "all"), (1, "all")]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
HOST_DTYPES = [torch.float32, torch.float16]  # in the order of DType


class Problem(ctypes.Structure):
    """PeerMergeProblem of torch-ext/spec/merge.h."""

    _fields_ = [
        ("part", ctypes.c_void_p), ("lse", ctypes.c_void_p), ("out", ctypes.c_void_p),
        ("merged_lse", ctypes.c_void_p), ("merged_lse_given", ctypes.c_bool),
        ("memory_of_ranks", ctypes.c_void_p * MOST_PEERS), ("calls", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("dtype", "ranks", "rank", "rows", "row_pairs")),
        *((name, ctypes.c_int32) for name in ("tokens", "heads", "own_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in (
            "part_stride_token", "part_stride_head", "lse_stride_token", "lse_stride_head",
            "out_stride_token", "out_stride_head", "merged_lse_stride_token",
        )),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """The kernel as a library of tests/cuda/merge_with_peers.cpp."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    root = tmp_path_factory.mktemp("peers")
    source = (REPOSITORY / "paged_decode_cuda" / "merge_with_peers.cu").read_text()
    source = re.sub(r'#include .*\n|extern "C" [^;]*;\n', "", source)
    instructions = {
        r'asm volatile\("st\..*?\);': "store_word(&pair->words[0], tag | payload.x), "
        "store_word(&pair->words[1], tag | payload.y);",
        r'asm volatile\("ld\..*?\);': "x = load_word(&pair->words[0]), y = load_word(&pair->words[1]);",
    }
    for instruction, here in instructions.items():
        source, count = re.subn(instruction, here, source, flags=re.DOTALL)
        assert count == 1
    # What follows the kernel launches it.
    (root / "kernel.h").write_text(
        source[: source.index("const void* kernel_of")] + "}  // namespace\n}  // namespace\n"
    )
    command = [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-pthread", "-w", f"-I{REPOSITORY / 'torch-ext'}"]
    command += [f'-DKERNEL="{root / "kernel.h"}"', REPOSITORY / "tests/cuda/merge_with_peers.cpp"]
    subprocess.run([*command, "-o", root / "peers.so"], check=True)
    return ctypes.CDLL(str(root / "peers.so"))


@pytest.fixture
def call(request, device):
    """A call of one rank; it ends when the rank has found what it waits for."""
    if device == "mps":
        pytest.skip("a kernel of CUDA, which the CPU can run too")
    if device == "cpu":
        host = request.getfixturevalue("host")
        return lambda ranks, *given: host.run_alone(ctypes.byref(ranks.problem(*given)))
    merge = request.getfixturevalue("paged_attn")._ops.ops.merge_with_peers
    return lambda ranks, *given: merge(*ranks.arguments(*given))


class Ranks:
    """Ranks with memory of their own."""

    def __init__(self, count, head_dim, dtype, device):
        self.count, self.head_dim, self.dtype, self.device = count, head_dim, dtype, device
        self.row_pairs = -(-head_dim * dtype.itemsize // 8) + 1
        self.rows = MAX_TOKENS * HEADS
        # Places in turns, writers, rows, pairs, words of a pair, (payload, number of the call).
        shape = (2, count, self.rows, self.row_pairs, 2, 2)
        self.memory = [torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(count)]
        self.calls = [torch.zeros(self.rows, dtype=torch.int32, device=device) for _ in range(count)]

    def draw(self, tokens, heads, generator):
        """Parts with their lse, as attention returns it, and results filled with NaN. Some tokens have no key in a
        part, one has none in any: nobody has written values there."""
        parts = torch.randn(self.count, tokens, HEADS, self.head_dim, generator=generator).to(self.dtype)
        lse = torch.randn(self.count, HEADS, tokens, generator=generator).transpose(1, 2) * 4
        if tokens > 2:
            parts[0, 1], lse[0, 1] = torch.nan, -torch.inf
            parts[:, 2], lse[:, 2] = torch.nan, -torch.inf
        own = HEADS if heads == "all" else HEADS // self.count
        outs = torch.full((self.count, tokens, own, self.head_dim), torch.nan, dtype=self.dtype)
        return *(x.to(self.device) for x in (parts, lse, outs)), torch.full(outs.shape[:-1], torch.nan).to(self.device)

    def words(self, part, lse, numbers):
        """(rows, pairs, 2, 2): what a rank sends of its result."""
        rows = part[..., 0].numel()
        values = torch.zeros(rows, (self.row_pairs - 1) * 8, dtype=torch.uint8, device=self.device)
        values[:, : self.head_dim * self.dtype.itemsize] = part.reshape(rows, -1).contiguous().view(torch.uint8)
        payload = torch.zeros(rows, self.row_pairs, 2, dtype=torch.int32, device=self.device)
        payload[:, :-1] = values.view(torch.int32).view(rows, -1, 2)
        payload[:, -1, 0] = lse.reshape(rows).contiguous().view(torch.int32)
        return torch.stack((payload, numbers[:rows, None, None].expand_as(payload)), -1)

    def receive(self, rank, parts, lse, later=0):
        """Writes what the others send to this rank, for its next call or a later one."""
        numbers = self.calls[rank] + 1 + later
        for writer in set(range(self.count)) - {rank}:
            words = self.words(parts[writer], lse[writer], numbers)
            rows = torch.arange(len(words), device=self.device)
            self.memory[rank][(numbers[: len(words)] & 1).long(), writer, rows] = words

    def arguments(self, rank, part, lse, out, merged_lse):
        words = [memory.view(torch.int64).squeeze(-1) for memory in self.memory]
        return part, lse.unsqueeze(-1), self.calls[rank], out, merged_lse, words, rank

    def problem(self, rank, part, lse, out, merged_lse):
        p = Problem()
        for name, tensor in (
            ("part", part), ("lse", lse), ("out", out), ("merged_lse", merged_lse), ("calls", self.calls[rank])
        ):  # fmt: skip
            setattr(p, name, tensor.data_ptr())
        for i, memory in enumerate(self.memory):
            p.memory_of_ranks[i] = memory.data_ptr()
        p.merged_lse_given, p.dtype = True, HOST_DTYPES.index(self.dtype)
        p.ranks, p.rank, p.rows, p.row_pairs = self.count, rank, self.rows, self.row_pairs
        p.tokens, p.heads, p.own_heads, p.head_dim = part.shape[0], part.shape[1], out.shape[1], self.head_dim
        p.part_stride_token, p.part_stride_head = part.stride()[:2]
        p.lse_stride_token, p.lse_stride_head = lse.stride()
        p.out_stride_token, p.out_stride_head = out.stride()[:2]
        p.merged_lse_stride_token = merged_lse.stride(0)
        return p


def check(rank, parts, lse, out, merged_lse):
    expected = (parts.double().nan_to_num(0.0) * lse.double().softmax(0).nan_to_num(0.0).unsqueeze(-1)).sum(0)
    mine = slice(None) if out.shape[1] == HEADS else slice(rank * out.shape[1], (rank + 1) * out.shape[1])
    tolerance = TOLERANCE[parts.dtype]
    torch.testing.assert_close(out.double(), expected[:, mine], rtol=tolerance, atol=tolerance)
    expected_lse = lse.double().logsumexp(0)[:, mine]
    torch.testing.assert_close(merged_lse.double(), expected_lse, rtol=1e-6, atol=5e-6)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [128, 33, 512, 1])
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_one_rank_at_a_time(call, device, count, head_dim, dtype):
    """Calls of several lengths after each other, so that rows of the memory are used a different number of times."""
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the host's compiler has no bfloat16")
    generator = torch.Generator().manual_seed(count + head_dim)
    for rank in {0, count // 2, count - 1}:
        ranks = Ranks(count, head_dim, dtype, device)
        for tokens, heads in CALLS:
            parts, lse, outs, merged_lse = ranks.draw(tokens, heads, generator)
            ranks.receive(rank, parts, lse)
            before = [memory.clone() for memory in ranks.memory]
            sent = ranks.words(parts[rank], lse[rank], ranks.calls[rank] + 1)
            call(ranks, rank, parts[rank], lse[rank], outs[rank], merged_lse[rank])
            check(rank, parts, lse, outs[rank], merged_lse[rank])
            rows = torch.arange(tokens * HEADS, device=device)
            numbers = ranks.calls[rank][: len(rows)]
            for reader in set(range(count)) - {rank}:
                gets = (rows % HEADS) // (HEADS // count) == reader if heads == "own" else rows >= 0
                before[reader][(numbers & 1).long()[gets], rank, rows[gets]] = sent[gets]
            assert all(torch.equal(x, y) for x, y in zip(ranks.memory, before, strict=True))


@pytest.mark.parametrize("dtype", HOST_DTYPES, ids=str)
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_side_by_side(host, device, count, dtype):
    """None of the calls waits for the ranks to meet; everybody gets the same bits."""
    if device != "cpu":
        pytest.skip("runs on the CPU")
    generator, ranks = torch.Generator().manual_seed(count), Ranks(count, 33, dtype, "cpu")
    drawn = [ranks.draw(tokens, heads, generator) for tokens, heads in CALLS]
    problems = [ranks.problem(rank, *(x[rank] for x in tensors)) for rank in range(count) for tensors in drawn]
    host.run_ranks((Problem * len(problems))(*problems), count, len(CALLS))
    for (parts, lse, outs, merged_lse), (_, heads) in zip(drawn, CALLS, strict=True):
        for rank in range(count):
            check(rank, parts, lse, outs[rank], merged_lse[rank])
            assert heads == "own" or torch.equal(outs[rank], outs[0])


def only_on_cuda(device):
    if torch.device(device).type != "cuda":
        pytest.skip("the operator is one of CUDA")


def test_graph(paged_attn, device):
    """The number of a call is counted on the device, so replays go on counting."""
    only_on_cuda(device)
    ranks, generator = Ranks(2, 128, torch.bfloat16, device), torch.Generator().manual_seed(0)
    drawn = [ranks.draw(4, "all", generator) for _ in range(2)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for parts, lse, outs, merged_lse in drawn:
            paged_attn._ops.ops.merge_with_peers(*ranks.arguments(1, parts[1], lse[1], outs[1], merged_lse[1]))
    for _ in range(5):
        for later, (parts, lse, _, _) in enumerate(drawn):
            parts.normal_(), lse.normal_()
            ranks.receive(1, parts, lse, later)
        graph.replay()
        for parts, lse, outs, merged_lse in drawn:
            check(1, parts, lse, outs[1], merged_lse[1])


def test_opcheck(paged_attn, device):
    only_on_cuda(device)
    ranks = Ranks(1, 64, torch.float16, device)
    tensors = (x[0] for x in ranks.draw(3, "all", torch.Generator()))
    merge = paged_attn._ops.ops.merge_with_peers.default
    torch.library.opcheck(merge, ranks.arguments(0, *tensors), test_utils=["test_schema", "test_faketensor"])


WRONG = {
    "part": lambda part: part.double(),
    "part_lse": lambda part_lse: part_lse[..., 0],
    "calls": lambda calls: calls[:8],
    "out": lambda out: out[:, :5],
    "memory_of_ranks": lambda memory: memory * 9,  # more ranks than a host has
    "memory_of_ranks: one rank has too few rows": lambda memory: [memory[0], memory[1][:, :, :-1]],
    "memory_of_ranks: made for more ranks": lambda memory: [torch.cat([x, x], 1) for x in memory],
    "memory_of_ranks: too short for a row": lambda memory: [x[..., :16, :].contiguous() for x in memory],
    "memory_of_ranks: not contiguous": lambda memory: [x.transpose(0, 4) for x in memory],
    "memory_of_ranks: other words": lambda memory: [x.double() for x in memory],
    "memory_of_ranks: none": lambda memory: [],
    "rank": lambda rank: 2,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors(paged_attn, device, wrong):
    only_on_cuda(device)
    ranks, name = Ranks(2, 64, torch.float16, device), wrong.partition(":")[0]
    names = ("part", "part_lse", "calls", "out", "lse", "memory_of_ranks", "rank")
    tensors = (x[0] for x in ranks.draw(3, "all", torch.Generator()))
    right = dict(zip(names, ranks.arguments(0, *tensors), strict=True))
    with pytest.raises(RuntimeError, match=rf"^{name}: expected .*, got "):
        paged_attn._ops.ops.merge_with_peers(**(right | {"lse": None, name: WRONG[wrong](right[name])}))
