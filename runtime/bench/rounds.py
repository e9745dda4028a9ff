"""The benchmark itself: every configuration warms up, then all take turns, A B C A B C, each run a job as the app's.

What drifts (heat, other programs) so hits all alike. Nothing is remembered but the result: no job in the store, no
history, no video but those that are wanted.
"""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runtime.bench import component_errors
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
from runtime.bench.entry import EngineFacts, Entry
from runtime.bench.environment import describe_environment
from runtime.bench.recorder import Recorder, Told, UnwrittenHistory, held_now, why_failed
from runtime.bench.similarity import Likeness, likeness, lpips_problem
from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import TandemError
from runtime.core.events import Cancelled, VideoSaved
from runtime.engines.programs import full_float32
from runtime.engines.service import EngineService
from runtime.execution.memory import release_cached_memory
from runtime.execution.residency import Residency
from runtime.machine.probe import Machine
from runtime.models.loras import model_for
from runtime.pipeline.files import make_folder, slug
from runtime.pipeline.run import run_job
from runtime.planner.resolve import resolve

SCHEMA = 1
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a benchmark is given.

    Attributes:
        machine: as it is before anything is loaded.
        history: what earlier jobs took, for the forecasts; it stays as it is.
        weights_dir: where models are found.
        folder: for videos, those in the making too.
        runs, warmup: how many of each configuration count, and how many go before.
        keep_videos: whether the first that counts of each stays, as NAME.mp4.
        compare_parts: whether parts are compared on a forward pass of their own.
    """

    machine: Machine
    engines: EngineService
    history: UnwrittenHistory
    weights_dir: Path
    folder: Path
    runs: int = 3
    warmup: int = 1
    keep_videos: bool = False
    compare_parts: bool = True


@dataclass
class Bench:
    """A benchmark under way; `measure` does it, and `to_json` tells of it at any time.

    Attributes:
        entries: the first of them is the reference.
        tell: hears one line for each thing that is done.
        saved: called whenever there is something new to keep.
    """

    setup: Setup
    entries: list[Entry]
    tell: Tell
    saved: Callable[["Bench"], None] = lambda _: None
    together: bool = False
    cancelled: bool = False
    noise: Likeness | None = None
    _reference_frames: tuple[np.ndarray, ...] = ()
    _passes: component_errors.Passes | None = None
    _about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        setup: Setup,
        configurations: Sequence[Configuration],
        tell: Tell,
        saved: Callable[["Bench"], None] = lambda _: None,
    ) -> "Bench":
        """Return a benchmark of configurations, nothing done yet."""
        # Reading the prompt is measured too, in every run.
        entries = [Entry(one, Residency(setup.engines, keep_prompts=False)) for one in configurations]
        return cls(setup, entries, tell, saved)

    @property
    def reference(self) -> Entry:
        """What the others are compared with."""
        return self.entries[0]

    def measure(self, cancel: Cancel) -> None:
        """Do it all. Ends early, with what was measured so far, once `cancel` is requested.

        Raises:
            TandemError: if none of the configurations can be planned: what is wrong with the first.
        """
        make_folder(self.setup.folder)
        with ExitStack() as stack:
            for entry in self.entries:
                stack.enter_context(entry.residency)
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".bench-", dir=self.setup.folder)))
            self._plan_all()
            live = ", ".join(entry.name for entry in self.entries if entry.live)
            self.tell(f"Measuring {live or 'nothing'}: {self.setup.runs} runs of each, in turn.")
            plans = [entry.planned()[1] for entry in self.entries if entry.live]
            self.together = fit_together(plans)
            if not self.together and len(plans) > 1:
                self.tell("They do not fit into memory all at once: each is loaded and warmed up anew for its turn.")
            try:
                self._take_turns(scratch, cancel)
            except CancelledError:
                self.cancelled = True
            self.saved(self)

    def _plan_all(self) -> None:
        first: TandemError | None = None
        for entry in self.entries:
            try:
                self._plan(entry)
            except TandemError as error:
                first = first or error
                entry.out("refused", error.what, error.remedy)
        if first is not None and not any(entry.plan for entry in self.entries):
            raise first
        for entry in self.entries:
            if not entry.live:
                self.tell(f"{entry.name}: {entry.why}")

    def _plan(self, entry: Entry) -> None:
        """Plan it as things are now: an engine may have been built for another one meanwhile."""
        setup, configuration = self.setup, entry.configuration
        # Where memory runs out, going on in another way would measure that one.
        request = configuration.request.replace(on_out_of_memory="ask")
        spec = model_for(request, setup.weights_dir)
        plan = resolve(request, spec, setup.machine, setup.folder, setup.engines.offers(spec), setup.history.read())
        entry.spec, entry.plan = spec, in_float32(plan) if configuration.float32 else plan
        why = fallback_text(plan)
        if why is not None:
            entry.out("refused", why, "Take another backend, or have its engine built.")

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
                    entry.held = {}
                self.saved(self)

    def _prepare(self, entry: Entry, scratch: Path, cancel: Cancel, *, again: bool = False) -> None:
        """Build, load and warm up; compare its parts with the reference's the first time."""
        if not entry.live or (not again and not self._planned_anew(entry)):
            return
        for number in range(self.setup.warmup):
            self.tell(f"{entry.name}: warm-up {number + 1} of {self.setup.warmup}")
            if self._run(entry, scratch / "warm-up.mp4", cancel) is None:
                return
        if not again and self.setup.compare_parts:
            self._compare_parts(entry, cancel)

    def _planned_anew(self, entry: Entry) -> bool:
        """Plan as things are by its first turn; return whether it is to run."""
        try:
            self._plan(entry)
        except TandemError as error:
            entry.out("refused", error.what, error.remedy)
        if not entry.live:
            self.tell(f"{entry.name}: {entry.why}")
        return entry.live and not self._known(entry)

    def _known(self, entry: Entry) -> bool:
        """Whether another one does the same already, where that is a reason to leave it out."""
        if not entry.configuration.only_if_new:
            return False
        own = plan_key(entry.planned()[1])
        others = [other for other in self.entries if other is not entry and other.live]
        same = next((other for other in others if plan_key(other.planned()[1]) == own), None)
        if same is not None:
            entry.out("same", f"It comes to what {same.name} does.")
            self.tell(f"{entry.name}: comes to what {same.name} does")
        return same is not None

    def _measured_run(self, entry: Entry, number: int, scratch: Path, cancel: Cancel) -> None:
        kept = self.setup.keep_videos and not entry.runs
        name = f"{slug(entry.name) or 'video'}-{self.entries.index(entry) + 1}.mp4"
        video = (self.setup.folder if kept else scratch) / name
        run = self._run(entry, video, cancel)
        if run is None:
            return
        entry.state = "measured"
        entry.runs.append(replace(run, frames=()))
        total = run.timings["total"]
        self.tell(f"{entry.name}: run {number + 1} of {self.setup.runs}, {total:.2f} s")
        if entry is not self.reference:
            self._compare_frames(entry, run)

    def _run(self, entry: Entry, video: Path, cancel: Cancel) -> Told | None:
        """Told one job; `None` where the configuration ends with it.

        Raises:
            CancelledError: if it was cancelled.
        """
        cancel.check()
        spec, plan = entry.planned()
        plan = plan.replace(output=video)
        device = plan.components["transformer"].device
        recorder = self.setup.history.listener = Recorder(device)
        release_cached_memory()  # what earlier runs left to PyTorch would count as there before this one
        before = held_now(device)
        with _arithmetic(entry), recorder.watching():
            run_job(plan, spec, recorder.emit, cancel, entry.residency, self.setup.history, on_frames=recorder.look)
        run = recorder.run()
        if isinstance(run.end, Cancelled):
            raise CancelledError
        if not self.setup.keep_videos or video.parent != self.setup.folder:
            video.unlink(missing_ok=True)
        if run.fell_back:
            entry.out("fell back", run.fell_back[0], "See what is wrong with it: engines verify, doctor.")
            self.tell(f"{entry.name}: {run.fell_back[0]}")
            return None
        if not isinstance(run.end, VideoSaved):
            what, remedy = why_failed(run.end)
            entry.out("failed", what, remedy)
            self.tell(f"{entry.name}: {what}")
            return None
        entry.note_memory(run)
        for kind, held in held_now(device).items():
            entry.held[kind] = entry.held.get(kind, 0) + held - before[kind]
        if entry.first is None:
            entry.first = replace(run, frames=())
            entry.engines = self._engines(entry)
            entry.plan = without_builds(entry.planned()[1])
        entry.note_frames(run.frames)
        if entry is self.reference:
            self._note_reference(run)
        return run

    def _engines(self, entry: Entry) -> tuple[EngineFacts, ...]:
        _, plan = entry.planned()
        uses = {use.id: use for part in plan.components.values() for use in part.engines}
        there = {record.id: record for record in self.setup.engines.store.index()} if uses else {}
        return tuple(
            EngineFacts(use.id, use.program, there[use.id].build_seconds, use.build)
            for use in uses.values()
            if use.id in there
        )

    def _compare_parts(self, entry: Entry, cancel: Cancel) -> None:
        spec, plan = entry.planned()
        reference = self.reference
        with _arithmetic(entry):
            try:
                if entry is reference:
                    self._passes = component_errors.reference_passes(spec, plan, entry.residency, cancel)
                elif self._passes is not None and clip_difference(plan, reference.planned()[1]) is None:
                    entry.parts = component_errors.errors(self._passes, spec, plan, entry.residency, cancel)
            except (TandemError, MemoryError, torch.OutOfMemoryError) as error:
                said = error.what if isinstance(error, TandemError) else "Memory ran out."
                entry.parts = {name: component_errors.PartError(None, said) for name in plan.components}
                entry.residency.free()

    def _note_reference(self, run: Told) -> None:
        """Keep its first clip; the second tells what two equal runs differ by."""
        if not self._reference_frames:
            self._reference_frames = run.frames
        elif self.noise is None:
            self.noise = likeness(run.frames, self._reference_frames)

    def _compare_frames(self, entry: Entry, run: Told) -> None:
        if entry.quality is not None or entry.not_compared:
            return
        if self._reference_frames:
            entry.not_compared = clip_difference(entry.planned()[1], self.reference.planned()[1]) or ""
        else:
            entry.not_compared = "no reference"
        if not entry.not_compared:
            entry.quality = likeness(run.frames, self._reference_frames)

    def to_json(self) -> dict[str, Any]:
        """Return all that was found so far, as JSON types."""
        self._about = self._about or describe_environment(self.setup.machine)
        plan = self.reference.plan
        missing = lpips_problem()
        return {
            "schema": SCHEMA,
            "kind": "bench",
            **self._about,
            "runs": self.setup.runs,
            "warmup": self.setup.warmup,
            "together": self.together,
            "cancelled": self.cancelled,
            "reference": self.reference.name,
            "reference_is": None if plan is None else backend_text(plan),
            "noise_floor": None if self.noise is None else self.noise.to_json(),
            "lpips": "measured" if missing is None else f"not measured: {missing}",
            "configurations": [entry.to_json() for entry in self.entries],
        }


def _arithmetic(entry: Entry) -> Any:
    """Return a context with whole float32 on a GPU, where that is what a configuration is for."""
    if not entry.configuration.float32:
        return nullcontext()
    return full_float32(torch.device(entry.planned()[1].components["transformer"].device))
