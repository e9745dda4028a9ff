"""The table of model families, and the interface of a family.

A family is a folder of `runtime.families` with

    spec.py         `FAMILY`, a `Family`: reads model folders without torch
    components.py   loads torch: `MODULES` for `models.stored_modules`, a class, a tuple of classes, or the name of a
                    class of transformers, which is imported when it is needed; `make_form` for `engines.programs`, and
                    the functions of `execution.components.Components`
    published.json  published models, if there are any: see `published_models`

To add one, write the folder and add its entry to `FAMILIES`. Both modules are imported on first use.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module, resources
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from runtime.core.errors import ModelError
from runtime.core.frozen import FrozenModel
from runtime.core.loras import BOTH, Expert
from runtime.models.folder import (
    check_files,
    check_tokenizer,
    check_tokenizers,
    missing_weights,
    read_config,
    tensor_shapes,
    weight_files,
)
from runtime.models.prompt_guides import PromptGuide
from runtime.models.spec import ModelSpec, folder_of, is_text_encoder, is_transformer
from runtime.models.stored_weights import FileTensor, WeightFiles, file_tensors, stored_weights
from runtime.models.timesteps import NO_FLOW_MATCHING, WITH_SHIFT
from runtime.models.variants import Variant
from runtime.upstream.diffusers import scheduler_names


class Entry(NamedTuple):
    """One family: `_class_name` in its folders' `model_index.json`, and its Python package.

    Folders of single components have no such file, but the `_class_name` or `model_id` of `config.json`.
    """

    pipelines: tuple[str, ...]
    package: str


# Of a weight that is not quantized.
_LEAST_BYTES = 2
# Of a pipeline, in a message.
_MAX_NAME_LENGTH = 80
# By name, as `ModelSpec.family` and engine keys have it.
FAMILIES: dict[str, Entry] = {
    "wan": Entry(
        ("WanPipeline", "WanImageToVideoPipeline", "WanVACEPipeline", "WanAnimatePipeline"), "runtime.families.wan"
    ),
    "hunyuan_video": Entry(("HunyuanVideoPipeline",), "runtime.families.hunyuan_video"),
    "framepack": Entry(("HunyuanVideoFramepackPipeline",), "runtime.families.framepack"),
    "ltx2": Entry(("LTX2Pipeline", "LTX2ImageToVideoPipeline", "LTX2ConditionPipeline"), "runtime.families.ltx2"),
    "dcae": Entry(("AutoencoderDC", "dcae"), "runtime.families.dcae"),
    "esrgan": Entry((), "runtime.families.esrgan"),
    "interpolator": Entry((), "runtime.families.interpolator"),
}


# The families of upscalers, which are found by name, not by folder, and of the network that interpolates.
_UPSCALERS, _INTERPOLATOR = "esrgan", "interpolator"


class LoraLayer(NamedTuple):
    """A layer that a LoRA file changes.

    Attributes:
        modules: the module, or the bare parameter, by its name in the diffusers transformer; several if their rows, in
            this order, are one layer in the file.
        swapped: whether the first half of the module's rows is the second in the file.
    """

    modules: tuple[str, ...]
    swapped: bool = False

    @property
    def title(self) -> str:
        """The name in messages."""
        return ", ".join(self.modules)


# The shape of a layer of a part that a model does not have, such as the image branch; see `Family.lora_weight_shape`.
ABSENT: tuple[()] = ()


class LoraChange(NamedTuple):
    """The layer and role of one tensor in a LoRA file.

    Attributes:
        role: "down" and "up", whose product is added to the weight, and "up_bias", which is added to the bias with the
            same scale; "lokr_…" and "hada_…", factors of LoKr and LoHa; "magnitude", DoRA's norms of the changed
            weight; "diff" and "bias", which are added to the weight and the bias unchanged; "alpha", which divided by
            the rank scales the product.
        expert: the only one that the file names for it.
    """

    layer: LoraLayer
    role: str
    expert: Expert = BOTH


@dataclass(frozen=True, kw_only=True)
class Part:
    """The repository of some components of a model that is published in several.

    Attributes:
        folders: of the repository, which become the model's.
        at_root: the component whose files are at the repository's root; empty if there is none.
        files: single files of the repository by their place in the model's folder, instead of folders.
    """

    repository: str
    folders: tuple[str, ...] = ()
    at_root: str = ""
    files: Mapping[str, str] = field(default_factory=dict)

    def place(self, path: str) -> str:
        """Return where a file of the repository is in the model's folder; empty if the model does not have it."""
        folder, separator, _ = path.partition("/")
        if separator:
            return path if folder in self.folders else ""
        return f"{self.at_root}/{path}" if self.at_root else ""


