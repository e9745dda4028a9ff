"""Builds TensorRT plans from the exported program with torch-tensorrt's converters.

torch-tensorrt's own files contain a pickled or TorchScript module around the plan. Only the plan is kept: it runs in
the same session as one built from ONNX, and nothing is unpickled. torch-tensorrt's names of the plan's tensors are
stored in `tensors.json`.
"""

import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.core.errors import EngineError, first_line, ran_out
from runtime.core.facts import Fact
from runtime.engines.builders import output_reporter
from runtime.engines.builders.tensorrt import (
    TensorRTBuilder,
    enclosing,
    gpu_of,
    log_layers,
    read_timing_cache,
    timing_cache_path,
    write_timing_cache,
)
from runtime.engines.child import Report
from runtime.planner.choice.engine_index import EngineKey
from runtime.upstream.torch import flattened

if TYPE_CHECKING:
    import torch

    from runtime.engines.component_programs import Program
    from runtime.engines.signatures import Shapes

# The loggers of torch-tensorrt, and of TensorRT within it.
_LOGGERS = ("torch_tensorrt", "torch_tensorrt [TensorRT Conversion Context]")


def arguments(key: EngineKey, device: "torch.device", timing_cache: Path) -> dict[str, Any]:
    """Return the keywords for `torch_tensorrt.dynamo.convert_exported_program_to_serialized_trt_engine`.

    An operation without a converter is an error: the engine is one plan and cannot fall back to PyTorch.
    """
    options = dict(key.options)
    return {
        "device": device,
        "disable_tf32": True,
        "workspace_size": int(options["workspace_mib"]) << 20,
        "optimization_level": int(options["optimization_level"]),
        "timing_cache_path": str(timing_cache),
        "assume_dynamic_shape_support": any(profile.min != profile.max for profile in key.profiles),
        # The weights are part of the key: see `onnx_tensorrt`.
        "immutable_weights": True,
        # TensorRT has its own copy of the weights while it builds.
        "offload_module_to_cpu": True,
        # The default treats every attention with a bias as causal; the text encoder's is not.
        "attn_bias_is_causal": False,
    }


def input_arguments(sizes: "Shapes", name: str, dtype: "torch.dtype") -> dict[str, Any]:
    """Return the keywords for `torch_tensorrt.Input`."""
    low, best, high = (shapes[name] for shapes in sizes)
    if low == high:
        return {"shape": best, "dtype": dtype}
    return {"min_shape": low, "opt_shape": best, "max_shape": high, "dtype": dtype}


class TorchTensorRT(TensorRTBuilder):
    """Builds plans with torch-tensorrt. It supports one profile, so several are replaced with an enclosing one."""

    name = "torch_tensorrt"
    requires = "torch_tensorrt"

    def packages(self, device: str) -> tuple[str, ...]:
        return (*super().packages(device), "torch-tensorrt")

    def build(self, program: "Program", key: EngineKey, folder: Path, report: Report) -> None:
        """Write `folder/engine.plan` and `folder/tensors.json`.

        Raises:
            EngineError: if torch-tensorrt cannot build it.
            torch.OutOfMemoryError: if the GPU's memory is too small.
        """
        from runtime.engines import tensorrt_library
        from runtime.engines.sessions.tensorrt import NAMES_FILE

        trt = tensorrt_library.load()
        import torch_tensorrt

        profile = enclosing(key.profiles)
        sizes = program.shapes(profile)
        report(Fact("engine.exporting"), None)
        exported = program.export(profile)
        example, unflatten = flattened(exported.example_inputs)
        inputs = [
            torch_tensorrt.Input(**input_arguments(sizes, name, tensor.dtype))
            for name, tensor in zip(program.input_names, example, strict=True)
        ]
        report(Fact("engine.building_with", {"compiler": "torch-tensorrt"}), None)
        cache = timing_cache_path(folder, key.device, trt.__version__)
        device = gpu_of(program)
        with _log_to(report):
            plan = _convert(exported, unflatten(inputs), key, device, cache)
        (folder / self.file_name).write_bytes(plan)
        log_layers(trt, folder / self.file_name, device)
        names = dict(zip(exported.graph_signature.user_inputs, program.input_names, strict=True))
        names |= {f"output{index}": name for index, name in enumerate(program.output_names)}
        (folder / NAMES_FILE).write_text(json.dumps(names), encoding="utf-8")


def _convert(
    exported: "torch.export.ExportedProgram",
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    key: EngineKey,
    device: "torch.device",
    cache: Path,
) -> bytes:
    import torch
    import torch_tensorrt

    positional, keywords = inputs
    with tempfile.TemporaryDirectory() as scratch, torch.cuda.device(device):
        # torch-tensorrt writes its cache in place, so it works on a copy.
        copy = Path(scratch) / "timing"
        copy.write_bytes(read_timing_cache(cache))
        try:
            plan = torch_tensorrt.dynamo.convert_exported_program_to_serialized_trt_engine(
                exported, arg_inputs=positional, kwarg_inputs=keywords, **arguments(key, device, copy)
            )
        except (RuntimeError, AssertionError, ValueError, TypeError, NotImplementedError) as error:
            if ran_out(error) == "VRAM":
                # torch-tensorrt wraps it in a RuntimeError.
                raise torch.OutOfMemoryError(first_line(error)) from error
            raise EngineError("engine.torch_tensorrt_failed", error=first_line(error)) from error
        write_timing_cache(cache, copy.read_bytes())
    return bytes(plan)


@contextmanager
def _log_to(report: Report) -> Iterator[None]:
    """Report torch-tensorrt's log lines."""
    report_line = output_reporter(report)

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            report_line(f"torch-tensorrt: {record.getMessage()}", None)

    handler, loggers = Handler(logging.INFO), [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
