"""Exported ONNX files: valid, without scatter, equal to PyTorch at every size; large weights in a separate file."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from runtime.engines import onnx_export
from runtime.engines.component_programs import TEXT_PADDING, Program
from runtime.engines.onnx_export import OPSET, TENSOR_NAMES, check_structure, export_onnx
from runtime.engines.programs import load_program
from runtime.engines.sessions.onnxruntime import OnnxRuntimeSession
from runtime.engines.verify import verify
from runtime.models.spec import ModelSpec, component_of
from runtime.planner.choice.engine_index import ShapeProfile
from tests.engines.conftest import DECODER_STEPS, PROFILES, Build
from tests.tiny_models import SHALLOW, SHALLOW_TI2V

CASES = [
    ("wan2.1", "text_encoder", PROFILES["text_encoder"]),
    (SHALLOW, "vae_next", DECODER_STEPS),
    *(
        pytest.param(SHALLOW_TI2V, name, PROFILES[name], marks=pytest.mark.slow)
        for name in ("transformer", "vae_first", "vae_next")
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "name", "profile"), CASES)
def test_exported_file_equals_pytorch_at_every_size(
    built: Build, architecture: str, name: str, profile: ShapeProfile
) -> None:
    engine = built("cpu", architecture, component_of(name), name, profile=profile)
    check(engine.folder / "engine.onnx", engine.program(), profile)


def check(path: Path, program: Program, profile: ShapeProfile) -> None:
    """Check that a file is by the standard, and computes what the program does at every size."""
    check_structure(path)
    model = onnx.load(path)
    assert [opset.version for opset in model.opset_import if opset.domain == ""] == [OPSET]
    assert OPSET >= 18
    assert not any(node.op_type.startswith("Scatter") for node in model.graph.node)
    # On a CPU the transformer takes text without its padding.
    padding = (TEXT_PADDING,) if program.cuts_text else ()
    assert tuple(node.name for node in model.graph.input) == program.input_names + padding
    assert tuple(TENSOR_NAMES.get(node.name, node.name) for node in model.graph.output) == program.output_names
    with OnnxRuntimeSession(path, provider="cpu", precision="float32", device="cpu") as session:
        result = verify(session, program, profile, "float32")
    assert result.error < 1e-5, result.detail


@pytest.mark.slow
def test_large_weights_are_in_a_separate_file_and_export_prints_nothing(
    tiny: Callable[[str], ModelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(onnx_export, "_MAX_INLINE_BYTES", 1000)
    program = load_program(tiny("wan2.1"), "text_encoder", "text_encoder", device="cpu", dtype="float32")
    path = tmp_path / "model.onnx"
    capfd.readouterr()
    export_onnx(program, PROFILES["text_encoder"], path)
    assert capfd.readouterr() == ("", "")
    assert (tmp_path / "model.onnx.data").stat().st_size > 10_000
    check_structure(path)
    with OnnxRuntimeSession(path, provider="cpu", precision="float32", device="cpu") as session:
        assert verify(session, program, PROFILES["text_encoder"], "float32").passed
