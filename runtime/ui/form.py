"""The web form: its controls and their layout, and reading its values into a request.

Values come from a browser and can be of any type: `GenerationRequest` and the planner validate them and name the field,
so Gradio's own checks are left out. Choices that Gradio has no control for, such as sizes with their proportions, are
HTML; `form.js` writes what is chosen into the controls, some of which are hidden.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import gradio as gr

from runtime.core.errors import InvalidRequestError
from runtime.core.images import NO_BORDERS
from runtime.core.request import (
    COMPONENTS,
    CONTROL_FIELDS,
    CONTROL_OPTIONS,
    FIELDS,
    FINISHERS,
    NO_NAG,
    OFF,
    PROMPT_SOURCES,
    GenerationRequest,
)
from runtime.core.request_fields import AUTO, Number, VideoFile
from runtime.core.templates import as_written
from runtime.core.units import counted
from runtime.models.catalogue import check_offered, published
from runtime.models.folder import read_vocabulary
from runtime.models.registry import takes_loras
from runtime.models.spec import VAE_ENCODER, ModelSpec
from runtime.planner.clip import frames_for
from runtime.server.watchers import MOST_WATCHERS
from runtime.ui import fields, formatting, image_places, theme
from runtime.ui.formatting import render

CUSTOM = "custom"
# Where the size comes from: "image" for the proportions of the image or video, if there is one. It is no field of
# requests.
SIZE_FROM = "size_from"
FROM_IMAGE = "image"
# The fields whose image or video the size can follow.
_SIZED = ("image", "video", "control")
# The field of requests without a control: what was typed as the prompt, if that is a template.
TEMPLATE = "template"
# What the user wrote, if an enhancer has made the prompt of it; a hidden control, and a line that enhance.js shows.
ORIGINAL = "original_prompt"
NAMES = (
    *(
        control
        for name in FIELDS
        if name != TEMPLATE
        for control in ([f"{fields.BACKEND}{component}" for component in COMPONENTS] if name == "backends" else [name])
    ),
    SIZE_FROM,
)
# The fields that visitors of a share link have too: those that do not choose what runs where.
BASIC = tuple(
    name
    for name, declared in FIELDS.items()
    if declared.group in {"prompt", "video", "more", "image"} and name not in PROMPT_SOURCES
)
# Their controls.
BASIC_NAMES = (*BASIC, SIZE_FROM)
# The controls that a change of model sets to its defaults.
FOLLOWING_MODEL = (
    "prompt", "width", "height", "frames", "fps",
    "negative_prompt", "steps", "guidance_scale", "guidance_scale_2", "nag", "shift",
)  # fmt: skip
# The other elements that depend on the model.
OTHERS = ("card", "images", "sizes", "lengths")
_PROMPT_INFO = "Who or what, how it moves, where, and when."
_TIMED_INFO = "Parts of the video can have their own: [0s: the boat sails] [2s: it turns]"
# Proportions that have a name; a size is called by one that is this close.
_PROPORTIONS = ((16, 9), (9, 16), (4, 3), (3, 4), (1, 1), (3, 2), (2, 3), (21, 9))
_CLOSE = 0.04
# The longer side of a drawn proportion, in pixels.
_DRAWN = 22

# No component shows the progress of an event. Gradio's page would otherwise update every output of all earlier events
# several times an event, and copy all properties of each.
_UNSEEN: dict[str, Any] = {"show_progress": "hidden", "show_progress_on": []}
# Events that the browser handles alone.
LOCAL: dict[str, Any] = {**_UNSEEN, "fn": None, "api_visibility": "private", "queue": False}
# Events that the server handles. Each of the three groups has its own slots of Gradio's queue (`server.SLOTS`), so that
# pages and programs that follow jobs, for hours perhaps, never take the slots of the buttons.
_PRIVATE: dict[str, Any] = {**_UNSEEN, "api_visibility": "private"}
SERVED: dict[str, Any] = {**_PRIVATE, "concurrency_id": "controls", "concurrency_limit": 40}
# More than `Watchers` admits: a newcomer starts before an older watcher has noticed that it ended.
WATCHING: dict[str, Any] = {**_PRIVATE, "concurrency_id": "pages", "concurrency_limit": 2 * MOST_WATCHERS}
STREAMED: dict[str, Any] = {"concurrency_id": "programs", "concurrency_limit": 160}


@dataclass
class Form:
    """A form, or a part of one.

    Attributes:
        controls: by name.
        others: what else depends on the model, by name, see `OTHERS`.
    """

    controls: dict[str, Any]
    others: dict[str, Any]


def prompt_section(values: Mapping[str, Mapping[str, Any]], no_enhancer: str | None = None) -> Form:
    """Create the prompt, the line on words that the model does not know, and the chips, which open `popovers`.

    Args:
        values: the properties of what depends on the model, see `model_values`.
        no_enhancer: why prompts cannot be enhanced; empty if they can, `None` for a page without that.
    """
    prompt = gr.Textbox(
        label=FIELDS["prompt"].label,
        **values["prompt"],
        placeholder="a red boat sails to the right on a calm sea at sunset",
        lines=4,
        max_lines=8,
        elem_id="field-prompt",
    )
    gr.HTML(render("unknown_words.html"), elem_id="unknown-words", apply_default_css=False)
    controls = {"prompt": prompt}
    if no_enhancer is not None:
        gr.HTML(render("original_prompt.html"), elem_id="original-prompt", apply_default_css=False)
        controls[ORIGINAL] = gr.Textbox(
            "", visible="hidden", label=FIELDS[ORIGINAL].label, elem_id=f"stored-{ORIGINAL}"
        )
    gr.HTML(render("chips.html", no_enhancer=no_enhancer), elem_id="chips", apply_default_css=False)
    return Form(controls, {})


def popovers(
    models: Mapping[str, ModelSpec], chosen: str, values: Mapping[str, Mapping[str, Any]], *, panels: bool
) -> Form:
    """Create what the chips open: model, images, size, length, presets and seed. All react without the server.

    Args:
        values: the properties of what depends on the model, see `model_values`.
        panels: whether the page has the panels, which download models and know what presets cost.
    """
    controls: dict[str, Any] = {}
    with _popover("model"):
        card = gr.HTML(**values["card"], elem_id="card", apply_default_css=False)
        choices = model_choices(models)
        controls["model"] = fields.control("model", choices=choices, value=chosen, info=None, visible=len(models) > 1)
        if panels:
            gr.HTML(render("get_models.html"), elem_id="get-models", apply_default_css=False)
    with _popover("images"):
        images = gr.HTML(**values["images"], elem_id="images", apply_default_css=False)
    # The script draws them; see images.js.
    for name in (name for name, declared in FIELDS.items() if declared.group == "image"):
        stored: dict[str, Any] = {"visible": "hidden", "label": FIELDS[name].label, "elem_id": f"stored-{name}"}
        default = GenerationRequest.model_fields[name].default
        number = isinstance(FIELDS[name], Number) and not FIELDS[name].placeholder
        text = "" if default == AUTO else fields.stored_text(name, default)
        controls[name] = gr.Number(default, **stored) if number else gr.Textbox(text, **stored)
    controls[SIZE_FROM] = gr.Textbox("", visible="hidden", label="Size from", elem_id=f"stored-{SIZE_FROM}")
    with _popover("size"):
        sizes = gr.HTML(**values["sizes"], elem_id="size", apply_default_css=False)
        with gr.Row(elem_id="sides", elem_classes="pair"):
            for name in ("width", "height"):
                controls[name] = fields.control(name, **values[name])
    with _popover("length"):
        lengths = gr.HTML(**values["lengths"], elem_id="length", apply_default_css=False)
        with gr.Column(elem_id="custom-length"):
            controls["frames"] = fields.control("frames", **values["frames"])
        controls["fps"] = fields.control("fps", **values["fps"], info="A faster playback shortens the video.")
    # For restored settings and programs; the page offers lengths in seconds that the model was made for.
    controls["seconds"] = gr.Textbox("", visible="hidden", label=FIELDS["seconds"].label, elem_id="stored-seconds")
    if panels:
        with _popover("quality"):
            gr.HTML(render("plan_part.html", part="presets"), elem_id="presets", apply_default_css=False)
            gr.HTML(render("own_presets.html"), elem_id="own-presets", apply_default_css=False)
        with _popover("prompts"):
            gr.HTML(render("recent_prompts.html"), apply_default_css=False)
    with _popover("seed"):
        controls["seed"] = fields.control("seed", info="Empty: a new one each time.")
    return Form(controls, {"card": card, "images": images, "sizes": sizes, "lengths": lengths})


def _popover(name: str) -> gr.Column:
    """Return a column that a chip opens; `popovers.js` makes it a popover of the browser's."""
    return gr.Column(elem_id=f"pop-{name}", elem_classes="popover")


