"""Models whose transformers are in single files, as ComfyUI, the models' authors and GGUF's tools write them.

A file is recognised by the names and shapes of its tensors. Its name only tells which expert of two it is, and where
the other one is: files of Wan2.2-A14B have "high_noise" and "low_noise" in otherwise equal names. Other components in
the same file are used. The tokenizer and the scheduler are those of a folder; so are the other components, unless it
lacks their weights and there are single files of them. Imports no torch.
"""

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from runtime.core.errors import ModelError, TandemError
from runtime.models.enhancers import ENHANCERS
from runtime.models.preprocessors import PREPROCESSORS
from runtime.models.registry import (
    FAMILIES,
    KnownModel,
    check_companions,
    check_loadable,
    check_name,
    family_of,
    published_models,
)
from runtime.models.spec import ModelSpec, folder_of, is_transformer
from runtime.models.stored_weights import FileTensor, StoredWeight, WeightFiles, file_tensors, stored_weights
from runtime.models.tensor_files import unreadable

# The folder of LoRAs in the weights folder.
LORAS = "loras"
# The folder of upscalers there; see `families.esrgan`.
UPSCALERS = "upscalers"
SUFFIXES = frozenset({".safetensors", ".gguf", ".sft"})
# Of Wan's own text encoder and VAEs, which are pickled.
PICKLED = ".pth"
# Prefixes that programs add to the names of a component's tensors.
_PREFIXES = (
    *("model.diffusion_model.", "model.model.", "diffusion_model.", "model."),
    *("text_model.", "vision_model.", "visual."),
)
# A buffer of whole numbers in files of older transformers.
_POSITIONS = ".position_ids"
Expert = Literal["high", "low"]
_COMPONENTS: Mapping[Expert, str] = {"high": "transformer", "low": "transformer_2"}
# "high_noise", "HighNoise", "-high-"; not "highres".
_EXPERT = re.compile(r"(?<![a-zA-Z])(high|low)(?=[ _.-]?noise|[^a-zA-Z]|$)", re.IGNORECASE)
_IN_NAME = re.compile(r"[ _.-]?(?<![a-zA-Z])(high|low)([ _.-]?noise)?(?=[^a-zA-Z]|$)", re.IGNORECASE)
_MAX_NAME_LENGTH = 80


@dataclass(frozen=True)
class TransformerFile:
    """A transformer in a file.

    Attributes:
        family: a key of `registry.FAMILIES`.
        expert: by the file's name, if it tells.
        known: the published model with such a transformer, if there is one.
    """

    path: Path
    family: str
    files: WeightFiles
    expert: Expert | None
    known: KnownModel | None
    experts: int


def listed(weights_dir: Path) -> dict[str, Path]:
    """Return the files of transformers in the weights folder and its subfolders, by the model's name.

    Two experts are one model, of which the high-noise expert's file is returned. Subfolders with components are models
    of their own. Nothing is opened.
    """
    models: dict[str, Path] = {}
    folders = [weights_dir, *sorted(path for path in weights_dir.glob("[!.]*") if path.is_dir())]
    for folder in folders:
        if folder != weights_dir and (
            folder.name in {LORAS, UPSCALERS, PREPROCESSORS, ENHANCERS}
            or any(folder.glob("*.json"))
            or any(folder.glob("*/*.json"))
        ):
            continue
        for path in weight_files_in(folder):
            name = model_name(path)
            if name not in models or expert_of(path) == "high":
                models[name] = path
    return models


def weight_files_in(folder: Path, suffixes: Collection[str] = SUFFIXES) -> list[Path]:
    """Return the single files in a folder; none if it cannot be read, or has a component of a model."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return []
    if any(path.name == "config.json" for path in entries):
        return []
    suited = (path for path in entries if path.suffix.lower() in suffixes and path.is_file())
    return [path for path in suited if not path.name.startswith(".") and path.name.isprintable()]


def model_name(path: Path) -> str:
    """Return the name of the model of a file: its own, without what tells the expert."""
    return _IN_NAME.sub("", path.stem, count=1) or path.stem


def expert_of(path: Path) -> Expert | None:
    """Return the expert that a file's name states."""
    match = _EXPERT.search(path.stem) or _EXPERT.fullmatch(re.sub(r"[ _.-]?noise$", "", path.parent.name, flags=re.I))
    return None if match is None else "high" if match[1].lower() == "high" else "low"


def other_expert(path: Path) -> list[Path]:
    """Return the paths where the file of the other expert may be, the usual one first."""
    name, folder = _exchanged(path.name), _exchanged(path.parent.name)
    places = [path.parent / name, path.parent.parent / folder / name]
    return [place for place in dict.fromkeys(places) if place != path]


def _exchanged(name: str) -> str:
    return _EXPERT.sub(lambda match: _OTHER_WORDS[match[1].lower()](match[1]), name, count=1)


def _in_case(word: str) -> Callable[[str], str]:
    return lambda like: word.upper() if like.isupper() else word.capitalize() if like[0].isupper() else word


_OTHER_WORDS = {"high": _in_case("low"), "low": _in_case("high")}


