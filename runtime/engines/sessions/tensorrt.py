"""Runs a TensorRT plan: shapes, buffers, streams and CUDA graphs. TensorRT 8.6, 10 and 11.

A plan is machine code that runs with the user's rights: `sessions.open_session` passes only content whose SHA-256 is
the one recorded at build time.
"""

import contextlib
import logging
import mmap
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from runtime.core.errors import EngineError
from runtime.core.plan import is_block_program
from runtime.core.units import shape_text
from runtime.core.untrusted_files import read_json
from runtime.engines import tensorrt_library
from runtime.engines.manifest import Content
from runtime.engines.sessions import BlockSession, Session, Weights
from runtime.planner.choice.engine_index import EngineRecord
from runtime.upstream.torch import RECORDING, recording_stream

logger = logging.getLogger(__name__)

Shape = tuple[int, ...]
# torch-tensorrt's names of a plan's tensors, in the engine's folder.
NAMES_FILE = "tensors.json"
# TensorRT requires aligned addresses. torch's allocations are aligned; views into them may not be.
_ALIGNMENT = 256
# Inputs of up to this size together are copied into the buffers of a CUDA graph; more are read in place, without one.
_STAGED_BYTES = 64 << 20
# Numbers of tokens that a block session has a context for: full chunks, and the last chunks of a few clips.
_MOST_CONTEXTS = 8
# An input of every block program.
_STREAM = "x"


def open_engine(
    folder: Path, record: EngineRecord, content: Content, *, device: str, weights: Weights
) -> "PlanSession":
    """See `sessions.open_session`."""
    from runtime.engines.onnx_export import TENSOR_NAMES

    names = read_names(folder) if record.key.builder == "torch_tensorrt" else TENSOR_NAMES
    if is_block_program(record.key.program):
        return TensorRTBlockSession(content, device=device, names=names)
    return TensorRTSession(content, device=device, cuda_graphs=uses_cuda_graphs(record), names=names)


def uses_cuda_graphs(record: EngineRecord) -> bool:
    """Return whether the engine's key says that its calls are captured in CUDA graphs."""
    return dict(record.key.options).get("cuda_graphs", "on") == "on"


class PlanSession(Session):
    """One deserialised plan and its tensors: what sessions of components and of blocks share.

    Execution contexts share one working memory per GPU, see `tensorrt_library.context_memory`: callers run all sessions
    of a GPU on one stream, or on streams that wait for each other.

    Args:
        plan: the engine file, or its content.
        device: a CUDA device.
        names: the program's names of the engine's tensors, where they differ.

    Attributes:
        library: see `tensorrt_library.load`.

    Raises:
        EngineError: if the plan is damaged, was built by another TensorRT or for another GPU, or there is no GPU.
        torch.OutOfMemoryError: if the GPU's memory is too small.
    """

    library: ClassVar[str] = "tensorrt"

    def __init__(self, plan: Path | Content, *, device: str, names: Mapping[str, str] | None = None) -> None:
        self._trt = tensorrt_library.load(self.library)
        self._device = torch.device(device)
        if self._device == torch.device("cuda"):
            self._device = torch.device("cuda", torch.cuda.current_device())
        with torch.cuda.device(self._device), tensorrt_library.listen() as messages:
            with tensorrt_library.failures(self._device, "engine.tensorrt_plan_refused"):
                self._stream = recording_stream(self._device)
                # TensorRT cannot use memory that torch's allocator caches.
                torch.cuda.empty_cache()
                self._runtime = self._trt.Runtime(tensorrt_library.logger(self.library))
                self._engine = deserialize(self._runtime, plan, messages)
            self.context_bytes = tensorrt_library.context_bytes(self._engine)
            self._inputs, self._outputs = _tensors(self._trt, self._engine, names or {})
            self._open(messages)

    @abstractmethod
    def _open(self, messages: tensorrt_library.Messages) -> None:
        """Create what is needed to run the plan."""

    @abstractmethod
    def _forget(self) -> None:
        """Drop all contexts and memory."""

    def close(self) -> None:
        if self._engine is None:
            return
        # Calls may still run, on any stream. After a failure the device may be unusable, and the rest is freed anyway.
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(self._device)
        self._forget()
        # Contexts need the engine, which needs the runtime.
        self._engine = None
        self._runtime = None

    def _create_context(self) -> Any:
        """See `tensorrt_library.create_context`."""
        return tensorrt_library.create_context(self._trt, self._engine)

    def _new_context(self, messages: tensorrt_library.Messages) -> Any:
        with tensorrt_library.failures(self._device, "engine.tensorrt_no_context"):
            context = self._create_context()
            if context is None:
                raise messages.failure("engine.tensorrt_no_context")
            return context

    def _check_open(self) -> None:
        if self._engine is None:
            raise RuntimeError("the session is closed")

    def _check_names(self, inputs: Mapping[str, torch.Tensor]) -> None:
        if inputs.keys() != self._inputs.keys():
            raise EngineError("engine.other_inputs", expected=sorted(self._inputs), given=sorted(inputs))

    def _convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor with the engine's dtype, device and alignment; the same tensor if nothing differs."""
        tensor = tensor.to(self._device, self._inputs[name].dtype).contiguous()
        return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor

    def _profile_shapes(self, name: str, profile: int) -> tuple[Shape, Shape, Shape]:
        tensor = self._inputs[name]
        if min(tensor.shape, default=0) >= 0:
            return tensor.shape, tensor.shape, tensor.shape
        low, best, high = self._engine.get_tensor_profile_shape(tensor.name, profile)
        return tuple(low), tuple(best), tuple(high)


