"""LoRA files: find them by name or path, validate them, and add them to a model's spec. Imports no torch.

Loading and engine keys read LoRAs from the spec. A file with a tensor that Tandem cannot apply is refused, unless the
tensor changes a part that only other models of the family have, such as the image branch.
"""

import contextlib
import functools
import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from stat import S_ISREG
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field

from runtime.core.errors import InvalidRequestError, ModelError, TandemError
from runtime.core.loras import BOTH, SUFFIX, Expert, Lora, LoraUse
from runtime.core.request import AUTO
from runtime.core.untrusted_files import open_file, parse_json
from runtime.models.lora_names import unsupported_kind
from runtime.models.registry import ABSENT, LoraChange, LoraLayer, family_of
from runtime.models.single_file import LORAS
from runtime.models.spec import ModelSpec
from runtime.models.tensor_files import Header, read_header
from runtime.models.variants import LORA_FOLDER

# How files of two-expert LoRAs are named.
_EXPERT_NAMES: Mapping[str, Expert] = {
    "high_noise": "high",
    "high-noise": "high",
    "low_noise": "low",
    "low-noise": "low",
}
# Bytes per element, and bits: a number with all of them set is NaN or Inf.
_FLOATS = {
    "F32": (4, 0x7F800000),
    "F16": (2, 0x7C00),
    "BF16": (2, 0x7F80),
    "F8_E4M3": (1, 0x7F),
    "F8_E5M2": (1, 0x7C),
}
# Of alpha, which some programs write as a number of Python's.
_INTEGERS = frozenset({"I32", "I64"})
_ALPHA = ".alpha"
_READ_BYTES = 1 << 22
# Where peft's configuration of the adapter is, as JSON: in the metadata of diffusers' files, whose keys have a prefix,
# and beside peft's own files.
_ADAPTER = "lora_adapter_metadata"
_COMPONENT = "transformer."
_PEFT_FILE, _PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_MAX_CONFIG_BYTES = 4 << 20
# Patterns of module names, which are regular expressions: those that cost little on any name, without repeated groups.
_PATTERN = re.compile(r"[\w.^$|\\\[\]()-]*(?:(?<!\))[*+][\w.^$|\\\[\]()-]*){0,3}")
_MAX_PATTERN_LENGTH = 1000
# Axes of the weights that have factors: of linear layers and of convolutions in time and space.
_FACTORED = frozenset({2, 5})
# Kinds of changes of a weight: roles that are needed, of which one alternative each; see `LoraChange`.
_KINDS: Mapping[str, tuple[tuple[frozenset[str], ...], ...]] = {
    "LoRA": ((frozenset({"down", "up"}),),),
    "LoHa": ((frozenset({"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}),),),
    "LoKr": tuple(
        (frozenset({f"lokr_{factor}"}), frozenset({f"lokr_{factor}_a", f"lokr_{factor}_b"})) for factor in ("w1", "w2")
    ),
    "difference": ((frozenset({"diff"}),),),
}
_NAME = re.compile(r"[\w.]+")
_NUMBER = re.compile(r"(?<=blocks\.)[0-9]+")
_MAX_NAME_LENGTH = 80


def _affordable(pattern: str) -> str:
    if len(pattern) > _MAX_PATTERN_LENGTH or not _PATTERN.fullmatch(pattern):
        raise ValueError("not an affordable pattern")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError("not a pattern") from error
    return pattern


_Pattern = Annotated[str, AfterValidator(_affordable)]
_Value = TypeVar("_Value")
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Adapter(BaseModel):
    """The values of peft's configuration that scale an adapter. LoHa and LoKr have `alpha`, not `lora_alpha`."""

    model_config = ConfigDict(frozen=True)

    peft_type: str = "LORA"
    r: Annotated[int, Field(gt=0)] | None = None
    rank_pattern: dict[_Pattern, Annotated[int, Field(gt=0)]] = Field(default_factory=dict)
    lora_alpha: Annotated[_Finite, Field(validation_alias=AliasChoices("lora_alpha", "alpha"))]
    alpha_pattern: dict[_Pattern, _Finite] = Field(default_factory=dict)
    use_rslora: bool = False

    def alpha(self, module: str) -> float:
        """Return the alpha of a module."""
        return next(_matching(module, self.alpha_pattern), self.lora_alpha)

    def rank(self, module: str) -> int | None:
        """Return the rank that the configuration states for a module."""
        return next(_matching(module, self.rank_pattern), self.r)


def _matching(module: str, values: Mapping[str, _Value]) -> Iterator[_Value]:
    """Yield the values whose patterns are a module's name or its end, as peft compares them."""
    for pattern, value in values.items():
        text = pattern.removeprefix("^")
        if _NAME.fullmatch(text):
            matches = module == text or (pattern == text and module.endswith(f".{text}"))
        else:
            matches = re.match(rf"(.*\.)?({pattern})$", module) is not None
        if matches:
            yield value


@dataclass(frozen=True)
class LoraFile:
    """A validated file.

    Attributes:
        digest: sha256 of the file and of peft's configuration beside it, in hexadecimal.
        shapes: of its tensors, by name.
        adapter: peft's configuration, in the file or beside it.
    """

    digest: str
    shapes: Mapping[str, tuple[int, ...]]
    adapter: _Adapter | None = None

    def scale(self, layer: LoraLayer, rank: int | None) -> float:
        """Return the factor of the product of a layer without a tensor of alpha.

        Args:
            rank: of its factors; `None` for two matrices of a LoKr. peft scales these, too, and LyCORIS does not.
        """
        adapter, module = self.adapter, layer.modules[0]
        if adapter is None:
            return 1.0
        if rank is None:
            stated = adapter.rank(module) if adapter.peft_type == "LOKR" else None
            return 1.0 if stated is None else adapter.alpha(module) / stated
        return adapter.alpha(module) / (math.sqrt(rank) if adapter.use_rslora else rank)


def loras_dir(weights_dir: Path) -> Path:
    """Return the folder whose LoRAs can be named without a path."""
    return weights_dir / LORAS


def with_loras(spec: ModelSpec, loras: Sequence[Lora], weights_dir: Path) -> ModelSpec:
    """Return a model with LoRAs, validated and checked against its architecture.

    A LoRA from step distillation sets the model's defaults, see `ModelSpec.distilled_for`, and may set its noise levels
    unless another one was distilled otherwise. Those of a variant come first, unless the same files are requested.

    Raises:
        ModelError: if a LoRA is missing, damaged or for another model.
        InvalidRequestError: if a LoRA is for an expert that the model does not have.
    """
    requested = {lora.file for lora in loras}
    always = [lora for lora in variant_loras(spec, weights_dir) if lora.file not in requested]
    uses = tuple(_use(spec, lora, weights_dir) for lora in (*always, *loras))
    spec = _with_factors(spec, uses)
    spec = replace(spec, loras=uses)
    distilled = [use for use in uses if use.steps is not None]
    if not distilled:
        return spec
    levels, *others = {family_of(spec.family).distilled_levels(use.path) for use in distilled}
    return spec.distilled_for(max(use.steps or 0 for use in distilled), () if others else levels)


def variant_loras(spec: ModelSpec, weights_dir: Path) -> tuple[Lora, ...]:
    """Return the LoRAs that a variant is always used with; none for other models.

    Those of a folder in the weights folder have names, `FOLDER/loras/FILE` without suffix, others paths.
    """
    if spec.variant is None:
        return ()
    folder, is_listed = spec.directory / LORA_FOLDER, spec.directory.parent == weights_dir
    paths = [(folder / lora.file, lora.weight) for lora in spec.variant.loras]
    names = {
        path: path.relative_to(weights_dir).as_posix().removesuffix(SUFFIX) if is_listed else str(path)
        for path, _ in paths
    }
    return tuple(Lora(names[path], weight) for path, weight in paths)


def stated(request: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """Return a request that states what a variant adds to it, for a machine that has its files without its folder.

    Args:
        request: fields of a `GenerationRequest`.
        spec: the request's model, with its LoRAs.
    """
    if spec.variant is None:
        return dict(request)
    values: dict[str, Any] = {"loras": [vars(use.requested()) for use in spec.loras]}
    if spec.variant.steps is not None and request.get("steps", AUTO) == AUTO:
        values["steps"] = spec.variant.steps
    if spec.noise.setting and request.get("shift") is None:
        values["shift"] = spec.variant.flow_shift
    return {**request, **values}


def _with_factors(spec: ModelSpec, uses: Sequence[LoraUse]) -> ModelSpec:
    """Return a spec that counts the factors that are kept beside weights that are quantized in files."""
    files = {
        name: replace(
            weights, packed_bytes=weights.packed_bytes + sum(_bytes(use) for use in uses if use.changes(name))
        )
        if weights.packed_weights
        else weights
        for name, weights in spec.files.items()
    }
    return replace(spec, files=files) if files else spec


def _bytes(use: LoraUse) -> int:
    try:
        return use.path.stat().st_size
    except OSError as error:
        raise _unreadable(use.path, error) from error


@dataclass(frozen=True)
class ListedLora:
    """A file in the folder of LoRAs.

    Attributes:
        name: as a request names it.
        expert: the only one that it changes, by its name.
        steps: see `LoraUse`.
        problem: why it cannot be used with a model, by the file's header.
    """

    name: str
    path: Path
    file_bytes: int
    modified: int
    expert: Expert = BOTH
    steps: int | None = None
    problem: TandemError | None = None


def listed(weights_dir: Path) -> list[ListedLora]:
    """Return the files in the folder of LoRAs by name, without opening them."""
    folder, loras = loras_dir(weights_dir), []
    for path in sorted(folder.rglob(f"*{SUFFIX}")):
        name = path.relative_to(folder).as_posix().removesuffix(SUFFIX)
        with contextlib.suppress(OSError):
            stat = path.stat()
            if S_ISREG(stat.st_mode) and Lora(name).is_name and name.isprintable() and _inside(path, folder):
                loras.append(ListedLora(name, path, stat.st_size, stat.st_mtime_ns))
    return loras


def checked(lora: ListedLora, spec: ModelSpec) -> ListedLora:
    """Return a file's properties for a model. Only the header is read: the content is checked when it is used."""
    steps, expert = family_of(spec.family).distilled_steps(lora.path), _expert_of(lora.path)
    try:
        if not spec.takes_loras_apart and expert != BOTH:
            raise _no_such_expert(lora.path, expert, spec)
        header = read_lora_header(lora.path)
        fits = _check_fits(lora.path, {name: tensor.shape for name, tensor in header.tensors.items()}, spec, expert)
    except TandemError as error:
        return replace(lora, expert=expert, steps=steps, problem=error)
    return replace(lora, expert=fits.expert, steps=steps)


def read_lora_header(path: Path) -> Header:
    """Read a LoRA's header.

    Raises:
        ModelError: if it is not a safetensors file of 8-, 16- or 32-bit floats; alpha can be an integer.
    """
    try:
        header = read_header(path)
    except ModelError as error:
        raise ModelError("lora.damaged", lora=path.name, cause=error.fact) from error
    for name, tensor in header.tensors.items():
        if tensor.dtype not in _FLOATS and not (tensor.dtype in _INTEGERS and name.endswith(_ALPHA)):
            raise ModelError("lora.dtype_unsupported", lora=path.name, dtype=tensor.dtype)
    return header


def _expert_of(path: Path) -> Expert:
    return next((name for text, name in _EXPERT_NAMES.items() if text in path.stem.lower()), BOTH)


def _no_such_expert(path: Path, expert: Expert, spec: ModelSpec) -> InvalidRequestError:
    return InvalidRequestError("loras", "lora.no_such_expert", lora=path.stem, expert=expert, model=spec.title)


def read_lora(path: Path) -> LoraFile:
    """Read and validate a LoRA's file; the result is cached until the file changes.

    Raises:
        ModelError: if it is not a complete safetensors file of 8-, 16- or 32-bit floats, or holds NaN or Inf.
    """
    if path.suffix.lower() != SUFFIX:
        raise ModelError("lora.not_safetensors", lora=path.name)
    try:
        stat = path.stat()
        config = _peft_config(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    return _read(path, stat.st_size, stat.st_mtime_ns, config)


def _peft_config(path: Path) -> bytes:
    """Return the configuration beside a file that peft saved; empty if there is none."""
    file = path.with_name(_PEFT_CONFIG)
    if path.name != _PEFT_FILE or not file.is_file():
        return b""
    with open_file(file) as opened:
        return opened.read(_MAX_CONFIG_BYTES)


def _use(spec: ModelSpec, lora: Lora, weights_dir: Path) -> LoraUse:
    path = _path(lora, weights_dir)
    expert = lora.expert
    if expert == BOTH:
        expert = _expert_of(path)
    if not spec.takes_loras_apart and expert != BOTH:
        raise _no_such_expert(path, expert, spec)
    file = read_lora(path)
    fits = _check_fits(path, file.shapes, spec, expert)
    return LoraUse(
        file=lora.file,
        path=path,
        digest=file.digest,
        weight=lora.weight,
        expert=fits.expert,
        steps=family_of(spec.family).distilled_steps(path),
        without_effect=fits.without_effect,
        start=lora.start,
        end=lora.end,
    )


def _path(lora: Lora, weights_dir: Path) -> Path:
    folder = loras_dir(weights_dir)
    places = [(folder, lora.file)]
    match lora.file.split("/"):
        case [variant, within, name] if within == LORA_FOLDER and lora.is_name:
            places.append((weights_dir / variant / LORA_FOLDER, name))
    for place, name in places:
        for candidate in (place / name, place / f"{name}{SUFFIX}"):
            if candidate.suffix == SUFFIX and _is_file(candidate) and _inside(candidate, place):
                return candidate.resolve()
    if lora.is_name:
        raise ModelError("lora.unknown", lora=lora.file, folder=folder)
    path = Path(lora.file)
    with contextlib.suppress(RuntimeError):  # the home folder of an unknown user
        path = path.expanduser()
    if not _is_file(path):
        raise ModelError("lora.unknown", lora=lora.file, folder=folder)
    return path.resolve()


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # the name is too long or has a null byte
        return False


def _inside(path: Path, folder: Path) -> bool:
    try:
        return path.resolve(strict=True).is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # a dangling or circular link
        return False


def layers_of(
    changes: Mapping[str, LoraChange], expert: Expert = BOTH, without_effect: Set[str] = frozenset()
) -> dict[tuple[LoraLayer, Expert], dict[str, str]]:
    """Return the layers that the tensors of a LoRA file change, with their tensors by role.

    A file may name experts in its tensors' names. If it names one for some, those without are for the other one.

    Args:
        changes: of all tensors of the file, by name.
        expert: the only one to return layers of.
        without_effect: layers to leave out, as in `LoraUse`.

    Raises:
        ValueError: naming a layer that two tensors change in the same role.
    """
    named = {change.expert for change in changes.values()} - {BOTH}
    default_expert: Expert = BOTH if len(named) != 1 else "high" if named == {"low"} else "low"
    layers: dict[tuple[LoraLayer, Expert], dict[str, str]] = {}
    for name, change in changes.items():
        of = default_expert if change.expert == BOTH else change.expert
        if without_effect and not without_effect.isdisjoint(map(_of_any_block, change.layer.modules)):
            continue
        if BOTH in (of, expert) or of == expert:
            roles = layers.setdefault((change.layer, of), {})
            if change.role in roles:
                raise ValueError(change.layer.title)
            roles[change.role] = name
    return layers


class _Fit(NamedTuple):
    """What a LoRA changes of a model; see `LoraUse`."""

    expert: Expert
    without_effect: tuple[str, ...]


def _check_fits(path: Path, shapes: Mapping[str, tuple[int, ...]], spec: ModelSpec, expert: Expert) -> _Fit:
    """Check that every tensor of a LoRA applies to the model, or to a part that only other models have."""
    name, family = path.stem, family_of(spec.family)
    changes: dict[str, LoraChange] = {}
    for tensor in shapes:
        change = family.lora_change(tensor)
        if change is None:
            kind = unsupported_kind(tensor)
            if kind is not None:
                raise ModelError("lora.kind_unsupported", lora=name, kind=kind)
            raise ModelError("lora.unknown_tensor", lora=name, tensor=tensor[:_MAX_NAME_LENGTH], model=spec.title)
        changes[tensor] = change
    try:
        layers = layers_of(changes, expert)
    except ValueError as error:
        raise ModelError("lora.duplicate_module", lora=name, module=str(error)) from error
    experts = {of for _, of in layers}
    if not spec.takes_loras_apart and "low" in experts:
        raise _no_such_expert(path, "low", spec)
    absent = {
        key for key in layers if any(family.lora_weight_shape(spec, module) == ABSENT for module in key[0].modules)
    }
    changed = [key for key, roles in layers.items() if set(roles) - {"alpha"}]
    if not changed:
        raise ModelError("lora.empty", lora=name)
    if absent.issuperset(changed):
        tensor = next(iter(shapes))[:_MAX_NAME_LENGTH]
        raise ModelError("lora.unknown_tensor", lora=name, tensor=tensor, model=spec.title)
    times = Counter((module, of) for layer, of in layers for module in layer.modules)
    for (layer, of), roles in layers.items():
        if (layer, of) in absent:
            continue
        _check_layer(name, spec, layer, {role: shapes[tensor] for role, tensor in roles.items()})
        for module in layer.modules:
            if times[module, of] > 1:  # as a layer of its own, and as a part of another
                raise ModelError("lora.duplicate_module", lora=name, module=module)
    (only,) = experts if len(experts) == 1 else (BOTH,)
    titles = {_of_any_block(module) for layer, _ in absent for module in layer.modules}
    return _Fit(only if expert == BOTH else expert, tuple(sorted(titles)))


def _of_any_block(module: str) -> str:
    """Return a module's name with "*" for the numbers of blocks."""
    return _NUMBER.sub("*", module)


def _check_layer(name: str, spec: ModelSpec, layer: LoraLayer, shapes: Mapping[str, tuple[int, ...]]) -> None:
    module = layer.title
    expected = _shape(name, spec, layer)
    kinds = [kind for kind, parts in _KINDS.items() if any(set(shapes) & roles for part in parts for roles in part)]
    if len(kinds) > 1:
        raise ModelError("lora.duplicate_module", lora=name, module=module)
    if kinds:
        for part in _KINDS[kinds[0]]:
            used = [roles for roles in part if set(shapes) & roles]
            if len(used) > 1:
                raise ModelError("lora.duplicate_module", lora=name, module=module)
            if not used or not used[0] <= set(shapes):
                raise ModelError("lora.factor_missing", lora=name, module=module, kind=kinds[0])
        changed = _changed_shape(name, module, kinds[0], shapes, expected)
        _check_shape(name, spec, module, changed, expected)
        if "magnitude" in shapes:
            _check_magnitude(name, layer, kinds[0], shapes["magnitude"], changed)
    elif "magnitude" in shapes:
        raise ModelError("lora.magnitude_invalid", lora=name, module=module)
    for role in ("bias", "up_bias"):
        if role in shapes:
            _check_shape(name, spec, f"{module}.bias", shapes[role], expected[:1])
    if "alpha" in shapes and prod(shapes["alpha"]) != 1:
        raise ModelError("lora.alpha_invalid", lora=name, module=module)


def _check_magnitude(
    name: str, layer: LoraLayer, kind: str, magnitude: tuple[int, ...], weight: tuple[int, ...]
) -> None:
    """Check that DoRA's magnitudes are of the outputs or, with a first axis of 1, of the inputs of a layer."""
    if is_of_inputs(magnitude, weight):
        if len(layer.modules) > 1:  # which are loaded one by one
            raise ModelError("lora.kind_unsupported", lora=name, kind="DoRA by inputs of fused layers")
        size = weight[1]
    else:
        size = weight[0]
    if kind == "difference" or prod(magnitude) != size:
        raise ModelError("lora.magnitude_invalid", lora=name, module=layer.title)


def is_of_inputs(magnitude: Sequence[int], weight: Sequence[int]) -> bool:
    """Whether DoRA's magnitudes, by their shape, are of the inputs (1, in, …) of a weight (out, in, …)."""
    return len(magnitude) > 1 and magnitude[0] == 1 and weight[0] != 1


def _changed_shape(
    name: str, module: str, kind: str, shapes: Mapping[str, tuple[int, ...]], expected: tuple[int | None, ...]
) -> tuple[int, ...]:
    """Return the shape of the weight that a layer's factors make.

    Raises:
        ModelError: if they cannot be multiplied.
    """
    if kind == "difference":
        return shapes["diff"]

    def product(outer: str, inner: str) -> tuple[int, ...]:
        """Return the shape of a product; a convolution's kernel is in the inner factor."""
        outer_shape, inner_shape = shapes[outer], shapes[inner]
        if len(outer_shape) < 2 or len(inner_shape) < 2 or set(outer_shape[2:]) - {1}:  # noqa: PLR2004
            raise ModelError("lora.not_matrices", lora=name, module=module)
        if outer_shape[1] != inner_shape[0] or not inner_shape[0]:
            raise ModelError("lora.ranks_differ", lora=name, module=module, ranks=[inner_shape[0], outer_shape[1]])
        return (outer_shape[0], *inner_shape[1:])

    if len(expected) not in _FACTORED:
        raise ModelError("lora.not_matrices", lora=name, module=module)
    if kind == "LoRA":
        if not len(shapes["down"]) == len(shapes["up"]) == len(expected):
            raise ModelError("lora.not_matrices", lora=name, module=module)
        return product("up", "down")
    if kind == "LoHa":
        first, second = product("hada_w1_a", "hada_w1_b"), product("hada_w2_a", "hada_w2_b")
        if first != second:
            raise ModelError("lora.ranks_differ", lora=name, module=module, ranks=[*first, *second])
        return _unflattened(first, expected)
    factors = [
        shapes[f"lokr_{factor}"] if f"lokr_{factor}" in shapes else product(f"lokr_{factor}_a", f"lokr_{factor}_b")
        for factor in ("w1", "w2")
    ]
    if any(len(factor) < 2 for factor in factors) or set(factors[0][2:]) - {1}:  # noqa: PLR2004
        raise ModelError("lora.not_matrices", lora=name, module=module)
    (rows, columns, *_), (inner_rows, inner_columns, *kernel) = factors
    return _unflattened((rows * inner_rows, columns * inner_columns, *kernel), expected)


def _unflattened(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> tuple[int, ...]:
    """Return the shape of a convolution whose factors have its inputs and kernel as one axis."""
    sizes = tuple(size for size in expected[1:] if size is not None)
    if len(shape) == 2 < len(expected) and len(sizes) == len(expected) - 1 and shape[1] == prod(sizes):  # noqa: PLR2004
        return (shape[0], *sizes)
    return shape


def _shape(name: str, spec: ModelSpec, layer: LoraLayer) -> tuple[int | None, ...]:
    """Return the shape of a layer's weight."""
    family, shapes = family_of(spec.family), []
    for module in layer.modules:
        shape = family.lora_weight_shape(spec, module)
        if shape is None:
            raise ModelError("lora.larger_model", lora=name, module=module, model=spec.title)
        shapes.append(shape)
    if len(shapes) == 1:
        return shapes[0]
    return (sum(shape[0] or 0 for shape in shapes), *shapes[0][1:])


def _check_shape(
    name: str, spec: ModelSpec, module: str, shape: tuple[int, ...], target: tuple[int | None, ...]
) -> None:
    if len(shape) != len(target) or any(want not in {None, have} for have, want in zip(shape, target, strict=True)):
        actual, expected = ("×".join("?" if n is None else str(n) for n in sizes) for sizes in (shape, target))
        raise ModelError("lora.other_size", lora=name, module=module, shape=actual, expected=expected, model=spec.title)


@functools.lru_cache(maxsize=64)
def _read(path: Path, _size: int, _changed: int, config: bytes) -> LoraFile:
    header = read_lora_header(path)
    digest = hashlib.sha256(config)
    try:
        with open_file(path) as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
            for name, tensor in header.tensors.items():
                if tensor.dtype in _INTEGERS:
                    continue
                first, last = tensor.data_offsets
                file.seek(header.start + first)
                _check_finite(path, name, tensor.dtype, file, last - first)
    except OSError as error:
        raise _unreadable(path, error) from error
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    return LoraFile(digest.hexdigest(), shapes, _adapter(path, header, config))


def _adapter(path: Path, header: Header, config: bytes) -> _Adapter | None:
    """Return the adapter's configuration from a file's metadata, or else from `config`, which was beside the file."""
    text = header.metadata.get(_ADAPTER, "").encode() or config
    if not text:
        return None
    try:
        values = {key.removeprefix(_COMPONENT): value for key, value in parse_json(text).items()}
        if values.get("peft_type") != "LOKR":  # the factors have the ranks
            values.pop("rank_pattern", None)
        return None if {"lora_alpha", "alpha"}.isdisjoint(values) else _Adapter.model_validate(values)
    except (ValueError, AttributeError) as error:  # no JSON, or no object
        raise ModelError("lora.metadata_invalid", lora=path.name) from error


def _check_finite(path: Path, name: str, dtype: str, file: Any, bytes_left: int) -> None:
    import numpy as np

    width, exponent = _FLOATS[dtype]
    while bytes_left:
        block = file.read(min(bytes_left, _READ_BYTES))
        if not block:  # the file became shorter
            raise ModelError("lora.changed", lora=path.name)
        bytes_left -= len(block)
        bits = np.frombuffer(block, dtype=np.dtype(f"<u{width}"))
        if ((bits & exponent) == exponent).any():
            raise ModelError("lora.not_finite", lora=path.name, tensor=name[:_MAX_NAME_LENGTH])


def _unreadable(path: Path, error: OSError) -> ModelError:
    return ModelError("lora.unreadable", lora=path.name, reason=error.strerror or str(error))
