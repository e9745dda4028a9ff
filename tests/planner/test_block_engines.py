"""Plans with engines for parts of transformer blocks: which settings they work with, precision, memory."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from runtime.bench.configurations import backend_text
from runtime.core.errors import InvalidRequestError, MemoryShortError
from runtime.core.estimates import MemoryStrategy
from runtime.core.facts import Fact, short
from runtime.core.plan import EngineRef, ExecutionPlan, LatentSize
from runtime.core.request import GenerationRequest
from runtime.machine.probe import Gpu, Machine
from runtime.planner import memory_model
from runtime.planner.choice.engine_offers import EngineOffer, no_offers
from runtime.planner.history import Run
from runtime.planner.memory_model import Workload
from runtime.planner.resolve import PlanningContext, resolve
from runtime.ui.plan_panel import summarize
from runtime.ui.plan_preview import Preview
from tests.facts import fact, states
from tests.plans import GIB, GPU_PACKAGES, machine
from tests.published_specs import spec

A14B, SMALL = "wan2.2-a14b", "wan2.1-1.3b"
EXPERTS = ("transformer", "transformer_2")
PROGRAMS = ("block_qkv", "block_query", "block_feed_forward")
PACKAGES = (*GPU_PACKAGES, ("torchao", "1"), ("bitsandbytes", "1"), ("flash-attn-4", "1"), ("triton", "1"))
GPU = Gpu("NVIDIA H200", (9, 0), 141 * GIB, 139 * GIB, "580.95")
H200 = replace(
    machine(ram_free_gib=500, torch_cuda="13.0", packages=PACKAGES),
    gpus=(GPU,),
    driver_cuda=(13, 0),
    ram_bytes=GIB << 10,
)
FOUR = replace(H200, gpus=(GPU,) * 4)
SIZE: LatentSize = (1, 1, 1)
CONTEXT = 400_000_000


def use(program: str, **changes: Any) -> EngineRef:
    """Return an engine that is there."""
    made = EngineRef(id=program, program=program, builder="b", precision="float16", profile=(SIZE, SIZE, SIZE))
    return made.replace(**changes)


def blocks(backend: str = "tensorrt", **changes: Any) -> EngineOffer:
    """Return block engines that are there."""
    stated = {"tokens": 8192, "context_bytes": CONTEXT} | changes
    uses = tuple(use(program, **stated) for program in PROGRAMS)
    return EngineOffer(backend=backend, builder=f"{backend}_blocks", engines=uses, file_bytes=1_000_000, in_blocks=True)


def whole(backend: str = "tensorrt", **changes: Any) -> EngineOffer:
    """Return an engine of the whole transformer that is there."""
    uses = (use("transformer", **changes),)
    return EngineOffer(backend=backend, builder=backend, engines=uses, file_bytes=28_000_000_000)


def plan(
    offered: Sequence[EngineOffer],
    model: str = A14B,
    on: Machine = H200,
    backend: str = "tensorrt",
    others: Mapping[str, Sequence[EngineOffer]] | None = None,
    history: Sequence[Run] = (),
    **settings: Any,
) -> ExecutionPlan:
    """Plan a clip whose transformers were requested on a backend.

    Args:
        offered: for the transformers.
        others: for single components.
    """
    request = GenerationRequest.from_mapping(
        {
            "prompt": "a red boat",
            "seed": 1,
            "width": 832,
            "height": 480,
            "frames": 81,
            "backends": dict.fromkeys(EXPERTS[: 2 if model == A14B else 1], backend),
            **settings,
        }
    )

    def offers(component: str, _latent: LatentSize, _device: str) -> Sequence[EngineOffer]:
        return (others or {}).get(component, offered if component in EXPERTS else ())

    return resolve(request, spec(model), PlanningContext(on, Path("x.mp4"), offers, history))


# What each kind of engine works with; a transformer in PyTorch works with all.
SETTINGS: list[tuple[dict[str, Any], bool, bool]] = [
    # settings, an engine of the whole transformer, block engines
    ({}, True, True),
    ({"offload": "none"}, True, True),
    ({"offload": "model"}, False, True),
    ({"offload": "group"}, False, True),
    ({"offload": "sequential"}, False, False),
    ({"gpus": 2}, False, True),
    ({"gpus": 4}, False, True),
    ({"step_cache": "first-block"}, False, True),
    ({"attention": "native"}, True, True),
    ({"attention": "cudnn"}, False, True),
    ({"attention": "flash4"}, False, True),
    ({"quantization": "none"}, True, True),
    ({"quantization": "fp8"}, False, False),
    ({"quantization": "bnb-8bit"}, False, False),
    ({"quantization": "bnb-4bit"}, False, False),
]


@pytest.mark.parametrize(("settings", "in_whole", "in_blocks"), SETTINGS, ids=str)
@pytest.mark.parametrize("offered", [[whole()], [blocks()], [whole(), blocks()], [blocks(), whole()]])
def test_settings_and_kinds_of_engines(
    settings: dict[str, Any], in_whole: bool, in_blocks: bool, offered: list[EngineOffer]
) -> None:
    able = [offer for offer in offered if (in_blocks if offer.in_blocks else in_whole)]
    if not able:
        with pytest.raises(InvalidRequestError) as refused:
            plan(offered, on=FOUR, **settings)
        assert refused.value.field in settings
        return
    made = plan(offered, on=FOUR, **({"gpus": 1} | settings))
    for name in EXPERTS:
        part = made.components[name]
        assert part.engines == able[0].engines
        assert (part.in_blocks, part.on_engine) == (able[0].in_blocks, not able[0].in_blocks)
        assert part.quantization == "none"
    for name, value in settings.items():
        assert (
            name in {"quantization", "step_cache", "attention"}
            or getattr(made, name, None) == value
            or (getattr(made.strategy, name) == value)
        )


@pytest.mark.slow
def test_pairs_of_settings_that_block_engines_allow() -> None:
    """Block engines allow what PyTorch allows, except three settings: no pair of others is refused."""
    allowed = [settings for settings, _, in_blocks in SETTINGS if in_blocks]
    for one, other in combinations(allowed, 2):
        if one.keys() & other.keys():
            continue
        settings = {"gpus": 1} | one | other
        try:
            plan([], on=FOUR, backend="pytorch", **settings)
        except (InvalidRequestError, MemoryShortError) as refused:
            with pytest.raises(type(refused)):
                plan([blocks()], on=FOUR, **settings)
        else:
            assert plan([blocks()], on=FOUR, **settings).components["transformer"].in_blocks


@pytest.mark.parametrize(
    ("setting", "code"),
    [
        ({"offload": "sequential"}, "planner.sequential_in_blocks"),
        ({"quantization": "bnb-4bit"}, "planner.quantized_in_blocks"),
        ({"quantization": "fp8"}, "planner.fp8_in_blocks"),
    ],
)
def test_refusals_state_the_reason_of_block_engines(setting: dict[str, Any], code: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        plan([whole(), blocks()], **setting)
    assert refused.value.fact.code == code


def test_several_gpus_are_used_with_block_engines_only() -> None:
    split = plan([whole(), blocks()], on=FOUR, gpus="auto").split
    assert split is not None
    assert (split.guidance, split.sequence) == (2, 2)
    alone = plan([whole()], on=FOUR, gpus="auto")
    assert alone.split is None
    causes = [fact.data["cause"].code for fact in alone.warnings if fact.code == "planner.one_gpu"]
    assert causes == ["planner.gpus_on_engine"]


def test_pytorch_computes_between_engines_in_their_precision() -> None:
    made = plan([blocks()])
    assert [made.components[name].dtype for name in made.components] == ["bfloat16", "float16", "float16", "bfloat16"]
    assert made.components["transformer"].weights_bytes == 2 * spec(A14B).parameters["transformer"]
    assert made.speed.attention == "flash4"
    assert (made.speed.compiled, made.speed.paired, made.speed.fused) == (False, False, False)
    assert made.speed.text_kept
    on_engine = plan([whole()])
    assert on_engine.components["transformer"].dtype == "bfloat16"
    assert on_engine.speed.attention_reason == Fact("planner.engines_compute")


@pytest.mark.parametrize("offer", [blocks(), whole()], ids=["blocks", "whole"])
@pytest.mark.parametrize(
    ("compile_", "vae", "on", "compiled", "code"),
    [
        ("always", "auto", H200, True, "planner.compiled_asked"),
        ("never", "auto", H200, False, "planner.not_compiled_asked"),
        # 81 frames of 832x480 decode in 1 s, which is less than compiling takes.
        ("auto", "auto", H200, False, "planner.not_compiled_pays_off"),
        ("auto", "auto", replace(H200, packages=GPU_PACKAGES), False, "planner.not_compiled"),
        ("always", "tensorrt", H200, False, ""),
    ],
)
def test_the_vae_is_compiled_beside_engines_of_the_transformers(
    offer: EngineOffer, compile_: str, vae: str, on: Machine, compiled: bool, code: str
) -> None:
    asked = dict.fromkeys(EXPERTS, "tensorrt") | {"vae": vae}
    decoder = EngineOffer(backend="tensorrt", builder="b", engines=(use("vae_first"), use("vae_next")))
    made = plan([offer], on=on, others={"vae": [decoder]}, backends=asked, compile=compile_)
    speed, reason = made.speed, made.speed.compiled_reason
    assert (speed.compiled, speed.vae_kernels, speed.channels_last) == (False, compiled, True)
    assert reason is not None
    if code:
        assert (reason.code, reason.data["how"].code) == ("planner.only_vae_compiles", code)
        assert made.seconds["load"].likely == pytest.approx(
            plan([offer], on=on, backends=asked, compile="never").seconds["load"].likely + (5.0 if compiled else 0.0)
        )
    else:
        assert reason.code in {"planner.engines_compute", "planner.not_compiled_in_blocks"}


def test_the_vae_is_compiled_beside_engines_if_that_pays_off() -> None:
    long: dict[str, Any] = {
        "width": 1024,
        "height": 1024,
        "frames": 253,
        "backends": dict.fromkeys(EXPERTS, "tensorrt"),
    }
    asked, never = plan([blocks()], **long), plan([blocks()], compile="never", **long)
    assert asked.speed.vae_kernels and not asked.speed.compiled
    saved = never.seconds["decode"].likely - asked.seconds["decode"].likely
    assert asked.speed.compiled_reason is not None
    how = asked.speed.compiled_reason.data["how"]
    assert (how.code, how.data["saved"]) == ("planner.compiled_pays_off", pytest.approx(saved))
    assert saved > how.data["seconds"]


def test_one_expert_in_blocks_and_one_in_pytorch() -> None:
    made = plan([blocks()], backends={"transformer": "tensorrt", "transformer_2": "pytorch"})
    assert [made.components[name].in_blocks for name in EXPERTS] == [True, False]
    assert [made.components[name].dtype for name in EXPERTS] == ["float16", "bfloat16"]
    assert not made.speed.paired
    assert not made.speed.fused


def test_memory_of_block_engines_is_about_pytorchs() -> None:
    sizes: list[dict[str, Any]] = [{}, {"width": 1280, "height": 720}]
    for size in sizes:
        in_blocks, in_pytorch = plan([blocks()], **size), plan([], backend="pytorch", **size)
        ours, theirs = (
            next(stage for stage in made.memory if stage.component == "transformer") for made in (in_blocks, in_pytorch)
        )
        assert ours.weights_bytes == theirs.weights_bytes
        assert ours.peak_bytes < theirs.weights_bytes + 1.1 * (theirs.peak_bytes - theirs.weights_bytes) + CONTEXT


def test_the_context_of_engines_is_shared() -> None:
    large = [use(program, context_bytes=size) for program, size in zip(PROGRAMS, (5, 7, 3), strict=True)]
    held = Workload.of(plan([blocks()]), spec(A14B))
    held = replace(held, engines={"transformer": tuple(large), "vae": (use("vae_next", context_bytes=6),)})
    assert held.context_bytes(["transformer"]) == 7
    assert held.context_bytes(["transformer", "vae"]) == 7
    assert held.context_bytes(["vae"]) == 6
    assert held.context_bytes(["text_encoder"]) == 0


@pytest.mark.parametrize(
    ("offload", "keep_loaded", "while_encoding"), [("none", True, 7), ("none", False, 0), ("model", True, 0)]
)
def test_a_context_is_held_while_other_components_run_only_if_all_stay_loaded(
    offload: str, keep_loaded: bool, while_encoding: int
) -> None:
    held = Workload.of(plan([blocks()]), spec(A14B))
    engines = tuple(use(program, context_bytes=7 * GIB) for program in PROGRAMS)
    strategy = MemoryStrategy(offload=offload, keep_loaded=keep_loaded)
    with_context, without = (
        memory_model.stages(replace(held, engines={"transformer": uses}), strategy)[0].overhead_bytes
        for uses in (engines, tuple(engine.replace(context_bytes=0) for engine in engines))
    )
    assert with_context - without == while_encoding * GIB


def test_engines_of_more_tokens_a_call_take_more_memory_beside_their_context() -> None:
    held = Workload.of(plan([blocks()]), spec(A14B))
    few, many = (
        memory_model.stages(
            replace(
                held, engines={"transformer": tuple(use(name, tokens=tokens, context_bytes=GIB) for name in PROGRAMS)}
            ),
            MemoryStrategy(),
        )[1].working_bytes
        for tokens in (1024, 2048)
    )
    # The stream in float32, the text's queries and their attended values in 16 bits.
    assert many - few == pytest.approx(1024 * (4 + 2 * 2) * 5120, rel=0.2)


def test_memory_of_engines_to_be_built_is_estimated() -> None:
    built, missing = plan([blocks()]), plan([blocks(build=True, context_bytes=0)])
    for ready, planned in zip(built.memory, missing.memory, strict=True):
        assert ready.peak_bytes == pytest.approx(planned.peak_bytes, rel=0.02)


def test_group_offload_streams_weights_past_block_engines() -> None:
    small_gpu = replace(H200, gpus=(replace(GPU, total_bytes=24 * GIB, free_bytes=23 * GIB),))
    made = plan([blocks(), whole()], on=small_gpu, offload="group")
    assert made.components["transformer"].in_blocks
    assert made.strategy.offload == "group"
    resident = memory_model.weights_bytes(spec(A14B), {name: part.dtype for name, part in made.components.items()})
    stage = next(stage for stage in made.memory if stage.component == "transformer")
    assert stage.weights_bytes < resident["transformer"] / 5
    assert made.forecast.ram_bytes > sum(resident.values())


def measured(offer: EngineOffer, seconds: float, **baselines: float) -> EngineOffer:
    """Return an offer with measurements."""
    return replace(offer, seconds=seconds, baselines=baselines)


def test_block_engines_are_chosen_if_a_pass_is_faster() -> None:
    in_pytorch = plan([], backend="auto", compile="always")
    assert in_pytorch.speed.compiled
    # Parts of a pass, without 1 s of attention.
    slow, fast = measured(blocks(), 1.9, eager=2.5, compiled=1.8), measured(blocks(), 1.5, eager=2.5, compiled=1.8)
    refused, chosen = (plan([offer], backend="auto", compile="always") for offer in (slow, fast))
    assert refused.components["transformer"].backend == "pytorch"
    assert refused.components["transformer"].reasons[-1].code == "planner.none_faster"
    assert refused.speed.compiled
    how = refused.components["transformer"].reasons[-1].data["how"]
    assert refused.seconds["denoise"].likely == pytest.approx(80 * how.data["pytorch"])
    assert chosen.components["transformer"].in_blocks
    note = chosen.components["transformer"].reasons[0].data["how"]
    assert note.data["path"] == Fact("planner.path_compiled")
    attention = note.data["seconds"] - 1.5
    assert note.data["pytorch"] == pytest.approx(1.8 + attention)
    assert 0.8 < attention < 2.0
    # Never compiled: the eager baseline counts.
    assert plan([slow], backend="auto", compile="never").components["transformer"].in_blocks


def test_the_forecast_of_a_pass_is_its_parts_and_attention() -> None:
    made = plan([measured(blocks(), 1.5, eager=2.5)], steps=10)
    calls = 2 * 10
    assert made.seconds["denoise"].likely == pytest.approx(calls * 2.8, rel=0.2)
    two = plan([measured(blocks(), 1.5, eager=2.5)], on=FOUR, gpus=2, steps=10)
    assert two.seconds["denoise"].likely < 0.6 * made.seconds["denoise"].likely


def test_engines_that_are_partly_built_have_no_speed_yet() -> None:
    ready = measured(blocks(), 1.5, eager=2.5)
    partly = replace(ready, seconds=0.1, engines=(*ready.engines[:2], ready.engines[2].replace(build=True)))
    unknown = replace(blocks(), engines=partly.engines)
    assert plan([partly], steps=10).seconds["denoise"] == plan([unknown], steps=10).seconds["denoise"]


def test_an_engine_that_was_not_requested_gives_way_where_memory_is_short() -> None:
    """PyTorch offloads weights by group; an engine of the whole transformer does not fit at all."""
    little = replace(H200, gpus=(replace(GPU, total_bytes=24 * GIB, free_bytes=23 * GIB),))
    offer = measured(whole(), 0.1, eager=2.5, compiled=1.8)
    made = plan([offer], on=little, backend="auto")
    assert made.components["transformer"].backend == "pytorch"
    assert made.components["transformer"].badge == Fact("planner.engine_memory")
    assert made.strategy == plan([], on=little, backend="auto").strategy
    with pytest.raises(MemoryShortError):
        plan([offer], on=little, backend="tensorrt")


def documented() -> list[tuple[str, str, bool, bool]]:
    """Return the rows of the table in docs/engines.md: field, value, whether each kind of engine works with it."""
    text = (Path(__file__).parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")
    rows = text.partition("| setting | engines of whole transformers | block engines |")[2].partition("\n\n")[0]
    found = []
    for row in rows.splitlines()[2:]:
        flags, *works = (cell.strip() for cell in row.strip("|").split("|"))
        for flag in re.findall(r"`--([a-z-]+) ([^`]+)`", flags):
            found.append((flag[0].replace("-", "_"), flag[1], *(one == "yes" for one in works)))
    return found


@pytest.mark.parametrize(("field", "value", "in_whole", "in_blocks"), documented())
def test_the_documented_table(field: str, value: str, in_whole: bool, in_blocks: bool) -> None:
    settings: dict[str, Any] = {"gpus": 1, field: int(value) if value.isdecimal() else value}
    for offer, works in ((whole(), in_whole), (blocks(), in_blocks)):
        if works:
            assert plan([offer], on=FOUR, **settings).components["transformer"].engines == offer.engines
        else:
            with pytest.raises(InvalidRequestError):
                plan([offer], on=FOUR, **settings)


def test_the_documented_table_has_every_setting() -> None:
    fields = {name for settings, *_ in SETTINGS for name in settings}
    assert {row[0] for row in documented()} == fields


def test_plans_previews_and_benchmarks_name_block_engines() -> None:
    made = plan([blocks()])
    part = made.components["transformer"].to_json()
    assert (part["engine"], part["engines"], part["dtype"]) == (PROGRAMS[-1], list(PROGRAMS), "float16")
    assert states(made.components["transformer"], "planner.in_blocks")
    assert backend_text(made) == (
        "PyTorch, bfloat16 (text_encoder, vae); TensorRT for blocks, float16 (transformer, transformer_2)"
    )
    summary = summarize(Preview(made, None, no_offers, (), True, spec(A14B)), tuple(made.components))
    badge = summary.badges["transformer_2"]
    assert (badge.text, badge.kind) == (f"TensorRT: {short(fact('planner.badge_ready'))}", "ready")
    # PyTorch computes the attention between the engines, so its kernel is stated too.
    assert str(fact("planner.in_blocks")) in badge.reason
    assert "FlashAttention 4" in badge.reason
