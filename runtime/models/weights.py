"""Load the components of a model folder with diffusers and transformers.

Weights are safetensors only. Nothing is downloaded: `registry.read_spec` refuses incomplete folders.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from safetensors import safe_open

from runtime.core.errors import ModelError, TandemError, first_line, ran_out
from runtime.core.plan import ComponentPlan
from runtime.models import quantization
from runtime.models.folder import check_read_by_library, read_config, tensor_types, weight_files, weights_variant
from runtime.models.lora_fusing import StoredWeights, fuse
from runtime.models.quantized_cache import QuantizedCache, quantized_key
from runtime.models.spec import IMAGE_ENCODER, ModelSpec, folder_of, is_text_encoder, is_transformer
from runtime.models.stored_modules import Filling, can_stream, empty_module, fill, module_class, weights_of_folder
from runtime.models.stored_weights import FileTensor, file_tensors
from runtime.models.tensor_stream import read_tensors
from runtime.upstream.diffusers import use_scipy
from runtime.upstream.libraries import diffusers, transformers

# Tandem shows its own progress.
diffusers.utils.logging.disable_progress_bar()
transformers.utils.logging.disable_progress_bar()


# Held while a library loads, and by a thread that loads beside others.
_LIBRARY, _BESIDE = threading.Lock(), threading.local()
# Dtypes of weights in safetensors files.
_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# By folder. Not those that scale with torchvision, if that is installed: their results differ.
_IMAGE_PROCESSORS = {"image_processor": "CLIPImageProcessorPil", "feature_extractor": "SiglipImageProcessorPil"}


def load_module(
    spec: ModelSpec,
    name: str,
    part: ComponentPlan,
    device: str | None = None,
    cache: QuantizedCache | None = None,
    *,
    dequantize: bool = False,
) -> torch.nn.Module:
    """Load one component's weights, for inference, with the spec's LoRAs added.

    Args:
        name: "text_encoder", "text_encoder_2", "image_encoder", "vae_encoder", "transformer", "transformer_2" or
            "vae".
        part: with the dtype and, for a transformer, the quantization.
        device: for the weights, instead of the part's device; ignored for weights that are quantized here.
        cache: quantized weights are loaded from it if it has them, else added.
        dequantize: whether weights that are quantized in files are dequantized; otherwise each is at every call.

    Raises:
        ModelError: if the weights do not match the configuration, or a LoRA has changed.
        MachineError: if this machine does not support the quantization.
        MemoryError: if memory (RAM) runs out.
    """
    if part.quantization != quantization.NONE and is_transformer(name):
        module, dtype = _quantized(spec, name, part, cache)
    else:
        dtype = getattr(torch, part.dtype)
        # UMT5 converts activations to the dtype of a weight.
        how = Filling(dtype, spec.unquantized, dequantize=dequantize or not is_transformer(name))
        module = _loaded(spec, name, device or part.device, how)
    return _ready(module, spec, name, dtype)


def load_tensors(spec: ModelSpec, component: str, names: Sequence[str]) -> list[torch.Tensor]:
    """Return some tensors of a component's files in this order, as they are stored, on the CPU.

    Args:
        names: by the component's class.

    Raises:
        ModelError: if one is missing, or a file is damaged.
    """
    stored: dict[str, FileTensor] = {}
    if component in spec.files:
        stored |= {name: weight.data for name, weight in spec.files[component].weights.items()}
    else:
        for path in spec.weight_paths(component):
            stored |= file_tensors(path)
    missing = sum(name not in stored for name in names)
    if missing:
        raise ModelError("model.component_incomplete", component=component, model=spec.title, missing=missing)
    return [tensor.clone() for _, tensor in read_tensors({name: stored[name] for name in names}, "cpu")]


def _ready(module: Any, spec: ModelSpec, name: str, dtype: torch.dtype, *, exact: bool = False) -> torch.nn.Module:
    """Return a loaded module for inference, with the spec's LoRAs added; see `fuse`."""
    if spec.loras_of(name):
        fuse(module, spec, name, dtype, exact=exact)
    return cast("torch.nn.Module", module.eval().requires_grad_(requires_grad=False))


def channels_last_on_cpu(module: torch.nn.Module) -> torch.nn.Module:
    """Return a module of convolutions with the order of weights in which PyTorch is fastest on a CPU."""
    on_cpu = next(module.parameters()).device.type == "cpu"
    made: torch.nn.Module = cast("Any", module).to(memory_format=torch.channels_last) if on_cpu else module
    return made


class NeedsLibraryError(Exception):
    """A component cannot be loaded beside other threads."""


@contextlib.contextmanager
def beside_others() -> Iterator[None]:
    """Load components on this thread while others compute or load, and no library does.

    Libraries change default dtypes and functions of the whole process meanwhile. A component that needs one raises
    `NeedsLibraryError` in this block.
    """
    with _LIBRARY:
        _BESIDE.entered = True
        try:
            yield
        finally:
            _BESIDE.entered = False


