"""Operators translated for TensorRT compute the same, and those that cannot be are exported as usual."""

from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from runtime.engines.onnx_export import OPSET, check_structure, export_onnx
from runtime.engines.programs import load_program
from runtime.engines.sessions.onnxruntime import OnnxRuntimeSession
from runtime.engines.tensorrt_operators import FRAME_DECODER_OPERATORS
from runtime.engines.verify import verify
from runtime.models.registry import read_spec
from runtime.models.spec import FRAME_DECODER
from runtime.planner.choice.engine_index import ShapeProfile
from tests.families.dcae import decoders

USUAL = ("DepthToSpace", "Resize", "Expand")
ANY, FULL = (1, 8), (8, 8)


def kinds_of(path: Path) -> Counter[str]:
    """Return how many operators of each kind a file has."""
    return Counter(node.op_type for node in onnx.load(str(path)).graph.node)


def exported(module: nn.Module, x: torch.Tensor, path: Path) -> Counter[str]:
    """Export a module of one tensor with the translations; return how many operators of each kind it has."""
    torch.onnx.export(
        module,
        (x,),
        path,
        dynamo=True,
        opset_version=OPSET,
        input_names=["x"],
        verbose=False,
        custom_translation_table=dict(FRAME_DECODER_OPERATORS),
    )
    return kinds_of(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "size", "left", "batches"),
    [
        # The last pixel shuffle has 3 channels.
        pytest.param(decoders.DC_BATCH_NORM, (3, 4), {"DepthToSpace": 1}, FULL, id="dc-8"),
        # Interpolation to the nearest pixel is not translated.
        pytest.param(decoders.DC_INTERPOLATED, (3, 4), {"Resize": 2}, ANY, id="dc-interpolated"),
        pytest.param(decoders.OWL_LANDSCAPE, (8, 8), {}, FULL, id="owl-landscape-8"),
    ],
)
def test_frame_decoders_compute_the_same(
    config: dict[str, Any], size: tuple[int, int], left: dict[str, int], batches: tuple[int, int], tmp_path: Path
) -> None:
    save: Any = decoders.save_owl if "model_id" in config else decoders.save_autoencoder
    save(tmp_path / "model", config)
    spec = read_spec(tmp_path / "model", "model")
    program = load_program(spec, FRAME_DECODER, FRAME_DECODER, device="cpu", dtype="float32")
    low, high = ((count, *size) for count in batches)
    profile, path = ShapeProfile(low, high, high), tmp_path / "x.onnx"
    export_onnx(program, profile, path, operators=FRAME_DECODER_OPERATORS)
    check_structure(path)
    found = kinds_of(path)
    assert {kind: found[kind] for kind in USUAL if found[kind]} == left
    assert found["ConvTranspose"] > 0
    with OnnxRuntimeSession(path, provider="cpu", precision="float32", device="cpu") as session:
        result = verify(session, program, profile, "float32")
    assert result.error < 1e-5, result.detail


class Operators(nn.Module):
    """Every translated operator in a way that is translated, or in one that is not."""

    def __init__(self, *, translated: bool) -> None:
        super().__init__()
        self.translated = translated

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return results of `x`, (n, 32, h, w)."""
        if self.translated:
            doubled = F.interpolate(x, scale_factor=2.0, mode="bicubic")
            resized = F.interpolate(x, size=(10, 4), mode="bicubic")
            return F.pixel_shuffle(x, 2), x.repeat_interleave(3, dim=1), doubled, resized
        few, many = F.pixel_shuffle(x[:, :12], 2), F.pixel_shuffle(x.repeat(1, 64, 1, 1), 2)
        return few, many, x.repeat_interleave(2, dim=2), x[0].repeat_interleave(2, dim=1)


@pytest.mark.slow
@pytest.mark.parametrize("translated", [True, False])
def test_operators_compute_the_same(translated: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x, path = Operators(translated=translated).eval(), torch.randn(2, 32, 5, 6), tmp_path / "x.onnx"
    kinds = set(exported(module, x, path))
    assert bool(kinds & {"DepthToSpace", "Resize"}) is not translated
    assert ({"ConvTranspose", "Conv", "MatMul"} <= kinds) is translated
    found = onnxruntime.InferenceSession(str(path)).run(None, {"x": x.numpy()})
    for one, wanted in zip(found, module(x), strict=True):
        torch.testing.assert_close(torch.from_numpy(one), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_bicubic_factors_that_the_dtype_lacks_stay_an_interpolation(tmp_path: Path) -> None:
    class Resized(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return F.interpolate(x, scale_factor=2.0, mode="bicubic"), F.interpolate(x, size=(7, 7), mode="bicubic")

    kinds = exported(Resized().eval(), torch.randn(1, 8, 10, 10).half(), tmp_path / "x.onnx")
    assert (kinds["Resize"], kinds["MatMul"]) == (1, 2)
