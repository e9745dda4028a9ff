"""Fuse LoRAs, LoHas, LoKrs and DoRAs into the weights of a loaded transformer.

A fused weight is W + weight · ΔW. Compilers and exporters then see plain weights; to remove a LoRA, the weights are
loaded again. If a weight was quantized at loading, the sum is computed from the weight on disk and quantized the same.

    LoRA  ΔW = alpha / rank · B A                                  https://arxiv.org/abs/2106.09685
    LoHa  ΔW = alpha / rank · (A₁ B₁) ⊙ (A₂ B₂)                    https://arxiv.org/abs/2108.06098
    LoKr  ΔW = alpha / rank · W₁ ⊗ W₂, each a matrix or a product  https://arxiv.org/abs/2309.14859
    DoRA  ΔW = m · (W + ΔW') / ‖W + ΔW'‖ − W, with ΔW' of the others           https://arxiv.org/abs/2402.09353

DoRA's magnitudes and norms are of the rows or, with magnitudes (1, in), of the inputs. LoKr with two matrices has no
rank: its scale is 1, or that of peft's configuration. These are the conventions of peft and LyCORIS.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open

from runtime.core.errors import ModelError, first_line
from runtime.core.loras import Expert, LoraUse
from runtime.models import packed_layers
from runtime.models.folder import weight_files
from runtime.models.loras import is_of_inputs, layers_of, read_lora
from runtime.models.packed_layers import PackedLinear
from runtime.models.quantization import is_quantized, quantized_like
from runtime.models.registry import LoraChange, LoraLayer, family_of
from runtime.models.spec import ModelSpec
from runtime.models.tensor_stream import MappedFiles


class _Delta(NamedTuple):
    """What one LoRA adds to one module.

    Attributes:
        tensors: names in the file by role.
        rows: of the module in the tensors with the layer's rows; `None` for all.
        swapped: see `registry.LoraLayer`.
        scale: of the product, by the rank, if no tensor gives alpha.
    """

    use: LoraUse
    tensors: Mapping[str, str]
    rows: slice | None
    swapped: bool
    scale: Callable[[int | None], float]


_OF_WEIGHT = frozenset({"up", "diff", "hada_w1_a", "lokr_w1", "lokr_w1_a"})
_OF_BIAS = frozenset({"bias", "up_bias"})
# Factors whose first axis is the rank. LoKr's first factor is seldom a product; LyCORIS gives both the same rank.
_WITH_RANK = ("down", "hada_w1_b", "lokr_w2_b", "lokr_w1_b")
# Beside factors, what makes the change of the weight another one than their product.
_CHANGES_PRODUCT = frozenset({"diff", "magnitude"})
# The roles of tensors that have the rows of the weight.
_BY_ROWS = frozenset({"up", "diff", "bias", "up_bias", "magnitude", "hada_w1_a", "hada_w2_a"})


@torch.no_grad()
def fuse(module: torch.nn.Module, spec: ModelSpec, component: str, dtype: torch.dtype, *, exact: bool = False) -> None:
    """Add the spec's LoRAs to the weights of a loaded transformer, in place.

    Sums are computed in float32 and rounded once to the weight's dtype. A weight that was quantized here equals that of
    a model whose files contain the LoRAs; it is read from the files again. A `PackedLinear` keeps the factors.

    Args:
        dtype: in which the weights were loaded.
        exact: whether changed weights become float32 instead of being rounded.

    Raises:
        ModelError: if a file changed since the job was planned, or cannot be applied.
    """
    loras, family = spec.loras_of(component), family_of(spec.family)
    expert: Expert = "low" if component == "transformer_2" else "high"
    deltas: defaultdict[str, list[_Delta]] = defaultdict(list)
    for use in loras:
        file = read_lora(use.path)
        if file.digest != use.digest:
            raise ModelError("lora.changed", lora=use.name)
        changes: dict[str, LoraChange] = {}
        for tensor in file.shapes:
            change = family.lora_change(tensor)
            assert change is not None, "the file was validated"
            changes[tensor] = change
        for (layer, _), tensors in layers_of(changes, expert, frozenset(use.without_effect)).items():
            for name, rows in _rows(module, layer):
                deltas[name].append(_Delta(use, tensors, rows, layer.swapped, partial(file.scale, layer)))
    try:
        with contextlib.ExitStack() as opened:
            files = {use.digest: opened.enter_context(safe_open(use.path, framework="pt")) for use in loras}
            quantized = any(map(is_quantized, module.parameters()))
            stored = _stored(spec, component, dtype, opened) if quantized else None
            for name, of_module in deltas.items():
                _change(module, name, of_module, files, stored, dtype, exact=exact)
    except (OSError, SafetensorError, AttributeError) as error:
        raise ModelError("lora.fusing_failed", reason=first_line(error)) from error


def _rows(module: torch.nn.Module, layer: LoraLayer) -> Iterator[tuple[str, slice | None]]:
    """Yield each module of a layer with its rows; `None` for all."""
    if len(layer.modules) == 1:
        yield layer.modules[0], None
        return
    first = 0
    for name in layer.modules:
        # Not those of the weight, which may be packed.
        last = first + cast("torch.nn.Linear", module.get_submodule(name)).out_features
        yield name, slice(first, last)
        first = last


def _stored(
    spec: ModelSpec, component: str, dtype: torch.dtype, opened: contextlib.ExitStack
) -> Callable[[str], torch.Tensor]:
    """Return a function that reads a weight from the files of a transformer."""
    files = spec.files.get(component)
    if files is not None:
        mapped = MappedFiles()
        return lambda name: packed_layers.read_plain(files.weights[name], mapped, dtype)
    paths = weight_files(spec.directory / component)
    return StoredWeights([opened.enter_context(safe_open(path, framework="pt")) for path in paths]).__getitem__


class StoredWeights:
    """The weights on disk, by name, from opened safetensors files."""

    def __init__(self, files: Sequence[Any]) -> None:
        self._file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - no mapping

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._file_of:
            raise ModelError("model.tensor_missing", tensor=name)
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor


def _change(
    module: torch.nn.Module,
    name: str,
    deltas: list[_Delta],
    files: dict[str, Any],
    stored: Callable[[str], torch.Tensor] | None,
    dtype: torch.dtype,
    *,
    exact: bool,
) -> None:
    """Change one module, or a parameter that belongs to no module; see `fuse`."""
    parent, _, last = name.rpartition(".")
    owner: Any = module.get_submodule(parent)
    target = getattr(owner, last)
    weight = target if isinstance(target, torch.nn.Parameter) else target.weight
    bias = None if isinstance(target, torch.nn.Parameter) else getattr(target, "bias", None)
    for parameter, roles in ((weight, _OF_WEIGHT), (bias, _OF_BIAS)):
        relevant = [delta for delta in deltas if roles & set(delta.tensors)]
        if not relevant:
            continue
        if parameter is None:
            raise ModelError("lora.no_bias", module=name)
        if isinstance(target, PackedLinear) and parameter is weight:
            for delta in relevant:
                tensors = _tensors(delta, files[delta.use.digest], torch.device("cpu"), torch.bfloat16)
                scale = _scale(delta, tensors)
                if "up" in tensors and not _CHANGES_PRODUCT & set(tensors):
                    target.add_product(delta.use.weight * scale, tensors["up"].flatten(1), tensors["down"].flatten(1))
                else:
                    target.add(delta.use.weight, tensors, partial(_weight_change, scale=scale, of=delta))
            continue
        quantized = is_quantized(parameter)
        original = stored(f"{name}.weight").to(parameter.device, dtype) if quantized and stored else parameter
        before = total = original.float()
        for delta in relevant:
            tensors = _tensors(delta, files[delta.use.digest], total.device)
            change = _weight_change if parameter is weight else _bias_change
            total = total + delta.use.weight * change(before, tensors, scale=_scale(delta, tensors), of=delta)
        if quantized:
            target.weight = quantized_like(target, total.to(dtype))
        elif exact:
            parameter.data = total
        else:
            parameter.copy_(total)


def _tensors(
    delta: _Delta, file: Any, device: torch.device, smallest: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Return a module's tensors by role, in float32, or in the file's precision but at least in `smallest`."""
    got = {}
    for role, name in delta.tensors.items():
        tensor: torch.Tensor = file.get_tensor(name)
        if tensor.dtype.itemsize == 1:  # float8, which few operations take
            tensor = tensor.float()
        if role in _BY_ROWS:
            if delta.swapped:
                tensor = torch.cat(tensor.chunk(2)[::-1])
            if delta.rows is not None:
                tensor = tensor[delta.rows]
        exact = torch.float32 if role == "alpha" else torch.promote_types(tensor.dtype, smallest)
        got[role] = tensor.to(device, exact)
    return got


