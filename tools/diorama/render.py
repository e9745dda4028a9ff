"""Render batches of scenes on CPU or GPU. A scene looks the same in any batch and crop.

Knows nothing about captions. Pictures come as (B, T, 3, H, W) in -1..1, as the VAE wants them after a transpose.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.diorama import backdrops, motion, sdf
from tools.diorama.subjects import PAINTERS, PAINTS
from tools.diorama.world import BACKDROPS, COLOURS, SUBJECTS, TIMES, WEATHERS, Scenes

COLOUR_RGB = {
    "red": (0.88, 0.16, 0.17), "orange": (0.97, 0.53, 0.10), "yellow": (0.99, 0.83, 0.16), "green": (0.16, 0.66, 0.30),
    "blue": (0.13, 0.38, 0.88), "purple": (0.50, 0.24, 0.72), "pink": (0.99, 0.48, 0.74), "white": (0.97, 0.97, 0.97),
}  # fmt: skip
SHADOW = 0.42
RIM = 1.3  # width of the pale edge around a subject, in pixels
REACH = 1.42  # no part of a subject, its shadow included, is farther from its centre, in sizes


def _alpha(distance: Tensor, pixel: float) -> Tensor:
    """Coverage 0..1 of an edge blurred over one and a half pixels."""
    return F.hardsigmoid(distance * (-4 / pixel))


def _flat(colour: Tensor, canvas: Tensor) -> Tensor:
    return colour[:, None, :, None, None].to(canvas.dtype)


def _paint(canvas: Tensor, colour: Tensor, distance: Tensor, pixel: float, opacity: Tensor | float = 1.0) -> None:
    """Lay ``colour`` (n, 3 or n, 1, 3, H, W) on ``canvas`` where ``distance`` (n, T or 1, H, W) is negative."""
    alpha = _alpha(distance, pixel).to(canvas.dtype)
    if not isinstance(opacity, float) or opacity < 1:
        alpha = alpha * opacity
    colour = _flat(colour, canvas) if colour.dim() == 2 else colour.to(canvas.dtype)
    canvas.lerp_(colour, alpha.unsqueeze(2).expand(-1, -1, 3, -1, -1))


def _shade(canvas: Tensor, distance: Tensor, reach: float, strength: Tensor | float = SHADOW) -> None:
    """Darken ``canvas`` softly around where ``distance`` is negative."""
    soft = F.hardsigmoid(distance * (-3 / reach))
    canvas.mul_((1 - strength * (soft * soft * (3 - 2 * soft))).to(canvas.dtype).unsqueeze(2))


def _shift(field: Tensor, right: int, down: int) -> Tensor:
    """``field`` shifted by whole pixels, with its border repeated."""
    height, width = field.shape[-2:]
    rows = (torch.arange(height, device=field.device) - down).clamp(0, height - 1)
    columns = (torch.arange(width, device=field.device) - right).clamp(0, width - 1)
    return field[..., rows, :][..., columns]


def outline(parts: list[tuple[Tensor, str]]) -> Tensor:
    """Distance to all ``parts`` of a subject together, in its own frame."""
    union = parts[0][0]
    for distance, _ in parts[1:]:
        union = torch.minimum(union, distance)
    return union


class Renderer:
    """Draws scenes at one size.

    ``size`` is (width, height) of the full picture in pixels; ``crop`` (width, height) draws a window of it only,
    its corner per scene given to ``__call__``. With ``stride`` only every so many of the ``frames`` are drawn.
    """

    def __init__(self, size: tuple[int, int], frames: int, device: torch.device | str = "cpu", stride: int = 1) -> None:
        self.size, self.frames, self.device, self.stride = size, frames, torch.device(device), stride
        self.shown = len(range(0, frames, stride))
        self.dtype = torch.float16 if self.device.type == "cuda" else torch.float32  # of the canvas
        short = min(size)
        self.unit = short / 2
        self.pixel = 2 / short
        self.extent = (size[0] / short, size[1] / short)

    @torch.no_grad()
    def __call__(self, scenes: Scenes, crop: tuple[int, int] | None = None, corner: Tensor | None = None) -> Tensor:
        """(B, T, 3, H, W) in -1..1. ``corner`` is (B, 2) in pixels (x, y), needed with ``crop``."""
        count = len(scenes)
        width, height = crop or self.size
        offset = torch.zeros(count, 2) if corner is None else corner.float()
        offset = offset.to(self.device)
        xs = (offset[:, :1] + torch.arange(width, device=self.device) + 0.5 - self.size[0] / 2) / self.unit
        ys = (offset[:, 1:] + torch.arange(height, device=self.device) + 0.5 - self.size[1] / 2) / self.unit
        x, y = xs[:, None, None, :], ys[:, None, :, None]
        t = (torch.arange(0, self.frames, self.stride, device=self.device) / motion.FPS)[None, :, None, None]
        canvas = self._sky(scenes, x, y, t)
        for name, index in self._groups(scenes.backdrop, BACKDROPS):
            canvas[index] = self._ground(name, canvas[index], scenes[index.cpu()], x[index], y[index], t)
        for slot in (0, 1):
            self._subjects(canvas, scenes, slot, offset, t)
        self._weather(canvas, scenes, x, y, t)
        return canvas.float().clamp(0, 1) * 2 - 1

    def _groups(self, codes: Tensor, names: tuple[str, ...]) -> list[tuple[str, Tensor]]:
        found = ((name, (codes == k).nonzero()[:, 0]) for k, name in enumerate(names))
        return [(name, index.to(self.device)) for name, index in found if len(index)]

    def _of(self, table: dict, names: tuple[str, ...], codes: Tensor) -> Tensor:
        return torch.tensor([table[n] for n in names], device=self.device)[codes.to(self.device)]

    def _wide(self, values: Tensor) -> Tensor:
        """(n,) numbers as (n, 1, 1, 1) on the device."""
        return values.to(self.device).float()[:, None, None, None]

    def _sky(self, scenes: Scenes, x: Tensor, y: Tensor, t: Tensor) -> Tensor:
        device, pixel = self.device, self.pixel
        seed = self._wide(scenes.jitter[:, 20])
        raining = (scenes.weather == WEATHERS.index("rain")).to(device)[:, None].float()
        snowing = (scenes.weather == WEATHERS.index("snow")).to(device)[:, None].float()
        sky = self._of(backdrops.SKY, TIMES, scenes.time)  # (B, 3 stops, 3)
        grey = sky.mean(-1, keepdim=True) * torch.tensor([0.84, 0.90, 1.0], device=device)
        sky = torch.lerp(sky, grey, 0.38 * raining[:, :, None] + 0.18 * snowing[:, :, None])
        v = y / self.extent[1]
        upper = ((v + 1) / 0.75).clamp(0, 1).unsqueeze(2)
        lower = ((v + 0.25) / 0.6).clamp(0, 1).unsqueeze(2)
        top, middle, horizon = (sky[:, k][:, None, :, None, None] for k in range(3))
        still = torch.lerp(torch.lerp(top, middle, upper), horizon, lower).expand(-1, -1, -1, -1, x.shape[3]).clone()

        # Sun or moon with a soft halo.
        sun = self._of({k: r[0] for k, r in backdrops.SUN.items()}, TIMES, scenes.time)
        place = self._of({k: r[1:] for k, r in backdrops.SUN.items()}, TIMES, scenes.time)
        nudge = self._wide(scenes.jitter[:, 19] - 0.5) * 0.24
        sx = x - (self._wide(place[:, 0]) + nudge) * self.extent[0]
        sy = y - self._wide(place[:, 1]) * self.extent[1]
        radius = self._wide(place[:, 2])
        disc = sdf.circle(sx, sy, radius)
        bite = sdf.circle(sx - 0.11, sy + 0.07, radius * 0.86)
        is_night = (scenes.time == TIMES.index("night")).to(device)[:, None, None, None]
        disc = torch.where(is_night, torch.maximum(disc, -bite), disc)
        halo = (1 - (torch.hypot(sx, sy) - radius) / 0.34).clamp(0, 1) * 0.30
        still.lerp_(_flat(sun, still).expand_as(still), halo.unsqueeze(2).expand_as(still))
        canvas = still.expand(-1, self.shown, -1, -1, -1).to(self.dtype, copy=True)

        clear = scenes.weather == WEATHERS.index("clear")
        index = ((scenes.time == TIMES.index("night")) & clear).nonzero()[:, 0].to(device)
        if len(index):
            local = canvas[index]
            paper = torch.tensor([[1.0, 0.96, 0.80]], device=device)
            _paint(local, paper, backdrops.stars(x[index], y[index], t, seed[index]), pixel, 0.9)
            canvas[index] = local
        _paint(canvas, sun, disc, pixel)
        self._clouds(canvas, scenes, x, y + self.extent[1] - 1, t)
        return canvas

    def _clouds(self, canvas: Tensor, scenes: Scenes, x: Tensor, y: Tensor, t: Tensor) -> None:
        """Small clouds in fair weather, else a bank; ``y`` is 0 in the middle of a wide picture's sky."""
        device, pixel = self.device, self.pixel
        seed = self._wide(scenes.jitter[:, 20])
        clear = scenes.weather == WEATHERS.index("clear")
        snowing = (scenes.weather == WEATHERS.index("snow")).to(device)[:, None].float()
        cloud = self._of(backdrops.CLOUD, TIMES, scenes.time)
        index = clear.nonzero()[:, 0].to(device)
        if len(index):
            local = canvas[index]
            drifting = backdrops.drifting_clouds(x[index], y[index], t, seed[index], 1.25, -0.78)
            _shade(local, _shift(drifting, 0, 2), 0.07, 0.16)
            _paint(local, cloud[index], drifting, pixel, 0.92)
            canvas[index] = local
        index = (~clear).nonzero()[:, 0].to(device)
        if len(index):
            # Clouds at the top distinguish rain and snow from clear weather in every frame.
            local = canvas[index]
            stormy = cloud[index] * torch.tensor([0.52, 0.56, 0.64], device=device)
            colour = torch.lerp(stormy, cloud[index] * 0.94, snowing[index])
            for edge, tone in ((-0.80, 0.86), (-0.93, 1.0)):
                where = torch.frac(seed[index] + edge + 1)
                bank = backdrops.scallops(x[index], y[index], t, where, edge, 0.40, up=False)
                _shade(local, _shift(bank, 1, 2), 0.08, 0.22)
                _paint(local, colour * tone, bank, pixel)
            canvas[index] = local

    def _ground(self, name: str, canvas: Tensor, scenes: Scenes, x: Tensor, y: Tensor, t: Tensor) -> Tensor:
        pixel, device = self.pixel, self.device
        v = y - 0.45 * (self.extent[1] - 1)  # tall pictures have more sky above and more ground below
        seed = self._wide(scenes.jitter[:, 20])
        tint = self._of(backdrops.CLOUD if name == "sky" else backdrops.GROUND_TINT, TIMES, scenes.time)
        raining = (scenes.weather == WEATHERS.index("rain")).to(device)[:, None].float()
        tint = torch.lerp(tint, tint.mean(-1, keepdim=True) * 0.92, 0.30 * raining)
        night = (scenes.time == TIMES.index("night")).to(device).float()[:, None]

        def colour(rgb: backdrops.Rgb) -> Tensor:
            return torch.tensor([rgb], device=device) * tint

        for layer, rgb in enumerate(backdrops.GROUND[name]):
            distance = backdrops.LAYERS[name](layer, x, v, t, seed)
            _shade(canvas, distance - 0.03, 0.10, 0.26)
            flat = _flat(colour(rgb), canvas)
            fall = ((v - (-0.1 + 0.28 * layer)) / 0.8).clamp(0, 1).unsqueeze(2).to(canvas.dtype)
            _paint(canvas, flat * (1 - 0.14 * fall), distance, pixel)
            if name == "city" and layer == 1:
                pane = torch.lerp(colour((0.80, 0.88, 0.95)), torch.tensor([[1.0, 0.84, 0.42]], device=device), night)
                _paint(canvas, pane, backdrops.windows(x, v, seed), pixel, 0.9)
            if layer == 1 and name in backdrops.GROWTH:
                shape, rgb_of_it = backdrops.GROWTH[name]
                plants = shape(x, v, t, seed)
                _shade(canvas, _shift(plants, 1, 1), 0.05, 0.25)
                _paint(canvas, colour(rgb_of_it), plants, pixel)
        return canvas

    def _subjects(self, canvas: Tensor, scenes: Scenes, slot: int, offset: Tensor, t: Tensor) -> None:
        """Draw subject ``slot`` of every scene that has one, in a window around it."""
        pose = motion.poses(scenes, slot, self.extent, self.frames)
        tint = self._of(backdrops.SUBJECT_TINT, TIMES, scenes.time)
        main = self._of(COLOUR_RGB, COLOURS, scenes.colour[:, slot].clamp(min=0))
        pale = (scenes.colour[:, slot] == COLOURS.index("white")).to(self.device)[:, None]
        dark = torch.where(pale, main * torch.tensor([0.80, 0.83, 0.90], device=self.device), main * 0.74)
        light = torch.where(pale, main * torch.tensor([0.90, 0.92, 0.97], device=self.device), 1 - (1 - main) * 0.62)
        rim = 1 - (1 - main) * 0.30
        clock = t + self._wide(scenes.jitter[:, 21 + slot]) * 5
        step = max(1, round(0.03 / self.pixel))
        height, width = canvas.shape[-2:]
        strides = torch.tensor(canvas.stride(), device=self.device)

        def by_frame(values: Tensor, index: Tensor) -> Tensor:
            return values[:, :: self.stride].to(self.device)[index][:, :, None, None]

        for name, index in self._groups(scenes.subject[:, slot], SUBJECTS):
            px, py, angle, squash = (by_frame(v, index) for v in (pose.x, pose.y, pose.angle, pose.squash))
            facing = by_frame(pose.facing.expand(-1, self.frames), index)
            size = self._wide(pose.size)[index]
            window = min(2 * round(REACH * motion.LARGEST * self.unit), height, width)
            corner_x = offset[index, :1][:, :, None, None]
            corner_y = offset[index, 1:][:, :, None, None]
            left = (px * self.unit + self.size[0] / 2 - corner_x - window / 2).round().clamp(0, width - window)
            above = (py * self.unit + self.size[1] / 2 - corner_y - window / 2).round().clamp(0, height - window)
            line = torch.arange(window, device=self.device)
            columns, rows = left + line, above + line[:, None]
            lx = (corner_x + columns + 0.5 - self.size[0] / 2) / self.unit - px
            ly = (corner_y + rows + 0.5 - self.size[1] / 2) / self.unit - py
            place = (
                index[:, None, None, None] * strides[0]
                + torch.arange(self.shown, device=self.device)[None, :, None, None] * strides[1]
                + rows.long() * strides[3]
                + columns.long()
            )
            channel = torch.arange(3, device=self.device)[None, None, :, None, None] * strides[2]
            place = place.unsqueeze(2) + channel
            local = canvas.view(-1)[place]

            parts = PAINTERS[name](*motion.local(lx, ly, (size, angle, facing, squash)), clock[index])
            union = outline(parts) * size
            _shade(local, _shift(union, step, round(1.5 * step)), 0.075)
            own = {"main": main[index], "dark": dark[index], "light": light[index]}
            _paint(local, rim[index] * tint[index], union - RIM * self.pixel, self.pixel)
            for distance, paint in parts:
                fixed = PAINTS[paint]
                flat = own[paint] if fixed is None else torch.tensor([fixed], device=self.device)
                _paint(local, flat * tint[index], distance * size, self.pixel)
            canvas.view(-1)[place] = local

    @torch.no_grad()
    def masks(self, scenes: Scenes) -> Tensor:
        """(B, T, H, W), 0 to 1: how much of each pixel subjects cover, their rims included."""
        xs, ys = (
            (torch.arange(n, device=self.device) + 0.5 - n / 2) / self.unit for n in self.size
        )  # fmt: skip
        t = (torch.arange(0, self.frames, self.stride, device=self.device) / motion.FPS)[None, :, None, None]
        cover = torch.zeros(len(scenes), self.shown, len(ys), len(xs), device=self.device)
        for slot in (0, 1):
            pose = motion.poses(scenes, slot, self.extent, self.frames)
            clock = t + self._wide(scenes.jitter[:, 21 + slot]) * 5
            shown = [
                v[:, :: self.stride].to(self.device)[:, :, None, None]
                for v in (pose.x, pose.y, pose.angle, pose.squash)
            ]
            for name, index in self._groups(scenes.subject[:, slot], SUBJECTS):
                px, py, angle, squash = (v[index] for v in shown)
                size, facing = self._wide(pose.size)[index], pose.facing.to(self.device)[index][:, :, None, None]
                place = motion.local(xs - px, ys[:, None] - py, (size, angle, facing, squash))
                union = outline(PAINTERS[name](*place, clock[index])) * size
                cover[index] = torch.maximum(cover[index], _alpha(union - RIM * self.pixel, self.pixel))
        return cover

    def _weather(self, canvas: Tensor, scenes: Scenes, x: Tensor, y: Tensor, t: Tensor) -> None:
        seed = self._wide(scenes.jitter[:, 23])
        looks = {"rain": (backdrops.rain, (0.74, 0.88, 1.0), 0.78), "snow": (backdrops.flakes, (1.0, 1.0, 1.0), 0.96)}
        for name, index in self._groups(scenes.weather, WEATHERS):
            if name == "clear":
                continue
            shape, rgb, opacity = looks[name]
            field = shape(x[index], y[index], t, seed[index])
            local = canvas[index]
            _shade(local, _shift(field, 1, 1), 0.035, 0.30)
            _paint(local, torch.tensor([rgb], device=self.device), field, self.pixel, opacity)
            canvas[index] = local


def laplacian_variance(clips: Tensor) -> Tensor:
    """(B, 3, T, H, W) in -1..1 to (B, T): how sharp each frame is, of its luminance in 0..1."""
    grey = (clips.float().clamp(-1, 1) * clips.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1, 1)).sum(1) / 2
    around = grey[..., :-2, 1:-1] + grey[..., 2:, 1:-1] + grey[..., 1:-1, :-2] + grey[..., 1:-1, 2:]
    return (around - 4 * grey[..., 1:-1, 1:-1]).flatten(2).var(2)


def to_uint8(clips: Tensor) -> Tensor:
    """(..., 3, H, W) in -1..1 to bytes (..., H, W, 3)."""
    return ((clips.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).movedim(-3, -1)
