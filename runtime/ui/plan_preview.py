"""The plan preview in Make: what Generate would do with the form as it is now, in milliseconds.

Plans come from cached facts about the machine and the engine library; nothing is loaded. The library is read again when
it changes, the machine every few seconds, and a model's weights are identified once in a thread; until that is done,
plans consider no engines and are marked incomplete.
"""

import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runtime.core.errors import InvalidRequestError, MachineError, MemoryShortError, TandemError
from runtime.core.estimates import MemoryStrategy, StrategyForecast
from runtime.core.facts import short
from runtime.core.plan import BACKEND_TITLES, PYTORCH, ComponentPlan, ExecutionPlan
from runtime.core.request import COMPONENTS, GenerationRequest
from runtime.core.units import memory_size
from runtime.engines.service import EngineService
from runtime.machine.probe import Machine
from runtime.models.catalogue import check_offered
from runtime.models.loras import with_loras
from runtime.models.spec import ModelSpec, is_transformer
from runtime.planner.engine_index import EngineRecord
from runtime.planner.engine_offers import Offers, no_offers
from runtime.planner.history import History
from runtime.planner.resolve import resolve
from runtime.ui import form, formatting
from runtime.ui.formatting import WORDS, page_text, paragraph, render, sentences
from runtime.ui.panels import Call, Reply, drawn, unknown_action

# Free memory changes slowly; a query of the GPU driver takes longer than a plan.
_MACHINE_SECONDS = 3.0
# How long a page waits for the identification of a model's weights.
_WAIT_SECONDS = 0.05
_NOWHERE = Path("none.mp4")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preview:
    """The plan for the form as it is now.

    Attributes:
        plan: `None` if the request cannot be carried out.
        error: why not.
        offers: the engines that the plan chose from, by component, preferred first.
        records: the engine library.
        complete: whether the model's engines are known.
        spec: the model with the request's LoRAs.
    """

    plan: ExecutionPlan | None
    error: TandemError | None
    offers: Offers
    records: Sequence[EngineRecord]
    complete: bool
    spec: ModelSpec


class PlanPreview:
    """Plans for any number of pages. Thread-safe.

    Args:
        probe: returns the machine as a new job would find it.
        history: returns the measured durations of earlier jobs.
        weights_dir: folder in which LoRAs are found by name.
    """

    def __init__(
        self,
        engines: EngineService,
        probe: Callable[[], Machine],
        history: Callable[[], History],
        weights_dir: Path = _NOWHERE,
    ) -> None:
        self._engines = engines
        self._probe = probe
        self._history = history
        self._weights_dir = weights_dir
        self._lock = threading.Lock()
        self._machine = probe()
        self._machine_at = time.monotonic()
        self._stamp: tuple[tuple[str, int], ...] = ()
        self._records: tuple[EngineRecord, ...] | None = None
        self._known: dict[tuple[object, ...], Offers] = {}
        self._identifying: dict[Path, threading.Thread] = {}

    def machine(self) -> Machine:
        """Return this machine as probed a few seconds ago at most."""
        with self._lock:
            if time.monotonic() - self._machine_at > _MACHINE_SECONDS:
                self._machine, self._machine_at = self._probe(), time.monotonic()
            return self._machine

    def library(self) -> Sequence[EngineRecord]:
        """Return the engines; they are read again when one was added, removed or written to."""
        stamp = _stamp(self._engines.store.folder)
        with self._lock:
            if self._records is None or stamp != self._stamp:
                self._records = tuple(self._engines.store.index())
                self._stamp = stamp
                self._known.clear()
            return self._records

    def preview(self, request: GenerationRequest, spec: ModelSpec) -> Preview:
        """Return the plan for a request, or the error why there is none."""
        records = self.library()
        complete = self._is_identified(spec)
        offers = self._offers(spec) if complete else no_offers
        try:
            spec = with_loras(spec, request.loras, self._weights_dir)
            offers = self._offers(spec) if complete else no_offers
            plan = resolve(request, spec, self.machine(), _NOWHERE, offers, self._history(), builds_later=True)
        except TandemError as error:
            return Preview(None, error, offers, records, complete, spec)
        return Preview(plan, None, offers, records, complete, spec)

    def _offers(self, spec: ModelSpec) -> Offers:
        """Return the engine service's offers, cached until the library or the model changes."""
        key = (spec.name, _modified(spec), tuple((use.identity, use.expert) for use in spec.loras))
        with self._lock:
            if key in self._known:
                return self._known[key]
        offers = functools.cache(self._engines.offers(spec))
        with self._lock:
            return self._known.setdefault(key, offers)

    def _is_identified(self, spec: ModelSpec) -> bool:
        """Return whether the model's weights are identified; if not, start a thread that does it and wait briefly."""
        with self._lock:
            thread = self._identifying.get(spec.directory)
            if thread is None:
                thread = threading.Thread(target=self._identify, args=(spec,), name="plan-preview", daemon=True)
                self._identifying[spec.directory] = thread
                thread.start()
        thread.join(_WAIT_SECONDS)
        return not thread.is_alive()

    def _identify(self, spec: ModelSpec) -> None:
        """Look up the engines of every component, which hashes the model's weights once."""
        defaults = spec.defaults
        latent = spec.latent_shape(defaults.frames, defaults.height, defaults.width)[2:]
        try:
            for component in spec.component_names:
                self._offers(spec)(component, latent, "cpu")
        except TandemError:  # the plan fails with it too
            return
        except Exception:
            logger.exception("The engines of %s could not be looked up", spec.name)


