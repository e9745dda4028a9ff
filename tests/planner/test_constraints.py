"""Rules and requirements, by code and data; build times; misfits of engines."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from runtime.core.facts import Fact, short
from runtime.core.request import BACKENDS, OFFLOADS, QUANTIZATIONS
from runtime.engines.builders import BUILDERS
from runtime.machine.compatibility import cuda_problem
from runtime.machine.probe import Machine
from runtime.models.catalogue import look_up
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_index import EngineRecord, ShapeProfile
from runtime.planner.choice.key_differences import misfit
from runtime.planner.constraints import (
    NEEDS,
    RULES,
    ComponentSettings,
    build_conflict,
    conflict,
    lacking,
    load_conflict,
    offload_conflict,
)
from runtime.planner.forecast import build_seconds
from tests.engines.engine_files import key, put
from tests.facts import fact, holds
from tests.planner.test_engine_index import CHANGES
from tests.plans import GIB, GPU_PACKAGES, gpu, machine

H200 = replace(
    machine(gpu=gpu(), torch_cuda="13.0", packages=(*GPU_PACKAGES, ("bitsandbytes", "0.48"), ("torchao", "0.14"))),
    driver_cuda=(13, 0),
)
TURING = replace(H200, gpus=(gpu(capability=(7, 5)),))
AMPERE = replace(H200, gpus=(gpu(capability=(8, 6)),))
ADA = replace(H200, gpus=(gpu(capability=(8, 9)),))
CPU = machine()
NO_GPU = fact("machine.no_gpu")
CASE = ComponentSettings(component="transformer", backend="tensorrt", device="cuda:0")


def without(on: Machine, *packages: str) -> Machine:
    """Return a machine without some packages."""
    return replace(on, packages=tuple(pair for pair in on.packages if pair[0] not in packages))


def known(name: str) -> ModelSpec:
    """Return a known model."""
    return look_up(name, Path("none"))


# The rule, the setting to change if one does, what the case has, the machine.
EXCLUDED: list[tuple[str, str, dict[str, Any], Machine]] = [
    ("planner.quantized_on_engine", "quantization", {"quantization": "bnb-4bit"}, H200),
    ("planner.quantized_on_engine", "quantization", {"quantization": "bnb-8bit"}, H200),
    ("planner.quantized_on_engine", "quantization", {"quantization": "fp8", "backend": "inductor"}, H200),
    (
        "planner.quantized_on_engine",
        "quantization",
        {"component": "text_encoder", "quantization": "bnb-4bit"},
        H200,
    ),
    ("planner.offload_on_engine", "offload", {"offload": "model"}, H200),
    (
        "planner.offload_on_engine",
        "offload",
        {"component": "transformer_2", "offload": "group", "backend": "onnxruntime"},
        replace(H200, packages=(*H200.packages, ("onnxruntime-gpu", "1.24"))),
    ),
    ("planner.offload_on_engine", "offload", {"offload": "sequential"}, H200),
    *(
        (
            "planner.8bit_offloaded",
            "offload",
            {"backend": "pytorch", "quantization": "bnb-8bit", "offload": offload},
            H200,
        )
        for offload in ("model", "group", "sequential")
    ),
    ("planner.gpus_on_engine", "gpus", {"gpus": 4}, H200),
    ("planner.gpus_on_engine", "gpus", {"gpus": 2, "backend": "inductor", "component": "transformer_2"}, H200),
    ("planner.gpus_on_engine", "gpus", {"gpus": 4, "backend": "onnxruntime", "device": "cpu"}, H200),
    ("planner.step_cache_on_engine", "step_cache", {"step_cache": "first-block", "component": "transformer_2"}, H200),
    (
        "planner.step_cache_offloaded",
        "step_cache",
        {"step_cache": "first-block:0.2", "backend": "pytorch", "offload": "group"},
        H200,
    ),
    ("planner.nag_on_engine", "nag", {"nag": True, "backend": "inductor"}, H200),
    ("planner.lora_ranges_on_engine", "loras", {"ranges": frozenset({"transformer"}), "backend": "inductor"}, H200),
    ("planner.attention_on_engine", "attention", {"attention": "flash4", "backend": "inductor"}, H200),
    ("planner.sequential_in_blocks", "offload", {"in_blocks": True, "offload": "sequential"}, H200),
    *(
        (
            "planner.quantized_in_blocks",
            "quantization",
            {"in_blocks": True, "quantization": quantization, "component": "transformer_2", **more},
            H200,
        )
        for quantization in ("bnb-4bit", "bnb-8bit")
        for more in ({}, {"offload": "model"}, {"gpus": 2, "step_cache": "first-block"})
    ),
    (
        "planner.fp8_in_blocks",
        "quantization",
        {"in_blocks": True, "quantization": "fp8", "precision": "float16"},
        H200,
    ),
    *(
        (
            "planner.fp8_not_asked",
            "quantization",
            {"in_blocks": True, "precision": "fp8", "quantization": quantization},
            H200,
        )
        for quantization in ("auto", "none")
    ),
    ("planner.bfloat16", "", {"backend": "inductor", "precision": "bfloat16"}, TURING),
    (
        "planner.vae_bfloat16",
        "vae_precision",
        {"component": "vae", "backend": "pytorch", "precision": "bfloat16"},
        TURING,
    ),
    *(
        (
            "planner.vae_16bit_on_cpu",
            "vae_precision",
            {"component": "vae", "backend": "pytorch", "device": "cpu", "precision": precision},
            on,
        )
        for precision in ("bfloat16", "float16")
        for on in (CPU, TURING)
    ),
    ("planner.onnxruntime_without_cuda", "", {"backend": "onnxruntime"}, H200),
]


def test_rules_exclude_with_the_setting_and_what_it_is_in_conflict_with(subtests: pytest.Subtests) -> None:
    for rule, setting, changes, on in EXCLUDED:
        case = replace(CASE, **changes)
        with subtests.test(msg=f"{rule}: {changes}"):
            assert [one.code for one in RULES if one.excludes(case, on)] == [rule]
            found = conflict(case, on)
            assert found is not None
            assert (found.fact.code, found.setting) == (rule, setting)
            names = ("backend", "component", "offload", "quantization", "gpus", "attention", "precision")
            assert found.fact.data == {name: getattr(case, name) for name in names} | {
                "in_pytorch": ["backend", f"{case.component}=pytorch"],
                "gpu": on.gpus[0].name if on.gpus else "",
            }
            assert len(short(found.fact)) <= 45


def test_8bit_weights_cannot_be_offloaded_on_any_machine(subtests: pytest.Subtests) -> None:
    for backend, offload, quantization in product(BACKENDS, OFFLOADS, QUANTIZATIONS):
        case = ComponentSettings(component="transformer", backend=backend, offload=offload, quantization=quantization)
        with subtests.test(msg=str(case)):
            against = offload_conflict(case)
            waits = offload in {"model", "group", "sequential"}
            assert (against is not None) == (backend == "pytorch" and quantization == "bnb-8bit" and waits)
            if against is not None:
                found = [one for one in (conflict(case, H200), conflict(case, CPU)) if one is not None]
                assert [(one.fact.code, one.setting) for one in found] == [(against.fact.code, "offload")] * 2


def test_every_rule_has_its_case() -> None:
    assert {rule.code for rule in RULES} == {row[0] for row in EXCLUDED}


@pytest.mark.parametrize(
    ("changes", "on"),
    [
        ({}, H200),
        ({"quantization": "none", "offload": "none"}, H200),
        ({"quantization": "auto", "offload": "auto"}, H200),
        # Offloading other parts, and engines for other parts, go together.
        ({"component": "vae", "offload": "group"}, H200),
        ({"component": "text_encoder", "offload": "model"}, H200),
        ({"component": "vae", "gpus": 2}, H200),
        ({"component": "text_encoder", "gpus": 4, "backend": "inductor"}, H200),
        ({"component": "vae", "step_cache": "first-block"}, H200),
        ({"component": "text_encoder", "step_cache": "first-block", "offload": "group", "backend": "pytorch"}, H200),
        ({"step_cache": "first-block", "offload": "model", "quantization": "fp8", "backend": "pytorch"}, H200),
        ({"gpus": 1}, H200),
        # What waits in PyTorch: all weights but those in 8 bits.
        ({"backend": "pytorch", "quantization": "bnb-8bit", "offload": "none"}, H200),
        ({"backend": "pytorch", "quantization": "bnb-8bit", "offload": "auto"}, H200),
        ({"backend": "pytorch", "quantization": "fp8", "offload": "model"}, H200),
        ({"backend": "inductor"}, H200),
        ({"backend": "onnxruntime", "device": "cpu", "component": "transformer_2"}, CPU),
        ({"backend": "pytorch", "offload": "group", "gpus": 2}, H200),
        ({"backend": "pytorch", "quantization": "bnb-4bit", "offload": "group", "gpus": 2}, H200),
        ({"backend": "inductor", "precision": "bfloat16"}, AMPERE),
        ({"backend": "inductor", "precision": "float16"}, TURING),
        ({"backend": "onnxruntime", "device": "cpu", "precision": "bfloat16"}, TURING),
        # The VAE's precision in PyTorch; engines have their own, on a CPU too.
        *(
            ({"component": "vae", "backend": "pytorch", "precision": precision}, on)
            for precision, on in (
                ("bfloat16", H200),
                ("bfloat16", AMPERE),
                ("float16", H200),
                ("float16", TURING),
                ("float32", TURING),
                ("", TURING),
            )
        ),
        ({"component": "vae", "backend": "pytorch", "device": "cpu", "precision": "float32"}, CPU),
        ({"component": "vae", "backend": "pytorch", "device": "cpu"}, CPU),
        ({"component": "vae", "backend": "onnxruntime", "device": "cpu", "precision": "bfloat16"}, CPU),
        ({"component": "transformer", "backend": "pytorch", "device": "cpu", "precision": "bfloat16"}, CPU),
    ],
)
def test_combinations_without_conflict(changes: dict[str, Any], on: Machine) -> None:
    assert conflict(replace(CASE, **changes), on) is None


LACKING: list[tuple[str, Machine, Fact]] = [
    ("tensorrt", CPU, NO_GPU),
    (
        "tensorrt",
        replace(CPU, gpu_problem=fact("machine.driver_failed", error="asleep")),
        fact("machine.driver_failed"),
    ),
    ("tensorrt", replace(H200, torch_cuda=None), fact("machine.torch_without_cuda")),
    (
        "tensorrt",
        replace(H200, driver_cuda=(12, 8)),
        fact("machine.driver_too_old", runs="12.8", needs="13.0", least="580"),
    ),
    (
        "tensorrt",
        replace(H200, torch_cuda="12.6", driver_cuda=(11, 4)),
        fact("machine.driver_too_old", runs="11.4", needs="12.6", least="525"),
    ),
    ("tensorrt", replace(H200, gpus=(gpu(capability=(7, 0)),)), fact("machine.gpu_too_old", gpu="Test GPU")),
    (
        "tensorrt",
        replace(TURING, torch_cuda="12.6", gpus=(gpu(capability=(12, 0)),)),
        fact("machine.gpu_too_new", gpu="Test GPU", cuda="12.6"),
    ),
    ("tensorrt", without(H200, "tensorrt"), fact("machine.gpu_package_missing", package="TensorRT")),
    (
        "tensorrt",
        replace(H200, torch_cuda="12.6", gpus=(gpu(capability=(7, 0)),)),
        fact("machine.tensorrt_without_gpu", gpu="Test GPU"),
    ),
    ("torch_tensorrt", without(H200, "torch-tensorrt"), fact("machine.gpu_package_missing", package="torch-tensorrt")),
    (
        "torch_tensorrt",
        replace(H200, torch_version="2.11.0"),
        fact("machine.torch_tensorrt_mismatch", installed="2.13.0", torch="2.11.0"),
    ),
    ("tensorrt_rtx", CPU, NO_GPU),
    ("tensorrt_rtx", H200, fact("machine.tensorrt_rtx_without_gpu", gpu="Test GPU", capability="9.0")),
    (
        "tensorrt_rtx",
        replace(AMPERE, gpus=(gpu(capability=(10, 0)),)),
        fact("machine.tensorrt_rtx_without_gpu", capability="10.0"),
    ),
    ("tensorrt_rtx", without(AMPERE, "tensorrt-rtx"), fact("machine.gpu_package_missing", package="TensorRT for RTX")),
    ("tensorrt_rtx_components", TURING, fact("machine.tensorrt_rtx_blocks_only")),
    ("tensorrt_rtx_fp8", AMPERE, fact("machine.gpu_without_fp8", gpu="Test GPU")),
    ("inductor", replace(CPU, compiler=None), fact("machine.no_compiler")),
    ("inductor", replace(CPU, compiler=None, system="Windows AMD64"), fact("machine.no_compiler_windows")),
    ("inductor", replace(CPU, torch_version=None), fact("machine.package_missing", package="PyTorch")),
    ("onnxruntime", without(CPU, "onnx"), fact("machine.package_missing", package="ONNX Runtime")),
    ("onnxruntime", without(CPU, "onnxruntime"), fact("machine.package_missing", package="ONNX Runtime")),
    ("bnb-8bit", CPU, NO_GPU),
    ("bnb-4bit", without(H200, "bitsandbytes"), fact("machine.gpu_package_missing", package="bitsandbytes")),
    ("fp8", AMPERE, fact("machine.gpu_without_fp8", gpu="Test GPU")),
    ("fp8", without(H200, "torchao"), fact("machine.gpu_package_missing", package="torchao")),
    ("model", CPU, NO_GPU),
    ("group", replace(H200, torch_cuda=None), fact("machine.torch_without_cuda")),
    ("sequential", CPU, NO_GPU),
]


def test_unmet_requirements_of_a_machine(subtests: pytest.Subtests) -> None:
    for feature, on, reason in LACKING:
        with subtests.test(msg=f"{feature}: {reason.code}"):
            found = lacking(feature, on)
            assert found is not None and not found.setting
            assert found.fact.code == reason.code and holds(found.fact.data, reason.data)


@pytest.mark.parametrize(
    ("capability", "runs"),
    [((7, 0), False), ((8, 0), True), ((8, 7), False), ((8, 9), True), ((12, 0), True), ((12, 1), True)],
)
def test_gpus_that_tensorrt_for_rtx_supports(capability: tuple[int, int], runs: bool) -> None:
    on = replace(H200, torch_cuda="12.8", gpus=(gpu(capability=capability),))
    assert (lacking("tensorrt_rtx", on) is None) is runs
    assert lacking("tensorrt_rtx", TURING) is None


def test_every_need_has_its_case_and_can_be_met() -> None:
    assert {row[0] for row in LACKING} == set(NEEDS)
    assert all(lacking(feature, ADA) is None for feature in NEEDS)
    only_rtx = {"tensorrt_rtx", "tensorrt_rtx_components", "tensorrt_rtx_fp8"}
    assert all(lacking(feature, H200) is None for feature in set(NEEDS) - only_rtx)
    assert all(lacking(feature, CPU) is None for feature in ("inductor", "onnxruntime", "none", "auto", "pytorch"))
    choices = {*BACKENDS, *OFFLOADS, *QUANTIZATIONS} - {"auto", "none", "pytorch"}
    assert choices <= set(NEEDS)


@pytest.mark.parametrize(
    ("capability", "cuda", "runs"),
    [
        ((7, 5), "13.0", True),
        ((7, 0), "12.8", True),
        ((7, 0), "13.0", False),
        ((12, 0), "12.8", True),
        ((10, 0), "12.6", False),
        ((9, 0), "12.1", True),
    ],
)
def test_which_gpu_a_pytorch_has_kernels_for(capability: tuple[int, int], cuda: str, runs: bool) -> None:
    assert (cuda_problem(machine(gpu=gpu(capability=capability), torch_cuda=cuda)) is None) == runs


@pytest.mark.parametrize(
    ("ram", "vram", "disk", "on", "reason"),
    [
        (GIB, GIB, GIB, replace(H200, disk_free_bytes=10 * GIB), None),
        (0, 0, 10**12, H200, None),
        (
            0,
            0,
            58 * 10**9,
            replace(H200, disk_free_bytes=10 * 10**9),
            Fact("planner.build_disk", {"needs": 58 * 10**9, "free": 10 * 10**9}),
        ),
        (60 * GIB, 0, 0, H200, Fact("planner.build_ram", {"needs": 60 * GIB, "total": 56 * GIB})),
        (0, 100 * GIB, 0, H200, Fact("planner.build_vram", {"needs": 100 * GIB, "total": 80 * GIB})),
        (0, GIB, 0, CPU, Fact("planner.build_vram", {"needs": GIB, "total": 0})),
    ],
)
def test_memory_and_disk_space_for_builds(ram: int, vram: int, disk: int, on: Machine, reason: Fact | None) -> None:
    found = build_conflict(ram, vram, disk, on)
    assert (None if found is None else found.fact) == reason


def test_memory_to_load() -> None:
    spec = known("wan2.2-t2v-a14b")
    weights = {name: 2 * spec.parameters[name] for name in spec.component_names}
    small = replace(H200, ram_bytes=16 * GIB, swap_bytes=0)
    found = load_conflict(spec, weights, small)
    assert found is not None
    assert found.fact == Fact(
        "planner.load_ram",
        {"component": "transformer", "model": spec.title, "needs": weights["transformer"], "total": 16 * GIB},
    )
    assert load_conflict(spec, {}, small) is None
    assert load_conflict(spec, weights, replace(small, swap_bytes=16 * GIB)) is None


@pytest.mark.parametrize(("name", "value"), CHANGES.items())
def test_a_misfit_is_a_short_text(name: str, value: object) -> None:
    found = misfit(key(), key(**{name: value}))
    # An engine of another program, family or builder is never the most similar one.
    assert (found is not None) == (name not in {"program", "family", "backend", "builder"}), name
    assert found is None or len(str(found)) < 40
    assert misfit(key(), key()) is None


def test_a_misfit_names_the_gpu_before_sizes() -> None:
    assert misfit(key(), key(device="NVIDIA L4", profiles=())) == Fact("engine.misfit_device")


def built(folder: Path, **changes: Any) -> EngineRecord:
    """Return an engine of Wan2.1-1.3B for its default size, built in 100 seconds."""
    made = key(backend="tensorrt", builder="onnx_tensorrt", profiles=(ShapeProfile.fixed((21, 60, 104)),))
    return replace(put(folder, made, model="wan2.1-t2v-1.3b", build_seconds=100.0), **changes)


def test_build_times_come_from_earlier_builds(tmp_path: Path) -> None:
    spec, size = known("wan2.1-t2v-1.3b"), (21, 60, 104)

    def seconds(*index: EngineRecord, of: ModelSpec = spec, latent: tuple[int, int, int] = size) -> float:
        return build_seconds(of, "transformer", "transformer", "onnx_tensorrt", latent, index)

    assert seconds(built(tmp_path)) == 100
    assert seconds(built(tmp_path), latent=(11, 60, 104)) == 100, "most of it does not depend on the size"
    assert seconds(built(tmp_path), latent=(21, 90, 160)) > 200
    assert seconds(built(tmp_path), built(tmp_path, build_seconds=80.0, built_at=2000.0)) == 80
    guess = seconds()
    assert guess == seconds(built(tmp_path, model="another")) == seconds(built(tmp_path, build_seconds=0.0)) != 100
    assert seconds(of=known("wan2.2-t2v-a14b")) > guess


def test_every_program_has_a_build_time() -> None:
    for name in ("diorama", "wan2.2-ti2v-5b", "wan2.2-t2v-a14b"):
        spec = known(name)
        for builder in BUILDERS.values():
            for component in spec.component_names:
                for program in builder.programs(spec, component):
                    assert build_seconds(spec, component, program, builder.name, (1, 60, 104)) > 0
