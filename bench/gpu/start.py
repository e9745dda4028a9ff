"""Measure the time from the start of a process to its first denoising step, in parts.

    python bench/gpu/start.py [--starts 3] [--steps 2] [--asked '{"compile": "always"}'] [MODEL]
    python bench/gpu/start.py --small --device cpu             the same with a tiny model, on the CPU

Random weights at full size in `TANDEM_CHECKS`, best a folder in memory, such as /dev/shm/start; both experts share the
same files. Each start is a process of its own that makes a clip as `generate` does, with another prompt, in FP8 on a
GPU. The first start quantizes and compiles, and writes both caches; later ones load them. Prints a JSON object per
start and appends it to $OUT/start.jsonl: the seconds since the process was started at which its parts began, and the
seconds that loading and compiling took. The cache folder is `cache` in `TANDEM_CHECKS`; `--fresh` empties it first.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STARTED = float(os.environ.get("TANDEM_STARTED_AT", time.time()))
sys.path.insert(0, str(Path(__file__).parents[2]))

# Of one clip: width, height, frames.
SIZE = (832, 480, 81)
MARKS: list[tuple[str, float]] = []


def mark(what: str) -> None:
    """Record the seconds since the process was started."""
    MARKS.append((what, round(time.time() - STARTED, 2)))


def child(arguments: argparse.Namespace) -> dict[str, Any]:
    """Make one clip as `generate` does, and return when its parts began."""
    mark("python")
    from runtime.core.environment import collect_garbage_less_often

    collect_garbage_less_often()
    from runtime.core.cancel import Cancel
    from runtime.core.events import Event, Failed, StageStarted, StepDone, VideoSaved, Warned
    from runtime.engines.service import EngineService
    from runtime.engines.store import EngineStore
    from runtime.machine.probe import probe
    from runtime.models.registry import read_spec
    from runtime.planner.resolve import PlanningContext, resolve

    spec, machine = read_spec(folder_of(arguments), arguments.model), probe()
    plan = resolve(request(arguments), spec, PlanningContext(machine, folder_of(arguments).parent / "start.mp4"))
    mark("planned")
    import torch

    mark("torch imported")
    end: list[Event] = []
    warned: list[str] = []

    def emit(event: Event) -> None:
        if isinstance(event, StageStarted):
            mark(f"{event.stage} {event.part}")
        elif isinstance(event, StepDone):
            mark("step done")
        elif isinstance(event, Warned):
            warned.append(str(event.fact))
        end.append(event)

    cache = folder_of(arguments).parent / "cache"
    cache.mkdir(exist_ok=True)
    service = EngineService(EngineStore(cache / "engines", 1), machine, cache)
    from runtime.execution.residency import Residency
    from runtime.pipeline import stages
    from runtime.pipeline.run import run_job

    mark("imported")
    # Random weights may well show one colour.
    vars(stages)["Detector"].inspect = lambda *_: None
    with Residency(service) as residency:
        run_job(plan, spec, emit, Cancel(), residency)
        mark("job ended")
        seconds = {"load": round(residency.load_seconds, 2), "compile": round(residency.compile_seconds, 2)}
    mark("caches written")
    failed = end[-1].what if isinstance(end[-1], Failed) else None
    assert failed or isinstance(end[-1], VideoSaved)
    counters = {name: dict(found) for name, found in torch._dynamo.utils.counters.items() if "cache" in str(found)}
    placed = str(plan.forecast.title)
    return {"marks": MARKS, **seconds, "strategy": placed, "warned": warned, "failed": failed, "counters": counters}


def request(arguments: argparse.Namespace) -> Any:
    """Return the request of one start."""
    from runtime.core.request import GenerationRequest

    width, height, frames = (64, 64, 9) if arguments.small else SIZE
    asked: dict[str, Any] = {"width": width, "height": height, "frames": frames, "steps": arguments.steps, "seed": 1}
    asked |= {"prompt": f"a boat, {arguments.number}", "compile": "always", "model": str(folder_of(arguments))}
    if arguments.device != "cpu":
        asked["quantization"] = "fp8"
    return GenerationRequest.from_mapping(asked | json.loads(arguments.asked))


def folder_of(arguments: argparse.Namespace) -> Path:
    """Return the folder of the model."""
    home = Path(os.environ.get("TANDEM_CHECKS", "/tmp/tandem-checks"))
    return home / f"start-{'small-' if arguments.small else ''}{arguments.model}"


def make(arguments: argparse.Namespace) -> None:
    """Make the model unless it is there, with all layers of the text encoder."""
    folder = folder_of(arguments)
    if (folder / "complete").exists():
        return
    from functools import partial

    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    from bench.gpu.jobs import MODELS, save
    from tests import tiny_models
    from tests.published_specs import TRANSFORMERS, UMT5, VAES

    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    tiny_models.build(MODELS[arguments.model][0], folder)
    if not arguments.small:
        device = arguments.device
        save(lambda: UMT5EncoderModel(UMT5Config(**UMT5)), folder / "text_encoder", device)
        save(partial(WanTransformer3DModel, **TRANSFORMERS[arguments.model]), folder / "transformer", device)
        save(partial(AutoencoderKLWan, **VAES.get(arguments.model, VAES["wan2.1"])), folder / "vae", device)
        if (folder / "transformer_2").exists():
            shutil.rmtree(folder / "transformer_2")
            (folder / "transformer_2").symlink_to(folder / "transformer")
    (folder / "complete").touch()


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="one for each expert")
    parser.add_argument("--asked", default="{}", help="fields of the request, as JSON")
    parser.add_argument("--small", action="store_true", help="a tiny model: for a rehearsal on a CPU")
    parser.add_argument("--fresh", action="store_true", help="empty the caches first")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("model", nargs="?", default="wan2.2-a14b")
    arguments = parser.parse_args()
    if arguments.make:
        make(arguments)
        return
    if arguments.number is not None:
        # Without the interpreter's cleanup, as a worker ends.
        sys.stdout.write(json.dumps(child(arguments), default=str) + "\n")
        sys.stdout.flush()
        os._exit(0)
    from functools import partial

    from bench.gpu import results

    say = partial(results.say, "start.jsonl")
    Path(os.environ.get("OUT", ".")).mkdir(parents=True, exist_ok=True)
    begun = time.time()
    # In a process of its own, so that its GPU memory is free afterwards.
    subprocess.run([sys.executable, __file__, *sys.argv[1:], "--make"], check=True)
    say(model=arguments.model, made_seconds=round(time.time() - begun, 1))
    if arguments.fresh:
        shutil.rmtree(folder_of(arguments).parent / "cache", ignore_errors=True)
    for number in range(arguments.starts):
        environment = {**os.environ, "TANDEM_STARTED_AT": str(time.time())}
        # As on people's machines: the first start leaves the bytecode of its libraries.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, __file__, *sys.argv[1:], "--number", str(number)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            say(start=number, failed=done.stderr[-3000:])
        else:
            say(start=number, **json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
