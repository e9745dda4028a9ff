"""Train the VAE on rendered crops (all frames, full height, half the width), on one or more GPUs.

    torchrun --nproc-per-node 4 -m tools.diorama.train_vae --out weights --minutes 8.5

With ``--decoder-only`` the encoder stays as it is: latents, and so experts trained on them, keep their meaning.
With ``--first`` the first frame, one of 33, counts for more. With ``--sharp`` every frame gets the same share of the
sharpness of what it shows, so that the first, which has one latent frame for itself, does not look softer.
With ``--equivariance`` shrunken latents must decode to the shrunken clip, and with ``--smooth`` neighbouring latents
must be alike: both make latents less like noise in space, so that experts learn them sooner.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import AutoencoderKLWan
from torch import Tensor

from tools.diorama import nets, training, world
from tools.diorama.checkpoint import has_weights, load_weights, save_weights
from tools.diorama.render import Renderer, laplacian_variance

LOG = logging.getLogger(__name__)
LANDSCAPE, PORTRAIT, SQUARE = (192, 112), (112, 192), (128, 128)
SHRINK = ((1, 2), (5, 7))  # what latents of 14 cells a side shrink by, one scale for each rank in turn


@dataclass(frozen=True)
class Aim:
    """The losses that training minimizes in addition to the reconstruction error."""

    kl: float = 3e-5
    noise: float = 0.04  # of a latent's usual size, so that the decoder forgives the experts' small errors
    equivariance: float = 0.0
    shrink: tuple[int, int] = SHRINK[0]
    smooth: float = 0.0
    decoder_only: bool = False
    first: float = 1.0  # weight of the first frame, which has a latent frame for itself
    sharp: float = 0.0
    # Share of a render's local contrast of edges that decoded frames should have: the first, and the others.
    sharpness: tuple[float, float] = (0.85, 0.85)


def crops(
    batch: int, frames: int, seed: int, device: torch.device, buffer: int, crop: tuple[int, int]
) -> Iterator[Tensor]:
    """Endless (batch, 3, frames, H, W) crops in bfloat16, rendered ``buffer`` at a time, each used once."""
    renderers = [Renderer(size, frames, device) for size in (LANDSCAPE, LANDSCAPE, LANDSCAPE, PORTRAIT, SQUARE)]
    turn = 0
    generator = torch.Generator().manual_seed(seed)
    while True:
        renderer = renderers[turn % len(renderers)]
        scenes = world.sample(buffer, seed * 1_000_003 + turn, two_subjects=0.6)
        room = torch.tensor([renderer.size[0] - crop[0], renderer.size[1] - crop[1]])
        corner = (torch.rand(buffer, 2, generator=generator) * (room + 1)).floor()
        clips = renderer(scenes, crop, corner).transpose(1, 2).to(torch.bfloat16)
        yield from clips.split(batch)
        turn += 1


@torch.no_grad()
def measure(
    model: AutoencoderKLWan,
    device: torch.device,
    size: tuple[int, int] = LANDSCAPE,
    frames: int = 33,
    count: int = 32,
    seed: int = 987_654,
) -> dict[str, float]:
    """PSNR in dB over ``count`` new complete clips: all frames, the first and the last; and the variance of the
    Laplacian as a share of the render's."""
    renderer = Renderer(size, frames, device)
    errors, edges = [], []
    for start in range(0, count, 8):
        scenes = world.sample(8, seed + start, keep="any")
        clip = renderer(scenes).transpose(1, 2)
        again = nets.decode_clip(model, nets.encode_clip(model, clip)[0]).clamp(-1, 1)
        errors.append(((clip - again) ** 2).mean((1, 3, 4)))
        edges.append(laplacian_variance(again) / laplacian_variance(clip))
    mse = torch.cat(errors)

    def psnr(values: Tensor) -> float:
        return float((10 * torch.log10(4 / values.clamp(min=1e-9))).mean())

    return {
        "all": psnr(mse.mean(1)),
        "first": psnr(mse[:, 0]),
        "last": psnr(mse[:, -1]),
        "worst": psnr(mse.mean(1).max()),
        "worst_first": psnr(mse[:, 0].max()),
        "sharpness": float(torch.cat(edges).mean()),
        "sharpness_first": float(torch.cat(edges)[:, 0].mean()),
    }


