"""The acceleration panel's summary of a plan: a badge per component, one line, memory, time, strategies. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from runtime.core.errors import InvalidRequestError, MachineError, MemoryShortError, TandemError
from runtime.core.estimates import MemoryStrategy, StrategyForecast
from runtime.core.facts import Fact, short
from runtime.core.plan import BACKEND_TITLES, PYTORCH, ComponentPlan, ExecutionPlan
from runtime.core.units import memory_size
from runtime.models.spec import is_transformer
from runtime.ui import formatting
from runtime.ui.plan_preview import Preview
from runtime.ui.templating import render
from runtime.ui.words import WORDS, page_text, text

_LOOKING = "Looking for engines…"
# Estimates are shown in tenths of a second.
_FINEST_SECONDS = 0.1
# Strategies whose times differ less count as equally fast.
_SLOWER = 1.05


@dataclass(frozen=True)
class Badge:
    """What will run one component, in short and in full.

    `kind` is "ready" (an engine that exists), "build" (an engine that is built first), "plain" (PyTorch), "instead"
    (PyTorch although another backend was requested) or "stopped" (the form cannot be carried out).
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
    """One strategy for the weights: what it does and needs, and whether it is used or why not.

    `offload` and `quantization` are the form's values that select it; `offered` tells whether they can.
    """

    title: str
    takes: str
    verdict: str
    taken: bool
    offered: bool
    offload: str
    quantization: str


@dataclass(frozen=True)
class PlanSummary:
    """Everything that the panel shows.

    Attributes:
        line: one line, for the closed panel.
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
    notes = " ".join(text(note) for note in (plan.shift_reason, *plan.warnings) if note)
    if not preview.complete:
        badge = Badge(_LOOKING, "Engines are known once the model's files have been read.", "plain")
        return PlanSummary(
            _LOOKING, dict.fromkeys(plan.components, badge), memory, "", strategies, notes, complete=False
        )
    badges = {
        name: Badge(_badge(part), _why(plan, name, part), _kind(plan, name, part))
        for name, part in plan.components.items()
    }
    return PlanSummary(_sum(plan), badges, memory, _time(plan), strategies, notes)


def stopped(error: Exception, components: tuple[str, ...]) -> PlanSummary:
    """Return the summary for a form that cannot be carried out."""
    problem = (
        text(error.fact) if isinstance(error, TandemError) else f"Internal error: {error!r} The log has the details."
    )
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
    return render("plan_badge_content.html", component=component, badge=badge or Badge("", "", "plain"))


def _why(plan: ExecutionPlan, name: str, part: ComponentPlan) -> str:
    # On a CPU there is nothing to choose.
    speed = _sentences(plan.speed.reasons) if part.device.startswith("cuda") or plan.asked.compile == "always" else ""
    reason = _sentences(part.reasons)
    return f"{reason} {speed}".strip() if part.backend == PYTORCH and is_transformer(name) else reason


def _sentences(facts: Sequence[Fact]) -> str:
    return " ".join(page_text(fact).what for fact in facts)


def _badge(part: ComponentPlan) -> str:
    title = BACKEND_TITLES[part.backend]
    return title if part.badge is None else f"{title}: {short(part.badge, WORDS)}"


def _kind(plan: ExecutionPlan, name: str, part: ComponentPlan) -> str:
    if part.backend == PYTORCH:
        return "instead" if plan.fell_back(name) else "plain"
    return "build" if any(use.build for use in part.engines) else "ready"


def _sum(plan: ExecutionPlan) -> str:
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
    builds = sum(use.build for part in parts.values() for use in part.engines)
    about = f"about {_words(plan.seconds['total'].likely)}"
    return f"{line}, {builds} to build first, then {about}" if builds else f"{line}, {about}"


def _time(plan: ExecutionPlan) -> str:
    total, load = plan.seconds["total"], plan.seconds["load"]
    how = "measured here" if total.measured else "estimated"
    return (
        f"about {_words(total.likely)}, {_words(total.low)} to {_words(total.high)} ({how}). "
        f"Loading before the first: about {_words(load.likely)}."
    )


def _words(seconds: float) -> str:
    return formatting.duration(max(seconds, _FINEST_SECONDS))


def _memory(plan: ExecutionPlan) -> Memory:
    peak = max(plan.memory, key=lambda stage: stage.peak_bytes)
    on_gpu = plan.components[peak.component].device.startswith("cuda")
    working = peak.working_bytes + peak.overhead_bytes
    return Memory(peak.weights_bytes, working, plan.free_bytes, "video memory" if on_gpu else "memory")


def _strategies(
    strategies: Sequence[StrategyForecast], where: str, taken: MemoryStrategy | None = None
) -> tuple[StrategyRow, ...]:
    """Return all strategies if the fastest does not fit."""
    fastest = strategies[0]
    if fastest.strategy == taken or (fastest.fits and fastest.fits_ram and not fastest.lacks):
        return ()
    return tuple(
        StrategyRow(
            title=page_text(one.title).what.rstrip("."),
            takes=_takes(one, fastest),
            verdict=text(one.verdict(where, taken=one.strategy == taken)),
            taken=one.strategy == taken,
            offered=one.offered,
            offload=one.strategy.offload,
            quantization=one.strategy.quantization,
        )
        for one in strategies
    )


def _takes(one: StrategyForecast, fastest: StrategyForecast) -> str:
    slower = one.seconds.likely / fastest.seconds.likely
    times = f", {slower:.1f} times as long" if slower >= _SLOWER else ""
    ram = f" + {memory_size(one.ram_bytes)} RAM" if one.strategy.offload != "none" else ""
    return f"{memory_size(one.peak_bytes)}{ram}{times}"
