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


def make(transformers, device, kind="Llama", **config):
    torch.manual_seed(0)
    # Gemma 3's plain name is its model with images.
    config_class = getattr(transformers, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config")
    model = getattr(transformers, f"{kind}ForCausalLM")(config_class(**SIZES, **config))
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    return model.to(device).eval()
