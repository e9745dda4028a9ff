"""The history file: time and memory that jobs took on this machine, for later estimates.

A damaged or missing file is an empty history, and a folder that cannot be written is not an error. Processes write one
after the other.
"""

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from runtime.core.frozen import FrozenModel
from runtime.core.locks import held
from runtime.core.plan import ExecutionPlan
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec
from runtime.planner.history import History, Run, compiling, runs_of

_VERSION: Literal[1] = 1
# Only the newest runs are kept, a few hundred bytes each.
_MOST = 400
_WAIT_SECONDS = 5.0

logger = logging.getLogger(__name__)


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

    def note(
        self,
        planned: ExecutionPlan,
        ran: ExecutionPlan,
        spec: ModelSpec,
        timings: Mapping[str, float],
        peaks: Mapping[str, int],
    ) -> None:
        """Add a job that ended well; see `planner.history.runs_of` for the arguments.

        Memory counts only for a process's first job; later ones start with memory in use or cached.
        """
        self.add(runs_of(planned, ran, spec, self.machine, timings, peaks if self._first else {}))
        self._first = False

    def note_compiling(self, plan: ExecutionPlan, spec: ModelSpec, seconds: float) -> None:
        """Add the time that compilation took."""
        self.add([compiling(plan, spec, self.machine, seconds)])


def _with_memory_of(before: Run | None, run: Run) -> Run:
    if before is None or run.excess_bytes is not None:
        return run
    return run.replace(working_bytes=before.working_bytes, excess_bytes=before.excess_bytes)
