"""The panel Models: known models that are not on this machine, what each needs, and their downloads."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.core.errors import TandemError
from runtime.core.settings import Settings
from runtime.machine.probe import free_disk_bytes
from runtime.models.catalogue import download_bytes, find, folders, known_models, not_downloaded
from runtime.models.hub.client import check_online
from runtime.models.registry import KnownModel
from runtime.models.spec import ModelSpec
from runtime.planner.requirements import smallest_card
from runtime.queue.downloads import Downloads, ModelDownload
from runtime.ui.formatting import page_text, paragraph, render
from runtime.ui.panels import Call, Reply, drawn, unknown_action


@dataclass(frozen=True)
class Row:
    """One model that can be downloaded.

    Attributes:
        size: upper bound of the download in bytes.
        needs: the smallest graphics card that runs it, as a sentence.
        state: absent, or the state of its download; "stopping" while that is cancelled.
        percent: of the download, where it is known.
        line: its progress or result.
    """

    name: str
    title: str
    license: str
    size: int
    needs: str
    state: str
    percent: int | None
    line: str

    @property
    def busy(self) -> bool:
        """Whether it is queued or being downloaded."""
        return self.state in {"queued", "running", "stopping"}


class ModelsPanel:
    """The panel; see `panels.Panel`. Models are named, never given by an address.

    Args:
        models: those that the page offers, by name; downloaded models are added.
    """

    def __init__(self, downloads: Downloads, models: dict[str, ModelSpec], settings: Settings) -> None:
        self._downloads = downloads
        self._models = models
        self._settings = settings

    def act(self, call: Call) -> Reply:
        """Carry out an action; the reply has the number of models that the page offers."""
        match call.action:
            case "look":
                pass
            case "download":
                self._downloads.add(_known(call.target))
            case "cancel":
                self._downloads.cancel(_known(call.target).name)
            case _:
                raise unknown_action()
        self.add_new_models()
        return {"models": len(self._models)}

    def draw(self, _call: Call, _reply: Reply) -> dict[str, str]:
        """Return the list of models."""
        return drawn({"list": self._list})

    def add_new_models(self) -> None:
        """Offer usable models that were added to the weights folder."""
        for name in folders(self._settings.weights_dir):
            if name not in self._models:
                try:
                    self._models[name] = find(name, self._settings.weights_dir)
                except TandemError:  # it cannot be used
                    continue

    def _list(self) -> str:
        offline = self._offline()
        rows = [self._row(spec) for spec in not_downloaded(self._settings.weights_dir)]
        tasks = [self._downloads.of(one.name) for one in known_models()]
        done = [_result(task) for task in tasks if task is not None and task.state == "done"]
        return models_html(rows, done, offline, free_disk_bytes(self._settings.weights_dir))

    def _row(self, spec: ModelSpec) -> Row:
        task = self._downloads.of(spec.name)
        return Row(
            name=spec.name,
            title=spec.title,
            license=spec.license,
            size=download_bytes(spec),
            needs=_needs(spec.name),
            state="absent" if task is None else "stopping" if task.cancelling else task.state,
            percent=None if task is None or task.share is None else round(100 * task.share),
            line="" if task is None else _line(task),
        )

    def _offline(self) -> str:
        """Return why nothing can be downloaded; empty if downloads are possible."""
        try:
            check_online(self._settings)
        except TandemError as error:
            return page_text(error.fact).what
        return ""


def models_html(rows: Sequence[Row], done: Sequence[str], offline: str, free_bytes: int) -> str:
    """Return the list of models.

    Args:
        done: results of finished downloads.
        offline: why nothing can be downloaded; empty if downloads are possible.
    """
    return render("models_list.html", rows=rows, done=done, offline=offline, free_bytes=free_bytes)


def _line(download: ModelDownload) -> str:
    return download.line if download.state == "running" else _result(download)


def _result(download: ModelDownload) -> str:
    return "" if download.result is None else paragraph(download.result)


@functools.cache
def _needs(name: str) -> str:
    card = smallest_card(_known(name).spec(Path("none")))
    return f"Needs at least a {card}." if card else "Needs more memory than one card has."


def _known(name: str) -> KnownModel:
    found = next((one for one in known_models() if one.name == name), None)
    if found is None:
        raise unknown_action()
    return found
