"""Fuses LoRAs, each on its own, into a transformer with diffusers' loader, which needs peft, and writes the weights.

    python -m tests.families.fuse_with_peft MODEL_FOLDER FAMILY WEIGHT LORA [LORA ...]

The LoRAs have diffusers' names. The weights with the LoRA `x.safetensors` are `x.fused`.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from diffusers import HunyuanVideoPipeline
from safetensors.torch import load_file, save_file

from runtime.models.registry import read_spec
from tests.families.hunyuan_lora_files import transformer


def main(folder: Path, family: str, weight: float, loras: Iterable[Path]) -> None:
    """Load, fuse, write."""
    for lora in loras:
        module = transformer(read_spec(folder, family))
        # The mixin of LoRAs is the same for FramePack's pipeline.
        pipeline = HunyuanVideoPipeline(*[None] * 2, module, *[None] * 4)
        pipeline.load_lora_weights(load_file(lora), adapter_name="style")
        pipeline.fuse_lora(components=["transformer"], lora_scale=weight)
        pipeline.unload_lora_weights()
        fused = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
        save_file(fused, lora.with_suffix(".fused"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), map(Path, sys.argv[4:]))
