"""The page: its parts, and how they are connected. What the connections do is in `handlers`."""

from typing import Any

import gradio as gr

from runtime.core.settings import Settings
from runtime.engines.service import EngineService
from runtime.queue.downloads import Downloads
from runtime.queue.service import JobQueue
from runtime.server.model_choices import offered
from runtime.ui import (
    acceleration,
    api,
    engine_import,
    engine_views,
    form,
    jobs_tabs,
    model_downloads,
    sharing_status,
    theme,
)
from runtime.ui.engines_tab import Library
from runtime.ui.handlers import Handlers
from runtime.ui.jobs_controller import JobsController
from runtime.ui.make_tab import LOCAL, SERVED, connect, connect_basics, header, make
from runtime.ui.plan_preview import Foresight
from runtime.ui.sharing import Sharing

# gradio's own temporary files are looked at hourly and kept a day; videos are not among them.
_TIDY_SECONDS = (3600, 86_400)
# How often the Engines tab looks while it is shown; it draws only what has changed.
_LOOK_SECONDS = 1.0


def build(
    worker: JobQueue,
    engines: EngineService,
    settings: Settings,
    sharing: Sharing | None = None,
    downloads: Downloads | None = None,
) -> gr.Blocks:
    """Return the page, with `/generate` for programs.

    Args:
        sharing: the share link, where there is one; the page says how it is and stops it.
        downloads: fetches models.

    Raises:
        ModelError: if the model that Tandem was started with cannot be used.
    """
    models = offered(settings)
    icon = theme.icon_svg()
    foresight = Foresight(engines, worker.machine, worker.history, settings.weights_dir)
    preset = form.preset_name(settings.backends)
    handlers = Handlers(worker, models, settings.log_file, icon, foresight, preset)
    library = Library(worker, engines, models, foresight)
    more = model_downloads.MoreModels(downloads or Downloads(settings), models, settings)

    def settings_column(prompt: gr.Textbox) -> tuple[form.Settings, model_downloads.Block]:
        column = form.settings_group(models, settings.model, prompt, foresight.machine(), settings.backends)
        return column, model_downloads.block()

    with gr.Blocks(title="Tandem", analytics_enabled=False, fill_width=True, delete_cache=_TIDY_SECONDS) as page:
        # First, so that the name is its own: gradio numbers later ones.
        gr.api(api.endpoint(worker, models, settings.model), api_name="generate", concurrency_limit=None)
        gr.HTML(header(icon, form.NAMES, preset), elem_id="top")
        if sharing is not None:
            sharing_status.make(page, sharing)
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Make", id="make", elem_id="tab-make") as make_tab:
                studio, (made, offering) = make(icon, settings_column)
            jobs_parts = jobs_tabs.make()
            with gr.Tab("Engines", id="engines", elem_id="tab-engines") as engines_tab:
                said = gr.HTML(engine_views.said(""), elem_id="library-said", apply_default_css=False)
                parts = _shelf("parts")
                bringing = engine_import.block()
                shelves = [parts, *map(_shelf, ("work", "disk", "table"))]
        controls, size, rows = made.controls, made.size, made.panel.rows.values()
        inputs = list(controls.values())
        connect(page, studio, handlers, controls, [size, *rows, *made.following_model], [size, *rows, *inputs])
        connect_basics(controls, size, made.length)
        _connect_choices(made)
        _connect_panel(handlers, made)
        drawn = _connect_library(library, inputs, [*shelves, said], make_tab, engines_tab)
        _connect_import(library, inputs, bringing, [*shelves, bringing.said, drawn])
        model_downloads.connect(page, more, offering, controls["model"])
        jobs_tabs.connect(JobsController(worker, models, settings.outputs_dir), jobs_parts, inputs, SERVED)
    page.queue(default_concurrency_limit=None)
    return page


def _shelf(name: str) -> gr.HTML:
    return gr.HTML("", elem_id=f"library-{name}", apply_default_css=False)


def _connect_choices(made: form.Settings) -> None:
    """Keep toggles in step with the choices that they mirror, and take a way to hold the weights from its button."""
    controls, panel = made.controls, made.panel
    for name, toggle in panel.toggles.items():
        choice = controls[f"backend_{name}"]
        toggle.input(**LOCAL, inputs=toggle, outputs=choice, js=f"(on) => on ? '{acceleration.TENSORRT}' : 'auto'")
        choice.change(**LOCAL, inputs=choice, outputs=toggle, js=f"(name) => name === '{acceleration.TENSORRT}'")
    panel.choose_way.click(
        **LOCAL, outputs=[controls["offload"], controls["quantization"]], js="() => window.tandem.way"
    )


def _connect_panel(handlers: Handlers, made: form.Settings) -> None:
    """Say what Generate would do, when the script asks: once the form has rested, one question after the other."""
    question = gr.Textbox("", visible="hidden", elem_id="question", label="Number of the question")
    answered = gr.Textbox("", visible="hidden", elem_id="answered", label="Number of the question answered")
    gr.Button("Look ahead", visible="hidden", elem_id="look-ahead").click(
        handlers.look_ahead,
        [question, *made.controls.values()],
        [*made.panel.shown, answered],
        js="(_, ...values) => [window.tandem.question(), ...values]",
        preprocess=False,
        trigger_mode="multiple",
        queue=False,
        **SERVED,
    )
    answered.change(**LOCAL, inputs=answered, js="(answer) => window.tandem.answered(answer)")


def _connect_library(
    library: Library, inputs: list[Any], shown: list[Any], make_tab: gr.Tab, engines_tab: gr.Tab
) -> gr.Textbox:
    """Show the library while its tab is open, and do what its buttons say; return what views are compared with.

    Args:
        shown: where a view goes, but for what it is compared with the next time.
    """
    drawn = gr.Textbox("", visible="hidden", elem_id="drawn", label="What the library shows")
    asked = gr.Textbox("", visible="hidden", elem_id="asked", label="What a button of the library says")
    act = gr.Button("Act", visible="hidden", elem_id="act")
    tick = gr.Timer(_LOOK_SECONDS, active=False)
    look: dict[str, Any] = {"inputs": [drawn, *inputs], "outputs": [*shown, drawn], "preprocess": False}
    tick.tick(library.look, **look, trigger_mode="once", **SERVED)
    engines_tab.select(library.look, **look, **SERVED)
    engines_tab.select(lambda: gr.Timer(active=True), None, tick, **SERVED)
    make_tab.select(lambda: gr.Timer(active=False), None, tick, **SERVED)
    # Engines may have come or gone meanwhile.
    make_tab.select(**LOCAL, js="() => window.tandem.lookAhead()")
    act.click(
        library.act,
        [asked, *inputs],
        [*shown, drawn],
        js="(_, ...values) => [window.tandem.asked(), ...values]",
        preprocess=False,
        trigger_mode="multiple",
        **SERVED,
    )
    return drawn


def _connect_import(library: Library, inputs: list[Any], block: engine_import.Block, shown: list[Any]) -> None:
    """Look into files and import them; another file has to be trusted anew."""
    block.file.input(**LOCAL, outputs=block.trusted, js="() => false")
    given: dict[str, Any] = {"inputs": [*block.inputs, *inputs], "outputs": shown, "preprocess": False}
    for handler, events in (
        (library.look_into, (block.look.click, block.file.submit)),
        (library.take, (block.take.click,)),
    ):
        for event in events:
            event(handler, **given, trigger_mode="once", **SERVED)
