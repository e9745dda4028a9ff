"""Grade a model directory: generate clips for held-out prompts and classify them with the judge.

    python -m tools.diorama.grade --weights weights --model runtime/models/embedded/diorama --json grades.json

Knows nothing about training. It samples through ``diffusers.WanPipeline``, to which the app's own pipeline is equal.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time
from pathlib import Path

import torch
from diffusers import UniPCMultistepScheduler, WanPipeline
from torch import Tensor

from tools.diorama import captions, judge, world
from tools.diorama.checkpoint import load_weights
from tools.diorama.world import Scenes

LOG = logging.getLogger(__name__)
SEED = 20_260
HELD_OUT_SHARE = 0.375


def requests(count: int, seed: int = SEED) -> tuple[Scenes, list[str]]:
    """``count`` scenes and full captions of them; the first part has combinations held out from training."""
    hard = round(count * HELD_OUT_SHARE)
    scenes = world.join([world.sample(hard, seed, keep="held_out"), world.sample(count - hard, seed + 1)])
    rng = random.Random(seed)
    return scenes, [captions.prompt(captions.facts(scenes, i), rng) for i in range(count)]


@torch.no_grad()
def generate(pipe: WanPipeline, prompts: list[str], seed: int, settings: dict[str, float], batch: int) -> Tensor:
    """(N, 3, 33, 112, 192) in -1..1, one seed per prompt."""
    clips = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        frames = pipe(
            part, negative_prompt=[""] * len(part), width=settings["width"], height=settings["height"],
            num_frames=settings["frames"], num_inference_steps=int(settings["steps"]),
            guidance_scale=settings["guidance_scale"], guidance_scale_2=settings["guidance_scale_2"],
            generator=[torch.Generator().manual_seed(seed + start + i) for i in range(len(part))], output_type="pt",
        ).frames  # fmt: skip
        clips.append(frames.float().cpu().transpose(1, 2) * 2 - 1)
    return torch.cat(clips)


@torch.no_grad()
def read(model: judge.Judge, clips: Tensor, scenes: Scenes, device: torch.device) -> dict[str, Tensor]:
    """(N,) bool per attribute: what the judge finds right in 33-frame clips (N, 3, 33, 112, 192)."""
    parts = []
    for start in range(0, len(clips), 32):
        logits = model(clips[start : start + 32, :, :: judge.STRIDE].to(device))
        parts.append(judge.verdict(logits, scenes[slice(start, start + 32)]))
    return {name: torch.cat([p[name] for p in parts]) for name in parts[0]}


def table(right: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Shares right on all requests, on the held-out combinations and on the rest."""
    count = len(right["subject"])
    hard = round(count * HELD_OUT_SHARE)
    spans = {"all": slice(0, count), "held_out": slice(0, hard), "seen": slice(hard, count)}
    result = {name: {k: round(float(v[s].float().mean()), 4) for k, v in right.items()} for name, s in spans.items()}
    whole = torch.stack(list(right.values())).all(0)
    for name, span in spans.items():
        result[name]["everything"] = round(float(whole[span].float().mean()), 4)
    return result


def load(folder: Path, device: torch.device, flow_shift: float | None = None) -> tuple[WanPipeline, dict]:
    """The pipeline in float32 and the sidecar's default settings."""
    pipe = WanPipeline.from_pretrained(folder, torch_dtype=torch.float32).to(device)
    pipe.set_progress_bar_config(disable=True)
    if flow_shift:
        pipe.scheduler = UniPCMultistepScheduler.from_config(pipe.scheduler.config, flow_shift=flow_shift)
    return pipe, json.loads((folder / "tandem.json").read_text())["defaults"]


def main() -> None:
    """Generate, judge and print the table; with several ``--try`` settings, one table each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True, help="holds the judge")
    parser.add_argument("--model", type=Path, default=Path("runtime/models/embedded/diorama"))
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--clips", type=Path, default=None, help="keep the clips of the last setting, uint8")
    parser.add_argument(
        "--try", dest="tries", nargs="*", default=["default"], help="steps,guidance,guidance_2,flow_shift or default"
    )
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = judge.Judge().to(device).eval()
    load_weights(model, args.weights, "judge")
    scenes, prompts = requests(args.count)
    results = []
    for spec in args.tries:
        began = time.monotonic()
        steps, scale, scale_2, shift = (None,) * 4 if spec == "default" else map(float, spec.split(","))
        pipe, settings = load(args.model, device, shift)
        if steps is not None:
            settings |= {"steps": steps, "guidance_scale": scale, "guidance_scale_2": scale_2}
        clips = generate(pipe, prompts, SEED, settings, args.batch)
        right = read(model, clips, scenes, device)
        results.append({"setting": spec, "scores": table(right)})
        wrong = [i for i in range(args.count) if not all(bool(v[i]) for v in right.values())]
        results[-1]["wrong"] = [
            {"prompt": prompts[i], "missed": [k for k, v in right.items() if not v[i]]} for i in wrong
        ]
        LOG.info("%s in %.0f s", spec, time.monotonic() - began)
        for name, row in results[-1]["scores"].items():
            LOG.info("  %-9s %s", name, " ".join(f"{k} {100 * v:.1f}" for k, v in row.items()))
        if args.json:
            args.json.write_text(json.dumps(results, indent=1))
    if args.clips:
        small = ((clips.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        torch.save({"clips": small, "prompts": prompts}, args.clips)


if __name__ == "__main__":
    main()
