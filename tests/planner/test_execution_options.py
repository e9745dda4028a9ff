"""Execution options: attention kernels, compilation, what is computed once; and their speedups on an H200.

The speedups are fitted to rows of measured_h200_speedups.jsonl (bench/h200.md) with "fitted": true. The split is by
rule: attention kernels measured alone and passes of 832×480 with PyTorch's attention are fitted; all passes with other
kernels and all of 1280×720 are held out. Decoders are fitted to the first size of their channels and to float32 at
832×480. On held-out rows estimates are off by 3 to 14 % for passes and by 15 % for decoding.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import InvalidRequestError, MachineError
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan, Speed
from runtime.core.request import ATTENTIONS, GenerationRequest
from runtime.core.sparse_attention import kernel_of
from runtime.machine.probe import Gpu, Machine
from runtime.models.catalogue import look_up
from runtime.models.images import with_images
from runtime.models.spec import ROW_KERNELS, ModelSpec, attention_flops
from runtime.models.stored_weights import INT8, FileTensor, StoredWeight, WeightFiles
from runtime.planner import constraints, execution_options, forecast
from runtime.planner.history import (
    Kind,
    Run,
    architecture,
    attention_kind,
    compilation_runs,
    device_name,
    history_tag,
    runs_of,
)
from runtime.planner.resolve import PlanningContext, resolve
from tests.image_files import picture
from tests.plans import GIB, machine
from tests.published_specs import spec as true_size

A14B = true_size("wan2.2-a14b")
# Without kernels for norms and gates, compiling saves a seventh of a pass in 16 bits.
COMPILES = replace(A14B, lacks=frozenset({ROW_KERNELS}))
SPEEDUPS = [
    json.loads(line) for line in Path(__file__).with_name("measured_h200_speedups.jsonl").read_text().splitlines()
]
TRITON = (("triton", "3.6.0"), ("torchao", "0.18.0"))
FLASH4 = (*TRITON, ("flash-attn-4", "4.0.0b36"))


def gpu_machine(
    name: str = "NVIDIA H200",
    capability: tuple[int, int] = (9, 0),
    gib: float = 141,
    packages: tuple[tuple[str, str], ...] = TRITON,
) -> Machine:
    """Return a machine with much memory and one GPU."""
    gpu = Gpu(name, capability, int(gib * GIB), int(gib * GIB), "580.0")
    here = machine(gpu=gpu, torch_cuda="13.0", packages=packages)
    return replace(here, ram_bytes=256 * GIB, ram_free_bytes=250 * GIB)


def plan(spec: ModelSpec = A14B, on: Machine | None = None, history: Any = (), **values: Any) -> ExecutionPlan:
    """Plan a clip of the model's defaults."""
    on = gpu_machine() if on is None else on
    return resolve(
        GenerationRequest(prompt="a boat", **values), spec, PlanningContext(on, Path("x.mp4"), history=history)
    )


def speedup_rows(part: str) -> list[dict[str, Any]]:
    """Return the measurements of a component, or of "attention" alone."""
    return [row for row in SPEEDUPS if row["part"] == part]


def named(row: dict[str, Any]) -> str:
    """Return a measurement's name for pytest."""
    return "-".join(str(value) for key, value in row.items() if key not in {"seconds", "fitted", "compiled"})


def test_the_speedups_are_those_of_the_fitted_rows() -> None:
    attention = {row["attention"]: row["seconds"] for row in speedup_rows("attention")}
    for kernel, speedup in forecast._ATTENTION_SPEEDUP.items():
        assert speedup == pytest.approx(attention["native"] / attention[kernel], rel=0.01)
    passes = [row for row in speedup_rows("transformer") if row["fitted"]]
    eager, in_fp8 = (row["seconds"] for row in passes if not row["compiled"])
    compiled = {row["quantization"]: row["seconds"] for row in passes if row["compiled"]}
    # Uncompiled FP8 was measured with attention in FP8.
    (compiled_in_fp8,) = (
        row["seconds"]
        for row in speedup_rows("transformer")
        if row["compiled"] and row["size"] == [832, 480] and row["quantization"] == row["attention"] == "fp8"
    )
    uncompiled = {"none": eager, "fp8": compiled["fp8"] * in_fp8 / compiled_in_fp8}
    assert forecast._QUANTIZED["fp8"][1] == pytest.approx(uncompiled["fp8"] / eager, rel=0.01)
    clip_attention = A14B.blocks * attention["native"]
    saved = (eager - uncompiled["fp8"]) / (eager - clip_attention)
    assert pytest.approx(saved, rel=0.02) == forecast._FP8_SAVED
    rate = next(rate for name, rate, _ in forecast._GPUS if name == "H200") * 1e12
    reached = attention_flops(A14B, A14B.tokens(81, 480, 832)) / attention["native"] / rate
    assert pytest.approx(reached, rel=0.01) == forecast._NATIVE_ATTENTION_SHARE
    for quantization, speedup in forecast._COMPILED_SPEEDUP.items():
        assert speedup == pytest.approx(uncompiled[quantization] / compiled[quantization], rel=0.01)
    decoders: dict[tuple[str, str], dict[bool, float]] = {}
    for row in speedup_rows("vae"):
        if row["fitted"]:
            decoders.setdefault((row["model"], row["dtype"]), {})[row["compiled"]] = row["seconds"]
    for (model, dtype), seconds in decoders.items():
        speedup = forecast.decoder_speedup(dtype, true_size(model).vae.last_channels, (9, 0))
        assert speedup == pytest.approx(seconds[False] / seconds[True], rel=0.01)


