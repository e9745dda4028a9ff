"""Measure jobs at full size with each memory strategy, and compare with the plan's estimate.

    python bench/gpu/jobs.py [--seconds N] [--offload O] [--small] [--device cuda:0] [MODEL …]    of `MODELS`
    python bench/gpu/jobs.py --ways none:none,group:none,auto:none:6 --sections 2 framepack-i2v
    python bench/gpu/jobs.py --ways none:none --sections 10 --steps 1 framepack-i2v

A way is offload, quantization, and optionally the GiB of a card to which PyTorch's memory is limited.
Random weights in `TANDEM_CHECKS`, two steps with guidance: memory depends on neither. Each job runs `resolve`
and `run_job` as in the app, with nothing loaded before it. Prints a JSON object per job and appends it to
$OUT/jobs.jsonl: estimated and measured bytes, on the GPU by stage (PyTorch's, so without the CUDA context) and in RAM.
"""

import argparse
import gc
import os
import shutil
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo,
    AutoencoderKLWan,
    HunyuanVideoFramepackTransformer3DModel,
    WanTransformer3DModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    LlamaConfig,
    LlamaModel,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
    UMT5Config,
    UMT5EncoderModel,
)

from bench.gpu import results
from bench.gpu.residency import measured
from runtime.core.cancel import Cancel
from runtime.core.events import Event, Failed, FellBack, SectionDone, VideoSaved
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.execution.residency import Residency
from runtime.families.hunyuan_video.spec import SKIPPED_LAYERS
from runtime.machine.probe import Machine, probe
from runtime.models.images import with_images
from runtime.models.registry import published_models, read_spec
from runtime.models.spec import ModelSpec
from runtime.pipeline import section_stages, stages
from runtime.pipeline.blank_video import Detector
from runtime.pipeline.history_file import HistoryFile
from runtime.pipeline.run import run_job
from runtime.planner.memory_model import baseline_bytes
from runtime.planner.resolve import PlanningContext, resolve
from tests import tiny_models
from tests.families import framepack_models
from tests.published_specs import TRANSFORMERS, UMT5, VAES

FRAMEPACK = published_models("framepack")
HOME = Path(os.environ.get("TANDEM_CHECKS", "/tmp/tandem-checks"))
# Architecture, width, height, frames.
MODELS = {
    "wan2.1-1.3b": ("wan2.1", 832, 480, 81),
    "wan2.2-ti2v-5b": ("wan2.2-ti2v-5b", 1280, 704, 121),
    "wan2.2-a14b": ("wan2.2-a14b", 832, 480, 81),
    "wan2.2-i2v-a14b": ("wan2.2-i2v-a14b", 832, 480, 81),
    "framepack-i2v": ("framepack", 832, 480, 73),
}
# LLaMA's computed layers: its memory while it is not resident depends on one or two.
LLAMA_LAYERS = 4
IMAGE = Path(__file__).parents[2] / "examples" / "boat.png"
GIB = 1 << 30
# Offload and quantization, as asked for.
WAYS = [
    ("auto", "auto"),
    ("group", "none"),
    ("sequential", "none"),
    ("none", "fp8"),
    ("model", "none"),
    ("model", "fp8"),
    ("none", "bnb-4bit"),
    ("model", "bnb-4bit"),
    ("none", "bnb-8bit"),
]


class Unjudged(Detector):
    """Disables the check for degenerate clips: random weights show noise."""

    def inspect(self, frames: Any) -> None:
        """Accept any frames."""


class Captured(HistoryFile):
    """Captures the measurements of the last job instead of writing them to the history."""

    def add_job(
        self,
        planned: ExecutionPlan,
        ran: ExecutionPlan,
        spec: ModelSpec,
        timings: Mapping[str, float],
        peaks: Mapping[str, int],
        *,
        loaded: bool = False,
    ) -> None:
        """Record the peaks."""
        self.peaks = dict(peaks)


say = partial(results.say, "jobs.jsonl")


