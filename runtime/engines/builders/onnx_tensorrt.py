"""Builds TensorRT plans from the exported ONNX file: TensorRT's ONNX parser, then its builder.

The weights are part of the plan and of the key. TensorRT can exchange them afterwards (refit), but by the names that
its parser gave to the file's constants, and the exporter folds weights into constants of its own: whose weights an
engine holds would rest on names that nothing checks.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.core.errors import EngineError
from runtime.engines import timing_cache
from runtime.engines.builders import Report
from runtime.engines.builders.tensorrt_common import Shapes, TensorRTBuilder, enclosing, gpu_of, shapes
from runtime.planner.constraints import OTHER_BACKEND
from runtime.planner.engine_index import EngineKey

if TYPE_CHECKING:
    from runtime.engines.programs import Program
    from runtime.engines.tensorrt_library import Messages


@dataclass(frozen=True)
class OnnxTensorRT(TensorRTBuilder):
    """See `Builder`.

    Attributes:
        prepare: changes the exported file before it is parsed, for a TensorRT too old for its operators.
    """

    name = "onnx_tensorrt"
    prepare: Callable[[Path], None] | None = None

    def build(self, program: "Program", key: EngineKey, folder: Path, report: Report) -> None:
        """Write `folder/engine.plan`.

        Raises:
            EngineError: if TensorRT cannot build it.
            torch.OutOfMemoryError: if the GPU's memory does not suffice.
        """
        import torch

        from runtime.engines import tensorrt_library
        from runtime.engines.onnx_export import export_onnx

        trt = tensorrt_library.load()
        sizes = [shapes(program, profile) for profile in key.profiles]
        with tempfile.TemporaryDirectory() as scratch:
            model = Path(scratch) / "model.onnx"
            report("Exporting to ONNX", None)
            export_onnx(program, enclosing(key.profiles), model)
            if self.prepare is not None:
                self.prepare(model)
            report("Building with TensorRT", 0.0)
            with torch.cuda.device(gpu_of(program)), tensorrt_library.listen(report) as said:
                _write_plan(trt, model, sizes, key, folder / self.file_name, said, report)


def _write_plan(
    trt: Any, model: Path, sizes: Sequence[Shapes], key: EngineKey, plan: Path, said: "Messages", report: Report
) -> None:
    from runtime.engines import tensorrt_library, tensorrt_progress

    options = dict(key.options)
    builder = trt.Builder(tensorrt_library.logger())
    network = _create_network(trt, builder)
    # It holds the weights: it must live until the plan is built.
    parser = trt.OnnxParser(network, tensorrt_library.logger())
    if not parser.parse_from_file(str(model)):
        reasons = "; ".join(parser.get_error(index).desc() for index in range(parser.num_errors))
        raise EngineError(
            f"TensorRT {trt.__version__} cannot read the exported model: {tensorrt_library.one_line(reasons)}",
            OTHER_BACKEND,
        )
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, int(options["workspace_mib"]) << 20)
    config.builder_optimization_level = int(options["optimization_level"])
    _set_precision(trt, config, key.precision)
    _add_profiles(builder, config, network, sizes, said)
    # TensorRT does not keep these two alive by itself.
    monitor = tensorrt_progress.monitor(trt, report)
    if monitor is not None:
        config.progress_monitor = monitor
    cache_file = timing_cache.path_for(plan.parent, key.device, trt.__version__)
    cache = config.create_timing_cache(timing_cache.read(cache_file))
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, ignore_mismatch=False)
    built = builder.build_serialized_network(network, config)
    if built is None:
        raise said.failure("TensorRT could not build the engine", OTHER_BACKEND)
    with plan.open("wb") as file:
        file.write(built)
    timing_cache.write(cache_file, bytes(memoryview(config.get_timing_cache().serialize())))


def _is_strongly_typed(trt: Any) -> bool:
    """Whether networks compute in the types that the model says: 8.6 cannot, 10 can, 11 does nothing else."""
    return hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")


def _create_network(trt: Any, builder: Any) -> Any:
    """Return an empty network, strongly typed where TensorRT has that."""
    if _is_strongly_typed(trt):
        return builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    return builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH))


def _set_precision(trt: Any, config: Any, precision: str) -> None:
    """Make a builder keep to `precision`.

    Raises:
        EngineError: if this version cannot.
    """
    # Else TensorRT rounds the factors of float32 products to 10 bits.
    config.clear_flag(trt.BuilderFlag.TF32)
    if _is_strongly_typed(trt) or precision == "float32":
        return
    if precision == "bfloat16":
        raise EngineError(
            f"TensorRT {trt.__version__} does not compute in bfloat16.", "Take float16 or float32, or TensorRT 10."
        )
    # Which layers take it is TensorRT's choice. Asked to keep even one in float32, 8.6 computes all of a transformer in
    # it (measured); sums that overflow are found when the engine is compared with PyTorch.
    config.set_flag(trt.BuilderFlag.FP16)


def _add_profiles(builder: Any, config: Any, network: Any, sizes: Sequence[Shapes], said: "Messages") -> None:
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    if all(min(tensor.shape, default=0) >= 0 for tensor in inputs):
        return
    for low, best, high in sizes:
        profile = builder.create_optimization_profile()
        for tensor in inputs:
            profile.set_shape(tensor.name, low[tensor.name], best[tensor.name], high[tensor.name])
        if config.add_optimization_profile(profile) < 0:
            raise said.failure("TensorRT does not take the shape profile", OTHER_BACKEND)