@torch.no_grad()
def fit_latents(
    model: AutoencoderKLWan, device: torch.device, count: int = 96
) -> tuple[dict[str, Any], dict[str, float]]:
    """Latent mean and deviation per channel with a least-squares map from normalised latents to RGB in -1..1; and
    how unlike neighbouring latents are."""
    renderer = Renderer(LANDSCAPE, 33, device)
    latents, colours = [], []
    for start in range(0, count, 16):
        clip = renderer(world.sample(16, 555_000 + start)).transpose(1, 2)
        latents.append(nets.encode_clip(model, clip)[0].float())
        seen = torch.cat([clip[:, :, :1], torch.nn.functional.avg_pool3d(clip[:, :, 1:], (4, 1, 1))], 2)
        colours.append(torch.nn.functional.avg_pool3d(seen, (1, 8, 8)))
    z, rgb = torch.cat(latents), torch.cat(colours)
    mean, std = z.mean((0, 2, 3, 4)), z.std((0, 2, 3, 4))
    flat = ((z - mean.view(1, -1, 1, 1, 1)) / std.view(1, -1, 1, 1, 1)).movedim(1, -1).reshape(-1, z.shape[1]).double()
    design = torch.cat([flat, torch.ones_like(flat[:, :1])], 1)
    weights = torch.linalg.lstsq(design.cpu(), rgb.movedim(1, -1).reshape(-1, 3).double().cpu()).solution

    def rounded(values: Tensor) -> list:
        return (
            [[round(float(v), 5) for v in row] for row in values]
            if values.dim() > 1
            else [round(float(v), 5) for v in values]
        )

    rough = dict(zip(("time", "height", "width"), rounded(roughness(z)), strict=True))
    fit = {"mean": rounded(mean), "std": rounded(std), "factors": rounded(weights[:-1]), "bias": rounded(weights[-1])}
    return fit, rough


def shrink(x: Tensor, by: tuple[int, int]) -> Tensor:
    """(..., H, W) with both sides times the fraction ``by``, each new pixel the mean of the area it covers."""

    def matrix(size: int) -> Tensor:
        new, left = divmod(size * by[0], by[1])
        if left:
            raise ValueError(f"{size} times {by[0]}/{by[1]} is no whole number")
        edges = torch.arange(new + 1, device=x.device) * (size / new)
        old = torch.arange(size, device=x.device)
        cover = torch.minimum(edges[1:, None], old + 1) - torch.maximum(edges[:-1, None], old)
        return cover.clamp(min=0) * (new / size)

    return matrix(x.shape[-2]) @ x @ matrix(x.shape[-1]).mT


def roughness(latents: Tensor) -> Tensor:
    """1 - correlation of neighbours in time, height and width, (3,), the mean over channels: 1 for white noise."""
    z = latents.float()
    z = z - z.mean((0, 2, 3, 4), keepdim=True)
    usual = z.square().mean((0, 2, 3, 4)) + 1e-6
    return torch.stack([(z.diff(dim=d).square().mean((0, 2, 3, 4)) / (2 * usual)).mean() for d in (2, 3, 4)])


def edge_contrast(clip: Tensor) -> Tensor:
    """Standard deviation of the Laplacian of the luminance around each place of (B, 3, T, H, W): (B, T, h, w)."""
    grey = (clip * clip.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1, 1)).sum(1)
    inner = grey[..., 1:-1, 1:-1]
    around = grey[..., :-2, 1:-1] + grey[..., 2:, 1:-1] + grey[..., 1:-1, :-2] + grey[..., 1:-1, 2:]
    return (torch.nn.functional.avg_pool2d((around - 4 * inner).square(), 16, 8) + 1e-6).sqrt()


def loss_of(model: AutoencoderKLWan, clip: Tensor, aim: Aim) -> tuple[Tensor, Tensor]:
    """What training lowers, and the mean squared error alone."""
    if aim.decoder_only:
        with torch.no_grad():
            mean, logvar = nets.encode_clip(model, clip)
    else:
        mean, logvar = nets.encode_clip(model, clip)
    mean, logvar = mean.float(), logvar.float()
    usual = mean.detach().std((0, 2, 3, 4), keepdim=True)
    noise = aim.noise * usual * (2 * torch.rand_like(mean[:, :1, :1, :1, :1]))
    latents = mean + torch.randn_like(mean) * ((0.5 * logvar).exp() + noise)

    def fault(latents: Tensor, clip: Tensor) -> tuple[Tensor, Tensor]:
        again = nets.decode_clip(model, latents.to(clip.dtype)).float()
        error = again - clip.float()
        each = (error.abs() + 2 * error * error).mean((0, 1, 3, 4))
        if aim.sharp:
            wanted = edge_contrast(clip.float())
            wanted = torch.cat([aim.sharpness[0] * wanted[:, :1], aim.sharpness[1] * wanted[:, 1:]], 1)
            each = each + aim.sharp * (edge_contrast(again) - wanted).abs().mean((0, 2, 3))
        loss = (each.sum() + (aim.first - 1) * each[0]) / (len(each) + aim.first - 1)
        return loss, (error * error).mean()

    loss, mse = fault(latents, clip)
    loss = loss + aim.kl * 0.5 * (mean * mean + logvar.exp() - 1 - logvar).mean()
    if aim.equivariance:
        # Fewer clips where they shrink less, so that every rank takes as long.
        count = min(len(clip), max(1, round(len(clip) * (aim.shrink[1] / aim.shrink[0]) ** 2 / 4)))
        small = fault(shrink(latents[:count], aim.shrink), shrink(clip[:count].float(), aim.shrink))
        loss = loss + aim.equivariance * small[0]
    if aim.smooth:
        rough = roughness(mean)
        loss = loss + aim.smooth * (0.5 * rough[0] + rough[1] + rough[2])
    return loss, mse


