"""Data of the job store: job records, the work of tasks on the engine library, and stored events."""

import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, Json, TypeAdapter, ValidationError

from runtime.core import events
from runtime.core.errors import first_line
from runtime.core.events import Event, Failed, Planned, VideoSaved
from runtime.core.frozen import FrozenModel
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest

logger = logging.getLogger(__name__)

Kind = Literal["video", "build", "task"]
State = Literal["queued", "running", "done", "failed", "cancelled", "interrupted"]
Control = Literal["", "cancel", "pause"]

KINDS: tuple[Kind, ...] = get_args(Kind)
VIDEOS: tuple[Kind, ...] = ("video",)
STATES: tuple[State, ...] = get_args(State)
RESUMABLE: tuple[State, ...] = ("failed", "cancelled", "interrupted")


class JobRecord(FrozenModel):
    """One job: a row of the table, whose columns have the same names or those in the aliases.

    Attributes:
        number: increases with each job and orders the history, independent of the clock.
        id: 8 hexadecimal digits.
        kind: "video", "build" (of engines) or "task" (other work on the engine library).
        title: of a build or task; empty for videos.
        part: the only component that a build is for; `None` for all.
        state: see `State`; a queued job that is `held` is paused.
        pending: the pause or cancel request that a running job has not followed yet.
        request: fields of `GenerationRequest`, with the seed fixed.
        plan_json: the plan as JSON, see `plan`.
        begun: whether the job has run: then it continues with its plan.
        output: the MP4 to write.
        owner: the visitor that the job belongs to; `None` for the user of this machine.
        batch: shared by the jobs of a batch.
        parent: the job that this one reruns.
        instance: the process that runs it, or ran it last.
        created, started, ended, deleted: seconds since 1970.
        result: `VideoSaved` as JSON, see `saved`.
        live: the latest of its frequent events, as JSON.
        failure: the error of a failed job.
        idle: whether it runs only while no other work waits, and makes room for videos.
        engines: ids of the engines that an idle build is for, separated by spaces.
    """

    model_config = ConfigDict(extra="ignore")

    number: int
    id: str
    kind: Kind
    title: str
    part: str | None
    state: State
    held: bool
    pending: Control = Field(alias="asked")
    request: Json[dict[str, Any]]
    plan_json: str | None = Field(alias="plan")
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
    result: Json[dict[str, Any]] | None
    failure: Json[Failed] | None
    live: str | None = None
    idle: bool = False
    engines: str = ""

    @property
    def open(self) -> bool:
        """Whether it is queued or running."""
        return self.state in {"queued", "running"}

    @property
    def resumable(self) -> bool:
        """Whether it can be resumed."""
        return self.kind == "video" and self.state in RESUMABLE and self.deleted is None

    @property
    def prompt(self) -> str:
        """The prompt; empty for builds and tasks."""
        return str(self.request.get("prompt", ""))

    @cached_property
    def plan(self) -> ExecutionPlan | None:
        """The plan; `None` if there is none, or this version cannot read it."""
        if self.plan_json is None:
            return None
        try:
            return ExecutionPlan.model_validate_json(self.plan_json)
        except ValidationError as error:
            logger.warning("The plan of job %s cannot be read: %s", self.id, first_line(error))
            return None

    @cached_property
    def saved(self) -> VideoSaved | None:
        """The result of a finished job."""
        return None if self.result is None else VideoSaved.model_validate(self.result)

    def generation_request(self) -> GenerationRequest:
        """Return the request.

        Raises:
            InvalidRequestError: if this version does not understand it.
        """
        return GenerationRequest.from_mapping(self.request)


class BuildEngines(FrozenModel):
    """Build the engines that a request wants.

    Attributes:
        request: by the names of `GenerationRequest`; with `build="always"` existing engines are built again.
        component: the only component to build for; `None` builds for all.
        engines: ids of the only engines to build; empty builds all.
    """

    kind: Literal["build"] = "build"
    request: dict[str, Any]
    component: str | None = None
    engines: tuple[str, ...] = ()


class InspectEngine(FrozenModel):
    """Open an engine file and find out which component it could replace. This runs code of the file.

    Attributes:
        model: name or folder of the model.
        component: the component to replace; `None` tries all.
    """

    kind: Literal["inspect"] = "inspect"
    path: Path
    model: str
    component: str | None = None


class ImportEngine(FrozenModel):
    """Import an engine file. This runs code of the file. Attributes as in `InspectEngine`."""

    kind: Literal["import"] = "import"
    path: Path
    model: str
    component: str | None = None


class VerifyEngine(FrozenModel):
    """Compare an engine with PyTorch; `models` are the names or folders of the models that it may belong to."""

    kind: Literal["verify"] = "verify"
    engine: str
    models: tuple[str, ...]


class DeleteEngine(FrozenModel):
    """Delete an engine."""

    kind: Literal["delete"] = "delete"
    engine: str


class PruneEngines(FrozenModel):
    """Delete the least recently used engines until the library is within `max_bytes`."""

    kind: Literal["prune"] = "prune"
    max_bytes: int


Work = Annotated[
    BuildEngines | InspectEngine | ImportEngine | VerifyEngine | DeleteEngine | PruneEngines,
    Field(discriminator="kind"),
]
_WORK: TypeAdapter[Work] = TypeAdapter(Work)


def work_of(record: JobRecord) -> Work:
    """Return the work of a record of kind "build" or "task".

    Raises:
        ValueError: if another version wrote it.
    """
    if record.kind == "build":
        engines = tuple(record.engines.split())
        return BuildEngines(request=dict(record.request), component=record.part, engines=engines)
    return _WORK.validate_python(record.request)


def event_to_json(event: Event) -> dict[str, Any]:
    """Return an event as the store holds it: without the plan and the result, which are in the record."""
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


def stored_request(request: GenerationRequest, plan: ExecutionPlan) -> dict[str, Any]:
    """Return the request as the store holds it: "auto" stays, the seed is fixed, and folders are absolute."""
    assert request.model == plan.model, "a plan for another request"
    by_path = Path(plan.model).expanduser().resolve() == plan.model_directory
    model = str(plan.model_directory) if by_path else plan.model
    return request.to_json() | {"seed": plan.seed, "model": model}
