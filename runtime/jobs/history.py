"""The file that remembers what jobs took here. Damaged or missing, it is empty; processes write one after the other.

What is remembered is a help, not a need: a folder that cannot be written to is no error.
"""

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from runtime.core.plan import ExecutionPlan
from runtime.engines.locks import held
from runtime.manager.history import History, Run, runs_of
from runtime.manager.machine import Machine
from runtime.models.spec import ModelSpec

_VERSION = 1
# The newest so many are kept, a few hundred bytes each.
_MOST = 400
_WAIT_SECONDS = 5.0

logger = logging.getLogger(__name__)


class HistoryFile:
    """What jobs took on `machine`, kept in `folder`."""

    def __init__(self, folder: Path, machine: Machine) -> None:
        self._path = folder / "history.json"
        self._machine = machine
        self._first = True

    def read(self) -> History:
        """Return all runs, the newest last."""
        try:
            values = json.loads(self._path.read_text(encoding="utf-8"))
            return tuple(Run.from_json(run) for run in values["runs"]) if values["version"] == _VERSION else ()
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
            return ()

    def add(self, new: Iterable[Run]) -> None:
        """Remember runs; each takes the place of the one before of its kind and size."""
        runs = list(new)
        if not runs:
            return
        known = {(run.kind, run.flops) for run in runs}
        target = self._path
        written = target.with_suffix(f".{os.getpid()}.tmp")
        try:
            with held(target.with_suffix(".lock"), seconds=_WAIT_SECONDS):
                kept = [run for run in self.read() if (run.kind, run.flops) not in known]
                values = {"version": _VERSION, "runs": [run.to_json() for run in (*kept, *runs)[-_MOST:]]}
                written.write_text(json.dumps(values), encoding="utf-8")
                written.replace(target)
        except OSError as error:  # a lock that nobody gives back in time is one too
            logger.warning("What the job took could not be noted in %s: %s", target, error)

    def note(
        self,
        planned: ExecutionPlan,
        ran: ExecutionPlan,
        spec: ModelSpec,
        timings: Mapping[str, float],
        peaks: Mapping[str, int],
    ) -> None:
        """Remember a job that ended well; see `manager.history.runs_of` for the arguments.

        Memory is told by a process's first job only: later ones find some of it taken, or free and not given back.
        """
        self.add(runs_of(planned, ran, spec, self._machine, timings, peaks if self._first else {}))
        self._first = False
