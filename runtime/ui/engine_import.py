"""The block of the Engines tab that imports engines made elsewhere: its controls, and their reading.

A file is named, not uploaded: plans are gigabytes and lie on the machine that Tandem runs on, and nobody puts files
here. Opening one runs what is in it, so it is opened only once somebody said that it is trusted; and as whoever else
uses this machine may reach the page, only if it belongs to whom Tandem runs for.
"""

import os
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from runtime.core.errors import EngineError, InvalidRequestError
from runtime.core.request import AUTO, COMPONENTS
from runtime.engines.imported.importing import BACKENDS, WARNING
from runtime.models.spec import ModelSpec
from runtime.ui import acceleration, engine_views

_LONGEST_PATH = 4096
_ADMINISTRATOR = 0
_KINDS = f"{', '.join(list(BACKENDS)[:-1])} or {list(BACKENDS)[-1]}"


@dataclass
class Block:
    """The block's controls."""

    file: gr.Textbox
    part: gr.Dropdown
    trusted: gr.Checkbox
    look: gr.Button
    take: gr.Button
    said: gr.HTML

    @property
    def inputs(self) -> list[Any]:
        """What its handlers are given before the form."""
        return [self.file, self.part, self.trusted]


def block() -> Block:
    """Make the block."""
    with gr.Accordion("Import an engine made elsewhere", open=False, elem_id="import", elem_classes="fold"):
        file = gr.Textbox(
            label="Engine file",
            info=f"The whole path of a {_KINDS} file, on the machine that Tandem runs on. It is copied.",
            placeholder="/home/you/transformer.plan",
            max_lines=1,
            elem_id="import-file",
        )
        part = gr.Dropdown(
            choices=[("Automatic", AUTO), *((acceleration.TITLES[name], name) for name in COMPONENTS)],
            value=AUTO,
            filterable=False,
            label="Stands for",
            info="A part of the model that is chosen under Make. Automatic compares it with those it can stand for.",
            elem_id="import-part",
        )
        gr.HTML(f'<p class="trouble" id="import-warning">{escape(str(WARNING))}</p>', apply_default_css=False)
        trusted = gr.Checkbox(
            value=False, label="I made this file myself, or trust who made it", elem_id="import-trusted"
        )
        with gr.Row(elem_id="import-acts"):
            look = gr.Button("Look into it", elem_id="import-look", min_width=130)
            take = gr.Button("Import", variant="primary", elem_id="import-take", min_width=130)
        said = gr.HTML(engine_views.said(""), elem_id="import-said", apply_default_css=False)
    return Block(file, part, trusted, look, take, said)


def read_path(value: Any) -> Path:
    """Read the path of a file.

    Raises:
        InvalidRequestError: if it is none.
    """
    text = value.strip().strip("\"'") if isinstance(value, str) else ""
    if not text or not text.isprintable() or len(text) > _LONGEST_PATH:
        raise InvalidRequestError("file", "No engine file is named.", f"Give the whole path of a {_KINDS} file.")
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # "~somebody", who has no home here
        path = Path(text)
    if not path.is_absolute():
        raise InvalidRequestError(
            "file",
            f"The path {text[:80]} is not whole.",
            f"Give it from the top, as in {Path.home() / 'transformer.plan'}.",
        )
    return path


def read_part(value: Any, spec: ModelSpec) -> str | None:
    """Read which component a file is to stand for; `None` is any.

    Raises:
        InvalidRequestError: if the model has none such.
    """
    if value == AUTO:
        return None
    if value not in spec.component_names:
        title = acceleration.TITLES.get(value, "such part") if isinstance(value, str) else "such part"
        raise InvalidRequestError("part", f"{spec.title} has no {title.lower()}.", "Choose another part, or Automatic.")
    return str(value)


def check_trusted(value: Any, path: Path) -> None:
    """Refuse to open a file of which nobody said that it is trusted, or that another user put there.

    Raises:
        InvalidRequestError: unless that was ticked.
        EngineError: for the file of another user.
    """
    if value is not True:
        raise InvalidRequestError(
            "trusted", f"Opening {path.name} runs what it holds.", "Tick that you trust it, if you do; else leave it."
        )
    if os.name == "posix" and path.stat().st_uid not in {os.getuid(), _ADMINISTRATOR}:
        raise EngineError(
            f"{path.name} belongs to another user of this machine.",
            "Make a copy of it that is yours, or import it with `engines import` on the command line.",
        )
