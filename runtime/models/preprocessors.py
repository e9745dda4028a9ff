"""Models that make control frames of videos, in the weights folder: which are published, found and usable.

Each is in a folder of `weights/preprocessors`: a folder of the Hugging Face hub, or several of them, one for each part.
A folder is recognised by the class in its `config.json`. Imports no torch.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.core.cancel import never
from runtime.core.digests import file_digests
from runtime.core.errors import InvalidRequestError, ModelError, TandemError
from runtime.core.preprocessors import DEPTH_ESTIMATOR, PERSON_DETECTOR, POSE_ESTIMATOR, PreprocessorUse
from runtime.core.request import DEPTH, POSE
from runtime.models.folder import check_files, count_parameters, read_config, reading, weight_files
from runtime.models.registry import Part

# Their folder in the weights folder.
PREPROCESSORS = "preprocessors"
# transformers' class of each part.
CLASSES: Mapping[str, str] = {
    DEPTH_ESTIMATOR: "DepthAnythingForDepthEstimation",
    POSE_ESTIMATOR: "VitPoseForPoseEstimation",
    PERSON_DETECTOR: "RTDetrForObjectDetection",
}
# The parts that make each kind of control frames.
PARTS: Mapping[str, tuple[str, ...]] = {DEPTH: (DEPTH_ESTIMATOR,), POSE: (PERSON_DETECTOR, POSE_ESTIMATOR)}
_PROCESSOR = "preprocessor_config.json"
# Sides of the pictures that a part takes, its layers, and other sizes: above what any published one has.
_MAX_SIDE, _MAX_LAYERS, _MAX_SIZE = 2_048, 128, 20_000
_LABELS = ("id2label", "label2id")
# With other values, transformers would load a part of the model, or code for it, from elsewhere.
_ELSEWHERE = ("backbone", "use_timm_backbone", "use_pretrained_backbone", "quantization_config")
_ATTENTION, _OWN_ATTENTION = "attn_implementation", (None, "eager", "sdpa")
# Height and width of what a pose estimator sees, unless its configuration says otherwise.
_POSE_SIDES = (256, 192)
# The points of a person that skeletons are drawn of: COCO's.
_POINTS = 17
# Changes when other control frames are made with the same model.
_VERSION = 1


@dataclass(frozen=True)
class PublishedPreprocessor:
    """A published model that makes control frames.

    Attributes:
        name: in `models download`, and of its folder.
        kind: one of `request.BY_MODEL`.
        title: for people.
        license: of its weights.
        parts: the repository of each part.
        size: bytes of its download, to 0.01 GB.
        about: what it makes.
    """

    name: str
    kind: str
    title: str
    license: str
    parts: tuple[Part, ...]
    size: int
    about: str

    @property
    def repositories(self) -> list[str]:
        """Those that its parts are downloaded from."""
        return [part.repository for part in self.parts]

    @property
    def names(self) -> frozenset[str]:
        """All names that mean it, in lower case."""
        return frozenset({self.name, self.parts[0].repository.lower()})


PUBLISHED: tuple[PublishedPreprocessor, ...] = (
    PublishedPreprocessor(
        name="depth-anything-v2-small",
        kind=DEPTH,
        title="Depth Anything V2 Small",
        license="Apache-2.0",
        parts=(Part(repository="depth-anything/Depth-Anything-V2-Small-hf", at_root=DEPTH_ESTIMATOR),),
        size=100_000_000,
        about="Makes control frames: depth.",
    ),
    PublishedPreprocessor(
        name="vitpose-base-simple",
        kind=POSE,
        title="ViTPose Base with RT-DETR R50",
        license="Apache-2.0",
        parts=(
            Part(repository="usyd-community/vitpose-base-simple", at_root=POSE_ESTIMATOR),
            Part(repository="PekingU/rtdetr_r50vd_coco_o365", at_root=PERSON_DETECTOR),
        ),
        size=520_000_000,
        about="Makes control frames: poses of people.",
    ),
)


def published_preprocessor(name: str) -> PublishedPreprocessor | None:
    """Return the published model that makes control frames with a name, in any case."""
    return next((model for model in PUBLISHED if name.strip().lower() in model.names), None)


def folder_of_preprocessor(name: str, weights_dir: Path) -> Path:
    """Return the folder of a model that makes control frames."""
    return weights_dir / PREPROCESSORS / name


def installed_parts(weights_dir: Path) -> dict[str, Path]:
    """Return the folder of each part that is installed; of several, a published one, else the first by name."""
    parent = weights_dir / PREPROCESSORS
    names = {model.name for model in PUBLISHED}
    folders = [path for path in parent.glob("[!.]*") if path.is_dir()] if parent.is_dir() else []
    found: dict[str, Path] = {}
    for folder in sorted(folders, key=lambda path: (path.name not in names, path.name)):
        for part, place in parts_in(folder).items():
            found.setdefault(part, place)
    return found


def parts_in(folder: Path) -> dict[str, Path]:
    """Return the folder of each part in a folder, which is that of a part or has folders of parts."""
    by_class = {name: part for part, name in CLASSES.items()}
    found: dict[str, Path] = {}
    for place in (folder, *sorted(path for path in folder.glob("[!.]*") if path.is_dir())):
        if (place / "config.json").is_file():
            try:
                classes = read_config(place / "config.json").get("architectures")
            except TandemError:  # not known to be a part
                continue
            for name in classes if isinstance(classes, list) else ():
                if name in by_class:
                    found.setdefault(by_class[name], place)
    return found


def missing_model(kind: str, weights_dir: Path) -> InvalidRequestError | None:
    """Return why no control frames of a kind can be made: their model is not installed; `None` if it is.

    Args:
        kind: one of `request.BY_MODEL`.
    """
    if {*PARTS[kind]} <= {*installed_parts(weights_dir)}:
        return None
    model = next(model for model in PUBLISHED if model.kind == kind)
    data = {"kind": kind, "model": model.title, "name": model.name, "license": model.license, "size": model.size}
    folder = weights_dir / PREPROCESSORS
    return InvalidRequestError("preprocess", "preprocess.model_missing", **data, folder=folder)


def find_preprocessor(
    kind: str, weights_dir: Path, cache_dir: Path | None, check: Callable[[], None] = never
) -> PreprocessorUse:
    """Return the model that makes control frames of a kind, checked.

    Args:
        cache_dir: stores digests of its weights, so that they are read once; `None` to read them.
        check: see `core.digests.file_digests`.

    Raises:
        InvalidRequestError: if none is installed.
        ModelError: if it is damaged, pickled, or of another architecture than Tandem runs.
    """
    error = missing_model(kind, weights_dir)
    if error is not None:
        raise error
    installed = installed_parts(weights_dir)
    folders = {part: installed[part] for part in PARTS[kind]}
    parameters = {part: check_part(part, folder) for part, folder in folders.items()}
    model = next((model for model in PUBLISHED if model.kind == kind and _is_whole(model, folders, weights_dir)), None)
    title = " with ".join(dict.fromkeys(folder.name for folder in folders.values())) if model is None else model.title
    return PreprocessorUse(
        kind=kind,
        title=title,
        license="unknown" if model is None else model.license,
        digest=_digest(folders, cache_dir, check),
        folders=folders,
        parameters=parameters,
    )


def check_preprocessor(folder: Path) -> None:
    """Check a downloaded model that makes control frames.

    Raises:
        ModelError: if it is incomplete or damaged.
    """
    found = parts_in(folder)
    if not any({*parts} <= {*found} for parts in PARTS.values()):
        raise ModelError("preprocess.no_model", folder=folder.name, classes=list(CLASSES.values()))
    for part, place in found.items():
        check_part(part, place)


def check_part(part: str, folder: Path) -> int:
    """Check the folder of a part as far as that needs no torch; return its number of weights.

    Raises:
        ModelError: if it is incomplete, damaged or pickled, or of an architecture that Tandem does not run.
    """
    check_files(folder)
    config, processor = read_config(folder / "config.json"), read_config(folder / _PROCESSOR)
    with reading(folder.name):
        _check_config(part, config)
        _check_sides(processor)
    return count_parameters(folder)


def _check_config(part: str, config: Mapping[str, Any]) -> None:
    """Raise a `ValueError` that names what Tandem does not run."""
    for name, value in _values(config):
        if (name in _ELSEWHERE and value) or (name.endswith(_ATTENTION) and value not in _OWN_ATTENTION):
            raise ValueError(name)
        most = _MAX_LAYERS if name == "depths" or name.endswith("_layers") else _MAX_SIZE
        sizes = [size for size in (value if isinstance(value, list) else [value]) if isinstance(size, int)]
        if not all(abs(size) <= most for size in sizes):
            raise ValueError(name)
    # Metric depth is larger for what is farther.
    if part == DEPTH_ESTIMATOR and config.get("depth_estimation_type", "relative") != "relative":
        raise ValueError("depth_estimation_type")
    if part == POSE_ESTIMATOR:
        if len(config["id2label"]) != _POINTS:
            raise ValueError("id2label")
        if len(config["backbone_config"].get("image_size", _POSE_SIDES)) != len(_POSE_SIDES):
            raise ValueError("image_size")
    if part == PERSON_DETECTOR and "person" not in config["id2label"].values():
        raise ValueError("id2label")


def _check_sides(processor: Mapping[str, Any]) -> None:
    """Raise a `ValueError` if pictures for a part are too large."""
    size = processor.get("size", {})
    sides = size.values() if isinstance(size, dict) else (size,)
    if not all(isinstance(side, int) and 0 < side <= _MAX_SIDE for side in sides):
        raise ValueError("size")


def _values(config: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Yield the names and values of a configuration, and of configurations in it, without labels."""
    for name, value in config.items():
        yield name, value
        if isinstance(value, dict) and name not in _LABELS:
            yield from _values(value)


def _is_whole(model: PublishedPreprocessor, folders: Mapping[str, Path], weights_dir: Path) -> bool:
    """Whether all parts are those of a published model's folder."""
    return {folder.parent for folder in folders.values()} == {folder_of_preprocessor(model.name, weights_dir)}


def _digest(folders: Mapping[str, Path], cache_dir: Path | None, check: Callable[[], None]) -> str:
    """Return the digest of the files of all parts."""
    paths = [
        path
        for part in sorted(folders)
        for path in (folders[part] / "config.json", folders[part] / _PROCESSOR, *weight_files(folders[part]))
    ]
    digests = file_digests(paths, cache_dir, check)
    return hashlib.sha256("\n".join([str(_VERSION), *digests]).encode()).hexdigest()
