"""What the Engines tab does. Its handlers answer raw HTTP too, so none trusts what it is sent."""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

from runtime.core.errors import EngineError, InvalidRequestError, TandemError
from runtime.core.plan import BACKEND_TITLES, PYTORCH
from runtime.core.request import AUTO
from runtime.core.units import about
from runtime.engines import library as engine_library
from runtime.engines import manifest
from runtime.engines.imported.importing import check_disk_space, check_library, read_source
from runtime.engines.service import EngineService
from runtime.models.spec import ModelSpec
from runtime.planner.engine_index import EngineRecord
from runtime.planner.engine_offers import EngineOffer
from runtime.queue.service import JobQueue
from runtime.queue.tasks import (
    BuildEngines,
    DeleteEngine,
    ImportEngine,
    InspectEngine,
    PruneEngines,
    VerifyEngine,
    Work,
)
from runtime.server.model_choices import check_offered
from runtime.ui import acceleration, break_even, engine_import, engine_views, form, formatting, plan_summary
from runtime.ui.plan_preview import Foreseen, Foresight

Updates = tuple[Any, ...]

_ENGINE = re.compile(r"[0-9a-f]{16}")
_CHORE = re.compile(r"[0-9a-f]{8}")
_MOST_WAITING = 20
_MOST_SENT = 1000
_ALL = "all"

logger = logging.getLogger(__name__)


