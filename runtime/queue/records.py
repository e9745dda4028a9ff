"""Data of the job store: job records, the work of tasks on the engine library, and stored events."""

import json
import logging
from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import BeforeValidator, ConfigDict, Field, Json, TypeAdapter, ValidationError

from runtime.core import events
from runtime.core.errors import StoreError, first_line
from runtime.core.events import Event, Failed, Planned, Stage, VideoSaved
from runtime.core.facts import Fact
from runtime.core.frozen import FrozenModel
from runtime.core.plan import ExecutionPlan, plain_output
from runtime.core.request import AUTO, GenerationRequest

logger = logging.getLogger(__name__)

Kind = Literal["video", "build", "task"]
State = Literal["queued", "running", "done", "failed", "cancelled", "interrupted"]
Control = Literal["", "cancel", "pause"]

KINDS: tuple[Kind, ...] = get_args(Kind)
VIDEOS: tuple[Kind, ...] = ("video",)
STATES: tuple[State, ...] = get_args(State)
OPEN: tuple[State, ...] = ("running", "queued")
RESUMABLE: tuple[State, ...] = ("failed", "cancelled", "interrupted")
# Ranks of builds, see `JobRecord.rank`; those of videos and tasks are 0.
ASKED_BUILD, IDLE_BUILD = 1, 2

# The store's events after which a job's earlier deaths do not count.
STARTS_OVER = frozenset({"QueuedAgain", "Edited"})

# Seconds since 1970, up to the year 9999.
LAST_SECOND = 253_402_300_799.0
_Seconds = Annotated[float, Field(ge=0, le=LAST_SECOND, allow_inf_nan=False)]


class Group(NamedTuple):
    """The videos of a batch that have the same prompt: variations, shown together."""

    batch: str
    prompt: str


class JobRecord(FrozenModel):
    """One job: a row of the table, whose columns have the same names or those in the aliases.

    Attributes:
        number: increases with each job and orders the history, independent of the clock.
        id: 8 hexadecimal digits.
        kind: "video", "build" (of engines, or compiling code) or "task" (other work on the engine library).
        titled: what a build or task does; `None` for videos. `title` is its text.
        position: its place in the queue.
        part: the only component that a build is for; `None` for all.
        state: see `State`; a queued job that is `held` is paused.
        pending: the pause or cancel request that a running job has not followed yet.
        request: fields of `GenerationRequest`, with the seed fixed.
        plan_json: the plan as JSON, see `plan`.
        begun: whether the job has run: then it continues with its plan.
        output: the MP4 to write.
        owner: the visitor that the job belongs to; `None` for the user of this machine.
        batch: shared by the jobs of a batch, see `group`.
        instance: the process that runs it, or ran it last.
        created, started, ended, deleted: seconds since 1970.
        result: `VideoSaved` as JSON, see `saved`.
        live: the latest of its frequent events, as JSON.
        failure: the error of a failed job.
        rank: in the order, before the position. Builds come after videos and tasks: first those that were asked for,
            which make room for videos, then idle ones, which videos leave for later and which make room for all work.
        seconds: forecast of its duration; `None` if it is unknown.
        engines: ids of the engines that an idle build is for, separated by spaces.
        starred: whether the user marked it.
        lease: grows each time that the job is started. What holds an older lease can write nothing: a fencing token.
        finish: whether it ends after the current section, with the video so far.
    """

    model_config = ConfigDict(extra="ignore")

    number: int
    id: str = Field(pattern=r"^[0-9a-f]{8}$")
    kind: Kind
    titled: Annotated[Json[Fact] | None, BeforeValidator(lambda text: text or None)] = Field(alias="title")
    position: int
    part: str | None
    state: State
    held: bool
    pending: Control = Field(alias="pending_control")
    request: Json[dict[str, Any]]
    plan_json: str | None = Field(alias="plan")
    begun: bool
    output: Path
    owner: str | None
    batch: str | None
    instance: str | None = Field(pattern=r"^[^/\\]{1,64}$")  # part of a file name
    created: _Seconds
    started: _Seconds | None
    ended: _Seconds | None
    deleted: _Seconds | None
    result: Json[dict[str, Any]] | None
    failure: Json[Failed] | None
    live: str | None = None
    rank: int = 0
    seconds: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    engines: str = ""
    starred: bool = False
    finish: bool = False
    lease: int = 0

    @property
    def title(self) -> str:
        """What a build or task does, in the words of the command line; empty for videos."""
        return "" if self.titled is None else str(self.titled)

    @property
    def open(self) -> bool:
        """Whether it is queued or running."""
        return self.state in {"queued", "running"}

    @property
    def group(self) -> Group | None:
        """The group that it belongs to; `None` if it was queued alone."""
        return None if self.batch is None or self.kind != "video" else Group(self.batch, self.prompt)

    @property
    def idle(self) -> bool:
        """Whether it is a build that a video left for later."""
        return self.rank == IDLE_BUILD

    @property
    def resumable(self) -> bool:
        """Whether it can be resumed, or its video, which ended early, continued."""
        return self.kind == "video" and (self.state in RESUMABLE or self.continues) and self.deleted is None

    @property
    def continues(self) -> bool:
        """Whether its video was made in sections and ended early."""
        return self.state == "done" and self.saved is not None and self.saved.continues

    @property
    def prompt(self) -> str:
        """The prompt; empty for builds and tasks."""
        return str(self.request.get("prompt", "")) if self.kind == "video" else ""

    @cached_property
    def plan(self) -> ExecutionPlan | None:
        """The plan; `None` if there is none, or this version cannot read it."""
        if self.plan_json is None:
            return None
        try:
            return read_plan(self.plan_json)
        except ValidationError as error:
            logger.warning("The plan of job %s cannot be read: %s", self.id, first_line(error))
            return None

    @cached_property
    def saved(self) -> VideoSaved | None:
        """The result of a finished job; `None` if there is none, or this version cannot read it."""
        if self.result is None:
            return None
        try:
            return VideoSaved.model_validate(self.result)
        except ValidationError as error:
            logger.warning("The result of job %s cannot be read: %s", self.id, first_line(error))
            return None

    @property
    def videos(self) -> tuple[Path, ...]:
        """The video of a finished job, and the same as it was decoded if the job has that too."""
        if self.saved is None:
            return ()
        return (self.output, plain_output(self.output)) if self.saved.keeps_plain else (self.output,)

    @cached_property
    def live_values(self) -> Mapping[str, Any]:
        """The latest of its frequent events; empty if there is none, or it cannot be read."""
        try:
            values = json.loads(self.live or "{}")
        except (ValueError, RecursionError):
            return {}
        return values if isinstance(values, dict) else {}

    def generation_request(self) -> GenerationRequest:
        """Return the request.

        Raises:
            InvalidRequestError: if this version does not understand it.
        """
        return GenerationRequest.from_mapping(self.request)


