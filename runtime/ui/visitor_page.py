"""The visitors' page of a share link: Make within limits; visitors see only their own videos.

It is a page of its own on another port: actions that visitors may not use do not exist there. Programs can call its
handlers too; every value is validated.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import gradio as gr

from runtime.core.errors import InvalidRequestError, TandemError
from runtime.core.settings import ROOT, Settings
from runtime.models.spec import ModelSpec
from runtime.queue.service import Job, JobQueue
from runtime.server import visitor_limits
from runtime.server.model_choices import check_offered
from runtime.server.visitors import Visitors
from runtime.ui import api, form, theme
from runtime.ui.handlers import Updates, alert, attached, cancelled, stored_values, updates_of
from runtime.ui.job_view import Audience
from runtime.ui.make_tab import connect, connect_basics, header, make
from runtime.ui.templating import render
from runtime.ui.words import page_text

_DETAILS = "Tell the person who shares this page; their log has the details."
_TIDY_SECONDS = (3600, 86_400)
_MOST_WAITING = 200

logger = logging.getLogger(__name__)


def build(worker: JobQueue, settings: Settings, models: dict[str, ModelSpec], visitors: Visitors) -> gr.Blocks:
    """Return the page, with `/generate` for visitors' programs.

    Args:
        models: what visitors may use, by name; the first is chosen.
    """
    icon = theme.icon_svg()
    handlers = VisitorHandlers(worker, settings, models, visitors, icon)
    chosen = next(iter(models))
    with gr.Blocks(title="Tandem", analytics_enabled=False, fill_width=True, delete_cache=_TIDY_SECONDS) as page:
        # First, so that the name is its own: gradio numbers later ones.
        gr.api(
            api.visitors_endpoint(visitors, visitor_of, handlers.audience, chosen),
            api_name="generate",
            concurrency_limit=None,
        )
        gr.HTML(header(icon, form.BASIC), elem_id="top")
        limits = gr.HTML(handlers.limits(models[chosen]), elem_id="limits", apply_default_css=False)
        values = handlers.values(models[chosen])
        make_controls, basics = make(
            icon, lambda prompt: form.basic_settings(models, chosen, prompt, values), panels=False
        )
        controls = basics.controls
        following = [controls[name] for name in form.FOLLOWING_MODEL if name in controls]
        connect(
            page,
            make_controls,
            handlers,
            controls,
            [limits, basics.size, *following],
            [limits, basics.size, *controls.values()],
        )
        connect_basics(controls, basics.size, basics.length)
    page.queue(default_concurrency_limit=None, max_size=_MOST_WAITING)
    return page


class VisitorHandlers:
    """The handlers of Make; see `handlers.Handlers`. The request identifies the visitor."""

    def __init__(
        self, worker: JobQueue, settings: Settings, models: dict[str, ModelSpec], visitors: Visitors, icon: str
    ) -> None:
        self._worker = worker
        self._settings = settings
        self._models = models
        self._visitors = visitors
        self._icon = icon
        folders = {"the folder of videos": settings.outputs_dir, "the cache folder": settings.cache_dir}
        folders |= {"the folder of models": settings.weights_dir, "the folder of engines": settings.engines_dir}
        folders |= {"Tandem's folder": ROOT, "the home folder": Path.home()}
        self.audience = Audience(
            _DETAILS, _address, lambda message: visitor_limits.without_paths(message, folders), panels=False
        )

    async def generate(self, request: gr.Request, *values: Any) -> AsyncIterator[Updates]:
        """Submit the form as the visitor's job and show it; errors are shown next to the picture."""
        try:
            job = await asyncio.to_thread(
                self._visitors.submit, form.read_basics(values, self._models), visitor_of(request)
            )
        except TandemError as error:
            field = error.field if isinstance(error, InvalidRequestError) else ""
            what, remedy = map(self.audience.redact, page_text(error.fact))
            yield alert(what, remedy, field, panels=False)
            return
        except Exception:  # an internal error: one line on the page, the traceback in the log
            logger.exception("A visitor's form could not be submitted")
            yield alert("Internal error.", _DETAILS, panels=False)
            return
        async for updates in updates_of(job, self._worker, self.audience, self._icon):
            yield updates

    async def attach(self, request: gr.Request, remembered: Any) -> AsyncIterator[Updates]:
        """Show the visitor's job of this browser tab while it runs, else another that runs, else the last one."""
        visitor = visitor_of(request)

        def own() -> Job | None:
            return self._visitors.job(remembered, visitor)

        async for updates in attached(own, self._worker, self.audience, self._icon, visitor):
            yield updates

    def cancel(self, request: gr.Request, watched: Any) -> Any:
        """Cancel the visitor's job that this page watches."""
        return cancelled(self._visitors.job(watched, visitor_of(request)))

    def choose_model(self, name: Any) -> Updates:
        """Set the limits and all controls that depend on the model."""
        names = ("size", *(name for name in form.FOLLOWING_MODEL if name in form.BASIC))
        try:
            spec = check_offered(name, self._models)
        except TandemError:
            return (gr.skip(),) * (1 + len(names))
        values = self.values(spec)
        return self.limits(spec), *(gr.update(**values[control]) for control in names)

    def fill(self, stored: Any) -> Updates:
        """Fill the form with stored values or the settings of a result, within the limits."""
        values = stored_values(stored)
        if values is None:
            return (gr.skip(),) * (2 + len(form.BASIC))
        filled = form.filled(values, self._models)
        spec = self._models[filled["model"]["value"]]
        filled = self._within(spec, filled)
        return self.limits(spec), *(gr.update(**filled[control]) for control in ("size", *form.BASIC))

    def limits(self, spec: ModelSpec) -> str:
        """Return the limits as HTML."""
        limits = visitor_limits.describe(visitor_limits.limits_of(self._settings, spec))
        return render("visitor_limits.html", limits=limits)

    def values(self, spec: ModelSpec) -> dict[str, dict[str, Any]]:
        """Return the properties of the controls that depend on the model, within the limits."""
        return self._within(spec, form.model_values(spec))

    def _within(self, spec: ModelSpec, values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        limits = visitor_limits.limits_of(self._settings, spec)
        own = visitor_limits.defaults_within(spec, limits)
        most = {"frames": visitor_limits.most_frames(spec, limits), "steps": limits.steps}
        for name, highest in most.items():
            # A slider needs two ends.
            values[name]["maximum"] = max(highest, 2)
            values[name]["value"] = min(values[name]["value"], highest)
        size = (values["width"]["value"], values["height"]["value"])
        if not visitor_limits.allows_size(size, limits):
            size = (own["width"], own["height"])
        values["width"]["value"], values["height"]["value"] = size
        fitting = {f"{w}x{h}" for w, h in spec.sizes if visitor_limits.allows_size((w, h), limits)} | {form.CUSTOM}
        choices = [choice for choice in values["size"]["choices"] if choice[1] in fitting]
        values["size"] |= {"choices": choices, "value": form.size_value(spec, *size)}
        if values["size"]["value"] not in fitting:
            values["size"]["value"] = form.CUSTOM
        return values


def visitor_of(request: gr.Request) -> str:
    """Return the visitor who sent a request, as the middleware identified them."""
    return str(request.request.user.display_name)


def _address(job: Job) -> str:
    """Return where a visitor's video is served: no path of this machine's."""
    return f"video/{job.id}.mp4"