@pytest.mark.parametrize("row", [row for row in speedup_rows("vae") if not row["fitted"]], ids=named)
def test_estimates_of_compiled_decoding_are_near_held_out_measurements(row: dict[str, Any]) -> None:
    width, height, frames = row["size"]
    asked: dict[str, Any] = {"width": width, "height": height, "frames": frames, "vae_precision": row["dtype"]}
    found = plan(true_size(row["model"]), compile="always", **asked).seconds["decode"]
    assert found.likely == pytest.approx(row["seconds"], rel=0.2)
    assert found.low < row["seconds"] < found.high
    assert not found.measured


@pytest.mark.parametrize("row", [row for row in speedup_rows("transformer") if not row["fitted"]], ids=named)
def test_estimates_of_compiled_passes_are_near_held_out_measurements(row: dict[str, Any]) -> None:
    on = gpu_machine(packages=(*FLASH4, ("nvidia-cudnn-frontend", "1.32")))
    width, height = row["size"]
    asked: dict[str, Any] = {name: row[name] for name in ("quantization", "attention")}
    found = plan(on=on, width=width, height=height, steps=40, compile="always", **asked).seconds["denoise"]
    assert found.likely == pytest.approx(80 * row["seconds"], rel=0.15)
    assert found.low < 80 * row["seconds"] < found.high
    assert not found.measured


# Of CUDA graphs of LTX-2, 121 frames (bench/h200.md), held out.
@pytest.mark.parametrize(
    ("size", "quantization", "seconds"),
    [
        ((768, 512), "none", 0.313),
        ((1216, 704), "none", 0.790),
        ((768, 512), "fp8", 0.216),
        ((1216, 704), "fp8", 0.577),
    ],
)
def test_estimates_of_passes_with_sound_are_near_measurements(
    size: tuple[int, int], quantization: str, seconds: float
) -> None:
    model = replace(look_up("ltx-2", Path("none")), is_downloaded=True)
    asked: dict[str, Any] = {"width": size[0], "height": size[1], "frames": 121, "guidance_scale": 1.0, "steps": 30}
    made = plan(model, gpu_machine(packages=FLASH4), quantization=quantization, **asked)
    assert (made.speed.graphed, made.speed.attention) == (True, "flash4")
    found = made.seconds["denoise"]
    assert found.likely == pytest.approx(30 * seconds, rel=0.15)
    assert found.low < 30 * seconds < found.high


@pytest.mark.parametrize("field", ["compiled", "text_kept", "paired", "graphed", "fused", "channels_last"])
def test_options_that_the_family_lacks_are_not_chosen(field: str) -> None:
    model = COMPILES if field == "compiled" else true_size("wan2.1-1.3b")
    asked: dict[str, Any] = {} if field == "compiled" else {"width": 256, "height": 256, "frames": 5}
    had, lacked = (plan(one, **asked).speed for one in (model, replace(model, lacks=model.lacks | {field})))
    assert getattr(had, field)
    assert not getattr(lacked, field)
    assert lacked.text_bytes == (0 if field == "text_kept" else had.text_bytes)
    if field == "compiled":
        assert lacked.compiled_reason is not None
        assert lacked.compiled_reason.data["cause"] == Fact("planner.family_never_compiles")


def test_requested_compilation_is_refused_if_the_family_lacks_it() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        plan(replace(A14B, lacks=frozenset({"compiled"})), compile="always")
    assert refused.value.fact.code == "family.option_unsupported"


@pytest.mark.parametrize(
    ("on", "wanted", "code"),
    [
        (gpu_machine(), "cudnn", "planner.attention_by_rule"),
        (gpu_machine(packages=FLASH4), "flash4", "planner.attention_by_rule"),
        (gpu_machine("NVIDIA B200", (10, 0), packages=FLASH4), "cudnn", "planner.attention_by_rule"),
        (gpu_machine("NVIDIA A100", (8, 0), 80), "flash", "planner.attention_by_rule"),
        (gpu_machine("NVIDIA A100", (8, 0), 80, FLASH4), "flash", "planner.attention_by_rule"),
        (gpu_machine("Tesla T4", (7, 5), 40), "native", "planner.attention_old_gpu"),
        (replace(machine(), ram_bytes=128 * GIB, ram_free_bytes=120 * GIB), "native", "planner.attention_on_cpu"),
    ],
    ids=["hopper", "hopper-flash4", "blackwell-flash4", "ampere", "ampere-flash4", "turing", "cpu"],
)
def test_attention_by_rule(on: Machine, wanted: str, code: str) -> None:
    small = true_size("wan2.1-1.3b")
    decided = plan(small, on, frames=5, steps=2).speed
    assert decided.attention == wanted
    assert decided.attention_reason is not None and decided.attention_reason.code == code


