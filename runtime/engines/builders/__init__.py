"""Engine builders by name. A builder's module is imported on use, so that listing builders loads no library."""

import importlib
from collections.abc import Iterator, Mapping
from typing import cast

from runtime.engines.builders.base import Builder, BuildNeeds

__all__ = ["BUILDERS", "BuildNeeds", "Builder", "builders_of"]


class _Builders(Mapping[str, Builder]):
    """Builders by name, in the order of preference."""

    _CLASSES: Mapping[str, str] = {
        "onnx_tensorrt": "OnnxTensorRT",
        "torch_tensorrt": "TorchTensorRT",
        "inductor": "InductorBuilder",
        "onnxruntime": "OnnxRuntimeBuilder",
    }

    def __getitem__(self, name: str) -> Builder:
        module = importlib.import_module(f"{__name__}.{name}") if name in self._CLASSES else None
        return cast("Builder", getattr(module, self._CLASSES[name])())

    def __iter__(self) -> Iterator[str]:
        return iter(self._CLASSES)

    def __len__(self) -> int:
        return len(self._CLASSES)


BUILDERS: Mapping[str, Builder] = _Builders()
_BACKENDS = {
    "tensorrt": ("onnx_tensorrt", "torch_tensorrt"),
    "inductor": ("inductor",),
    "onnxruntime": ("onnxruntime",),
}


def builders_of(backend: str) -> tuple[Builder, ...]:
    """Return the builders whose engines a backend runs, the preferred one first."""
    return tuple(BUILDERS[name] for name in _BACKENDS[backend])