class PublishedComponent(FrozenModel):
    """A component of published models.

    Attributes:
        parameters: number of weights.
        config: the values of its `config.json` that `Family.known_spec` needs.
    """

    parameters: int
    config: Mapping[str, Any] | None = None


class KnownModel(FrozenModel):
    """A published model.

    Attributes:
        name: in `--model` and `models list`.
        title: for people.
        family: a key of `FAMILIES`.
        repository: on huggingface.co, in diffusers' format or, with `parts`, of the transformer.
        parts: its repositories, if it is published in several.
        index: its `model_index.json`, if it is published in several repositories.
        license: of its weights.
        download_bytes: size of the files that a download fetches, to 0.1 GB; 0 if their formats are not known.
        about: a sentence on what it makes.
        aliases: other names, in lower case.
        components: by name.
        boundary_ratio, expand_timesteps: as in `ModelSpec`.
        sizes: (width, height) that it was trained for, if not all of its family's.
        mag_ratios: see `ModelSpec`.
        flow_shift: in the authors' own code; the request, or the model folder, decides what runs.
        variants: with transformers in smaller files, the largest first.
    """

    name: str
    title: str
    family: str
    repository: str
    parts: tuple[Part, ...] = ()
    index: Mapping[str, Any] = {}
    license: str
    download_bytes: int = 0
    about: str = ""
    aliases: frozenset[str]
    components: Mapping[str, PublishedComponent]
    boundary_ratio: float | None = None
    expand_timesteps: bool = False
    sizes: tuple[tuple[int, int], ...] = ()
    flow_shift: float
    mag_ratios: Mapping[str, tuple[float, ...]] = {}
    variants: tuple[Variant, ...] = ()

    @property
    def configs(self) -> dict[str, Mapping[str, Any]]:
        """`PublishedComponent.config` by component."""
        return {name: part.config for name, part in self.components.items() if part.config is not None}

    @property
    def parameters(self) -> dict[str, int]:
        """Number of weights by component."""
        return {name: part.parameters for name, part in self.components.items()}

    @property
    def experts(self) -> int:
        """As in `ModelSpec`."""
        return sum(map(is_transformer, self.components))

    @property
    def names(self) -> frozenset[str]:
        """All of its names, in lower case."""
        repository = self.repository.lower()
        folder = repository.rpartition("/")[2]
        return self.aliases | {self.name, repository, folder, folder.removesuffix("-diffusers")}

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return self.repository.rpartition("/")[2]

    def description(self, weights_dir: Path) -> dict[str, Any]:
        """Return the fields of its spec that do not depend on the family, for `Family.known_spec`."""
        return {
            "family": self.family,
            "name": self.name,
            "title": self.title,
            "license": self.license,
            "about": self.about,
            "directory": weights_dir / self.folder,
            "parameters": self.parameters,
            "latent_rgb": None,
            "mag_ratios": self.mag_ratios,
            "is_downloaded": False,
        }

    def spec(self, weights_dir: Path) -> ModelSpec:
        """Return its spec, as if its folder were in `weights_dir`."""
        return family_of(self.family).known_spec(self, weights_dir)

    def variant_folder(self, variant: Variant) -> str:
        """Return the name of a variant's folder, which is the variant's name in `--model`."""
        return f"{self.name}-{variant.name}"

    def describes(self, spec: ModelSpec) -> bool:
        """Whether a model of that architecture may be this one."""
        reference = self.spec(spec.directory.parent)
        return (reference.family, reference.transformer, reference.vae, reference.experts) == (
            spec.family,
            spec.transformer,
            spec.vae,
            spec.experts,
        )