def test_float32_keeps_pytorchs_own_attention() -> None:
    from runtime.models.catalogue import find

    decided = plan(find("diorama", Path("none")), gpu_machine()).speed
    assert (decided.attention, decided.compiled) == ("native", False)
    assert decided.attention_reason == Fact("planner.attention_dtype", {"dtype": "float32"})


def measured(kind: str, seconds: float, clip: ExecutionPlan) -> Run:
    """Return a measured attention of a clip's size on the test's H200."""
    found = attention_kind("NVIDIA H200", "bfloat16", kind)
    return Run(
        kind=found, flops=attention_flops(A14B, clip.tokens), seconds=seconds, working_bytes=1, excess_bytes=None
    )


def test_the_fastest_measured_attention_is_used_if_it_is_installed() -> None:
    clip = plan()
    runs = [measured("cudnn", 0.038, clip), measured("flash4", 0.034, clip), measured("flash", 0.06, clip)]
    assert plan(history=runs).speed.attention == "cudnn"  # flash4 is not installed
    here = gpu_machine(packages=FLASH4)
    decided = plan(on=here, history=runs).speed
    assert decided.attention == "flash4"
    assert decided.attention_reason is not None
    assert decided.attention_reason.code == "planner.attention_measured"
    assert decided.attention_reason.data["seconds"]["flash4"] == 0.034
    # Measurements take precedence over the rule.
    assert plan(on=here, history=[*runs[:1], measured("flash4", 0.04, clip)]).speed.attention == "cudnn"
    # Inexact attention is used only on request.
    runs.append(measured("fp8", 0.001, clip))
    both = gpu_machine(packages=(*TRITON, ("nvidia-cudnn-frontend", "1.32")))
    assert plan(on=both, history=runs).speed.attention == "cudnn"
    assert plan(on=both, history=runs, attention="fp8").speed.attention == "fp8"


@pytest.mark.parametrize("kind", [*list(ATTENTIONS)[2:], "sol:1.5"])
def test_an_unavailable_attention_is_refused_with_a_remedy(kind: str) -> None:
    with pytest.raises(MachineError) as refused:
        plan(true_size("wan2.1-1.3b"), machine(), attention=kind, frames=5)
    assert refused.value.code == "planner.attention_needs_gpu"
    assert refused.value.data == {"attention": kind, "cause": Fact("machine.no_gpu")}
    assert refused.value.remedy
    old = gpu_machine("Tesla T4", (7, 5), 40)
    with pytest.raises(MachineError) as refused:
        plan(true_size("wan2.1-1.3b"), old, attention=kind, frames=5)
    assert refused.value.code == "planner.attention_unavailable"
    assert refused.value.data["cause"] == Fact("planner.attention_gpu_too_old", {"gpu": "Tesla T4"})


@pytest.mark.parametrize("kind", ["flash3", "flash4", "sage", "fp8", "sol:2"])
def test_a_missing_package_is_named(kind: str) -> None:
    against = constraints.attention_conflict(kind, gpu_machine())
    assert against is not None
    package = constraints.ATTENTION_KERNELS[kernel_of(kind)].package
    assert against.fact == Fact("planner.attention_not_installed", {"package": package})
    with pytest.raises(MachineError) as refused:
        plan(attention=kind)
    assert refused.value.data["cause"] == against.fact


def test_16_bit_attention_of_a_float32_model_is_refused() -> None:
    from runtime.models.catalogue import find

    with pytest.raises(InvalidRequestError) as refused:
        plan(find("diorama", Path("none")), gpu_machine(), attention="cudnn")
    assert (refused.value.field, refused.value.code) == ("attention", "planner.attention_needs_16bit")
    assert refused.value.data["dtype"] == "float32"


def test_compiling_pays_off_for_a_long_clip_and_not_for_a_short_one() -> None:
    long, short = plan(COMPILES), plan(COMPILES, frames=5, steps=2)
    for made, compiled, code in (
        (long, True, "planner.compiled_pays_off"),
        (short, False, "planner.not_compiled_pays_off"),
    ):
        reason = made.speed.compiled_reason
        assert made.speed.compiled is compiled and reason is not None
        assert (reason.code, reason.data["seconds"], reason.data["measured"]) == (code, 20.0, False)
    never = plan(COMPILES, compile="never")
    assert long.seconds["denoise"].likely < never.seconds["denoise"].likely
    assert long.seconds["load"].likely - never.seconds["load"].likely == pytest.approx(20.0)
    assert long.seconds["compile"].likely == 20.0 and "compile" not in short.seconds


