"""Transformers with 8 or 4 bits a weight, quantized while they are loaded, by the libraries that diffusers knows.

Only the linear layers of the blocks are quantized: they hold nearly all weights. What goes in and out of the model
(patch embedding, text and time embedding, the last projection), norms and modulation keep their precision.
"""

import importlib
import logging
from typing import Any

from runtime.core.errors import MachineError, ModelError, first_line
from runtime.core.plan import ComponentPlan

NONE = "none"
BNB_8BIT, BNB_4BIT, FP8 = "bnb-8bit", "bnb-4bit", "fp8"

_KEPT = ("patch_embedding", "condition_embedder", "proj_out")
_PACKAGES = {BNB_8BIT: "bitsandbytes", BNB_4BIT: "bitsandbytes", FP8: "torchao"}
_FP8_CAPABILITY = (8, 9)
_BF16_CAPABILITY = (8, 0)


def loading_arguments(part: ComponentPlan) -> dict[str, Any]:
    """Return what `from_pretrained` takes to quantize a transformer onto the part's device.

    Raises:
        MachineError: if the device cannot, or a package is missing or does not start.
    """
    import torch

    kind = part.quantization
    if not part.device.startswith("cuda"):
        raise MachineError(
            f"Quantization {kind} needs an NVIDIA GPU; this plan runs on {part.device}.", "Take --quantization none."
        )
    capability = torch.cuda.get_device_capability(part.device)
    if kind == FP8 and capability < _FP8_CAPABILITY:
        have, need = (".".join(map(str, numbers)) for numbers in (capability, _FP8_CAPABILITY))
        raise MachineError(
            f"Quantization fp8 needs a GPU of compute capability {need} or newer; this one has {have}.",
            "Take --quantization bnb-8bit, bnb-4bit or none.",
        )
    dtype = getattr(torch, arithmetic(part, bfloat16=capability >= _BF16_CAPABILITY))
    return {"torch_dtype": dtype, "quantization_config": config(kind, dtype), "device_map": {"": part.device}}


def arithmetic(part: ComponentPlan, *, bfloat16: bool) -> str:
    """Return the dtype that a quantized part computes in: its own, but 16 bits wide.

    Args:
        bfloat16: whether the GPU has it.
    """
    if part.quantization == FP8:
        return "bfloat16"  # torchao scales rows of nothing else
    if part.dtype == "float32":
        return "bfloat16" if bfloat16 else "float16"
    return part.dtype


def config(kind: str, dtype: Any) -> Any:
    """Return the quantization for `from_pretrained`.

    Args:
        kind: "bnb-8bit", "bnb-4bit" or "fp8".
        dtype: the torch dtype of the arithmetic around it.

    Raises:
        MachineError: if the package is missing or does not start.
    """
    _import_package(kind)
    import diffusers

    if kind == FP8:
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow

        # Otherwise torchao has Inductor tune every kernel that this process compiles from then on, engines included.
        how = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False)
        return diffusers.TorchAoConfig(how, modules_to_not_convert=list(_KEPT))
    if kind == BNB_8BIT:
        # It computes in float16 inside, and says so at every call.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        return diffusers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=list(_KEPT))
    return diffusers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=list(_KEPT),
    )


def check_quantized(module: Any, kind: str, what: str) -> None:
    """Raise `ModelError` where nothing was quantized: torchao passes over layers whose sides are no multiples of 16."""
    if not any(map(is_quantized, module.parameters())):
        raise ModelError(
            f"Quantization {kind} found no layer of {what} that it can take: their sizes do not fit it.",
            "Take --quantization none.",
        )


def is_quantized(parameter: Any) -> bool:
    """Whether a parameter is one of the libraries' own, which hold fewer bits."""
    import torch

    return type(parameter) is not torch.nn.Parameter


def quantized_like(layer: Any, weight: Any) -> Any:
    """Return another weight, quantized as a linear layer's own is, for its place: nothing was computed with it yet.

    Args:
        layer: `torch.nn.Linear`, or a library's own kind of it.
        weight: (out, in), in the dtype of the arithmetic.
    """
    import torch

    own = layer.weight
    if type(own).__module__.startswith("bitsandbytes"):
        import bitsandbytes

        # As `from_pretrained` does it: from the CPU, for only on their way from there they are quantized.
        if isinstance(own, bitsandbytes.nn.Params4bit):
            how = ("blocksize", "compress_statistics", "quant_type", "quant_storage", "module")
            fresh: Any = bitsandbytes.nn.Params4bit(weight.cpu(), **{name: getattr(own, name) for name in how})
        else:
            fresh = bitsandbytes.nn.Int8Params(weight.cpu(), requires_grad=False)
        return fresh.to(own.device)
    from torchao.quantization import quantize_

    plain = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    plain.weight = torch.nn.Parameter(weight.to(own.device), requires_grad=False)
    quantize_(plain, config(FP8, weight.dtype).get_apply_tensor_subclass())
    return plain.weight


def _import_package(kind: str) -> None:
    package = _PACKAGES[kind]
    remedy = (
        "Run install.sh (install.bat on Windows) again: it installs requirements-gpu.txt where there is a GPU; "
        "or take --quantization none."
    )
    try:
        importlib.import_module(package)
    except Exception as error:  # its libraries fail in ways of their own
        absent = isinstance(error, ModuleNotFoundError) and error.name == package
        problem = "is not installed" if absent else f"does not start here: {first_line(error)}"
        raise MachineError(f"Quantization {kind} needs {package}, which {problem}.", remedy) from error
