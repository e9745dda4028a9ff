"""The interface of engine builders, and the table of builders, whose modules are imported on first use."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple, cast

from runtime.core.facts import Fact
from runtime.core.plan import is_block_program
from runtime.core.request import INTERPOLATOR, SOUND_DECODERS
from runtime.engines.child import Report
from runtime.engines.key_parts import (
    architecture_digest,
    device_text,
    export_revision,
    versions_of,
    weights_digest,
)
from runtime.machine.probe import Machine
from runtime.models.spec import IMAGE_ENCODER, VAE_ENCODER, ModelSpec, component_of, is_transformer
from runtime.planner.choice.engine_index import SWAPPED, EngineKey, ShapeProfile
from runtime.planner.constraints import lacking
from runtime.planner.memory_model import DTYPE_BYTES

if TYPE_CHECKING:
    from runtime.engines.component_programs import Program


@dataclass(frozen=True)
class BuildNeeds:
    """Upper estimates of what a build takes at its peak, in bytes."""

    ram_bytes: int
    disk_bytes: int
    vram_bytes: int = 0


class Builder(ABC):
    """Turns a program into an engine.

    Attributes:
        name: the value of `EngineKey.builder`.
        backend: what runs its engines: a module of `engines.sessions`.
        file_name: of the engine: "engine.plan", "engine.pt2" or "engine.onnx".
        kind: "component" if its engines replace components, "blocks" if they compute parts of a transformer's blocks.
        requires: the entry of `constraints.NEEDS` that it needs, if that is not its backend's.
    """

    name: ClassVar[str]
    backend: ClassVar[str]
    file_name: ClassVar[str]
    kind: ClassVar[str] = "component"
    requires: ClassVar[str] = ""

    def unavailable(self, machine: Machine) -> Fact | None:
        """Return why it cannot build on a machine and what to do about it, or None. Imports nothing heavy."""
        error = lacking(self.requires or self.backend, machine)
        return None if error is None else error.fact

    def programs(self, spec: ModelSpec, component: str) -> tuple[str, ...]:
        """Return the programs that it builds for a component, in the order of use; empty if it builds none."""
        if self.kind == "component":
            return spec.programs[component]
        return spec.block_programs if is_transformer(component) else ()

    def on_request(self, component: str, device: str) -> bool:
        """Return whether its engines are likely slower than PyTorch, and so built only if their backend is requested.

        Measured: on a CPU block engines, and the interpolator's (`docs/interpolate.md`); on a GPU engines of the VAE,
        with every backend (`bench/h200.md`). Images are encoded once per video, and PyTorch encodes only the frames
        that differ. Decoders of sound were measured on a CPU only (`docs/engines.md`).
        """
        if component == INTERPOLATOR:
            return device == "cpu"
        if component in {IMAGE_ENCODER, VAE_ENCODER, *SOUND_DECODERS}:
            return True
        return component == "vae" if device != "cpu" else self.kind == "blocks"

    def key(
        self,
        spec: ModelSpec,
        component: str,
        program: str,
        profiles: tuple[ShapeProfile, ...],
        *,
        precision: str,
        machine: Machine,
        device: str,
        cache_dir: Path | None = None,
    ) -> EngineKey:
        """Return the key of the engine that `build` creates on this machine. Imports no torch.

        Args:
            component: whose weights.
            profiles: the latent sizes that the engine serves.
            device: "cpu" or "cuda:0".
            cache_dir: see `key_parts.weights_digest`.

        Raises:
            ModelError: if the weights cannot be read.
            EngineError: if the device does not exist.
        """
        keeps_weights = self.keeps_weights(program, profiles, device)
        return EngineKey(
            program=program,
            family=spec.family,
            architecture=architecture_digest(spec, component, program),
            weights=weights_digest(spec, component, cache_dir) if keeps_weights else SWAPPED,
            export_revision=export_revision(spec.family),
            profiles=profiles,
            precision=precision,
            backend=self.backend,
            builder=self.name,
            options=self.options(machine, device),
            versions=versions_of(*self.packages(device)),
            device=device_text(machine, device),
            system=machine.system,
        )

    def keeps_weights(self, program: str, profiles: tuple[ShapeProfile, ...], device: str) -> bool:
        """Whether the engine contains its weights; otherwise they are supplied when it is loaded."""
        return not is_block_program(program)

    def options(self, machine: Machine, device: str) -> tuple[tuple[str, str], ...]:
        """Return `EngineKey.options`."""
        return ()

    @abstractmethod
    def packages(self, device: str) -> tuple[str, ...]:
        """Return the libraries whose versions are part of the key."""

    @abstractmethod
    def default_precision(self, spec: ModelSpec, program: str, machine: Machine, device: str) -> str:
        """Return the fastest precision in which a program keeps its quality.

        That of decoders of single frames is the same for all builders; see `frame_decoders.frame_engine`.
        """

    @abstractmethod
    def needs(self, spec: ModelSpec, program: str, profile: ShapeProfile) -> BuildNeeds:
        """Estimate what building takes."""

    @abstractmethod
    def build(self, program: "Program", key: EngineKey, folder: Path, report: Report) -> None:
        """Write `folder / file_name`, and the data files that belong to it.

        Args:
            program: loaded in the key's precision; it cannot be used afterwards.
            report: called with progress.

        Raises:
            EngineError: if the engine cannot be built.
            torch.OutOfMemoryError: if the GPU's memory is too small.
        """


class _Row(NamedTuple):
    """Where a builder's class is, and its rank among the builders for a device: the usually fastest engines are first.

    Measurements on this machine take precedence over ranks; 0 is a device that the builder does not support.
    """

    module: str
    class_name: str
    on_cpu: int
    on_cuda: int


_TABLE: Mapping[str, _Row] = {
    "onnx_tensorrt": _Row("tensorrt", "OnnxTensorRT", on_cpu=0, on_cuda=1),
    "torch_tensorrt": _Row("torch_tensorrt", "TorchTensorRT", on_cpu=0, on_cuda=2),
    "tensorrt_blocks": _Row("tensorrt", "TensorRTBlocks", on_cpu=0, on_cuda=3),
    "tensorrt_rtx": _Row("tensorrt_rtx", "TensorRTRTX", on_cpu=0, on_cuda=4),
    "tensorrt_rtx_blocks": _Row("tensorrt_rtx", "TensorRTRTXBlocks", on_cpu=0, on_cuda=5),
    "tensorrt_rtx_blocks_fp8": _Row("tensorrt_rtx", "TensorRTRTXFp8Blocks", on_cpu=0, on_cuda=6),
    "inductor": _Row("inductor", "InductorBuilder", on_cpu=2, on_cuda=7),
    "onnxruntime": _Row("onnxruntime", "OnnxRuntimeBuilder", on_cpu=1, on_cuda=8),
    "onnxruntime_blocks": _Row("onnxruntime", "OnnxRuntimeBlocks", on_cpu=3, on_cuda=9),
}


class _Builders(Mapping[str, Builder]):
    def __getitem__(self, name: str) -> Builder:
        row = _TABLE[name]
        module = importlib.import_module(f"{__name__}.{row.module}")
        return cast("Builder", getattr(module, row.class_name)())

    def __iter__(self) -> Iterator[str]:
        return iter(_TABLE)

    def __len__(self) -> int:
        return len(_TABLE)


BUILDERS: Mapping[str, Builder] = _Builders()


def builders_for(device: str) -> list[Builder]:
    """Return the builders that support a device ("cpu" or "cuda:0"), the preferred one first."""
    ranks = {name: row.on_cpu if device == "cpu" else row.on_cuda for name, row in _TABLE.items()}
    return [BUILDERS[name] for name in sorted(ranks, key=lambda name: ranks[name]) if ranks[name]]


def builders_of(backend: str) -> list[Builder]:
    """Return the builders whose engines a backend runs, the preferred one first."""
    return [builder for builder in BUILDERS.values() if builder.backend == backend]


def output_reporter(report: Report) -> Callable[[str, float | None], None]:
    """Return a function that reports lines of a library's own log."""
    return lambda line, fraction: report(Fact("engine.builder_output", {"line": line}), fraction)


def weights_bytes(spec: ModelSpec, program: str, precision: str) -> int:
    """Return the bytes of a program's weights; each program of a part of the VAE holds all of the part's weights."""
    return DTYPE_BYTES[precision] * spec.parameters[component_of(program)]
