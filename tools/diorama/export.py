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
from torch import nn

from tools.diorama import nets, world
from tools.diorama.checkpoint import has_weights, load_weights

LOG = logging.getLogger(__name__)
DEFAULTS = {
    "width": 192, "height": 112, "frames": 33, "fps": 16, "steps": 8, "guidance_scale": 1.0,
    "guidance_scale_2": 1.0, "negative_prompt": "", "upscale": "4",
}  # fmt: skip
SIZES = [[192, 112], [112, 192], [128, 128], [160, 96]]
FRAME_COUNTS = [17, 33, 49]
FLOW_SHIFT = 5.0
VERSION = 2  # 1 had experts of 6 blocks, 20 steps and guidance
ABOUT = "Ships with Tandem: a drawn paper-cut world of boats, balloons, birds, trains and cats."
BOUNDARY = 0.875
# The parts of a model directory, and their names in checkpoints.
NAMES = {"transformer": "high", "transformer_2": "low", "vae": "vae", "text_encoder": "text"}
WORDS = {
    "Colors": list(world.COLOURS),
    "Things": [
        "boat", "balloon", "bird", "fish", "car", "train", "kite", "rocket", "ball", "star", "cat", "butterfly",
    ],
    "Movements": ["moves to the left", "moves to the right", "rises", "sinks", "circles", "bounces"],
    "Places": ["on the sea", "over the hills", "in the city", "in the desert", "in the snowy mountains", "in the sky"],
    "Weather": ["in clear weather", "in the rain", "while it snows"],
    "Times of day": ["in the morning", "at noon", "at sunset", "at night"],
}  # fmt: skip


def sidecar(factors: list[list[float]], bias: list[float]) -> dict[str, object]:
    """What tandem.json holds: what diffusers' configs have no place for."""
    return {
        "title": "Diorama", "version": VERSION, "license": "Apache-2.0", "about": ABOUT, "defaults": DEFAULTS,
        "sizes": SIZES, "frame_counts": FRAME_COUNTS, "from_images": True, "interpolates": True,
        "latent_rgb_factors": factors, "latent_rgb_bias": bias, "words": WORDS,
    }  # fmt: skip


@torch.no_grad()
def blend(module: nn.Module, folder: Path, name: str, share: float) -> None:
    """Make each weight of ``module`` the mean of its own, which counts for ``share``, and that in ``folder``."""
    own = {k: v.clone() for k, v in module.state_dict().items()}
    load_weights(module, folder, name)
    for key, value in module.state_dict().items():
        value.lerp_(own[key], share)


def export(
    out: Path,
    weights: Sequence[Path] = (),
    sizes: nets.Sizes = nets.TRUE,
    flow_shift: float = FLOW_SHIFT,
    decoder_share: float = 1.0,
) -> None:
    """Write the model directory ``out``, each part from the first of ``weights`` that has it, else untrained.

    ``weights`` may hold checkpoints of the trainings or model directories, ``out`` itself among them. With a
    ``decoder_share`` below 1, the VAE is a mean with the next of ``weights`` that has one and the same encoder.
    """
    torch.manual_seed(0)
    fit: dict[str, Any] = {"factors": [[0.0] * 3 for _ in range(16)], "bias": [0.0] * 3}
    parts: dict[str, Any] = {}  # of diffusers and transformers
    for part, name in NAMES.items():
        folders = [f for f in weights if has_weights(f, name)]
        if part == "vae":
            parts[part] = vae = nets.vae(sizes)
            if folders:
                load_weights(vae, folders[0], name)
                fit = nets.read_latents(folders[0])
                vae.register_to_config(latents_mean=fit["mean"], latents_std=fit["std"])
            if folders and decoder_share < 1:
                blend(vae, folders[1], name, decoder_share)
        elif part == "text_encoder":
            parts[part] = nets.load_text(folders[0], sizes) if folders else nets.text_encoder(sizes)
        else:
            parts[part] = nets.load_expert(folders[0], name, sizes) if folders else nets.expert(sizes)
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
    parser.add_argument(
        "--decoder-share", type=float, default=1.0, help="of the first VAE found; the next one's weights have the rest"
    )
    parser.add_argument("--rehearsal", action="store_true", help="tiny networks")
    arguments = parser.parse_args()
    tried = nets.REHEARSAL if arguments.rehearsal else nets.TRUE
    export(arguments.out, arguments.weights, tried, arguments.flow_shift, arguments.decoder_share)
