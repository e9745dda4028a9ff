"""The page: its parts, and how they are connected. What the connections do is in `handlers`."""

import json
from typing import Any

import gradio as gr

from runtime.core.settings import Settings
from runtime.jobs.worker import Worker
from runtime.ui import api, form, stage, theme
from runtime.ui.handlers import Handlers
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


def build(worker: Worker, settings: Settings) -> gr.Blocks:
    """Return the page, with `/generate` for programs.

    Raises:
        ModelError: if the model that Tandem was started with cannot be used.
    """
    models = offered(settings)
    icon = theme.icon_svg()
    handlers = Handlers(worker, models, settings.log_file, icon)
    with gr.Blocks(title="Tandem", analytics_enabled=False, fill_width=True, delete_cache=_TIDY_SECONDS) as page:
        # First, so that the name is its own: gradio numbers later ones.
        gr.api(api.endpoint(worker, models, settings.model), api_name="generate", concurrency_limit=None)
        gr.HTML(_header(icon), elem_id="top")
        with gr.Row(elem_id="columns"):
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
                inputs, size, length = form.settings_group(models, settings.model, prompt)
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
            handlers.choose_model, inputs.model, [size, *inputs.following_model], preprocess=False, **_SERVED
        )
        for button, example in examples:
            button.click(**_LOCAL, outputs=prompt, js=f"() => {json.dumps(example)}")
        _connect_form(inputs, size, length)
        facts.select(**_LOCAL, outputs=inputs.seed, js="() => String(window.tandem.used.seed)")
        # Both bring a whole form back, and the model's own sizes and limits with it.
        whole: dict[str, Any] = {"inputs": remembered, "outputs": [size, *inputs.controls], "preprocess": False}
        facts.submit(handlers.fill, **whole, js="() => JSON.stringify(window.tandem.used)", **_SERVED)
        page.load(handlers.fill, **whole, js="() => window.tandem.stored()", **_SERVED).then(
            **_LOCAL, js="() => window.tandem.startKeeping()"
        )
    page.queue(default_concurrency_limit=None)
    return page


def _header(icon: str) -> str:
    return (
        f"<header>{icon}<h1>Tandem</h1><p>{_TAGLINE}</p>"
        '<button type="button" class="button" id="theme">Dark</button></header>'
        '<p id="offline" role="alert"></p>'
    )


def _connect_form(inputs: form.Form, size: gr.Radio, length: gr.HTML) -> None:
    """Keep size, length and the browser's memory of the form in step, without asking the server."""
    sides = [inputs.width, inputs.height]
    size.input(
        **_LOCAL, inputs=[size, *sides], outputs=sides, js="(size, w, h) => window.tandem.sizeChosen(size, w, h)"
    )
    for side in sides:
        side.change(**_LOCAL, inputs=[size, *sides], outputs=size, js="(size, w, h) => window.tandem.sizeTyped(w, h)")
    timing = [inputs.frames, inputs.fps]
    for part in timing:
        part.change(**_LOCAL, inputs=timing, outputs=length, js="(frames, fps) => window.tandem.length(frames, fps)")
    for control in inputs.controls:
        control.change(**_LOCAL, inputs=inputs.controls, js="(...values) => window.tandem.save(values)")
