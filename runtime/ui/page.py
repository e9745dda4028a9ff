"""The owner's page: its parts and how they are connected, and the routes of its panels."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr
from starlette.routing import BaseRoute

from runtime.core.batches import MOST_AXES
from runtime.core.cancel import never
from runtime.core.facts import Fact
from runtime.core.images import ImageUse, VideoUse
from runtime.core.settings import LOOPBACK, Settings
from runtime.engines.imported.importing import WARNING
from runtime.engines.service import EngineService
from runtime.machine.probe import has_screen
from runtime.models.catalogue import add_usable, decoders, offered
from runtime.models.images import keep_image
from runtime.models.registry import finishing_models
from runtime.models.spec import ModelSpec
from runtime.models.videos import keep_video
from runtime.planner.placement import usable_gpus
from runtime.queue.enhancing import Enhancements
from runtime.queue.job_queue import JobQueue
from runtime.queue.model_tasks import ModelTasks
from runtime.server import image_uploads, latent_uploads
from runtime.server.security import Submit
from runtime.ui import api, control_preview, exports, form, panels, theme
from runtime.ui.cluster_panel import ClusterPanel
from runtime.ui.decode_panel import DecodePanel
from runtime.ui.engines_panel import FILE_KINDS, EnginesPanel, plan_problem
from runtime.ui.enhancer_panel import EnhancerPanel
from runtime.ui.form import LOCAL, SERVED
from runtime.ui.formatting import page_text, paragraph, render
from runtime.ui.history_panel import FILTERS, HistoryPanel
from runtime.ui.image_places import ImageAnswers
from runtime.ui.job_view import Audience, clip_address, video_address
from runtime.ui.loras_panel import LorasPanel
from runtime.ui.make_tab import SUBMITS, Handlers, add_make, header
from runtime.ui.models_panel import ModelsPanel
from runtime.ui.plan_panel import PreviewPanel
from runtime.ui.plan_preview import PlanPreview
from runtime.ui.queue_panel import GRID_FIELDS, MAX_VARIATIONS, QueuePanel
from runtime.ui.results_panel import ResultsPanel
from runtime.ui.settings_panel import SettingsPanel
from runtime.ui.sharing import Sharing, add_sharing_bar

if TYPE_CHECKING:  # imports ray
    from runtime.server.cluster.head import ClusterHead

# Gradio checks its own temporary files hourly and keeps them a day; videos are not among them.
_TIDY_SECONDS = (3600, 86_400)


def build(
    worker: JobQueue,
    engines: EngineService,
    settings: Settings,
    sharing: Sharing | None,
    model_tasks: ModelTasks,
    head: "ClusterHead | None" = None,
) -> tuple[gr.Blocks, Mapping[str, Submit], list[BaseRoute]]:
    """Return the page, with `/generate` for programs, what submits its jobs, and the routes of its panels.

    Args:
        sharing: the share link, if there is one.
        head: of the cluster, if there is one.

    Raises:
        ModelError: if the model that Tandem was started with cannot be used.
    """
    models = offered(settings.model, settings.weights_dir)
    # Engines are built on this machine; videos may be planned for another one.
    builds = PlanPreview(engines, worker.machine, worker.history, settings.weights_dir)
    preview = (
        builds if head is None else PlanPreview(engines, worker.planned_machine, worker.history, settings.weights_dir)
    )
    opens_folders = settings.host in LOOPBACK and has_screen()
    keep = _keeping(settings)
    handlers = Handlers(
        worker,
        models,
        _audience(settings, opens_folders=opens_folders),
        theme.icon_svg(),
        ImageAnswers(settings, keep, models, preview.machine, pictures=True),
        form.preset_name(settings.backends),
        lambda: len(usable_gpus(preview.machine())),
    )
    enhancements = Enhancements(worker, settings)
    no_enhancer = enhancements.problem()
    page = _blocks(
        handlers,
        settings,
        sharing,
        plan_problem(builds.machine()),
        "" if no_enhancer is None else paragraph(no_enhancer),
        clustered=head is not None,
    )

    def frame_decoders() -> list[ModelSpec]:
        return decoders(settings.weights_dir)

    def of_single_frames() -> list[ModelSpec]:
        return [*decoders(settings.weights_dir), *finishing_models(settings.weights_dir)]

    submissions = {"generate": api.submission(worker, models, settings.model), SUBMITS: handlers.submit}
    routes = panels.routes(
        {
            "preview": PreviewPanel(preview, models, worker.store, settings.weights_dir),
            "queue": QueuePanel(worker, models, settings.outputs_dir),
            "results": ResultsPanel(worker, models, settings.outputs_dir, opens_folders=opens_folders),
            "history": HistoryPanel(worker, models, settings.outputs_dir),
            "engines": EnginesPanel(worker, engines, models, builds, of_single_frames),
            "decode": DecodePanel(worker, models, frame_decoders, settings, opens_folders=opens_folders),
            "models": ModelsPanel(model_tasks, models, settings, preview, worker),
            "loras": LorasPanel(models, settings.weights_dir),
            "enhancer": EnhancerPanel(enhancements, models),
            "settings": SettingsPanel(worker, engines.store, models, settings, sharing),
            **({} if head is None else {"cluster": ClusterPanel(head.view, worker, settings)}),
        }
    )
    routes += exports.routes(exports.owners_video(worker, settings))
    routes += control_preview.routes(preview, models)
    uploads = image_uploads.routes(keep, keep_video=_keeping_videos(settings))
    return page, submissions, [*routes, *uploads, *latent_uploads.routes(settings.latents_dir)]


def _audience(settings: Settings, *, opens_folders: bool) -> Audience:
    return Audience(
        f"The log has the details: {settings.log_file}",
        lambda job: video_address(job, settings.outputs_dir),
        clip_address,
        opens_folders=opens_folders,
    )


def _blocks(
    handlers: Handlers,
    settings: Settings,
    sharing: Sharing | None,
    no_engines: Fact | None,
    no_enhancer: str,
    *,
    clustered: bool,
) -> gr.Blocks:
    """Return the page with its tabs.

    Args:
        no_engines: why TensorRT's engines cannot run here.
        no_enhancer: why prompts cannot be enhanced; empty if they can.
        clustered: whether there is a cluster.
    """

    def advanced(values: Mapping[str, Mapping[str, Any]]) -> form.Form:
        sampling, finishing = form.sampling_section(values), form.finishing_section()
        return form.joined([sampling, finishing, form.acceleration_section(settings.backends), form.loras_section()])

    with gr.Blocks(title="Tandem", analytics_enabled=False, fill_width=True, delete_cache=_TIDY_SECONDS) as page:
        # First, so that the name is its own: gradio numbers later ones.
        gr.api(api.endpoint(settings.model), api_name="generate", **form.STREAMED)
        defaults = form.defaults_html(handlers.models)
        gr.HTML(header(handlers.icon, form.NAMES, defaults, handlers.preset), elem_id="top")
        if sharing is not None:
            add_sharing_bar(page, sharing)
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Make", id="make", elem_id="tab-make"):
                created = add_make(page, handlers, settings.model, advanced, no_enhancer=no_enhancer)
            with gr.Tab("Queue", id="queue", elem_id="tab-queue"):
                _panel("queue", max_variations=MAX_VARIATIONS, grid_fields=GRID_FIELDS, most_axes=MOST_AXES)
            with gr.Tab("History", id="history", elem_id="tab-history"):
                _panel("history", filters=FILTERS)
            with gr.Tab("Models", id="models", elem_id="tab-models"):
                _panel("models", count=len(handlers.models), weights_dir=settings.weights_dir)
                _panel("decode", latents_dir=settings.latents_dir)
            with gr.Tab("Engines", id="engines", elem_id="tab-engines"):
                lacks = "" if no_engines is None else page_text(no_engines).what
                _panel("engines", kinds=FILE_KINDS, lacks=lacks, warning=paragraph(WARNING))
            if clustered:
                with gr.Tab("Cluster", id="cluster", elem_id="tab-cluster"):
                    _panel("cluster")
        _panel("comparison")
        _panel("mask")
        # The panels' script reads the form with this button; see `formValues` in panels.js.
        gr.Button("Read the form", visible="hidden", elem_id="read-form").click(
            **LOCAL, inputs=list(created.controls.values()), js="(...values) => window.tandem.formRead(values)"
        )
        _connect_models(page, handlers, created, settings.weights_dir)
    return page


def _connect_models(page: gr.Blocks, handlers: Handlers, created: form.Form, weights_dir: Path) -> None:
    """Connect what lists the models and what chooses one."""
    fields, models = created.controls, handlers.models

    def model_choices() -> Any:
        add_usable(models, weights_dir)
        named = form.model_choices(models)
        return gr.update(choices=named, visible=len(named) > 1)

    # Pressed by the script when a model was downloaded; a new page lists models that were added since the start.
    refresh = gr.Button("List the models", visible="hidden", elem_id="refresh-models")
    refresh.click(model_choices, None, fields["model"], **SERVED)
    page.load(model_choices, None, fields["model"], **SERVED)

    def use_model(name: Any, image: Any) -> tuple[Any, ...]:
        chosen = {"value": name} if isinstance(name, str) and name in models else {}  # a page may send anything
        return (model_choices() | chosen, *handlers.choose_model(name, image))

    # Pressed by the script for "Use" in Models.
    outputs = created.others | fields
    gr.Button("Choose the model", visible="hidden", elem_id="choose-model").click(
        use_model,
        [fields["model"], fields["image"]],
        [fields["model"], *(outputs[name] for name in handlers.following_model)],
        js="(_model, image) => [window.tandem.chosenModel, image]",
        preprocess=False,
        **SERVED,
    )


def _keeping(settings: Settings) -> image_uploads.Keep:
    def keep(data: bytes, name: str, visitor: str, check: Callable[[], None] = never) -> ImageUse:
        del visitor
        return keep_image(data, name, "image", settings.cache_dir, check=check)

    return keep


def _keeping_videos(settings: Settings) -> image_uploads.KeepVideo:
    def keep(data: bytes, name: str, check: Callable[[], None] = never) -> VideoUse:
        return keep_video(data, name, settings.cache_dir, check=check)

    return keep


def _panel(name: str, **values: Any) -> None:
    """Add the element that the script fills with a panel."""
    gr.HTML(render(f"{name}.html", **values), elem_id=f"panel-{name}", apply_default_css=False)
