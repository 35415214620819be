"""A vLLM plugin: attention through the paged-attn kernel.

    pip install <repository>/engines/vllm

On a CPU vLLM has one place for an attention backend, and installing the plugin is enough: ours takes it. On a GPU it is
asked for: `LLM(..., attention_backend="CUSTOM")` or `vllm serve --attention-backend CUSTOM`. VLLM_PLUGINS= (empty)
starts vLLM without it.
"""

BACKEND = "paged_attn_vllm.backend.PagedAttnBackend"


def place() -> str:
    """The name in vLLM's list of backends that ours takes: on CPUs vLLM ignores CUSTOM."""
    from vllm.platforms import current_platform

    return "CPU_ATTN" if current_platform.is_cpu() else "CUSTOM"


def register() -> None:
    """Called by vLLM through the entry point `vllm.general_plugins`, in every process and more than once."""
    from vllm.logger import init_logger
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum[place()], BACKEND)
    # Below vLLM's own name, for its settings of logging to hold.
    init_logger("vllm.paged_attn").info_once("attention backend %s is %s", place(), BACKEND)
