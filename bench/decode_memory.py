"""Measure the peak memory of `decode` for short and long files of latents: it must not grow with their length.

    python bench/decode_memory.py [--frames 2000,20000] [--model diorama-dcae] [--latent 2x4] [--backend pytorch]

Each file of random latents is decoded by `python app.py decode` in a process of its own. Prints the length, the size of
the file, the peak resident memory of that process (ffmpeg, its child, is not included), and the seconds.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import psutil

from runtime.core import settings
from runtime.models.catalogue import find

ROOT = Path(__file__).parents[1]
_POLL_SECONDS = 0.05
_PART = 1000


def write_latents(file: Path, shape: tuple[int, int, int, int]) -> None:
    """Write random latents in float16, a part at a time."""
    random = np.random.default_rng(0)
    stored = np.lib.format.open_memmap(file, mode="w+", dtype=np.float16, shape=shape)
    for start in range(0, shape[0], _PART):
        part = stored[start : start + _PART]
        part[:] = random.standard_normal(part.shape, np.float32)


def peak_of(command: list[str]) -> tuple[int, float]:
    """Run a command; return its peak resident memory in bytes, and the seconds."""
    started, peak = time.monotonic(), 0
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            peak = max(peak, watched.memory_info().rss)
            time.sleep(_POLL_SECONDS)
    if process.returncode:
        sys.exit(process.returncode)
    return peak, time.monotonic() - started


def main() -> None:
    """Decode the files, the shortest first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", default="2000,20000")
    parser.add_argument("--model", default="diorama-dcae")
    parser.add_argument("--latent", default="2x4", help="height x width")
    parser.add_argument("--backend", default="pytorch")
    arguments = parser.parse_args()
    spec = find(arguments.model, settings.load().weights_dir)
    height, width = (int(side) for side in arguments.latent.split("x"))
    for frames in map(int, arguments.frames.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            file, video = Path(folder, "latents.npy"), Path(folder, "video.mp4")
            write_latents(file, (frames, spec.vae.z_dim, height, width))
            command = [sys.executable, "app.py", "decode", str(file), "--model", arguments.model, "--out", str(video)]
            peak, seconds = peak_of([*command, "--backend", arguments.backend])
            sys.stdout.write(
                f"{frames} frames, {file.stat().st_size / 1e6:.1f} MB of latents: "
                f"peak {peak / 1e6:.0f} MB, {seconds:.0f} s\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
