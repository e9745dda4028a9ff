"""Measure a decoder of single frames on a CPU: PyTorch and engines in turn, so that other programs slow all alike.

    python bench/dcae_cpu.py [--model diorama-dcae] [--rounds 20] [--threads 2]

Eight frames a call, through `make_batched_decode_fn`; a missing engine is built first. Prints the median and the least
milliseconds of each, and how many times as fast as PyTorch it is in the median of the rounds. Engines of ONNX Runtime
use the provider of the installed package, which is OpenVINO on an x86 CPU; it is printed.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from runtime.families.dcae import BatchedDecoder, load_decoder, make_batched_decode_fn

BACKENDS = ("pytorch", "onnxruntime", "inductor")


def provider_of(decode: BatchedDecoder) -> str:
    """Return the backend that a function ran on, and its provider if it has several."""
    record = next((one for one in decode.service.store.index() if one.id == decode.engine), None)
    provider = dict(record.key.options).get("provider", "") if record is not None else ""
    return f"{decode.backend} with {provider}" if provider else decode.backend


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="diorama-dcae")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    decoder: Any = load_decoder(arguments.model)
    spec = decoder.tandem_spec
    size = spec.vae.latent_size(spec.defaults.height, spec.defaults.width)
    latents = torch.randn(1, 8, spec.vae.z_dim, *size, generator=torch.Generator().manual_seed(0))
    functions = {backend: make_batched_decode_fn(decoder, backend=backend) for backend in BACKENDS}
    frames = {backend: decode(latents) for backend, decode in functions.items()}
    seconds: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for _ in range(arguments.rounds):
        for backend, decode in functions.items():
            started = time.perf_counter()
            decode(latents)
            seconds[backend].append(time.perf_counter() - started)
    for backend, own in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(seconds["pytorch"], own, strict=True))
        error = ((frames[backend] - frames["pytorch"]).norm() / frames["pytorch"].norm()).item()
        ran = provider_of(functions[backend])
        sys.stdout.write(
            f"{backend} (on {ran}): median {1000 * statistics.median(own):.0f} ms, least {1000 * min(own):.0f} ms, "
            f"{ratio:.2f} times as fast as PyTorch, error {error:.1e}\n"
        )


if __name__ == "__main__":
    main()
