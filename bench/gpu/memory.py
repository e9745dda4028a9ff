"""Measure Wan's components on a GPU at full size: weights, working memory, seconds.

    python bench/gpu/memory.py [PART …]     of transformers, vaes, text; all by default

Random weights: neither memory nor speed depends on their values. Prints a JSON object per measurement, and appends it
to $OUT/memory.jsonl. Bytes are PyTorch's: `weights` stay allocated between calls, `working` is what a call allocates
on top of them and its inputs at its peak, `reserved` what the allocator took from the driver for all of it.
"""

import gc
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from bench.gpu import results
from bench.gpu.timing import call_seconds
from runtime.execution.text_encoder import PyTorchTextModel
from runtime.families.wan.transformer import PyTorchDenoiser
from runtime.families.wan.vae import PyTorchVideoDecoder
from tests.published_specs import TRANSFORMERS, UMT5, VAES

# Width, height, frames.
CLIPS = {
    "wan2.1-1.3b": [(832, 480, 81), (832, 480, 33), (480, 272, 49)],
    "wan2.2-a14b": [(832, 480, 81), (832, 480, 33), (1280, 720, 81)],
    "wan2.2-i2v-a14b": [(832, 480, 81)],
    "wan2.2-ti2v-5b": [(1280, 704, 121), (1280, 704, 49), (832, 480, 81)],
}
DECODED = {
    "wan2.1": [(832, 480), (1280, 720), (480, 272)],
    "wan2.2-ti2v-5b": [(1280, 704), (832, 480)],
}
DEVICE = "cuda:0"


say = partial(results.say, "memory.jsonl")


@contextmanager
def module(make: Callable[[], torch.nn.Module], dtype: torch.dtype) -> Iterator[tuple[Any, int]]:
    """Yield a module with random weights on the GPU, and their bytes; free it afterwards."""
    before = torch.cuda.memory_allocated()
    with torch.device("meta"):
        made = make()
    made = made.to(dtype).to_empty(device=DEVICE).eval().requires_grad_(False)
    for tensor in (*made.parameters(), *made.buffers()):
        if tensor.is_floating_point():
            tensor.normal_(0, 0.02)
    try:
        yield made, torch.cuda.memory_allocated() - before
    finally:
        del made, tensor
        gc.collect()
        torch.cuda.empty_cache()


def call(run: Callable[[], object], repeats: int) -> dict[str, Any]:
    """Run a function and return its peak bytes and median seconds."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    working, reserved = torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved()
    seconds = [call_seconds(run, cuda=True) for _ in range(repeats)]
    return {"working": working, "reserved": reserved, "seconds": round(statistics.median(seconds), 4)}


def transformers() -> None:
    """Measure one forward pass of each transformer in bfloat16."""
    for name, config in TRANSFORMERS.items():
        with module(partial(WanTransformer3DModel, **config), torch.bfloat16) as (made, weights):
            made.rope = type(made.rope)(128, (1, 2, 2), 1024).to(DEVICE)
            large_vae = config.get("in_channels") == TRANSFORMERS["wan2.2-ti2v-5b"]["in_channels"]
            denoiser = PyTorchDenoiser(made)
            text = torch.randn(1, 512, 4096, device=DEVICE, dtype=torch.bfloat16)
            timestep = torch.tensor(500.0, device=DEVICE)
            for width, height, frames in CLIPS[name]:
                scale = 16 if large_vae else 8
                size = (1, config.get("in_channels", 16), (frames - 1) // 4 + 1, height // scale, width // scale)
                latents = torch.randn(size, device=DEVICE)
                found = call(partial(denoiser, latents, timestep, text), 2)
                say(
                    part="transformer",
                    model=name,
                    dtype="bfloat16",
                    size=[width, height, frames],
                    weights=weights,
                    **found,
                )


def vaes() -> None:
    """Measure decoding of 9 latent frames by frames per call; memory does not grow with the clip."""
    for name, config in VAES.items():
        for dtype in (torch.float32, torch.bfloat16):
            with module(partial(AutoencoderKLWan, **config), dtype) as (made, weights):
                del made.encoder
                gc.collect()
                decoder = PyTorchVideoDecoder(made)
                scale, channels = made.config.scale_factor_spatial, made.config.z_dim
                for width, height in DECODED[name]:
                    latents = torch.randn(1, channels, 9, height // scale, width // scale, device=DEVICE)
                    for chunk in (1, 2, 4):
                        say(
                            part="vae",
                            model=name,
                            dtype=str(dtype).removeprefix("torch."),
                            size=[width, height, 33],
                            chunk=chunk,
                            weights=weights,
                            **call(partial(decode, decoder, latents, chunk), 1),
                        )


def decode(decoder: PyTorchVideoDecoder, latents: torch.Tensor, chunk: int) -> None:
    """Decode as a job does: frames are copied from the GPU as bytes."""
    for frames in decoder.frames(latents, chunk):
        frames.mul(127.5).add(127.5).to(torch.uint8).cpu()


def text() -> None:
    """Measure UMT5-XXL with 512 tokens in bfloat16."""
    with module(lambda: UMT5EncoderModel(UMT5Config(**UMT5)), torch.bfloat16) as (made, weights):
        model = PyTorchTextModel(made, DEVICE)
        ids = torch.randint(1, 1000, (1, 512), device=DEVICE)
        mask = torch.ones_like(ids)
        found = call(lambda: model(ids, mask), 3)
        say(part="text_encoder", model="umt5-xxl", dtype="bfloat16", tokens=512, weights=weights, **found)


def main() -> None:
    """Measure."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    say(part="machine", gpu=torch.cuda.get_device_name(), torch=torch.__version__, context=total - free, total=total)
    parts = {part.__name__: part for part in (transformers, vaes, text)}
    for name in sys.argv[1:] or parts:
        parts[name]()


if __name__ == "__main__":
    main()
