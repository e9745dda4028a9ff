"""Train the deep-compression autoencoder (DC-AE) that ships, on rendered frames, on one GPU.

    python -m tools.diorama.train_dcae --minutes 4 --out weights

It is a diffusers `AutoencoderDC` that encodes each frame for itself: 16 × 16 pixels become 32 numbers. It needs no
attention and no norm over the frame, so it is trained on square crops and decodes frames of any size.

`--out` gets a model folder, `diorama-dcae`, with float16 weights; `world.safetensors`, the latents of a clip of scenes
held out from training, scaled by `scaling_factor` as a world model would make them; `dcae.json` with the table in the
README; and `dcae.png`, frames of the clip above the decoded ones.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderDC
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from tools.diorama import training, world
from tools.diorama.render import Renderer, laplacian_variance, to_uint8

LOG = logging.getLogger(__name__)
LANDSCAPE, PORTRAIT, SQUARE = (192, 112), (112, 192), (128, 128)
FRAMES, STRIDE, CROP = 33, 8, (112, 112)  # of a scene, every eighth frame is used
NAME, CLIP = "diorama-dcae", "world.safetensors"
CLIP_SEED = 424_242
NOISE = 0.03  # of a latent's usual size, so that the decoder forgives small errors
ABSOLUTE, EDGES = 0.1, 0.1  # weights of the absolute error and of the error of edges, beside the squared error

# The encoder and the decoder have 0.97 million weights together: 1.9 MB in float16.
TRUE: dict[str, Any] = {
    "latent_channels": 32,
    "encoder_block_out_channels": (16, 32, 64, 64, 64),
    "encoder_layers_per_block": (1, 1, 1, 1, 0),
    "decoder_block_out_channels": (24, 48, 96, 96, 96),
    "decoder_layers_per_block": (2, 2, 1, 1, 0),
}
REHEARSAL: dict[str, Any] = {
    "latent_channels": 8,
    "encoder_block_out_channels": (8, 8, 16, 16, 16),
    "encoder_layers_per_block": (1, 1, 1, 1, 0),
    "decoder_block_out_channels": (8, 8, 16, 16, 16),
    "decoder_layers_per_block": (1, 1, 1, 1, 0),
}


def autoencoder(sizes: dict[str, Any]) -> AutoencoderDC:
    """An untrained autoencoder without attention."""
    none: tuple[tuple[int, ...], ...] = ((),) * len(sizes["encoder_block_out_channels"])
    return AutoencoderDC(
        **sizes, encoder_qkv_multiscales=none, decoder_qkv_multiscales=none, upsample_block_type="interpolate",
        downsample_block_type="conv",
    )  # fmt: skip


def frames(batch: int, scenes: int, seed: int, device: torch.device) -> Iterator[Tensor]:
    """Endless (batch, 3, 112, 112) crops of single frames in -1..1, of ``scenes`` scenes at a time, in random order."""
    renderers = [Renderer(size, FRAMES, device, STRIDE) for size in (LANDSCAPE, LANDSCAPE, PORTRAIT, SQUARE)]
    generator = torch.Generator().manual_seed(seed)
    turn = 0
    while True:
        drawn = []
        for renderer in renderers:
            some = world.midway(world.sample(scenes, seed * 1_000_003 + turn, two_subjects=0.6), turn)
            room = torch.tensor([renderer.size[0] - CROP[0], renderer.size[1] - CROP[1]])
            corner = (torch.rand(scenes, 2, generator=generator) * (room + 1)).floor()
            drawn.append(renderer(some, CROP, corner).flatten(0, 1))
            turn += 1
        all_of_them = torch.cat(drawn)
        order = torch.randperm(len(all_of_them), generator=generator).to(device)
        for index in order.split(batch):
            if len(index) == batch:
                yield all_of_them[index].contiguous(memory_format=torch.channels_last)


def gradients(x: Tensor) -> tuple[Tensor, Tensor]:
    """Differences of neighbouring pixels, down and to the right."""
    return x.diff(dim=2), x.diff(dim=3)


def loss_of(model: AutoencoderDC, images: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and the mean squared error that is part of it."""
    latents = model.encoder(images)
    latents = latents + NOISE * latents.detach().float().std() * torch.randn_like(latents)
    again = model.decoder(latents).float()
    mse = F.mse_loss(again, images)
    edges = sum(F.l1_loss(a, b) for a, b in zip(gradients(again), gradients(images), strict=True))
    return mse + ABSOLUTE * F.l1_loss(again, images) + EDGES * edges, mse


def psnr(mse: Tensor) -> Tensor:
    """Decibels of mean squared errors of values in -1..1."""
    return 10 * torch.log10(4 / mse.clamp(min=1e-9))


@torch.no_grad()
def measure(model: AutoencoderDC, device: torch.device, size: tuple[int, int], count: int = 24) -> dict[str, float]:
    """PSNR of whole frames of scenes held out from training: the mean and the worst; and their sharpness.

    Sharpness is the variance of the Laplacian as a share of the render's.
    """
    renderer = Renderer(size, FRAMES, device, STRIDE)
    errors, edges = [], []
    for start in range(0, count, 8):
        clip = renderer(world.sample(8, 987_654 + start, keep="held_out"))
        flat = clip.flatten(0, 1)
        again = model.decoder(model.encoder(flat)).float().clamp(-1, 1)
        errors.append(((flat - again) ** 2).mean((1, 2, 3)))
        moved = again.view_as(clip).transpose(1, 2)
        edges.append(laplacian_variance(moved) / laplacian_variance(clip.transpose(1, 2)))
    found = psnr(torch.cat(errors))
    return {"psnr": float(found.mean()), "worst": float(found.min()), "sharpness": float(torch.cat(edges).mean())}


