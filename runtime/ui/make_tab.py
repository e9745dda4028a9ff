"""Make: prompt, player and settings, and their events. The owner's and the visitors' page both have it."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import gradio as gr

from runtime.ui import form, job_view
from runtime.ui.templating import render

_FACTS_SCRIPT = """
element.addEventListener('click', (event) => {
  const button = event.target.closest('[data-use]');
  if (button) {
    window.tandem.use(button.dataset.request);
    trigger(button.dataset.use === 'seed' ? 'select' : 'submit');
  }
});
"""

# Events that the browser handles alone.
LOCAL: dict[str, Any] = {"fn": None, "show_progress": "hidden", "api_visibility": "private", "queue": False}
# Events that the server handles. Any number of pages may watch at once.
SERVED: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "concurrency_limit": None}

Created = TypeVar("Created")


class MakeHandlers(Protocol):
    """Handlers of Make; see `handlers.Handlers`. Those of the visitors' page take the request first."""

    @property
    def generate(self) -> Callable[..., Any]:
        """Submit the form as a job and show it."""

    @property
    def attach(self) -> Callable[..., Any]:
        """Show the job of this browser tab."""

    @property
    def cancel(self) -> Callable[..., Any]:
        """Cancel the watched job."""

    @property
    def choose_model(self) -> Callable[..., Any]:
        """Set the controls that depend on the model."""

    @property
    def fill(self) -> Callable[..., Any]:
        """Fill the form."""


@dataclass
class MakeControls:
    """The controls other than settings.

    Attributes:
        examples: buttons with their prompts.
        watched, remembered: the job that this page shows: on the server for Cancel, and in the browser tab for reloads.
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
        """The outputs of a view of a job, in the order of the handlers' updates."""
        return [
            self.picture, self.status, self.facts, self.generate, self.cancel, self.watched, self.remembered,
        ]  # fmt: skip


def make(icon: str, settings: Callable[[gr.Textbox], Created], *, panels: bool = True) -> tuple[MakeControls, Created]:
    """Create the controls in columns.

    Args:
        settings: creates the settings; it is given the prompt.
        panels: whether the page has the panels, which add to the queue and resume jobs.
    """
    with gr.Row(elem_id="columns"):
        with gr.Column(elem_id="compose"):
            prompt, examples = form.compose()
            with gr.Row(elem_id="actions"):
                generate = gr.Button("Generate", variant="primary", size="lg", elem_id="generate")
                cancel = gr.Button("Cancel", size="lg", elem_id="cancel", visible=False)
            gr.HTML(render("make_actions.html", panels=panels), elem_id="actions-more", apply_default_css=False)
        with gr.Column(elem_id="stage"):
            picture = gr.HTML(job_view.picture_html(None, "idle", icon), elem_id="picture")
            status = gr.HTML(job_view.status_html(job_view.IDLE, panels=panels), elem_id="status")
            facts = gr.HTML("", elem_id="facts", js_on_load=_FACTS_SCRIPT)
        with gr.Column(elem_id="settings"):
            created = settings(prompt)
    watched = gr.State(None)
    remembered = gr.Textbox("", visible="hidden", elem_id="remembered", label="Job of this tab")
    attach_again = gr.Button("Watch again", visible="hidden", elem_id="attach")
    return (
        MakeControls(prompt, examples, generate, cancel, picture, status, facts, watched, remembered, attach_again),
        created,
    )


def connect(
    page: gr.Blocks,
    make: MakeControls,
    handlers: MakeHandlers,
    controls: dict[str, Any],
    following_model: Sequence[Any],
    whole: Sequence[Any],
) -> None:
    """Connect the controls with the handlers.

    Args:
        controls: of the form, by name.
        following_model, whole: outputs of `choose_model` and `fill`, in their order.
    """
    inputs, shown = list(controls.values()), make.shown
    # The handler validates the values as the browser sent them (preprocess=False).
    make.generate.click(handlers.generate, inputs, shown, preprocess=False, trigger_mode="once", **SERVED)
    make.cancel.click(handlers.cancel, make.watched, make.cancel, **SERVED)
    page.load(handlers.attach, make.remembered, shown, js="() => window.tandem.job()", **SERVED)
    # An answer that was lost with its stream must not block the next attempt.
    make.attach_again.click(
        handlers.attach,
        make.remembered,
        shown,
        js="() => window.tandem.job()",
        trigger_mode="multiple",
        **SERVED,
    )
    make.remembered.change(**LOCAL, inputs=make.remembered, js="(id) => window.tandem.remember(id)")
    controls["model"].input(handlers.choose_model, controls["model"], list(following_model), preprocess=False, **SERVED)
    for button, example in make.examples:
        button.click(**LOCAL, outputs=make.prompt, js=f"() => {json.dumps(example)}")
    make.facts.select(**LOCAL, outputs=controls["seed"], js="() => String(window.tandem.used.seed)")
    # Both fill the whole form, including the model's sizes and limits.
    back: dict[str, Any] = {"inputs": make.remembered, "outputs": list(whole), "preprocess": False}
    make.facts.submit(handlers.fill, **back, js="() => JSON.stringify(window.tandem.used)", **SERVED)
    page.load(handlers.fill, **back, js="() => window.tandem.stored()", **SERVED).then(
        **LOCAL, inputs=inputs, js="(...values) => window.tandem.startKeeping(values)"
    )


def connect_basics(controls: dict[str, Any], size: gr.Radio, length: gr.HTML) -> None:
    """Synchronise size, length and the stored form in the browser, without the server.

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
    """Return the page's header.

    Args:
        fields: the names of the form's controls in order, for the script that stores their values.
        preset: the launch flags' backends, see `form.preset_name`.
    """
    return render("header.html", icon=icon, fields=" ".join(fields), preset=preset)
