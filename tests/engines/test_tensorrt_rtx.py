"""TensorRT for RTX, with the real builder from its published wheels: it needs no GPU. Its runtime needs one.

The wheels (95 MB) are downloaded once. The tests are skipped where they cannot be.
"""

import hashlib
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.core.cancel import Cancel
from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.core.plan import is_block_program
from runtime.engines import onnx_export
from runtime.engines.block_programs import BlockProgram
from runtime.engines.build import BuildJob, BuildRequest, Job, start_child
from runtime.engines.builders import BUILDERS, tensorrt_rtx
from runtime.engines.child import Report
from runtime.engines.component_programs import Program
from runtime.engines.onnx_export import export_onnx
from runtime.engines.programs import load_program
from runtime.engines.sessions.tensorrt_rtx import TensorRTRTXSession
from runtime.machine.probe import Machine
from runtime.models import spec as spec_module
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_index import SWAPPED, EngineKey, ShapeProfile
from runtime.planner.choice.key_differences import differences
from tests.conftest import build_once
from tests.engines.contract import wheels
from tests.engines.engine_files import refusal
from tests.plans import GPU_PACKAGES, gpu, machine

PROGRAMS = ("text_encoder", "transformer", "vae_first", "vae_next")
BLOCKS = ("block_qkv", "block_query", "block_feed_forward")
ANY = ShapeProfile.fixed((1, 1, 1))
ADA, TURING = (8, 9), (7, 5)
# As small as tests need. Builds with dynamic sizes take twice as long.
CASES = [
    # `test_the_log_of_a_build_shows_fused_attention` builds the transformer of videos from text.
    ("wan2.1", "text_encoder", ANY),
    ("wan2.1-flf2v", "transformer", ShapeProfile.fixed((3, 6, 8))),
    ("wan2.1", "vae_next", ShapeProfile((1, 2, 2), (1, 6, 8), (1, 10, 12))),
]


def rtx(capability: tuple[int, int] = ADA) -> Machine:
    """Return a machine with an RTX GPU."""
    return replace(
        machine(gpu=gpu(capability=capability), torch_cuda="13.0", packages=GPU_PACKAGES), driver_cuda=(13, 0)
    )


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the wheels importable. They stay loaded: the library keeps its first logger."""
    for package in ("libs", "bindings"):
        name = f"tensorrt-rtx-cu13-{package}"
        monkeypatch.syspath_prepend(wheels.unpacked(f"{name}=={wheels.pinned(name)}"))


@pytest.fixture
def shared_exports(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Export each program once for all builds from the same file, such as those for several GPUs."""

    def export(program: Program, profile: ShapeProfile, path: Path) -> None:
        form = program.module
        precision = program.dtype if isinstance(program, BlockProgram) else next(form.parameters()).dtype
        identity = f"{program.spec}{program.name}{type(form).__name__}{precision}{profile}"
        name = f"exported-{hashlib.sha256(identity.encode()).hexdigest()}"
        folder, _ = build_once(tmp_path_factory, name, lambda new: export_onnx(program, profile, new / path.name))
        shutil.copytree(folder, path.parent, dirs_exist_ok=True)

    monkeypatch.setattr(onnx_export, "export_onnx", export)


def key_of(
    spec: ModelSpec, program: str, profile: ShapeProfile, capability: tuple[int, int] = ADA, builder: str = ""
) -> EngineKey:
    """Return the key that a builder would build a program for, by default the first one that can."""
    maker = BUILDERS[builder or ("tensorrt_rtx_blocks" if is_block_program(program) else "tensorrt_rtx")]
    on = rtx(capability)
    return maker.key(
        spec,
        component_of(program),
        program,
        (profile,),
        precision=maker.default_precision(spec, program, on, "cuda:0"),
        machine=on,
        device="cuda:0",
    )


def component_of(program: str) -> str:
    """Return the component that a program computes."""
    return "transformer" if is_block_program(program) else spec_module.component_of(program)


