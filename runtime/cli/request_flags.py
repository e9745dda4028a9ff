"""The options that describe a video, generated from the request's fields for every command that takes them."""

import functools
import inspect
import shlex
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import typer
from typer.exceptions import TyperException

from runtime.core import settings
from runtime.core.errors import InvalidRequestError
from runtime.core.facts import shortened
from runtime.core.request import FIELDS, GenerationRequest
from runtime.core.request_fields import AUTO, Choice, RequestField

Result = TypeVar("Result")

# The shift that lightx2v used to distill its LoRAs; a test compares it with the value in the family.
_LIGHTNING_SHIFT = 5.0
# Values for --steps, --guidance and --shift that a preset sets if the options are not given.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "lightning-4": {"steps": 4, "guidance_scale": 1.0, "shift": _LIGHTNING_SHIFT}
}
PRESET_HELP = (
    "For a step-distillation LoRA that is not recognized by its name: 4 steps, no guidance and shift "
    f"{_LIGHTNING_SHIFT:g}, unless given otherwise."
)


def metavar(declared: RequestField) -> str:
    """Return the placeholder for an option's value in help texts: "N", "never|always"."""
    choices = [name for name in declared.choices if name != AUTO] if isinstance(declared, Choice) else ["N"]
    return declared.metavar or "|".join(choices)


def request_from_flags(flags: Mapping[str, Any]) -> GenerationRequest:
    """Return the request that options describe; fields that are not given keep their defaults.

    Args:
        flags: texts of the options by their names in `OPTIONS`, and "prompt"; `None` for options that are not given.

    Raises:
        InvalidRequestError: for an invalid value.
    """
    given = {name: text for name, text in flags.items() if text is not None}
    preset = _preset(given.pop("preset", None), given.get("lora"))
    values: dict[str, Any] = {"prompt": given.pop("prompt"), "model": settings.load().model, **preset}
    for name, text in given.items():
        field = _FIELD_OF[name]
        declared = FIELDS[field]
        if field == "guidance_scale":
            values |= _guidance(text)
        else:
            values[field] = text if declared.repeatable else declared.parse(text)
    return GenerationRequest.from_mapping(values)


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option(name: str, declared: RequestField) -> inspect.Parameter:
    unset = f" [default: {declared.unset}]" if declared.unset else ""
    text = f"{declared.help}{' Repeatable.' if declared.repeatable else ''}{unset}".replace("`", "")
    option = typer.Option(declared.flag, metavar=metavar(declared), help=text)
    return _parameter(name, Annotated[list[str] | None if declared.repeatable else str | None, option])


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


# The field that each option sets, by the option's name as a parameter.
_FIELD_OF = {_name(declared.flag): field for field, declared in FIELDS.items() if declared.flag}
_PROMPT = inspect.Parameter(
    "prompt",
    inspect.Parameter.KEYWORD_ONLY,
    annotation=Annotated[str, typer.Argument(metavar="PROMPT", help=FIELDS["prompt"].help)],
)
OPTIONS: Mapping[str, inspect.Parameter] = {
    **{name: _option(name, FIELDS[field]) for name, field in _FIELD_OF.items()},
    "preset": _parameter(
        "preset", Annotated[str | None, typer.Option("--preset", metavar="|".join(PRESETS), help=PRESET_HELP)]
    ),
}


def takes_request(command: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a command whose first parameter is a `GenerationRequest`: typer sees prompt and options instead."""
    return _takes(command, [_PROMPT, *OPTIONS.values()])


def takes_options(*names: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorate a command whose first parameter is a `GenerationRequest`: typer sees the named options instead."""
    return lambda command: _takes(command, [OPTIONS[name] for name in names])


def takes_flags(command: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a command whose first parameter is a mapping of flags: typer sees all options instead.

    The mapping contains the options that were given, for `request_from_flags`.
    """
    _, *own = inspect.signature(command, eval_str=True).parameters.values()

    @functools.wraps(command)
    def wrapper(**values: Any) -> Result:
        given = {name: values.pop(name) for name in OPTIONS}
        return command({name: value for name, value in given.items() if value is not None}, **values)

    return with_parameters(wrapper, [*OPTIONS.values(), *own])


def flags_in(text: str) -> Mapping[str, Any]:
    """Return the options in a text such as "--steps 4 --offload group", for `request_from_flags`.

    Raises:
        InvalidRequestError: if the text contains anything else.
    """
    parser = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": []})

    def parsed(flags: Mapping[str, Any]) -> Mapping[str, Any]:
        return flags

    parser.command()(takes_flags(parsed))
    try:
        found: Mapping[str, Any] = parser(shlex.split(text), prog_name="flags", standalone_mode=False)
    except (TyperException, ValueError) as error:
        problem = error.format_message() if isinstance(error, TyperException) else str(error)
        raise InvalidRequestError("flags", "cli.flags_invalid", problem=problem.strip().rstrip(".")) from error
    return found


def with_parameters(wrapper: Callable[..., Result], parameters: list[inspect.Parameter]) -> Callable[..., Result]:
    """Return `wrapper` with a signature of keyword parameters, which typer reads."""
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # not in typeshed
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


def _takes(command: Callable[..., Result], options: list[inspect.Parameter]) -> Callable[..., Result]:
    _, *own = inspect.signature(command, eval_str=True).parameters.values()

    @functools.wraps(command)
    def wrapper(**values: Any) -> Result:
        # Commands without a prompt generate nothing; the request needs some text.
        flags = {"prompt": "none", **{option.name: values.pop(option.name) for option in options}}
        return command(request_from_flags(flags), **values)

    return with_parameters(wrapper, [*options, *own])


def _preset(name: str | None, loras: list[str] | None) -> Mapping[str, Any]:
    if name is None:
        return {}
    if name not in PRESETS:
        raise InvalidRequestError("preset", "request.not_a_choice", value=shortened(name), choices=list(PRESETS))
    if not loras:
        raise InvalidRequestError("preset", "cli.preset_without_lora", preset=name)
    return PRESETS[name]


def _guidance(text: str) -> dict[str, object]:
    """Return the guidance scales for high and low noise; the planner uses a single one for both."""
    scales = [FIELDS["guidance_scale"].parse(part) for part in text.split(",")]
    names = ("guidance_scale", "guidance_scale_2")
    if len(scales) > len(names):
        raise InvalidRequestError("guidance_scale", "cli.guidance_invalid", value=shortened(text))
    return dict(zip(names, scales, strict=False))
