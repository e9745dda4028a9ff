"""Measure the time from the start of `generate` to its first denoising step, in parts.

    python bench/gpu/start.py                                  the shipped model
    python bench/gpu/start.py wan2.2-a14b [--starts 3] [--asked '{"compile": "always"}']
    python bench/gpu/start.py wan2.2-a14b --small --device cpu the same with a tiny model, on the CPU

The shipped model needs no files. Others get random weights at full size in `TANDEM_CHECKS`, best a folder in memory,
such as /dev/shm/start; both experts share the same files, and a GPU computes in FP8. Each start is a process of its own
that runs the command line, with another prompt. The first one quantizes and compiles, and writes both caches; later
ones load them. Prints a JSON object per start and appends it to $OUT/start.jsonl: the seconds since the process was
started at which its parts began, the processor seconds until the first step was done, and what was imported by then.
One more start prints which packages take longest to import. The cache folder is `cache` in `TANDEM_CHECKS`; `--fresh`
empties it first.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

STARTED = float(os.environ.get("TANDEM_STARTED_AT", time.time()))
sys.path.insert(0, str(Path(__file__).parents[2]))

# Of one clip: width, height, frames.
SIZE = (832, 480, 81)
SHIPPED = "diorama"
# Modules that take seconds to import, and that not every start needs.
HEAVY = (
    *("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "triton", "torchao", "bitsandbytes"),
    *("peft", "sklearn", "scipy", "torchvision", "torchaudio", "flash_attn", "diffusers.pipelines"),
)
MARKS: list[tuple[str, float]] = []


def mark(what: str) -> None:
    """Record the seconds since the process was started."""
    MARKS.append((what, round(time.time() - STARTED, 2)))


def child(arguments: argparse.Namespace) -> dict[str, Any]:
    """Generate one video by the command line, and return when its parts began."""
    mark("python")
    from runtime.cli import terminal
    from runtime.cli.main import run
    from runtime.core.events import Failed, Planned, StageStarted, StepDone, VideoSaved, Warned

    found: dict[str, Any] = {"warned": [], "failed": None}
    show = terminal.ProgressLine.event

    def event(self: terminal.ProgressLine, event: Any) -> None:
        if isinstance(event, Planned):
            mark("planned, libraries imported")
            found["strategy"] = str(event.plan.forecast.title)
            # Random weights may well show one colour.
            vars(sys.modules["runtime.pipeline.video_output"])["Detector"].inspect = lambda *_: None
        elif isinstance(event, StageStarted):
            mark(f"{event.stage} {event.part}")
        elif isinstance(event, StepDone) and "first_step_done" not in found:
            mark("step done")
            imported = [name for name in HEAVY if name in sys.modules]
            found.update(first_step_done=MARKS[-1][1], cpu_seconds=round(time.process_time(), 2))
            found.update(modules=len(sys.modules), heavy=imported)
        elif isinstance(event, Warned):
            found["warned"].append(str(event.fact))
        elif isinstance(event, Failed):
            found["failed"] = event.fact
        elif isinstance(event, VideoSaved):
            mark("video saved")
            found["load"] = round(event.load_seconds, 2)
        show(self, event)

    terminal.ProgressLine.event = event  # type: ignore[method-assign]
    code = run(["generate", *request(arguments)])
    mark("caches written")
    return {**found, "code": code, "marks": MARKS}


def request(arguments: argparse.Namespace) -> list[str]:
    """Return the prompt and the options of one start."""
    asked: dict[str, Any] = {"frames": 9, "steps": arguments.steps, "seed": 1}
    if arguments.model != SHIPPED:
        width, height, frames = (64, 64, 9) if arguments.small else SIZE
        asked |= {"width": width, "height": height, "frames": frames, "compile": "always"}
        asked |= {"model": folder_of(arguments)} | ({"quantization": "fp8"} if arguments.device != "cpu" else {})
    asked |= {"out": folder_of(arguments).parent / "start.mp4", **json.loads(arguments.asked)}
    options = [word for name, value in asked.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [f"a boat, {arguments.number}", *options]


def folder_of(arguments: argparse.Namespace) -> Path:
    """Return the folder of the model."""
    home = Path(os.environ.get("TANDEM_CHECKS", "/tmp/tandem-checks"))
    return home / f"start-{'small-' if arguments.small else ''}{arguments.model}"


def make(arguments: argparse.Namespace) -> None:
    """Make the model unless it is there, with all layers of the text encoder."""
    folder = folder_of(arguments)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if arguments.model == SHIPPED or (folder / "complete").exists():
        return
    from functools import partial

    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    from bench.gpu.jobs import MODELS, save
    from tests import tiny_models
    from tests.published_specs import TRANSFORMERS, UMT5, VAES

    shutil.rmtree(folder, ignore_errors=True)
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
    parser.add_argument("model", nargs="?", default=SHIPPED)
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
    # As on people's machines: the first start leaves the bytecode of its libraries.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["TANDEM_CACHE_DIR"] = str(folder_of(arguments).parent / "cache")
    for number in range(arguments.starts + 1):
        last = number == arguments.starts
        command = [sys.executable, *(["-X", "importtime"] if last else []), __file__, *sys.argv[1:]]
        environment["TANDEM_STARTED_AT"] = str(time.time())
        command += ["--number", str(number)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            say(start=number, failed=done.stderr[-3000:])
        elif last:
            say(imports=imports(done.stderr))
        else:
            say(start=number, **json.loads(done.stdout.splitlines()[-1]))


def imports(log: str) -> dict[str, float]:
    """Return the seconds in which the 25 slowest packages were imported, by `-X importtime`, which slows them down."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for line in log.splitlines():
        own, _, name = line.removeprefix("import time:").strip().replace("|", " ").partition(" ")
        if line.startswith("import time:") and own.isdigit():
            seconds[".".join(name.split()[-1].split(".")[:2])] += int(own) / 1e6
    return {name: round(seconds[name], 3) for name in sorted(seconds, key=seconds.__getitem__, reverse=True)[:25]}


if __name__ == "__main__":
    main()
