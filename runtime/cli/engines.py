"""`build`, `engines …` and `export`: print the result and return it for `--json`."""

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from runtime.cli import terminal
from runtime.cli.exit_codes import cancel_on_signals
from runtime.core import settings
from runtime.core.cancel import Cancel
from runtime.core.environment import program
from runtime.core.errors import EngineError, InvalidRequestError, StoreError, TandemError
from runtime.core.facts import Fact, render, shortened
from runtime.core.files import make_named_folder
from runtime.core.plan import BACKEND_TITLES, is_block_program
from runtime.core.request import GenerationRequest
from runtime.core.settings import Settings
from runtime.core.units import UNITS, byte_size
from runtime.engines.service import EngineService
from runtime.machine.probe import probe
from runtime.models.catalogue import check_makes_videos, decoders, find, folders, read_model
from runtime.models.registry import finishing_models
from runtime.models.requested import model_for
from runtime.models.spec import FRAME_BATCH, ModelSpec
from runtime.pipeline.build_engines import (
    BuildResult,
    Turns,
    build_all,
    build_frame_engines,
    frame_latents,
    wanted_engines,
)
from runtime.pipeline.pytorch_timer import PyTorchTimerFactory
from runtime.planner.choice.engine_index import IMPORTED, UNREADABLE_KEY, EngineRecord, serves_any_clip
from runtime.planner.resolve import PlanningContext, resolve

# Between two looks for videos.
_LOOK_SECONDS = 0.2


def build(request: GenerationRequest, *, again: bool) -> dict[str, Any]:
    """Build all engines for a model and a size; return those built and those that failed.

    Args:
        again: builds also engines that exist.

    Raises:
        CancelledError: on Ctrl-C; finished engines are kept.
    """
    loaded = settings.load()
    service = EngineService.from_settings(loaded, probe())
    decoder = find(request.model, loaded.weights_dir) if not request.loras else None
    if decoder is not None and decoder.only_decodes:
        return _build_decoder(request, decoder, service, loaded, again=again)
    spec = model_for(request, loaded.weights_dir, loaded.cache_dir, needs_image=False, keep=False)
    engines = wanted_engines(request, spec, service)
    to_build = [engine for engine in engines if again or engine.use.build]
    terminal.line(
        str(
            Fact(
                "cli.engines_to_build",
                {"engines": len(to_build), "seconds": sum(engine.seconds for engine in to_build)},
            )
            if to_build
            else Fact("cli.engines_built")
        )
    )
    started = time.monotonic()
    with cancel_on_signals() as cancel, _turns(loaded, cancel) as turns:
        results = build_all(engines, spec, service, _progress(), cancel, again=lambda _: again, turns=turns)
        built = _each(results, len(engines))
    return _built(built, started, sum(engine.seconds for engine in to_build))


def _build_decoder(
    request: GenerationRequest, spec: ModelSpec, service: EngineService, loaded: Settings, *, again: bool
) -> dict[str, Any]:
    """Build the engines of a decoder of single frames; see `build`."""
    started = time.monotonic()
    with cancel_on_signals() as cancel, _turns(loaded, cancel) as turns:
        built = _each(build_frame_engines(request, spec, service, _progress(), cancel, again=again, turns=turns))
    return _built(built, started, sum(result.wanted.seconds for result in built))


@contextmanager
def _turns(loaded: Settings, cancel: Cancel) -> Iterator[Turns]:
    """Yield what lets an engine be built while no video of the cache folder waits or runs."""
    from runtime.queue import recovery
    from runtime.queue.store import open_store

    store = open_store(loaded.cache_dir)

    def has_video() -> bool:
        with suppress(StoreError):  # read again soon
            if store.order.has_video():
                recovery.recover(store, "")  # its process may be dead
                return store.order.has_video()
        return False

    def take() -> Cancel:
        if has_video():
            terminal.line(str(Fact("cli.build_makes_room")))
        while has_video():
            cancel.check()
            time.sleep(_LOOK_SECONDS)
        return _Turn(cancel, has_video)

    try:
        yield take
    finally:
        store.close()


