"""The rewrite of exported files for TensorRT 8.6 changes no result."""

from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch

from runtime.engines.onnx_export import check_structure, export_onnx
from runtime.engines.programs import load_program
from runtime.engines.sessions.onnxruntime import OnnxRuntimeSession
from runtime.models.spec import ModelSpec
from tests.gpu import opset17
from tests.gpu.check_common import profile_of, relative_error
from tests.gpu.opset17 import to_opset_17

# Operators that 8.6.0 has in plugins only, of which those of its wheel need libraries that are not there.
PLUGINS = {"InstanceNormalization"}


@pytest.mark.parametrize(("component", "name"), [("text_encoder", "text_encoder"), ("vae", "vae_group_3")])
def test_a_rewritten_file_computes_the_same(
    component: str, name: str, tiny: Callable[[str], ModelSpec], tmp_path: Path
) -> None:
    program = load_program(tiny("hunyuan-video"), component, name, device="cpu", dtype="float32")
    profile, path = profile_of(name, (3, 4, 6)), tmp_path / "x.onnx"
    export_onnx(program, profile, path)
    to_opset_17(path)
    check_structure(path)
    graph = onnx.load(str(path)).graph
    assert not PLUGINS & {node.op_type for node in graph.node}
    inputs = program.inputs(profile.opt)
    with OnnxRuntimeSession(path, provider="cpu", precision="float32", device="cpu") as session:
        found = session.infer(**inputs)
    for output, wanted in program.run(**inputs).items():
        assert relative_error(found[output], wanted) < 1e-5


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
