"""Read the weight files of the next component into the page cache while the current one runs on the GPU."""

import contextlib
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from runtime.core.plan import ExecutionPlan
from runtime.models.spec import ModelSpec

_PIECE_BYTES = 8 << 20
# Files are read ahead only if they fit into free memory twice.
_FREE_FACTOR = 2.0


def next_files(spec: ModelSpec, plan: ExecutionPlan, running: str, held: Collection[str]) -> list[Path]:
    """Return the weight files of the next component that is not in memory.

    Args:
        held: components that are loaded or have no work left.
    """
    names = list(plan.components)
    after = names[names.index(running) + 1 :]
    coming = next((name for name in after if name not in held), None)
    if coming is None or not plan.components[running].device.startswith("cuda") or plan.components[coming].engines:
        return []
    return sorted((spec.directory / coming).glob("*.safetensors"))


@contextmanager
def reading(files: Sequence[Path], free_bytes: int | None = None) -> Iterator[None]:
    """Read files on a thread while entered, if free memory (RAM) suffices.

    Args:
        free_bytes: free memory; read from the system by default.
    """
    free = psutil.virtual_memory().available if free_bytes is None else free_bytes
    with contextlib.suppress(OSError):
        if not files or _FREE_FACTOR * sum(path.stat().st_size for path in files) > free:
            files = ()
    stop = threading.Event()
    thread = threading.Thread(target=_read, args=(files, stop), name="prefetch", daemon=True)
    if files:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if files:
            thread.join()


def _read(files: Sequence[Path], stop: threading.Event) -> None:
    piece = bytearray(_PIECE_BYTES)
    with contextlib.suppress(OSError):  # loading the file reports the error
        for path in files:
            with path.open("rb", buffering=0) as file:
                while not stop.is_set() and file.readinto(piece):
                    pass
