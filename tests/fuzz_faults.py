"""Makes one argument of a good random call bad, and says which name the error must hold."""

import torch
from fuzz_calls import is_ignored, locality, visible

NEUTRAL_ALONE = ("cu_seqlens_k_new", "rotary_seqlens")  # not looked at without their tensors
# The message may name the tensor that fixed a size instead of the one that was spoiled.
PARTNERS = {
    "q": "q|k_cache|k:|out|head|rotary_cos", "k": "k|v|head", "v": "v|k|head", "k_cache": "k_cache|v_cache|head|q:",
    "v_cache": "v_cache|k_cache|head", "rotary_cos": "rotary", "rotary_sin": "rotary", "page_table": "_table",
    "block_table": "_table|k_cache|k:", "s_aux": "s_aux|sinks", "sinks": "s_aux|sinks",
    "seqused_k": "seqused_k|cache_seqlens",
}  # fmt: skip


def named(name):
    return PARTNERS.get(name, name)


def tensors(call, *kinds):
    asked = [n for n, x in call.arguments.items() if isinstance(x, torch.Tensor) and n != "scheduler_metadata"]
    if "k" not in call.arguments:
        asked = [n for n in asked if n not in NEUTRAL_ALONE]
    if "rotary_cos" not in call.arguments:
        asked = [n for n in asked if n != "rotary_seqlens"]
    asked = [n for n in asked if not (n.endswith("_descale") and is_ignored(call.arguments, n))]
    return [n for n in asked if not kinds or n in kinds]


def wrong_dtype(call, dice):
    name = dice.choice(tensors(call))
    x = call.arguments[name]
    wrong = torch.int16 if x.dtype.is_floating_point else torch.float32
    call.arguments[name] = torch.zeros(x.shape, dtype=wrong)
    return named(name)


def one_dimension_more(call, dice):
    # One row of slopes may serve every request, and a packed k looks like an unpacked one.
    names = [n for n in tensors(call) if n not in ("alibi_slopes", "q", "k", "v")]
    if not names:
        return ""
    name = dice.choice(names)
    call.arguments[name] = call.arguments[name][None]
    return named(name)


def elsewhere(call, dice):
    name = dice.choice(tensors(call))
    call.arguments[name] = call.arguments[name].to("meta")
    return "device|meta"


def one_entry_more(call, dice):
    kinds = ("cache_seqlens", "cache_leftpad", "cache_batch_idx", "cu_seqlens_k", "cu_seqlens_k_new", "s_aux", "sinks",
             "seqused_k", "rotary_seqlens")  # fmt: skip
    names = tensors(call, *kinds)
    if call.base == "kv_paged_write":
        names = [n for n in names if n == "cache_seqlens" and "slot_mapping" not in call.arguments]
    if not names:
        return ""
    name = dice.choice(names)
    x = call.arguments[name]
    call.arguments[name] = torch.cat([x, x[-1:] if len(x) else torch.zeros(1, dtype=x.dtype)])
    return named(name)


def table_given(call):
    return "block_table" in call.arguments or "page_table" in call.arguments


def bad_scalar(call, dice):
    if call.base == "kv_paged_write":
        return ""
    name, value = dice.choice(
        [("softcap", -1.0), ("softcap", float("nan")), ("num_splits", -1), ("attention_chunk", -3),
         ("window_size", (-2, 0)), ("window_size", (3, -7))]
    )  # fmt: skip
    if name == "window_size" and value[1] == -7:
        call.arguments["causal"] = False
    call.arguments[name] = value
    return name


def half_of_a_pair(call, dice):
    pairs = [p for p in (("k", "v"), ("rotary_cos", "rotary_sin")) if p[0] in call.arguments]
    if not pairs or call.base != "flash_attn_with_kvcache":
        return ""
    pair = dice.choice(pairs)
    del call.arguments[dice.choice(pair)]
    return "rotary" if "rotary_cos" in pair else "k and v|k:|v:"


def asks_for_a_gradient(call, dice):
    kinds = ("q", "k", "v", "k_cache", "v_cache", "qv", "s_aux", "sinks", "alibi_slopes", "q_descale", "k_descale",
             "v_descale", "rotary_cos", "rotary_sin", "out")  # fmt: skip
    name = dice.choice(tensors(call, *kinds))
    call.arguments[name] = call.arguments[name].detach().clone().requires_grad_()
    return named(name) if name in ("s_aux", "sinks") else name


def strided_last_dimension(call, dice):
    names = [n for n in tensors(call, "k_cache", "v_cache", "out") if call.arguments[n].shape[-1] > 1]
    names = [n for n in names if call.arguments[n].numel()]
    if not names:
        return ""
    name = dice.choice(names)
    call.arguments[name] = torch.stack([call.arguments[name]] * 2, -1)[..., 0]
    return name


