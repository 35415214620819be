"""SGLang's FlashAttention backend from its wheel, unmodified, where the rest of SGLang's environment is missing.

What is not installed is replaced before SGLang is imported:

    sgl_kernel       a wheel of CUDA code. The backend takes `merge_state_v2` and `get_scheduler_metadata` from it; here
                     they come from paged_attn.fa3. Its attention functions raise: those that the backend calls come
                     from `kernels`, with SGLANG_USE_SGL_FA3_KERNEL=0 (the Makefile sets it).
    flashinfer,      CUDA code that modules on the way import and never call here.
    torchvision
    the GPU itself   SGLang asks for its generation before it calls the kernel.

PAGED_ATTN_TEST_DEVICE says where the tensors are: cpu or cuda.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types

from transformers.utils import is_torchvision_available

DEVICE = os.environ.get("PAGED_ATTN_TEST_DEVICE", "cpu")
ABSENT = [name for name in ("flashinfer", "sgl_kernel", "torchvision") if importlib.util.find_spec(name) is None]


class _AnyName(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (), {})


class _Absent(types.ModuleType):
    """A module that has every name; whoever calls one gets an error or an empty object, never a result."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (), {})


class _AbsentModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Absent(spec.name)

    def exec_module(self, module):
        pass


def _attention_of_sgl_kernel(*arguments, **keywords):
    raise NotImplementedError("attention of sgl_kernel was called: expected SGLANG_USE_SGL_FA3_KERNEL=0, and ours")


def import_backend(fa3):
    """SGLang's module with its FlashAttention backend. `fa3` stands in for what sgl_kernel has of CUDA."""
    # transformers must remember that there is no torchvision before an empty module takes its name.
    is_torchvision_available()
    sys.meta_path.insert(0, _AbsentModules())
    import sgl_kernel
    import sgl_kernel.flash_attn

    sgl_kernel.merge_state_v2 = fa3.merge_state_v2
    sgl_kernel.flash_attn.get_scheduler_metadata = fa3.get_scheduler_metadata
    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):  # the backend imports them too
        setattr(sgl_kernel.flash_attn, name, _attention_of_sgl_kernel)

    from sglang.kernels.ops.attention import flash_attention_v3
    from sglang.srt.layers.attention import flashattention_backend

    flash_attention_v3._is_fa3_supported = lambda device=None: True
    flashattention_backend.get_device_capability = lambda: (9, 0)
    return flashattention_backend
