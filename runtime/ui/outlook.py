"""What the acceleration panel says of a plan: a chip per part, the sum in a line, memory and time.

A pure function of what is foreseen. Knows nothing about gradio or HTML.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from runtime.core.errors import InvalidRequestError, MachineError
from runtime.core.plan import BACKEND_TITLES, PYTORCH, ComponentPlan, ExecutionPlan
from runtime.ui import clip_time, text
from runtime.ui.foresight import Foreseen

_LONGEST_CHIP = 70
_LOOKING = "Looking for engines…"


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
class Outlook:
    """Everything that the panel shows.

    Attributes:
        line: the sum, for the closed panel.
        chips: by component.
        memory: `None` where there is no plan.
        time: the forecast in words.
        problem, remedy: why the form cannot be carried out.
        complete: whether engines are known yet; if not, it is worth asking again.
    """

    line: str
    chips: Mapping[str, Chip] = field(default_factory=dict)
    memory: Memory | None = None
    time: str = ""
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
    chips = {name: _chip(plan, name, foreseen) for name in plan.components}
    seconds = clip_time.clip_seconds(plan, foreseen.offers)
    builds = sum(use.build for part in plan.components.values() for use in part.engines)
    time = "not measured here yet" if seconds is None else f"about {text.duration(seconds)}"
    line = _LOOKING if not foreseen.complete else _sum(plan, None if seconds is None else time, builds)
    return Outlook(line, chips, _memory(plan, foreseen), time, complete=foreseen.complete)


def stopped(error: Exception, components: tuple[str, ...]) -> Outlook:
    """Return what to say where a form cannot be carried out."""
    what, remedy = str(getattr(error, "what", error)), str(getattr(error, "remedy", ""))
    what = what[:1].upper() + what[1:]
    title = "Does not fit" if isinstance(error, MachineError) else "Cannot be made"
    if isinstance(error, InvalidRequestError):
        title = "Waiting for a setting to be mended"
    chip = Chip(f"{title}.", f"{what} {remedy}", "stopped")
    return Outlook(title, dict.fromkeys(components, chip), problem=what, remedy=remedy)


def _chip(plan: ExecutionPlan, name: str, foreseen: Foreseen) -> Chip:
    part = plan.components[name]
    title = BACKEND_TITLES[part.backend]
    if not foreseen.complete:
        return Chip(_LOOKING, "The model's files are read once; then its engines are known.", "plain")
    if part.backend == PYTORCH:
        kind = "instead" if part.fell_back else "plain"
        return Chip(_short(f"{title}: {_why_pytorch(part)}"), part.reason, kind)
    ids = [use.id for use in part.engines]
    offered = foreseen.offers(name, plan.latent_size, part.device)
    offer = next((offer for offer in offered if [use.id for use in offer.uses] == ids), None)
    if any(use.build for use in part.engines):
        seconds = clip_time.build_estimate(offer, foreseen.records) if offer else None
        about = f", about {text.duration(seconds)}" if seconds else ""
        return Chip(f"{title}: builds first{about}", part.reason, "build")
    speed = f", {offer.speed_up:.1f} times as fast" if offer and offer.speed_up else ""
    return Chip(f"{title}: engine ready{speed}", part.reason, "ready")


def _why_pytorch(part: ComponentPlan) -> str:
    """Return what matters of the reason: what stands after "but" or the colon, up to the full stop."""
    if part.asked == PYTORCH:
        return "as chosen"
    _, _, why = part.reason.partition(" but " if part.fell_back else ": ")
    if part.fell_back and why.startswith("has "):
        why = f"{BACKEND_TITLES[part.asked]} {why.partition(' (')[0]}"
    return (why or part.reason).split(". ")[0].rstrip(".")


def _short(sentence: str) -> str:
    return sentence if len(sentence) <= _LONGEST_CHIP else f"{sentence[: _LONGEST_CHIP - 1].rstrip()}…"


def _sum(plan: ExecutionPlan, time: str | None, builds: int) -> str:
    parts = plan.components
    counted = Counter(BACKEND_TITLES[part.backend] for part in parts.values() if part.backend != PYTORCH)
    how = "Auto" if all(part.asked == "auto" for part in parts.values()) else "As chosen"
    if counted:
        shares = " and ".join(f"{title} for {count}" for title, count in counted.most_common())
        said = f"{how}: {shares} of {len(parts)} parts"
    else:
        said = f"{how}: PyTorch"
    if builds:
        said += f", {builds} to build first"
    return f"{said}, {time}" if time else said


def _memory(plan: ExecutionPlan, foreseen: Foreseen) -> Memory:
    sizes = [part.weights_bytes for part in plan.components.values()]
    weights = min(sum(sizes) if plan.keep_loaded else max(sizes), plan.memory_bytes)
    device = plan.components["transformer"].device
    machine = foreseen.machine
    on_gpu = device.startswith("cuda")
    free = machine.gpus[int(device.partition(":")[2] or 0)].free_bytes if on_gpu else machine.ram_free_bytes
    return Memory(weights, plan.memory_bytes - weights, free, "video memory" if on_gpu else "memory")