def read_transformer(path: Path, candidates: Sequence[Mapping[str, Any]] = ()) -> TransformerFile:
    """Recognise the transformer in a file.

    Args:
        candidates: configurations of installed models, see `registry.SingleFiles.config_of`.

    Raises:
        ModelError: if it is pickled, damaged, of another kind of model, or of a format that cannot be read.
    """
    check_name(path)
    try:
        stat = path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    stored = _read(path, stat.st_size, stat.st_mtime_ns)
    for name in FAMILIES:
        family = family_of(name)
        names = family.single_files
        if names is None:
            continue
        weights = _renamed(stored, names.diffusers_names(list(stored)))
        if weights is None:
            continue
        config = names.config_of({key: weight.shape for key, weight in weights.items()}, candidates)
        if config is not None:
            _check(path, weights, dict(names.parameters(config)))
            expert = expert_of(path)
            experts = names.experts(config, named=expert is not None)
            model = _known(published_models(name), config, experts, path)
            files = WeightFiles.of(weights, config, names.UNQUANTIZED)
            return TransformerFile(path, name, files, expert, model, experts)
    raise ModelError("model.file_unknown", file=path.name, tensors=[key[:_MAX_NAME_LENGTH] for key in list(stored)[:3]])


def _renamed(
    stored: Mapping[str, StoredWeight], names: Mapping[str, str | tuple[str, ...]]
) -> dict[str, StoredWeight] | None:
    """Return weights under the names of `SingleFiles.diffusers_names`; `None` if two have the same one.

    Some programs store biases of convolutions with axes of one.
    """
    weights: dict[str, StoredWeight] = {}
    for key, weight in stored.items():
        renamed = names.get(key, ())
        parts = (renamed,) if isinstance(renamed, str) else renamed
        if len(parts) > 1 and (not weight.shape or weight.shape[0] % len(parts)):
            return None
        for number, name in enumerate(parts):
            if name in weights:
                return None
            part = weight if len(parts) == 1 else weight.rows(number, len(parts))
            weights[name] = part.as_vector if name.endswith(".bias") else part
    return weights


class PartFile(NamedTuple):
    """A component in a file that is no transformer: its family, its name, and its weights."""

    family: str
    component: str
    files: WeightFiles


