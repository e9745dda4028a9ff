"""`decode`: latents of a file to an MP4."""

from pathlib import Path
from typing import Any

from runtime.cli import terminal
from runtime.cli.exit_codes import cancel_on_signals
from runtime.core import settings
from runtime.core.errors import InvalidRequestError
from runtime.core.events import Event, FellBack, Warned
from runtime.core.facts import render
from runtime.core.files import give_usual_permissions
from runtime.core.plan import BACKEND_TITLES
from runtime.core.request import AUTO, MAX_FPS
from runtime.engines.service import EngineService
from runtime.machine.probe import probe
from runtime.models.catalogue import find
from runtime.models.latent_files import parse_channels
from runtime.pipeline.files import make_folder, output_path

_MAX_CRF = 51


def decode(
    latents: str, model: str | None, out: str | None, *, fps: int | None, channels: str, crf: int | None, backend: str
) -> dict[str, Any]:
    """Decode a file of latents; print the video's path and return what was done.

    Raises:
        TandemError: if the file or the model cannot be used, or the video cannot be written.
        CancelledError: on Ctrl-C; nothing is left.
    """
    loaded = settings.load()
    if backend not in {AUTO, *BACKEND_TITLES}:
        raise InvalidRequestError(
            "backend", "request.not_a_choice", value=repr(backend)[:40], choices=[AUTO, *BACKEND_TITLES]
        )
    for name, value, low, most in (("fps", fps, 1, MAX_FPS), ("crf", crf, 0, _MAX_CRF)):
        if value is not None and not low <= value <= most:
            nearest = min(max(value, low), most)
            raise InvalidRequestError(name, "request.out_of_range", value=value, low=low, high=most, nearest=nearest)
    source = _path("latents", latents)
    if out is None:
        make_folder(loaded.outputs_dir)
        output = output_path(loaded.outputs_dir, source.stem)
    else:
        output = _path("out", out)
    spec = find(loaded.model if model is None else model, loaded.weights_dir)
    # It imports torch.
    from runtime.pipeline.decode import DecodeRequest, decode_file

    request = DecodeRequest(
        latents=source, spec=spec, output=output, fps=fps, channels=parse_channels(channels), crf=crf, backend=backend
    )
    progress = terminal.ProgressLine()

    def emit(event: Event) -> None:
        progress.event(event)
        if isinstance(event, FellBack | Warned):
            terminal.warning(render(event.fact).what)

    with cancel_on_signals() as cancel, progress.shown():
        done = decode_file(request, loaded, EngineService.from_settings(loaded, probe()), emit, cancel)
    if loaded.outputs_dir not in output.parents:
        give_usual_permissions(output)
    rate = done.to_json()["frames_per_second"]
    where = BACKEND_TITLES.get(done.backend, done.backend)
    terminal.line(f"Saved. {done.frames} frames of {done.width}×{done.height}, {rate:.1f} frames/s on {where}.")
    terminal.result_path(output)
    return done.to_json()


def _path(field: str, text: str) -> Path:
    if not text.strip() or not text.isprintable():
        raise InvalidRequestError(field, "cli.out_unreadable" if field == "out" else "latents.path_unreadable")
    return Path(text).expanduser().resolve()
