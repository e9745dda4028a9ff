"""The Engines panel: engines of each component at the current settings, tasks, the engine library, imports."""

import contextlib
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.core.errors import EngineError, InvalidRequestError, TandemError
from runtime.core.facts import Fact, lowered
from runtime.core.messages.components import TITLES, title_of
from runtime.core.plan import BACKEND_TITLES, PYTORCH, ExecutionPlan, LatentSize, is_block_program
from runtime.core.request import FINISHERS, SOUND_DECODERS
from runtime.core.request_fields import AUTO
from runtime.core.units import about, byte_size, counted
from runtime.engines.builders import builders_of
from runtime.engines.imported.importing import BACKENDS, check_disk_space, check_library, read_source
from runtime.engines.service import EngineService
from runtime.machine.probe import Machine
from runtime.models.catalogue import check_offered
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_index import IMPORTED, UNREADABLE_KEY, EngineRecord, ShapeProfile, serves_any_clip
from runtime.planner.choice.engine_offers import EngineOffer
from runtime.queue.job_planning import build_title
from runtime.queue.job_queue import JobQueue
from runtime.queue.records import (
    BuildEngines,
    BuildProgress,
    DeleteEngine,
    ImportEngine,
    InspectEngine,
    PruneEngines,
    VerifyEngine,
    Work,
)
from runtime.queue.views import Task
from runtime.ui import form, formatting
from runtime.ui.break_even import BreakEven, break_even_of_part, break_even_of_record
from runtime.ui.formatting import page_text, paragraph, render
from runtime.ui.job_view import waiting_text
from runtime.ui.panels import Call, Reply, drawn, unknown_action
from runtime.ui.plan_panel import summarize
from runtime.ui.plan_preview import PlanPreview, Preview, to_build

# Kinds of tasks that other parts of the page show.
_SHOWN_ELSEWHERE = frozenset({"decode", "enhance"})
# Suffixes of engine files that can be imported, as text.
FILE_KINDS = f"{', '.join(list(BACKENDS)[:-1])} or {list(BACKENDS)[-1]}"
_ENGINE_ID = re.compile(r"[0-9a-f]{16}")
_TASK_ID = re.compile(r"[0-9a-f]{8}")
_MAX_OPEN_TASKS = 20
_MAX_PATH = 4096
_ROOT_USER = 0
_ALL = "all"
_TITLES = {"verify": "task.verify", "delete": "task.delete", "import": "task.import", "inspect": "task.inspect"}


@dataclass(frozen=True)
class Entry:
    """One engine of the library.

    Attributes:
        spec: its model, if that is known.
        stale: reasons why it cannot be used anymore.
        break_even: when it pays off, if the current settings use it.
    """

    record: EngineRecord
    spec: ModelSpec | None
    stale: Sequence[Fact]
    break_even: BreakEven | None


