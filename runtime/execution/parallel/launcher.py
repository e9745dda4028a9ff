"""The process between the one that leads and those of the GPUs: starts them, and sees to it that none outlives it.

    python -m runtime.execution.parallel.launcher     the job as a JSON line on standard input, which then stays open

Its end tells that whoever leads is gone: all are killed then. When one ends, a JSON line says how. On CPUs the
processes are forks of this one, which has imported what they need: that is done once. CUDA does not outlive a fork, so
for GPUs they are started anew.
"""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

_KILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def main() -> None:
    """Start the processes, and wait until they have ended."""
    job: dict[str, Any] = json.loads(sys.stdin.readline())
    on_cpu = all(device == "cpu" for device in job["devices"])
    if on_cpu:
        importlib.import_module("runtime.execution.parallel.worker")
    started: dict[int, int] = {}
    for number in range(len(job["devices"])):
        pid = os.fork()
        if pid:
            started[pid] = number
            continue
        _become(number, job)
        if on_cpu:
            _end_as(number, job)
        rank = json.dumps({"number": number, **job})
        os.execv(sys.executable, [sys.executable, "-m", "runtime.execution.parallel.worker", rank])
    for end in job["ends"]:
        os.close(end)
    threading.Thread(target=_end_with_leader, args=(list(started),), daemon=True).start()
    while started:
        pid, status = os.waitpid(-1, 0)
        if pid in started:
            code = os.waitstatus_to_exitcode(status)
            sys.stdout.write(json.dumps({"number": started.pop(pid), "code": code}) + "\n")
            with contextlib.suppress(OSError):
                sys.stdout.flush()


def _become(number: int, job: dict[str, Any]) -> None:
    """Keep one end, and write all that is said to a log."""
    log = os.open(Path(job["folder"]) / f"{number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for other, end in enumerate(job["ends"]):
        if other == number:
            os.set_inheritable(end, True)
        else:
            os.close(end)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_KILL_WITH_PARENT, signal.SIGKILL)


def _end_as(number: int, job: dict[str, Any]) -> None:
    """Be one of the processes, in a fork."""
    import traceback

    from runtime.execution.parallel.worker import serve

    code = 1
    try:
        serve(number, job)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _end_with_leader(started: list[int]) -> None:
    sys.stdin.read()
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
    # Nothing is to be tidied up, and with PyTorch imported that takes seconds.
    os._exit(0)
