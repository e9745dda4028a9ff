"""Where one engine is built: a hidden folder of the store that is whole or gone.

    .building-<engine's id>-<random>/
        engine/       becomes <engine's id>/ by one rename
        scratch/      the build's temporary files
        elsewhere     the path of the scratch folder, where that cannot be in here
        child         a lock that the child process holds while it lives

What processes that were killed left behind is removed by whoever comes next: a folder belongs to a living build while
the engine's lock or the child's is held.
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
    """The folders of one build: `engine` is for what is built, `scratch` for temporary files."""

    folder: Path
    scratch: Path

    @property
    def engine(self) -> Path:
        """What becomes the engine's folder."""
        return self.folder / "engine"


@contextlib.contextmanager
def workspace(store: Path, engine_id: str) -> Iterator[Workspace]:
    """Make a workspace in the store's folder; hold the engine's lock around it. Afterwards nothing of it is left.

    Raises:
        OSError: if it cannot be made.
    """
    folder = store / f".building-{engine_id}-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
        scratch = folder / "scratch"
        # Compilers trip over spaces in the paths of their temporary files.
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
    """Hold the child's lock of a workspace: nobody removes it under a child whose parent is gone.

    Raises:
        OSError: if the workspace is gone.
    """
    with held(folder / "child", seconds=_LOCK_SECONDS):
        yield


def sweep(store: Path, locks: Path) -> None:
    """Remove the workspaces that no living build owns.

    Args:
        store: the store's folder.
        locks: the folder of the engines' locks.
    """
    for folder in entries(store):
        match = _FOLDER.fullmatch(folder.name)
        if match is not None:
            # A child may outlive its parent by a moment.
            with contextlib.suppress(OSError), held(locks / match[1], seconds=0):
                if not is_held(folder / "child"):
                    _remove(folder)


def entries(folder: Path) -> list[Path]:
    """Return what is in a folder, sorted by name; of one that is gone or closed to us, nothing."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError, ValueError):
        elsewhere = Path((folder / "elsewhere").read_text(encoding="utf-8"))
        # The file is read with suspicion: nothing but a build's own scratch folder is removed.
        if elsewhere.parent == Path(tempfile.gettempdir()) and _ELSEWHERE.fullmatch(elsewhere.name):
            shutil.rmtree(elsewhere, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
