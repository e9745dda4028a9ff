"""Runs an Inductor package. It is a zip that holds a library: loading it runs its code, and unpickles nothing.

`open_session` hands over only files whose sha256 is the one that was noted when they were built here.

torch never unloads a library and never gives back the weights that one was handed. So a library is loaded once in a
process, whoever opens its package how often, and closing a session takes the weights' memory away by itself.
"""

import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from runtime.core.errors import EngineError, first_line
from runtime.engines.closeable import Closing
from runtime.engines.io_signature import METADATA_KEY, WEIGHTS_KEY, Edges
from runtime.engines.programs import TEXT_PADDING, cut_text, full_float32

_REMEDY = "Build it anew."
_METADATA = "_metadata.json"


class InductorSession(Closing):
    """One package with its weights. Not safe between threads.

    Outputs are new tensors in each call.

    Args:
        package: the engine file.
        device: where it runs.
        weights: the state dict of the program's form where the package has none; they are used where they are, not
            copied, and let go with the session.

    Raises:
        EngineError: if the package cannot be loaded, or the weights are not what it needs.
    """

    def __init__(self, package: Path, *, device: str, weights: Mapping[str, torch.Tensor] | None) -> None:
        self._device = torch.device(device)
        self._library: _Library | None = _load(package, self._device)
        self._weights = None if weights is None else self._library.fit(weights, self._device)

    def close(self) -> None:
        """Let the weights go. Outputs that are still held stay."""
        if self._library is not None and self._weights is not None:
            self._library.take_away(self._weights)
        self._library = None
        self._weights = None

    @torch.inference_mode()
    def infer(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `Session`."""
        if self._library is None:
            raise RuntimeError("the session is closed")
        edges = self._library.edges
        if TEXT_PADDING in edges.names:
            inputs = cut_text(inputs)
        tensors, _ = edges.fit(inputs, self._device)
        # A library calls cuDNN as torch does.
        with full_float32(self._device):
            outputs = self._library.run(tensors, self._weights)
        return {edge.name: output for edge, output in zip(edges.outputs, outputs, strict=True)}


class _Library:
    """One loaded library; several sessions with weights of their own may take turns."""

    def __init__(self, package: Path, device: torch.device) -> None:
        # Read by the library's code as it starts, so it lies in the open until then.
        self._folder = tempfile.TemporaryDirectory(prefix="tandem-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        metadata: dict[str, str] = {}
        with zipfile.ZipFile(package) as archive:
            for member in archive.namelist():
                path = folder / PurePosixPath(member).name
                if path.suffix in {".so", ".pyd", ".dll", ".json", ".cubin"}:
                    path.write_bytes(archive.read(member))
                if path.name.endswith(_METADATA):
                    metadata |= json.loads(archive.read(member))
        self.edges = Edges.from_text(metadata[METADATA_KEY])
        described: dict[str, tuple[str, list[int]]] = json.loads(metadata[WEIGHTS_KEY])
        (code,) = (path for path in folder.iterdir() if path.suffix not in {".json", ".cubin"})
        runners: Any = torch._C._aoti
        if device.type == "cpu":
            self._runner = runners.AOTIModelContainerRunnerCpu(str(code), 1)
            if os.name == "posix":
                # What is mapped needs no name; so nothing is left behind, however the process ends.
                self._folder.cleanup()
        else:
            self._runner = runners.AOTIModelContainerRunnerCuda(str(code), 1, str(device), str(folder))
        self._names: dict[str, str] = {
            original: name for name, original in self._runner.get_constant_names_to_original_fqns().items()
        }
        self._wanted = {name: described[name] for name in self._names} if described else {}
        self._held: Mapping[str, torch.Tensor] | None = None

    def fit(self, weights: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
        """Return the weights that the library needs, as it needs them.

        Raises:
            EngineError: if one is missing or of another shape.
        """
        found = {}
        for name, (dtype, shape) in self._wanted.items():
            tensor = weights.get(name)
            if tensor is None or list(tensor.shape) != shape:
                raise EngineError(f"The engine needs {name}, {shape}, which the model has not.", _REMEDY)
            # Detached, so that emptying it leaves the giver's alone.
            found[name] = tensor.detach().to(device=device, dtype=getattr(torch, dtype)).contiguous()
        return found

    def run(self, tensors: list[torch.Tensor], weights: Mapping[str, torch.Tensor] | None) -> list[torch.Tensor]:
        """Run the library on a session's weights.

        Raises:
            EngineError: if it fails.
        """
        try:
            if weights is not None and weights is not self._held:
                given = {self._names[name]: tensor for name, tensor in weights.items()}
                self._runner.update_constant_buffer(given, False, True, True)
                self._held = weights
            outputs: list[torch.Tensor] = self._runner.run(tensors)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise EngineError(f"The engine failed: {first_line(error)}.", "PyTorch takes over.") from error
        return outputs

    def take_away(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Free a session's weights, of which the library keeps references for ever."""
        if self._held is weights:
            self._held = None
        with torch.no_grad():
            for tensor in weights.values():
                tensor.set_()  # type: ignore[call-overload] # its stub knows no form without arguments


_LIBRARIES: dict[tuple[Path, int, int, torch.device], _Library] = {}


def _load(package: Path, device: torch.device) -> _Library:
    try:
        stat = package.stat()
        key = package.resolve(), stat.st_size, stat.st_mtime_ns, device
        if key not in _LIBRARIES:
            _LIBRARIES[key] = _Library(package, device)
        return _LIBRARIES[key]
    except (OSError, RuntimeError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise EngineError(f"The package cannot be loaded: {first_line(error)}.", _REMEDY) from error
