"""Measure the shapes of subjects: fit the renderer's own silhouette to what the segmenter finds in each frame.

    python -m tools.diorama.shape --weights weights --models runtime/models/embedded/diorama --json shapes.json

A silhouette is fitted over place, size, turn, squash, side and phase of its motion. Per frame: the overlap with the
segmented subject (IoU), and the mean distance of the subject's edge from the silhouette's, in pixels. ``weights`` holds
the segmenter. Renders, renders through the VAE, and ellipses instead of subjects show what the numbers mean.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import WanPipeline
from torch import Tensor

from tools.diorama import captions, grade, motion, nets, sdf, segment, training, world
from tools.diorama.render import RIM, Renderer, outline, to_uint8
from tools.diorama.subjects import CARRIAGE, PAINTERS
from tools.diorama.world import Scenes

LOG = logging.getLogger(__name__)
SEED = 31_400
STRIDE = 2  # of the frames measured
OMIT = 0.85  # how often a brief prompt leaves out what is usual
TURNS, PHASES, CELLS = 20, 4, 36  # of the coarse search
CANDIDATES, STEPS = 6, 45  # of the fine search
SIZES = (0.7, 1.35)  # of a silhouette, relative to the usual size
WINDOW = 72  # pixels on each side; a subject has at most 63
KEPT = slice(None, None, 5)  # clips of which frames are kept


@dataclass(frozen=True)
class Fit:
    """Per frame measured: overlap, edge distance in pixels and fitted size in pixels, all (N, T)."""

    iou: Tensor
    edge: Tensor
    size: Tensor


def requests(count: int, seed: int = SEED) -> tuple[Scenes, list[str], Tensor]:
    """Scenes with one subject, prompts, and which of them are brief, (N,) bool: half.

    Full prompts state everything, and 3 of 8 have a combination held out from training. Brief ones are as people write:
    they leave out most of what is usual.
    """
    half = count // 2
    hard = round(half * grade.HELD_OUT_SHARE)
    parts = [
        world.sample(hard, seed, keep="held_out", two_subjects=0),
        world.sample(half - hard, seed + 1, two_subjects=0),
        world.sample(count - half, seed + 2, keep="any", two_subjects=0, usual=1.0),
    ]
    scenes = world.join(parts)
    rng = random.Random(seed)
    brief = torch.arange(count) >= half
    prompts = []
    for i in range(count):
        known = captions.facts(scenes, i)
        prompts.append(captions.prompt(captions.brief(known, rng, OMIT) if brief[i] else known, rng))
    return scenes, prompts, brief


@torch.no_grad()
def find(model: segment.Segmenter, clips: Tensor) -> Tensor:
    """(N, 3, T, H, W) in -1..1 to (N, T, H, W), 0 to 1: where the subject is, the largest in each frame."""
    device = next(model.parameters()).device
    parts = []
    for clip in clips.split(16):
        frames = clip.to(device).transpose(1, 2).flatten(0, 1)
        with training.autocast(device):
            parts.append(largest(model(frames).float().sigmoid()).unflatten(0, (len(clip), -1)))
    return torch.cat(parts)


def largest(masks: Tensor, gap: int = 2) -> Tensor:
    """``masks`` (M, H, W) without all but the largest region; parts up to twice ``gap`` pixels apart are one region."""
    count, height, width = masks.shape
    wide = F.max_pool2d(masks[:, None], 2 * gap + 1, 1, gap) > 0.5
    label = (
        torch.arange(1, height * width + 1, device=masks.device, dtype=torch.float32).view(1, 1, height, width) * wide
    )
    for step in range(4 * max(height, width)):
        before, label = label, F.max_pool2d(label, 3, 1, 1) * wide
        if step % 16 == 0 and torch.equal(before, label):
            break
    label = (label[:, 0] * (masks > 0.5)).long()
    sizes = torch.zeros(count, height * width + 1, device=masks.device)
    sizes.scatter_add_(1, label.flatten(1), masks.flatten(1))
    sizes[:, 0] = 0
    best = sizes.argmax(1)
    keep = (label == best[:, None, None]) & (best > 0)[:, None, None]
    return masks * (F.max_pool2d(keep[:, None].float(), 3, 1, 1)[:, 0] > 0)


def ellipses(masks: Tensor) -> Tensor:
    """(M, H, W): ellipses with the area, centre and second moments of ``masks``."""
    height, width = masks.shape[1:]
    ys, xs = (torch.arange(n, device=masks.device, dtype=torch.float32) for n in (height, width))
    area = masks.sum((1, 2)).clamp(min=1e-3)
    cx, cy = (masks.sum(1) @ xs) / area, (masks.sum(2) @ ys) / area
    dx, dy = xs - cx[:, None], ys - cy[:, None]
    xx, yy = (masks.sum(1) * dx * dx).sum(1) / area + 0.1, (masks.sum(2) * dy * dy).sum(1) / area + 0.1
    xy = torch.einsum("mhw,mw,mh->m", masks, dx, dy) / area
    far = xx[:, None, None] * (dy * dy)[:, :, None] + yy[:, None, None] * (dx * dx)[:, None, :]
    far = (far - 2 * xy[:, None, None] * dy[:, :, None] * dx[:, None, :]) / (xx * yy - xy * xy)[:, None, None]
    return (far < 4).float()


def _distance(name: str, x: Tensor, y: Tensor, clock: Tensor) -> Tensor:
    """Distance to the silhouette of ``name`` in its own frame."""
    return outline(PAINTERS[name](x, y, clock))


@dataclass(frozen=True)
class Templates:
    """A subject's silhouettes in its own frame: ``inside`` (phases, cells, cells), their areas and centroids, the grid
    ``x`` and ``y`` of cells, and the K combinations of ``phase``, ``turn`` and ``side`` to try."""

    inside: Tensor
    area: Tensor
    centroid: Tensor
    x: Tensor
    y: Tensor
    clocks: Tensor
    phase: Tensor
    turn: Tensor
    side: Tensor

    def offset(self, index: Tensor) -> Tensor:
        """(..., 2): where the centroids of combinations ``index`` lie from the subject's centre, at size 1."""
        x, y = self.centroid[self.phase[index]].unbind(-1)
        sin, cos = self.turn[index].sin(), self.turn[index].cos()
        return torch.stack([self.side[index] * (x * cos - y * sin), x * sin + y * cos], -1)


