"""What `decode` and `upscale` have in common: their options, following the progress, and the lines at the end."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.cli import terminal
from runtime.cli.exit_codes import cancel_on_signals
from runtime.core.cancel import Cancel
from runtime.core.errors import InvalidRequestError
from runtime.core.events import Event, FellBack, Stage, StageStarted, Warned
from runtime.core.facts import render, shortened
from runtime.core.files import give_usual_permissions
from runtime.core.plan import BACKEND_TITLES
from runtime.core.request import BACKENDS, FIELDS
from runtime.core.settings import Settings
from runtime.pipeline.files import make_folder, output_path

if TYPE_CHECKING:  # it imports torch
    from runtime.pipeline.conversion import Converted


def check_options(backend: str, **numbers: int | None) -> None:
    """Check options that mean the same as fields of requests; `None` is not checked.

    Raises:
        InvalidRequestError: if one is invalid.
    """
    if backend not in BACKENDS:
        data = {"value": shortened(backend), "choices": list(BACKENDS)}
        raise InvalidRequestError("backend", "request.not_a_choice", **data)
    for name, value in numbers.items():
        if value is not None:
            FIELDS[name].check(name, value)


def read_path(field: str, text: str, problem: str) -> Path:
    """Return the path that an option names.

    Raises:
        InvalidRequestError: with the code `problem`, if it is none.
    """
    if not text.strip() or not text.isprintable():
        raise InvalidRequestError(field, problem)
    try:
        return Path(text).expanduser().resolve()
    except (OSError, RuntimeError) as error:  # no such user's home, links in a circle, a device on Windows
        raise InvalidRequestError(field, problem) from error


def read_output(out: str | None, name: str, outputs_dir: Path) -> Path:
    """Return the MP4 to write: `out`, or a new one in the folder for videos, which is made.

    Args:
        name: of the new one.

    Raises:
        InvalidRequestError, OutputError: if the path or the folder cannot be used.
    """
    if out is not None:
        return read_path("out", out, "cli.out_unreadable")
    make_folder(outputs_dir)
    return output_path(outputs_dir, name)


def run_conversion(
    stage: Stage,
    output: Path,
    settings: Settings,
    convert: "Callable[[Callable[[Event], None], Cancel], Converted]",
) -> dict[str, Any]:
    """Make a video of a file; print the progress and the result's path, and return what was done.

    Args:
        stage: what makes the frames.
        convert: makes the video; it imports torch, which takes seconds that a refused request does not need.

    Raises:
        TandemError: if the video cannot be made.
        CancelledError: on Ctrl-C; nothing is left.
    """
    progress, began = terminal.ProgressLine(), time.monotonic()
    loaded_at = began

    def emit(event: Event) -> None:
        nonlocal loaded_at
        progress.event(event)
        if isinstance(event, StageStarted) and event.stage == stage:
            loaded_at = time.monotonic()
        if isinstance(event, FellBack | Warned):
            terminal.warning(render(event.fact).what)

    with cancel_on_signals() as cancel, progress.shown():
        emit(StageStarted(stage="load"))
        done = convert(emit, cancel)
    if settings.outputs_dir not in output.parents:
        give_usual_permissions(output)
    speed = f"{done.rate:.1f} frames/s on {BACKEND_TITLES.get(done.backend, done.backend)}"
    terminal.line(
        f"Saved. {done.frames} frames of {done.width}×{done.height} · {done.seconds:.1f} s ({speed}) · "
        f"loading {loaded_at - began:.1f} s"
    )
    terminal.result_path(output)
    return done.to_json()