LARGE: dict[str, Any] = {"width": 1280, "height": 720, "frames": 161, "steps": 2}


@pytest.mark.parametrize(
    ("values", "on", "kernels"),
    [
        (LARGE, gpu_machine(), True),
        # Of a short clip they save less than they take to compile.
        (LARGE | {"frames": 81}, gpu_machine(), False),
        (LARGE | {"frames": 81, "compile": "always"}, gpu_machine(), True),
        (LARGE | {"compile": "never"}, gpu_machine(), False),
        (LARGE | {"offload": "model"}, gpu_machine(), True),
        # Hooks would move weights that kernels read.
        (LARGE | {"offload": "group"}, gpu_machine(), False),
        (LARGE | {"quantization": "bnb-4bit"}, gpu_machine(packages=(*TRITON, ("bitsandbytes", "0.50"))), True),
        (LARGE, gpu_machine(packages=()), False),
        (LARGE, gpu_machine("NVIDIA L40S", (8, 9)), True),
    ],
    ids=["long", "short", "asked", "never", "model", "group", "bnb", "no triton", "ada"],
)
def test_the_vae_has_kernels_of_its_own_where_blocks_are_not_compiled(
    values: dict[str, Any], on: Machine, kernels: bool
) -> None:
    made, plain = plan(on=on, **values), plan(on=on, **values | {"compile": "never"})
    assert made.speed.vae_kernels is kernels and not plain.speed.vae_kernels
    assert (Fact("planner.vae_kernels") in made.speed.reasons) is kernels
    assert (made.seconds["decode"].likely < 0.9 * plain.seconds["decode"].likely) is kernels
    if values.get("compile") == "always":
        return
    assert not made.speed.compiled
    assert ("compile" in made.seconds) is kernels
    if kernels:
        # In the forecast before the first step, as blocks are.
        assert made.seconds["compile"].likely == 5.0
        assert made.seconds["load"].likely - plain.seconds["load"].likely == pytest.approx(5.0)


def test_kernels_of_the_vae_that_are_compiled_already_are_loaded() -> None:
    """A process that stays counts them once; measured seconds take precedence."""
    here, one = gpu_machine(), plan(compile="always", **SHORT)
    runs = compilation_runs(one.replace(speed=one.speed.replace(compiled=False)), A14B, here, 7.0, cached=False)
    assert {run.kind.component for run in runs} == {"compiling vae"}
    request = GenerationRequest(prompt="a boat", **SHORT)
    for long_lived, history, kernels in ((False, [], False), (True, [], False), (True, runs, True)):
        context = PlanningContext(here, Path("x.mp4"), history=history, long_lived=long_lived)
        made = resolve(request, A14B, context)
        assert (made.speed.compiled, made.speed.vae_kernels) == (False, kernels)
        if kernels:
            assert made.seconds["compile"].likely == 1.0
    slow = resolve(GenerationRequest(prompt="a boat", **LARGE | {"frames": 101}), A14B, context._replace(history=runs))
    assert slow.speed.vae_kernels is False


def test_a_model_with_kernels_is_compiled_in_16_bits_if_its_code_is_cached() -> None:
    here = replace(gpu_machine(), cores=16)
    assert not plan(on=here).speed.compiled
    assert plan(COMPILES, here).speed.compiled
    made = plan(on=here, compile="always")
    assert plan(on=here, history=compilation_runs(made, A14B, here, 6.0, cached=False)).speed.compiled


SHORT: dict[str, Any] = {"width": 832, "height": 480, "frames": 81, "steps": 10, "quantization": "none"}


def compilations(seconds: float, *, cached: bool, on: Machine, **values: Any) -> list[Run]:
    """Return what a job with compiled code adds to the history."""
    made = plan(COMPILES, on, compile="always", **values)
    return compilation_runs(made, COMPILES, on, seconds, cached=cached)


def made_before(count: int, on: Machine) -> list[Run]:
    """Return the calls of so many uncompiled jobs of `SHORT`, which take as long as they are estimated."""
    planned = plan(COMPILES, on, compile="never", **SHORT)
    runs = runs_of(planned, planned, COMPILES, on, {"denoise": planned.seconds["denoise"].likely}, {})
    return [run.replace(jobs=count) for run in runs if run.kind.component == "transformer"] if count else []


