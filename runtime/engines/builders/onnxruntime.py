"""Builds engines for ONNX Runtime: the exported ONNX file. The execution provider is part of the key."""

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from runtime.core.facts import Fact
from runtime.core.request import UPSCALER
from runtime.engines.builders import Builder, BuildNeeds, weights_bytes
from runtime.engines.child import Report
from runtime.engines.key_parts import BLOCK_TOKENS, TOKENS_OPTION, versions_of
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_index import EngineKey, ShapeProfile

if TYPE_CHECKING:
    from runtime.engines.component_programs import Program

_GIB = 1 << 30
_MIB = 1 << 20
_BASE_RAM = 2 * _GIB
# ONNX Runtime has one package name per provider; only one of them may be installed.
PACKAGES = ("onnxruntime-openvino", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime")


@dataclass(frozen=True)
class OnnxRuntimeBuilder(Builder):
    """Builds ONNX files for an execution provider.

    Args:
        provider: "cpu", "openvino", "cuda", "tensorrt", "coreml" or "directml"; by default the best one of the
            installed package for the device.
    """

    provider: str | None = None
    name: ClassVar[str] = "onnxruntime"
    backend: ClassVar[str] = "onnxruntime"
    file_name: ClassVar[str] = "engine.onnx"

    def default_precision(self, spec: ModelSpec, program: str, machine: Machine, device: str) -> str:
        """Return the fastest precision in which a program keeps its quality.

        On a CPU only the VAE (59 dB) and the upscaler (63 dB) run in bfloat16, which needs OpenVINO. It would also
        round the places that the interpolator reads (50 dB).
        """
        if device == "cpu":
            fast = self._provider(device) == "openvino" and machine.cpu_has_bfloat16
            return "bfloat16" if program.startswith(("vae", UPSCALER)) and fast else "float32"
        return "float16" if program == "transformer" else "float32"

    def options(self, machine: Machine, device: str) -> tuple[tuple[str, str], ...]:
        return (("provider", self._provider(device)),)

    def packages(self, device: str) -> tuple[str, ...]:
        return ("torch", "onnxscript", *PACKAGES)

    def needs(self, spec: ModelSpec, program: str, profile: ShapeProfile) -> BuildNeeds:
        weights = weights_bytes(spec, program, "float32")
        # RAM: the module, the exporter's copy, and the file while it is written.
        return BuildNeeds(ram_bytes=_BASE_RAM + 3 * weights, disk_bytes=2 * weights)

    def build(self, program: "Program", key: EngineKey, folder: Path, report: Report) -> None:
        """Write `folder/engine.onnx`, and `folder/engine.onnx.data` where the weights are large.

        Raises:
            torch.onnx.errors.OnnxExporterError: if torch has no translation for an operator.
        """
        from runtime.engines.onnx_export import export_onnx

        (profile,) = key.profiles
        report(Fact("engine.exporting_onnx"), 0.0)
        if key.precision == "bfloat16":
            # Providers that compute in bfloat16 take a float32 graph and round internally.
            program.module.float()
        export_onnx(program, profile, folder / self.file_name, cut=program.device.type == "cpu")

    def _provider(self, device: str) -> str:
        if self.provider is not None:
            return self.provider
        if device != "cpu":
            return "cuda"
        installed = dict(versions_of(*PACKAGES))
        on_x86 = platform.machine().lower() in {"x86_64", "amd64"}
        return "openvino" if "onnxruntime-openvino" in installed and on_x86 else "cpu"


@dataclass(frozen=True)
class OnnxRuntimeBlocks(OnnxRuntimeBuilder):
    """Builds the ONNX files of block engines, for the providers of ONNX Runtime itself.

    Args:
        tokens: the most tokens in one call.
    """

    tokens: int = BLOCK_TOKENS
    name: ClassVar[str] = "onnxruntime_blocks"
    kind: ClassVar[str] = "blocks"

    def default_precision(self, spec: ModelSpec, program: str, machine: Machine, device: str) -> str:
        return "float32" if device == "cpu" else "float16"

    def options(self, machine: Machine, device: str) -> tuple[tuple[str, str], ...]:
        return (*super().options(machine, device), (TOKENS_OPTION, str(self.tokens)))

    def needs(self, spec: ModelSpec, program: str, profile: ShapeProfile) -> BuildNeeds:
        return BuildNeeds(ram_bytes=_BASE_RAM, disk_bytes=_MIB)

    def _provider(self, device: str) -> str:
        # OpenVINO prepares weights when a file is loaded, and is slow with weights that are inputs.
        return "cpu" if device == "cpu" else super()._provider(device)