def file_section() -> None:
    """Create what fills the form from a video, and what resets it. The page keeps its own prompt."""
    defaults = GenerationRequest(prompt="any").to_json()
    gr.HTML(render("make_actions.html", defaults=defaults), elem_id="actions-more", apply_default_css=False)


def sampling_section(values: Mapping[str, Mapping[str, Any]]) -> Form:
    """Create the controls that change how the model makes the video.

    Args:
        values: the properties of what depends on the model, see `model_values`.
    """
    gr.HTML(render("section.html", title="Sampling"), apply_default_css=False)
    with gr.Row(elem_id="sampling", elem_classes="fields"):
        names = [name for name, declared in FIELDS.items() if declared.group == "more"]
        return Form({name: fields.control(name, **values.get(name, {})) for name in sorted(names, key=_is_text)}, {})


def _is_text(name: str) -> bool:
    return name == "negative_prompt"


def acceleration_section(backends: Mapping[str, str]) -> Form:
    """Create what says how the machine makes the video; the panel of the plan draws the choices.

    Args:
        backends: initial backends by component; "auto" for those not named.
    """
    gr.HTML(render("section.html", title="Acceleration"), apply_default_css=False)
    controls: dict[str, Any] = {}
    for name, declared in FIELDS.items():
        if declared.group == "acceleration":
            stored = {f"{fields.BACKEND}{component}": backends.get(component, AUTO) for component in COMPONENTS}
            for control, value in (stored if name == "backends" else {name: fields.unchanged(name)}).items():
                controls[control] = gr.Textbox(
                    value, visible="hidden", label=declared.label, elem_id=f"stored-{control}"
                )
    for part in ("summary", "components", "options"):
        gr.HTML(render("plan_part.html", part=part), elem_id=f"plan-{part}", apply_default_css=False)
    return Form(controls, {})


