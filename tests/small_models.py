"""Small random models of transformers, whose tokens depend on what attention returns."""

import torch

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    # Attention that decides which token comes next, so that a wrong result shows in the tokens.
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
# By name: the family of classes, and what it has beside SIZES.
MODELS = {
    "llama": ("Llama", {}),
    "qwen 3": ("Qwen3", {}),
    "mistral, sliding window": ("Mistral", {"sliding_window": 8}),
    "gemma 2, softcap": ("Gemma2", {"sliding_window": 8, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}),
    "gemma 3, both kinds of layers": (
        "Gemma3",
        {"sliding_window": 8, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt-oss, sinks": ("GptOss", {"sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1}),
}
# Models whose layers attend with other keys or values than those they store, and with another's.
CHANGES_AFTER_STORING = {
    "deepseek v3, latents": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4, "head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16, "v_head_dim": 16, "moe_intermediate_size": 32, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        },
    ),
    "diffllama, other values": ("DiffLlama", {}),
    "jetmoe, repeated": ("JetMoe", {"kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip
# Models that make masks with a window, and do not tell their layers of it.
WINDOW_OF_THE_MASK = {
    "phimoe": ("Phimoe", {"sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "qwen 2 moe": (
        "Qwen2Moe",
        {
            "sliding_window": 6, "use_sliding_window": True, "max_window_layers": 2, "num_experts": 2,
            "num_experts_per_tok": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        },
    ),
}  # fmt: skip
_SHARED = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 6, "vocab_size_per_layer_input": 300,
    "hidden_size_per_layer_input": 16, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
SHARED_KEYS = {
    "gemma 3n": (
        "Gemma3n", _SHARED | {"laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4},
    ),
    "gemma 4": ("Gemma4", _SHARED | {"global_head_dim": 32}),
}  # fmt: skip
_TEXT_CONFIGS = ("Gemma3", "Gemma3n", "Gemma4")  # their plain names are models with images


def make(transformers, device, kind="Llama", **config):
    torch.manual_seed(0)
    config_class = getattr(transformers, f"{kind}TextConfig" if kind in _TEXT_CONFIGS else f"{kind}Config")
    model = getattr(transformers, f"{kind}ForCausalLM")(config_class(**(SIZES | config)))
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    return model.to(device).eval()
