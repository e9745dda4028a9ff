"""The Models panel: installed and published models, whether each runs here, downloads, verification, deletion."""

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.core.errors import InvalidRequestError, ModelError, TandemError
from runtime.core.facts import Fact, short
from runtime.core.settings import Settings
from runtime.core.units import byte_size, memory_size
from runtime.machine.probe import Machine, free_disk_bytes
from runtime.models.catalogue import (
    EMBEDDED,
    add_usable,
    delete_files,
    download_bytes,
    folders,
    known_as,
    known_models,
    known_variant,
    not_downloaded,
    own_files,
    published_bytes,
    stored_bytes,
    unusable,
)
from runtime.models.helpers import PUBLISHED, PublishedHelper, folder_of_helper, parent_of, published_helper
from runtime.models.hub.client import check_online
from runtime.models.hub.download import (
    bytes_in,
    delete_model,
    discard_partial,
    is_disk_short,
    partial_bytes,
    partial_downloads,
)
from runtime.models.hub.files import MANIFEST, read_manifest
from runtime.models.registry import KnownModel
from runtime.models.spec import ModelSpec
from runtime.planner.requirements import Fit, smallest_card
from runtime.planner.variants import ORIGINAL, Candidate, offer
from runtime.queue.job_queue import JobQueue
from runtime.queue.model_tasks import ModelTask, ModelTasks
from runtime.ui import form, formatting
from runtime.ui.formatting import page_text, paragraph, render
from runtime.ui.jobs_panel import example_of
from runtime.ui.panels import Call, Reply, drawn, unknown_action
from runtime.ui.plan_preview import PlanPreview

_HUB_PAGE = "https://huggingface.co/"
_MAX_NAME = 200


@dataclass(frozen=True, kw_only=True)
class _VariantButton:
    """A button that downloads a variant of a model.

    Attributes:
        key: target of the action.
        verdict: whether it runs here.
        strong, confirm: see `_Card`.
    """

    key: str
    title: str
    name: str
    verdict: str
    strong: bool
    confirm: str


@dataclass(frozen=True, kw_only=True)
class _Card:
    """One model as the template shows it.

    Attributes:
        key: identifies the card and is the target of its actions.
        picture: address of a frame of a clip; empty without one.
        facts: names and values.
        state: "installed", "unusable", "absent", "partial", or the state of an open or ended task.
        actions: names of the buttons; `others` are in the menu, each with the reason if it is disabled.
        frees: what deletion frees.
        strong: whether a download is recommended: it runs well here and the disk has the space.
        confirm: the question before a download.
        line, percent: progress or result of the last task.
        best: downloads the variant for this machine; `None` if none fits, or the model has no variants.
        why: why it is this one, or why none fits.
        variants: download the other variants.
    """

    key: str
    title: str
    state: str
    picture: str = ""
    about: str = ""
    kind: str = ""
    verdict: str = ""
    detail: str = ""
    problem: str = ""
    facts: Sequence[tuple[str, str]] = ()
    actions: Sequence[str] = ()
    others: Mapping[str, str] = field(default_factory=dict)
    selected: bool = False
    frees: str = ""
    strong: bool = False
    confirm: str = ""
    line: str = ""
    failed: bool = False
    percent: int | None = None
    offer: str = "Download"
    best: _VariantButton | None = None
    why: str = ""
    variants: Sequence[_VariantButton] = ()


