"""The parts of the TensorRT builders that need no GPU: availability, keys, shapes, progress, timing cache, names."""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.engines import tensorrt_library
from runtime.engines.builders import BUILDERS, tensorrt, torch_tensorrt
from runtime.engines.builders.tensorrt import BuildPhases, OnnxTensorRT
from runtime.engines.programs import load_program
from runtime.engines.sessions.tensorrt import TensorRTSession, read_names
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_index import SWAPPED, UNREADABLE_KEY, EngineKey, ShapeProfile
from tests.engines.engine_files import refusal
from tests.plans import GPU_PACKAGES, gpu, machine
from tests.published_specs import spec as published

NAMES = ("onnx_tensorrt", "torch_tensorrt")
WITH_GPU = machine(gpu=gpu(), torch_cuda="13.0", packages=GPU_PACKAGES)
VARIED = ShapeProfile((1, 4, 6), (2, 4, 8), (3, 8, 10))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that says which packages are installed, for the builders alone."""

    def say(**versions: str) -> None:
        def version(package: str) -> str:
            name = package.replace("-", "_")
            if name not in versions:
                raise PackageNotFoundError(package)
            return versions[name]

        monkeypatch.setattr(tensorrt, "version", version)

    return say


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("where", "why"),
    [
        (machine(), Fact("machine.no_gpu")),
        (machine(gpu=gpu()), Fact("machine.torch_without_cuda", {"torch": "2.13.0"})),
        (
            machine(gpu=gpu(capability=(7, 0)), torch_cuda="12.8", packages=GPU_PACKAGES),
            Fact("machine.tensorrt_without_gpu", {"gpu": "Test GPU"}),
        ),
    ],
)
def test_reason_why_a_builder_is_unavailable(name: str, where: Machine, why: Fact) -> None:
    assert BUILDERS[name].unavailable(where) == why
    assert BUILDERS[name].unavailable(WITH_GPU) is None


def test_missing_or_incompatible_package_is_named() -> None:
    without = replace(WITH_GPU, packages=())
    assert BUILDERS["onnx_tensorrt"].unavailable(without) == Fact(
        "machine.gpu_package_missing", {"package": "TensorRT"}
    )
    with_one = replace(WITH_GPU, packages=(("tensorrt", "11.0.0.114"),))
    assert BUILDERS["onnx_tensorrt"].unavailable(with_one) is None
    assert BUILDERS["torch_tensorrt"].unavailable(with_one) == Fact(
        "machine.gpu_package_missing", {"package": "torch-tensorrt"}
    )
    unfit = replace(with_one, packages=(*with_one.packages, ("torch-tensorrt", "2.11.0")))
    assert BUILDERS["torch_tensorrt"].unavailable(unfit) == Fact(
        "machine.torch_tensorrt_mismatch", {"installed": "2.11.0", "torch": "2.13.0"}
    )


@pytest.mark.parametrize(
    ("version", "capability", "text"),
    [("11.0.0.114", (9, 0), "bfloat16"), ("11.0.0.114", (7, 5), "float32"), ("8.6.0", (9, 0), "float32")],
)
def test_default_precisions(
    installed: Callable[..., None],
    tiny: Callable[[str], ModelSpec],
    version: str,
    capability: tuple[int, int],
    text: str,
) -> None:
    installed(tensorrt=version)
    spec = tiny("wan2.2-a14b")
    where = machine(gpu=gpu(capability=capability), torch_cuda="13.0")
    builder = BUILDERS["onnx_tensorrt"]
    programs = ("text_encoder", "transformer", "vae_first", "vae_next")
    assert [builder.default_precision(spec, program, where, "cuda:0") for program in programs] == [
        text,
        "float16",
        text,
        text,
    ]
    # PyTorch computes small models in float32.
    blocks, large = BUILDERS["tensorrt_blocks"], published("wan2.2-a14b")
    assert blocks.default_precision(spec, "block_qkv", where, "cuda:0") == "float32"
    assert blocks.default_precision(large, "block_qkv", where, "cuda:0") == "float16"


@pytest.mark.parametrize("name", NAMES)
def test_keys(name: str, tiny: Callable[[str], ModelSpec]) -> None:
    spec, builder = tiny("wan2.2-a14b"), BUILDERS[name]

    def key(component: str, where: Machine = WITH_GPU, precision: str = "float16") -> str:
        made = builder.key(
            spec, component, "transformer", (VARIED,), precision=precision, machine=where, device="cuda:0"
        )
        assert (made.builder, made.backend, made.program) == (name, "tensorrt", "transformer")
        return made.digest()

    assert key("transformer") == key("transformer")
    # The weights are in the plan.
    assert key("transformer") != key("transformer_2")
    assert key("transformer") != key("transformer", precision="float32")
    assert key("transformer") != key("transformer", machine(gpu=gpu(capability=(8, 9)), torch_cuda="13.0"))
    with refusal("engine.tensorrt_needs_gpu"):
        key("transformer", machine())


def test_needs_grow_with_the_size(tiny: Callable[[str], ModelSpec]) -> None:
    builder = BUILDERS["onnx_tensorrt"]
    for program in ("transformer", "vae_next"):
        small, large = (
            builder.needs(tiny("wan2.1"), program, ShapeProfile.fixed(size)) for size in ((2, 8, 8), (4, 90, 160))
        )
        assert small.ram_bytes == large.ram_bytes
        assert 0 < small.vram_bytes < large.vram_bytes


def test_needs_of_a_full_size_transformer_fit_one_gpu() -> None:
    spec = published("wan2.2-a14b")
    weights = 2 * spec.parameters["transformer"]
    size = ShapeProfile.fixed((21, 60, 104))
    whole = BUILDERS["onnx_tensorrt"].needs(spec, "transformer", size)
    assert weights < whole.vram_bytes < 1.5 * weights
    assert whole.ram_bytes < 3.2 * weights
    blocks = BUILDERS["tensorrt_blocks"].needs(spec, "block_feed_forward", size)
    # More than the weights of one block and the tensors of a call, and a small part of the whole.
    assert weights / 40 < blocks.vram_bytes < 6e9
    assert blocks.ram_bytes < 5e9
    assert blocks.disk_bytes < 1e7


def test_block_engines_hold_no_weights(tiny: Callable[[str], ModelSpec]) -> None:
    spec, builder = tiny("wan2.2-a14b"), BUILDERS["tensorrt_blocks"]
    assert builder.programs(spec, "transformer_2") == spec.block_programs
    assert builder.programs(spec, "vae") == ()
    keys = [
        builder.key(
            spec,
            component,
            "block_qkv",
            (ShapeProfile.fixed((1, 1, 1)),),
            precision="float16",
            machine=WITH_GPU,
            device="cuda:0",
        )
        for component in ("transformer", "transformer_2")
    ]
    assert keys[0] == keys[1]
    assert keys[0].weights == SWAPPED
    options = dict(keys[0].options)
    assert options["tokens"] == "8192"
    assert set(options) == {"optimization_level", "tokens", "workspace_mib"}


def test_profile_of_a_block_engine_is_optimized_for_full_calls(tiny: Callable[[str], ModelSpec]) -> None:
    spec = tiny("wan2.1")
    program = load_program(spec, "transformer", "block_qkv", device="cpu", dtype="float16", tokens=96)
    low, best, high = program.shapes(ShapeProfile.fixed((1, 1, 1)))
    width = spec.transformer.width
    assert (low["x"], best["x"], high["x"]) == ((1, width), (96, width), (96, width))
    assert low["q_weight"] == high["q_weight"] == (width, width)


@pytest.mark.slow
def test_module_is_freed_before_tensorrt_builds(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> None:
    """The module's weights are gone when the exported file is prepared, which is before TensorRT reads it."""
    spec = tiny("wan2.1")
    program = load_program(spec, "transformer", "transformer", device="cpu", dtype="float32")
    for parameter in program.module.parameters():
        parameter.data = parameter.data.clone()  # not in the mapped file
    storages = [parameter.untyped_storage() for parameter in program.module.parameters()]
    freed: list[bool] = []

    class ReachedTensorRTError(Exception):
        pass

    def prepare(model: Path) -> None:
        assert model.stat().st_size > 0
        # The exporter looks at some with numpy, which on a CPU fixes the size of the storage; on a GPU it copies.
        freed.extend(storage.nbytes() == 0 for storage in storages if storage.resizable())
        raise ReachedTensorRTError

    profile = ShapeProfile.fixed((3, 8, 6))
    key = BUILDERS["onnx_tensorrt"].key(
        spec, "transformer", "transformer", (profile,), precision="float32", machine=WITH_GPU, device="cuda:0"
    )
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ReachedTensorRTError):
        patch.setattr(tensorrt_library, "load", lambda: None)
        OnnxTensorRT(prepare=prepare).build(program, key, tmp_path, lambda *_: None)
    assert len(freed) > 5
    assert all(freed)


