"""Quantization of a transformer's weights to 8 or 4 bits while it is loaded, with bitsandbytes or torchao.

Only the linear layers of the blocks are quantized; they hold nearly all weights. The input and output layers (patch
embedding, text and time embedding, last projection), norms and modulation keep their precision.
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

from runtime.core.errors import MachineError, ModelError, first_line
from runtime.core.plan import ComponentPlan

NONE = "none"
BNB_8BIT, BNB_4BIT, FP8 = "bnb-8bit", "bnb-4bit", "fp8"
# Behind the path of a parameter: the tensors of which torchao's parameters consist, see `fp8_tensor`.
FP8_DATA, FP8_SCALE = ".qdata", ".scale"

_PACKAGES = {BNB_8BIT: "bitsandbytes", BNB_4BIT: "bitsandbytes", FP8: "torchao"}
_FP8_CAPABILITY = (8, 9)
_BF16_CAPABILITY = (8, 0)
# On Hopper, cuBLAS of CUDA 13 refuses FP8 products with a bias and fast accumulation if there are fewer than 48 rows,
# and they are long: 8,192 values fail, 5,120 do not. A short text has so few rows.
_FEW_ROWS = 64


def loading_arguments(part: ComponentPlan, unquantized: Sequence[str]) -> dict[str, Any]:
    """Return the arguments with which `from_pretrained` quantizes a transformer and loads it onto the part's device.

    Args:
        unquantized: layers that keep their precision, see `ModelSpec.unquantized`.

    Raises:
        MachineError: if the device does not support the quantization, or a package cannot be imported.
    """
    import torch

    kind = part.quantization
    if not part.device.startswith("cuda"):
        raise MachineError("quantization.needs_gpu", kind=kind, device=part.device)
    capability = torch.cuda.get_device_capability(part.device)
    if kind == FP8 and capability < _FP8_CAPABILITY:
        actual, needed = (".".join(map(str, numbers)) for numbers in (capability, _FP8_CAPABILITY))
        raise MachineError("quantization.needs_newer_gpu", kind=kind, needed=needed, capability=actual)
    dtype = getattr(torch, compute_dtype(part, bfloat16=capability >= _BF16_CAPABILITY))
    return {
        "torch_dtype": dtype,
        "quantization_config": diffusers_config(kind, dtype, unquantized),
        "device_map": {"": part.device},
    }


def compute_dtype(part: ComponentPlan, *, bfloat16: bool) -> str:
    """Return the 16-bit dtype in which a quantized part computes.

    Args:
        bfloat16: whether the GPU supports bfloat16.
    """
    if part.quantization == FP8:
        return "bfloat16"  # torchao scales rows in this dtype only
    if part.dtype == "float32":
        return "bfloat16" if bfloat16 else "float16"
    return part.dtype


def diffusers_config(kind: str, dtype: Any, unquantized: Sequence[str] = ()) -> Any:
    """Return diffusers' quantization configuration.

    Args:
        kind: "bnb-8bit", "bnb-4bit" or "fp8".
        dtype: the torch dtype from `compute_dtype`.
        unquantized: layers that keep their precision, see `ModelSpec.unquantized`.

    Raises:
        MachineError: if the package is missing or cannot be imported.
    """
    _import_package(kind)
    from runtime.upstream.diffusers import use_bitsandbytes
    from runtime.upstream.libraries import diffusers

    if kind == FP8:
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow

        # By default, torchao makes Inductor autotune every kernel that this process compiles later, engines included.
        settings = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False)
        return diffusers.TorchAoConfig(settings, modules_to_not_convert=list(unquantized))
    use_bitsandbytes()
    if kind == BNB_8BIT:
        # bitsandbytes computes in float16 and logs that at every call.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        return diffusers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=list(unquantized))
    return diffusers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=list(unquantized),
    )


def package_of(kind: str) -> str:
    """Return the package that quantizes weights so."""
    return _PACKAGES[kind]


def check_quantized(module: Any, kind: str, component: str, model: str) -> None:
    """Check that at least one layer was quantized: torchao skips layers whose sizes are not multiples of 16.

    Raises:
        ModelError: if none was.
    """
    if not any(map(is_quantized, module.parameters())):
        raise ModelError("quantization.no_layer_fits", kind=kind, component=component, model=model)


def install_fp8_linear(module: Any) -> None:
    """Let layers with weights in FP8 round their input in one kernel, and add few rows' bias apart; see `_FEW_ROWS`.

    Where torchao rounds, rows of zeros stay zeros, as in the kernel; by default it divides them by zero.
    """
    import torch

    from runtime.models.row_operations import SMALLEST_AMAX

    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear) and layer.bias is not None and is_quantized(layer.weight):
            layer.forward = MethodType(_linear, layer)  # type: ignore[method-assign]
            rounding: Any = getattr(layer.weight, "act_quant_kwargs", None)
            if rounding is not None:
                rounding.hp_value_lb = SMALLEST_AMAX


def _linear(self: Any, x: Any) -> Any:
    """Return `torch.nn.Linear.forward`'s result."""
    from torch.nn.functional import linear

    from runtime.models.row_operations import quantize_rows

    if x.shape[:-1].numel() < _FEW_ROWS:
        return linear(x, self.weight) + self.bias
    if not _rounds_in_a_kernel(x):
        return linear(x, self.weight, self.bias)
    return _product(self, x, quantize_rows)


