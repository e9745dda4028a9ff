"""Modules of diffusers and transformers, filled with the weights of their files tensor by tensor.

The result equals that of the libraries' `from_pretrained` bit for bit. Weights get their dtype, and are quantized, on
their device, to which they are streamed (`models.tensor_stream`). Unlike `from_pretrained`, which sets default dtypes
and replaces functions of the whole process meanwhile, this is safe beside other threads.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from runtime.models import packed_layers, quantization
from runtime.models.folder import read_config, weight_files
from runtime.models.packed_layers import PackedLinear
from runtime.models.registry import components_of
from runtime.models.spec import ModelSpec, folder_of
from runtime.models.stored_weights import (
    FileTensor,
    StoredWeight,
    file_tensors,
    is_unquantized,
    stays_packed,
    stored_weights,
)
from runtime.upstream.diffusers import kept_in_float32
from runtime.upstream.libraries import diffusers, transformers
from runtime.upstream.transformers import mark_initialized

_WHOLE_NUMBERS = frozenset({"I16", "I32", "I64", "U16", "U32", "U64", "BOOL"})
_WITHOUT_MEMORY = threading.local()
_INITIALIZERS = frozenset(name for name in vars(torch.nn.init) if name.endswith("_") and not name.startswith("_"))


def _on_meta(_module: torch.nn.Module, _name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter | None:
    """Move a new parameter to the meta device, in threads that are in `_without_memory`."""
    if not getattr(_WITHOUT_MEMORY, "entered", False) or parameter.is_meta:
        return None
    empty = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
    mark_initialized(empty)
    return empty


# Once, because other threads may be making modules; accelerate's `init_empty_weights` changes those of all threads.
register_module_parameter_registration_hook(cast("Any", _on_meta))  # may return a parameter, despite its type


class _WithoutDrawing(TorchFunctionMode):
    """Leaves parameters without memory as they are: to draw their values, PyTorch imports its compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, unless it initializes such a parameter."""
        del types
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _INITIALIZERS:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


@contextmanager
def _without_memory() -> Iterator[None]:
    """Let modules that this thread makes have parameters without memory; buffers are computed."""
    _WITHOUT_MEMORY.entered = True
    try:
        with _WithoutDrawing():
            yield
    finally:
        _WITHOUT_MEMORY.entered = False


def module_class(spec: ModelSpec, name: str) -> Any:
    """Return the class of a component: one of diffusers or transformers, or of the family.

    Of several, it is the one that the component's configuration names, or else the first.
    """
    known = components_of(spec.family).MODULES[name]
    if isinstance(known, tuple):
        named = config_of(spec, name).get("_class_name")
        return next((kind for kind in known if kind.__name__ == named), known[0])
    return getattr(transformers, known) if isinstance(known, str) else known


def config_of(spec: ModelSpec, name: str) -> dict[str, Any]:
    """Return a component's configuration, of its folder or of its single file.

    Raises:
        ModelError: if it is missing or not JSON.
    """
    files = spec.files.get(name)
    return read_config(spec.directory / folder_of(name) / "config.json") if files is None else dict(files.config)


def empty_module(spec: ModelSpec, name: str) -> torch.nn.Module:
    """Return a component whose parameters have no memory, of its configuration in the folder or of its files.

    Raises:
        Exception: of any type, if the library does not accept the configuration.
    """
    kind, config = module_class(spec, name), config_of(spec, name)
    with _without_memory():
        if issubclass(kind, transformers.PreTrainedModel):
            return cast("torch.nn.Module", kind(kind.config_class.from_dict(config)))
        return cast("torch.nn.Module", kind.from_config(config))


def can_stream(spec: ModelSpec, name: str) -> bool:
    """Whether a component may be filled by `fill`: its class is a library's own model."""
    return issubclass(module_class(spec, name), diffusers.ModelMixin | transformers.PreTrainedModel)