@pytest.mark.parametrize(
    ("cores", "long_lived", "made", "history", "seconds", "measured", "compiled"),
    [
        # Compiling was not measured. It saves 11 s of each clip, of which two are counted and those made before.
        (16, True, 0, [], 6.0, False, True),
        (64, True, 0, [], 6.0, False, True),
        (16, False, 0, [], 6.0, False, True),
        (8, True, 0, [], 12.0, False, True),
        (2, True, 0, [], 20.0, False, True),
        (2, True, 1, [], 20.0, False, True),
        # Each command loads the code from the cache again.
        (2, False, 0, [], 20.0, False, False),
        (2, False, 1, [], 20.0, False, True),
        # Measured without the cache, then from it.
        (2, True, 0, [(17.0, False, {})], 2.0, False, True),
        (2, True, 0, [(40.0, False, {"width": 512, "height": 512})], 40.0, True, False),
        (2, True, 0, [(10.0, False, {"width": 512, "height": 512})], 10.0, True, True),
        (2, True, 0, [(40.0, False, {}), (3.0, True, {})], 3.0, True, True),
        (2, False, 0, [(40.0, False, {}), (12.0, True, {})], 12.0, True, False),
        (2, True, 0, [(40.0, False, {}), (12.0, True, {})], 12.0, True, True),
        # Code of other weights is not this code.
        (2, False, 0, [(1.0, False, {"quantization": "fp8"})], 20.0, False, False),
    ],
)
def test_compiling_is_counted_as_it_happens(
    cores: int,
    long_lived: bool,
    made: int,
    history: list[tuple[float, bool, dict[str, Any]]],
    seconds: float,
    measured: bool,
    compiled: bool,
) -> None:
    here = replace(gpu_machine(), cores=cores)
    runs = made_before(made, here)
    for took, cached, values in history:
        runs += compilations(took, cached=cached, on=here, **SHORT | values)
    context = PlanningContext(here, Path("x.mp4"), history=runs)
    decided = resolve(GenerationRequest(prompt="a boat", **SHORT), COMPILES, context, builds_later=long_lived)
    reason = decided.speed.compiled_reason
    assert reason is not None
    assert (reason.data["seconds"], reason.data["measured"]) == (seconds, measured)
    assert reason.data["clips"] == made + 2
    assert decided.speed.compiled is compiled
    assert compiled == ("compile" in decided.seconds)


@pytest.mark.parametrize(
    ("history", "changes", "later"),
    [
        # 40 s are more than two clips save, and the 2 s from the cache fewer than three clips.
        ([(40.0, False, {"width": 512, "height": 512})], {}, True),
        ([(40.0, False, {"width": 512, "height": 512})], {"idle_builds": False}, False),
        ([(40.0, False, {"width": 512, "height": 512})], {"builds_later": False}, False),
        ([(40.0, False, {"width": 512, "height": 512})], {"compile": "never"}, False),
        # From the cache, code of this machine takes longer than it saves.
        ([(40.0, False, {}), (60.0, True, {"width": 512, "height": 512})], {}, False),
        # What is in the cache is not compiled again.
        ([(40.0, False, {}), (39.0, True, {})], {}, False),
        # It pays off for this clip already.
        ([(10.0, False, {"width": 512, "height": 512})], {}, False),
    ],
)
def test_code_is_compiled_when_no_video_waits_if_that_pays_off_for_the_next_clip(
    history: list[tuple[float, bool, dict[str, Any]]], changes: dict[str, Any], later: bool
) -> None:
    here, runs = replace(gpu_machine(), cores=2), []
    for took, cached, values in history:
        runs += compilations(took, cached=cached, on=here, **SHORT | values)
    context = PlanningContext(here, Path("x.mp4"), history=runs, idle_builds=changes.get("idle_builds", True))
    request = GenerationRequest(prompt="a boat", compile=changes.get("compile", "auto"), **SHORT)
    decided = resolve(request, COMPILES, context, builds_later=changes.get("builds_later", True))
    assert decided.speed.compiled_later is later
    reason = decided.speed.compiled_reason
    assert reason is not None and (reason.code == "planner.compiled_later") is later
    assert ("later" in decided.seconds) is later
    if later:
        assert not decided.speed.compiled and "compile" not in decided.seconds
        runs += [*made_before(1, here), *compilations(40.0, cached=False, on=here, **SHORT)]
        second = resolve(request, COMPILES, context._replace(history=runs), builds_later=True)
        assert second.speed.compiled and not second.speed.compiled_later
        assert decided.second_seconds.likely == pytest.approx(second.seconds["total"].likely)


def test_a_machine_of_other_cores_or_pytorch_is_another_one() -> None:
    here = replace(gpu_machine(), cores=8)
    runs = compilations(1.0, cached=False, on=here, **SHORT)
    for other in (replace(here, cores=4), replace(here, torch_version="2.99.0")):
        reason = plan(COMPILES, other, history=runs, **SHORT).speed.compiled_reason
        assert reason is not None and not reason.data["measured"]