def finishing_section() -> Form:
    """Create what is done with the frames and the sound; the panel of the plan draws the choices."""
    gr.HTML(render("section.html", title="Loop, sound, frame rate and size"), apply_default_css=False)
    names = [name for name, declared in FIELDS.items() if declared.group == "finishing"]
    controls: dict[str, Any] = {
        name: gr.Textbox(fields.unchanged(name), visible="hidden", label=FIELDS[name].label, elem_id=f"stored-{name}")
        for name in names
    }
    gr.HTML(render("plan_part.html", part="finishing"), elem_id="plan-finishing", apply_default_css=False)
    return Form(controls, {})


def loras_section() -> Form:
    """Create the choice of LoRAs."""
    gr.HTML(render("section.html", title=FIELDS["loras"].label), elem_id="title-loras", apply_default_css=False)
    gr.HTML(render("loras.html"), elem_id="panel-loras", apply_default_css=False)
    info = (
        "One a line: name:strength. high= or low= before the name selects one expert or stage, @0-0.5 after it a part "
        "of the steps."
    )
    return Form({"loras": fields.control("loras", label="By hand", info=info)}, {})


def joined(parts: Iterable[Form]) -> Form:
    """Return a form of several parts, with its controls in the order of `NAMES`."""
    created: dict[str, Any] = {}
    dependents: dict[str, Any] = {}
    for part in parts:
        created |= part.controls
        dependents |= part.others
    return Form({name: created[name] for name in NAMES if name in created}, dependents)


def model_choices(models: Mapping[str, ModelSpec]) -> list[tuple[str, str]]:
    """Return the choices of the model's control: titles and names."""
    return [
        (spec.title if spec.license == "unknown" else f"{spec.title} ({spec.license})", name)
        for name, spec in tuple(models.items())
    ]


