"""Common parts of the two builders of TensorRT plans: availability, keys, requirements, shapes and the timing cache.

The timing cache holds TensorRT's kernel measurements, which shorten the next build. There is one file per GPU and
TensorRT version in the engine folder. It is replaced by a rename: concurrent builds lose at most each other's
measurements. It begins with the SHA-256 of the rest, because TensorRT does not check its input.
"""

import contextlib
import hashlib
import os
import secrets
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from runtime.core.errors import EngineError
from runtime.core.plan import LatentSize
from runtime.engines.builders.base import Builder, BuildNeeds, weights_bytes
from runtime.machine.probe import Machine, gpu_index
from runtime.models.spec import ModelSpec
from runtime.planner import constraints
from runtime.planner.engine_index import ShapeProfile
from runtime.planner.memory_model import DTYPE_BYTES, denoise_bytes
from runtime.upstream.torch import without_computing

if TYPE_CHECKING:
    import torch

    from runtime.engines.programs import Program

Shape = tuple[int, ...]
# The shapes of all inputs by name, at a profile's smallest, best and largest size.
Shapes = tuple[Mapping[str, Shape], Mapping[str, Shape], Mapping[str, Shape]]

# "tensorrt" is a package that depends on the one for the installed CUDA.
PACKAGES = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12")
_FIRST_WITH_BFLOAT16 = 10
_GIB = 1 << 30
_MIB = 1 << 20
# The workspace is at most a quarter of the GPU's memory, so that enough is left for the rest of a job.
_WORKSPACE_SHARE = 4
_LARGEST_WORKSPACE = 16 * _GIB
# TensorRT's default; higher levels take much longer to build for little gain.
_OPTIMIZATION_LEVEL = 3
# TensorRT's libraries and torch, before weights are loaded.
_BASE_RAM = 4 * _GIB
_HASH_BYTES = 32
_MAX_CACHE_BYTES = 1 << 30
_WORKSPACE_PREFIX = ".building-"


class TensorRTBuilder(Builder):
    """A `Builder` without `build`."""

    backend: ClassVar[str] = "tensorrt"
    file_name: ClassVar[str] = "engine.plan"

    def default_precision(self, program: str, machine: Machine, device: str) -> str:
        """See `Builder`.

        - transformer: float16. Its sums and norms stay in float32, its activations are far below float16's limit, and
          float16's eleven bits are closer to the weights than bfloat16's eight.
        - text_encoder: bfloat16, in which UMT5 was trained; its feed-forward layers overflow in float16. It runs
          twice per clip, so float32 costs little time where bfloat16 is not available.
        - VAE: float32, as in diffusers. In bfloat16 smooth surfaces show bands, and float16 leaves little range for
          its activations.
        """
        usual = _usual_precision(program)
        if usual == "bfloat16" and machine.gpus[_gpu_index(machine, device)].capability < constraints.BF16_CAPABILITY:
            return "float32"
        return usual

    def options(self, machine: Machine, device: str) -> tuple[tuple[str, str], ...]:
        """See `Builder`. Sessions read cuda_graphs."""
        workspace = _workspace_bytes(machine, device) // _MIB
        return (
            ("cuda_graphs", "on"),
            ("optimization_level", str(_OPTIMIZATION_LEVEL)),
            ("workspace_mib", str(workspace)),
        )

    def packages(self, device: str) -> tuple[str, ...]:
        """See `Builder`."""
        return (*PACKAGES, "torch")

    def needs(self, spec: ModelSpec, program: str, profile: ShapeProfile) -> BuildNeeds:
        """See `Builder`."""
        weights = weights_bytes(spec, program, _usual_precision(program))
        # RAM: the exported weights, the parser's and builder's copies, and the plan. Disk: the ONNX file and the plan.
        # GPU: the module, the builder's copy and the engine; kernels are measured at the largest size.
        return BuildNeeds(
            ram_bytes=_BASE_RAM + 3 * weights,
            disk_bytes=2 * weights,
            vram_bytes=3 * weights + 2 * _activation_bytes(spec, program, profile),
        )


