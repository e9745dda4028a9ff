"""Files of the part that comes next, read into the system's cache while the one before it runs on the GPU."""

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
_ROOM = 2.0


def next_files(spec: ModelSpec, plan: ExecutionPlan, running: str, held: Collection[str]) -> list[Path]:
    """Return the weights that will be loaded after the part that runs, and are not in memory.

    Args:
        held: the parts that are loaded, or have nothing to do.
    """
    names = list(plan.components)
    after = names[names.index(running) + 1 :]
    coming = next((name for name in after if name not in held), None)
    if coming is None or not plan.components[running].device.startswith("cuda") or plan.components[coming].engines:
        return []
    return sorted((spec.directory / coming).glob("*.safetensors"))


@contextmanager
def reading(files: Sequence[Path], free_bytes: int | None = None) -> Iterator[None]:
    """Read files on a thread while entered, where memory (RAM) has room for them.

    Args:
        free_bytes: of memory; by default as the system says.
    """
    free = psutil.virtual_memory().available if free_bytes is None else free_bytes
    with contextlib.suppress(OSError):
        if not files or _ROOM * sum(path.stat().st_size for path in files) > free:
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