def model_values(
    spec: ModelSpec, models: Mapping[str, ModelSpec], *, from_image: bool = False
) -> dict[str, dict[str, Any]]:
    """Return the properties of the controls and elements that follow the model, by name.

    Args:
        models: what the page offers, by name.
        from_image: whether the form has an image.
    """
    defaults, stride = spec.defaults, spec.frame_stride
    wide, high = spec.strides
    guidance = image_places.guidance(spec, from_image=from_image)
    lacking = lacks(spec)
    guidance_info = FIELDS["guidance_scale"].help
    if spec.embedded_guidance:
        guidance_info = "How closely the video follows the prompt. It is an input of the model and takes no time."
    own_prompts = "" if spec.section is None else f" {_TIMED_INFO}"
    return {
        "prompt": {"info": f"{_PROMPT_INFO}{own_prompts}"},
        "card": {"value": card_html(spec)},
        "images": {"value": image_places.places_html(spec, models)},
        "sizes": {"value": sizes_html(spec.sizes)},
        "lengths": {"value": lengths_html(spec.frame_counts, defaults.fps, spec)},
        "width": {"value": defaults.width, "step": wide, "info": f"A multiple of {wide}."},
        "height": {"value": defaults.height, "step": high, "info": f"A multiple of {high}."},
        "frames": {
            "info": f"A multiple of {stride}, plus 1.",
            "value": defaults.frames,
            "minimum": spec.least_frames,
            "step": stride,
        },
        "fps": {"value": defaults.fps},
        "negative_prompt": {"value": defaults.negative_prompt, "visible": "negative_prompt" not in lacking},
        "steps": {"value": defaults.steps},
        "guidance_scale": {"value": guidance["guidance_scale"], "info": guidance_info},
        "guidance_scale_2": {"value": guidance["guidance_scale_2"], "visible": "guidance_scale_2" not in lacking},
        "nag": {"value": NO_NAG, "visible": "nag" not in lacking},
        "stages": {"visible": "stages" not in lacking},
        "shift": {"value": "", "info": f"{FIELDS['shift'].help} Empty: the model's own{_own_shift(spec)}."},
    }


def lacks(spec: ModelSpec) -> frozenset[str]:
    """Return the request fields that a model does not have; the form does not show them."""
    steering = () if spec.control_input is None else spec.control_input.fields
    return spec.unsupported | {
        name
        for name, there in (
            ("negative_prompt", not spec.embedded_guidance),
            ("guidance_cache", not spec.embedded_guidance),
            ("guidance_scale_2", spec.experts > 1),
            ("stages", spec.refinement is not None),
            ("compile", "compiled" not in spec.lacks),
            ("attention", "attention" not in spec.lacks),
            ("loras", takes_loras(spec.family)),
            *((name, name in steering) for name in (*CONTROL_FIELDS, *CONTROL_OPTIONS)),
            *((name, spec.takes_keyframes) for name in ("keyframes", "keyframe_seconds")),
            *((name, spec.takes_given_frames) for name in ("extend_frames", "join")),
        )
        if not there
    }


def card_html(spec: ModelSpec, *, panels: bool = True) -> str:
    """Return the card of a model: what it is called, shows and knows, and what it costs.

    Args:
        panels: whether the page has the panels, which know what it costs.
    """
    return render(
        "model_card.html",
        spec=spec,
        panels=panels,
        picture=theme.picture_of(spec),
        words=list(spec.words.items()),
        vocabulary=" ".join(sorted(read_vocabulary(spec.directory))),
        lacks=" ".join(sorted(lacks(spec))),
    )


def sizes_html(sizes: Sequence[tuple[int, int]]) -> str:
    """Return the choice of sizes, each with its proportion drawn."""
    choices = [(f"{w}x{h}", proportion(w, h), formatting.size(w, h), *_drawn(w, h)) for w, h in sizes]
    return render("sizes.html", sizes=choices, custom=CUSTOM, from_image=FROM_IMAGE)


def lengths_html(frame_counts: Sequence[int], fps: int, spec: ModelSpec) -> str:
    """Return the choice of lengths in seconds at a playback speed, and in frames or sections."""
    stride = 0 if spec.section is None else spec.frame_stride
    units = [counted(spec.sections(count), "section") if stride else counted(count, "frame") for count in frame_counts]
    seconds = [f"{count / fps:.1f} s" for count in frame_counts]
    return render("lengths.html", lengths=zip(frame_counts, seconds, units, strict=True), custom=CUSTOM, stride=stride)


def defaults_html(
    models: Mapping[str, ModelSpec], sizes: Callable[[ModelSpec], Sequence[tuple[int, int]]] = lambda spec: spec.sizes
) -> str:
    """Return the choice of the default model and size; the browser stores what is chosen.

    Args:
        models: what the page offers, by name.
        sizes: returns the sizes of a model that are offered.
    """
    choices = [
        (name, spec.title, [[f"{w}x{h}", formatting.size(w, h)] for w, h in sizes(spec)])
        for name, spec in tuple(models.items())
    ]
    return render("settings_defaults.html", models=choices)