class EnginesPanel:
    """The Engines panel; see `panels.Panel`."""

    def __init__(
        self,
        worker: JobQueue,
        engines: EngineService,
        models: dict[str, ModelSpec],
        preview: PlanPreview,
        decoders: Callable[[], list[ModelSpec]] = list,
    ) -> None:
        self._worker = worker
        self._engines = engines
        self._models = models
        self._preview = preview
        # Models that make no videos, but have engines too.
        self._decoders = decoders

    def act(self, call: Call) -> Reply:
        """Carry out an action."""
        match call.action:
            case "refresh":
                return {}
            case "build":
                return self._add(*self._build(call.target, call.form))
            case "prune":
                return self._add(PruneEngines(max_bytes=self._engines.store.max_bytes), Fact("task.prune"))
            case "inspect" | "import":
                return self._add(*self._import(call))
            case "cancel" if _TASK_ID.fullmatch(call.target):
                self._worker.cancel([call.target])
                return {"message": "Cancelled."}
            case "verify" | "delete" | "pin" | "unpin":
                return self._on_engine(call.action, self._engine(call.target))
        raise unknown_action()

    def draw(self, call: Call, _reply: Reply) -> dict[str, str]:
        """Return the HTML of the components, tasks, storage and engines."""
        records = self._preview.library()
        preview, problem = self._previewed(call.form)
        # Those of the panel that decodes latents are shown there.
        tasks = [task for task in self._worker.tasks() if task.kind not in _SHOWN_ELSEWHERE]
        return drawn(
            {
                "components": lambda: _components_html(preview, problem, {task.titled for task in tasks if task.open}),
                "choices": lambda: self._choices(call.form),
                "tasks": lambda: tasks_html(tasks, self._worker),
                "storage": lambda: self._storage(records),
                "table": lambda: table_html(self._entries(records, preview)),
            }
        )

    def _on_engine(self, action: str, record: EngineRecord) -> Reply:
        title = lowered(title_of(record.key.program))
        match action:
            case "verify":
                work: Work = VerifyEngine(
                    engine=record.id, models=(*self._models, *(spec.name for spec in self._decoders()))
                )
            case "delete":
                work = DeleteEngine(engine=record.id)
            case _:
                self._engines.store.pin(record.id, pinned=action == "pin")
                return {"message": f"{'Pinned' if action == 'pin' else 'Unpinned'}: {title}."}
        return self._add(work, Fact(_TITLES[action], {"program": record.key.program, "engine": record.id}))

    def _build(self, target: str, values: Sequence[Any]) -> tuple[Work, Fact, float | None]:
        """Return the task of a target, its title and forecast: "all", a component, or "component=backend"."""
        component, _, backend = target.partition("=")
        request = form.read_settings(values, self._models)
        spec = self._models[request.model]
        if component not in {_ALL, *spec.component_names, *FINISHERS}:
            raise unknown_action()
        if backend:
            if component == _ALL or backend not in BACKEND_TITLES or backend == PYTORCH:
                raise unknown_action()
            request = request.replace(backends={**request.backends, component: backend})
        preview = self._preview.preview(request, spec)
        if preview.error is not None:
            raise preview.error
        plan = preview.plan
        assert plan is not None, "neither a plan nor an error"
        if component in FINISHERS and component not in plan.components:
            raise unknown_action()
        title = _title_of_build(plan, spec, component, backend)
        part = None if component == _ALL else component
        names = list(plan.components) if part is None else [part]
        return BuildEngines(request=request.to_json(), component=part), title, preview.build_seconds(names)

    def _import(self, call: Call) -> tuple[Work, Fact]:
        """Check the file's path, its first bytes, disk space and the user's trust; return the task and its title."""
        spec = form.read_model(call.form, self._models)
        component = read_component(call.values.get("component"), spec)
        source = read_source(read_path(call.values.get("file")))
        check_library(source, self._engines.machine)
        check_disk_space(source, self._engines.store.folder)
        check_trusted(call.values.get("trusted"), source.path)
        kind = ImportEngine if call.action == "import" else InspectEngine
        title = Fact(_TITLES[call.action], {"file": source.path.name})
        return kind(path=source.path, model=spec.name, component=component), title

    def _add(self, work: Work, title: Fact, seconds: float | None = None) -> Reply:
        open_tasks = [open_task for open_task in self._worker.tasks() if open_task.open]
        if any(open_task.titled == title for open_task in open_tasks):
            raise EngineError("ui.task_exists")
        if len(open_tasks) >= _MAX_OPEN_TASKS:
            raise EngineError("ui.too_many_tasks", maximum=_MAX_OPEN_TASKS)
        task = self._worker.add_task(work, title, seconds)
        return {"message": f"{task.title}: {'queued' if self._worker.ahead(task) else 'started'}."}

    def _engine(self, engine_id: str) -> EngineRecord:
        """Return the engine with exactly this id; only the command line accepts prefixes."""
        if not _ENGINE_ID.fullmatch(engine_id):
            raise unknown_action()
        (record,) = self._engines.store.choose([engine_id])
        return record

    def _choices(self, values: Sequence[Any]) -> str:
        """Return the components that an engine file can be imported for."""
        names: Sequence[str] = tuple(TITLES)
        with contextlib.suppress(TandemError):
            names = form.read_model(values, self._models).component_names
        return render("engines_choices.html", components=[(name, title_of(name, names)) for name in names])

    def _storage(self, records: Sequence[EngineRecord]) -> str:
        store = self._engines.store
        return storage_html(store.total_bytes(), store.max_bytes, len(records))

    def _previewed(self, values: Sequence[Any]) -> tuple[Preview | None, str]:
        """Return the plan preview for the form's settings, and why there is no plan (empty if there is one)."""
        try:
            request = form.read_settings(values, self._models)
            preview = self._preview.preview(request, check_offered(request.model, self._models))
        except TandemError as error:
            return None, paragraph(error.fact)
        return preview, "" if preview.error is None else paragraph(preview.error.fact)

    def _entries(self, records: Sequence[EngineRecord], preview: Preview | None) -> list[Entry]:
        models = (*self._models.values(), *self._decoders())
        entries = []
        for record in sorted(records, key=lambda record: (-record.last_used, record.id)):
            spec = next((spec for spec in models if spec.name == record.model), None)
            stale = self._engines.why_stale(record, models)
            entries.append(Entry(record, spec, stale, break_even_of_record(record, preview)))
        return entries


