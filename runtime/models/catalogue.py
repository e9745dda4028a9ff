"""The models: the one that ships with Tandem, those in the cache's `weights` folder, any folder by its path, and
published models, which can be planned with before their weights are downloaded.
"""

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from runtime.core.disk_caches import bytes_in
from runtime.core.errors import ModelError, OutputError, TandemError
from runtime.models import single_file
from runtime.models.enhancers import ENHANCERS
from runtime.models.folder import read_config
from runtime.models.preprocessors import PREPROCESSORS
from runtime.models.registry import FAMILIES, KnownModel, family_of, is_component, published_models, read_spec
from runtime.models.single_file import LORAS, UPSCALERS, assemble
from runtime.models.spec import ModelSpec, folder_of, is_transformer
from runtime.models.stored_weights import WeightFiles
from runtime.models.variants import DESCRIPTION, InstalledVariant, Variant

EMBEDDED = Path(__file__).parent / "embedded"
_BYTES_PER_WEIGHT = 4
# Folders of the weights folder that are no models of videos.
_OTHERS = frozenset({LORAS, UPSCALERS, PREPROCESSORS, ENHANCERS})
# Of text encoders, image encoders, VAEs and upsamplers, in ComfyUI.
_PART_FOLDERS = ("text_encoders", "clip", "clip_vision", "vae", "latent_upscale_models")
# Why a folder does not fit that lacks a component.
_MISSING = frozenset({"model.weights_missing", "model.file_missing"})


def folders(weights_dir: Path) -> dict[str, Path]:
    """Return the folder of each model by name, shipped ones first, without incomplete downloads.

    Raises:
        ModelError: if the weights folder cannot be read.
    """
    if weights_dir.is_dir() and not os.access(weights_dir, os.R_OK | os.X_OK):
        raise ModelError("model.weights_folder_unreadable", folder=weights_dir)
    model_folders = {path.parent.name: path.parent for path in sorted(EMBEDDED.glob("*/model_index.json"))}
    for path in sorted(weights_dir.glob("*/model_index.json")):
        if not path.parent.name.startswith("."):
            model_folders.setdefault(path.parent.name, path.parent)
    return model_folders


def transformer_files(weights_dir: Path) -> dict[str, Path]:
    """Return the single files of transformers by the model's name, without names that folders have.

    Raises:
        ModelError: if the weights folder cannot be read.
    """
    model_folders = folders(weights_dir)
    return {name: path for name, path in single_file.listed(weights_dir).items() if name not in model_folders}


def from_file(path: Path, weights_dir: Path) -> ModelSpec:
    """Return the model whose transformer is in a file; see `single_file.assemble`.

    Its other components are those beside the file, or of an installed model; first the published one's own.
    """
    installed = [folder for folder in folders(weights_dir).values() if folder.parent != EMBEDDED]
    near = [folder for folder in (path.parent, path.parent.parent) if _has_components(folder)]
    companions = [folder.parent.parent for folder in sorted(weights_dir.glob("[!.]*/scheduler/scheduler_config.json"))]
    configs = _configs("transformer", [*near, *installed])
    part_configs = _part_configs([*near, *installed])
    try:
        first = single_file.read_transformer(path, configs)
    except ModelError as error:
        if error.code not in {"model.file_unknown", "model.format_unknown"}:
            raise
        found = single_file.read_parts(path, part_configs)
        if not found:
            raise single_file.needs_folder(path) or error from error
        data = {"component": found[0].component, "format": found[0].files.title}
        raise ModelError("model.file_is_part", file=path.name, **data) from error
    names = first.known.names if first.known else frozenset()
    companions = sorted({*installed, *companions}, key=lambda folder: (folder.name.lower() not in names, folder))
    parts, problems = _parts(path, first, weights_dir, part_configs)
    try:
        return _distilled(assemble(path, [*near, *companions], weights_dir, configs, parts), path)
    except ModelError as error:
        # A damaged file may be the one that is missing.
        if problems and error.code == "model.file_unfit" and error.data["cause"].code in _MISSING:
            raise problems[0] from error
        raise