class TensorRTSession(PlanSession):
    """A session of a component: its execution context and its buffers.

    Outputs alternate between two sets of buffers: an output stays valid until the call after the next, and the next
    call may read it in place as an input. Each set is allocated when it is first needed. Runs on its own stream,
    synchronized with the caller's stream.

    Args:
        plan, device, names: see `PlanSession`.
        cuda_graphs: whether to capture the second call with the same shapes, and replay it from then on.

    Raises:
        EngineError, torch.OutOfMemoryError: see `PlanSession`.
    """

    def __init__(
        self, plan: Path | Content, *, device: str, cuda_graphs: bool = True, names: Mapping[str, str] | None = None
    ) -> None:
        self._graphs_wanted = cuda_graphs
        self._graphs: dict[tuple[int, ...], torch.cuda.CUDAGraph] = {}
        self._shapes: dict[str, Shape] | None = None
        self._output_shapes: dict[str, Shape] = {}
        self._profile = 0
        self._warm = False
        self._turn = 0
        self._buffers: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
        self._staged: dict[str, torch.Tensor] = {}
        self._memory: torch.Tensor | None = None
        super().__init__(plan, device=device, names=names)

    def _open(self, messages: tensorrt_library.Messages) -> None:
        self._context = self._new_context(messages)
        self._bind_memory()

    def _forget(self) -> None:
        self._free_buffers()
        self._context = None
        self._memory = None

    def release(self) -> None:
        if self._engine is None:
            return
        with torch.cuda.device(self._device), tensorrt_library.failures(self._device):
            self._stream.synchronize()
        self._free_buffers()
        self._memory = None

    def _free_buffers(self) -> None:
        """Free graphs and buffers. Captured graphs are valid for these buffers only."""
        for graph in self._graphs.values():
            with contextlib.suppress(RuntimeError):
                graph.reset()
        self._graphs.clear()
        self._staged.clear()
        self._buffers = ({}, {})
        self._warm = False

    def infer(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `Session`; outputs are on the session's device."""
        self._check_open()
        self._check_names(inputs)
        with (
            torch.cuda.device(self._device),
            torch.no_grad(),
            tensorrt_library.listen() as messages,
            tensorrt_library.failures(self._device),
        ):
            tensors = {name: self._convert(name, tensor) for name, tensor in inputs.items()}
            self._stream.wait_stream(torch.cuda.current_stream())
            self._set_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()}, messages)
            self._bind_memory()
            outputs = self._next_buffers()
            bound, repeatable = self._bind_inputs(tensors)
            # Binding may have copied, on the caller's stream.
            self._stream.wait_stream(torch.cuda.current_stream())
            if repeatable:
                self._replay(bound, outputs, messages)
            else:
                self._execute(bound, outputs, messages)
            self._warm = True
            self._turn = 1 - self._turn
            torch.cuda.current_stream().wait_stream(self._stream)
        return dict(outputs)

    def _bind_memory(self) -> None:
        """Use the shared working memory. With captured graphs it stays the one that they were captured with."""
        if self._graphs:
            return
        shared = tensorrt_library.context_memory(self._device, self.context_bytes)
        if shared is not self._memory:
            tensorrt_library.set_context_memory(self._context, shared)
            self._memory = shared

    def _set_shapes(self, shapes: dict[str, Shape], messages: tensorrt_library.Messages) -> None:
        """Set profile and shapes; does nothing if the shapes are those of the call before."""
        if shapes == self._shapes:
            return
        self._shapes = None
        self._stream.synchronize()
        self._free_buffers()
        profile = self._nearest_profile(shapes)
        if profile != self._profile:
            with tensorrt_library.failures(self._device, "engine.tensorrt_profile_not_set"):
                if not self._context.set_optimization_profile_async(profile, self._stream.cuda_stream):
                    raise messages.failure("engine.tensorrt_profile_not_set")
            self._profile = profile
        for name, shape in shapes.items():
            if not self._context.set_input_shape(self._inputs[name].name, shape):
                raise messages.failure("engine.tensorrt_shape_refused", tensor=name, shape=shape_text(shape))
        for name, output in self._outputs.items():
            shape = tuple(self._context.get_tensor_shape(output.name))
            if min(shape, default=0) < 0:
                raise messages.failure("engine.tensorrt_unknown_output", tensor=name)
            self._output_shapes[name] = shape
        self._shapes = shapes

    def _next_buffers(self) -> dict[str, torch.Tensor]:
        """Return the set of buffers that the call before did not write."""
        buffers = self._buffers[self._turn]
        if not buffers:
            new = {
                name: torch.empty(shape, dtype=self._outputs[name].dtype, device=self._device)
                for name, shape in self._output_shapes.items()
            }
            buffers.update(new)
        return buffers

    def _nearest_profile(self, shapes: dict[str, Shape]) -> int:
        """Return the index of the profile that takes these shapes and is optimized for the nearest ones."""
        candidates = []
        for profile in range(self._engine.num_optimization_profiles):
            distance = 0
            for name, shape in shapes.items():
                low, best, high = self._profile_shapes(name, profile)
                if len(low) != len(shape) or not all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True)):
                    break
                distance += sum(abs(n - b) for n, b in zip(shape, best, strict=True))
            else:
                candidates.append((distance, profile))
        if not candidates:
            raise EngineError(
                "engine.no_profile_fits",
                profiles=" or ".join(self._range(index) for index in range(self._engine.num_optimization_profiles)),
                given=", ".join(f"{name} {shape_text(shape)}" for name, shape in shapes.items()),
            )
        return min(candidates)[1]

    def _range(self, profile: int) -> str:
        """Return the tensors of a profile whose shapes vary, with minimum and maximum, as text."""
        ranges = {name: self._profile_shapes(name, profile) for name in self._inputs}
        varying = {name: shapes for name, shapes in ranges.items() if shapes[0] != shapes[2]} or ranges
        return ", ".join(f"{name} {shape_text(low)} to {shape_text(high)}" for name, (low, _, high) in varying.items())

    def _bind_inputs(self, tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], bool]:
        """Return the tensors that the engine reads, and whether a CUDA graph of the call can be used again.

        Outputs of the call before are read in place, others are copied into buffers for a graph. Without a graph they
        are read in place too, except a tensor from the buffers that are about to be written.
        """
        previous = {tensor.data_ptr() for tensor in self._buffers[1 - self._turn].values()}
        rest = {name: tensor for name, tensor in tensors.items() if tensor.data_ptr() not in previous}
        repeatable = self._warm and self._graphs_wanted
        if repeatable and sum(tensor.nbytes for tensor in rest.values()) <= _STAGED_BYTES:
            for name, tensor in rest.items():
                if name not in self._staged:
                    self._staged[name] = torch.empty_like(tensor)
                self._staged[name].copy_(tensor)
            return tensors | {name: self._staged[name] for name in rest}, True
        written = {_storage(tensor) for tensor in self._buffers[self._turn].values()}
        copied = {name: tensor.clone() for name, tensor in rest.items() if _storage(tensor) in written}
        return tensors | copied, False

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
            with RECORDING, torch.cuda.stream(self._stream):
                # Other threads may allocate during the capture.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._execute(inputs, outputs, messages)
                finally:
                    graph.capture_end()
        except Exception as error:  # bindings raise errors of any type
            logger.warning("CUDA graphs are off for this engine: %s", error)
            self._graphs_wanted = False
            self._graphs.clear()
            return None
        return graph


