"""Run jobs to their end, or stop them at an event."""

from collections.abc import Callable
from typing import Any

from runtime.core.cancel import Cancel
from runtime.core.events import Event
from runtime.core.plan import ExecutionPlan
from runtime.execution.residency import Residency
from runtime.models.spec import ModelSpec
from runtime.pipeline.run import run_job

Choice = Callable[[Event], bool]


def never(_: Event) -> bool:
    """Stop at no event."""
    return False


def events_of(
    plan: ExecutionPlan,
    spec: ModelSpec,
    residency: Residency,
    *,
    cancel_at: Choice = never,
    pause_at: Choice = never,
    **given: Any,
) -> list[Event]:
    """Run a job, cancelled or paused at the events that are chosen; `given` goes to `run_job`."""
    events: list[Event] = []
    cancel = Cancel()

    def emit(event: Event) -> None:
        events.append(event)
        if cancel_at(event):
            cancel.request()
        if pause_at(event):
            cancel.pause()

    run_job(plan, spec, emit, cancel, residency, **given)
    return events
