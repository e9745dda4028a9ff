"""Several GPUs that share a job: splits, refusals, and forecasts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import InvalidRequestError, MachineError, MemoryShortError, TandemError
from runtime.core.estimates import Seconds
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan, Split
from runtime.core.request import GenerationRequest
from runtime.execution.parallel.proxies import shared_speed
from runtime.machine.probe import Gpu, Machine
from runtime.models.catalogue import look_up
from runtime.models.images import with_images
from runtime.models.spec import ROW_KERNELS
from runtime.planner.history import runs_of
from runtime.planner.placement import counts, faster_by_split
from runtime.planner.resolve import PlanningContext, resolve
from runtime.planner.strategies import next_strategy
from runtime.queue.job_planning import move_to_gpu
from tests.image_files import picture
from tests.planner.test_memory_model import workload
from tests.plans import GIB, machine
from tests.published_specs import spec

A14B, SMALL, TI2V = "wan2.2-a14b", "wan2.1-1.3b", "wan2.2-ti2v-5b"
H200 = Gpu("NVIDIA H200", (9, 0), 141 * GIB, 139 * GIB, "580.95")
H100 = replace(H200, name="NVIDIA H100", total_bytes=80 * GIB, free_bytes=79 * GIB)
ALONE: dict[str, Any] = {"guidance_scale": 1, "guidance_scale_2": 1}
PACKAGES = (("torchao", "1"), ("bitsandbytes", "1"))


def on(*gpus: Gpu, ram_gib: float = 500, **changes: Any) -> Machine:
    """Return a machine with these GPUs."""
    made = replace(machine(ram_free_gib=ram_gib, torch_cuda="13.0"), gpus=gpus, ram_bytes=int(2 * ram_gib) * GIB)
    return replace(made, packages=PACKAGES, **changes)


FOUR, EIGHT = on(*[H200] * 4), on(*[H200] * 8)


def plan(model: str, where: Machine, gpu: int = 0, others: list[int] | None = None, **values: Any) -> ExecutionPlan:
    """Plan a clip of 832x480 with 81 frames."""
    wanted = {"prompt": "a red boat", "seed": 1, "width": 832, "height": 480, "frames": 81} | values
    if model == TI2V:
        wanted |= {"width": 1280, "height": 704}
    request = GenerationRequest.from_mapping(wanted)
    return resolve(request, spec(model), PlanningContext(where, Path("x.mp4"), gpu=gpu, others=others))


@pytest.mark.parametrize(
    ("model", "values", "degrees"),
    [
        (A14B, {"gpus": 1}, None),
        (A14B, {"gpus": 2}, (2, 1)),
        (A14B, {"gpus": 4}, (2, 2)),
        (A14B, {"gpus": "auto"}, (2, 2)),
        # Without guidance all share the tokens; where one expert has none too, since it would leave half of them idle.
        (A14B, {"gpus": 2, **ALONE}, (1, 2)),
        (A14B, {"gpus": 4, **ALONE}, (1, 4)),
        (A14B, {"gpus": 2, "guidance_scale": 4, "guidance_scale_2": 1}, (1, 2)),
        (SMALL, {"gpus": 3}, (1, 3)),
        (SMALL, {"gpus": 4}, (2, 2)),
        (TI2V, {"gpus": 4}, (2, 2)),
        (A14B, {"gpus": 2, "quantization": "fp8"}, (2, 1)),
        (A14B, {"gpus": 4, "step_cache": "first-block"}, (2, 2)),
        # A GPU for the pass without the prompt would be idle where it is left out.
        (A14B, {"gpus": 2, "guidance_cache": "0.1"}, (1, 2)),
        (A14B, {"gpus": "auto", "guidance_cache": "0.1"}, (1, 4)),
        # With "auto", settings that exclude several GPUs select one.
        (A14B, {"gpus": "auto", "offload": "group"}, None),
        (A14B, {"gpus": "auto", "quantization": "bnb-4bit"}, None),
    ],
)
def test_the_split_of_a_number_of_gpus(model: str, values: dict[str, Any], degrees: tuple[int, int] | None) -> None:
    made = plan(model, FOUR, **values)
    assert (None if made.split is None else (made.split.guidance, made.split.sequence)) == degrees
    assert made.gpus == (1 if degrees is None else degrees[0] * degrees[1])
    if made.split is not None:
        assert made.split.devices == tuple(f"cuda:{index}" for index in range(made.gpus))
        assert made.split.decode
        assert Fact("planner.on_gpus", {"gpus": made.gpus}) in made.components["transformer"].reasons
        assert (
            made.components["text_encoder"].reasons
            == plan(model, FOUR, **values | {"gpus": 1}).components["text_encoder"].reasons
        )
    assert made.request_json()["gpus"] == made.gpus
    assert ExecutionPlan.model_validate_json(made.model_dump_json()) == made


@pytest.mark.parametrize(
    ("model", "where", "values", "kind", "code", "data"),
    [
        (A14B, FOUR, {"gpus": 5}, InvalidRequestError, "planner.too_few_gpus", {"wanted": 5, "usable": 4}),
        (A14B, on(H200), {"gpus": 2}, InvalidRequestError, "planner.too_few_gpus", {"wanted": 2, "usable": 1}),
        (
            A14B,
            machine(),
            {"gpus": 2},
            InvalidRequestError,
            "planner.no_usable_gpus",
            {"wanted": 2, "cause": Fact("machine.no_gpu")},
        ),
        (A14B, FOUR, {"gpus": 3}, InvalidRequestError, "planner.heads_not_divisible", {"heads": 40, "able": [1, 2, 4]}),
        (
            SMALL,
            on(*[H200] * 5),
            {"gpus": 5},
            InvalidRequestError,
            "planner.heads_not_divisible",
            {"heads": 12, "able": [1, 2, 3, 4]},
        ),
        (
            A14B,
            FOUR,
            {"gpus": 2, "offload": "model"},
            InvalidRequestError,
            "planner.gpus_offloaded",
            {"gpus": 2, "offload": "model"},
        ),
        (
            A14B,
            FOUR,
            {"gpus": 2, "quantization": "bnb-8bit"},
            InvalidRequestError,
            "planner.gpus_quantized",
            {"gpus": 2, "quantization": "bnb-8bit"},
        ),
        (
            A14B,
            FOUR,
            {"gpus": 2, "backends": {"transformer": "tensorrt"}},
            InvalidRequestError,
            "planner.gpus_on_engine",
            {"gpus": 2, "backend": "tensorrt", "in_pytorch": ["backend", "transformer=pytorch"]},
        ),
        (
            A14B,
            on(H200, replace(H200, name="Tesla T4", capability=(7, 5))),
            {"gpus": 2},
            MachineError,
            "planner.gpus_without_bfloat16",
            {"first": H200.name, "second": "Tesla T4"},
        ),
        (A14B, replace(FOUR, system="Windows AMD64"), {"gpus": 2}, MachineError, "planner.gpus_need_linux", {}),
        (A14B, on(H200, replace(H200, free_bytes=20 * GIB)), {"gpus": 2}, MemoryShortError, "planner.use_one_gpu", {}),
    ],
)
def test_settings_that_several_gpus_exclude(
    model: str, where: Machine, values: dict[str, Any], kind: type[TandemError], code: str, data: dict[str, Any]
) -> None:
    with pytest.raises(kind) as caught:
        plan(model, where, **values)
    assert caught.value.code == code
    assert data.items() <= caught.value.data.items()
    assert getattr(caught.value, "field", "gpus") == "gpus"
    assert "--gpus" in caught.value.remedy or "one GPU" in caught.value.remedy
    assert "\n" not in caught.value.what + caught.value.remedy


@pytest.mark.parametrize("value", [0, -1, 17, 1.5, "two", None, True, [], float("nan")])
def test_an_invalid_number_of_gpus_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        GenerationRequest.from_mapping({"prompt": "a boat", "gpus": value})
    assert caught.value.field == "gpus"


def test_auto_uses_identical_gpus_and_one_for_small_models() -> None:
    mixed = on(H200, H100, H200)
    made = plan(A14B, mixed, gpus="auto")
    assert made.split is not None
    assert made.split.devices == ("cuda:0", "cuda:2")
    asked = plan(A14B, mixed, gpus=2)
    assert Fact("planner.gpus_differ", {"names": [H200.name, H100.name]}) in asked.warnings
    assert plan(A14B, on(H200, H100), gpus="auto").split is None
    tight = on(*[replace(H200, free_bytes=30 * GIB)] * 2)
    alone = plan(A14B, tight, gpus="auto")
    assert alone.split is None
    assert Fact("planner.one_gpu_memory") in alone.warnings
    assert alone.strategy.offload == "group"
    tiny = on(*[replace(H200, free_bytes=1 * GIB)] * 2, ram_gib=1)
    for gpus in (2, "auto"):
        with pytest.raises(MemoryShortError) as caught:
            plan(A14B, tiny, gpus=gpus)
        assert caught.value.strategies and caught.value.code != "planner.use_one_gpu"


def test_only_the_permitted_gpus_are_used() -> None:
    made = plan(A14B, FOUR, gpu=2, others=[3, 1], gpus=2)
    assert made.split is not None
    assert made.split.devices == ("cuda:2", "cuda:3")
    assert made.components["vae"].device == "cuda:2"
    with pytest.raises(InvalidRequestError) as caught:
        plan(A14B, FOUR, gpu=2, others=[3], gpus=4)
    assert (caught.value.code, caught.value.data["usable"]) == ("planner.too_few_gpus", 2)


def test_each_gpu_holds_all_weights_and_the_fullest_decides() -> None:
    one, two, four = (plan(A14B, FOUR, gpus=count) for count in (1, 2, 4))
    assert one.strategy.keep_loaded and two.strategy.keep_loaded and four.strategy.keep_loaded
    held = [{stage.component: stage.weights_bytes for stage in made.memory} for made in (one, two, four)]
    assert held[0] == held[1] == held[2]
    # Another process and its buffers; and a share of the tokens needs less.
    working = [{stage.component: stage.working_bytes for stage in made.memory} for made in (one, two, four)]
    assert working[0]["transformer"] == working[1]["transformer"] > working[2]["transformer"]
    assert two.memory_bytes > one.memory_bytes
    less = plan(A14B, on(H200, replace(H200, free_bytes=60 * GIB)), gpus=2)
    assert less.free_bytes == 60 * GIB
    assert not less.strategy.keep_loaded
    assert {one.strategy.offload for one in less.strategies} == {"none"}
    assert {one.strategy.quantization for one in less.strategies} == {"none", "fp8"}


def test_each_gpu_remembers_its_own_passes_and_tokens() -> None:
    growth = []
    for values in ({"gpus": 1}, {"gpus": 2}, {"gpus": 4}, {"gpus": 2, **ALONE}, {"gpus": 1, **ALONE}):
        plain, cached = (plan(A14B, FOUR, step_cache=cache, **values) for cache in ("none", "first-block"))
        before, after = ({stage.component: stage.working_bytes for stage in made.memory} for made in (plain, cached))
        assert before["vae"] == after["vae"]
        growth.append(after["transformer"] - before["transformer"])
    one_pass = 3 * plan(A14B, FOUR).tokens * spec(A14B).transformer.width * 2
    # 32,760 tokens: half of them are no fraction.
    assert growth == [2 * one_pass, one_pass, one_pass // 2, one_pass // 2, one_pass]


def test_more_gpus_are_forecast_to_be_faster() -> None:
    seconds = [plan(A14B, FOUR, gpus=count).seconds for count in (1, 2, 4)]
    for name in ("denoise", "decode", "total"):
        one, two, four = (found[name] for found in seconds)
        assert one.likely > two.likely > four.likely
        assert two.low < two.likely < two.high
    assert seconds[0]["encode"] == seconds[1]["encode"]
    split = Split(devices=("cuda:0", "cuda:1"), guidance=2, sequence=1, decode=False)
    alone = Seconds(10.0, 8.0, 20.0)
    assert faster_by_split(alone, split, "vae") == alone
    assert faster_by_split(alone, split, "transformer").likely == pytest.approx(5.1, abs=0.1)


@pytest.mark.parametrize(("gpus", "seconds"), [(1, 151.1), (2, 76.1), (4, 43.0)])
def test_seconds_of_a_clip_on_several_h200s_are_near_the_measurement(gpus: int, seconds: float) -> None:
    packages = (*PACKAGES, ("triton", "3.6.0"), ("nvidia-cudnn-frontend", "1.32"))
    asked: dict[str, Any] = {"steps": 40, "compile": "always", "quantization": "fp8", "attention": "fp8"}
    found = plan(A14B, replace(FOUR, packages=packages), gpus=gpus, **asked).seconds["total"]
    assert found.likely == pytest.approx(seconds, rel=0.15)
    assert found.low < seconds < found.high


def test_runs_of_several_gpus_do_not_count_for_one() -> None:
    timings = {"text_encoder": 1.0, "denoise": 100.0, "decode": 2.0}
    devices = []
    for count in (1, 2):
        made = plan(A14B, FOUR, gpus=count)
        runs = runs_of(made, made, spec(A14B), FOUR, timings, {"text_encoder": 1, "denoise": 1, "decode": 1})
        devices.append({run.kind.component: run.kind.device for run in runs})
        again = resolve(
            GenerationRequest(prompt="a boat", width=832, height=480, frames=81, gpus=count),
            spec(A14B),
            PlanningContext(FOUR, Path("x.mp4"), history=runs),
        )
        assert again.seconds["denoise"].likely == pytest.approx(100.0)
    assert devices[0]["text_encoder"] == devices[1]["text_encoder"] == "NVIDIA H200"
    assert devices[1]["transformer"] == "2 x NVIDIA H200, guidance 2, tokens 1"
    assert devices[1]["vae"] == "2 x NVIDIA H200, strips"


def test_a_begun_job_goes_to_as_many_other_gpus() -> None:
    made = plan(A14B, FOUR, gpus=2)
    moved = move_to_gpu(made, 3, FOUR, [1])
    assert moved is not None and moved.split is not None
    assert moved.split.devices == ("cuda:3", "cuda:1")
    assert move_to_gpu(made, 3, FOUR, []) is None
    assert move_to_gpu(made, 0, on(H200)) is None


def test_tiles_are_decoded_by_one() -> None:
    made = plan(A14B, FOUR, gpus=2)
    relief = next_strategy(made, spec(A14B), "vae", "VRAM", lossy=True)
    while relief is not None and relief.plan.strategy.decode_tile is None:
        relief = next_strategy(relief.plan, spec(A14B), "vae", "VRAM", lossy=True)
    assert relief is not None and relief.plan.split is not None
    assert not relief.plan.split.decode
    assert relief.plan.gpus == 2


@pytest.mark.parametrize(
    ("heads", "passes", "able"),
    [
        (40, 2, [1, 2, 4, 5, 8]),
        (40, 1, [1, 2, 4, 5, 8]),
        (12, 2, [1, 2, 3, 4, 6, 8]),
        (2, 1, [1, 2]),
        (2, 4, [1, 2, 4, 8]),
        (12, 3, [1, 2, 3, 4, 6]),
    ],
)
def test_heads_are_shared_evenly(heads: int, passes: int, able: list[int]) -> None:
    known = spec(A14B)
    model = replace(known, transformer=replace(known.transformer, num_attention_heads=heads))
    assert counts(model, 8, passes=passes) == able


def test_a_shared_pass_takes_less_memory() -> None:
    held = workload(spec(A14B), (832, 480, 81))
    assert held.split is None


def with_sound(model: str, where: Machine = EIGHT, **values: Any) -> ExecutionPlan:
    """Plan a clip of LTX-2."""
    known = replace(look_up(model, Path("none")), is_downloaded=True).for_text()
    request = GenerationRequest.from_mapping({"prompt": "a red boat", "model": model, **values})
    return resolve(request, known.in_stages(int(request.stages)), PlanningContext(where, Path("x.mp4")))


@pytest.mark.parametrize(
    ("model", "values", "degrees"),
    [
        # Four passes.
        ("ltx-2.3", {"gpus": 2}, (2, 1)),
        ("ltx-2.3", {"gpus": 4}, (4, 1)),
        ("ltx-2.3", {"gpus": "auto"}, (4, 2)),
        ("ltx-2.3", {"gpus": 2, "guidance_scale": 1}, (1, 2)),
        ("ltx-2.3", {"gpus": 2, "guidance_cache": "0.1"}, (1, 2)),
        ("ltx-2.3-distilled", {"gpus": 8}, (1, 8)),
        # The second stage has one pass.
        ("ltx-2-distilled", {"gpus": 2, "guidance_scale": 3, "stages": "2"}, (1, 2)),
        ("ltx-2-distilled", {"gpus": 2, "guidance_scale": 3}, (2, 1)),
    ],
)
def test_all_passes_of_guidance_are_shared(model: str, values: dict[str, Any], degrees: tuple[int, int]) -> None:
    made = with_sound(model, **values)
    assert made.split is not None
    assert (made.split.guidance, made.split.sequence, made.split.decode) == (*degrees, False)
    passes, sequence = degrees
    how = Fact("planner.passes_shared", {"passes": passes})
    if sequence > 1:
        how = Fact("planner.passes_and_tokens_shared", {"passes": passes, "sequence": sequence})
    if passes == 1:
        how = Fact("planner.tokens_shared", {"sequence": sequence})
    assert how in made.components["transformer"].reasons
    # GPUs that share tokens exchange them within a pass.
    assert (made.speed.paired, made.speed.graphed) == (False, sequence == 1)


@pytest.mark.parametrize(
    ("values", "graphed"),
    [
        ({"quantization": "fp8"}, True),
        ({"step_cache": "taylorseer:2"}, False),
        ({"width": 1536, "height": 1024}, False),
    ],
)
def test_passes_on_gpus_of_their_own_are_graphs_as_on_one_gpu(values: dict[str, Any], *, graphed: bool) -> None:
    shared, alone = (with_sound("ltx-2.3", gpus=gpus, **values) for gpus in (4, 1))
    assert shared.split is not None
    assert (shared.split.sequence, alone.split) == (1, None)
    assert shared.speed.graphed == alone.speed.graphed == graphed
    # What the processes are told.
    assert shared_speed(shared.speed, "transformer").graphed == graphed


def test_gpus_that_cannot_share_a_pass_with_sound_are_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        with_sound("ltx-2.3", gpus=3)
    assert (caught.value.code, caught.value.data["able"]) == ("planner.heads_not_divisible", [1, 2, 4, 8])
    model = look_up("ltx-2.3", Path("none"))
    assert model.sound is not None and model.sound.latents is not None
    sound = replace(model.sound, latents=replace(model.sound.latents, heads=6))
    assert counts(replace(model, sound=sound), 8, passes=1) == [1, 2]


def test_passes_with_sound_are_forecast_by_their_number() -> None:
    plans = {gpus: with_sound("ltx-2.3", gpus=gpus) for gpus in (1, 2, 4, 8)}
    seconds = {gpus: made.seconds["denoise"].likely for gpus, made in plans.items()}
    assert seconds[1] / seconds[2] == pytest.approx(1.98, rel=0.01)
    assert seconds[1] / seconds[4] == pytest.approx(3.96, rel=0.01)
    assert seconds[1] / seconds[8] == pytest.approx(4 * 0.99 * 2 * 0.88, rel=0.01)
    # Each GPU stores what a step cache keeps of its own passes. Without a cache, GPUs with passes of their own would
    # record graphs, which compilation replaces.
    growth, compiling = [], replace(EIGHT, packages=(*EIGHT.packages, ("triton", "3.6.0")))
    for gpus in (2, 4, 8):
        asked: dict[str, Any] = {"where": compiling, "gpus": gpus, "compile": "always"}
        plain, cached = (with_sound("ltx-2.3", **asked, step_cache=cache) for cache in ("none", "first-block"))
        before, after = (
            next(stage.working_bytes for stage in made.memory if stage.component == "transformer")
            for made in (plain, cached)
        )
        growth.append(after - before)
    of_pass = growth[1]
    assert growth == [2 * of_pass, of_pass, of_pass // 2]
    assert of_pass > 0


@pytest.mark.parametrize("model", ["hunyuan-video", "framepack-i2v"])
def test_a_family_without_strips_shares_passes_and_decodes_on_one(model: str, tmp_path: Path) -> None:
    hunyuan = replace(look_up(model, Path("none")), is_downloaded=True)
    request = GenerationRequest(prompt="a red boat", gpus=4, compile="always")
    if hunyuan.image_input is not None:
        picture(832, 480).save(tmp_path / "image.png")
        request = request.replace(image=str(tmp_path / "image.png"))
        hunyuan = with_images(hunyuan, request, tmp_path, tmp_path)
    where = replace(FOUR, packages=(*FOUR.packages, ("triton", "3.6.0")))
    made = resolve(request, hunyuan, PlanningContext(where, Path("x.mp4")))
    assert made.split == Split(
        devices=tuple(f"cuda:{index}" for index in range(4)), guidance=1, sequence=4, decode=False
    )
    alone = resolve(request.replace(gpus=1), hunyuan, PlanningContext(where, Path("x.mp4")))
    assert alone.seconds["denoise"].likely > 2.5 * made.seconds["denoise"].likely
    assert made.seconds["decode"] == alone.seconds["decode"]
    assert made.speed.compiled
    assert not any(getattr(made.speed, field) for field in hunyuan.lacks - {"strips", "compiled_vae", ROW_KERNELS})
    uncompiled = resolve(request.replace(gpus=1, compile="never"), hunyuan, PlanningContext(where, Path("x.mp4")))
    assert uncompiled.seconds["decode"] == alone.seconds["decode"]
