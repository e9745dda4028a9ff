"""The endpoint `/generate`, for programs: `gradio_client.Client(url).predict("a red boat", api_name="/generate")`.

Its parameters are the fields of `GenerationRequest`. Visitors of a share link have another endpoint with
fewer fields.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

import gradio as gr

from runtime.core.errors import TandemError
from runtime.core.events import Failed, VideoSaved, to_json
from runtime.core.facts import Fact, Words, render
from runtime.core.request import FIELDS, GenerationRequest
from runtime.models.catalogue import check_offered
from runtime.models.spec import ModelSpec
from runtime.queue.job_queue import JobQueue
from runtime.queue.views import Job
from runtime.server.visitors import Visitors
from runtime.ui import form, job_view
from runtime.ui.fields import by_name

# Types of the lists and mappings in the endpoint's schema; null stands for the default.
_TYPES: Mapping[str, Any] = {"backends": dict[str, str] | list[str] | None, "loras": list[str] | None}


class ApiWords(Words):
    """Names of settings in messages for programs: the endpoint's parameters."""

    def setting(self, name: str, value: str | None = None) -> str:
        """Return a field's name, or "offload=group" with a value."""
        return name if value is None else f"{name}={value}"


def endpoint(worker: JobQueue, models: dict[str, ModelSpec], default_model: str) -> Callable[..., Any]:
    """Return the function of `/generate` on the owner's page."""

    async def generate(*values: Any) -> AsyncIterator[dict[str, Any]]:
        """Generate one video. Streams the job's events; the last is VideoSaved, whose "video" is the MP4.

        The parameters are the fields of a request, as in docs/commands.md. "auto" uses the model's default, and a
        random seed; negative_prompt null uses the model's own. backends selects what runs a component, as
        {"vae": "pytorch"} or ["vae=pytorch"], with "all" for every component; loras names files in the cache's
        weights/loras, as ["style:0.8"]. The job continues when the stream is closed.
        """
        try:
            request = _request(FIELDS, values)
            check_offered(request.model, models)
            by_name(request.loras)  # raises for a path
            job = await asyncio.to_thread(worker.submit, request)
        except TandemError as error:
            raise _error(_text(error.fact)) from error
        async for event in _events(job, lambda saved: {"path": str(saved.video), "meta": {"_type": "gradio.FileData"}}):
            yield event

    return _with_parameters(generate, FIELDS, default_model)


def visitors_endpoint(
    visitors: Visitors, visitor_of: Callable[[gr.Request], str], audience: job_view.Audience, default_model: str
) -> Callable[..., Any]:
    """Return the function of `/generate` on the visitors' page."""

    async def generate(request: gr.Request, *values: Any) -> AsyncIterator[dict[str, Any]]:
        """Generate one video within the limits. Streams the job's events; the last is VideoSaved.

        Its "video" is the MP4's address below the link, which needs your login. "auto" uses the model's default or the
        limit, and a random seed. The job continues when the stream is closed.
        """
        try:
            job = await asyncio.to_thread(visitors.submit, _request(form.BASIC, values), visitor_of(request))
        except TandemError as error:
            raise _error(audience.redact(_text(error.fact))) from error
        async for event in _events(job, lambda _: audience.address(job), audience.redact):
            yield event

    gradio_request = inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=gr.Request)
    return _with_parameters(generate, form.BASIC, default_model, gradio_request)


def _request(names: Iterable[str], values: Iterable[Any]) -> GenerationRequest:
    """Return the request with these fields; null for a list or mapping means its default."""
    given = zip(names, values, strict=True)
    return GenerationRequest(**{name: value for name, value in given if value is not None or name not in _TYPES})


def _with_parameters(
    function: Callable[..., Any], names: Iterable[str], default_model: str, *before: inspect.Parameter
) -> Callable[..., Any]:
    """Set the parameters of an endpoint's function, from which Gradio builds the schema.

    Args:
        names: request fields.
        before: parameters before those of the fields.
    """
    parameters = list(before)
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
    function.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": dict[str, Any]}
    return function


async def _events(
    job: Job, video: Callable[[VideoSaved], Any], redact: Callable[[str], str] = str
) -> AsyncIterator[dict[str, Any]]:
    """Yield a job's events as JSON values, with every text redacted.

    Args:
        video: returns the value of the last event's "video".

    Raises:
        gr.Error: if the job fails.
    """
    async for event in job_view.follow_events(job):
        if isinstance(event, Failed):
            raise _error(redact(f"{event.what} {event.remedy}"))
        values = to_json(event) | {"job": job.id}
        if isinstance(event, VideoSaved):
            values["video"] = video(event)
        yield _redacted(values, redact)


def _redacted(value: Any, redact: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: _redacted(one, redact) for key, one in value.items()}
    return [_redacted(one, redact) for one in value] if isinstance(value, list | tuple) else value


def _text(fact: Fact) -> str:
    return " ".join(render(fact, ApiWords())).strip()


def _error(text: str) -> gr.Error:
    return gr.Error(text, title="Tandem", print_exception=False)
