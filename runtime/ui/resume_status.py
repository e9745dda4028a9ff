"""How a job that ended without a video stands: how far it was, what of it is kept, and how it could go on. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.core.events import Event, OutOfMemory, Planned, Resumed, StepDone
from runtime.core.units import duration


@dataclass(frozen=True)
class Standing:
    """What to say of it.

    Attributes:
        kept: how far it was and from where it goes on, as sentences.
        step: the step that it goes on after; `None` where it begins anew.
        memory: where memory ran out, and what that cost; empty where it did not.
        way: what the more frugal way is called that it can go on in; empty where there is none.
        changes: to the request, for that way.
    """

    kept: str
    step: int | None
    memory: str
    way: str
    changes: Mapping[str, Any]


def standing(events: Sequence[Event], step: int | None) -> Standing:
    """Read it from what a job told.

    Args:
        events: since it was taken up last.
        step: of its checkpoint, which may be younger than the last word about it; `None` if there is none.
    """
    reached, of = step or 0, 0
    full: OutOfMemory | None = None
    for event in events:
        if isinstance(event, Planned):
            of = event.plan.steps
        elif isinstance(event, Resumed | StepDone):
            reached, of = max(reached, event.step), event.of
        elif isinstance(event, OutOfMemory):
            full = event
    changes = {} if full is None or full.retried else full.changes
    way = str(full.strategy) if full is not None and changes else ""
    return Standing(_kept(reached, of, step), step, "" if full is None else _memory(full), way, changes)


def _kept(reached: int, of: int, step: int | None) -> str:
    if not reached:
        return "It had not begun to denoise." if of else ""
    if reached == of:
        stopped = f"All {of} steps were done."
        if step == of:
            return f"{stopped} Only decoding is left."
    else:
        stopped = f"It stopped at step {reached} of {of}."
    if step is None:
        return f"{stopped} Nothing of that is kept: it begins anew."
    if step == reached:
        return f"{stopped} It goes on from there."
    return f"{stopped} It goes on after step {step}." if step else f"{stopped} The steps are done again."


def _memory(full: OutOfMemory) -> str:
    lost = f" {duration(full.lost_seconds)} of work were lost." if full.lost_seconds >= 1 and not full.retried else ""
    return f"{full.fact}{lost}"
