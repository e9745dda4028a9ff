"""What may stand in the place of a file that is read without trust."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

# Deeper than any parser goes, with fewer values than are accepted.
DEEP = b'{"a":' * 10_000


def _large(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


HOSTILE: dict[str, Callable[[Path], object]] = {
    **({} if sys.platform == "win32" else {"fifo": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero")}),
    "folder": lambda path: path.mkdir(),
    "deep": lambda path: path.write_bytes(DEEP),
    "large": _large,
}
