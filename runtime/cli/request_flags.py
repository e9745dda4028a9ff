"""The flags that describe a video, said once for every command that takes them."""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from runtime.core import settings
from runtime.core.errors import InvalidRequestError
from runtime.core.request import AUTO, Auto, GenerationRequest

Result = TypeVar("Result")

_DEFAULT = "[default: the model's]"


def request_from_flags(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What the video shows, in a sentence.")],
    negative_prompt: Annotated[str | None, typer.Option(help=f"What it should not show. {_DEFAULT}")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME|DIR", help="A name from `models list`, or a folder.")
    ] = None,
    width: Annotated[int | None, typer.Option(help=f"Pixels, a multiple of the model's stride. {_DEFAULT}")] = None,
    height: Annotated[int | None, typer.Option(help=f"Pixels, a multiple of the model's stride. {_DEFAULT}")] = None,
    frames: Annotated[int | None, typer.Option(help=f"Number of frames, 4n+1. {_DEFAULT}")] = None,
    fps: Annotated[int | None, typer.Option(help=f"Frames per second of the video. {_DEFAULT}")] = None,
    steps: Annotated[int | None, typer.Option(help=f"Denoising steps: more is slower and finer. {_DEFAULT}")] = None,
    guidance: Annotated[
        str | None,
        typer.Option(
            metavar="SCALE[,SCALE]",
            help=f"How closely the prompt is followed; two values for high and low noise. {_DEFAULT}",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="The same seed and settings give the same video. [default: random]")
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
        width=_or_auto(width),
        height=_or_auto(height),
        frames=_or_auto(frames),
        fps=_or_auto(fps),
        steps=_or_auto(steps),
        guidance_scale=high,
        guidance_scale_2=low,
        seed=_or_auto(seed),
    )


def taking_request(command: Callable[..., Result]) -> Callable[..., Result]:
    """Give `command`, which takes a `GenerationRequest` first, the flags of `request_from_flags` in its place."""
    flags = inspect.signature(request_from_flags, eval_str=True).parameters
    _, *own = inspect.signature(command, eval_str=True).parameters.values()

    @functools.wraps(command)
    def wrapper(**values: Any) -> Result:
        request = request_from_flags(**{name: values.pop(name) for name in flags})
        return command(request, **values)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*flags.values(), *own)]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


def _or_auto(value: int | None) -> int | Auto:
    return AUTO if value is None else value


def _scales(text: str | None) -> tuple[float | Auto, float | Auto]:
    if text is None:
        return AUTO, AUTO
    parts = text.split(",")
    try:
        high, low = (float(parts[0]), float(parts[1]) if len(parts) > 1 else AUTO)
    except ValueError as error:
        raise _no_scale(text) from error
    if len(parts) > 2:  # noqa: PLR2004 - high noise, low noise
        raise _no_scale(text)
    return high, low


def _no_scale(text: str) -> InvalidRequestError:
    return InvalidRequestError(
        "guidance_scale", f"--guidance is {text[:40]!r}.", "Give a number such as 4, or two such as 4,3."
    )
