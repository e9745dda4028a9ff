"""The form: every control with its explanation, and its reading into a request.

Values come as the browser sent them, of any type: `GenerationRequest` and the planner judge them, in words that name
the field, so gradio's own checks are left out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import gradio as gr

from runtime.core.errors import InvalidRequestError
from runtime.core.request import ALL, AUTO, COMPONENTS, GenerationRequest, label
from runtime.core.step_cache import NONE, read_step_cache
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec
from runtime.server.model_choices import check_offered
from runtime.ui import acceleration, formatting, lora_field, shift_field, theme

CUSTOM = "custom"
_WIDEST_STEPS = 100
_MODEL_FRAMES_SHOWN = 2


@dataclass
class Form:
    """The controls, by the names of `GenerationRequest`, in the order in which handlers get them.

    A page chooses a backend for each component; together they are the request's `backends`.
    """

    prompt: gr.Textbox
    negative_prompt: gr.Textbox
    model: gr.Dropdown
    width: gr.Number
    height: gr.Number
    frames: gr.Slider
    fps: gr.Number
    steps: gr.Slider
    guidance_scale: gr.Number
    guidance_scale_2: gr.Number
    seed: gr.Textbox
    shift: gr.Textbox
    backend_text_encoder: gr.Dropdown
    backend_transformer: gr.Dropdown
    backend_transformer_2: gr.Dropdown
    backend_vae: gr.Dropdown
    build: gr.Dropdown
    offload: gr.Dropdown
    quantization: gr.Dropdown
    on_out_of_memory: gr.Dropdown
    gpus: gr.Dropdown
    loras: gr.Textbox
    step_cache: gr.Dropdown
    attention: gr.Dropdown
    compile: gr.Dropdown
    vae_precision: gr.Dropdown

    @property
    def controls(self) -> list[Any]:
        """The controls in order."""
        return [getattr(self, field.name) for field in fields(self)]

    @property
    def following_model(self) -> list[Any]:
        """The controls that a change of model sets to its defaults, in the order of `FOLLOWING_MODEL`."""
        return [getattr(self, name) for name in FOLLOWING_MODEL]


FOLLOWING_MODEL = (
    "width", "height", "frames", "fps", "negative_prompt", "steps", "guidance_scale", "guidance_scale_2",
    "shift", "backend_text_encoder", "backend_transformer", "backend_transformer_2", "backend_vae",
)  # fmt: skip
NAMES = tuple(field.name for field in fields(Form))
# The prompt, and the settings that are not about what runs where.
BASIC = NAMES[: NAMES.index("shift") + 1]
# The rows of the acceleration panel, which come and go with the model; they are no settings.
ROWS = tuple(f"row_{name}" for name in COMPONENTS)


def compose() -> tuple[gr.Textbox, list[tuple[gr.Button, str]]]:
    """Make the prompt and the examples below it; return it and each example's button with its prompt."""
    prompt = gr.Textbox(
        label="Prompt",
        info="Say in a sentence what the video shows: who or what, how it moves, where, when.",
        placeholder="a red boat sails to the right on a calm sea at sunset",
        lines=3,
        max_lines=8,
        elem_id="field-prompt",
    )
    with gr.Row(elem_id="examples"):
        buttons = [
            (gr.Button(example["title"], size="sm", elem_classes="example"), example["prompt"])
            for example in theme.examples()
        ]
    return prompt, buttons


@dataclass
class Basics:
    """The settings that everybody has: their controls by name, the choice of sizes, the line that tells the length."""

    controls: dict[str, Any]
    size: gr.Radio
    length: gr.HTML


@dataclass
class Settings:
    """The settings column: the form, the choice of sizes, the line that tells the length, the acceleration panel."""

    form: Form
    size: gr.Radio
    length: gr.HTML
    panel: acceleration.Panel


def settings_group(
    models: Mapping[str, ModelSpec],
    chosen: str,
    prompt: gr.Textbox,
    machine: Machine,
    backends: Mapping[str, str],
) -> Settings:
    """Make the settings.

    Args:
        backends: what is chosen at first, by component; "auto" for those not named.
    """
    basics = basic_settings(models, chosen, model_values(models[chosen]))
    panel, choices = acceleration.panel(models[chosen], machine, backends)
    form = Form(prompt, **basics.controls, **choices, loras=lora_field.control())
    return Settings(form, basics.size, basics.length, panel)