def weights_of_folder(folder: Path, module: torch.nn.Module) -> dict[str, StoredWeight] | None:
    """Return a module's weights in a folder by its names; `None` if some are missing, or have another name or shape.

    Raises:
        ModelError: if a file is damaged, or of a format that cannot be read.
    """
    tensors: dict[str, FileTensor] = {}
    for path in weight_files(folder):
        tensors |= file_tensors(path)
    # Not buffers of whole numbers, such as positions, which older files contain.
    stored = stored_weights({name: tensor for name, tensor in tensors.items() if tensor.dtype not in _WHOLE_NUMBERS})
    weights: dict[str, StoredWeight] = {}
    for names in _same(module):
        stored_names = [name for name in names if name in stored]
        if not stored_names or any(stored[name].shape != tuple(_of(module, name).shape) for name in stored_names):
            return None
        weights |= {name: stored[name] for name in stored_names}
    return weights


@dataclass(frozen=True)
class Filling:
    """How weights are loaded.

    Attributes:
        dtype: of those that are not quantized.
        unquantized: see `ModelSpec.unquantized`.
        fp8: whether the layers of the blocks are quantized with torchao.
        dequantize: whether weights that are quantized in files are dequantized; otherwise each is at every call.
    """

    dtype: torch.dtype
    unquantized: Sequence[str] = ()
    fp8: bool = False
    dequantize: bool = False


def fill(module: torch.nn.Module, weights: Mapping[str, StoredWeight], device: str, how: Filling) -> torch.nn.Module:
    """Load weights into a module of `empty_module`; return it.

    Args:
        weights: of all parameters; of those that are one, at least under one name.

    Raises:
        ModelError: if a file cannot be read, or became shorter.
        MachineError: if torchao is missing.
    """
    float32, same = kept_in_float32(module, how.dtype), {name: names for names in _same(module) for name in names}
    for name, data, scales in packed_layers.read_weights(weights, device):
        stored, owner = weights[name], name.rpartition(".")[0]
        layer = module.get_submodule(owner)
        packed = stays_packed(name, stored, how.unquantized)
        if packed and not (how.dequantize or how.fp8):
            parent, _, attribute = owner.rpartition(".")
            replacement = PackedLinear(cast("torch.nn.Linear", layer), stored.kind, data, scales, stored.rotated)
            replacement.bias = cast("torch.nn.Linear", layer).bias
            setattr(module.get_submodule(parent), attribute, replacement)
            continue
        dtype = torch.float32 if not float32.isdisjoint(name.split(".")) else how.dtype
        tensor = packed_layers.plain(stored, data, scales, dtype)
        if how.fp8 and is_in_blocks(layer, name, how.unquantized):
            _set(module, [name], quantization.fp8_weight(tensor))
            continue
        names, now = same[name], _of(module, name)
        # Of two names of one parameter the files may have both, with other values.
        tied = now.is_meta or (len(names) > 1 and torch.equal(now.to(tensor.device), tensor))
        _set(module, names if tied else [name], torch.nn.Parameter(tensor, requires_grad=False))
    return module.to(device)


def is_in_blocks(layer: torch.nn.Module, parameter: str, unquantized: Sequence[str]) -> bool:
    """Whether quantization applies to a parameter: the weight of a linear layer of a transformer's blocks."""
    linear = isinstance(layer, torch.nn.Linear) and parameter.endswith(".weight")
    return linear and not is_unquantized(parameter, unquantized)


def _same(module: torch.nn.Module) -> list[list[str]]:
    """Return the names of parameters and stored buffers, those of one parameter together."""
    groups: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


def _of(module: torch.nn.Module, name: str) -> torch.Tensor:
    owner, _, last = name.rpartition(".")
    tensor: torch.Tensor = getattr(module.get_submodule(owner), last)
    return tensor


def _set(module: torch.nn.Module, names: Sequence[str], value: Any) -> None:
    for name in names:
        owner, _, last = name.rpartition(".")
        target = module.get_submodule(owner)
        is_parameter = isinstance(getattr(target, last), torch.nn.Parameter)
        setattr(target, last, value if is_parameter else value.data)