def templates(name: str, device: torch.device) -> Templates:
    """The silhouettes of subject ``name`` that the coarse search tries."""
    line = (torch.arange(CELLS, device=device) + 0.5) / CELLS * 2.5 - 1.25
    y, x = torch.meshgrid(line, line, indexing="ij")
    clocks = torch.arange(PHASES, device=device) * (0.67 / PHASES)
    rim = RIM * 2 / 112 / motion.SOLO_SIZE
    inside = (_distance(name, x[None, None], y[None, None], clocks[:, None, None, None])[:, 0] < rim).float()
    cell = (2.5 / CELLS) ** 2
    area = inside.sum((1, 2)) * cell
    centroid = torch.stack([(inside * v).sum((1, 2)) for v in (x, y)], -1) * cell / area[:, None]
    turns = torch.linspace(-0.8, 0.8, TURNS, device=device)
    if CARRIAGE[name] in ("points", "rolls"):
        turns = torch.arange(TURNS, device=device) * (2 * math.pi / TURNS)
    two_sided = CARRIAGE[name] in ("faces", "points")
    sides = torch.tensor([1.0, -1.0] if two_sided else [1.0], device=device)
    phase, turn, side = torch.cartesian_prod(torch.arange(PHASES, device=device).float(), turns, sides).unbind(1)
    return Templates(inside, area, centroid, x, y, clocks, phase.long(), turn, side)


