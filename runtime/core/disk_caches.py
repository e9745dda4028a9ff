"""Folders of the cache that only make later starts faster, or previews better, each with a limit.

What was used least recently goes first.

    quantized/      weights after quantization, an entry for each transformer
    compiled/       code that Inductor, Triton and FlashAttention 4 compiled
    latent_colors/  the map from latents to colors of previews, a file for each VAE
    control_frames/ depth and poses of control videos, a file for each clip

They can be deleted at any time. Engines have a limit of their own, which is a setting.
"""

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class DiskCache(NamedTuple):
    """A folder of the cache, and the most bytes in it."""

    name: str
    max_bytes: int


# Two experts of 14 billion weights in FP8 take 29 GB.
QUANTIZED = DiskCache("quantized", 64 * 10**9)
# The compiled blocks and decoder of a model take a few megabytes for each size of clip.
COMPILED = DiskCache("compiled", 4 * 10**9)
# A file takes 4 KB for 16 channels, and 150 KB for 128.
LATENT_COLORS = DiskCache("latent_colors", 10**7)
# Depth of 81 frames of 832×480 takes 32 MB, poses three times as much.
CONTROL_FRAMES = DiskCache("control_frames", 4 * 10**9)
DISK_CACHES = (QUANTIZED, COMPILED, LATENT_COLORS, CONTROL_FRAMES)


class Entry(NamedTuple):
    """A file, or a folder, that is removed as a whole; when it was used, in nanoseconds since 1970; and its bytes."""

    used: int
    size: int
    path: Path


def files_of(folder: Path) -> list[Entry]:
    """Return all files of a folder. Reading a file sets its time of access, on most disks once a day."""
    entries = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            stat = path.stat(follow_symlinks=False)
            if path.is_file():
                entries.append(Entry(max(stat.st_atime_ns, stat.st_mtime_ns), stat.st_size, path))
    return entries


def bytes_in(folder: Path) -> int:
    """Return the bytes of all files of a folder; 0 if it does not exist."""
    return sum(entry.size for entry in files_of(folder))


def evict(entries: Iterable[Entry], max_bytes: int, keep: Path | None = None) -> None:
    """Remove the least recently used entries until the others take at most `max_bytes`.

    Args:
        keep: an entry that stays.
    """
    in_order = sorted(entries)
    total = sum(entry.size for entry in in_order)
    for _, size, path in in_order:
        if total > max_bytes and path != keep:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):  # in use on Windows
                    path.unlink(missing_ok=True)
            total -= size