def plan_problem(machine: Machine) -> Fact | None:
    """Return why TensorRT engines cannot run on this machine; `None` if they can."""
    problems = [builder.unavailable(machine) for builder in builders_of("tensorrt")]
    return None if None in problems else problems[0]


def read_path(value: object) -> Path:
    """Read the path of an engine file; quotation marks around it are removed.

    Raises:
        InvalidRequestError: if it is not an absolute path.
    """
    text = value.strip().strip("\"'") if isinstance(value, str) else ""
    if not text or not text.isprintable() or len(text) > _MAX_PATH:
        raise InvalidRequestError("file", "ui.engine_file_missing", kinds=FILE_KINDS)
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # "~name" of an unknown user
        path = Path(text)
    if not path.is_absolute():
        example = Path.home() / "transformer.plan"
        raise InvalidRequestError("file", "ui.engine_file_relative", path=text[:80], example=example)
    return path


def read_component(value: object, spec: ModelSpec) -> str | None:
    """Read the component that an engine file is for; `None` if it is to be detected.

    Raises:
        InvalidRequestError: if the model does not have it.
    """
    if value == AUTO:
        return None
    if not isinstance(value, str) or value not in spec.component_names:
        title = TITLES.get(value, "such component") if isinstance(value, str) else "such component"
        raise InvalidRequestError("component", "ui.no_such_component", model=spec.title, component=lowered(title))
    return value


def check_trusted(value: object, path: Path) -> None:
    """Check that the user trusts a file and that no other user of this machine owns it: engines hold executable code.

    Raises:
        InvalidRequestError: if the user did not confirm it.
        EngineError: if the file belongs to another user.
    """
    if value != "on":
        raise InvalidRequestError("trusted", "ui.engine_file_untrusted", file=path.name)
    if sys.platform != "win32" and path.stat().st_uid not in {os.getuid(), _ROOT_USER}:
        raise EngineError("ui.engine_file_of_another_user", file=path.name)


def tasks_html(tasks: Sequence[Task], worker: JobQueue) -> str:
    """Return the HTML of the tasks in a queue, newest first."""
    return render("engines_tasks.html", tasks=[_task(task, worker) for task in reversed(tasks)])


def storage_html(total_bytes: int, max_bytes: int, count: int) -> str:
    """Return the HTML of the disk space that engines use, with the limit."""
    share = min(total_bytes / max_bytes, 1.0) if max_bytes else float(total_bytes > 0)
    return render(
        "engines_storage.html", total=total_bytes, maximum=max_bytes, count=count, percent=f"{100 * share:.1f}"
    )


def table_html(entries: Sequence[Entry]) -> str:
    """Return the HTML of the engines by model, one row each."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        row = _row(entry)
        groups.setdefault(row["model"], []).append(row)
    return render("engines_table.html", groups=groups)


def supported_sizes(record: EngineRecord, spec: ModelSpec | None) -> str:
    """Return the sizes that an engine supports: in pixels and frames, or in latent units if its model is unknown."""
    if serves_any_clip(record.key.program):
        return "any size"
    return ", ".join(_profile_text(record.key.program, profile, spec) for profile in record.key.profiles)


def _profile_text(program: str, profile: ShapeProfile, spec: ModelSpec | None) -> str:
    low, high = (_size_text(program, latent, spec) for latent in (profile.min, profile.max))
    return low if low == high else f"{low} to {high}"


def _size_text(program: str, latent: LatentSize, spec: ModelSpec | None) -> str:
    frames, height, width = latent
    if program in SOUND_DECODERS:
        sound = spec and spec.sound_latents
        return f"{sound.seconds(frames):.1f} s of sound" if sound else f"{counted(frames, 'latent')} of sound"
    if spec is None:
        return f"{frames} × {height} × {width} latent"
    pixels = formatting.size(width * spec.vae.scale_factor_spatial, height * spec.vae.scale_factor_spatial)
    if program not in {"transformer", "vae_clip"}:
        return f"{pixels}, any length"
    return f"{pixels}, {counted((frames - 1) * spec.vae.scale_factor_temporal + 1, 'frame')}"


def _row(entry: Entry) -> dict[str, Any]:
    """Return the template's values for one engine."""
    record = entry.record
    key = record.key
    readable = key != UNREADABLE_KEY
    state, problem = _state(entry)
    backend = BACKEND_TITLES.get(key.backend, key.backend)
    size = byte_size(record.file_bytes)
    return {
        "id": record.id,
        "title": title_of(key.program) if readable else "Unreadable",
        "model": _model_title(entry),
        "state": state,
        "problem": problem,
        "pinned": record.pinned,
        "imported": key.builder == IMPORTED,
        "size": size,
        "backend": f"{backend}, {key.precision}" if readable else "",
        "cells": (
            ("Sizes", supported_sizes(record, entry.spec)),
            ("Speed", _speed(record)),
            ("Error", _error(record)),
            ("Build", _built(record)),
            ("Pays off", str(entry.break_even) if entry.break_even else ""),
        ),
        "used": formatting.moment(record.last_used),
    }


