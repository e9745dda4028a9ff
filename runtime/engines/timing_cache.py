"""TensorRT's timing cache: what measuring kernels found, kept beside the engines so that the next build is shorter.

One file per GPU and TensorRT version, replaced whole by one rename: two builds at once lose at most each other's
measurements. It begins with the sha256 of the rest, since TensorRT trusts what it is given.
"""

import contextlib
import hashlib
import os
import secrets
from pathlib import Path

_HASH_BYTES = 32
_MAX_BYTES = 1 << 30
_WORKSPACE = ".building-"


def path_for(engine: Path, device: str, version: str) -> Path:
    """Return the file for a GPU and TensorRT's version, in the folder that holds the engines.

    Args:
        engine: the engine's folder, which may lie in a workspace of the store while it is built.
    """
    store = engine.parent.parent if engine.parent.name.startswith(_WORKSPACE) else engine.parent
    digest = hashlib.sha256(f"{device}\n{version}".encode()).hexdigest()[:16]
    return store / f".timing-{digest}"


def read(path: Path) -> bytes:
    """Return the cache, empty if there is none or it is damaged."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            return b""
        data = path.read_bytes()
    except OSError:
        return b""
    cache = data[_HASH_BYTES:]
    return cache if hashlib.sha256(cache).digest() == data[:_HASH_BYTES] else b""


def write(path: Path, cache: bytes) -> None:
    """Replace the cache; where that fails, the next build is as long as this one, and that is all."""
    new = path.with_name(f"{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        try:
            new.write_bytes(hashlib.sha256(cache).digest() + cache)
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
