"""Measure linear layers in the formats of files: by kernels, dequantized at each call, in bfloat16 and in FP8.

    python bench/gpu/quantized_layers.py                     needs comfy-kitchen and torchao
    python bench/gpu/quantized_layers.py --device cpu --tiny                         a rehearsal

A block of Wan2.2-A14B has eight products of 5120 to 5120 values, one of 5120 to 13824 and one of 13824 to 5120; random
weights and inputs. "ms" is their sum, medians of CUDA events, for 32,760 tokens (81 frames of 832x480) and for 1,560 (5
frames); "weights" their bytes, "peak" the bytes that the largest product needs besides. Errors are ‖out - ref‖ / ‖ref‖:
"format" of dequantized weights against float32, "all" with the rounding of inputs and in bfloat16. Prints a JSON object
per measurement and appends it to $OUT/quantized_layers.jsonl.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from safetensors.torch import save_file
from torch import nn

from bench.gpu import results
from bench.gpu.timing import call_seconds
from runtime.core.facts import Fact
from runtime.models import packed_layers
from runtime.models.packed_layers import PackedLinear
from runtime.models.quantization import fp8_weight, install_fp8_linear
from runtime.models.stored_weights import file_tensors, stored_weights
from tests.gpu.errors import relative_error

# In and out, and how many of them a block has.
PRODUCTS = {(5120, 5120): 8, (5120, 13_824): 1, (13_824, 5120): 1}
TINY = {(256, 512): 2}
TOKENS, TINY_TOKENS = (32_760, 1560), (64,)
_ROTATED = {"convrot": True, "convrot_groupsize": 256}
# By name: comfy-kitchen's layout, what a file states, and arguments of the quantizer.
FORMATS: Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "NVFP4": ("TensorCoreNVFP4Layout", {"format": "nvfp4"}, {}),
    "MXFP8": ("TensorCoreMXFP8Layout", {"format": "mxfp8"}, {}),
    "INT8": ("TensorWiseINT8Layout", {"format": "int8_tensorwise"}, {"per_channel": True}),
    "INT8 rotated": (
        "TensorWiseINT8Layout",
        {"format": "int8_tensorwise", **_ROTATED},
        {"per_channel": True, **_ROTATED},
    ),
    "W4A8": ("AsymW4A8Int8Layout", {"format": "asym_w4a8_int8", **_ROTATED}, {"convrot_groupsize": 256}),
}


def packed(weight: torch.Tensor, name: str) -> PackedLinear:
    """Return a layer that was quantized, written to a file and read from it, on the device of the weight."""
    from comfy_kitchen.tensor import QuantizedTensor

    layout, stated, how = FORMATS[name]
    file = QuantizedTensor.from_float(weight, layout, **how).state_dict("layer.weight")
    blob = torch.tensor(list(json.dumps(stated).encode()), dtype=torch.uint8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layer.safetensors"
        save_file({key: value.contiguous().cpu() for key, value in file.items()} | {"layer.comfy_quant": blob}, path)
        stored = stored_weights(file_tensors(path))
        ((key, data, scales),) = packed_layers.read_weights(stored, weight.device)
    like = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    return PackedLinear(like, stored[key].kind, data, scales, stored[key].rotated)


def plain(weight: torch.Tensor) -> nn.Linear:
    """Return a layer with a weight as it is."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def in_fp8(weight: torch.Tensor) -> nn.Module:
    """Return a layer with Tandem's FP8."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    layer.bias = nn.Parameter(torch.zeros(weight.shape[0], device=weight.device, dtype=weight.dtype))
    layer.weight = nn.Parameter(fp8_weight(weight), requires_grad=False)
    holder = nn.Sequential(layer)
    install_fp8_linear(holder)
    return layer


def with_kernels(weight: torch.Tensor, name: str) -> nn.Module:
    """Return a quantized layer that comfy-kitchen's kernels multiply."""
    layer = packed(weight, name)

    def failed(reason: Fact) -> None:
        raise RuntimeError(str(reason))

    packed_layers.use_int8_kernels(layer, used=True, on_failed=failed)
    return layer


def compiled(weight: torch.Tensor, name: str) -> nn.Module:
    """Return a quantized layer whose dequantization is compiled."""
    layer = packed(weight, name)
    layer.compile()
    return layer


def bytes_of(layer: nn.Module) -> int:
    """Return the bytes of a layer's weights."""
    return sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers()))


def measure(device: str, name: str, make: Callable[[torch.Tensor], nn.Module], *, tiny: bool) -> None:
    """Measure the products of a block."""
    cuda, dtype = device.startswith("cuda"), torch.bfloat16
    milliseconds = dict.fromkeys(TINY_TOKENS if tiny else TOKENS, 0.0)
    weights = peak = 0
    errors: list[float] = []
    for (inner, outer), count in (TINY if tiny else PRODUCTS).items():
        generator = torch.Generator(device).manual_seed(inner + outer)
        weight = torch.randn(outer, inner, device=device, generator=generator) * inner**-0.5
        layer = make(weight.to(dtype))
        weights += count * bytes_of(layer)
        for tokens in milliseconds:
            x = torch.randn(1, tokens, inner, device=device, generator=generator).to(dtype)
            if cuda:
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
            got = layer(x)
            if cuda:
                peak = max(peak, torch.cuda.max_memory_allocated() - before - got.nbytes)
            seconds = statistics.median(call_seconds(partial(layer, x), cuda=cuda) for _ in range(7))
            milliseconds[tokens] += 1000 * count * seconds
        # Of the fewest tokens: the reference takes more memory.
        errors.append(relative_error(got.float(), nn.functional.linear(x.float(), weight)))
        del x, got
    rounded = {str(tokens): round(value, 3) for tokens, value in milliseconds.items()}
    error = float(f"{max(errors):.3g}")
    results.say("quantized_layers.jsonl", variant=name, ms=rounded, weights=weights, peak=peak, error=error)


@torch.no_grad()
def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    Path(os.environ.get("OUT", ".")).mkdir(parents=True, exist_ok=True)
    cuda = arguments.device.startswith("cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    variants: dict[str, Callable[[torch.Tensor], nn.Module]] = {"bfloat16": plain}
    if cuda:
        variants["FP8"] = in_fp8
    for name, (_, stated, _) in FORMATS.items():
        variants[f"{name}, dequantized"] = partial(packed, name=name)
        if cuda:
            variants[f"{name}, dequantized, compiled"] = partial(compiled, name=name)
        if "int8" in stated["format"]:
            variants[f"{name}, kernels"] = partial(with_kernels, name=name)
    for name, make in variants.items():
        try:
            measure(arguments.device, name, make, tiny=arguments.tiny)
        except Exception as error:
            results.say("quantized_layers.jsonl", variant=name, failed=f"{type(error).__name__}: {str(error)[:300]}")
        torch.compiler.reset()


if __name__ == "__main__":
    main()