class ModelsPanel:
    """The Models panel; see `panels.Panel`.

    Args:
        models: the models that the page offers, by name; the panel adds and removes models.
        preview: forecasts for this machine.
        worker: whose jobs use models.
    """

    def __init__(
        self,
        tasks: ModelTasks,
        models: dict[str, ModelSpec],
        settings: Settings,
        preview: PlanPreview,
        worker: JobQueue,
    ) -> None:
        self._tasks = tasks
        self._models = models
        self._weights_dir = settings.weights_dir
        self._settings = settings
        self._preview = preview
        self._worker = worker
        self._fits: dict[str, Fit] = {}
        self._candidates: dict[str, tuple[Candidate, ...]] = {}
        self._fits_of: Machine | None = None

    def act(self, call: Call) -> Reply:
        """Carry out an action; the reply contains the number of models that the page offers."""
        target, reply = call.target, Reply()
        match call.action:
            case "refresh":
                pass
            case "look":
                self._tasks.look(read_repository(call.values.get("repository")))
            case "download":
                self._tasks.download(self._repository(target))
            case "pause" | "cancel":
                self._tasks.cancel(self._folder(target))
            case "discard":
                reply = self._discard(self._folder(target))
            case "verify" if self._is_downloaded(target):
                self._tasks.verify(target)
            case "delete" if (helper := published_helper(target)) is not None:
                reply = self._delete_helper(helper)
            case "delete":
                reply = self._delete(target)
            case _:
                raise unknown_action()
        self._follow_disk()
        return reply | {"models": len(self._models)}

    def draw(self, call: Call, _reply: Reply) -> dict[str, str]:
        """Return the HTML of the installed models, and of those that can be downloaded."""
        return drawn({"installed": lambda: self._installed_html(call), "available": self._available_html})

    def _follow_disk(self) -> None:
        """Offer the models that are in the weights folder now."""
        add_usable(self._models, self._weights_dir)
        for name, spec in tuple(self._models.items()):
            if len(self._models) > 1 and not spec.exists:
                self._models.pop(name, None)

    def _discard(self, folder: str) -> Reply:
        self._tasks.forget(folder)
        freed = discard_partial(parent_of(folder, self._weights_dir), folder)
        return {"message": f"Removed from the list; {byte_size(freed)} freed." if freed else "Removed from the list."}

    def _delete(self, name: str) -> Reply:
        files = own_files(name, self._weights_dir)
        if not files and name not in {*folders(self._weights_dir), *unusable(self._weights_dir, ())}:
            raise unknown_action()
        spec = self._models.get(name)
        title = spec.title if spec else name
        if not (files or _in_folder(self._weights_dir, name)):
            raise ModelError("model.not_deletable", model=title, folder=EMBEDDED)
        jobs = self._worker.store.order.count_with_model(name)
        if jobs:
            raise ModelError("model.in_use", model=title, jobs=jobs)
        self._tasks.forget(name)
        freed = delete_files(name, self._weights_dir) if files else delete_model(self._weights_dir, name)
        if len(self._models) > 1:
            self._models.pop(name, None)
        return {
            "message": f"Deleted: {title}. {byte_size(freed)} freed.",
            "gone": name,
            "first": next(iter(self._models)),
        }

    def _delete_helper(self, helper: PublishedHelper) -> Reply:
        folder = folder_of_helper(helper, self._weights_dir)
        if not folder.is_dir():
            raise unknown_action()
        self._tasks.forget(helper.name)
        freed = delete_model(folder.parent, folder.name)
        return {"message": f"Deleted: {helper.title}. {byte_size(freed)} freed."}

    def _repository(self, target: str) -> str:
        """Return the name to download: of a published model, or the repository of a card."""
        if _names_folder(target):
            return target
        model = _known(target)
        if model is not None:
            return model.name
        task, partial = self._tasks.of(target), partial_downloads(self._weights_dir).get(target)
        if task is not None and task.source is not None:
            return task.source.repository
        if partial is None and self._is_downloaded(target):
            partial = read_manifest(self._weights_dir / target)
        if partial is None:
            raise unknown_action()
        return partial.repository

    def _folder(self, target: str) -> str:
        """Return the folder of a card's model."""
        model = _known(target)
        if _names_folder(target):
            return target
        if model is None and self._tasks.of(target) is None and target not in partial_downloads(self._weights_dir):
            raise unknown_action()
        return target if model is None else model.folder

    def _is_downloaded(self, name: str) -> bool:
        return name in folders(self._weights_dir) and (self._weights_dir / name / MANIFEST).is_file()

    def _installed_html(self, call: Call) -> str:
        selected = ""
        with contextlib.suppress(TandemError):
            selected = form.read_model(call.form, self._models).name
        models = tuple(self._models.items())
        cards = [self._installed(name, spec, selected) for name, spec in models]
        cards += [self._helper(model) for model in PUBLISHED if self._has(model)]
        cards += [self._unusable(name, error) for name, error in unusable(self._weights_dir, _names(models)).items()]
        shipped = all(spec.directory.parent == EMBEDDED for _, spec in models)
        return render("models_installed.html", cards=cards, shipped=shipped, weights_dir=self._weights_dir)

    def _available_html(self) -> str:
        installed = {*folders(self._weights_dir)}
        absent = {spec.directory.name: spec for spec in not_downloaded(self._weights_dir)}
        named = {
            task.folder: task for task in self._tasks.all() if task.source is not None and task.source.makes_videos
        }
        other_folders = {*named, *partial_downloads(self._weights_dir)} - {*absent, *installed}
        best_first = sorted(absent.values(), key=lambda spec: (self._fit(spec).rank, spec.total_parameters))
        cards = [self._known(spec) for spec in best_first]
        cards += [self._helper(model) for model in PUBLISHED if not self._has(model)]
        cards += [self._other(folder) for folder in sorted(other_folders)]
        return render(
            "models_available.html",
            cards=cards,
            offline=self._offline_reason(),
            free_bytes=free_disk_bytes(self._weights_dir),
        )

    def _offline_reason(self) -> str:
        """Return why nothing can be downloaded; empty if downloads are possible."""
        try:
            check_online(self._settings)
        except TandemError as error:
            return page_text(error.fact).what
        return ""

    def _fit(self, spec: ModelSpec) -> Fit:
        """Return whether a model runs here; computed again when the machine was probed again."""
        self._forget_machine()
        if spec.name not in self._fits:
            self._fits[spec.name] = self._preview.fit(spec)
        return self._fits[spec.name]

    def _forget_machine(self) -> None:
        """Drop what was computed for the machine before it was probed again."""
        machine = self._preview.machine()
        if machine is not self._fits_of:
            self._fits, self._candidates, self._fits_of = {}, {}, machine

    def _variants(self, spec: ModelSpec) -> dict[str, Any]:
        """Return the fields of a published model's card that are about variants."""
        model = known_as(spec.name)
        if model is None or not model.variants:
            return {}
        self._forget_machine()
        if model.name not in self._candidates:
            self._candidates[model.name] = self._preview.variants(model)
        free = free_disk_bytes(self._weights_dir)
        offered = offer(self._candidates[model.name], free)
        # These have cards of their own.
        apart = {*folders(self._weights_dir), *partial_downloads(self._weights_dir)}
        apart |= {task.folder for task in self._tasks.all()}
        best = None if offered.best is None or offered.best.spec.name in apart else offered.best
        others = [candidate for candidate in offered.others if candidate.spec.name not in apart]
        return {
            "best": None if best is None else self._variant_button(spec, best, best=True),
            "why": page_text(offered.reason).what if best is offered.best else "",
            "variants": [
                self._variant_button(spec, candidate)
                for candidate in others
                # Without the best one, the original has the usual button.
                if best is not None or candidate.name != ORIGINAL
            ],
        }

    def _variant_button(self, spec: ModelSpec, candidate: Candidate, *, best: bool = False) -> _VariantButton:
        size = _size_text(candidate.bytes, is_exact=candidate.is_exact)
        kind = page_text(candidate.title).what.rstrip(".") if isinstance(candidate.title, Fact) else candidate.title
        title = f"Get the variant for this machine ({size})" if best else f"{kind} ({size})"
        short = self._disk_short(candidate.bytes, is_exact=candidate.is_exact)
        return _VariantButton(
            key=candidate.spec.name,
            title=title,
            name=f"{title}: {spec.title}, {kind}",
            verdict=str(candidate.fit.verdict),
            strong=best and candidate.fit.kind == "well",
            confirm=f"Download {spec.title}, {kind}? License: {spec.license}. Size: {size}.{_clause(short)}",
        )

    def _installed(self, name: str, spec: ModelSpec, selected: str) -> _Card:
        menu = {}
        folder = spec.directory
        in_folder = _in_folder(self._weights_dir, name)
        files = own_files(name, self._weights_dir)
        task = self._tasks.of(folder.name) if in_folder else None
        busy = task is not None and task.open
        if in_folder:
            menu["verify"] = "" if self._is_downloaded(name) else "Tandem did not download it and has no hashes."
            menu["delete"] = ""
            if task is not None and task.kind == "verify" and task.state == "failed" and self._is_downloaded(name):
                menu["repair"] = self._offline_reason()
        elif files:
            menu["delete"] = ""
        size = stored_bytes(spec)
        places = [("Folder", folder.name)] if in_folder and folder.name != spec.title else []
        places += [("File", path.name) for path in dict.fromkeys(spec.single_files.values())]
        link = folder.is_symlink() if in_folder else any(path.is_symlink() for path in files)
        return _Card(
            key=name,
            title=spec.title,
            state="installed",
            picture=example_of(self._worker.store, spec),
            facts=[("License", spec.license), ("On disk", byte_size(size)), *places, *_clip(spec, self._fit(spec))],
            actions=(*(() if spec.name == selected else ("use",)), *(("cancel",) if busy else ())),
            others={} if busy else menu,
            selected=spec.name == selected,
            frees="only the link" if link else byte_size(sum(map(_size, files)) if files else size),
            **_verdict(spec, self._fit(spec)),
            **_progress(task),
        )

    def _unusable(self, name: str, error: TandemError) -> _Card:
        plain = name if name.isprintable() else ascii(name)
        files = own_files(name, self._weights_dir)
        size = byte_size(sum(map(_size, files)) if files else bytes_in(self._weights_dir / name))
        return _Card(
            key=plain,
            title=plain,
            state="unusable",
            verdict="Cannot be used",
            kind="unsupported",
            problem=paragraph(error.fact),
            facts=[("On disk", size)],
            others={"delete": ""} if plain == name and (files or _in_folder(self._weights_dir, name)) else {},
            frees=size,
        )

    def _known(self, spec: ModelSpec) -> _Card:
        fit, folder = self._fit(spec), spec.directory.name
        task, begun = self._tasks.of(folder), partial_bytes(self._weights_dir, folder)
        exact = published_bytes(spec) if task is None or task.plan is None else task.plan.listing.total_bytes
        size = exact or download_bytes(spec)
        size_text = _size_text(size, is_exact=bool(exact))
        received = [("Received", byte_size(begun))] if begun else []
        short = self._disk_short(size - begun, is_exact=bool(exact))
        transfer = self._transfer(task, begun)
        variants = self._variants(spec) if not begun and (task is None or not task.open) else {}
        if variants.get("best") is not None:
            transfer["actions"], problem = (), ""
        else:
            problem = _advice(short)
        return _Card(
            key=spec.name,
            title=spec.title,
            state=_state(task, begun),
            facts=[
                ("License", spec.license),
                ("Download", size_text),
                *received,
                *_clip(spec, fit),
                ("Minimum", _smallest_card(spec.name)),
            ],
            problem=problem,
            strong=fit.kind == "well" and short is None,
            confirm=f"Download {spec.title}? License: {spec.license}. Size: {size_text}.{_clause(short)}",
            **transfer,
            **variants,
            **_verdict(spec, fit),
            **_progress(task),
        )

    def _has(self, model: PublishedHelper) -> bool:
        return folder_of_helper(model, self._weights_dir).is_dir()

    def _helper(self, model: PublishedHelper) -> _Card:
        """Return the card of a model that makes no videos."""
        facts, task = [("License", model.license)], self._tasks.of(model.name)
        shown: dict[str, Any] = {"key": model.name, "title": model.title, "about": model.about, **_progress(task)}
        if self._has(model):
            size = byte_size(bytes_in(folder_of_helper(model, self._weights_dir)))
            facts.append(("On disk", size))
            return _Card(**shown, state="installed", facts=facts, others={"delete": ""}, frees=size)
        begun = partial_bytes(parent_of(model.name, self._weights_dir), model.name)
        facts += [("Download", byte_size(model.size)), *([("Received", byte_size(begun))] if begun else [])]
        short = self._disk_short(model.size - begun, is_exact=False)
        question = f"Download {model.title}? License: {model.license}. Size: {byte_size(model.size)}.{_clause(short)}"
        transfer = self._transfer(task, begun)
        return _Card(
            **shown, state=_state(task, begun), facts=facts, problem=_advice(short), confirm=question, **transfer
        )

    def _other(self, folder: str) -> _Card:
        task, begun = self._tasks.of(folder), partial_bytes(self._weights_dir, folder)
        partial = partial_downloads(self._weights_dir).get(folder)
        repository = task.source.repository if task and task.source else partial.repository if partial else folder
        facts = []
        listing = None if task is None or task.plan is None else task.plan.listing
        license_name = listing.license if listing else partial.license if partial else ""
        variant = known_variant(folder)
        title = repository if variant is None else variant.title
        if listing or partial:
            facts = [("License", license_name or "none stated; see the repository")]
        if listing:
            facts.append(("Download", byte_size(listing.total_bytes)))
        if begun:
            facts.append(("Received", byte_size(begun)))
        short = self._disk_short(listing.total_bytes - begun, is_exact=True) if listing else None
        transfer = self._transfer(task, begun)
        if not listing and not begun and task is not None and not task.open:
            transfer["actions"] = ()  # the look-up failed
        return _Card(
            key=folder,
            title=title,
            state=_state(task, begun),
            facts=facts,
            problem=_advice(short),
            confirm=f"Download {title}? License: {license_name or 'none stated'}."
            + (f" Size: {byte_size(listing.total_bytes)}." if listing else "")
            + _clause(short),
            **transfer,
            **_progress(task),
        )

    def _disk_short(self, needed: int, *, is_exact: bool) -> Fact | None:
        """Return that the disk is too small for a download, or may be; `None` if it has the space."""
        free = free_disk_bytes(self._weights_dir)
        if not is_disk_short(needed, free):
            return None
        data = {"needed": needed, "free": free, "folder": self._weights_dir}
        return Fact("hub.disk_full" if is_exact else "hub.disk_may_be_full", data)

    def _transfer(self, task: ModelTask | None, begun: int) -> dict[str, Any]:
        """Return the actions of a model that is not complete."""
        if task is not None and task.open:
            return {"actions": ("pause",) if task.kind == "download" else ("cancel",)}
        menu = {"discard": ""} if begun or (task is not None and task.source is not None) else {}
        return {"actions": ("download",), "others": menu, "offer": "Resume" if begun else "Download"}


