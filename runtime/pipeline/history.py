"""The history file: time and memory of jobs and attention kernels on this machine, for later plans and estimates.

A damaged or missing file is an empty history, and a folder that cannot be written is not an error. Processes write one
after the other. Reading imports no torch.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from runtime.core.frozen import FrozenModel
from runtime.core.locks import held
from runtime.core.plan import PYTORCH, ExecutionPlan
from runtime.core.request import AUTO
from runtime.machine.probe import Machine, gpu_index, seen_from
from runtime.models.spec import ModelSpec, attention_flops
from runtime.planner.execution_options import exact_attentions
from runtime.planner.history import (
    History,
    Run,
    attention_kind,
    attention_seconds,
    compiling,
    device_name,
    runs_of,
)
from runtime.planner.memory_model import DTYPE_BYTES

_VERSION: Literal[1] = 1
# Only the newest runs are kept, a few hundred bytes each.
_MOST = 400
_WAIT_SECONDS = 5.0

logger = logging.getLogger(__name__)

# Returns the seconds of one attention call: kind, tokens, heads, head dimension, dtype, device.
Measure = Callable[[str, int, int, int, str, str], float]


class _Document(FrozenModel):
    """The file."""

    version: Literal[1]
    runs: tuple[Run, ...]


class HistoryFile:
    """The history of jobs on `machine`, in `folder`."""

    def __init__(self, folder: Path, machine: Machine) -> None:
        self._path = folder / "history.json"
        self.machine = machine
        self._first = True
        self._known: tuple[tuple[int, int, int], History] | None = None

    def read(self) -> History:
        """Return all runs, the newest last; the file is read again only when it has changed."""
        try:
            found = self._path.stat()
        except OSError:
            return ()
        # With the inode: every write makes a new file, so two writes within one clock tick differ too.
        stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
        known = self._known
        if known is None or known[0] != stamp:
            known = self._known = (stamp, self._parsed())
        return known[1]

    def _parsed(self) -> History:
        try:
            return _Document.model_validate_json(self._path.read_bytes()).runs
        except (OSError, ValidationError):
            return ()

    def add(self, new: Iterable[Run]) -> None:
        """Add runs; each replaces the run of the same kind and size, and keeps that one's memory if it has none."""
        runs = {(run.kind, run.flops): run for run in new}
        if not runs:
            return
        target = self._path
        written = target.with_suffix(f".{os.getpid()}.tmp")
        try:
            with held(target.with_suffix(".lock"), seconds=_WAIT_SECONDS):
                before = {(run.kind, run.flops): run for run in self.read()}
                kept = [run for key, run in before.items() if key not in runs]
                now = [_with_memory_of(before.get(key), run) for key, run in runs.items()]
                document = _Document(version=_VERSION, runs=(*kept, *now)[-_MOST:])
                written.write_text(document.model_dump_json(), encoding="utf-8")
                written.replace(target)
        except OSError as error:  # includes a timeout of the lock
            logger.warning("%s could not be written: %s", target.name, error.strerror or error)

    def add_job(
        self,
        planned: ExecutionPlan,
        ran: ExecutionPlan,
        spec: ModelSpec,
        timings: Mapping[str, float],
        peaks: Mapping[str, int],
    ) -> None:
        """Add a job that succeeded; see `planner.history.runs_of` for the arguments.

        Memory counts only for a process's first job; later ones start with memory in use or cached.
        """
        self.add(runs_of(planned, ran, spec, self.machine, timings, peaks if self._first else {}))
        self._first = False

    def add_compilation(self, plan: ExecutionPlan, spec: ModelSpec, seconds: float) -> None:
        """Add the time that compilation took."""
        self.add([compiling(plan, spec, self.machine, seconds)])


def _with_memory_of(before: Run | None, run: Run) -> Run:
    if before is None or run.excess_bytes is not None:
        return run
    return run.replace(working_bytes=before.working_bytes, excess_bytes=before.excess_bytes)


def measure_attention(
    plan: ExecutionPlan, spec: ModelSpec, history: HistoryFile, measure: Measure | None = None
) -> None:
    """Measure the exact attention kernels on this GPU, once per size class and dtype.

    The job itself keeps its planned kernel, so that it can be resumed bit for bit; the measurements serve later plans.

    Args:
        measure: `execution.attention.seconds_of` by default.
    """
    missing = unmeasured(plan, spec, history.read(), history.machine)
    if not missing:
        return
    from runtime.execution.attention import seconds_of
    from runtime.execution.memory import release_cached_memory

    measure = measure or seconds_of
    part, transformer = plan.components["transformer"], spec.transformer
    flops, name = attention_flops(spec, plan.tokens), device_name(history.machine, part.device)
    found = []
    for kind in missing:
        try:
            seconds = measure(
                kind,
                plan.tokens,
                transformer.num_attention_heads,
                transformer.attention_head_dim,
                part.dtype,
                part.device,
            )
        except Exception as error:  # each package raises its own errors; a kernel that fails is not used
            logger.info("The attention %s was not measured: %s", kind, type(error).__name__)
            continue
        kind_of_run = attention_kind(name, part.dtype, kind)
        found.append(Run(kind=kind_of_run, flops=flops, seconds=seconds, working_bytes=1, excess_bytes=None))
    release_cached_memory()
    history.add(found)


def unmeasured(plan: ExecutionPlan, spec: ModelSpec, history: History, machine: Machine) -> list[str]:
    """Return the attention kernels to measure before a clip is made."""
    part = plan.components["transformer"]
    full = DTYPE_BYTES[part.dtype] > DTYPE_BYTES["bfloat16"]
    if plan.asked.attention != AUTO or part.backend != PYTORCH or not part.device.startswith("cuda") or full:
        return []
    name, flops = device_name(machine, part.device), attention_flops(spec, plan.tokens)
    if attention_seconds(history, name, part.dtype, flops):
        return []
    return exact_attentions(seen_from(machine, gpu_index(part.device)))
