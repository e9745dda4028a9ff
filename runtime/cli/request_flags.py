"""The flags that describe a video, said once for every command that takes them."""

import contextlib
import functools
import inspect
import shlex
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import typer
from typer.exceptions import TyperException

from runtime.core import settings
from runtime.core.errors import InvalidRequestError
from runtime.core.loras import parse_lora
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
    VAE_PRECISIONS,
    GenerationRequest,
)
from runtime.core.step_cache import DEFAULT_STRENGTH, NONE

Result = TypeVar("Result")
# What shapes an engine.
_SIZE = ("model", "width", "height", "frames")

# What --steps, --guidance and --shift are where they are not given.
# lightx2v distilled its LoRAs with this shift; a test compares it with that of the family.
_LIGHTNING_SHIFT = 5.0
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "lightning-4": {"steps": 4, "guidance_scale": 1.0, "shift": _LIGHTNING_SHIFT}
}
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
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar=f"N|{AUTO}",
            help=f"How many GPUs make the video together; {AUTO}: all alike, where that is faster. [default: 1]",
        ),
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[high=|low=]FILE[:WEIGHT]",
            help="A LoRA to add to the transformers, or to one expert, repeatable: a .safetensors file, or a name in "
            "weights/loras in the cache folder. [default: weight 1, both experts unless its name says which]",
        ),
    ] = None,
    step_cache: Annotated[
        str | None,
        typer.Option(
            metavar="none|first-block[:STRENGTH]",
            help="Reuse across denoising steps what a transformer's blocks add, in PyTorch: faster, and not quite the "
            f"same video; the stronger, the faster. [default: none; strength {DEFAULT_STRENGTH:g}]",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(PRESETS),
            help="For a step-distillation LoRA of lightx2v's: 4 steps, no guidance, and "
            f"shift {_LIGHTNING_SHIFT:g}, unless others are given.",
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
    shift: Annotated[
        str | None,
        typer.Option(
            metavar=f"N|{AUTO}",
            help="How far noise levels are moved towards noise: higher for layout and motion, lower for detail. "
            "[default: what the model's scheduler says]",
        ),
    ] = None,
    vae_precision: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(VAE_PRECISIONS[1:]),
            help="In which the VAE decodes in PyTorch: 16 bits take half the memory. "
            "[default: bfloat16 where the transformers run in it]",
        ),
    ] = None,
) -> GenerationRequest:
    """Build a request from flags; what was not given stays open.

    Raises:
        InvalidRequestError: for a value out of bounds.
    """
    high, low = _scales(guidance)
    chosen = _preset(preset, lora)
    return GenerationRequest(
        prompt=prompt,
        negative_prompt=negative_prompt,
        model=settings.load().model if model is None else model,
        width=_number(width),
        height=_number(height),
        frames=_number(frames),
        fps=_number(fps),
        steps=chosen.get("steps", AUTO) if steps is None else _number(steps),
        guidance_scale=chosen.get("guidance_scale", AUTO) if guidance is None else high,
        guidance_scale_2=low,
        seed=_number(seed),
        backends=_backends(backend or []),
        build=AUTO if build is None else build,
        offload=AUTO if offload is None else offload,
        quantization=AUTO if quantization is None else quantization,
        on_out_of_memory=RETRY if on_out_of_memory is None else on_out_of_memory,
        gpus=1 if gpus is None else _number(gpus),
        loras=tuple(parse_lora(text) for text in lora or []),
        step_cache=NONE if step_cache is None else step_cache,
        attention=AUTO if attention is None else attention,
        compile=AUTO if compile is None else compile,
        shift=chosen.get("shift") if shift is None else _number(shift),
        vae_precision=AUTO if vae_precision is None else vae_precision,
    )


def taking_request(command: Callable[..., Result]) -> Callable[..., Result]:
    """Give `command`, which takes a `GenerationRequest` first, the flags of `request_from_flags` in its place."""
    return _taking(command, list(_FLAGS))


def taking_size(command: Callable[..., Result]) -> Callable[..., Result]:
    """Give `command`, which takes a `GenerationRequest` first, the flags for model and size in its place."""
    return _taking(command, list(_SIZE))


def taking_engines(command: Callable[..., Result]) -> Callable[..., Result]:
    """Give `command`, which takes a `GenerationRequest` first, the flags that an engine is built by in its place."""
    return _taking(command, [*_SIZE, "backend", "lora"])


def taking_flags(command: Callable[..., Result]) -> Callable[..., Result]:
    """Give `command`, which takes a mapping first, the flags of `request_from_flags` but the prompt in its place.

    The mapping holds those that were given; `request_from_flags` takes them.
    """
    flags = [flag for name, flag in _FLAGS.items() if name != "prompt"]
    _, *own = inspect.signature(command, eval_str=True).parameters.values()

    @functools.wraps(command)
    def wrapper(**values: Any) -> Result:
        given = {flag.name: values.pop(flag.name) for flag in flags}
        return command({name: value for name, value in given.items() if value != _FLAGS[name].default}, **values)

    return _signed(wrapper, [*flags, *own])


def flags_in(text: str) -> Mapping[str, Any]:
    """Return the flags that a text gives, as they stand on the command line of `generate`, for `request_from_flags`.

    Raises:
        InvalidRequestError: if it holds anything else.
    """
    parser = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": []})

    def parsed(flags: Mapping[str, Any]) -> Mapping[str, Any]:
        return flags

    parser.command()(taking_flags(parsed))
    try:
        found: Mapping[str, Any] = parser(shlex.split(text), prog_name="flags", standalone_mode=False)
    except (TyperException, ValueError) as error:
        said = error.format_message().strip() if isinstance(error, TyperException) else str(error)
        raise InvalidRequestError(
            "flags", said if said.endswith(".") else f"{said}.", "Give flags as `generate` takes them."
        ) from error
    return found


_FLAGS = inspect.signature(request_from_flags, eval_str=True).parameters


def _taking(command: Callable[..., Result], names: list[str]) -> Callable[..., Result]:
    flags = [_FLAGS[name] for name in names]
    _, *own = inspect.signature(command, eval_str=True).parameters.values()

    @functools.wraps(command)
    def wrapper(**values: Any) -> Result:
        # Without a prompt there is no video; a request has one all the same.
        given: dict[str, Any] = {"prompt": "none"} | {name: values.pop(name) for name in names}
        return command(request_from_flags(**given), **values)

    return _signed(wrapper, [*flags, *own])


def _signed(wrapper: Callable[..., Result], parameters: list[inspect.Parameter]) -> Callable[..., Result]:
    """Return `wrapper` as one that takes parameters, by name: typer reads which."""
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
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


def _preset(name: str | None, lora: list[str] | None) -> Mapping[str, Any]:
    if name is None:
        return {}
    if name not in PRESETS:
        raise InvalidRequestError("preset", f"There is no preset {name[:40]!r}.", f"Take {', '.join(PRESETS)}.")
    if not lora:
        raise InvalidRequestError(
            "preset",
            f"The preset {name} is for a step-distillation LoRA, and none is given.",
            "Give it by --lora FILE, both files for a model with two experts.",
        )
    return PRESETS[name]


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
