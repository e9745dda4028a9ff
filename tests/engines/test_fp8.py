"""FP8 block engines: the form in PyTorch, the exported file in ONNX Runtime, and torchao's weights."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest

from runtime.engines.block_programs import BlockProgram
from runtime.engines.component_programs import Program
from runtime.engines.fp8 import Fp8Part
from runtime.engines.onnx_export import FP8_OPSET, check_structure, export_onnx
from runtime.engines.programs import load_program
from runtime.engines.sessions import onnxruntime as onnxruntime_sessions
from runtime.engines.sessions.onnxruntime import OnnxRuntimeBlockSession
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_index import ShapeProfile
from tests.engines.conftest import relative
from tests.engines.contract import wheels

PROGRAMS = ("block_qkv", "block_query", "block_feed_forward")
SLOW = pytest.mark.slow
TOKENS = 64
ROOT = Path(__file__).parents[2]


def load(spec: ModelSpec, name: str, dtype: str) -> Program:
    """Return a block program for a few tokens."""
    return load_program(spec, "transformer", name, device="cpu", dtype=dtype, tokens=TOKENS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_fp8_differs_from_float32_by_a_few_percent(name: str, tiny: Callable[[str], ModelSpec]) -> None:
    spec = tiny("wan2.2-a14b")
    exact, rounded = load(spec, name, "float32"), load(spec, name, "fp8")
    assert isinstance(exact, BlockProgram)
    assert isinstance(rounded.module, Fp8Part)
    inputs = exact.inputs_for(48)
    outputs = rounded.run(**rounded.module.quantized(inputs))
    for output, expected in exact.run(**inputs).items():
        assert outputs[output].shape == expected.shape
        assert 5e-3 < relative(outputs[output], expected) < 6e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param("block_qkv", marks=SLOW), "block_query", pytest.param("block_feed_forward", marks=SLOW)]
)
def test_the_exported_file_computes_what_the_form_does(
    name: str, tiny: Callable[[str], ModelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, path = load(tiny("wan2.2-a14b"), name, "fp8"), tmp_path / "engine.onnx"
    assert isinstance(program, BlockProgram)
    export_onnx(program, ShapeProfile.fixed((1, 1, 1)), path)
    check_structure(path)
    model = onnx.load(path)
    assert [opset.version for opset in model.opset_import if opset.domain == ""] == [FP8_OPSET]
    types = {one.name: one.type.tensor_type.elem_type for one in model.graph.input}
    matrices = [name for name, kind in types.items() if kind == onnx.TensorProto.FLOAT8E4M3FN]
    assert matrices == [name.removesuffix("_scale") for name in types if name.endswith("_scale")]
    assert len(matrices) == [node.op_type for node in model.graph.node].count("MatMul")

    def unoptimized(model: Path, **_: object) -> onnxruntime.InferenceSession:
        # With its optimizations, ONNX Runtime 1.24 multiplies other numbers.
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        return onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])

    monkeypatch.setattr(onnxruntime_sessions, "load_session", unoptimized)
    with OnnxRuntimeBlockSession(path, provider="cpu", precision="fp8", device="cpu") as session:
        for tokens in (1, 40, TOKENS):
            inputs = program.inputs_for(tokens)
            found = session.infer(**inputs)
            for output, expected in program.run(**inputs).items():
                assert found[output].dtype == expected.dtype
                assert relative(found[output], expected) < 1e-2


# In a process of its own: importing torchao changes torch.
TORCHAO = """
import torch
from torchao.quantization import Float8Tensor, PerRow
from runtime.engines.fp8 import Fp8Weight, linear
from runtime.execution.block_engines import _parameter
from runtime.models.quantization import is_quantized

torch.manual_seed(0)
layer = torch.nn.Linear(256, 96).bfloat16()
plain = layer.weight.detach().clone()
layer.weight = torch.nn.Parameter(Float8Tensor.from_hp(plain, granularity=PerRow()), requires_grad=False)
block = torch.nn.ModuleDict({"to_q": layer})
assert is_quantized(layer.weight) and _parameter(block, "to_q.weight", torch.bfloat16) is None
data, scale = (_parameter(block, f"to_q.weight.{one}", torch.bfloat16) for one in ("qdata", "scale"))
assert data.dtype == torch.float8_e4m3fn and data.shape == (96, 256) and data.is_contiguous()
assert scale.dtype == torch.float32 and scale.shape == (96, 1) and scale.is_contiguous()
assert data.data_ptr() == layer.weight.qdata.data_ptr()
assert _parameter(block, "to_q.bias", torch.bfloat16) is layer.bias
assert _parameter(torch.nn.ModuleDict({"to_q": torch.nn.Linear(8, 8)}), "to_q.weight.qdata", torch.bfloat16) is None
own = Fp8Weight.of(plain)
assert (own.scale / scale - 1).abs().max() < 5e-3

# torchao rounds activations in the same way, and multiplies with `torch._scaled_mm`.
x = torch.randn(40, 256).bfloat16()
rounded = Float8Tensor.from_hp(x, granularity=PerRow())
expected = (rounded.qdata.float() @ data.float().t()) * rounded.scale * scale.t() + layer.bias.float()
found = linear(x, Fp8Weight(data, scale), layer.bias)
unrounded = x.float() @ plain.float().t() + layer.bias.float()
error, exact = (float((one - expected).norm() / expected.norm()) for one in (found, unrounded))
assert error < exact / 2 and exact < 5e-2, (error, exact)
"""


@pytest.mark.slow
def test_torchaos_weights_are_taken_and_its_arithmetic_is_the_same() -> None:
    folder = wheels.unpacked(f"torchao=={wheels.pinned('torchao')}")
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(folder)!r}]\n{TORCHAO}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