def _scale(delta: _Delta, tensors: Mapping[str, torch.Tensor]) -> float:
    """Return the factor of the product: alpha / rank."""
    rank = next((len(tensors[role]) for role in _WITH_RANK if role in tensors), None)
    if "alpha" not in tensors:
        return delta.scale(rank)
    return 1.0 if rank is None else float(tensors["alpha"].item()) / rank


def _weight_change(
    weight: torch.Tensor, tensors: Mapping[str, torch.Tensor], *, scale: float, of: _Delta
) -> torch.Tensor:
    """Return ΔW in the shape and dtype of `weight` (out, …), which is not changed; see the module's formulas."""
    if "diff" in tensors:
        return tensors["diff"].to(weight.dtype)
    factors = {role: tensor.to(weight.dtype) for role, tensor in tensors.items()}
    change = scale * _product(factors, of).reshape(weight.shape)
    if "magnitude" not in factors:
        return change
    changed, magnitude = weight + change, factors["magnitude"]
    magnitude_axis = 1 if is_of_inputs(magnitude.shape, weight.shape) else 0
    axes = [axis for axis in range(weight.ndim) if axis != magnitude_axis]
    norms = torch.linalg.vector_norm(changed, dim=axes, keepdim=True)
    return torch.sub(changed * (magnitude.reshape(norms.shape) / norms), weight)


