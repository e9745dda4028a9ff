"""Measure each memory strategy on a GPU at Wan2.2-A14B's width: memory, seconds, error.

    python bench/gpu/residency.py [--blocks 4] [--seconds 480] [--small] [--device D] [PART …] of latents, tiles

Random weights, two experts of a few blocks, Wan2.1's VAE. Prints a JSON object per measurement and appends it to
$OUT/residency.jsonl. `vram` is the peak that PyTorch allocated, `ram` the peak growth of the process, `left` the bytes
still allocated after everything was freed; `error` is that of the latents relative to `none`.
"""

import argparse
import gc
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel

from bench.gpu import results
from runtime.core.plan import ExecutionPlan
from runtime.execution.residency import Residency
from runtime.families.wan.vae import PyTorchVideoDecoder
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec
from tests import tiny_models
from tests.pipeline.test_parity import sample
from tests.plans import tiny_plan, with_strategy

# (offload, quantization, whether parts stay loaded)
WAYS = [
    ("none", "none", False),
    ("none", "none", True),
    ("model", "none", False),
    ("group", "none", False),
    ("sequential", "none", False),
    ("none", "fp8", False),
    ("none", "bnb-8bit", False),
    ("none", "bnb-4bit", False),
    ("model", "fp8", False),
    ("model", "bnb-4bit", False),
    ("group", "fp8", False),
    ("group", "bnb-4bit", False),
    ("sequential", "fp8", False),
    ("sequential", "bnb-4bit", False),
]
STARTED = time.monotonic()
TILES = (None, 64, 48, 32)


say = partial(results.say, "residency.jsonl")


@contextmanager
def measured(device: str) -> Iterator[dict[str, float]]:
    """Yield a mapping that receives peaks and seconds."""
    found: dict[str, float] = {}
    process, stop = psutil.Process(), threading.Event()
    before = peak = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.02):
            peak = max(peak, process.memory_info().rss)

    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    started = time.perf_counter()
    try:
        yield found
    finally:
        if cuda:
            torch.cuda.synchronize()
            found["vram"] = torch.cuda.max_memory_allocated()
            found["reserved"] = torch.cuda.max_memory_reserved()
        found["seconds"] = round(time.perf_counter() - started, 3)
        stop.set()
        thread.join()
        found["ram"] = peak - before


def model(folder: Path, arguments: argparse.Namespace) -> ModelSpec:
    """Save a model with two wide experts of random weights."""
    tiny_models.build("wan2.2-a14b", folder)
    heads, inner = (4, 512) if arguments.small else (40, 13824)
    for seed, name in enumerate(("transformer", "transformer_2")):
        torch.manual_seed(seed)
        with torch.device("meta"):
            made = WanTransformer3DModel(
                num_attention_heads=heads, ffn_dim=inner, num_layers=arguments.blocks, text_dim=32, rope_max_seq_len=128
            )
        made = made.to(torch.bfloat16).to_empty(device=arguments.device)
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, 0, 0.02)
        rope = type(made.rope)(128, (1, 2, 2), 128)
        made.rope = rope
        shutil.rmtree(folder / name)
        made.save_pretrained(folder / name)
        del made
    gc.collect()
    return read_spec(folder, "wide")


def with_weights(plan: ExecutionPlan, offload: str, quantization: str, keep: bool) -> ExecutionPlan:
    """Return the plan with a memory strategy."""
    plan = with_strategy(plan, offload=offload, keep_loaded=keep)
    for name in ("transformer", "transformer_2"):
        plan = plan.with_component(name, plan.components[name].replace(quantization=quantization))
    return plan


def latents(arguments: argparse.Namespace) -> None:
    """Measure four steps with guidance, twice: the second job reuses what the first loaded."""
    cuda = arguments.device.startswith("cuda")
    with tempfile.TemporaryDirectory() as folder:
        spec = model(Path(folder), arguments)
        size = {"width": 64, "height": 32} if arguments.small else {"width": 832, "height": 480}
        plan = tiny_plan(spec, Path("x.mp4"), negative_prompt="blue ball", **size)
        parts = {
            name: part.replace(device=arguments.device, dtype="bfloat16" if name != "vae" else "float32")
            for name, part in plan.components.items()
        }
        plan = plan.replace(components=parts)
        say(part="model", blocks=arguments.blocks, expert_bytes=2 * spec.parameters["transformer"], tokens=plan.tokens)
        wanted: torch.Tensor | None = None
        for offload, quantization, keep in WAYS:
            what = {"part": "latents", "offload": offload, "quantization": quantization, "keep_loaded": keep}
            try:
                if time.monotonic() - STARTED > arguments.seconds:
                    raise TimeoutError("no time is left")
                gc.collect()
                before = torch.cuda.memory_allocated() if cuda else 0
                with Residency() as residency:
                    asked = with_weights(plan, offload, quantization, keep)
                    with measured(arguments.device) as first:
                        got = sample(spec, asked, residency).cpu()
                    loaded = residency.load_seconds
                    with measured(arguments.device) as second:
                        again = sample(spec, asked, residency).cpu()
                left = torch.cuda.memory_allocated() - before if cuda else 0
                wanted = got if wanted is None else wanted
                say(
                    **what,
                    error=((got - wanted).norm() / wanted.norm()).item(),
                    repeats=torch.equal(got, again),
                    first=first,
                    second=second,
                    load_seconds=[round(loaded, 3), round(residency.load_seconds - loaded, 3)],
                    left=left,
                )
            except Exception as error:
                traceback.print_exc()
                say(**what, failed=f"{type(error).__name__}: {error}"[:500])


@torch.no_grad()
def tiles(arguments: argparse.Namespace) -> None:
    """Measure decoding 3 latent frames of 720p, at once and in tiles."""
    torch.manual_seed(0)
    small = {"base_dim": 4, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1} if arguments.small else {}
    vae: Any = AutoencoderKLWan(**small).to(arguments.device).eval().requires_grad_(False)
    vae.encoder = None
    decoder = PyTorchVideoDecoder(vae, arguments.device)
    z = torch.randn(1, 16, 3, 90, 160, device=arguments.device)
    for tile in TILES:
        what = {"part": "tiles", "size": [1280, 720, 9], "tile": tile}
        try:
            if arguments.device.startswith("cuda"):
                torch.cuda.empty_cache()
            with measured(arguments.device) as found:
                count = sum(map(len, map(torch.Tensor.cpu, decoder.frames(z, 1, tile))))
            say(**what, frames=count, **found)
        except Exception as error:
            traceback.print_exc()
            say(**what, failed=f"{type(error).__name__}: {error}"[:500])


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=480, help="begin nothing after so many")
    parser.add_argument("--small", action="store_true", help="narrow experts: for a rehearsal on a CPU")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("parts", nargs="*", default=["latents", "tiles"])
    arguments = parser.parse_args()
    name = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "CPU"
    say(part="machine", device=name, torch=torch.__version__, ram=psutil.virtual_memory().total)
    parts = {"latents": partial(latents, arguments), "tiles": partial(tiles, arguments)}
    for part in arguments.parts:
        parts[part]()


if __name__ == "__main__":
    main()
