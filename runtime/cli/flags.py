"""Options of the commands: request fields, the web app's options, and `--json` and `--offline`, which all have."""

import functools
import inspect
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any, TypeVar

import typer
from typer.exceptions import TyperException

from runtime.core import settings
from runtime.core.environment import environment_variables
from runtime.core.errors import InvalidRequestError
from runtime.core.facts import shortened
from runtime.core.request import FIELDS, OFF, PROMPT_SOURCES, GenerationRequest
from runtime.core.request_fields import AUTO, Choice, RequestField

Result = TypeVar("Result")
Flags = Mapping[str, Any]

JsonFlag = Annotated[bool, typer.Option("--json", help="End standard output with one JSON object on its last line.")]
OfflineFlag = Annotated[bool, typer.Option("--offline", help="Disable downloads.")]
# The second one is huggingface_hub's: it disables the downloads of libraries.
_OFFLINE_VARIABLES = ("TANDEM_OFFLINE", "HF_HUB_OFFLINE")

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


def with_parameters(wrapper: Callable[..., Result], parameters: Collection[inspect.Parameter]) -> Callable[..., Result]:
    """Return `wrapper` with a signature of keyword parameters, which typer reads."""
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # not in typeshed
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


def with_flags(command: Callable[..., Result], flags: Mapping[str, Any]) -> Callable[..., Result]:
    """Return `command` with more switches, which are off by default: annotations by name."""
    parameters = inspect.signature(command).parameters
    added = [_parameter(name, annotation, False) for name, annotation in flags.items() if name not in parameters]
    return with_parameters(command, [*parameters.values(), *added])


def downloads_disabled() -> AbstractContextManager[None]:
    """Return a context that disables downloads in this process and its children."""
    return environment_variables(dict.fromkeys(_OFFLINE_VARIABLES, "1"))


def metavar(declared: RequestField) -> str:
    """Return the placeholder for an option's value in help texts: "N", "never|always"."""
    choices = [name for name in declared.choices if name != AUTO] if isinstance(declared, Choice) else ["N"]
    return declared.metavar or "|".join(choices)


def request_from_flags(flags: Flags) -> GenerationRequest:
    """Return the request that options describe; fields that are not given keep their defaults.

    Args:
        flags: texts of the options by their names in `OPTIONS`, "prompt", and "settings_of", a file whose settings the
            others replace; `None` for options that are not given.

    Raises:
        InvalidRequestError: for an invalid value.
        OutputError: if the file cannot be read or has no settings.
    """
    file, given = flags.get("settings_of"), {name: text for name, text in flags.items() if name != "settings_of"}
    fields, stored = fields_from_flags(given), dict[str, Any]()
    if file is not None:
        # It reads files with ffmpeg, which few commands need.
        from runtime.cli.settings_file import settings_of

        stored = settings_of(file)
        for source in PROMPT_SOURCES if "prompt" in fields else ():
            stored.pop(source, None)
        for field in fields:
            stored.pop(_GIVE_WAY.get(field, ""), None)
    return GenerationRequest.from_mapping({"model": settings.load().model, **stored, **fields})


def fields_from_flags(flags: Flags) -> dict[str, Any]:
    """Return the fields of a request that options set, see `request_from_flags`."""
    texts = {name: text for name, text in flags.items() if text is not None}
    values: dict[str, Any] = {**_preset(texts.pop("preset", None), texts.get("lora"))}
    if "prompt" in texts:
        values["prompt"] = texts.pop("prompt")
    off = [field for name, field in _OFF_FIELD_OF.items() if texts.pop(name, False)]
    for name, text in texts.items():
        field = _FIELD_OF[name]
        declared = FIELDS[field]
        if field == "guidance_scale":
            values |= _guidance(text)
        elif field == "keyframes":
            values |= _keyframes(text)
        else:
            values[field] = text if declared.repeatable else declared.parse(text)
    for field in off:
        if values.get(field, OFF) != OFF:
            raise InvalidRequestError(field, "cli.on_and_off", value=shortened(values[field]), field=field)
        values[field] = OFF
    return values


