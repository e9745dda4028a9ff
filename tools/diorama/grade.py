"""Grade a model directory: generate clips for held-out prompts and images, and classify them with the judges.

    python -m tools.diorama.grade --weights weights --model runtime/models/embedded/diorama --json grades.json

Knows nothing about training. It samples through ``diffusers.WanPipeline`` and ``diffusers.WanImageToVideoPipeline``, to
which the app's own pipeline is equal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import UniPCMultistepScheduler, WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel
from torch import Tensor, nn

from tools.diorama import captions, judge, world
from tools.diorama.render import Renderer, laplacian_variance, to_uint8
from tools.diorama.world import Scenes

LOG = logging.getLogger(__name__)
SEED = 20_260
HELD_OUT_SHARE = 0.375
# What each judge reads: edges tell nothing of colours.
READS = {
    "judge": ("subject", "colour", "motion", "backdrop", "time", "weather"),
    "outlines": ("subject", "motion", "backdrop", "time", "weather"),
}


def requests(count: int, seed: int = SEED) -> tuple[Scenes, list[str]]:
    """``count`` scenes and full captions of them; the first part has combinations held out from training."""
    hard = round(count * HELD_OUT_SHARE)
    scenes = world.join([world.sample(hard, seed, keep="held_out"), world.sample(count - hard, seed + 1)])
    rng = random.Random(seed)
    return scenes, [captions.prompt(captions.facts(scenes, i), rng) for i in range(count)]


def short_prompt(scenes: Scenes, index: int) -> str:
    """What a person types beside an image: "the boat sails left", without colour, place, time or weather."""
    known = captions.facts(scenes, index)
    bare = captions.Facts(tuple((s, None) for s, _ in known.subjects), known.motion)
    text = captions.sentence(bare, captions.Wording(plain=True))
    return text.replace("a ", "the ", 1) if text.startswith("a ") else text


@torch.no_grad()
def images(scenes: Scenes, settings: dict[str, float], device: torch.device) -> Tensor:
    """(N, 3, H, W) in -1..1: the first frames of ``scenes``, rounded to bytes as a PNG holds them."""
    renderer = Renderer((int(settings["width"]), int(settings["height"])), int(settings["frames"]), device)
    parts = []
    for start in range(0, len(scenes), 32):
        first = to_uint8(renderer(scenes[slice(start, start + 32)])[:, 0])
        parts.append(first.movedim(-1, 1).float().cpu() / 127.5 - 1)
    return torch.cat(parts)


class ImageGuided(nn.Module):
    """An expert whose pass without guidance has the prompt but no image: guidance then amplifies the image.

    That pass sees the first latent frame as noisy as the others, as in a video from text. Give the prompt as the
    negative prompt too.
    """

    def __init__(self, expert: WanTransformer3DModel) -> None:
        super().__init__()
        self.expert, self.config, self.dtype, self.device = expert, expert.config, expert.dtype, expert.device
        self.imageless = False

    @contextlib.contextmanager
    def cache_context(self, name: str) -> Iterator[None]:
        """The pass that comes next, "cond" or "uncond", as the pipeline names it."""
        self.imageless = name == "uncond"
        yield

    def forward(self, hidden_states: Tensor, timestep: Tensor, **others: Any) -> tuple[Tensor, ...]:
        """The expert's answer; ``timestep`` is (B, tokens), 0 on the first latent frame."""
        if self.imageless:
            # The noise is the same in every step of both experts.
            noise = torch.randn(hidden_states[:, :, 0].shape, generator=torch.Generator().manual_seed(SEED))
            timestep = timestep.amax(1, keepdim=True).expand_as(timestep)
            sigma = (timestep[:, 0] / 1000).view(-1, 1, 1, 1)
            first = torch.lerp(hidden_states[:, :, 0], noise.to(hidden_states), sigma)
            hidden_states = torch.cat([first.unsqueeze(2), hidden_states[:, :, 1:]], 2)
        return self.expert(hidden_states=hidden_states, timestep=timestep, **others)


