"""From where a job that ended without a video can be resumed, and with which settings. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.core.events import Event, OutOfMemory, Planned, Resumed, StepDone
from runtime.core.units import duration
from runtime.ui.words import page_text


@dataclass(frozen=True)
class ResumeStatus:
    """How a job can be resumed.

    Attributes:
        kept: how far the job was and from where it continues, as sentences.
        step: last step of the checkpoint; `None` if the job starts over.
        memory: where memory ran out and what that cost; empty if it did not.
        alternative: the lower-memory strategy that the job can be resumed with; empty if there is none.
        changes: to the request, for that strategy.
    """

    kept: str
    step: int | None
    memory: str
    alternative: str
    changes: Mapping[str, Any]


def resume_status(events: Sequence[Event], step: int | None) -> ResumeStatus:
    """Return how a job can be resumed.

    Args:
        events: of its last run.
        step: of its checkpoint, which may be newer than the last event; `None` if there is none.
    """
    reached, of = step or 0, 0
    memory: OutOfMemory | None = None
    for event in events:
        if isinstance(event, Planned):
            of = event.plan.steps
        elif isinstance(event, Resumed | StepDone):
            reached, of = max(reached, event.step), event.of
        elif isinstance(event, OutOfMemory):
            memory = event
    changes = {} if memory is None or memory.retried else memory.changes
    alternative = "" if memory is None or memory.strategy is None or not changes else page_text(memory.strategy).what
    problem = "" if memory is None else _memory(memory)
    return ResumeStatus(_kept(reached, of, step), step, problem, alternative, changes)


def _kept(reached: int, of: int, step: int | None) -> str:
    if not reached:
        return "Denoising had not started." if of else ""
    if reached == of:
        stopped = f"All {of} steps were done."
        if step == of:
            return f"{stopped} Only decoding remains."
    else:
        stopped = f"It stopped at step {reached} of {of}."
    if step is None:
        return f"{stopped} No checkpoint was kept: it starts over."
    if step == reached:
        return f"{stopped} It continues from there."
    return f"{stopped} It continues after step {step}." if step else f"{stopped} It starts again at the first step."


def _memory(memory: OutOfMemory) -> str:
    what = page_text(memory.fact).what
    if memory.lost_seconds < 1 or memory.retried:
        return what
    return f"{what} {duration(memory.lost_seconds)} of work was lost."
