"""Measure loading and a forward pass of one expert of Wan2.2-A14B from single files.

    python bench/gpu/files.py [--formats BF16,FP8,Q8_0,Q4_K] [--frames 81] [--device cuda:0] [--small]

Writes files with random weights to a temporary folder. The file was just written, so it is in the file cache. Prints a
JSON object per format: seconds to load, seconds of a pass (of three, the least), and bytes of weights and of the peak.
"""

import argparse
import functools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from runtime.core.plan import ComponentPlan
from runtime.families.wan import file_names
from runtime.models.catalogue import look_up
from runtime.models.registry import published_models
from runtime.models.weights import load_module
from runtime.planner.memory_model import weights_bytes
from tests import tiny_models
from tests.transformer_files import random_blocks

KNOWN = published_models("wan")


def write(path: Path, kind: str, config: dict[str, object]) -> None:
    """Write a transformer with random weights, the same in all parameters of a shape: to draw all takes minutes."""
    writer = gguf.GGUFWriter(path, "wan") if path.suffix == ".gguf" else None
    tensors, random = {}, np.random.default_rng(0)

    @functools.cache
    def blocks(shape: tuple[int, ...]) -> Any:
        return random_blocks(kind, shape, random)

    @functools.cache
    def values(shape: tuple[int, ...]) -> torch.Tensor:
        return 0.02 * torch.randn(shape)

    for name, shape in file_names.parameters(config):
        matrix = "blocks." in name and len(shape) == 2
        if writer is not None and matrix:
            number = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, blocks(shape), raw_dtype=number)
        elif writer is not None:
            writer.add_tensor(name, values(shape).numpy().astype(np.float16))
        else:
            tensors[name] = values(shape).to(torch.float8_e4m3fn if matrix and kind == "FP8" else torch.bfloat16)
            if matrix and kind == "FP8":
                tensors[f"{name.removesuffix('.weight')}.scale_weight"] = torch.ones(1)
    if writer is None:
        save_file(tensors, path)
        return
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def measure(path: Path, device: str, frames: int, sides: tuple[int, int]) -> dict[str, object]:
    """Load a file and run passes."""
    spec = look_up(str(path), path.parent)
    dtype = "bfloat16" if device.startswith("cuda") else "float32"
    part = ComponentPlan(backend="pytorch", device=device, dtype=dtype, weights_bytes=0, reasons=())
    synchronize = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    started = time.perf_counter()
    module = load_module(spec, "transformer", part)
    synchronize()
    found: dict[str, object] = {"title": spec.title, "load_seconds": time.perf_counter() - started}
    found["planned_bytes"] = weights_bytes(spec, dict.fromkeys(spec.component_names, dtype))["transformer"]
    found["weights_bytes"] = sum(one.nbytes for one in (*module.parameters(), *module.buffers()))
    values = getattr(torch, dtype)
    latents = torch.randn(1, 16, (frames - 1) // 4 + 1, *sides, device=device, dtype=values)
    text = torch.randn(1, 512, spec.transformer.text_dim, device=device, dtype=values)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        with torch.inference_mode():
            module(latents, torch.tensor([900.0], device=device), text, return_dict=False)
        synchronize()
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() if device.startswith("cuda") else None
    return found | {"pass_seconds": min(seconds), "peak_bytes": peak}


def main() -> None:
    """Measure each format."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--formats", default="BF16,FP8,Q8_0,Q4_K")
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--small", action="store_true", help="a tiny model: for a rehearsal on a CPU")
    arguments = parser.parse_args()
    config = dict(KNOWN[0].configs["transformer"]) | {"pos_embed_seq_len": None}
    sides = (60, 104)
    if arguments.small:
        sides = (4, 4)
    for kind in arguments.formats.split(","):
        with tempfile.TemporaryDirectory() as folder:
            suffix = ".gguf" if kind.startswith("Q") else ".safetensors"
            path = Path(folder, f"wan-high-noise-{kind}{suffix}")
            small = (
                {"num_attention_heads": 2, "num_layers": 1, "ffn_dim": 256, "text_dim": 32} if arguments.small else {}
            )
            if arguments.small:
                tiny_models.build("wan2.1", Path(folder, "base"))
            for expert in ("high", "low"):
                other = path.with_name(path.name.replace("high", expert))
                if expert == "high":
                    write(other, kind, config | small)
                else:  # the same file: only one expert is measured
                    other.hardlink_to(path)
            measured = _measured(path, arguments, sides)
            sys.stdout.write(json.dumps({"format": kind, **measured}) + "\n")
            sys.stdout.flush()


def _measured(path: Path, arguments: argparse.Namespace, sides: tuple[int, int]) -> dict[str, object]:
    if arguments.device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return measure(path, arguments.device, arguments.frames, sides)


if __name__ == "__main__":
    main()
