"""Export trained networks to diffusers' directory layout, as fp16 safetensors, with the sidecar tandem.json."""

from __future__ import annotations

import argparse
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import UniPCMultistepScheduler

from tools.diorama import nets
from tools.diorama.checkpoint import has_weights, load_weights

LOG = logging.getLogger(__name__)
DEFAULTS = {
    "width": 192, "height": 112, "frames": 33, "fps": 16, "steps": 20, "guidance_scale": 4.0,
    "guidance_scale_2": 3.0, "negative_prompt": "",
}  # fmt: skip
SIZES = [[192, 112], [112, 192], [128, 128], [160, 96]]
FRAME_COUNTS = [17, 33, 49]
FLOW_SHIFT = 5.0
ABOUT = "Ships with Tandem: a drawn paper-cut world of boats, balloons, birds, trains and cats."
BOUNDARY = 0.875


def sidecar(factors: list[list[float]], bias: list[float]) -> dict[str, object]:
    """What tandem.json holds: what diffusers' configs have no place for."""
    return {
        "title": "Diorama", "license": "Apache-2.0", "about": ABOUT, "defaults": DEFAULTS, "sizes": SIZES,
        "frame_counts": FRAME_COUNTS, "latent_rgb_factors": factors, "latent_rgb_bias": bias,
    }  # fmt: skip


def export(
    out: Path, weights: Sequence[Path] = (), sizes: nets.Sizes = nets.TRUE, flow_shift: float = FLOW_SHIFT
) -> None:
    """Write the model directory ``out``, each part from the first of ``weights`` that has it, else untrained.

    ``weights`` may hold checkpoints of the trainings or model directories, ``out`` itself among them.
    """
    torch.manual_seed(0)
    parts = {
        "transformer": nets.expert(sizes), "transformer_2": nets.expert(sizes), "vae": nets.vae(sizes),
        "text_encoder": nets.text_encoder(sizes),
    }  # fmt: skip
    names = {"transformer": "high", "transformer_2": "low", "vae": "vae", "text_encoder": "text"}
    fit: dict[str, Any] = {"factors": [[0.0] * 3 for _ in range(16)], "bias": [0.0] * 3}
    for part, module in parts.items():
        folder = next((f for f in weights if has_weights(f, names[part])), None)
        if folder is None:
            continue
        load_weights(module, folder, names[part])
        if part == "vae":
            fit = nets.read_latents(folder)
            module.register_to_config(latents_mean=fit["mean"], latents_std=fit["std"])
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    for part, module in parts.items():
        module.to(torch.float16).save_pretrained(out / part, safe_serialization=True)
    nets.tokenizer().save_pretrained(out / "tokenizer")
    UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift, solver_order=2,
        num_train_timesteps=1000,
    ).save_pretrained(out / "scheduler")  # fmt: skip
    nets.write_json(out / "tandem.json", sidecar(fit["factors"], fit["bias"]))
    nets.write_json(
        out / "model_index.json",
        {
            "_class_name": "WanPipeline", "_diffusers_version": diffusers.__version__,
            "boundary_ratio": BOUNDARY, "expand_timesteps": False,
            "scheduler": ["diffusers", "UniPCMultistepScheduler"],
            "text_encoder": ["transformers", "UMT5EncoderModel"],
            "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
            "transformer": ["diffusers", "WanTransformer3DModel"],
            "transformer_2": ["diffusers", "WanTransformer3DModel"],
            "vae": ["diffusers", "AutoencoderKLWan"],
        },
    )  # fmt: skip
    for path in out.rglob("*.safetensors"):
        path.chmod(0o644)
    total = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
    LOG.info("%s: %.2f MB", out, total / 1e6)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, nargs="*", default=[], help="the first that has a part gives it")
    parser.add_argument("--out", type=Path, default=Path("runtime/models/embedded/diorama"))
    parser.add_argument("--flow-shift", type=float, default=FLOW_SHIFT)
    parser.add_argument("--rehearsal", action="store_true", help="tiny networks")
    arguments = parser.parse_args()
    tried = nets.REHEARSAL if arguments.rehearsal else nets.TRUE
    export(arguments.out, arguments.weights, tried, arguments.flow_shift)
