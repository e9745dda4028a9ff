"""`tests.sharing_app` with few file descriptors, and with a clock that a file moves, in all its processes.

The file `$TANDEM_CHAOS_CLOCK` contains seconds that are added to `time.time()`. Importing this module moves the clock.
"""

import contextlib
import os
import resource
import time
from pathlib import Path

from tests.chaos import CLOCK

DESCRIPTORS = 512
_real = time.time_ns


def _time_ns() -> int:
    offset = 0.0
    with contextlib.suppress(OSError, ValueError):
        offset = float(Path(os.environ[CLOCK]).read_text(encoding="ascii"))
    return _real() + int(offset * 1e9)


def _time() -> float:
    return _time_ns() / 1e9


# Also in the processes that the app starts, which import this module again.
time.time_ns, time.time = _time_ns, _time

if __name__ == "__main__":
    from tests import sharing_app

    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    sharing_app.main()
