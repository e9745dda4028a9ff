"""The block that offers known models that are not here: what each is and needs, downloading, how far that is.

Its handlers answer raw HTTP too, so none trusts what it is sent: models are told by their names, and by no address.
Visitors of a share link have a page without it.
"""

import functools
import hashlib
import json
import logging
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from runtime.core.errors import InvalidRequestError, TandemError
from runtime.core.facts import render
from runtime.core.settings import Settings
from runtime.core.units import byte_size
from runtime.machine.probe import free_disk_bytes
from runtime.models.catalogue import find, folders, not_here
from runtime.models.hub.client import check_online
from runtime.models.known import download_bytes, known_models
from runtime.models.registry import KnownModel
from runtime.models.spec import ModelSpec
from runtime.planner.requirements import smallest_card
from runtime.queue.downloads import Downloads, ModelDownload
from runtime.ui.form import model_choices
from runtime.ui.make_tab import SERVED

# How often the block looks while it is open.
_LOOK_SECONDS = 1.0
_MOST_SENT = 200
# What a page says of what it shows: how many models it knows, and a digest of the block.
_MARKS = 2
_STATES = {"queued": "Waiting", "running": "Downloading", "done": "Done", "failed": "Failed", "cancelled": "Cancelled"}

logger = logging.getLogger(__name__)

Updates = tuple[Any, Any, Any]


@dataclass
class Block:
    """The block's parts."""

    fold: gr.Accordion
    view: gr.HTML


class MoreModels:
    """The block's handlers. Each view goes to: the block, the choice of models, and what is shown now.

    Args:
        models: that the page offers, by name; what was downloaded is added.
    """

    def __init__(self, downloads: Downloads, models: dict[str, ModelSpec], settings: Settings) -> None:
        self._downloads = downloads
        self._models = models
        self._settings = settings
        self._built = len(models)

    def begin(self, shown: Any) -> Updates:
        """Offer models that came since the server started; the block is folded, and drawn when it is opened."""
        self._take_in()
        _, choices, mark = self._compared(shown, "")
        return gr.skip(), choices, mark

    def look(self, shown: Any) -> Updates:
        """Show what has changed since `shown`; a model that came can be chosen from then on."""
        return self._view(shown, "")

    def act(self, asked: Any) -> Updates:
        """Do what a button of the block says, JSON of `act` and `of`."""
        said = ""
        try:
            self._do(asked)
        except TandemError as error:
            said = f"{error.what} {error.remedy}"
        except Exception as error:  # a defect: told in one line, kept in the log
            logger.exception("The models could not do what was asked")
            said = f"Something broke inside Tandem: {error!r} The log has the details."
        return self._view(None, said)

    def _do(self, asked: Any) -> None:
        try:
            value = json.loads(asked) if isinstance(asked, str) and len(asked) <= _MOST_SENT else None
        except (ValueError, RecursionError):
            value = None
        match value:
            case {"act": "download", "of": str(name)}:
                self._downloads.add(_known(name))
            case {"act": "cancel", "of": str(name)}:
                self._downloads.cancel(_known(name).name)
            case _:
                raise _unknown()

    def _view(self, shown: Any, said: str) -> Updates:
        self._take_in()
        why_not = self._why_not()
        missing = not_here(self._settings.weights_dir)
        items = "".join(_item(spec, self._downloads.of(spec.name), online=not why_not) for spec in missing)
        came = [task for one in known_models() if (task := self._downloads.of(one.name)) and task.state == "done"]
        items += "".join(f'<li data-state="done"><p class="said">{escape(_result(task))}</p></li>' for task in came)
        lines = [why_not, said]
        if missing:
            lines.append(f"{byte_size(free_disk_bytes(self._settings.weights_dir))} are free on the disk.")
        elif not came:
            lines.append("All models that Tandem knows are here.")
        told = "".join(f'<p class="aside" role="status">{escape(line)}</p>' for line in lines if line)
        view = f'<section class="shelf" data-models="">{told}<ul class="work">{items}</ul></section>'
        return self._compared(shown, view)

    def _compared(self, shown: Any, view: str) -> Updates:
        """Return what differs from what is shown."""
        count, mark = str(len(self._models)), hashlib.sha256(view.encode()).hexdigest()[:16]
        # A page knows the models that there were when the server started, until it is told of more.
        known = shown.split() if isinstance(shown, str) else []
        was_count, was = known if len(known) == _MARKS else (str(self._built), "")
        return (
            gr.skip() if was == mark else view,
            gr.skip() if was_count == count else _choices(self._models),
            f"{count} {mark}",
        )

    def _take_in(self) -> None:
        """Offer models that came since."""
        for name in folders(self._settings.weights_dir):
            if name not in self._models:
                try:
                    self._models[name] = find(name, self._settings.weights_dir)
                except TandemError:  # one that cannot be used
                    continue

    def _why_not(self) -> str:
        try:
            check_online(self._settings)
        except TandemError as error:
            return error.what
        return ""


