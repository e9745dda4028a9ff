"""This process among those that run jobs: a lock held for its life tells the others that it lives."""

import contextlib
import secrets
from pathlib import Path

from runtime.core.errors import StoreError
from runtime.core.locks import held, is_held


class Instance:
    """A process that runs jobs. Use as a context manager: it lives while entered.

    Args:
        store_path: of the job store; `None` for one in memory, which has no other processes.

    Attributes:
        id: of this process, 8 hexadecimal digits.
    """

    def __init__(self, store_path: Path | None) -> None:
        self.id = secrets.token_hex(4)
        self._folder = None if store_path is None else folder(store_path)
        self._held = contextlib.ExitStack()

    def __enter__(self) -> "Instance":
        """Begin to live.

        Raises:
            StoreError: if the lock's file cannot be made.
        """
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._held.enter_context(held(_lock(self._folder, self.id), seconds=0))
            except OSError as error:
                raise StoreError(
                    f"{self._folder} cannot be written: {error.strerror or error}.",
                    "Make the folder writable, or set TANDEM_CACHE_DIR to one that is.",
                ) from error
        return self

    def __exit__(self, *_: object) -> None:
        """End; the operating system sees to it if nobody else does."""
        self._held.close()


def folder(store_path: Path) -> Path:
    """Return where the locks of a store's processes are."""
    return store_path.parent / "jobs" / "instances"


def lives(store_path: Path, instance: str) -> bool:
    """Return whether a process still runs; a worker counts as running for as long as the app that supervises it."""
    return is_held(_lock(folder(store_path), instance.partition(".")[0]))


def _lock(where: Path, instance: str) -> Path:
    return where / f"{instance}.lock"
