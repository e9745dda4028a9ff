"""The Models panel: downloads models of the catalogue; shows their license, size and minimum hardware."""

import functools
from pathlib import Path
from typing import Any

from runtime.core.errors import TandemError
from runtime.core.settings import Settings
from runtime.machine.probe import free_disk_bytes
from runtime.models.catalogue import add_usable, download_bytes, known_models, not_downloaded
from runtime.models.hub.client import check_online
from runtime.models.registry import KnownModel
from runtime.models.spec import ModelSpec
from runtime.planner.requirements import smallest_card
from runtime.queue.downloads import Downloads, ModelDownload
from runtime.ui.formatting import page_text, paragraph, render
from runtime.ui.panels import Call, Reply, drawn, unknown_action


class ModelsPanel:
    """The Models panel; see `panels.Panel`. Actions accept names of catalogue models only, no URLs.

    Args:
        models: the models that the page offers, by name; the panel adds downloaded models.
    """

    def __init__(self, downloads: Downloads, models: dict[str, ModelSpec], settings: Settings) -> None:
        self._downloads = downloads
        self._models = models
        self._settings = settings

    def act(self, call: Call) -> Reply:
        """Carry out an action; the reply contains the number of models that the page offers."""
        match call.action:
            case "refresh":
                pass
            case "download":
                self._downloads.add(_known(call.target))
            case "cancel":
                self._downloads.cancel(_known(call.target).name)
            case _:
                raise unknown_action()
        add_usable(self._models, self._settings.weights_dir)
        return {"models": len(self._models)}

    def draw(self, _call: Call, _reply: Reply) -> dict[str, str]:
        """Return the HTML of the list of models."""
        return drawn({"list": self._list})

    def _list(self) -> str:
        known = [(one, self._downloads.of(one.name)) for one in known_models()]
        absent = {spec.name: spec for spec in not_downloaded(self._settings.weights_dir)}
        return render(
            "models_list.html",
            rows=[_row(absent[one.name], task) for one, task in known if one.name in absent],
            done=[_result(task) for _, task in known if task is not None and task.state == "done"],
            offline=self._offline_reason(),
            free_bytes=free_disk_bytes(self._settings.weights_dir),
        )

    def _offline_reason(self) -> str:
        """Return why nothing can be downloaded; empty if downloads are possible."""
        try:
            check_online(self._settings)
        except TandemError as error:
            return page_text(error.fact).what
        return ""


def _row(spec: ModelSpec, task: ModelDownload | None) -> dict[str, Any]:
    """Return the template's values for a model that can be downloaded; "size" is the largest download in bytes."""
    if task is None:
        state, line, percent = "absent", "", None
    else:
        state = "stopping" if task.cancelling else task.state
        line = task.line if state == "running" else _result(task)
        percent = None if task.share is None else round(100 * task.share)
    card = _smallest_card(spec.name)
    return {
        "spec": spec,
        "state": state,
        "busy": state in {"queued", "running", "stopping"},
        "size": download_bytes(spec),
        "needs": f"Minimum hardware: {card}." if card else "It needs more memory than one graphics card has.",
        "percent": percent,
        "line": line,
    }


def _result(download: ModelDownload) -> str:
    return "" if download.result is None else paragraph(download.result)


@functools.cache
def _smallest_card(name: str) -> str:
    return str(smallest_card(_known(name).spec(Path("none"))) or "")


def _known(name: str) -> KnownModel:
    """Return a model of the catalogue by name."""
    found = next((one for one in known_models() if one.name == name), None)
    if found is None:
        raise unknown_action()
    return found
