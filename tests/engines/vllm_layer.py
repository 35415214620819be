"""One attention layer of vLLM with the plugin of engines/vllm, without the engine around it, on the CPU or a GPU."""

import torch
from absent_operators import DEVICE
from paged_attn_vllm import place, register
from vllm.config import AttentionConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheLayout

NAME = "model.layers.0.attn"


class Layer:
    """The layer, its pages, and requests that have `lengths` keys each in pages of a random order."""

    def __init__(self, heads, kv_heads, head_size, dtype, block_size=16, cache_dtype="auto", batch=4, **options):
        register()
        self.config = VllmConfig(attention_config=AttentionConfig(backend=AttentionBackendEnum[place()]))
        self.config.cache_config.block_size, self.config.cache_config.cache_dtype = block_size, cache_dtype
        with set_current_vllm_config(self.config), torch.device(DEVICE), set_default_torch_dtype(dtype):
            self.attention = Attention(
                heads, head_size, head_size**-0.5, kv_heads, cache_config=self.config.cache_config, prefix=NAME,
                **options,
            )  # fmt: skip
            self.attention.process_weights_after_loading(dtype)
        if cache_dtype == "auto":  # the model's, and there is no model
            self.attention.kv_cache_torch_dtype = dtype
        self.lengths, self.block_size, blocks = [0] * batch, block_size, 64
        backend = self.attention.get_attn_backend()
        # vLLM lays a cache out as the backend prefers and hands it over as [blocks, kv_heads, slots, 2 * head_size].
        assert backend.supported_kv_cache_layouts()[0] is KVCacheLayout.LBNHC
        stored = self.attention.kv_cache_torch_dtype if cache_dtype == "auto" else torch.uint8
        cache = torch.empty(blocks, block_size, kv_heads, 2 * head_size, dtype=stored, device=DEVICE)
        cache.fill_(torch.nan) if stored.is_floating_point else cache.fill_(0x7F)
        self.attention.kv_cache = cache.transpose(1, 2)
        self.table = torch.randperm(blocks, device=DEVICE, dtype=torch.int32).view(batch, -1)
        spec = self.attention.get_kv_cache_spec(self.config)
        with set_current_vllm_config(self.config):
            self.builder = backend.get_builder_cls()(spec, [NAME], self.config, torch.device(DEVICE))

    def common(self, new):
        """What vLLM's model runner knows of a step of `new` tokens of each request."""
        lengths = [length + count for length, count in zip(self.lengths, new, strict=True)]
        starts = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        slots = []
        for request, (length, count) in enumerate(zip(self.lengths, new, strict=True)):
            at = torch.arange(length, length + count, device=DEVICE)
            slots.append(self.table[request, at // self.block_size].long() * self.block_size + at % self.block_size)
        return CommonAttentionMetadata(
            query_start_loc=starts.to(DEVICE),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
            num_reqs=len(new),
            num_actual_tokens=sum(new),
            max_query_len=max(new),
            max_seq_len=max(lengths),
            block_table_tensor=self.table,
            slot_mapping=torch.cat(slots),
        )

    def forward(self, common, q, k, v):
        """Through vLLM's own layer, which writes the keys and attends."""
        metadata = self.builder.build(0, common)
        with set_forward_context({NAME: metadata}, self.config, slot_mapping={NAME: common.slot_mapping}):
            return self.attention(q.flatten(1), k.flatten(1), v.flatten(1))
