"""A stand-in for TensorRT on a CPU: an engine runs its program in PyTorch, through the addresses that it is given.

`tests/engines/contract` checks that the names which the sessions use exist in TensorRT. Here "cuda" is the CPU, whose
streams do nothing.
"""

import ctypes
import enum
import json
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.engines import tensorrt_library
from runtime.engines.block_programs import BlockProgram
from runtime.engines.component_programs import Program
from runtime.engines.sessions import tensorrt
from runtime.planner.choice.engine_index import ShapeProfile

Shape = tuple[int, ...]
_NAMES = {torch.float32: "FLOAT", torch.float16: "HALF", torch.bfloat16: "BF16", torch.int64: "INT64"}


class Mode(enum.Enum):
    """As `tensorrt.TensorIOMode`."""

    INPUT = 1
    OUTPUT = 2


class Location(enum.Enum):
    """As `tensorrt.TensorLocation`."""

    DEVICE = 0


def tensor_at(address: int, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor in memory at an address."""
    count = int(torch.Size(shape).numel())
    size = torch.empty(0, dtype=dtype).element_size()
    data = (ctypes.c_char * (count * size)).from_address(address)
    return torch.frombuffer(data, dtype=dtype, count=count).view(shape)


class Engine:
    """An engine for one program.

    Args:
        program: what it computes.
        profile: its size; a block program takes any number of tokens up to its own.
        memory: bytes that a context needs.
        profiles: 2 for a second profile, which takes the largest size only.
    """

    def __init__(self, program: Program, profile: ShapeProfile, memory: int = 1000, profiles: int = 1) -> None:
        self.program = program
        self.num_optimization_profiles = profiles
        self.device_memory_size = memory
        self.contexts = 0
        self._low, _, self._high = program.shapes(profile)
        inputs = program.inputs(profile.opt)
        self.kinds = {name: (Mode.INPUT, tensor.dtype, self._shape(name)) for name, tensor in inputs.items()}
        outputs = program.run(**inputs)
        blocks = isinstance(program, BlockProgram)
        for name, tensor in outputs.items():
            shape = (-1, *tensor.shape[1:]) if blocks else tuple(tensor.shape)
            known = f"new_{name}" if name == "x" or name.startswith("cache_") else name
            self.kinds[known] = (Mode.OUTPUT, tensor.dtype, shape)
        self.num_io_tensors = len(self.kinds)

    def _shape(self, name: str) -> Shape:
        return tuple(-1 if a != b else a for a, b in zip(self._low[name], self._high[name], strict=True))

    def get_tensor_name(self, index: int) -> str:
        return list(self.kinds)[index]

    def get_tensor_mode(self, name: str) -> Mode:
        return self.kinds[name][0]

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=_NAMES[self.kinds[name][1]])

    def get_tensor_shape(self, name: str) -> Shape:
        return self.kinds[name][2]

    def get_tensor_location(self, name: str) -> Location:
        return Location.DEVICE

    def get_tensor_profile_shape(self, name: str, profile: int) -> tuple[Shape, Shape, Shape]:
        return self._high[name] if profile else self._low[name], self._high[name], self._high[name]

    def create_execution_context_without_device_memory(self) -> "Context":
        self.contexts += 1
        return Context(self)


class InspectedEngine(Engine):
    """An engine with an inspector, which lists two layers."""

    num_layers = 2

    def create_engine_inspector(self) -> Any:
        def describe(index: int, form: str) -> str:
            assert form == "JSON"
            return json.dumps({"Name": f"layer {index}", "LayerType": "gemm"}, indent=1)

        return SimpleNamespace(get_layer_information=describe)


class Context:
    """An execution context; `fails` makes it raise, or return False, instead of running."""

    fails: Exception | bool = False

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.device_memory = 0
        self.shapes: dict[str, Shape] = {}
        self.bound: dict[str, int] = {}
        self.profile = 0

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        if isinstance(self.fails, Exception):
            raise self.fails
        self.profile = profile
        return not self.fails

    def set_input_shape(self, name: str, shape: Shape) -> bool:
        self.shapes[name] = shape
        return True

    def get_tensor_shape(self, name: str) -> Shape:
        tokens = next((shape[0] for shape in self.shapes.values()), -1)
        return tuple(tokens if size < 0 else size for size in self.engine.kinds[name][2])

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.bound[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        assert self.device_memory, "the context has no working memory"
        assert stream, "on the default stream TensorRT waits for the GPU"
        if isinstance(self.fails, Exception):
            raise self.fails
        if self.fails:
            return False
        # Everything that was in the working memory is lost.
        ctypes.memset(self.device_memory, 255, self.engine.device_memory_size)
        kinds = self.engine.kinds
        inputs, outputs = (
            {
                name: tensor_at(self.bound[name], self.shapes.get(name, self.get_tensor_shape(name)), dtype)
                for name, (mode, dtype, _) in kinds.items()
                if mode == wanted
            }
            for wanted in (Mode.INPUT, Mode.OUTPUT)
        )
        for name, result in self.engine.program.run(**inputs).items():
            outputs[f"new_{name}" if f"new_{name}" in outputs else name].copy_(result)
        return True


class Stream:
    """As `torch.cuda.Stream`."""

    def __init__(self, cuda_stream: int = 1) -> None:
        self.cuda_stream = cuda_stream

    def wait_stream(self, _: "Stream") -> None: ...

    def synchronize(self) -> None: ...


class Graph:
    """As `torch.cuda.CUDAGraph`; what is captured has run already. `fails` makes it raise when it is replayed."""

    fails: Exception | None = None

    def capture_begin(self, **_: object) -> None: ...

    def capture_end(self) -> None: ...

    def reset(self) -> None: ...

    def replay(self) -> None:
        if self.fails is not None:
            raise self.fails


@contextmanager
def engines(found: Mapping[bytes, Engine]) -> Iterator[None]:
    """Make TensorRT deserialise these engines from files with the given content, in a `with` block."""

    def runtime(_: object) -> Any:
        return SimpleNamespace(deserialize_cuda_engine=lambda data: found.get(bytes(data)))

    library = SimpleNamespace(
        Runtime=runtime,
        TensorIOMode=Mode,
        TensorLocation=Location,
        LayerInformationFormat=SimpleNamespace(JSON="JSON"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorrt_library, "load", lambda *_, **__: library)
        patch.setattr(tensorrt_library, "logger", lambda *_: None)
        patch.setattr(tensorrt_library, "_context_memory", weakref.WeakValueDictionary())
        # PyTorch aligns memory to 64 bytes on a CPU, and to 512 on a GPU.
        patch.setattr(tensorrt, "_ALIGNMENT", 64)
        patch.setattr(torch.cuda, "device", lambda _: nullcontext())
        patch.setattr(torch.cuda, "stream", lambda _: nullcontext())
        patch.setattr(torch.cuda, "Stream", lambda *_, **__: Stream())
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "current_stream", lambda *_: Stream(0))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        for name in ("empty_cache", "synchronize"):
            patch.setattr(torch.cuda, name, lambda *_: None)
        yield