@pytest.mark.parametrize(
    ("cause", "kind"),
    [(torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError), (KeyError("aten.foo"), EngineError)],
)
def test_errors_that_torch_tensorrt_wraps(
    cause: Exception, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(*_: object, **__: object) -> bytes:
        try:
            raise cause
        except Exception as error:
            raise RuntimeError(f"While interpreting the module got an error: {error}") from error

    package = SimpleNamespace(dynamo=SimpleNamespace(convert_exported_program_to_serialized_trt_engine=convert))
    monkeypatch.setitem(sys.modules, "torch_tensorrt", package)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    builder = torch_tensorrt.TorchTensorRT()
    key = EngineKey(**{**vars(UNREADABLE_KEY), "options": builder.options(WITH_GPU, "cuda:0")})
    exported = torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),))
    with pytest.raises(kind):
        torch_tensorrt._convert(exported, ((), {}), key, torch.device("cuda", 0), tmp_path / "timing")


LAYER = {
    "Name": "node_linear_3 + node_add_5",
    "LayerType": "gemm",
    "Inputs": [
        {"Name": name, "Dimensions": [8192, 5120], "Format/Datatype": "Half"} for name in ("x", "q_weight", "q_bias")
    ],
    "Outputs": [{"Name": "q", "Dimensions": [8192, 5120], "Format/Datatype": "Half"}],
    "TacticName": "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n" * 10,
    "Metadata": "page" * 1000,
}


