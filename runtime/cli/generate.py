"""`generate`: one job on this thread, with Ctrl-C as its cancel."""

from pathlib import Path

from runtime.cli import endings, show
from runtime.cli.cancelling import cancel_on_signals
from runtime.components.residency import Residency
from runtime.core import settings
from runtime.core.errors import InvalidRequestError
from runtime.core.events import Event, Failed, FellBack, TerminalEvent, VideoSaved, Warned
from runtime.core.request import GenerationRequest
from runtime.engines.service import EngineService
from runtime.jobs.flow import run_job
from runtime.jobs.history import HistoryFile
from runtime.jobs.outputs import make_folder, output_path
from runtime.manager.machine import probe
from runtime.manager.planner import resolve
from runtime.models.catalogue import find


def generate(request: GenerationRequest, out: str | None, *, as_json: bool) -> int:
    """Make one video and return the exit code."""
    loaded = settings.load()
    spec = find(request.model, loaded.weights_dir)
    machine = probe()
    engines = EngineService.from_settings(loaded, machine)
    history = HistoryFile(loaded.cache_dir, machine)
    output = _target(request, out, loaded.outputs_dir)
    plan = resolve(request, spec, machine, output, engines.offers(spec), history.read())
    progress = show.ProgressLine()
    ends: list[TerminalEvent] = []

    def emit(event: Event) -> None:
        progress.event(event)
        if isinstance(event, Warned):
            show.warning(event.message)
        if isinstance(event, FellBack):
            show.warning(event.reason)
        if isinstance(event, TerminalEvent):
            ends.append(event)

    with cancel_on_signals() as cancel, Residency(engines) as residency, progress.shown():
        run_job(plan, spec, emit, cancel, residency, history)
    (end,) = ends
    if isinstance(end, VideoSaved):
        _report(end)
        if as_json:
            endings.emit_json(end.result_json())
        return endings.DONE
    if isinstance(end, Failed):
        if end.defect:
            return endings.defect(end.what, as_json=as_json)
        return endings.refuse(end.what, end.remedy, as_json=as_json)
    show.line("Cancelled. Nothing was saved.")
    return endings.CANCELLED


def _target(request: GenerationRequest, out: str | None, outputs_dir: Path) -> Path:
    if out is None:
        make_folder(outputs_dir)
        return output_path(outputs_dir, request.prompt)
    if not out.isprintable() or not out.strip():
        raise InvalidRequestError("out", "--out is empty or unreadable.", "Give a file name that ends in .mp4.")
    return Path(out).expanduser().resolve()


def _report(end: VideoSaved) -> None:
    timings = end.timings
    stages = ", ".join(f"{name} {timings[name]:.1f} s" for name in ("encode", "denoise", "decode", "mux"))
    show.line(f"Saved {end.video}")
    show.line(f"Seed {end.request['seed']} · {timings['total']:.1f} s ({stages}) · loading {end.load_seconds:.1f} s")
