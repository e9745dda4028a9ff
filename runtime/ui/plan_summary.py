"""What the acceleration panel says of a plan: a chip per part, the sum in a line, memory and time.

A pure function of what is foreseen. Knows nothing about gradio or HTML.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from runtime.core.errors import InvalidRequestError, MachineError, MemoryShortError
from runtime.core.estimates import MemoryStrategy, StrategyForecast
from runtime.core.plan import BACKEND_TITLES, PYTORCH, ComponentPlan, ExecutionPlan
from runtime.core.units import memory_size
from runtime.models.spec import is_transformer
from runtime.ui import formatting
from runtime.ui.plan_preview import Foreseen

_LOOKING = "Looking for engines…"
# Forecasts are no finer than they are shown.
_FINEST_SECONDS = 0.1
# Ways that differ less in time are as fast as each other.
_SLOWER = 1.05


@dataclass(frozen=True)
class Chip:
    """What will happen to one part: in a few words, in full, and of which kind.

    `kind` is "ready" (an engine that is there), "build" (one that is built first), "plain" (PyTorch), "instead"
    (PyTorch, though another was asked for) or "stopped" (the form cannot be carried out).
    """

    text: str
    reason: str
    kind: str


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak: of weights, of what is worked on beside them, and what is free before; and where."""

    weights: int
    working: int
    free: int
    where: str


@dataclass(frozen=True)
class Step:
    """One way to hold the weights: what is done, what it takes, and whether it is taken or why it cannot be.

    `offload` and `quantization` are what the form says for it; `offered` says whether they take it.
    """

    title: str
    takes: str
    verdict: str
    taken: bool
    offered: bool
    offload: str
    quantization: str


@dataclass(frozen=True)
class Outlook:
    """Everything that the panel shows.

    Attributes:
        line: the sum, for the closed panel.
        chips: by component.
        memory: `None` where there is no plan.
        time: the forecast in words.
        ways: how the weights could be held, fastest first, where memory is short for the fastest, or for any.
        notes: what there is to say beside it.
        problem, remedy: why the form cannot be carried out.
        complete: whether engines are known yet; if not, it is worth asking again.
    """

    line: str
    chips: Mapping[str, Chip] = field(default_factory=dict)
    memory: Memory | None = None
    time: str = ""
    ways: tuple[Step, ...] = ()
    notes: str = ""
    problem: str = ""
    remedy: str = ""
    complete: bool = True


def outlook(foreseen: Foreseen, components: tuple[str, ...]) -> Outlook:
    """Return what to say of what is foreseen, for a model of these components."""
    plan = foreseen.plan
    if plan is None:
        error = foreseen.error
        assert error is not None, "neither a plan nor an error"
        return stopped(error, components)
    memory = _memory(plan)
    ways, notes = (
        _ways(plan.strategies, memory.where, plan.strategy),
        " ".join(filter(None, (plan.shift_reason, *plan.warnings))),
    )
    if not foreseen.complete:
        badge = Chip(_LOOKING, "The model's files are read once; then its engines are known.", "plain")
        return Outlook(_LOOKING, dict.fromkeys(plan.components, badge), memory, "", ways, notes, complete=False)
    chips = {
        name: Chip(part.badge, _why(plan, name, part), _kind(plan, name, part))
        for name, part in plan.components.items()
    }
    return Outlook(_sum(plan), chips, memory, _time(plan), ways, notes)


def stopped(error: Exception, components: tuple[str, ...]) -> Outlook:
    """Return what to say where a form cannot be carried out."""
    what, remedy = str(getattr(error, "what", error)), str(getattr(error, "remedy", ""))
    what = what[:1].upper() + what[1:]
    title = "Does not fit" if isinstance(error, MachineError) else "Cannot be made"
    if isinstance(error, InvalidRequestError):
        title = "Waiting for a setting to be mended"
    badge = Chip(f"{title}.", f"{what} {remedy}", "stopped")
    ways = _ways(error.strategies, error.where) if isinstance(error, MemoryShortError) else ()
    return Outlook(title, dict.fromkeys(components, badge), ways=ways, problem=what, remedy=remedy)


def _why(plan: ExecutionPlan, name: str, part: ComponentPlan) -> str:
    # On a CPU there is nothing to choose.
    told = plan.speed.description if part.device.startswith("cuda") or plan.asked.compile == "always" else ""
    return f"{part.reason} {told}".strip() if part.backend == PYTORCH and is_transformer(name) else part.reason


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
        said = f"{how}: {shares} of {len(parts)} parts"
    else:
        said = f"{how}: PyTorch"
    if plan.gpus > 1:
        said = f"{said} on {plan.gpus} GPUs"
    builds = sum(use.build for part in parts.values() for use in part.engines)
    about = f"about {_words(plan.seconds['total'].likely)}"
    return f"{said}, {builds} to build first, then {about}" if builds else f"{said}, {about}"


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


def _ways(strategies: Sequence[StrategyForecast], where: str, taken: MemoryStrategy | None = None) -> tuple[Step, ...]:
    """Return all strategies if the fastest does not fit."""
    fastest = strategies[0]
    if fastest.strategy == taken or (fastest.fits and fastest.fits_ram and not fastest.lacks):
        return ()
    return tuple(
        Step(
            title=one.title,
            takes=_takes(one, fastest),
            verdict=one.verdict(where, taken=one.strategy == taken),
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
