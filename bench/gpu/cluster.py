"""Measure jobs of a model of 14 billion parameters on two GPUs of a cluster.

    python bench/gpu/cluster.py [--steps 8] [--frames 33]
    python bench/gpu/cluster.py --small        the same with a tiny model and two nodes without a GPU

The head has no GPU. A node joins with a worker for each of two GPUs, and makes a job alone, then two at once with the
same seed; it joins again with `--gpus-per-worker 2`, and makes one job on both GPUs. Each worker first makes a job that
is not counted, which loads the model. Random weights, saved in `TANDEM_CHECKS`; the two GPUs' frames must be equal.
Prints a JSON object per measurement and appends it to $OUT/cluster.jsonl. Needs Ray and ffmpeg.
"""

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu import results
from tests import tiny_models
from tests.cluster_machines import Machines

HOME = Path(os.environ.get("TANDEM_CHECKS", "/tmp/tandem-checks"))
MODEL = "measured"
SIZE = {"width": 832, "height": 480}
PROMPT = "a boat at sunset"
# Of the job that loads the model.
WARM = {"steps": 2}
say = partial(results.say, "cluster.jsonl")


def make(folder: Path, *, small: bool) -> None:
    """Save the model unless it is there."""
    complete = folder.with_suffix(".complete")
    if complete.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    tiny_models.build("wan2.1", folder)
    if not small:
        large(folder)
    complete.touch()


def large(folder: Path) -> None:
    """Replace the weights by those of the published size."""
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    from bench.gpu.gpus import TEXT
    from bench.gpu.jobs import save
    from tests.published_specs import TRANSFORMERS

    save(lambda: UMT5EncoderModel(UMT5Config(**TEXT)), folder / "text_encoder", "cuda:0")
    save(partial(WanTransformer3DModel, **TRANSFORMERS["wan2.2-a14b"]), folder / "transformer", "cuda:0")
    shutil.rmtree(folder / "vae")
    # As it is initialized, so that frames are noise: clips of one color are rejected.
    AutoencoderKLWan().save_pretrained(folder / "vae")


def linked(model: Path, cache: Path) -> None:
    """Link the model's files into a cache folder."""
    shutil.copytree(model, cache / "weights" / MODEL, copy_function=os.link)


def together(cluster: Machines, seeds: list[int], fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Make jobs at once; return when each started and ended, relative to the first start, and its frames' digest."""
    jobs = [cluster.submit(seed, **fields) for seed in seeds]
    cluster.wait(cluster.finished, 400)
    failed = [cluster.videos()[job]["error"] for job in jobs if cluster.videos()[job]["status"] != "completed"]
    if failed:
        say(failed=failed)
        return []
    times = [cluster.times(job) for job in jobs]
    first = min(started for started, _ in times)
    return [
        {"started": round(started - first, 2), "ended": round(ended - first, 2), "frames": cluster.frames(job)}
        for job, (started, ended) in zip(jobs, times, strict=True)
    ]


def apart(cluster: Machines, fields: dict[str, Any], nodes: int, began: float) -> None:
    """Measure a job alone and two at once on two workers, which then leave.

    Args:
        began: when the head was started, by `time.monotonic`.
    """
    for _ in range(nodes):
        cluster.add_node()
    cluster.wait(lambda: len(cluster.workers()) == 2, 240)
    say(joined_seconds=round(time.monotonic() - began, 1))
    together(cluster, [0, 0], fields | WARM)
    say(jobs="alone", made=together(cluster, [1], fields))
    say(jobs="two at once", made=together(cluster, [1, 1], fields))
    for node in cluster.nodes:
        node.send_signal(signal.SIGINT)
        node.wait(60)
    cluster.wait(lambda: not cluster.workers(), 60)


def on_both(cluster: Machines, fields: dict[str, Any]) -> None:
    """Measure a job on a worker that has both GPUs."""
    cluster.add_node("--gpus-per-worker", "2")
    cluster.wait(lambda: len(cluster.workers()) == 1, 240)
    together(cluster, [0], fields | WARM)
    say(jobs="one on both", made=together(cluster, [1], fields))


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--frames", type=int, default=33)
    parser.add_argument("--small", action="store_true", help="a tiny model, without a GPU")
    parser.add_argument("--both", action="store_true", help="only the job on both GPUs")
    parser.add_argument("--make", action="store_true", help="only save the model, in TANDEM_CHECKS")
    arguments = parser.parse_args()
    fields: dict[str, Any] = {"prompt": PROMPT, "model": MODEL, "compile": "never", "quantization": "none"}
    fields |= {"steps": arguments.steps, "frames": 9 if arguments.small else arguments.frames}
    fields |= {"width": 64, "height": 32} if arguments.small else SIZE
    model = HOME / f"cluster{'-small' if arguments.small else ''}"
    model.parent.mkdir(parents=True, exist_ok=True)
    make(model, small=arguments.small)
    if arguments.make:
        return
    with tempfile.TemporaryDirectory(dir=HOME) as name:
        folder = Path(name)
        for cache in ("head", "node0", "node1"):
            linked(model, folder / cache)
        began = time.monotonic()
        cluster = Machines(folder, CUDA_VISIBLE_DEVICES="")
        with contextlib.closing(cluster):
            if not arguments.both:
                apart(cluster, fields, 2 if arguments.small else 1, began)
            if not arguments.small:
                on_both(cluster, fields | {"gpus": 2})


if __name__ == "__main__":
    main()
