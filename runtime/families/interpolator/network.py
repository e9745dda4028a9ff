"""The frame halfway between two frames, by a small network.

It estimates where each pixel of the new frame was in both frames, from coarse to fine, and mixes both frames moved
there, as IFNet does (Huang et al., 2022, "Real-Time Intermediate Flow Estimation for Video Frame Interpolation").
Trained by `tools/diorama/train_interpolation.py` on renders of the shipped model's world.
"""

from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from runtime.models.catalogue import EMBEDDED

WEIGHTS = EMBEDDED / "interpolator" / "model.safetensors"
# How much smaller a stage computes, and its channels.
STAGES = ((8, 96), (4, 80), (2, 64))
REFINED = 32
# Sides that frames are padded to are multiples of this.
MULTIPLE = 16
# Longest side in pixels whose motion the network estimates: it was trained with 192×112.
_LONGEST = 480
_FLOW = 4
_FLOW_UNIT = 16.0


def moved(frames: Tensor, flow: Tensor) -> Tensor:
    """Read (n, c, h, w) frames at each pixel's place plus `flow`, (n, 2, h, w) in pixels, x first; float32."""
    height, width = frames.shape[-2:]
    rows = torch.arange(height, device=frames.device, dtype=flow.dtype)
    columns = torch.arange(width, device=frames.device, dtype=flow.dtype)
    x = (columns[None, None, :] + flow[:, 0]) * (2 / (width - 1)) - 1
    y = (rows[None, :, None] + flow[:, 1]) * (2 / (height - 1)) - 1
    return F.grid_sample(frames, torch.stack([x, y], -1), padding_mode="border", align_corners=True)


def _convolution(wide: int, out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(wide, out, 3, stride, 1), nn.PReLU(out))


class Stage(nn.Module):
    """Improves flow, (n, 4, h, w) in pixels, and mask, (n, 1, h, w), at a part of the size."""

    def __init__(self, given: int, scale: int, width: int) -> None:
        super().__init__()
        self.scale = scale
        self.first = nn.Sequential(_convolution(given, width // 2, 2), _convolution(width // 2, width))
        self.body = nn.Sequential(*(_convolution(width, width) for _ in range(6)))
        self.last = nn.ConvTranspose2d(width, _FLOW + 1, 4, 2, 1)

    def forward(self, given: Tensor, flow: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the changes of flow and mask, at full size."""
        small = F.interpolate(given, scale_factor=2 / self.scale, mode="bilinear", antialias=True)
        if flow is not None:
            flow = F.interpolate(flow, scale_factor=2 / self.scale, mode="bilinear") * (2 / self.scale)
            small = torch.cat([small, flow], 1)
        features = self.first(small)
        changes = self.last(self.body(features) + features)
        # Places in bfloat16 would be a pixel off.
        changes = F.interpolate(changes.float(), scale_factor=self.scale / 2, mode="bilinear")
        return changes[:, :_FLOW] * (self.scale / 2), changes[:, _FLOW:]


class InterpolationNetwork(nn.Module):
    """Computes the frame halfway between two frames, (n, 3, h, w) in -1 to 1; sides are multiples of `MULTIPLE`."""

    def __init__(self) -> None:
        super().__init__()
        (first, width), *others = STAGES
        stages = [Stage(6, first, width), *(Stage(13 + _FLOW, scale, wide) for scale, wide in others)]
        self.stages = nn.ModuleList(stages)
        self.refine = nn.Sequential(
            _convolution(6 + 6 + 3 + _FLOW + 1, REFINED),
            _convolution(REFINED, REFINED),
            _convolution(REFINED, REFINED),
            nn.Conv2d(REFINED, 3, 3, 1, 1),
        )

    def forward(self, before: Tensor, after: Tensor, smaller: int = 1) -> list[Tensor]:
        """Return the frame as each stage has it, the best last.

        Args:
            smaller: estimate the motion in frames so many times smaller; sides are multiples of `MULTIPLE` times it.
        """
        full = before, after
        if smaller > 1:
            before, after = (
                F.interpolate(frame, scale_factor=1 / smaller, mode="bilinear", antialias=True) for frame in full
            )
        both = torch.cat([before, after], 1)
        first, *others = self.stages
        flow, mask = first(both, None)
        mixed, warped = _mixed(before, after, flow, mask)
        made = [mixed]
        for stage in others:
            more, change = stage(torch.cat([both, *warped, mask], 1), flow)
            flow, mask = flow + more, mask + change
            mixed, warped = _mixed(before, after, flow, mask)
            made.append(mixed)
        if smaller > 1:
            flow = F.interpolate(flow, scale_factor=float(smaller), mode="bilinear") * smaller
            return [_mixed(*full, flow, F.interpolate(mask, scale_factor=float(smaller), mode="bilinear"))[0]]
        rest = self.refine(torch.cat([both, *warped, mixed, flow / _FLOW_UNIT, mask], 1))
        return [*made, mixed + rest]


def _mixed(before: Tensor, after: Tensor, flow: Tensor, mask: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the mixture of both frames moved, and both."""
    warped = moved(before, flow[:, :2]), moved(after, flow[:, 2:])
    share = mask.sigmoid()
    return warped[0] * share + warped[1] * (1 - share), warped


def smaller_for(width: int, height: int) -> int:
    """Return how many times smaller the frames are in which motion is estimated: a power of two."""
    smaller = 1
    while max(width, height) > _LONGEST * smaller:
        smaller *= 2
    return smaller


@lru_cache(maxsize=1)
def load_network(device: str, weights: Path = WEIGHTS) -> InterpolationNetwork:
    """Return the network with its weights in float32, for inference."""
    network = InterpolationNetwork()
    network.load_state_dict({name: tensor.float() for name, tensor in load_file(weights).items()})
    return network.to(device).eval().requires_grad_(False)