def _model_title(entry: Entry) -> str:
    """Return the model that an engine belongs to; engines of blocks belong to every model of their architecture."""
    if is_block_program(entry.record.key.program):
        return "all models of its architecture"
    return entry.record.model if entry.spec is None else entry.spec.title


def _state(entry: Entry) -> tuple[str, str]:
    record = entry.record
    if record.problem is not None:
        return "broken", f"Not used: {paragraph(record.problem)}"
    if not record.verified:
        return "broken", f"Not used: {paragraph(record.detail)}"
    if entry.stale:
        return "stale", f"Stale: {' '.join(map(paragraph, entry.stale))}"
    return "ready", ""


def _speed(record: EngineRecord) -> str:
    if not record.seconds_per_call or not record.pytorch_seconds:
        return "not measured"
    return f"{record.pytorch_seconds / record.seconds_per_call:.2f} times as fast as PyTorch"


def _error(record: EngineRecord) -> str:
    if not record.verified and record.detail.code == "engine.not_compared_yet":
        return ""
    if math.isnan(record.error):
        return "not finite"
    largest = f", largest of one value {record.largest_error:.0e}" if record.largest_error else ""
    return f"{record.error:.0e} of {record.tolerance:.0e}{largest}"


def _built(record: EngineRecord) -> str:
    if record.key.builder == IMPORTED:
        return "imported"
    return f"in {formatting.duration(record.build_seconds)}" if record.build_seconds else ""


def _task(task: Task, worker: JobQueue) -> dict[str, Any]:
    if task.state == "queued":
        line = waiting_text(task, worker)
    elif task.state == "running":
        line = _builds_line(task) or task.line
    else:
        line = "" if task.result is None else paragraph(task.result)
    return {
        "task": task,
        "builds": [_build_row(build, task) for build in task.builds],
        "state": "stopping" if task.cancelling else task.state,
        "line": line,
        "percent": None if task.share is None else round(100 * task.share),
        # The log helps while a task runs and after it failed.
        "log": "\n".join(task.log) if task.state in {"running", "failed"} else "",
    }


def _build_row(build: BuildProgress, task: Task) -> dict[str, str]:
    """Return the template's values for one build of a task."""
    alike = {
        sibling.component
        for sibling in task.builds
        if (sibling.program, sibling.backend) == (build.program, build.backend)
    }
    # Two transformers may share an engine; those with engines of their own are told apart.
    program = title_of(build.component, alike) if len(alike) > 1 and build.program in alike else title_of(build.program)
    name = f"{program}, {BACKEND_TITLES.get(build.backend, build.backend)}"
    state, gained = build.state, f", {build.speedup:.2f} times as fast as PyTorch" if build.speedup else ""
    match state:
        case "waiting" if task.open:
            text = f"waiting, {about(build.expected)}" if build.expected else "waiting"
        case "running" if task.open:
            text = f"running for {formatting.duration(task.seconds_running(build))}"
        case "done":
            text = f"built in {formatting.duration(build.took)}{gained}"
        case "kept":
            text = f"existed already{gained}"
        case "failed":
            text = f"failed: {'' if build.problem is None else paragraph(build.problem)}"
        case _:
            text = "not built"
    return {"name": name, "state": state, "text": text}


def _builds_line(task: Task) -> str:
    """Return how many builds have ended, the time so far, and about how long the others take; empty without builds."""
    if not task.builds:
        return ""
    ended = [build for build in task.builds if not build.open]
    so_far = sum(build.took for build in ended) + sum(map(task.seconds_running, task.builds))
    rest = task.seconds_left or 0.0
    count = f"{len(ended)} of {counted(len(task.builds), 'engine')} done"
    total = f" of {about(so_far + rest)}" if rest >= 1 else ""
    return f"{count}, {formatting.duration(so_far)} so far, {formatting.time_left(rest)}{total}."


def _title_of_build(plan: ExecutionPlan, spec: ModelSpec, component: str, backend: str = "") -> Fact:
    """Return the title of a task that builds engines for one component or all; see `build_title`."""
    return build_title(plan, spec, list(plan.components) if component == _ALL else [component], backend)