def _bias_change(bias: torch.Tensor, tensors: Mapping[str, torch.Tensor], *, scale: float, of: _Delta) -> torch.Tensor:
    """Return what is added to a bias (out,)."""
    change = torch.zeros_like(bias)
    if "bias" in tensors:
        change = change + tensors["bias"]
    return change + scale * tensors["up_bias"] if "up_bias" in tensors else change


def _product(factors: Mapping[str, torch.Tensor], of: _Delta) -> torch.Tensor:
    """Return the unscaled product of a layer's factors as a matrix with the rows of the weight."""
    if "up" in factors:
        return factors["up"].flatten(1) @ factors["down"].flatten(1)
    if "hada_w1_a" in factors:
        pairs = ((factors[f"hada_w{number}_a"], factors[f"hada_w{number}_b"]) for number in (1, 2))
        first, second = (outer.flatten(1) @ inner.flatten(1) for outer, inner in pairs)
        return first * second
    first, second = (
        factors[f"lokr_{name}"]
        if f"lokr_{name}" in factors
        else torch.tensordot(factors[f"lokr_{name}_a"].flatten(1), factors[f"lokr_{name}_b"], dims=1)
        for name in ("w1", "w2")
    )
    product = torch.kron(first.reshape(*first.shape[:2], *[1] * (second.ndim - 2)), second).flatten(1)
    if of.swapped:
        product = torch.cat(product.chunk(2)[::-1])
    return product if of.rows is None else product[of.rows]