def test_what_a_second_clip_takes() -> None:
    compiled, never = (plan(on=replace(gpu_machine(), cores=16), compile=how) for how in ("always", "never"))
    # All components stay loaded.
    for made in (compiled, never):
        assert made.strategy.keep_loaded
        assert made.second_seconds == made.seconds["total"]
    freed = plan(on=gpu_machine(gib=78), compile="always")
    assert freed.strategy.freed == ("text_encoder",)
    text = freed.components["text_encoder"].weights_bytes / sum(
        part.weights_bytes for part in freed.components.values()
    )
    loading = freed.seconds["load"].likely - freed.seconds["compile"].likely
    assert freed.second_seconds.likely == pytest.approx(freed.seconds["total"].likely + text * loading)
    assert freed.to_json()["forecast"]["second"] == freed.second_seconds.to_json()
    # Offloaded weights stay in RAM.
    offloaded = plan(on=gpu_machine(gib=48), offload="model")
    assert offloaded.second_seconds == offloaded.seconds["total"]


def test_measured_compiled_calls_take_precedence() -> None:
    clip = plan(compile="always")
    kind = Kind(
        device="NVIDIA H200",
        model=architecture(COMPILES),
        component="transformer",
        backend="pytorch",
        dtype="bfloat16",
        quantization="none",
        offload="none",
        speed=history_tag(clip.speed, "transformer"),
    )
    flops = A14B.transformer.forward_flops(clip.tokens, 512)
    # Blocks are not compiled if compiled calls were slower than the estimate of uncompiled ones.
    slow = Run(kind=kind, flops=flops, seconds=30.0, working_bytes=1, excess_bytes=None)
    assert not plan(COMPILES, history=[slow]).speed.compiled
    fast = slow.replace(seconds=1.0)
    again = plan(COMPILES, history=[fast])
    assert again.speed.compiled
    assert again.seconds["denoise"].likely == pytest.approx(80.0)


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"offload": "group"}, "planner.compile_offloaded"),
        ({"offload": "sequential"}, "planner.compile_offloaded"),
        ({"quantization": "bnb-4bit"}, "planner.compile_quantized"),
    ],
)
def test_settings_that_exclude_compilation(values: dict[str, Any], code: str) -> None:
    here = gpu_machine(packages=(*TRITON, ("bitsandbytes", "0.50")))
    decided = plan(on=here, **values).speed
    cause = Fact(code, values)
    assert not decided.compiled
    assert decided.compiled_reason == Fact("planner.not_compiled", {"cause": cause})
    with pytest.raises(InvalidRequestError) as refused:
        plan(on=here, compile="always", **values)
    assert (refused.value.field, refused.value.code) == ("compile", code)
    assert values.items() <= refused.value.data.items()


def test_compilation_requires_triton() -> None:
    bare = gpu_machine(packages=())
    reason = Fact("planner.not_compiled", {"cause": Fact("machine.no_triton")})
    assert plan(on=bare).speed.compiled_reason == reason
    with pytest.raises(MachineError) as refused:
        plan(on=bare, compile="always")
    assert refused.value.fact == Fact("planner.compile_unavailable", {"cause": Fact("machine.no_triton")})


def test_blocks_are_compiled_on_a_cpu_only_on_request() -> None:
    small = true_size("wan2.1-1.3b")
    here = replace(machine(), ram_bytes=128 * GIB, ram_free_bytes=120 * GIB)
    assert not plan(small, here, frames=5).speed.compiled
    assert plan(small, here, frames=5, compile="always").speed.compiled
    with pytest.raises(MachineError) as refused:
        plan(small, replace(here, compiler=None), frames=5, compile="always")
    assert refused.value.data["cause"] == Fact("machine.no_compiler")


def test_the_text_is_cached_if_it_is_small_against_free_memory() -> None:
    large, small = plan(), plan(on=gpu_machine(gib=36), quantization="fp8")
    assert large.speed.text_kept
    # 40 blocks, keys and values, two texts of 512 tokens of 5120 channels in 2 bytes.
    assert large.speed.text_bytes == 40 * 2 * 2 * 512 * 5120 * 2
    assert not small.speed.text_kept
    without = plan(guidance_scale=1.0, guidance_scale_2=1.0)
    assert without.speed.text_bytes == large.speed.text_bytes // 2
    denoise = [
        next(stage for stage in one.memory if stage.component == "transformer").working_bytes
        for one in (large, without)
    ]
    assert denoise[0] - denoise[1] == large.speed.text_bytes // 2
    offloaded = plan(offload="group").speed
    assert (offloaded.text_kept, offloaded.text_bytes, offloaded.fused) == (False, 0, False)


def test_small_models_on_a_gpu_pair_passes_and_use_cuda_graphs() -> None:
    from runtime.models.catalogue import find

    decided = plan(find("diorama", Path("none")), gpu_machine(), guidance_scale=4.0).speed
    assert decided.paired
    assert decided.graphed
    assert {"planner.paired", "planner.graphed"} <= {fact.code for fact in decided.reasons}
    large = plan().speed
    assert not large.paired
    assert not large.graphed
    on_cpu = plan(find("diorama", Path("none")), machine(), guidance_scale=4.0).speed
    assert not on_cpu.paired
    assert not on_cpu.graphed
    assert on_cpu.text_kept


