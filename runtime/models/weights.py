"""Loads the modules of a model folder, through the library classes that its configs name. Weights are safetensors only.

Nothing is fetched: folders are complete before they come here (`registry.read_spec`).
"""

import threading
from typing import Any, cast

import diffusers
import torch
import transformers

from runtime.core.errors import ModelError, ram_ran_out
from runtime.core.plan import ComponentPlan
from runtime.models import quantization
from runtime.models.lora_fusing import fuse
from runtime.models.registry import components_of, family_of
from runtime.models.spec import ModelSpec, is_transformer

# Progress is ours to show.
diffusers.utils.logging.disable_progress_bar()
transformers.utils.logging.disable_progress_bar()

# Held wherever modules get parameters: loading, the libraries patch how for all threads, so that they get no memory.
MAKING = threading.Lock()
# Schedulers solve equations. What does that on a GPU PyTorch loads at the first, which two threads at once break.
_SOLVING = threading.Lock()


def load_module(spec: ModelSpec, name: str, part: ComponentPlan, device: str | None = None) -> torch.nn.Module:
    """Load one component's weights, for inference, with the spec's LoRAs added.

    Args:
        name: "text_encoder", "transformer", "transformer_2" or "vae".
        part: says the dtype and, for a transformer, the quantization.
        device: where the weights are put, if not on the part's own device; quantized ones always come to lie there.

    Raises:
        ModelError: if the weights do not fit the configuration, or a LoRA is not what it was.
        MachineError: if this machine cannot quantize.
        MemoryError: if memory (RAM) runs out.
    """
    dtype_argument = "dtype" if name == "text_encoder" else "torch_dtype"
    arguments: dict[str, Any] = {
        dtype_argument: getattr(torch, part.dtype),
        "use_safetensors": True,
        "local_files_only": True,
        "subfolder": name,
        "output_loading_info": True,
    }
    quantized = part.quantization != quantization.NONE and is_transformer(name)
    where = device or part.device
    if quantized:
        arguments |= quantization.loading_arguments(part)
    elif where.startswith("cuda"):
        # Tensor by tensor onto the GPU: files of float32 would else be whole in RAM first, in the dtype that is wanted.
        arguments["device_map"] = {"": where}
    try:
        with MAKING:
            module, loading = components_of(spec.family).MODULES[name].from_pretrained(str(spec.directory), **arguments)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        if ram_ran_out(error):
            raise MemoryError(str(error)) from None
        raise ModelError(
            f"The {name} of {spec.title} cannot be loaded: {str(error).splitlines()[0] if str(error) else error!r}.",
            "Copy or download the model again.",
        ) from error
    absent = [*loading["missing_keys"], *loading["mismatched_keys"]]
    if absent:
        # The libraries would fill these with random numbers and go on.
        raise ModelError(
            f"The weights of the {name} of {spec.title} do not fit its configuration: {len(absent)} are missing.",
            "Copy or download the model again.",
        )
    if quantized:
        quantization.check_quantized(module, part.quantization, name, spec.title)
    else:
        module = module.to(where)
    if spec.loras_of(name):
        with MAKING:
            fuse(module, spec.loras_of(name), spec.directory / name, arguments[dtype_argument], family_of(spec.family))
    return cast("torch.nn.Module", module.eval().requires_grad_(requires_grad=False))


def load_tokenizer(spec: ModelSpec) -> Any:
    """Load the model's tokenizer.

    Raises:
        ModelError: if it is missing or damaged.
    """
    try:
        return transformers.AutoTokenizer.from_pretrained(str(spec.directory / "tokenizer"), local_files_only=True)
    except Exception as error:  # tokenizers' own errors derive from Exception alone
        raise ModelError(
            f"The tokenizer of {spec.title} cannot be loaded.", "Copy or download the model again."
        ) from error


def load_scheduler(spec: ModelSpec, shift: float | None = None, device: str = "cpu") -> Any:
    """Load the model's scheduler, of the class that its configuration names.

    Args:
        shift: how far it moves noise levels towards noise, instead of its configuration's.
        device: of its latents.

    Raises:
        ModelError: if diffusers has no such scheduler.
    """
    scheduler_class = getattr(diffusers, spec.scheduler, None)
    if not (isinstance(scheduler_class, type) and issubclass(scheduler_class, diffusers.SchedulerMixin)):
        raise ModelError(
            f"{spec.title} wants the scheduler {spec.scheduler!r}, which diffusers {diffusers.__version__} has not.",
            "Update Tandem, or take another model.",
        )
    if device.startswith("cuda"):
        with _SOLVING:
            one = torch.ones(1, 1, device=device, dtype=torch.float32)
            torch.linalg.solve(one, one)
    changed: dict[str, Any] = {}
    if shift is not None:
        assert spec.noise.setting is not None, "the planner refuses it"
        changed[spec.noise.setting] = shift
    try:
        return cast("Any", scheduler_class).from_pretrained(
            str(spec.directory), subfolder="scheduler", local_files_only=True, **changed
        )
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(
            f"The scheduler of {spec.title} cannot be loaded.", "Copy or download the model again."
        ) from error
