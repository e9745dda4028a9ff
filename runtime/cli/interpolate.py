"""`interpolate`: a video file to an MP4 with more frames."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.cli import terminal
from runtime.cli.conversion import check_options, read_output, read_path, run_conversion
from runtime.cli.plan_and_doctor import forecast_text
from runtime.core import settings
from runtime.core.cancel import Cancel
from runtime.core.errors import InvalidRequestError, ModelError
from runtime.core.events import Event
from runtime.core.plan import INTERPOLATOR_TITLES, Interpolator
from runtime.core.request import AUTO
from runtime.core.units import duration
from runtime.machine.probe import Machine, probe
from runtime.models.catalogue import find, folders
from runtime.models.registry import find_interpolator
from runtime.pipeline.history_file import HistoryFile
from runtime.pipeline.interpolate_plan import InterpolationPlan
from runtime.planner.history import History
from runtime.planner.interpolation import FACTORS, interpolator_of, network_calls
from runtime.video.mp4 import check_output, find_metadata
from runtime.video.reader import read_info

if TYPE_CHECKING:  # it imports torch
    from runtime.pipeline.interpolate import Interpolated


def interpolate(file: str, out: str | None, *, factor: int, slow: bool, crf: int | None) -> dict[str, Any]:
    """Interpolate a video; print the result's path and return what was done.

    Raises:
        TandemError: if the video cannot be used, or the result cannot be written.
        CancelledError: on Ctrl-C; nothing is left.
    """
    loaded = settings.load()
    check_options(AUTO, crf=crf)
    if factor not in FACTORS:
        raise InvalidRequestError("factor", "request.not_a_choice", value=factor, choices=list(FACTORS))
    source = read_path("file", file, "source.path_unreadable")
    info = read_info(source)
    output = read_output(out, f"{source.stem} {'slow' if slow else 'fps'} {factor}x", loaded.outputs_dir)
    if output == source:
        raise InvalidRequestError("out", "source.same_file", file=source.name)
    machine = probe()
    calls = None
    if _interpolator(source, loaded.weights_dir) == "network":
        device = "cuda:0" if machine.gpus and machine.torch_cuda else "cpu"
        calls = network_calls(find_interpolator(), info.width, info.height, device, machine)
    plan = InterpolationPlan(source=info, factor=factor, output=output, slow=slow, requested_crf=crf, calls=calls)
    check_output(output, plan.width, plan.height, (info.frames or 1) * factor, plan.crf)
    history = HistoryFile(loaded.cache_dir, machine)
    _print_plan(plan, history.read(), history.machine)

    def convert(emit: Callable[[Event], None], cancel: Cancel) -> "Interpolated":
        from runtime.pipeline.interpolate import interpolate_file

        return interpolate_file(plan, history, emit, cancel)

    return run_conversion("interpolate", output, loaded, convert)


def _interpolator(source: Path, weights_dir: Path) -> Interpolator:
    """Return what computes the new frames of a file, by the model that made it."""
    request = find_metadata(source).get("request")
    model = request.get("model") if isinstance(request, dict) else None
    try:
        # A file may name anything: only a model's name is looked up, no path.
        if isinstance(model, str) and model in folders(weights_dir):
            return interpolator_of(find(model, weights_dir))
    except ModelError:
        pass
    return "minterpolate"


def _print_plan(plan: InterpolationPlan, history: History, machine: Machine) -> None:
    """Print what interpolating makes and how long it takes."""
    source, longer = plan.source, plan.factor if plan.slow else 1
    frames = ""
    if source.frames is not None and source.seconds is not None:
        frames = f", {source.frames} to {source.frames * plan.factor} frames ({duration(source.seconds * longer)})"
    rate = f"{float(plan.fps):.4g} fps" if plan.slow else f"{float(source.rate):.4g} to {float(plan.fps):.4g} fps"
    sound = " with sound" if source.sound and not plan.slow else ""
    terminal.line(f"{INTERPOLATOR_TITLES[plan.by]}: {plan.width}x{plan.height}{frames}, {rate}{sound}")
    seconds = plan.seconds(machine, history)
    if seconds is not None:
        terminal.line(forecast_text(seconds, plan.load_seconds))