class Library:
    """The tab's handlers. Each view goes to: parts, work, disk, table, what was said, and what is shown now."""

    def __init__(
        self, worker: JobQueue, engines: EngineService, models: dict[str, ModelSpec], foresight: Foresight
    ) -> None:
        self._worker = worker
        self._engines = engines
        self._models = models
        self._foresight = foresight

    def look(self, shown: Any, *values: Any) -> Updates:
        """Show what has changed since `shown`: a tick costs next to nothing where nothing has."""
        return self._view(shown, values, gr.skip())

    def act(self, asked: Any, *values: Any) -> Updates:
        """Do what a button of the tab says, JSON of `act` and `of`, and show what came of it."""
        return self._said(lambda: self._do(asked, values), values)

    def look_into(self, file: Any, part: Any, trusted: Any, *values: Any) -> Updates:
        """Open an engine file and say what it could stand for, as a chore."""
        return self._said(lambda: self._foreign(InspectEngine, "Look into", file, part, trusted, values), values)

    def take(self, file: Any, part: Any, trusted: Any, *values: Any) -> Updates:
        """Import an engine file, as a chore."""
        return self._said(lambda: self._foreign(ImportEngine, "Import", file, part, trusted, values), values)

    def _said(self, do: Callable[[], str], values: Sequence[Any]) -> Updates:
        """Do something, and show what came of it."""
        try:
            said = do()
        except TandemError as error:
            said = _told(error)
        except Exception as error:  # a defect: told in one line, kept in the log
            logger.exception("The engine library could not do what was asked")
            said = f"Something broke inside Tandem: {error!r} The log has the details."
        return self._view(None, values, engine_views.said(said))

    def _foreign(
        self,
        work: type[InspectEngine | ImportEngine],
        verb: str,
        file: Any,
        part: Any,
        trusted: Any,
        values: Sequence[Any],
    ) -> str:
        """Queue work on a file, once its first bytes say that it may be an engine and somebody that it is trusted."""
        spec = form.read_model(values, self._models)
        component = engine_import.read_part(part, spec)
        source = read_source(engine_import.read_path(file))
        check_library(source, self._engines.machine)
        check_disk_space(source, self._engines.store.folder)
        engine_import.check_trusted(trusted, source.path)
        return self._add(work(path=source.path, model=spec.name, component=component), f"{verb} {source.path.name}")

    def _do(self, asked: Any, values: Sequence[Any]) -> str:
        act, of = _parsed(asked)
        match act:
            case "build":
                return self._add(*self._building(of, values))
            case "prune":
                work = PruneEngines(max_bytes=self._engines.store.max_bytes)
                return self._add(work, "Delete what is beyond the limit")
            case "cancel":
                if not _CHORE.fullmatch(of):
                    raise _unknown()
                self._worker.cancel([of])
                return "Cancelled."
            case "verify" | "delete" | "pin" | "unpin":
                return self._of_engine(act, self._engine(of))
        raise _unknown()

    def _of_engine(self, act: str, record: EngineRecord) -> str:
        title = engine_views.PROGRAM_TITLES.get(record.key.program, "engine").lower()
        match act:
            case "verify":
                work: Work = VerifyEngine(engine=record.id, models=tuple(self._models))
            case "delete":
                work = DeleteEngine(engine=record.id)
            case _:
                change = self._engines.store.pin if act == "pin" else self._engines.store.unpin
                change(record.id)
                return f"{'Pinned' if act == 'pin' else 'Unpinned'}: {title}."
        return self._add(work, f"{act.title()} {title} {record.id}")

    def _building(self, part: str, values: Sequence[Any]) -> tuple[Work, str]:
        request = form.read_settings(values, self._models)
        spec = self._models[request.model]
        if part != _ALL and part not in spec.component_names:
            raise _unknown()
        foreseen = self._foresight.foresee(request, spec)
        if foreseen.error is not None:
            raise foreseen.error
        plan = foreseen.plan
        assert plan is not None, "neither a plan nor an error"
        size = f"{formatting.size(plan.width, plan.height)}, {plan.frames} frames"
        whose = "all parts" if part == _ALL else plan.title(part)
        title = f"Build engines for {whose} of {spec.title} at {size}"
        return BuildEngines(request=request.to_json(), component=None if part == _ALL else part), title

    def _add(self, work: Work, title: str) -> str:
        waiting = [one for one in self._worker.tasks() if one.open]
        if any(one.title == title for one in waiting):
            raise EngineError("That is waiting or running already.", "See Work.")
        if len(waiting) >= _MOST_WAITING:
            raise EngineError("Too much work is waiting.", "Let some of it end, or cancel some.")
        task = self._worker.add_task(work, title)
        return f"{task.title}: waiting for its turn." if self._worker.ahead(task) else f"{task.title}: begun."

    def _engine(self, engine_id: str) -> EngineRecord:
        """Return the engine of exactly this id: beginnings are for the command line."""
        if not _ENGINE.fullmatch(engine_id):
            raise _unknown()
        (record,) = engine_library.choose(self._engines.store, [engine_id])
        return record

    def _view(self, shown: Any, values: Sequence[Any], said: Any) -> Updates:
        """Return what differs from what is shown: a running build changes its own lines and no table."""
        stamp, records = self._foresight.library()
        foreseen, problem = self._foreseen(values)
        drawn_work = engine_views.work([(one, len(self._worker.ahead(one))) for one in self._worker.tasks()])
        drawn_parts = _parts(foreseen, problem)
        marks = [_mark(drawn_parts), _mark(drawn_work), _mark(stamp), _mark((stamp, drawn_parts))]
        before = shown.split() if isinstance(shown, str) else []
        same = [mark in before[place : place + 1] for place, mark in enumerate(marks)]
        return (
            gr.skip() if same[0] else drawn_parts,
            gr.skip() if same[1] else drawn_work,
            gr.skip() if same[2] else self._disk(records),
            gr.skip() if same[3] else engine_views.table(self._entries(records, foreseen)),
            said,
            gr.skip() if all(same) else " ".join(marks),
        )

    def _disk(self, records: Sequence[EngineRecord]) -> str:
        total = sum(manifest.folder_bytes(self._engines.store.path(record.id)) for record in records)
        return engine_views.disk(total, self._engines.store.max_bytes, len(records))

    def _foreseen(self, values: Sequence[Any]) -> tuple[Foreseen | None, str]:
        try:
            request = form.read_settings(values, self._models)
            foreseen = self._foresight.foresee(request, check_offered(request.model, self._models))
        except TandemError as error:
            return None, _told(error)
        return foreseen, "" if foreseen.error is None else _told(foreseen.error)

    def _entries(self, records: Sequence[EngineRecord], foreseen: Foreseen | None) -> list[engine_views.Entry]:
        models = tuple(self._models.values())
        entries = []
        for record in sorted(records, key=lambda record: (-record.last_used, record.id)):
            spec = next((spec for spec in models if spec.name == record.model), None)
            stale = engine_library.why_stale(record, models, self._engines.machine, self._engines.notes)
            entries.append(engine_views.Entry(record, spec, stale, _payoff_of(record, foreseen)))
        return entries


