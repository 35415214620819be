"""Runs the kernels of a translated .metal file on tensors of the CPU.

library = Library(metal_build.kernels(path))
library.run("kernel", grid=(2, 1, 1), threadgroup=(64, 1, 1), buffers={0: tensor, 1: bytes(params)})
"""

import ctypes as c

NUM_BUFFERS = 31


class MetalError(RuntimeError):
    pass


class Counts(c.Structure):
    """mtl::Counts of shim/runtime.h; a list counts by buffer index, bytes are summed over lanes."""

    _fields_ = [
        *((name, c.c_uint64) for name in ("dispatches", "threadgroups", "threads", "simd_operations", "barriers")),
        ("threadgroup_bytes", c.c_uint64),
        *((name, c.c_uint64 * NUM_BUFFERS) for name in ("loaded", "stored", "load_instructions", "store_instructions")),
        ("threadgroup_loaded", c.c_uint64),
        ("threadgroup_stored", c.c_uint64),
    ]


class Library:
    def __init__(self, path):
        lib = self.lib = c.CDLL(str(path))
        lib.mtl_find.restype = lib.mtl_arguments_new.restype = c.c_void_p
        lib.mtl_names.restype = lib.mtl_simd_counts.restype = c.c_char_p
        lib.mtl_counts.restype = c.POINTER(Counts)
        lib.mtl_find.argtypes = [c.c_char_p]
        lib.mtl_arguments_free.argtypes = [c.c_void_p]
        lib.mtl_set_buffer.argtypes = [c.c_void_p, c.c_int, c.c_void_p, c.c_size_t]
        lib.mtl_set_bytes.argtypes = lib.mtl_set_constant.argtypes = [c.c_void_p, c.c_int, c.c_char_p, c.c_size_t]
        lib.mtl_set_threadgroup_memory.argtypes = [c.c_void_p, c.c_int, c.c_size_t]
        numbers = c.POINTER(c.c_uint32)
        lib.mtl_dispatch.argtypes = [c.c_void_p, c.c_void_p, numbers, numbers, c.c_int, c.c_uint32]
        lib.mtl_dispatch.argtypes += [c.c_char_p, c.c_size_t]

    def names(self):
        return self.lib.mtl_names().decode().split()

    def counts(self):
        return self.lib.mtl_counts().contents

    def simd_counts(self):
        """How often each simdgroup function ran, by name."""
        lines = (line.split() for line in self.lib.mtl_simd_counts().decode().splitlines())
        return {name: int(count) for name, count in lines}

    def reset_counts(self):
        self.lib.mtl_reset_counts()

    def run(
        self,
        name,
        grid,
        threadgroup,
        buffers,
        constants=None,
        threadgroup_memory=None,
        threads=False,
        seed=0,
        exact=True,
    ):
        """buffers: index -> tensor, or bytes (setBytes); constants: index -> bool, int or bytes. grid counts
        threadgroups, or threads with threads=True. A seed other than 0 shuffles the order of everything. exact gives
        the kernel copies in memory of exactly their size, so that AddressSanitizer sees each byte past the end."""
        kernel = self.lib.mtl_find(name.encode())
        if not kernel:
            raise MetalError(f"no kernel {name!r}")
        arguments = self.lib.mtl_arguments_new()
        kept = []
        try:
            for index, value in buffers.items():
                if isinstance(value, (bytes, c.Structure, c._SimpleCData)):
                    self.lib.mtl_set_bytes(arguments, index, bytes(value), len(bytes(value)))
                    continue
                storage = value if not exact else value.clone()
                kept.append((value, storage))
                size = value.numel() * value.element_size()
                self.lib.mtl_set_buffer(arguments, index, storage.data_ptr(), size)
            for index, value in (constants or {}).items():
                if not isinstance(value, bytes):
                    value = bytes(c.c_bool(value) if isinstance(value, bool) else c.c_int(value))
                self.lib.mtl_set_constant(arguments, index, value, len(value))
            for index, size in (threadgroup_memory or {}).items():
                self.lib.mtl_set_threadgroup_memory(arguments, index, size)
            message = c.create_string_buffer(4096)
            sizes = (c.c_uint32 * 3)(*grid), (c.c_uint32 * 3)(*threadgroup)
            if self.lib.mtl_dispatch(kernel, arguments, *sizes, not threads, seed, message, len(message)):
                raise MetalError(message.value.decode())
            for value, storage in kept:
                if storage is not value:
                    value.copy_(storage)
        finally:
            self.lib.mtl_arguments_free(arguments)
