"""The child process of `child`: loads a program, builds its engine, proves it, writes engine.json last.

python -m runtime.engines.build_child < job.json      never typed by anybody
"""

import contextlib
import errno
import gc
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import psutil

from runtime.core.cpu_threads import let_waiting_threads_sleep
from runtime.core.errors import TandemError
from runtime.core.loras import LoraUse
from runtime.engines.workspace import working_in
from runtime.machine.probe import probe
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec
from runtime.planner.engine_index import IMPORTED, SWAPPED, EngineKey, EngineRecord
from runtime.planner.memory_model import DTYPE_BYTES

_FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# The float32 module and what it computes with, as a share of the free memory.
_REFERENCE_SHARE = 0.5


class Report(Protocol):
    """Tells of progress: a line, and the share done where that is known."""

    def __call__(self, line: str, share: float | None = None) -> None: ...


class Parent:
    """The way back to the parent: what was standard output, before libraries could write to it."""

    def __init__(self) -> None:
        self._file = os.dup(1)
        # Whatever is printed, by Python or by a library underneath, joins standard error: the log.
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        self._lock = threading.Lock()

    def say(self, message: Mapping[str, Any]) -> None:
        """Send one message, whole."""
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            while data:
                data = data[os.write(self._file, data) :]

    def report(self, line: str, share: float | None = None) -> None:
        """Tell of progress."""
        self.say({"line": line, "share": share})


def main() -> None:
    """Do the job that comes on standard input."""
    parent = Parent()
    job = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    let_waiting_threads_sleep()
    try:
        with working_in(Path(job["workspace"])):
            parent.say({"done": TASKS[job["task"]](job, parent.report)})
    except BaseException as error:
        traceback.print_exc()
        parent.say(_failure(error))
        sys.stderr.flush()
        os._exit(1)
    # Libraries may crash as they are torn down; what they made is complete.
    sys.stderr.flush()
    os._exit(0)


def build(job: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Build one engine, prove it, write engine.json last."""
    from runtime.engines import manifest
    from runtime.engines.builders import BUILDERS
    from runtime.engines.programs import load_program

    folder, component, device = Path(job["engine"]), job["component"], job["device"]
    spec, key = _spec(job), EngineKey.from_json(job["key"])
    builder = BUILDERS[key.builder]
    report(f"Loading the weights of the {component}")
    program = load_program(spec, component, key.program, device=device, dtype=key.precision)
    started = time.monotonic()
    builder.build(program, key, folder, report)
    seconds = time.monotonic() - started
    del program
    _free_memory(device)
    files = manifest.hashed_files(folder, builder.file_name)
    record = EngineRecord(
        id=key.digest(),
        key=key,
        model=spec.name,
        component=component,
        files=files,
        file_bytes=sum(file.bytes for file in files),
        build_seconds=round(seconds, 3),
        built_at=time.time(),
        last_used=time.time(),
        loras=() if key.weights == SWAPPED else spec.loras_of(component),
    )
    found = _prove(spec, component, record, folder, device, report)
    manifest.write(folder, replace(record, **found))
    return {}


def verify(job: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Prove an engine that is in the store."""
    from runtime.engines import manifest

    folder = Path(job["engine"])
    # An engine that is being imported is not in a folder of its name yet.
    record = manifest.read(folder, EngineKey.from_json(job["key"]).digest())
    found = _prove(_spec(job), job["component"], record, folder, job["device"], report)
    # JSON has no NaN.
    return {**found, "error": found["error"] if math.isfinite(found["error"]) else None}


def inspect(job: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Open an engine file that was made elsewhere, and return its contract."""
    from runtime.engines.imported.reading import read

    report("Opening the engine file")
    return read(Path(job["file"]), job["backend"], job["device"]).to_json()


TASKS: Mapping[str, Callable[[Mapping[str, Any], Report], dict[str, Any]]] = {
    "build": build,
    "verify": verify,
    "inspect": inspect,
}


def _spec(job: Mapping[str, Any]) -> ModelSpec:
    spec = read_spec(Path(job["model"]["directory"]), job["model"]["name"])
    return replace(spec, loras=tuple(LoraUse.from_json(use) for use in job["model"].get("loras", ())))


def _prove(
    spec: ModelSpec, component: str, record: EngineRecord, folder: Path, device: str, report: Report
) -> dict[str, Any]:
    """Run the engine beside PyTorch and return what an `EngineRecord` says of that."""
    from runtime.engines.imported.session import prove_imported
    from runtime.engines.programs import load_program
    from runtime.engines.sessions import open_session
    from runtime.engines.verify import verify

    key = record.key

    def weights() -> Mapping[str, Any]:
        return load_program(spec, component, key.program, device=device, dtype=key.precision).module.state_dict()

    compare = prove_imported if key.builder == IMPORTED else verify
    report("Comparing with PyTorch")
    with open_session(folder, record, device=device, weights=weights) as session:
        dtype = "float32" if _float32_fits(spec, component, device) else key.precision
        reference = load_program(spec, component, key.program, device=device, dtype=dtype)
        results = [compare(session, reference, profile, key.precision) for profile in key.profiles]
    worst = max(results, key=lambda result: math.inf if math.isnan(result.error) else result.error)
    return {
        "error": worst.error,
        "tolerance": worst.tolerance,
        "verified": all(result.passed for result in results),
        "detail": worst.detail,
        "seconds_per_call": results[0].seconds_per_call,
        "pytorch_seconds_per_call": results[0].pytorch_seconds_per_call,
    }


def _float32_fits(spec: ModelSpec, component: str, device: str) -> bool:
    import torch

    free = torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else probe().ram_free_bytes
    return DTYPE_BYTES["float32"] * spec.parameters[component] < _REFERENCE_SHARE * free


def _free_memory(device: str) -> None:
    import torch

    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def _failure(error: BaseException) -> dict[str, Any]:
    if isinstance(error, TandemError):
        return {"failed": error.what, "remedy": error.remedy, "kind": "told"}
    name = type(error).__name__
    said = str(error).strip().splitlines()
    kind = "defect"
    if isinstance(error, MemoryError) or name == "OutOfMemoryError":
        kind = "memory"
    elif isinstance(error, OSError) and error.errno in _FULL_DISK:
        kind = "disk"
    return {"failed": f"{name}: {said[0]}" if said else name, "remedy": "", "kind": kind}


def _end_with_parent() -> None:
    """End when standard input does: the parent is gone, however it went, and nobody waits for what is built here."""
    with contextlib.suppress(OSError):
        while os.read(0, 1 << 10):
            pass
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().children(recursive=True):
            process.kill()
    if sys.platform != "win32" and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
