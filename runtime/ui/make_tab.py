"""The tab Make: prompt, player and settings, their events, and the handlers of the owner's page.

The visitors' page has the tab too. Programs can call the handlers: every value is validated.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import gradio as gr

from runtime.core.errors import InvalidRequestError, TandemError
from runtime.models.spec import ModelSpec
from runtime.queue.job_queue import JobQueue
from runtime.queue.views import Job
from runtime.server.model_choices import check_offered
from runtime.ui import form, job_view
from runtime.ui.formatting import page_text, render
from runtime.ui.job_view import Audience

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
Updates = tuple[Any, ...]

logger = logging.getLogger(__name__)


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
    handlers: "Handlers",
    controls: dict[str, Any],
    others: dict[str, Any],
) -> None:
    """Connect the controls with the handlers.

    Args:
        controls: of the form, by name, in the order of `handlers.names`.
        others: what else depends on the model, by name, in the order of `handlers.others`.
    """
    inputs, shown, targets = list(controls.values()), make.shown, others | controls
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
    following = [targets[name] for name in handlers.following_model]
    controls["model"].input(handlers.choose_model, controls["model"], following, preprocess=False, **SERVED)
    for button, example in make.examples:
        button.click(**LOCAL, outputs=make.prompt, js=f"() => {json.dumps(example)}")
    make.facts.select(**LOCAL, outputs=controls["seed"], js="() => String(window.tandem.used.seed)")
    # Both fill the whole form, including the model's sizes and limits.
    back: dict[str, Any] = {"inputs": make.remembered, "outputs": list(targets.values()), "preprocess": False}
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


class Handlers:
    """The handlers of the owner's page. A view of a job updates `MakeControls.shown`; the names are of outputs.

    Args:
        audience: of the page; it says where details of internal errors are.
        preset: the launch flags' backends, see `form.preset_name`.
        gpus: returns how many GPUs can be chosen.
    """

    names: Sequence[str] = form.NAMES
    others: Sequence[str] = ("size", *form.ROWS)

    def __init__(
        self,
        worker: JobQueue,
        models: dict[str, ModelSpec],
        audience: Audience,
        icon: str,
        preset: str = "",
        gpus: Callable[[], int] = lambda: 1,
    ) -> None:
        self._worker = worker
        self._models = models
        self.audience = audience
        self._icon = icon
        self._preset = preset
        self._gpus = gpus

    @property
    def following_model(self) -> tuple[str, ...]:
        """The outputs of `choose_model`."""
        return (*self.others, *(name for name in form.FOLLOWING_MODEL if name in self.names))

    async def generate(self, request: gr.Request, *values: Any) -> AsyncIterator[Updates]:
        """Submit the form as a job and show it until it ends; errors are shown next to the picture."""
        try:
            job = await asyncio.to_thread(self._submit, values, request)
        except TandemError as error:
            yield self._alert(error)
            return
        except Exception as error:  # an internal error: one line on the page, the traceback in the log
            logger.exception("The form could not be submitted")
            what = f"Internal error: {error!r}" if self.audience.panels else "Internal error."
            yield self._shown_alert(what, self.audience.details)
            return
        async for updates in self._follow(job):
            yield updates

    async def attach(self, request: gr.Request, remembered: Any) -> AsyncIterator[Updates]:
        """Show the job of this browser tab while it runs, else another that runs, else the last one."""

        def shown() -> Job | None:
            owner, job = self._owner(request), self._job(remembered, request)
            return (
                job if job is not None and job.open else self._worker.active(owner) or job or self._worker.latest(owner)
            )

        try:
            job = await asyncio.to_thread(shown)
        except TandemError as error:
            yield self._alert(error)
            return
        if job is None:
            # A generator that yields nothing would clear the outputs.
            yield _unchanged(7)
            return
        async for updates in self._follow(job):
            yield updates

    def cancel(self, request: gr.Request, watched: Any) -> Any:
        """Cancel the job that this page watches; return the update of the button."""
        job = self._job(watched, request)
        if job is None or not job.open:
            return gr.skip()
        job.request_cancel()
        return gr.update(value="Stopping…", interactive=False)

    def choose_model(self, name: Any) -> Updates:
        """Set size, length and the other controls that depend on the model to its defaults."""
        try:
            values = self.model_values(check_offered(name, self._models))
        except TandemError:
            return _unchanged(len(self.following_model))
        return tuple(gr.update(**values[output]) for output in self.following_model)

    def fill(self, stored: Any) -> Updates:
        """Fill the form with stored values or the settings of a result: JSON by control or field of the request."""
        outputs = (*self.others, *self.names)
        try:
            values = json.loads(stored)
        except (TypeError, ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            return _unchanged(len(outputs))
        filled = form.filled(values, self._models, self._preset, self._gpus())
        filled = self._limited(self._models[filled["model"]["value"]], filled)
        return tuple(gr.update(**filled[output]) for output in outputs)

    def model_values(self, spec: ModelSpec) -> dict[str, dict[str, Any]]:
        """Return the properties of all outputs that depend on the model."""
        return self._limited(spec, form.model_values(spec))

    def _submit(self, values: Sequence[Any], _request: gr.Request) -> Job:
        return self._worker.submit(form.read(values, self._models))

    def _owner(self, _request: gr.Request) -> str | None:
        """Return whose jobs the sender of a request sees; `None` stands for the owner of this Tandem."""
        return None

    def _job(self, job_id: Any, _request: gr.Request) -> Job | None:
        """Return a job that the sender of a request may see."""
        return self._worker.job(job_id) if isinstance(job_id, str) and job_id else None

    def _limited(self, _spec: ModelSpec, values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the controls' properties within the limits of this page's users."""
        return values

    async def _follow(self, job: Job) -> AsyncIterator[Updates]:
        """Yield the updates of a page that shows a job, until the job ends."""
        before: job_view.View | None = None
        async for view in job_view.follow_views(job, self._worker, self.audience, self._icon):
            yield _updates(view, before)
            before = view

    def _alert(self, error: TandemError) -> Updates:
        what, remedy = map(self.audience.redact, page_text(error.fact))
        return self._shown_alert(what, remedy, error.field if isinstance(error, InvalidRequestError) else "")

    def _shown_alert(self, what: str, remedy: str, field: str = "") -> Updates:
        """Return updates that show an error and leave everything else unchanged."""
        line = job_view.Line("failed", what=what, remedy=remedy, field=field)
        return (gr.skip(), job_view.status_html(line, panels=self.audience.panels), *_unchanged(5))


def _updates(view: job_view.View, before: job_view.View | None) -> Updates:
    """Return the updates from one view to the next."""

    def changed(name: str) -> Any:
        value = getattr(view, name)
        return gr.skip() if before is not None and getattr(before, name) == value else value

    buttons = _unchanged(2)
    if before is None or (before.busy, before.stopping) != (view.busy, view.stopping):
        title = "Stopping…" if view.stopping else "Cancel"
        buttons = (
            gr.update(visible=not view.busy),
            gr.update(visible=view.busy, value=title, interactive=not view.stopping),
        )
    return (changed("picture"), changed("status"), changed("facts"), *buttons, changed("job_id"), changed("job_id"))


def _unchanged(count: int) -> Updates:
    return (gr.skip(),) * count
