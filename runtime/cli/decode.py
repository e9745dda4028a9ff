"""`decode`: latents of a file to an MP4."""

import time
from pathlib import Path
from typing import Any

from runtime.cli import terminal
from runtime.cli.exit_codes import cancel_on_signals
from runtime.cli.flags import CRF_LIMITS, check_file_options
from runtime.cli.plan_and_doctor import forecast_text
from runtime.core import settings
from runtime.core.errors import InvalidRequestError
from runtime.core.events import Event, FellBack, StageStarted, Warned
from runtime.core.facts import render
from runtime.core.files import give_usual_permissions
from runtime.core.plan import BACKEND_TITLES
from runtime.core.request import MAX_FPS
from runtime.engines.service import EngineService
from runtime.machine.probe import Machine, probe
from runtime.models.catalogue import find
from runtime.models.latent_files import LatentFile, parse_channels
from runtime.pipeline.decode_plan import DecodePlan, DecodeRequest
from runtime.pipeline.files import make_folder, output_path
from runtime.pipeline.history_file import HistoryFile
from runtime.planner.history import History
from runtime.video.mp4 import check_output


def decode(
    latents: str, model: str | None, out: str | None, *, fps: int | None, channels: str, crf: int | None, backend: str
) -> dict[str, Any]:
    """Decode a file of latents; print the video's path and return what was done.

    Raises:
        TandemError: if the file or the model cannot be used, or the video cannot be written.
        CancelledError: on Ctrl-C; nothing is left.
    """
    loaded = settings.load()
    check_file_options(backend, {"fps": (fps, 1, MAX_FPS), "crf": (crf, *CRF_LIMITS)})
    source = _path("latents", latents)
    if out is None:
        make_folder(loaded.outputs_dir)
        output = output_path(loaded.outputs_dir, source.stem)
    else:
        output = _path("out", out)
    spec = find(loaded.model if model is None else model, loaded.weights_dir)
    request = DecodeRequest(
        latents=source, spec=spec, output=output, fps=fps, channels=parse_channels(channels), crf=crf, backend=backend
    )
    machine = probe()
    progress, loaded_at = terminal.ProgressLine(), 0.0

    def emit(event: Event) -> None:
        nonlocal loaded_at
        progress.event(event)
        if isinstance(event, StageStarted) and event.stage == "decode":
            loaded_at = time.monotonic()
        if isinstance(event, FellBack | Warned):
            terminal.warning(render(event.fact).what)

    with LatentFile(source) as file:
        plan = DecodePlan.of(request, file, loaded.weights_dir, machine)
        check_output(output, plan.width, plan.height, plan.layout.count, plan.crf)
        _print_plan(plan, HistoryFile(loaded.cache_dir, machine).read(), machine)
        with cancel_on_signals() as cancel, progress.shown():
            began = time.monotonic()
            emit(StageStarted(stage="load"))
            # It imports torch, which takes seconds that a refused request does not need.
            from runtime.pipeline.decode import decode_file

            done = decode_file(plan, file, loaded, EngineService.from_settings(loaded, machine), emit, cancel)
    if loaded.outputs_dir not in output.parents:
        give_usual_permissions(output)
    rate = done.to_json()["frames_per_second"]
    where = BACKEND_TITLES.get(done.backend, done.backend)
    terminal.line(
        f"Saved. {done.frames} frames of {done.width}×{done.height} · {done.seconds:.1f} s ({rate:.1f} frames/s on "
        f"{where}) · loading {loaded_at - began:.1f} s"
    )
    terminal.result_path(output)
    return done.to_json()


def _print_plan(plan: DecodePlan, history: History, machine: Machine) -> None:
    """Print what decoding makes and how long it takes."""
    title, count = plan.request.spec.title, plan.layout.count
    terminal.line(f"{title}: {plan.width}x{plan.height}, {count} frames ({count / plan.fps:.1f} s at {plan.fps} fps)")
    terminal.line(forecast_text(plan.seconds(machine, history), plan.load_seconds))


def _path(field: str, text: str) -> Path:
    if not text.strip() or not text.isprintable():
        raise InvalidRequestError(field, "cli.out_unreadable" if field == "out" else "latents.path_unreadable")
    return Path(text).expanduser().resolve()
