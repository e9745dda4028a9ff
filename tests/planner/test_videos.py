"""Sizes, lengths and steps that follow from a video, what is refused, and forecasts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import InvalidRequestError
from runtime.core.images import VideoUse
from runtime.core.plan import ExecutionPlan, skipped_steps
from runtime.core.request import GenerationRequest
from runtime.models.catalogue import look_up
from runtime.models.spec import VAE_ENCODER, ModelSpec
from runtime.pipeline.checkpoint import identity
from runtime.planner import history, memory_model
from runtime.planner.resolve import PlanningContext, resolve
from tests.facts import fact
from tests.plans import machine, no_engines

Tiny = Callable[[str], ModelSpec]
DIGEST = "ab" * 32


def use(frames: int = 500, seconds: float | None = 31.0, width: int = 832, height: int = 480) -> VideoUse:
    path = Path("/cache/images") / DIGEST
    return VideoUse(
        name="boat.mp4", path=path, digest=DIGEST, width=width, height=height, fps=16, frames=frames, seconds=seconds
    )


def plan(spec: ModelSpec, video: VideoUse, **values: Any) -> ExecutionPlan:
    request = GenerationRequest.from_mapping({"prompt": "a boat", "seed": 1, "video": video.reference} | values)
    return resolve(request, spec.from_video(video), PlanningContext(machine(ram_free_gib=400), Path("x.mp4")))


# The default is 832x480, 81 frames at 16 per second; frames are 4n + 1.
@pytest.mark.parametrize(
    ("video", "asked", "frames", "warning"),
    [
        (use(), {}, 81, "planner.video_first_part"),
        (use(81, 5.06), {}, 81, None),
        (use(82, 5.1), {}, 81, None),
        (use(80, 5.0), {}, 77, None),
        (use(3, 0.2), {}, 1, None),
        (use(40, 31.0), {}, 37, "planner.video_incomplete"),
        (use(40, None), {}, 37, None),
        (use(), {"frames": 121}, 121, None),
        (use(32, 2.0), {"seconds": 2.0}, 29, None),
        (use(36, 31.0), {"seconds": 2.0}, 33, None),
    ],
)
def test_lengths(video: VideoUse, asked: dict[str, Any], frames: int, warning: str | None, tiny: Tiny) -> None:
    made = plan(tiny("wan2.1"), video, **asked)
    assert made.frames == frames
    of_video = [fact.code for fact in made.warnings if fact.code.startswith("planner.video_")]
    assert of_video == ([] if warning is None else [warning])


@pytest.mark.parametrize(
    ("video", "size"),
    [(use(), (832, 480)), (use(width=480, height=832), (480, 832)), (use(width=64, height=64), (624, 624))],
)
def test_a_size_follows_from_the_videos_proportions(video: VideoUse, size: tuple[int, int], tiny: Tiny) -> None:
    made = plan(tiny("wan2.1"), video, frames=9)
    assert (made.width, made.height) == size
    cut = plan(tiny("wan2.1"), video.replace(width=100, height=300), frames=9, width=832, height=480)
    assert "planner.video_cut" in {fact.code for fact in cut.warnings}


def steered(spec: ModelSpec, control: VideoUse, mask: VideoUse | None, **values: Any) -> ExecutionPlan:
    files = {"control": control.reference, "mask": None if mask is None else mask.reference}
    request = GenerationRequest.from_mapping({"prompt": "a boat", "seed": 1, **files, **values})
    spec = replace(spec, control=control, mask=mask)
    return resolve(request, spec, PlanningContext(machine(ram_free_gib=400), Path("x.mp4")))


@pytest.mark.parametrize(
    ("control", "mask", "asked", "frames"),
    [
        (use(), None, {}, 81),
        (use(), use(40, 2.5), {}, 37),
        (use(40, 2.5), use(), {}, 37),
        (use(), use(36, 31.0), {"seconds": 2.0}, 33),
        (use(), use(), {"frames": 121}, 121),
    ],
)
def test_the_shorter_of_control_video_and_mask_limits_the_length(
    control: VideoUse, mask: VideoUse | None, asked: dict[str, Any], frames: int, tiny: Tiny
) -> None:
    made = steered(tiny("wan2.1-vace"), control, mask, **asked)
    assert (made.frames, made.width, made.height) == (frames, 832, 480)
    with pytest.raises(InvalidRequestError) as refused:
        steered(tiny("wan2.1-vace"), control, use(40), frames=41)
    assert (refused.value.code, refused.value.data["able"]) == ("planner.video_too_short", 37)


def test_the_size_follows_from_the_control_video_and_cuts_are_reported(tiny: Tiny) -> None:
    high = use(width=480, height=832)
    made = steered(tiny("wan2.1-vace"), high, None, frames=9)
    assert (made.width, made.height) == (480, 832)
    cut = steered(tiny("wan2.1-vace"), high, None, frames=9, width=832, height=480)
    assert "planner.video_cut" in {fact.code for fact in cut.warnings}
    part = made.components[VAE_ENCODER]
    assert [reason.code for reason in part.reasons][-1] == "planner.no_video_engines"


def test_memory_counts_the_control_branch(tiny: Tiny) -> None:
    spec, plain = look_up("wan2.1-vace-14b", Path()), look_up("wan2.1-t2v-14b", Path())
    tokens = spec.tokens(81, 480, 832)
    own, usual = (memory_model.denoise_bytes(model, tokens, "bfloat16") for model in (spec, plain))
    assert own - usual == 3 * tokens * 2 * 5120
    assert spec.parameters["transformer"] - plain.parameters["transformer"] > 3e9
    assert spec.transformer.forward_flops(tokens, 512) / plain.transformer.forward_flops(tokens, 512) == pytest.approx(
        1.2, rel=0.01
    )


@pytest.mark.parametrize(
    ("asked", "field", "code", "able"),
    [
        ({"frames": 41}, "frames", "planner.video_too_short", 37),
        ({"seconds": 3.0}, "seconds", "planner.video_too_short", 37),
        ({"steps": 1}, "strength", "planner.strength_without_steps", 1.0),
        ({"steps": 3, "strength": 0.33}, "strength", "planner.strength_without_steps", 0.34),
        ({"frames": 36}, "frames", "planner.frame_count", [33, 37]),
    ],
)
def test_refusals(asked: dict[str, Any], field: str, code: str, able: Any, tiny: Tiny) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        plan(tiny("wan2.1"), use(40, 2.5), **asked)
    assert (refused.value.field, refused.value.code, refused.value.data["able"]) == (field, code, able)


def test_only_the_steps_of_the_strength_count(tiny: Tiny) -> None:
    spec = tiny("wan2.2-a14b")
    whole = plan(spec, use(), frames=9, steps=10, strength=1.0, shift=5.0)
    assert sum(whole.expert_steps.values()) == 10
    for strength in (0.9, 0.58, 0.2):
        made = plan(spec, use(), frames=9, steps=10, strength=strength, shift=5.0)
        run = int(10 * strength)
        assert (made.steps, made.skipped_steps, made.total_steps, len(made.computed)) == (10, 10 - run, run, run)
        low = min(run, whole.expert_steps["transformer_2"])
        assert made.expert_steps == {"transformer": run - low, "transformer_2": low}
        assert made.seconds["denoise"].likely < whole.seconds["denoise"].likely
        assert states_steps(made) == (strength, run, 10)
        assert ExecutionPlan.model_validate_json(made.model_dump_json()) == made
        assert made.to_json()["video"]["name"] == "boat.mp4" and made.to_json()["skipped_steps"] == 10 - run
    # As diffusers rounds: 0.58 · 50 is 28.999… in floating point.
    assert 50 - skipped_steps(50, 0.58) == 28


def states_steps(made: ExecutionPlan) -> tuple[float, int, int]:
    (reason,) = (one for one in made.components["transformer"].reasons if one.code == "planner.steps_of_strength")
    return reason.data["strength"], reason.data["run"], reason.data["steps"]


def test_the_encoder_is_forecast_for_all_frames_and_never_on_an_engine(tmp_path: Path) -> None:
    spec = look_up("wan2.1-t2v-1.3b", Path("none"))
    assert VAE_ENCODER not in spec.component_names
    made = plan(spec, use(), backends={"vae_encoder": "onnxruntime"})
    assert list(made.components) == ["text_encoder", VAE_ENCODER, "transformer", "vae"]
    part = made.components[VAE_ENCODER]
    assert part.backend == "pytorch" and not part.engines
    offers = no_engines(tmp_path).offers(spec.from_video(use()))(VAE_ENCODER, made.latent_size, "cpu")
    assert {(offer.engines, offer.problem) for offer in offers} == {((), fact("planner.no_video_engines"))}
    workload = memory_model.Workload.of(made, spec.from_video(use()))
    # About as much as decoding, which has twice the width in its last level.
    assert 0.2 < workload.flops(VAE_ENCODER) / workload.flops("vae") < 1
    stage = next(stage for stage in made.memory if stage.component == VAE_ENCODER)
    shorter = plan(spec, use(), frames=5)
    other = next(stage for stage in shorter.memory if stage.component == VAE_ENCODER)
    # A call has a limited number of frames: a longer video takes only more bytes of pixels.
    assert made.strategy.decode_chunk == 2 and shorter.strategy.decode_chunk == 1
    encoder = spec.from_video(use()).input_encoder
    calls = [encoder.encode_bytes(frames, 480, 832, 4) for frames in (8, 4)]
    assert stage.working_bytes - other.working_bytes == (81 - 5) * 832 * 480 * 3 + calls[0] - calls[1]
    assert history.architecture(spec) == history.architecture(spec.from_video(use()))


def test_checkpoints_belong_to_a_video_its_rate_and_a_strength(tiny: Tiny) -> None:
    spec, text = tiny("wan2.1"), {"frames": 9, "steps": 10}
    plans = [
        plan(spec, use(), **text),
        plan(spec, use(), **text, strength=0.8),
        plan(spec, use(), **text, fps=8),
        plan(spec, use().replace(digest="cd" * 32), **text),
        plan(spec, use(), **text, image_fit="fit"),
    ]
    request = GenerationRequest.from_mapping({"prompt": "a boat", "seed": 1, **text})
    plans.append(resolve(request, spec, PlanningContext(machine(), Path("x.mp4"))))
    assert len({identity({}, one) for one in plans}) == len(plans)
    same = plans[-1].replace(strength=0.8, fps=8)
    assert identity({}, same) == identity({}, plans[-1])
