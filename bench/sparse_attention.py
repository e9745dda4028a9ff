"""Measure the effect of sparse attention on the shipped model, at the largest size and length of its videos.

    python -m bench.sparse_attention [--taus 0.5 1 1.5] [--prompts 8] [--out videos]
    python -m bench.sparse_attention --prompts 48 --frames 33 --judges weights

The kernels of comfy-kitchen need heads of 128 channels, and the model's have 32. So sparse attention is computed by
`runtime.execution.sparse_attention.emulate`, without rounding, on a CPU or a GPU. On a GPU the error of the kernels,
with heads filled up with zeros, is measured too. The model's sequences have 18 blocks of tokens at most, each three
quarters of a frame. Plans use sparse attention for longer sequences only, for which no conclusion follows but the order
of the thresholds.

Prints JSON lines: the relative error of attention in some blocks and steps against exact attention of the same queries,
keys and values; how similar saved videos are to those with exact attention, as ffmpeg measures it, and to compare, how
similar those of another seed are; and with `--judges`, the folder of `python -m tools.diorama.judge --out`, the grades
of videos of 33 frames.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from bench.step_cache import JUDGES_DEVICE, PROMPTS, SEED, rgb_of
from runtime.core.cancel import Cancel
from runtime.core.events import Event, VideoSaved
from runtime.core.plan import EAGER
from runtime.core.request import GenerationRequest
from runtime.core.sparse_attention import BLOCK, EXACT_BLOCKS, HEAD_WIDTH, exact_steps
from runtime.execution import attention as attentions
from runtime.execution.residency import Residency
from runtime.execution.sparse_attention import attend_sparse, emulate
from runtime.machine.probe import probe
from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec
from runtime.pipeline.run import run_job
from runtime.planner.resolve import PlanningContext, resolve
from runtime.video.similarity import similarity
from tests.gpu.errors import relative_error
from tools.diorama import grade, judge

SIZE, FRAMES = (192, 112), 49
MORE_PROMPTS = (*PROMPTS, "a pink butterfly circles above the sea at noon", "a white cat moves right in the snow")
# Blocks whose attention is compared, of those that are sparse.
COMPARED_BLOCKS = (1, 5, 8, 11)
Captured = dict[tuple[int, int], tuple[torch.Tensor, ...]]


def say(**found: Any) -> None:
    """Print a line of JSON."""
    sys.stdout.write(json.dumps(found).replace("Infinity", "null") + "\n")
    sys.stdout.flush()


def by_emulation(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tau: float, _: int = 0) -> torch.Tensor:
    """Return sparse attention of heads of any width, on any device."""
    return emulate(q, k, v, tau, q.shape[1])


@contextmanager
def captured(blocks: int, steps: tuple[int, ...]) -> Iterator[Captured]:
    """Record the queries, keys and values of self-attention in some blocks and steps while entered."""
    found: Captured = {}
    native, calls = attentions.attention("native"), 0

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        if q.shape == k.shape:
            step, block = divmod(calls, blocks)
            if step in steps and block in COMPARED_BLOCKS:
                found[step, block] = (q, k, v)
            calls += 1
        return native(q, k, v)

    attentions._KINDS["native"] = attend
    try:
        yield found
    finally:
        attentions._KINDS["native"] = native


def make(
    spec: ModelSpec, residency: Residency, prompt: str, tau: float | None, frames: int, out: Path, seed: int = SEED
) -> float:
    """Make one video; return the seconds of its steps."""
    width, height = SIZE
    request = GenerationRequest(
        prompt=prompt,
        seed=seed,
        width=width,
        height=height,
        frames=frames,
        upscale="off",
        backends={"all": "pytorch"},
    )
    plan = resolve(request, spec, PlanningContext(probe(), out))
    plan = plan.replace(speed=EAGER.replace(sparse_tau=tau))
    events: list[Event] = []
    run_job(plan, spec, events.append, Cancel(), residency)
    end = events[-1]
    if not isinstance(end, VideoSaved):
        sys.exit(f"No video: {end}")
    return end.timings["denoise"]


def by_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tau: float) -> torch.Tensor:
    """Return the attention that the kernels compute, of heads that are filled up with zeros."""
    width = q.shape[3]
    # The kernel divides scores by the root of the filled width.
    wide = [F.pad(x, (0, HEAD_WIDTH - width)).bfloat16() for x in (q * (HEAD_WIDTH / width) ** 0.5, k, v)]
    return attend_sparse(wide[0], wide[1], wide[2], tau)[..., :width]


def errors(found: Captured, taus: list[float]) -> None:
    """Print the relative errors of attention by threshold, over all captured calls, and of a typical and the worst."""
    first, *_ = next(iter(found.values()))
    ways: dict[str, Any] = {"emulated": by_emulation} | ({"kernel": by_kernel} if first.device.type == "cuda" else {})
    exact = {key: attentions.attention("native")(*qkv) for key, qkv in found.items()}
    for name, attend in ways.items():
        for tau in taus:
            what = {"part": "errors", "by": name, "tau": tau, "tokens": first.shape[1]}
            try:
                measured = {key: relative_error(attend(*qkv, tau), exact[key]) for key, qkv in found.items()}
            except Exception as error:  # the package or its kernel; the others are measured all the same
                say(**what, failed=f"{type(error).__name__}: {str(error)[:300]}")
                continue
            worst = max(measured, key=measured.__getitem__)
            say(
                **what,
                mean=round(statistics.mean(measured.values()), 4),
                median=round(statistics.median(measured.values()), 4),
                worst=round(measured[worst], 4),
                worst_step_and_block=worst,
            )


def main() -> None:
    """Make the videos, print the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--taus", type=float, nargs="+", default=[0.5, 1.0, 1.5])
    parser.add_argument("--prompts", type=int, default=len(MORE_PROMPTS), help="with --judges, captions of `grade`")
    parser.add_argument("--frames", type=int, default=FRAMES)
    parser.add_argument("--out", type=Path, default=None, help="folder for the videos")
    parser.add_argument("--judges", type=Path, default=None, help="folder of the judges, for 33 frames")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after these, no prompt begins")
    arguments = parser.parse_args()
    if arguments.judges and arguments.frames != judge.FRAMES:
        parser.error(f"--judges: they see videos of {judge.FRAMES} --frames")
    folder = arguments.out or Path(tempfile.mkdtemp(prefix="sparse-attention-"))
    folder.mkdir(parents=True, exist_ok=True)
    spec = find("diorama", Path("none"))
    scenes, captions = grade.requests(arguments.prompts)
    prompts = captions if arguments.judges else list(MORE_PROMPTS[: arguments.prompts])
    blocks, steps = spec.transformer.num_layers, spec.defaults.steps
    first = exact_steps(steps)
    say(part="setup", blocks=blocks, exact_blocks=EXACT_BLOCKS, steps=steps, exact_steps=first, block_tokens=BLOCK)
    settings: list[float | None] = [None, *arguments.taus]
    ends = time.monotonic() + arguments.seconds
    likeness: dict[str, list[Any]] = {}
    videos: dict[float | None, list[Path]] = {tau: [] for tau in settings}
    with Residency() as residency, patch.object(attentions, "attend_sparse", by_emulation):
        with captured(blocks, (first, (first + steps) // 2, steps - 1)) as found:
            make(spec, residency, prompts[0], None, arguments.frames, folder / "captured.mp4")
        with torch.no_grad():
            errors(found, arguments.taus)
        del found
        for number, prompt in enumerate(prompts):
            if number and time.monotonic() > ends:
                break
            for tau in settings:
                out = folder / f"{number}-{'exact' if tau is None else f'{tau:g}'}.mp4"
                make(spec, residency, prompt, tau, arguments.frames, out)
                videos[tau].append(out)
                if tau is not None:
                    likeness.setdefault(f"{tau:g}", []).append(similarity(videos[None][number], out))
            other = folder / f"{number}-other.mp4"
            make(spec, residency, prompt, None, arguments.frames, other, SEED + 1)
            likeness.setdefault("another seed", []).append(similarity(videos[None][number], other))
            say(
                part="prompt",
                number=number,
                psnr={tau: round(results[-1].psnr, 1) for tau, results in likeness.items()},
            )
    for setting, results in likeness.items():
        say(
            part="videos",
            tau=setting,
            frames=arguments.frames,
            prompts=len(results),
            psnr=round(statistics.mean(result.psnr for result in results), 1),
            psnr_least=round(min(result.psnr for result in results), 1),
            ssim=round(statistics.mean(result.ssim for result in results), 4),
            ssim_least=round(min(result.ssim for result in results), 4),
        )
    if arguments.judges:
        judges = judge.load(arguments.judges, JUDGES_DEVICE)
        for tau, saved in videos.items():
            shown = torch.stack([clip_of(video, arguments.frames) for video in saved])
            table = grade.table(grade.read(judges, shown, scenes[slice(0, len(saved))], JUDGES_DEVICE), {})["all"]
            say(part="grades", tau=tau, prompts=len(saved), grades=table)


def clip_of(video: Path, frames: int) -> torch.Tensor:
    """Return a video as the judges take it, (3, frames, height, width) in -1 to 1."""
    pixels = torch.frombuffer(bytearray(rgb_of(video)), dtype=torch.uint8)
    return pixels.view(frames, SIZE[1], SIZE[0], 3).movedim(-1, 0).float() / 127.5 - 1


if __name__ == "__main__":
    main()
