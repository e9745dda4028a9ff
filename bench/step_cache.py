"""Measure step caches on the shipped model: blocks computed, seconds, and similarity to the video without a cache.

    python -m bench.step_cache --caches first-block:0.1 magcache:0.06 taylorseer:2 --steps 40 --out videos
    python -m bench.step_cache --caches guidance:0.05 guidance:0.1 guidance:0.2 --guidance 3 --steps 20
    python -m bench.step_cache --prompts 48 --judges weights

`guidance:STRENGTH` is a guidance cache, which needs `--guidance` above 1. With `--judges`, the folder of `python -m
tools.diorama.judge --out`, the judges also grade each saved video.

Every video is the default clip, made by the job that the app runs, in PyTorch; likeness is between the saved videos as
ffmpeg measures it. The last line is JSON. The table of a run: bench/step_cache.md.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runtime.core.cancel import Cancel
from runtime.core.events import Event, VideoSaved
from runtime.core.request import AUTO, OFF, Auto, GenerationRequest
from runtime.core.step_cache import FIRST_BLOCK, MAGCACHE, NONE, TAYLORSEER, read_step_cache
from runtime.execution.residency import Residency
from runtime.machine.probe import probe
from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec
from runtime.pipeline.run import run_job
from runtime.planner.resolve import PlanningContext, resolve
from runtime.video.mp4 import find_ffmpeg
from runtime.video.similarity import similarity
from tests.pipeline.computed_blocks import blocks_computed
from tools.diorama import grade, judge
from tools.diorama.world import Scenes

PROMPTS = (
    "a red boat sails to the right on a calm sea at sunset",
    "a yellow bird circles above the hills in the morning",
    "a green car drives left through the city at night, in rain",
    "a white rocket flies up over the desert by day",
    "a purple fish swims to the left in the sea by day",
    "an orange balloon floats up over the snow at sunset",
)
SEED = 7
JUDGES_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CACHES = {FIRST_BLOCK: (0.05, 0.1, 0.2), MAGCACHE: (0.03, 0.06, 0.12), TAYLORSEER: (2, 3, 4)}


GUIDANCE = "guidance:"


def read_cache(text: str) -> str:
    """Return a step cache, or a guidance cache as "guidance:STRENGTH"."""
    if text.startswith(GUIDANCE):
        return f"{GUIDANCE}{GenerationRequest(prompt='x', guidance_cache=text.removeprefix(GUIDANCE)).guidance_cache}"
    return read_step_cache(text)


def video_of(folder: Path, number: int, step_cache: str) -> Path:
    """Return the file of a prompt's video."""
    return folder / f"{number}-{step_cache.replace(':', '-')}.mp4"


def make(
    spec: ModelSpec, residency: Residency, prompt: str, cache: str, steps: int, guidance: float | Auto, out: Path
) -> dict[str, float]:
    """Make one video; return the blocks that it took, the passes left out, and the seconds of its steps."""
    of_guidance = cache.startswith(GUIDANCE)
    request = GenerationRequest(
        prompt=prompt,
        seed=SEED,
        steps=steps,
        guidance_scale=guidance,
        step_cache=NONE if of_guidance else cache,
        guidance_cache=cache.removeprefix(GUIDANCE) if of_guidance else OFF,
        upscale=OFF,
        backends={"all": "pytorch"},
    )
    plan = resolve(request, spec, PlanningContext(probe(), out))
    events: list[Event] = []
    blocks = blocks_computed(lambda: run_job(plan, spec, events.append, Cancel(), residency))
    end = events[-1]
    if not isinstance(end, VideoSaved):
        sys.exit(f"No video: {end}")
    return {"blocks": blocks, "left_out": end.passes_left_out, "seconds": end.timings["denoise"]}


