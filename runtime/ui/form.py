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
from runtime.core.messages.components import TITLES, title_of
from runtime.core.request import BACKENDS, COMPONENTS, FIELDS, GenerationRequest
from runtime.core.request_fields import AUTO, Number
from runtime.engines.builders import builders_of
from runtime.machine.probe import Machine
from runtime.models.catalogue import check_offered, published
from runtime.models.spec import ModelSpec
from runtime.planner.placement import VAE_PSNR, usable_gpus
from runtime.ui import fields, formatting
from runtime.ui.formatting import page_text, render
from runtime.ui.watchers import MOST_WATCHERS

TENSORRT = "tensorrt"
CUSTOM = "custom"
# Sliders end at this many steps, and at this many times the model's longest clip.
_STEPS_SHOWN = 100
_LENGTHS_SHOWN = 2
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


# Events that the browser handles alone.
LOCAL: dict[str, Any] = {"fn": None, "show_progress": "hidden", "api_visibility": "private", "queue": False}
# Events that the server handles. Each of the three groups has its own slots of Gradio's queue (`server.SLOTS`), so that
# pages and programs that follow jobs, for hours perhaps, never take the slots of the buttons.
_PRIVATE: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
SERVED: dict[str, Any] = {**_PRIVATE, "concurrency_id": "controls", "concurrency_limit": 40}
# More than `Watchers` admits: a newcomer starts before an older watcher has noticed that it ended.
WATCHING: dict[str, Any] = {**_PRIVATE, "concurrency_id": "pages", "concurrency_limit": 2 * MOST_WATCHERS}
STREAMED: dict[str, Any] = {"concurrency_id": "programs", "concurrency_limit": 160}


@dataclass
class Form:
    """A form, or a part of one.

    Attributes:
        controls: by name, in the order of `NAMES` or `BASIC`.
        others: what else depends on the model, by name: the choice of sizes, the rows of the acceleration panel.
    """

    controls: dict[str, Any]
    others: dict[str, Any]


def acceleration_panel(spec: ModelSpec, machine: Machine, backends: Mapping[str, str]) -> Form:
    """Create the acceleration panel.

    Args:
        backends: initial backends by component.
    """
    values = model_values(spec)
    unavailable = tensorrt_problem(machine)
    controls: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    with gr.Accordion("Acceleration", open=False, elem_id="acceleration", elem_classes="fold"):
        for name in COMPONENTS:
            backend, chosen = f"{fields.BACKEND}{name}", backends.get(name, AUTO)
            with gr.Row(elem_classes="part", elem_id=f"part-{name}", **values[f"row_{name}"]) as rows[f"row_{name}"]:
                choice = controls[backend] = gr.Dropdown(
                    choices=[(title, value) for value, title in BACKENDS.items()],
                    value=chosen,
                    filterable=False,
                    elem_id=f"field-{backend}",
                    **values[backend],
                )
                toggle = gr.Checkbox(
                    label="TensorRT",
                    value=chosen == TENSORRT,
                    interactive=unavailable is None,
                    elem_id=f"tensorrt-{name}",
                    elem_classes="toggle",
                )
                gr.HTML(render("plan_part.html", part=name), elem_classes="badge-line", apply_default_css=False)
            toggle.input(**LOCAL, inputs=toggle, outputs=choice, js=f"(on) => on ? '{TENSORRT}' : '{AUTO}'")
            choice.change(**LOCAL, inputs=choice, outputs=toggle, js=f"(name) => name === '{TENSORRT}'")
        if unavailable is not None:
            gr.HTML(render("no_tensorrt.html", reason=page_text(unavailable).what), apply_default_css=False)
        psnr = f"PSNR to float32: {VAE_PSNR['bfloat16']} dB with bfloat16, {VAE_PSNR['float16']} dB with float16."
        properties = {"gpus": _gpus(machine), "vae_precision": {"info": f"{FIELDS['vae_precision'].help} {psnr}"}}
        for name, declared in FIELDS.items():
            if declared.group == "acceleration" and name != "backends":
                controls[name] = fields.control(name, **properties.get(name, {}))
        gr.HTML(render("plan_part.html", part="summary"), elem_id="plan-summary", apply_default_css=False)
        # Pressed by the script when a memory strategy is selected.
        gr.Button("Choose a strategy", visible="hidden", elem_id="choose-strategy").click(
            **LOCAL, outputs=[controls["offload"], controls["quantization"]], js="() => window.tandem.strategy"
        )
    return Form(controls, rows)


