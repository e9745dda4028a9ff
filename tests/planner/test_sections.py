"""Plans of videos that are made in sections, and lengths in seconds."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import InvalidRequestError
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.models.catalogue import look_up
from runtime.models.spec import ModelSpec, SectionSpec
from runtime.planner import memory_model
from runtime.planner.resolve import PlanningContext, resolve
from tests.plans import gpu, machine

Tiny = Callable[[str], ModelSpec]
SECTION = SectionSpec(latent_frames=9, sampling_type="vanilla")


def plan(spec: ModelSpec, **values: Any) -> ExecutionPlan:
    """Resolve a request."""
    request = GenerationRequest.from_mapping({"prompt": "a red boat", "seed": 1} | values)
    return resolve(request, spec, PlanningContext(machine(gpu=gpu(), torch_cuda="13.0"), Path("x.mp4")))


@pytest.fixture
def spec(tiny: Tiny) -> ModelSpec:
    """Return a model that makes sections of 36 frames."""
    return replace(tiny("wan2.1"), section=SECTION)


@pytest.mark.parametrize(
    ("seconds", "fps", "frames", "sections"),
    [(60, 30, 1801, 50), (1.2, 30, 37, 1), (0, 30, 37, 1), (2, 30, 73, 2), (3, 12, 37, 1), (120, 30, 3601, 100)],
)
def test_a_length_in_seconds_is_a_number_of_sections(
    seconds: float, fps: int, frames: int, sections: int, spec: ModelSpec
) -> None:
    made = plan(spec, seconds=seconds, fps=fps)
    assert (made.frames, made.sections, made.total_steps) == (frames, sections, sections * made.steps)
    # The frames that were used, so that the request can be repeated with another number of frames per second.
    again = GenerationRequest.from_mapping(made.request_json())
    assert (again.frames, again.seconds) == (frames, "auto")


def test_other_models_take_seconds_too(tiny: Tiny) -> None:
    made = plan(tiny("wan2.1"), seconds=2, fps=16)
    assert (made.frames, made.sections, made.total_steps) == (33, 1, made.steps)
    assert plan(tiny("wan2.1"), seconds=0).frames == 1


def test_seconds_and_frames_exclude_each_other(spec: ModelSpec) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        plan(spec, seconds=2, frames=73)
    assert (caught.value.field, caught.value.fact.code) == ("seconds", "planner.seconds_and_frames")


@pytest.mark.parametrize(("seconds", "fps"), [(134, 30), (600, 120)])
def test_a_length_beyond_the_longest_is_refused_with_it(seconds: float, fps: int, spec: ModelSpec) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        plan(spec, seconds=seconds, fps=fps)
    assert caught.value.fact.code == "planner.too_long"
    longest = plan(spec, seconds=float(caught.value.fact.data["able"]), fps=fps)
    assert longest.frames == 3997


def test_memory_is_that_of_a_section_and_time_grows_with_their_number(spec: ModelSpec) -> None:
    two, many = plan(spec, seconds=2.4, fps=30), plan(spec, seconds=60, fps=30)
    assert (two.sections, many.sections) == (2, 50)
    assert many.latent_shape == two.latent_shape == (1, 16, 9, 60, 104)
    assert many.memory == two.memory
    for stage in ("denoise", "decode"):
        assert many.seconds[stage].likely == pytest.approx(25 * two.seconds[stage].likely)
    assert many.seconds["encode"] == two.seconds["encode"]
    assert many.step_flops == two.step_flops
    assert many.decode_flops == pytest.approx(25 * two.decode_flops)


def test_a_section_is_decoded_with_the_one_made_before(spec: ModelSpec) -> None:
    one, two = plan(spec, seconds=1.2, fps=30), plan(spec, seconds=2.4, fps=30)
    decoded = [memory_model.Workload.of(made, spec).decoded for made in (one, two)]
    assert decoded == [10, 19]
    # Frames of the window wait in system memory, as they are decoded and as they blend.
    window = memory_model.window_bytes(memory_model.Workload.of(two, spec))
    assert window == 2 * 73 * 480 * 832 * 3 * 4
    assert two.forecast.ram_bytes - one.forecast.ram_bytes == window - 2 * 37 * 480 * 832 * 3 * 4


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a red boat", 1),
        ("[0s: a red boat] [1.2s: a blue ball]", 2),
        ("[0s: a red boat] [1.2s: a blue ball] [2.4s: a red boat]", 2),
        ("[3.6s: a red boat]", 1),  # later than the middle of the last section
    ],
)
def test_prompts_of_sections_are_counted(prompt: str, prompts: int, spec: ModelSpec) -> None:
    made = plan(spec, prompt=prompt, frames=109, fps=30, guidance_scale=1)
    assert (made.sections, made.prompts) == (3, prompts)
    once = plan(spec, frames=109, fps=30, guidance_scale=1)
    assert made.seconds["encode"].likely == pytest.approx(prompts * once.seconds["encode"].likely)


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ("[0s: a boat] [1,5s: a ball]", "times"),
        ("[1s-0.5s: a boat]", "times"),
        ("a boat [1s a ball]", "times"),
        ("[0s: a boat] [1s: a ball", "times"),
        ("[nans: a boat]", "times"),
        (f"[{'9' * 400}s: a boat]", "times"),
        ("[0s: a boat] [1s: ]", "of_time_empty"),
        ("a boat [1s:]", "of_time_empty"),
        ("[1s: a boat] [0.5s: a ball]", "order"),
        ("[0s: a boat] [1.3s: a ball]", "too_late"),
        ("[0s: a boat] [999999999s: a ball]", "too_late"),
    ],
)
def test_times_that_cannot_be_used_are_refused(prompt: str, code: str, spec: ModelSpec) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        plan(spec, prompt=prompt, frames=37, fps=30)
    assert (caught.value.field, caught.value.fact.code) == ("prompt", f"planner.prompt_{code}")
    assert len(caught.value.what) < 120
    assert caught.value.remedy


def test_a_prompt_may_last_longer_than_the_video(spec: ModelSpec) -> None:
    assert plan(spec, prompt="[0s-1s: a boat] [1s-5s: a ball]", frames=37, fps=30).prompts == 1


@pytest.mark.parametrize("field", ["prompt", "negative_prompt"])
def test_weights_of_words_need_an_encoder_with_a_state_for_each(field: str, tiny: Tiny) -> None:
    spec = tiny("wan2.1")
    chat = replace(spec, encoders={name: replace(sizes, takes_weights=False) for name, sizes in spec.encoders.items()})
    for model, text, code in (
        (chat, "a (red:1.3) boat", "prompt_weights"),
        (spec, "a (red:5) boat", "prompt_weight"),
        (spec, "a (red:-0.5) boat", "prompt_weight"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            plan(model, **{"prompt": "a boat", field: text})
        assert (caught.value.field, caught.value.fact.code) == (field, f"planner.{code}")
        assert len(caught.value.what) < 120 and caught.value.remedy
    plan(spec, **{"prompt": "a boat", field: "a (red:1.3) boat"})
    plan(chat, **{"prompt": "a boat", field: r"a (red) boat \(16:9\)"})
    models = {name: look_up(name, Path("none")).takes_weights for name in ("wan2.2-t2v-a14b", "hunyuan-video")}
    assert models == {"wan2.2-t2v-a14b": True, "hunyuan-video": False}


def test_models_without_sections_refuse_times(tiny: Tiny) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        plan(tiny("wan2.1"), prompt="[0s: a boat] [1s: a ball]")
    assert (caught.value.field, caught.value.fact.code) == ("prompt", "planner.prompt_without_sections")
    # What no model reads as a time is text.
    assert plan(tiny("wan2.1"), prompt="a boat [2s a ball").prompt == "a boat [2s a ball"


def test_weights_that_are_not_kept_are_brought_for_each_section(spec: ModelSpec) -> None:
    large = replace(spec, parameters=dict.fromkeys(spec.component_names, 10_000_000_000))
    made = plan(large, frames=36 * 50 + 1, guidance_scale=1, compile="never")
    plain = [one for one in made.strategies if one.strategy.quantization == "none"]
    likely = {(one.strategy.offload, one.strategy.keep_loaded): one.seconds.likely for one in plain}
    kept, by_model, one_at_a_time = (likely[one] for one in (("none", True), ("model", False), ("none", False)))
    # Two components of 20 GB for each section: over the bus in 1.25 s, or from the disk in 20 s.
    assert by_model - kept == pytest.approx(2 * 50 * 20 / 16, rel=0.1)
    assert one_at_a_time - kept == pytest.approx(2 * 49 * 20, rel=0.1)


def test_weights_wait_in_memory_between_sections_rather_than_on_the_disk(spec: ModelSpec) -> None:
    large = replace(spec, parameters={name: 3_000_000_000 for name in spec.component_names})
    chosen = []
    for one in (large, replace(large, section=None)):
        request = GenerationRequest(prompt="a red boat", seed=1, frames=73)
        on = machine(gpu=gpu(free_gib=14), torch_cuda="13.0", ram_free_gib=60)
        strategy = resolve(request, one, PlanningContext(on, Path("x.mp4"))).strategy
        assert not strategy.keep_loaded
        chosen.append(strategy.offload)
    assert chosen == ["model", "none"]
