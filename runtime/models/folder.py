"""Reads model folders in diffusers' format without torch: JSON files, numbers of weights, `tandem.json`.

A folder may come from anywhere: every number in its configurations has a limit, so that no library builds layers or
tables without end, and everything in it is a regular file or a folder.
"""

import contextlib
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from runtime.core.errors import ModelError
from runtime.core.request import MAX_FRAMES, MAX_SIDE, MAX_STEPS
from runtime.core.untrusted_files import (
    BYTE_ORDER_MARK,
    MAX_JSON_VALUES,
    NotRegularFileError,
    TooManyValuesError,
    is_lfs_pointer,
    open_file,
    read_json,
)
from runtime.models.spec import Defaults, LatentRgb
from runtime.models.tensor_files import Header, StoredTensor, lfs_pointer, read_header, unreadable

# Names of weights as diffusers and transformers write them, with `variant` or without; "fp16" and the like.
_WEIGHTS = re.compile(r"(?:diffusion_pytorch_model|model)(?:\.(?P<variant>[A-Za-z0-9_]+))?\.safetensors")
_INDEX = re.compile(r".+\.safetensors\.index(?:\.(?P<variant>[A-Za-z0-9_]+))?\.json")
# The vocabulary of a tokenizer, by any of the libraries.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
# The largest number in a published configuration is the size of a vocabulary, 256,384.
_MAX_NUMBER = 1_000_000
# The default of some schedulers.
_MAY_BE_INFINITE = frozenset({"lambda_min_clipped"})
# Two names of one tensor; files may have either.
_TIED = (("shared.weight", "encoder.embed_tokens.weight"),)
# A weight of one of a list of equal layers, by the names of transformers and of diffusers' transformers.
_LAYER = re.compile(
    r"(?P<list>(?:.+\.)?(?:layers|(?:single_)?transformer_blocks|refiner_blocks))\.(?P<number>[0-9]{1,4})\.(?P<rest>.+)"
)
# Tokenizers of this size or less are read completely.
_SMALL_TOKENIZER_BYTES = 4 << 20
# Files without weights; the largest, UMT5's tokenizer, has 17 MB.
MAX_SMALL_FILE_BYTES = 64 << 20
_MAX_ENTRIES = 20_000
_MAX_DETAIL_LENGTH = 200
_MAX_SHOWN = 100
_MAX_LISTED = 100
# Published magnitude ratios are between 0.75 and 1.3.
_MAX_RATIO = 10.0

