"""Kills jobs with signal 9 at chosen or random moments, resumes them in new processes, and compares the videos.

    .venv/bin/python -m tests.queue.killing --kills 30 --seed 1 [--model DIR]

Prints for each kill the moment, the files that remained, and the result after resuming.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.core.cancel import Cancel
from runtime.core.events import Event, to_json
from runtime.core.plan import ExecutionPlan
from runtime.execution.residency import Residency
from runtime.models.catalogue import EMBEDDED
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint import CheckpointFolder
from runtime.pipeline.run import run_job
from tests.plans import tiny_plan

# How often a job of two experts does each with its files.
CALLS = {"open": 8, "os.rename": 4, "os.link": 1, "subprocess.Popen": 2, "os.mkdir": 2}


@dataclass(frozen=True)
class Moment:
    """When a job is killed.

    Attributes:
        event: after so many events.
        delay: seconds after that.
        call: or just before Python does this (one of `CALLS`) for the `count`th time, to a file of the job's.
    """

    event: int = -1
    delay: float = 0.0
    call: str = ""
    count: int = 1


@dataclass(frozen=True)
class Killed:
    """The end of a job's process.

    Attributes:
        code: its exit code, -9 if it was killed in time.
        events: the events that it emitted.
        files: names of files in the outputs folder and in the job's folder.
    """

    code: int | None
    events: list[dict[str, Any]]
    files: list[str]


class Bench:
    """Runs one plan in processes of their own, forked from one that has imported PyTorch."""

    def __init__(self, spec: ModelSpec, plan: ExecutionPlan, folder: Path) -> None:
        self._spec = spec
        self._plan = plan
        self.job = folder / "job"
        self._log = folder / "events.jsonl"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.engines.child_imports", "tests.queue.killing"])

    def run(self, moment: Moment | None = None) -> Killed:
        """Run the job until it ends, or is killed."""
        self._log.unlink(missing_ok=True)
        arguments = (self._spec.directory, self._plan.model_dump_json(), self.job, self._log, moment)
        process = self._context.Process(target=_work, args=arguments)
        process.start()
        process.join(120)
        assert process.exitcode is not None, "the job hangs"
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        files = [path.name for folder in (self._plan.output.parent, self.job) for path in _listed(folder)]
        return Killed(process.exitcode, [json.loads(line) for line in lines if line.endswith("}")], files)


def _listed(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _work(directory: Path, plan_json: str, job: Path, log: Path, moment: Moment | None) -> None:
    """Run a job in this process, and end it when its moment has come."""
    plan = ExecutionPlan.model_validate_json(plan_json)
    count = 0

    def emit(event: Event) -> None:
        nonlocal count
        with log.open("a") as file:
            file.write(json.dumps(to_json(event)) + "\n")
        count += 1
        if moment is not None and count == moment.event:
            threading.Thread(target=_die, args=(moment.delay,), daemon=True).start()

    if moment is not None and moment.call:
        _die_at(moment, (str(job), str(plan.output.parent)), log)
    with Residency() as residency:
        spec = read_spec(directory, directory.name)
        run_job(plan, spec, emit, Cancel(), residency, checkpoints=CheckpointFolder(job), job_id="0badcafe")


def _die(delay: float = 0.0) -> None:
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at(moment: Moment, folders: tuple[str, ...], log: Path) -> None:
    seen = 0

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if name != moment.call or str(arguments[0]) == str(log):
            return
        if name == "subprocess.Popen" or str(arguments[0]).startswith(folders):
            seen += 1
            if seen == moment.count:
                _die()

    sys.addaudithook(hook)


def at_random(chance: random.Random, events: int) -> Moment:
    """Return a moment anywhere in a job with so many events: most at random times, some at a call."""
    if chance.random() < 0.25:
        call = chance.choice(list(CALLS))
        return Moment(call=call, count=chance.randint(1, CALLS[call]))
    return Moment(event=chance.randint(1, events - 1), delay=chance.random() * 0.06)


def main() -> None:
    """Kill jobs at random moments and print the results."""
    from tests.pipeline.test_resume import stream_of
    from tests.pipeline.test_run import frames_of

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, default=EMBEDDED / "diorama")
    given = parser.parse_args()
    chance = random.Random(given.seed)
    write = sys.stdout.write
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "out"
        out.mkdir()
        spec = read_spec(given.model, given.model.name)
        plan = tiny_plan(spec, out / "x.mp4", width=96, height=64, frames=17, steps=8)
        undisturbed = Bench(spec, plan, Path(name) / "undisturbed")
        undisturbed.job.parent.mkdir()
        count = len(undisturbed.run().events)
        wanted = frames_of(plan.output), stream_of(plan.output)
        same = 0
        for number in range(given.kills):
            for path in out.iterdir():
                path.unlink()
            bench = Bench(spec, plan, Path(name) / str(number))
            bench.job.parent.mkdir()
            moment = at_random(chance, count)
            killed = bench.run(moment)
            resumed = bench.run()
            end = resumed.events[-1]["event"]
            from_step = [event["step"] for event in resumed.events if event["event"] == "Resumed"]
            tidy = [path.name for path in out.iterdir()] == ["x.mp4"]
            equal = (frames_of(plan.output), stream_of(plan.output)) == wanted
            same += equal and tidy and end == "VideoSaved"
            last = (
                {key: killed.events[-1].get(key) for key in ("event", "step", "stage", "part")} if killed.events else {}
            )
            became = "identical" if equal and tidy else "DIFFERENT"
            write(f"{number + 1:3} exit {killed.code} after {json.dumps(last)}, {moment}; files {killed.files}; ")
            write(f"resumed from {from_step or 'the start'}: {end}, {became}\n")
        write(f"{same} of {given.kills} identical, no file left over\n")
    sys.exit(same != given.kills)


if __name__ == "__main__":
    main()
