"""The part of a page where videos are made: prompt, stage and settings, and how they are connected.

Both pages have it, that of the person whose Tandem this is and that of visitors; each with handlers of its own.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import gradio as gr

from runtime.ui import form, player, queue_view

_FACTS_SCRIPT = """
element.addEventListener('click', (event) => {
  const button = event.target.closest('[data-use]');
  if (button) {
    window.tandem.use(button.dataset.request);
    trigger(button.dataset.use === 'seed' ? 'select' : 'submit');
  }
});
"""
_TAGLINE = "A sentence becomes a video, on this machine."

# Events that the browser handles alone.
LOCAL: dict[str, Any] = {"fn": None, "show_progress": "hidden", "api_visibility": "private", "queue": False}
# Events that the server handles. Any number of pages may watch at once.
SERVED: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "concurrency_limit": None}

Made = TypeVar("Made")


class Makes(Protocol):
    """Handlers of a page where videos are made; see `handlers.Handlers`.

    Each takes what the page sends, a visitors' page the request before it, and returns updates for what it is connected
    with below.
    """

    @property
    def generate(self) -> Callable[..., Any]:
        """Submit the form as a job, and show it."""

    @property
    def attach(self) -> Callable[..., Any]:
        """Show the job of this tab."""

    @property
    def cancel(self) -> Callable[..., Any]:
        """Stop the job that is watched."""

    @property
    def choose_model(self) -> Callable[..., Any]:
        """Set what follows the model."""

    @property
    def fill(self) -> Callable[..., Any]:
        """Bring a form back."""


@dataclass
class Studio:
    """What is on the page beside the settings.

    Attributes:
        examples: each button with its prompt.
        watched, remembered: the job that this page watches, on the server for Cancel and in the browser's tab for the
            next reload.
    """

    prompt: gr.Textbox
    examples: list[tuple[gr.Button, str]]
    generate: gr.Button
    cancel: gr.Button
    picture: gr.HTML
    status: gr.HTML
    facts: gr.HTML
    watched: gr.State
    remembered: gr.Textbox
    attach_again: gr.Button

    @property
    def shown(self) -> list[Any]:
        """What a view of a job goes to, in the order of the handlers' updates."""
        return [
            self.picture, self.status, self.facts, self.generate, self.cancel, self.watched, self.remembered,
        ]  # fmt: skip


def make(icon: str, settings: Callable[[gr.Textbox], Made], *, desk: bool = True) -> tuple[Studio, Made]:
    """Make it in columns.

    Args:
        settings: makes the settings, and is given the prompt.
        desk: whether the page has one, which adds to the queue and takes up jobs again.
    """
    with gr.Row(elem_id="columns"):
        with gr.Column(elem_id="compose"):
            prompt, examples = form.compose()
            with gr.Row(elem_id="actions"):
                generate = gr.Button("Generate", variant="primary", size="lg", elem_id="generate")
                cancel = gr.Button("Cancel", size="lg", elem_id="cancel", visible=False)
            gr.HTML(queue_view.beside(desk=desk), elem_id="beside", apply_default_css=False)
        with gr.Column(elem_id="stage"):
            picture = gr.HTML(player.picture(None, "idle", icon), elem_id="picture")
            status = gr.HTML(player.status(player.IDLE, desk=desk), elem_id="status")
            facts = gr.HTML("", elem_id="facts", js_on_load=_FACTS_SCRIPT)
        with gr.Column(elem_id="settings"):
            made = settings(prompt)
    watched = gr.State(None)
    remembered = gr.Textbox("", visible="hidden", elem_id="remembered", label="Job of this tab")
    attach_again = gr.Button("Watch again", visible="hidden", elem_id="attach")
    return (
        Studio(prompt, examples, generate, cancel, picture, status, facts, watched, remembered, attach_again),
        made,
    )


def connect(
    page: gr.Blocks,
    studio: Studio,
    handlers: Makes,
    controls: dict[str, Any],
    following_model: Sequence[Any],
    whole: Sequence[Any],
) -> None:
    """Connect it with its handlers.

    Args:
        controls: of the form, by name.
        following_model, whole: what `choose_model` and `fill` set, in their order.
    """
    inputs, shown = list(controls.values()), studio.shown
    # Values go to the handler as they come (preprocess=False): it answers for bad ones in its own words.
    studio.generate.click(handlers.generate, inputs, shown, preprocess=False, trigger_mode="once", **SERVED)
    studio.cancel.click(handlers.cancel, studio.watched, studio.cancel, **SERVED)
    page.load(handlers.attach, studio.remembered, shown, js="() => window.tandem.job()", **SERVED)
    studio.attach_again.click(handlers.attach, studio.remembered, shown, js="() => window.tandem.job()", **SERVED)
    studio.remembered.change(**LOCAL, inputs=studio.remembered, js="(id) => window.tandem.remember(id)")
    controls["model"].input(handlers.choose_model, controls["model"], list(following_model), preprocess=False, **SERVED)
    for button, example in studio.examples:
        button.click(**LOCAL, outputs=studio.prompt, js=f"() => {json.dumps(example)}")
    studio.facts.select(**LOCAL, outputs=controls["seed"], js="() => String(window.tandem.used.seed)")
    # Both bring a whole form back, and the model's own sizes and limits with it.
    back: dict[str, Any] = {"inputs": studio.remembered, "outputs": list(whole), "preprocess": False}
    studio.facts.submit(handlers.fill, **back, js="() => JSON.stringify(window.tandem.used)", **SERVED)
    page.load(handlers.fill, **back, js="() => window.tandem.stored()", **SERVED).then(
        **LOCAL, js="() => window.tandem.startKeeping()"
    )


def connect_basics(controls: dict[str, Any], size: gr.Radio, length: gr.HTML) -> None:
    """Keep size, length and the browser's memory of the form in step, without asking the server.

    Args:
        controls: of the form, by name.
    """
    sides = [controls["width"], controls["height"]]
    size.input(**LOCAL, inputs=[size, *sides], outputs=sides, js="(size, w, h) => window.tandem.sizeChosen(size, w, h)")
    for side in sides:
        side.change(**LOCAL, inputs=[size, *sides], outputs=size, js="(size, w, h) => window.tandem.sizeTyped(w, h)")
    timing = [controls["frames"], controls["fps"]]
    for part in timing:
        part.change(**LOCAL, inputs=timing, outputs=length, js="(frames, fps) => window.tandem.length(frames, fps)")
    for control in controls.values():
        control.change(**LOCAL, inputs=list(controls.values()), js="(...values) => window.tandem.save(values)")


def header(icon: str, fields: Iterable[str], preset: str = "") -> str:
    """Return the head of a page.

    Args:
        fields: the names of the form's controls in order, for the script that stores their values.
        preset: the launch flags' backends, see `form.preset_name`.
    """
    return (
        f'<header data-fields="{" ".join(fields)}" data-preset="{preset}">{icon}<h1>Tandem</h1><p>{_TAGLINE}</p>'
        '<button type="button" class="button" id="theme">Dark</button></header>'
        '<p id="offline" role="alert"></p>'
    )
