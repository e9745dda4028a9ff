"""`upscale`: a video file to a larger MP4."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from runtime.cli import terminal
from runtime.cli.conversion import check_options, read_output, read_path, run_conversion
from runtime.cli.plan_and_doctor import forecast_text
from runtime.core import settings
from runtime.core.cancel import Cancel
from runtime.core.errors import InvalidRequestError
from runtime.core.events import Event
from runtime.core.units import duration
from runtime.engines.service import EngineService
from runtime.families.esrgan.upscalers import SCALES, find_upscaler
from runtime.machine.probe import Machine, probe
from runtime.pipeline.history_file import HistoryFile
from runtime.pipeline.upscale_plan import UpscalePlan, UpscaleRequest
from runtime.planner.history import History
from runtime.video.mp4 import check_output
from runtime.video.reader import read_info

if TYPE_CHECKING:
    from runtime.pipeline.upscale import Upscaled


def upscale(
    file: str, out: str | None, *, scale: int | None, upscaler: str | None, crf: int | None, backend: str
) -> dict[str, Any]:
    """Upscale a video; print the result's path and return what was done.

    Raises:
        TandemError: if the video or the upscaler cannot be used, or the result cannot be written.
        CancelledError: on Ctrl-C; nothing is left.
    """
    loaded = settings.load()
    check_options(backend, crf=crf)
    if scale is not None and scale not in SCALES:
        nearest = min(max(scale, SCALES[0]), SCALES[-1])
        limits = {"low": SCALES[0], "high": SCALES[-1]}
        raise InvalidRequestError("scale", "request.out_of_range", value=scale, nearest=nearest, **limits)
    source = read_path("file", file, "source.path_unreadable")
    spec = find_upscaler(upscaler, scale, loaded.weights_dir)
    info = read_info(source)
    output = read_output(out, f"{source.stem} {spec.vae.scale_factor_spatial}x", loaded.outputs_dir)
    if output == source:
        raise InvalidRequestError("out", "source.same_file", file=source.name)
    request = UpscaleRequest(source=info, spec=spec, output=output, crf=crf, backend=backend)
    machine = probe()
    plan = UpscalePlan.of(request, machine)
    check_output(output, plan.width, plan.height, info.frames or 1, plan.crf)
    _print_plan(plan, HistoryFile(loaded.cache_dir, machine).read(), machine)

    def convert(emit: Callable[[Event], None], cancel: Cancel) -> "Upscaled":
        from runtime.pipeline.upscale import upscale_file

        return upscale_file(plan, loaded, EngineService.from_settings(loaded, machine), emit, cancel)

    return run_conversion("upscale", output, loaded, convert)


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