def _coarse(name: str, masks: Tensor, unit: float) -> Tensor:
    """(M, CANDIDATES, 7) poses for ``masks`` (M, H, W): centre x, y and size in pixels, turn, side, squash, clock."""
    device = masks.device
    height, width = masks.shape[1:]
    ys, xs = (torch.arange(n, device=device) + 0.5 for n in (height, width))
    area = masks.sum((1, 2)).clamp(min=1.0)
    centre = torch.stack([(masks.sum(1) @ xs) / area, (masks.sum(2) @ ys) / area], -1)
    t = templates(name, device)
    cell = (2.5 / CELLS) ** 2
    sin, cos = t.turn.sin()[:, None, None], t.turn.cos()[:, None, None]
    ax, ay = (v - t.centroid[t.phase][:, k, None, None] for k, v in enumerate((t.x, t.y)))
    dx, dy = t.side[:, None, None] * (ax * cos - ay * sin), ax * sin + ay * cos  # (K, cells, cells)
    size = (area[:, None] / t.area[t.phase]).sqrt().clamp(SIZES[0] * unit, SIZES[1] * unit)  # (M, K)
    result = []
    for mask, middle, scale, whole in zip(masks.split(8), centre.split(8), size.split(8), area.split(8), strict=True):
        px = middle[:, 0, None, None, None] + scale[:, :, None, None] * dx
        py = middle[:, 1, None, None, None] + scale[:, :, None, None] * dy
        points = torch.stack([2 * px / width - 1, 2 * py / height - 1], -1).flatten(2, 3)
        cover = F.grid_sample(mask[:, None], points, align_corners=False)[:, 0].unflatten(2, (CELLS, CELLS))
        overlap = (cover * t.inside[t.phase]).sum((2, 3)) * cell * scale.square()
        iou = overlap / (whole[:, None] + t.area[t.phase] * scale.square() - overlap)
        best = iou.topk(CANDIDATES, 1).indices
        chosen = scale.gather(1, best)
        place = middle[:, None] - chosen[..., None] * t.offset(best)
        squash = torch.ones_like(chosen)
        clock = t.clocks[t.phase[best]]
        result.append(torch.stack([*place.unbind(-1), chosen, t.turn[best], t.side[best], squash, clock], -1))
    return torch.cat(result)


def _signed(name: str, poses: Tensor, xs: Tensor, ys: Tensor) -> Tensor:
    """(P, h, w) distances in pixels from silhouettes in ``poses`` (P, 7), at pixels ``xs`` (P, w) and ``ys`` (P, h)."""
    size, turn, side, squash, clock = (v[:, None, None, None] for v in poses[:, 2:].unbind(1))
    dx, dy = (xs - poses[:, :1])[:, None, None, :], (ys - poses[:, 1:2])[:, None, :, None]
    lx, ly = sdf.rotate(dx * side / size, dy / size / squash, turn)
    return (_distance(name, lx, ly, clock) * size)[:, 0] - RIM


