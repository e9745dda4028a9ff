"""Runs a benchmark: all configurations warm up, then take turns (A B C A B C), each run a complete job.

Turns spread drift, such as heat or other programs, over all configurations. Only the result is kept: no job in the
store, no history, and no video unless requested.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from runtime.bench.configurations import (
    Configuration,
    backend_text,
    clip_difference,
    fallback_text,
    fit_together,
    in_float32,
    plan_key,
    without_builds,
)
from runtime.bench.recorder import Measurement, Recorder, UnwrittenHistory, failure_text, used_memory
from runtime.bench.result_files import describe_environment
from runtime.bench.similarity import Similarity, similarity
from runtime.bench.statistics import Spread, spread
from runtime.core.cancel import Cancel, CancelledError
from runtime.core.environment import program
from runtime.core.errors import TandemError
from runtime.core.events import Cancelled, VideoSaved
from runtime.core.files import give_usual_permissions
from runtime.core.locks import remove_scratch_folders, scratch_folder
from runtime.core.plan import ExecutionPlan
from runtime.core.units import about, counted
from runtime.engines.reference import full_float32
from runtime.engines.service import EngineService
from runtime.execution.memory import release_cached_memory
from runtime.execution.residency import Residency
from runtime.machine.probe import Machine
from runtime.models.requested import model_for
from runtime.models.spec import ModelSpec
from runtime.pipeline.files import make_folder, slug
from runtime.planner.resolve import PlanningContext, resolve
from runtime.queue.executors import make_video
from runtime.queue.run import PutBack

_SCRATCH = ".bench-"
SCHEMA = 1
Report = Callable[[str], None]
# "same": its plan equals that of another configuration, which is measured instead.
State = Literal["waiting", "measured", "same", "refused", "failed", "fell back"]
# Memory that PyTorch allocated on the GPU, all used memory of the GPU, and the resident memory of the process.
MEMORIES = ("vram", "gpu", "ram")
STAGES = ("encode", "denoise", "decode", "mux", "total")


@dataclass(frozen=True)
class EngineUsed:
    """An engine that a configuration uses; `built_now` if it was built during this benchmark."""

    id: str
    program: str
    build_seconds: float
    built_now: bool


@dataclass
class Entry:
    """One configuration with its plan and its measurements.

    Attributes:
        state: how far it was measured; `why` and `remedy` are the reason if it was not.
        spec, plan: set when it is planned.
        residency: keeps its components loaded.
        first: its first run, which loads weights and builds engines.
        runs: measured runs, after the warm-up.
        resident_bytes: bytes that it keeps between runs, by kind of memory.
        peaks: peak bytes by kind of memory and stage, including those that it keeps between runs.
        engines: the engines that it uses.
        quality: similarity of its clip to the reference's; `not_compared` is the reason if there is none.
        digests: SHA-256 of the frames of each run.
    """

    configuration: Configuration
    residency: Residency
    state: State = "waiting"
    why: str = ""
    remedy: str = ""
    spec: ModelSpec | None = None
    plan: ExecutionPlan | None = None
    first: Measurement | None = None
    runs: list[Measurement] = field(default_factory=list)
    resident_bytes: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, dict[str, int]] = field(default_factory=lambda: {kind: {} for kind in MEMORIES})
    engines: tuple[EngineUsed, ...] = ()
    quality: Similarity | None = None
    not_compared: str = ""
    digests: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the configuration."""
        return self.configuration.name

    @property
    def live(self) -> bool:
        """Whether it can run."""
        return self.state in {"waiting", "measured"}

    def planned(self) -> tuple[ModelSpec, ExecutionPlan]:
        """Return its model and plan."""
        assert self.spec is not None and self.plan is not None
        return self.spec, self.plan

    def stop(self, state: State, why: str, remedy: str = "") -> None:
        """Stop measuring it; after a fallback its measurements are deleted, since they mix two configurations."""
        self.state, self.why, self.remedy = state, why, remedy
        if state == "fell back":
            self.runs.clear()
            self.quality = None
            self.first = None
        self.residency.free()

    def add_memory(self, run: Measurement) -> None:
        """Update the peaks with those of a run."""
        for kind, of_run in (("vram", run.vram), ("gpu", run.gpu), ("ram", run.ram)):
            peaks = self.peaks[kind]
            for stage, beyond in of_run.items():
                peaks[stage] = max(peaks.get(stage, 0), self.resident_bytes.get(kind, 0) + beyond, 0)

    def add_frames(self, frames: Sequence[np.ndarray]) -> None:
        """Add the digest of a run's frames."""
        digest = hashlib.sha256()
        for batch in frames:
            digest.update(np.ascontiguousarray(batch).data)
        self.digests.append(digest.hexdigest())

    @property
    def repeats(self) -> bool | None:
        """Whether all runs gave the same frames; `None` with fewer than two runs."""
        return len(set(self.digests)) == 1 if len(self.digests) > 1 else None

    def to_json(self) -> dict[str, Any]:
        """Return plan and measurements as JSON types."""
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
            "quality": None if self.quality is None else self.quality.to_json(),
            "not_compared": self.not_compared,
            "repeats": self.repeats,
            "warnings": list(warnings),
        }


