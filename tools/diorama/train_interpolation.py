"""Train the network that computes the frame halfway between two frames, see `runtime.families.interpolator`.

    python -m tools.diorama.train_interpolation --out weights --minutes 5

The shipped weights took 3.3 minutes of one H200, 9,841 steps with `--uses 48 --clips 24`.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.families.interpolator.programs import InterpolationNetwork
from tools.diorama import training, world
from tools.diorama.checkpoint import has_weights, load_weights, save_weights
from tools.diorama.render import Renderer

LOG = logging.getLogger(__name__)
NAME = "interpolator"
# Rendered size and frames, and the crop of a step. Sides are a multiple of 16.
SIZE, FRAMES, CROP = (256, 160), 17, (192, 112)
# Half the distance of the given frames: 1 of a clip interpolated 2 times, 2 of one interpolated 4 times.
DISTANCES = (1, 2)


def triples(clips: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw frames, those between and those after, (count, 3, h, w), of (B, T, 3, H, W), flipped and cut at random."""
    device, (width, height) = clips.device, CROP
    distance = DISTANCES[int(torch.randint(len(DISTANCES), ()))]
    clip = torch.randint(len(clips), (count,), device=device)
    first = torch.randint(clips.shape[1] - 2 * distance, (count,), device=device)
    picked = torch.stack([clips[clip, first + step * distance] for step in range(3)], 1)
    row = int(torch.randint(picked.shape[-2] - height + 1, ()))
    column = int(torch.randint(picked.shape[-1] - width + 1, ()))
    picked = picked[..., row : row + height, column : column + width]
    for axis in (1, -1, -2):  # time, width, height
        picked = picked.flip(axis) if torch.rand(()) < 0.5 else picked
    # The shipped model's clips are softer than renders.
    soft = F.avg_pool2d(picked.flatten(0, 1), 3, 1, 1).view_as(picked)
    picked = torch.lerp(picked, soft, (torch.rand(count, 1, 1, 1, 1, device=device) * 1.6 - 0.6).clamp(min=0))
    return picked[:, 0], picked[:, 1], picked[:, 2]


def psnr(made: Tensor, true: Tensor) -> Tensor:
    """Return the PSNR in dB of each of (n, 3, h, w) in -1..1, rounded to 8 bits."""
    errors = ((made.float().clamp(-1, 1) - true.float()) * 127.5).round().square().flatten(1).mean(1)
    return 10 * torch.log10(255**2 / errors.clamp(min=1e-3))


@torch.no_grad()
def measure(model: InterpolationNetwork, device: torch.device, count: int, seed: int) -> dict[int, float]:
    """Return the mean PSNR in dB of fresh renders at the shipped model's size, by distance."""
    model.eval()
    found: dict[int, list[Tensor]] = {distance: [] for distance in DISTANCES}
    renderer = Renderer(CROP, FRAMES, device)
    for start in range(0, count, 8):
        clips = renderer(world.sample(8, seed + start, keep="held_out"))
        for distance, values in found.items():
            kept, between = clips[:, :: 2 * distance], clips[:, distance :: 2 * distance]
            made = model(kept[:, :-1].flatten(0, 1), kept[:, 1:].flatten(0, 1))[-1]
            values.append(psnr(made, between.flatten(0, 1)[: len(made)]))
    model.train()
    return {distance: float(torch.cat(values).mean()) for distance, values in found.items()}


def main() -> None:
    """Train within the budget, measure on fresh renders and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, default=None)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clips", type=int, default=16, help="rendered for a step")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--uses", type=int, default=4, help="steps with the same renders")
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--test", type=int, default=64)
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()
    *_, device = training.start()
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(args.seed)
    model = InterpolationNetwork().to(device)
    if has_weights(args.resume, NAME):
        load_weights(model, args.resume, NAME)
    LOG.info("%.2f million weights", sum(weight.numel() for weight in model.parameters()) / 1e6)
    run = torch.compile(model) if device.type == "cuda" else model
    optimiser = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-4, fused=device.type == "cuda")
    renderer, clock = Renderer(SIZE, FRAMES, device), training.Clock(args.minutes, device)
    clips = torch.empty(0)
    while clock.tick():
        if (clock.steps - 1) % args.uses == 0:
            clips = renderer(world.sample(args.clips, args.seed + clock.steps, keep="seen", usual=0.0))
        before, true, after = triples(clips, args.batch)
        with training.autocast(device):
            made = run(before, after)
        parts = [((one.float() - true).square() + 1e-5).sqrt().mean() for one in made]
        loss = parts[-1] + 0.3 * sum(parts[:-1])
        for group in optimiser.param_groups:
            group["lr"] = args.lr * clock.rate()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if clock.steps % 200 == 0:
            LOG.info("step %d, %.0f %%, loss %.4f", clock.steps, 100 * clock.progress, float(parts[-1]))
    found = measure(model, device, args.test, 1_000_003)
    LOG.info("PSNR by distance: %s, after %d steps", found, clock.steps)
    save_weights(model.state_dict(), args.out, NAME, torch.float16)


if __name__ == "__main__":
    main()