def _parts(
    path: Path,
    transformer: single_file.TransformerFile,
    weights_dir: Path,
    configs: Mapping[str, Sequence[Mapping[str, Any]]],
) -> tuple[dict[str, WeightFiles], list[TandemError]]:
    """Return other components in single files that fit a transformer, and why other files cannot be read.

    They are looked for in its own file, beside it, in folders beside its folder, as ComfyUI has them, and in the
    weights folder.

    Raises:
        ModelError: if its own file has a component that is damaged.
    """
    files = {part.component: part.files for part in single_file.read_parts(path, configs) if _fits(part, transformer)}
    beside = [path.parent.parent / name for name in _PART_FOLDERS]
    places = [path.parent, *beside, weights_dir, *sorted(weights_dir.glob("[!.]*"))]
    problems: list[TandemError] = []
    for folder in dict.fromkeys(places):
        for file in single_file.weight_files_in(folder, {*single_file.SUFFIXES, single_file.PICKLED}):
            # Other transformers are large, too, but only headers are read.
            try:
                parts = [] if file == path else single_file.read_parts(file, configs)
            except TandemError as error:
                problems.append(error)
                continue
            for part in parts:
                if _fits(part, transformer):
                    files.setdefault(part.component, part.files)
    return files, problems


def _fits(part: single_file.PartFile, transformer: single_file.TransformerFile) -> bool:
    """Whether a component is of the same model as a transformer."""
    fits = family_of(part.family).part_files[part.component].fits
    return part.family == transformer.family and fits(part.files.config, transformer.files.config)


def _configs(component: str, places: Sequence[Path]) -> list[Mapping[str, Any]]:
    configs: list[Mapping[str, Any]] = []
    for folder in places:
        with contextlib.suppress(TandemError):
            configs.append(read_config(folder / component / "config.json"))
    return configs


def _part_configs(places: Sequence[Path]) -> dict[str, list[Mapping[str, Any]]]:
    """Return configurations of components that single files may have: of installed models, then of published ones."""
    return {
        part: [*_configs(part, places), *(model.configs[part] for model in known_models() if part in model.configs)]
        for part in dict.fromkeys(part for family in FAMILIES for part in family_of(family).part_files)
    }


def _has_components(folder: Path) -> bool:
    return (folder / "scheduler" / "scheduler_config.json").is_file() and (folder / "tokenizer").is_dir()


def own_files(name: str, weights_dir: Path) -> list[Path]:
    """Return the files of a model of single files in the weights folder: of its transformers, which no other uses."""
    path = transformer_files(weights_dir).get(name)
    if path is None:
        return []
    files = [place for place in single_file.other_expert(path) if place.is_file()]
    of_both = single_file.expert_of(path) is not None and any(single_file.model_name(file) == name for file in files)
    return [path, *files[:1]] if of_both else [path]


def delete_files(name: str, weights_dir: Path) -> int:
    """Delete the files of `own_files`; return the freed bytes. Of links only the links are deleted.

    Raises:
        OutputError: if one cannot be deleted.
    """
    freed = 0
    for path in own_files(name, weights_dir):
        try:
            freed += 0 if path.is_symlink() else path.stat().st_size
            path.unlink()
        except OSError as error:
            raise OutputError("model.not_deleted", file=path, reason=error.strerror or str(error)) from error
    return freed


def decoder_folders(weights_dir: Path) -> dict[str, Path]:
    """Return the folder of each decoder of single frames by name, shipped ones first."""
    decoder_paths: dict[str, Path] = {}
    for parent in (EMBEDDED, weights_dir):
        for path in sorted(parent.glob("*/config.json")):
            if not path.parent.name.startswith(".") and is_component(path.parent):
                decoder_paths.setdefault(path.parent.name, path.parent)
    return decoder_paths


def find_decoder(name: str, weights_dir: Path) -> ModelSpec:
    """Return the decoder of single frames with a name or in a folder.

    Raises:
        ModelError: if it does not exist, cannot be used, or is another kind of model.
    """
    spec = find(name, weights_dir)
    if not spec.only_decodes:
        raise ModelError("model.no_frame_decoder", model=spec.title, names=list(decoder_folders(weights_dir)))
    return spec


def find(name: str, weights_dir: Path) -> ModelSpec:
    """Return the model, or decoder of single frames, with a name, in any case, or in a folder.

    Raises:
        ModelError: if it does not exist, cannot be used, or its weights are not downloaded.
    """
    spec = look_up(name, weights_dir)
    if not spec.is_downloaded and spec.files:
        names = (folder_of(name) for name in spec.component_names if folder_of(name) not in spec.files)
        data = {"missing": [*dict.fromkeys(names), "tokenizer", "scheduler"], "folder": weights_dir}
        raise ModelError("model.components_not_downloaded", model=spec.title, name=published_name(spec), **data)
    if not spec.is_downloaded:
        model = known_as(name)
        repository = model.repository if model else spec.name
        raise ModelError(
            "model.weights_not_downloaded", model=spec.title, name=spec.name, repository=repository, folder=weights_dir
        )
    return spec


