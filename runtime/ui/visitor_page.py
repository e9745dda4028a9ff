"""The visitors' page of a share link: Make within limits; visitors see only their own videos.

It is a page of its own on another port: actions that visitors may not use do not exist there. Programs can call its
handlers too; every value is validated.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gradio as gr

from runtime.core.request import FIELDS
from runtime.core.settings import Settings
from runtime.models.spec import ModelSpec
from runtime.queue.job_queue import JobQueue
from runtime.queue.views import Job
from runtime.server.security import Submit
from runtime.server.visitor_limits import allows_size, defaults_within, describe_limits, limits_of, most_frames
from runtime.server.visitors import Visitors, private_folders, without_paths
from runtime.server.watchers import Watchers
from runtime.ui import api, form, theme
from runtime.ui.formatting import render
from runtime.ui.image_places import ImageAnswers, places_html
from runtime.ui.job_view import Audience
from runtime.ui.make_tab import SUBMITS, Handlers, add_make, header

_DETAILS = "Tell the person who shares this page; their log has the details."
_TIDY_SECONDS = (3600, 86_400)
# Pages and programs of one visitor that follow videos; at least as many as the videos that they may have open.
_WATCHERS = 4


def build(
    worker: JobQueue, settings: Settings, models: dict[str, ModelSpec], visitors: Visitors
) -> tuple[gr.Blocks, Mapping[str, Submit], Callable[[str], str]]:
    """Return the page with `/generate` for programs, what submits its jobs, and what removes paths from messages.

    Args:
        models: what visitors may use, by name; the first is chosen.
    """
    icon = theme.icon_svg()
    watchers = Watchers(max(_WATCHERS, settings.share_queue))
    handlers = VisitorHandlers(worker, settings, models, visitors, icon, watchers)
    chosen = next(iter(models))
    with gr.Blocks(title="Tandem", analytics_enabled=False, fill_width=True, delete_cache=_TIDY_SECONDS) as page:
        # First, so that the name is its own: gradio numbers later ones.
        gr.api(
            api.visitors_endpoint(watchers, visitor_of, handlers.audience, chosen),
            api_name="generate",
            **form.STREAMED,
        )
        defaults = form.defaults_html(models, handlers.sizes)
        gr.HTML(header(icon, form.BASIC_NAMES, defaults, panels=False), elem_id="top")
        values = handlers.model_values(models[chosen])
        limits = gr.HTML(**values["limits"], elem_id="limits", apply_default_css=False)
        add_make(page, handlers, chosen, form.sampling_section, {"limits": limits})
    submissions = {"generate": api.visitors_submission(visitors, handlers.audience, chosen), SUBMITS: handlers.submit}
    return page, submissions, handlers.audience.redact


class VisitorHandlers(Handlers):
    """The handlers of the visitors' page. The request identifies the visitor."""

    names = form.BASIC_NAMES
    others = ("limits", *form.OTHERS)

    def __init__(
        self,
        worker: JobQueue,
        settings: Settings,
        models: dict[str, ModelSpec],
        visitors: Visitors,
        icon: str,
        watchers: Watchers,
    ) -> None:
        folders = private_folders(settings)
        redact = partial(without_paths, folders=folders)
        audience = Audience(_DETAILS, _address, _clip_address, redact, panels=False)
        images = ImageAnswers(settings, visitors.keep_image, models, worker.machine, pictures=False)
        super().__init__(worker, models, audience, icon, images, watchers=watchers)
        self._settings = settings
        self._visitors = visitors

    def _submit(self, values: Sequence[Any], visitor: str) -> Job:
        return self._visitors.submit(form.read_basics(values, self.models), visitor)

    def _owner(self, request: gr.Request) -> str:
        return visitor_of(request)

    def _job(self, job_id: Any, request: gr.Request) -> Job | None:
        return self._visitors.job(job_id, visitor_of(request))

    def sizes(self, spec: ModelSpec) -> list[tuple[int, int]]:
        """Return the sizes of a model that visitors may use."""
        limits = limits_of(self._settings, spec)
        return [size for size in spec.sizes if allows_size(size, limits)]

    def _limited(self, spec: ModelSpec, values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        limits = limits_of(self._settings, spec)
        defaults = defaults_within(spec, limits)
        # A value that is restored stays as it is; if it is above the limit, Generate refuses it and says why.
        for name, highest in (("frames", most_frames(spec, limits)), ("steps", limits.steps)):
            info = values[name].get("info", FIELDS[name].help)
            values[name]["info"] = f"{info} At most {highest}."
        for name, within in defaults.items():
            if values[name]["value"] == getattr(spec.defaults, name):
                values[name]["value"] = within
        lengths = [count for count in spec.frame_counts if count <= most_frames(spec, limits)]
        values["card"] = {"value": form.card_html(spec, panels=False)}
        values["images"] = {"value": places_html(spec, self.models, videos=False)}
        values["sizes"] = {"value": form.sizes_html(self.sizes(spec))}
        values["lengths"] = {"value": form.lengths_html(lengths, spec.defaults.fps, spec)}
        values["limits"] = {"value": render("visitor_limits.html", limits=describe_limits(limits))}
        return values


def visitor_of(request: gr.Request) -> str:
    """Return the visitor who sent a request, as the middleware identified them."""
    return str(request.request.user.display_name)


def _address(job: Job) -> str:
    """Return where a visitor's video is served: no path of this machine's."""
    return f"video/{job.id}.mp4"


def _clip_address(job: Job, count: int) -> str:
    """Return where the clip of the finished sections or frames of a visitor's video is served."""
    return f"video/{job.id}-{count}.mp4"
