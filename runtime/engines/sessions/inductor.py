"""Runs an Inductor package. It is a zip that holds a library: loading it runs its code, and unpickles nothing.

`open_session` hands over only files whose sha256 is the one that was noted when they were built here.
"""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from runtime.core.errors import EngineError
from runtime.engines.edges import METADATA_KEY, Edges
from runtime.engines.programs import TEXT_PADDING, cut_text

_MODEL = "model"
_REMEDY = "Build it anew."


class InductorSession:
    """One loaded package. Not safe between threads.

    Outputs are new tensors in each call.

    Args:
        package: the engine file.
        device: where it runs.
        weights: the state dict of the program's form where the package has none; they are used where they are, not
            copied, and freed with the session.

    Raises:
        EngineError: if the package cannot be loaded, or the weights are not what it needs.
    """

    def __init__(self, package: Path, *, device: str, weights: Mapping[str, torch.Tensor] | None) -> None:
        self._device = torch.device(device)
        index = -1 if self._device.type == "cpu" else self._device.index or 0
        try:
            self._loader: Any = torch._C._aoti.AOTIModelPackageLoader(str(package), _MODEL, True, 1, index)
            self._edges = Edges.from_text(self._loader.get_metadata()[METADATA_KEY])
        except (RuntimeError, KeyError, TypeError, ValueError) as error:
            raise EngineError(f"The package cannot be loaded: {_first_line(error)}.", _REMEDY) from error
        # The library holds pointers only.
        self._weights = None if weights is None else self._hand_over(weights)

    def __enter__(self) -> "InductorSession":
        """Return itself; leaving closes it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free everything."""
        self.close()

    def close(self) -> None:
        """Free library and weights. Outputs that are still held stay."""
        self._loader = None
        self._weights = None

    @torch.inference_mode()
    def infer(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `Session`."""
        if self._loader is None:
            raise RuntimeError("the session is closed")
        if TEXT_PADDING in self._edges.names:
            inputs = cut_text(inputs)
        tensors, _ = self._edges.fit(inputs, self._device)
        try:
            outputs = self._loader.run(tensors)
        except RuntimeError as error:
            raise EngineError(f"The engine failed: {_first_line(error)}.", "PyTorch takes over.") from error
        return {edge.name: output for edge, output in zip(self._edges.outputs, outputs, strict=True)}

    def _hand_over(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = self._loader.get_constant_fqns()
        absent = [name for name in names if name not in weights]
        if absent:
            raise EngineError(f"The engine needs weights that the model has not: {', '.join(absent[:3])}.", _REMEDY)
        given = {name: weights[name].to(self._device).contiguous() for name in names}
        self._loader.load_constants(given, False, True, True)
        return given


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
