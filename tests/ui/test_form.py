"""From the controls' values, whatever the browser sent, to a request."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import InvalidRequestError, ModelError, TandemError
from runtime.core.loras import Lora
from runtime.core.request import AUTO, COMPONENTS, OFF, GenerationRequest
from runtime.models.catalogue import find, known_as, look_up
from runtime.models.spec import ControlInput, ModelSpec
from runtime.ui import fields, form, make_tab, theme
from tests.image_files import taking_images
from tests.tiny_models import ANIMATE

GOOD: dict[str, Any] = {
    "prompt": "a red boat",
    "negative_prompt": "",
    "model": "wan2.2-a14b",
    "width": 64,
    "height": 32,
    "frames": 9,
    "seconds": "",
    "fps": 8,
    "steps": 4,
    "guidance_scale": 4.0,
    "guidance_scale_2": 3.0,
    "nag": 1,
    "seed": "",
    "crf": "",
    "shift": "",
    "backend_text_encoder": "auto",
    "backend_text_encoder_2": "auto",
    "backend_connectors": "auto",
    "backend_image_encoder": "auto",
    "backend_vae_encoder": "auto",
    "backend_transformer": "auto",
    "backend_transformer_2": "auto",
    "backend_latent_upsampler": "auto",
    "backend_vae": "auto",
    "backend_audio_vae": "auto",
    "backend_vocoder": "auto",
    "backend_interpolator": "auto",
    "backend_upscaler": "auto",
    "build": "auto",
    "offload": "auto",
    "quantization": "auto",
    "on_out_of_memory": "retry",
    "gpus": "1",
    "loras": "",
    "step_cache": "none",
    "guidance_cache": "off",
    "attention": "auto",
    "compile": "auto",
    "stages": "1",
    "vae_precision": "auto",
    "image": "",
    "last_image": "",
    "image_fit": "crop",
    "image_position": 50,
    "loop": "off",
    "interpolate": "off",
    "upscale": "auto",
    "upscaler": "auto",
    "extend": "",
    "video": "",
    "strength": 0.6,
    "keyframes": "",
    "keyframe_seconds": "",
    "control": "",
    "face": "",
    "background": "",
    "mask": "",
    "outpaint": "0, 0, 0, 0",
    "extend_frames": "",
    "join": "",
    "original_prompt": "",
    "references": "",
    "control_scale": "1",
    "preprocess": "off",
    "overlap": "1",
    "control_start": 0,
    "sound": "on",
    "size_from": "",
}
BACKENDS = [f"backend_{name}" for name in COMPONENTS]


@pytest.fixture(scope="module")
def models(tiny: Callable[[str], ModelSpec]) -> dict[str, ModelSpec]:
    return {name: tiny(name) for name in ("wan2.2-a14b", "wan2.1", "wan2.2-ti2v-5b")}


def read(models: dict[str, ModelSpec], **changes: Any) -> GenerationRequest:
    values = GOOD | changes
    return form.read([values[name] for name in form.NAMES], models)


def test_an_empty_number_suggests_the_default(models: dict[str, ModelSpec]) -> None:
    spec = models["wan2.2-a14b"]
    without = models | {spec.name: replace(spec, defaults=replace(spec.defaults, guidance_scale_2=None))}
    for offered, shown in ((models, spec.defaults.guidance_scale_2), (without, spec.defaults.guidance_scale)):
        with pytest.raises(InvalidRequestError) as caught:
            read(offered, guidance_scale_2=None)
        assert (caught.value.code, caught.value.data["default"]) == ("form.empty", shown)


def test_values_become_a_request(models: dict[str, ModelSpec]) -> None:
    request = read(models)
    plain = {name: value for name, value in GOOD.items() if name not in {*BACKENDS, "size_from"}}
    read_values = {"seed": AUTO, "seconds": AUTO, "gpus": 1, "loras": (), "shift": None, "crf": AUTO}
    read_values |= {"image": None, "last_image": None, "extend": None, "video": None}
    read_values |= {"keyframes": (), "keyframe_seconds": (), "original_prompt": None}
    read_values |= dict.fromkeys(("control", "face", "background", "mask", "join"))
    read_values |= {"references": (), "control_scale": (1.0,), "outpaint": 0, "extend_frames": AUTO}
    assert request == GenerationRequest(**(plain | read_values))
    assert [read(models, gpus=given).gpus for given in ("2", "auto")] == [2, AUTO]


def test_a_prompt_that_is_as_it_was_written_has_no_original(models: dict[str, ModelSpec]) -> None:
    originals = {"": None, "a boat": "a boat", "a red boat": None}
    assert {text: read(models, original_prompt=text).original_prompt for text in originals} == originals
    with pytest.raises(InvalidRequestError) as refused:
        read(models, original_prompt=7)
    assert refused.value.field == "original_prompt"


def test_backends_are_read_by_component(models: dict[str, ModelSpec]) -> None:
    chosen = {"backend_vae": "onnxruntime", "backend_transformer_2": "pytorch"}
    request = read(models, **chosen, build="never", offload="group", quantization="fp8")
    assert request.backends == {"transformer_2": "pytorch", "vae": "onnxruntime"}
    assert (request.build, request.offload, request.quantization) == ("never", "group", "fp8")
    # The parts of the VAE have a row each.
    from_image = read(models, model="wan2.2-ti2v-5b", backend_vae="onnxruntime", guidance_scale_2=None)
    assert from_image.backends == {"vae": "onnxruntime", "vae_encoder": "auto"}
    # A row that a model does not have says nothing, whatever was chosen there before.
    assert read(models, model="wan2.1", **chosen).backends == {"vae": "onnxruntime"}


@pytest.mark.parametrize("field", ["backend_transformer_2", "backend_vae", "build", "offload", "quantization"])
@pytest.mark.parametrize("value", [None, "", "cuda", 1, True, [], {}, ["pytorch"], float("nan"), "a" * 100_000])
def test_invalid_choices_are_rejected_by_field(models: dict[str, ModelSpec], field: str, value: Any) -> None:
    if value is None and field in BACKENDS:
        assert read(models, **{field: value}).backends == {}  # as in JSON, nothing was chosen
        return
    with pytest.raises(InvalidRequestError) as refused:
        read(models, **{field: value})
    assert refused.value.field == ("backends" if field in BACKENDS else field)
    assert len(refused.value.what) < 120


@pytest.mark.parametrize(
    ("value", "loras"),
    [
        ("", ()),
        (None, ()),
        (" \n\n", ()),
        ("stil für boote:0.8", (Lora("stil für boote", 0.8),)),
        ("a/b\n high=c:1.5 \nlow=c", (Lora("a/b"), Lora("c", 1.5, "high"), Lora("c", 1.0, "low"))),
    ],
)
def test_loras_are_read_one_for_each_line(models: dict[str, ModelSpec], value: Any, loras: tuple[Lora, ...]) -> None:
    request = read(models, loras=value)
    assert request.loras == loras
    # They come back from what the browser kept, and from a video's request.
    for stored in (value, request.to_json()["loras"]):
        kept = form.filled(GOOD | {"loras": stored}, models)["loras"]["value"]
        assert read(models, loras=kept).loras == loras


@pytest.mark.parametrize(
    "value",
    [7, [], ["a"], {}, True, "a" * 100_000, "a\x00b", "a:-1", "a:0", "a:nan", "a:1e9", "a\na", "\n".join("abcdefghi"),
     "/etc/passwd", "../a", "~/a", "a.safetensors", "C:\\a", "a/../../b", "high="],
)  # fmt: skip
def test_loras_outside_the_cache_are_rejected(models: dict[str, ModelSpec], value: Any) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read(models, loras=value)
    assert refused.value.field == "loras"
    assert len(refused.value.what) < 150 and refused.value.remedy


@pytest.mark.parametrize("stored", [7, [7], {"a": 1}, [{"file": 3}], "x" * 9_000, [["a", "b"]]])
def test_invalid_stored_loras_are_ignored(models: dict[str, ModelSpec], stored: Any) -> None:
    assert len(form.filled(GOOD | {"loras": stored}, models)["loras"]["value"]) <= 4_000


@pytest.mark.parametrize("value", [None, "", "first", 7, [], {}, "first-block:0", "first-block:nan", "x" * 100_000])
def test_invalid_step_caches_are_rejected_and_not_restored(models: dict[str, ModelSpec], value: Any) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read(models, step_cache=value)
    assert refused.value.field == "step_cache"
    assert form.filled(GOOD | {"step_cache": value}, models)["step_cache"]["value"] == "none"


def test_a_step_cache_is_restored_with_its_strength(models: dict[str, ModelSpec]) -> None:
    for given, kept in (("first-block", "first-block"), ("first-block:0.250", "first-block:0.25")):
        assert read(models, step_cache=given).step_cache == kept
        assert form.filled(GOOD | {"step_cache": given}, models)["step_cache"]["value"] == kept


def test_attention_is_restored_with_its_threshold(models: dict[str, ModelSpec]) -> None:
    for given, kept in (("fp8", "fp8"), ("sol", "sol"), ("sol:1.50", "sol:1.5")):
        assert read(models, attention=given).attention == kept
        assert form.filled(GOOD | {"attention": given}, models)["attention"]["value"] == kept
    others: tuple[Any, ...] = ("sol:9", "sol:x", "fp8:1", 7, None, [])
    for invalid in others:
        assert form.filled(GOOD | {"attention": invalid}, models)["attention"]["value"] == "auto"


def test_prompts_and_seed_do_not_affect_the_plan(models: dict[str, ModelSpec]) -> None:
    values = GOOD | {"prompt": None, "negative_prompt": 7, "seed": "abc"}
    request = form.read_settings([values[name] for name in form.NAMES], models)
    assert (request.width, request.seed) == (64, AUTO)
    with pytest.raises(InvalidRequestError):
        form.read_settings([values[name] for name in form.NAMES][1:], models)


@pytest.mark.parametrize(("given", "seed"), [("", AUTO), ("  ", AUTO), (None, AUTO), ("12", 12), (" 7 ", 7), (5, 5)])
def test_an_empty_seed_is_random(models: dict[str, ModelSpec], given: Any, seed: Any) -> None:
    assert read(models, seed=given).seed == seed


def test_a_model_with_one_transformer_has_one_guidance_scale(models: dict[str, ModelSpec]) -> None:
    assert read(models, model="wan2.1").guidance_scale_2 == AUTO


BAD: list[Any] = [None, "", "abc", float("nan"), float("inf"), -1, 0.5, 10**30, True, [], {}, "\x00", "9" * 100_000]


@pytest.mark.parametrize("field", ["width", "height", "frames", "fps", "steps", "guidance_scale", "guidance_scale_2"])
@pytest.mark.parametrize("value", BAD, ids=lambda value: repr(value)[:12])
def test_invalid_numbers_are_rejected_by_field(models: dict[str, ModelSpec], field: str, value: Any) -> None:
    if field.startswith("guidance") and value == 0.5:
        assert getattr(read(models, **{field: value}), field) == value
        return
    with pytest.raises(InvalidRequestError) as refused:
        read(models, **{field: value})
    assert refused.value.field == field
    assert len(refused.value.what) < 120
    assert refused.value.remedy


@pytest.mark.parametrize("value", ["abc", "1.5", "-1", "９" * 30, "1" * 100_000, "0x10", [], {}, float("nan"), -1])
def test_invalid_seeds_are_rejected(models: dict[str, ModelSpec], value: Any) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read(models, seed=value)
    assert refused.value.field == "seed"


@pytest.mark.parametrize("value", ["", "   ", None, 7, ["a"], "a\x00b", "a" * 100_000])
def test_invalid_prompts_are_rejected(models: dict[str, ModelSpec], value: Any) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read(models, prompt=value)
    assert refused.value.field == "prompt"


@pytest.mark.parametrize("value", [None, "", "/etc", "../weights", 7, []])
def test_only_offered_models_are_accepted(models: dict[str, ModelSpec], value: Any) -> None:
    with pytest.raises(ModelError):
        read(models, model=value)


def test_controls_follow_the_model(models: dict[str, ModelSpec]) -> None:
    two, one = (form.model_values(models[name], models) for name in ("wan2.2-a14b", "wan2.1"))
    assert two["guidance_scale_2"]["visible"] and not one["guidance_scale_2"]["visible"]
    assert 'value="832x480"' in two["sizes"]["value"]
    assert two["frames"]["step"] == 4
    # Gradio would change a number above its maximum, and without a word.
    assert "maximum" not in two["frames"] and "maximum" not in two["steps"]
    assert f"<span>{81 / two['fps']['value']:.1f} s</span> <small>81 frames</small>" in two["lengths"]["value"]
    assert set(form.FOLLOWING_MODEL) <= set(two)


def test_a_stored_form_is_restored(models: dict[str, ModelSpec]) -> None:
    stored = {"model": "wan2.1", "prompt": "a kite", "width": 64, "height": 32, "fps": 5, "seed": 7, "steps": 3}
    values = form.filled(stored, models)
    assert {name: values[name]["value"] for name in stored} == stored | {"seed": "7"}
    assert values["guidance_scale_2"]["visible"] is False


def test_a_form_with_an_image_has_the_guidance_of_images(models: dict[str, ModelSpec]) -> None:
    spec = models["wan2.2-a14b"]
    defaults = replace(spec.defaults, image_guidance_scale=2.0, image_guidance_scale_2=None)
    offered = models | {spec.name: replace(spec, defaults=defaults)}
    image, names = f"sha256:{'ab' * 32}/boat.png", ("guidance_scale", "guidance_scale_2")
    for stored, scales in (
        ({}, (4.0, 3.0)),
        ({"image": image}, (2.0, 2.0)),
        ({"image": image, "guidance_scale": 4, "guidance_scale_2": 3}, (4, 3)),
    ):
        values = form.filled({"model": spec.name} | stored, offered)
        assert tuple(values[name]["value"] for name in names) == scales


@pytest.mark.parametrize("value", [None, "x", [], {}, float("nan"), float("inf")])
def test_an_invalid_stored_form_is_ignored(models: dict[str, ModelSpec], value: Any) -> None:
    values = form.filled(dict.fromkeys(form.NAMES, value) | {"model": "wan2.1"}, models)
    assert values["width"]["value"] == models["wan2.1"].defaults.width
    gone = form.filled({"model": value, "prompt": "kept", "width": 64}, models)
    assert gone["model"]["value"] == "wan2.2-a14b"
    assert gone["prompt"]["value"] == "kept"
    assert gone["width"]["value"] == 832


def test_every_control_is_a_field_of_the_request() -> None:
    assert set(form.NAMES) == {*GenerationRequest.model_fields, *BACKENDS, "size_from"} - {"backends", form.TEMPLATE}
    with pytest.raises(TandemError):
        form.read([None] * len(form.NAMES), {})


@pytest.mark.parametrize(
    ("given", "shift", "back"),
    [("", None, ""), (None, None, ""), (" auto ", None, ""), ("5", 5.0, "5"), ("7,5", 7.5, "7.5"), (12.0, 12.0, "12")],
)
def test_a_shift_is_read_and_restored(models: dict[str, ModelSpec], given: Any, shift: float | None, back: str) -> None:
    request = read(models, shift=given)
    assert request.shift == shift
    for stored in (GOOD | {"shift": given}, request.to_json()):
        assert form.filled(stored, models)["shift"]["value"] == back
    # Of a model that is gone nothing is brought back.
    assert form.filled(GOOD | {"shift": given, "model": "gone"}, models)["shift"]["value"] == ""
    basics = form.read_basics([(GOOD | {"shift": given})[name] for name in form.BASIC_NAMES], models)
    assert basics.shift == shift


@pytest.mark.parametrize(
    "value", ["0", "-1", "1e9", "nan", "much", "5;", 0, 1e9, math.nan, True, [], {}, "9" * 100_000]
)
def test_invalid_shifts_are_rejected_and_not_restored(models: dict[str, ModelSpec], value: Any) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read(models, shift=value)
    assert refused.value.field == "shift" and len(refused.value.what) < 100
    assert form.filled(GOOD | {"shift": value}, models)["shift"]["value"] == ""


def test_the_help_text_has_the_models_own_shift(models: dict[str, ModelSpec]) -> None:
    spec = models["wan2.2-a14b"]
    assert form.model_values(spec, models)["shift"]["info"].endswith("Empty: the model's own (3).")
    known = known_as("wan2.2-t2v-a14b")
    assert known is not None
    here = replace(known.spec(Path("weights")), is_downloaded=True, noise=spec.noise)
    assert form.model_values(here, models)["shift"]["info"].endswith("own (3; the authors use 12).")
    same = replace(here, noise=replace(spec.noise, shift=12.0))
    assert form.model_values(same, models)["shift"]["info"].endswith("own (12).")


def test_the_vae_precision_is_read_and_restored(models: dict[str, ModelSpec]) -> None:
    request = read(models, vae_precision="float16")
    assert request.vae_precision == "float16"
    assert form.filled(request.to_json(), models)["vae_precision"]["value"] == "float16"
    # What no choice holds, and what a video from before there was one says, is left to Tandem.
    assert form.filled(GOOD | {"vae_precision": "float8"}, models)["vae_precision"]["value"] == AUTO
    before = {name: value for name, value in request.to_json().items() if name != "vae_precision"}
    assert "value" not in form.filled(before, models)["vae_precision"]
    basics = form.read_basics([GOOD[name] for name in form.BASIC_NAMES], models)
    assert basics.vae_precision == AUTO
    with pytest.raises(InvalidRequestError) as refused:
        read(models, vae_precision="float8")
    assert refused.value.field == "vae_precision"


IMAGE = f"sha256:{'a' * 64}/boat.png"


@pytest.fixture
def able(models: dict[str, ModelSpec]) -> dict[str, ModelSpec]:
    """Models of which the first starts from an image, and the second ends with one too."""
    first, second, *_ = models.values()
    return {first.name: taking_images(first), second.name: taking_images(second, last="optional")}


def test_images_are_read_for_models_that_take_them(able: dict[str, ModelSpec], models: dict[str, ModelSpec]) -> None:
    given = {"image": IMAGE, "last_image": IMAGE, "image_fit": "fit", "image_position": 20.5}
    both = read(able, model="wan2.1", **given)
    assert (both.image, both.last_image, both.image_fit, both.image_position) == (IMAGE, IMAGE, "fit", 20.5)
    # The form shows no place for what a model does not take.
    assert [(one.image, one.last_image) for one in (read(able, **given), read(models, **given))] == [
        (IMAGE, None),
        (None, None),
    ]
    basics = form.read_basics([(GOOD | given)[name] for name in form.BASIC_NAMES], able)
    assert (basics.image, basics.image_position) == (IMAGE, 20.5)
    # A video is not for visitors, nor for models that take none.
    video = {"video": IMAGE, "strength": 0.3}
    taken = read(models, **video)
    assert (taken.video, taken.strength) == (IMAGE, 0.3)
    without = {name: replace(spec, video_input=None) for name, spec in models.items()}
    assert read(without, **video).video is None
    assert form.read_basics([(GOOD | video)[name] for name in form.BASIC_NAMES], models).video is None


def test_control_videos_are_read_for_models_that_they_steer(
    models: dict[str, ModelSpec], tiny: Callable[[str], ModelSpec]
) -> None:
    steered = {"wan2.1-vace": tiny("wan2.1-vace"), **models}
    given: dict[str, Any] = {
        "control": IMAGE,
        "mask": IMAGE,
        "references": f"{IMAGE}\n{IMAGE}",
        "control_scale": "1, 0.5",
    }
    given |= {"preprocess": "edges", "control_start": 1.5}
    request = read(steered, model="wan2.1-vace", size_from="image", width=None, **given)
    assert (request.control, request.mask, request.references) == (IMAGE, IMAGE, (IMAGE, IMAGE))
    assert (request.control_scale, request.preprocess, request.width) == ((1.0, 0.5), "edges", AUTO)
    assert request.control_start == 1.5
    restored = form.filled(request.to_json(), steered)
    assert {name: restored[name]["value"] for name in given} == given
    assert restored["size_from"]["value"] == "image"
    # The form shows no place for what a model does not take.
    other = read(steered, **given)
    assert (other.control, other.mask, other.references, other.control_scale) == (None, None, (), (1.0,))
    # Videos are not for visitors.
    basics = form.read_basics([(GOOD | given | {"model": "wan2.1-vace"})[name] for name in form.BASIC_NAMES], steered)
    assert (basics.control, basics.mask, basics.references) == (None, None, (IMAGE, IMAGE))
    # What is made of a control video is not shown without one.
    assert basics.preprocess == read(steered, model="wan2.1-vace", preprocess="edges").preprocess == OFF
    assert read(steered, model="wan2.1-vace", control_start=1.5).control_start == 0
    with pytest.raises(InvalidRequestError) as refused:
        read(steered, model="wan2.1-vace", control_scale="much")
    assert (refused.value.field, refused.value.code) == ("control_scale", "request.not_numbers")
    assert form.filled(GOOD | {"control_scale": "much"}, steered)["control_scale"]["value"] == "1"


def test_videos_of_a_character_are_read_for_models_that_take_them(
    models: dict[str, ModelSpec], tiny: Callable[[str], ModelSpec]
) -> None:
    offered = {"animate": tiny(ANIMATE), "wan2.1-vace": tiny("wan2.1-vace"), **models}
    given = dict.fromkeys(("image", "control", "face", "background", "mask"), IMAGE)
    others = {"references": IMAGE, "control_scale": "0.5", "preprocess": "edges", "extend": IMAGE, "video": IMAGE}
    request = read(offered, model="animate", size_from="image", width=None, **given, **others)
    assert read(offered, model="animate", **given, overlap="5").overlap == "5"
    assert read(offered, model="wan2.1-vace", **given, overlap="5").overlap == "1"
    assert [getattr(request, name) for name in given] == [IMAGE] * 5 and request.width == AUTO
    assert (request.references, request.control_scale, request.preprocess) == ((), (1.0,), "off")
    assert (request.extend, request.video) == (None, None)
    restored = form.filled(request.to_json(), offered)
    assert {name: restored[name]["value"] for name in given} == given
    steered = read(offered, model="wan2.1-vace", **given)
    assert (steered.image, steered.face, steered.background, steered.mask) == (IMAGE, None, None, IMAGE)


def test_keyframes_of_the_form_and_their_times_are_read_and_restored(able: dict[str, ModelSpec]) -> None:
    given = {"keyframes": f"{IMAGE}\n{IMAGE}", "keyframe_seconds": "1, 2.5"}
    # The form shows no place for what a model does not take.
    plain = read(able, **given)
    assert (plain.keyframes, plain.keyframe_seconds) == ((), ())
    spec = able[GOOD["model"]]
    assert spec.image_input is not None
    guided = able | {GOOD["model"]: replace(spec, image_input=replace(spec.image_input, last="keyframe"))}
    request = read(guided, **given)
    assert (request.keyframes, request.keyframe_seconds) == ((IMAGE, IMAGE), (1.0, 2.5))
    restored = form.filled(request.to_json(), guided)
    assert {name: restored[name]["value"] for name in given} == given
    assert read(guided, keyframe_seconds="1").keyframe_seconds == ()
    with pytest.raises(InvalidRequestError) as refused:
        read(guided, **given | {"keyframe_seconds": "soon"})
    assert (refused.value.field, refused.value.code) == ("keyframe_seconds", "request.not_numbers")


def test_the_size_follows_from_the_image_if_there_is_one(able: dict[str, ModelSpec]) -> None:
    as_image = read(able, image=IMAGE, size_from="image", width=None)
    assert (as_image.width, as_image.height) == (AUTO, AUTO)
    assert read(able, size_from="image").width == read(able, image=IMAGE).width == 64
    as_video = read(able, video=IMAGE, size_from="image", width=None)
    assert (as_video.width, form.filled(as_video.to_json(), able)["size_from"]["value"]) == (AUTO, "image")
    for request, size_from in ((as_image, "image"), (read(able, image=IMAGE), "")):
        restored = form.filled(request.to_json(), able)
        assert restored["size_from"]["value"] == size_from
        assert restored["image"]["value"] == IMAGE


@pytest.mark.parametrize("value", ["/etc/passwd", "sha256:12", 12, [], {}, "a\nb"])
def test_only_copies_of_images_are_read_and_restored(able: dict[str, ModelSpec], value: Any) -> None:
    video_input = able["wan2.1"].video_input
    assert video_input is not None
    able["wan2.1"] = replace(able["wan2.1"], control_input=ControlInput(vae=video_input, blocks=2, channels=96))
    for field in ("image", "last_image", "extend", "video", "control", "mask", "references"):
        if field == "references" and value == []:
            continue  # no images
        with pytest.raises(InvalidRequestError) as refused:
            read(able, model="wan2.1", **({"image": IMAGE} | {field: value}))
        assert refused.value.field == field


def test_the_page_stores_every_control() -> None:
    script = (theme.ASSETS / "page.js").read_text(encoding="utf-8")
    assert 'dataset.fields.split(" ")' in script
    assert f'data-fields="{" ".join(form.NAMES)}"' in make_tab.header("", form.NAMES, "")


def test_choices_are_restored_from_the_browser_and_from_a_result(models: dict[str, ModelSpec]) -> None:
    kept = form.filled({"model": "wan2.1", "backend_vae": "inductor", "build": "missing"}, models)
    assert kept["backend_vae"]["value"] == "inductor"
    assert kept["build"]["value"] == "missing"
    # What was not kept stays as the page has it.
    assert "value" not in kept["offload"]
    backends = {"all": "onnxruntime", "vae": "pytorch"}
    result = form.filled(read(models).to_json() | {"backends": backends, "offload": "model"}, models)
    on_pytorch = {"backend_vae", "backend_vae_encoder"}
    assert all(result[name]["value"] == ("pytorch" if name in on_pytorch else "onnxruntime") for name in BACKENDS)
    assert result["offload"]["value"] == "model"
    odd = form.filled({"model": "wan2.1", "backends": {"vae": "cuda"}, "build": "often", "offload": []}, models)
    assert odd["backend_vae"]["value"] == "auto"
    assert odd["build"]["value"] == "auto"
    assert "value" not in odd["offload"]


def test_no_more_gpus_are_restored_than_exist(models: dict[str, ModelSpec]) -> None:
    for kept, gpus, wanted in (("2", 2, "2"), ("4", 2, None), ("auto", 2, "auto"), ("2", 1, None), (4, 4, "4")):
        assert form.filled({"model": "wan2.1", "gpus": kept}, models, gpus=gpus)["gpus"].get("value") == wanted


@pytest.mark.parametrize(
    ("size", "name"),
    [
        ((192, 112), "16:9"), ((832, 480), "16:9"), ((1280, 704), "16:9"), ((720, 1280), "9:16"), ((128, 128), "1:1"),
        ((160, 96), "5:3"), ((64, 32), "2:1"), ((640, 480), "4:3"), ((16, 1024), "1:64"),
    ],
)  # fmt: skip
def test_sizes_are_called_by_their_proportion(size: tuple[int, int], name: str) -> None:
    assert form.proportion(*size) == name


def test_only_a_model_with_a_small_vocabulary_lists_its_words(models: dict[str, ModelSpec]) -> None:
    shipped = find("diorama", Path("none"))
    card = form.card_html(shipped)
    vocabulary = re.search('data-vocabulary="([^"]*)"', card)
    assert vocabulary is not None
    known = set(vocabulary[1].split())
    assert {"boat", "sunset", "a"} <= known and not {"dragon", "<unk>", "</s>"} & known
    # Each word that can be clicked is one of them.
    shown = re.findall('data-word="([^"]*)"', card)
    assert len(shown) > 30
    assert {part for word in shown for part in word.split()} <= known
    assert 'src="data:image/webp;base64,' in card
    other = form.card_html(replace(shipped, directory=models["wan2.1"].directory, words={}))
    assert "<img" not in other and "data-word" not in other


def test_launch_flags_override_stored_backends(models: dict[str, ModelSpec]) -> None:
    preset = form.preset_name({"vae": "tensorrt"})
    kept = {"model": "wan2.1", "backend_vae": "pytorch", "build": "never"}
    assert "value" not in form.filled(kept, models, preset)["backend_vae"]
    assert form.filled(kept, models, preset)["build"]["value"] == "never"
    assert form.filled(kept | {"preset": preset}, models, preset)["backend_vae"]["value"] == "pytorch"
    assert "value" not in form.filled(kept | {"preset": preset}, models)["backend_vae"]
    # What a result was made with is taken as it is.
    result = form.filled({"model": "wan2.1", "backends": {"vae": "pytorch"}}, models, preset)
    assert result["backend_vae"]["value"] == "pytorch"


def test_the_list_of_models_has_known_licenses(models: dict[str, ModelSpec]) -> None:
    (spec,) = list(models.values())[:1]
    named = {"a": replace(spec, title="A", license="MIT"), "b": replace(spec, title="B", license="unknown")}
    assert form.model_choices(named) == [("A (MIT)", "a"), ("B", "b")]


@pytest.fixture(scope="module")
def families(tiny: Callable[[str], ModelSpec]) -> dict[str, ModelSpec]:
    """Return models as published families have them, by name; none is downloaded."""
    names = ("wan2.2-t2v-a14b", "hunyuan-video", "framepack-i2v", "framepack-f1-i2v")
    return {name: look_up(name, Path("nowhere")) for name in names}


def test_the_form_shows_what_the_family_has(families: dict[str, ModelSpec]) -> None:
    shown = {spec.name: form.model_values(spec, families) for spec in families.values()}
    visible = {
        name: [values[one]["visible"] for one in ("negative_prompt", "guidance_scale_2")]
        for name, values in shown.items()
    }
    assert list(visible.values()) == [[True, True], [False, False], [False, False], [False, False]]
    places = {name: re.findall(r'data-place="(\w+)"', values["images"]["value"]) for name, values in shown.items()}
    assert list(places.values()) == [["video"], [], ["image", "last_image", "extend"], ["image", "extend"]]
    assert ["[0s:" in values["prompt"]["info"] for values in shown.values()] == [False, False, True, True]
    assert ["input of the model" in values["guidance_scale"]["info"] for values in shown.values()] == [
        False,
        *[True] * 3,
    ]
    strides = [re.findall(r'data-stride="(\d+)"', values["lengths"]["value"]) for values in shown.values()]
    assert strides == [[], [], ["36"], ["36"]]
    assert "4 sections" in shown["framepack-i2v"]["lengths"]["value"]
    for spec in families.values():
        lacks = set(re.findall(r'data-lacks="([^"]*)"', shown[spec.name]["card"]["value"])[0].split())
        assert lacks == form.lacks(spec) >= spec.unsupported


def test_values_of_another_model_that_are_not_shown_are_left_out(families: dict[str, ModelSpec]) -> None:
    image = f"sha256:{64 * chr(48)}/boat.png"
    given = {"negative_prompt": "blurry", "loras": "style:0.8", "gpus": "2", "step_cache": "first-block:0.1"}
    for spec in families.values():
        request = read(families, model=spec.name, **given, image=image, last_image=image)
        fresh, lacking = GenerationRequest(prompt="x"), form.lacks(spec)
        for name in ("negative_prompt", "loras", "gpus", "step_cache", "guidance_scale_2"):
            assert (getattr(request, name) == getattr(fresh, name)) == (name in lacking), (spec.name, name)
        assert (request.image is None) == (spec.image_input is None)
        assert (request.last_image is None) == (spec.image_input is None or spec.image_input.last == "none")


def test_stages_are_offered_by_models_that_can_make_two(tiny: Callable[[str], ModelSpec]) -> None:
    models = {name: tiny(name) for name in ("ltx-2.3-distilled", "ltx-2.3", "wan2.1")}
    shown = {name: form.model_values(spec, models)["stages"]["visible"] for name, spec in models.items()}
    assert shown == {"ltx-2.3-distilled": True, "ltx-2.3": False, "wan2.1": False}
    # What was selected for one model is not requested of another.
    assert {name: read(models, model=name, stages="2").stages for name in models} == {
        "ltx-2.3-distilled": "2",
        "ltx-2.3": "1",
        "wan2.1": "1",
    }
    filled = form.filled({"model": "ltx-2.3-distilled", "stages": "2"}, models)
    assert filled["stages"] == {"value": "2", "visible": True}
    control = fields.control("stages")
    assert (control.value, [value for _, value in control.choices]) == ("1", ["1", "2"])


def test_a_length_in_seconds_is_shown_in_whole_sections(families: dict[str, ModelSpec]) -> None:
    filled = form.filled({"model": "framepack-f1-i2v", "seconds": 60.0, "fps": 30}, families)
    assert (filled["frames"]["value"], filled["seconds"]["value"]) == (1801, "")
    filled = form.filled({"model": "framepack-f1-i2v", "seconds": 599.0, "fps": 120}, families)
    assert filled["seconds"]["value"] == "599"