def _crop(masks: Tensor, centre: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Windows of ``masks`` (M, H, W) around ``centre`` (M, 2), and the pixels' x (M, w) and y (M, h)."""
    count, height, width = masks.shape
    device = masks.device
    span = torch.tensor([min(WINDOW, width), min(WINDOW, height)], device=device)
    corner = torch.minimum(
        (centre - span / 2).round().clamp(min=0), torch.tensor([width, height], device=device) - span
    )
    columns, rows = (corner[:, k : k + 1] + torch.arange(int(span[k]), device=device) for k in (0, 1))
    index = torch.arange(count, device=device)[:, None, None]
    return masks[index, rows.long()[:, :, None], columns.long()[:, None]], columns + 0.5, rows + 0.5


def _fine(name: str, masks: Tensor, poses: Tensor, unit: float) -> tuple[Tensor, ...]:
    """The best of ``poses`` (M, C, 7) after gradient steps: IoU, edge distance and size, (M,) each."""
    count, candidates = poses.shape[:2]
    target, xs, ys = (v.repeat_interleave(candidates, 0) for v in _crop(masks, poses[:, 0, :2]))
    area = masks.sum((1, 2)).clamp(min=1.0).repeat_interleave(candidates, 0)
    # Steps of Adam are as large as its rate in these units.
    units = torch.tensor([0.35, 0.35, 0.2, 0.03, 0.0, 0.015, 0.02], device=masks.device)
    start = poses.flatten(0, 1)
    change = torch.zeros_like(start, requires_grad=True)
    adam = torch.optim.Adam([change], lr=1.0, betas=(0.8, 0.95))

    def current() -> Tensor:
        x, y, size, turn, side, squash, clock = (start + change * units).unbind(1)
        size, squash = size.clamp(SIZES[0] * unit, SIZES[1] * unit), squash.clamp(0.78, 1.05)
        return torch.stack([x, y, size, turn, side, squash, clock], 1)

    for step in range(STEPS):
        adam.param_groups[0]["lr"] = 1.0 - 0.9 * step / STEPS
        cover = torch.sigmoid(_signed(name, current(), xs, ys) * (-1.5 - 1.5 * step / STEPS))
        overlap = (cover * target).sum((1, 2))
        loss = (1 - overlap / (area + cover.sum((1, 2)) - overlap)).sum()
        (change.grad,) = torch.autograd.grad(loss, [change])
        change.grad.nan_to_num_(0.0)
        adam.step()
    with torch.no_grad():
        distance = _signed(name, current(), xs, ys)
        subject = target > 0.5
        overlap = (subject & (distance < 0)).sum((1, 2))
        total = (masks > 0.5).sum((1, 2)).repeat_interleave(candidates)
        iou = overlap / (total + (distance < 0).sum((1, 2)) - overlap).clamp(min=1)
        core = -F.max_pool2d(-subject[:, None].float(), 3, 1, 1)[:, 0] > 0.5
        rim = subject & ~core
        edge = ((distance + 0.5).abs() * rim).sum((1, 2)) / rim.sum((1, 2)).clamp(min=1)
        edge = torch.where(rim.flatten(1).any(1), edge, torch.full_like(edge, unit))
        best = iou.unflatten(0, (count, candidates)).argmax(1, keepdim=True)
        values = (iou, edge, current()[:, 2])
        return tuple(v.unflatten(0, (count, candidates)).gather(1, best)[:, 0] for v in values)


def fit(masks: Tensor, scenes: Scenes, chunk: int = 256) -> Fit:
    """How well the silhouette of each scene's first subject fits ``masks`` (N, T, H, W) of one subject each."""
    count, shown, height, width = masks.shape
    unit = motion.SOLO_SIZE * min(height, width) / 2
    result = {f.name: torch.zeros(count, shown) for f in fields(Fit)}
    for code, name in enumerate(world.SUBJECTS):
        index = (scenes.subject[:, 0] == code).nonzero()[:, 0]
        parts = []
        for part in masks[index.to(masks.device)].flatten(0, 1).split(chunk) if len(index) else ():
            parts.append(_fine(name, part, _coarse(name, part, unit), unit))
        for key, values in zip(result, zip(*parts, strict=True), strict=False):
            result[key][index] = torch.cat(values).float().cpu().unflatten(0, (len(index), shown))
    return Fit(**result)


def table(fits: Fit, scenes: Scenes, brief: Tensor) -> dict[str, dict[str, float]]:
    """Figures of all clips, of the full and the brief prompts, and by subject."""
    rows = {"all": torch.ones_like(brief), "full": ~brief, "brief": brief, "held_out": world.held_out(scenes) & ~brief}
    rows |= {name: scenes.subject[:, 0] == code for code, name in enumerate(world.SUBJECTS)}
    result = {}
    for name, mask in rows.items():
        if not mask.any():
            continue
        iou, edge, size = (getattr(fits, f.name)[mask] for f in fields(Fit))
        change = iou.diff(dim=1).abs() if iou.shape[1] > 1 else iou * 0
        growth = size.log().diff(dim=1).abs() if iou.shape[1] > 1 else iou * 0
        result[name] = {
            "clips": int(mask.sum()), "iou": float(iou.mean()), "p10": float(iou.flatten().quantile(0.1)),
            "edge": float(edge.mean()), "change": float(change.mean()), "growth": float(growth.mean()),
        }  # fmt: skip
    return result


def show(name: str, rows: dict[str, dict[str, float]], *, subjects: bool = True) -> None:
    """Log a table."""
    for row, values in rows.items():
        if subjects or row not in world.SUBJECTS:
            text = " ".join(f"{k} {v:.3f}" for k, v in values.items() if k != "clips")
            LOG.info("%-28s %-10s %4d  %s", name, row, values["clips"], text)


@torch.no_grad()
def generate(pipe: WanPipeline, prompts: list[str], settings: dict[str, Any], batch: int, seed: int = SEED) -> Tensor:
    """(N, 3, T, H, W) in -1..1 in float16, one seed per prompt; decoded at once, in bfloat16 on a GPU."""
    device = pipe.device
    mean, std = nets.statistics(pipe.vae)
    clips = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        latents = pipe(
            prompt=part, negative_prompt=[""] * len(part), width=settings["width"], height=settings["height"],
            num_frames=settings["frames"], num_inference_steps=int(settings["steps"]),
            guidance_scale=settings["guidance_scale"], guidance_scale_2=settings["guidance_scale_2"],
            generator=[torch.Generator().manual_seed(seed + start + i) for i in range(len(part))], output_type="latent",
        ).frames  # fmt: skip
        for few in (latents.float() * std + mean).split(32):
            with training.autocast(device):
                clips.append(nets.decode_clip(pipe.vae, few).clamp(-1, 1).half().cpu())
    return torch.cat(clips)


def settings_of(spec: str, device: torch.device) -> tuple[WanPipeline, dict[str, Any]]:
    """The pipeline and settings of FOLDER or FOLDER@steps,guidance,guidance_2,flow_shift."""
    folder, _, numbers = spec.partition("@")
    steps, scale, scale_2, shift = map(float, numbers.split(",")) if numbers else (None,) * 4
    pipe, settings = grade.load(Path(folder), device, shift)
    if steps is not None:
        settings |= {"steps": steps, "guidance_scale": scale, "guidance_scale_2": scale_2}
    return pipe, settings


@torch.no_grad()
def calibrate(
    model: segment.Segmenter, pipe: WanPipeline, scenes: Scenes, brief: Tensor, device: torch.device
) -> dict[str, Any]:
    """The tables of renders, renders through the VAE of ``pipe``, and ellipses instead of the renders' subjects."""
    renderer = Renderer((192, 112), 33, device)
    strided = Renderer((192, 112), 33, device, STRIDE)
    masks: dict[str, list[Tensor]] = {"true": [], "render": [], "vae": [], "ellipse": []}
    for start in range(0, len(scenes), 16):
        part = scenes[slice(start, start + 16)]
        true = strided.masks(part)
        clip = renderer(part).transpose(1, 2)
        with training.autocast(device):
            again = nets.decode_clip(pipe.vae, nets.encode_clip(pipe.vae, clip)[0]).float().clamp(-1, 1)
        masks["true"].append(true)
        masks["render"].append(find(model, clip[:, :, ::STRIDE]))
        masks["vae"].append(find(model, again[:, :, ::STRIDE]))
        masks["ellipse"].append(ellipses(true.flatten(0, 1)).unflatten(0, true.shape[:2]))
    result = {}
    for name, parts in masks.items():
        with torch.enable_grad():
            result[name] = table(fit(torch.cat(parts), scenes), scenes, brief)
        show(name, result[name], subjects=name in ("vae", "ellipse"))
    return result


def main() -> None:
    """Calibrate, then measure every model given, on the same prompts and seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True, help="holds the segmenter")
    parser.add_argument("--models", nargs="+", required=True, help="FOLDER or FOLDER@steps,guidance,guidance_2,shift")
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--clips", type=Path, default=None, help="keep a few frames of each model's clips, uint8")
    parser.add_argument("--no-calibration", action="store_true")
    args = parser.parse_args()
    *_, device = training.start()
    model = segment.load(args.weights, device)
    scenes, prompts, brief = requests(args.count)
    results: dict[str, Any] = {}
    frames: dict[str, Any] = {"prompts": prompts[KEPT]}
    for number, spec in enumerate(args.models):
        began = time.monotonic()
        pipe, settings = settings_of(spec, device)
        if number == 0 and not args.no_calibration:
            results |= calibrate(model, pipe, scenes, brief, device)
            LOG.info("calibrated in %.0f s", time.monotonic() - began)
            began = time.monotonic()
        clips = generate(pipe, prompts, settings, args.batch)
        made = time.monotonic()
        results[spec] = table(fit(find(model, clips[:, :, ::STRIDE].float()), scenes), scenes, brief)
        show(spec[-28:], results[spec])
        LOG.info("%s: %.0f s to generate, %.0f s to measure", spec, made - began, time.monotonic() - made)
        frames[spec] = to_uint8(clips[KEPT][:, :, (2, 16, 30)].transpose(1, 2))
        if args.json:
            args.json.write_text(json.dumps(results, indent=1))
    if args.clips:
        torch.save(frames, args.clips)


if __name__ == "__main__":
    main()
