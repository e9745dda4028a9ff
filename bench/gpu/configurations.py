"""Compare configurations at true size on a GPU, through the same code as `bench` and `tools.forward`.

    python bench/gpu/configurations.py [--small] [--runs N] [--exact] PART …

of `480p`, `720p` (one expert of Wan2.2-A14B, bfloat16 and FP8, and its VAE; random weights made on the device),
`jobs` (clips with random weights on disk, as in jobs.py) and `diorama` (the shipped model). `--exact`
measures errors against float32 at 720p too, which takes minutes. `--small` runs all parts on tiny models, also on a
CPU. `jobs` and `diorama` write videos: they need ffmpeg (IMAGEIO_FFMPEG_EXE).

Each prints a JSON object per finished configuration, and updates its result in $OUT/PART.json.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu import jobs
from runtime.bench import render, result_files
from runtime.bench.benchmark import Bench, Setup
from runtime.bench.configurations import Configuration
from runtime.bench.recorder import UnwrittenHistory
from runtime.core.cancel import Cancel
from runtime.core.request import GenerationRequest
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.machine.probe import probe
from runtime.pipeline import video_output
from tests import tiny_models
from tools.forward.measure import Forward, ForwardSetup, rows

OUT = Path(os.environ.get("OUT", "."))
SIZES = {"480p": (832, 480), "720p": (1280, 720)}
FRAMES = 81
# What an H200 does in bfloat16 in long matrix products.
TERA_OPERATIONS = 790.0
# Name, and what differs from the plan.
FORWARD: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bf16", {"quantization": "none"}),
    ("fp8", {"quantization": "fp8"}),
)
JOBS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bf16", {"quantization": "none", "offload": "none"}),
    ("fp8", {"quantization": "fp8", "offload": "none"}),
    ("parts wait", {"quantization": "none", "offload": "model"}),
)


def write(line: str) -> None:
    """Print one line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def configurations(
    named: Sequence[tuple[str, dict[str, Any]]], common: dict[str, Any], *, quantized: bool
) -> list[Configuration]:
    """Return configurations; those with quantized weights only if they are available."""
    return [
        Configuration(
            name=name,
            flags=json.dumps(values),
            request=GenerationRequest.from_mapping({"prompt": "x"} | common | values),
        )
        for name, values in named
        if quantized or values.get("quantization", "none") == "none"
    ]


def forward(part: str, arguments: argparse.Namespace, folder: Path) -> None:
    """Measure passes at one size."""
    width, height = (64, 32) if arguments.small else SIZES[part]
    model = str(tiny_models.build("wan2.2-a14b", folder / "tiny")) if arguments.small else "wan2.2-t2v-a14b"
    common = {"model": model, "width": width, "height": height, "frames": 9 if arguments.small else FRAMES, "seed": 1}
    setup = ForwardSetup(
        machine=probe(),
        engines=None,
        weights_dir=folder / "weights",
        random=True,
        runs=arguments.runs,
        tera_operations=TERA_OPERATIONS,
        exact=part == "480p" or arguments.exact,
    )
    shown = 0

    def saved(now: Forward) -> None:
        nonlocal shown
        result = now.to_json()
        result_files.write_json(OUT / f"{part}.json", result)
        for one in result["configurations"][shown:]:
            write(json.dumps(one))
        shown = len(result["configurations"])

    measurement = Forward(setup, configurations(FORWARD, common, quantized=not arguments.small), write, saved)
    measurement.measure(Cancel())
    for row in rows(measurement.to_json()):
        write(" | ".join(row))


def clips(part: str, arguments: argparse.Namespace, folder: Path) -> None:
    """Measure clips, with random weights or of the shipped model."""
    machine = probe()
    common: dict[str, Any] = {"seed": 1}
    if part == "jobs":
        spec = jobs.model("wan2.2-a14b", arguments)
        size = (64, 32, 9) if arguments.small else (*SIZES["480p"], FRAMES)
        common |= {"model": str(spec.directory), "steps": arguments.steps}
        common |= dict(zip(("width", "height", "frames"), size, strict=True))
        named = JOBS
    else:
        common |= {"model": "diorama", "steps": 2, "frames": 5} if arguments.small else {"model": "diorama"}
        named = (("pytorch", {"backends": {"all": "pytorch"}}), ("parts wait", {"offload": "model"}))
    setup = Setup(
        machine=machine,
        engines=EngineService(EngineStore(folder / "engines", 10**11), machine, folder),
        history=UnwrittenHistory(folder, machine),
        weights_dir=folder / "weights",
        folder=OUT,
        runs=arguments.runs,
    )

    def saved(now: Bench) -> None:
        result_files.write_json(OUT / f"{part}.json", now.to_json())

    bench = Bench.of(setup, configurations(named, common, quantized=not arguments.small), write, saved)
    bench.measure(Cancel())
    result = bench.to_json()
    for printed in (render.timing_rows(result), render.quality_rows(result)):
        for row in printed:
            write(" | ".join(row))
    for line in (*render.outcomes(result), *render.notes(result)):
        write(line)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true", help="tiny models: a rehearsal")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of a clip of random weights")
    parser.add_argument("--exact", action="store_true", help="errors against float32 at 720p too")
    parser.add_argument("--device", default="cuda:0", help="where random weights of `jobs` are made")
    parser.add_argument("parts", nargs="*", default=["480p"], choices=[*SIZES, "jobs", "diorama"])
    arguments = parser.parse_args()
    # Random weights show nothing, and are not to.
    vars(video_output)["Detector"] = jobs.Unjudged
    OUT.mkdir(parents=True, exist_ok=True)
    for part in arguments.parts:
        with tempfile.TemporaryDirectory() as folder:
            (forward if part in SIZES else clips)(part, arguments, Path(folder))


if __name__ == "__main__":
    main()