def save(make: Any, folder: Path, device: str) -> None:
    """Save a module with random weights in bfloat16."""
    with torch.device("meta"):
        made = make()
    made = made.to(torch.bfloat16).to_empty(device=device)
    if isinstance(made, UMT5EncoderModel):
        made.tie_weights()  # making it empty unties its embedding
    for name, tensor in (*made.named_parameters(), *made.named_buffers()):
        if tensor.is_floating_point():
            # Norms near one, so that attention is neither flat nor sharp: sparse attention depends on that.
            torch.nn.init.normal_(tensor, float("norm" in name and name.endswith("weight")), 0.02)
    if folder.exists():
        shutil.rmtree(folder)
    made.save_pretrained(folder)
    del made, tensor
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def model(name: str, arguments: argparse.Namespace) -> ModelSpec:
    """Return a model of one of the published architectures; both experts share the same files."""
    architecture = MODELS[name][0]
    folder = HOME / name
    if architecture == "framepack":
        return framepack(folder, arguments)
    tiny_models.build(architecture, folder)
    if arguments.small:
        return read_spec(folder, name)
    text = HOME / "text_encoder"
    if not text.exists():
        save(lambda: UMT5EncoderModel(UMT5Config(**UMT5)), text, arguments.device)
    shutil.rmtree(folder / "text_encoder")
    (folder / "text_encoder").symlink_to(text)
    save(partial(WanTransformer3DModel, **TRANSFORMERS[name]), folder / "transformer", arguments.device)
    if (folder / "transformer_2").exists():
        shutil.rmtree(folder / "transformer_2")
        (folder / "transformer_2").symlink_to(folder / "transformer")
    vae = VAES.get(name, VAES["wan2.1"])
    save(partial(AutoencoderKLWan, **vae), folder / "vae", arguments.device)
    return read_spec(folder, name)


def framepack(folder: Path, arguments: argparse.Namespace) -> ModelSpec:
    """Return FramePack with few layers of LLaMA."""
    framepack_models.pipeline().save_pretrained(folder)
    if arguments.small:
        return read_spec(folder, folder.name)
    configs = FRAMEPACK[0].configs
    llama = {**configs["text_encoder"], "num_hidden_layers": LLAMA_LAYERS + SKIPPED_LAYERS}
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    side = configs["image_encoder"]["image_size"]
    SiglipImageProcessor(size={"height": side, "width": side}).save_pretrained(folder / "feature_extractor")
    for part, make in {
        "text_encoder": lambda: LlamaModel(LlamaConfig(**llama, **ids)),
        "text_encoder_2": lambda: CLIPTextModel(CLIPTextConfig(**configs["text_encoder_2"], **ids)),
        "image_encoder": lambda: SiglipVisionModel(SiglipVisionConfig(**configs["image_encoder"])),
        "vae": lambda: AutoencoderKLHunyuanVideo(**configs["vae"]),
        "transformer": lambda: HunyuanVideoFramepackTransformer3DModel(**configs["transformer"]),
    }.items():
        save(make, folder / part, arguments.device)
    return read_spec(folder, folder.name)


def on_card(machine: Machine, gib: float | None) -> Machine:
    """Return a machine whose first GPU has so many GiB, of which 5 % are in use, and limit PyTorch to them."""
    if not machine.gpus:
        return machine
    if gib is None:
        torch.cuda.set_per_process_memory_fraction(1.0)
        return machine
    card, free = machine.gpus[0], int(0.95 * gib * GIB)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((free - baseline_bytes("cuda:0")) / card.total_bytes)
    return replace(machine, gpus=(replace(card, total_bytes=int(gib * GIB), free_bytes=free),))


def allocated(device: str) -> tuple[int, int]:
    """Return the bytes that PyTorch has on the GPU, now and at most so far."""
    if not device.startswith("cuda"):
        return 0, 0
    return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()