class _Turn(Cancel):
    """The token of one engine's build, which ends when all builds are cancelled or a video goes first."""

    def __init__(self, cancel: Cancel, has_video: Callable[[], bool]) -> None:
        super().__init__()
        self._cancel, self._has_video = cancel, has_video
        self._look_at = 0.0

    def check(self) -> None:
        self._cancel.check()
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
            if self._has_video():
                self.request()
        super().check()


def _each(results: Iterable[BuildResult], count: int | None = None) -> list[BuildResult]:
    """Return the results of builds, and print each failure when it happens."""
    built = []
    for number, result in enumerate(results, start=1):
        built.append(result)
        if result.error is not None:
            place = "" if count is None else f"{number} of {count}: "
            terminal.warning(f"{place}{result.error.what} {result.error.remedy}")
    return built


def _built(built: Sequence[BuildResult], started: float, estimated: float) -> dict[str, Any]:
    """Print and return what was built."""
    seconds = time.monotonic() - started
    records = [result.record for result in built if result.record is not None]
    _table(records, {})
    terminal.line(str(Fact("cli.engines_ready", {"ready": len(records), "engines": len(built), "seconds": seconds})))
    return {
        "seconds": round(seconds, 3),
        "estimated_seconds": round(estimated, 3),
        "engines": [_row(record) for record in records],
        "failed": [
            {
                "component": result.wanted.component,
                "program": result.wanted.use.program,
                "backend": result.wanted.backend,
                "what": result.error.what,
                "remedy": result.error.remedy,
            }
            for result in built
            if result.error is not None
        ],
    }


def listing() -> dict[str, Any]:
    """Print and return the engine library."""
    service = _service()
    store, models = service.store, _models()
    engines = sorted(store.index(), key=lambda record: (-record.last_used, record.id))
    stale = {record.id: service.why_stale(record, models) for record in engines}
    total_bytes = store.total_bytes()
    _table(engines, stale)
    terminal.result(f"{byte_size(total_bytes)} of at most {byte_size(store.max_bytes)}, in {store.folder}")
    return {
        "engines": [{**_row(record), "stale": list(map(str, stale[record.id]))} for record in engines],
        "total_bytes": total_bytes,
        "max_bytes": store.max_bytes,
        "folder": str(store.folder),
    }


def verify(ids: Sequence[str]) -> dict[str, Any]:
    """Compare engines, by default all, with PyTorch; return the results.

    Raises:
        CancelledError: on Ctrl-C; finished comparisons are kept.
    """
    service = _service()
    chosen = service.store.choose(ids)
    if not chosen:
        terminal.line(str(Fact("cli.no_engines")))
    rows = []
    with cancel_on_signals() as cancel:
        for result in service.verify(chosen, _models(), _progress(), cancel, timers=PyTorchTimerFactory(service)):
            record = result.engine
            if result.skipped is not None:
                verdict = f"not verified. {render(result.skipped).what} {render(result.skipped).remedy}"
            else:
                verdict = f"{'verified' if record.usable else 'WRONG'}: {record.problem or record.detail}"
            terminal.result(f"{record.id} {_title(record)}: {verdict}")
            rows.append({**_row(record), "skipped": result.skipped and str(result.skipped)})
    bad = sum(1 for row in rows if row["skipped"] is None and not row["usable"])
    return {"ok": bad == 0, "engines": rows}


def delete(ids: Sequence[str]) -> dict[str, Any]:
    """Delete engines by id."""
    store = _service().store
    chosen = store.choose(ids)
    freed = sum(store.delete(record.id) for record in chosen)
    terminal.result(f"Deleted {_count(len(chosen))}, {byte_size(freed)}.")
    return {"deleted": [record.id for record in chosen], "freed_bytes": freed}


def prune(max_size: str | None) -> dict[str, Any]:
    """Delete the least recently used engines until the library is no larger than `max_size`, or the configured size."""
    done = _service().store.prune(None if max_size is None else parse_size(max_size))
    remainder = f"{byte_size(done.total_bytes)} of at most {byte_size(done.max_bytes)} remain"
    terminal.result(f"Deleted {_count(len(done.deleted))}; {remainder}.")
    if not done.enough:
        terminal.warning("The library is still too large: pinned engines and those in use are kept.")
    return {
        "deleted": [record.id for record in done.deleted],
        "total_bytes": done.total_bytes,
        "max_bytes": done.max_bytes,
        "enough": done.enough,
    }


