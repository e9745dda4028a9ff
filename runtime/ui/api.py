"""The endpoint `/generate`, for programs: `gradio_client.Client(url).predict("a red boat", api_name="/generate")`.

Its parameters are the fields of `GenerationRequest`. Visitors of a share link have another endpoint with
fewer fields.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

import gradio as gr

from runtime.core.errors import LimitError, TandemError
from runtime.core.events import Failed, VideoSaved, to_json
from runtime.core.facts import as_text
from runtime.core.request import FIELDS, GenerationRequest
from runtime.models.catalogue import check_offered
from runtime.models.spec import ModelSpec
from runtime.queue.job_queue import JobQueue
from runtime.queue.views import Job
from runtime.server.api_words import ApiWords
from runtime.server.gradio_requests import RefusedError
from runtime.server.security import Submit
from runtime.server.video_requests import by_name, set_values
from runtime.server.visitors import Visitors
from runtime.server.watchers import Watch, Watchers
from runtime.ui import form, job_view
from runtime.ui.fields import check_copies
from runtime.upstream import gradio as private

# Sessions whose calls have ended and whose results wait to be read. A program may make many calls before it reads the
# first result; one that never reads must not fill the memory. Of most, only the last result is kept.
_MOST_UNREAD = 100
_MOST_WHOLE = 10
# Types of the lists and mappings in the endpoint's schema; null stands for the default.
_TYPES: Mapping[str, Any] = {
    "backends": dict[str, str] | list[str] | None,
    "loras": list[str] | None,
    "references": list[str] | None,
    "keyframes": list[str] | None,
    "keyframe_seconds": float | list[float] | None,
    "control_scale": float | list[float] | None,
}


def submission(worker: JobQueue, models: dict[str, ModelSpec], default_model: str) -> Submit:
    """Return what submits the job of a call of `/generate` on the owner's page."""

    def submit(request: GenerationRequest, _visitor: str) -> Job:
        check_offered(request.model, models)
        by_name(request.loras)  # raises for a path
        check_copies(request)
        return worker.submit(request)

    return _submission(FIELDS, default_model, submit)


def visitors_submission(visitors: Visitors, audience: job_view.Audience, default_model: str) -> Submit:
    """Return what submits the job of a call of `/generate` on the visitors' page."""
    return _submission(form.BASIC, default_model, visitors.submit, audience.redact)


def endpoint(default_model: str) -> Callable[..., Any]:
    """Return the function of `/generate` on the owner's page."""

    async def generate(request: gr.Request, *_values: Any) -> AsyncIterator[dict[str, Any]]:
        """Generate one video. Streams the job's events; the last is VideoSaved, whose "video" is the MP4.

        The parameters are the fields of a request, as in docs/commands.md. "auto" uses the model's default, and a
        random seed; negative_prompt null uses the model's own. backends selects what runs a component, as
        {"vae": "pytorch"} or ["vae=pytorch"], with "all" for every component; loras names files in the cache's
        weights/loras, as ["style:0.8"]; images and videos are uploads. The job continues when the stream is
        closed.
        """
        async for event in _events(
            request,
            Watch(),
            lambda _, saved: {"path": str(saved.video), "meta": {"_type": "gradio.FileData"}},
        ):
            yield event

    return _with_parameters(generate, FIELDS, default_model)


def visitors_endpoint(
    watchers: Watchers, visitor_of: Callable[[gr.Request], str], audience: job_view.Audience, default_model: str
) -> Callable[..., Any]:
    """Return the function of `/generate` on the visitors' page."""

    async def generate(request: gr.Request, *_values: Any) -> AsyncIterator[dict[str, Any]]:
        """Generate one video within the limits. Streams the job's events; the last is VideoSaved.

        Its "video" is the MP4's address below the link, which needs your login. "auto" uses the model's default or the
        limit, and a random seed. The job continues when the stream is closed.
        """
        with watchers.watching(visitor_of(request)) as watch:
            async for event in _events(request, watch, lambda job, _: audience.address(job), audience.redact):
                yield event

    return _with_parameters(generate, form.BASIC, default_model)


def _submission(
    names: Iterable[str],
    default_model: str,
    submit: Callable[[GenerationRequest, str], Job],
    redact: Callable[[str], str] = str,
) -> Submit:
    """Return what submits the job of a call.

    Args:
        names: of the request fields that the call has.
        submit: is given the request and the visitor's name.
    """

    async def submitted(values: Iterable[Any], visitor: str) -> object:
        try:
            return await asyncio.to_thread(lambda: submit(_request(names, values, default_model), visitor))
        except TandemError as error:
            return RefusedError(
                error.fact, 429 if isinstance(error, LimitError) else 422, text=redact(as_text(error.fact, ApiWords()))
            )

    return submitted


def _submitted(request: gr.Request) -> Job:
    """Return the job that the middleware submitted for a call.

    Raises:
        gr.Error: if it was refused.
    """
    submitted = request.request.state.submitted
    if isinstance(submitted, RefusedError):
        raise _error(submitted.detail)
    return submitted


def _request(names: Iterable[str], values: Iterable[Any], default_model: str) -> GenerationRequest:
    """Return the request with these fields; see `set_values`."""
    return GenerationRequest(**{"model": default_model, **set_values(dict(zip(names, values, strict=True)))})


def _with_parameters(function: Callable[..., Any], names: Iterable[str], default_model: str) -> Callable[..., Any]:
    """Set the parameters of an endpoint's function, from which Gradio builds the schema.

    Args:
        names: request fields.
    """
    parameters = [inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=gr.Request)]
    for name in names:
        info = GenerationRequest.model_fields[name]
        default = inspect.Parameter.empty if info.is_required() else None if name in _TYPES else info.default
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=default_model if name == "model" else default,
                annotation=_TYPES.get(name, info.annotation),
            )
        )
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # not in typeshed
        parameters, return_annotation=dict[str, Any]
    )
    # Gradio reads the schema of yielded values from the annotation of the return value.
    function.__annotations__ = {entry.name: entry.annotation for entry in parameters} | {"return": dict[str, Any]}
    return function


async def _events(
    request: gr.Request, watch: Watch, video: Callable[[Job, VideoSaved], Any], redact: Callable[[str], str] = str
) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a call's job as JSON values, with every text redacted.

    Args:
        video: returns the value of the last event's "video".

    Raises:
        gr.Error: if the job was refused or fails, or newer pages and programs end the watch.
    """
    job = _submitted(request)
    try:
        async for event in job_view.follow_events(job, watch):
            if isinstance(event, Failed):
                raise _error(redact(f"{event.what} {event.remedy}"))
            values = to_json(event) | {"job": job.id}
            if isinstance(event, VideoSaved):
                values["video"] = video(job, event)
            yield _redacted(values, redact)
    finally:
        private.forget_unread(request.request.app, _MOST_UNREAD, _MOST_WHOLE)
    if watch.reason is not None:
        raise _error(as_text(watch.reason, ApiWords()))


def _redacted(value: Any, redact: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: _redacted(item, redact) for key, item in value.items()}
    return [_redacted(item, redact) for item in value] if isinstance(value, list | tuple) else value


def _error(text: str) -> gr.Error:
    return gr.Error(text, title="Tandem", print_exception=False)
