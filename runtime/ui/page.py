"""The page: its parts, and how they are connected. What the connections do is in `handlers`."""

import json
from typing import Any

import gradio as gr

from runtime.core.settings import Settings
from runtime.engines.service import EngineService
from runtime.jobs.worker import Worker
from runtime.ui import acceleration, api, form, shelf, stage, theme
from runtime.ui.foresight import Foresight
from runtime.ui.handlers import Handlers
from runtime.ui.library import Library
from runtime.ui.models import offered

_TAGLINE = "A sentence becomes a video, on this machine."
# gradio's own temporary files are looked at hourly and kept a day; videos are not among them.
_TIDY_SECONDS = (3600, 86_400)
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
_LOCAL: dict[str, Any] = {"fn": None, "show_progress": "hidden", "api_visibility": "private", "queue": False}
# Events that the server handles. Any number of pages may watch at once.
_SERVED: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "concurrency_limit": None}
# How often the Engines tab looks while it is shown; it draws only what has changed.
_LOOK_SECONDS = 1.0


def build(worker: Worker, engines: EngineService, settings: Settings) -> gr.Blocks:
    """Return the page, with `/generate` for programs.

    Raises:
        ModelError: if the model that Tandem was started with cannot be used.
    """
    models = offered(settings)
    icon = theme.icon_svg()
    foresight = Foresight(engines, worker.machine, worker.history)
    preset = form.preset_name(settings.backends)
    handlers = Handlers(worker, models, settings.log_file, icon, foresight, preset)
    library = Library(worker, engines, models, foresight)
    with gr.Blocks(title="Tandem", analytics_enabled=False, fill_width=True, delete_cache=_TIDY_SECONDS) as page:
        # First, so that the name is its own: gradio numbers later ones.
        gr.api(api.endpoint(worker, models, settings.model), api_name="generate", concurrency_limit=None)
        gr.HTML(_header(icon, preset), elem_id="top")
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Make", id="make", elem_id="tab-make") as make_tab, gr.Row(elem_id="columns"):
                with gr.Column(elem_id="compose"):
                    prompt, examples = form.compose()
                    with gr.Row(elem_id="actions"):
                        generate = gr.Button("Generate", variant="primary", size="lg", elem_id="generate")
                        cancel = gr.Button("Cancel", size="lg", elem_id="cancel", visible=False)
                with gr.Column(elem_id="stage"):
                    picture = gr.HTML(stage.picture(None, "idle", icon), elem_id="picture")
                    status = gr.HTML(stage.status(stage.IDLE), elem_id="status")
                    facts = gr.HTML("", elem_id="facts", js_on_load=_FACTS_SCRIPT)
                with gr.Column(elem_id="settings"):
                    made = form.settings_group(models, settings.model, prompt, foresight.machine(), settings.backends)
            with gr.Tab("Engines", id="engines", elem_id="tab-engines") as engines_tab:
                said = gr.HTML(shelf.said(""), elem_id="library-said", apply_default_css=False)
                shelves = [
                    gr.HTML("", elem_id=f"library-{name}", apply_default_css=False)
                    for name in ("parts", "work", "disk", "table")
                ]
        inputs, size = made.form, made.size
        # The job that this page watches: on the server for Cancel, and in the browser's tab for the next reload.
        watched = gr.State(None)
        remembered = gr.Textbox("", visible="hidden", elem_id="remembered", label="Job of this tab")
        attach_again = gr.Button("Watch again", visible="hidden", elem_id="attach")
        shown = [picture, status, facts, generate, cancel, watched, remembered]

        # Values go to the handler as they come (preprocess=False): it answers for bad ones in its own words.
        generate.click(handlers.generate, inputs.controls, shown, preprocess=False, trigger_mode="once", **_SERVED)
        cancel.click(handlers.cancel, watched, cancel, **_SERVED)
        page.load(handlers.attach, remembered, shown, js="() => window.tandem.job()", **_SERVED)
        attach_again.click(handlers.attach, remembered, shown, js="() => window.tandem.job()", **_SERVED)
        remembered.change(**_LOCAL, inputs=remembered, js="(id) => window.tandem.remember(id)")
        inputs.model.input(
            handlers.choose_model,
            inputs.model,
            [size, *made.panel.rows.values(), *inputs.following_model],
            preprocess=False,
            **_SERVED,
        )
        for button, example in examples:
            button.click(**_LOCAL, outputs=prompt, js=f"() => {json.dumps(example)}")
        _connect_form(made)
        _connect_panel(handlers, made)
        _connect_library(library, inputs, [*shelves, said], make_tab, engines_tab)
        facts.select(**_LOCAL, outputs=inputs.seed, js="() => String(window.tandem.used.seed)")
        # Both bring a whole form back, and the model's own sizes and limits with it.
        whole: dict[str, Any] = {
            "inputs": remembered,
            "outputs": [size, *made.panel.rows.values(), *inputs.controls],
            "preprocess": False,
        }
        facts.submit(handlers.fill, **whole, js="() => JSON.stringify(window.tandem.used)", **_SERVED)
        page.load(handlers.fill, **whole, js="() => window.tandem.stored()", **_SERVED).then(
            **_LOCAL, js="() => window.tandem.startKeeping()"
        )
    page.queue(default_concurrency_limit=None)
    return page