class Needs(FrozenModel):
    """What a scheduler must know of a video, in a column of its own: reading a plan takes 2 ms.

    Attributes:
        model: the name of the model's folder or file.
        gpus: how many GPUs of one machine it needs.
        bytes_per_gpu: memory that it needs on each, or RAM on a CPU, with the strategy that needs the least without
            changing the video, of those that the request allows.
        engines: ids of the engines that its plan uses.
        seconds: forecast of its duration, without loading.
    """

    model: str
    gpus: int
    bytes_per_gpu: int
    engines: tuple[str, ...]
    seconds: float

    @classmethod
    def of(cls, plan: ExecutionPlan) -> "Needs":
        """Return what a plan needs."""
        offload = plan.request.offload
        possible = [
            forecast.peak_bytes
            for forecast in plan.strategies
            if forecast.lacks is None and forecast.strategy.lossless and offload in {AUTO, forecast.strategy.offload}
        ]
        return cls(
            model=plan.model_directory.name,
            gpus=plan.gpus,
            bytes_per_gpu=min([plan.forecast.peak_bytes, *possible]),
            engines=tuple(use.id for part in plan.components.values() for use in part.engines),
            seconds=max(plan.seconds["total"].likely, 1.0),
        )


def needs_columns(owner: str | None, plan: ExecutionPlan) -> dict[str, str | float]:
    """Return the columns that a scheduler and lists read without the plan.

    They are the needs as JSON, the lane, see `QueueOrder.waiting`, and the seconds of the needs.
    """
    needs = Needs.of(plan)
    lane = json.dumps([owner, needs.model, needs.gpus])
    return {"needs": needs.model_dump_json(), "lane": lane, "seconds": needs.seconds}


@lru_cache(maxsize=1024)
def read_needs(text: str) -> Needs:
    """Return needs from JSON; queued videos share few.

    Raises:
        ValidationError: if it cannot be read.
    """
    return Needs.model_validate_json(text)


class Waiting(NamedTuple):
    """A queued video that a scheduler may start."""

    id: str
    owner: str | None
    created: float
    needs: Needs


class Ahead(NamedTuple):
    """A job that runs before another one.

    Attributes:
        running: whether it has started.
        seconds: forecast of its whole duration; `None` if it is unknown.
    """

    kind: Kind
    running: bool
    seconds: float | None


class Durations(NamedTuple):
    """How long videos and builds take.

    Attributes:
        jobs: their number.
        timed: how many of them have a forecast.
        videos, builds: the seconds of those together.
    """

    jobs: int = 0
    timed: int = 0
    videos: float = 0.0
    builds: float = 0.0


class Line(NamedTuple):
    """How much is in the queue.

    Attributes:
        jobs: videos, builds and tasks that run or wait.
        videos: of these.
        waiting: those that wait and have a place in the order: not builds.
        going: videos that wait and are not paused.
    """

    jobs: int
    videos: int
    waiting: int
    going: int


