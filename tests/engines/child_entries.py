"""Entry functions of the child process for tests: builds that succeed at once, fail, crash or hang."""

# ruff: noqa: T201  # printing is under test

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.engines.build import BuildJob as Job
from runtime.engines.child import Report
from tests.engines.engine_files import put


def make(job: Job, report: Report) -> dict[str, Any]:
    """Make an engine at once, with a line in a file for each time it was made."""
    with job.engine.parents[1].joinpath("made").open("a") as file:
        file.write("made\n")
    report(Fact("engine.compiling"), 0.5)
    time.sleep(0.3)
    put(job.engine, job.request.key, built_at=time.time())
    return {}


def make_wrong(job: Job, report: Report) -> dict[str, Any]:
    """Make an engine that differs from PyTorch."""
    detail = Fact("engine.compared_not_finite", {"where": "velocity"})
    put(job.engine, job.request.key, verified=False, detail=detail, error=float("nan"))
    return {}


def find_nan(job: Job, report: Report) -> dict[str, Any]:
    """Find NaN while verifying."""
    detail = Fact("engine.compared_not_finite", {"where": "velocity"})
    found = {"error": None, "tolerance": 1e-4, "verified": False, "detail": detail}
    return {**found, "seconds_per_call": 0.0, "pytorch_seconds_per_call": 0.0}


def forget(job: Job, report: Report) -> dict[str, Any]:
    """Return without making anything."""
    return {}


def raise_(job: Job, report: Report) -> dict[str, Any]:
    """Raise an internal error."""
    print("about to fail")
    raise ValueError("the shape is odd\nand more")


def refuse(job: Job, report: Report) -> dict[str, Any]:
    """Raise a user error."""
    raise EngineError("engine.tensorrt_parse_failed", version="10", detail="Foo is unknown")


def exhaust(job: Job, report: Report) -> dict[str, Any]:
    """Run out of memory."""
    raise MemoryError


def exhaust_within(job: Job, report: Report) -> dict[str, Any]:
    """Run out of memory within a library that raises another error."""
    try:
        raise MemoryError
    except MemoryError as error:
        raise RuntimeError("While interpreting the module got an error") from error


def babble(job: Job, report: Report) -> dict[str, Any]:
    """Print all sorts of things to all streams, then make an engine."""
    print(json.dumps({"type": "done", "result": {}}))
    print("no progress", file=sys.__stdout__)
    ctypes.CDLL(None).puts(b"from C")
    ctypes.CDLL(None).fflush(None)
    os.write(1, b'{"type": "done"}\n\xff\xfe\x00 \x1b[31mred\x1b[0m\r50%\r100%\n')
    os.write(2, b"x" * 3_000_000 + b"\n")
    print("[" * 100_000)
    return make(job, report)


def show_progress(job: object, report: Report) -> dict[str, Any]:
    """Show progress with tqdm, as libraries do."""
    return {"counted": len(list(tqdm(range(3))))}


def show_temporary_folders(job: object, report: Report) -> dict[str, Any]:
    """Return the folders of temporary files, of this process and of compilers."""
    names = ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    return {"folders": [str(Path.cwd()), tempfile.gettempdir(), *(os.environ[name] for name in names)]}


def pause(job: object, report: Report) -> dict[str, Any]:
    """Report nothing for a few seconds, then leave a file."""
    time.sleep(5)
    Path("ended").touch()
    return {}


def die(job: Job, report: Report) -> dict[str, Any]:
    """Crash in native code."""
    print("last words", flush=True)
    ctypes.string_at(0)
    return {}


def abort(job: object, report: Report) -> dict[str, Any]:
    """Crash whatever the job is."""
    os.abort()


def exit_(job: Job, report: Report) -> dict[str, Any]:
    """End the process with the exit code of success."""
    os.write(2, b"bye\n")
    os._exit(0)


def fill(job: Job, report: Report) -> dict[str, Any]:
    """Write until the disk is full."""
    with (job.engine / "engine.pt2").open("wb") as file:
        while True:
            file.write(b"x" * (1 << 16))


def never(job: object, report: Report) -> dict[str, Any]:
    """Stand for a child that must not be started."""
    raise AssertionError("a child was started")


def hang(job: Job, report: Report) -> dict[str, Any]:
    """Never end, with a child in another process group, and one that ignores signals."""
    code = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; time.sleep(600)"
    others = [subprocess.Popen([sys.executable, "-c", code], start_new_session=own) for own in (True, False)]
    Path(job.engine, "engine.pt2").write_bytes(b"half")
    report(Fact("engine.builder_output", {"line": f"pids {os.getpid()} {others[0].pid} {others[1].pid}"}), None)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
    return {}
