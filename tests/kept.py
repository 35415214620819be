"""What the reference gives, kept on disk for one run of the tests: every instruction set, every emulated processor and
every build with sanitizers is judged by the same numbers, and float64 takes longer than most kernels.

The key is a digest of all arguments, value by value with dtype and shape, and of the code that makes the result; what a
kernel returned is no argument. A file that is missing, cut short or changed in one bit is no file: the result is
computed. Without PAGED_ATTN_TEST_KEEP, the folder, nothing is kept.
"""

import contextlib
import fcntl
import functools
import hashlib
import io
import os
import tempfile
from pathlib import Path

import torch

SOURCES = [Path(__file__).with_name(name) for name in ("kept.py", "reference.py", "compare.py")]
# Files lie in this many folders, each with a lock of its own, and a folder holds so many bytes: 2 GiB in all at most.
FOLDERS, ROOM = 64, 32 << 20


def digest(*parts):
    return hashlib.blake2b(b"".join(parts), digest_size=32).digest()


@functools.cache
def maker():
    """Of the code, and of the arithmetic that torch has for this processor."""
    torchs = f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
    return digest(torchs.encode(), *(digest(source.read_bytes()) for source in SOURCES))


def key_of(value):
    """A digest of tensors, numbers and words, in lists and dictionaries of any depth."""
    if isinstance(value, torch.Tensor):
        memory = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return digest(f"{value.dtype} {tuple(value.shape)}".encode(), memory)
    if isinstance(value, dict):
        return digest(b"dict", *(key_of(x) for item in sorted(value.items(), key=lambda item: item[0]) for x in item))
    if isinstance(value, (list, tuple)):
        return digest(b"list", *map(key_of, value))
    assert value is None or isinstance(value, (bool, int, float, str, torch.dtype)), f"no key for {type(value)}"
    return digest(repr(value).encode())


def read(path, key):
    """The tensors of a file, or None."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if content[:32] != digest(key, content[32:]):
        return None
    return torch.load(io.BytesIO(content[32:]), weights_only=True)


def write(path, key, tensors):
    """At once or not at all; nothing where the folder is full."""
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    if buffer.tell() + sum(file.stat().st_size for file in path.parent.iterdir()) > ROOM:
        return
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(digest(key, buffer.getvalue()) + buffer.getvalue())
    os.replace(file.name, path)


@contextlib.contextmanager
def locked(folder):
    """One process at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def keep(function):
    """A function of the arguments that key_of takes, whose result is a tuple of tensors."""

    @functools.wraps(function)
    def kept(*arguments):
        if not os.environ.get("PAGED_ATTN_TEST_KEEP"):
            return function(*arguments)
        key = digest(maker(), function.__name__.encode(), key_of(arguments))
        path = Path(os.environ["PAGED_ATTN_TEST_KEEP"]) / str(key[0] % FOLDERS) / key.hex()
        found = read(path, key)
        if found is None:
            with locked(path.parent):  # processes run the same tests side by side: one computes, the others wait for it
                found = read(path, key)
                if found is None:
                    found = function(*arguments)
                    write(path, key, found)
        return found

    return kept
