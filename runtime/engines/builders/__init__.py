"""What makes engines: one `Builder` each. They are imported when asked for, so that listing them loads no library."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec
from runtime.planner.engine_index import EngineKey
from runtime.planner.shapes import ShapeProfile

if TYPE_CHECKING:
    from runtime.engines.programs import Program

Report = Callable[[str, float | None], None]


@dataclass(frozen=True)
class BuildNeeds:
    """What a build takes at its peak, in bytes, estimated from above."""

    ram_bytes: int
    disk_bytes: int
    vram_bytes: int = 0


class Builder(Protocol):
    """Turns a program into an engine."""

    @property
    def name(self) -> str:
        """As `EngineKey.builder` has it."""
        ...

    @property
    def backend(self) -> str:
        """What runs its engines: "tensorrt", "inductor" or "onnxruntime"."""
        ...

    @property
    def file_name(self) -> str:
        """The engine file: "engine.plan", "engine.pt2" or "engine.onnx"."""
        ...

    def unavailable(self, machine: Machine) -> tuple[str, str] | None:
        """Return why it cannot build here and what would help, or `None` if it can. Imports nothing heavy."""
        ...

    def default_precision(self, program: str, machine: Machine, device: str) -> str:
        """Return the precision in which a program is built unless asked otherwise."""
        ...

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
        notes: Path | None = None,
    ) -> EngineKey:
        """Return the identity of the engine that `build` would make here. Imports no torch.

        Args:
            component: whose weights.
            profiles: the latent sizes it is to serve.
            device: "cpu" or "cuda:0".
            notes: see `identity.program_key_parts`.

        Raises:
            ModelError: if the weights cannot be read.
            EngineError: if there is no such device.
        """
        ...

    def needs(self, spec: ModelSpec, program: str, profile: ShapeProfile) -> BuildNeeds:
        """Estimate what building takes."""
        ...

    def build(self, program: "Program", key: EngineKey, folder: Path, report: Report) -> None:
        """Write `folder / file_name`, and the data files that belong to it beside it.

        Args:
            program: loaded in the key's precision; it is used up.
            report: called with a line for people and the share done, where that is known.

        Raises:
            EngineError: if it cannot be built.
        """
        ...


class _Builders(Mapping[str, Builder]):
    """Builders by name, in the order of preference."""

    _CLASSES: Mapping[str, str] = {
        "onnx_tensorrt": "OnnxTensorRT",
        "torch_tensorrt": "TorchTensorRT",
        "inductor": "InductorBuilder",
        "onnxruntime": "OnnxRuntimeBuilder",
    }

    def __getitem__(self, name: str) -> Builder:
        module = importlib.import_module(f"{__name__}.{name}") if name in self._CLASSES else None
        return cast("Builder", getattr(module, self._CLASSES[name])())

    def __iter__(self) -> Iterator[str]:
        return iter(self._CLASSES)

    def __len__(self) -> int:
        return len(self._CLASSES)


BUILDERS: Mapping[str, Builder] = _Builders()
_BACKENDS = {
    "tensorrt": ("onnx_tensorrt", "torch_tensorrt"),
    "inductor": ("inductor",),
    "onnxruntime": ("onnxruntime",),
}


def builders_of(backend: str) -> tuple[Builder, ...]:
    """Return the builders whose engines a backend runs, the preferred one first."""
    return tuple(BUILDERS[name] for name in _BACKENDS[backend])