def linear_of_gelu(layer: Any, x: Any) -> Any:
    """Return a linear layer's result of the GELU of `x`, approximated with tanh, (batch, tokens, width).

    After `install_fp8_linear`, one kernel computes and rounds it.
    """
    from torch.nn.functional import gelu

    from runtime.models.row_operations import quantize_gelu_rows

    # A compiler fuses both itself. Hooks and adapters replace or wrap the layer.
    rounds = _rounds_in_a_kernel(x) and x.shape[:-1].numel() >= _FEW_ROWS
    if rounds and getattr(layer.forward, "__func__", None) is _linear:
        return _product(layer, x, quantize_gelu_rows)
    return layer(gelu(x, approximate="tanh"))


def _rounds_in_a_kernel(x: Any) -> bool:
    """Return whether the input of a layer in FP8 is rounded by a kernel of `row_operations`."""
    import torch

    return x.device.type == "cuda" and not torch.compiler.is_compiling()


def _product(layer: Any, x: Any, quantize: Callable[[Any], Any]) -> Any:
    """Return the result of a layer in FP8, whose input a function of `row_operations` rounds.

    torchao computes the same, but its rounding takes several kernels where nothing is compiled.
    """
    from torch.nn.functional import ScalingType, scaled_mm

    from runtime.models.row_operations import computed

    rows = x.shape[:-1].numel()
    data, scale = (fp8_tensor(layer.weight, suffix) for suffix in (FP8_DATA, FP8_SCALE))
    rounded, scales = computed(quantize, x.reshape(rows, -1), fewest=0)
    by_row = ScalingType.RowWise
    product: Any = scaled_mm(
        rounded, data.t(), scales, by_row, scale.t(), by_row, bias=layer.bias, output_dtype=x.dtype, use_fast_accum=True
    )
    return product.unflatten(0, x.shape[:-1])


def is_quantized(parameter: Any) -> bool:
    """Return whether a quantization library replaced this parameter."""
    import torch

    return type(parameter) is not torch.nn.Parameter


def fp8_tensor(parameter: Any, suffix: str) -> Any:
    """Return a tensor of an FP8 parameter of torchao, `None` if the parameter is none with one scale for each row.

    Args:
        suffix: `FP8_DATA` for (out, in), float8_e4m3fn, or `FP8_SCALE` for (out, 1), float32.
    """
    data, scale = (getattr(parameter, name[1:], None) for name in (FP8_DATA, FP8_SCALE))
    if data is None or scale is None or tuple(scale.shape) != (data.shape[0], 1):
        return None
    return data if suffix == FP8_DATA else scale


def quantized_like(layer: Any, weight: Any) -> Any:
    """Return a weight, quantized as that of `layer`, to replace it before the layer is first used.

    Args:
        layer: a quantized `torch.nn.Linear` or subclass.
        weight: (out, in), in the dtype from `compute_dtype`.
    """

    parameter = layer.weight
    if type(parameter).__module__.startswith("bitsandbytes"):
        import bitsandbytes

        # bitsandbytes quantizes a parameter when it moves from the CPU to the GPU.
        if isinstance(parameter, bitsandbytes.nn.Params4bit):
            names = ("blocksize", "compress_statistics", "quant_type", "quant_storage", "module")
            fresh: Any = bitsandbytes.nn.Params4bit(weight.cpu(), **{name: getattr(parameter, name) for name in names})
        else:
            fresh = bitsandbytes.nn.Int8Params(weight.cpu(), requires_grad=False)
        return fresh.to(parameter.device)
    return fp8_weight(weight.to(parameter.device))


def fp8_weight(weight: Any) -> Any:
    """Return a linear layer's weight in torchao's FP8; unchanged if torchao does not quantize layers of its sizes.

    Args:
        weight: (out, in), bfloat16, on a device on which torchao supports FP8.

    Raises:
        MachineError: if torchao is missing or cannot be imported.
    """
    import torch

    config = diffusers_config(FP8, weight.dtype).get_apply_tensor_subclass()
    from torchao.quantization import quantize_

    plain = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    plain.weight = torch.nn.Parameter(weight, requires_grad=False)
    quantize_(plain, config)
    return plain.weight


def _import_package(kind: str) -> None:
    package = _PACKAGES[kind]
    try:
        importlib.import_module(package)
    except Exception as error:  # native libraries raise errors of any type
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise MachineError("quantization.package_missing", kind=kind, package=package) from error
        reason = first_line(error)
        raise MachineError("quantization.package_broken", kind=kind, package=package, reason=reason) from error
