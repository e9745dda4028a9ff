"""The flags that describe a video, said once for every command that takes them."""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from runtime.core import settings
from runtime.core.errors import InvalidRequestError
from runtime.core.request import (
    ALL,
    ATTENTIONS,
    AUTO,
    BACKENDS,
    BUILDS,
    COMPILES,
    COMPONENTS,
    OFFLOADS,
    ON_OUT_OF_MEMORY,
    QUANTIZATIONS,
    RETRY,
    GenerationRequest,
)

Result = TypeVar("Result")
# What shapes an engine.
_SIZE = ("model", "width", "height", "frames")

_DEFAULT = "[default: the model's]"


def request_from_flags(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What the video shows, in a sentence.")],
    negative_prompt: Annotated[str | None, typer.Option(help=f"What it should not show. {_DEFAULT}")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME|DIR", help="A name from `models list`, or a folder.")
    ] = None,
    width: Annotated[
        str | None, typer.Option(metavar="N", help=f"Pixels, a multiple of the model's stride. {_DEFAULT}")
    ] = None,
    height: Annotated[
        str | None, typer.Option(metavar="N", help=f"Pixels, a multiple of the model's stride. {_DEFAULT}")
    ] = None,
    frames: Annotated[str | None, typer.Option(metavar="N", help=f"Number of frames, 4n+1. {_DEFAULT}")] = None,
    fps: Annotated[str | None, typer.Option(metavar="N", help=f"Frames per second of the video. {_DEFAULT}")] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="N", help=f"Denoising steps: more is slower and finer. {_DEFAULT}")
    ] = None,
    guidance: Annotated[
        str | None,
        typer.Option(
            metavar="SCALE[,SCALE]",
            help=f"How closely the prompt is followed; two values for high and low noise. {_DEFAULT}",
        ),
    ] = None,
    seed: Annotated[
        str | None, typer.Option(metavar="N", help="The same seed and settings give the same video. [default: random]")
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COMPONENT=BACKEND",
            help=f"What runs a component, repeatable. Components: {', '.join(COMPONENTS)}, or {ALL} for every one; "
            f"backends: {', '.join(BACKENDS)}. [default: {ALL}={AUTO}]",
        ),
    ] = None,
    build: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(BUILDS[1:]),
            help="Whether engines are built first. [default: missing ones of backends that --backend names]",
        ),
    ] = None,
    offload: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(OFFLOADS[1:]),
            help="Where weights wait while they are not used: on the GPU, or in RAM by part, by block or by layer. "
            "[default: what fits]",
        ),
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(QUANTIZATIONS[1:]),
            help="Of the transformers' weights in PyTorch: smaller and a little less exact. [default: none if it fits]",
        ),
    ] = None,
    on_out_of_memory: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(ON_OUT_OF_MEMORY),
            help="Where memory runs out: go on in the next more frugal way that gives the same video, or in any, or "
            f"stop and say which. [default: {RETRY}]",
        ),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(ATTENTIONS[1:]),
            help="What computes the transformers' attention in PyTorch; sage and fp8 are less exact. "
            "[default: the fastest exact one]",
        ),
    ] = None,
    compile: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(COMPILES[1:]),
            help="Whether the transformers' blocks are compiled in PyTorch. [default: where it pays off for the clip]",
        ),
    ] = None,
) -> GenerationRequest:
    """Build a request from flags; what was not given stays open.

    Raises:
        InvalidRequestError: for a value out of bounds.
    """
    high, low = _scales(guidance)
    return GenerationRequest(
        prompt=prompt,
        negative_prompt=negative_prompt,
        model=settings.load().model if model is None else model,
        width=_number(width),
        height=_number(height),
        frames=_number(frames),
        fps=_number(fps),
        steps=_number(steps),
        guidance_scale=high,
        guidance_scale_2=low,
        seed=_number(seed),
        backends=_backends(backend or []),
        build=AUTO if build is None else build,
        offload=AUTO if offload is None else offload,
        quantization=AUTO if quantization is None else quantization,
        on_out_of_memory=RETRY if on_out_of_memory is None else on_out_of_memory,
        attention=AUTO if attention is None else attention,
        compile=AUTO if compile is None else compile,
    )


def taking_request(command: Callable[..., Result]) -> Callable[..., Result]:
    """Give `command`, which takes a `GenerationRequest` first, the flags of `request_from_flags` in its place."""
    return _taking(command, list(_FLAGS))


def taking_size(command: Callable[..., Result]) -> Callable[..., Result]:
    """Give `command`, which takes a `GenerationRequest` first, the flags for model and size in its place."""
    return _taking(command, list(_SIZE))


def taking_engines(command: Callable[..., Result]) -> Callable[..., Result]:
    """Give `command`, which takes a `GenerationRequest` first, the flags for model, size and backend in its place."""
    return _taking(command, [*_SIZE, "backend"])


_FLAGS = inspect.signature(request_from_flags, eval_str=True).parameters


def _taking(command: Callable[..., Result], names: list[str]) -> Callable[..., Result]:
    flags = [_FLAGS[name] for name in names]
    _, *own = inspect.signature(command, eval_str=True).parameters.values()

    @functools.wraps(command)
    def wrapper(**values: Any) -> Result:
        # Without a prompt there is no video; a request has one all the same.
        given: dict[str, Any] = {"prompt": "none"} | {name: values.pop(name) for name in names}
        return command(request_from_flags(**given), **values)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*flags, *own)]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


def _number(text: str | None) -> Any:
    """Return the number that `text` spells, else the text itself: `GenerationRequest` says what is wrong with it."""
    if text is None:
        return AUTO
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return text


def _backends(texts: list[str]) -> dict[str, str]:
    """Return the backends by component; `GenerationRequest` says what is wrong with them."""
    backends: dict[str, str] = {}
    for text in texts:
        component, separator, backend = text.partition("=")
        if not separator:
            raise InvalidRequestError(
                "backends", f"--backend is {text[:40]!r}.", "Give COMPONENT=BACKEND, as in vae=inductor or all=pytorch."
            )
        if backends.get(component, backend) != backend:
            raise InvalidRequestError(
                "backends", f"--backend names {component[:40]!r} twice.", "Give one backend per component."
            )
        backends[component] = backend
    return backends


def _scales(text: str | None) -> tuple[Any, Any]:
    """Return the guidance scales of high and low noise; one value is meant for both."""
    if text is None:
        return AUTO, AUTO
    high, *rest = text.split(",")
    if len(rest) > 1:
        raise InvalidRequestError(
            "guidance_scale", f"--guidance is {text[:40]!r}.", "Give a number such as 4, or two such as 4,3."
        )
    return _number(high), _number(rest[0]) if rest else AUTO