def installed_version() -> str | None:
    """Return the version of the installed TensorRT, without importing it."""
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def enclosing(profiles: Sequence[ShapeProfile]) -> ShapeProfile:
    """Return one profile that serves all sizes of the given ones; its optimal size is the first one's."""
    low, high = profiles[0].min, profiles[0].max
    for profile in profiles[1:]:
        low = (min(low[0], profile.min[0]), min(low[1], profile.min[1]), min(low[2], profile.min[2]))
        high = (max(high[0], profile.max[0]), max(high[1], profile.max[1]), max(high[2], profile.max[2]))
    return ShapeProfile(low, profiles[0].opt, high)


def shapes(program: "Program", profile: ShapeProfile) -> Shapes:
    """Return the shapes of a program's inputs at a profile's sizes. Allocates and computes nothing."""

    def at(latent: LatentSize) -> dict[str, Shape]:
        with without_computing(real_weights=True):
            return {name: tuple(tensor.shape) for name, tensor in program.inputs(latent).items()}

    return at(profile.min), at(profile.opt), at(profile.max)


def gpu_of(program: "Program") -> "torch.device":
    """Return the GPU to build on: the one that holds the weights, else the first."""
    import torch

    return torch.device("cuda", program.device.index or 0)


def _usual_precision(program: str) -> str:
    if program == "transformer":
        return "float16"
    installed = installed_version()
    has_bfloat16 = installed is not None and int(installed.partition(".")[0]) >= _FIRST_WITH_BFLOAT16
    return "bfloat16" if program == "text_encoder" and has_bfloat16 else "float32"


def _activation_bytes(spec: ModelSpec, program: str, profile: ShapeProfile) -> int:
    frames, height, width = profile.max
    if program == "transformer":
        tokens = prod(size // patch for size, patch in zip(profile.max, spec.transformer.patch_size, strict=True))
        return denoise_bytes(spec, tokens, _usual_precision(program))
    if program == "text_encoder":
        return 0
    scale = spec.vae.scale_factor_spatial
    return spec.vae.decode_bytes(frames, height * scale, width * scale, DTYPE_BYTES[_usual_precision(program)])


def _gpu_index(machine: Machine, device: str) -> int:
    index = gpu_index(device)
    if not device.startswith("cuda") or index >= len(machine.gpus):
        raise EngineError("engine.tensorrt_needs_gpu", device=device)
    return index


def _workspace_bytes(machine: Machine, device: str) -> int:
    return min(machine.gpus[_gpu_index(machine, device)].total_bytes // _WORKSPACE_SHARE, _LARGEST_WORKSPACE)


def timing_cache_path(engine: Path, device: str, version: str) -> Path:
    """Return the timing cache of a GPU and TensorRT version.

    Args:
        engine: the engine's folder in the store, or in a workspace of the store.
    """
    store = engine.parent.parent if engine.parent.name.startswith(_WORKSPACE_PREFIX) else engine.parent
    digest = hashlib.sha256(f"{device}\n{version}".encode()).hexdigest()[:16]
    return store / f".timing-{digest}"


def read_timing_cache(path: Path) -> bytes:
    """Return a timing cache; empty if it is missing or damaged."""
    try:
        if path.stat().st_size > _MAX_CACHE_BYTES:
            return b""
        data = path.read_bytes()
    except OSError:
        return b""
    cache = data[_HASH_BYTES:]
    return cache if hashlib.sha256(cache).digest() == data[:_HASH_BYTES] else b""


def write_timing_cache(path: Path, cache: bytes) -> None:
    """Replace a timing cache. Errors are ignored: the next build only takes longer."""
    new = path.with_name(f"{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        try:
            new.write_bytes(hashlib.sha256(cache).digest() + cache)
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
