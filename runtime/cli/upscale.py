"""`upscale`: a video file to a larger MP4."""

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
from runtime.core.units import duration
from runtime.engines.service import EngineService
from runtime.families.esrgan.upscalers import SCALES, find_upscaler
from runtime.machine.probe import Machine, probe
from runtime.pipeline.files import make_folder, output_path
from runtime.pipeline.history_file import HistoryFile
from runtime.pipeline.upscale_plan import UpscalePlan, UpscaleRequest
from runtime.planner.history import History
from runtime.video.mp4 import check_output
from runtime.video.reader import read_info


def upscale(
    file: str, out: str | None, *, scale: int | None, upscaler: str | None, crf: int | None, backend: str
) -> dict[str, Any]:
    """Upscale a video; print the result's path and return what was done.

    Raises:
        TandemError: if the video or the upscaler cannot be used, or the result cannot be written.
        CancelledError: on Ctrl-C; nothing is left.
    """
    loaded = settings.load()
    check_file_options(backend, {"scale": (scale, SCALES[0], SCALES[-1]), "crf": (crf, *CRF_LIMITS)})
    if not file.strip() or not file.isprintable():
        raise InvalidRequestError("file", "source.path_unreadable")
    spec = find_upscaler(upscaler, scale, loaded.weights_dir)
    source = Path(file).expanduser().resolve()
    info = read_info(source)
    if out is None:
        make_folder(loaded.outputs_dir)
        output = output_path(loaded.outputs_dir, f"{source.stem} {spec.vae.scale_factor_spatial}x")
    elif not out.strip() or not out.isprintable():
        raise InvalidRequestError("out", "cli.out_unreadable")
    else:
        output = Path(out).expanduser().resolve()
    if output == source:
        raise InvalidRequestError("out", "upscale.same_file", file=source.name)
    request = UpscaleRequest(source=info, spec=spec, output=output, crf=crf, backend=backend)
    machine = probe()
    plan = UpscalePlan.of(request, machine)
    check_output(output, plan.width, plan.height, info.frames or 1, plan.crf)
    _print_plan(plan, HistoryFile(loaded.cache_dir, machine).read(), machine)
    return _run(plan, loaded, machine)


def _run(plan: UpscalePlan, loaded: settings.Settings, machine: Machine) -> dict[str, Any]:
    output = plan.request.output
    progress, loaded_at = terminal.ProgressLine(), 0.0

    def emit(event: Event) -> None:
        nonlocal loaded_at
        progress.event(event)
        if isinstance(event, StageStarted) and event.stage == "upscale":
            loaded_at = time.monotonic()
        if isinstance(event, FellBack | Warned):
            terminal.warning(render(event.fact).what)

    with cancel_on_signals() as cancel, progress.shown():
        began = time.monotonic()
        emit(StageStarted(stage="load"))
        # It imports torch, which takes seconds that a refused request does not need.
        from runtime.pipeline.upscale import upscale_file

        done = upscale_file(plan, loaded, EngineService.from_settings(loaded, machine), emit, cancel)
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


def _print_plan(plan: UpscalePlan, history: History, machine: Machine) -> None:
    """Print what upscaling makes and how long it takes."""
    spec, source = plan.request.spec, plan.request.source
    length = "" if source.seconds is None else f", {source.frames} frames ({duration(source.seconds)})"
    sound = " with sound" if source.sound else ""
    terminal.line(
        f"{spec.title}: {source.width}x{source.height} to {plan.width}x{plan.height}{length}, "
        f"{float(source.rate):.4g} fps{sound}"
    )
    seconds = plan.seconds(machine, history)
    if seconds is not None:
        terminal.line(forecast_text(seconds, plan.load_seconds))
