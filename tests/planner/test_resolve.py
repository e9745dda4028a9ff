"""Plans and refusals of requests on several machines."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import InvalidRequestError, MachineError, MemoryShortError
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.machine.probe import Machine, seen_from
from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec
from runtime.planner.clip import nearest
from runtime.planner.history import Kind, Run, architecture
from runtime.planner.placement import usable_gpus
from runtime.planner.resolve import PlanningContext, resolve
from tests.plans import GIB, gpu, machine

OUT = Path("x.mp4")

Tiny = Callable[[str], ModelSpec]


def plan(spec: ModelSpec, /, on: Machine | None = None, **values: Any) -> ExecutionPlan:
    """Resolve a request for a red boat."""
    return resolve(
        GenerationRequest.from_mapping({"prompt": "a red boat"} | values), spec, PlanningContext(on or machine(), OUT)
    )


def large(spec: ModelSpec) -> ModelSpec:
    """Return the spec with as many weights as Wan2.2-A14B has."""
    sizes = {"text_encoder": 5_680_000_000, "transformer": 14_290_000_000, "transformer_2": 14_290_000_000}
    return replace(spec, parameters={name: sizes.get(name, 127_000_000) for name in spec.component_names})


def test_no_field_of_a_plan_is_auto(tiny: Tiny) -> None:
    made = plan(tiny("wan2.2-a14b"))
    assert (made.width, made.height, made.frames, made.fps, made.steps) == (832, 480, 81, 16, 40)
    assert (made.guidance_scale, made.guidance_scale_2) == (4.0, 3.0)
    assert 0 <= made.seed < 2**32
    assert made.negative_prompt
    assert made.latent_shape == (1, 16, 21, 60, 104)
    assert made.tokens == 32_760
    assert all(part.reasons for part in made.components.values())
    assert list(made.components) == ["text_encoder", "transformer", "transformer_2", "vae"]
    assert GenerationRequest.from_mapping(made.request_json()).seed == made.seed


@pytest.mark.parametrize(
    ("architecture", "tokens"), [("wan2.1", 32_760), ("wan2.2-a14b", 32_760), ("wan2.2-ti2v-5b", 27_280)]
)
def test_tokens_of_the_default_clip(architecture: str, tokens: int, tiny: Tiny) -> None:
    assert plan(tiny(architecture)).tokens == tokens


@pytest.mark.parametrize(
    ("given", "pair"),
    [
        ({}, (4.0, 3.0)),
        ({"guidance_scale": 6}, (6.0, 6.0)),
        ({"guidance_scale_2": 2}, (4.0, 2.0)),
        ({"guidance_scale": 1, "guidance_scale_2": 0}, (1.0, 0.0)),
    ],
)
def test_guidance_per_expert(given: dict[str, Any], pair: tuple[float, float], tiny: Tiny) -> None:
    made = plan(tiny("wan2.2-a14b"), **given)
    assert (made.guidance_scale, made.guidance_scale_2) == pair


def test_one_transformer_has_no_second_guidance(tiny: Tiny) -> None:
    assert plan(tiny("wan2.1")).guidance_scale_2 is None
    with pytest.raises(InvalidRequestError) as caught:
        plan(tiny("wan2.1"), guidance_scale_2=3.0)
    assert (caught.value.field, caught.value.code) == ("guidance_scale_2", "planner.no_second_guidance")


@pytest.mark.parametrize(
    ("architecture", "values", "field", "fitting"),
    [
        ("wan2.2-a14b", {"width": 190}, "width", [176, 192]),
        ("wan2.2-a14b", {"height": 8}, "height", [16, 32]),
        ("wan2.2-a14b", {"width": 1023}, "width", [1008, 1024]),
        ("wan2.2-a14b", {"width": 8191}, "width", 1024),
        ("wan2.2-a14b", {"height": 1040}, "height", 1024),
        ("wan2.2-a14b", {"frames": 257}, "frames", 253),
        ("wan2.2-ti2v-5b", {"width": 2080}, "width", 2048),
        ("wan2.2-a14b", {"frames": 32}, "frames", [29, 33]),
        ("wan2.2-a14b", {"frames": 2}, "frames", [1, 5]),
        ("wan2.2-ti2v-5b", {"width": 720}, "width", [704, 736]),
    ],
)
def test_unsupported_sizes_are_refused_with_the_nearest(
    architecture: str, values: dict[str, Any], field: str, fitting: int | list[int], tiny: Tiny
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        plan(tiny(architecture), **values)
    assert caught.value.field == field
    if isinstance(fitting, int):
        assert (caught.value.code, caught.value.data["most"]) == ("planner.too_large", fitting)
    else:
        code = "planner.frame_count" if field == "frames" else "planner.not_a_multiple"
        assert (caught.value.code, caught.value.data["able"]) == (code, fitting)


@pytest.mark.parametrize(
    ("value", "stride", "offset", "low", "high", "found"),
    [
        (190, 16, 0, 16, 8192, [176, 192]),
        (3, 16, 0, 16, 8192, [16, 32]),
        (9000, 16, 0, 16, 8192, [8192]),
        (32, 4, 1, 1, 4001, [29, 33]),
        (0, 4, 1, 1, 4001, [1, 5]),
    ],
)
def test_nearest(value: int, stride: int, offset: int, low: int, high: int, found: list[int]) -> None:
    assert nearest(value, stride, offset, low, high) == found


@pytest.mark.parametrize(
    ("on", "is_large", "device", "dtypes", "code"),
    [
        (machine(), False, "cpu", {"float32"}, "machine.no_gpu"),
        (
            replace(machine(), gpu_problem=Fact("machine.driver_failed", {"error": "x"})),
            False,
            "cpu",
            {"float32"},
            "machine.driver_failed",
        ),
        (machine(gpu=gpu()), False, "cpu", {"float32"}, "machine.torch_without_cuda"),
        (machine(gpu=gpu(), torch_cuda="13.0"), False, "cuda:0", {"float32"}, "planner.small_on_gpu"),
        (machine(gpu=gpu(), torch_cuda="13.0"), True, "cuda:0", {"bfloat16"}, "planner.bfloat16_on_gpu"),
        (
            machine(gpu=gpu(capability=(7, 5), free_gib=80), torch_cuda="13.0"),
            True,
            "cuda:0",
            {"float16", "float32"},
            "planner.float16_on_gpu",
        ),
    ],
)
def test_device_and_precision_with_reason(
    on: Machine, is_large: bool, device: str, dtypes: set[str], code: str, tiny: Tiny
) -> None:
    spec = large(tiny("wan2.2-a14b")) if is_large else tiny("wan2.2-a14b")
    made = plan(spec, on)
    assert {part.device for part in made.components.values()} == {device}
    assert {part.dtype for part in made.components.values()} == dtypes
    for part in made.components.values():
        reason = part.reasons[0]
        if reason.code == "planner.on_cpu":
            reason = reason.data["cause"]
        assert reason.code == code
    assert made.components["vae"].dtype == ("bfloat16" if "float16" not in dtypes and is_large else "float32")


@pytest.mark.parametrize(
    ("free_gib", "keep"),
    [(140, True), (48, False), (20, None)],
)
def test_components_stay_loaded_only_if_they_fit(free_gib: float, keep: bool | None, tiny: Tiny) -> None:
    on = machine(gpu=gpu(free_gib=free_gib), torch_cuda="13.0")
    spec = large(tiny("wan2.2-a14b"))
    if keep is None:
        with pytest.raises(MemoryShortError) as caught:
            plan(spec, on)
        assert caught.value.where == "video memory"
    else:
        assert plan(spec, on).strategy.keep_loaded is keep


def test_too_little_ram_is_refused(tiny: Tiny) -> None:
    with pytest.raises(MemoryShortError) as caught:
        plan(large(tiny("wan2.2-a14b")))
    assert (caught.value.code, caught.value.where) == ("planner.memory_short", "memory")
    assert caught.value.data["free"] == 20 * GIB
    with pytest.raises(MachineError):
        plan(large(tiny("wan2.1")), width=1024, height=1024, frames=253)


@pytest.mark.parametrize(
    ("asked", "codes"),
    [
        ({"negative_prompt": "blur", "guidance_scale": 1.0}, ["planner.negative_needs_nag"]),
        ({"negative_prompt": "blur", "guidance_scale": 1.0, "nag": 11}, []),
        ({"negative_prompt": "blur", "guidance_scale": 1.0, "guidance_scale_2": 3.0}, []),
        ({"negative_prompt": "", "guidance_scale": 1.0}, []),
        ({"negative_prompt": "blur"}, []),
        ({"upscaler": "realesrgan-x4plus"}, ["planner.upscaler_unused"]),
        ({"sound": "lossless"}, ["planner.sound_unused"]),
        ({"sound": "off"}, []),
    ],
)
def test_settings_without_effect_are_warnings(asked: dict[str, Any], codes: list[str], tiny: Tiny) -> None:
    warnings = plan(tiny("wan2.2-a14b"), **asked).warnings
    assert [fact.code for fact in warnings if fact.code.endswith(("_unused", "_nag"))] == codes


def test_unusual_sizes_are_warnings(tiny: Tiny) -> None:
    assert plan(tiny("wan2.1")).warnings == ()
    (size,) = plan(tiny("wan2.1"), width=64, height=64).warnings
    assert (size.code, size.data["size"]) == ("planner.unusual_size", "64x64")
    (frames,) = plan(tiny("wan2.1"), frames=101).warnings
    assert (frames.code, frames.data["most"]) == ("planner.unusual_length", 81)


def two_gpus(
    *, capabilities: tuple[tuple[int, int], ...] = ((9, 0), (9, 0)), free_gib: tuple[int, ...] = (80, 40)
) -> Machine:
    """Return a machine with two GPUs."""
    found = [gpu(capability=each, free_gib=free) for each, free in zip(capabilities, free_gib, strict=True)]
    named = [replace(one, name=f"GPU {index}") for index, one in enumerate(found)]
    return replace(machine(torch_cuda="13.0"), gpus=tuple(named))


@pytest.mark.parametrize(("index", "free_gib"), [(0, 80), (1, 40)])
def test_each_gpu_has_its_own_plan(index: int, free_gib: int, tiny: Tiny) -> None:
    made = resolve(GenerationRequest(prompt="a boat"), tiny("wan2.1"), PlanningContext(two_gpus(), OUT, gpu=index))
    assert {part.device for part in made.components.values()} == {f"cuda:{index}"}
    assert made.free_bytes == free_gib * GIB
    assert made.components["vae"].reasons[0].data["gpu"] == f"GPU {index}"


def test_precision_is_that_of_the_used_gpu(tiny: Tiny) -> None:
    seen = two_gpus(capabilities=((9, 0), (7, 5)))
    spec = large(tiny("wan2.2-a14b"))
    plans = [
        resolve(GenerationRequest(prompt="a boat"), spec, PlanningContext(seen, OUT, gpu=index)) for index in (0, 1)
    ]
    assert [made.components["transformer"].dtype for made in plans] == ["bfloat16", "float16"]


@pytest.mark.parametrize(
    ("seen", "usable"),
    [
        (machine(), []),
        (machine(gpu=gpu(), torch_cuda=None), []),
        (machine(gpu=gpu(), torch_cuda="13.0"), [0]),
        (two_gpus(), [0, 1]),
        (two_gpus(capabilities=((9, 0), (6, 1))), [0]),
        (two_gpus(capabilities=((6, 1), (9, 0))), [1]),
    ],
)
def test_which_gpus_make_videos(seen: Machine, usable: list[int]) -> None:
    assert usable_gpus(seen) == usable


def test_a_machine_seen_from_one_gpu() -> None:
    seen = seen_from(two_gpus(), 1)
    assert [one.name for one in seen.gpus] == ["GPU 1", "GPU 1"]
    assert seen_from(machine(), 0) == machine()


@pytest.mark.parametrize(
    ("step_cache", "tensors", "computed"), [("magcache:0.12", 2, (4, 9)), ("taylorseer", 4, (5, 6))]
)
def test_a_forecast_counts_the_steps_that_a_cache_computes(
    step_cache: str, tensors: int, computed: tuple[int, int], tmp_path: Path
) -> None:
    spec = find("diorama", tmp_path)
    asked: Any = {"steps": 20, "guidance_scale": 4.0}
    plain, cached = plan(spec, **asked), plan(spec, step_cache=step_cache, **asked)
    steps = dict(zip(("transformer", "transformer_2"), computed, strict=True))
    reason = {"step_cache": cached.step_cache, "computed": steps["transformer"], "steps": 9}
    assert Fact("planner.steps_computed", reason) in cached.components["transformer"].reasons
    assert (sum(cached.computed), cached.steps) == (sum(computed), 20)
    before, after = (made.seconds["denoise"].likely for made in (plain, cached))
    assert after == pytest.approx(before * sum(computed) / 20)
    working = [{one.component: one.working_bytes for one in made.memory}["transformer"] for made in (plain, cached)]
    assert working[1] - working[0] == 2 * tensors * cached.tokens * spec.transformer.width * 4
    # Whatever the strength, the seconds of a computed pass are those of a pass without a cache.
    run = Run(
        kind=Kind(device="Test CPU, 2 cores", model=architecture(spec), component="transformer", backend="pytorch",
                  dtype="float32", quantization="none", offload="none"),
        flops=spec.transformer.forward_flops(plain.tokens, spec.max_sequence_length),
        seconds=2.0, working_bytes=1, excess_bytes=None,
    )  # fmt: skip
    request = GenerationRequest(prompt="a boat", step_cache=step_cache, **asked)
    measured = resolve(request, spec, PlanningContext(machine(), OUT, history=[run])).seconds["denoise"]
    assert measured.measured and measured.likely == pytest.approx(2 * 2.0 * sum(computed))


@pytest.mark.parametrize(
    ("model", "values", "code"),
    [
        ("wan2.1", {"guidance_scale": 1.0}, "planner.no_guidance_to_cache"),
        ("wan2.2-a14b", {"guidance_scale": 1.0, "guidance_scale_2": 1.0}, "planner.no_guidance_to_cache"),
        ("wan2.2-a14b", {"guidance_scale": 1.0, "guidance_scale_2": 3.0}, ""),
        ("wan2.2-a14b", {}, ""),
        ("hunyuan-video", {}, "planner.one_pass_only"),
    ],
)
def test_a_guidance_cache_needs_guidance(
    model: str, values: dict[str, Any], code: str, tiny: Callable[[str], ModelSpec]
) -> None:
    spec, asked = tiny(model), {**values, "guidance_cache": "0.1"}
    if not code:
        made = plan(spec, **asked)
        assert made.guidance_cache == made.request_json()["guidance_cache"] == "0.1"
        cached = {
            name
            for name, part in made.components.items()
            if "planner.guidance_cached" in {reason.code for reason in part.reasons}
        }
        assert cached == ({"transformer_2"} if values else {"transformer", "transformer_2"})
        return
    with pytest.raises(InvalidRequestError) as refused:
        plan(spec, **asked)
    assert (refused.value.fact.code, refused.value.field) == (code, "guidance_cache")


def test_a_guidance_cache_is_not_automatic_and_needs_separate_passes(tiny: Callable[[str], ModelSpec]) -> None:
    spec, here = find("diorama", OUT), machine(gpu=gpu(), torch_cuda="13.0")
    plain, cached = (plan(spec, here, guidance_scale=3.0, guidance_cache=cache) for cache in ("off", "0.2"))
    assert (plain.speed.paired, cached.speed.paired) == (True, False)
    assert plan(tiny("wan2.1")).guidance_cache == "off"


def test_magcache_needs_ratios_of_the_model(tiny: Callable[[str], ModelSpec]) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        plan(tiny("wan2.1"), step_cache="magcache")
    assert (refused.value.fact.code, refused.value.field) == ("planner.no_mag_ratios", "step_cache")


def test_a_step_cache_is_reckoned_with(tiny: Callable[[str], ModelSpec]) -> None:
    spec = tiny("wan2.2-a14b")
    plain, cached = plan(spec), plan(spec, step_cache="first-block:0.2")
    assert (plain.step_cache, cached.step_cache) == ("none", "first-block:0.2")
    reused = Fact("planner.step_cached", {"step_cache": "first-block:0.2"})
    assert reused in cached.components["transformer_2"].reasons
    assert reused not in cached.components["vae"].reasons
    working = [
        {stage.component: stage.working_bytes for stage in made.memory}
        for made in (
            plain,
            cached,
            plan(spec, guidance_scale=1),
            plan(spec, step_cache="first-block", guidance_scale=1),
        )
    ]
    cached_bytes = 3 * cached.tokens * spec.transformer.width * 4
    guided, unguided = (after["transformer"] - before["transformer"] for before, after in (working[:2], working[2:]))
    assert (guided, unguided) == (2 * cached_bytes, cached_bytes)
    assert working[0]["vae"] == working[1]["vae"]
    # What it saves is not known before it was measured: the forecast becomes wider, not only shorter.
    seconds, before = cached.seconds["denoise"], plain.seconds["denoise"]
    assert seconds.low < before.low and before.likely > seconds.likely and seconds.high > before.high
    measured = [
        Run(
            kind=Kind(device="Test CPU, 2 cores", model=architecture(spec), component="transformer", backend="pytorch",
                      dtype="float32", quantization="none", offload="none", step_cache=cache),
            flops=spec.transformer.forward_flops(plain.tokens, spec.max_sequence_length),
            seconds=seconds_each, working_bytes=1, excess_bytes=None,
        )
        for cache, seconds_each in (("", 2.0), ("first-block:0.2", 1.0))
    ]  # fmt: skip
    request = GenerationRequest(prompt="a boat", step_cache="first-block:0.2", steps=10)
    both = resolve(request, spec, PlanningContext(machine(), OUT, history=measured)).seconds["denoise"]
    assert both.measured and both.likely == pytest.approx(20.0)
    unknown = resolve(request, spec, PlanningContext(machine(), OUT, history=measured[:1])).seconds["denoise"]
    assert not unknown.measured and unknown.low < 20.0 < unknown.high and unknown.high > 40.0
