"""What the page's buttons do: submit, watch, cancel. They answer raw HTTP too, so none trusts what it is sent."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import gradio as gr

from runtime.core.errors import InvalidRequestError, TandemError
from runtime.core.events import VideoSaved
from runtime.core.request import COMPONENTS
from runtime.models.spec import ModelSpec
from runtime.planner.parallelism import usable_gpus
from runtime.queue.service import Job, JobQueue
from runtime.server.model_choices import check_offered
from runtime.ui import acceleration, form, job_stream, plan_summary, player
from runtime.ui.job_stream import Audience
from runtime.ui.plan_preview import Foresight
from runtime.ui.result_view import file_url

Updates = tuple[Any, ...]

_NUMBER = re.compile(r"[0-9]{1,12}")

logger = logging.getLogger(__name__)


class Handlers:
    """The page's handlers. Each view goes to: picture, status, facts, Generate, Cancel, the job watched, its id."""

    def __init__(
        self,
        worker: JobQueue,
        models: dict[str, ModelSpec],
        log_file: Path,
        icon: str,
        foresight: Foresight,
        preset: str,
    ) -> None:
        self._worker = worker
        self._models = models
        self._audience = Audience(f"The log has the details: {log_file}", _address)
        self._icon = icon
        self._foresight = foresight
        self._preset = preset

    async def generate(self, *values: Any) -> AsyncIterator[Updates]:
        """Submit the form as a job and show it until it ends; a form that cannot be is answered beside the stage."""
        try:
            job = await asyncio.to_thread(self._worker.submit, form.read(values, self._models))
        except TandemError as error:
            field = error.field if isinstance(error, InvalidRequestError) else ""
            yield alert(error.what, error.remedy, field)
            return
        except Exception as error:  # a defect: told in one line, kept in the log
            logger.exception("The form could not be submitted")
            yield alert(f"Something broke inside Tandem: {error!r}", self._audience.details)
            return
        async for updates in updates_of(job, self._worker, self._audience, self._icon):
            yield updates

    async def attach(self, remembered: Any) -> AsyncIterator[Updates]:
        """Show the job of this tab while it runs, else one that runs, else the last result of this server."""

        def own() -> Job | None:
            return self._worker.job(remembered) if isinstance(remembered, str) and remembered else None

        async for updates in attached(own, self._worker, self._audience, self._icon):
            yield updates

    def cancel(self, watched: Any) -> Any:
        """Ask the job that this page watches to stop; watching shows the rest."""
        return cancelled(self._worker.job(watched) if isinstance(watched, str) else None)

    def choose_model(self, name: Any) -> Updates:
        """Set size, length and the rest to the defaults of another model."""
        try:
            values = form.model_values(check_offered(name, self._models))
        except TandemError:
            return (gr.skip(),) * (1 + len(form.ROWS) + len(form.FOLLOWING_MODEL))
        return tuple(gr.update(**values[control]) for control in ("size", *form.ROWS, *form.FOLLOWING_MODEL))

    def fill(self, stored: Any) -> Updates:
        """Bring a form back that the browser kept, or the settings of a result: JSON by the names of the request."""
        values = stored_values(stored)
        if values is None:
            return (gr.skip(),) * (1 + len(form.ROWS) + len(form.NAMES))
        gpus = len(usable_gpus(self._foresight.machine()))
        filled = form.filled(values, self._models, self._preset, gpus)
        return tuple(gr.update(**filled[control]) for control in ("size", *form.ROWS, *form.NAMES))

    def look_ahead(self, question: Any, *values: Any) -> Updates:
        """Say what Generate would do now, at the chips, and which question that answers.

        A form that cannot be is an answer too. "more" after the number says that it is worth asking again.
        """
        number = question if isinstance(question, str) and _NUMBER.fullmatch(question) else ""
        try:
            request = form.read_settings(values, self._models)
            spec = check_offered(request.model, self._models)
            seen = plan_summary.outlook(self._foresight.foresee(request, spec), spec.component_names)
        except TandemError as error:
            seen = plan_summary.stopped(error, COMPONENTS)
        except Exception as error:  # a defect: told in one line, kept in the log
            logger.exception("It could not be said what would happen")
            seen = plan_summary.stopped(error, COMPONENTS)
        return *acceleration.show(seen), f"{number}{'' if seen.complete else ' more'}"


def stored_values(stored: Any) -> dict[str, Any] | None:
    """Return what a stored form holds, `None` for what is none."""
    try:
        values = json.loads(stored)
    except (TypeError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def cancelled(job: Job | None) -> Any:
    """Ask a job to stop; return what its button shows then."""
    if job is None or not job.open:
        return gr.skip()
    job.request_cancel()
    return gr.update(value="Stopping…", interactive=False)


async def updates_of(job: Job, worker: JobQueue, audience: Audience, icon: str) -> AsyncIterator[Updates]:
    """Yield what to change on a page that shows a job, until the job ends."""
    before: job_stream.View | None = None
    async for view in job_stream.follow_views(job, worker, audience, icon):
        yield _updates(view, before)
        before = view


async def attached(
    own: Callable[[], Job | None], worker: JobQueue, audience: Audience, icon: str, visitor: str | None = None
) -> AsyncIterator[Updates]:
    """Show a page's own job while it runs, else another that runs, else the last: a visitor's, or of this server's.

    Args:
        own: finds the page's job; it and all else is looked up where that may take its time.
    """

    def shown() -> Job | None:
        job = own()
        return job if job is not None and job.open else worker.active(visitor) or job or worker.latest(visitor)

    try:
        job = await asyncio.to_thread(shown)
    except TandemError as error:
        yield alert(audience.redact(error.what), audience.redact(error.remedy), desk=visitor is None)
        return
    if job is None:
        # A generator that yields nothing would empty the page.
        yield (gr.skip(),) * 7
        return
    async for updates in updates_of(job, worker, audience, icon):
        yield updates


def _address(job: Job) -> str:
    saved = job.progress.end
    return file_url(saved.video) if isinstance(saved, VideoSaved) else ""


def _updates(view: job_stream.View, before: job_stream.View | None) -> Updates:
    """Return what differs from the view before; the rest is left as it is."""

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


def alert(what: str, remedy: str, field: str = "", *, desk: bool = True) -> Updates:
    """Return updates that show an error and leave everything else, the form first of all, as it was.

    Args:
        desk: see `stage.status`.
    """
    said = acceleration.in_form_words
    line = player.Line("failed", what=said(what), remedy=said(remedy), field=field)
    return (gr.skip(), player.status(line, desk=desk), *(gr.skip(),) * 5)
