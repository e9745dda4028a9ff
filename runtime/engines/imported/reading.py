"""Reads the contract of an engine file from the file itself, in a child process: opening one runs it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from runtime.core.errors import EngineError, first_line
from runtime.engines.imported.contract import FREE, Contract, Port

_PLAN_OF_ANOTHER = (
    (
        ("incompatible device", "expecting compute"),
        "it was built for another GPU",
        "Have it built on a GPU of this kind.",
    ),
    (
        ("latform specific tag", "latformTag"),
        "it was built on another system",
        "Have it built on a system of this kind.",
    ),
    (
        ("version", "Version"),
        "it was built by another TensorRT",
        "A plan runs on the TensorRT that made it: have it built anew.",
    ),
)
_COPY = "Copy it again from where it was made, or have it built anew."
_MOST_OUTSIDE = 100
# Which types of an ONNX file's weights stand for which precision.
_WEIGHTS = {"FLOAT": "float32", "FLOAT16": "float16", "BFLOAT16": "bfloat16"}


def read(path: Path, backend: str, device: str) -> Contract:
    """Open an engine file and return its contract.

    Raises:
        EngineError: if it cannot be opened here.
    """
    return _read_plan(path, torch.device(device)) if backend == "tensorrt" else _read_onnx(path)


def _read_plan(path: Path, device: torch.device) -> Contract:
    from runtime.engines import tensorrt_library
    from runtime.engines.sessions.tensorrt import deserialize

    trt = tensorrt_library.load()
    with torch.cuda.device(device), tensorrt_library.listen() as said:
        runtime = trt.Runtime(tensorrt_library.logger())
        try:
            engine = deserialize(runtime, path, said)
        except EngineError as error:
            raise _told_apart(error) from error
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
        # What a plan computes in is not written in it, and plans in float16 are what people make; a wrong one is far
        # outside of every tolerance.
        precision="bfloat16" if "bfloat16" in types else "float16",
        working_bytes=int(memory),
    )


def _plan_port(trt: Any, engine: Any, name: str) -> Port:
    from runtime.engines import tensorrt_library

    if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
        raise EngineError(
            f"The engine wants {name} in the host's memory.", "Have it built with its tensors on the GPU."
        )
    sizes = tuple(int(size) for size in engine.get_tensor_shape(name))
    ranges = []
    if FREE in sizes and engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT:
        for profile in range(engine.num_optimization_profiles):
            low, best, high = (tuple(map(int, shape)) for shape in engine.get_tensor_profile_shape(name, profile))
            ranges.append((low, best, high))
    dtype = str(tensorrt_library.torch_dtype(engine.get_tensor_dtype(name))).removeprefix("torch.")
    return Port(name, dtype, sizes, tuple(ranges))


def _told_apart(error: EngineError) -> EngineError:
    """Say in plain words what TensorRT says in its own."""
    for marks, why, remedy in _PLAN_OF_ANOTHER:
        if any(mark in error.what for mark in marks):
            return EngineError(f"TensorRT does not take the file: {why}.", remedy)
    return EngineError(f"The file is damaged, or no plan of this TensorRT. {error.what}", _COPY)


def _read_onnx(path: Path) -> Contract:
    import onnx

    try:
        model = onnx.load(str(path), load_external_data=False)
        if not model.graph.output:
            raise EngineError("The ONNX file is damaged or none: it has no outputs.", _COPY)
        return _onnx_contract(model)
    except EngineError:
        raise
    except Exception as error:  # protobuf's errors have no base of their own, and what it reads may be anything
        raise EngineError(f"The ONNX file is damaged or none: {first_line(error)}.", _COPY) from error


def _onnx_contract(model: Any) -> Contract:
    weights = {tensor.name for tensor in model.graph.initializer}
    opset = max((entry.version for entry in model.opset_import if entry.domain in {"", "ai.onnx"}), default=0)
    maker = f"{model.producer_name} {model.producer_version}".strip()
    inputs = tuple(_onnx_port(value) for value in model.graph.input if value.name not in weights)
    outputs = tuple(_onnx_port(value) for value in model.graph.output)
    types = {port.dtype for port in (*inputs, *outputs)} | {_type_of_most(model)}
    return Contract(
        backend="onnxruntime",
        made_by=f"{maker or 'an unknown program'} (ONNX, opset {opset})",
        inputs=inputs,
        outputs=outputs,
        # The coarsest: rounding at the edges counts as well.
        precision=next((name for name in ("bfloat16", "float16") if name in types), "float32"),
        beside=_data_files(model),
    )


def _onnx_port(value: Any) -> Port:
    import onnx

    tensor = value.type.tensor_type
    sizes = tuple(size.dim_value if size.HasField("dim_value") else FREE for size in tensor.shape.dim)
    try:
        dtype = str(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    except KeyError:
        dtype = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    return Port(value.name, dtype, sizes)


def _type_of_most(model: Any) -> str:
    """Return the type of most of the weights."""
    import onnx

    bytes_of: dict[str, int] = {}
    for tensor in model.graph.initializer:
        name = onnx.TensorProto.DataType.Name(tensor.data_type)
        count = 1
        for size in tensor.dims:
            count *= size
        bytes_of[name] = bytes_of.get(name, 0) + count
    most = max((name for name in bytes_of if name in _WEIGHTS), key=lambda name: bytes_of[name], default="FLOAT")
    return _WEIGHTS[most]


def _data_files(model: Any) -> tuple[str, ...]:
    """Return the files with weights that belong to a model; they must lie beside it.

    Raises:
        EngineError: if one lies elsewhere.
    """
    names: list[str] = []
    for tensor in model.graph.initializer:
        place: Mapping[str, str] = {entry.key: entry.value for entry in tensor.external_data}
        if "location" in place and place["location"] not in names:
            names.append(place["location"])
    for name in names:
        if Path(name).name != name or "\\" in name or name.startswith(".") or len(names) > _MOST_OUTSIDE:
            raise EngineError(
                f"The ONNX file reads weights from outside of its folder: {name[:80]}.",
                "Save it with its weights inside, or in files beside it.",
            )
    return tuple(sorted(names))