def read_repository(value: object) -> str:
    """Read a repository's name or the address of its page.

    Raises:
        InvalidRequestError: if none is given.
    """
    name = value.strip().removeprefix(_HUB_PAGE).rstrip("/") if isinstance(value, str) else ""
    if not name or len(name) > _MAX_NAME:
        raise InvalidRequestError("repository", "ui.repository_missing", example=known_models()[0].repository)
    return name


def _verdict(spec: ModelSpec, fit: Fit) -> dict[str, Any]:
    detail = "" if fit.detail is None else page_text(fit.detail).what
    return {
        "about": spec.about or _weights(spec.total_parameters),
        "kind": fit.kind,
        "verdict": str(fit.verdict),
        "detail": detail,
    }


def _weights(count: int) -> str:
    """Return "1.3 billion weights.", "250 million weights.", or the number of a smaller model's."""
    for unit, name in ((10**9, "billion "), (10**6, "million ")):
        if count >= unit:
            return f"{count / unit:,.3g} {name}weights."
    return f"{count:,} weights."


def _clip(spec: ModelSpec, fit: Fit) -> list[tuple[str, str]]:
    """Return the facts on the default clip: size and length, and time and memory on this machine."""
    defaults = spec.defaults
    seconds = f"{defaults.frames / defaults.fps:.1f} s at {defaults.fps} fps"
    facts = [("Default clip", f"{formatting.size(defaults.width, defaults.height)}, {seconds}")]
    if fit.seconds is not None:
        how = short(fit.seconds.basis)
        facts.append(("Time", f"about {formatting.duration(max(fit.seconds.likely, 0.1))} ({how})"))
        facts.append(("Memory", f"{memory_size(fit.peak_bytes)} of {memory_size(fit.free_bytes)} free"))
    return facts


