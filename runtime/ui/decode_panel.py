"""The panel that decodes a file of latents: its form, the tasks, and a player of the newest video."""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from runtime.core.errors import EngineError, InvalidRequestError, TandemError
from runtime.core.facts import Fact
from runtime.models.catalogue import check_offered
from runtime.models.latent_files import RGB, LatentFile, latent_files_in, parse_channels
from runtime.models.spec import ModelSpec
from runtime.pipeline.decode_plan import DecodePlan, DecodeRequest
from runtime.pipeline.files import make_folder, output_path
from runtime.queue.job_queue import JobQueue
from runtime.queue.records import DecodeLatents
from runtime.queue.views import Task
from runtime.server.job_files import find_output
from runtime.ui.engines_panel import tasks_html
from runtime.ui.formatting import render
from runtime.ui.job_view import file_url
from runtime.ui.panels import Call, Reply, drawn, unknown_action

_KIND = "decode"
_TASK_ID = re.compile(r"[0-9a-f]{8}")
_MAX_OPEN_TASKS = 20
_MAX_CHARACTERS = 4_000


class DecodePanel:
    """The panel; see `panels.Panel`.

    Args:
        models: the models that make videos, by name.
        decoders: returns the decoders of single frames.
        latents_dir: folder whose files can be chosen by name.
        weights_dir: folder of the models.
    """

    def __init__(
        self,
        worker: JobQueue,
        models: dict[str, ModelSpec],
        decoders: Callable[[], list[ModelSpec]],
        outputs_dir: Path,
        latents_dir: Path,
        weights_dir: Path,
    ) -> None:
        self._worker = worker
        self._models = models
        self._decoders = decoders
        self._outputs_dir = outputs_dir
        self._latents_dir = latents_dir
        self._weights_dir = weights_dir

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
        raise unknown_action()

    def draw(self, _call: Call, _reply: Reply) -> dict[str, str]:
        """Return the HTML of the choices, the tasks and the player."""
        tasks = [task for task in self._worker.tasks() if task.kind == _KIND]
        return drawn(
            {
                "files": self._files,
                "choices": self._choices,
                "tasks": lambda: tasks_html(tasks, self._worker),
                "player": lambda: self._player(tasks),
            }
        )

    def _decode(self, call: Call) -> Reply:
        file, name, channels = (call.values.get(field) for field in ("file", "model", "channels"))
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

    def _seconds(self, request: DecodeRequest) -> float | None:
        """Return the forecast of a task; `None` for latents that it will refuse."""
        machine = self._worker.machine()
        with suppress(TandemError), LatentFile(request.latents) as file:
            plan = DecodePlan.of(request, file, self._weights_dir, machine)
            return plan.seconds(machine, self._worker.history()).likely
        return None

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
        return render("decode_files.html", names=[path.name for path in latent_files_in(self._latents_dir)])

    def _offered(self) -> dict[str, ModelSpec]:
        return {spec.name: spec for spec in self._decoders()} | self._models

    def _choices(self) -> str:
        return render("decode_choices.html", models=[(name, spec.title) for name, spec in self._offered().items()])

    def _player(self, tasks: list[Task]) -> str:
        done = [task for task in tasks if task.state == "done" and task.result is not None]
        video = Path(str(done[-1].result.data.get("video", ""))) if done and done[-1].result else Path()
        address = file_url(video) if find_output(str(video), self._outputs_dir) else ""
        return render("decode_player.html", address=address, name=video.name)
