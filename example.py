"""Loads the build of this directory, appends a token to two requests and attends; compared with PyTorch's attention.

make build && .venv/bin/python example.py
"""

from pathlib import Path

import kernels
import torch
import torch.nn.functional as F

built = {path.name.split("-")[-3].rstrip("0123456789") for path in Path(__file__).parent.glob("build/torch*")}
if torch.cuda.is_available() and "cu" in built:
    device, backend = "cuda", "cuda"
elif torch.backends.mps.is_available():
    device, backend = "mps", "metal"
else:
    device, backend = "cpu", "cpu"
paged_attn = kernels.get_local_kernel(Path(__file__).parent / "build", backend=backend)

# 64 pages of 16 slots for 8 kv_heads; two requests with 100 and 37 keys in the cache own 8 pages each.
torch.manual_seed(0)
k_cache, v_cache = paged_attn.empty_paged_cache(64, 16, 8, 128, dtype=torch.bfloat16, device=device)
k_cache.normal_(), v_cache.normal_()
block_table = torch.randperm(64, device=device)[:16].int().view(2, 8)
cache_seqlens = torch.tensor([100, 37], dtype=torch.int32, device=device)

# One new token each: its key and value go into the pages, then it attends to all keys of its request.
q, k, v = (torch.randn(2, 1, heads, 128, dtype=torch.bfloat16, device=device) for heads in (32, 8, 8))
out = paged_attn.flash_attn_with_kvcache(
    q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, block_table=block_table, causal=True
)

for request, before in enumerate(cache_seqlens.tolist()):
    keys, values = (
        cache[block_table[request].long()].flatten(0, 1)[: before + 1].transpose(0, 1) for cache in (k_cache, v_cache)
    )
    assert torch.equal(keys[:, -1], k[request, 0])
    expected = F.scaled_dot_product_attention(q[request].transpose(0, 1), keys, values, enable_gqa=True)
    torch.testing.assert_close(out[request].transpose(0, 1), expected, atol=1e-2, rtol=1e-2)
print(f"{device}: out {tuple(out.shape)}, equal to scaled_dot_product_attention over the gathered keys")