def _gpus(machine: Machine) -> dict[str, Any]:
    """Return the properties of the choice of GPUs."""
    count = len(usable_gpus(machine))
    titles = {"1": "One", AUTO: "All identical GPUs", **{str(n): str(n) for n in range(2, count + 1)}}
    return {"choices": [(title, value) for value, title in titles.items()], "value": "1", "visible": count > 1}


def tensorrt_problem(machine: Machine) -> Fact | None:
    """Return why TensorRT engines cannot be built or run on this machine, `None` if they can."""
    problems = [builder.unavailable(machine) for builder in builders_of(TENSORRT)]
    return None if None in problems else problems[0]


def all_settings(
    models: Mapping[str, ModelSpec],
    chosen: str,
    prompt: gr.Textbox,
    machine: Machine,
    backends: Mapping[str, str],
) -> Form:
    """Create the settings of the owner's page.

    Args:
        prompt: the prompt's control.
        backends: the initial backends by component; "auto" for those not named.
    """
    basics = basic_settings(models, chosen, prompt, model_values(models[chosen]))
    panel = acceleration_panel(models[chosen], machine, backends)
    with gr.Accordion(FIELDS["loras"].label, open=False, elem_id="loras", elem_classes="fold"):
        info = "One a line: name:weight from weights/loras in the cache folder; high= or low= selects one expert."
        loras = fields.control("loras", label="Names", info=info)
    created = basics.controls | panel.controls | {"loras": loras}
    return Form({name: created[name] for name in NAMES}, basics.others | panel.others)


def basic_settings(
    models: Mapping[str, ModelSpec], chosen: str, prompt: gr.Textbox, values: Mapping[str, Mapping[str, Any]]
) -> Form:
    """Create the settings that visitors have too; size, length and seed react in the browser, without the server.

    Args:
        prompt: the prompt's control.
        values: the properties of the controls that depend on the model, see `model_values`.
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
    random.click(**LOCAL, outputs=made["seed"], js="() => ''")
    with gr.Accordion("More settings", open=False, elem_id="more", elem_classes="fold"):
        for name in (name for name, declared in FIELDS.items() if declared.group == "more"):
            made[name] = fields.control(name, **values.get(name, {}))
    sides, timing = [made["width"], made["height"]], [made["frames"], made["fps"]]
    size.input(**LOCAL, inputs=[size, *sides], outputs=sides, js="(size, w, h) => window.tandem.sizeChosen(size, w, h)")
    for side in sides:
        side.change(**LOCAL, inputs=[size, *sides], outputs=size, js="(size, w, h) => window.tandem.sizeTyped(w, h)")
    for part in timing:
        part.change(**LOCAL, inputs=timing, outputs=length, js="(frames, fps) => window.tandem.length(frames, fps)")
    return Form({name: made[name] for name in BASIC}, {"size": size})


def model_choices(models: Mapping[str, ModelSpec]) -> list[tuple[str, str]]:
    """Return the choices of the model's control: titles and names."""
    return [(f"{spec.title} ({spec.license})", name) for name, spec in tuple(models.items())]


def model_values(spec: ModelSpec) -> dict[str, dict[str, Any]]:
    """Return the properties of the controls that follow the model, by name."""
    defaults, stride = spec.defaults, spec.vae.scale_factor_temporal
    titles = {name: title_of(name, spec.component_names) for name in TITLES}
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
            "maximum": _LENGTHS_SHOWN * max(*spec.frame_counts, defaults.frames) // stride * stride + 1,
            "step": stride,
        },
        "fps": {"value": defaults.fps},
        "negative_prompt": {"value": defaults.negative_prompt},
        "steps": {"value": defaults.steps, "minimum": 1, "maximum": max(_STEPS_SHOWN, defaults.steps), "step": 1},
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
