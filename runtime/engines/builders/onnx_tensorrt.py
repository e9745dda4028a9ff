"""Builds TensorRT plans from the exported ONNX file with TensorRT's ONNX parser and builder.

The weights are part of the plan and of the key. TensorRT can replace them later (refit), but only by the names that
its parser gave to the file's constants, and the exporter folds weights into other constants: nothing would check whose
weights an engine holds.
"""

import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.engines.builders.base import output_reporter
from runtime.engines.builders.tensorrt_common import (
    Shapes,
    TensorRTBuilder,
    enclosing,
    gpu_of,
    read_timing_cache,
    shapes,
    timing_cache_path,
    write_timing_cache,
)
from runtime.engines.child import Report
from runtime.planner.engine_index import EngineKey

if TYPE_CHECKING:
    from runtime.engines.programs import Program
    from runtime.engines.tensorrt_library import Messages, ReportLine

_SMALLEST_STEP = 0.005


@dataclass(frozen=True)
class OnnxTensorRT(TensorRTBuilder):
    """See `Builder`.

    Attributes:
        prepare: rewrites the exported file before it is parsed, for a TensorRT that lacks some of its operators.
    """

    name = "onnx_tensorrt"
    prepare: Callable[[Path], None] | None = None

    def build(self, program: "Program", key: EngineKey, folder: Path, report: Report) -> None:
        """Write `folder/engine.plan`.

        Raises:
            EngineError: if TensorRT cannot build it.
            torch.OutOfMemoryError: if the GPU's memory is too small.
        """
        import torch

        from runtime.engines import tensorrt_library
        from runtime.engines.onnx_export import export_onnx

        trt = tensorrt_library.load()
        sizes = [shapes(program, profile) for profile in key.profiles]
        with tempfile.TemporaryDirectory() as scratch:
            model = Path(scratch) / "model.onnx"
            report(Fact("engine.exporting_onnx"), None)
            export_onnx(program, enclosing(key.profiles), model)
            if self.prepare is not None:
                self.prepare(model)
            report(Fact("engine.building_tensorrt"), 0.0)
            report_line = output_reporter(report)
            with torch.cuda.device(gpu_of(program)), tensorrt_library.listen(report_line) as messages:
                _write_plan(trt, model, sizes, key, folder / self.file_name, messages, report_line)


def _write_plan(
    trt: Any,
    model: Path,
    sizes: Sequence[Shapes],
    key: EngineKey,
    plan: Path,
    messages: "Messages",
    report: "ReportLine",
) -> None:
    from runtime.engines import tensorrt_library

    options = dict(key.options)
    builder = trt.Builder(tensorrt_library.logger())
    network = _create_network(trt, builder)
    # The parser owns the weights: it must live until the plan is built.
    parser = trt.OnnxParser(network, tensorrt_library.logger())
    if not parser.parse_from_file(str(model)):
        reasons = "; ".join(parser.get_error(index).desc() for index in range(parser.num_errors))
        raise EngineError(
            "engine.tensorrt_parse_failed", version=trt.__version__, detail=tensorrt_library.one_line(reasons)
        )
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, int(options["workspace_mib"]) << 20)
    config.builder_optimization_level = int(options["optimization_level"])
    _set_precision(trt, config, key.precision)
    _add_profiles(builder, config, network, sizes, messages)
    # TensorRT does not keep a reference to the monitor.
    monitor = progress_monitor(trt, report)
    if monitor is not None:
        config.progress_monitor = monitor
    cache_file = timing_cache_path(plan.parent, key.device, trt.__version__)
    cache = config.create_timing_cache(read_timing_cache(cache_file))
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, ignore_mismatch=False)
    built = builder.build_serialized_network(network, config)
    if built is None:
        raise messages.failure("engine.tensorrt_build_failed")
    with plan.open("wb") as file:
        file.write(built)
    write_timing_cache(cache_file, bytes(memoryview(config.get_timing_cache().serialize())))


def _is_strongly_typed(trt: Any) -> bool:
    """Whether networks can keep to the model's dtypes: TensorRT 8.6 cannot, 10 can, 11 always does."""
    return hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")


def _create_network(trt: Any, builder: Any) -> Any:
    """Return an empty network, strongly typed where TensorRT supports it."""
    if _is_strongly_typed(trt):
        return builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    return builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH))


def _set_precision(trt: Any, config: Any, precision: str) -> None:
    """Restrict the builder to a precision.

    Raises:
        EngineError: if this TensorRT version does not support it.
    """
    # By default TensorRT rounds float32 factors to 10 bits.
    config.clear_flag(trt.BuilderFlag.TF32)
    if _is_strongly_typed(trt) or precision == "float32":
        return
    if precision == "bfloat16":
        raise EngineError("engine.tensorrt_without_bfloat16", version=trt.__version__)
    # TensorRT chooses the layers that run in float16. If even one must stay in float32, 8.6 runs the whole transformer
    # in float32 (measured). Overflows are found when the engine is compared with PyTorch.
    config.set_flag(trt.BuilderFlag.FP16)


def _add_profiles(builder: Any, config: Any, network: Any, sizes: Sequence[Shapes], messages: "Messages") -> None:
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    if all(min(tensor.shape, default=0) >= 0 for tensor in inputs):
        return
    for low, best, high in sizes:
        profile = builder.create_optimization_profile()
        for tensor in inputs:
            profile.set_shape(tensor.name, low[tensor.name], best[tensor.name], high[tensor.name])
        if config.add_optimization_profile(profile) < 0:
            raise messages.failure("engine.tensorrt_profile_refused")


@dataclass
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


class BuildPhases:
    """Combines the nested phases of TensorRT's builder into one increasing fraction. Thread-safe."""

    def __init__(self, report: "ReportLine") -> None:
        self._report = report
        self._running: dict[str, _Phase] = {}
        self._reported = 0.0
        self._lock = threading.Lock()

    def start(self, name: str, parent: str | None, steps: int) -> None:
        """Start a phase within its parent."""
        with self._lock:
            self._running[name] = _Phase(parent, max(steps, 1))
            fraction = self._reported
        self._report(name, fraction)

    def step(self, name: str, step: int) -> None:
        """Complete a step, counted from 0."""
        with self._lock:
            phase = self._running.get(name)
            if phase is None:
                return
            phase.done = step + 1
            roots = [root for root, phase in self._running.items() if phase.parent is None]
            fraction = max((self._fraction(root) for root in roots), default=0)
            if fraction < self._reported + _SMALLEST_STEP:
                return
            self._reported = fraction
        self._report(name, fraction)

    def finish(self, name: str) -> None:
        """End a phase, which may be before its last step."""
        with self._lock:
            self._running.pop(name, None)

    def _fraction(self, name: str) -> float:
        phase = self._running[name]
        children = [child for child, other in self._running.items() if other.parent == name]
        inner = max((self._fraction(child) for child in children), default=0.0)
        return min((phase.done + inner) / phase.steps, 1.0)


def progress_monitor(trt: Any, report: "ReportLine") -> Any | None:
    """Return a `tensorrt.IProgressMonitor` that reports, or None if TensorRT has none (8.6)."""
    if not hasattr(trt, "IProgressMonitor"):
        return None
    phases = BuildPhases(report)

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc] # the base class is known at run time only
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            phases.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            phases.step(phase_name, step)
            return True

        def phase_finish(self, phase_name: str) -> None:
            phases.finish(phase_name)

    return Monitor()