@torch.no_grad()
def scale_of(model: AutoencoderDC, device: torch.device) -> float:
    """The factor that gives latents a root mean square of 1."""
    clip = Renderer(LANDSCAPE, FRAMES, device, STRIDE)(world.sample(32, 555_000)).flatten(0, 1)
    return round(1 / float(model.encoder(clip).float().square().mean().sqrt()), 5)


@torch.no_grad()
def save_clip(model: AutoencoderDC, device: torch.device, out: Path, length: int) -> float:
    """Write the latents of a clip and a picture of it; return the PSNR of the clip decoded from that file."""
    clip = Renderer(LANDSCAPE, length, device)(world.sample(1, CLIP_SEED, keep="held_out", two_subjects=1.0))[0]
    latents = (model.encoder(clip) * model.config.scaling_factor).to(torch.float16)
    save_file({"latents": latents.cpu().contiguous()}, out / CLIP, {"fps": "16", "model": NAME})
    again = model.decoder(latents.float() / model.config.scaling_factor).clamp(-1, 1)
    shown = [0, length // 3, 2 * length // 3, length - 1]
    rows = [np.concatenate(list(to_uint8(x[shown]).cpu().numpy()), axis=1) for x in (clip, again)]
    Image.fromarray(np.concatenate(rows)).save(out / "dcae.png")
    return float(psnr((clip - again).square().mean()))


def describe(folder: Path) -> None:
    """Write ``tandem.json``: what diffusers' configuration of the model folder has no place for."""
    found = {
        "title": "Diorama DC-AE", "license": "Apache-2.0",
        "about": "Decodes latents of diorama's world, frame by frame.",
        "defaults": {
            "width": LANDSCAPE[0], "height": LANDSCAPE[1], "frames": 49, "fps": 16, "steps": 1, "guidance_scale": 1.0,
        },
        "sizes": [list(LANDSCAPE), list(PORTRAIT), list(SQUARE)], "frame_counts": [49],
    }  # fmt: skip
    (folder / "tandem.json").write_text(json.dumps(found, indent=1) + "\n")
    for path in folder.iterdir():
        path.chmod(0o644)


def finish(model: AutoencoderDC, device: torch.device, out: Path, facts: dict[str, Any], length: int) -> None:
    """Round the weights to float16, measure the result, and write everything."""
    out.mkdir(parents=True, exist_ok=True)
    model.eval().to(memory_format=torch.contiguous_format)
    model.register_to_config(scaling_factor=scale_of(model, device))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())
    sizes = {"192x112": LANDSCAPE, "112x192": PORTRAIT, "128x128": SQUARE}
    found = {name: measure(model, device, size) for name, size in sizes.items()}
    clip = save_clip(model, device, out, length)
    copy = AutoencoderDC.from_config(model.config)
    # `from_config` leaves out values that were not given to the constructor.
    copy.register_to_config(scaling_factor=model.config.scaling_factor)
    copy.load_state_dict(model.state_dict())
    copy.half().save_pretrained(out / NAME, safe_serialization=True)
    describe(out / NAME)
    (out / CLIP).chmod(0o644)
    (out / "dcae.json").write_text(json.dumps({**facts, "sizes": found, "clip_psnr": clip}, indent=1) + "\n")
    for name, row in found.items():
        LOG.info("%s: %.2f dB, worst %.2f dB, sharpness %.2f", name, row["psnr"], row["worst"], row["sharpness"])
    LOG.info("the clip: %.2f dB", clip)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=4.0, help="of training, after compiling")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--scenes", type=int, default=256, help="rendered at a time, of each of four sizes")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--adamw", action="store_true")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--rehearsal", action="store_true", help="a tiny network")
    parser.add_argument("--length", type=int, default=49, help="frames of the clip")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Train within the budget, then measure and save."""
    args = arguments()
    _, _, device = training.start()
    torch.manual_seed(args.seed)
    model = autoencoder(REHEARSAL if args.rehearsal else TRUE).to(device, memory_format=torch.channels_last)
    count = sum(parameter.numel() for parameter in model.parameters())
    LOG.info("%d weights", count)
    optimiser = training.Muon(model.named_parameters(), args.lr, 0.01, plain=args.adamw, skip=("conv_in", "conv_out"))
    average = training.Average(model, 0.998)
    compute = loss_of if args.eager else torch.compile(loss_of, dynamic=False)
    parameters: list[nn.Parameter] = list(model.parameters())
    data = frames(args.batch, args.scenes, args.seed, device)
    clock = training.Clock(args.minutes, device)
    began = report = time.monotonic()
    compiling = device.type == "cuda"
    while clock.tick():
        images = next(data)
        with training.autocast(device):
            loss, mse = compute(model, images)
        loss.backward()
        training.average_gradients(parameters)
        optimiser.step(clock.rate())
        optimiser.zero_grad()
        average.update()
        if compiling:
            compiling = False
            LOG.info("compiled after %.0f s", time.monotonic() - began)
            clock.restart(args.minutes)
        if time.monotonic() - report > 15:
            report = time.monotonic()
            LOG.info("step %d, %.0f%%, %.2f dB", clock.steps, 100 * clock.progress, psnr(mse.detach()))
    LOG.info("%d steps in %.0f s", clock.steps, time.monotonic() - began)
    average.store()
    facts = {"weights": count, "steps": clock.steps, "batch": args.batch, "minutes": args.minutes, "seed": args.seed}
    finish(model, device, args.out, facts, args.length)


if __name__ == "__main__":
    main()
