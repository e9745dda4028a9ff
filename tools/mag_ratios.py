"""Measure a model's magnitude ratios for MagCache, and store them in `tandem.json` in its folder.

    python -m tools.mag_ratios MODEL [--steps N] [--prompt TEXT …]

Makes a video for each prompt without a step cache, in PyTorch. A ratio is the size of the blocks' residual, in the pass
with the prompt, divided by its size in the step before, averaged over tokens; the first of each transformer is 1.
Ratios of several prompts are averaged. Source: `magcache_calibration` in https://github.com/Zehong-Ma/MagCache.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from runtime.core.cancel import Cancel
from runtime.core.events import Event, StepDone, VideoSaved
from runtime.core.request import AUTO, GenerationRequest
from runtime.core.settings import load
from runtime.execution.residency import Residency
from runtime.machine.probe import probe
from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec
from runtime.pipeline.run import run_job
from runtime.planner.resolve import PlanningContext, resolve

PROMPTS = ("a red boat sails to the right on a calm sea at sunset", "a yellow bird circles above the hills")
SEED = 7
# Where diffusers' transformers have their blocks, in the order they run.
_BLOCKS = ("blocks", "transformer_blocks", "single_transformer_blocks")
_DIGITS = 5


class Recorder:
    """Records the sizes of the residuals of a transformer's blocks, a vector over the tokens for each pass."""

    def __init__(self) -> None:
        self.sizes: list[torch.Tensor] = []
        self._input: torch.Tensor | None = None
        self._ends: tuple[Any, Any] = (None, None)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record all passes while entered."""
        handles = register_module_forward_pre_hook(self._before), register_module_forward_hook(self._after)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        blocks = [block for name in _BLOCKS for block in getattr(module, name, ())]
        if blocks and hasattr(module, "proj_out"):
            self._ends = blocks[0], blocks[-1]
        if module is self._ends[0]:
            self._input = args[0]

    def _after(self, module: torch.nn.Module, _: Any, out: Any) -> None:
        if module is self._ends[1] and self._input is not None:
            hidden = out[0] if isinstance(out, tuple) else out
            self.sizes.append((hidden - self._input).float().norm(dim=-1).flatten())


def measured(
    spec: ModelSpec, residency: Residency, prompt: str, steps: int | None, folder: Path
) -> dict[str, list[float]]:
    """Make one video; return the ratios of each transformer's steps."""
    request = GenerationRequest(
        prompt=prompt, model=spec.name, seed=SEED, backends={"all": "pytorch"}, compile="never", steps=steps or AUTO
    )
    plan = resolve(request, spec, PlanningContext(probe(), folder / "x.mp4"))
    # Each pass is a call of its own, which runs the hooks.
    plan = plan.replace(speed=plan.speed.replace(paired=False, graphed=False), split=None)
    events: list[Event] = []
    recorder = Recorder()
    with recorder.listening():
        run_job(plan, spec, events.append, Cancel(), residency)
    if not isinstance(events[-1], VideoSaved):
        sys.exit(f"No video: {events[-1]}")
    found: dict[str, list[float]] = {}
    sizes, before = iter(recorder.sizes), torch.empty(0)
    for step in (event for event in events if isinstance(event, StepDone)):
        scale = plan.guidance_scale_2 if step.part == "transformer_2" else plan.guidance_scale
        size, *_ = [next(sizes) for _ in range(2 if scale is not None and scale > 1 else 1)]
        own = found.setdefault(str(step.part), [])
        own.append((size / before).mean().item() if own else 1.0)
        before = size
    return found


def store(spec: ModelSpec, ratios: dict[str, list[float]]) -> Path:
    """Write the ratios to a model's `tandem.json`, which is made if there is none; return its path."""
    path = spec.directory / "tandem.json"
    config: dict[str, Any] = {
        "title": spec.title,
        "license": spec.license,
        "about": spec.about,
        "defaults": asdict(spec.defaults),
        "sizes": spec.sizes,
        "frame_counts": spec.frame_counts,
    }
    if path.exists():
        config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"mag_ratios": ratios}, indent=2) + "\n", encoding="utf-8")
    return path


def main() -> None:
    """Measure and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a name or a folder, as for --model")
    parser.add_argument("--steps", type=int, default=None, help="by default the model's own")
    parser.add_argument("--prompt", nargs="+", default=list(PROMPTS))
    arguments = parser.parse_args()
    spec = find(arguments.model, load().weights_dir)
    if spec.single_files:
        sys.exit(f"{spec.title} has no folder of its own to store ratios in: measure the model in diffusers' format.")
    with Residency() as residency, tempfile.TemporaryDirectory() as folder:
        runs = [measured(spec, residency, prompt, arguments.steps, Path(folder)) for prompt in arguments.prompt]
    ratios = {
        name: [round(statistics.mean(step), _DIGITS) for step in zip(*(run[name] for run in runs), strict=True)]
        for name in runs[0]
    }
    sys.stdout.write(f"{json.dumps(ratios)}\nStored in {store(spec, ratios)}\n")


if __name__ == "__main__":
    main()