def unknown_keyword(call, dice):
    name = dice.choice(("block_tabel", "score_mod", "seqlens"))
    call.arguments[name] = 1
    return name


def both_names(call, dice):
    pairs = [(a, b) for a, b in (("block_table", "page_table"), ("page_table", "block_table"), ("s_aux", "sinks"),
                                 ("sinks", "s_aux")) if a in call.arguments]  # fmt: skip
    if not pairs or call.base == "kv_paged_write":
        return ""
    a, b = dice.choice(pairs)
    call.arguments[b] = call.arguments[a]
    return b


def dropout(call, dice):
    if call.base not in ("flash_attn_func", "flash_attn_varlen_func"):
        return ""
    call.arguments["dropout_p"] = 0.1
    return "dropout_p"


# Only the values of a tensor tell, which a GPU does not look at.


def entry(call, name, index, value):
    call.arguments[name] = call.arguments[name].clone()
    call.arguments[name][index] = value
    call.by_value = True
    return named(name)


def bad_length(call, dice):
    names = tensors(call, "cache_seqlens", "seqused_k")
    if not names or not len(call.arguments[names[0]]) or "slot_mapping" in call.arguments:
        return ""
    x = call.arguments[names[0]]
    value = dice.choice((2**31 - 1, -(2**31), 1_000_000))
    return entry(call, names[0], dice.randrange(len(x)), value) + "|block_table|rotary|page_table"


def bad_page(call, dice):
    """Where a token is written or a key is read; the draw wrote wild numbers only where nobody looks."""
    names = tensors(call, "block_table", "page_table")
    if not names or "slot_mapping" in call.arguments:
        return ""
    page_size = next(call.arguments[n] for n in ("k_cache", "k") if n in call.arguments).shape[1]
    if call.base == "flash_attn_with_kvcache":
        page_size = call.arguments["k_cache"].shape[1]
    wanted = []
    for request in call.requests:
        used = visible(request, *locality(call.arguments)).any(0)
        used[request.old_len :] = True
        wanted += [(request.row, int(j) // page_size) for j in used.nonzero()[:, 0]]
    if not wanted:
        return ""
    return entry(call, names[0], dice.choice(wanted), dice.choice((-1, 2147480000, 1 << 20))) + "|block_table"


def bad_leftpad(call, dice):
    if not tensors(call, "cache_leftpad") or not call.requests:
        return ""
    return entry(call, "cache_leftpad", dice.randrange(len(call.requests)), -1 - dice.randrange(5))


def bad_row(call, dice):
    """Of a request that has keys: an idle one may name any row."""
    wanted = [b for b, request in enumerate(call.requests) if request.kv_len > 0]
    if not tensors(call, "cache_batch_idx") or not wanted:
        return ""
    return entry(call, "cache_batch_idx", dice.choice(wanted), dice.choice((-1, 1 << 20)))


def bad_ends(call, dice):
    names = tensors(call, "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new")
    names = [n for n in names if not (n == "cu_seqlens_k" and "seqused_k" in call.arguments and table_given(call))]
    if not names or not call.requests:
        return ""
    name = dice.choice(names)
    index, value = dice.choice(((0, 1), (-1, 1 << 20), (1, -1)))
    if name == "cu_seqlens_k" and table_given(call) and index == 0:
        return ""
    return entry(call, name, index, value) + "|seqused_k|cache_seqlens|rotary"


def too_short_a_hint(call, dice):
    """max_seqlen_q below the longest q_len: a device that cannot see that writes every row all the same."""
    longest = max((r.q_len for r in call.requests), default=0)
    if "cu_seqlens_q" not in call.arguments or longest == 0:
        return ""
    call.arguments["max_seqlen_q"] = dice.randrange(longest)
    call.by_value = call.harmless = True
    return "max_seqlen_q"


def bad_slot(call, dice):
    if "slot_mapping" not in call.arguments or not any(r.new_len for r in call.requests):
        return ""
    slots = call.arguments["slot_mapping"]
    index = next(r.new_begin for r in call.requests if r.new_len)
    call.arguments["slot_mapping"] = slots.long()
    return entry(call, "slot_mapping", index if slots.numel() > index else 0, 2**40)


FAULTS = (
    wrong_dtype, wrong_dtype, one_dimension_more, elsewhere, one_entry_more, bad_scalar, half_of_a_pair,
    asks_for_a_gradient, strided_last_dimension, unknown_keyword, both_names, dropout,
    # What few calls have an argument for, several times.
    *(bad_length, bad_page, bad_ends, too_short_a_hint) * 2, *(bad_leftpad, bad_row, bad_slot) * 4,
)  # fmt: skip


def break_call(call, dice):
    for fault in dice.sample(FAULTS, len(FAULTS)):
        name = fault(call, dice)
        if name:
            call.fault = name
            call.features = {f"refused: {fault.__name__}", f"refused by {call.function}"}
            return