class BatchedImages(WanImageToVideoPipeline):
    """``WanImageToVideoPipeline`` with one image per prompt.

    With several generators it encodes all images once for each generator, which fits one image only.
    """

    def prepare_latents(self, image: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The latents of noise, the condition and its mask, image by image."""
        _, *size, generators, latents, last = args
        if latents is not None or last is not None:
            raise ValueError("images are graded with their generators alone")
        parts = [
            super(BatchedImages, self).prepare_latents(one[None], 1, *size, [generator], None, None)
            for one, generator in zip(image, generators, strict=True)
        ]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]), parts[0][2]


@torch.no_grad()
def generate(
    pipe: WanPipeline | BatchedImages,
    prompts: list[str],
    seed: int,
    settings: dict[str, float],
    batch: int,
    pictures: Tensor | None = None,
) -> Tensor:
    """(N, 3, T, H, W) in -1..1, one seed per prompt; from ``pictures`` (N, 3, H, W) in -1..1 where given."""
    clips = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        given = {} if pictures is None else {"image": (pictures[start : start + batch] + 1) / 2}
        guided = isinstance(pipe.transformer, ImageGuided)
        frames = pipe(
            prompt=part, negative_prompt=part if guided else [""] * len(part), width=settings["width"],
            height=settings["height"], num_frames=settings["frames"], num_inference_steps=int(settings["steps"]),
            guidance_scale=settings["guidance_scale"], guidance_scale_2=settings["guidance_scale_2"],
            generator=[torch.Generator().manual_seed(seed + start + i) for i in range(len(part))], output_type="pt",
            **given,
        ).frames  # fmt: skip
        clips.append(frames.float().cpu().transpose(1, 2) * 2 - 1)
    return torch.cat(clips)


@torch.no_grad()
def read(models: dict[str, judge.Judge], clips: Tensor, scenes: Scenes, device: torch.device) -> dict[str, Tensor]:
    """(N,) bool per judge and attribute: what is found right in 33-frame clips (N, 3, 33, 112, 192)."""
    found: dict[str, list[Tensor]] = {}
    for start in range(0, len(clips), 32):
        shown = clips[start : start + 32, :, :: judge.STRIDE].to(device)
        for name, model in models.items():
            right = judge.verdict(model(shown), scenes[slice(start, start + 32)])
            for attribute in READS[name]:
                found.setdefault(f"{name} {attribute}", []).append(right[attribute])
    return {name: torch.cat(parts) for name, parts in found.items()}


def table(right: dict[str, Tensor], parts: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Shares right by judge and attribute on all requests and on ``parts`` of them, (N,) bool each."""
    spans = {"all": torch.ones(len(next(iter(right.values()))), dtype=torch.bool), **parts}
    result = {
        name: {"count": float(mask.sum())} | {k: round(float(v[mask].float().mean()), 4) for k, v in right.items()}
        for name, mask in spans.items()
        if mask.any()
    }
    for kind in READS:
        whole = torch.stack([v for k, v in right.items() if k.startswith(kind)]).all(0)
        for name, row in result.items():
            row[f"{kind} everything"] = round(float(whole[spans[name]].float().mean()), 4)
    return result


def groups(scenes: Scenes) -> dict[str, Tensor]:
    """The parts of requests that are listed on their own."""
    hard, twins = world.held_out(scenes), scenes.subject[:, 0] == scenes.subject[:, 1]
    rows = {
        "held_out": hard, "one": ~scenes.two, "one_held_out": ~scenes.two & hard, "twins": twins,
        "two_kinds": scenes.two & ~twins,
    }  # fmt: skip
    return rows | {name: (scenes.subject == k).any(1) for k, name in enumerate(world.SUBJECTS)}


def sharpness(clips: Tensor) -> dict[str, float]:
    """How sharp the first frame is, by the variance of the Laplacian, as a share of the other frames' mean."""
    each = laplacian_variance(clips)
    ratio = each[:, 0] / each[:, 1:].mean(1)
    return {
        "clips": len(clips), "first_to_others": round(float(each[:, 0].mean() / each[:, 1:].mean()), 4),
        "mean_of_clips": round(float(ratio.mean()), 4), "median_of_clips": round(float(ratio.median()), 4),
        "first": float(each[:, 0].mean()), "others": float(each[:, 1:].mean()),
    }  # fmt: skip


def likeness(clips: Tensor, pictures: Tensor) -> dict[str, float]:
    """PSNR in dB of the first frames against ``pictures``: mean and worst."""
    error = (clips[:, :, 0].clamp(-1, 1) - pictures).square().mean((1, 2, 3))
    psnr = 10 * torch.log10(4 / error.clamp(min=1e-9))
    return {"mean": round(float(psnr.mean()), 2), "worst": round(float(psnr.min()), 2)}


def load(folder: Path, device: torch.device, flow_shift: float | None = None) -> tuple[WanPipeline, dict]:
    """The pipeline in float32 and the sidecar's default settings."""
    pipe = WanPipeline.from_pretrained(folder, torch_dtype=torch.float32).to(device)
    pipe.set_progress_bar_config(disable=True)
    if flow_shift:
        pipe.scheduler = UniPCMultistepScheduler.from_config(pipe.scheduler.config, flow_shift=flow_shift)
    return pipe, json.loads((folder / "tandem.json").read_text())["defaults"]


def with_images(pipe: WanPipeline, *, guided: bool = False) -> BatchedImages:
    """The same model as a pipeline that starts from images, in the way of Wan2.2-TI2V; see ``ImageGuided``."""
    parts = {name: getattr(pipe, name) for name in ("tokenizer", "text_encoder", "vae", "scheduler")}
    experts = {name: getattr(pipe, name) for name in ("transformer", "transformer_2")}
    if guided:
        experts = {name: ImageGuided(expert) for name, expert in experts.items()}
    boundary = pipe.config.boundary_ratio
    made = BatchedImages(**parts, **experts, boundary_ratio=boundary, expand_timesteps=True)
    made.set_progress_bar_config(disable=True)
    return made


def image_setting(pipe: WanPipeline, settings: dict[str, Any], spec: str) -> tuple[BatchedImages, dict[str, Any]]:
    """The pipeline and the settings of clips from images that a value of ``--try-images`` stands for."""
    if spec == "default":
        own = {name: settings.get(f"image_{name}") for name in ("guidance_scale", "guidance_scale_2")}
        return with_images(pipe), settings | {name: value for name, value in own.items() if value is not None}
    scales = spec.removeprefix("image,").split(",")
    chosen = dict(zip(("guidance_scale", "guidance_scale_2"), map(float, scales), strict=True))
    return with_images(pipe, guided=spec.startswith("image,")), settings | chosen


def grade_images(
    pipe: BatchedImages,
    models: dict[str, judge.Judge],
    count: int,
    settings: dict[str, float],
    batch: int,
    device: torch.device,
) -> tuple[dict[str, dict[str, Any]], Tensor]:
    """The tables of ``count`` clips from images: with full prompts, short ones, and from images amid the motion; and
    the clips with short prompts."""
    scenes, prompts = requests(count, SEED + 100)
    short = [short_prompt(scenes, i) for i in range(count)]
    amid = world.midway(scenes, SEED)
    kept = torch.empty(0)
    result: dict[str, dict[str, Any]] = {}
    for name, shown, texts in (("full", scenes, prompts), ("short", scenes, short), ("short_midway", amid, short)):
        pictures = images(shown, settings, device)
        clips = generate(pipe, texts, SEED, settings, batch, pictures)
        right = read(models, clips, shown, device)
        result[name] = {
            "scores": table(right, {"one": ~scenes.two}), "psnr_of_first": likeness(clips, pictures),
            "sharpness": sharpness(clips[:64]), "wrong": wrong(right, texts),
        }  # fmt: skip
        kept = clips if name == "short" else kept
    return result, kept


def wrong(right: dict[str, Tensor], prompts: list[str]) -> list[dict[str, object]]:
    """The prompts that a judge found something wrong for, and what."""
    missed = [[k for k, v in right.items() if not v[i]] for i in range(len(prompts))]
    return [{"prompt": prompts[i], "missed": m} for i, m in enumerate(missed) if m]


def show(scores: dict[str, dict[str, float]]) -> None:
    """Log a table in percent."""
    for name, row in scores.items():
        LOG.info("  %-12s %s", name, " ".join(f"{k} {100 * v:.1f}" for k, v in row.items() if k != "count"))


def main() -> None:
    """Generate, judge and print the tables; with several ``--try`` and ``--try-images`` settings, one set each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True, help="holds the judges")
    parser.add_argument("--model", type=Path, default=Path("runtime/models/embedded/diorama"))
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--images", type=int, default=64, help="number of clips from images, in each of three ways")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--clips", type=Path, default=None, help="keep the clips of the last setting, uint8")
    parser.add_argument(
        "--try", dest="tries", nargs="*", default=["default"], help="steps,guidance,guidance_2,flow_shift or default"
    )
    parser.add_argument(
        "--try-images", dest="image_tries", nargs="*", default=["default"],
        help="guidance,guidance_2 of clips from images, default, or image,guidance,guidance_2 to amplify the image"
    )  # fmt: skip
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = judge.load(args.weights, device)
    scenes, prompts = requests(args.count)
    results = []
    for spec in args.tries:
        began = time.monotonic()
        steps, scale, scale_2, shift = (None,) * 4 if spec == "default" else map(float, spec.split(","))
        pipe, settings = load(args.model, device, shift)
        if steps is not None:
            settings |= {"steps": steps, "guidance_scale": scale, "guidance_scale_2": scale_2}
        clips = generate(pipe, prompts, SEED, settings, args.batch)
        right = read(models, clips, scenes, device)
        results.append({"setting": spec, "scores": table(right, groups(scenes)), "sharpness": sharpness(clips[:64])})
        results[-1]["wrong"] = wrong(right, prompts)
        LOG.info("%s in %.0f s, sharpness %s", spec, time.monotonic() - began, results[-1]["sharpness"])
        show(results[-1]["scores"])
        results[-1]["images"] = {}
        for image_spec in args.image_tries if args.images else ():
            began_images = time.monotonic()
            moving, chosen = image_setting(pipe, settings, image_spec)
            tables, moved = grade_images(moving, models, args.images, chosen, args.batch, device)
            results[-1]["images"][image_spec] = tables
            LOG.info("images, %s: %.0f s", image_spec, time.monotonic() - began_images)
            for name, one in tables.items():
                LOG.info("image, %s: %s %s", name, one["psnr_of_first"], one["sharpness"])
                show(one["scores"])
            if args.json:
                args.json.write_text(json.dumps(results, indent=1))
        LOG.info("%s: %.0f s", spec, time.monotonic() - began)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1))
    if args.clips:
        keep = {"clips": clips, "moved": moved} if args.images else {"clips": clips}
        torch.save({k: to_uint8(v.transpose(1, 2)) for k, v in keep.items()} | {"prompts": prompts}, args.clips)


if __name__ == "__main__":
    main()