def basic_settings(models: Mapping[str, ModelSpec], chosen: str, values: Mapping[str, Mapping[str, Any]]) -> Basics:
    """Make the settings that are not about what runs where.

    Args:
        values: the properties of the controls that follow the model, as `model_values` has them.
    """
    model = gr.Dropdown(
        choices=model_choices(models),
        value=chosen,
        label="Model",
        info="Sizes, length and the settings below follow it.",
        visible=len(models) > 1,
        elem_id="field-model",
    )
    size = gr.Radio(**values["size"], label="Size", info="The model's own; or type another below.", elem_id="size")
    with gr.Row(elem_classes="pair"):
        width = gr.Number(**values["width"], label="Width", elem_id="field-width")
        height = gr.Number(**values["height"], label="Height", elem_id="field-height")
    frames = gr.Slider(
        **values["frames"],
        label="Frames",
        info="More frames make a longer video, and take more time and memory.",
        buttons=[],
        elem_id="field-frames",
    )
    with gr.Row(elem_id="speed-row"):
        fps = gr.Number(**values["fps"], label="Frames per second", info="Speed of the video.", elem_id="field-fps")
        length = gr.HTML(length_line(values["frames"]["value"], values["fps"]["value"]), elem_id="length")
    with gr.Row(elem_id="seed-row"):
        # Text, because gradio's number fields show 0 where nothing is given.
        seed = gr.Textbox(
            label="Seed",
            placeholder="random",
            info="Empty: a new one each time. The same seed and settings give the same video again.",
            max_lines=1,
            elem_id="field-seed",
        )
        random = gr.Button("Random", elem_id="random-seed", min_width=90)
    random.click(None, None, seed, js="() => ''", api_visibility="private", show_progress="hidden")
    with gr.Accordion("More settings", open=False, elem_id="more", elem_classes="fold"):
        negative = gr.Textbox(
            **values["negative_prompt"],
            label="Negative prompt",
            info="What the video should not show. May be empty.",
            lines=2,
            max_lines=6,
            elem_id="field-negative_prompt",
        )
        steps = gr.Slider(
            **values["steps"],
            label="Steps",
            info="More steps: finer, and slower in proportion.",
            buttons=[],
            elem_id="field-steps",
        )
        with gr.Row(elem_classes="pair"):
            guidance = gr.Number(
                **values["guidance_scale"],
                label="Guidance",
                info="How closely the prompt is followed. 1 turns it off and halves the time.",
                step=0.5,
                elem_id="field-guidance_scale",
            )
            guidance_2 = gr.Number(
                **values["guidance_scale_2"],
                label="Low-noise guidance",
                info="The same for the second transformer, which draws the detail.",
                step=0.5,
                elem_id="field-guidance_scale_2",
            )
        shift = shift_field.control(values["shift"])
    controls = (negative, model, width, height, frames, fps, steps, guidance, guidance_2, seed, shift)
    return Basics(dict(zip(BASIC[1:], controls, strict=True)), size, length)


def model_choices(models: Mapping[str, ModelSpec]) -> list[tuple[str, str]]:
    """Return how models stand in their choice: what is read, and the name behind it."""
    return [(f"{spec.title} ({spec.license})", name) for name, spec in tuple(models.items())]


def model_values(spec: ModelSpec) -> dict[str, dict[str, Any]]:
    """Return the properties of the controls that follow the model, by name."""
    defaults, stride = spec.defaults, spec.vae.scale_factor_temporal
    wide, high = spec.strides
    sizes: list[tuple[str, str]] = [(formatting.size(w, h), f"{w}x{h}") for w, h in spec.sizes]
    second = defaults.guidance_scale_2 if defaults.guidance_scale_2 is not None else defaults.guidance_scale
    return {
        "size": {"choices": [*sizes, ("Custom", CUSTOM)], "value": size_value(spec, defaults.width, defaults.height)},
        "width": {"value": defaults.width, "step": wide, "info": f"A multiple of {wide}."},
        "height": {"value": defaults.height, "step": high, "info": f"A multiple of {high}."},
        "frames": {
            "value": defaults.frames,
            "minimum": 1,
            "maximum": _MODEL_FRAMES_SHOWN * max(*spec.frame_counts, defaults.frames) // stride * stride + 1,
            "step": stride,
        },
        "fps": {"value": defaults.fps, "step": 1},
        "negative_prompt": {"value": defaults.negative_prompt},
        "steps": {"value": defaults.steps, "minimum": 1, "maximum": max(_WIDEST_STEPS, defaults.steps), "step": 1},
        "guidance_scale": {"value": defaults.guidance_scale},
        "guidance_scale_2": {"value": second, "visible": spec.experts > 1},
        "shift": shift_field.model_values(spec),
        **acceleration.model_values(spec),
    }


def filled(
    stored: Mapping[str, Any], models: dict[str, ModelSpec], preset: str = "", gpus: int = 1
) -> dict[str, dict[str, Any]]:
    """Return properties for the choice of sizes and every control that bring stored values back.

    The stored values come from a browser: those that a control could not show are passed over, as is a model that is
    no longer there, with all that belongs to it. Backends that were kept under another preset than this one give way
    to it: whoever starts the app with other flags means them.

    Args:
        gpus: how many there are: more are not brought back.
    """
    known = stored.get("model") in list(models)
    name = stored["model"] if known else next(iter(models))
    values = model_values(models[name]) | {"model": {"value": name}}
    for control in ("prompt", "seed"):
        given = stored.get(control)
        values[control] = {"value": str(given) if isinstance(given, str | int) else ""}
    if known:
        if isinstance(stored.get("negative_prompt"), str):
            values["negative_prompt"]["value"] = stored["negative_prompt"]
        for control in ("width", "height", "frames", "fps", "steps", "guidance_scale", "guidance_scale_2"):
            given = stored.get(control)
            if isinstance(given, int | float) and math.isfinite(given):
                values[control]["value"] = given
        values["shift"]["value"] = shift_field.shown(stored.get("shift"))
    values["size"]["value"] = size_value(models[name], values["width"]["value"], values["height"]["value"])
    chosen = _chosen(stored)
    if "backends" not in stored and stored.get("preset", "") != preset:
        chosen = {name: value for name, value in chosen.items() if not name.startswith("backend_")}
    if chosen.get("gpus") not in acceleration.GPUS[: 1 + gpus]:
        chosen.pop("gpus", None)
    for control in acceleration.CHOICES:
        values.setdefault(control, {}).update({"value": chosen[control]} if control in chosen else {})
    return values | {
        "loras": {"value": lora_field.shown(stored.get("loras"))},
        "step_cache": {"value": acceleration.step_cache_shown(stored.get("step_cache"))},
    }


