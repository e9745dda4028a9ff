"""The frame halfway between two frames, by a small network, and the network's exportable form.

It estimates where each pixel of the new frame was in both frames, from coarse to fine, and mixes both frames moved
there, as IFNet does (Huang et al., 2022, "Real-Time Intermediate Flow Estimation for Video Frame Interpolation").
Trained by `tools/diorama/train_interpolation.py` on renders of the shipped model's world.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.families.interpolator.spec import (
    BODY,
    FLOW,
    MULTIPLE,
    REFINED,
    STAGES,
    given_channels,
    refined_channels,
    smaller_for,
)

_FLOW_UNIT = 16.0


def moved(frames: Tensor, flow: Tensor) -> Tensor:
    """Read (n, c, h, w) frames at each pixel's place plus `flow`, (n, 2, h, w) in pixels, x first; float32."""
    height, width = frames.shape[-2:]
    rows = torch.arange(height, device=frames.device, dtype=flow.dtype)
    columns = torch.arange(width, device=frames.device, dtype=flow.dtype)
    x = (columns[None, None, :] + flow[:, 0]) * (2 / (width - 1)) - 1
    y = (rows[None, :, None] + flow[:, 1]) * (2 / (height - 1)) - 1
    return F.grid_sample(frames, torch.stack([x, y], -1), padding_mode="border", align_corners=True)


def reduced(frames: Tensor, by: int) -> Tensor:
    """Return (n, c, h, w) frames `by` times smaller, an even number or 1; sides are multiples of it.

    Equal to `F.interpolate` with "bilinear" and `antialias`, which TensorRT and older ONNX do not have.
    """
    if by == 1:
        return frames
    taps = 1 - (torch.arange(2 * by, device=frames.device, dtype=frames.dtype) + (0.5 - by)).abs() / by
    channels = frames.shape[1]
    kernel = (taps[:, None] * taps / by**2).expand(channels, 1, -1, -1)
    smaller = F.conv2d(frames, kernel, stride=by, padding=by // 2, groups=channels)
    # At the edges, taps beyond the frame are left out, and the others count for more.
    rows, columns = (
        by / F.conv1d(frames.new_ones(1, 1, side), taps[None, None], stride=by, padding=by // 2)[0, 0]
        for side in frames.shape[-2:]
    )
    return smaller * rows[:, None] * columns


def _convolution(inputs: int, channels: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, channels, 3, stride, 1), nn.PReLU(channels))


class Stage(nn.Module):
    """Improves flow, (n, 4, h, w) in pixels, and mask, (n, 1, h, w), at a part of the size."""

    def __init__(self, given: int, scale: int, width: int) -> None:
        super().__init__()
        self.scale = scale
        self.first = nn.Sequential(_convolution(given, width // 2, 2), _convolution(width // 2, width))
        self.body = nn.Sequential(*(_convolution(width, width) for _ in range(BODY)))
        self.last = nn.ConvTranspose2d(width, FLOW + 1, 4, 2, 1)

    def forward(self, given: Tensor, flow: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the changes of flow and mask, at full size."""
        by = self.scale // 2
        small = reduced(given, by)
        if flow is not None:
            flow = F.interpolate(flow, scale_factor=1 / by, mode="bilinear") * (1 / by)
            small = torch.cat([small, flow], 1)
        features = self.first(small.to(self.last.weight.dtype))
        # Places in 8 or 11 bits would be a pixel off.
        changes = self.last(self.body(features) + features).float()
        changes = F.interpolate(changes, scale_factor=float(by), mode="bilinear")
        return changes[:, :FLOW] * by, changes[:, FLOW:]


class InterpolationNetwork(nn.Module):
    """Computes the frame halfway between two frames, (n, 3, h, w) in -1 to 1; sides are multiples of `MULTIPLE`.

    Only convolutions have the dtype of the weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            Stage(given_channels(number), scale, width) for number, (scale, width) in enumerate(STAGES)
        )
        self.refine = nn.Sequential(
            _convolution(refined_channels(), REFINED),
            _convolution(REFINED, REFINED),
            _convolution(REFINED, REFINED),
            nn.Conv2d(REFINED, 3, 3, 1, 1),
        )

    def forward(self, before: Tensor, after: Tensor, smaller: int = 1) -> list[Tensor]:
        """Return the frame as each stage has it, float32, the best last.

        Args:
            before, after: float32.
            smaller: estimate the motion in frames so many times smaller; sides are multiples of `MULTIPLE` times it.
        """
        full = before, after
        before, after = reduced(before, smaller), reduced(after, smaller)
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
        given = torch.cat([both, *warped, mixed, flow / _FLOW_UNIT, mask], 1)
        return [*made, mixed + self.refine(given.to(next(self.refine.parameters()).dtype)).float()]


def _mixed(before: Tensor, after: Tensor, flow: Tensor, mask: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the mixture of both frames moved, and both."""
    warped = moved(before, flow[:, :2]), moved(after, flow[:, 2:])
    return torch.lerp(warped[1], warped[0], mask.sigmoid()), warped


class InterpolatorForm(nn.Module):
    """The program `interpolator`, see `engines.programs`: frames of any size, and colors in 0 to 1."""

    def __init__(self, network: InterpolationNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, latent_frames: Tensor) -> Tensor:
        """Return the frames halfway between two, (n, 3, h, w) float32 in about 0 to 1.

        Args:
            latent_frames: both, (n, 6, h, w) float32 in 0 to 1.
        """
        height, width = latent_frames.shape[2:]
        smaller = smaller_for(width, height)
        multiple = MULTIPLE * smaller
        colors = latent_frames.float() * 2 - 1
        padding = (0, -width % multiple, 0, -height % multiple)
        padded = F.pad(colors, padding, mode="replicate") if any(padding) else colors
        made: Tensor = self.network(padded[:, :3], padded[:, 3:], smaller)[-1]
        return (made[..., :height, :width] + 1) / 2