def look_up(name: str, weights_dir: Path) -> ModelSpec:
    """Return the model or decoder with a name or in a folder, or a published one whose weights are not downloaded.

    Raises:
        ModelError: if it does not exist or cannot be used.
    """
    installed = folders(weights_dir)
    if name in installed:
        return read_model(installed[name], name)
    decoders = decoder_folders(weights_dir)
    if name in decoders:
        return read_spec(decoders[name], name)
    directory = Path(name).expanduser()
    if directory.is_dir():
        return read_model(directory.resolve(), directory.resolve().name)
    for installed_name, folder in installed.items():
        if installed_name.lower() == name.lower():
            return read_model(folder, installed_name)
    files = transformer_files(weights_dir)
    path = next((path for file_name, path in files.items() if file_name.lower() == name.lower()), weights_dir / name)
    if directory.is_file() or path.is_file():
        # Not resolved: a link may have the name that its target lacks.
        return from_file((directory if directory.is_file() else path).absolute(), weights_dir)
    published_model = known_as(name)
    if published_model is not None:
        folder_name = _name_of(published_model, installed)
        return read_model(installed[folder_name], folder_name) if folder_name else published_model.spec(weights_dir)
    variant = known_variant(name)
    if variant is not None:
        raise ModelError("variant.not_downloaded", name=variant.folder, title=variant.title)
    if directory.name == name:
        names = [*installed, *files, *(model.name for model in not_downloaded(weights_dir))]
        raise ModelError("model.unknown", name=name, names=names)
    return read_spec(directory.resolve(), directory.resolve().name)


def add_usable(models: dict[str, ModelSpec], weights_dir: Path) -> dict[str, ModelSpec]:
    """Add the usable models of the weights folder that are not in `models` yet, by name; return `models`."""
    for name in (*folders(weights_dir), *transformer_files(weights_dir)):
        if name not in models:
            with contextlib.suppress(TandemError):
                models[name] = find(name, weights_dir)
    return models


def offered(first: str, weights_dir: Path) -> dict[str, ModelSpec]:
    """Return the usable models by name, starting with `first`, a name or a folder.

    Raises:
        ModelError: if the first cannot be used, or makes no videos.
    """
    spec = find(first, weights_dir)
    check_makes_videos(spec, first)
    return add_usable({first: spec}, weights_dir)


def check_makes_videos(spec: ModelSpec, name: str) -> None:
    """Raise a `ModelError` if a model is a decoder of single frames.

    Args:
        name: under which it was requested.
    """
    if spec.only_decodes:
        raise ModelError("model.only_decodes", model=spec.title, name=name)


def decoders(weights_dir: Path) -> list[ModelSpec]:
    """Return the decoders of single frames that can be used."""
    specs = []
    for name, folder in decoder_folders(weights_dir).items():
        with contextlib.suppress(TandemError):
            specs.append(read_spec(folder, name))
    return specs


def unusable(weights_dir: Path, usable: Collection[str]) -> dict[str, TandemError]:
    """Return why folders and files of the weights folder cannot be used, by name.

    Args:
        usable: names of models that need no check.
    """
    errors = {}
    for folder in sorted(weights_dir.iterdir()) if weights_dir.is_dir() else ():
        name = folder.name
        of_files = not any(folder.glob("*/*.json")) and bool(single_file.weight_files_in(folder))
        if not name.startswith(".") and name not in {*_OTHERS, *usable} and folder.is_dir() and not of_files:
            try:
                read_model(folder, name)
            except TandemError as error:
                errors[name] = error
    for name, path in transformer_files(weights_dir).items() if weights_dir.is_dir() else ():
        if name not in usable:
            try:
                from_file(path, weights_dir)
            except TandemError as error:
                if not is_part(error):
                    errors[name] = error
    return errors


def is_part(error: TandemError) -> bool:
    """Whether a file is not a model that cannot be used, but a component of one, which other programs use."""
    needs_folder = error.code == "model.file_needs_folder" and not is_transformer(error.data["component"])
    return needs_folder or error.code == "model.file_is_part"


def check_offered(name: object, models: Mapping[str, ModelSpec]) -> ModelSpec:
    """Return the model with a name that came over HTTP.

    Raises:
        ModelError: if it is not among `models`; a page cannot open folders of its choice.
    """
    if isinstance(name, str) and name in models:
        return models[name]
    raise ModelError("model.not_offered", models=list(models))


def not_downloaded(weights_dir: Path) -> list[ModelSpec]:
    """Return the published models whose weights are not in `weights_dir`."""
    installed = folders(weights_dir)
    return [model.spec(weights_dir) for model in known_models() if not _name_of(model, installed)]