def test_a_layer_is_one_line_of_json() -> None:
    line = tensorrt.layer_line(json.dumps(LAYER, indent=1))
    # The log keeps 500 characters of a line.
    assert len(line) < 500
    assert "\n" not in line
    found = json.loads(line)
    assert found["Name"] == LAYER["Name"]
    assert found["TacticName"].startswith("sm90_xmma_gemm")
    assert found["Inputs"] == ["Half [8192, 5120]", "Half [8192, 5120]", "and 1 more"]
    assert found["Outputs"] == ["Half [8192, 5120]"]
    # Without details TensorRT gives a name; what is not JSON is kept, shortened.
    assert tensorrt.layer_line('"node_linear_3"') == '"node_linear_3"'
    assert len(tensorrt.layer_line("{" * 1000)) < 500


def test_the_log_of_tensorrt_is_collected_by_level(monkeypatch: pytest.MonkeyPatch) -> None:
    class ILogger:
        INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    monkeypatch.setattr(tensorrt_library, "load", lambda *_, **__: SimpleNamespace(ILogger=ILogger))
    logger = tensorrt_library.logger.__wrapped__("tensorrt")
    lines: list[str] = []
    with tensorrt_library.listen(lambda line, _: lines.append(line)) as messages:
        logger.log(ILogger.INTERNAL_ERROR, "assertion\n")
        logger.log(ILogger.ERROR, "no kernel")
        logger.log(ILogger.WARNING, "slow")
        logger.log(ILogger.INFO, "a phase")
        logger.log(ILogger.VERBOSE, "a tactic")
        # TensorRT for RTX lists the layers as information.
        logger.log(ILogger.INFO, "Layers:\nName: a, LayerType: gemm\nName: b, LayerType: kgen\n\nBindings:\nx\n")
    logger.log(ILogger.ERROR, "another build's")
    assert (messages.errors, messages.warnings) == (["assertion", "no kernel"], ["slow"])
    assert messages.layers == ("Name: a, LayerType: gemm", "Name: b, LayerType: kgen")
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("strongly_typed", "precision", "flags"),
    [
        (False, "float32", {"OTHER"}),
        (False, "float16", {"OTHER", "FP16"}),
        (True, "float16", {"OTHER"}),
        (True, "bfloat16", {"OTHER"}),
    ],
)
def test_factors_in_float32_are_not_rounded(strongly_typed: bool, precision: str, flags: set[str]) -> None:
    """TensorRT sets the flag TF32 by default."""
    networks = SimpleNamespace(STRONGLY_TYPED=1) if strongly_typed else SimpleNamespace()
    trt = SimpleNamespace(
        BuilderFlag=SimpleNamespace(TF32="TF32", FP16="FP16"), NetworkDefinitionCreationFlag=networks, __version__="8.6"
    )
    all_flags = {"TF32", "OTHER"}
    config = SimpleNamespace(clear_flag=all_flags.discard, set_flag=all_flags.add)
    tensorrt._set_precision(trt, config, precision)
    assert all_flags == flags
    if not strongly_typed:
        with refusal("engine.tensorrt_without_bfloat16"):
            tensorrt._set_precision(trt, config, "bfloat16")


