"""`decode`: latents of a file to an MP4."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from runtime.cli import terminal
from runtime.cli.conversion import check_options, read_output, read_path, run_conversion
from runtime.cli.plan_and_doctor import forecast_text
from runtime.core import settings
from runtime.core.cancel import Cancel
from runtime.core.events import Event
from runtime.engines.service import EngineService
from runtime.machine.probe import Machine, probe
from runtime.models.catalogue import find
from runtime.models.latent_files import LatentFile, parse_channels
from runtime.pipeline.decode_plan import DecodePlan, DecodeRequest
from runtime.pipeline.history_file import HistoryFile
from runtime.planner.history import History
from runtime.video.mp4 import check_output

if TYPE_CHECKING:
    from runtime.pipeline.decode import Decoded


def decode(
    latents: str, model: str | None, out: str | None, *, fps: int | None, channels: str, crf: int | None, backend: str
) -> dict[str, Any]:
    """Decode a file of latents; print the video's path and return what was done.

    Raises:
        TandemError: if the file or the model cannot be used, or the video cannot be written.
        CancelledError: on Ctrl-C; nothing is left.
    """
    loaded = settings.load()
    check_options(backend, fps=fps, crf=crf)
    source = read_path("latents", latents, "latents.path_unreadable")
    output = read_output(out, source.stem, loaded.outputs_dir)
    spec = find(loaded.model if model is None else model, loaded.weights_dir)
    request = DecodeRequest(
        latents=source, spec=spec, output=output, fps=fps, channels=parse_channels(channels), crf=crf, backend=backend
    )
    machine = probe()
    with LatentFile(source) as file:
        plan = DecodePlan.of(request, file, loaded.weights_dir, machine)
        check_output(output, plan.width, plan.height, plan.layout.count, plan.crf)
        _print_plan(plan, HistoryFile(loaded.cache_dir, machine).read(), machine)

        def convert(emit: Callable[[Event], None], cancel: Cancel) -> "Decoded":
            from runtime.pipeline.decode import decode_file

            return decode_file(plan, file, loaded, EngineService.from_settings(loaded, machine), emit, cancel)

        return run_conversion("decode", output, loaded, convert)


def _print_plan(plan: DecodePlan, history: History, machine: Machine) -> None:
    """Print what decoding makes and how long it takes."""
    title, count = plan.request.spec.title, plan.layout.count
    terminal.line(f"{title}: {plan.width}x{plan.height}, {count} frames ({count / plan.fps:.1f} s at {plan.fps} fps)")
    terminal.line(forecast_text(plan.seconds(machine, history), plan.load_seconds))
