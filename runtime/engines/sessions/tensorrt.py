"""Runs a TensorRT plan: shapes, buffers, streams and CUDA graphs. TensorRT 8.6, 10 and 11.

A plan is machine code that runs with the user's rights: `sessions.open_session` passes only files whose SHA-256 is
the one recorded at build time.
"""

import json
import logging
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from runtime.core.errors import EngineError
from runtime.engines import tensorrt_library
from runtime.engines.sessions import Session, Weights
from runtime.planner.engine_index import EngineRecord

logger = logging.getLogger(__name__)

Shape = tuple[int, ...]
# torch-tensorrt's names of a plan's tensors, in the engine's folder.
NAMES_FILE = "tensors.json"
# TensorRT requires aligned addresses. torch's allocations are aligned; views into them may not be.
_ALIGNMENT = 256
# Inputs up to this size are copied into the buffers of a CUDA graph; larger ones are read in place, without a graph.
_STAGED_BYTES = 64 << 20


def open_engine(folder: Path, record: EngineRecord, *, device: str, weights: Weights) -> "TensorRTSession":
    """See `sessions.open_session`."""
    from runtime.engines.onnx_export import TENSOR_NAMES

    names = read_names(folder) if record.key.builder == "torch_tensorrt" else TENSOR_NAMES
    return TensorRTSession(
        folder / record.files[0].name, device=device, cuda_graphs=uses_cuda_graphs(record), names=names
    )


def uses_cuda_graphs(record: EngineRecord) -> bool:
    """Return whether the engine's key says that its calls are captured in CUDA graphs."""
    return dict(record.key.options).get("cuda_graphs", "on") == "on"


