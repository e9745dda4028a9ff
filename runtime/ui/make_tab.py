"""The tab Make: prompt, player and settings, their events, and the handlers of the owner's page.

The visitors' page has the tab too. Programs can call the handlers: every value is validated.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import gradio as gr

from runtime.core.errors import InvalidRequestError, TandemError
from runtime.core.events import VideoSaved
from runtime.models.catalogue import check_offered
from runtime.models.other_programs import read_settings
from runtime.models.spec import ModelSpec
from runtime.queue.job_queue import JobQueue
from runtime.queue.views import Job
from runtime.server.watchers import MOST_WATCHERS, Watchers
from runtime.ui import form, image_places, job_view, restored, stage, theme
from runtime.ui.form import LOCAL, SERVED, WATCHING, Form
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

Updates = tuple[Any, ...]

# The name by which the middleware knows the button Generate; `/generate` is the function for programs.
SUBMITS = "make"

logger = logging.getLogger(__name__)


def add_make(
    page: gr.Blocks,
    handlers: "Handlers",
    chosen: str,
    advanced: Callable[[Mapping[str, Mapping[str, Any]]], Form],
    extras: Mapping[str, Any] | None = None,
    no_enhancer: str | None = None,
) -> Form:
    """Create form, picture and status, and connect them with the handlers.

    Args:
        chosen: the model that is selected at start.
        advanced: creates the controls of the panel Advanced; it is given the properties of what depends on the model.
        extras: more outputs that depend on the model, by name; `handlers.others` has the names of all.
        no_enhancer: see `form.prompt_section`.
    """
    panels, models = handlers.audience.panels, handlers.models
    values = handlers.model_values(models[chosen])
    with gr.Row(elem_id="columns"):
        with gr.Column(elem_id="compose"):
            words = form.prompt_section(values, no_enhancer)
            refused = gr.HTML(render("restored.html", refused=None, at=0), elem_id="refused", apply_default_css=False)
            with gr.Column(elem_id="bar"):
                if panels:
                    gr.HTML(render("forecast.html"), elem_id="forecast", apply_default_css=False)
                with gr.Row(elem_id="actions"):
                    generate = gr.Button("Generate", variant="primary", size="lg", elem_id="generate")
                    if panels:
                        gr.HTML(render("queue_next.html"), elem_id="queue-next", apply_default_css=False)
                    cancel = gr.Button("Cancel", size="lg", elem_id="cancel", visible=False)
        with gr.Column(elem_id="stage"):
            gr.HTML(render("examples.html", examples=theme.examples()), elem_id="examples", apply_default_css=False)
            picture = gr.HTML(job_view.picture_html(None, "idle", handlers.icon), elem_id="picture")
            status = gr.HTML(job_view.status_html(job_view.IDLE, panels=panels), elem_id="status")
            gr.HTML(render("transport.html"), elem_id="transport", apply_default_css=False)
            facts = gr.HTML("", elem_id="facts", js_on_load=_FACTS_SCRIPT)
            gr.HTML("<div data-export-place></div>", elem_id="stage-export", apply_default_css=False)
            if panels:
                gr.HTML(render("results.html"), elem_id="recent", apply_default_css=False)
        with gr.Column(elem_id="settings"):
            form.file_section()
            more = advanced(values)
    chosen_by_chips = form.popovers(models, chosen, values, panels=panels)
    created = form.joined([words, chosen_by_chips, more])
    # The job that this page shows. No `gr.State`: gradio's page keeps a connection for it, of the browser's six.
    remembered = gr.Textbox("", visible="hidden", elem_id="remembered", label="Job of this tab")
    player = _Player(picture, status, facts, generate, cancel, remembered)
    _connect_player(page, handlers, list(created.controls.values()), player)
    _connect_form(page, handlers, created, {**(extras or {}), **created.others}, player, refused)
    _add_image_questions(handlers)
    return created


class _Player(NamedTuple):
    """What shows a job, with its buttons."""

    picture: gr.HTML
    status: gr.HTML
    facts: gr.HTML
    generate: gr.Button
    cancel: gr.Button
    remembered: gr.Textbox


def _connect_player(page: gr.Blocks, handlers: "Handlers", inputs: list[Any], player: _Player) -> None:
    """Connect what begins, ends and shows jobs."""
    attach = gr.Button("Watch again", visible="hidden", elem_id="attach")
    show = gr.Button("Show a video", visible="hidden", elem_id="show")
    outputs, remembered = list(player), player.remembered
    # The handlers validate the values as the browser sent them (preprocess=False).
    once: dict[str, Any] = {"preprocess": False, "trigger_mode": "once", "api_name": SUBMITS}
    player.generate.click(handlers.generate, inputs, outputs, **once, **WATCHING)
    player.cancel.click(handlers.cancel, player.remembered, player.cancel, **SERVED)
    stored_job: dict[str, Any] = {"inputs": remembered, "outputs": outputs, "js": "() => window.tandem.job()"}
    page.load(handlers.attach, **stored_job, **WATCHING)
    # A lost answer must not block the next attempt.
    attach.click(handlers.attach, **stored_job, trigger_mode="multiple", **WATCHING)
    selected_job = stored_job | {"js": "() => window.tandem.selected()"}
    show.click(handlers.show, **selected_job, trigger_mode="multiple", **WATCHING)
    remembered.change(**LOCAL, inputs=remembered, js="(id) => window.tandem.remember(id)")


def _connect_form(
    page: gr.Blocks, handlers: "Handlers", created: Form, extras: Mapping[str, Any], player: _Player, refused: gr.HTML
) -> None:
    """Connect what fills the form, and what stores its values.

    Args:
        extras: the outputs that are no controls, by name.
        refused: shows the settings that could not be restored.
    """
    controls, inputs = created.controls, list(created.controls.values())
    outputs = {**extras, **controls}
    dependent = [outputs[name] for name in handlers.following_model]
    controls["model"].input(
        handlers.choose_model, [controls["model"], controls["image"]], dependent, preprocess=False, **SERVED
    )
    player.facts.select(**LOCAL, outputs=controls["seed"], js="() => String(window.tandem.used.seed)")
    # Pressed by the script when something that is no control of Gradio's changes the form; see `apply` in form.js.
    apply = gr.Button("Apply", visible="hidden", elem_id="apply")
    apply.click(**LOCAL, outputs=inputs, js="() => window.tandem.applied()")
    # Both fill the whole form, including the model's sizes and limits.
    fill: dict[str, Any] = {"inputs": player.remembered, "outputs": list(outputs.values()), "preprocess": False}
    restore: dict[str, Any] = fill | {"outputs": [*outputs.values(), refused]}
    player.facts.submit(handlers.restore, **restore, js="() => JSON.stringify(window.tandem.used)", **SERVED)
    page.load(handlers.fill, **fill, js="() => window.tandem.stored()", **SERVED).then(
        **LOCAL, inputs=inputs, js="(...values) => window.tandem.startKeeping(values)"
    )
    # Only Gradio has all values, and reading them takes long: the script does so once for several changes.
    keep = gr.Button("Keep the form", visible="hidden", elem_id="keep-form")
    keep.click(**LOCAL, inputs=inputs, js="(...values) => window.tandem.save(values)")
    for control in inputs:
        control.change(**LOCAL, js="() => window.tandem.changed()")


def _add_image_questions(handlers: "Handlers") -> None:
    """Connect the questions of the images' script; see `image_places`."""
    ask_image = gr.Button("Ask about an image", visible="hidden", elem_id="ask-image")
    answer = gr.Textbox("", visible="hidden", label="About an image")
    question: dict[str, Any] = {"inputs": answer, "outputs": answer, "js": "() => window.tandem.imageAsked()"}
    ask_image.click(handlers.image, **question, trigger_mode="multiple", **SERVED).then(
        **LOCAL, inputs=answer, js="(text) => window.tandem.imageAnswered(text)"
    )


