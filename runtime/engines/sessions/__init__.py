"""Running engines: `open_session` returns a `Session`, which is called like the program of the engine."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.core.errors import EngineError
from runtime.engines import manifest
from runtime.planner.engine_index import IMPORTED, SWAPPED, EngineRecord

if TYPE_CHECKING:
    import torch


class Session(ABC):
    """One loaded engine, and a context manager that closes it. Not thread-safe."""

    @abstractmethod
    def infer(self, **inputs: "torch.Tensor") -> dict[str, "torch.Tensor"]:
        """Run the engine once.

        Args:
            inputs: the program's inputs by name; they are converted to the engine's dtypes and device.

        Returns:
            The program's outputs by name. They stay valid until the call after the next.

        Raises:
            EngineError: if the engine does not take these inputs or fails.
            MemoryError, torch.OutOfMemoryError: if memory runs out.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the engine. The session cannot be used afterwards; outputs that are still referenced stay valid."""

    def __enter__(self) -> "Session":
        """Return the session; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the session."""
        self.close()


def open_session(
    folder: Path, record: EngineRecord, *, device: str, weights: Callable[[], Mapping[str, "torch.Tensor"]]
) -> Session:
    """Load an engine.

    An engine is code: TensorRT plans and Inductor's libraries run with the user's rights, and an ONNX file decides
    what is computed. Every file's SHA-256 is therefore compared with the one recorded at build time before anything
    opens the file. Nothing is unpickled.

    Args:
        folder: the engine's folder.
        record: from its engine.json.
        device: a torch device.
        weights: returns the state dict of the program's module; called only for an engine without weights.

    Raises:
        EngineError: if a file is missing or changed, or the engine cannot be loaded.
        MemoryError, torch.OutOfMemoryError: if memory runs out.
    """
    problem = manifest.check_hashes(folder, record)
    if problem is not None:
        raise EngineError("engine.unusable", engine=record.id, cause=problem)
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
            from runtime.engines.onnx_export import TENSOR_NAMES
            from runtime.engines.sessions.tensorrt import TensorRTSession, read_names

            graphs = dict(key.options).get("cuda_graphs", "on") == "on"
            names = read_names(folder) if key.builder == "torch_tensorrt" else TENSOR_NAMES
            return TensorRTSession(engine, device=device, cuda_graphs=graphs, names=names)
    raise EngineError("engine.unknown_backend", backend=key.backend)