def _chosen(stored: Mapping[str, Any]) -> dict[str, str]:
    """Return the choices that stored values hold; a result says `backends`, by component or for all."""
    backends = stored.get("backends")
    given = dict(stored)
    if isinstance(backends, Mapping):
        given |= {f"backend_{name}": backends.get(name, backends.get(ALL, AUTO)) for name in COMPONENTS}
    return {
        name: given[name] if given[name] in known else known[0]
        for name, known in acceleration.CHOICES.items()
        if isinstance(given.get(name), str)
    }


def preset_name(backends: Mapping[str, str]) -> str:
    """Return what tells one preset of backends from another."""
    return ",".join(f"{name}={backend}" for name, backend in sorted(backends.items()))


def size_value(spec: ModelSpec, width: object, height: object) -> str:
    """Return the choice of sizes that goes with a width and a height."""
    return f"{width}x{height}" if (width, height) in spec.sizes else CUSTOM


def length_line(frames: int, fps: int) -> str:
    """Return the line that tells frames and seconds together; page.js keeps it up to date."""
    return f'<p class="length">{formatting.length(frames, fps)}</p>'


def read(values: Sequence[Any], models: dict[str, ModelSpec]) -> GenerationRequest:
    """Read the controls' values, in the order of `NAMES`.

    Raises:
        TandemError: for a value that cannot be, naming it.
    """
    given = _by_name(values)
    spec = check_offered(given["model"], models)
    given["prompt"] = "" if given["prompt"] is None else given["prompt"]
    given["seed"], given["gpus"] = _seed(given["seed"]), formatting.whole(given["gpus"])
    given["loras"], given["shift"] = lora_field.read(given["loras"]), shift_field.read(given["shift"])
    given["step_cache"] = read_step_cache(given["step_cache"])
    if spec.experts == 1:
        given["guidance_scale_2"] = AUTO
    chosen = {name: given.pop(f"backend_{name}") for name in COMPONENTS}
    given["backends"] = {name: chosen[name] for name in spec.component_names if chosen[name] != AUTO}
    for name, value in given.items():
        if value is None and name not in {"negative_prompt", "shift", *acceleration.CHOICES}:
            default = model_values(spec)[name]["value"]  # as the form shows it
            raise InvalidRequestError(name, f"The {label(name)} is empty.", f"Give one, such as {default:g}.")
    return GenerationRequest(**given)


def read_basics(values: Sequence[Any], models: dict[str, ModelSpec]) -> GenerationRequest:
    """Read the values of a form that has no more than the controls of `BASIC`.

    Raises:
        TandemError: for a value that cannot be, naming it.
    """
    others = {name: known[0] for name, known in acceleration.CHOICES.items()} | {"loras": "", "step_cache": NONE}
    return read([*values, *(others[name] for name in NAMES[len(BASIC) :])], models)


def read_settings(values: Sequence[Any], models: dict[str, ModelSpec]) -> GenerationRequest:
    """Read the controls' values but for the words and the seed, which change nothing in what runs where.

    Raises:
        TandemError: for a value that cannot be, naming it.
    """
    given = _by_name(values) | {"prompt": "none", "negative_prompt": None, "seed": ""}
    return read([given[name] for name in NAMES], models)


def with_prompt(values: Sequence[Any], prompt: str) -> list[Any]:
    """Return the controls' values with another prompt."""
    return [prompt if name == "prompt" else value for name, value in zip(NAMES, values, strict=False)]


def read_model(values: Sequence[Any], models: dict[str, ModelSpec]) -> ModelSpec:
    """Read which model is chosen, whatever else the controls say.

    Raises:
        TandemError: for one that is not offered.
    """
    return check_offered(_by_name(values)["model"], models)


def _by_name(values: Sequence[Any]) -> dict[str, Any]:
    if len(values) != len(NAMES):
        raise InvalidRequestError("form", "The form is not whole.", "Load the page again.")
    return dict(zip(NAMES, values, strict=True))


def _seed(value: Any) -> Any:
    """Return the number in the field, "auto" for an empty one, and what is neither as it is, to be refused by name."""
    given = value.strip() if isinstance(value, str) else value
    return AUTO if given is None or given == "" else formatting.whole(given)
