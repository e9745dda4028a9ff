"""The contract of an imported engine file: its input and output tensors, precision and memory.

Opening an engine file can run code that it contains, so `read_contract` is called in a child process. Importing this
module imports no torch.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from runtime.core.errors import EngineError, first_line
from runtime.core.facts import Fact
from runtime.core.plan import BACKEND_TITLES

if TYPE_CHECKING:
    import torch

# Stands for the size of a dynamic axis.
DYNAMIC = -1
# Maximum of a dynamic axis whose range the file does not state.
UNLIMITED = 1 << 30
Sizes = tuple[int, ...]
# Minimum, optimum and maximum of one size; the optimum is 0 if the file does not state one.
Span = tuple[int, int, int]

# Fragments of TensorRT's error messages ("Platform specific tag mismatch"), and the codes of their causes.
_PLAN_MISMATCHES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("incompatible device", "expecting compute"), "engine.plan_of_another_gpu"),
    (("latform specific tag", "latformTag"), "engine.plan_of_another_system"),
    (("version", "Version"), "engine.plan_of_another_tensorrt"),
)
_MAX_WEIGHT_FILES = 100
# Below the 255 of most file systems.
_MAX_NAME_BYTES = 200
_ONNX_PRECISIONS = {"FLOAT": "float32", "FLOAT16": "float16", "BFLOAT16": "bfloat16"}


@dataclass(frozen=True)
class Port:
    """One input or output.

    Attributes:
        name: its name in the file.
        dtype: the name of its torch dtype.
        sizes: one per axis, `DYNAMIC` for a dynamic one.
        ranges: minimum, optimum and maximum sizes for each shape profile; empty if the file does not state them.
    """

    name: str
    dtype: str
    sizes: Sizes
    ranges: tuple[tuple[Sizes, Sizes, Sizes], ...] = ()

    def span(self, axis: int, profile: int) -> Span:
        """Return the possible sizes of an axis in a profile."""
        size = self.sizes[axis]
        if size != DYNAMIC:
            return size, size, size
        if not self.ranges:
            return 1, 0, UNLIMITED
        low, best, high = (sizes[axis] for sizes in self.ranges[profile])
        return low, best, high

    def __str__(self) -> str:
        """Return "sample (1, 16, any, 45, 80) float16"."""
        sizes = ", ".join("any" if size == DYNAMIC else str(size) for size in self.sizes)
        return f"{self.name} ({sizes}) {self.dtype}"


@dataclass(frozen=True, kw_only=True)
class Contract:
    """The properties of an engine file that can be read without running it.

    Attributes:
        backend: "tensorrt" or "onnxruntime".
        made_by: the program that wrote the file; empty if unknown.
        inputs, outputs: in the file's order.
        precision: dtype of its arithmetic, as far as the file shows it; determines the tolerance of verification.
        working_bytes: memory that it needs while it runs, in addition to its weights; 0 if unknown.
        weight_files: names of the files with its external weights.
    """

    backend: str
    made_by: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    precision: str
    working_bytes: int = 0
    weight_files: tuple[str, ...] = ()

    @property
    def profiles(self) -> int:
        """The number of shape profiles; 1 if the file has none."""
        return max((len(port.ranges) for port in self.inputs), default=0) or 1

    def describe(self) -> list[Fact]:
        """Return the contract as text for the user, one fact per line."""
        made_by = self.made_by or Fact("engine.unknown_maker")
        data = {"backend": BACKEND_TITLES[self.backend], "made_by": made_by, "memory": self.working_bytes}
        return [
            Fact("engine.contract_with_memory" if self.working_bytes else "engine.contract", data),
            *(Fact("engine.contract_input", {"tensor": str(port)}) for port in self.inputs),
            *(Fact("engine.contract_output", {"tensor": str(port)}) for port in self.outputs),
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the contract as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> "Contract":
        """Parse the result of `to_json`.

        Raises:
            ValueError: if the value is invalid.
        """
        return TypeAdapter(cls).validate_python(value)


def read_contract(path: Path, backend: str, device: str) -> Contract:
    """Open an engine file and return its contract.

    Raises:
        EngineError: if it cannot be opened on this machine.
    """
    import torch

    return _read_plan(path, torch.device(device)) if backend == "tensorrt" else _read_onnx(path)


def _read_plan(path: Path, device: "torch.device") -> Contract:
    import torch

    from runtime.engines import tensorrt_library
    from runtime.engines.sessions.tensorrt import deserialize

    trt = tensorrt_library.load()
    with torch.cuda.device(device), tensorrt_library.listen() as messages:
        runtime = trt.Runtime(tensorrt_library.logger())
        try:
            engine = deserialize(runtime, path, messages)
        except EngineError as error:
            errors = " ".join(messages.errors)
            code = next((code for parts, code in _PLAN_MISMATCHES if any(part in errors for part in parts)), None)
            raise EngineError(code or "engine.plan_damaged", cause=error.fact) from error
        ports = {
            name: _plan_port(trt, engine, name)
            for name in (engine.get_tensor_name(index) for index in range(engine.num_io_tensors))
        }
        inputs = tuple(port for name, port in ports.items() if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT)
        outputs = tuple(port for port in ports.values() if port not in inputs)
        memory = getattr(engine, "device_memory_size_v2", None) or engine.device_memory_size
    types = {port.dtype for port in (*inputs, *outputs)}
    return Contract(
        backend="tensorrt",
        made_by=f"TensorRT {trt.__version__}",
        inputs=inputs,
        outputs=outputs,
        # A plan does not state its precision; most are float16. The error of a wrong engine exceeds any tolerance.
        precision="bfloat16" if "bfloat16" in types else "float16",
        working_bytes=int(memory),
    )


def _plan_port(trt: Any, engine: Any, name: str) -> Port:
    from runtime.engines import tensorrt_library

    if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
        raise EngineError("engine.tensorrt_host_tensor", tensor=name)
    sizes = tuple(int(size) for size in engine.get_tensor_shape(name))
    ranges: list[tuple[Sizes, Sizes, Sizes]] = []
    if DYNAMIC in sizes and engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT:
        for profile in range(engine.num_optimization_profiles):
            low, best, high = (tuple(map(int, shape)) for shape in engine.get_tensor_profile_shape(name, profile))
            ranges.append((low, best, high))
    dtype = str(tensorrt_library.torch_dtype(engine.get_tensor_dtype(name))).removeprefix("torch.")
    return Port(name=name, dtype=dtype, sizes=sizes, ranges=tuple(ranges))


def _read_onnx(path: Path) -> Contract:
    import onnx

    try:
        model = onnx.load(str(path), load_external_data=False)
        if not model.graph.output:
            raise EngineError("engine.onnx_without_outputs")
        return _onnx_contract(model)
    except EngineError:
        raise
    except Exception as error:  # protobuf's errors have no common base class
        raise EngineError("engine.onnx_damaged", error=first_line(error)) from error


def _onnx_contract(model: Any) -> Contract:
    weights = {tensor.name for tensor in model.graph.initializer}
    opset = max((entry.version for entry in model.opset_import if entry.domain in {"", "ai.onnx"}), default=0)
    maker = f"{model.producer_name} {model.producer_version}".strip() or "an unknown program"
    inputs = tuple(_onnx_port(value) for value in model.graph.input if value.name not in weights)
    outputs = tuple(_onnx_port(value) for value in model.graph.output)
    types = {port.dtype for port in (*inputs, *outputs)} | {_weights_precision(model)}
    return Contract(
        backend="onnxruntime",
        made_by=f"{maker} (ONNX, opset {opset})",
        inputs=inputs,
        outputs=outputs,
        # The least precise dtype, because inputs and outputs are rounded too.
        precision=next((name for name in ("bfloat16", "float16") if name in types), "float32"),
        weight_files=_weight_files(model),
    )


def _onnx_port(value: Any) -> Port:
    import onnx

    tensor = value.type.tensor_type
    sizes = tuple(size.dim_value if size.HasField("dim_value") else DYNAMIC for size in tensor.shape.dim)
    try:
        dtype = str(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    except KeyError:
        dtype = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    return Port(name=value.name, dtype=dtype, sizes=sizes)


def _weights_precision(model: Any) -> str:
    """Return the dtype of most of the weights."""
    import onnx

    counts: dict[str, int] = {}
    for tensor in model.graph.initializer:
        name = onnx.TensorProto.DataType.Name(tensor.data_type)
        counts[name] = counts.get(name, 0) + math.prod(tensor.dims)
    most = max((name for name in counts if name in _ONNX_PRECISIONS), key=lambda name: counts[name], default="FLOAT")
    return _ONNX_PRECISIONS[most]


def _weight_files(model: Any) -> tuple[str, ...]:
    """Return the names of the files with a model's weights, which must be in the same folder.

    Raises:
        EngineError: if one is in another folder, or has no name that every file system accepts.
    """
    names = {_location(tensor) for tensor in _tensors(model) if tensor.external_data or tensor.data_location}
    if len(names) > _MAX_WEIGHT_FILES:
        raise EngineError("engine.onnx_many_weight_files", most=_MAX_WEIGHT_FILES)
    for name in names:
        if Path(name).name != name or "\\" in name or name.startswith("."):
            raise EngineError("engine.onnx_weights_outside", file=name[:80])
        if not name or not name.isprintable() or len(name.encode()) > _MAX_NAME_BYTES:
            raise EngineError("engine.onnx_weights_name", file=name[:80])
    return tuple(sorted(names))


def _location(tensor: Any) -> str:
    return next((str(entry.value) for entry in tensor.external_data if entry.key == "location"), "")


def _tensors(model: Any) -> Iterator[Any]:
    """Yield all tensors of a model: initializers, and those in attributes of nodes, subgraphs and functions."""
    import onnx

    stack = [model]
    while stack:
        message = stack.pop()
        if isinstance(message, onnx.TensorProto):
            yield message
            continue
        for field, value in message.ListFields():
            if field.message_type is not None:
                stack += [value] if hasattr(value, "ListFields") else value
