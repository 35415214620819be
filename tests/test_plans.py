"""The plans of the CPU and of Metal, without running them: every (row, key) is somebody's, once; shares, grids and
workspaces stay within bounds. CUDA's: test_cuda_plans.py.
"""

import heapq
import itertools
import math
import random
import time

import pytest


def random_batch(rng, most=6):
    """A call of a few requests, packed or padded, and what each row of each request sees."""
    batch = rng.randint(0, most)
    packed = rng.random() < 0.6
    longest = rng.choice((1, 1, 3, 20, 90))
    q_lens = [rng.choice((0, 1, longest, rng.randint(0, longest))) for _ in range(batch)]
    if not packed:
        q_lens = [longest] * batch
    lens = [rng.choice((0, 1, 33, rng.randint(0, 200), rng.choice((700, 3000)))) for _ in range(batch)]
    room = max([16, *lens])
    call = {
        "batch": batch, "kv_heads": rng.choice((1, 2, 3, 8)), "group": rng.choice((1, 2, 4, 7)),
        "head_dim": rng.choice((64, 80, 128, 256)), "cache_seqlens": lens, "max_q_len": max(q_lens, default=0),
        "total_q": sum(q_lens) + (rng.choice((0, 3)) if packed else 0), "page_size": room,
        "window_right": rng.choice((-1, 0, 0)), "window_left": rng.choice((-1, -1, 50)),
        "num_splits": rng.choice((0, 0, 0, 1, 3, 1000)), "deterministic": int(rng.random() < 0.2),
        "attention_chunk": rng.choice((0, 0, 0, 64)), "max_seqlen_k": rng.choice((-1, -1, 0, 1, max(lens, default=0))),
    }  # fmt: skip
    if packed:
        call["cu_seqlens_q"] = [0, *itertools.accumulate(q_lens)]
    return call, q_lens, lens


def row_keys(native, call, q_lens, lens, b, row):
    token = row // call["group"]
    return native.spec.visible_keys(
        lens[b] - q_lens[b] + token, lens[b], 0, call["window_left"], call["window_right"], call["attention_chunk"]
    )


def assert_cover(wanted, shares):
    """Shares of keys, in any order, hold each key of the range `wanted` once."""
    begin, end = wanted
    clipped = sorted((max(a, begin), min(b, end)) for a, b in shares if max(a, begin) < min(b, end))
    assert [a for a, _ in clipped] == [begin, *(b for _, b in clipped)][: len(clipped)], (wanted, shares)
    assert begin >= end or (clipped and clipped[-1][1] == end), (wanted, shares)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_cpu_carves_no_more_than_it_asks_for(native, dtype):
    """Whatever a row of the cache holds, the memory of a task suffices for it and for a token done once more."""
    for heads, dim, rows, one_token, small in itertools.product(
        (1, 2, 3, 4, 8, 16), (32, 64, 80, 128, 192, 256, 512), (1, 4, 7, 8, 16, 23, 24), (True, False), (True, False)
    ):
        call = {"kv_heads": heads, "group": rows if one_token else 1, "head_dim": dim, "cache_dtype": dtype}
        asked, carved = native.scratch.bytes(call, heads, rows, small)
        assert carved <= asked, (heads, dim, rows, one_token, small)


def test_cpu_covers_every_key_once(native):
    rng = random.Random(5)
    for _ in range(2000):
        call, q_lens, lens = random_batch(rng)
        threads = rng.choice((1, 2, 7, 64))
        plan = native.cpu.plan(call, threads)
        owner = {}
        for work in plan["works"]:
            for head, row in itertools.product(range(*work["heads"]), range(*work["rows"])):
                assert owner.setdefault((work["batch"], head, row), work) is work, "a row of two items"
        rows = [
            (b, h, r) for b, n in enumerate(q_lens) for h in range(call["kv_heads"]) for r in range(n * call["group"])
        ]
        assert sorted(owner) == rows
        for b, head, row in rng.sample(rows, min(20, len(rows))):
            assert_cover(row_keys(native, call, q_lens, lens, b, row), owner[b, head, row]["splits"])
        # Each split is one item, the longest first; partial results lie beside each other.
        assert sorted(task[:2] for task in plan["tasks"]) == [
            (w, s) for w, work in enumerate(plan["works"]) for s in range(len(work["splits"]))
        ]
        costs = [cost for _, _, cost in plan["tasks"]]
        assert costs == sorted(costs, reverse=True)
        partials = sorted(w["partial"] for w in plan["works"] if w["partial"][0] < w["partial"][1])
        assert all(a[1] == b[0] for a, b in itertools.pairwise(partials))
        assert plan["partial_floats"] == (partials[-1][1] if partials else 0)


