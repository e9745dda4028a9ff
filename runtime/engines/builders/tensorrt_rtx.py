"""Builds plans with TensorRT for RTX: for GeForce and RTX GPUs, from the exported ONNX file.

TensorRT for RTX builds without measuring kernels, in seconds and without using a GPU. Its runtime compiles the kernels
for the GPU when the engine is first loaded, and keeps them in a runtime cache (`sessions.tensorrt_rtx`).

Plans could serve several kinds of GPUs. They are built for the compute capability of one, which makes them smaller and
is the only way for Turing; the key contains it, and the GPU. On Turing, TensorRT for RTX has no float32 matrix products
or convolutions and no bfloat16, so it builds block engines only.
"""

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.core.plan import is_block_program
from runtime.core.request import SOUND_DECODERS
from runtime.engines.builders import Builder, BuildNeeds, output_reporter, weights_bytes
from runtime.engines.builders.tensorrt import (
    activation_bytes,
    add_profiles,
    enclosing,
    gpu_of_machine,
    prepare_build,
    progress_monitor,
    serialize,
)
from runtime.engines.child import Report
from runtime.engines.key_parts import BLOCK_TOKENS, TOKENS_OPTION
from runtime.machine.probe import Machine
from runtime.models.quantization import FP8
from runtime.models.spec import IMAGE_ENCODER, ModelSpec
from runtime.planner.choice.engine_index import EngineKey, ShapeProfile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.engines.component_programs import Program
    from runtime.engines.signatures import Shapes
    from runtime.engines.tensorrt_library import Messages, ReportLine

LIBRARY = "tensorrt_rtx"
PACKAGES = ("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu13-libs")
# The entry of `EngineKey.options` for the compute capability that an engine is built for, such as "89".
CAPABILITY_OPTION = "compute_capability"
_GIB = 1 << 30
_MIB = 1 << 20
# The libraries and torch, before weights are loaded. At A14B's width a build of block engines takes 1.7 GiB (measured).
_BASE_RAM = 4 * _GIB
# The tensors of a call with all tokens, and the engine's working memory, at a width of 5120.
_BLOCK_VRAM = 3 * _GIB


class TensorRTRTX(Builder):
    """Builds whole components."""

    name: ClassVar[str] = "tensorrt_rtx"
    backend: ClassVar[str] = "tensorrt_rtx"
    file_name: ClassVar[str] = "engine.plan"
    requires: ClassVar[str] = "tensorrt_rtx_components"

    def default_precision(self, spec: ModelSpec, program: str, machine: Machine, device: str) -> str:
        """Return the fastest precision in which a program keeps its quality; the reasons are those of `tensorrt`.

        GPUs without bfloat16 have block engines only.
        """
        return _usual_precision(program)

    def options(self, machine: Machine, device: str) -> tuple[tuple[str, str], ...]:
        major, minor = gpu_of_machine(machine, device).capability
        return (CAPABILITY_OPTION, f"{major}{minor}"), ("cuda_graphs", "on")

    def packages(self, device: str) -> tuple[str, ...]:
        return (*PACKAGES, "onnxscript", "torch")

    def needs(self, spec: ModelSpec, program: str, profile: ShapeProfile) -> BuildNeeds:
        precision = _usual_precision(program)
        weights = weights_bytes(spec, program, precision)
        # RAM: the parser's and the builder's copies of the weights; the plan is written piece by piece. Disk: the ONNX
        # file and the plan. GPU: the module and, while they are compared, the engine.
        return BuildNeeds(
            ram_bytes=_BASE_RAM + 2 * weights,
            disk_bytes=2 * weights,
            vram_bytes=2 * weights + 2 * activation_bytes(spec, program, profile, precision),
        )

    def build(self, program: "Program", key: EngineKey, folder: Path, report: Report) -> None:
        """Write `folder/engine.plan`. The layers of the engine go to standard error, and so into the build's log.

        Raises:
            EngineError: if TensorRT for RTX is not installed, or cannot build it.
        """
        from runtime.engines import tensorrt_library
        from runtime.engines.onnx_export import export_onnx

        trt = tensorrt_library.load(LIBRARY, needs_gpu=False)
        sizes = [program.shapes(profile) for profile in key.profiles]
        with tempfile.TemporaryDirectory() as scratch:
            model = Path(scratch) / "model.onnx"
            report(Fact("engine.exporting_onnx"), None)
            export_onnx(program, enclosing(key.profiles), model)
            report(Fact("engine.building_with", {"compiler": "TensorRT for RTX"}), 0.0)
            report_line = output_reporter(report)
            with tensorrt_library.listen(report_line) as messages:
                write_plan(trt, model, sizes, key, folder / self.file_name, messages, report_line)
                sys.stderr.writelines(f"{layer}\n" for layer in messages.layers)


class TensorRTRTXBlocks(TensorRTRTX):
    """Builds block engines."""

    name: ClassVar[str] = "tensorrt_rtx_blocks"
    kind: ClassVar[str] = "blocks"
    requires: ClassVar[str] = ""

    def options(self, machine: Machine, device: str) -> tuple[tuple[str, str], ...]:
        return (*super().options(machine, device), (TOKENS_OPTION, str(BLOCK_TOKENS)))

    def needs(self, spec: ModelSpec, program: str, profile: ShapeProfile) -> BuildNeeds:
        return BuildNeeds(ram_bytes=_BASE_RAM, disk_bytes=4 * _MIB, vram_bytes=_BLOCK_VRAM)


class TensorRTRTXFp8Blocks(TensorRTRTXBlocks):
    """Builds block engines with FP8 matrices, see `engines.fp8`; they run on no GPU so far."""

    name: ClassVar[str] = "tensorrt_rtx_blocks_fp8"
    requires: ClassVar[str] = "tensorrt_rtx_fp8"

    def default_precision(self, spec: ModelSpec, program: str, machine: Machine, device: str) -> str:
        return FP8


def write_plan(
    trt: Any,
    model: Path,
    sizes: "Sequence[Shapes]",
    key: EngineKey,
    plan: Path,
    messages: "Messages",
    report: "ReportLine",
) -> None:
    """Build a plan from an ONNX file.

    Args:
        sizes: of the inputs, for each of the key's profiles.

    Raises:
        EngineError: if TensorRT for RTX does not support the file or the compute capability.
    """
    from runtime.engines import tensorrt_library

    builder, network, _parser, config = prepare_build(trt, tensorrt_library.logger(LIBRARY), model)
    # By default TensorRT rounds float32 factors to 10 bits.
    config.clear_flag(trt.BuilderFlag.TF32)
    _set_capability(trt, config, dict(key.options)[CAPABILITY_OPTION])
    add_profiles(builder, config, network, sizes, messages)
    # TensorRT does not keep a reference to the monitor.
    monitor = progress_monitor(trt, report)
    config.progress_monitor = monitor
    serialize(trt, builder, network, config, plan, messages)


def _set_capability(trt: Any, config: Any, capability: str) -> None:
    """Build for one compute capability; for one newer than the library, build for all that it supports."""
    target = getattr(trt.ComputeCapability, f"SM{capability}", None)
    if target is None:
        return
    config.num_compute_capabilities = 1
    if not config.set_compute_capability(target, 0):
        raise EngineError("engine.rtx_capability_refused", capability=capability)


def _usual_precision(program: str) -> str:
    if program in {IMAGE_ENCODER, *SOUND_DECODERS}:
        return "float32"
    return "float16" if program == "transformer" or is_block_program(program) else "bfloat16"