def _parts(foreseen: Foreseen | None, problem: str) -> str:
    if foreseen is None or foreseen.plan is None:
        return engine_views.parts([], "", "", problem)
    plan = foreseen.plan
    chips = plan_summary.outlook(foreseen, tuple(plan.components)).chips
    rows: list[engine_views.PartRow] = []
    known: list[break_even.Payoff] = []
    used: set[str] = set()
    for name, part in plan.components.items():
        offered = foreseen.offers(name, plan.latent_size, part.device)
        fastest = max((offer for offer in offered if offer.speed_up), key=lambda offer: offer.speed_up, default=None)
        pays = None if fastest is None else break_even.payoff(plan, name, fastest, foreseen.records)
        if fastest is not None and pays is not None:
            known.append(pays)
            used |= {use.id for use in fastest.uses}
        unknown = _unbuilt(plan.asked.backend(name), offered) if foreseen.complete else ""
        now = acceleration.in_form_words(chips[name].text)
        rows.append(engine_views.PartRow(name, plan.title(name), now, str(pays or unknown)))
    size = f"{formatting.size(plan.width, plan.height)}, {plan.frames} frames, {plan.steps} steps"
    total = ""
    if known:
        # Experts may share an engine: it was built once.
        built = sum(record.build_seconds for record in foreseen.records if record.id in used)
        both = break_even.Payoff(built, sum(max(pays.saved_seconds, 0.0) for pays in known))
        total = f"{'All together' if len(known) == len(rows) else 'Those built'}: {both}."
    elif foreseen.complete:
        total = "What engines save is known once they are built and measured."
    what = f"{plan.model}, {size}. Builds what is missing of the chosen backends, or of all where it is automatic."
    return engine_views.parts(rows, what, total, problem)


def _unbuilt(asked: str, offered: Sequence[EngineOffer]) -> str:
    """Return how long the first engines that can be built here would take, of the backend that is asked for."""
    if asked == PYTORCH:
        return "none needed"
    wanted = [offer for offer in offered if asked in {AUTO, offer.backend}]
    first = next((offer for offer in wanted if offer.problem is None and not offer.ready), None)
    if first is None:
        return "not measured" if any(offer.ready for offer in wanted) else "none can be built here"
    how_long = f", {about(first.build_seconds)} to build on {BACKEND_TITLES[first.backend]}"
    return f"not built yet{how_long if first.build_seconds else ''}"


def _payoff_of(record: EngineRecord, foreseen: Foreseen | None) -> break_even.Payoff | None:
    """Return what an engine cost and saves with each clip, if the form's settings would use it."""
    if foreseen is None or foreseen.plan is None or not record.seconds_per_call:
        return None
    plan = foreseen.plan
    times = 0.0
    for name, part in plan.components.items():
        offered = foreseen.offers(name, plan.latent_size, part.device)
        if any(use.id == record.id and not use.build for offer in offered for use in offer.uses):
            times += break_even.calls(plan)[name]
    if record.key.program == "vae_next":
        times *= plan.latent_size[0] - 1
    saved = times * (record.pytorch_seconds_per_call - record.seconds_per_call)
    return break_even.Payoff(record.build_seconds, saved) if times else None


def _parsed(asked: Any) -> tuple[str, str]:
    """Return what is asked for, and of what, both text of no great length.

    Raises:
        InvalidRequestError: for anything else.
    """
    try:
        value = json.loads(asked) if isinstance(asked, str) and len(asked) <= _MOST_SENT else None
    except (ValueError, RecursionError):
        value = None
    match value:
        case {"act": str(act), "of": str(of)}:
            return act, of
    raise _unknown()


def _mark(drawn: object) -> str:
    """Return what changes with what is drawn."""
    return hashlib.sha256(repr(drawn).encode()).hexdigest()[:16]


def _told(error: TandemError) -> str:
    # A field's name begins a sentence; a file's stays as it is.
    what = f"{error.what[:1].upper()}{error.what[1:]}" if isinstance(error, InvalidRequestError) else error.what
    return acceleration.in_form_words(f"{what} {error.remedy}")


def _unknown() -> InvalidRequestError:
    return InvalidRequestError("act", "There is no such action or engine.", "Load the page again.")
