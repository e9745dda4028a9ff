"""Reads a fetched model through, and says which of its files are not what was fetched."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runtime.core.cancel import Cancel
from runtime.core.errors import ModelError
from runtime.models.hub.manifest import Manifest, difference, read_manifest


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What was found: the files that differ, each with what is wrong with it in a few words."""

    folder: Path
    manifest: Manifest
    wrong: dict[str, str]

    @property
    def total_bytes(self) -> int:
        """What the model takes on disk, where it is whole."""
        return sum(file.size for file in self.manifest.files.values())


def verify(folder: Path, cancel: Cancel, tell: Callable[[str, int, int], None]) -> Verified:
    """Compare a folder's files with the sizes and hashes that were noted when they were fetched.

    Args:
        tell: is given the file at work, the bytes read, and those to read in all.

    Raises:
        ModelError: if none were noted, or not readably.
        CancelledError: when asked to cancel.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise ModelError(
            f"{folder.name} was not put there by `models download`, so there are no hashes to compare it with.",
            "Compare it with where you have it from.",
        )
    done, wrong = 0, {}
    total = sum(file.size for file in manifest.files.values())
    for path, file in manifest.files.items():
        before = done

        def read(count: int, path: str = path) -> None:
            nonlocal done
            done += count
            tell(path, done, total)

        what = difference(folder / path, file, cancel, read)
        if what:
            wrong[path] = what
        done = before + file.size
        tell(path, done, total)
    return Verified(folder=folder, manifest=manifest, wrong=wrong)
