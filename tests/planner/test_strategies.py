"""The chosen memory strategy on several machines, refusals, and strategies that are offered instead."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import InvalidRequestError, MachineError, MemoryShortError
from runtime.core.facts import Fact
from runtime.core.loras import LoraUse
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.machine.probe import Gpu, Machine
from runtime.planner import memory_model
from runtime.planner.history import runs_of
from runtime.planner.resolve import PlanningContext, resolve
from tests.facts import fact, states
from tests.planner.test_memory_model import workload
from tests.plans import GIB, machine
from tests.published_specs import spec

A14B, SMALL, TI2V = "wan2.2-a14b", "wan2.1-1.3b", "wan2.2-ti2v-5b"
QUANTIZERS = ("torchao", "bitsandbytes")


def on(
    free_gib: float, ram_gib: float, capability: tuple[int, int] = (8, 9), quantizers: tuple[str, ...] = QUANTIZERS
) -> Machine:
    """Return a machine with so much free of each memory."""
    gpu = Gpu("Some GPU", capability, int(free_gib * GIB), int(free_gib * GIB), "580.0")
    return replace(
        machine(ram_free_gib=ram_gib, gpu=gpu, torch_cuda="13.0"), packages=tuple((name, "1") for name in quantizers)
    )


SHORT, RAM_SHORT, BOTH_SHORT = "planner.memory_short", "planner.ram_short", "planner.memory_and_ram_short"


def plan(model: str, where: Machine, **values: Any) -> ExecutionPlan:
    """Plan a clip of 832x480 with the default frames, decoded in float32: what memory it takes decides the most."""
    wanted = {"prompt": "a red boat", "seed": 1, "width": 832, "height": 480, "vae_precision": "float32"} | values
    return resolve(GenerationRequest.from_mapping(wanted), spec(model), PlanningContext(where, Path("x.mp4")))


@pytest.mark.parametrize(
    ("model", "where", "values", "offload", "quantization", "keeps", "chunk", "tile"),
    [
        (A14B, on(140, 500), {}, "none", "none", "all", 4, None),
        (A14B, on(86, 500), {}, "none", "none", "but text", 1, None),
        (A14B, on(75, 500), {}, "none", "none", "none", 3, None),
        (A14B, on(40, 16), {}, "none", "none", "none", 1, None),
        (A14B, on(24, 96), {}, "group", "none", "none", 1, None),
        (A14B, on(24, 32), {}, "none", "bnb-8bit", "none", 1, None),
        (A14B, on(32, 32), {}, "none", "fp8", "none", 1, None),
        (A14B, on(24, 32, (8, 6)), {}, "none", "bnb-8bit", "none", 1, None),
        (A14B, on(24, 32, (8, 9), ("bitsandbytes",)), {}, "none", "bnb-8bit", "none", 1, None),
        (A14B, on(19, 32), {}, "none", "bnb-4bit", "none", 1, None),
        (A14B, on(140, 500), {"offload": "model"}, "model", "none", "none", 4, None),
        (A14B, on(140, 500), {"offload": "sequential"}, "sequential", "none", "none", 4, None),
        (A14B, on(140, 500), {"offload": "none"}, "none", "none", "all", 4, None),
        (A14B, on(140, 500), {"quantization": "bnb-4bit"}, "none", "bnb-4bit", "all", 4, None),
        (A14B, on(140, 500), {"quantization": "fp8", "offload": "model"}, "model", "fp8", "none", 4, None),
        (A14B, on(24, 96), {"quantization": "fp8"}, "none", "fp8", "none", 1, None),
        # The VAE's decoder is what does not fit.
        (SMALL, on(17, 32), {"frames": 33}, "none", "none", "none", 1, None),
        (SMALL, on(16, 32), {"frames": 33}, "none", "none", "none", 1, 64),
        (SMALL, on(16, 32), {}, "none", "none", "none", 1, 64),
        (SMALL, on(16, 32), {"offload": "model"}, "model", "none", "none", 1, 64),
        (SMALL, on(12, 32), {}, "none", "none", "none", 1, 64),
        (TI2V, on(16, 32), {"width": 1280, "height": 704}, "group", "none", "none", 1, 32),
        # The text encoder does not fit whole: it goes by layer, in group offload as in sequential.
        (SMALL, on(8, 32), {}, "group", "none", "none", 1, 32),
        (SMALL, on(8, 32), {"offload": "sequential"}, "sequential", "none", "none", 1, 32),
        (SMALL, on(8, 32), {"width": 1280, "height": 720}, "group", "none", "none", 1, 32),
        (TI2V, on(8, 32), {}, "group", "none", "none", 1, 16),
        (TI2V, on(8, 32), {"width": 1280, "height": 704}, "sequential", "none", "none", 1, 16),
        (A14B, on(8, 96), {}, "group", "none", "none", 1, 32),
        (A14B, on(7.5, 96), {}, "sequential", "none", "none", 1, 32),
        # In bfloat16 it takes half of that.
        (SMALL, on(16, 32), {"vae_precision": "auto"}, "none", "none", "none", 1, None),
        (A14B, on(75, 500), {"vae_precision": "bfloat16"}, "none", "none", "but text", 1, None),
        # A frame no larger than a tile is decoded whole.
        (SMALL, on(8, 32), {"width": 256, "height": 256}, "group", "none", "none", 1, None),
        (SMALL, on(24, 32), {}, "none", "none", "but text", 1, None),
        (TI2V, on(24, 32), {}, "none", "none", "none", 1, None),
        (TI2V, on(140, 500), {}, "none", "none", "all", 4, None),
    ],
)
def test_the_chosen_strategy(
    model: str,
    where: Machine,
    values: dict[str, Any],
    offload: str,
    quantization: str,
    keeps: str,
    chunk: int,
    tile: int | None,
) -> None:
    made = plan(model, where, **values)
    assert (made.strategy.offload, made.strategy.quantization) == (offload, quantization)
    stay = [name for name in made.components if made.strategy.keeps(name)]
    expected = {"all": list(made.components), "but text": list(made.components)[1:], "none": []}
    assert stay == expected[keeps]
    assert (made.strategy.decode_chunk, made.strategy.decode_tile) == (chunk, tile)
    assert made.components["transformer"].quantization == quantization
    assert made.components["vae"].quantization == "none"
    (taken,) = [one for one in made.strategies if one.strategy == made.strategy]
    assert (taken.strategy.decode_tile, taken.strategy.lossless) == (tile, tile is None and quantization == "none")
    assert taken.peak_bytes == made.memory_bytes == max(stage.peak_bytes for stage in made.memory) <= made.free_bytes


def test_quantization_without_a_request_is_a_warning() -> None:
    (warning,) = plan(A14B, on(24, 32)).warnings
    assert warning == Fact("planner.quantized", {"quantization": "bnb-8bit"})
    assert plan(A14B, on(24, 32), quantization="bnb-8bit").warnings == ()


def test_a_tight_fit_is_the_last_resort_with_a_warning() -> None:
    made = plan(A14B, on(32, 32, quantizers=()))
    (warning,) = made.warnings
    assert warning == Fact("planner.memory_tight", {"peak": made.memory_bytes, "free": made.free_bytes})
    assert made.memory_bytes < made.free_bytes
    # With room in RAM there is a way that fits well.
    roomy = plan(A14B, on(32, 96, quantizers=()))
    assert (roomy.strategy.offload, roomy.warnings) == ("group", ())


@pytest.mark.parametrize(
    ("measured", "offload"),
    [
        ({}, "none"),
        ({"none": 60.0}, "none"),
        # What was not measured is not known to be faster.
        ({"model": 40.0}, "none"),
        ({"none": 60.0, "model": 40.0}, "model"),
        ({"none": 60.0, "model": 59.0}, "none"),
        ({"none": 60.0, "model": 50.0, "group": 40.0}, "group"),
        ({"none": 40.0, "group": 60.0}, "none"),
    ],
)
def test_no_strategy_is_chosen_that_was_measured_slower(measured: dict[str, float], offload: str) -> None:
    here, model = on(60, 500), spec(A14B)
    asked: dict[str, Any] = {"compile": "never", "steps": 4}
    history = []
    for way, seconds in measured.items():
        ran = plan(A14B, here, offload=way, **asked)
        timings = {"text_encoder": 1.0, "denoise": seconds, "decode": 2.0}
        history += runs_of(ran, ran, model, here, timings, {})
    request = GenerationRequest.from_mapping(plan(A14B, here, **asked).request.to_json() | {"offload": "auto"})
    made = resolve(request, model, PlanningContext(here, Path("x.mp4"), history=history))
    assert made.strategy.offload == offload
    # A request for another one counts.
    none = resolve(request.replace(offload="none"), model, PlanningContext(here, Path("x.mp4"), history=history))
    assert none.strategy.offload == "none"


@pytest.mark.parametrize(
    ("model", "where", "values", "code", "gib", "instead"),
    [
        (A14B, on(24, 96), {"offload": "none", "quantization": "none"}, SHORT, {"peak": 30.7}, {"offload": "group"}),
        (A14B, on(24, 96), {"offload": "model"}, SHORT, {"peak": 30.7}, {"offload": "group"}),
        (A14B, on(24, 32), {"offload": "group"}, RAM_SHORT, {"ram": 56.5}, {"quantization": "fp8"}),
        (A14B, on(140, 16), {"offload": "model"}, RAM_SHORT, {"ram": 67.1}, {"offload": "none"}),
        (A14B, on(15, 96), {"quantization": "fp8"}, SHORT, {"peak": 22.2}, {"offload": "group"}),
        (A14B, on(8, 32), {}, BOTH_SHORT, {"ram": 56.7}, "planner.more_ram"),
        (A14B, on(8, 32), {"offload": "sequential"}, RAM_SHORT, {"ram": 67.3}, "planner.more_ram"),
        (A14B, on(24, 32, quantizers=()), {}, BOTH_SHORT, {"peak": 30.7, "ram": 56.5}, "planner.more_ram"),
        (SMALL, on(8, 8), {}, BOTH_SHORT, {"peak": 11.4, "ram": 13.6}, "planner.more_ram"),
        (SMALL, on(8, 16), {"width": 1920, "height": 1088}, SHORT, {"peak": 8.9}, "planner.ask_for_less"),
        (SMALL, on(8, 32), {"offload": "none"}, SHORT, {"peak": 11.4}, {"offload": "group"}),
        (SMALL, on(8, 32), {"offload": "model"}, SHORT, {"peak": 11.4}, {"offload": "group"}),
        (A14B, machine(ram_free_gib=16), {}, SHORT, {"free": 16.0}, "planner.ask_for_less"),
    ],
)
def test_too_little_memory_is_refused_with_a_strategy_that_fits(
    model: str, where: Machine, values: dict[str, Any], code: str, gib: dict[str, float], instead: str | dict[str, str]
) -> None:
    with pytest.raises(MemoryShortError) as caught:
        plan(model, where, **values)
    assert (caught.value.code, caught.value.where) == (code, "video memory" if where.gpus else "memory")
    for name, size in gib.items():
        assert caught.value.data[name] / GIB == pytest.approx(size, abs=0.06)
    remedy = caught.value.data["remedy"]
    if isinstance(instead, str):
        assert remedy.code == instead
    else:
        assert (remedy.code, remedy.data["changes"]) == ("planner.use_strategy", instead)


@pytest.mark.parametrize(
    ("where", "quantization", "code", "cause"),
    [
        (on(24, 32, (8, 6)), "fp8", "planner.quantization_unavailable", "machine.gpu_without_fp8"),
        (machine(ram_free_gib=500), "bnb-4bit", "planner.quantization_needs_gpu", "machine.no_gpu"),
    ],
)
def test_an_unavailable_quantization_is_refused(where: Machine, quantization: str, code: str, cause: str) -> None:
    with pytest.raises(MachineError) as caught:
        plan(A14B, where, quantization=quantization)
    assert (caught.value.code, caught.value.data["cause"].code) == (code, cause)


def test_offload_on_a_cpu_is_a_warning() -> None:
    made = plan(A14B, machine(ram_free_gib=500), offload="group")
    assert made.strategy.offload == "none"
    assert made.warnings[0].code == "planner.offload_on_cpu"


def test_quantized_transformers_are_not_brought_in_parts() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        plan(A14B, on(140, 500), offload="group", quantization="bnb-4bit")
    assert caught.value.code == "planner.quantized_offload"
    assert caught.value.data["chosen"] == {"quantization": "bnb-4bit", "offload": "group"}


def test_strategies_of_a_cpu() -> None:
    roomy, short = (plan(SMALL, machine(ram_free_gib=gib)) for gib in (96, 32))
    assert [one.title.code for one in roomy.strategies] == ["strategy.keep", "strategy.one_at_a_time"]
    assert (roomy.strategy.keep_loaded, short.strategy.keep_loaded) == (True, False)
    assert {one.ram_bytes for one in roomy.strategies} == {0}


def test_frames_are_decoded_in_tiles_on_a_cpu_if_memory_is_short() -> None:
    roomy, short = (plan(SMALL, machine(ram_free_gib=gib), width=1920, height=1088) for gib in (64, 30))
    assert (roomy.strategy.decode_tile, short.strategy.decode_tile) == (None, 64)
    # The clip comes together in the same memory.
    whole_clip = 81 * 1920 * 1088 * 3 * 2
    assert short.memory[-1].working_bytes > whole_clip
    assert short.memory[-1].working_bytes < roomy.memory[-1].working_bytes / 3
    assert short.seconds["decode"].likely > 1.1 * roomy.seconds["decode"].likely
    assert short.decode_flops > 1.1 * roomy.decode_flops
    assert short.seconds["denoise"] == roomy.seconds["denoise"]


def test_a_measured_decode_in_tiles_counts_for_tiles_of_this_size_only() -> None:
    where = machine(ram_free_gib=30)
    request = GenerationRequest(prompt="x", seed=1, width=1920, height=1088, vae_precision="float32")
    made = resolve(request, spec(SMALL), PlanningContext(where, Path("x.mp4")))
    ran = runs_of(made, made, spec(SMALL), where, {"decode": 5.0}, {})
    again = resolve(request, spec(SMALL), PlanningContext(where, Path("x.mp4"), history=ran))
    assert made.strategy.decode_tile == 64 and again.seconds["decode"].likely == pytest.approx(5.0)
    others = [run.replace(kind=run.kind.replace(tile="32")) for run in ran if run.kind.component == "vae"]
    assert (
        resolve(request, spec(SMALL), PlanningContext(where, Path("x.mp4"), history=others)).seconds["decode"]
        == made.seconds["decode"]
    )


def test_decoding_in_tiles_is_a_warning() -> None:
    made = plan(SMALL, on(8, 32))
    (warning,) = made.warnings
    assert warning == Fact("planner.decoded_in_tiles", {"side": 256})
    (taken,) = [one for one in made.strategies if one.strategy == made.strategy]
    assert taken.title == fact("strategy.tiles", how=fact("strategy.offload_group"), side=256)
    assert made.to_json()["decode_tile"] == 32


def test_components_are_freed_before_frames_are_tiled() -> None:
    strategies = plan(SMALL, on(16, 32)).strategies
    assert [one.strategy.decode_tile for one in strategies[:3]] == [None, None, 64]


def test_an_engine_decodes_whole_frames() -> None:
    held = workload(spec(SMALL), (832, 480, 81))
    assert memory_model.tile_sides(held) == [64, 32]
    assert memory_model.tile_sides(replace(held, engine_bytes={"vae": 1})) == []


def test_the_decoder_supports_every_tile() -> None:
    sides = [
        side for model in (SMALL, TI2V) for side in memory_model.tile_sides(workload(spec(model), (1280, 704, 81)))
    ]
    assert sides == [64, 32, 32, 16]
    assert min(sides) >= 4


def test_unavailable_strategies_are_shown_and_not_offered() -> None:
    made = plan(A14B, on(32, 96, (8, 6), ("bitsandbytes",)))
    lacks = {
        one.strategy.quantization: one.lacks and one.lacks.code
        for one in made.strategies
        if one.strategy.quantization != "none"
    }
    assert lacks == {"fp8": "machine.gpu_without_fp8", "bnb-8bit": None, "bnb-4bit": None}
    bare = plan(A14B, on(32, 96, quantizers=()))
    assert {one.strategy.flags: one.lacks.code for one in bare.strategies if one.lacks} == {
        "--quantization fp8": "machine.gpu_package_missing",
        "--quantization bnb-8bit": "machine.gpu_package_missing",
        "--quantization bnb-4bit": "machine.gpu_package_missing",
    }
    # It would fit, and is not offered.
    assert all(one.fits and one.fits_ram for one in bare.strategies if one.strategy.quantization == "bnb-4bit")
    with pytest.raises(MachineError) as caught:
        plan(A14B, on(24, 32, quantizers=()), offload="group")
    assert "changes" not in caught.value.data["remedy"].data


def test_the_ladder_is_from_fast_to_frugal() -> None:
    strategies = plan(A14B, on(140, 500)).strategies
    asked = [one.strategy.flags for one in strategies]
    assert asked == [
        "",
        "",
        "",
        "--offload model",
        "--offload group",
        "--quantization fp8",
        "--quantization bnb-8bit",
        "--quantization bnb-4bit",
        "--offload sequential",
    ]
    lossless = [one for one in strategies if one.strategy.lossless]
    assert [one.peak_bytes for one in lossless] == sorted((one.peak_bytes for one in lossless), reverse=True)
    assert [one.seconds.likely for one in lossless] == sorted(one.seconds.likely for one in lossless)
    assert not any(one.ram_bytes > 10 * GIB for one in strategies if one.strategy.offload == "none")


@pytest.mark.parametrize(
    ("model", "where"),
    [(A14B, on(140, 500)), (A14B, on(24, 96)), (A14B, on(24, 32)), (A14B, on(19, 32)), (SMALL, on(16, 32))],
)
def test_an_offered_strategy_is_chosen_on_request(model: str, where: Machine) -> None:
    for one in plan(model, where).strategies:
        if not one.offered:
            assert one.verdict("video memory").code != "strategy.fits"
            continue
        made = plan(model, where, offload=one.strategy.offload, quantization=one.strategy.quantization)
        (taken,) = [other for other in made.strategies if other.strategy == made.strategy]
        assert taken == one
        assert len(made.strategies) == len(plan(model, where).strategies)


def test_strategies_that_requested_backends_exclude_are_not_offered() -> None:
    with_tensorrt = replace(on(24, 96), packages=(*on(24, 96).packages, ("tensorrt", "11.0")))
    made = plan(A14B, with_tensorrt, backends={"transformer": "tensorrt"})
    group = next(one for one in made.strategies if one.strategy.flags == "--offload model")
    assert not group.offered
    excluded = fact("planner.offload_on_engine", offload="model", backend="tensorrt")
    assert states(group.verdict("video memory"), fact("strategy.unavailable", cause=excluded))
    with pytest.raises(InvalidRequestError) as caught:
        plan(A14B, with_tensorrt, backends={"transformer": "tensorrt"}, offload="model")
    assert (caught.value.field, caught.value.code) == ("offload", "planner.offload_on_engine")


def test_a_requested_strategy_is_inserted_among_the_others() -> None:
    made = plan(A14B, on(140, 500), quantization="fp8", offload="model")
    strategies = made.strategies
    flags = [one.strategy.flags for one in strategies]
    place = flags.index("--offload model --quantization fp8")
    assert strategies[place].strategy == made.strategy and flags[place - 1] == "--quantization fp8"


def verdict(fact: Fact) -> str:
    """Return a verdict's code, and the memory or the code of the cause."""
    cause = fact.data.get("cause")
    more = fact.data.get("memory") if cause is None else cause.code
    return " ".join(filter(None, (fact.code.removeprefix("strategy."), more)))