def pin(ids: Sequence[str], *, pinned: bool) -> dict[str, Any]:
    """Pin engines, so that they are not evicted, or unpin them."""
    store = _service().store
    chosen = store.choose(ids)
    rows = [_row(store.pin(record.id, pinned=pinned)) for record in chosen]
    terminal.result(f"{'Pinned' if pinned else 'Unpinned'} {_count(len(rows))}.")
    return {"engines": rows}


def export(component: str, request: GenerationRequest, out: str) -> dict[str, Any]:
    """Export one component as ONNX into the folder `out`, and compare its output in ONNX Runtime with PyTorch's."""
    from runtime.engines.onnx_export import export_component

    spec = find(request.model, settings.load().weights_dir)
    _check_component(spec, component)
    if spec.only_decodes:
        latent = (FRAME_BATCH, *frame_latents(request, spec))
    else:
        latent = resolve(request, spec, PlanningContext(probe(), Path("none.mp4"))).engine_size(component)
    files = []
    for exported in export_component(spec, component, latent, _folder(out)):
        terminal.result(f"{exported.path} ({byte_size(exported.bytes)}): {exported.describe()}")
        files.append(exported.to_json())
    return {"component": component, "model": spec.name, "files": files}


def import_file(file: str, component: str | None, model: str | None, *, trusted: bool) -> dict[str, Any]:
    """Import an engine file after a confirmation, since engine files can run code; print what it is and serves.

    Args:
        trusted: skips the question.

    Raises:
        TandemError: if it is not an engine, or cannot be used with the model.
        CancelledError: on Ctrl-C.
    """
    from runtime.engines.imported.importing import (
        WARNING,
        check_disk_space,
        check_library,
        import_engine,
        read_source,
    )

    loaded = settings.load()
    machine = probe()
    service = EngineService.from_settings(loaded, machine)
    name = loaded.model if model is None else model
    spec = find(name, loaded.weights_dir)
    check_makes_videos(spec, name)
    if component is not None:
        _check_component(spec, component)
    if not file.strip() or not file.isprintable():
        raise InvalidRequestError("file", "cli.file_unreadable")
    source = read_source(Path(file).expanduser())
    check_library(source, machine)
    check_disk_space(source, service.store.folder)
    terminal.warning(str(WARNING))
    if not trusted:
        cannot = InvalidRequestError("yes", "cli.trust_not_confirmed", file=source.path.name)
        terminal.ask(f"Open {source.path}?", cannot)
    with cancel_on_signals() as cancel:
        timers = PyTorchTimerFactory(service)
        done = import_engine(source.path, spec, component, service, _progress(), cancel, timers=timers)
    for fact in done.describe():
        terminal.result(str(fact))
    record = done.engine
    if done.compared:
        terminal.result(f"Imported as {record.id}: {record.detail}")
    else:
        terminal.warning(
            f"Imported as {record.id}. It is not used until it is compared with PyTorch, for which memory was short. "
            f"Close other programs, then run `{program()} engines verify {record.id}`."
        )
    return {
        "engine": _row(record),
        "contract": done.contract.to_json(),
        "serves": str(done.serves),
        "exact": done.match.exact,
        "adapters": list(map(str, done.match.describe())),
        "compared": done.compared,
    }