def flags_in(text: str) -> Flags:
    """Return the options in a text such as "--steps 4 --offload group", for `request_from_flags`.

    Raises:
        InvalidRequestError: if the text contains anything else.
    """
    parser = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": []})

    def parsed(flags: Flags) -> Flags:
        return flags

    parser.command()(takes_flags(parsed))
    try:
        options: Flags = parser(shlex.split(text), prog_name="flags", standalone_mode=False)
    except (TyperException, ValueError) as error:
        problem = error.format_message() if isinstance(error, TyperException) else str(error)
        raise InvalidRequestError("flags", "cli.flags_invalid", problem=problem.strip().rstrip(".")) from error
    return options


def _parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _option(name: str, declared: RequestField) -> inspect.Parameter:
    unset = f" [default: {declared.unset}]" if declared.unset else ""
    text = f"{declared.help}{' Repeatable.' if declared.repeatable else ''}{unset}".replace("`", "")
    option = typer.Option(declared.flag, metavar=metavar(declared), help=text)
    return _parameter(name, Annotated[list[str] | None if declared.repeatable else str | None, option])


def _off_option(name: str, field: str) -> inspect.Parameter:
    option = typer.Option(_OFF_FLAGS[field], help=f"The same as {FIELDS[field].flag} {OFF}.")
    return _parameter(name, Annotated[bool, option], False)


# The field that each option sets, by the option's name as a parameter.
_FIELD_OF = {
    declared.flag.removeprefix("--").replace("-", "_"): field for field, declared in FIELDS.items() if declared.flag
}
# The fields that options without a value turn off, and these options by their names as parameters.
_OFF_FLAGS = {field: declared.off_flag for field, declared in FIELDS.items() if isinstance(declared, Choice)}
_OFF_FIELD_OF = {flag.removeprefix("--").replace("-", "_"): field for field, flag in _OFF_FLAGS.items() if flag}
_PROMPT = _parameter("prompt", Annotated[str | None, typer.Argument(metavar="PROMPT", help=FIELDS["prompt"].help)])
_SETTINGS_OF = _parameter(
    "settings_of",
    Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Use the settings in a video, PNG or JSON file of Tandem, ComfyUI, Wan2GP or FramePack-Studio. PROMPT "
            "and other options take precedence.",
        ),
    ],
)
# Fields of a file that give way to another one of the options.
_GIVE_WAY = {"frames": "seconds", "seconds": "frames", "guidance_scale": "guidance_scale_2"}
OPTIONS: Mapping[str, inspect.Parameter] = {
    **{name: _option(name, FIELDS[field]) for name, field in _FIELD_OF.items()},
    **{name: _off_option(name, field) for name, field in _OFF_FIELD_OF.items()},
    "preset": _parameter(
        "preset", Annotated[str | None, typer.Option("--preset", metavar="|".join(PRESETS), help=PRESET_HELP)]
    ),
}
# Options of the web app that take a value: placeholder and help text.
_WEB_VALUES: Mapping[str, tuple[str, str]] = {
    "host": ("ADDRESS", "Address to listen on. [default: 127.0.0.1]"),
    "port": ("N", "Port to listen on. [default: 7860]"),
    "auth": ("USER:PASSWORD", "Require a password; needed if --host is not 127.0.0.1, generated for --share."),
    "model": ("NAME|DIR", "Model that is selected at start. [default: diorama]"),
    "share_frames": ("N", "Maximum number of frames of a visitor's video. [default: the model's]"),
    "share_size": (
        "WIDTHxHEIGHT",
        "Maximum size of a visitor's video, in either orientation. [default: the model's]",
    ),
    "share_steps": ("N", "Maximum number of steps of a visitor's video. [default: the model's]"),
    "share_queue": ("N", "Maximum number of queued and running videos per visitor. [default: 2]"),
    "share_queue_all": ("N", "Maximum number of queued and running videos of all visitors. [default: 10]"),
    "share_rate": ("N", "Maximum number of videos per visitor and hour. [default: 20]"),
}
# The switches of the web app: help texts.
_WEB_SWITCHES: Mapping[str, str] = {
    "no_browser": "Do not open a browser.",
    "offline": "Disable downloads.",
    "share": "Create a link for visitors, with a password and the limits above.",
    "cluster": "Let other machines join and make the videos.",
    "enable_tensorrt": "Select TensorRT for all components at start, or for those of the flags below.",
    "tensorrt_text_encoders": "With --enable-tensorrt: the text and image encoders.",
    "tensorrt_transformer": "With --enable-tensorrt: the transformers.",
    "version": "Print the version and exit.",
}
_WEB_OPTIONS = [
    *(
        _parameter(name, Annotated[str | None, typer.Option(metavar=placeholder, help=text)])
        for name, (placeholder, text) in _WEB_VALUES.items()
    ),
    *(
        _parameter(name, Annotated[bool, typer.Option(f"--{name.replace('_', '-')}", help=text)], False)
        for name, text in _WEB_SWITCHES.items()
    ),
]