def test_one_profile_encloses_several() -> None:
    other = ShapeProfile((2, 2, 8), (4, 4, 9), (4, 4, 20))
    assert tensorrt.enclosing([VARIED]) == VARIED
    assert tensorrt.enclosing([VARIED, other]) == ShapeProfile((1, 2, 6), (2, 4, 8), (4, 8, 20))


@pytest.mark.parametrize(
    ("component", "name"),
    [("text_encoder", "text_encoder"), ("transformer", "transformer"), ("vae", "vae_first"), ("vae", "vae_next")],
)
def test_shapes_are_those_of_the_inputs(component: str, name: str, tiny: Callable[[str], ModelSpec]) -> None:
    program = load_program(tiny("wan2.1"), component, name, device="cpu", dtype="float32")
    found = program.shapes(VARIED)
    for sizes, latent in zip(found, (VARIED.min, VARIED.opt, VARIED.max), strict=True):
        assert sizes == {name: tuple(tensor.shape) for name, tensor in program.inputs(latent).items()}
    # Nothing of the pretended run is left in the module.
    assert all(type(tensor) in {torch.Tensor, torch.nn.Parameter} for tensor in program.module.state_dict().values())


def test_build_phases_are_one_increasing_fraction() -> None:
    reported: list[tuple[str, float | None]] = []
    phases = BuildPhases(lambda line, share: reported.append((line, share)))
    phases.start("Building", None, 4)
    phases.step("Building", 0)
    phases.start("Timing", "Building", 100)
    for step in range(100):
        phases.step("Timing", step)
    phases.finish("Timing")
    phases.step("Building", 1)
    phases.step("unknown phase", 3)
    phases.step("Building", 3)
    phases.finish("Building")
    shares = [share for _, share in reported if share is not None]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert reported[1] == ("Building", 0.25)
    # A quarter done, and half of the next quarter.
    assert any(line == "Timing" and share == pytest.approx(0.375, abs=0.01) for line, share in reported)
    assert shares[-1] == 1
    assert len(reported) < 60


def test_damaged_timing_cache_is_empty(tmp_path: Path) -> None:
    path = tensorrt.timing_cache_path(tmp_path / "0123456789abcdef", "H200 sm90", "8.6.0")
    assert path.parent == tmp_path
    assert path == tensorrt.timing_cache_path(
        tmp_path / ".building-0123456789abcdef-00" / "engine", "H200 sm90", "8.6.0"
    )
    assert path != tensorrt.timing_cache_path(tmp_path / "x", "H200 sm90", "11.0")
    assert tensorrt.read_timing_cache(path) == b""
    tensorrt.write_timing_cache(path, b"measured")
    assert tensorrt.read_timing_cache(path) == b"measured"
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert tensorrt.read_timing_cache(path) == b""
    path.write_bytes(data[:10])
    assert tensorrt.read_timing_cache(path) == b""
    tensorrt.write_timing_cache(tmp_path / "no such folder" / "timing", b"measured")


@pytest.mark.parametrize("text", [None, "", "[]", '{"z": 1}', "\xff"])
def test_damaged_tensor_names_are_an_error(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "tensors.json"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    with refusal("engine.file_unreadable", "engine.file_damaged") as refused:
        read_names(tmp_path)
    assert refused.value.data["file"] == "tensors.json"
    path.write_text(json.dumps({"given_0": "cache_0"}), encoding="utf-8")
    assert read_names(tmp_path) == {"given_0": "cache_0"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_a_session_is_an_error_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "engine.plan").write_bytes(b"plan")
    with refusal("engine.tensorrt_without_gpu"):
        TensorRTSession(tmp_path / "engine.plan", device="cuda:0")


def test_out_of_memory_is_recognized() -> None:
    code = "engine.tensorrt_not_run"
    messages = tensorrt_library.Messages(errors=["Error Code 2: OutOfMemory (no further information)"])
    assert isinstance(messages.failure(code), torch.OutOfMemoryError)
    messages = tensorrt_library.Messages(errors=["Version tag does not match"], warnings=["slow"])
    error = messages.failure(code)
    assert isinstance(error, EngineError)
    assert (error.code, error.data) == (code, {"detail": "Version tag does not match"})
    long = str(tensorrt_library.Messages(errors=["In node 3:\n" + "word " * 200]).failure(code))
    assert "\n" not in long
    assert len(long) < 500
    silent = tensorrt_library.Messages().failure(code)
    assert isinstance(silent, EngineError)
    assert silent.data == {"detail": Fact("engine.tensorrt_silent")}
