"""What every builder shares: the identity of what it makes, and how large a program's weights are."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from runtime.engines.identity import EXPORT_REVISION, device_text, program_key_parts, versions_of
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec
from runtime.planner.constraints import lacking
from runtime.planner.engine_index import SWAPPED, EngineKey
from runtime.planner.memory_model import DTYPE_BYTES
from runtime.planner.shapes import ShapeProfile


class KeyedBuilder(ABC):
    """`Builder.key` and `Builder.unavailable`, from what a builder says of itself."""

    name: ClassVar[str]
    backend: ClassVar[str]
    # What it needs of the machine, in `compat.NEEDS`, if not what its backend does.
    needed: ClassVar[str] = ""

    def unavailable(self, machine: Machine) -> tuple[str, str] | None:
        """See `Builder`."""
        found = lacking(self.needed or self.backend, machine)
        return None if found is None else (found.reason, found.remedy)

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
        """See `Builder`."""
        architecture, weights = program_key_parts(spec, component, program, notes)
        where = device_text(machine, device)
        return EngineKey(
            program=program,
            family=spec.family,
            architecture=architecture,
            weights=weights if self.keeps_weights(program, profiles, device) else SWAPPED,
            export_revision=EXPORT_REVISION,
            profiles=profiles,
            precision=precision,
            backend=self.backend,
            builder=self.name,
            options=self.options(machine, device),
            versions=versions_of(*self.packages(device)),
            device=where,
            system=machine.system,
        )

    def keeps_weights(self, program: str, profiles: tuple[ShapeProfile, ...], device: str) -> bool:
        """Whether the engine holds its weights; they are handed over as it is loaded if not."""
        return True

    def options(self, machine: Machine, device: str) -> tuple[tuple[str, str], ...]:
        """Return `EngineKey.options`."""
        return ()

    @abstractmethod
    def packages(self, device: str) -> tuple[str, ...]:
        """Return the libraries whose versions make a difference."""


def weights_bytes(spec: ModelSpec, program: str, precision: str) -> int:
    """Return the bytes of a program's weights; each of the VAE's two steps holds all of the VAE's."""
    component = "vae" if program.startswith("vae") else program
    return DTYPE_BYTES[precision] * spec.parameters[component]