def _stamp(folder: Path) -> tuple[tuple[str, int], ...]:
    """Return the names of the engines' folders with their modification times."""
    try:
        found = [path for path in folder.iterdir() if not path.name.startswith(".")]
        return tuple(sorted((path.name, path.lstat().st_mtime_ns) for path in found))
    except OSError:
        return ()


def _modified(spec: ModelSpec) -> str:
    """Return the modification times of the model's folders."""
    folders = (spec.directory / name for name in spec.component_names)
    return "-".join(str(folder.stat().st_mtime_ns) if folder.is_dir() else "" for folder in folders)


_SEARCHING = "Looking for engines…"
# Estimates are shown in tenths of a second.
_FINEST_SECONDS = 0.1
# Strategies whose times differ less count as equally fast.
_SLOWER = 1.05


@dataclass(frozen=True)
class Badge:
    """What will run one component, and why.

    Attributes:
        kind: "ready" (an engine that exists), "build" (an engine that is built when no video waits), "plain" (PyTorch),
            "instead" (PyTorch although another backend was requested) or "stopped" (the form cannot be carried out).
    """

    text: str
    reason: str
    kind: str


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak: weights, working set, and free memory before; `where` is "video memory" or "memory"."""

    weights: int
    working: int
    free: int
    where: str


@dataclass(frozen=True)
class StrategyRow:
    """One memory strategy.

    Attributes:
        needs: memory, and time compared to the fastest strategy.
        verdict: whether it fits, or why it cannot be used.
        offered: whether it can be selected, by the form's values `offload` and `quantization`.
    """

    title: str
    needs: str
    verdict: str
    in_use: bool
    offered: bool
    offload: str
    quantization: str


@dataclass(frozen=True)
class PlanSummary:
    """Everything that the panel shows.

    Attributes:
        line: for the title of the closed panel.
        badges: by component.
        memory: `None` if there is no plan.
        time: the estimate.
        strategies: fastest first, if the fastest does not fit into memory.
        notes: warnings, and the reason for the shift.
        problem: why the form cannot be carried out, and what to do about it.
        complete: whether engines are known; if not, the page asks again.
    """

    line: str
    badges: Mapping[str, Badge] = field(default_factory=dict)
    memory: Memory | None = None
    time: str = ""
    strategies: tuple[StrategyRow, ...] = ()
    notes: str = ""
    problem: str = ""
    complete: bool = True


def summarize(preview: Preview, components: tuple[str, ...]) -> PlanSummary:
    """Return the summary of a plan preview for a model with these components."""
    plan = preview.plan
    if plan is None:
        error = preview.error
        assert error is not None, "neither a plan nor an error"
        return stopped(error, components)
    memory = _memory(plan)
    strategies = _strategies(plan.strategies, memory.where, plan.strategy)
    notes = " ".join(paragraph(note, plan.components) for note in (plan.shift_reason, *plan.warnings) if note)
    if not preview.complete:
        badge = Badge(_SEARCHING, "Engines are known once the model's files have been read.", "plain")
        return PlanSummary(
            _SEARCHING, dict.fromkeys(plan.components, badge), memory, "", strategies, notes, complete=False
        )
    badges = {
        name: Badge(_badge(part), _why(plan, name, part), _kind(plan, name, part))
        for name, part in plan.components.items()
    }
    return PlanSummary(_summary_line(plan), badges, memory, _time(plan), strategies, notes)


def stopped(error: TandemError, components: tuple[str, ...]) -> PlanSummary:
    """Return the summary for a form that cannot be carried out."""
    problem = paragraph(error.fact)
    problem = f"{problem[:1].upper()}{problem[1:]}"
    title = "Does not fit" if isinstance(error, MachineError) else "Cannot be generated"
    if isinstance(error, InvalidRequestError):
        title = "Invalid setting"
    badge = Badge(f"{title}.", problem, "stopped")
    strategies = _strategies(error.strategies, error.where) if isinstance(error, MemoryShortError) else ()
    return PlanSummary(title, dict.fromkeys(components, badge), strategies=strategies, problem=problem)


def panel_html(summary: PlanSummary) -> str:
    """Return memory, time, problem, strategies and notes."""
    # Without a plan the bar is hidden; its elements stay the same for screen readers.
    memory = summary.memory or Memory(0, 0, 0, "memory")
    left = max(memory.free - memory.weights - memory.working, 0)
    total = max(memory.weights + memory.working + left, 1)
    sizes = (
        ("weights", "Weights", memory.weights),
        ("working", "Working set", memory.working),
        ("free", "Free", left),
    )
    shares = [(name, title, size, f"{100 * size / total:.1f}") for name, title, size in sizes]
    return render("plan_summary.html", summary=summary, where=memory.where, shares=shares)


def badge_html(component: str, badge: Badge | None = None) -> str:
    """Return a component's badge; its reason describes the component's choice to screen readers."""
    return render("plan_badge.html", component=component, badge=badge or Badge("", "", "plain"))


def _why(plan: ExecutionPlan, name: str, part: ComponentPlan) -> str:
    # On a CPU there is nothing to choose, so the reasons are left out.
    speed = sentences(plan.speed.reasons) if part.device.startswith("cuda") or plan.asked.compile == "always" else ""
    reason = sentences(part.reasons)
    return f"{reason} {speed}".strip() if not part.on_engine and is_transformer(name) else reason


def _badge(part: ComponentPlan) -> str:
    title = BACKEND_TITLES[part.backend]
    return title if part.badge is None else f"{title}: {short(part.badge, WORDS)}"


def _kind(plan: ExecutionPlan, name: str, part: ComponentPlan) -> str:
    if part.later:
        return "build"
    if part.backend == PYTORCH:
        return "instead" if plan.fell_back(name) else "plain"
    return "ready"


def _summary_line(plan: ExecutionPlan) -> str:
    parts = plan.components
    counted = Counter(BACKEND_TITLES[part.backend] for part in parts.values() if part.backend != PYTORCH)
    how = "Auto" if all(plan.asked.backend(name) == "auto" for name in parts) else "As chosen"
    if counted:
        shares = " and ".join(f"{title} for {count}" for title, count in counted.most_common())
        line = f"{how}: {shares} of {len(parts)} components"
    else:
        line = f"{how}: PyTorch"
    if plan.gpus > 1:
        line = f"{line} on {plan.gpus} GPUs"
    # Both experts use the same block engines.
    builds = len({use.id for part in parts.values() for use in part.later})
    later = f"; {formatting.count(builds, 'engine')} to build when no video waits" if builds else ""
    return f"{line}, about {_duration(plan.seconds['total'].likely)}{later}"


def _time(plan: ExecutionPlan) -> str:
    total, load = plan.seconds["total"], plan.seconds["load"]
    how = "measured here" if total.measured else "estimated"
    return (
        f"about {_duration(total.likely)}, {_duration(total.low)} to {_duration(total.high)} ({how}). "
        f"Loading before the first: about {_duration(load.likely)}."
    )


def _duration(seconds: float) -> str:
    return formatting.duration(max(seconds, _FINEST_SECONDS))


def _memory(plan: ExecutionPlan) -> Memory:
    peak = max(plan.memory, key=lambda stage: stage.peak_bytes)
    on_gpu = plan.components[peak.component].device.startswith("cuda")
    working = peak.working_bytes + peak.overhead_bytes
    return Memory(peak.weights_bytes, working, plan.free_bytes, "video memory" if on_gpu else "memory")


def _strategies(
    strategies: Sequence[StrategyForecast], where: str, in_use: MemoryStrategy | None = None
) -> tuple[StrategyRow, ...]:
    """Return all strategies if the fastest does not fit."""
    fastest = strategies[0]
    if fastest.strategy == in_use or (fastest.fits and fastest.fits_ram and not fastest.lacks):
        return ()
    return tuple(
        StrategyRow(
            title=page_text(one.title).what.rstrip("."),
            needs=_needs(one, fastest),
            verdict=paragraph(one.verdict(where, taken=one.strategy == in_use)),
            in_use=one.strategy == in_use,
            offered=one.offered,
            offload=one.strategy.offload,
            quantization=one.strategy.quantization,
        )
        for one in strategies
    )


def _needs(one: StrategyForecast, fastest: StrategyForecast) -> str:
    slower = one.seconds.likely / fastest.seconds.likely
    times = f", {slower:.1f} times as long" if slower >= _SLOWER else ""
    ram = f" + {memory_size(one.ram_bytes)} RAM" if one.strategy.offload != "none" else ""
    return f"{memory_size(one.peak_bytes)}{ram}{times}"


class PreviewPanel:
    """The panel; see `panels.Panel`. Its parts are the components' badges and the summary."""

    def __init__(self, preview: PlanPreview, models: dict[str, ModelSpec]) -> None:
        self._preview = preview
        self._models = models

    def act(self, call: Call) -> Reply:
        """Summarize the plan; the reply has one line, and whether the model's engines are known."""
        if call.action != "refresh":
            raise unknown_action()
        summary = self._summary(call)
        return {"line": summary.line, "complete": summary.complete, "summary": summary}

    def draw(self, _call: Call, reply: Reply) -> dict[str, str]:
        """Return the badges and the summary."""
        summary: PlanSummary | None = reply.pop("summary", None)
        if summary is None:  # an error that `act` has reported
            return {}
        badges = {name: lambda name=name: badge_html(name, summary.badges.get(name)) for name in COMPONENTS}
        return drawn({**badges, "summary": lambda: panel_html(summary)})

    def _summary(self, call: Call) -> PlanSummary:
        try:
            request = form.read_settings(call.form, self._models)
            spec = check_offered(request.model, self._models)
        except TandemError as error:  # an invalid form has a summary too
            return stopped(error, COMPONENTS)
        return summarize(self._preview.preview(request, spec), spec.component_names)