def rgb_of(video: Path) -> bytes:
    """Return the frames of a video, three bytes a pixel."""
    command = [find_ffmpeg(), "-v", "error", "-i", str(video), "-f", "rawvideo", "-pix_fmt", "rgb24", "pipe:1"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout


def grades(judges: dict[str, judge.Judge], scenes: Scenes, videos: list[Path], spec: ModelSpec) -> dict[str, float]:
    """Return the shares of videos in which the judges find an attribute of their scenes right."""
    size = (-1, spec.defaults.frames, spec.defaults.height, spec.defaults.width, 3)
    data = b"".join(rgb_of(video) for video in videos)
    shown = torch.from_numpy(np.frombuffer(data, np.uint8).reshape(size)).movedim(-1, 1).float() / 127.5 - 1
    return grade.table(grade.read(judges, shown, scenes, JUDGES_DEVICE), {})["all"]


def main() -> None:
    """Make the videos, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [f"{kind}:{one:g}" for kind, strengths in CACHES.items() for one in strengths]
    parser.add_argument("--caches", type=read_cache, nargs="+", default=default, metavar="KIND:STRENGTH")
    parser.add_argument("--guidance", type=float, default=AUTO, help="the guidance scale; by default the model's own")
    parser.add_argument("--steps", type=int, default=None, help="by default the model's own")
    parser.add_argument(
        "--prompts", type=int, default=len(PROMPTS), help="more than six are captions of tools.diorama.grade"
    )
    parser.add_argument("--out", type=Path, default=None, help="folder for the videos")
    parser.add_argument("--judges", type=Path, default=None, help="folder of the judges, for more than six prompts")
    arguments = parser.parse_args()
    if arguments.judges and arguments.prompts <= len(PROMPTS):
        parser.error("--judges: scenes are known of more than six --prompts only")
    folder = arguments.out or Path(tempfile.mkdtemp(prefix="step-cache-"))
    folder.mkdir(parents=True, exist_ok=True)
    spec = find("diorama", Path("none"))
    few = arguments.prompts <= len(PROMPTS)
    scenes, captions = grade.requests(arguments.prompts)
    prompts = PROMPTS[: arguments.prompts] if few else captions
    judges = judge.load(arguments.judges, JUDGES_DEVICE) if arguments.judges else {}
    settings = [NONE, *arguments.caches]
    steps = arguments.steps or spec.defaults.steps
    found: dict[str, list[dict[str, float]]] = {setting: [] for setting in settings}
    with Residency() as residency:
        for number, prompt in enumerate(prompts):
            for setting in settings:
                out = video_of(folder, number, setting)
                made = make(spec, residency, prompt, setting, steps, arguments.guidance, out)
                result = similarity(video_of(folder, number, NONE), out)
                found[setting].append(made | {"psnr": result.psnr, "ssim": result.ssim, "same": result.identical})
                sys.stderr.write(f"{number} {setting} {found[setting][-1]}\n")
    rows: list[dict[str, Any]] = []
    for setting in settings:
        runs = found[setting]
        blocks = sum(run["blocks"] for run in runs) / sum(run["blocks"] for run in found[NONE])
        rows.append(
            {
                "step_cache": setting,
                "blocks": round(blocks, 3),
                "left_out": round(statistics.mean(run["left_out"] for run in runs), 1),
                "seconds": round(statistics.median(run["seconds"] for run in runs), 2),
                "psnr": round(statistics.mean(run["psnr"] for run in runs), 1),
                "psnr_least": round(min(run["psnr"] for run in runs), 1),
                "ssim": round(statistics.mean(run["ssim"] for run in runs), 4),
                "ssim_least": round(min(run["ssim"] for run in runs), 4),
            }
        )
        if judges:
            videos = [video_of(folder, number, setting) for number in range(len(prompts))]
            rows[-1]["grades"] = grades(judges, scenes, videos, spec)
    lines = ["| step cache | blocks computed | denoising | PSNR, mean | least | SSIM, mean | least |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    lines += [
        f"| {row['step_cache']} | {row['blocks']:.0%} | {row['seconds']} s | {row['psnr']} dB | {row['psnr_least']} dB "
        f"| {row['ssim']} | {row['ssim_least']} |"
        for row in rows
    ]
    sys.stdout.write(
        "\n".join(lines) + "\n" + json.dumps({"rows": rows, "runs": found}).replace("Infinity", "null") + "\n"
    )


if __name__ == "__main__":
    main()