@contextlib.contextmanager
def _library() -> Iterator[None]:
    """Let a library load, once no thread loads in `beside_others`."""
    if getattr(_BESIDE, "entered", False):
        raise NeedsLibraryError
    with _LIBRARY:
        yield


def _loaded(spec: ModelSpec, name: str, device: str, how: Filling) -> torch.nn.Module:
    """Load a component that no library quantizes, without LoRAs.

    Raises:
        ModelError, MachineError, MemoryError: see `load_module`.
    """
    files = spec.files.get(name)
    if files is not None or can_stream(spec, name):
        empty = _empty(spec, name)
        with _loading(spec, name):
            folder = spec.directory / folder_of(name)
            weights = files.weights if files is not None else weights_of_folder(folder, empty)
            if weights is not None:
                return fill(empty, weights, device, how)
    # Load tensor by tensor onto the GPU; otherwise all converted weights would be in RAM first.
    arguments = {"device_map": {"": device}} if device.startswith("cuda") else {}
    module: torch.nn.Module = _from_library(spec, name, how.dtype, arguments)
    return module.to(device)


@contextlib.contextmanager
def _loading(spec: ModelSpec, component: str) -> Iterator[None]:
    """Raise a `MemoryError` if RAM runs out in the `with` block, and a `ModelError` for errors of libraries."""
    try:
        yield
    except TandemError:
        raise
    except Exception as error:  # libraries raise whatever a wrong configuration leads to
        memory = ran_out(error)
        if memory == "VRAM":
            raise
        if memory == "RAM":
            raise MemoryError(str(error)) from None
        reason = first_line(error)
        raise ModelError("model.component_unloadable", component=component, model=spec.title, reason=reason) from error


def _empty(spec: ModelSpec, name: str) -> torch.nn.Module:
    """Return a component whose parameters have no memory yet.

    Raises:
        ModelError: if the library does not accept the configuration; if a parameter or stored buffer is not in
            `ModelSpec.files`, or has another shape.
    """
    with _loading(spec, name):
        module = empty_module(spec, name)
    files = spec.files.get(name)
    if files is None:
        return module
    buffers = dict(module.named_buffers())
    stored = {key: tensor for key, tensor in module.state_dict().items() if key in buffers}
    shapes = {key: tuple(tensor.shape) for key, tensor in {**dict(module.named_parameters()), **stored}.items()}
    absent = sum(key not in files.weights or files.weights[key].shape != shape for key, shape in shapes.items())
    if absent:
        raise ModelError("model.component_incomplete", component=name, model=spec.title, missing=absent)
    unknown = next((key for key in files.weights if key not in shapes), None)
    if unknown is not None:
        raise ModelError("model.file_tensor_unknown", file=files.paths[0].name, tensor=unknown, model=spec.title)
    return module


def _quantized(
    spec: ModelSpec, name: str, part: ComponentPlan, cache: QuantizedCache | None
) -> tuple[torch.nn.Module, torch.dtype]:
    """Load a transformer with weights that are quantized here, without LoRAs; return also the dtype it computes in."""
    arguments = quantization.loading_arguments(part, spec.unquantized)
    dtype, fp8 = arguments["torch_dtype"], part.quantization == quantization.FP8

    def load() -> torch.nn.Module:
        if fp8:
            module = _loaded(spec, name, part.device, Filling(dtype, spec.unquantized, fp8=True))
        else:
            module = _from_library(spec, name, dtype, arguments)
        quantization.check_quantized(module, part.quantization, name, spec.title)
        return module

    if cache is None:
        module = load()
    else:
        key = quantized_key(spec, name, part, dtype, cache.folder.parent)
        with contextlib.nullcontext() if fp8 else _library():
            cached_module = cache.read(key, lambda: empty_module(spec, name), part.device)
        module = load() if cached_module is None else cached_module
        if cached_module is None:
            cache.keep(key, module)
    if fp8:
        quantization.install_fp8_linear(module)
    return module, dtype


def load_stored(spec: ModelSpec, name: str) -> torch.nn.Module:
    """Load one component on the CPU with every weight as exact as its files and the spec's LoRAs make it.

    Weights have the dtype of the files and are mapped from them, so that they take no RAM of their own, except those
    that LoRAs change, which are float32, and those that are stored more precisely than most.

    Args:
        name: see `load_module`.

    Raises:
        ModelError, MemoryError: see `load_module`.
    """
    if name in spec.files:
        module = _loaded(
            spec, name, "cpu", Filling(torch.float32, spec.unquantized, dequantize=not is_transformer(name))
        )
        return _ready(module, spec, name, torch.float32, exact=True)
    folder = spec.directory / folder_of(name)
    stored = tensor_types(folder)
    sizes: Counter[str] = Counter()
    for kind, count in stored.values():
        sizes[kind] += count * torch.empty((), dtype=_STORED.get(kind, torch.float32)).itemsize
    most = _STORED.get(sizes.most_common(1)[0][0], torch.float32)
    module = _from_library(spec, name, most, {})
    owned = dict(module.named_parameters())
    finer = [key for key, (kind, _) in stored.items() if key in owned and _loses(_STORED.get(kind), owned[key].dtype)]
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(safe_open(path, framework="pt")) for path in weight_files(folder)]
        weights = StoredWeights(files)
        for key in finer:
            owned[key].data = weights[key]
    return _ready(module, spec, name, most, exact=True)


