"""Writes programs as ONNX files for builders, and components as ONNX files for other programs.

The opset is 18, for FP8 19, the first with FP8. Weights go into a separate file if protobuf's limit of 2 GiB would be
exceeded.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch

from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.core.files import give_usual_permissions
from runtime.core.plan import LatentSize
from runtime.core.request import SOUND_DECODERS
from runtime.engines.component_programs import CACHE, Program
from runtime.engines.fp8 import PRODUCT_SCALE, Fp8Part
from runtime.engines.programs import load_program
from runtime.engines.signatures import METADATA_KEY
from runtime.models.spec import FRAME_PROGRAMS, ModelSpec
from runtime.models.vae_groups import GROUP_PROGRAMS
from runtime.planner.choice.engine_index import STEPS, ShapeProfile, serves_any_clip
from runtime.upstream.onnxscript import fast_rewriting

OPSET = 18
FP8_OPSET = 19
# A protobuf message is limited to 2 GiB, of which the graph needs a part.
_MAX_INLINE_BYTES = 1_900_000_000
# Names are unique within a graph: caches, and the stream `x` of block programs, need other names among the outputs.
_NEW = "new_"
_MOST_CACHES = 100
TENSOR_NAMES = {f"{_NEW}{name}": name for name in ("x", *(f"{CACHE}{index}" for index in range(_MOST_CACHES)))}


@dataclass(frozen=True)
class Exported:
    """One ONNX file and its relative error against PyTorch."""

    program: str
    path: Path
    bytes: int
    error: float
    tolerance: float

    def describe(self) -> Fact:
        """Return the result of the comparison."""
        return Fact("engine.export_compared", {"error": self.error, "tolerance": self.tolerance})

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**vars(self), "path": str(self.path)}


def export_onnx(
    program: Program,
    profile: ShapeProfile,
    path: Path,
    *,
    cut: bool = False,
    operators: Mapping[Callable[..., Any], Callable[..., Any]] | None = None,
) -> None:
    """Write `path`, and its weights as `path` + ".data" if they are large.

    The file's tensors have the program's names, except those in `TENSOR_NAMES`.

    Args:
        program: of any dtype and device; its tensors are the file's.
        profile: sizes are dynamic where its minimum and maximum differ.
        cut: whether the transformer's text is cut (`programs.cut_text`).
        operators: translations of PyTorch's operators to ONNX, instead of the exporter's.

    Raises:
        torch.onnx.errors.OnnxExporterError: if torch cannot translate an operator.
    """
    signature = program.signature(profile, program.example(profile, cut=cut))
    large = sum(tensor.nbytes for tensor in program.module.state_dict().values()) > _MAX_INLINE_BYTES
    with _quiet(), fast_rewriting():
        exported = torch.onnx.export(
            program.export(profile, cut=cut),
            dynamo=True,
            opset_version=FP8_OPSET if isinstance(program.module, Fp8Part) else OPSET,
            custom_translation_table={torch.ops.tandem.fp8_product.default: _fp8_product, **(operators or {})},
            input_names=[tensor.name for tensor in signature.inputs],
            output_names=[_output_name(name) for name in program.output_names],
            external_data=large,
            verbose=False,
        )
    assert exported is not None
    exported.model.metadata_props[METADATA_KEY] = signature.to_text()
    exported.save(path, external_data=large)


def _fp8_product(x: Any, weight: Any) -> Any:
    """Translate `fp8.fp8_product`: as factors that are quantized with a constant scale and dequantized."""
    from onnxscript import opset19

    op: Any = opset19
    scale = op.Constant(value=onnx.helper.make_tensor("", onnx.TensorProto.FLOAT16, [], [PRODUCT_SCALE]))
    zero = op.Constant(value=onnx.helper.make_tensor("", onnx.TensorProto.FLOAT8E4M3FN, [], [0.0]))
    left = op.DequantizeLinear(op.QuantizeLinear(x, scale, zero), scale)
    right = op.DequantizeLinear(weight, scale)
    return op.MatMul(left, op.Transpose(right, perm=[1, 0]))


def _output_name(name: str) -> str:
    return f"{_NEW}{name}" if f"{_NEW}{name}" in TENSOR_NAMES else name


def check_structure(path: Path) -> None:
    """Check a file against the ONNX standard.

    Raises:
        onnx.checker.ValidationError: if it violates the standard.
    """
    onnx.checker.check_model(str(path), full_check=True)


def export_component(spec: ModelSpec, component: str, latent: LatentSize, folder: Path) -> Iterator[Exported]:
    """Write a component's programs in float32 with dynamic sizes, and compare each with PyTorch in ONNX Runtime.

    Args:
        latent: see `ExecutionPlan.engine_size`; the files serve any size up to it, that of a frame decoder any number
            of frames up to it, that of a decoder of sound no other length.

    Raises:
        EngineError: if a file cannot be written, or differs from PyTorch; that file is removed.
    """
    from runtime.engines.sessions.onnxruntime import OnnxRuntimeSession
    from runtime.engines.verify import verify

    for name in spec.programs[component]:
        path = folder / f"{component if name == 'transformer' else name}.onnx"
        profile = _export_profile(name, spec, latent)
        program = load_program(spec, component, name, device="cpu", dtype="float32")
        try:
            export_onnx(program, profile, path)
            check_structure(path)
        except OSError as error:
            raise EngineError("engine.export_not_written", file=path, error=error.strerror or str(error)) from error
        with OnnxRuntimeSession(path, provider="cpu", precision="float32", device="cpu") as session:
            verification = verify(session, program, profile, "float32")
        files = [file for file in (path, path.with_name(f"{path.name}.data")) if file.exists()]
        if not verification.passed:
            for file in files:
                file.unlink()
            raise EngineError("engine.export_wrong", file=path.name, cause=verification.detail)
        for file in files:
            give_usual_permissions(file)
        yield Exported(
            name, path, sum(file.stat().st_size for file in files), verification.error, verification.tolerance
        )


def _export_profile(program: str, spec: ModelSpec, latent: LatentSize) -> ShapeProfile:
    """Return the profile from the smallest useful size to `latent`; an axis of size 1 would become static."""
    if serves_any_clip(program):
        return ShapeProfile.fixed((1, 1, 1))
    if program in SOUND_DECODERS:
        # A spectrogram's frames are no multiple of the latents.
        return ShapeProfile.fixed(latent)
    if program in FRAME_PROGRAMS:
        # Some decoders choose their way to compute attention by the size.
        return ShapeProfile((1, *latent[1:]), latent, latent)
    frames, height, width = (1, *latent[1:]) if program in STEPS else latent
    _, patch_h, patch_w = spec.transformer.patch_size
    fewest = frames if program in GROUP_PROGRAMS else min(2, frames)
    low = (fewest, min(2 * patch_h, height), min(2 * patch_w, width))
    return ShapeProfile(low, (frames, height, width), (frames, height, width))


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's messages about optional packages, and torch's warnings about its own code."""
    exporter = logging.getLogger("torch.onnx")
    level = exporter.level
    exporter.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        exporter.setLevel(level)