def parse_size(text: str) -> int:
    """Return the number of bytes in a size such as "500 MB" or "2GB"; a number without a unit is refused.

    Raises:
        InvalidRequestError: if it is not a size.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([KMGT]?B)\s*", text.upper())
    size = float(match[1]) * UNITS[match[2]] if match else math.nan
    if not math.isfinite(size):
        raise InvalidRequestError("max_size", "cli.size_invalid", value=shortened(text))
    return int(size)


def _check_component(spec: ModelSpec, component: str) -> None:
    if component not in spec.component_names:
        raise InvalidRequestError(
            "component",
            "model.no_such_component",
            model=spec.title,
            component=shortened(component),
            choices=spec.component_names,
        )


def _service() -> EngineService:
    return EngineService.from_settings(settings.load(), probe())


def _models() -> list[ModelSpec]:
    specs = []
    for name, folder in folders(settings.load().weights_dir).items():
        try:
            specs.append(read_model(folder, name))
        except TandemError:  # reported by `models list`
            continue
    weights_dir = settings.load().weights_dir
    return [*specs, *decoders(weights_dir), *finishing_models(weights_dir)]


def _folder(text: str) -> Path:
    if not text.strip() or not text.isprintable():
        raise InvalidRequestError("out", "cli.folder_unreadable")
    folder = Path(text).expanduser().resolve()
    try:
        make_named_folder(folder)
    except OSError as error:
        raise EngineError("cli.folder_not_created", folder=folder, error=error.strerror or str(error)) from error
    return folder


def _progress() -> Any:
    """Return a callback that prints the progress of a build, one line per change."""
    last = ""

    def show(fact: Fact, share: float | None) -> None:
        nonlocal last
        text = str(fact) if share in {None, 0.0, 1.0} else f"{fact} ({share:.0%})"
        if text != last:
            last = text
            terminal.line(text)

    return show


def _table(records: Sequence[EngineRecord], stale: Mapping[str, Sequence[Fact]]) -> None:
    if not records:
        terminal.line(str(Fact("cli.no_engines")))
        return
    terminal.table(
        ("Engine", "Part", "Runs on", "Latent sizes", "On disk", "Speed", "Used", ""),
        [
            (
                record.id,
                _title(record),
                f"{BACKEND_TITLES.get(record.key.backend, record.key.backend)}, {record.key.precision}"
                f"{', imported' if record.key.builder == IMPORTED else ''}",
                "any" if serves_any_clip(record.key.program) else ", ".join(map(str, record.key.profiles)),
                byte_size(record.file_bytes),
                _speed(record),
                datetime.fromtimestamp(record.last_used).astimezone().strftime("%Y-%m-%d"),
                _state(record, stale.get(record.id, ())),
            )
            for record in records
        ],
    )


def _row(record: EngineRecord) -> dict[str, Any]:
    """Return an engine's fields in the JSON output."""
    key = record.key
    return {
        "id": record.id,
        "model": record.model,
        "component": record.component,
        "program": key.program,
        "backend": key.backend,
        "builder": key.builder,
        "precision": key.precision,
        "profiles": [{"min": p.min, "opt": p.opt, "max": p.max} for p in key.profiles],
        "device": key.device,
        "versions": dict(key.versions),
        "file_bytes": record.file_bytes,
        "build_seconds": record.build_seconds,
        "seconds_per_call": record.seconds_per_call,
        "pytorch_seconds_per_call": record.pytorch_seconds_per_call,
        "baselines": dict(record.baselines),
        "context_bytes": record.context_bytes,
        "error": None if math.isnan(record.error) else record.error,
        "largest_error": record.largest_error,
        "tolerance": record.tolerance,
        "verified": record.verified,
        "usable": record.usable,
        "problem": record.problem and str(record.problem),
        "detail": str(record.detail),
        "built_at": record.built_at,
        "last_used": record.last_used,
        "pinned": record.pinned,
    }


def _title(record: EngineRecord) -> str:
    if record.key == UNREADABLE_KEY:
        return "unreadable"
    # Block engines serve all models of an architecture, such as this one.
    like = "like " if is_block_program(record.key.program) else ""
    return f"{like}{record.model} {record.key.program}"


def _speed(record: EngineRecord) -> str:
    if not record.seconds_per_call or not record.pytorch_seconds:
        return ""
    return f"{record.pytorch_seconds / record.seconds_per_call:.2f}x"


def _state(record: EngineRecord, stale: Sequence[Fact]) -> str:
    if record.problem is not None:
        return str(record.problem)
    if not record.verified:
        return str(record.detail)
    reasons = f"stale: {' '.join(map(str, stale))}" if stale else ""
    return ", ".join(filter(None, ("pinned" if record.pinned else "", reasons)))


def _count(count: int) -> str:
    return f"{count} engine{'' if count == 1 else 's'}"
