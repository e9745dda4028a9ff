"""The web form: the layout of its controls, the acceleration panel, reading its values into a request.

Values come from a browser and can be of any type: `GenerationRequest` and the planner validate them and name the field,
so Gradio's own checks are left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from runtime.core.errors import InvalidRequestError
from runtime.core.facts import Fact
from runtime.core.request import BACKENDS, COMPONENTS, FIELDS, GenerationRequest
from runtime.core.request_fields import AUTO, Number
from runtime.engines.builders import builders_of
from runtime.machine.probe import Machine
from runtime.models.catalogue import published
from runtime.models.spec import ModelSpec
from runtime.planner.placement import VAE_PSNR, usable_gpus
from runtime.server.model_choices import check_offered
from runtime.ui import fields, formatting, theme
from runtime.ui.formatting import COMPONENT_TITLES, page_text, render

TENSORRT = "tensorrt"


@dataclass
class AccelerationPanel:
    """The controls of the panel that are not settings.

    Attributes:
        rows: one for each component.
        toggles: TensorRT on or off, one for each component; each mirrors the choice of the backend.
        choose_strategy: pressed by the script when a strategy is selected.
    """

    rows: dict[str, Any]
    toggles: dict[str, Any]
    choose_strategy: gr.Button


def acceleration_panel(
    spec: ModelSpec, machine: Machine, backends: Mapping[str, str]
) -> tuple[AccelerationPanel, dict[str, Any]]:
    """Create the panel; return it and its settings by field.

    Args:
        backends: initial backends by component.
    """
    values = model_values(spec)
    absent = tensorrt_problem(machine)
    settings: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    toggles: dict[str, Any] = {}
    with gr.Accordion("Acceleration", open=False, elem_id="acceleration", elem_classes="fold"):
        for name in COMPONENTS:
            chosen = backends.get(name, AUTO)
            with gr.Row(elem_classes="part", elem_id=f"part-{name}", **values[f"row_{name}"]) as rows[name]:
                settings[f"backend_{name}"] = gr.Dropdown(
                    choices=[(title, value) for value, title in BACKENDS.items()],
                    value=chosen,
                    filterable=False,
                    elem_id=f"field-backend_{name}",
                    **values[f"backend_{name}"],
                )
                toggles[name] = gr.Checkbox(
                    label="TensorRT",
                    value=chosen == TENSORRT,
                    interactive=absent is None,
                    elem_id=f"tensorrt-{name}",
                    elem_classes="toggle",
                )
                gr.HTML(render("plan_part.html", part=name), elem_classes="badge-line", apply_default_css=False)
        if absent is not None:
            gr.HTML(render("no_tensorrt.html", reason=page_text(absent).what), apply_default_css=False)
        psnr = f"PSNR to float32: {VAE_PSNR['bfloat16']} dB with bfloat16, {VAE_PSNR['float16']} dB with float16."
        properties = {"gpus": _gpus(machine), "vae_precision": {"info": f"{FIELDS['vae_precision'].help} {psnr}"}}
        for name, declared in FIELDS.items():
            if declared.group == "acceleration" and name != "backends":
                settings[name] = fields.control(name, **properties.get(name, {}))
        gr.HTML(render("plan_part.html", part="summary"), elem_id="plan-summary", apply_default_css=False)
        choose_strategy = gr.Button("Choose a strategy", visible="hidden", elem_id="choose-strategy")
    return AccelerationPanel(rows, toggles, choose_strategy), settings


def _gpus(machine: Machine) -> dict[str, Any]:
    """Return the properties of the choice of GPUs."""
    count = len(usable_gpus(machine))
    titles = {"1": "One", AUTO: "All identical GPUs", **{str(n): str(n) for n in range(2, count + 1)}}
    return {"choices": [(title, value) for value, title in titles.items()], "value": "1", "visible": count > 1}


def tensorrt_problem(machine: Machine) -> Fact | None:
    """Return why TensorRT engines cannot be built or run on this machine, `None` if they can."""
    problems = [builder.unavailable(machine) for builder in builders_of(TENSORRT)]
    return None if None in problems else problems[0]


CUSTOM = "custom"
_WIDEST_STEPS = 100
_MODEL_FRAMES_SHOWN = 2


NAMES = tuple(
    control
    for name in FIELDS
    for control in ([f"{fields.BACKEND}{one}" for one in COMPONENTS] if name == "backends" else [name])
)
# The controls that visitors of a share link have too: those that do not choose what runs where.
BASIC = tuple(name for name, declared in FIELDS.items() if declared.group in {"prompt", "video", "more"})
# The controls that a change of model sets to its defaults.
FOLLOWING_MODEL = (
    "width", "height", "frames", "fps", "negative_prompt", "steps", "guidance_scale", "guidance_scale_2", "shift",
    *(f"{fields.BACKEND}{name}" for name in COMPONENTS),
)  # fmt: skip
# The rows of the acceleration panel, which are visible where the model has the component.
ROWS = tuple(f"row_{name}" for name in COMPONENTS)


def compose() -> tuple[gr.Textbox, list[tuple[gr.Button, str]]]:
    """Make the prompt and the examples below it; return it and each example's button with its prompt."""
    prompt = gr.Textbox(
        label=FIELDS["prompt"].label,
        info=FIELDS["prompt"].help,
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
    """The settings that every page has.

    Attributes:
        controls: by the names of `BASIC`, in that order.
        size: the choice of the model's sizes.
        length: the line with the video's length in seconds.
    """

    controls: dict[str, Any]
    size: gr.Radio
    length: gr.HTML


@dataclass
class Settings(Basics):
    """All settings: `controls` by `NAMES`, in that order, and the acceleration panel."""

    panel: AccelerationPanel


def settings_group(
    models: Mapping[str, ModelSpec],
    chosen: str,
    prompt: gr.Textbox,
    machine: Machine,
    backends: Mapping[str, str],
) -> Settings:
    """Make the settings.

    Args:
        backends: the initial backends by component; "auto" for those not named.
    """
    basics = basic_settings(models, chosen, prompt, model_values(models[chosen]))
    panel, choices = acceleration_panel(models[chosen], machine, backends)
    with gr.Accordion(FIELDS["loras"].label, open=False, elem_id="loras", elem_classes="fold"):
        info = "One a line: name:weight from weights/loras in the cache folder; high= or low= selects one expert."
        loras = fields.control("loras", label="Names", info=info)
    made = basics.controls | choices | {"loras": loras}
    return Settings({name: made[name] for name in NAMES}, basics.size, basics.length, panel)


def basic_settings(
    models: Mapping[str, ModelSpec], chosen: str, prompt: gr.Textbox, values: Mapping[str, Mapping[str, Any]]
) -> Basics:
    """Make the settings that do not choose what runs where.

    Args:
        prompt: the prompt's control, made by `compose`.
        values: the properties of the controls that follow the model, see `model_values`.
    """
    made: dict[str, Any] = {"prompt": prompt}
    info = "Determines the sizes, the length and the defaults below."
    choices = model_choices(models)
    made["model"] = fields.control("model", choices=choices, value=chosen, info=info, visible=len(models) > 1)
    size = gr.Radio(
        **values["size"], label="Size", info="A size the model was trained on, or a custom one.", elem_id="size"
    )
    with gr.Row(elem_classes="pair"):
        for name in ("width", "height"):
            made[name] = fields.control(name, **values[name])
    made["frames"] = fields.control("frames", **values["frames"])
    with gr.Row(elem_id="speed-row"):
        made["fps"] = fields.control("fps", **values["fps"])
        length = gr.HTML(formatting.length(values["frames"]["value"], values["fps"]["value"]), elem_id="length")
    with gr.Row(elem_id="seed-row"):
        made["seed"] = fields.control("seed")
        random = gr.Button("Random", elem_id="random-seed", min_width=90)
    random.click(None, None, made["seed"], js="() => ''", api_visibility="private", show_progress="hidden")
    with gr.Accordion("More settings", open=False, elem_id="more", elem_classes="fold"):
        for name in (name for name, declared in FIELDS.items() if declared.group == "more"):
            made[name] = fields.control(name, **values.get(name, {}))
    return Basics({name: made[name] for name in BASIC}, size, length)


def model_choices(models: Mapping[str, ModelSpec]) -> list[tuple[str, str]]:
    """Return the choices of the model's control: titles and names."""
    return [(f"{spec.title} ({spec.license})", name) for name, spec in tuple(models.items())]


def model_values(spec: ModelSpec) -> dict[str, dict[str, Any]]:
    """Return the properties of the controls that follow the model, by name."""
    defaults, stride = spec.defaults, spec.vae.scale_factor_temporal
    titles = COMPONENT_TITLES | ({"transformer": "High-noise transformer"} if spec.experts > 1 else {})
    wide, high = spec.strides
    sizes: list[tuple[str, str]] = [(formatting.size(w, h), f"{w}x{h}") for w, h in spec.sizes]
    second = defaults.guidance_scale_2 if defaults.guidance_scale_2 is not None else defaults.guidance_scale
    return {
        "size": {"choices": [*sizes, ("Custom", CUSTOM)], "value": size_value(spec, defaults.width, defaults.height)},
        "width": {"value": defaults.width, "step": wide, "info": f"A multiple of {wide}."},
        "height": {"value": defaults.height, "step": high, "info": f"A multiple of {high}."},
        "frames": {
            "info": f"A multiple of {stride}, plus 1. More frames take more time and memory.",
            "value": defaults.frames,
            "minimum": 1,
            "maximum": _MODEL_FRAMES_SHOWN * max(*spec.frame_counts, defaults.frames) // stride * stride + 1,
            "step": stride,
        },
        "fps": {"value": defaults.fps},
        "negative_prompt": {"value": defaults.negative_prompt},
        "steps": {"value": defaults.steps, "minimum": 1, "maximum": max(_WIDEST_STEPS, defaults.steps), "step": 1},
        "guidance_scale": {"value": defaults.guidance_scale},
        "guidance_scale_2": {"value": second, "visible": spec.experts > 1},
        "shift": {"value": "", "info": f"{FIELDS['shift'].help} Empty: the model's own{_own_shift(spec)}."},
        **{f"row_{name}": {"visible": name in spec.component_names} for name in COMPONENTS},
        **{f"{fields.BACKEND}{name}": {"label": title} for name, title in titles.items()},
    }


def _own_shift(spec: ModelSpec) -> str:
    """Return the model's own shift for the help text, in parentheses."""
    known = published(spec)
    if not spec.is_downloaded or spec.noise.setting is None:
        return ""
    other = known is not None and known.flow_shift != spec.noise.shift
    return f" ({spec.noise.shift:g}{f'; the authors use {known.flow_shift:g}' if known and other else ''})"


def filled(
    stored: Mapping[str, Any], models: dict[str, ModelSpec], preset: str = "", gpus: int = 1
) -> dict[str, dict[str, Any]]:
    """Return properties for the choice of sizes and every control that restore stored values.

    The stored values come from a browser. Skipped are values that a control cannot show, a model that is no longer
    offered with all values that depend on it, and backends that were stored under other launch flags.

    Args:
        preset: the launch flags' backends, see `preset_name`.
        gpus: how many GPUs there are; larger numbers are not restored.
    """
    known = stored.get("model") in list(models)
    name = stored["model"] if known else next(iter(models))
    values = {control: dict[str, Any]() for control in NAMES} | model_values(models[name])
    values["model"] = {"value": name}
    for field, declared in FIELDS.items():
        follows_model = declared.group in {"video", "more"} and field != "seed"
        if field in {"model", "backends", "gpus"} or (follows_model and not known):
            continue
        value = fields.shown(field, stored.get(field))
        if value is not None:
            values[field]["value"] = value
        elif field == "prompt":
            values[field]["value"] = ""
    if stored.get("gpus") in ("1", AUTO, *map(str, range(2, gpus + 1))):
        values["gpus"]["value"] = stored["gpus"]
    values |= _filled_backends(stored, values, preset)
    values["size"]["value"] = size_value(models[name], values["width"]["value"], values["height"]["value"])
    return values


def _filled_backends(
    stored: Mapping[str, Any], values: Mapping[str, dict[str, Any]], preset: str
) -> dict[str, dict[str, Any]]:
    """Return the properties of the backends' controls; a result stores `backends`, by component or for all."""
    controls = [f"{fields.BACKEND}{name}" for name in COMPONENTS]
    chosen: Mapping[str, str | None] = {}
    if "backends" in stored:
        chosen = fields.shown_backends(stored["backends"])
    elif stored.get("preset", "") == preset:
        chosen = {control: fields.shown_backend(stored.get(control)) for control in controls}
    return {
        control: values[control] | ({} if chosen.get(control) is None else {"value": chosen[control]})
        for control in controls
    }


def preset_name(backends: Mapping[str, str]) -> str:
    """Return the launch flags' backends as a string that differs if any of them differs."""
    return ",".join(f"{name}={backend}" for name, backend in sorted(backends.items()))


def size_value(spec: ModelSpec, width: object, height: object) -> str:
    """Return the choice of sizes for a width and a height."""
    return f"{width}x{height}" if (width, height) in spec.sizes else CUSTOM


def read(values: Sequence[Any], models: dict[str, ModelSpec]) -> GenerationRequest:
    """Read the controls' values, in the order of `NAMES`.

    Raises:
        TandemError: for an invalid value, with its field.
    """
    given = _by_name(values)
    spec = check_offered(given["model"], models)
    backends = {name: given.pop(f"{fields.BACKEND}{name}") for name in COMPONENTS}
    request = {name: fields.read(name, value) for name, value in given.items()}
    request["prompt"] = "" if request["prompt"] is None else request["prompt"]
    request["backends"] = {name: backends[name] for name in spec.component_names if backends[name] != AUTO}
    if spec.experts == 1:
        request["guidance_scale_2"] = AUTO
    for name, value in request.items():
        if value is None and isinstance(FIELDS[name], Number) and name != "shift":
            default = model_values(spec).get(name, {}).get("value", GenerationRequest.model_fields[name].default)
            raise InvalidRequestError(name, "form.empty", default=default)
    return GenerationRequest(**request)


def read_basics(values: Sequence[Any], models: dict[str, ModelSpec]) -> GenerationRequest:
    """Read the values of a form that has only the controls of `BASIC`.

    Raises:
        TandemError: for an invalid value, with its field.
    """
    if len(values) != len(BASIC):
        raise InvalidRequestError("form", "form.incomplete")
    others = {name: str(info.default) for name, info in GenerationRequest.model_fields.items() if name not in BASIC}
    given = dict.fromkeys(NAMES, AUTO) | others | {"loras": ""} | dict(zip(BASIC, values, strict=True))
    return read([given[name] for name in NAMES], models)


def read_settings(values: Sequence[Any], models: dict[str, ModelSpec]) -> GenerationRequest:
    """Read the controls' values except prompts and seed, which do not affect the plan.

    Raises:
        TandemError: for an invalid value, with its field.
    """
    given = _by_name(values) | {"prompt": "none", "negative_prompt": None, "seed": ""}
    return read([given[name] for name in NAMES], models)


def with_prompt(values: Sequence[Any], prompt: str) -> list[Any]:
    """Return the controls' values with another prompt."""
    return [prompt if name == "prompt" else value for name, value in zip(NAMES, values, strict=False)]


def read_model(values: Sequence[Any], models: dict[str, ModelSpec]) -> ModelSpec:
    """Read the selected model; other controls may be invalid.

    Raises:
        TandemError: if it is not offered.
    """
    return check_offered(_by_name(values)["model"], models)


def _by_name(values: Sequence[Any]) -> dict[str, Any]:
    if len(values) != len(NAMES):
        raise InvalidRequestError("form", "form.incomplete")
    return dict(zip(NAMES, values, strict=True))
