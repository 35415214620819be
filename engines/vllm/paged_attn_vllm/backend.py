"""The three classes that vLLM asks of an attention backend.

vLLM keeps keys and values of a layer in one tensor, [blocks, kv_heads, block_size, 2 * head_size] in whatever order of
strides a backend prefers. Both caches are views of it: the kernel takes any strides.
"""

from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from kernels import get_kernel
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout, is_quantized_kv_cache

from . import place

# What these see are the keys of the same pass: there is no cache.
WITHOUT_CACHE = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


@cache
def kernel():
    return get_kernel("org/paged-attn", version=1, trust_remote_code=True)


class PagedAttnBackend(AttentionBackend):
    # The new keys are written by an operator of their own, before.
    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"]

    @staticmethod
    def get_name() -> str:
        # vLLM looks the name up among its own: the place that this backend takes.
        return place()

    @staticmethod
    def get_impl_cls():
        return PagedAttnImpl

    @staticmethod
    def get_builder_cls():
        return PagedAttnMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(1)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size <= 256 or head_size == 512

    @classmethod
    def supported_kv_cache_layouts(cls):
        # A token's heads side by side: the keys of a page are then read in order. Any other works too.
        return (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC, KVCacheLayout.BLNHC, KVCacheLayout.BLHNC)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER, *WITHOUT_CACHE)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True


@dataclass
class PagedAttnMetadata:
    """What the layers of one step share."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool


class PagedAttnMetadataBuilder(AttentionMetadataBuilder[PagedAttnMetadata]):
    # No call reads lengths on the host, so a captured graph replays with any.
    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedAttnMetadata:
        common = common_attn_metadata
        if isinstance(common.causal, torch.Tensor):
            raise NotImplementedError("causal: expected one value for the whole batch, got one for each request")
        # On a GPU vLLM asks for them before. Some of its versions have no such fields.
        if getattr(common, "mm_req_doc_ranges", None):
            raise NotImplementedError("mm_req_doc_ranges: expected None, got ranges of tokens that see each other")
        if getattr(common, "rswa_prefix_lens", None) is not None:
            raise NotImplementedError("rswa_prefix_lens: expected None, got a tensor (windows with a prefix)")
        # vLLM's table is as wide as the longest context that it serves. How wide it is here tells the kernel how many
        # keys a request may have.
        pages = -(-common.max_seq_len // self.kv_cache_spec.block_size)
        return PagedAttnMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=int(common.max_query_len),  # a number of NumPy from vLLM's chunked local attention
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor[:, :pages],
            slot_mapping=common.slot_mapping,
            causal=common.causal,
        )

    def update_block_table(self, metadata, blk_table, slot_mapping):
        # A shallow copy: vLLM's own builders around this one give metadata more attributes, or another class.
        new = copy(metadata)
        new.block_table, new.slot_mapping = blk_table[:, : metadata.block_table.shape[1]], slot_mapping
        return new


class PagedAttnImpl(AttentionImpl[PagedAttnMetadata]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        # On a GPU vLLM has looked at this list, on a CPU nobody has.
        known = PagedAttnBackend.supported_kv_cache_dtypes
        if kv_cache_dtype not in known:
            raise ValueError(f"kv_cache_dtype: expected one of {', '.join(known)}, got {kv_cache_dtype}")
        # While vLLM makes a model, the model's dtype is torch's default.
        dtype = str(torch.get_default_dtype()).removeprefix("torch.")
        if kv_cache_dtype in ("float16", "bfloat16") and kv_cache_dtype != dtype and attn_type not in WITHOUT_CACHE:
            raise ValueError(
                f"kv_cache_dtype: expected the model's dtype {dtype} (auto), or 8 bits, got {kv_cache_dtype}"
            )
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads or num_heads, head_size
        self.scale = float(scale)
        self.softcap = logits_soft_cap or 0.0
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        # vLLM counts the token itself, the kernel the keys beside it.
        self.window_left = -1 if sliding_window is None else sliding_window - 1
        self.sinks = sinks
        self.attn_type = attn_type
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.eight_bits = None
        if is_quantized_kv_cache(kv_cache_dtype):
            self.eight_bits = torch.float8_e5m2 if kv_cache_dtype == "fp8_e5m2" else torch.float8_e4m3fn
        kernel()  # a kernel that is missing shows when the model is made

    def forward(
        self,
        layer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagedAttnMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query, key, value and output are (tokens, heads, head_size); those past num_actual_tokens are padding."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale: expected None (the kernel does not quantize its output)")
        if attn_metadata is None:  # warming up: the layers after this one get no NaN
            return output.fill_(0)
        meta, tokens = attn_metadata, attn_metadata.num_actual_tokens
        if self.attn_type in WITHOUT_CACHE:
            self._attend(query, key[:tokens], value[:tokens], meta, output, cu_seqlens_k=meta.query_start_loc)
            return output
        k_cache, v_cache = self._caches(kv_cache)
        k_scale, v_scale = self._scales(layer, meta.seq_lens.shape[0])
        self._attend(
            query,
            k_cache,
            v_cache,
            meta,
            output,
            block_table=meta.block_table,
            seqused_k=meta.seq_lens,
            k_descale=k_scale,
            v_descale=v_scale,
        )
        return output

    def _attend(self, query, k, v, meta, output, **keys):
        causal = meta.causal and self.attn_type == AttentionType.DECODER
        kernel().flash_attn_varlen_func(
            query[: meta.num_actual_tokens],
            k,
            v,
            meta.query_start_loc,
            max_seqlen_q=meta.max_query_len,
            softmax_scale=self.scale,
            causal=causal,
            window_size=(self.window_left, 0 if causal else self.window_left),
            softcap=self.softcap,
            alibi_slopes=self._slopes_on(query.device),
            s_aux=self.sinks,
            out=output[: meta.num_actual_tokens],
            **keys,
        )

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        if self.attn_type in WITHOUT_CACHE:
            return
        k_cache, v_cache = self._caches(kv_cache)
        k_scale, v_scale = self._scales(layer, 1)
        tokens = slot_mapping.shape[0]
        kernel().kv_paged_write(
            key[:tokens],
            value[:tokens],
            k_cache,
            v_cache,
            slot_mapping=slot_mapping,
            k_descale=k_scale,
            v_descale=v_scale,
        )

    def _caches(self, kv_cache):
        pages = kv_cache.transpose(1, 2)
        if self.eight_bits is not None:
            pages = pages.view(self.eight_bits)
        return pages.split(self.head_size, dim=-1)

    def _scales(self, layer, batch):
        if self.eight_bits is None:
            return None, None
        # One scale, or one for each KV head.
        return layer._k_scale.expand(batch, self.num_kv_heads), layer._v_scale.expand(batch, self.num_kv_heads)

    def _slopes_on(self, device):
        if self.alibi_slopes is not None and self.alibi_slopes.device != device:
            self.alibi_slopes = self.alibi_slopes.to(device)
        return self.alibi_slopes
