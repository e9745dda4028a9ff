"""Runs an Inductor package: a zip file with a shared library. Loading it runs its code and unpickles nothing.

`open_session` passes only content whose SHA-256 is the one recorded at build time.

torch never unloads such a library and never releases the weights that it was given. A library is therefore loaded
once per process, and closing a session frees the memory of the weights itself.
"""

import contextlib
import hashlib
import io
import json
import os
import weakref
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import torch

from runtime.core.errors import EngineError, first_line
from runtime.core.locks import scratch_folder
from runtime.engines.component_programs import TEXT_PADDING, cut_text
from runtime.engines.manifest import Content
from runtime.engines.reference import full_float32
from runtime.engines.sessions import Session, Weights
from runtime.engines.signatures import METADATA_KEY, WEIGHTS_KEY, IOSignature
from runtime.planner.choice.engine_index import SWAPPED, EngineRecord
from runtime.upstream.torch import package_runner

_METADATA = "_metadata.json"
_CODE = (".so", ".pyd", ".dll")


def open_engine(
    _folder: Path, record: EngineRecord, content: Content, *, device: str, weights: Weights
) -> "InductorSession":
    """See `sessions.open_session`."""
    state = weights() if record.key.weights == SWAPPED else None
    return InductorSession(content, device=device, weights=state)


class InductorSession(Session):
    """One package with its weights. Every call returns new tensors.

    Args:
        package: the content of the engine file.
        device: a torch device.
        weights: the state dict of the program's module, for a package without weights. They are used in place, not
            copied, and released with the session.

    Raises:
        EngineError: if the package cannot be loaded, or the weights do not match it.
    """

    def __init__(self, package: Content, *, device: str, weights: Mapping[str, torch.Tensor] | None) -> None:
        self._device = torch.device(device)
        self._library: _Library | None = _load(package, self._device)
        self._weights = None if weights is None else self._library.convert_weights(weights, self._device)

    def close(self) -> None:
        if self._library is not None and self._weights is not None:
            self._library.free(self._weights)
        self._library = None
        self._weights = None

    @torch.inference_mode()
    def infer(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        if self._library is None:
            raise RuntimeError("the session is closed")
        signature = self._library.signature
        if TEXT_PADDING in signature.names:
            inputs = cut_text(inputs, signature.ranges["text"][0])
        tensors, _ = signature.convert(inputs, self._device)
        # The library calls cuDNN with torch's settings.
        with full_float32(self._device):
            outputs = self._library.run(tensors, self._weights)
        return {entry.name: output for entry, output in zip(signature.outputs, outputs, strict=True)}


class _Library:
    """One loaded library, which may be used by several sessions with different weights in turn."""

    def __init__(self, package: Content, device: torch.device) -> None:
        # The library's code reads these files when it starts.
        scratch = contextlib.ExitStack()
        folder = scratch.enter_context(scratch_folder())
        remove_folder = weakref.finalize(self, scratch.close)
        metadata: dict[str, str] = {}
        with zipfile.ZipFile(io.BytesIO(package)) as archive:
            for member in archive.namelist():
                path = folder / PurePosixPath(member).name
                if path.suffix in {*_CODE, ".json", ".cubin"}:
                    path.write_bytes(archive.read(member))
                if path.name.endswith(_METADATA):
                    metadata |= json.loads(archive.read(member))
        self.signature = IOSignature.from_text(metadata[METADATA_KEY])
        described: dict[str, tuple[str, list[int]]] = json.loads(metadata[WEIGHTS_KEY])
        (code,) = (path for path in folder.iterdir() if path.suffix in _CODE)
        self._runner = package_runner(code, device, folder)
        if device.type == "cpu" and os.name == "posix":
            # A mapped file needs no name: nothing remains on disk, however the process ends.
            remove_folder()
        self._names: dict[str, str] = {
            original: name for name, original in self._runner.get_constant_names_to_original_fqns().items()
        }
        self._expected = {name: described[name] for name in self._names} if described else {}
        self._current: Mapping[str, torch.Tensor] | None = None

    def convert_weights(self, weights: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
        """Return the weights that the library needs, with its dtypes and on its device.

        Raises:
            EngineError: if one is missing or has another shape.
        """
        converted = {}
        for name, (dtype, shape) in self._expected.items():
            tensor = weights.get(name)
            if tensor is None or list(tensor.shape) != shape:
                raise EngineError("engine.weight_missing", weight=name, shape=list(shape))
            # Detached, so that freeing it does not affect the caller's tensor.
            converted[name] = tensor.detach().to(device=device, dtype=getattr(torch, dtype)).contiguous()
        return converted

    def run(self, tensors: list[torch.Tensor], weights: Mapping[str, torch.Tensor] | None) -> list[torch.Tensor]:
        """Run the library with a session's weights.

        Raises:
            EngineError: if it fails.
        """
        try:
            if weights is not None and weights is not self._current:
                constants = {self._names[name]: tensor for name, tensor in weights.items()}
                self._runner.update_constant_buffer(constants, False, True, True)
                self._current = weights
            outputs: list[torch.Tensor] = self._runner.run(tensors)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise EngineError("engine.failed", error=first_line(error)) from error
        return outputs

    def free(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Free the memory of a session's weights; the library keeps references to them for the process's lifetime."""
        if self._current is weights:
            self._current = None
        with torch.no_grad():
            for tensor in weights.values():
                tensor.set_()  # type: ignore[call-overload] # the stub lacks the form without arguments


# By the SHA-256 of the package, and the device.
_LIBRARIES: dict[tuple[bytes, torch.device], _Library] = {}


def _load(package: Content, device: torch.device) -> _Library:
    try:
        key = hashlib.sha256(package).digest(), device
        if key not in _LIBRARIES:
            _LIBRARIES[key] = _Library(package, device)
        return _LIBRARIES[key]
    except (OSError, RuntimeError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise EngineError("engine.package_not_loaded", error=first_line(error)) from error