def test_a_lower_memory_strategy_drops_options_that_take_memory() -> None:
    full = Speed(attention="cudnn", compiled=True, text_kept=True, text_bytes=1, paired=True, graphed=True, fused=True)
    on = execution_options.with_less_memory(full, "model", "none")
    assert (on.compiled, on.attention, on.fused) == (True, "cudnn", False)
    assert not (on.text_kept or on.text_bytes or on.paired or on.graphed)
    with_kernels = full.replace(vae_kernels=True)
    kept = [execution_options.with_less_memory(with_kernels, how, "none") for how in ("model", "group")]
    assert [speed.vae_kernels for speed in kept] == [True, False]
    assert not execution_options.with_less_memory(full, "group", "none").compiled
    assert not execution_options.with_less_memory(full, "none", "bnb-8bit").compiled


def test_runs_with_other_options_are_another_kind() -> None:
    here = gpu_machine()
    planned = plan(compile="always")
    timings = {"text_encoder": 1.0, "denoise": 200.0, "decode": 2.0}
    runs = {run.kind.component: run for run in runs_of(planned, planned, A14B, here, timings, {})}
    assert runs["transformer"].kind.speed == "compiled cudnn"
    assert runs["vae"].kind.speed == "compiled channels last"
    assert Run.model_validate_json(runs["vae"].model_dump_json()) == runs["vae"]
    for options, left in (
        ({"compiled": False}, ["text_encoder", "vae"]),
        ({"vae_kernels": False}, ["text_encoder", "transformer"]),
        ({"compiled": False, "vae_kernels": False}, ["text_encoder"]),
    ):
        fell = planned.replace(speed=planned.speed.replace(**options))
        components = [run.kind.component for run in runs_of(planned, fell, A14B, here, timings, {})]
        assert components == left
    # What an earlier version wrote says nothing of it.
    old = runs["transformer"].model_dump(mode="json")
    del old["kind"]["speed"]
    assert Run.model_validate(old).kind.speed == ""
    assert device_name(here, "cuda:0") == "NVIDIA H200"


KITCHEN = (*FLASH4, ("comfy-kitchen", "0.2.40"))


def test_sparse_attention_keeps_the_fastest_exact_kernel_for_the_rest() -> None:
    on = gpu_machine(packages=KITCHEN)
    decided = plan(on=on, attention="sol:1.5").speed
    assert (decided.attention, decided.sparse_tau) == ("flash4", 1.5)
    data = {"attention": "sol:1.5", "tau": 1.5, "exact": "flash4"}
    assert decided.attention_reason == Fact("planner.sparse_asked", data)
    assert plan(on=on, attention="sol").speed.sparse_tau == 1.0
    clip = plan()
    runs = [measured("cudnn", 0.030, clip), measured("flash4", 0.034, clip), measured("sol", 0.001, clip)]
    assert plan(on=on, history=runs, attention="sol").speed.attention == "cudnn"
    assert plan(on=on, history=runs).speed.sparse_tau is None  # never chosen automatically


@pytest.mark.parametrize(
    ("name", "size", "sparse"),
    [
        ("wan2.2-a14b", (832, 480, 81), True),
        ("wan2.2-a14b", (832, 480, 29), True),
        ("wan2.2-a14b", (832, 480, 25), False),
        ("wan2.2-a14b", (480, 272, 81), False),
    ],
)
def test_short_sequences_keep_exact_attention(name: str, size: tuple[int, int, int], sparse: bool) -> None:
    width, height, frames = size
    asked: dict[str, Any] = {"width": width, "height": height, "frames": frames}
    decided = plan(true_size(name), gpu_machine(packages=KITCHEN), attention="sol", **asked)
    assert decided.speed.sparse_tau == (1.0 if sparse else None)
    reason = decided.speed.attention_reason
    assert reason is not None
    assert reason.code == ("planner.sparse_asked" if sparse else "planner.sparse_short")
    assert sparse or (reason.data["tokens"], reason.data["least"]) == (decided.tokens, 12_288)


@pytest.mark.parametrize(("width", "height", "sparse"), [(832, 480, True), (320, 192, False)])
@pytest.mark.parametrize("name", ["hunyuan-video", "framepack-i2v"])
def test_other_families_have_sparse_attention(name: str, width: int, height: int, sparse: bool, tmp_path: Path) -> None:
    model = replace(look_up(name, Path("none")), is_downloaded=True)
    request = GenerationRequest(prompt="a boat", attention="sol", width=width, height=height)
    if model.image_input is not None:
        picture(832, 480).save(tmp_path / "boat.png")
        request = request.replace(image=str(tmp_path / "boat.png"))
        model = with_images(model, request, tmp_path, tmp_path)
    decided = resolve(request, model, PlanningContext(gpu_machine(packages=KITCHEN), Path("x.mp4"))).speed
    assert decided.sparse_tau == (1.0 if sparse else None)