def _components_html(preview: Preview | None, problem: str, building: Collection[Fact | None]) -> str:
    """Return the HTML of the components at the current settings.

    Args:
        problem: why there is no plan.
        building: titles of the tasks that run or wait; they cannot be added again.
    """
    if preview is None or preview.plan is None:
        return render("engines_components.html", rows=[], what="", total="", problem=problem, build=False)
    plan = preview.plan
    all_building = _title_of_build(plan, preview.spec, _ALL) in building
    badges = summarize(preview, tuple(plan.components)).badges
    offers = {name: preview.offers_for(name) for name in plan.components}
    gains = _break_evens(preview, plan, offers)
    rows: list[dict[str, Any]] = []
    for name, offered in offers.items():
        requested = plan.request.backend(name)
        tried = to_build(requested, offered) if preview.complete else []
        state = _unbuilt(requested, offered) if preview.complete else ""
        if name in gains:
            backend, gain = gains[name]
            state = f"{BACKEND_TITLES[backend]} {gain}"
            state = f"{state}; {_missing(tried)}" if tried else state
        rows.append(
            {
                "component": name,
                "title": plan.title(name),
                "badge": badges[name],
                "state": state,
                "build": bool(tried),
                "building": all_building or _title_of_build(plan, preview.spec, name) in building,
                "backends": _backends(offered) if preview.complete else [],
            }
        )
    size = f"{formatting.size(plan.width, plan.height)}, {plan.frames} frames, {plan.steps} steps"
    return render(
        "engines_components.html",
        rows=rows,
        what=f"For {preview.spec.title} at {size}, the settings in Make.",
        total=_total(preview, plan, offers, gains),
        problem=problem,
        build=any(row["build"] for row in rows),
        building=all_building,
    )


def _break_evens(
    preview: Preview, plan: ExecutionPlan, offers: Mapping[str, Sequence[EngineOffer]]
) -> dict[str, tuple[str, BreakEven]]:
    """Return the backend of each component's engines, and when they pay off, where that is known."""
    gains = {
        name: break_even_of_part(plan.components[name], offered, preview.records) for name, offered in offers.items()
    }
    return {name: gain for name, gain in gains.items() if gain is not None}


def _total(
    preview: Preview,
    plan: ExecutionPlan,
    offers: Mapping[str, Sequence[EngineOffer]],
    gains: Mapping[str, tuple[str, BreakEven]],
) -> str:
    """Return what all engines save, and how long building what is missing takes."""
    total = ""
    if gains:
        # Building tried every backend. Several components may use the same engine, which was built once.
        ids = {use.id for name in gains for offer in offers[name] for use in offer.engines if not use.build}
        built = sum(record.build_seconds for record in preview.records if record.id in ids)
        combined = BreakEven(built, sum(max(gain.saved_seconds, 0.0) for _, gain in gains.values()))
        total = f"{'In total' if len(gains) == len(offers) else 'Engines that are built'}: {combined}."
    elif preview.complete:
        total = "Savings are known once engines are built and measured."
    seconds = preview.build_seconds(plan.components)
    return f"{total} Building what is missing takes {about(seconds)}." if seconds else total


def _backends(offered: Sequence[EngineOffer]) -> list[tuple[str, str, str]]:
    """Return name and title of each backend of a component, and why no engines can be built with it, if so."""
    reasons: dict[str, str] = {}
    for offer in offered:
        reason = "" if offer.problem is None else page_text(offer.problem).what
        if offer.ready:
            reason = "Built already."
        if reasons.get(offer.backend, "-"):  # one of a backend's two kinds is enough
            reasons[offer.backend] = reason
    return [(name, BACKEND_TITLES[name], reason) for name, reason in reasons.items()]


def _missing(tried: Sequence[EngineOffer]) -> str:
    titles = " and ".join(dict.fromkeys(BACKEND_TITLES[offer.backend] for offer in tried))
    return f"not built yet with {titles}"


def _unbuilt(requested: str, offered: Sequence[EngineOffer]) -> str:
    """Return how long the engines of the requested backend, or of all that are tried, take to build."""
    if requested == PYTORCH:
        return "none needed"
    candidates = [offer for offer in offered if requested in {AUTO, offer.backend}]
    tried = to_build(requested, offered)
    if not tried:
        return "not measured" if any(offer.ready for offer in candidates) else "none can be built on this machine"
    seconds = sum(offer.build_seconds for offer in tried)
    titles = " and ".join(dict.fromkeys(BACKEND_TITLES[offer.backend] for offer in tried))
    return f"not built yet{f', {about(seconds)} to build with {titles}' if seconds else ''}"
