"""One layer of an SGLang engine: its pools, its backend and batches as its scheduler makes them."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from sglang_backend import DEVICE

Q_HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
MAX_CONTEXT = 256


@dataclass(frozen=True)
class Setup:
    page_size: int = 1
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None  # None: as dtype
    kv_heads: int = KV_HEADS
    window: int = -1
    softcap: float = 0.0
    chunk: int | None = None  # of local attention
    latent: tuple | None = None  # (lora rank, rotary part) of multi-head latent attention
    encoder: bool = False
    cross: bool = False  # the layer attends to the encoder's keys
    topk: int = 0  # of speculative decoding
    draft_tokens: int = 0
    draft_steps: int = 0
    step: int = 0


class Engine:
    """`lengths`: the keys that each request has in the cache. Slots that hold no key are NaN."""

    def __init__(self, backend_module, setup: Setup, lengths):
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.runtime_context import get_context, get_parallel

        self.setup, self.lengths = setup, list(lengths)
        self.override = get_context().override_server_args(
            attention_backend="fa3",
            chunked_prefill_size=-1,
            disable_radix_cache=False,
            is_embedding=False,
            speculative_eagle_topk=setup.topk,
            speculative_num_draft_tokens=setup.draft_tokens or None,
            speculative_num_steps=setup.draft_steps or None,
        )
        self.override.install()
        # One process, without SGLang's process groups.
        self.parallel = get_parallel().override(attn_tp_size=1, attn_dcp_rank=0)
        self.parallel.__enter__()
        batch, cache_dtype = len(self.lengths), setup.cache_dtype or setup.dtype
        self.requests = ReqToTokenPool(
            size=batch, max_context_len=MAX_CONTEXT, device=DEVICE, enable_memory_saver=False
        )
        self.pool = self._make_pool(cache_dtype, batch)
        self.backend = backend_module.FlashAttentionBackend(
            self._runner(cache_dtype), speculative_step_id=setup.step, speculative_num_steps=setup.draft_steps
        )
        latent = setup.latent
        self.layer = RadixAttention(
            num_heads=Q_HEADS,
            head_dim=sum(latent) if latent else HEAD_DIM,
            scaling=0.11,
            num_kv_heads=1 if latent else setup.kv_heads,
            layer_id=0,
            logit_cap=setup.softcap,
            v_head_dim=latent[0] if latent else -1,
            sliding_window_size=setup.window,
            is_cross_attention=setup.cross,
            use_irope=setup.chunk is not None,
        )
        if cache_dtype != setup.dtype:
            self.layer.k_scale, self.layer.v_scale = torch.tensor(0.5), torch.tensor(0.25)
        self._allocate_slots(batch)

    def _make_pool(self, cache_dtype, batch):
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

        setup = self.setup
        common = {
            "size": (batch + 2) * MAX_CONTEXT,
            "page_size": setup.page_size,
            "dtype": cache_dtype,
            "layer_num": 1,
            "device": DEVICE,
            "enable_memory_saver": False,
        }
        if setup.latent:
            rank, rotary = setup.latent
            pool = MLATokenToKVPool(kv_lora_rank=rank, qk_rope_head_dim=rotary, **common)
            buffers = pool.kv_buffer
        else:
            pool = MHATokenToKVPool(head_num=setup.kv_heads, head_dim=HEAD_DIM, enable_alt_stream=False, **common)
            buffers = [*pool.k_buffer, *pool.v_buffer]
        for buffer in buffers:
            # 0x7f is a NaN of float8_e4m3fn, which the pool keeps as bytes.
            buffer.fill_(torch.nan) if buffer.is_floating_point() else buffer.fill_(0x7F)
        return pool

    def _runner(self, cache_dtype):
        """What the backend reads of SGLang's ModelRunner."""
        from sglang.srt.configs.model_config import AttentionArch
        from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

        setup = self.setup
        self.translator = KVIndexTranslator(
            req_to_token=self.requests.req_to_token,
            token_to_kv_pool_allocator=SimpleNamespace(page_size=setup.page_size, get_kvcache=lambda: self.pool),
            token_to_kv_pool=self.pool,
            page_size=setup.page_size,
            device=DEVICE,
        )
        config = SimpleNamespace(
            is_encoder_decoder=setup.encoder,
            context_len=MAX_CONTEXT,
            attention_arch=AttentionArch.MLA if setup.latent else AttentionArch.MHA,
            is_local_attention_model=setup.chunk is not None,
            head_dim=HEAD_DIM,
            hf_text_config=SimpleNamespace(num_attention_heads=Q_HEADS, attn_logit_softcapping=setup.softcap or None),
            get_num_kv_heads=lambda tp_size: setup.kv_heads,
        )
        return SimpleNamespace(
            model_config=config,
            device=DEVICE,
            req_to_token_pool=self.requests,
            token_to_kv_pool=self.pool,
            kv_cache_dtype=cache_dtype,
            kv_cache_dtype_str="auto" if cache_dtype == setup.dtype else "fp8_e4m3",
            page_size=setup.page_size,
            kv_index_translator=self.translator,
            is_draft_worker=False,
            sliding_window_size=setup.window if setup.window >= 0 else None,
            attention_chunk_size=setup.chunk,
        )

    def _allocate_slots(self, batch):
        """Pages in random order, as an allocator leaves them after a while; page 0 is padding."""
        size = self.setup.page_size
        pages = torch.randperm((batch + 1) * MAX_CONTEXT // size) + 1
        per_request = MAX_CONTEXT // size
        for b in range(batch):
            own = pages[b * per_request : (b + 1) * per_request]
            slots = (own[:, None] * size + torch.arange(size)).flatten()
            self.requests.req_to_token[b] = slots.int()
        self.spare_pages = pages[batch * per_request :].tolist()

    def close(self):
        self.parallel.__exit__(None, None, None)
        self.override.restore()

    def slots(self, b, begin, end):
        return self.requests.req_to_token[b, begin:end].long()

    def write(self, slots, k, v=None):
        """Keys and values in the given slots, by the pool's own function; of latent attention k is [latent, rotary]."""
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        if not len(slots):
            return
        location = KVWriteLoc(slots, physical=True)
        if self.setup.latent:
            rank = self.setup.latent[0]
            self.pool.set_mla_kv_buffer(self.layer, location, k[..., :rank].contiguous(), k[..., rank:].contiguous())
        else:
            self.pool.set_kv_buffer(self.layer, location, k.clone(), v.clone(), self.layer.k_scale, self.layer.v_scale)

    def batch(self, mode, new_lens=None, slots=None, **fields):
        """A ForwardBatch; `lengths` are the keys before the new ones, which decode and extend count in seq_lens."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        speculative = mode == ForwardMode.TARGET_VERIFY or fields.get("spec_info") is not None
        new_lens = new_lens or [1] * len(self.lengths)
        after = [n if speculative else n + new for n, new in zip(self.lengths, new_lens, strict=True)]
        if slots is None:
            slots = torch.cat([self.slots(b, n, n + new) for b, (n, new) in enumerate(zip(self.lengths, new_lens))])
        seq_lens = torch.tensor(after)
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(after),
            input_ids=torch.zeros(sum(new_lens), dtype=torch.int64),
            req_pool_indices=torch.arange(len(after)),
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens.cpu(),
            out_cache_loc=slots,
            seq_lens_sum=sum(after),
            positions=torch.zeros(sum(new_lens), dtype=torch.int64),
        )
        if mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
            batch.extend_prefix_lens = torch.tensor(self.lengths)
            batch.extend_prefix_lens_cpu = self.lengths
            batch.extend_seq_lens = torch.tensor(new_lens)
            batch.extend_seq_lens_cpu = new_lens
            batch.extend_num_tokens = sum(new_lens)
        for name, value in fields.items():
            setattr(batch, name, value)
        self.translator.bind_own_plan(batch)
        self.backend.init_forward_metadata(batch)
        return batch
