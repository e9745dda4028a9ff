"""Measures the working set of decoding on a CPU, each clip in its own process: rows of `measured_cpu.jsonl`.

    python -m bench.vae_cpu --width 768 --height 512 --frames 9 --chunk 2

Linux only: it reads /proc. "working" is the peak beyond what was held before, after a tiny clip that loads libraries
and starts threads. It counts what malloc does not give back, which varies from run to run by up to 0.3 GB.
"""

import argparse
import ctypes
import gc
import json
import sys
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan

from runtime.core.cancel import Cancel
from runtime.families.wan.vae import PyTorchVideoDecoder
from runtime.models.catalogue import EMBEDDED
from runtime.pipeline.sampling import decode

# The shipped model's, and one with so few channels that PyTorch computes all convolutions by itself.
NARROW = {"base_dim": 4, "z_dim": 16, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}


def made(name: str) -> AutoencoderKLWan:
    """Return a VAE: "diorama" or "narrow"."""
    torch.manual_seed(0)
    if name == "narrow":
        vae = AutoencoderKLWan(**NARROW)
    else:
        vae = AutoencoderKLWan.from_pretrained(EMBEDDED / name / "vae", torch_dtype=torch.float32)
    return vae.eval().requires_grad_(False)


def status(key: str) -> int:
    """Return a value of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def run(vae: AutoencoderKLWan, size: tuple[int, int, int], chunk: int, tile: int | None) -> None:
    """Decode random latents as a job does."""
    width, height, frames = size
    shape = (1, vae.config.z_dim, (frames - 1) // 4 + 1, height // 8, width // 8)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    count = sum(len(part.numpy()) for part in decode(PyTorchVideoDecoder(vae), latents, chunk, Cancel(), tile))
    assert count == frames


def main() -> None:
    """Measure one clip and print its row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vae", choices=["diorama", "narrow"], default="diorama")
    for name, default in (("width", 768), ("height", 512), ("frames", 9), ("chunk", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tile", type=int, default=None, help="side of the tiles, in latents")
    arguments = parser.parse_args()
    size = (arguments.width, arguments.height, arguments.frames)
    vae = made(arguments.vae)
    run(vae, (64, 64, 5), 1, None)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    run(vae, size, arguments.chunk, arguments.tile)
    row = {"vae": arguments.vae, "size": size, "chunk": arguments.chunk, "tile": arguments.tile}
    sys.stdout.write(json.dumps(row | {"before": before, "working": status("VmHWM") - before}) + "\n")


if __name__ == "__main__":
    main()