class TensorRTBlockSession(PlanSession, BlockSession):
    """A session of a block engine, which reads and writes tensors in place by address.

    A context serves one number of tokens, so that full and last chunks alternate without new shapes, also while a CUDA
    graph is captured. Contexts and working memory that a graph was captured with are kept until `close`.

    Raises:
        EngineError, torch.OutOfMemoryError: see `PlanSession`.
    """

    def _open(self, messages: tensorrt_library.Messages) -> None:
        self._contexts: dict[int, _BoundContext] = {}
        shapes = {name: self._profile_shapes(name, 0) for name in self._inputs}
        dynamic = {axes[2][axis] for name, axes in shapes.items() for axis in self._inputs[name].dynamic_axes}
        # A plan for one number of tokens has static sizes only; all parts take the stream `x`.
        self._most = max(dynamic) if dynamic else self._inputs[_STREAM].shape[0]
        self._is_dynamic = bool(dynamic)

    def _forget(self) -> None:
        self._contexts = {}

    def release(self) -> None:
        if self._engine is None:
            return
        with tensorrt_library.failures(self._device):
            torch.cuda.synchronize(self._device)
        self._contexts = {tokens: bound for tokens, bound in self._contexts.items() if bound.captured}

    @property
    def most_tokens(self) -> int:
        return self._most

    def infer(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `Session`; the outputs are new tensors of each call."""
        self._check_open()
        self._check_names(inputs)
        with torch.cuda.device(self._device), torch.no_grad(), tensorrt_library.failures(self._device):
            tensors = {name: self._convert(name, tensor) for name, tensor in inputs.items()}
            tokens = self._check(tensors, self._inputs)
            outputs = {
                name: torch.empty(output.shape_for(tokens), dtype=output.dtype, device=self._device)
                for name, output in self._outputs.items()
            }
        self.write(tensors, outputs)
        return outputs

    def write(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """See `BlockSession`. Waits for nothing, and can be captured in a CUDA graph after one call with its shapes."""
        self._check_open()
        self._check_names(inputs)
        tokens = self._check(inputs, self._inputs)
        if outputs.keys() != self._outputs.keys() or self._check(outputs, self._outputs) != tokens:
            raise EngineError("engine.other_outputs", expected=sorted(self._outputs), given=sorted(outputs))
        with (
            torch.cuda.device(self._device),
            tensorrt_library.listen() as messages,
            tensorrt_library.failures(self._device),
        ):
            bound = self._contexts.get(tokens) or self._add_context(tokens, messages)
            bound.captured |= torch.cuda.is_current_stream_capturing()
            bound.bind_memory()
            for tensors, kinds in ((inputs, self._inputs), (outputs, self._outputs)):
                for name, tensor in tensors.items():
                    bound.bind(kinds[name].name, tensor.data_ptr(), messages)
            stream = torch.cuda.current_stream()
            if stream.cuda_stream:
                bound.execute(stream, messages)
                return
            # On the default stream TensorRT would wait for the GPU.
            self._stream.wait_stream(stream)
            bound.execute(self._stream, messages)
            stream.wait_stream(self._stream)

    def _add_context(self, tokens: int, messages: tensorrt_library.Messages) -> "_BoundContext":
        free = [number for number, bound in self._contexts.items() if not bound.captured]
        if len(free) >= _MOST_CONTEXTS:
            # Its last call may still run.
            torch.cuda.synchronize(self._device)
            del self._contexts[free[0]]
        bound = _BoundContext(self._new_context(messages), self._device, self.context_bytes)
        profile = self._profile_for(tokens)
        if profile and not bound.set_profile(profile, self._stream):
            raise messages.failure("engine.tensorrt_profile_not_set")
        for name, tensor in self._inputs.items() if self._is_dynamic else ():
            shape = tensor.shape_for(tokens)
            if tensor.dynamic_axes and not bound.set_shape(tensor.name, shape):
                raise messages.failure("engine.tensorrt_shape_refused", tensor=name, shape=shape_text(shape))
        self._contexts[tokens] = bound
        return bound

    def _profile_for(self, tokens: int) -> int:
        """Return the profile that is optimized for a number of tokens; the first one takes any."""
        for profile in range(1, self._engine.num_optimization_profiles) if self._is_dynamic else ():
            low, _, high = self._profile_shapes(_STREAM, profile)
            if low[0] <= tokens <= high[0]:
                return profile
        return 0

    def _check(self, tensors: Mapping[str, torch.Tensor], kinds: "Mapping[str, _Tensor]") -> int:
        """Return the number of tokens of tensors that are read or written in place.

        Raises:
            EngineError: if one has another shape, dtype or device than the engine's, is not contiguous or not aligned.
        """
        tokens = None if self._is_dynamic else self._most
        for name, tensor in tensors.items():
            kind = kinds[name]
            shape = tuple(tensor.shape)
            for axis in kind.dynamic_axes if len(shape) == len(kind.shape) else ():
                tokens = tokens or shape[axis]
            if shape != kind.shape_for(tokens or 1) or not 1 <= (tokens or 1) <= self._most:
                expected = f"{shape_text(kind.shape_for(1))} to {shape_text(kind.shape_for(self._most))}"
                raise EngineError("engine.other_shape", tensor=name, expected=expected, given=shape_text(shape))
            if (
                tensor.dtype != kind.dtype
                or tensor.device != self._device
                or not tensor.is_contiguous()
                or tensor.data_ptr() % _ALIGNMENT
            ):
                raise EngineError("engine.tensorrt_tensor_refused", tensor=name)
        return tokens or self._most


class _BoundContext:
    """The execution context of a block session for one number of tokens.

    Attributes:
        captured: whether a CUDA graph was captured with it: what the graph uses must not change then.
    """

    def __init__(self, context: Any, device: torch.device, memory_bytes: int) -> None:
        self.captured = False
        self._context = context
        self._device = device
        self._memory_bytes = memory_bytes
        self._memory: torch.Tensor | None = None
        self._addresses: dict[str, int] = {}

    def set_profile(self, profile: int, stream: torch.cuda.Stream) -> bool:
        """Select an optimization profile, before anything else is set; return whether the engine has it."""
        selected = bool(self._context.set_optimization_profile_async(profile, stream.cuda_stream))
        stream.synchronize()
        return selected

    def set_shape(self, name: str, shape: Shape) -> bool:
        """Set the shape of an input; return whether the engine takes it."""
        return bool(self._context.set_input_shape(name, shape))

    def bind_memory(self) -> None:
        """Use the shared working memory, or keep what a CUDA graph was captured with."""
        if self.captured and self._memory is not None:
            return
        shared = tensorrt_library.context_memory(self._device, self._memory_bytes)
        if shared is not self._memory:
            tensorrt_library.set_context_memory(self._context, shared)
            self._memory = shared

    def bind(self, name: str, address: int, messages: tensorrt_library.Messages) -> None:
        """Set the address of a tensor, if it is another one than in the call before."""
        if self._addresses.get(name) == address:
            return
        self._addresses.pop(name, None)
        if not self._context.set_tensor_address(name, address):
            raise messages.failure("engine.tensorrt_address_refused", tensor=name)
        self._addresses[name] = address

    def execute(self, stream: torch.cuda.Stream, messages: tensorrt_library.Messages) -> None:
        """Enqueue the call."""
        if not self._context.execute_async_v3(stream.cuda_stream):
            raise messages.failure("engine.tensorrt_not_run")


class _Tensor:
    """One input or output of the engine; `shape` has -1 for dynamic sizes."""

    def __init__(self, trt: Any, engine: Any, name: str) -> None:
        self.name = name
        self.dtype = tensorrt_library.torch_dtype(engine.get_tensor_dtype(name))
        self.shape: Shape = tuple(engine.get_tensor_shape(name))
        self.dynamic_axes = tuple(axis for axis, size in enumerate(self.shape) if size < 0)
        self.is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
            raise EngineError("engine.tensorrt_host_tensor", tensor=name)

    def shape_for(self, tokens: int) -> Shape:
        """Return the shape of a block engine's tensor, in which the dynamic size counts tokens."""
        return tuple(tokens if size < 0 else size for size in self.shape)


def _tensors(trt: Any, engine: Any, names: Mapping[str, str]) -> tuple[dict[str, _Tensor], dict[str, _Tensor]]:
    tensors = [_Tensor(trt, engine, engine.get_tensor_name(index)) for index in range(engine.num_io_tensors)]
    inputs = {names.get(tensor.name, tensor.name): tensor for tensor in tensors if tensor.is_input}
    outputs = {names.get(tensor.name, tensor.name): tensor for tensor in tensors if not tensor.is_input}
    return inputs, outputs


def deserialize(runtime: Any, plan: Path | Content, messages: tensorrt_library.Messages) -> Any:
    """Return the `ICudaEngine` in a plan: a file or its content.

    Raises:
        EngineError: if the file cannot be read, or TensorRT cannot load it.
        torch.OutOfMemoryError: if the GPU's memory is too small.
    """
    if isinstance(plan, Path):
        try:
            with plan.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                engine = runtime.deserialize_cuda_engine(data)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise EngineError("engine.file_unreadable", file=plan.name, error=str(error)) from error
    else:
        engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise messages.failure("engine.tensorrt_plan_refused")
    return engine


def read_names(folder: Path) -> Mapping[str, str]:
    """Return the program's names of the tensors of a plan that torch-tensorrt built.

    Raises:
        EngineError: if the file is missing or damaged.
    """
    try:
        names = read_json(folder / NAMES_FILE)
    except (OSError, ValueError) as error:
        raise EngineError("engine.file_unreadable", file=NAMES_FILE, error=str(error)) from error
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise EngineError("engine.file_damaged", file=NAMES_FILE)
    return names


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