def read_parts(path: Path, candidates: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[PartFile]:
    """Recognise the components of one family in a file, such as text encoders and VAEs, but no transformers.

    Args:
        candidates: configurations of known and installed models, by component.

    Raises:
        ModelError: if the file is pickled, damaged, or of a format that cannot be read; if it is such a component, and
            lacks a parameter, or has one of another shape.
    """
    check_name(path)
    tensors = file_tensors(path)
    for name in FAMILIES:
        parts: list[PartFile] = []
        for component, part in family_of(name).part_files.items():
            renamed = part.names(list(tensors))
            # Only weights may have other types, such as SentencePiece's model.
            stored = _weights({key: tensor for key, tensor in tensors.items() if key in renamed})
            weights = {renamed.get(key, key): replace(weight, added=part.added(key)) for key, weight in stored.items()}
            shapes = {key: weight.shape for key, weight in weights.items()}
            config = part.config_of(shapes, candidates.get(component, ()))
            if config is None:
                continue
            _check(path, weights, part.parameters(config))
            parts.append(PartFile(name, component, WeightFiles.of(weights, config, None)))
        if parts:
            return parts
    return []


def needs_folder(path: Path) -> ModelError | None:
    """Return why a component in a file is not read: it is one that must be in a model's folder. `None` for others.

    Raises:
        ModelError: if the file is pickled, damaged, or of a format that cannot be read.
    """
    names = set()
    for name in file_tensors(path):
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        names.add(name.removeprefix(prefix))
    # A model that was made of another one has tensors more.
    fits = [
        (len(signs.has), family, component, signs.code)
        for family in FAMILIES
        for component, alternatives in family_of(family).folder_files.items()
        for signs in alternatives
        if signs.fit(names)
    ]
    if not fits:
        return None
    _, family, component, code = max(fits, key=lambda fit: fit[0])
    model = published_models(family)[0]
    data = {"component": component, "title": model.title, "model": model.name}
    return ModelError(code, file=path.name, **data)


@functools.lru_cache(maxsize=32)
def _read(path: Path, _size: int, _changed: int) -> dict[str, StoredWeight]:
    return _weights(file_tensors(path))


def _weights(tensors: Mapping[str, FileTensor]) -> dict[str, StoredWeight]:
    return stored_weights({name: tensor for name, tensor in tensors.items() if not name.endswith(_POSITIONS)})


def _check(path: Path, weights: Mapping[str, StoredWeight], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a file has exactly the parameters of its architecture."""
    for name, shape in expected.items():
        if name not in weights:
            raise ModelError("model.file_tensor_missing", file=path.name, tensor=name)
        if weights[name].shape != shape:
            sizes = ("×".join(map(str, axes)) for axes in (weights[name].shape, shape))
            have, want = sizes
            raise ModelError("model.file_other_shape", file=path.name, tensor=name, shape=have, expected=want)
    for name in weights:
        if name not in expected:
            raise ModelError("model.file_tensor_unknown", file=path.name, tensor=name[:_MAX_NAME_LENGTH])


def _known(models: Sequence[KnownModel], config: Mapping[str, Any], experts: int, path: Path) -> KnownModel | None:
    """Return the published model with such a transformer; of several, one whose size or kind is in the file's name."""
    kind = "_class_name"  # of transformers with parts that others lack
    fits = [
        model
        for model in models
        if model.experts == experts
        and config.get(kind) == model.configs["transformer"].get(kind)
        and all(config.get(name) == value for name, value in model.configs["transformer"].items() if name in config)
    ]
    text, endings = path.stem.lower(), {model.name: model.name.rpartition("-")[2] for model in fits}
    in_name = [model for model in fits if endings[model.name] in text]
    return max(in_name, key=lambda model: len(endings[model.name]), default=fits[0] if fits else None)


def assemble(
    path: Path,
    folders: Sequence[Path],
    weights_dir: Path,
    candidates: Sequence[Mapping[str, Any]],
    parts: Mapping[str, WeightFiles] | None = None,
) -> ModelSpec:
    """Return the model of a file: with the other expert's file, if it has two, and the components of a folder.

    Args:
        folders: that may have the other components; the first that fits is used.
        parts: other components in this file, and those in others, for folders that lack their weights.

    Returns:
        The model; if no folder fits and it is a published model's transformer, one that is not downloaded.

    Raises:
        ModelError: if a file cannot be used, the other expert's is missing, or no folder fits.
    """
    first = read_transformer(path, candidates)
    transformers = {"transformer": first}
    if first.experts > 1:
        if first.expert is None:
            raise ModelError("model.file_expert_unknown", file=path.name, title=_title(first))
        second = _second(first, candidates)
        pair = (first, second) if first.expert == "high" else (second, first)
        transformers = dict(zip(_COMPONENTS.values(), pair, strict=True))
    return combined({name: file.files for name, file in transformers.items()}, first, folders, weights_dir, parts or {})


def reassemble(paths: Mapping[str, Path], configs: Mapping[str, Mapping[str, Any]], directory: Path) -> ModelSpec:
    """Return a model that `assemble` returned in another process.

    Args:
        paths: `ModelSpec.single_files`.
        configs: of these components.
        directory: of its other components.

    Raises:
        ModelError: if a file has changed so that it cannot be used.
    """
    transformers = {
        name: read_transformer(path, [configs[name]]) for name, path in paths.items() if is_transformer(name)
    }
    files = {name: file.files for name, file in transformers.items()}
    parts: dict[str, WeightFiles] = {}
    for name, path in paths.items():
        if name not in transformers:
            component = folder_of(name)
            found = [part for part in read_parts(path, {component: [configs[name]]}) if part.component == component]
            if not found:
                raise ModelError("model.file_unknown", file=path.name, tensors=[])
            parts[component] = found[0].files
    return combined(files, transformers["transformer"], [directory], directory.parent, parts)


def combined(
    files: Mapping[str, WeightFiles],
    first: TransformerFile,
    folders: Sequence[Path],
    weights_dir: Path,
    parts: Mapping[str, WeightFiles],
) -> ModelSpec:
    """See `assemble`."""
    name, family = model_name(first.path), family_of(first.family)
    reasons: list[TandemError] = []
    for folder in folders:
        try:
            check_companions(folder)
            used = {
                part: weights
                for part, weights in parts.items()
                if first.path in weights.paths or not any((folder / part).glob("*.safetensors"))
            }
            spec = family.assemble(folder, name, {**files, **used}, first.known)
            check_loadable(spec)
        except TandemError as error:
            # The published model's own folder fits, so it is damaged.
            if first.known is not None and folder.name.lower() in first.known.names:
                raise
            reasons.append(error)
        else:
            return replace(spec, title=_title(first), mag_ratios=first.known.mag_ratios if first.known else {})
    if first.known is None:
        data = {"file": first.path.name, "title": _title(first)}
        if reasons:
            raise ModelError("model.file_unfit", **data, cause=reasons[0].fact)
        raise ModelError("model.file_alone", **data)
    spec = first.known.spec(weights_dir)
    files = {**files, **parts}
    parameters = {component: weights.parameters for component, weights in files.items()}
    return replace(spec, name=name, title=_title(first), files=files, parameters={**spec.parameters, **parameters})


def _second(first: TransformerFile, candidates: Sequence[Mapping[str, Any]]) -> TransformerFile:
    """Return the file of the other expert."""
    places = other_expert(first.path)
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        missing = "low" if first.expert == "high" else "high"
        raise ModelError(
            "model.file_expert_missing", file=first.path.name, expert=missing, title=_title(first), path=places[0]
        )
    second = read_transformer(path, candidates)
    if second.files.config != first.files.config or second.expert == first.expert:
        raise ModelError("model.experts_differ", model=_title(first))
    return second


def _title(file: TransformerFile) -> str:
    """Return family, size and format for people."""
    weights = file.files.parameters * file.experts
    title = file.known.title if file.known else f"{file.family}, {weights / 1e9:.2g} B weights"
    return f"{title}, {file.files.title}"