class TensorRTSession(Session):
    """One deserialised plan, its execution context and its buffers.

    Outputs alternate between two sets of buffers: an output stays valid until the call after the next, and the next
    call may read it in place as an input. Runs on its own stream, synchronized with the caller's stream.

    Args:
        plan: the engine file.
        device: a CUDA device.
        cuda_graphs: whether to capture the second call with the same shapes, and replay it from then on.
        names: the program's names of the engine's tensors, where they differ.

    Raises:
        EngineError: if the plan is damaged, was built by another TensorRT or for another GPU, or there is no GPU.
        torch.OutOfMemoryError: if the GPU's memory is too small.
    """

    library: ClassVar[str] = "tensorrt"

    def __init__(
        self, plan: Path, *, device: str, cuda_graphs: bool = True, names: Mapping[str, str] | None = None
    ) -> None:
        trt = tensorrt_library.load(self.library)
        self._device = torch.device(device)
        self._graphs_wanted = cuda_graphs
        self._graphs: dict[tuple[int, ...], torch.cuda.CUDAGraph] = {}
        self._shapes: dict[str, Shape] | None = None
        self._profile = 0
        self._warm = False
        self._turn = 0
        self._buffers: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
        self._staged: dict[str, torch.Tensor] = {}
        with torch.cuda.device(self._device), tensorrt_library.listen() as messages:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch's own
            # TensorRT cannot use memory that torch's allocator caches.
            torch.cuda.empty_cache()
            self._runtime = trt.Runtime(tensorrt_library.logger(self.library))
            self._engine = deserialize(self._runtime, plan, messages)
            created = self._create_context(trt)
            if created is None:
                raise messages.failure("engine.tensorrt_no_context")
            self._context, self._memory = created
            self._inputs, self._outputs = _tensors(trt, self._engine, names or {})

    def _create_context(self, trt: Any) -> tuple[Any, torch.Tensor] | None:
        """See `tensorrt_library.create_context`."""
        return tensorrt_library.create_context(trt, self._engine, self._device)

    def close(self) -> None:
        if self._engine is None:
            return
        self._stream.synchronize()
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._staged.clear()
        self._buffers = ({}, {})
        # Each of these needs the next one.
        self._context = None
        self._memory = torch.empty(0)
        self._engine = None
        self._runtime = None

    def infer(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `Session`; outputs are on the session's device."""
        if self._engine is None:
            raise RuntimeError("the session is closed")
        if set(inputs) != set(self._inputs):
            raise EngineError("engine.other_inputs", expected=sorted(self._inputs), given=sorted(inputs))
        with torch.cuda.device(self._device), torch.no_grad(), tensorrt_library.listen() as messages:
            given = {name: self._convert(name, tensor) for name, tensor in inputs.items()}
            self._stream.wait_stream(torch.cuda.current_stream())
            self._set_shapes({name: tuple(tensor.shape) for name, tensor in given.items()}, messages)
            outputs = self._buffers[self._turn]
            bound, repeatable = self._bind_inputs(given)
            # Binding may have copied, on the caller's stream.
            self._stream.wait_stream(torch.cuda.current_stream())
            if repeatable and self._warm and self._graphs_wanted:
                self._replay(bound, outputs, messages)
            else:
                self._execute(bound, outputs, messages)
            self._warm = True
            self._turn = 1 - self._turn
            torch.cuda.current_stream().wait_stream(self._stream)
        return dict(outputs)

    def _convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor with the engine's dtype, device and alignment; the same tensor if nothing differs."""
        tensor = tensor.to(self._device, self._inputs[name].dtype).contiguous()
        return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor

    def _set_shapes(self, shapes: dict[str, Shape], messages: tensorrt_library.Messages) -> None:
        """Set profile, shapes and buffers; does nothing if the shapes are those of the call before."""
        if shapes == self._shapes:
            return
        self._shapes = None
        # Captured graphs are valid for their own shapes only.
        self._stream.synchronize()
        self._graphs.clear()
        self._staged.clear()
        self._buffers = ({}, {})
        self._warm = False
        profile = self._nearest_profile(shapes)
        if profile != self._profile:
            if not self._context.set_optimization_profile_async(profile, self._stream.cuda_stream):
                raise messages.failure("engine.tensorrt_profile_not_set")
            self._profile = profile
        for name, shape in shapes.items():
            if not self._context.set_input_shape(self._inputs[name].name, shape):
                raise messages.failure("engine.tensorrt_shape_refused", tensor=name, shape=_shape_text(shape))
        first: dict[str, torch.Tensor] = {}
        for name, output in self._outputs.items():
            shape = tuple(self._context.get_tensor_shape(output.name))
            if min(shape, default=0) < 0:
                raise messages.failure("engine.tensorrt_unknown_output", tensor=name)
            first[name] = torch.empty(shape, dtype=output.dtype, device=self._device)
        self._buffers = (first, {name: torch.empty_like(tensor) for name, tensor in first.items()})
        self._shapes = shapes

    def _nearest_profile(self, shapes: dict[str, Shape]) -> int:
        """Return the index of the profile that takes these shapes and is optimized for the nearest ones."""
        found = []
        for profile in range(self._engine.num_optimization_profiles):
            distance = 0
            for name, shape in shapes.items():
                low, best, high = self._profile_shapes(name, profile)
                if len(low) != len(shape) or not all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True)):
                    break
                distance += sum(abs(n - b) for n, b in zip(shape, best, strict=True))
            else:
                found.append((distance, profile))
        if not found:
            raise EngineError(
                "engine.no_profile_fits",
                profiles=" or ".join(self._range(index) for index in range(self._engine.num_optimization_profiles)),
                given=", ".join(f"{name} {_shape_text(shape)}" for name, shape in shapes.items()),
            )
        return min(found)[1]

    def _range(self, profile: int) -> str:
        """Return the tensors of a profile whose shapes vary, with minimum and maximum, as text."""
        ranges = {name: self._profile_shapes(name, profile) for name in self._inputs}
        varying = {name: shapes for name, shapes in ranges.items() if shapes[0] != shapes[2]} or ranges
        return ", ".join(
            f"{name} {_shape_text(low)} to {_shape_text(high)}" for name, (low, _, high) in varying.items()
        )

    def _profile_shapes(self, name: str, profile: int) -> tuple[Shape, Shape, Shape]:
        tensor = self._inputs[name]
        if min(tensor.shape, default=0) >= 0:
            return tensor.shape, tensor.shape, tensor.shape
        low, best, high = self._engine.get_tensor_profile_shape(tensor.name, profile)
        return tuple(low), tuple(best), tuple(high)

    def _bind_inputs(self, given: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], bool]:
        """Return the tensors that the engine reads, and whether the next similar call will use the same addresses.

        Outputs of the call before are read in place; a tensor from the buffers that are about to be written is copied.
        """
        written = {_storage(tensor) for tensor in self._buffers[self._turn].values()}
        previous = {tensor.data_ptr() for tensor in self._buffers[1 - self._turn].values()}
        bound, repeatable = {}, True
        for name, tensor in given.items():
            if tensor.data_ptr() in previous:
                bound[name] = tensor
            elif self._graphs_wanted and tensor.nbytes <= _STAGED_BYTES:
                if name not in self._staged:
                    self._staged[name] = torch.empty_like(tensor)
                bound[name] = self._staged[name].copy_(tensor)
            else:
                bound[name] = tensor.clone() if _storage(tensor) in written else tensor
                repeatable = False
        return bound, repeatable

    def _execute(
        self, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor], messages: tensorrt_library.Messages
    ) -> None:
        for tensors, kinds in ((inputs, self._inputs), (outputs, self._outputs)):
            for name, tensor in tensors.items():
                if not self._context.set_tensor_address(kinds[name].name, tensor.data_ptr()):
                    raise messages.failure("engine.tensorrt_address_refused", tensor=name)
        if not self._context.execute_async_v3(self._stream.cuda_stream):
            raise messages.failure("engine.tensorrt_not_run")

    def _replay(
        self, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor], messages: tensorrt_library.Messages
    ) -> None:
        """Launch the CUDA graph for these addresses; capture it first if there is none yet."""
        key = (self._turn, *(tensor.data_ptr() for tensor in inputs.values()))
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._capture(inputs, outputs, messages)
            if graph is None:
                self._execute(inputs, outputs, messages)
                return
            self._graphs[key] = graph
        with torch.cuda.stream(self._stream):
            graph.replay()

    def _capture(
        self, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor], messages: tensorrt_library.Messages
    ) -> torch.cuda.CUDAGraph | None:
        """Capture one call without running it. If that fails, return None and use no graphs in this session."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                # Other threads may allocate during the capture.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._execute(inputs, outputs, messages)
                finally:
                    graph.capture_end()
        except (EngineError, RuntimeError) as error:
            logger.warning("CUDA graphs are off for this engine: %s", error)
            self._graphs_wanted = False
            self._graphs.clear()
            return None
        return graph


class _Tensor:
    """One input or output of the engine; `shape` has -1 for dynamic sizes."""

    def __init__(self, trt: Any, engine: Any, name: str) -> None:
        self.name = name
        self.dtype = tensorrt_library.torch_dtype(engine.get_tensor_dtype(name))
        self.shape: Shape = tuple(engine.get_tensor_shape(name))
        self.is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
            raise EngineError("engine.tensorrt_host_tensor", tensor=name)


def _tensors(trt: Any, engine: Any, names: Mapping[str, str]) -> tuple[dict[str, _Tensor], dict[str, _Tensor]]:
    tensors = [_Tensor(trt, engine, engine.get_tensor_name(index)) for index in range(engine.num_io_tensors)]
    inputs = {names.get(tensor.name, tensor.name): tensor for tensor in tensors if tensor.is_input}
    outputs = {names.get(tensor.name, tensor.name): tensor for tensor in tensors if not tensor.is_input}
    return inputs, outputs


def deserialize(runtime: Any, plan: Path, messages: tensorrt_library.Messages) -> Any:
    """Return the `ICudaEngine` in a plan file.

    Raises:
        EngineError: if the file cannot be read, or TensorRT cannot load it.
        torch.OutOfMemoryError: if the GPU's memory is too small.
    """
    try:
        with plan.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            engine = runtime.deserialize_cuda_engine(data)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise EngineError("engine.file_unreadable", file=plan.name, error=str(error)) from error
    if engine is None:
        raise messages.failure("engine.tensorrt_plan_refused")
    return engine


def read_names(folder: Path) -> Mapping[str, str]:
    """Return the program's names of the tensors of a plan that torch-tensorrt built.

    Raises:
        EngineError: if the file is missing or damaged.
    """
    try:
        names = json.loads((folder / NAMES_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError("engine.file_unreadable", file=NAMES_FILE, error=str(error)) from error
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise EngineError("engine.file_damaged", file=NAMES_FILE)
    return names


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _shape_text(shape: Shape) -> str:
    return "×".join(map(str, shape)) or "one value"
