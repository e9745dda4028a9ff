"""Runs a TensorRT plan: shapes, buffers, streams and CUDA graphs. Versions 8.6, 10 and 11.

A plan is machine code and runs with our rights: `sessions.open_session` hands over only files whose sha256 is the one
that was noted when they were built here.
"""

import logging
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from runtime.core.errors import EngineError
from runtime.engines import tensorrt_library
from runtime.engines.closeable import Closing

logger = logging.getLogger(__name__)

Shape = tuple[int, ...]
# TensorRT wants addresses that are multiples of this; torch's allocations are, views into them need not be.
_ALIGNMENT = 256
# Inputs up to this size are copied to where a CUDA graph looks for them; larger ones are read where they are.
_STAGED_BYTES = 64 << 20


class TensorRTSession(Closing):
    """One deserialised plan, its execution context and its buffers. Not safe between threads.

    Outputs are written into two sets of buffers in turn: an output stays as it is until the call after the next, and
    may be an input of the next, which reads it where it lies. Runs on a stream of its own, ordered with the caller's.

    Args:
        plan: the engine file.
        device: a CUDA device.
        cuda_graphs: whether calls of an unchanged shape are captured after the first and then replayed.
        names: the program's name of each of the engine's tensors, where they differ.

    Raises:
        EngineError: if the plan is damaged, of another TensorRT or GPU, or there is no GPU.
        torch.OutOfMemoryError: if the GPU's memory does not suffice.
    """

    def __init__(
        self, plan: Path, *, device: str, cuda_graphs: bool = True, names: Mapping[str, str] | None = None
    ) -> None:
        trt = tensorrt_library.load()
        self._device = torch.device(device)
        self._graphs_wanted = cuda_graphs
        self._graphs: dict[tuple[int, ...], torch.cuda.CUDAGraph] = {}
        self._shapes: dict[str, Shape] | None = None
        self._profile = 0
        self._warm = False
        self._turn = 0
        self._buffers: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
        self._staged: dict[str, torch.Tensor] = {}
        with torch.cuda.device(self._device), tensorrt_library.listen() as said:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch's own
            # Memory that torch keeps for later is not there for TensorRT.
            torch.cuda.empty_cache()
            self._runtime = trt.Runtime(tensorrt_library.logger())
            self._engine = deserialize(self._runtime, plan, said)
            made = tensorrt_library.create_context(trt, self._engine, self._device)
            if made is None:
                raise said.failure("TensorRT cannot run the engine")
            self._context, self._memory = made
            self._inputs, self._outputs = _tensors(trt, self._engine, names or {})

    def close(self) -> None:
        """Free engine, context, buffers and graphs. Outputs that are still held stay."""
        if self._engine is None:
            return
        self._stream.synchronize()
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._staged.clear()
        self._buffers = ({}, {})
        # In this order: each needs the next.
        self._context = None
        self._memory = torch.empty(0)
        self._engine = None
        self._runtime = None

    def infer(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run the engine once.

        Args:
            inputs: the program's; of another dtype or device they are converted.

        Returns:
            The program's outputs, on the session's device.

        Raises:
            EngineError: if the engine does not take these inputs or does not run.
            torch.OutOfMemoryError: if the GPU's memory does not suffice.
        """
        if self._engine is None:
            raise RuntimeError("the session is closed")
        if set(inputs) != set(self._inputs):
            raise EngineError(
                f"The engine takes {', '.join(sorted(self._inputs))}; it was given {', '.join(sorted(inputs))}.",
                tensorrt_library.REMEDY,
            )
        with torch.cuda.device(self._device), torch.no_grad(), tensorrt_library.listen() as said:
            given = {name: self._at_edge(name, tensor) for name, tensor in inputs.items()}
            self._stream.wait_stream(torch.cuda.current_stream())
            self._set_shapes({name: tuple(tensor.shape) for name, tensor in given.items()}, said)
            outputs = self._buffers[self._turn]
            bound, settled = self._place(given)
            # Placing may have copied, on the caller's stream.
            self._stream.wait_stream(torch.cuda.current_stream())
            if settled and self._warm and self._graphs_wanted:
                self._replay(bound, outputs, said)
            else:
                self._execute(bound, outputs, said)
            self._warm = True
            self._turn = 1 - self._turn
            torch.cuda.current_stream().wait_stream(self._stream)
        return dict(outputs)

    def _at_edge(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor as the engine reads it, itself where it can be."""
        tensor = tensor.to(self._device, self._inputs[name].dtype).contiguous()
        return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor

    def _set_shapes(self, shapes: dict[str, Shape], said: tensorrt_library.Messages) -> None:
        """Prepare profile, shapes and buffers; nothing to do where they are as in the call before."""
        if shapes == self._shapes:
            return
        self._shapes = None
        # A captured graph belongs to the shapes that it was captured with.
        self._stream.synchronize()
        self._graphs.clear()
        self._staged.clear()
        self._buffers = ({}, {})
        self._warm = False
        profile = self._fitting_profile(shapes)
        if profile != self._profile:
            if not self._context.set_optimization_profile_async(profile, self._stream.cuda_stream):
                raise said.failure("TensorRT does not change the engine's shape profile")
            self._profile = profile
        for name, shape in shapes.items():
            if not self._context.set_input_shape(self._inputs[name].name, shape):
                raise said.failure(f"The engine does not take {name} of {_words(shape)}")
        first: dict[str, torch.Tensor] = {}
        for name, output in self._outputs.items():
            shape = tuple(self._context.get_tensor_shape(output.name))
            if min(shape, default=0) < 0:
                raise said.failure(f"The engine does not know the size of its output {name}")
            first[name] = torch.empty(shape, dtype=output.dtype, device=self._device)
        self._buffers = (first, {name: torch.empty_like(tensor) for name, tensor in first.items()})
        self._shapes = shapes

    def _fitting_profile(self, shapes: dict[str, Shape]) -> int:
        """Return the profile that takes these shapes and is optimised for the nearest."""
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
            asked = ", ".join(f"{name} {_words(shape)}" for name, shape in shapes.items())
            built = " or ".join(self._range(profile) for profile in range(self._engine.num_optimization_profiles))
            raise EngineError(f"The engine was built for {built}; asked: {asked}.", "Build one for this size.")
        return min(found)[1]

    def _range(self, profile: int) -> str:
        """Return a profile in words: what varies, from its least to its most."""
        ranges = {name: self._profile_shapes(name, profile) for name in self._inputs}
        varying = {name: shapes for name, shapes in ranges.items() if shapes[0] != shapes[2]} or ranges
        return ", ".join(f"{name} {_words(low)} to {_words(high)}" for name, (low, _, high) in varying.items())

    def _profile_shapes(self, name: str, profile: int) -> tuple[Shape, Shape, Shape]:
        tensor = self._inputs[name]
        if min(tensor.shape, default=0) >= 0:
            return tensor.shape, tensor.shape, tensor.shape
        low, best, high = self._engine.get_tensor_profile_shape(tensor.name, profile)
        return tuple(low), tuple(best), tuple(high)

    def _place(self, given: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], bool]:
        """Decide where each input is read, and whether the next call like this one will read it there too.

        The outputs of the call before are read where they are; a tensor of the set that is written now is copied.
        """
        now = {_storage(tensor) for tensor in self._buffers[self._turn].values()}
        before = {tensor.data_ptr() for tensor in self._buffers[1 - self._turn].values()}
        bound, settled = {}, True
        for name, tensor in given.items():
            if tensor.data_ptr() in before:
                bound[name] = tensor
            elif self._graphs_wanted and tensor.nbytes <= _STAGED_BYTES:
                if name not in self._staged:
                    self._staged[name] = torch.empty_like(tensor)
                bound[name] = self._staged[name].copy_(tensor)
            else:
                bound[name] = tensor.clone() if _storage(tensor) in now else tensor
                settled = False
        return bound, settled

    def _execute(
        self, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor], said: tensorrt_library.Messages
    ) -> None:
        for tensors, kinds in ((inputs, self._inputs), (outputs, self._outputs)):
            for name, tensor in tensors.items():
                if not self._context.set_tensor_address(kinds[name].name, tensor.data_ptr()):
                    raise said.failure(f"TensorRT refuses the memory of {name}")
        if not self._context.execute_async_v3(self._stream.cuda_stream):
            raise said.failure("The engine did not run")

    def _replay(
        self, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor], said: tensorrt_library.Messages
    ) -> None:
        """Launch the graph of these addresses, captured if it is the first call with them."""
        key = (self._turn, *(tensor.data_ptr() for tensor in inputs.values()))
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._capture(inputs, outputs, said)
            if graph is None:
                self._execute(inputs, outputs, said)
                return
            self._graphs[key] = graph
        with torch.cuda.stream(self._stream):
            graph.replay()

    def _capture(
        self, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor], said: tensorrt_library.Messages
    ) -> torch.cuda.CUDAGraph | None:
        """Record one call without running it; None if this engine cannot be recorded: then no call is from now on."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                # Other threads may allocate meanwhile.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._execute(inputs, outputs, said)
                finally:
                    graph.capture_end()
        except (EngineError, RuntimeError) as error:
            logger.warning("CUDA graphs are off for this engine: %s", error)
            self._graphs_wanted = False
            self._graphs.clear()
            return None
        return graph


class _Tensor:
    """One of the engine's inputs or outputs; sizes that vary are -1 in `shape`."""

    def __init__(self, trt: Any, engine: Any, name: str) -> None:
        self.name = name
        self.dtype = tensorrt_library.torch_dtype(engine.get_tensor_dtype(name))
        self.shape: Shape = tuple(engine.get_tensor_shape(name))
        self.is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
            raise EngineError(f"The engine wants {name} in the host's memory.", tensorrt_library.REMEDY)


def _tensors(trt: Any, engine: Any, names: Mapping[str, str]) -> tuple[dict[str, _Tensor], dict[str, _Tensor]]:
    tensors = [_Tensor(trt, engine, engine.get_tensor_name(index)) for index in range(engine.num_io_tensors)]
    inputs = {names.get(tensor.name, tensor.name): tensor for tensor in tensors if tensor.is_input}
    outputs = {names.get(tensor.name, tensor.name): tensor for tensor in tensors if not tensor.is_input}
    return inputs, outputs


def deserialize(runtime: Any, plan: Path, said: tensorrt_library.Messages) -> Any:
    """Return the engine in a plan.

    Raises:
        EngineError: if the file cannot be read or TensorRT does not take it.
        torch.OutOfMemoryError: if the GPU's memory does not suffice.
    """
    try:
        with plan.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            engine = runtime.deserialize_cuda_engine(data)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise EngineError(f"The engine file cannot be read: {error}.", tensorrt_library.REMEDY) from error
    if engine is None:
        raise said.failure("TensorRT does not take the engine file")
    return engine


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _words(shape: Shape) -> str:
    return "×".join(map(str, shape)) or "one value"