def stages(runs: Sequence[Measurement]) -> Mapping[str, Spread]:
    """Return the spread of each stage over runs."""
    spreads = {name: spread([run.timings[name] for run in runs if name in run.timings]) for name in STAGES}
    return {name: figure for name, figure in spreads.items() if figure is not None}


def _json(figure: Spread | None) -> dict[str, float] | None:
    return None if figure is None else figure.to_json()


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Machine, folders and options of a benchmark.

    Attributes:
        machine: probed before anything is loaded.
        history: timings of earlier jobs, for forecasts; not changed.
        weights_dir: folder of the models.
        folder: folder for videos and temporary files.
        runs, warmup: measured runs of each configuration, and runs before them.
        keep_videos: whether to keep the first measured video of each configuration, as NAME.mp4.
    """

    machine: Machine
    engines: EngineService
    history: UnwrittenHistory
    weights_dir: Path
    folder: Path
    runs: int = 3
    warmup: int = 1
    keep_videos: bool = False


@dataclass
class Bench:
    """A benchmark: `measure` runs it, and `to_json` returns the results so far.

    Attributes:
        entries: the configurations; the first one is the reference.
        report: called with a line of text for each step.
        saved: called with the benchmark after each run, to save the results so far.
        cancelled: whether runs are missing, also because the process was killed; false once all are done.
    """

    setup: Setup
    entries: list[Entry]
    report: Report
    saved: Callable[["Bench"], None] = lambda _: None
    together: bool = False
    cancelled: bool = True
    noise: Similarity | None = None
    _reference_frames: tuple[np.ndarray, ...] = ()
    _environment: dict[str, Any] = field(default_factory=dict)
    # Estimated time to build the missing engines of a component, by their ids; 0 if unknown.
    _build_seconds: dict[tuple[str, ...], float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        setup: Setup,
        configurations: Sequence[Configuration],
        report: Report,
        saved: Callable[["Bench"], None] = lambda _: None,
    ) -> "Bench":
        """Return a benchmark of configurations."""
        # Every run encodes its prompt, which is measured too.
        entries = [
            Entry(configuration, Residency(setup.engines, keep_prompts=False)) for configuration in configurations
        ]
        return cls(setup, entries, report, saved)

    @property
    def reference(self) -> Entry:
        """The configuration that the others are compared with."""
        return self.entries[0]

    def measure(self, cancel: Cancel) -> None:
        """Run the benchmark; if `cancel` is requested, stop and keep the measurements so far.

        Raises:
            TandemError: the first configuration's error, if none can be planned.
        """
        make_folder(self.setup.folder)
        with ExitStack() as stack:
            for entry in self.entries:
                stack.enter_context(entry.residency)
            remove_scratch_folders(self.setup.folder, _SCRATCH)
            scratch = stack.enter_context(scratch_folder(self.setup.folder, _SCRATCH))
            self._plan_all()
            plans = [entry.planned()[1] for entry in self.entries if entry.live]
            self.together = fit_together(plans)
            self.report(self._forecast(plans))
            if not self.together and len(plans) > 1:
                self.report("They do not fit in memory together: each is loaded and warmed up again for each run.")
            try:
                self._take_turns(scratch, cancel)
                self.cancelled = False
            except CancelledError:
                pass
            self.saved(self)

    def _forecast(self, plans: Sequence[ExecutionPlan]) -> str:
        """Return a line with what is measured, and about how long the runs and the builds before them take."""
        setup, turns = self.setup, 1 if self.together else self.setup.runs
        seconds = 0.0
        for plan in plans:
            load, total = plan.seconds["load"].likely, plan.seconds["total"].likely
            seconds += turns * (load + setup.warmup * total) + setup.runs * total
        names = ", ".join(entry.name for entry in self.entries if entry.live)
        text = f"Measuring {names or 'nothing'}: {counted(setup.runs, 'run')} of each, in turn, {about(seconds)}"
        missing = {use.id for plan in plans for part in plan.components.values() for use in part.engines if use.build}
        if missing:
            complete = all(self._build_seconds.values())
            text += f". Engines to build before that: {len(missing)}"
            text += f", {about(sum(self._build_seconds.values()))}" if complete else ""
        return f"{text}."

    def _plan_all(self) -> None:
        first: TandemError | None = None
        for entry in self.entries:
            try:
                self._plan(entry)
            except TandemError as error:
                first = first or error
                entry.stop("refused", error.what, error.remedy)
        if first is not None and not any(entry.plan for entry in self.entries):
            raise first
        for entry in self.entries:
            if not entry.live:
                self.report(f"{entry.name}: {entry.why}")

    def _plan(self, entry: Entry) -> None:
        """Plan a configuration; an engine that another one has built in the meantime can be used."""
        setup, configuration = self.setup, entry.configuration
        # A retry after out-of-memory would measure another strategy.
        request = configuration.request.replace(on_out_of_memory="ask")
        spec = model_for(request, setup.weights_dir, setup.engines.cache_dir)
        offers = setup.engines.offers(spec)
        plan = resolve(request, spec, PlanningContext(setup.machine, setup.folder, offers, setup.history.read()))
        for name, part in plan.components.items():
            built = tuple(use.id for use in part.engines if use.build)
            if built:
                of_part = offers(name, plan.engine_size(name), part.device)
                chosen = (
                    offer for offer in of_part if [use.id for use in offer.engines] == [use.id for use in part.engines]
                )
                self._build_seconds[built] = next((offer.build_seconds for offer in chosen), 0.0)
        entry.spec, entry.plan = spec, in_float32(plan) if configuration.float32 else plan
        why = fallback_text(plan)
        if why is not None:
            entry.stop("refused", why, "Select another backend, or build its engine.")

    def _take_turns(self, scratch: Path, cancel: Cancel) -> None:
        if self.together:
            for entry in self.entries:
                self._prepare(entry, scratch, cancel)
        for number in range(self.setup.runs):
            for entry in self.entries:
                if not self.together:
                    self._prepare(entry, scratch, cancel, again=number > 0)
                if entry.live:
                    self._measured_run(entry, number, scratch, cancel)
                if not self.together:
                    entry.residency.free()
                    entry.resident_bytes = {}
                self.saved(self)

    def _prepare(self, entry: Entry, scratch: Path, cancel: Cancel, *, again: bool = False) -> None:
        """Build engines, load and warm up."""
        if not entry.live or (not again and not self._replan(entry)):
            return
        for number in range(self.setup.warmup):
            self.report(f"{entry.name}: warm-up {number + 1} of {self.setup.warmup}")
            if self._run(entry, scratch / "warm-up.mp4", cancel) is None:
                return

    def _replan(self, entry: Entry) -> bool:
        """Plan again before the first run, and return whether the configuration can run."""
        try:
            self._plan(entry)
        except TandemError as error:
            entry.stop("refused", error.what, error.remedy)
        if not entry.live:
            self.report(f"{entry.name}: {entry.why}")
        return entry.live and not self._is_repeated(entry)

    def _is_repeated(self, entry: Entry) -> bool:
        """Return whether a configuration is skipped because its plan equals that of another one."""
        if not entry.configuration.only_if_new:
            return False
        key = plan_key(entry.planned()[1])
        peers = [peer for peer in self.entries if peer is not entry and peer.live]
        same = next((peer for peer in peers if plan_key(peer.planned()[1]) == key), None)
        if same is not None:
            entry.stop("same", f"Its plan equals that of {same.name}.")
            self.report(f"{entry.name}: same plan as {same.name}")
        return same is not None

    def _measured_run(self, entry: Entry, number: int, scratch: Path, cancel: Cancel) -> None:
        keep = self.setup.keep_videos and not entry.runs
        name = f"{slug(entry.name) or 'video'}-{self.entries.index(entry) + 1}.mp4"
        video = (self.setup.folder if keep else scratch) / name
        run = self._run(entry, video, cancel)
        if run is None:
            return
        if keep:
            give_usual_permissions(video)
        entry.state = "measured"
        entry.runs.append(replace(run, frames=()))
        total = run.timings["total"]
        self.report(f"{entry.name}: run {number + 1} of {self.setup.runs}, {total:.2f} s")
        if entry is not self.reference:
            self._compare_frames(entry, run)

    def _run(self, entry: Entry, video: Path, cancel: Cancel) -> Measurement | None:
        """Run one job and return its measurement; `None` if the configuration failed.

        Raises:
            CancelledError: if the benchmark was cancelled.
        """
        cancel.check()
        spec, plan = entry.planned()
        plan = plan.replace(output=video)
        device = plan.components["transformer"].device
        recorder = self.setup.history.listener = Recorder(device)
        release_cached_memory()  # memory that PyTorch caches would count as used before this run
        before = used_memory(device)
        with _precision(entry), recorder.measuring():
            end = make_video(
                plan,
                spec,
                recorder.emit,
                cancel,
                entry.residency,
                history=self.setup.history,
                on_frames=recorder.add_frames,
            )
        run = recorder.measurement(None if isinstance(end, PutBack) else end)
        if isinstance(run.end, Cancelled):
            raise CancelledError
        if not self.setup.keep_videos or video.parent != self.setup.folder:
            video.unlink(missing_ok=True)
        if run.fell_back:
            check = f"Check the engine: `{program()} engines verify`. Check the machine: `{program()} doctor`."
            entry.stop("fell back", run.fell_back[0], check)
            self.report(f"{entry.name}: {run.fell_back[0]}")
            return None
        if not isinstance(run.end, VideoSaved):
            what, remedy = failure_text(run.end)
            entry.stop("failed", what, remedy)
            self.report(f"{entry.name}: {what}")
            return None
        entry.add_memory(run)
        for kind, size in used_memory(device).items():
            entry.resident_bytes[kind] = entry.resident_bytes.get(kind, 0) + size - before[kind]
        if entry.first is None:
            entry.first = replace(run, frames=())
            entry.engines = self._engines(entry)
            entry.plan = without_builds(entry.planned()[1])
        entry.add_frames(run.frames)
        if entry is self.reference:
            self._add_reference(run)
        return run

    def _engines(self, entry: Entry) -> tuple[EngineUsed, ...]:
        _, plan = entry.planned()
        uses = {use.id: use for part in plan.components.values() for use in part.engines}
        records = {record.id: record for record in self.setup.engines.store.index()} if uses else {}
        return tuple(
            EngineUsed(use.id, use.program, records[use.id].build_seconds, use.build)
            for use in uses.values()
            if use.id in records
        )

    def _add_reference(self, run: Measurement) -> None:
        """Keep the frames of the first run; compare those of the second with them for the noise floor."""
        if not self._reference_frames:
            self._reference_frames = run.frames
        elif self.noise is None:
            self.noise = similarity(run.frames, self._reference_frames)

    def _compare_frames(self, entry: Entry, run: Measurement) -> None:
        if entry.quality is not None or entry.not_compared:
            return
        if self._reference_frames:
            entry.not_compared = clip_difference(entry.planned()[1], self.reference.planned()[1]) or ""
        else:
            entry.not_compared = "no reference"
        if not entry.not_compared:
            entry.quality = similarity(run.frames, self._reference_frames)

    def to_json(self) -> dict[str, Any]:
        """Return the results so far as JSON types."""
        self._environment = self._environment or describe_environment(self.setup.machine)
        plan = self.reference.plan
        return {
            "schema": SCHEMA,
            "kind": "bench",
            **self._environment,
            "runs": self.setup.runs,
            "warmup": self.setup.warmup,
            "together": self.together,
            "cancelled": self.cancelled,
            "reference": self.reference.name,
            "reference_is": None if plan is None else backend_text(plan),
            "noise_floor": None if self.noise is None else self.noise.to_json(),
            "configurations": [entry.to_json() for entry in self.entries],
        }


def _precision(entry: Entry) -> AbstractContextManager[None]:
    """Return a context without TF32 on a GPU for the float32 reference."""
    if not entry.configuration.float32:
        return nullcontext()
    return full_float32(torch.device(entry.planned()[1].components["transformer"].device))
