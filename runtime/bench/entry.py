"""One configuration while it is measured: its plan, its runs, and what became of it, as JSON at the end."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from runtime.bench.component_errors import PartError
from runtime.bench.configurations import Configuration, backend_text
from runtime.bench.recorder import Told
from runtime.bench.similarity import Likeness
from runtime.bench.statistics import Spread, spread
from runtime.core.plan import ExecutionPlan
from runtime.execution.residency import Residency
from runtime.models.spec import ModelSpec

# "same" as another one, which is measured for both.
State = Literal["waiting", "measured", "same", "refused", "failed", "fell back"]
# What PyTorch allocated on the GPU, what is in use there in all, and the process's resident memory.
MEMORIES = ("vram", "gpu", "ram")
STAGES = ("encode", "denoise", "decode", "mux", "total")


@dataclass(frozen=True)
class EngineFacts:
    """An engine that a configuration runs on; `built_now` says that it was built for this benchmark."""

    id: str
    program: str
    build_seconds: float
    built_now: bool


@dataclass
class Entry:
    """One configuration.

    Attributes:
        state: what became of it; `why` and `remedy` say more where it was not measured.
        spec, plan: once it was planned.
        residency: holds its parts.
        first: its first run, which loads and builds.
        runs: those that count.
        held: bytes that stay with it between runs, of each `MEMORIES`.
        peaks: bytes at the most, of each `MEMORIES` by stage, what it holds between runs included.
        engines: that it runs on.
        parts: the error of one forward pass, by part.
        quality: how alike its clip is to the reference's; `not_compared` says why there is none.
        digests: of the frames of each run.
    """

    configuration: Configuration
    residency: Residency
    state: State = "waiting"
    why: str = ""
    remedy: str = ""
    spec: ModelSpec | None = None
    plan: ExecutionPlan | None = None
    first: Told | None = None
    runs: list[Told] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, dict[str, int]] = field(default_factory=lambda: {kind: {} for kind in MEMORIES})
    engines: tuple[EngineFacts, ...] = ()
    parts: dict[str, PartError] = field(default_factory=dict)
    quality: Likeness | None = None
    not_compared: str = ""
    digests: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its name."""
        return self.configuration.name

    @property
    def live(self) -> bool:
        """Whether it is to run again."""
        return self.state in {"waiting", "measured"}

    def planned(self) -> tuple[ModelSpec, ExecutionPlan]:
        """Return its model and plan, once there is one."""
        assert self.spec is not None and self.plan is not None
        return self.spec, self.plan

    def out(self, state: State, why: str, remedy: str = "") -> None:
        """End it. What a configuration took that fell back is nobody's time: its figures go."""
        self.state, self.why, self.remedy = state, why, remedy
        if state == "fell back":
            self.runs.clear()
            self.parts.clear()
            self.quality = None
            self.first = None
        self.residency.free()

    def note_memory(self, run: Told) -> None:
        """Take the peaks of a run in, which found held what `held` says."""
        for kind, of_run in (("vram", run.vram), ("gpu", run.gpu), ("ram", run.ram)):
            peaks = self.peaks[kind]
            for stage, beyond in of_run.items():
                peaks[stage] = max(peaks.get(stage, 0), self.held.get(kind, 0) + beyond, 0)

    def note_frames(self, frames: Sequence[np.ndarray]) -> None:
        """Remember which frames a run gave."""
        digest = hashlib.sha256()
        for batch in frames:
            digest.update(np.ascontiguousarray(batch).data)
        self.digests.append(digest.hexdigest())

    @property
    def repeats(self) -> bool | None:
        """Whether all runs gave the same frames; `None` where there was one at most."""
        return len(set(self.digests)) == 1 if len(self.digests) > 1 else None

    def to_json(self) -> dict[str, Any]:
        """Return all that is known, as JSON types."""
        plan, first = self.plan, self.first
        warnings = {message: None for run in (first, *self.runs) if run is not None for message in run.warnings}
        return {
            "name": self.name,
            "flags": self.configuration.flags,
            "state": self.state,
            "why": self.why,
            "remedy": self.remedy,
            "runs_on": None if plan is None else backend_text(plan),
            "request": None if plan is None else plan.request_json(),
            "plan": None if plan is None else plan.to_json(),
            "runs": len(self.runs),
            "stages": {name: _json(figure) for name, figure in stages(self.runs).items()},
            "step": _json(spread([seconds for run in self.runs for seconds in run.steps])),
            "wall": _json(spread([run.wall_seconds for run in self.runs])),
            "first": None
            if first is None
            else {"wall": first.wall_seconds, "load": first.load_seconds, "timings": dict(first.timings)},
            "load": _json(spread([run.load_seconds for run in self.runs])),
            "build_seconds": None if first is None else first.build_seconds,
            "engines": [vars(engine) for engine in self.engines],
            "memory": {kind: dict(peaks) for kind, peaks in self.peaks.items()},
            "parts": {name: vars(part) for name, part in self.parts.items()},
            "quality": None if self.quality is None else self.quality.to_json(),
            "not_compared": self.not_compared,
            "repeats": self.repeats,
            "warnings": list(warnings),
        }


def stages(runs: Sequence[Told]) -> Mapping[str, Spread]:
    """Return the spread of each stage over runs."""
    found = {name: spread([run.timings[name] for run in runs if name in run.timings]) for name in STAGES}
    return {name: figure for name, figure in found.items() if figure is not None}


def _json(figure: Spread | None) -> dict[str, float] | None:
    return None if figure is None else figure.to_json()