def build(spec: ModelSpec, key: EngineKey, folder: Path) -> Path:
    """Build an engine on the CPU and return its plan."""
    program = load_program(spec, component_of(key.program), key.program, device="cpu", dtype=key.precision)
    builder = BUILDERS[key.builder]
    builder.build(program, key, folder, lambda fact, share: None)
    return folder / builder.file_name


def layers(text: str) -> list[tuple[str, str]]:
    """Return (name, type) of an engine's layers, as the builder lists them in the log of a build."""
    return re.findall(r"^Name: (\S+), LayerType: (\w+)", text, re.MULTILINE)


def fused_attentions(text: str) -> int:
    """Return how many layers are a fused attention."""
    return sum(name.startswith("_gemm_mha") for name, _ in layers(text))


def factor_types(text: str, kind: str) -> list[tuple[str, ...]]:
    """Return the types of the inputs of an engine's layers of a kind."""
    inputs = re.findall(rf"^Name: \S+, LayerType: {kind}, Inputs: \[(.*?)\]+, Constants:", text, re.MULTILINE)
    return [tuple(re.findall(r"Datatype: (\w+)", one)) for one in inputs]


def a14b(tiny: Callable[[str], ModelSpec]) -> ModelSpec:
    """Return a tiny model whose blocks are said to have the sizes of Wan2.2-A14B's; block engines need no weights."""
    spec = tiny("wan2.2-a14b")
    sizes = {"num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824}
    return replace(spec, transformer=replace(spec.transformer, **sizes))


@pytest.mark.slow
@pytest.mark.usefixtures("library", "shared_exports")
@pytest.mark.parametrize(("model", "program", "profile"), CASES)
def test_every_program_is_built_whole_with_fused_attention(
    model: str,
    program: str,
    profile: ShapeProfile,
    tiny: Callable[[str], ModelSpec],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    spec = tiny(model)
    key = key_of(spec, program, profile)
    assert key.weights != SWAPPED
    plan = build(spec, key, tmp_path)
    log = capfd.readouterr().err
    loaded: Any = load_program(spec, component_of(program), program, device="cpu", dtype=key.precision)
    assert plan.stat().st_size > 0.5 * sum(tensor.nbytes for tensor in loaded.module.parameters())
    # Among the clip's tokens, to those of the text and, if there are any, to those of images.
    kinds = 2 if spec.context_tokens == spec.max_sequence_length else 3
    attentions = kinds * spec.transformer.num_layers if program == "transformer" else 0
    assert fused_attentions(log) == attentions
    assert len(layers(log)) > attentions
    if program.startswith("vae"):
        convolutions = sum(isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d) for module in loaded.module.modules())
        found = factor_types(log, "correlation")
        assert len(found) >= convolutions
        assert set().union(*found) == {"BFloat16"}


@pytest.mark.slow
@pytest.mark.usefixtures("library", "shared_exports")
def test_block_engines_of_a14bs_width(
    tiny: Callable[[str], ModelSpec], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spec, total = a14b(tiny), 0
    for program in BLOCKS:
        key = key_of(spec, program, ANY, TURING)
        assert (key.precision, key.weights, dict(key.options)["tokens"]) == ("float16", SWAPPED, "8192")
        total += build(spec, key, tmp_path).stat().st_size
        found = layers(capfd.readouterr().err)
        assert sum(kind in {"gemm", "runtime_fusion"} for _, kind in found) == {"block_query": 2}.get(program, 3)
    assert total < 2 << 20


@pytest.mark.slow
@pytest.mark.usefixtures("library")
def test_products_of_fp8_block_engines_are_in_fp8(
    tiny: Callable[[str], ModelSpec], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spec = a14b(tiny)
    for program, products in zip(BLOCKS, (3, 2, 3), strict=True):
        key = key_of(spec, program, ANY, builder="tensorrt_rtx_blocks_fp8")
        assert (key.precision, key.weights) == ("fp8", SWAPPED)
        assert build(spec, key, tmp_path).stat().st_size < 1 << 20
        assert factor_types(capfd.readouterr().err, "gemm") == [("FP8", "FP8")] * products


@pytest.mark.slow
@pytest.mark.usefixtures("library")
def test_block_engines_of_ltx2s_width(
    tiny: Callable[[str], ModelSpec], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each matrix is a product of its own; those of the gates have as many rows as there are heads."""
    spec = tiny("ltx-2.3")
    sizes = {"num_attention_heads": 32, "attention_head_dim": 128, "sound_heads": 32, "sound_head_dim": 64}
    transformer: Any = spec.transformer
    spec = replace(spec, transformer=replace(transformer, **sizes))
    for program, products in {"block_qkv": 4, "block_cross": 5, "block_sound_feed_forward": 3}.items():
        assert build(spec, key_of(spec, program, ANY), tmp_path).stat().st_size < 2 << 20
        found = layers(capfd.readouterr().err)
        assert sum(kind in {"gemm", "runtime_fusion"} for _, kind in found) == products, program
        if program == "block_cross":
            build(spec, key_of(spec, program, ANY, builder="tensorrt_rtx_blocks_fp8"), tmp_path)
            assert factor_types(capfd.readouterr().err, "gemm") == [("FP8", "FP8")] * products


@pytest.mark.slow
@pytest.mark.usefixtures("library", "shared_exports")
def test_on_turing_whole_components_are_refused(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> None:
    assert BUILDERS["tensorrt_rtx"].unavailable(rtx(TURING)) == Fact(
        "machine.tensorrt_rtx_blocks_only", {"gpu": "Test GPU"}
    )
    assert BUILDERS["tensorrt_rtx_blocks"].unavailable(rtx(TURING)) is None
    spec = tiny("wan2.1")
    with pytest.raises(EngineError) as refused:
        build(spec, key_of(spec, "transformer", ShapeProfile.fixed((3, 6, 8)), TURING), tmp_path)
    assert refused.value.fact.code == "engine.tensorrt_build_failed"
    assert not sum(path.stat().st_size for path in tmp_path.iterdir())


def build_only(job: Job, report: Report) -> dict[str, Any]:
    """Build an engine on the CPU; the entry of a child process, which on a machine with a GPU also verifies it."""
    assert isinstance(job, BuildJob)
    build(job.request.spec, job.request.key, job.engine)
    return {}


@pytest.mark.slow
@pytest.mark.usefixtures("library")
def test_the_log_of_a_build_shows_fused_attention(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> None:
    spec, log = tiny("wan2.1"), tmp_path / "build.log"
    key = key_of(spec, "transformer", ShapeProfile.fixed((3, 6, 8)))
    (tmp_path / "scratch").mkdir()
    (tmp_path / "engine").mkdir()
    request = BuildRequest(spec=spec, component="transformer", key=key, device="cuda:0")
    job = BuildJob(tmp_path, tmp_path / "engine", request)
    outcome = start_child(build_only, job, request.title, tmp_path / "scratch", log, lambda fact, share: None, Cancel())
    assert outcome.result == {}, outcome.log
    assert (tmp_path / "engine" / "engine.plan").stat().st_size
    assert fused_attentions(log.read_text()) == 2 * spec.transformer.num_layers


@pytest.mark.slow
@pytest.mark.usefixtures("library")
def test_a_damaged_model_file_is_refused(tmp_path: Path) -> None:
    from runtime.engines import tensorrt_library
    from runtime.engines.builders.tensorrt import create_network, parse

    (tmp_path / "model.onnx").write_bytes(b"no model")
    trt = tensorrt_library.load("tensorrt_rtx", needs_gpu=False)
    builder = trt.Builder(tensorrt_library.logger("tensorrt_rtx"))
    parser = trt.OnnxParser(create_network(trt, builder), tensorrt_library.logger("tensorrt_rtx"))
    with pytest.raises(EngineError) as refused:
        parse(trt, parser, tmp_path / "model.onnx")
    assert refused.value.fact.code == "engine.tensorrt_parse_failed"


@pytest.mark.slow
@pytest.mark.usefixtures("library")
def test_the_library_has_the_names_that_sessions_use() -> None:
    import tensorrt_rtx_bindings as trt

    assert trt.DynamicShapesKernelSpecializationStrategy.EAGER
    assert trt.ExecutionContextAllocationStrategy.USER_MANAGED
    used = {
        trt.Builder: ("build_serialized_network_to_stream",),
        trt.IRuntimeConfig: (
            "create_runtime_cache",
            "dynamic_shapes_kernel_specialization_strategy",
            "set_execution_context_allocation_strategy",
            "set_runtime_cache",
        ),
        trt.IRuntimeCache: ("deserialize", "serialize"),
        trt.ICudaEngine: ("create_execution_context", "create_runtime_config", "device_memory_size_v2"),
        trt.IExecutionContext: ("execute_async_v3", "set_device_memory", "set_input_shape", "set_tensor_address"),
    }
    assert [name for kind, names in used.items() for name in names if not hasattr(kind, name)] == []


def test_an_engine_is_built_for_one_compute_capability() -> None:
    targets: dict[int, str] = {}

    def target(capability: str, index: int) -> bool:
        targets[index] = capability
        return capability != "refused"

    trt = SimpleNamespace(ComputeCapability=SimpleNamespace(SM89="8.9", SM75="refused"))
    config = SimpleNamespace(num_compute_capabilities=0, set_compute_capability=target)
    tensorrt_rtx._set_capability(trt, config, "999")  # newer than the library
    assert (config.num_compute_capabilities, targets) == (0, {})
    tensorrt_rtx._set_capability(trt, config, "89")
    assert (config.num_compute_capabilities, targets) == (1, {0: "8.9"})
    with refusal("engine.rtx_capability_refused"):
        tensorrt_rtx._set_capability(trt, config, "75")


def test_the_key_names_the_compute_capability(tiny: Callable[[str], ModelSpec]) -> None:
    spec = tiny("wan2.1")
    one, two = (key_of(spec, "transformer", ShapeProfile.fixed((3, 6, 8)), capability) for capability in (ADA, (8, 6)))
    option = {"option": "compute capability", "found": "89", "wanted": "86"}
    assert Fact("engine.differs_option", option) in differences(two, one)
    assert one.backend == "tensorrt_rtx"


def test_default_precisions(tiny: Callable[[str], ModelSpec]) -> None:
    maker, spec = BUILDERS["tensorrt_rtx"], tiny("wan2.2-a14b")
    chosen = {program: maker.default_precision(spec, program, rtx(), "cuda:0") for program in PROGRAMS}
    assert chosen == {
        "text_encoder": "bfloat16",
        "transformer": "float16",
        "vae_first": "bfloat16",
        "vae_next": "bfloat16",
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_nothing_is_run(tmp_path: Path) -> None:
    with pytest.raises(EngineError) as refused:
        TensorRTRTXSession(b"plan", cache_file=tmp_path / "runtime.cache", device="cuda:0")
    assert refused.value.fact.code == "engine.tensorrt_without_gpu"
    assert BUILDERS["tensorrt_rtx"].unavailable(machine()) == Fact("machine.no_gpu")


def test_where_it_is_not_installed_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.engines import tensorrt_library

    monkeypatch.setitem(tensorrt_library._MODULES, "tensorrt_rtx", "tensorrt_rtx_that_is_absent")
    with pytest.raises(EngineError) as refused:
        tensorrt_library.load("tensorrt_rtx", needs_gpu=False)
    assert refused.value.fact.code == "engine.tensorrt_not_loadable"