def known_models() -> list[KnownModel]:
    """Return the published models of every family."""
    return [model for family in FAMILIES for model in published_models(family)]


def known_as(name: str) -> KnownModel | None:
    """Return the published model with a name or alias, in upper or lower case."""
    return next((model for model in known_models() if name.strip().lower() in model.names), None)


def published(spec: ModelSpec) -> KnownModel | None:
    """Return the published model that a folder holds, by its name and its architecture."""
    model = known_as(spec.name) or (None if spec.single_files else known_as(spec.directory.name))
    return model if model is not None and model.describes(spec) else None


def published_name(spec: ModelSpec) -> str:
    """Return the name of the published model with a folder's name; empty if there is none."""
    model = known_as(spec.directory.name)
    return "" if model is None else model.name


def named(spec: ModelSpec) -> ModelSpec:
    """Return a folder's spec with what is known of the model that it holds, if published.

    That is its title, license, sizes and description, and its magnitude ratios.

    Values of its own `tandem.json` take precedence.
    """
    model = known_as(spec.directory.name)
    if model is None or not model.describes(spec):
        return spec
    spec = replace(spec, mag_ratios=spec.mag_ratios or model.mag_ratios)
    if spec.license != "unknown":
        return spec
    return replace(spec, title=model.title, license=model.license, sizes=model.sizes or spec.sizes, about=model.about)


def stored_bytes(spec: ModelSpec) -> int:
    """Return the size of an installed model: of its single files if it has some, else of its folder.

    A variant has its single files in its folder.
    """
    if not spec.single_files or spec.variant is not None:
        return bytes_in(spec.directory)
    sizes = 0
    for path in set(spec.single_files.values()):
        with contextlib.suppress(OSError):
            sizes += path.stat().st_size
    return sizes


def published_bytes(spec: ModelSpec) -> int:
    """Return the size of the files that a published model's download fetches; 0 if it is not known."""
    model = known_as(spec.name)
    return 0 if model is None else model.download_bytes


def download_bytes(spec: ModelSpec) -> int:
    """Return `published_bytes`, or the most that it may be: published weights have at most 4 bytes each."""
    return published_bytes(spec) or _BYTES_PER_WEIGHT * spec.total_parameters


def read_model(folder: Path, name: str) -> ModelSpec:
    """Return the model in a folder: in diffusers' format, or a variant as it is downloaded.

    Raises:
        ModelError: if it is incomplete or damaged; see `registry.read_spec`.
    """
    variant = read_variant(folder)
    if variant is None:
        return _distilled(named(read_spec(folder, name)), folder / "transformer")
    spec = from_file(folder / variant.transformer, folder.parent)
    if spec.directory != folder or not spec.is_downloaded:
        raise ModelError("variant.incomplete", model=name)
    if variant.steps is not None:
        spec = spec.distilled_for(variant.steps)
    return replace(spec, name=name, title=variant.title, license=variant.license, variant=variant)


def _distilled(spec: ModelSpec, path: Path) -> ModelSpec:
    """Return a model with the steps and noise levels of its distillation, if its file's or folder's name states one."""
    family = family_of(spec.family)
    steps = family.distilled_model(path)
    if steps is None:
        return spec
    return replace(spec.distilled_for(steps, family.distilled_levels(path)), distilled_steps=steps)


def read_variant(folder: Path) -> InstalledVariant | None:
    """Return the description of the variant in a folder; `None` if it holds none.

    Raises:
        ModelError: if the description is damaged.
    """
    path = folder / DESCRIPTION
    if not path.exists():
        return None
    try:
        return InstalledVariant.model_validate(read_config(path))
    except ValidationError as error:
        raise ModelError("variant.damaged", model=folder.name, file=path) from error


class KnownVariant(NamedTuple):
    """A variant of a published model."""

    model: KnownModel
    variant: Variant

    @property
    def folder(self) -> str:
        """The name of its folder, by which requests name it."""
        return self.model.variant_folder(self.variant)

    @property
    def title(self) -> str:
        """Model, format and steps, for people."""
        return self.description.title

    @property
    def description(self) -> InstalledVariant:
        """What its folder states of it."""
        model = self.model
        return InstalledVariant.of(self.variant, model=model.name, title=model.title, license_name=model.license)


def known_variant(name: str) -> KnownVariant | None:
    """Return the variant of a published model by the name of its folder, in upper or lower case."""
    known = (KnownVariant(model, variant) for model in known_models() for variant in model.variants)
    return next((variant for variant in known if variant.folder == name.strip().lower()), None)


def _name_of(model: KnownModel, installed: dict[str, Path]) -> str:
    return next((name for name in installed if name.lower() in model.names), "")