@pytest.mark.parametrize(
    ("model", "where", "values", "verdicts"),
    [
        (A14B, on(8, 32), {}, {"too_little video memory", "too_little RAM", "too_little_of_both video memory"}),
        (A14B, on(24, 96), {"offload": "none", "quantization": "none"}, {"too_little video memory", "fits"}),
        (SMALL, machine(ram_free_gib=8), {}, {"too_little memory"}),
        (
            A14B,
            replace(on(140, 12, quantizers=()), ram_bytes=12 * GIB, swap_bytes=0),
            {},
            {
                f"unavailable {code}"
                for code in ("planner.load_ram", "machine.gpu_package_missing", "machine.gpu_package_missing")
            },
        ),
    ],
)
def test_a_refusal_carries_the_ladder(model: str, where: Machine, values: dict[str, Any], verdicts: set[str]) -> None:
    with pytest.raises(MemoryShortError) as caught:
        plan(model, where, **values)
    strategies = caught.value.strategies
    # One more where RAM is short.
    short = where.ram_free_bytes < 67 * GIB
    assert len(strategies) == (9 + short if where.gpus else 2)
    assert {verdict(one.verdict(caught.value.where)) for one in strategies} == verdicts


def test_the_plan_says_it_all_as_json() -> None:
    result = plan(A14B, on(24, 96)).to_json()
    assert result["memory"]["peak_bytes"] == result["memory_bytes"]
    assert result["memory"]["free_bytes"] == 24 * GIB
    assert [stage["component"] for stage in result["memory"]["stages"]] == list(result["components"])
    assert set(result["forecast"]) == {"encode", "denoise", "decode", "total", "load", "second"}
    for forecast in result["forecast"].values():
        assert forecast["low"] <= forecast["seconds"] <= forecast["high"]
        assert forecast["measured"] is False
    assert [one["flags"] for one in result["ladder"] if one["taken"]] == ["--offload group"]


def test_a_lora_is_added_to_quantized_weights_too() -> None:
    use = LoraUse(file="style", path=Path("style.safetensors"), digest="0" * 64, weight=1.0)
    with_lora = replace(spec(A14B), loras=(use,))

    def planned(where: Machine, **values: Any) -> ExecutionPlan:
        request = GenerationRequest.from_mapping({"prompt": "a boat", "loras": ["style"]} | values)
        return resolve(request, with_lora, PlanningContext(where, Path("x.mp4")))

    small, without = planned(on(24, 32)), plan(A14B, on(24, 32))
    assert small.loras == (use,)
    assert small.strategy.quantization == without.strategy.quantization != "none"
    assert [one.lacks for one in small.strategies] == [one.lacks for one in without.strategies]
    forced = planned(on(140, 500), quantization="fp8")
    assert (forced.strategy.quantization, forced.loras) == ("fp8", (use,))