def _takes(
    options: Collection[inspect.Parameter], convert: Callable[[Flags], Any]
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Return a decorator: typer sees `options` instead of a command's first parameter, which `convert` computes."""

    def decorate(command: Callable[..., Result]) -> Callable[..., Result]:
        _, *parameters = inspect.signature(command).parameters.values()

        @functools.wraps(command)
        def wrapper(**values: Any) -> Result:
            first = convert({option.name: values.pop(option.name) for option in options})
            return command(first, **values)

        return with_parameters(wrapper, [*options, *parameters])

    return decorate


def takes_request(command: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a command whose first parameter is a `GenerationRequest`: typer sees prompt and options instead."""
    return _takes([_PROMPT, _SETTINGS_OF, *OPTIONS.values()], request_from_flags)(command)


def takes_request_or_list(command: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a command whose first parameter is a mapping of flags: typer sees options and a prompt, if there is one.

    The mapping contains what was given, for `request_from_flags`.
    """
    prompt = typer.Argument(metavar="[PROMPT]", help=FIELDS["prompt"].help, show_default=False)
    first = _parameter("prompt", Annotated[str | None, prompt])
    return _takes([first, _SETTINGS_OF, *OPTIONS.values()], _given)(command)


def takes_options(*names: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorate a command whose first parameter is a `GenerationRequest`: typer sees the named options instead."""
    # Commands without a prompt generate nothing; the request needs some text.
    return _takes([OPTIONS[name] for name in names], lambda flags: request_from_flags({"prompt": "none", **flags}))


def takes_changes(*names: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorate a command whose first parameter has fields of a request: typer sees the named options, and --prompt."""
    declared = FIELDS["prompt"]
    prompt = typer.Option("--prompt", metavar="TEXT", help=f"{declared.help} [default: the same]")
    options = [_parameter("prompt", Annotated[str | None, prompt]), *(OPTIONS[name] for name in names)]
    return _takes(options, fields_from_flags)


def takes_flags(command: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a command whose first parameter is a mapping of flags: typer sees all options instead.

    The mapping contains the options that were given, for `request_from_flags`.
    """
    return _takes(OPTIONS.values(), _given)(command)


def takes_web_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a command whose first parameter is a mapping: typer sees the web app's options instead.

    The mapping contains values and switches that were given.
    """
    return _takes(_WEB_OPTIONS, _given)(command)


def _given(flags: Flags) -> Flags:
    return {name: value for name, value in flags.items() if value is not None and value is not False}


def _preset(name: str | None, loras: list[str] | None) -> Mapping[str, Any]:
    if name is None:
        return {}
    if name not in PRESETS:
        raise InvalidRequestError("preset", "request.not_a_choice", value=shortened(name), choices=list(PRESETS))
    if not loras:
        raise InvalidRequestError("preset", "cli.preset_without_lora", preset=name)
    return PRESETS[name]


def _keyframes(texts: Sequence[str]) -> dict[str, object]:
    """Return the files and times of keyframes such as "boat.png@2.5"."""
    files, times = [], []
    for text in texts:
        file, _, seconds = text.rpartition("@")
        try:
            times.append(float(seconds.removesuffix("s")))
        except ValueError as error:
            raise InvalidRequestError("keyframes", "cli.keyframe_without_time", value=shortened(text)) from error
        files.append(file)
    return {"keyframes": files, "keyframe_seconds": times}


def _guidance(text: str) -> dict[str, object]:
    """Return the guidance scales for high and low noise; the planner uses a single one for both."""
    scales = [FIELDS["guidance_scale"].parse(part) for part in text.split(",")]
    names = ("guidance_scale", "guidance_scale_2")
    if len(scales) > len(names):
        raise InvalidRequestError("guidance_scale", "cli.guidance_invalid", value=shortened(text))
    return dict(zip(names, scales, strict=False))