def header(icon: str, fields: Iterable[str], defaults: str, preset: str = "", *, panels: bool = True) -> str:
    """Return the page's header, with what opens over the page.

    Args:
        fields: the names of the form's controls in order, for the script that stores their values.
        defaults: the choice of the default model and size, see `form.defaults_html`.
        preset: the launch flags' backends, see `form.preset_name`.
        panels: whether the page has the panels, which notice that a job has ended.
    """
    names = " ".join(fields)
    return render("header.html", icon=icon, fields=names, defaults=defaults, preset=preset, panels=panels)


class Handlers:
    """The handlers of the owner's page.

    Attributes:
        names: of the form's controls, in order.
        others: names of the other outputs that depend on the model, in order.

    Args:
        models: what the page offers, by name.
        audience: of the page; it says where details of internal errors are.
        images: answers what the script of the images asks.
        preset: the launch flags' backends, see `form.preset_name`.
        gpus: returns how many GPUs can be chosen.
        watchers: of the page.
    """

    names: Sequence[str] = form.NAMES
    others: Sequence[str] = form.OTHERS

    def __init__(
        self,
        worker: JobQueue,
        models: dict[str, ModelSpec],
        audience: Audience,
        icon: str,
        images: image_places.ImageAnswers,
        preset: str = "",
        gpus: Callable[[], int] = lambda: 1,
        watchers: Watchers | None = None,
    ) -> None:
        self._worker = worker
        self.models = models
        self.audience = audience
        self.icon = icon
        self._images = images
        self.preset = preset
        self._gpus = gpus
        self._watchers = watchers or Watchers(MOST_WATCHERS)

    @property
    def following_model(self) -> tuple[str, ...]:
        """The outputs of `choose_model`."""
        return (*self.others, *(name for name in form.FOLLOWING_MODEL if name in self.names))

    async def submit(self, values: Sequence[Any], visitor: str) -> object:
        """Submit the form as a job; return the job, or why there is none. The middleware calls this for `SUBMITS`."""
        try:
            return await asyncio.to_thread(self._submit, values, visitor)
        except TandemError as error:
            return error
        except Exception as error:  # an internal error: one line on the page, the traceback in the log
            logger.exception("The form could not be submitted")
            return error

    async def generate(self, request: gr.Request, *_values: Any) -> AsyncIterator[Updates]:
        """Show the job that was submitted until it ends; errors are shown next to the picture."""
        job = request.request.state.submitted
        if isinstance(job, TandemError):
            yield self._alert(job)
        elif isinstance(job, Exception):
            what = f"Internal error: {job!r}" if self.audience.panels else "Internal error."
            yield self._shown_alert(what, self.audience.details)
        else:
            async for updates in self._follow(job, request):
                yield updates

    async def attach(self, request: gr.Request, remembered: Any) -> AsyncIterator[Updates]:
        """Show the job of this browser tab while it runs, else another that runs, else the last one."""

        def find_job() -> Job | None:
            owner, job = self._owner(request), self._job(remembered, request)
            if job is not None and (job.open or any(member.open for member, _ in self._worker.group(job))):
                return job
            return self._worker.active(owner) or job or self._worker.latest(owner, self._shows)

        try:
            job = await asyncio.to_thread(find_job)
        except TandemError as error:
            yield self._alert(error)
            return
        if job is None:
            # A generator that yields nothing would clear the outputs.
            yield _unchanged(6)
            return
        async for updates in self._follow(job, request):
            yield updates

    def _shows(self, job: Job) -> bool:
        """Return whether the stage has something of a job: `generate --out` may have put its video elsewhere."""
        return not isinstance(job.progress.end, VideoSaved) or bool(self.audience.address(job))

    async def show(self, request: gr.Request, remembered: Any) -> AsyncIterator[Updates]:
        """Show one job, even while another runs; without one, show that there is none."""
        try:
            job = await asyncio.to_thread(self._job, remembered, request)
        except TandemError as error:
            yield self._alert(error)
            return
        if job is None:  # the last one was deleted
            picture = job_view.picture_html(None, "idle", self.icon)
            status = job_view.status_html(job_view.IDLE, panels=self.audience.panels)
            yield (picture, status, "", gr.update(visible=True), gr.update(visible=False), "")
            return
        async for updates in self._follow(job, request):
            yield updates

    def cancel(self, request: gr.Request, shown: Any) -> Any:
        """Cancel the job that this page shows, with its group; return the update of the button."""
        job = self._job(shown, request)
        jobs = [] if job is None else [job, *(member for member, _ in self._worker.group(job))]
        ids = dict.fromkeys(member.id for member in jobs if member.open)
        if not ids:
            return gr.skip()
        self._worker.cancel(ids)
        return gr.update(value="Stopping…", interactive=False)

    def image(self, request: gr.Request, question: Any) -> str:
        """Answer what the script of the images asks, JSON with JSON; see `image_places`."""
        values = _read_object(question) or {}
        try:
            answer = self._images.answer(values, self._job(values.get("job"), request), self._owner(request) or "")
        except TandemError as error:
            answer = image_places.error_answer(error, self.audience.redact)
        return json.dumps({"id": values.get("id"), **answer})

    def choose_model(self, name: Any, image: Any) -> Updates:
        """Set size, length and the other controls that depend on the model to its defaults."""
        try:
            values = self.model_values(check_offered(name, self.models), from_image=bool(image))
        except TandemError:
            return _unchanged(len(self.following_model))
        return tuple(gr.update(**values[output]) for output in self.following_model)

    def fill(self, stored: Any) -> Updates:
        """Fill the form with stored values: JSON by control or field of the request. What it cannot show is skipped."""
        values = _read_object(stored)
        return _unchanged(len(self._outputs)) if values is None else self._filled(form.as_typed(values))[0]

    def restore(self, stored: Any) -> Updates:
        """Fill the form with the settings of a video or a file, and list those that were not applied."""
        values = _read_object(stored)
        if values is None:
            return _unchanged(len(self._outputs) + 1)
        if isinstance(values.get("tags"), dict):  # of a file that another program made
            settings, refused = restored.usable_of(read_settings(values["tags"]), self.models)
        else:
            settings, refused = restored.usable(form.as_typed(values), self.models)
        updates, filled = self._filled(settings)
        refused += restored.replaced(settings, filled, self.names)
        return (*updates, render("restored.html", refused=refused, at=time.monotonic_ns()))

    @property
    def _outputs(self) -> tuple[str, ...]:
        return (*self.others, *self.names)

    def _filled(self, values: Mapping[str, Any]) -> tuple[Updates, Mapping[str, Mapping[str, Any]]]:
        """Return the updates that fill the form, and the controls' properties by name."""
        filled = form.filled(values, self.models, self.preset, self._gpus())
        filled = self._limited(self.models[filled["model"]["value"]], filled)
        return tuple(gr.update(**filled[output]) for output in self._outputs), filled

    def model_values(self, spec: ModelSpec, *, from_image: bool = False) -> dict[str, dict[str, Any]]:
        """Return the properties of all outputs that depend on the model; see `form.model_values`."""
        return self._limited(spec, form.model_values(spec, self.models, from_image=from_image))

    def _submit(self, values: Sequence[Any], _visitor: str) -> Job:
        return self._worker.submit(form.read(values, self.models))

    def _owner(self, _request: gr.Request) -> str | None:
        """Return whose jobs the sender of a request sees; `None` stands for the owner of this Tandem."""
        return None

    def _job(self, job_id: Any, _request: gr.Request) -> Job | None:
        """Return a job that the sender of a request may see."""
        return self._worker.job(job_id) if isinstance(job_id, str) and job_id else None

    def _limited(self, _spec: ModelSpec, values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the controls' properties within the limits of this page's users."""
        return values

    async def _follow(self, job: Job, request: gr.Request) -> AsyncIterator[Updates]:
        """Yield the updates of a page that shows a job, until the job ends or newer pages take the page's place."""
        before: job_view.View | None = None
        with self._watchers.watching(self._owner(request) or "", request.session_hash or "") as watch:
            async for view in stage.follow_views(job, self._worker, self.audience, self.icon, watch):
                yield _updates(view, before)
                before = view
        if watch.reason is not None:
            yield self._shown_alert(*page_text(watch.reason))

    def _alert(self, error: TandemError) -> Updates:
        what, remedy = map(self.audience.redact, page_text(error.fact))
        return self._shown_alert(what, remedy, error.field if isinstance(error, InvalidRequestError) else "")

    def _shown_alert(self, what: str, remedy: str, field: str = "") -> Updates:
        """Return updates that show an error and leave everything else unchanged."""
        line = job_view.Line("failed", what=what, remedy=remedy, field=field)
        return (gr.skip(), job_view.status_html(line, panels=self.audience.panels), *_unchanged(4))


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
    return (changed("picture"), changed("status"), changed("facts"), *buttons, changed("job_id"))


def _read_object(stored: Any) -> dict[str, Any] | None:
    """Return the object in a JSON text; `None` if there is none."""
    try:
        values = json.loads(stored)
    except (TypeError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def _unchanged(count: int) -> Updates:
    return (gr.skip(),) * count