def block() -> Block:
    """Make the block, folded."""
    with gr.Accordion("More models", open=False, elem_id="more-models", elem_classes="fold") as fold:
        view = gr.HTML("", elem_id="models-view", apply_default_css=False)
    return Block(fold, view)


def connect(page: gr.Blocks, handlers: MoreModels, made: Block, model: gr.Dropdown) -> None:
    """Show the block while it is open, and do what its buttons say."""
    drawn = gr.Textbox("", visible="hidden", elem_id="models-drawn", label="What the block of models shows")
    shown: list[Any] = [made.view, model, drawn]
    asked = gr.Textbox("", visible="hidden", elem_id="models-asked", label="What a button of the models says")
    act = gr.Button("Act", visible="hidden", elem_id="models-act")
    tick = gr.Timer(_LOOK_SECONDS, active=False)
    page.load(handlers.begin, drawn, shown, **SERVED)
    tick.tick(handlers.look, drawn, shown, trigger_mode="once", **SERVED)
    made.fold.expand(handlers.look, drawn, shown, **SERVED)
    made.fold.expand(lambda: gr.Timer(active=True), None, tick, **SERVED)
    made.fold.collapse(lambda: gr.Timer(active=False), None, tick, **SERVED)
    act.click(
        handlers.act,
        asked,
        shown,
        js="() => [window.tandem.asked()]",
        preprocess=False,
        trigger_mode="multiple",
        **SERVED,
    )


def _choices(models: dict[str, ModelSpec]) -> Any:
    named = model_choices(models)
    return gr.update(choices=named, visible=len(named) > 1)


def _item(spec: ModelSpec, task: ModelDownload | None, *, online: bool) -> str:
    state = "absent" if task is None else task.state
    stopping = task is not None and task.cancelling
    size = byte_size(download_bytes(spec))
    title = "Stopping…" if stopping else _STATES.get(state, "")
    tag = f'<span class="tag">{title}</span>' if title else ""
    about = f"Licence {spec.license}, about {size} at most. {_needs(spec.name)}"
    busy = task is not None and task.open
    confirm = f"Download {spec.title}? Its licence is {spec.license}. About {size} at most are fetched."
    if busy:
        button = _button("cancel", "Cancel", spec, "", off=stopping)
    else:
        button = _button("download", "Download", spec, confirm, off=not online)
    said = "" if task is None else task.line if task.state == "running" else _result(task)
    percent = 0 if task is None or task.share is None else round(100 * task.share)
    bar = (
        f'<div class="bar" role="progressbar" aria-label="Download of {escape(spec.title, quote=True)}" '
        f'aria-valuemin="0" aria-valuemax="100" aria-valuenow="{percent}"{"" if state == "running" else " hidden"}>'
        f'<span style="width:{percent}%"{"" if percent else " class=waiting"}></span></div>'
    )
    return (
        f'<li data-model="{escape(spec.name, quote=True)}" data-state="{"stopping" if stopping else state}">'
        f'<p class="row-end"><span><strong>{escape(spec.title)}</strong> {tag}</span>'
        f'{button}</p><p class="said">{escape(about)}</p>{bar}<p class="said">{escape(said)}</p></li>'
    )


def _result(download: ModelDownload) -> str:
    return "" if download.result is None else " ".join(filter(None, render(download.result)))


@functools.cache
def _needs(name: str) -> str:
    card = smallest_card(_known(name).spec(Path("none")))
    return f"Needs at least a {card}." if card else "Needs more than any one card has."


def _button(act: str, title: str, spec: ModelSpec, confirm: str, *, off: bool) -> str:
    name = escape(f"{title} {spec.title}", quote=True)
    return (
        f'<button type="button" class="button" data-act="{act}" data-of="{escape(spec.name, quote=True)}" '
        f'data-confirm="{escape(confirm, quote=True)}" aria-label="{name}"{" disabled" if off else ""}>{title}</button>'
    )


def _known(name: str) -> KnownModel:
    found = next((one for one in known_models() if one.name == name), None)
    if found is None:
        raise _unknown()
    return found


def _unknown() -> InvalidRequestError:
    return InvalidRequestError("act", "There is no such action or model.", "Load the page again.")