def _loses(stored: torch.dtype | None, loaded: torch.dtype) -> bool:
    """Whether converting from the stored dtype has rounded."""
    return stored is not None and torch.promote_types(stored, loaded) != loaded


def _from_library(spec: ModelSpec, name: str, dtype: torch.dtype, more: dict[str, Any]) -> Any:
    """Load one component with `from_pretrained` of its class: where weights have other names in files, for example.

    Args:
        more: arguments of `from_pretrained`.

    Raises:
        ModelError, MemoryError: see `load_module`.
    """
    folder = spec.directory / folder_of(name)
    check_read_by_library(folder / "config.json")
    dtype_argument = "dtype" if is_text_encoder(name) or name == IMAGE_ENCODER else "torch_dtype"
    arguments: dict[str, Any] = {
        dtype_argument: dtype,
        "use_safetensors": True,
        "local_files_only": True,
        "subfolder": folder_of(name),
        "variant": weights_variant(folder),
        "output_loading_info": True,
        **more,
    }
    with _library(), _loading(spec, name):
        module, loading = module_class(spec, name).from_pretrained(str(spec.directory), **arguments)
    absent = [*loading["missing_keys"], *loading["mismatched_keys"]]
    if absent:
        # The libraries would initialize these randomly and only log a warning.
        raise ModelError("model.component_incomplete", component=name, model=spec.title, missing=len(absent))
    return module


def load_tokenizer(spec: ModelSpec, component: str = "text_encoder") -> Any:
    """Load the tokenizer of a text encoder.

    Raises:
        ModelError: if it is missing or damaged.
    """
    try:
        return transformers.AutoTokenizer.from_pretrained(
            str(spec.directory / component.replace("text_encoder", "tokenizer")),
            local_files_only=True,
            trust_remote_code=False,
        )
    except Exception as error:  # errors of the tokenizers package derive from Exception
        raise ModelError("model.part_unloadable", part="tokenizer", model=spec.title) from error


def load_image_processor(spec: ModelSpec) -> Any:
    """Load the processor of a model's image encoder.

    Raises:
        ModelError: if it is missing or damaged.
    """
    here = [folder for folder in _IMAGE_PROCESSORS if (spec.directory / folder).is_dir()]
    folder = here[0] if here else "image_processor"
    try:
        processor = getattr(transformers, _IMAGE_PROCESSORS[folder])
        return processor.from_pretrained(str(spec.directory), subfolder=folder, local_files_only=True)
    except Exception as error:
        raise ModelError("model.part_unloadable", part="image processor", model=spec.title) from error


def load_scheduler(spec: ModelSpec, shift: float | None = None) -> Any:
    """Load the model's scheduler.

    Args:
        shift: of the timesteps, instead of the configuration's.

    Raises:
        ModelError: if diffusers has no such scheduler, or it does not accept the configuration.
    """
    scheduler_class = getattr(diffusers, spec.scheduler, None)
    if not (isinstance(scheduler_class, type) and issubclass(scheduler_class, diffusers.SchedulerMixin)):
        raise ModelError(
            "model.scheduler_unknown", model=spec.title, scheduler=spec.scheduler, version=diffusers.__version__
        )
    changed: dict[str, Any] = {}
    if shift is not None:
        assert spec.noise.setting is not None, "the planner refuses a shift otherwise"
        changed[spec.noise.setting] = shift
    if spec.noise.renewed:
        config: dict[str, Any] = {"num_train_timesteps": spec.noise.training_steps, "stochastic_sampling": True}
    else:
        config = read_config(spec.directory / "scheduler" / "scheduler_config.json") | changed
    try:
        if config.get("use_beta_sigmas"):
            use_scipy(scheduler_class)
        scheduler = cast("Any", scheduler_class).from_config(config)
        return with_given_levels(scheduler) if spec.noise.levels else scheduler
    except Exception as error:  # each scheduler raises its own errors
        raise ModelError("model.part_unloadable", part="scheduler", model=spec.title) from error


def with_given_levels(scheduler: Any) -> Any:
    """Return a scheduler of flow matching whose steps have the noise levels that it is given, without a shift."""
    unshifted = {"use_dynamic_shifting": False, "shift_terminal": None, "shift": 1.0}
    return type(scheduler).from_config(scheduler.config, **unshifted)
