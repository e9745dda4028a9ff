"""Sizes from an image's proportions, warnings about what is cut, and plans with images as JSON."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import InvalidRequestError
from runtime.core.images import ImageUse
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.models.spec import ModelSpec
from runtime.planner.resolve import PlanningContext, resolve
from tests.facts import fact
from tests.image_files import taking_images
from tests.plans import machine

Tiny = Callable[[str], ModelSpec]
DIGEST, OTHER = "ab" * 32, "cd" * 32


def use(width: int, height: int, digest: str = DIGEST) -> ImageUse:
    return ImageUse(name="boat.png", path=Path("/cache/images") / digest, digest=digest, width=width, height=height)


def plan(spec: ModelSpec, image: ImageUse | None, last: ImageUse | None = None, **values: Any) -> ExecutionPlan:
    spec = replace(taking_images(spec, last="optional"), image=image, last_image=last)
    given = {name: one.reference for name, one in (("image", image), ("last_image", last)) if one is not None}
    request = GenerationRequest.from_mapping({"prompt": "a boat", "seed": 1, "frames": 9} | given | values)
    return resolve(request, spec, PlanningContext(machine(), Path("x.mp4")))


# The default is 832x480, strides of 16; the own sizes are 832x480, 480x832, 1280x720 and 720x1280.
@pytest.mark.parametrize(
    ("image", "asked", "size"),
    [
        ((1920, 1080), {}, (832, 480)),  # 16:9 is close to the model's own size
        ((1080, 1920), {}, (480, 832)),
        ((832, 480), {}, (832, 480)),
        ((1000, 1000), {}, (624, 624)),
        ((4000, 3000), {}, (736, 544)),
        ((3000, 4000), {}, (544, 736)),
        ((800, 100), {}, (1024, 128)),  # the tiny model has 1024 positions
        ((16, 128), {}, (128, 1024)),
        ((1000, 1000), {"width": 320}, (320, 320)),
        ((1000, 1000), {"height": 480}, (480, 480)),
        ((1920, 1080), {"height": 480}, (848, 480)),
        ((1920, 1080), {"width": 160}, (160, 96)),
        ((800, 100), {"width": 32}, (32, 16)),  # never less than a stride
        ((1000, 1000), {"width": 832, "height": 480}, (832, 480)),
        ((1000, 1000), {"image_fit": "fit"}, (624, 624)),
    ],
)
def test_a_size_follows_from_the_images_proportions(
    image: tuple[int, int], asked: dict[str, Any], size: tuple[int, int], tiny: Tiny
) -> None:
    spec = tiny("wan2.1")
    assert (spec.defaults.width, spec.defaults.height, spec.strides) == (832, 480, (16, 16))
    made = plan(spec, use(*image), **asked)
    assert (made.width, made.height) == size


def test_without_an_image_the_default_size_applies(tiny: Tiny) -> None:
    made = plan(tiny("wan2.1"), None, image_fit="fit", image_position=3)
    assert (made.width, made.height, made.images) == (832, 480, {})
    assert (plan(tiny("wan2.1"), None, width=320).height) == 480


@pytest.mark.parametrize(
    ("asked", "scales", "explained"),
    [
        ({}, (2.0, 1.5), True),
        ({"guidance_scale": 5.0}, (5.0, 5.0), False),
        ({"guidance_scale": 4.0, "guidance_scale_2": 3.0}, (4.0, 3.0), False),
        ({"guidance_scale_2": 3.0}, (2.0, 3.0), True),
    ],
)
def test_a_model_can_have_other_guidance_for_images(
    asked: dict[str, Any], scales: tuple[float, float], explained: bool, tiny: Tiny
) -> None:
    usual = tiny("wan2.2-a14b")
    spec = replace(usual, defaults=replace(usual.defaults, image_guidance_scale=2.0, image_guidance_scale_2=1.5))
    made = plan(spec, use(832, 480), **asked)
    assert (made.guidance_scale, made.guidance_scale_2) == scales
    reason = fact("planner.guidance_of_images", scales=["2", "1.5"], usual=["4", "3"])
    assert made.guidance_reason == (reason if explained else None)
    assert made.to_json()["guidance_reason"] == str(made.guidance_reason or "")
    for other, image in ((spec, None), (usual, use(832, 480))):
        same = plan(other, image)
        assert (same.guidance_scale, same.guidance_scale_2, same.guidance_reason) == (4.0, 3.0, None)
    assert ExecutionPlan.model_validate_json(made.model_dump_json()) == made


def test_a_side_stays_within_the_limits(tiny: Tiny) -> None:
    made = plan(tiny("wan2.1"), use(800, 100), height=512)
    assert (made.width, made.height) == (1024, 512)


@pytest.mark.parametrize(
    ("image", "asked", "percent", "suggested"),
    [
        ((1000, 1000), {"width": 832, "height": 480}, 42, "624x624"),
        ((4000, 3000), {"width": 640, "height": 640}, 25, "736x560"),
        ((1920, 1080), {"width": 832, "height": 480}, None, None),
        ((1920, 1080), {"width": 320, "height": 192}, 6, "336x192"),
        ((1000, 1000), {"width": 832, "height": 480, "image_fit": "fit"}, None, None),
        ((1000, 1000), {}, None, None),
        ((1000, 1000), {"width": 832}, None, None),
    ],
)
def test_a_warning_says_what_is_cut(
    image: tuple[int, int], asked: dict[str, Any], percent: int | None, suggested: str | None, tiny: Tiny
) -> None:
    made = plan(tiny("wan2.1"), use(*image), **asked)
    cut = [fact for fact in made.warnings if fact.code == "planner.image_cut"]
    assert [(fact.data["percent"], fact.data["suggested"]) for fact in cut] == (
        [] if percent is None else [(percent, suggested)]
    )
    assert all(fact.data["image"] == "boat.png" for fact in cut)


def test_a_last_image_of_other_proportions_is_cut(tiny: Tiny) -> None:
    made = plan(tiny("wan2.1"), use(832, 480), use(480, 832, OTHER))
    assert (made.width, made.height) == (832, 480)
    (cut,) = (fact for fact in made.warnings if fact.code.endswith("_cut"))
    assert cut.code == "planner.last_image_cut" and cut.data["percent"] == 67
    assert not [fact for fact in plan(tiny("wan2.1"), use(832, 480), use(1664, 960)).warnings if "cut" in fact.code]


# Of 25 frames, 8 a second; each latent frame after the first has 8 frames, so keyframes lie at frames 1, 9 and 17.
@pytest.mark.parametrize(
    ("seconds", "frames"),
    [([0.1], [1]), ([0.6], [1]), ([0.7], [9]), ([2, 1], [17, 9]), ([3], [17]), ([3.1, 1.2, 0.2], [17, 9, 1])],
)
def test_keyframes_lie_at_the_nearest_first_frame_of_a_latent(
    seconds: list[float], frames: list[int], tiny: Tiny
) -> None:
    made = keyframed(tiny("ltx-2"), seconds)
    assert [*made.keyframe_places.values()] == frames
    tokens = made.latent_shape[3] * made.latent_shape[4]
    assert made.tokens == tokens * (made.latent_shape[2] + len(frames))


@pytest.mark.parametrize(
    ("seconds", "last", "code", "data"),
    [
        ([0.05], False, "planner.keyframe_first", {}),
        ([3.3], False, "planner.keyframe_outside", {"last": 3.0}),
        ([1, 0.9], False, "planner.keyframes_too_close", {"seconds": 0.9, "other": 1, "apart": 1.0}),
        ([2], True, "planner.keyframes_too_close", {"seconds": 2, "other": 3.0}),
    ],
)
def test_keyframes_that_no_clip_has_are_refused(
    seconds: list[float], last: bool, code: str, data: dict[str, Any], tiny: Tiny
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        keyframed(tiny("ltx-2"), seconds, use(64, 32) if last else None)
    assert (refused.value.field, refused.value.code) == ("keyframe_seconds", code)
    assert data.items() <= refused.value.fact.data.items()


def keyframed(spec: ModelSpec, seconds: list[float], last: ImageUse | None = None) -> ExecutionPlan:
    """Return the plan of a clip with a keyframe at each of these times."""
    keyframes = (use(64, 32, OTHER),) * len(seconds)
    given: dict[str, Any] = {"keyframes": [one.reference for one in keyframes], "keyframe_seconds": seconds}
    given |= {} if last is None else {"last_image": last.reference}
    request = GenerationRequest.from_mapping({"prompt": "a boat", "seed": 1, "frames": 25, "fps": 8, **given})
    spec = replace(spec, keyframes=keyframes, last_image=last)
    return resolve(request, spec, PlanningContext(machine(), Path("x.mp4")))


def test_a_size_that_follows_from_the_image_is_not_called_unusual(tiny: Tiny) -> None:
    codes = [fact.code for fact in plan(tiny("wan2.1"), use(1000, 1000)).warnings]
    assert "planner.unusual_size" not in codes
    asked = [fact.code for fact in plan(tiny("wan2.1"), use(1000, 1000), width=640, height=640).warnings]
    assert "planner.unusual_size" in asked


def test_a_plan_has_the_images_and_how_they_are_cropped(tiny: Tiny) -> None:
    made = plan(tiny("wan2.1"), use(640, 480), use(64, 48, OTHER), image_position=20, image_fit="fit")
    assert made.images == {"image": use(640, 480), "last_image": use(64, 48, OTHER)}
    assert (made.image_fit, made.image_position) == ("fit", 20.0)
    assert plan(tiny("wan2.1"), use(640, 480), image_position="auto").image_position == 50.0
    assert made.to_json()["images"]["image"] == {"name": "boat.png", "digest": DIGEST, "width": 640, "height": 480}
    assert ExecutionPlan.model_validate_json(made.model_dump_json()) == made
    read = GenerationRequest.from_mapping(json.loads(json.dumps(made.request_json())))
    assert (read.image, read.last_image) == (f"sha256:{DIGEST}/boat.png", f"sha256:{OTHER}/boat.png")
    assert (read.image_fit, read.image_position, read.width) == ("fit", 20.0, made.width)
    assert "/cache" not in json.dumps(made.request_json() | made.to_json())


def test_components_that_only_images_need_are_left_out_of_a_plan_without_one(tiny: Tiny) -> None:
    spec = tiny("wan2.1")
    assert spec.for_text() == spec
    programs = {"image_encoder": ("image_encoder",), "vae_encoder": ("vae_encoder",), **spec.programs}
    assert [*replace(spec, programs=programs).for_text().programs] == [*spec.programs]


@pytest.mark.parametrize("field", ["image", "last_image"])
def test_a_spec_without_the_requests_images_is_an_internal_error(field: str, tiny: Tiny) -> None:
    request = GenerationRequest.from_mapping({"prompt": "a boat", field: "boat.png"})
    with pytest.raises(AssertionError):
        resolve(request, tiny("wan2.1"), PlanningContext(machine(), Path("x.mp4")))


def test_plans_of_earlier_versions_have_no_image(tiny: Tiny) -> None:
    stored = json.loads(plan(tiny("wan2.1"), None).model_dump_json())
    for name in ("image", "last_image", "image_fit", "image_position"):
        del stored[name], stored["request"][name]
    read = ExecutionPlan.model_validate_json(json.dumps(stored))
    assert (read.images, read.image_fit, read.image_position) == ({}, "crop", 50.0)
