"""Runs an ONNX file in ONNX Runtime with one of its execution providers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from runtime.core.errors import EngineError, first_line
from runtime.core.plan import is_block_program
from runtime.engines.block_programs import TOKENS
from runtime.engines.component_programs import TEXT_PADDING, cut_text
from runtime.engines.manifest import Content
from runtime.engines.sessions import BlockSession, Session, Weights
from runtime.engines.signatures import METADATA_KEY, IOSignature
from runtime.planner.choice.engine_index import EngineRecord

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


def open_engine(
    folder: Path, record: EngineRecord, content: Content, *, device: str, weights: Weights
) -> "OnnxRuntimeSession":
    """See `sessions.open_session`."""
    provider = dict(record.key.options).get("provider", "cpu")
    model = model_of(folder, record, content)
    session = OnnxRuntimeBlockSession if is_block_program(record.key.program) else OnnxRuntimeSession
    return session(model, provider=provider, precision=record.key.precision, device=device)


class OnnxRuntimeSession(Session):
    """One loaded ONNX file.

    Outputs alternate between two sets of buffers, which stay allocated while sizes are the same.

    Args:
        model: the ONNX file, or its content.
        provider: a name from `builders.onnxruntime`.
        precision: of the arithmetic, for providers that have this option.
        device: of the inputs and outputs.

    Raises:
        EngineError: if the file cannot be loaded, or the provider is not available.
    """

    def __init__(self, model: Path | bytes, *, provider: str, precision: str, device: str) -> None:
        self._device = torch.device(device)
        self._session: Any = load_session(model, provider=provider, precision=precision, device=self._device)
        try:
            self._signature = IOSignature.from_text(self._session.get_modelmeta().custom_metadata_map[METADATA_KEY])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError("engine.onnx_not_loaded", error=first_line(error)) from error
        self._names = [output.name for output in self._session.get_outputs()]
        self._buffers: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._turn = 0

    def release(self) -> None:
        self._buffers = ([], [])

    def close(self) -> None:
        self._session = None
        self._buffers = ([], [])

    @torch.inference_mode()
    def infer(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        if self._session is None:
            raise RuntimeError("the session is closed")
        if TEXT_PADDING in self._signature.names:
            inputs = cut_text(inputs, self._signature.ranges["text"][0])
        tensors, named_sizes = self._signature.convert(inputs, self._device)
        outputs = self._next_buffers([output.shape(named_sizes) for output in self._signature.outputs])
        self._run(tensors, outputs)
        return {entry.name: output for entry, output in zip(self._signature.outputs, outputs, strict=True)}

    def _run(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Run with tensors in the signature's order, which are read and written in place."""
        binding = self._session.io_binding()
        for entry, tensor in zip(self._signature.inputs, inputs, strict=True):
            binding.bind_input(entry.name, *self._placement(tensor))
        for name, tensor in zip(self._names, outputs, strict=True):
            binding.bind_output(name, *self._placement(tensor))
        try:
            binding.synchronize_inputs()
            self._session.run_with_iobinding(binding)
            binding.synchronize_outputs()
        except Exception as error:  # ONNX Runtime's errors derive from Exception
            if OUT_OF_MEMORY in str(error):
                raise MemoryError(str(error)) from error
            raise EngineError("engine.failed", error=first_line(error)) from error

    def _next_buffers(self, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
        """Return the set of buffers that the last call did not use, reallocated if sizes changed."""
        self._turn = 1 - self._turn
        buffers = self._buffers[self._turn]
        if [tuple(buffer.shape) for buffer in buffers] != shapes:
            buffers[:] = [
                torch.empty(shape, dtype=entry.torch_dtype, device=self._device)
                for shape, entry in zip(shapes, self._signature.outputs, strict=True)
            ]
        return buffers

    def _placement(self, tensor: torch.Tensor) -> tuple[str, int, Any, tuple[int, ...], int]:
        """Return the arguments of `IOBinding.bind_input` and `bind_output` for a tensor, after its name."""
        return (
            self._device.type,
            self._device.index or 0,
            _element_type(tensor.dtype),
            tuple(tensor.shape),
            tensor.data_ptr(),
        )


class OnnxRuntimeBlockSession(OnnxRuntimeSession, BlockSession):
    """One loaded ONNX file of a block engine."""

    @property
    def most_tokens(self) -> int:
        return self._signature.ranges[TOKENS][1]

    @torch.inference_mode()
    def write(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """See `BlockSession`. ONNX Runtime has a stream of its own: this waits for the current one, and for it."""
        tensors, named_sizes = self._signature.convert(inputs, self._device)
        shapes = {entry.name: (entry.torch_dtype, entry.shape(named_sizes)) for entry in self._signature.outputs}
        if {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in outputs.items()} != shapes:
            raise EngineError("engine.other_outputs", expected=sorted(shapes), given=sorted(outputs))
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._run(tensors, [outputs[name] for name in shapes])


def model_of(folder: Path, record: EngineRecord, content: Content) -> Path | bytes:
    """Return what to load a session from: the checked content of the ONNX file if it is the only one, else its path.

    ONNX Runtime opens weights in further files by name. Given their content, it would copy it.
    """
    alone = all(file.name.endswith(".json") for file in record.files[1:])
    return content if alone and isinstance(content, bytes) else folder / record.files[0].name


def load_session(model: Path | bytes, *, provider: str, precision: str, device: torch.device) -> Any:
    """Return an `onnxruntime.InferenceSession`; arguments are those of `OnnxRuntimeSession`.

    Raises:
        EngineError: if the file cannot be loaded, or the provider is not available.
    """
    import onnxruntime

    provider_name = _PROVIDERS.get(provider, provider)
    if provider_name not in onnxruntime.get_available_providers():
        raise EngineError("engine.provider_missing", provider=provider)
    options = onnxruntime.SessionOptions()
    # Errors are raised; they need not be printed too.
    options.log_severity_level = _FATAL
    options.intra_op_num_threads = torch.get_num_threads()
    # Idle threads sleep instead of spinning: between calls PyTorch uses the cores.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if provider == "openvino":
        # OpenVINO optimizes the graph itself, and does not support ONNX Runtime's fused operators.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session: Any = onnxruntime.InferenceSession(
            model if isinstance(model, bytes) else str(model),
            options,
            providers=[(provider_name, _provider_options(provider, precision, device))],
        )
    except Exception as error:  # ONNX Runtime's errors derive from Exception
        raise EngineError("engine.onnx_not_loaded", error=first_line(error)) from error
    # ONNX Runtime silently falls back to its CPU provider.
    if session.get_providers()[0] != provider_name:
        raise EngineError("engine.provider_not_started", provider=provider)
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
        # By default float32 factors are rounded to 10 bits (TF32).
        return {"device_id": str(device.index or 0), "use_tf32": "0"}
    return {}


def _element_type(dtype: torch.dtype) -> Any:
    import numpy as np
    import onnx

    # numpy has neither.
    if dtype is torch.bfloat16:
        return int(onnx.TensorProto.BFLOAT16)
    if dtype is torch.float8_e4m3fn:
        return int(onnx.TensorProto.FLOAT8E4M3FN)
    return np.dtype(str(dtype).removeprefix("torch.")).type
