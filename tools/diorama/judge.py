"""The judges: two small networks, trained on renders only, that classify what a clip shows.

    python -m tools.diorama.judge --out weights --minutes 5

One sees the clip. The other, "outlines", sees the edges of its luminance alone, so that shapes must be right.
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
from tools.diorama.nets import write_json
from tools.diorama.render import Renderer
from tools.diorama.world import Scenes

LOG = logging.getLogger(__name__)
SIZE, FRAMES, STRIDE = (192, 112), 33, 4
KINDS = {"judge": False, "outlines": True}  # the name of the weights, and whether it sees outlines alone


def _block(wide: int, out: int, stride: int, reach: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(wide, out, (1, 3, 3), (1, stride, stride), (0, 1, 1), bias=False), nn.BatchNorm3d(out), nn.ReLU(),
        nn.Conv3d(out, out, (reach, 3, 3), 1, (reach // 2, 1, 1), bias=False), nn.BatchNorm3d(out),
    )  # fmt: skip


class Judge(nn.Module):
    """Reads (B, 3, 9, 112, 192), every fourth frame in -1..1, into logits per attribute.

    One map per subject says where it is; colours and the direction are read from there. With ``outlines`` it sees the
    edges alone, and its answers on colour mean nothing.
    """

    def __init__(self, outlines: bool = False) -> None:
        super().__init__()
        self.outlines = outlines
        widths, strides, reaches = (32, 32, 64, 128, 192), (1, 2, 2, 1), (1, 1, 3, 3)
        subjects = len(world.SUBJECTS)
        self.stem = nn.Sequential(
            nn.Conv3d(1 if outlines else 3, widths[0], (1, 5, 5), (1, 2, 2), (0, 2, 2)),
            nn.BatchNorm3d(widths[0]),
            nn.ReLU(),
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
        x = self.stem(edges(clip) if self.outlines else clip)
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


def edges(clip: Tensor) -> Tensor:
    """(B, 3, T, H, W) in -1..1 to (B, 1, T, H, W) in 0..1: how steep the luminance is, strong edges much alike."""
    grey = (clip * clip.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1, 1)).sum(1, keepdim=True).float()
    grey = F.pad(grey, (1, 1, 1, 1, 0, 0), mode="replicate")
    right = grey[..., 1:-1, 2:] - grey[..., 1:-1, :-2]
    down = grey[..., 2:, 1:-1] - grey[..., :-2, 1:-1]
    steep = (right.square() + down.square() + 1e-8).sqrt()
    return steep / (steep + 0.1)


def present(scenes: Scenes) -> Tensor:
    """(B, subjects) 0 or 1."""
    shown = torch.zeros(len(scenes), len(world.SUBJECTS) + 1)
    shown.scatter_(1, scenes.subject % (len(world.SUBJECTS) + 1), 1.0)
    return shown[:, :-1]


def loss_of(logits: dict[str, Tensor], scenes: Scenes, device: torch.device, *, colours: bool = True) -> Tensor:
    """Sum of the losses of all heads, without the colour's where the network sees no ``colours``."""
    shown = present(scenes).to(device)
    loss = F.cross_entropy(logits["subject"], shown / shown.sum(1, keepdim=True))
    loss = loss + F.cross_entropy(logits["count"], scenes.two.long().to(device))
    for name in ("motion", "backdrop", "time", "weather"):
        loss = loss + F.cross_entropy(logits[name], getattr(scenes, name).to(device))
    for slot in (0, 1) if colours else ():
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


def load(folder: Path, device: torch.device) -> dict[str, Judge]:
    """Both judges of ``folder``, ready to judge."""
    models = {name: Judge(outlines).to(device).eval() for name, outlines in KINDS.items()}
    for name, model in models.items():
        load_weights(model, folder, name)
    return models


@torch.no_grad()
def measure(
    models: dict[str, Judge], renderer: Renderer, device: torch.device, count: int, seed: int, *, midway: bool = False
) -> dict[str, dict[str, float]]:
    """Share read right per attribute on fresh renders, of each judge."""
    found: dict[str, dict[str, list[Tensor]]] = {name: {} for name in models}
    for model in models.values():
        model.eval()
    for start in range(0, count, 64):
        scenes = world.sample(64, seed + start, keep="any")
        if midway:
            scenes = world.midway(scenes, seed + start)
        clips = renderer(scenes).transpose(1, 2)
        for name, model in models.items():
            with training.autocast(device):
                logits = model(clips)
            for attribute, right in verdict(logits, scenes).items():
                found[name].setdefault(attribute, []).append(right)
    for model in models.values():
        model.train()
    return {
        name: {k: float(torch.cat(parts).float().mean()) for k, parts in table.items()} for name, table in found.items()
    }


def train_step(model: Judge, optimiser: torch.optim.Optimizer, clips: Tensor, scenes: Scenes) -> Tensor:
    """One step on a batch; the loss."""
    with training.autocast(clips.device):
        logits = model(clips)
    loss = loss_of({k: v.float() for k, v in logits.items()}, scenes, clips.device, colours=not model.outlines)
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    return loss.detach()


def main() -> None:
    """Train both judges on the same renders within the budget, measure them on fresh ones and save them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, default=None)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--test", type=int, default=2048)
    parser.add_argument("--midway", type=float, default=0.15, help="share of clips entered at any time")
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()
    *_, device = training.start()
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(args.seed)
    models = {name: Judge(outlines).to(device) for name, outlines in KINDS.items()}
    for name, model in models.items():
        training.channels_last(model)
        if has_weights(args.resume, name):
            load_weights(model, args.resume, name)
    renderer = Renderer(SIZE, FRAMES, device, STRIDE)
    optimisers = {
        name: torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01, fused=device.type == "cuda")
        for name, model in models.items()
    }
    clock = training.Clock(args.minutes, device)
    report = time.monotonic()
    while clock.tick():
        seed = args.seed * 7_000_003 + clock.steps
        big = world.sample(args.batch * 4, seed, keep="any", two_subjects=0.4)
        late = round(args.midway * len(big))
        big = world.join([big[slice(late, None)], world.midway(big[slice(0, late)], seed)])
        # So that every batch has some of them.
        big = big[torch.randperm(len(big), generator=torch.Generator().manual_seed(seed))]
        clips = renderer(big).transpose(1, 2)
        losses = {}
        for part in range(4):
            span = slice(part * args.batch, (part + 1) * args.batch)
            rough = roughen(clips[span]).contiguous(memory_format=torch.channels_last_3d)
            for name, model in models.items():
                for group in optimisers[name].param_groups:
                    group["lr"] = args.lr * clock.rate(20)
                losses[name] = train_step(model, optimisers[name], rough, big[span])
        if time.monotonic() - report > 15:
            report = time.monotonic()
            LOG.info("step %d, loss %s", clock.steps * 4, {k: round(float(v), 4) for k, v in losses.items()})
    args.out.mkdir(parents=True, exist_ok=True)
    for name, model in models.items():
        save_weights(model.state_dict(), args.out, name)
    scores = {"steps": clock.steps * 4, "renders": measure(models, renderer, device, args.test, 424_242)}
    scores["midway"] = measure(models, renderer, device, args.test, 525_252, midway=True)
    LOG.info("%s", scores)
    write_json(args.out / "judges.json", scores)


if __name__ == "__main__":
    main()
