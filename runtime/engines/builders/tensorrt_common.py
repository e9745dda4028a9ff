"""What both builders of TensorRT plans share: when they can work, keys, what they ask of the machine, shapes."""

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from math import prod
from typing import TYPE_CHECKING, ClassVar

from runtime.core.errors import EngineError
from runtime.engines.builders import BuildNeeds
from runtime.engines.builders.base import KeyedBuilder, weights_bytes
from runtime.machine.probe import Machine, gpu_index
from runtime.models.spec import ModelSpec
from runtime.planner import constraints
from runtime.planner.memory_model import DTYPE_BYTES, denoise_bytes
from runtime.planner.shapes import LatentSize, ShapeProfile

if TYPE_CHECKING:
    import torch

    from runtime.engines.programs import Program

Shape = tuple[int, ...]
# The shapes of all inputs by name, at a profile's smallest, best and largest size.
Shapes = tuple[Mapping[str, Shape], Mapping[str, Shape], Mapping[str, Shape]]

# One release has several names: "tensorrt" asks for the one that fits CUDA.
PACKAGES = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12")
_FIRST_WITH_BFLOAT16 = 10
_GIB = 1 << 30
_MIB = 1 << 20
# Of the GPU's memory: a kernel that wants more for itself leaves too little for the rest of the job.
_WORKSPACE_SHARE = 4
_LARGEST_WORKSPACE = 16 * _GIB
# TensorRT's own default: beyond, building takes much longer for little.
_OPTIMIZATION_LEVEL = 3
# TensorRT's libraries and torch, before any weight is loaded.
_BASE_RAM = 4 * _GIB


class TensorRTBuilder(KeyedBuilder):
    """What `Builder` asks for beside `build`."""

    name: ClassVar[str]
    backend: ClassVar[str] = "tensorrt"
    file_name: ClassVar[str] = "engine.plan"

    def default_precision(self, program: str, machine: Machine, device: str) -> str:
        """Return the fastest precision in which a program keeps its quality.

        - transformer: float16. Its sums and norms stay in float32 (see `forms`), its activations are far below
          float16's limit, and float16's eleven bits lie nearer to the weights than bfloat16's eight.
        - text_encoder: bfloat16, which UMT5 was trained in; in float16 its feed-forward layers overflow. It runs
          twice a clip, so float32 where bfloat16 is missing costs little time.
        - VAE: float32. Its frames are what is seen: in bfloat16 smooth surfaces show bands, and float16 leaves its
          activations little room. diffusers, too, runs it in float32.
        """
        usual = _usual_precision(program)
        if usual == "bfloat16" and machine.gpus[_gpu_index(machine, device)].capability < constraints.BF16_CAPABILITY:
            return "float32"
        return usual

    def options(self, machine: Machine, device: str) -> tuple[tuple[str, str], ...]:
        """Return what `EngineKey.options` says unless somebody asks otherwise; a session looks at cuda_graphs."""
        workspace = _workspace_bytes(machine, device) // _MIB
        return (
            ("cuda_graphs", "on"),
            ("optimization_level", str(_OPTIMIZATION_LEVEL)),
            ("workspace_mib", str(workspace)),
        )

    def packages(self, device: str) -> tuple[str, ...]:
        """See `KeyedBuilder`."""
        return (*PACKAGES, "torch")

    def needs(self, spec: ModelSpec, program: str, profile: ShapeProfile) -> BuildNeeds:
        """See `Builder`."""
        weights = weights_bytes(spec, program, _usual_precision(program))
        # RAM: the exported weights, the parser's and builder's copies, the plan. Disk: the exported file and the plan.
        # The GPU: the module, the builder's copy and the engine; kernels are measured on the largest size.
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
    """Return one profile that serves all that the given ones do; its best size is the first's."""
    low, high = profiles[0].min, profiles[0].max
    for profile in profiles[1:]:
        low = (min(low[0], profile.min[0]), min(low[1], profile.min[1]), min(low[2], profile.min[2]))
        high = (max(high[0], profile.max[0]), max(high[1], profile.max[1]), max(high[2], profile.max[2]))
    return ShapeProfile(low, profiles[0].opt, high)


def shapes(program: "Program", profile: ShapeProfile) -> Shapes:
    """Return the shapes of a program's inputs at a profile's sizes. Allocates and computes nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def at(latent: LatentSize) -> dict[str, Shape]:
        with FakeTensorMode(allow_non_fake_inputs=True):
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
        raise EngineError(f"TensorRT needs an NVIDIA GPU, and {device} is none.", constraints.OTHER_BACKEND)
    return index


def _workspace_bytes(machine: Machine, device: str) -> int:
    return min(machine.gpus[_gpu_index(machine, device)].total_bytes // _WORKSPACE_SHARE, _LARGEST_WORKSPACE)
