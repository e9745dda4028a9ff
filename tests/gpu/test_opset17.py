"""The rewrite of exported files for TensorRT 8.6 changes no result."""

from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch

from runtime.core.plan import LatentSize
from runtime.engines.onnx_export import check_structure, export_onnx
from runtime.engines.programs import load_program
from runtime.engines.sessions.onnxruntime import OnnxRuntimeSession
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_index import ShapeProfile
from tests.gpu import opset17
from tests.gpu.errors import relative_error
from tests.gpu.opset17 import float32_nodes, to_opset_17

# Operators that the parser of 8.6 has, of those that occur; `InstanceNormalization` is a plugin that needs a library
# that its wheel has not. Source: https://github.com/onnx/onnx-tensorrt/blob/8.6.1/docs/operators.md.
KNOWN = {
    *("Add", "Cast", "Clip", "Concat", "Constant", "Conv", "ConvTranspose", "Div", "Equal", "Expand", "Gather", "Gemm"),
    *("LayerNormalization", "LeakyRelu", "Log", "MatMul", "Mul", "Neg", "Or", "Pad", "Pow", "Reciprocal", "ReduceMean"),
    *("Reshape", "Resize", "Shape", "Sigmoid", "Sin", "Slice", "Softmax", "Split", "Sqrt", "Squeeze", "Sub", "Tanh"),
    *("Tile", "Transpose", "Unsqueeze", "Where"),
}
SOUND: LatentSize = (7, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "component", "name", "latent"),
    # Each has operators that no other has; of block engines, those of the one that has most.
    [
        ("hunyuan-video", "text_encoder", "text_encoder", (1, 1, 1)),
        ("hunyuan-video", "vae", "vae_group_3", (3, 4, 6)),
        ("ltx-2", "vocoder", "vocoder", SOUND),
        ("ltx-2.3", "vae", "vae_clip", (2, 2, 3)),
        ("ltx-2.3", "audio_vae", "audio_vae", SOUND),
        ("ltx-2.3", "vocoder", "vocoder", SOUND),
        ("ltx-2.3", "transformer", "block_cross", (1, 1, 1)),
    ],
)
def test_a_rewritten_file_computes_the_same(
    architecture: str,
    component: str,
    name: str,
    latent: LatentSize,
    tiny: Callable[[str], ModelSpec],
    tmp_path: Path,
) -> None:
    program = load_program(tiny(architecture), component, name, device="cpu", dtype="float32", tokens=64)
    profile, path = ShapeProfile.fixed(latent), tmp_path / "x.onnx"
    export_onnx(program, profile, path)
    to_opset_17(path)
    check_structure(path)
    graph = onnx.load(str(path)).graph
    assert {node.op_type for node in graph.node} <= KNOWN
    constants = {one.name for one in graph.initializer}
    assert {node.input[1] for node in graph.node if node.op_type.startswith("Conv")} <= constants
    inputs = program.inputs(profile.opt)
    with OnnxRuntimeSession(path, provider="cpu", precision="float32", device="cpu") as session:
        found = session.infer(**inputs)
    for output, wanted in program.run(**inputs).items():
        assert relative_error(found[output], wanted) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("bias", [True, False])
def test_wide_depthwise_convolutions_are_split(bias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opset17, "_MOST_GROUPS", 3)
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(8, 8, (3, 5), padding=(1, 2), groups=8, bias=bias), torch.nn.Conv2d(8, 4, 1, groups=2)]
    module, x, path = torch.nn.Sequential(*layers).eval(), torch.randn(2, 8, 5, 6), tmp_path / "x.onnx"
    torch.onnx.export(module, (x,), path, dynamo=True, opset_version=18, input_names=["x"], verbose=False)
    to_opset_17(path)
    check_structure(path)
    convolutions = [node for node in onnx.load(str(path)).graph.node if node.op_type == "Conv"]
    assert len(convolutions) == 4
    (found,) = onnxruntime.InferenceSession(str(path)).run(None, {"x": x.numpy()})
    assert relative_error(torch.from_numpy(found), module(x)) < 1e-6


class Residual(torch.nn.Module):
    """Sums of convolutions: with the input, of two, and with the input of one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n, 4, h, w) of `x`, of the same shape."""
        first, second, third, fourth = self.layers
        x = first(x) + x
        x = second(x) + third(x)
        y = fourth(x)
        return (y + x) * y


@pytest.mark.slow
def test_sums_of_convolutions_become_differences(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x, path = Residual().eval(), torch.randn(2, 4, 5, 6), tmp_path / "x.onnx"
    exported = torch.onnx.export(module, (x,), dynamo=True, opset_version=18, input_names=["x"], verbose=False)
    assert exported is not None
    exported.save(path, external_data=False)
    to_opset_17(path)
    check_structure(path)
    kinds = [node.op_type for node in onnx.load(str(path)).graph.node]
    assert (kinds.count("Sub"), kinds.count("Add")) == (1, 2)
    (found,) = onnxruntime.InferenceSession(str(path)).run(None, {"x": x.numpy()})
    assert relative_error(torch.from_numpy(found), module(x)) < 1e-6


class Mixed(torch.nn.Module):
    """A convolution in float16 and a product of large sums in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x (n, 4, h, w) plus a product of its convolution; float16."""
        y = self.conv(x).flatten(2).float()
        scores = torch.relu(y @ y.transpose(1, 2)) @ y
        return x + (scores / (1 + scores.abs().sum(1, keepdim=True))).half().view_as(x)


@pytest.mark.slow
def test_nodes_that_compute_in_float32_are_found(tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    x = torch.randn(1, 4, 5, 6).half()
    torch.onnx.export(Mixed().half().eval(), (x,), path, dynamo=True, opset_version=18, verbose=False)
    to_opset_17(path)
    nodes = onnx.load(str(path)).graph.node
    names, found = [node.name for node in nodes], float32_nodes(path)
    assert len(set(names)) == len(names)
    assert sorted(node.op_type for node in nodes if node.name in found) == [
        "Add",
        "Div",
        "MatMul",
        "MatMul",
        "ReduceSum",
    ]
    assert {node.op_type for node in nodes if node.name not in found} >= {"Conv", "Add", "Cast", "Relu"}
