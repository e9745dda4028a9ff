"""The endpoint `/generate`, for programs: `gradio_client.Client(url).predict("a red boat", api_name="/generate")`."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

import gradio as gr

from runtime.core.errors import InvalidRequestError, TandemError
from runtime.core.events import Failed, VideoSaved, to_json
from runtime.core.request import AUTO, GenerationRequest
from runtime.jobs.worker import Worker
from runtime.models.spec import ModelSpec
from runtime.ui import watch
from runtime.ui.models import check_offered

Auto = Literal["auto"]


def endpoint(worker: Worker, models: dict[str, ModelSpec], default_model: str) -> Callable[..., Any]:
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
    ) -> AsyncIterator[dict[str, Any]]:
        """Make one video. Streams the job's events as they happen; the last is VideoSaved, whose "video" is the MP4.

        "auto" takes the model's own default, and a random seed; negative_prompt null takes the model's own. backends
        says what runs a component, as {"vae": "pytorch"} or ["vae=pytorch"], "all" for every one; build, offload and
        quantization are as on the command line. The job goes on when the stream is closed.
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
            )
            job = await asyncio.to_thread(worker.submit, request)
        except TandemError as error:
            raise _refusal(error.what, error.remedy) from error
        async for event in watch.follow_events(job):
            if isinstance(event, Failed):
                raise _refusal(event.what, event.remedy)
            told = to_json(event) | {"job": job.id}
            if isinstance(event, VideoSaved):
                told["video"] = {"path": str(event.video), "meta": {"_type": "gradio.FileData"}}
            yield told

    # gradio reads the schema of what is yielded off the annotation of what is returned.
    generate.__annotations__["return"] = dict[str, Any]
    return generate


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