@lru_cache(maxsize=16)
def read_plan(plan_json: str) -> ExecutionPlan:
    """Return a plan from JSON. It takes 2 ms, and the plan ten times as much memory as the text, or more.

    Raises:
        ValidationError: if this version cannot read it.
    """
    return ExecutionPlan.model_validate_json(plan_json)


def read_row(row: Mapping[str, Any]) -> JobRecord:
    """Return the job in a row of the table.

    Raises:
        StoreError: "queue.job_unreadable" with the columns that are invalid.
    """
    # SQLite stores any type in any column; text that is not UTF-8 is read as bytes. Paths with NUL raise ValueErrors.
    columns = [
        name for name, value in row.items() if isinstance(value, bytes) or (isinstance(value, str) and "\0" in value)
    ]
    if not columns:
        try:
            return JobRecord.model_validate(row)
        except ValidationError as error:
            columns = list(dict.fromkeys(str(problem["loc"][0]) for problem in error.errors(include_url=False)))
    name = row["id"] if isinstance(row["id"], str) and row["id"].isalnum() else f"number {row['number']}"
    raise StoreError("queue.job_unreadable", job=name[:40], columns=columns)


class Death(FrozenModel):
    """The death of a job's worker process: the event "WorkerDied".

    Attributes:
        how: it ended.
        out_of_memory: whether the system killed it because memory ran out.
        stage, part: the job's stage, and the component that ran or for which an engine was built.
        begun: whether the job was planned, or the build had begun, so that it may be the cause.
    """

    event: Literal["WorkerDied"] = "WorkerDied"
    how: Fact = Fact("queue.exit_unknown")
    out_of_memory: bool = False
    stage: Stage | None = None
    part: str | None = None
    begun: bool = True


def read_death(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored `Death` as JSON; one whose details cannot be read still counts."""
    try:
        return Death.model_validate(values).model_dump()
    except ValidationError:
        return Death().model_dump()


class TaskLive(FrozenModel):
    """The latest progress of a task: the current activity, and the share done, 0 to 1, if known."""

    fact: Fact
    share: float | None


def task_progress(record: JobRecord) -> TaskLive | None:
    """Return the latest progress of a build or task; `None` if there is none, or it cannot be read."""
    try:
        return TaskLive.model_validate(record.live_values)
    except ValidationError:
        return None


class BuildProgress(FrozenModel):
    """One engine of a task that builds engines.

    Attributes:
        program, backend: see `EngineKey`.
        component: the one that it is built for; others may share it.
        expected: about how long it takes, in seconds.
        state: "kept" if it existed already.
        took: seconds.
        speedup: how many times as fast as PyTorch it is; 0 if not measured.
        problem: why it failed.
    """

    program: str
    backend: str
    component: str = ""
    expected: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    state: Literal["waiting", "running", "done", "kept", "failed"] = "waiting"
    took: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    speedup: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    problem: Fact | None = None

    @property
    def open(self) -> bool:
        """Whether it waits or runs."""
        return self.state in {"waiting", "running"}


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


class CompileCode(FrozenModel):
    """Compile what later clips of a request run in PyTorch; `request` is by the names of `GenerationRequest`."""

    kind: Literal["compile"] = "compile"
    request: dict[str, Any]


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


class DecodeLatents(FrozenModel):
    """Decode a file of latents to an MP4; see `pipeline.decode_plan.DecodeRequest`."""

    kind: Literal["decode"] = "decode"
    latents: Path
    model: str
    output: Path
    channels: tuple[str, ...]


class EnhancePrompt(FrozenModel):
    """Enhance a prompt with a chat model in a folder; see `models.prompt_guides`.

    Attributes:
        folder, title, parameters: see `models.enhancers.LocalEnhancer`.
        instructions: the system prompt.
        most: how many characters the enhanced prompt may have.
    """

    kind: Literal["enhance"] = "enhance"
    folder: Path
    title: str
    parameters: int
    instructions: str
    prompt: str
    most: int


Work = Annotated[
    BuildEngines
    | CompileCode
    | InspectEngine
    | ImportEngine
    | VerifyEngine
    | DeleteEngine
    | PruneEngines
    | DecodeLatents
    | EnhancePrompt,
    Field(discriminator="kind"),
]
_WORK: TypeAdapter[Work] = TypeAdapter(Work)


def work_of(record: JobRecord) -> Work:
    """Return the work of a record of kind "build" or "task".

    Raises:
        ValueError: if another version wrote it.
    """
    if record.kind == "build" and "kind" not in record.request:
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
    """Return the request as the store holds it: "auto" stays, the seed is fixed, and files do not depend on the folder.

    A job uses its own copies of images and videos.
    """
    assert request.model == plan.model, "a plan for another request"
    path = Path(plan.model).expanduser()
    by_path = plan.model_directory in {path.resolve(), path.absolute()}
    model = str(plan.model_directory) if by_path else plan.model
    return request.to_json() | {"seed": plan.seed, "model": model, **plan.input_references}
