"""The contract in float64 on the CPU, written to be checked by eye; the tests compare every backend with it.

Arguments are named and shaped as in `flash_attn_with_kvcache`. Only keys that a row may see are ever indexed, so a NaN
anywhere else cannot reach the result. Nothing here calls the package or PyTorch's own attention.
"""

import torch

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # indexing by bits works for every dtype, fp8 included


def per_request(x, cu_seqlens):
    """The [tokens, heads, dim] of each request, from (batch, tokens, ...) or packed (total, ...)."""
    if cu_seqlens is None:
        return list(x)
    ends = cu_seqlens.tolist()
    return [x[begin:end] for begin, end in zip(ends, ends[1:])]


def visible_keys(q_pos, kv_len, leftpad=0, window_left=-1, window_right=-1, attention_chunk=0):
    """Positions of the keys that the row at q_pos sees."""
    keys = range(leftpad, kv_len)
    if window_left >= 0:
        keys = [j for j in keys if j >= q_pos - window_left]
    if window_right >= 0:
        keys = [j for j in keys if j <= q_pos + window_right]
    if attention_chunk > 0:
        chunk = (q_pos - leftpad) // attention_chunk  # counted from the first key that exists
        keys = [j for j in keys if (j - leftpad) // attention_chunk == chunk]
    return list(keys)


def place(cache, block_table, row, positions):
    """(page, slot) of each key position; a contiguous cache is one long page per row."""
    if block_table is None:
        return torch.full((len(positions),), row), torch.tensor(positions, dtype=torch.int64)
    page_size, table = cache.shape[1], block_table[row].tolist()
    index = [(table[j // page_size], j % page_size) for j in positions]
    return tuple(torch.tensor(index, dtype=torch.int64).view(-1, 2).T)


def read(cache, block_table, row, positions, descale=None):
    """[positions, kv_heads, dim] of one request: value = stored * descale."""
    stored = cache.view(BITS[cache.itemsize])[place(cache, block_table, row, positions)].view(cache.dtype).double()
    return stored if descale is None else stored * descale.double()[:, None]


def stored_as(x, descale, dtype):
    """x in the dtype of the cache; fp8 holds x / descale, saturating. What is fp8 already is stored as it is."""
    if dtype.itemsize > 1 or x.dtype == dtype:
        return x.to(dtype)
    x, limit = x.double(), torch.finfo(dtype).max
    return (x if descale is None else x / descale.double()[:, None]).clamp(-limit, limit).to(dtype)


def rotate(x, positions, cos, sin, interleaved):
    """Rotary embedding of [tokens, heads, dim]; pairs are neighbours (interleaved) or half a rotary_dim apart."""
    half = cos.shape[-1]
    first, second = slice(0, half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    cos, sin, x = cos[positions].double()[:, None], sin[positions].double()[:, None], x.double()
    y = x.clone()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., first] * sin + x[..., second] * cos
    return y


def append(k, v, k_cache, v_cache, block_table, cache_seqlens, *, cu_seqlens_k_new=None, slot_mapping=None,
           cache_batch_idx=None, rotary_cos=None, rotary_sin=None, rotary_interleaved=True, rotary_seqlens=None,
           k_descale=None, v_descale=None):  # fmt: skip
    """Writes the new tokens into the caches, in place: token t of request b at position cache_seqlens[b] + t."""
    done = 0
    for b, (k_b, v_b) in enumerate(zip(per_request(k, cu_seqlens_k_new), per_request(v, cu_seqlens_k_new))):
        row = b if cache_batch_idx is None else int(cache_batch_idx[b])
        tokens = range(len(k_b))
        if rotary_cos is not None:
            base = int((cache_seqlens if rotary_seqlens is None else rotary_seqlens)[b])
            k_b = rotate(k_b, [base + t for t in tokens], rotary_cos, rotary_sin, rotary_interleaved)
        if slot_mapping is not None:  # page and slot in one number; negative: this token is not written
            target = slot_mapping[done : done + len(k_b)].tolist()
            kept = [t for t in tokens if target[t] >= 0]
            index = [divmod(target[t], k_cache.shape[1]) for t in kept]
            where = tuple(torch.tensor(index, dtype=torch.int64).view(-1, 2).T)
            k_b, v_b, done = k_b[kept], v_b[kept], done + len(k_b)
        else:
            where = place(k_cache, block_table, row, [int(cache_seqlens[b]) + t for t in tokens])
        for cache, x, descale in ((k_cache, k_b, k_descale), (v_cache, v_b, v_descale)):
            new = stored_as(x, None if descale is None else descale[b], cache.dtype)
            cache.view(BITS[cache.itemsize])[where] = new.view(BITS[cache.itemsize])


def by_group(x, kv_heads):
    """[q_heads, ...] as [kv_heads, group, ...]: the heads that share keys side by side."""
    return x.reshape(kv_heads, len(x) // max(1, kv_heads), *x.shape[1:])


class Exact:
    """The arithmetic of the contract: float64. compare.py puts others in its place, to see what a dtype costs."""

    @staticmethod
    def number(x):
        return x.double()

    @staticmethod
    def rotated(x, dtype):
        return x

    @staticmethod
    def order(keys):
        return keys

    @staticmethod
    def scores(pairs, factor):
        """factor times the sum of the products of each pair: a row [q_heads, dim] with [keys, kv_heads, dim]."""
        products = [torch.einsum("kgd,nkd->kgn", by_group(row, keys.shape[1]), keys) for row, keys in pairs]
        return factor * sum(products).flatten(0, 1)

    @staticmethod
    def softmax(s, value):
        """(out, lse) of one row; a row without keys has out 0 and lse -inf."""
        lse = torch.logsumexp(s, 1)
        p = torch.where(s == -torch.inf, 0.0, torch.exp(s - lse[:, None]))
        return torch.einsum("kgn,nkd->kgd", by_group(p, value.shape[1]), value).flatten(0, 1), lse


def attend(q, k_cache, v_cache, *, cache_seqlens, block_table=None, seqlens_new=None, cache_batch_idx=None,
           cache_leftpad=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
           cu_seqlens_q=None, qv=None, q_descale=None, k_descale=None, v_descale=None, attention_chunk=0, s_aux=None,
           rotary_cos=None, rotary_sin=None, rotary_interleaved=True, rotary_seqlens=None,
           arithmetic=Exact):  # fmt: skip
    """(out, lse) in float64, the new tokens (seqlens_new of each request) already in the caches.

    out is shaped like q; lse is (batch, q_heads, tokens), or (q_heads, total_q) with cu_seqlens_q. Tokens of q that no
    request has see nothing, like rows without keys: out 0, lse -inf.
    """
    q_descale, k_descale, v_descale = (
        descale if x.dtype.itemsize == 1 else None  # other tensors have no scale
        for x, descale in ((q, q_descale), (k_cache, k_descale), (v_cache, v_descale))
    )
    window_left, window_right = window_size[0], 0 if causal else window_size[1]
    q_heads, head_dim, head_dim_v = q.shape[-2], q.shape[-1], v_cache.shape[-1]
    group, number = q_heads // max(1, k_cache.shape[2]), arithmetic.number
    scale = (head_dim + (head_dim_v if qv is not None else 0)) ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = torch.zeros(*q.shape[:-1], head_dim_v).double(), torch.full(q.shape[:-1], -torch.inf).double()
    out_of, lse_of = per_request(out, cu_seqlens_q), per_request(lse, cu_seqlens_q)  # views: one request each
    qv_of = [None] * len(out_of) if qv is None else per_request(number(qv), cu_seqlens_q)
    for b, q_b in enumerate(per_request(number(q), cu_seqlens_q)):
        row = b if cache_batch_idx is None else int(cache_batch_idx[b])
        q_len, old_len = len(q_b), int(cache_seqlens[b])
        kv_len = old_len + (0 if seqlens_new is None else seqlens_new[b])
        leftpad = 0 if cache_leftpad is None else int(cache_leftpad[b])
        if rotary_cos is not None:
            base = old_len if rotary_seqlens is None else int(rotary_seqlens[b])
            moving = window_left >= 0 or window_right >= 0 or attention_chunk > 0  # else all queries share one position
            positions = [base + t * moving for t in range(q_len)]
            q_b = number(
                arithmetic.rotated(rotate(q_b, positions, rotary_cos, rotary_sin, rotary_interleaved), q.dtype)
            )
        q_scale = 1.0 if q_descale is None else number(q_descale[b]).repeat_interleave(group)[:, None]
        q_pos = range(kv_len - q_len, kv_len)
        seen_by = [visible_keys(p, kv_len, leftpad, window_left, window_right, attention_chunk) for p in q_pos]
        seen = sorted(set().union(*seen_by))  # no other key is read
        index = {j: i for i, j in enumerate(seen)}
        key, value = (
            number(read(cache, block_table, row, seen, None if descale is None else descale[b]))
            for cache, descale in ((k_cache, k_descale), (v_cache, v_descale))
        )
        for t in range(q_len):
            keys = arithmetic.order(seen_by[t])
            own = slice(None) if keys == seen else [index[j] for j in keys]
            pairs = [(q_b[t], key[own])] if qv is None else [(q_b[t], key[own]), (qv_of[b][t], value[own])]
            s, values = arithmetic.scores(pairs, scale * q_scale), value[own]
            if softcap > 0:
                s = softcap * torch.tanh(s / softcap)
            if alibi_slopes is not None:
                slope = number(alibi_slopes if alibi_slopes.dim() == 1 else alibi_slopes[b])
                s = s - slope[:, None] * (q_pos[t] - torch.tensor(keys, dtype=torch.int64)).abs()
            if s_aux is not None:  # the sink: one more column that carries no value
                s, values = (
                    torch.cat([s, number(s_aux)[:, None]], 1),
                    torch.cat([values, values.new_zeros(1, *values.shape[1:])]),
                )
            out_of[b][t], lse_of[b][t] = arithmetic.softmax(s, values)
    return out, lse.transpose(-1, -2)
