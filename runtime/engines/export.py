"""Writes a component as ONNX files for other programs, each compared with PyTorch through ONNX Runtime's CPU."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.core.errors import EngineError
from runtime.core.plan import LatentSize
from runtime.models.spec import ModelSpec
from runtime.planner.shapes import ShapeProfile

_FULL = "the disk is full or cannot be written"


@dataclass(frozen=True)
class Exported:
    """One ONNX file and how far it is from PyTorch (relative)."""

    program: str
    path: Path
    bytes: int
    error: float
    tolerance: float

    @property
    def detail(self) -> str:
        """What the comparison found, in words."""
        return f"relative error {self.error:.0e} through ONNX Runtime, allowed {self.tolerance:.0e}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return {**vars(self), "path": str(self.path)}


def export_component(spec: ModelSpec, component: str, latent: LatentSize, folder: Path) -> Iterator[Exported]:
    """Write `<component>.onnx`, or a file for each program, in float32 with frames and sizes dynamic.

    Weights above 2 GB go into a file of their own beside each.

    Args:
        latent: (frames, height, width); the files serve any size up to it.

    Raises:
        EngineError: if a file cannot be written, or is not what PyTorch computes; that file is removed.
    """
    from runtime.engines.onnx_export import check_structure, export_onnx
    from runtime.engines.programs import load_program
    from runtime.engines.sessions.onnxruntime import OnnxRuntimeSession
    from runtime.engines.verify import verify

    for name in spec.programs[component]:
        path = folder / f"{component if name == 'transformer' else name}.onnx"
        profile = _profile(name, spec, latent)
        program = load_program(spec, component, name, device="cpu", dtype="float32")
        try:
            export_onnx(program, profile, path)
            check_structure(path)
        except OSError as error:
            raise EngineError(
                f"{path} cannot be written: {error.strerror or _FULL}.", "Give another folder."
            ) from error
        with OnnxRuntimeSession(path, provider="cpu", precision="float32", device="cpu") as session:
            found = verify(session, program, profile, "float32")
        files = [file for file in (path, path.with_name(f"{path.name}.data")) if file.exists()]
        if not found.passed:
            for file in files:
                file.unlink()
            raise EngineError(
                f"{path.name} was not what PyTorch computes: {found.detail}.", "Take another release of torch."
            )
        yield Exported(name, path, sum(file.stat().st_size for file in files), found.error, found.tolerance)


def _profile(program: str, spec: ModelSpec, latent: LatentSize) -> ShapeProfile:
    """Return the profile from the smallest that makes sense to `latent`: a dimension of one would be fixed."""
    if program == "text_encoder":
        return ShapeProfile.fixed((1, 1, 1))
    frames, height, width = (1, *latent[1:]) if program in {"vae_first", "vae_next"} else latent
    _, patch_h, patch_w = spec.transformer.patch_size
    low = (min(2, frames), min(2 * patch_h, height), min(2 * patch_w, width))
    return ShapeProfile(low, (frames, height, width), (frames, height, width))
