"""The child process with other tasks in place of a build: what a builder may do to it. Run as the real one is."""

# ruff: noqa: T201  # printing is what is tried

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runtime.core.errors import EngineError
from runtime.engines import build_child
from runtime.engines.build_child import Report
from runtime.planner.engine_index import EngineKey
from tests.engines.made import put

Job = Mapping[str, Any]


def make(job: Job, report: Report) -> dict[str, Any]:
    """Make an engine at once, with a line in a file per time it was made."""
    with Path(job["engine"]).parents[1].joinpath("made").open("a") as file:
        file.write("made\n")
    report("half", 0.5)
    time.sleep(0.3)
    put(Path(job["engine"]), EngineKey.from_json(job["key"]), built_at=time.time())
    return {}


def make_wrong(job: Job, report: Report) -> dict[str, Any]:
    """Make an engine that does not do what PyTorch does."""
    key = EngineKey.from_json(job["key"])
    put(Path(job["engine"]), key, verified=False, detail="NaN in velocity", error=float("nan"))
    return {}


def prove(job: Job, report: Report) -> dict[str, Any]:
    """Find that an engine holds NaN now."""
    found = {"error": None, "tolerance": 1e-4, "verified": False, "detail": "velocity holds NaN or Inf"}
    return {**found, "seconds_per_call": 0.0, "pytorch_seconds_per_call": 0.0}


def forget(job: Job, report: Report) -> dict[str, Any]:
    """Say that all is done, with nothing made."""
    return {}


def raise_(job: Job, report: Report) -> dict[str, Any]:
    """Raise what a defect raises."""
    print("about to fail")
    raise ValueError("the shape is odd\nand more")


def refuse(job: Job, report: Report) -> dict[str, Any]:
    """Raise what the user can mend."""
    raise EngineError("The operator Foo is unknown.", "Take another builder.")


def exhaust(job: Job, report: Report) -> dict[str, Any]:
    """Run out of memory."""
    raise MemoryError


def babble(job: Job, report: Report) -> dict[str, Any]:
    """Print all sorts of things wherever one can, then do it."""
    print(json.dumps({"done": {}}))
    print(json.dumps({"line": "no progress", "share": 0.9}), file=sys.__stdout__)
    ctypes.CDLL(None).puts(b'{"failed": "from C"}')
    ctypes.CDLL(None).fflush(None)
    os.write(1, b'{"done": {}}\n\xff\xfe\x00 \x1b[31mred\x1b[0m\r50%\r100%\n')
    os.write(2, b"x" * 3_000_000 + b"\n")
    print("[" * 100_000)
    return make(job, report)


def die(job: Job, report: Report) -> dict[str, Any]:
    """Crash in native code."""
    print("last words", flush=True)
    ctypes.string_at(0)
    return {}


def exit_(job: Job, report: Report) -> dict[str, Any]:
    """End the process as if all were well."""
    os.write(2, b"bye\n")
    os._exit(0)


def fill(job: Job, report: Report) -> dict[str, Any]:
    """Write until the disk is full."""
    with Path(job["engine"], "engine.pt2").open("wb") as file:
        while True:
            file.write(b"x" * (1 << 16))


def hang(job: Job, report: Report) -> dict[str, Any]:
    """Never end, with a child of its own that never ends and left the group, and one that is deaf to signals."""
    code = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; time.sleep(600)"
    others = [subprocess.Popen([sys.executable, "-c", code], start_new_session=own) for own in (True, False)]
    Path(job["engine"], "engine.pt2").write_bytes(b"half")
    report(f"pids {os.getpid()} {others[0].pid} {others[1].pid}")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
    return {}


ODD: Mapping[str, Callable[[Job, Report], dict[str, Any]]] = {
    function.__name__: function
    for function in (make, make_wrong, prove, forget, raise_, refuse, exhaust, babble, die, exit_, fill, hang)
}

if __name__ == "__main__":
    build_child.TASKS = dict.fromkeys(build_child.TASKS, ODD[sys.argv[1]])
    build_child.main()
