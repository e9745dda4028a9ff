"""Runs a plan of TensorRT for RTX.

The runtime compiles the kernels of a plan for the GPU and for the shapes of its inputs. They are kept in a runtime
cache in the engine's folder, so that only the first session compiles them. The file begins with the SHA-256 of the
rest; the library itself rejects a cache of another GPU, driver or version.
"""

import contextlib
from pathlib import Path
from typing import Any, ClassVar

import torch

from runtime.core.plan import is_block_program
from runtime.engines import tensorrt_library
from runtime.engines.builders.tensorrt import read_timing_cache, write_timing_cache
from runtime.engines.builders.tensorrt_rtx import LIBRARY
from runtime.engines.manifest import Content
from runtime.engines.onnx_export import TENSOR_NAMES
from runtime.engines.sessions import Weights
from runtime.engines.sessions.tensorrt import PlanSession, TensorRTBlockSession, TensorRTSession, uses_cuda_graphs
from runtime.planner.choice.engine_index import EngineRecord

CACHE_FILE = "runtime.cache"


def open_engine(folder: Path, record: EngineRecord, content: Content, *, device: str, weights: Weights) -> PlanSession:
    """See `sessions.open_session`."""
    options: dict[str, Any] = {"cache_file": folder / CACHE_FILE, "device": device, "names": TENSOR_NAMES}
    if is_block_program(record.key.program):
        return TensorRTRTXBlockSession(content, **options)
    return TensorRTRTXSession(content, cuda_graphs=uses_cuda_graphs(record), **options)


class _WithRuntimeCache(PlanSession):
    """Sessions whose contexts compile kernels when they need them.

    Args:
        cache_file: the runtime cache.

    Raises:
        EngineError: also if the GPU is none that TensorRT for RTX supports.
    """

    library: ClassVar[str] = LIBRARY

    def __init__(self, plan: Path | Content, *, cache_file: Path, **options: Any) -> None:
        self._cache_file = cache_file
        self._saved = read_timing_cache(self._cache_file)
        self._config: Any = None
        self._kernels: Any = None
        super().__init__(plan, **options)

    def _create_context(self) -> Any:
        if self._config is None:
            self._config = self._engine.create_runtime_config()
            # By default other kernels run until those for a shape are compiled: results would depend on time.
            self._config.dynamic_shapes_kernel_specialization_strategy = (
                self._trt.DynamicShapesKernelSpecializationStrategy.EAGER
            )
            self._kernels = self._config.create_runtime_cache()
            if self._saved:
                self._kernels.deserialize(self._saved)
            self._config.set_runtime_cache(self._kernels)
        return tensorrt_library.create_context(self._trt, self._engine, self._config)

    def close(self) -> None:
        if self._engine is not None and self._kernels is not None:
            # The GPU may be unusable. Without the file the next session compiles the kernels again.
            with contextlib.suppress(Exception):
                self._save_kernels()
        super().close()
        self._config = None
        self._kernels = None

    def _save_kernels(self) -> None:
        """Write the runtime cache, if kernels were compiled."""
        with torch.cuda.device(self._device):
            compiled = self._kernels.serialize()
        data = b"" if compiled is None else bytes(memoryview(compiled))
        if data and data != self._saved:
            write_timing_cache(self._cache_file, data)
            self._saved = data


class TensorRTRTXSession(_WithRuntimeCache, TensorRTSession):
    """A session of a component, see `TensorRTSession`."""


class TensorRTRTXBlockSession(_WithRuntimeCache, TensorRTBlockSession):
    """A session of a block engine, see `TensorRTBlockSession`."""