def job(spec: ModelSpec, way: tuple[str, str, float | None], arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one job and return its estimated and measured figures; see `ways`."""
    offload, quantization, card = way
    _, width, height, frames = MODELS[spec.name]
    size: dict[str, Any] = {} if not arguments.small else {"width": 64, "height": 64, "frames": 9}
    if spec.section is not None:
        size |= {"image": str(IMAGE), "frames": 36 * arguments.sections + 1}
    request = GenerationRequest.from_mapping(
        {
            "prompt": "a red boat",
            "model": str(spec.directory),
            "steps": arguments.steps,
            "seed": 1,
            "offload": offload,
            "quantization": quantization,
            **({"width": width, "height": height, "frames": frames} | size),
        }
    )
    spec = with_images(spec, request, HOME, None)
    machine = on_card(probe(), card)
    plan = resolve(request, spec, PlanningContext(machine, HOME / "job.mp4"))
    captured = Captured(HOME, machine)
    events: list[Event] = []
    by_section: list[tuple[int, int]] = []

    def emit(event: Event) -> None:
        events.append(event)
        if isinstance(event, SectionDone):
            by_section.append(allocated(arguments.device))

    with Residency() as residency, measured(arguments.device) as found:
        run_job(plan, spec, emit, Cancel(), residency, history=captured)
    end = events[-1]
    context = baseline_bytes(arguments.device)
    forecast: dict[str, int] = {}
    for stage in plan.memory:
        # Components that encode are also measured one by one.
        for name in (stage.stage, stage.component):
            forecast[name] = max(forecast.get(name, 0), stage.peak_bytes - context)
    what = {
        "strategy": str(plan.forecast.title),
        "tile": plan.strategy.decode_tile,
        "by_section": by_section,
        "forecast": forecast,
        "forecast_ram": plan.forecast.ram_bytes,
        "ram": found["ram"],
        "reserved": found.get("reserved"),
        "wall_seconds": found["seconds"],
        "fell_back": [str(event.reason) for event in events if isinstance(event, FellBack)],
    }
    if not isinstance(end, VideoSaved):
        return {**what, "failed": end.what if isinstance(end, Failed) else str(end)}
    seconds = {stage: round(plan.seconds[stage].likely, 2) for stage in ("encode", "denoise", "decode", "load")}
    return {
        **what,
        "measured": captured.peaks,
        "off": {
            stage: round(peak / forecast[stage] - 1, 3) for stage, peak in captured.peaks.items() if stage in forecast
        },
        "forecast_seconds": seconds,
        "seconds": {**end.timings, "load": end.load_seconds},
    }


def ways(arguments: argparse.Namespace) -> list[tuple[str, str, float | None]]:
    """Return offload, quantization and the GiB of a card, of each job."""
    if not arguments.ways:
        return [(*way, None) for way in WAYS]
    found = []
    for way in arguments.ways.split(","):
        offload, quantization, *card = way.split(":")
        found.append((offload, quantization, float(card[0]) if card else None))
    return found


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=3600, help="start no job after so long")
    parser.add_argument("--offload", help="only this one")
    parser.add_argument("--ways", help="only these: OFFLOAD:QUANTIZATION[:GIB],…")
    parser.add_argument("--sections", type=int, default=2, help="of models that make videos in sections")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="tiny models: for a rehearsal on a CPU")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("models", nargs="*", default=list(MODELS))
    arguments = parser.parse_args()
    started = time.monotonic()
    for module in (stages, section_stages):
        module.Detector = Unjudged  # type: ignore[attr-defined]  # random weights may well show one colour
    HOME.mkdir(parents=True, exist_ok=True)
    say(part="machine", torch=torch.__version__, gpus=[gpu.name for gpu in probe().gpus])
    for name in arguments.models:
        begun = time.monotonic()
        spec = model(name, arguments)
        say(model=name, made_seconds=round(time.monotonic() - begun, 1), parameters=dict(spec.parameters))
        for offload, quantization, card in ways(arguments):
            if arguments.offload not in {None, offload}:
                continue
            if time.monotonic() - started > arguments.seconds:
                say(model=name, offload=offload, quantization=quantization, skipped="no time left")
                continue
            try:
                found = job(spec, (offload, quantization, card), arguments)
            except Exception as error:
                traceback.print_exc()
                found = {"failed": f"{type(error).__name__}: {error}"[:500]}
            say(model=name, offload=offload, quantization=quantization, card=card, **found)
        shutil.rmtree(HOME / name)


if __name__ == "__main__":
    main()
