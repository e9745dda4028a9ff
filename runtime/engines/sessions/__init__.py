"""Runs engines: `open_session` returns a `Session`, which is called like the program of the engine.

The module of a backend has its name, and a function `open_engine` with the arguments of `open_session` and the content
of the engine file, which is valid until the function returns.
"""

import contextlib
import importlib
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.engines import manifest
from runtime.engines.builders import builders_of
from runtime.planner.choice.engine_index import IMPORTED, EngineRecord

if TYPE_CHECKING:
    import torch

# Returns the state dict of a program's module; called only for an engine without weights.
Weights = Callable[[], Mapping[str, "torch.Tensor"]]


class Session(AbstractContextManager["Session"]):
    """One loaded engine, and a context manager that closes it. Not thread-safe.

    Attributes:
        context_bytes: GPU memory that the engine needs while it runs, besides weights, inputs and outputs; it may be
            shared with other engines. 0 if the backend does not state it.
    """

    context_bytes: int = 0

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

    def release(self) -> None:
        """Free memory that only later calls need; the next call allocates it again.

        Outputs that are still referenced stay valid. For an engine that ran for the last time in a while, such as the
        VAE's first step, whose outputs are as large as all caches.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the engine. The session cannot be used afterwards; outputs that are still referenced stay valid."""

    def __exit__(self, *_: object) -> None:
        self.close()


class BlockSession(Session):
    """A session of a block engine: its inputs include weights, and one axis of its tensors counts tokens."""

    @property
    @abstractmethod
    def most_tokens(self) -> int:
        """The most tokens of one call."""

    @abstractmethod
    def write(self, inputs: Mapping[str, "torch.Tensor"], outputs: Mapping[str, "torch.Tensor"]) -> None:
        """Run the engine once on the current stream, with outputs written into given tensors.

        Args:
            inputs, outputs: by name, contiguous, on the engine's device, with its dtypes; no output overlaps an input.
                Read and written in place: the caller keeps them until the stream has passed this call.

        Raises:
            EngineError: if the engine does not take these tensors or fails.
            MemoryError, torch.OutOfMemoryError: if memory runs out.
        """


def open_session(
    folder: Path,
    record: EngineRecord,
    *,
    device: str,
    weights: Weights,
    hashed: manifest.FileStates | None = None,
) -> Session:
    """Load an engine.

    An engine is code: TensorRT plans and Inductor's libraries run with the user's rights, and an ONNX file decides
    what is computed. Every file's SHA-256 is therefore compared with the one recorded at build time before anything
    opens the file, and the engine file is loaded from the very bytes that were hashed, see `manifest.open_checked`.
    Files that a library opens by name (an ONNX file with weights in further files) must not change between this check
    and the end of loading. What a session writes itself, such as compiled kernels, begins with its own SHA-256. Nothing
    is unpickled.

    Args:
        folder: the engine's folder.
        record: from its engine.json.
        device: a torch device.
        weights: of the program, in the engine's precision.
        hashed: see `manifest.open_checked`.

    Raises:
        EngineError: if a file is missing or changed, or the engine cannot be loaded.
        MemoryError, torch.OutOfMemoryError: if memory runs out.
    """
    before = manifest.file_states(folder, record)
    with contextlib.ExitStack() as stack:
        content = manifest.open_checked(folder, record, stack, hashed)
        if isinstance(content, Fact):
            raise EngineError("engine.unusable", engine=record.id, cause=content)
        name = record.key.backend
        # The name is checked because it is imported.
        if not builders_of(name):
            raise EngineError("engine.unknown_backend", backend=name)
        backend: Any = importlib.import_module(f"{__name__}.{IMPORTED if record.key.builder == IMPORTED else name}")
        session: Session = backend.open_engine(folder, record, content, device=device, weights=weights)
    after = manifest.file_states(folder, record)
    for name in (file.name for file in record.files if after.get(file.name) != before.get(file.name)):
        session.close()
        raise EngineError("engine.unusable", engine=record.id, cause=Fact("engine.file_changed", {"file": name}))
    return session
