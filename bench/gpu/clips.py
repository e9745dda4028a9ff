"""Measure the first clips of a process with default settings, as a web app makes them, beside what the plans say.

    python bench/gpu/clips.py [--clips 2] [--processes 1] [--idle] [--asked '{"steps": 4}'] [MODEL]    of `jobs.MODELS`
    python bench/gpu/clips.py --small --device cpu --asked '{"compile": "always"}'              a rehearsal

Random weights at full size in `TANDEM_CHECKS`, best a folder in memory; both experts share the same files. By default
81 frames of 832x480 from an image, 4 steps with guidance, FP8 weights. Each process begins with nothing loaded and
makes its clips with one residency and one history, as a worker does; the first process finds empty caches, later ones
those of the first. Prints a JSON object per clip and appends it to $OUT/clips.jsonl: `seconds` is all of the job, of
which `load` reads weights and compiles, and `without_reading` is the rest with compiling. The reasons and the forecast
are those of the plan before the clip. One H200: about 120 s for two clips of one process, 50 s of them for the weights.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu import results

say = partial(results.say, "clips.jsonl")


def fields(arguments: argparse.Namespace, folder: Path, width: int, height: int, frames: int) -> dict[str, Any]:
    """Return the fields of the clips' request."""
    asked: dict[str, Any] = {"model": str(folder), "steps": 4, "width": width, "height": height, "frames": frames}
    if arguments.small:
        asked |= {"width": 64, "height": 64, "frames": 9}
    if arguments.device != "cpu":
        asked["quantization"] = "fp8"
    return asked | json.loads(arguments.asked)


def process(arguments: argparse.Namespace) -> None:
    """Make the clips of one process."""
    import torch

    from bench.gpu.jobs import HOME, IMAGE, MODELS, Unjudged
    from runtime.core.cancel import Cancel
    from runtime.core.events import Event, Failed, StepDone, VideoSaved
    from runtime.core.request import GenerationRequest
    from runtime.engines.service import EngineService
    from runtime.engines.store import EngineStore
    from runtime.execution.residency import Residency
    from runtime.machine.probe import probe
    from runtime.models.images import with_images
    from runtime.models.registry import read_spec
    from runtime.pipeline import video_output
    from runtime.pipeline.ahead import compile_ahead
    from runtime.pipeline.history_file import HistoryFile
    from runtime.pipeline.run import run_job
    from runtime.planner.resolve import PlanningContext, resolve

    vars(video_output)["Detector"] = Unjudged  # random weights may well show one colour
    folder, cache, machine = HOME / arguments.model, HOME / "clips-cache", probe()
    cache.mkdir(exist_ok=True)
    plain = read_spec(folder, arguments.model)
    history = HistoryFile(cache, machine)
    service = EngineService(EngineStore(cache / "engines", 1), machine, cache)
    say(part="process", number=arguments.number, cores=machine.cores, torch=torch.__version__)
    with Residency(service) as residency:
        for number in range(1, arguments.clips + 1):
            asked = fields(arguments, folder, *MODELS[arguments.model][1:])
            asked |= {"prompt": f"a boat, {number}", "seed": number}
            if plain.image_input is not None:
                asked["image"] = str(IMAGE)
            request = GenerationRequest.from_mapping(asked)
            spec = with_images(plain, request, HOME, None)
            # The machine as it was: a worker counts what it has loaded as free.
            context = PlanningContext(
                machine, HOME / "clip.mp4", service.offers(spec), history.read(), idle_builds=arguments.idle
            )
            plan = resolve(request, spec, context, builds_later=True)
            events: list[Event] = []
            before, began = (residency.load_seconds, residency.compile_seconds), time.perf_counter()
            run_job(plan, spec, events.append, Cancel(), residency, history=history)
            seconds = time.perf_counter() - began
            load, compiling = residency.load_seconds - before[0], residency.compile_seconds - before[1]
            end = events[-1]
            say(
                process=arguments.number,
                clip=number,
                seconds=round(seconds, 2),
                load=round(load, 2),
                compile=round(compiling, 2),
                without_reading=round(seconds - load + compiling, 2),
                steps=[round(event.seconds, 2) for event in events if isinstance(event, StepDone)],
                stages=dict(end.timings) if isinstance(end, VideoSaved) else None,
                failed=end.what if isinstance(end, Failed) else None,
                forecast={name: entry["seconds"] for name, entry in plan.to_json()["forecast"].items()},
                compiled=plan.speed.compiled,
                attention=plan.speed.attention,
                reasons=[str(reason) for reason in plan.speed.reasons],
                strategy=str(plan.forecast.title),
            )
            if plan.speed.compiled_later:
                context, began = context._replace(history=history.read()), time.perf_counter()
                plan = resolve(request.replace(compile="always"), spec, context, builds_later=True)
                made = compile_ahead(plan, spec, Cancel(), residency, history)
                say(process=arguments.number, idle=round(time.perf_counter() - began, 2), result=str(made))


def make(arguments: argparse.Namespace) -> None:
    """Make the model, and remove the caches of an earlier run."""
    from bench.gpu.jobs import HOME, model

    HOME.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(HOME / "clips-cache", ignore_errors=True)
    model(arguments.model, arguments)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clips", type=int, default=2, help="of each process")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--idle", action="store_true", help="compile between clips what a web app would compile")
    parser.add_argument("--asked", default="{}", help="fields of the request, as JSON")
    parser.add_argument("--small", action="store_true", help="a tiny model: for a rehearsal on a CPU")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    parser.add_argument("model", nargs="?", default="wan2.2-i2v-a14b")
    arguments = parser.parse_args()
    Path(os.environ.get("OUT", ".")).mkdir(parents=True, exist_ok=True)
    if arguments.number is not None:
        step = make if arguments.number == 0 else process
        try:
            step(arguments)
        except Exception as error:
            traceback.print_exc()
            say(process=arguments.number, failed=f"{type(error).__name__}: {error}"[:500])
            sys.exit(1)
        return
    # The first makes the weights, so that its GPU memory is free afterwards.
    for number in range(arguments.processes + 1):
        began = time.monotonic()
        done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--number", str(number)], check=False)
        say(part="weights" if number == 0 else "process", number=number, wall=round(time.monotonic() - began, 1))
        if done.returncode and number == 0:
            sys.exit(1)


if __name__ == "__main__":
    main()
