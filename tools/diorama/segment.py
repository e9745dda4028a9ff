"""The segmenter: a small U-Net, trained on renders only, that finds subjects in frames.

    python -m tools.diorama.segment --out weights --minutes 1.2

Renders are warped for training, so that it follows the outline that it sees and not the one that it remembers.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.diorama import training, world
from tools.diorama.checkpoint import load_weights, save_weights
from tools.diorama.render import Renderer

LOG = logging.getLogger(__name__)
SIZE, FRAMES, STRIDE = (192, 112), 33, 8
WIDTHS = (24, 48, 72, 96)


def _block(wide: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(wide, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
        nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
    )  # fmt: skip


class Segmenter(nn.Module):
    """(N, 3, H, W) in -1..1 to logits (N, H, W) of a subject being there; H and W are multiples of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(_block(a, b) for a, b in zip((3, *WIDTHS), WIDTHS, strict=False))
        self.up = nn.ModuleList(_block(a + b, a) for a, b in itertools.pairwise(WIDTHS))
        self.out = nn.Conv2d(WIDTHS[0], 1, 1)

    def forward(self, frames: Tensor) -> Tensor:
        """Logits of all frames."""
        levels: list[Tensor] = []
        x = frames
        for block in self.down:
            x = block(F.max_pool2d(x, 2) if levels else x)
            levels.append(x)
        for block, level in zip(reversed(self.up), reversed(levels[:-1]), strict=True):
            wide = F.interpolate(x, level.shape[-2:], mode="bilinear", align_corners=False)
            x = block(torch.cat([level, wide], 1))
        return self.out(x)[:, 0]


def load(folder: Path, device: torch.device) -> Segmenter:
    """The trained segmenter in ``folder``."""
    model = Segmenter()
    load_weights(model, folder, "segmenter")
    return model.to(device).eval()


def distort(frames: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """``frames`` (N, 3, H, W) and ``masks`` (N, H, W) warped by a few pixels, the frames also blurred and noisy."""
    count, _, height, width = frames.shape
    device = frames.device
    flow = torch.zeros(count, 2, height, width, device=device)
    for cells, reach in ((4, 6.0), (9, 4.0), (18, 2.0)):
        strength = reach * torch.rand(count, 1, 1, 1, device=device) * (torch.rand(count, 1, 1, 1, device=device) < 0.7)
        coarse = torch.randn(count, 2, cells, cells * width // height, device=device) * strength * 0.6
        flow += F.interpolate(coarse, (height, width), mode="bicubic", align_corners=False)
    ys, xs = (torch.arange(n, device=device) + 0.5 for n in (height, width))
    grid = torch.stack([2 * (xs + flow[:, 0]) / width - 1, 2 * (ys[:, None] + flow[:, 1]) / height - 1], -1)
    both = torch.cat([frames, masks[:, None]], 1)
    both = F.grid_sample(both, grid, padding_mode="reflection", align_corners=False)
    image, mask = both[:, :3], both[:, 3]
    soft = F.interpolate(F.avg_pool2d(image, 2), (height, width), mode="bilinear", align_corners=False)
    image = torch.lerp(image, soft, torch.rand(count, 1, 1, 1, device=device))
    tint = 1 + 0.15 * torch.randn(count, 3, 1, 1, device=device)
    noise = 0.06 * torch.rand(count, 1, 1, 1, device=device) * torch.randn_like(image)
    return (image * tint + noise).clamp(-1, 1), mask


def loss_of(model: Segmenter, frames: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy and 1 - soft IoU, and the IoU of the thresholded masks."""
    with training.autocast(frames.device):
        logits = model(frames).float()
    probability = logits.sigmoid()
    overlap = (probability * masks).sum((1, 2))
    whole = (probability + masks).sum((1, 2)) - overlap
    loss = F.binary_cross_entropy_with_logits(logits, masks) * 5 + (1 - (overlap + 1) / (whole + 1)).mean()
    guess, true = logits > 0, masks > 0.5
    iou = (guess & true).sum((1, 2)) / (guess | true).sum((1, 2)).clamp(min=1)
    return loss, iou.mean().detach()


def main() -> None:
    """Train within the budget and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=1.2)
    parser.add_argument("--batch", type=int, default=32, help="clips; five frames of each are shown")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=61)
    args = parser.parse_args()
    *_, device = training.start()
    torch.manual_seed(args.seed)
    model = Segmenter().to(device)
    parameters = list(model.parameters())
    optimiser = training.Muon(model.named_parameters(), args.lr, 0.01, skip=("down.0.0", "out"))
    renderer = Renderer(SIZE, FRAMES, device, STRIDE)
    clock = training.Clock(args.minutes, device)
    report = time.monotonic()
    while clock.tick():
        scenes = world.sample(args.batch, args.seed * 1_000_000 + clock.steps, keep="any", two_subjects=0.15, usual=0.3)
        frames, masks = renderer(scenes).flatten(0, 1), renderer.masks(scenes).flatten(0, 1)
        loss, iou = loss_of(model, *distort(frames, masks))
        loss.backward()
        training.average_gradients(parameters)
        optimiser.step(clock.rate(30))
        optimiser.zero_grad()
        if time.monotonic() - report > 15:
            report = time.monotonic()
            LOG.info("segmenter: step %d, loss %.4f, IoU %.3f", clock.steps, loss.detach(), iou)
    LOG.info("segmenter: %d steps, IoU of warped renders %.4f", clock.steps, iou)
    save_weights(model.state_dict(), args.out, "segmenter")


if __name__ == "__main__":
    main()
