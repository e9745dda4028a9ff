"""Kill workers, raylets and the head of a cluster of three nodes on this machine while it makes videos.

    python -m bench.cluster [--jobs 30] [--kills 10] [--nodes 3] [--kinds worker,raylet,head]
    python -m bench.cluster --overhead 4 | --latency 2

Prints one JSON object: how every job ended, whether its frames equal those of a server without a cluster, processes
that are left, and durations.
"""

import argparse
import contextlib
import json
import os
import re
import statistics
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.cluster_machines import JOB, Machines, machines

SEEDS = 3
# About ten seconds on two cores.
LONG_STEPS = 65


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=30)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--kinds", default="worker,raylet,head")
    parser.add_argument("--overhead", type=int, default=0, help="only compare the durations of so many long jobs")
    parser.add_argument(
        "--latency", type=int, default=0, help="only measure when a page shows the steps of so many jobs"
    )
    given = parser.parse_args()
    if given.latency:
        _latency(given.latency)
        return
    if given.overhead:
        _overhead(given.overhead)
        return
    result: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        with machines(_made(folder, "alone"), 0) as alone:
            started = time.monotonic()
            ids = {seed: alone.submit(seed) for seed in range(SEEDS)}
            alone.wait(alone.finished, 300)
            result["alone_seconds"] = round((time.monotonic() - started) / SEEDS, 2)
            expected = {seed: alone.frames(job) for seed, job in ids.items()}
        with machines(_made(folder, "cluster"), given.nodes) as cluster:
            for kind in given.kinds.split(","):
                result[kind] = _round(cluster, kind, given.jobs, given.kills, expected)
        time.sleep(5)
        result["left"] = cluster.left()
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


def _overhead(count: int) -> None:
    """Print the seconds from start to end of equal jobs, of a server alone and of a cluster with one node, in turn."""
    seconds: dict[str, list[float]] = {"alone": [], "cluster": []}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        alone = stack.enter_context(machines(_made(folder, "alone"), 0))
        cluster = stack.enter_context(machines(_made(folder, "cluster"), 1))
        for number in range(count + 1):
            for name, one in (("alone", alone), ("cluster", cluster)):
                job = one.submit(number, steps=LONG_STEPS)
                one.wait(one.finished, 300)
                if number:  # the first one loads the libraries and the model
                    started, ended = one.times(job)
                    seconds[name].append(round(ended - started, 3))
    result = {name: {"seconds": found, "median": statistics.median(found)} for name, found in seconds.items()}
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


# Collects when the page first shows that step `number` runs.
_WATCH = """() => {
  const seen = window.seen = {};
  const look = () => {
    const status = document.querySelector('#status .status');
    const step = /step (\\d+) of/.exec(status?.textContent ?? '');
    if (step) (seen[status.dataset.job] ??= {})[step[1]] ??= Date.now();
  };
  new MutationObserver(look).observe(document.body, { childList: true, subtree: true, characterData: true,
    attributes: true, attributeFilter: ['data-job'] });
}"""


def _latency(count: int) -> None:
    """Print the seconds from the end of a step, by the log of the process that runs it, until the page shows the next.

    In turn on the web app alone and on one with a node; each page follows its own jobs.
    """
    from playwright.sync_api import sync_playwright

    from tests.browser.conftest import (
        ARGUMENTS,
        CHROMIUM,
        DESKTOP,
        advance,
        ask,
        customize,
        ready,
        start,
        wait_for_state,
    )

    found: dict[str, list[float]] = {"alone": [], "cluster": []}
    loads = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        alone = stack.enter_context(machines(_made(folder, "alone"), 0, page=True))
        cluster = stack.enter_context(machines(_made(folder, "cluster"), 1, page=True))
        browser = stack.enter_context(sync_playwright()).chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        stack.callback(browser.close)
        pages = {}
        viewport: Any = DESKTOP
        for name, one in (("alone", alone), ("cluster", cluster)):
            pages[name] = page = browser.new_context(viewport=viewport).new_page()
            page.set_default_timeout(180_000)
            page.goto(f"http://127.0.0.1:{one.port}/")
            ready(page)
            page.evaluate(_WATCH)
            ask(page, str(JOB["prompt"]))
            customize(page, frames=str(JOB["frames"]))
            advance(page)
            page.fill("#field-steps input", str(LONG_STEPS))
            page.press("#field-steps input", "Tab")
        for number in range(count + 1):
            for name, machine in (("alone", "head"), ("cluster", "node0")):
                page = pages[name]
                start(page)
                wait_for_state(page, "done")
                job = str(page.get_attribute("#status .status", "data-job"))
                loads.append(os.getloadavg()[0])
                if number:  # the first one loads the libraries and the model
                    log = Path(folder) / name / machine / "logs" / "tandem.log"
                    found[name] += _delays(log.read_text(encoding="utf-8"), job, page.evaluate("window.seen")[job])
    result: dict[str, object] = {name: _summary(values) for name, values in found.items()}
    sys.stdout.write(json.dumps(result | {"load": [min(loads), max(loads)]}, indent=2) + "\n")


def _delays(log: str, job: str, shown: dict[str, int]) -> list[float]:
    """Return the seconds from the end of each step until the page shows that it is over."""
    line = re.compile(rf"^(\S+ \S+),(\d+) .*job {job}: StepDone step=(\d+) ", re.MULTILINE)
    delays = []
    for when, milliseconds, step in line.findall(log):
        ended = datetime.strptime(when, "%Y-%m-%d %H:%M:%S").timestamp() + int(milliseconds) / 1000
        # A page that shows a later step shows that this one is over.
        later = [at / 1000 for number, at in shown.items() if int(number) > int(step)]
        if later:  # the last step is followed by decoding
            delays.append(min(later) - ended)
    return delays


def _summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "steps": len(ordered),
        "median": round(statistics.median(ordered), 3),
        "p95": round(ordered[int(0.95 * len(ordered))], 3),
        "most": round(ordered[-1], 3),
    }


def _made(folder: str, name: str) -> Path:
    path = Path(folder) / name
    path.mkdir()
    return path


def _round(cluster: Machines, kind: str, count: int, kills: int, expected: dict[int, str]) -> dict[str, object]:
    """Queue videos, kill processes of one kind while they run, and compare what is made."""
    started = time.monotonic()
    jobs = {cluster.submit(number % SEEDS): number % SEEDS for number in range(count)}
    killed, at = 0, []
    while killed < kills:
        cluster.wait(lambda: any(worker["job"] for worker in cluster.workers()) or cluster.finished(), 240)
        if cluster.finished():
            break
        time.sleep(1.0 + killed % 3)
        if kind == "worker":
            killed += cluster.kill_worker()
        elif kind == "raylet":
            killed += cluster.kill_raylet(killed % len(cluster.nodes))
        else:
            cluster.kill_head()
            killed += 1
        at.append(round(time.monotonic() - started, 1))
        time.sleep(3.0)
    cluster.wait(cluster.finished, 1200)
    videos = cluster.videos()
    done = [job for job in jobs if videos[job]["status"] == "completed"]
    equal = sum(cluster.frames(job) == expected[jobs[job]] for job in done)
    failed = {job: videos[job]["error"] for job in jobs if job not in done}
    seconds = round(time.monotonic() - started, 1)
    return {
        "jobs": count,
        "kills": killed,
        "at": at,
        "completed": len(done),
        "equal": equal,
        "failed": failed,
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
