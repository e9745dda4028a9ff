"""The endpoint `/generate`, for programs: `gradio_client.Client(url).predict("a red boat", api_name="/generate")`.

Visitors of a share link have one of their own, without what chooses engines and memory.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Literal

import gradio as gr

from runtime.core.errors import InvalidRequestError, TandemError
from runtime.core.events import Failed, VideoSaved, to_json
from runtime.core.loras import read_loras
from runtime.core.request import AUTO, RETRY, GenerationRequest
from runtime.core.step_cache import NONE
from runtime.models.spec import ModelSpec
from runtime.queue.service import Job, JobQueue
from runtime.server.model_choices import check_offered
from runtime.server.visitors import Visitors
from runtime.ui import job_stream
from runtime.ui.lora_field import by_name

Auto = Literal["auto"]


def endpoint(worker: JobQueue, models: dict[str, ModelSpec], default_model: str) -> Callable[..., Any]:
    """Return the function behind `/generate`."""

    async def generate(
        prompt: str,
        negative_prompt: str | None = None,
        model: str = default_model,
        width: int | Auto = AUTO,
        height: int | Auto = AUTO,
        frames: int | Auto = AUTO,
        fps: int | Auto = AUTO,
        steps: int | Auto = AUTO,
        guidance_scale: float | Auto = AUTO,
        guidance_scale_2: float | Auto = AUTO,
        seed: int | Auto = AUTO,
        backends: dict[str, str] | list[str] | None = None,
        build: str = AUTO,
        offload: str = AUTO,
        quantization: str = AUTO,
        on_out_of_memory: str = RETRY,
        gpus: int | Auto = 1,
        loras: list[str] | None = None,
        step_cache: str = NONE,
        attention: str = AUTO,
        compile: str = AUTO,
        shift: float | None = None,
        vae_precision: str = AUTO,
    ) -> AsyncIterator[dict[str, Any]]:
        """Make one video. Streams the job's events as they happen; the last is VideoSaved, whose "video" is the MP4.

        "auto" takes the model's own default, and a random seed; negative_prompt null takes the model's own. backends
        says what runs a component, as {"vae": "pytorch"} or ["vae=pytorch"], "all" for every one; build, offload,
        quantization, on_out_of_memory, gpus, step_cache, attention, compile, shift and vae_precision are as on the
        command line; loras names those in the cache's weights/loras, as ["style:0.8"]. The job goes on when the stream
        is closed.
        """
        try:
            check_offered(model, models)
            request = GenerationRequest(
                prompt=prompt,
                negative_prompt=negative_prompt,
                model=model,
                width=width,
                height=height,
                frames=frames,
                fps=fps,
                steps=steps,
                guidance_scale=guidance_scale,
                guidance_scale_2=guidance_scale_2,
                seed=seed,
                backends=_backends(backends),
                build=build,
                offload=offload,
                quantization=quantization,
                on_out_of_memory=on_out_of_memory,
                gpus=gpus,
                loras=by_name(read_loras(() if loras is None else loras)),
                step_cache=step_cache,
                attention=attention,
                compile=compile,
                shift=shift,
                vae_precision=vae_precision,
            )
            job = await asyncio.to_thread(worker.submit, request)
        except TandemError as error:
            raise _refusal(error.what, error.remedy) from error
        async for told in _told(job, lambda saved: {"path": str(saved.video), "meta": {"_type": "gradio.FileData"}}):
            yield told

    # gradio reads the schema of what is yielded off the annotation of what is returned.
    generate.__annotations__["return"] = dict[str, Any]
    return generate


def visitors_endpoint(
    visitors: Visitors, visitor_of: Callable[[gr.Request], str], audience: job_stream.Audience, default_model: str
) -> Callable[..., Any]:
    """Return the function behind `/generate` on the page of a share link's visitors."""

    async def generate(
        request: gr.Request,
        prompt: str,
        negative_prompt: str | None = None,
        model: str = default_model,
        width: int | Auto = AUTO,
        height: int | Auto = AUTO,
        frames: int | Auto = AUTO,
        fps: int | Auto = AUTO,
        steps: int | Auto = AUTO,
        guidance_scale: float | Auto = AUTO,
        guidance_scale_2: float | Auto = AUTO,
        seed: int | Auto = AUTO,
        shift: float | None = None,
    ) -> AsyncIterator[dict[str, Any]]:
        """Make one video within the limits. Streams the job's events as they happen; the last is VideoSaved.

        Its "video" is where the MP4 is, below the link; it goes only to whoever logged in as you did. "auto" takes the
        model's own default, or the limit, and a random seed. The job goes on when the stream is closed.
        """
        try:
            asked = GenerationRequest(
                prompt=prompt,
                negative_prompt=negative_prompt,
                model=model,
                width=width,
                height=height,
                frames=frames,
                fps=fps,
                steps=steps,
                guidance_scale=guidance_scale,
                guidance_scale_2=guidance_scale_2,
                seed=seed,
                shift=shift,
            )
            job = await asyncio.to_thread(visitors.submit, asked, visitor_of(request))
        except TandemError as error:
            raise _refusal(audience.redact(error.what), audience.redact(error.remedy)) from error
        async for told in _told(job, lambda _: audience.address(job), audience.redact):
            yield told

    generate.__annotations__["return"] = dict[str, Any]
    return generate


async def _told(
    job: Job, video: Callable[[VideoSaved], Any], redact: Callable[[str], str] = str
) -> AsyncIterator[dict[str, Any]]:
    """Yield a job's events as JSON, as `may_hear` lets them through; `video` says where the finished one is."""
    async for event in job_stream.follow_events(job):
        if isinstance(event, Failed):
            raise _refusal(redact(event.what), redact(event.remedy))
        told = to_json(event) | {"job": job.id}
        if isinstance(event, VideoSaved):
            told["video"] = video(event)
        yield _heard(told, redact)


def _heard(value: Any, redact: Callable[[str], str]) -> Any:
    """Return JSON values with every text as it may be heard."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: _heard(one, redact) for key, one in value.items()}
    return [_heard(one, redact) for one in value] if isinstance(value, list | tuple) else value


def _backends(given: object) -> Any:
    """Return a list of COMPONENT=BACKEND by component, and the rest as it is: `GenerationRequest` judges both."""
    if given is None:
        return {}
    if not isinstance(given, list):
        return given
    backends: dict[str, str] = {}
    for entry in given:
        component, separator, backend = entry.partition("=") if isinstance(entry, str) else ("", "", "")
        if not separator or backends.get(component, backend) != backend:
            raise InvalidRequestError(
                "backends", f"backends holds {str(entry)[:40]!r}.", 'Give each component once, as in ["vae=pytorch"].'
            )
        backends[component] = backend
    return backends


def _refusal(what: str, remedy: str) -> gr.Error:
    return gr.Error(f"{what} {remedy}", title="Tandem", print_exception=False)