def proportion(width: int, height: int) -> str:
    """Return the proportion of a size: "16:9" for one that is close to it, else the exact one if it is short."""
    ratio = width / height
    close = min(_PROPORTIONS, key=lambda pair: abs(pair[0] / pair[1] / ratio - 1))
    if abs(close[0] / close[1] / ratio - 1) <= _CLOSE:
        return f"{close[0]}:{close[1]}"
    shared = gcd(width, height)
    return f"{width // shared}:{height // shared}"


def _drawn(width: int, height: int) -> tuple[int, int]:
    """Return the sides of the small rectangle that stands for a size."""
    longer = max(width, height)
    return round(_DRAWN * width / longer), round(_DRAWN * height / longer)


def _own_shift(spec: ModelSpec) -> str:
    """Return the model's own shift for the help text, in parentheses."""
    model = published(spec)
    if not spec.is_downloaded or spec.noise.setting is None:
        return ""
    differs = model is not None and model.flow_shift != spec.noise.shift
    return f" ({spec.noise.shift:g}{f'; the authors use {model.flow_shift:g}' if model and differs else ''})"


def as_typed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored values, of a form or a request, with the template of a prompt as the prompt.

    A prompt that was enhanced stands as it is, also if what was enhanced was made of a template.
    """
    values = {name: value for name, value in stored.items() if name != TEMPLATE}
    template, prompt = stored.get(TEMPLATE), stored.get("prompt")
    if template and stored.get(ORIGINAL) and isinstance(prompt, str):
        template = as_written(prompt)
    return values | ({"prompt": template} if isinstance(template, str) and template else {})


def filled(
    stored: Mapping[str, Any], models: dict[str, ModelSpec], preset: str = "", gpus: int = 1
) -> dict[str, dict[str, Any]]:
    """Return properties for every control and for what else depends on the model that restore stored values.

    The stored values come from a browser. Skipped are values that a control cannot show, a model that is no longer
    offered with all values that depend on it, and backends that were stored under other launch flags.

    Args:
        preset: the launch flags' backends, see `preset_name`.
        gpus: how many GPUs there are; larger numbers are not restored.
    """
    has_model = stored.get("model") in list(models)
    name = stored["model"] if has_model else next(iter(models))
    of_model = model_values(models[name], models, from_image=bool(stored.get("image")))
    values = {control: dict[str, Any]() for control in NAMES} | of_model
    values["model"] = {"value": name}
    for field in FIELDS:
        declared = FIELDS[field]
        follows_model = declared.group in {"video", "more"} and field != "seed"
        if field in {"model", "backends", "gpus", TEMPLATE} or (follows_model and not has_model):
            continue
        value = fields.shown(field, stored.get(field))
        if value is not None:
            values[field]["value"] = value
        elif field in {"prompt", ORIGINAL}:
            values[field]["value"] = ""
    values |= _length(models[name], values)
    if str(stored.get("gpus")) in ("1", AUTO, *map(str, range(2, gpus + 1))):  # a number in requests
        values["gpus"]["value"] = str(stored["gpus"])
    from_image = stored.get(SIZE_FROM) == FROM_IMAGE or AUTO in (stored.get("width"), stored.get("height"))
    has_input = any(values[name].get("value") for name in _SIZED)
    values[SIZE_FROM]["value"] = FROM_IMAGE if from_image and has_input else ""
    values |= _filled_backends(stored, values, preset)
    return values


def _length(spec: ModelSpec, values: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the properties that show a stored length in seconds in frames; none if there is none, or it is invalid."""
    seconds = values["seconds"].get("value")
    if not seconds:
        return {}
    try:
        request = GenerationRequest(prompt="none", seconds=fields.read("seconds", seconds))
        frames = frames_for(request, spec, int(values["fps"]["value"]))
    except InvalidRequestError:
        return {}  # Generate refuses it
    return {"frames": values["frames"] | {"value": frames}, "seconds": {"value": ""}}


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


