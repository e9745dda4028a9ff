"""How far TensorRT's builder is: its nested phases as one rising share. TensorRT 10 and later tell it."""

import threading
from dataclasses import dataclass
from typing import Any

from runtime.engines.tensorrt_library import Report

_SMALLEST_STEP = 0.005


@dataclass
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


class Phases:
    """The phases that run now, and the share of the whole that is done. Safe between threads."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._running: dict[str, _Phase] = {}
        self._told = 0.0
        self._lock = threading.Lock()

    def start(self, name: str, parent: str | None, steps: int) -> None:
        """A phase of so many steps begins within its parent."""
        with self._lock:
            self._running[name] = _Phase(parent, max(steps, 1))
            share = self._told
        self._report(name, share)

    def step(self, name: str, step: int) -> None:
        """A step, counted from 0, is done."""
        with self._lock:
            phase = self._running.get(name)
            if phase is None:
                return
            phase.done = step + 1
            share = max((self._share(root) for root, phase in self._running.items() if phase.parent is None), default=0)
            if share < self._told + _SMALLEST_STEP:
                return
            self._told = share
        self._report(name, share)

    def finish(self, name: str) -> None:
        """A phase ends, perhaps before its last step."""
        with self._lock:
            self._running.pop(name, None)

    def _share(self, name: str) -> float:
        phase = self._running[name]
        inner = max((self._share(child) for child, other in self._running.items() if other.parent == name), default=0.0)
        return min((phase.done + inner) / phase.steps, 1.0)


def monitor(trt: Any, report: Report) -> Any | None:
    """Return a `tensorrt.IProgressMonitor` that reports, or None where TensorRT has none (8.6)."""
    if not hasattr(trt, "IProgressMonitor"):
        return None
    phases = Phases(report)

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc] # its base is known at run time only
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            phases.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            phases.step(phase_name, step)
            return True

        def phase_finish(self, phase_name: str) -> None:
            phases.finish(phase_name)

    return Monitor()