@functools.cache
def _smallest_card(name: str) -> str:
    """Return the smallest hardware for a published model's default clip."""
    model = next(candidate for candidate in known_models() if candidate.name == name)
    return str(smallest_card(model.spec(Path("none"))) or "more memory than one graphics card has")


def _progress(task: ModelTask | None) -> dict[str, Any]:
    if task is None:
        return {}
    return {
        "line": task.line if task.state == "running" else _advice(task.result),
        "failed": task.state == "failed",
        "percent": None if task.share is None else round(100 * task.share),
    }


def _advice(fact: Fact | None) -> str:
    return "" if fact is None else paragraph(fact)


def _size_text(count: int, *, is_exact: bool) -> str:
    return byte_size(count) if is_exact else f"up to {byte_size(count)}"


def _clause(short: Fact | None) -> str:
    """Return what is wrong with the disk, to be added to a question."""
    return "" if short is None else f" {page_text(short).what}"


def _state(task: ModelTask | None, begun: int) -> str:
    if task is None or (task.state == "done" and task.kind == "look"):
        return "partial" if begun else "absent"
    return "stopping" if task.cancelling else task.state


def _names(models: Iterable[tuple[str, ModelSpec]]) -> set[str]:
    """Return the names of models in the weights folder: of their folders, or of the files' models."""
    return {spec.name if spec.single_files else spec.directory.name for _, spec in models}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _in_folder(weights_dir: Path, name: str) -> bool:
    """Return whether a folder of that name is in the weights folder."""
    return Path(name).name == name and (weights_dir / name).is_dir()


def _names_folder(target: str) -> bool:
    """Return whether a card's target is the name to download and of the folder: of variants, and of no video models."""
    return published_helper(target) is not None or known_variant(target) is not None


def _known(target: str) -> KnownModel | None:
    """Return a model of the catalogue by name or folder."""
    return next((model for model in known_models() if target in {model.name, model.folder}), None)