def test_sparse_attention_of_other_heads_is_refused() -> None:
    narrow = replace(A14B, transformer=replace(A14B.transformer, attention_head_dim=64, num_attention_heads=80))
    with pytest.raises(InvalidRequestError) as refused:
        plan(narrow, gpu_machine(packages=KITCHEN), attention="sol")
    assert (refused.value.field, refused.value.code) == ("attention", "planner.sparse_head_width")
    assert (refused.value.data["width"], refused.value.data["needs"]) == (64, 128)


def test_sparse_attention_combines_with_other_options() -> None:
    on = gpu_machine(packages=KITCHEN)
    together = plan(on=on, attention="sol", quantization="fp8", step_cache="taylorseer:2", compile="always")
    assert together.speed.compiled and together.speed.sparse_tau == 1.0
    # A recorded graph would replay the kernels of one step.
    small = replace(A14B, transformer=replace(A14B.transformer, num_layers=1, ffn_dim=128, num_attention_heads=1))
    asked: dict[str, Any] = {"guidance_scale": 1.0, "frames": 29}
    graphed = [plan(small, on, attention=kind, **asked).speed.graphed for kind in ("flash4", "sol")]
    assert graphed == [True, False]


@pytest.mark.parametrize(
    ("size", "milliseconds"), [((832, 480), {"flash4": 32.6, "sol": 17.0}), ((1280, 720), {"flash4": 177, "sol": 80.8})]
)
def test_the_speedup_of_sparse_attention_is_that_measured(
    size: tuple[int, int], milliseconds: dict[str, float]
) -> None:
    on = gpu_machine(packages=KITCHEN)
    width, height = size
    seconds = {
        kind: plan(on=on, width=width, height=height, steps=40, attention=kind, compile="always").seconds["denoise"]
        for kind in milliseconds
    }
    # Of 80 passes of 40 blocks, 16 passes are exact, and so is the first block of the others.
    saved = 64 * 39 * (milliseconds["flash4"] - milliseconds["sol"]) / 1000
    assert seconds["flash4"].likely - seconds["sol"].likely == pytest.approx(saved, rel=0.2)
    assert not seconds["sol"].measured


INT8_FILES = WeightFiles.of(
    {"blocks.0.weight": StoredWeight(INT8, (8, 8), FileTensor(Path("x"), "I8", (8, 8), 0, 64))}, {}, ()
)


@pytest.mark.parametrize(
    ("on", "asked", "code"),
    [
        (gpu_machine(packages=KITCHEN), {}, "planner.int8_kernels"),
        (gpu_machine("Tesla T4", (7, 5), 141, KITCHEN), {}, "planner.int8_kernels"),
        (gpu_machine(packages=KITCHEN), {"quantization": "none"}, "planner.int8_asked"),
        (gpu_machine(packages=KITCHEN), {"quantization": "fp8"}, None),
        (gpu_machine(), {}, "planner.int8_not_installed"),
    ],
)
def test_layers_in_int8_are_multiplied_by_kernels_where_they_run(
    on: Machine, asked: dict[str, Any], code: str | None
) -> None:
    spec = replace(A14B, files={name: INT8_FILES for name in ("transformer", "transformer_2")})
    small = {"frames": 5, "width": 256, "height": 256}
    decided = plan(spec, on, **small, **asked).speed
    assert decided.int8_kernels is (code == "planner.int8_kernels")
    assert (decided.int8_reason and decided.int8_reason.code) == code
    assert decided.int8_reason is None or decided.int8_reason in decided.reasons
    # Layers of other formats are dequantized without a word.
    assert plan(A14B, on, **small, **asked).speed.int8_reason is None


def test_layers_in_int8_are_dequantized_without_units_that_multiply_them() -> None:
    old = constraints.int8_problem(gpu_machine("Tesla V100", (7, 0), packages=KITCHEN))
    assert old == Fact("planner.int8_old_gpu", {"gpu": "Tesla V100"})
    assert constraints.int8_problem(None) == Fact("planner.int8_on_cpu")


def test_estimates_with_sparse_attention_follow_measurements_without() -> None:
    on = gpu_machine(packages=KITCHEN)
    asked: dict[str, Any] = {"steps": 40, "compile": "always", "attention": "flash4"}
    before = plan(on=on, **asked)
    runs = runs_of(before, before, A14B, on, {"denoise": 800.0}, {})
    known = plan(on=on, history=runs, **asked).seconds["denoise"]
    sparse = [
        plan(on=on, history=runs, **asked | {"attention": f"sol:{tau}"}).seconds["denoise"] for tau in (0.5, 1, 2)
    ]
    assert known.likely > sparse[0].likely > sparse[1].likely > sparse[2].likely > 0.4 * known.likely
    assert history_tag(plan(on=on, **asked | {"attention": "sol:2"}).speed, "transformer") == "compiled flash4 sol:2"