_Frames = Annotated[int, Field(strict=True, ge=1, le=MAX_FRAMES)]
_Side = Annotated[int, Field(strict=True, ge=1, le=MAX_SIDE)]
_TITLE = TypeAdapter(Annotated[str, Field(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")])
_DEFAULTS = TypeAdapter(Defaults)
_FLAG = TypeAdapter(Annotated[bool, Field(strict=True)])
_VERSION = TypeAdapter(Annotated[int, Field(strict=True, ge=1, le=1_000_000)])
_SIZES = TypeAdapter(Annotated[tuple[tuple[_Side, _Side], ...], Field(min_length=1, max_length=_MAX_LISTED)])
_FRAME_COUNTS = TypeAdapter(Annotated[tuple[_Frames, ...], Field(min_length=1, max_length=_MAX_LISTED)])
_LATENT_RGB = TypeAdapter(LatentRgb)
_Ratios = Annotated[
    tuple[Annotated[float, Field(gt=0, le=_MAX_RATIO, allow_inf_nan=False)], ...],
    Field(min_length=1, max_length=MAX_STEPS),
]
_MAG_RATIOS = TypeAdapter(dict[Literal["transformer", "transformer_2"], _Ratios])
_Words = Annotated[str, Field(max_length=40, pattern=r"^[^\x00-\x1f\x7f]+$")]
_WORDS = TypeAdapter(
    Annotated[dict[_Words, Annotated[tuple[_Words, ...], Field(max_length=_MAX_LISTED)]], Field(max_length=12)]
)
# The normalizer of a tokenizer of whole words. The page's script does the same with what is typed.
_WORD_NORMALIZERS = [
    {"type": "NFKD"},
    {"type": "StripAccents"},
    {"type": "Lowercase"},
    {"type": "Replace", "pattern": {"Regex": r"[^\p{L}\p{N}]+"}, "content": " "},
]
# Larger tokenizers split words into known pieces; UMT5's has 17 MB.
_MAX_VOCABULARY_BYTES = 1 << 20


def up_to(most: int) -> Any:
    """Return the limits of a number in a configuration: published models stay far below them."""
    return Field(strict=True, ge=1, le=most)


def read_config(path: Path) -> dict[str, Any]:
    """Read a configuration file of a model folder.

    Raises:
        ModelError: if it is missing, not JSON, not a JSON object, or has a number beyond a million.
    """
    value = read_object(path)
    for name, number in _numbers(value):
        if not (abs(number) <= _MAX_NUMBER or (name in _MAY_BE_INFINITE and not math.isnan(number))):
            file = f"{path.parent.name}/{path.name}"
            raise ModelError("model.number_too_large", file=file, name=name[:40], most=_MAX_NUMBER)
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Read a file of a model folder with a JSON object, whatever its numbers.

    Raises:
        ModelError: if it is missing, not JSON, or not a JSON object.
    """
    file = f"{path.parent.name}/{path.name}"
    try:
        value = read_json(path, infinite=True)
    except FileNotFoundError as error:
        raise ModelError("model.file_missing", file=file) from error
    except OSError as error:
        raise ModelError("model.file_unreadable", file=file, path=path, reason=error.strerror) from error
    except TooManyValuesError as error:
        raise ModelError("model.file_too_many", file=file, most=MAX_JSON_VALUES) from error
    except ValueError as error:
        if is_lfs_pointer(path):
            raise lfs_pointer(path) from error
        raise ModelError("model.file_not_json", file=file) from error
    if not isinstance(value, dict):
        raise ModelError("model.file_not_json", file=file)
    return value


def _numbers(config: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield all numbers of a configuration, with the name of the value that contains them."""
    pending: list[tuple[str, Any]] = list(config.items())
    while pending:
        name, value = pending.pop()
        if isinstance(value, int | float):
            yield name, value
        elif isinstance(value, dict):
            pending += value.items()
        elif isinstance(value, list):
            pending += ((name, item) for item in value)


@contextlib.contextmanager
def reading(title: str) -> Iterator[None]:
    """Turn an error of incomplete or invalid configurations into a ModelError, in a `with` block.

    Args:
        title: the model's name in the message.
    """
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        detail = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise ModelError("model.config_invalid", model=title, detail=detail[:_MAX_DETAIL_LENGTH]) from error
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        detail = str(error)[:_MAX_DETAIL_LENGTH]
        raise ModelError("model.config_invalid", model=title, detail=detail) from error


def has_component(index: dict[str, Any], component: str) -> bool:
    """Return whether `model_index.json` names a class for a component."""
    entry = index.get(component)
    return isinstance(entry, list) and len(entry) == 2 and entry[0] is not None  # noqa: PLR2004 - [library, class]


def check_files(directory: Path) -> None:
    """Check that a folder has regular files only, and no pickled weights, which can run code when loaded.

    Raises:
        ModelError: naming the first such file.
    """
    count, folders = 0, [directory]
    try:
        while folders:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    count += 1
                    if count > _MAX_ENTRIES:
                        raise ModelError("model.too_many_files", model=directory.name, most=_MAX_ENTRIES)
                    _check_file(directory, entry)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
    except OSError as error:  # a folder that may not be read, or nested too deep
        raise ModelError("model.file_unreadable", file=directory.name, path=directory, reason=error.strerror) from error


def _check_file(directory: Path, entry: "os.DirEntry[str]") -> None:
    path = Path(entry.path)
    if path.suffix.lower() in _PICKLE_SUFFIXES:
        raise ModelError("model.pickled", file=_shown(path, directory))
    # `exists` is false for links to nothing, which no library opens.
    if not entry.is_file() and not entry.is_dir() and path.exists():
        reason = NotRegularFileError(path).strerror
        raise ModelError("model.file_unreadable", file=_shown(path, directory), path=path, reason=reason)


def _shown(path: Path, directory: Path) -> str:
    """Return a path within a folder for a message; of a very long one, the end."""
    return str(path.relative_to(directory))[-_MAX_SHOWN:]


def check_tokenizer(directory: Path) -> None:
    """Check the files of a tokenizer's folder, if it exists, before a library reads them.

    Raises:
        ModelError: if one is too large, or the configuration names code to run.
    """
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if path.is_file():
            if path.stat().st_size > MAX_SMALL_FILE_BYTES:
                file = f"{directory.name}/{path.name}"
                raise ModelError("model.file_too_large", file=file, most=MAX_SMALL_FILE_BYTES)
            check_read_by_library(path)
    path = directory / "tokenizer_config.json"
    if path.exists() and "auto_map" in read_object(path):
        raise ModelError("model.tokenizer_runs_code")


def check_read_by_library(path: Path) -> None:
    """Check that a library can read a file of text: it has its content, and no byte order mark.

    Raises:
        ModelError: if not.
    """
    if is_lfs_pointer(path):
        raise lfs_pointer(path)
    if path.suffix == ".json":
        with open_file(path) as file:
            if file.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK:
                raise ModelError("model.byte_order_mark", file=f"{path.parent.name}/{path.name}")


def check_tokenizers(directory: Path, encoders: Collection[str], title: str) -> None:
    """Check that each text encoder has a tokenizer.

    Raises:
        ModelError: if one has not.
    """
    for encoder in encoders:
        folder = directory / encoder.replace("text_encoder", "tokenizer")
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            raise ModelError("model.tokenizer_missing", model=title, folder=folder, files=list(_TOKENIZER_FILES))
        if not _is_tokenizer(folder):
            raise ModelError("model.part_unloadable", part="tokenizer", model=title)


def _is_tokenizer(folder: Path) -> bool:
    """Return whether the files of a tokenizer are complete, as far as is known without loading a large one."""
    try:
        for name in ("tokenizer_config.json", "special_tokens_map.json", "vocab.json"):
            if (folder / name).is_file():
                read_object(folder / name)
        path = folder / "tokenizer.json"
        if path.is_file():
            return _is_whole(path, path.stat().st_size, path.stat().st_mtime_ns)
        return all(_begins_as_model(folder / name) for name in ("tokenizer.model", "spiece.model"))
    except (ModelError, OSError):
        return False


@lru_cache(maxsize=16)
def _is_whole(path: Path, size: int, _changed: int) -> bool:
    """Return whether a `tokenizer.json` can be read; of a large one, whether it is a whole JSON object."""
    if size > _SMALL_TOKENIZER_BYTES:
        with open_file(path) as file:
            start = file.read(16).lstrip()
            file.seek(-16, os.SEEK_END)
            return start.startswith(b"{") and file.read().rstrip().endswith(b"}")
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(path))
    except Exception:  # the package has no other type
        return False
    return True


def _begins_as_model(path: Path) -> bool:
    """Return whether a file is missing, or begins as SentencePiece's model: with its first piece."""
    if not path.is_file():
        return True
    with open_file(path) as file:
        return file.read(1) == b"\n"


def weight_files(component: Path) -> list[Path]:
    """Return the safetensors files of a component: those that its index names, if it has one.

    If there are several variants (see `weights_variant`), the files are those of one.

    Raises:
        ModelError: if there are none, or the index is invalid or names a file outside the folder.
    """
    variants = _weights_by_variant(component)
    files, index = variants[_preferred(variants)] if variants else ([], None)
    names = set(files) if index is None else _indexed(component / index)
    if not names:
        raise ModelError("model.weights_missing", component=component.name)
    for name in names:
        if Path(name).name != name:
            raise ModelError("model.weights_outside", component=component.name)
    return [component / name for name in sorted(names)]


def weights_variant(component: Path) -> str | None:
    """Return the variant of a component's weights, as in diffusers: "fp16" of "model.fp16.safetensors".

    `None` for weights without one, which are preferred, then those in bfloat16.
    """
    return _preferred(_weights_by_variant(component))


def _preferred(variants: Collection[str | None]) -> str | None:
    return min(variants, key=lambda name: (name is not None, name != "bf16", name), default=None)


def _weights_by_variant(component: Path) -> dict[str | None, tuple[list[str], str | None]]:
    """Return the files of weights, and the index that names them if there is one, by variant."""
    variants: dict[str | None, tuple[list[str], str | None]] = {}
    for name in sorted(path.name for path in component.iterdir()) if component.is_dir() else ():
        index, single = _INDEX.fullmatch(name), _WEIGHTS.fullmatch(name)
        if index is not None:
            variants[index["variant"]] = ([], name)
        elif single is not None:
            variants.setdefault(single["variant"], ([name], None))
    return variants


def _indexed(path: Path) -> set[str]:
    """Return the files that an index names."""
    names = read_object(path).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ModelError("model.index_invalid", file=f"{path.parent.name}/{path.name}")
    return set(names.values())


def count_parameters(component: Path, tied: tuple[str, str] | None = None) -> int:
    """Return the number of weights in a component's files.

    Args:
        tied: two names of one tensor; if files hold both, it counts once.

    Raises:
        ModelError: if a file cannot be read or is not valid.
    """
    sizes = {name: count for name, (_, count) in tensor_types(component).items()}
    if tied is not None and tied[0] in sizes:
        sizes.pop(tied[1], None)
    return sum(sizes.values())


def tensor_types(component: Path) -> dict[str, tuple[str, int]]:
    """Return the dtype, as safetensors names it, and the number of weights of each tensor of a component, by name.

    Raises:
        ModelError: see `weight_files` and `read_header`.
    """
    return {name: (tensor.dtype, tensor.elements) for name, tensor in _tensors(component).items()}


def tensor_shapes(component: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a component, by name.

    Raises:
        ModelError: see `weight_files` and `read_header`; if the index names a tensor that no file has.
    """
    shapes = {name: tensor.shape for name, tensor in _tensors(component).items()}
    variants = _weights_by_variant(component)
    index = variants[_preferred(variants)][1]
    for name in read_object(component / index)["weight_map"] if index is not None else ():
        if name not in shapes:
            raise ModelError("model.file_tensor_missing", file=f"{component.name}/{index}", tensor=name[:_MAX_SHOWN])
    return shapes


def _tensors(component: Path) -> dict[str, StoredTensor]:
    """Return the tensors in all files of a component, by name."""
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(component):
        try:
            status = path.stat()
        except OSError as error:
            raise unreadable(path, error) from error
        tensors |= _header(path, status.st_size, status.st_mtime_ns).tensors
    return tensors


@lru_cache(maxsize=32)
def _header(path: Path, _size: int, _changed: int) -> Header:
    return read_header(path)


def missing_weights(shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]] | None) -> int:
    """Return how many weights are missing, or have another shape.

    Args:
        shapes: of the tensors in files. Libraries accept a prefix in their names.
        expected: see `registry.Family.weights`; `None` compares the layers of each list with each other, and
            expects a weight for each bias.
    """
    if expected is not None:
        by_end = {name.partition(".")[2]: shape for name, shape in shapes.items()}
        aliases = {name: alias for pair in _TIED for name, alias in (pair, pair[::-1])}
        return sum(
            shape not in {shapes.get(name), by_end.get(name), shapes.get(aliases.get(name, ""))}
            for name, shape in expected.items()
        )
    layers: dict[str, dict[int, set[str]]] = {}
    missing = sum(name.endswith(".bias") and f"{name[:-4]}weight" not in shapes for name in shapes)
    for name in shapes:
        layer = _LAYER.fullmatch(name)
        if layer is not None:
            layers.setdefault(layer["list"], {}).setdefault(int(layer["number"]), set()).add(layer["rest"])
    for blocks in layers.values():
        every: set[str] = set().union(*blocks.values())
        for number in range(max(blocks) + 1):
            absent = every - blocks.get(number, set())
            # A bias without its weight is counted already.
            missing += sum(f"{name[:-6]}bias" not in blocks.get(number, ()) or name[-6:] != "weight" for name in absent)
    return missing


def read_sidecar(directory: Path, experts: int) -> dict[str, Any] | None:
    """Read `tandem.json`: arguments of `ModelSpec` that diffusers' configurations do not contain.

    Returns:
        `title`, `license`, `about`, `latent_rgb`, `defaults`, `sizes`, `frame_counts`, `words`, `mag_ratios`,
        `interpolates` and `version`, or `None` without such a file.

    Raises:
        KeyError, TypeError, ValueError: if it is incomplete or invalid.
        ModelError: if it is not JSON.
    """
    path = directory / "tandem.json"
    if not path.exists():
        return None
    config = read_config(path)
    factors, bias = config.get("latent_rgb_factors"), config.get("latent_rgb_bias")
    defaults = _DEFAULTS.validate_python({"guidance_scale_2": None, "negative_prompt": "", **config["defaults"]})
    return {
        "title": _TITLE.validate_python(config.get("title") or directory.name),
        "license": _TITLE.validate_python(config.get("license") or "unknown"),
        "about": _TITLE.validate_python(config.get("about") or ""),
        "latent_rgb": _LATENT_RGB.validate_python({"factors": factors, "bias": bias}) if factors and bias else None,
        "defaults": defaults if experts > 1 else replace(defaults, guidance_scale_2=None, image_guidance_scale_2=None),
        "sizes": _SIZES.validate_python(config["sizes"]),
        "frame_counts": _FRAME_COUNTS.validate_python(config["frame_counts"]),
        "words": _WORDS.validate_python(config.get("words", {})),
        "mag_ratios": _mag_ratios(config.get("mag_ratios", {}), experts),
        "interpolates": _FLAG.validate_python(config.get("interpolates", False)),
        "version": _VERSION.validate_python(config.get("version", 1)),
    }


def _mag_ratios(value: Any, experts: int) -> dict[str, tuple[float, ...]]:
    """Return magnitude ratios of all transformers, or none.

    Raises:
        ValueError: for anything else.
    """
    ratios: dict[str, tuple[float, ...]] = {str(name): row for name, row in _MAG_RATIOS.validate_python(value).items()}
    if ratios and len(ratios) != experts:
        raise ValueError("mag_ratios")
    return ratios


def read_vocabulary(directory: Path) -> frozenset[str]:
    """Return all words that a model knows, in lower case without accents; empty if it knows pieces of words."""
    path = directory / "tokenizer" / "tokenizer.json"
    try:
        if path.stat().st_size > _MAX_VOCABULARY_BYTES:
            return frozenset()
        tokenizer = read_object(path)
        whole_words = tokenizer["model"]["type"] == "WordLevel"
        if not whole_words or tokenizer["normalizer"]["normalizers"] != _WORD_NORMALIZERS:
            return frozenset()
        special = {token["content"] for token in tokenizer["added_tokens"]}
        return frozenset(map(str, tokenizer["model"]["vocab"])) - special
    except (OSError, ModelError, KeyError, TypeError):
        return frozenset()
