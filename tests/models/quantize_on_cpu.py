"""Quantizes a small transformer on the CPU, where the libraries can but diffusers and torchao refuse: their refusals
are passed over. Prints the relative errors by placement as JSON.

    python -m tests.models.quantize_on_cpu KIND FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.quantizers.bitsandbytes import bnb_quantizer

from runtime.components.offload import Placement, place
from runtime.core.plan import ComponentPlan
from runtime.models.quantization import check_quantized, config


def main(kind: str, folder: Path) -> None:
    """Quantize, place, run."""
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=16,
        out_channels=16,
        text_dim=64,
        freq_dim=32,
        ffn_dim=256,
        num_layers=3,
        rope_max_seq_len=64,
    )
    model.save_pretrained(folder / "transformer")
    inputs = {
        "hidden_states": torch.randn(1, 16, 3, 8, 8).bfloat16(),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 8, 64).bfloat16(),
        "return_dict": False,
    }
    wanted = run(load(folder), inputs)
    part = ComponentPlan(
        backend="pytorch", device="cpu", dtype="bfloat16", weights_bytes=0, reason="", quantization=kind
    )
    placements: tuple[Placement, ...] = ("device",) if kind == "bnb-8bit" else ("device", "whole", "blocks", "leaves")
    errors = {}
    for how in placements:
        quantized = load(folder, kind)
        check_quantized(quantized, kind, "it")
        counted = sum(type(parameter) is not torch.nn.Parameter for parameter in quantized.parameters())
        projection, embedder = quantized.proj_out.weight, quantized.condition_embedder.time_proj.weight
        kept = [str(weight.dtype) for weight in (projection, embedder, quantized.patch_embedding.weight)]
        placed = place(quantized, how, part)
        for _ in range(2):
            placed.bring()
            got = run(quantized, inputs)
            placed.away()
        errors[how] = ((got - wanted).norm() / wanted.norm()).item()
    sys.stdout.write(json.dumps({"errors": errors, "quantized": counted, "kept": kept}) + "\n")


def load(folder: Path, kind: str | None = None) -> Any:
    """Load the transformer, quantized or not."""
    arguments: dict[str, Any] = {"torch_dtype": torch.bfloat16}
    if kind is not None:
        arguments["quantization_config"] = config(kind, torch.bfloat16)
        allow_cpu(kind)
    if kind in {"bnb-8bit", "bnb-4bit"}:
        arguments["device_map"] = {"": "cpu"}
    model: Any = WanTransformer3DModel.from_pretrained(folder, subfolder="transformer", **arguments)
    return model.eval().requires_grad_(False)


def allow_cpu(kind: str) -> None:
    """Pass over the refusal of a machine without a GPU."""
    if kind == "fp8":
        from torchao.quantization import quant_api

        quant_api._check_hardware_support = lambda _: None
        return
    for quantizer in (bnb_quantizer.BnB8BitDiffusersQuantizer, bnb_quantizer.BnB4BitDiffusersQuantizer):
        quantizer.validate_environment = lambda *_, **__: None


@torch.no_grad()
def run(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Return the velocity in float32."""
    velocity: torch.Tensor = model(**inputs)[0]
    return velocity.float()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
