"""A job as the store keeps it: what was asked for, what was decided, how it stands. Plain data, read by every page."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError

from runtime.core import events
from runtime.core.errors import first_line
from runtime.core.events import Event, Failed, Planned, VideoSaved
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest

logger = logging.getLogger(__name__)

# "task" is work on the engine library that only the process that was asked for it can do.
Kind = Literal["video", "build", "task"]
State = Literal["queued", "running", "done", "failed", "cancelled", "interrupted"]
Wish = Literal["", "cancel", "pause"]

KINDS: tuple[Kind, ...] = get_args(Kind)
VIDEOS: tuple[Kind, ...] = ("video",)
STATES: tuple[State, ...] = get_args(State)
# From here a job can be taken up again.
RESUMABLE: tuple[State, ...] = ("failed", "cancelled", "interrupted")


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """One job.

    Attributes:
        number: rises with each job; the order of history, whatever the clock says.
        id: 8 hexadecimal digits.
        kind: "video", or work on the engine library that waits in the same line.
        title: of that work; a video has none.
        part: the one component that a build is for, if it is not for all.
        state: where it stands; one that is `held` waits for somebody to let it go on.
        asked: what a running job was asked for and has not done yet.
        request: by the names of `GenerationRequest`, the seed fixed.
        plan_json: the plan as text, see `plan`.
        begun: whether it ran: then the plan is what it ran by, and it goes on by it.
        output: the MP4 to write.
        owner: the visitor whose it is; `None` is the person at this machine.
        batch: what jobs that were asked for together have in common.
        parent: the job that this one redoes in part.
        instance: the process that runs it, or ran it last.
        created, started, ended, deleted: seconds since 1970, by the clock as it then was.
        result: `VideoSaved` as JSON.
        live: what it shows of this moment, an event as JSON that the next one replaces.
        failure: what went wrong and what to do about it.
    """

    number: int
    id: str
    kind: Kind
    title: str
    part: str | None
    state: State
    held: bool
    asked: Wish
    request: Mapping[str, Any]
    plan_json: str | None
    begun: bool
    output: Path
    owner: str | None
    batch: str | None
    parent: str | None
    instance: str | None
    created: float
    started: float | None
    ended: float | None
    deleted: float | None
    result: Mapping[str, Any] | None
    failure: Failed | None
    live: str | None = None

    @property
    def open(self) -> bool:
        """Whether it waits or runs."""
        return self.state in {"queued", "running"}

    @property
    def resumable(self) -> bool:
        """Whether it can be taken up again."""
        return self.kind == "video" and self.state in RESUMABLE and self.deleted is None

    @property
    def prompt(self) -> str:
        """What the video shows; empty for work on the engine library."""
        return str(self.request.get("prompt", ""))

    @cached_property
    def plan(self) -> ExecutionPlan | None:
        """What was decided; `None` where nothing was, or an older Tandem decided what this one cannot read."""
        if self.plan_json is None:
            return None
        try:
            return ExecutionPlan.model_validate_json(self.plan_json)
        except ValidationError as error:
            logger.warning("The plan of job %s cannot be read: %s", self.id, first_line(error))
            return None

    @cached_property
    def saved(self) -> VideoSaved | None:
        """The result as the event that told it."""
        if self.result is None:
            return None
        return VideoSaved.model_validate(self.result)

    def asked_for(self) -> GenerationRequest:
        """Return the request.

        Raises:
            InvalidRequestError: if it is not one that this Tandem understands.
        """
        return GenerationRequest.from_mapping(self.request)


def event_to_json(event: Event) -> dict[str, Any]:
    """Return an event as the store keeps it: without plan and result, which the record has."""
    if isinstance(event, VideoSaved):
        return {"event": event.event}
    return event.model_dump(mode="json")


def event_from_json(values: Mapping[str, Any], record: JobRecord) -> Event | None:
    """Return an event of `record`; `None` for the store's own events, and for those of another version."""
    name = values.get("event")
    if name == "Planned":
        return None if record.plan is None else Planned(plan=record.plan)
    if name == "VideoSaved":
        return record.saved
    return events.from_json(values)


def complete(request: GenerationRequest, plan: ExecutionPlan) -> dict[str, Any]:
    """Return the request as the store keeps it: what is open stays open, but for the seed; folders are whole paths."""
    assert request.model == plan.model, "a plan for another request"
    by_path = Path(plan.model).expanduser().resolve() == plan.model_directory
    model = str(plan.model_directory) if by_path else plan.model
    return request.to_json() | {"seed": plan.seed, "model": model}