def finish(model: AutoencoderKLWan, out: Path, device: torch.device, known: dict | None, *, tiny: bool) -> None:
    """Save the VAE and what its latents look like, if that is not ``known``, and measure it at all sizes."""
    model.eval()
    out.mkdir(parents=True, exist_ok=True)
    save_weights(model.state_dict(), out, "vae")
    fit, rough = fit_latents(model, device, 16 if tiny else 96)
    nets.write_json(out / "latents.json", known or fit)
    LOG.info("1 - correlation of neighbouring latents: %s", rough)
    results = []
    shapes = [(LANDSCAPE, 17), (LANDSCAPE, 33), (LANDSCAPE, 49), (PORTRAIT, 33), (SQUARE, 33), ((160, 96), 17)]
    for size, frames in shapes[: 1 if tiny else None]:
        values = measure(model, device, size, frames, 8 if tiny else 32)
        LOG.info("%dx%d, %d frames: %s", *size, frames, {k: round(v, 2) for k, v in values.items()})
        results.append({"size": size, "frames": frames, **values})
    nets.write_json(out / "vae.json", {"roughness": rough, "psnr": results})


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, default=None)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--buffer", type=int, default=256)
    parser.add_argument("--frames", type=int, default=33)
    parser.add_argument("--crop", type=int, nargs=2, default=(96, 112))
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--adamw", action="store_true")
    parser.add_argument("--decoder-only", action="store_true")
    parser.add_argument("--first", type=float, default=1.0, help="weight of the first frame; others have 1")
    parser.add_argument("--sharp", type=float, default=Aim.sharp, help="weight of the local contrast of edges")
    parser.add_argument(
        "--sharpness", type=float, nargs=2, default=Aim.sharpness,
        help="share of a render's contrast of edges: the first frame's, the others'",
    )  # fmt: skip
    parser.add_argument("--kl", type=float, default=Aim.kl)
    parser.add_argument("--noise", type=float, default=Aim.noise, help="in the mean, of a latent's usual size")
    parser.add_argument("--equivariance", type=float, default=0.0, help="weight of shrunken latents, with crop 112 112")
    parser.add_argument("--smooth", type=float, default=0.0, help="weight of the difference of neighbouring latents")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--rehearsal", action="store_true", help="tiny networks")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Train within the budget, then measure and save."""
    args = arguments()
    began = time.monotonic()
    rank, world_size, device = training.start()
    torch.manual_seed(args.seed)
    model = nets.vae(nets.REHEARSAL if args.rehearsal else nets.TRUE).to(device)
    if has_weights(args.resume, "vae"):
        load_weights(model, args.resume, "vae")
    training.channels_last(model)
    if args.decoder_only:
        model.encoder.requires_grad_(False)
        model.quant_conv.requires_grad_(False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = training.Muon(model.named_parameters(), args.lr, 0.01, plain=args.adamw, skip=("conv_out", "conv_in"))
    average = training.Average(model, 0.998)
    aim = Aim(
        args.kl, args.noise, args.equivariance, SHRINK[rank % len(SHRINK)], args.smooth, args.decoder_only, args.first,
        args.sharp, tuple(args.sharpness),
    )  # fmt: skip
    compute = loss_of if args.eager else torch.compile(loss_of, dynamic=False)
    torch.manual_seed(args.seed * 1000 + rank)
    data = crops(args.batch, args.frames, args.seed * 64 + rank, device, args.buffer, tuple(args.crop))
    clock = training.Clock(args.minutes, device)
    report = time.monotonic()
    while clock.tick():
        clip = next(data)
        with torch.autocast(device.type, torch.bfloat16):
            loss, mse = compute(model, clip, aim)
        loss.backward()
        training.average_gradients(parameters)
        optimiser.step(clock.rate())
        optimiser.zero_grad()
        average.update()
        if clock.steps == 1:
            LOG.info("first step after %.0f s", time.monotonic() - began)
        if rank == 0 and time.monotonic() - report > 15:
            report = time.monotonic()
            psnr = 10 * torch.log10(4 / mse.detach())
            LOG.info("step %d, %.0f%%, loss %.4f, %.2f dB", clock.steps, 100 * clock.progress, loss, psnr)
    LOG.info("%d steps in %.0f s on %d devices", clock.steps, time.monotonic() - began, world_size)
    if rank == 0:
        average.store()
        known = nets.read_latents(args.resume) if args.decoder_only and args.resume else None
        finish(model, args.out, device, known, tiny=args.rehearsal or device.type == "cpu")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