class SingleFiles(Protocol):
    """What a family knows of its transformer in a single file, in the names of several programs."""

    @property
    def UNQUANTIZED(self) -> Sequence[str]:  # noqa: N802 - of a module
        """See `ModelSpec.unquantized`."""

    def diffusers_names(self, names: Sequence[str]) -> Mapping[str, str | tuple[str, ...]]:
        """Return diffusers' names of the parameters in a file, by name; an unknown name stays as it is.

        Several names are those of equal parts of the rows, in order.
        Tensors of other components are left out, where files have them too.
        """

    def config_of(
        self, shapes: Mapping[str, tuple[int, ...]], candidates: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any] | None:
        """Return the configuration of the transformer with these parameters; `None` if it is of another family.

        Args:
            shapes: by diffusers' names.
            candidates: configurations of other models, for what does not follow from shapes.
        """

    def parameters(self, config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of every parameter of a transformer with this configuration."""

    def experts(self, config: Mapping[str, Any], *, named: bool) -> int:
        """Return how many experts a model has that such a transformer is one of.

        Args:
            named: whether the file's name says which expert it is.
        """


class PartFiles(NamedTuple):
    """What a family knows of another component in a single file.

    Attributes:
        names: returns the library's names of the parameters in a file, by name, without tensors that are none.
        config_of: as `SingleFiles.config_of`; `candidates` are configurations of the component.
        parameters: returns the shape of every parameter by name.
        fits: returns whether a component of a configuration belongs to a transformer of one.
        added: returns what a file adds to all values of a tensor, by its name in the file.
    """

    names: Callable[[Sequence[str]], dict[str, str]]
    config_of: Callable[[Mapping[str, tuple[int, ...]], Sequence[Mapping[str, Any]]], dict[str, Any] | None]
    parameters: Callable[[Mapping[str, Any]], Mapping[str, tuple[int, ...]]]
    fits: Callable[[Mapping[str, Any], Mapping[str, Any]], bool] = lambda _config, _transformer: False
    added: Callable[[str], float] = lambda _name: 0.0


class FileSigns(NamedTuple):
    """Names of tensors by which a component in a single file is recognised, without the prefixes that programs add.

    Attributes:
        has: all are in the file.
        lacks: none is.
        code: of the error that says why such a file is not read.
    """

    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    code: str = "model.file_needs_folder"

    def fit(self, names: Collection[str]) -> bool:
        """Whether a file with these tensors is such a component."""
        return all(name in names for name in self.has) and not any(name in names for name in self.lacks)


class Family(Protocol):
    """The part of a family that needs no torch."""

    @property
    def single_files(self) -> SingleFiles | None:
        """Transformers in single files; none by default."""
        return None

    @property
    def part_files(self) -> Mapping[str, PartFiles]:
        """Other components in single files, by component; none by default."""
        return {}

    @property
    def folder_files(self) -> Mapping[str, Sequence[FileSigns]]:
        """How single files are recognised that Tandem does not read, by the component that they have; none by default.

        The model is used as a folder instead.
        """
        return {}

    def weights(self, component: str, config: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]] | None:
        """Return name and shape of the weights of a component of this configuration.

        `None` if only the library knows them, by default; then what follows from the files themselves is checked.
        """
        return None

    @property
    def shared_programs(self) -> Sequence[str]:
        """Further families whose code exports its components to engines; none by default."""
        return ()

    @property
    def negative_prompt(self) -> str:
        """The negative prompt that the family's authors recommend; empty without one."""

    @property
    def prompt_guide(self) -> PromptGuide:
        """Instructions for a chat model that enhances prompts for its models; general ones by default."""
        return PromptGuide()

    def read_spec(self, directory: Path, name: str) -> ModelSpec:
        """Read a model folder of this family; see `registry.read_spec`."""

    def check(self, directory: Path, title: str) -> None:
        """Check the configurations of a folder whose weights may be missing; see `registry.check_folder`."""

    def known_spec(self, model: KnownModel, weights_dir: Path) -> ModelSpec:
        """Return the spec of a published model, as if its folder were in `weights_dir`."""

    def assemble(
        self, directory: Path, name: str, files: Mapping[str, WeightFiles], model: KnownModel | None
    ) -> ModelSpec:
        """Return the spec of a model whose transformers, and maybe others, are in single files, by component.

        Args:
            directory: the folder with its other components.
            model: the published model with these transformers, if there is one.

        Raises:
            ModelError: if the folder is incomplete, damaged, or of a model that they do not fit.
        """
        message = f"{type(self).__name__} has no single files"
        raise NotImplementedError(message)

    def lora_change(self, tensor: str) -> LoraChange | None:
        """Return the layer and factor of a tensor in a LoRA file, by its name; `None` for an unknown layer.

        This and the following methods are for families with LoRAs. By default, no LoRA fits.
        """
        return None

    def lora_weight_shape(self, spec: ModelSpec, module: str) -> tuple[int | None, ...] | None:
        """Return the shape of the weight of a module that LoRAs change; `None` for an unknown axis.

        `None` for a module beyond the model's size, `ABSENT` for one of a part that only other models have.
        """
        return None

    def distilled_steps(self, path: Path) -> int | None:
        """Return for how many steps a LoRA was distilled, by its file's or folder's name; `None` if it was not."""
        return None

    def distilled_model(self, path: Path) -> int | None:
        """Return for how many steps a model was distilled, by its file's or folder's name; `None` if it was not."""
        return None

    def distilled_shift(self, path: Path) -> float | None:
        """Return the shift with which a LoRA was distilled, by its file's or folder's name, if known."""
        return None

    def distilled_levels(self, path: Path) -> tuple[float, ...]:
        """Return the noise levels of a LoRA or model whose steps each add new noise, by its name; empty for others."""
        return ()


def family_of(name: str) -> Family:
    """Return a family's torch-free part by `ModelSpec.family`."""
    return cast("Family", import_module(f"{FAMILIES[name].package}.spec").FAMILY)


def find_upscaler(name: str | None, scale: int, weights_dir: Path) -> ModelSpec:
    """Return an installed upscaler by name; see `families.esrgan.upscalers.find_upscaler`."""
    finder = import_module(f"{FAMILIES[_UPSCALERS].package}.upscalers")
    return cast("ModelSpec", finder.find_upscaler(name, scale, weights_dir, by_path=False))


def find_interpolator() -> ModelSpec:
    """Return the network that interpolates; see `families.interpolator.spec.interpolator_model`."""
    return cast("ModelSpec", import_module(f"{FAMILIES[_INTERPOLATOR].package}.spec").interpolator_model())


def finishing_models(weights_dir: Path) -> list[ModelSpec]:
    """Return the networks for finished frames, as engines have them: upscalers for each factor, the interpolator."""
    package = import_module(f"{FAMILIES[_UPSCALERS].package}.upscalers")
    return [*package.upscaler_models(weights_dir), find_interpolator()]


def takes_loras(family: str) -> bool:
    """Whether a family maps LoRAs to its modules."""
    return type(family_of(family)).lora_change is not Family.lora_change


def components_of(name: str) -> Any:
    """Import a family's `components` module, and torch with it."""
    return import_module(f"{FAMILIES[name].package}.components")


@cache
def published_models(family: str) -> list[KnownModel]:
    """Read a family's `published.json`; without the file, no model is published.

    It has the `sources` of its values, `components` and `files` by a name in this file, and `models`. Those have the
    fields of `KnownModel`, with the names of their components and of their variants' files, and those of `common`.
    """
    file = resources.files(FAMILIES[family].package) / "published.json"
    if not file.is_file():
        return []
    content = json.loads(file.read_text(encoding="utf-8"))
    models = [{"family": family, **content.get("common", {}), **model} for model in content["models"]]
    for model in models:
        names = model["components"]
        model["components"] = {part: content["components"][name] for part, name in names.items()}
        for variant in model.get("variants", ()):
            files = content["files"]
            variant["transformers"] = {part: files[name] for part, name in variant["transformers"].items()}
            variant["loras"] = [{**lora, "file": files[lora["file"]]} for lora in variant.get("loras", ())]
    return list(map(KnownModel.model_validate, models))


def read_spec(directory: Path, name: str) -> ModelSpec:
    """Read a model folder in diffusers' format.

    Args:
        name: of the model in the result.

    Raises:
        ModelError: if the folder is missing, incomplete, damaged, of an unknown family, or holds pickled weights; if a
            value is out of its limits, or a file is not a regular file.
    """
    if not directory.is_dir():
        raise ModelError("model.folder_missing", folder=directory)
    check_name(directory)
    family = _family_in(directory, directory.name)
    check_companions(directory)
    spec = with_quantized(family.read_spec(directory, name))
    check_loadable(spec)
    if spec.latent_rgb is not None and len(spec.latent_rgb.factors) != spec.vae.z_dim:
        raise ModelError("model.config_invalid", model=spec.title, detail="latent_rgb_factors")
    return spec


def check_loadable(spec: ModelSpec) -> None:
    """Check what would otherwise fail when a model is loaded: scheduler, tokenizers, and names and shapes of weights.

    Raises:
        ModelError: if diffusers does not have the scheduler, it is not for flow matching, a tokenizer is missing or
            damaged, or a component lacks weights.
    """
    if spec.only_decodes:
        return
    if spec.scheduler not in WITH_SHIFT and spec.scheduler not in scheduler_names():
        raise ModelError(
            "model.scheduler_unknown",
            model=spec.title,
            scheduler=spec.scheduler[:_MAX_NAME_LENGTH],
            version=version("diffusers"),
        )
    if spec.scheduler not in WITH_SHIFT or spec.noise.fixed == NO_FLOW_MATCHING:
        file = spec.directory / "scheduler" / "scheduler_config.json"
        raise ModelError("model.scheduler_other", model=spec.title, scheduler=spec.scheduler, file=file)
    check_tokenizers(spec.directory, list(filter(is_text_encoder, spec.component_names)), spec.title)
    family = family_of(spec.family)
    for name in spec.component_names:
        files, folder = spec.files.get(name), spec.directory / folder_of(name)
        if files is not None and files.paths[0].parent != folder:
            continue  # checked when the file was recognised
        shapes = {key: weight.shape for key, weight in files.weights.items()} if files else tensor_shapes(folder)
        missing = missing_weights(shapes, family.weights(name, read_config(folder / "config.json")))
        if missing:
            raise ModelError("model.component_incomplete", component=name, model=spec.title, missing=missing)


def check_name(path: Path) -> None:
    """Raise a `ModelError` if a name cannot be shown."""
    if not path.name.isprintable():  # not UTF-8, or with control characters
        raise ModelError("model.name_unreadable", folder=ascii(path.name))


def check_companions(directory: Path) -> None:
    """Check the files of a folder before a library reads them; see `check_files` and `check_tokenizer`."""
    check_files(directory)
    for tokenizer in ("tokenizer", "tokenizer_2"):
        check_tokenizer(directory / tokenizer)


def with_quantized(spec: ModelSpec) -> ModelSpec:
    """Return a spec with `ModelSpec.files` of the transformers whose weights are quantized in the folder.

    Raises:
        ModelError: if their format cannot be read.
    """
    by_component: dict[str, WeightFiles] = {}
    for name in filter(is_transformer, spec.component_names):
        folder = spec.directory / name
        config = read_config(folder / "config.json")
        paths = weight_files(folder)
        # No plain weight has fewer bytes.
        if config.pop("quantization_config", None) is None and _size(paths) >= _LEAST_BYTES * spec.parameters[name]:
            continue
        tensors: dict[str, FileTensor] = {}
        for path in paths:
            tensors |= file_tensors(path)
        files = WeightFiles.of(stored_weights(tensors), config, spec.unquantized)
        if files.packed_weights:
            by_component[name] = files
    parameters = {name: files.parameters for name, files in by_component.items()}
    return replace(spec, files=by_component, parameters={**spec.parameters, **parameters}) if by_component else spec


def _size(paths: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def check_folder(directory: Path, title: str) -> None:
    """Check that a folder's configurations are of a model that Tandem runs; its weights may be missing.

    Args:
        title: the model's name in errors.

    Raises:
        ModelError: if they are of an unknown family, missing or damaged.
    """
    family = _family_in(directory, title)
    for tokenizer in ("tokenizer", "tokenizer_2"):
        check_tokenizer(directory / tokenizer)
    family.check(directory, title)


def _family_in(directory: Path, title: str) -> Family:
    pipeline = _stated(directory)
    for name, entry in FAMILIES.items():
        if pipeline in entry.pipelines:
            return family_of(name)
    supported = [pipeline for entry in FAMILIES.values() for pipeline in entry.pipelines]
    if not pipeline:
        raise ModelError("model.family_unstated", model=title, supported=supported)
    name = " ".join(str(pipeline).split())[:_MAX_NAME_LENGTH]
    raise ModelError("model.family_unknown", model=title, pipeline=name, supported=supported)


def _stated(directory: Path) -> object:
    """Return the name in a folder's configuration by which families are known, if there is one."""
    if not is_component(directory):
        return read_config(directory / "model_index.json").get("_class_name")
    config = read_config(directory / "config.json")
    model = config.get("model")
    return config.get("_class_name") or (model if isinstance(model, dict) else config).get("model_id")


def is_component(directory: Path) -> bool:
    """Return whether a folder has a component's configuration, and none of a model of several components."""
    return not (directory / "model_index.json").exists() and (directory / "config.json").is_file()
