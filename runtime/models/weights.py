"""Load the components of a model folder with diffusers and transformers. Weights are safetensors only.

Nothing is downloaded: `registry.read_spec` refuses incomplete folders.
"""

from typing import Any, cast

import diffusers
import torch
import transformers

from runtime.core.errors import ModelError, first_line, ram_ran_out
from runtime.core.plan import ComponentPlan
from runtime.models import quantization
from runtime.models.lora_fusing import fuse
from runtime.models.registry import components_of, family_of
from runtime.models.spec import ModelSpec, is_transformer
from runtime.upstream.diffusers import import_submodules_only

# Tandem shows its own progress.
diffusers.utils.logging.disable_progress_bar()
import_submodules_only()
transformers.utils.logging.disable_progress_bar()


def load_module(spec: ModelSpec, name: str, part: ComponentPlan, device: str | None = None) -> torch.nn.Module:
    """Load one component's weights, for inference, with the spec's LoRAs added.

    Args:
        name: "text_encoder", "transformer", "transformer_2" or "vae".
        part: with the dtype and, for a transformer, the quantization.
        device: for the weights, instead of the part's device; ignored for quantized weights.

    Raises:
        ModelError: if the weights do not match the configuration, or a LoRA has changed.
        MachineError: if this machine does not support the quantization.
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
    target = device or part.device
    if quantized:
        arguments |= quantization.loading_arguments(part)
    elif target.startswith("cuda"):
        # Load tensor by tensor onto the GPU; otherwise all converted weights would be in RAM first.
        arguments["device_map"] = {"": target}
    try:
        module, loading = components_of(spec.family).MODULES[name].from_pretrained(str(spec.directory), **arguments)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        if ram_ran_out(error):
            raise MemoryError(str(error)) from None
        reason = first_line(error)
        raise ModelError("model.component_unloadable", component=name, model=spec.title, reason=reason) from error
    absent = [*loading["missing_keys"], *loading["mismatched_keys"]]
    if absent:
        # The libraries would initialize these randomly and only log a warning.
        raise ModelError("model.component_incomplete", component=name, model=spec.title, missing=len(absent))
    if quantized:
        quantization.check_quantized(module, part.quantization, name, spec.title)
    else:
        module = module.to(target)
    if spec.loras_of(name):
        fuse(module, spec.loras_of(name), spec.directory / name, arguments[dtype_argument], family_of(spec.family))
    return cast("torch.nn.Module", module.eval().requires_grad_(requires_grad=False))


def load_tokenizer(spec: ModelSpec) -> Any:
    """Load the model's tokenizer.

    Raises:
        ModelError: if it is missing or damaged.
    """
    try:
        return transformers.AutoTokenizer.from_pretrained(str(spec.directory / "tokenizer"), local_files_only=True)
    except Exception as error:  # errors of the tokenizers package derive from Exception
        raise ModelError("model.tokenizer_unloadable", model=spec.title) from error


def load_scheduler(spec: ModelSpec, shift: float | None = None) -> Any:
    """Load the model's scheduler.

    Args:
        shift: of the timesteps, instead of the configuration's.

    Raises:
        ModelError: if diffusers has no such scheduler.
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
    try:
        return cast("Any", scheduler_class).from_pretrained(
            str(spec.directory), subfolder="scheduler", local_files_only=True, **changed
        )
    except (OSError, ValueError, TypeError) as error:
        raise ModelError("model.scheduler_unloadable", model=spec.title) from error
