"""vLLM's compiled operators, where only its Python files are installed.

On a GPU vLLM imports them on the way to an attention layer. Empty modules stand in; the tests call nothing of them.
This module must be imported before vLLM. PAGED_ATTN_TEST_DEVICE says where the tensors are: cpu or cuda.
"""

import importlib.util
import os
import sys
import types
from pathlib import Path

DEVICE = os.environ.get("PAGED_ATTN_TEST_DEVICE", "cpu")

if DEVICE == "cuda":
    vllm = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    for module in ("_C_stable_libtorch", "vllm_flash_attn/_vllm_fa2_C"):
        if not list(vllm.glob(f"{module}*.so")):
            name = "vllm." + module.replace("/", ".")
            sys.modules[name] = types.ModuleType(name)
