"""The hidden folder of the store in which one engine is built; it becomes an engine or disappears.

    .building-<engine's id>-<random>/
        engine/       becomes <engine's id>/ by one rename
        scratch/      the build's temporary files
        elsewhere     the path of the scratch folder, if it cannot be in here
        child         a lock that the child process holds while it runs

The remains of killed processes are removed by the next process that opens the store: a workspace is in use while the
engine's lock or the child's lock is held.
"""

import contextlib
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from runtime.core.locks import held, is_held

_FOLDER = re.compile(r"\.building-([0-9a-f]{16})-[0-9a-f]{8}")
_LOCK_SECONDS = 10.0
_ELSEWHERE = re.compile(r"tandem-build-[0-9a-f]{16}")


@dataclass(frozen=True)
class Workspace:
    """The folders of one build: `engine` for the engine, `scratch` for temporary files."""

    folder: Path
    scratch: Path

    @property
    def engine(self) -> Path:
        """The folder that becomes the engine's."""
        return self.folder / "engine"


@contextlib.contextmanager
def workspace(store: Path, engine_id: str) -> Iterator[Workspace]:
    """Create a workspace in the store's folder and remove it afterwards; the caller holds the engine's lock.

    Raises:
        OSError: if it cannot be created.
    """
    folder = store / f".building-{engine_id}-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
        scratch = folder / "scratch"
        # Compilers fail on temporary files whose paths contain spaces.
        if re.search(r"\s", str(scratch)):
            scratch = Path(tempfile.gettempdir()) / f"tandem-build-{secrets.token_hex(8)}"
            (folder / "elsewhere").write_text(str(scratch), encoding="utf-8")
        scratch.mkdir(mode=0o700)
        (folder / "engine").mkdir()
        yield Workspace(folder, scratch)
    finally:
        _remove(folder)


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Hold the child's lock of a workspace, so that it is not removed while a child outlives its parent.

    Raises:
        OSError: if the workspace does not exist.
    """
    with held(folder / "child", seconds=_LOCK_SECONDS):
        yield


def sweep(store: Path, locks: Path) -> None:
    """Remove the workspaces that are not in use.

    Args:
        store: the store's folder.
        locks: the folder of the engines' locks.
    """
    for folder in entries(store):
        match = _FOLDER.fullmatch(folder.name)
        if match is not None:
            # A child may outlive its parent briefly.
            with contextlib.suppress(OSError), held(locks / match[1], seconds=0):
                if not is_held(folder / "child"):
                    _remove(folder)


def entries(folder: Path) -> list[Path]:
    """Return a folder's entries, sorted by name; none if it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError, ValueError):
        elsewhere = Path((folder / "elsewhere").read_text(encoding="utf-8"))
        # The file's content is not trusted: only a build's scratch folder is removed.
        if elsewhere.parent == Path(tempfile.gettempdir()) and _ELSEWHERE.fullmatch(elsewhere.name):
            shutil.rmtree(elsewhere, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
