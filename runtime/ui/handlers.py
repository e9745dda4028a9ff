"""The handlers of Make: submit, watch, cancel, fill the form. Programs can call them too; every value is validated."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import gradio as gr

from runtime.core.errors import InvalidRequestError, TandemError
from runtime.core.events import VideoSaved
from runtime.models.spec import ModelSpec
from runtime.planner.parallelism import usable_gpus
from runtime.queue.service import Job, JobQueue
from runtime.server.model_choices import check_offered
from runtime.ui import form, job_view
from runtime.ui.job_view import Audience
from runtime.ui.plan_preview import PlanPreview
from runtime.ui.result_view import file_url
from runtime.ui.words import page_text

Updates = tuple[Any, ...]

logger = logging.getLogger(__name__)


class Handlers:
    """The handlers. A view updates: picture, status, facts, Generate, Cancel, the watched job, its id."""

    def __init__(
        self,
        worker: JobQueue,
        models: dict[str, ModelSpec],
        log_file: Path,
        icon: str,
        preview: PlanPreview,
        preset: str,
    ) -> None:
        self._worker = worker
        self._models = models
        self._audience = Audience(f"The log has the details: {log_file}", _address)
        self._icon = icon
        self._preview = preview
        self._preset = preset

    async def generate(self, *values: Any) -> AsyncIterator[Updates]:
        """Submit the form as a job and show it until it ends; errors are shown next to the picture."""
        try:
            job = await asyncio.to_thread(self._worker.submit, form.read(values, self._models))
        except TandemError as error:
            field = error.field if isinstance(error, InvalidRequestError) else ""
            yield alert(*page_text(error.fact), field)
            return
        except Exception as error:  # an internal error: one line on the page, the traceback in the log
            logger.exception("The form could not be submitted")
            yield alert(f"Internal error: {error!r}", self._audience.details)
            return
        async for updates in updates_of(job, self._worker, self._audience, self._icon):
            yield updates

    async def attach(self, remembered: Any) -> AsyncIterator[Updates]:
        """Show the job of this browser tab while it runs, else another that runs, else the last result."""

        def own() -> Job | None:
            return self._worker.job(remembered) if isinstance(remembered, str) and remembered else None

        async for updates in attached(own, self._worker, self._audience, self._icon):
            yield updates

    def cancel(self, watched: Any) -> Any:
        """Cancel the job that this page watches."""
        return cancelled(self._worker.job(watched) if isinstance(watched, str) else None)

    def choose_model(self, name: Any) -> Updates:
        """Set size, length and the rest to the defaults of another model."""
        try:
            values = form.model_values(check_offered(name, self._models))
        except TandemError:
            return (gr.skip(),) * (1 + len(form.ROWS) + len(form.FOLLOWING_MODEL))
        return tuple(gr.update(**values[control]) for control in ("size", *form.ROWS, *form.FOLLOWING_MODEL))

    def fill(self, stored: Any) -> Updates:
        """Fill the form with stored values or the settings of a result: JSON by field of the request."""
        values = stored_values(stored)
        if values is None:
            return (gr.skip(),) * (1 + len(form.ROWS) + len(form.NAMES))
        gpus = len(usable_gpus(self._preview.machine()))
        filled = form.filled(values, self._models, self._preset, gpus)
        return tuple(gr.update(**filled[control]) for control in ("size", *form.ROWS, *form.NAMES))


def stored_values(stored: Any) -> dict[str, Any] | None:
    """Return the values of a stored form, `None` if it is not one."""
    try:
        values = json.loads(stored)
    except (TypeError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def cancelled(job: Job | None) -> Any:
    """Cancel a job; return the update of its button."""
    if job is None or not job.open:
        return gr.skip()
    job.request_cancel()
    return gr.update(value="Stopping…", interactive=False)


async def updates_of(job: Job, worker: JobQueue, audience: Audience, icon: str) -> AsyncIterator[Updates]:
    """Yield the updates of a page that shows a job, until the job ends."""
    before: job_view.View | None = None
    async for view in job_view.follow_views(job, worker, audience, icon):
        yield _updates(view, before)
        before = view


async def attached(
    own: Callable[[], Job | None], worker: JobQueue, audience: Audience, icon: str, visitor: str | None = None
) -> AsyncIterator[Updates]:
    """Show a page's own job while it runs, else another that runs, else the last one.

    Args:
        own: finds the page's job; called in a thread because the job store may be slow.
        visitor: whose jobs are shown; `None` for the owner's.
    """

    def shown() -> Job | None:
        job = own()
        return job if job is not None and job.open else worker.active(visitor) or job or worker.latest(visitor)

    try:
        job = await asyncio.to_thread(shown)
    except TandemError as error:
        what, remedy = map(audience.redact, page_text(error.fact))
        yield alert(what, remedy, panels=visitor is None)
        return
    if job is None:
        # A generator that yields nothing would clear the outputs.
        yield (gr.skip(),) * 7
        return
    async for updates in updates_of(job, worker, audience, icon):
        yield updates


def _address(job: Job) -> str:
    saved = job.progress.end
    return file_url(saved.video) if isinstance(saved, VideoSaved) else ""


def _updates(view: job_view.View, before: job_view.View | None) -> Updates:
    """Return the updates from one view to the next."""

    def changed(name: str) -> Any:
        value = getattr(view, name)
        return gr.skip() if before is not None and getattr(before, name) == value else value

    buttons: tuple[Any, Any] = (gr.skip(), gr.skip())
    if before is None or (before.busy, before.stopping) != (view.busy, view.stopping):
        buttons = (
            gr.update(visible=not view.busy),
            gr.update(
                visible=view.busy, value="Stopping…" if view.stopping else "Cancel", interactive=not view.stopping
            ),
        )
    return (changed("picture"), changed("status"), changed("facts"), *buttons, changed("job_id"), changed("job_id"))


def alert(what: str, remedy: str, field: str = "", *, panels: bool = True) -> Updates:
    """Return updates that show an error and leave everything else unchanged.

    Args:
        panels: see `job_view.status_html`.
    """
    line = job_view.Line("failed", what=what, remedy=remedy, field=field)
    return (gr.skip(), job_view.status_html(line, panels=panels), *(gr.skip(),) * 5)
