"""Runs an ONNX file in ONNX Runtime, with one of its execution providers."""

import json
from pathlib import Path
from typing import Any

import torch

from runtime.core.errors import EngineError, first_line
from runtime.engines.closeable import Closing
from runtime.engines.io_signature import METADATA_KEY, Edges
from runtime.engines.programs import TEXT_PADDING, cut_text

_PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
    "directml": "DmlExecutionProvider",
}
_OPENVINO_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
_FATAL = 4
OUT_OF_MEMORY = "Failed to allocate memory"
_REMEDY = "Build it anew."


class OnnxRuntimeSession(Closing):
    """One loaded ONNX file. Not safe between threads.

    Outputs are written into two sets of buffers in turn, which are kept while sizes stay the same.

    Args:
        model: the ONNX file.
        provider: a name from `builders.onnxruntime`.
        precision: of the arithmetic, where the provider is told.
        device: where inputs and outputs are.

    Raises:
        EngineError: if the file cannot be loaded, or the provider is not there.
    """

    def __init__(self, model: Path, *, provider: str, precision: str, device: str) -> None:
        self._device = torch.device(device)
        self._session: Any = start(model, provider=provider, precision=precision, device=self._device)
        try:
            self._edges = Edges.from_text(self._session.get_modelmeta().custom_metadata_map[METADATA_KEY])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"The ONNX file cannot be loaded: {first_line(error)}.", _REMEDY) from error
        self._names = [output.name for output in self._session.get_outputs()]
        self._buffers: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._turn = 0

    def close(self) -> None:
        """Free model and buffers. Outputs that are still held stay."""
        self._session = None
        self._buffers = ([], [])

    @torch.inference_mode()
    def infer(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `Session`."""
        if self._session is None:
            raise RuntimeError("the session is closed")
        if TEXT_PADDING in self._edges.names:
            inputs = cut_text(inputs)
        tensors, known = self._edges.fit(inputs, self._device)
        outputs = self._next_buffers([edge.shape(known) for edge in self._edges.outputs])
        binding = self._session.io_binding()
        for edge, tensor in zip(self._edges.inputs, tensors, strict=True):
            binding.bind_input(edge.name, *self._where(tensor))
        for name, tensor in zip(self._names, outputs, strict=True):
            binding.bind_output(name, *self._where(tensor))
        try:
            binding.synchronize_inputs()
            self._session.run_with_iobinding(binding)
            binding.synchronize_outputs()
        except Exception as error:  # ONNX Runtime's own errors derive from Exception alone
            if OUT_OF_MEMORY in str(error):
                raise MemoryError(str(error)) from error
            raise EngineError(f"The engine failed: {first_line(error)}.", "PyTorch takes over.") from error
        return {edge.name: output for edge, output in zip(self._edges.outputs, outputs, strict=True)}

    def _next_buffers(self, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
        """Return the set of buffers that was not used last, made anew where sizes have changed."""
        self._turn = 1 - self._turn
        buffers = self._buffers[self._turn]
        if [tuple(buffer.shape) for buffer in buffers] != shapes:
            buffers[:] = [
                torch.empty(shape, dtype=edge.torch_dtype, device=self._device)
                for shape, edge in zip(shapes, self._edges.outputs, strict=True)
            ]
        return buffers

    def _where(self, tensor: torch.Tensor) -> tuple[str, int, Any, tuple[int, ...], int]:
        """Return what a binding wants to know of a tensor."""
        return (
            self._device.type,
            self._device.index or 0,
            _element_type(tensor.dtype),
            tuple(tensor.shape),
            tensor.data_ptr(),
        )


def start(model: Path, *, provider: str, precision: str, device: torch.device) -> Any:
    """Load an ONNX file; arguments as for `OnnxRuntimeSession`.

    Raises:
        EngineError: if the file cannot be loaded, or the provider is not there.
    """
    import onnxruntime

    wanted = _PROVIDERS.get(provider, provider)
    if wanted not in onnxruntime.get_available_providers():
        raise EngineError(
            f"This ONNX Runtime has no {provider} provider.", "Install the package that has it, or build anew."
        )
    options = onnxruntime.SessionOptions()
    # What goes wrong is raised; nothing needs to be printed as well.
    options.log_severity_level = _FATAL
    options.intra_op_num_threads = torch.get_num_threads()
    # Threads that wait sleep: between calls the cores belong to PyTorch.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if provider == "openvino":
        # It optimises for itself, and does not know ONNX Runtime's fused operators.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session: Any = onnxruntime.InferenceSession(
            str(model), options, providers=[(wanted, _provider_options(provider, precision, device))]
        )
    except Exception as error:  # ONNX Runtime's own errors derive from Exception alone
        raise EngineError(f"The ONNX file cannot be loaded: {first_line(error)}.", _REMEDY) from error
    # ONNX Runtime falls back to the CPU in silence; that is for us to decide.
    if session.get_providers()[0] != wanted:
        raise EngineError(f"The {provider} provider does not start here.", "Choose another backend.")
    return session


def _provider_options(provider: str, precision: str, device: torch.device) -> dict[str, str]:
    if provider == "openvino":
        plugin = {
            "INFERENCE_PRECISION_HINT": _OPENVINO_PRECISIONS[precision],
            "INFERENCE_NUM_THREADS": str(torch.get_num_threads()),
            "NUM_STREAMS": "1",
        }
        return {"device_type": "CPU", "load_config": json.dumps({"CPU": plugin})}
    if device.type == "cuda":
        # float32 is float32: by default factors are rounded to 10 bits.
        return {"device_id": str(device.index or 0), "use_tf32": "0"}
    return {}


def _element_type(dtype: torch.dtype) -> Any:
    import numpy as np
    import onnx

    if dtype is torch.bfloat16:  # which numpy has not
        return int(onnx.TensorProto.BFLOAT16)
    return np.dtype(str(dtype).removeprefix("torch.")).type