@pytest.mark.parametrize("threads", [1, 2, 8, 96])
def test_cpu_keeps_all_threads_busy(native, threads):
    """One long request is cut for all threads; with as many requests as threads nothing is."""
    call = {"cache_seqlens": [131072], "page_size": 131072, "kv_heads": 8, "head_dim": 128}
    one = native.cpu.plan(call, threads)
    assert len(one["tasks"]) >= threads
    lengths = [end - begin for begin, end in one["works"][0]["splits"]]
    if threads < native.cpu.many_threads:
        assert max(lengths) - min(lengths) <= native.cpu.split_align * len(lengths)
        many = {"batch": 64 * threads, "cache_seqlens": [2048] * 64 * threads, "page_size": 2048, "kv_heads": 8}
        assert native.cpu.plan(many, threads)["partial_floats"] == 0


@pytest.mark.parametrize("threads", [8, 16, 32, 96])
@pytest.mark.parametrize("batch, keys", [(1, 131072), (8, 4096), (3, 20000), (200, 512)])
def test_cpu_tasks_of_many_threads_end_together(native, threads, batch, keys):
    """Each task is at most a small share, for every thread, of what is left, so that no thread is alone at the end, and
    none is so short that its beginning costs more than it evens out."""
    call = {"batch": batch, "cache_seqlens": [keys] * batch, "page_size": keys, "group": 4, "kv_heads": 8}
    plan = native.cpu.plan(call | {"head_dim": 128}, threads)
    left = batch * keys
    fewest = max(native.cpu.last_task_keys, min(native.cpu.last_task_bytes // (8 * 256 * 2), left // threads))
    lengths = [end - begin for work in plan["works"] for begin, end in work["splits"]]
    for length in lengths:
        assert length <= max(left / (native.cpu.task_shares * threads), fewest) * 1.5 + native.cpu.split_align
        left -= length
    assert left == 0 and min(lengths) >= fewest // 2 and lengths[-1] <= 2 * fewest + native.cpu.split_align


def test_cpu_cuts_heads_where_keys_are_few(native):
    """Every thread that pays gets a task, also where the keys alone are too few to be cut for all."""
    for keys, batch, threads in itertools.product((2048, 4096, 16384), (1, 2, 5), (2, 4, 8, 16, 32)):
        call = {"batch": batch, "cache_seqlens": [keys] * batch, "page_size": 16384, "group": 4, "kv_heads": 8}
        plan = native.cpu.plan(call | {"head_dim": 128}, threads)
        assert len(plan["tasks"]) >= min(plan["threads"], 8 * batch * (keys // 256)) * 3 // 4
        if batch * keys >= 16384:
            assert all(work["heads"] == (0, 8) for work in plan["works"]), "the keys can be cut for all"


def end_of_small_call(native, call, plan):
    """When the last thread ends, in keys: each takes the longest task that is left."""
    costs, threads = [], [0] * plan["threads"]
    for work in plan["works"]:
        heads, splits = work["heads"][1] - work["heads"][0], work["splits"]
        beside = native.cpu.begin_keys + heads * native.cpu.head_keys
        if len(splits) > 1:
            beside += native.cpu.merge_keys + native.cpu.partial_keys * heads * len(splits)
        percent = 100 + (call.get("part_of_slot", 0) if heads < call["kv_heads"] else 0)
        costs += [heads * ((end - begin) * percent // 100) + beside for begin, end in splits]
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(threads, threads[0] + cost)
    return max(threads)


@pytest.mark.parametrize("part_of_slot", [0, 40])
@pytest.mark.parametrize(
    "kv_heads, batch, keys",
    [(8, 1, 512), (8, 1, 300), (2, 1, 900), (1, 3, 700), (5, 2, 333), (1, 1, 2048), (1, 1, 4096), (2, 1, 2048)],
)
def test_cpu_short_calls_gain_from_every_thread(native, kv_heads, batch, keys, part_of_slot):
    """More threads never make a call longer, and what it takes is near an equal share, or near what splits cost."""
    call = {"batch": batch, "cache_seqlens": [keys] * batch, "page_size": keys, "group": 32, "kv_heads": kv_heads}
    call |= {"head_dim": 128, "part_of_slot": part_of_slot}
    before, aligned = math.inf, native.cpu.split_align * kv_heads
    for threads in range(1, 65):
        plan = native.cpu.plan(call, threads)
        if plan["threads"] < threads:
            break
        end = end_of_small_call(native, call, plan)
        assert end <= before
        share, splits = batch * keys * kv_heads / threads, math.isqrt(native.cpu.partial_keys * keys)
        assert end <= 2 * (share + native.cpu.merge_keys + kv_heads * native.cpu.head_keys + splits) + aligned
        before = end


def test_cpu_short_calls_cut_the_long_request(native):
    """A long request beside short ones is shared out, and hardly ever does one more thread make a call longer."""
    rng, longer = random.Random(10), 0
    for _ in range(100):
        lens = [rng.choice((1, rng.randint(1, 100))) for _ in range(rng.randint(1, 7))] + [rng.randint(500, 2000)]
        call = {"batch": len(lens), "cache_seqlens": lens, "page_size": 2000, "group": 8, "head_dim": 64}
        call |= {"kv_heads": rng.choice((1, 2, 8)), "part_of_slot": rng.choice((0, 40))}
        before = alone = end_of_small_call(native, call, native.cpu.plan(call, 1))
        for threads in range(2, 33):
            plan = native.cpu.plan(call, threads)
            if plan["threads"] < threads:
                break
            end = end_of_small_call(native, call, plan)
            assert end <= 1.25 * before
            assert plan["threads"] < 4 or end < 0.7 * alone
            longer += end > 1.05 * before
            before = min(end, before)
    assert longer <= 10


def hide_keys(rng, align, q_len):
    """What hides the first keys of a request from all of its rows: arguments, padding, and how many are hidden and are
    there in all. The hidden ones are a multiple of `align`, so that the others are cut as in a cache of their own."""
    kind = rng.choice(("window", "chunk", "leftpad"))
    hidden, seen = rng.choice((0, 1, 40, 6000)) * align, q_len + rng.randint(1, rng.choice((100, 2000)))
    options, padding = {"window_right": 0}, {}
    if kind == "window":
        options["window_left"] = seen - q_len
    elif kind == "chunk":  # all rows lie in one
        chunk = options["attention_chunk"] = align * (1 + seen // align)
        hidden = hidden // chunk * chunk
    else:
        padding["cache_leftpad"] = [hidden]
    return options, padding, hidden, hidden + seen


def test_cpu_plans_for_the_keys_that_rows_see(native):
    """Keys that a window, a chunk or padding hides from all rows cost nothing: the plan is that of a cache without
    them."""
    rng = random.Random(9)
    for _ in range(1000):
        q_len, threads = rng.choice((1, 1, 1, 3, 40)), rng.choice((1, 2, 8, 32))
        call = {"group": rng.choice((1, 4, 8)), "kv_heads": rng.choice((1, 2, 8)), "head_dim": rng.choice((64, 128))}
        call |= {"max_q_len": q_len, "page_size": 2**20}
        options, padding, hidden, keys = hide_keys(rng, native.cpu.split_align, q_len)
        plan = native.cpu.plan(call | options | padding | {"cache_seqlens": [keys]}, threads)
        alone = native.cpu.plan(call | options | {"cache_seqlens": [keys - hidden]}, threads)
        for work in plan["works"]:
            work["splits"] = [(begin - hidden, end - hidden) for begin, end in work["splits"]]
        assert plan == alone, (call, options, padding, threads)


def test_cpu_shares_out_a_window(native):
    """The sliding layers of gpt-oss: a window of 128 keys takes the threads that 128 keys take."""
    call = {"group": 8, "kv_heads": 8, "cache_seqlens": [100000], "page_size": 100000}
    plan = native.cpu.plan(call | {"window_left": 127, "window_right": 0}, 8)
    assert len(plan["tasks"]) == plan["threads"] == 8


def test_cpu_short_calls_take_few_threads(native):
    """A call of a few keys has nothing to share out; the longer a call is, the more threads it takes."""
    taken = []
    for keys in (1, 16, 64, 256, 1024, 4096, 65536):
        call = {"cache_seqlens": [keys], "page_size": 65536, "group": 4, "kv_heads": 8, "head_dim": 128}
        assert native.cpu.plan(call, 1)["threads"] == 1
        taken.append(native.cpu.plan(call, 32)["threads"])
    assert taken == sorted(taken) and taken[:2] == [1, 1] and taken[2] == 4 and taken[-1] == 32
    many = {"batch": 64, "cache_seqlens": [1] * 64, "page_size": 1, "group": 4, "kv_heads": 8, "head_dim": 128}
    assert native.cpu.plan(many, 32)["threads"] > 8, "rows of few keys count too"


def test_cpu_plans_one_thread_in_no_time(native):
    """With one thread there is nothing to choose: many kv_heads take no longer than one, whatever the batch. (Most of
    these requests have no tokens, so that time goes to the plan alone.)"""
    batch = 100000
    call = {"batch": batch, "cache_seqlens": [0] * batch, "head_dim": 1}
    call |= {"cu_seqlens_q": [0] * batch + [1], "total_q": 1, "page_size": 1}

    def seconds(kv_heads):
        times = []
        for _ in range(5):
            start = time.process_time()
            native.cpu.plan(call | {"kv_heads": kv_heads}, 1)
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(128) < 3 * seconds(1)


@pytest.mark.parametrize("q_len", [512, 1024, 2048])
def test_cpu_prefill_has_items_for_all_threads(native, q_len):
    """Some items for every thread, as long as none gets so short that its keys are read too often."""
    call = {"cache_seqlens": [2048], "max_q_len": q_len, "page_size": 2048, "group": 4, "kv_heads": 8, "head_dim": 128}
    for threads in (1, 8, 16, 32):
        plan = native.cpu.plan(call, threads)
        longest = max(end - begin for begin, end in (work["rows"] for work in plan["works"]))
        assert len(plan["works"]) >= 4 * threads or longest <= 128
        assert longest == 240 or len(plan["works"]) < 8 * threads
        whole = native.cpu.plan(call | {"deterministic": 1}, threads)
        assert whole["works"] == native.cpu.plan(call | {"deterministic": 1}, 1)["works"]


def test_cpu_splits_as_asked(native):
    for asked, keys in itertools.product((1, 2, 5, 1000, 2**40), (0, 1, 15, 16, 17, 5000)):
        plan = native.cpu.plan({"cache_seqlens": [keys], "page_size": 5000, "num_splits": asked}, 4)
        assert [len(w["splits"]) for w in plan["works"]] == [max(1, min(asked, math.ceil(keys / 16)))]


def test_cpu_deterministic_plans_see_no_other_request(native):
    rng = random.Random(6)
    for _ in range(300):
        lens = [rng.randint(0, 9000) for _ in range(5)]
        call = {"kv_heads": 2, "deterministic": 1, "page_size": 9000, "head_dim": 128}
        whole = native.cpu.plan(call | {"batch": 5, "cache_seqlens": lens}, rng.choice((1, 3, 16)))
        for b, kv_len in enumerate(lens):
            alone = native.cpu.plan(call | {"batch": 1, "cache_seqlens": [kv_len]}, 2)
            assert [w["splits"] for w in whole["works"] if w["batch"] == b] == [w["splits"] for w in alone["works"]]


CUTS = [{"deterministic": 1}, {"num_splits": 10**9}, {"deterministic": 1, "num_splits": 10**9}]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_cpu_partial_results_have_a_bound(native, cuts):
    """32 MiB for each request. The cuts of a request see neither the others nor the threads, prompts included."""
    rng = random.Random(7)
    for _ in range(100):
        lens, q_len = [rng.choice((0, 700, 30000, 131072)) for _ in range(3)], rng.choice((1, 4, 33, 500, 4096))
        call = {"kv_heads": 2, "group": rng.choice((1, 16)), "page_size": 131072, "head_dim": 128, "max_q_len": q_len}
        whole = native.cpu.plan(call | cuts | {"batch": 3, "cache_seqlens": lens}, rng.choice((1, 3, 16)))
        for b, kv_len in enumerate(lens):
            works = [(w["rows"], w["heads"], w["splits"]) for w in whole["works"] if w["batch"] == b]
            alone = native.cpu.plan(call | cuts | {"batch": 1, "cache_seqlens": [kv_len]}, 2)
            assert alone["partial_floats"] * 4 <= 2**25
            if "deterministic" in cuts:
                assert works == [(w["rows"], w["heads"], w["splits"]) for w in alone["works"]]
        assert whole["partial_floats"] * 4 <= 3 * 2**25


def test_cpu_counts_beyond_32_bits(native):
    """2^31 - 1 keys, and shares of them; no length wraps."""
    kv_len = 2**31 - 1
    call = {"cache_seqlens": [kv_len], "page_size": kv_len, "kv_heads": 8, "head_dim": 256, "group": 16}
    plan = native.cpu.plan(call, 96)
    for work in plan["works"]:
        assert_cover((0, kv_len), work["splits"])
    assert plan["partial_floats"] > 0 and all(0 < cost < 2**62 for _, _, cost in plan["tasks"])


ROUTES = ("prefill", "decode", "wide")


def metal_route(native, call):
    return next(name for name, reason in native.metal.why_not(call).items() if not reason)


def test_metal_covers_every_key_once(native):
    """Over the grids of a call: the threadgroups that own a row hold each key that it sees, once."""
    rng, taken = random.Random(7), set()
    for _ in range(1500):
        call, q_lens, lens = random_batch(rng, most=4)
        if not call["total_q"] or not call["batch"]:
            continue
        call |= rng.choice(({}, {"head_dim": 512}, {"qv": 1}))
        route = metal_route(native, call)
        taken.add(route)
        shares = {}
        for items in native.metal.deal(call, route).values():
            for b, head, first_row, rows, begin, end, split, splits in items:
                assert split < splits
                for row in range(first_row, first_row + rows):
                    shares.setdefault((b, head, row), []).append((begin, end, split, splits))
        rows = [
            (b, h, r) for b, n in enumerate(q_lens) for h in range(call["kv_heads"]) for r in range(n * call["group"])
        ]
        assert sorted(shares) == rows, "a row that no threadgroup writes, or one that does not exist"
        for b, head, row in rng.sample(rows, min(20, len(rows))):
            found = shares[b, head, row]
            assert sorted(split for *_, split, _ in found) == list(range(found[0][3])), "a split twice or not at all"
            assert_cover(row_keys(native, call, q_lens, lens, b, row), [(a, e) for a, e, *_ in found])
    assert taken == set(ROUTES)


def test_metal_grids_and_workspaces_are_bounded(native):
    """Threadgroups grow with the tokens and the requests, not with their product, whatever max_seqlen_q says; with more
    splits of few requests only up to what keeps the GPU busy."""
    rng = random.Random(8)
    for _ in range(500):
        batch, tokens = rng.randint(1, 300), rng.randint(1, 3000)
        cuts = sorted(rng.randint(0, tokens) for _ in range(batch - 1))
        call = {
            "batch": batch, "cu_seqlens_q": [0, *cuts, tokens], "total_q": tokens, "kv_heads": 4, "group": 4,
            "cache_seqlens": [4096] * batch, "page_size": 4096,
            "max_q_len": rng.choice((1, tokens, 2**31 // 4 - 1)),
        }  # fmt: skip
        plan = native.metal.plan(call, metal_route(native, call))
        for kernel, width, height, depth, threads in plan["dispatches"]:
            assert 0 < threads <= 1024 and threads % 32 == 0
            if kernel != "merge":
                assert width * height * depth <= 4 * (tokens * 4 + batch) + 16 * 1024 * 4
        partials = batch * 4 * plan["split_rows"] * plan["max_splits"] if plan["max_splits"] > 1 else 0
        assert plan["max_splits"] <= 64 and partials <= 4 * 16 * 1024 * 64


def test_metal_plans_by_max_seqlen_k(native):
    """As in a cache that holds no more keys, but where cuts are fixed."""
    for keys, options in itertools.product((0, 40, 600, 5000), ({}, {"max_q_len": 40}, {"batch": 30})):

        def plan_of(options=options, **own):
            call = {"kv_heads": 2, "group": 2, "head_dim": 64} | options | own
            return native.metal.plan(call, metal_route(native, call))

        said = plan_of(page_size=100_000, max_seqlen_k=keys)
        assert said == plan_of(page_size=max(keys, 1)) | {"dispatches": said["dispatches"]}
        for fixed in ({"num_splits": 3}, {"deterministic": 1}):
            wide = {"page_size": 100_000} | fixed
            assert plan_of(**wide, max_seqlen_k=keys) == plan_of(**wide), "a hint has changed what must not change"


def test_metal_counts_to_the_edge_of_32_bits(native):
    """The largest call that the backend takes: no tile or grid wraps."""
    tokens = (2**31 - 1) // 8
    for packed in (False, True):
        call = {"batch": 1, "group": 8, "total_q": tokens, "max_q_len": tokens, "page_size": 2**30 - 1}
        if packed:
            call |= {"cu_seqlens_q": [0, tokens]}
        for route in ROUTES:
            plan = native.metal.plan(call, route)
            rows = plan["prefill_rows"] or plan["rows"]
            kernel, width, *_ = plan["dispatches"][0]
            assert tokens * 8 // rows <= width < 2**31, (route, kernel)