def _header(icon: str, preset: str) -> str:
    return (
        f'<header data-preset="{preset}">{icon}<h1>Tandem</h1><p>{_TAGLINE}</p>'
        '<button type="button" class="button" id="theme">Dark</button></header>'
        '<p id="offline" role="alert"></p>'
    )


def _connect_form(made: form.Settings) -> None:
    """Keep size, length, toggles and the browser's memory of the form in step, without asking the server."""
    inputs, size, panel = made.form, made.size, made.panel
    sides = [inputs.width, inputs.height]
    size.input(
        **_LOCAL, inputs=[size, *sides], outputs=sides, js="(size, w, h) => window.tandem.sizeChosen(size, w, h)"
    )
    for side in sides:
        side.change(**_LOCAL, inputs=[size, *sides], outputs=size, js="(size, w, h) => window.tandem.sizeTyped(w, h)")
    timing = [inputs.frames, inputs.fps]
    for part in timing:
        part.change(
            **_LOCAL, inputs=timing, outputs=made.length, js="(frames, fps) => window.tandem.length(frames, fps)"
        )
    for name, toggle in panel.toggles.items():
        choice = getattr(inputs, f"backend_{name}")
        toggle.input(**_LOCAL, inputs=toggle, outputs=choice, js=f"(on) => on ? '{acceleration.TENSORRT}' : 'auto'")
        choice.change(**_LOCAL, inputs=choice, outputs=toggle, js=f"(name) => name === '{acceleration.TENSORRT}'")
    for control in inputs.controls:
        control.change(**_LOCAL, inputs=inputs.controls, js="(...values) => window.tandem.save(values)")


def _connect_panel(handlers: Handlers, made: form.Settings) -> None:
    """Say what Generate would do, when the script asks: once the form has rested, one question after the other."""
    question = gr.Textbox("", visible="hidden", elem_id="question", label="Number of the question")
    answered = gr.Textbox("", visible="hidden", elem_id="answered", label="Number of the question answered")
    gr.Button("Look ahead", visible="hidden", elem_id="look-ahead").click(
        handlers.look_ahead,
        [question, *made.form.controls],
        [*made.panel.shown, answered],
        js="(_, ...values) => [window.tandem.question(), ...values]",
        preprocess=False,
        trigger_mode="multiple",
        queue=False,
        **_SERVED,
    )
    answered.change(**_LOCAL, inputs=answered, js="(answer) => window.tandem.answered(answer)")


def _connect_library(
    library: Library, inputs: form.Form, shown: list[Any], make_tab: gr.Tab, engines_tab: gr.Tab
) -> None:
    """Show the library while its tab is open, and do what its buttons say.

    Args:
        shown: where a view goes, but for what it is compared with the next time.
    """
    drawn = gr.Textbox("", visible="hidden", elem_id="drawn", label="What the library shows")
    asked = gr.Textbox("", visible="hidden", elem_id="asked", label="What a button of the library says")
    act = gr.Button("Act", visible="hidden", elem_id="act")
    tick = gr.Timer(_LOOK_SECONDS, active=False)
    look: dict[str, Any] = {"inputs": [drawn, *inputs.controls], "outputs": [*shown, drawn], "preprocess": False}
    tick.tick(library.look, **look, trigger_mode="once", **_SERVED)
    engines_tab.select(library.look, **look, **_SERVED)
    engines_tab.select(lambda: gr.Timer(active=True), None, tick, **_SERVED)
    make_tab.select(lambda: gr.Timer(active=False), None, tick, **_SERVED)
    # Engines may have come or gone meanwhile.
    make_tab.select(**_LOCAL, js="() => window.tandem.lookAhead()")
    act.click(
        library.act,
        [asked, *inputs.controls],
        [*shown, drawn],
        js="(_, ...values) => [window.tandem.asked(), ...values]",
        preprocess=False,
        trigger_mode="multiple",
        **_SERVED,
    )