def read(values: Sequence[Any], models: dict[str, ModelSpec]) -> GenerationRequest:
    """Read the controls' values, in the order of `NAMES`.

    Raises:
        TandemError: for an invalid value, with its field.
    """
    settings = by_name(values)
    spec = check_offered(settings["model"], models)
    size_from = settings.pop(SIZE_FROM)
    backends = {name: settings.pop(f"{fields.BACKEND}{name}") for name in COMPONENTS}
    request = {name: fields.read(name, value) for name, value in settings.items()}
    request["prompt"] = "" if request["prompt"] is None else request["prompt"]
    if request[ORIGINAL] in ("", request["prompt"]):  # not enhanced, or undone
        request[ORIGINAL] = None
    chosen = {name: backend for name, backend in backends.items() if name in {*spec.component_names, *FINISHERS}}
    request["backends"] = {name: backend for name, backend in chosen.items() if backend != AUTO}
    if "vae" in request["backends"] and VAE_ENCODER in chosen:
        request["backends"][VAE_ENCODER] = chosen[VAE_ENCODER]  # the VAE's other part has its own control
    # The form does not show them, and keeps the values of another model.
    for name in lacks(spec):
        request[name] = GenerationRequest.model_fields[name].get_default(call_default_factory=True)
    # The form shows no place for what the model does not take.
    for name, taken in (
        ("image", spec.image_input is not None),
        ("last_image", spec.image_input is not None and spec.image_input.last != "none"),
        ("video", spec.video_input is not None),
        ("extend", spec.starts_from_images),
    ):
        request[name] = request[name] if taken else None
    if request["control"] is None:  # the form shows it with a control video only
        request |= {"preprocess": OFF, "control_start": 0, "outpaint": NO_BORDERS}
    if not request["keyframes"]:  # the form shows times with keyframes only
        request["keyframe_seconds"] = ()
    if request["extend"] is None:
        request |= {"extend_frames": AUTO, "join": None}
    else:
        request["width"] = request["height"] = request["fps"] = AUTO
    if size_from == FROM_IMAGE and any(request[name] is not None for name in _SIZED):
        request["width"] = request["height"] = AUTO
    for name, value in request.items():
        if value is None and isinstance(FIELDS[name], Number) and name != "shift":
            following = model_values(spec, models, from_image=request["image"] is not None).get(name, {})
            default = following.get("value", GenerationRequest.model_fields[name].default)
            raise InvalidRequestError(name, "form.empty", default=default)
    read = GenerationRequest(**request)
    fields.check_copies(read)
    return read


def read_basics(values: Sequence[Any], models: dict[str, ModelSpec]) -> GenerationRequest:
    """Read the values of a form that has only the controls of `BASIC_NAMES`.

    Raises:
        TandemError: for an invalid value, with its field.
    """
    if len(values) != len(BASIC_NAMES):
        raise InvalidRequestError("form", "form.incomplete")
    defaults = {name: str(info.default) for name, info in GenerationRequest.model_fields.items() if name not in BASIC}
    settings = dict.fromkeys(NAMES, AUTO) | defaults | {"loras": ""} | dict(zip(BASIC_NAMES, values, strict=True))
    # Visitors have no places for videos.
    settings |= {name: "" for name, declared in FIELDS.items() if isinstance(declared, VideoFile)}
    return read([settings[name] for name in NAMES], models)


def read_settings(values: Sequence[Any], models: dict[str, ModelSpec]) -> GenerationRequest:
    """Read the controls' values except prompts and seed, which do not affect the plan.

    Raises:
        TandemError: for an invalid value, with its field.
    """
    settings = by_name(values) | {"prompt": "none", ORIGINAL: "", "negative_prompt": None, "seed": ""}
    return read([settings[name] for name in NAMES], models)


def with_prompt(values: Sequence[Any], prompt: str) -> list[Any]:
    """Return the controls' values with another prompt."""
    return [prompt if name == "prompt" else value for name, value in zip(NAMES, values, strict=False)]


def read_model(values: Sequence[Any], models: dict[str, ModelSpec]) -> ModelSpec:
    """Read the selected model; other controls may be invalid.

    Raises:
        TandemError: if it is not offered.
    """
    return check_offered(by_name(values)["model"], models)


def by_name(values: Sequence[Any]) -> dict[str, Any]:
    """Return the controls' values by name.

    Raises:
        InvalidRequestError: if they are not of one form.
    """
    if len(values) != len(NAMES):
        raise InvalidRequestError("form", "form.incomplete")
    return dict(zip(NAMES, values, strict=True))
