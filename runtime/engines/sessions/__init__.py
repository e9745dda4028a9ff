"""Running engines: `open_session` gives what answers like the program itself, whatever is behind it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from runtime.core.errors import EngineError
from runtime.engines import manifest
from runtime.planner.engine_index import IMPORTED, SWAPPED, EngineRecord


class Session(Protocol):
    """One engine, loaded. Not safe between threads."""

    def infer(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run the engine once.

        Args:
            inputs: the program's, by name; of another dtype or device they are converted.

        Returns:
            The program's outputs by name. They stay as they are until the call after the next.

        Raises:
            EngineError: if the engine does not take these inputs or fails.
            MemoryError, torch.OutOfMemoryError: if memory does not suffice.
        """
        ...

    def close(self) -> None:
        """Free everything; the session is of no use afterwards."""
        ...

    def __enter__(self) -> "Session": ...

    def __exit__(self, *_: object) -> None: ...


def open_session(
    folder: Path, record: EngineRecord, *, device: str, weights: Callable[[], Mapping[str, torch.Tensor]]
) -> Session:
    """Load an engine.

    An engine is code: a TensorRT plan and Inductor's library run with our rights, and an ONNX file decides what is
    computed. So every file's sha256 is compared with the one noted when it was built, before anything opens it.
    Nothing is unpickled.

    Args:
        folder: the engine's.
        record: from its engine.json.
        device: where it runs.
        weights: gives the state dict of the program's form; called only for an engine without weights of its own.

    Raises:
        EngineError: if a file is missing or not what was built, or the engine cannot be loaded.
        MemoryError, torch.OutOfMemoryError: if memory does not suffice.
    """
    problem = manifest.check_hashes(folder, record)
    if problem is not None:
        raise EngineError(f"The engine cannot be used: {problem}.", "Build it anew.")
    key, engine = record.key, folder / record.files[0].name
    if key.builder == IMPORTED:
        from runtime.engines.imported.session import open_imported

        return open_imported(folder, record, device=device)
    match key.backend:
        case "inductor":
            from runtime.engines.sessions.inductor import InductorSession

            given = weights() if key.weights == SWAPPED else None
            return InductorSession(engine, device=device, weights=given)
        case "onnxruntime":
            from runtime.engines.sessions.onnxruntime import OnnxRuntimeSession

            provider = dict(key.options).get("provider", "cpu")
            return OnnxRuntimeSession(engine, provider=provider, precision=key.precision, device=device)
        case "tensorrt":
            graphs = dict(key.options).get("cuda_graphs", "on") == "on"
            if key.builder == "torch_tensorrt":
                from runtime.engines.sessions.torch_tensorrt import TorchTensorRTSession

                return TorchTensorRTSession(engine, device=device, cuda_graphs=graphs)
            from runtime.engines.onnx_export import TENSOR_NAMES
            from runtime.engines.sessions.tensorrt import TensorRTSession

            return TensorRTSession(engine, device=device, cuda_graphs=graphs, names=TENSOR_NAMES)
    raise EngineError(f"There is nothing that runs engines of {key.backend!r}.", "Build the engine anew.")
