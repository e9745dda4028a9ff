"""The panel that decodes a file of latents: its form, the tasks that are not done, and the decoded clips."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import typer

from runtime.core.errors import EngineError, InvalidRequestError
from runtime.core.facts import Fact
from runtime.core.settings import Settings
from runtime.models.catalogue import check_offered
from runtime.models.latent_files import RGB, LatentFile, latent_files_in, parse_channels
from runtime.models.spec import ModelSpec
from runtime.pipeline.decode_plan import DecodePlan, DecodeRequest
from runtime.pipeline.files import make_folder, output_path
from runtime.queue.job_queue import JobQueue
from runtime.queue.records import DecodeLatents, JobRecord, work_of
from runtime.queue.views import Task
from runtime.server.job_files import find_output
from runtime.ui.engines_panel import tasks_html
from runtime.ui.formatting import page_text, render
from runtime.ui.job_view import file_url
from runtime.ui.panels import Call, Reply, drawn, unknown_action

_KIND = "decode"
_TASK_ID = re.compile(r"[0-9a-f]{8}")
_MAX_OPEN_TASKS = 20
_MAX_CHARACTERS = 4_000
# Clips that are listed, and tasks among which they are looked for.
_MOST_CLIPS, _MOST_TASKS = 12, 100


@dataclass(frozen=True, kw_only=True)
class Clip:
    """A decoded clip.

    Attributes:
        id: of its task.
        latents: the name of the file of latents.
        address: where the video is served.
        channels: what its frames show, empty for colors only.
        result: how many frames it has, and how fast they were decoded.
        ended: seconds since 1970.
    """

    id: str
    latents: str
    video: Path
    address: str
    model: str
    channels: str
    result: str
    ended: float


class DecodePanel:
    """The panel; see `panels.Panel`.

    Args:
        models: the models that make videos, by name.
        decoders: returns the decoders of single frames.
        settings: has the folders; files in that of latents can be chosen by name.
        opens_folders: whether the browser runs on this machine, which has a screen.
    """

    def __init__(
        self,
        worker: JobQueue,
        models: dict[str, ModelSpec],
        decoders: Callable[[], list[ModelSpec]],
        settings: Settings,
        *,
        opens_folders: bool = False,
    ) -> None:
        self._worker = worker
        self._models = models
        self._decoders = decoders
        self._outputs_dir = settings.outputs_dir
        self._latents_dir = settings.latents_dir
        self._weights_dir = settings.weights_dir
        self._opens_folders = opens_folders
        # Of tasks that are done, by id: they do not change.
        self._results: dict[str, Fact | None] = {}

    def act(self, call: Call) -> Reply:
        """Carry out an action."""
        match call.action:
            case "refresh":
                return {}
            case "decode":
                return self._decode(call)
            case "cancel" if _TASK_ID.fullmatch(call.target):
                self._worker.cancel([call.target])
                return {"message": "Cancelled."}
            case "reveal" if self._opens_folders:
                return self._reveal(call.target)
        raise unknown_action()

    def draw(self, _call: Call, _reply: Reply) -> dict[str, str]:
        """Return the HTML of the choices, the tasks and the clips."""
        tasks = [task for task in self._worker.tasks() if task.kind == _KIND and task.state != "done"]
        return drawn(
            {
                "files": self._files,
                "choices": self._choices,
                "tasks": lambda: tasks_html(tasks, self._worker),
                "clips": lambda: render("decode_clips.html", clips=self._clips(), opens_folders=self._opens_folders),
            }
        )

    def _decode(self, call: Call) -> Reply:
        file, elsewhere, name, channels = (
            call.values.get(field) for field in ("file", "elsewhere", "model", "channels")
        )
        # Without a listed file, the path counts.
        file = file or elsewhere
        spec = check_offered(name, self._offered())
        if not isinstance(file, str) or not isinstance(channels, str) or len(file) > _MAX_CHARACTERS:
            raise unknown_action()
        path = self._path(file.strip())
        panels = parse_channels(channels or RGB)
        open_tasks = [open_task for open_task in self._worker.tasks() if open_task.open]
        if len(open_tasks) >= _MAX_OPEN_TASKS:
            raise EngineError("ui.too_many_tasks", maximum=_MAX_OPEN_TASKS)
        make_folder(self._outputs_dir)
        work = DecodeLatents(
            latents=path, model=str(name), output=output_path(self._outputs_dir, path.stem), channels=panels
        )
        request = DecodeRequest(latents=path, spec=spec, output=work.output, channels=panels)
        task = self._worker.add_task(work, Fact("task.decode", {"file": path.name}), self._seconds(request))
        return {"message": f"{task.title}: {'queued' if self._worker.ahead(task) else 'started'}."}

    def _seconds(self, request: DecodeRequest) -> float:
        """Return the forecast of a task.

        Raises:
            InvalidRequestError: if the file cannot be read, or its latents do not fit the decoder.
        """
        machine = self._worker.machine()
        with LatentFile(request.latents) as file:
            plan = DecodePlan.of(request, file, self._weights_dir, machine)
        return plan.seconds(machine, self._worker.history()).likely

    def _path(self, text: str) -> Path:
        """Return the file with a name in the folder of latents, or with an absolute path.

        Raises:
            InvalidRequestError: if the text is neither.
        """
        path = Path(text).expanduser() if text.isprintable() else Path()
        listed = {file.name: file for file in latent_files_in(self._latents_dir)}
        if text in listed:
            return listed[text]
        if not path.is_absolute():
            raise InvalidRequestError("latents", "ui.latents_not_listed", folder=self._latents_dir)
        return path

    def _files(self) -> str:
        sizes = latent_files_in(self._latents_dir)
        return render("decode_files.html", files=[(path.name, size) for path, size in sizes.items()])

    def _offered(self) -> dict[str, ModelSpec]:
        return {spec.name: spec for spec in self._decoders()} | self._models

    def _choices(self) -> str:
        return render("decode_choices.html", models=[(name, spec.title) for name, spec in self._offered().items()])

    def _reveal(self, task: str) -> Reply:
        video = next((clip.video for clip in self._clips() if clip.id == task), None)
        if video is None:
            raise unknown_action()
        typer.launch(str(video), locate=True)
        return {}

    def _clips(self) -> list[Clip]:
        """Return the newest decoded clips; those of `decode` on the command line are not tasks."""
        records = self._worker.store.list(kinds=["task"], states=["done"], limit=_MOST_TASKS)
        models = self._offered()
        clips = (self._clip(record, models) for record in records if record.request.get("kind") == _KIND)
        return list(islice(filter(None, clips), _MOST_CLIPS))

    def _clip(self, record: JobRecord, models: Mapping[str, ModelSpec]) -> Clip | None:
        """Return the clip of a task; `None` if it was deleted or cannot be read."""
        try:
            work = work_of(record)
        except ValueError:  # another version wrote it
            return None
        if not isinstance(work, DecodeLatents) or find_output(str(work.output), self._outputs_dir) is None:
            return None
        if record.id not in self._results:
            task = Task(record, self._worker.store)
            task.refresh()
            self._results[record.id] = task.result
        spec, result = models.get(work.model), self._results[record.id]
        return Clip(
            id=record.id,
            latents=work.latents.name,
            video=work.output,
            address=file_url(work.output),
            model=work.model if spec is None else spec.title,
            channels="" if work.channels == (RGB,) else ", ".join(work.channels),
            result="" if result is None else page_text(result).what,
            ended=record.ended or record.created,
        )
