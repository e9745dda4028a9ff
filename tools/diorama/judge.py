"""The judge: a small network, trained on renders only, that classifies what a clip shows.

python -m tools.diorama.judge --out weights --minutes 3
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
from tools.diorama.checkpoint import has_weights, load_weights, save_weights
from tools.diorama.render import Renderer
from tools.diorama.world import Scenes

LOG = logging.getLogger(__name__)
SIZE, FRAMES, STRIDE = (192, 112), 33, 4


def _block(wide: int, out: int, stride: int, reach: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(wide, out, (1, 3, 3), (1, stride, stride), (0, 1, 1), bias=False), nn.BatchNorm3d(out), nn.ReLU(),
        nn.Conv3d(out, out, (reach, 3, 3), 1, (reach // 2, 1, 1), bias=False), nn.BatchNorm3d(out),
    )  # fmt: skip


class Judge(nn.Module):
    """Reads (B, 3, 9, 112, 192), every fourth frame in -1..1, into logits per attribute.

    One map per subject says where it is; colours and the direction are read from there.
    """

    def __init__(self) -> None:
        super().__init__()
        widths, strides, reaches = (32, 32, 64, 128, 192), (1, 2, 2, 1), (1, 1, 3, 3)
        subjects = len(world.SUBJECTS)
        self.stem = nn.Sequential(
            nn.Conv3d(3, widths[0], (1, 5, 5), (1, 2, 2), (0, 2, 2)), nn.BatchNorm3d(widths[0]), nn.ReLU()
        )
        pairs = list(itertools.pairwise(widths))
        self.blocks = nn.ModuleList(_block(a, b, s, r) for (a, b), s, r in zip(pairs, strides, reaches, strict=True))
        self.shortcuts = nn.ModuleList(nn.Conv3d(a, b, 1, (1, s, s)) for (a, b), s in zip(pairs, strides, strict=True))
        self.maps = nn.Conv3d(widths[-1], subjects, 1)
        self.colour = nn.Sequential(nn.Linear(widths[-1], 128), nn.ReLU(), nn.Linear(128, len(world.COLOURS)))
        self.subject = nn.Sequential(nn.Linear(widths[-1], 128), nn.ReLU(), nn.Linear(128, subjects))
        self.whole = nn.Sequential(nn.Linear(2 * widths[-1], 256), nn.ReLU())
        self.path = nn.Sequential(nn.Linear(256 + subjects * 18, 256), nn.ReLU(), nn.Linear(256, len(world.MOTIONS)))
        self.plain = nn.ModuleDict(
            {"count": nn.Linear(256, 2), "backdrop": nn.Linear(256, len(world.BACKDROPS)),
             "time": nn.Linear(256, len(world.TIMES)), "weather": nn.Linear(256, len(world.WEATHERS))}
        )  # fmt: skip

    def forward(self, clip: Tensor) -> dict[str, Tensor]:
        """Logits; "subject" (B, subjects) ranks what is shown, "colour" is (B, subjects, colours)."""
        x = self.stem(clip)
        for block, shortcut in zip(self.blocks, self.shortcuts, strict=True):
            x = F.relu(block(x) + shortcut(x))
        maps, x = self.maps(x).float(), x.float()
        heat = maps.flatten(3).softmax(-1)  # of each frame
        frames = maps.flatten(3).logsumexp(-1)
        found = torch.einsum("bstp,bctp,bst->bsc", heat, x.flatten(3), frames.softmax(-1))
        own = self.subject(found).diagonal(dim1=1, dim2=2)
        heat = heat.unflatten(3, maps.shape[3:])
        rows = torch.linspace(-1, 1, maps.shape[3], device=maps.device)
        columns = torch.linspace(-1, 1, maps.shape[4], device=maps.device)
        seen = self.whole(torch.cat([x.mean((2, 3, 4)), x.amax((2, 3, 4))], 1))
        result = {k: head(seen) for k, head in self.plain.items()}
        result["subject"] = own + frames.logsumexp(-1)
        # The motion is visible only in the shown frames.
        share = result["subject"].softmax(1)[:, :, None]
        path = torch.cat([(heat.sum(4) @ rows) * share, (heat.sum(3) @ columns) * share], 2)
        result["motion"] = self.path(torch.cat([seen, path.flatten(1)], 1))
        result["colour"] = self.colour(found)
        return result


def present(scenes: Scenes) -> Tensor:
    """(B, subjects) 0 or 1."""
    shown = torch.zeros(len(scenes), len(world.SUBJECTS) + 1)
    shown.scatter_(1, scenes.subject % (len(world.SUBJECTS) + 1), 1.0)
    return shown[:, :-1]


def loss_of(logits: dict[str, Tensor], scenes: Scenes, device: torch.device) -> Tensor:
    """Sum of the losses of all heads."""
    shown = present(scenes).to(device)
    loss = F.cross_entropy(logits["subject"], shown / shown.sum(1, keepdim=True))
    loss = loss + F.cross_entropy(logits["count"], scenes.two.long().to(device))
    for name in ("motion", "backdrop", "time", "weather"):
        loss = loss + F.cross_entropy(logits[name], getattr(scenes, name).to(device))
    for slot in (0, 1):
        index = (scenes.subject[:, slot] >= 0).nonzero()[:, 0]
        picked = logits["colour"][index.to(device), scenes.subject[index, slot].to(device)]
        loss = loss + F.cross_entropy(picked, scenes.colour[index, slot].to(device))
    return loss


def verdict(logits: dict[str, Tensor], scenes: Scenes) -> dict[str, Tensor]:
    """(B,) bool per attribute: whether what the judge sees is what ``scenes`` asks for."""
    logits = {k: v.float().cpu() for k, v in logits.items()}
    wanted = present(scenes)
    kinds = wanted.sum(1).long()
    order = logits["subject"].argsort(1, descending=True)
    seen = torch.zeros_like(wanted)
    seen.scatter_(1, order[:, :1], 1.0)
    seen[kinds > 1] = seen[kinds > 1].scatter(1, order[kinds > 1, 1:2], 1.0)
    many = logits["count"].argmax(1) == scenes.two.long()
    result = {"subject": (seen == wanted).all(1) & many}
    rows = torch.arange(len(scenes))
    colour = torch.ones(len(scenes), dtype=torch.bool)
    for slot in (0, 1):
        subject = scenes.subject[:, slot]
        predicted = logits["colour"][rows, subject.clamp(min=0)].argmax(1)
        colour &= (predicted == scenes.colour[:, slot]) | (subject < 0)
    result["colour"] = colour
    for name in ("motion", "backdrop", "time", "weather"):
        result[name] = logits[name].argmax(1) == getattr(scenes, name)
    return result


def roughen(clip: Tensor) -> Tensor:
    """Blur, noise and a change of light, so that the judge reads generated clips as it reads renders."""
    count = clip.shape[0]
    pick = torch.rand(count, 1, 1, 1, 1, device=clip.device)
    soft = F.avg_pool3d(clip, (1, 3, 3), 1, (0, 1, 1))
    clip = torch.lerp(clip, soft, (pick * 1.6 - 0.6).clamp(min=0))
    clip = clip * (0.94 + 0.12 * torch.rand_like(pick)) + 0.06 * (torch.rand_like(pick) - 0.5)
    return clip + torch.randn_like(clip) * 0.08 * torch.rand_like(pick)


@torch.no_grad()
def measure(model: Judge, renderer: Renderer, device: torch.device, count: int, seed: int) -> dict[str, float]:
    """Share read right per attribute on fresh renders."""
    model.eval()
    found: dict[str, list[Tensor]] = {}
    for start in range(0, count, 64):
        scenes = world.sample(64, seed + start, keep="any")
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(renderer(scenes).transpose(1, 2))
        for name, right in verdict(logits, scenes).items():
            found.setdefault(name, []).append(right)
    model.train()
    return {name: float(torch.cat(parts).float().mean()) for name, parts in found.items()}


def main() -> None:
    """Train within the budget, measure on fresh renders and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, default=None)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--test", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()
    *_, device = training.start()
    torch.manual_seed(args.seed)
    model = Judge().to(device)
    training.channels_last(model)
    if has_weights(args.resume, "judge"):
        load_weights(model, args.resume, "judge")
    renderer = Renderer(SIZE, FRAMES, device, STRIDE)
    optimiser = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    clock = training.Clock(args.minutes, device)
    report = time.monotonic()
    while clock.tick():
        big = world.sample(args.batch * 4, args.seed * 7_000_003 + clock.steps, keep="any", two_subjects=0.4)
        clips = renderer(big).transpose(1, 2)
        for part in range(4):
            span = slice(part * args.batch, (part + 1) * args.batch)
            for group in optimiser.param_groups:
                group["lr"] = args.lr * clock.rate(20)
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(roughen(clips[span]).contiguous(memory_format=torch.channels_last_3d))
            loss = loss_of({k: v.float() for k, v in logits.items()}, big[span], device)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
        if time.monotonic() - report > 15:
            report = time.monotonic()
            LOG.info("judge: step %d, loss %.4f", clock.steps * 4, loss.detach())
    scores = measure(model, renderer, device, args.test, 424_242)
    LOG.info("judge: %d steps, on fresh renders %s", clock.steps * 4, {k: round(v, 4) for k, v in scores.items()})
    save_weights(model.state_dict(), args.out, "judge")


if __name__ == "__main__":
    main()
