"""What the tabs Queue and History do, on a real worker that runs nothing, and whose jobs they may touch."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec
from runtime.queue.service import JobQueue
from runtime.queue.store import JobStore
from runtime.ui import form
from runtime.ui.jobs_controller import PARTS, JobsController
from runtime.ui.jobs_request import read
from tests.plans import no_engines
from tests.queue.made import saved
from tests.queue.test_worker import small
from tests.running import RunningQueue
from tests.ui.test_form import GOOD

VIEW: dict[str, Any] = {
    "act": "look", "of": "", "values": {}, "tab": "queue", "search": "", "state": "all", "page": 0, "open": "",
    "pair": [], "marks": {}, "number": 1,
}  # fmt: skip


@pytest.fixture
def worker(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> Iterator[JobQueue]:
    """Return a worker that is closed: what is queued stays queued."""
    shutil.copytree(tiny("wan2.2-a14b").directory, tmp_path / "weights" / "tiny")
    store = JobStore(tmp_path / "jobs.sqlite")
    made = RunningQueue(tmp_path / "weights", tmp_path / "outputs", no_engines(tmp_path), store=store)
    made.close()
    yield made
    store.close()


@pytest.fixture
def models(worker: JobQueue, tmp_path: Path) -> dict[str, ModelSpec]:
    return {"tiny": find("tiny", tmp_path / "weights")}


@pytest.fixture
def desk(worker: JobQueue, models: dict[str, ModelSpec], tmp_path: Path) -> JobsController:
    return JobsController(worker, models, tmp_path / "outputs")


def values(**changes: Any) -> list[Any]:
    """Return a form for the tiny model."""
    size = {"model": "tiny", "width": 32, "height": 32, "frames": 5, "steps": 2, "fps": 8}
    given = GOOD | size | changes
    return [given[name] for name in form.NAMES]


def act(desk: JobsController, name: str, of: str = "", **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Press a button; return what was drawn, by part, and what was said."""
    shown = changes.pop("form", values())
    *drawn, says = desk.act(json.dumps(VIEW | {"act": name, "of": of} | changes), *shown)
    return dict(zip(PARTS, drawn, strict=True)), json.loads(says)


def add(worker: JobQueue, prompt: str, owner: str | None = None) -> str:
    return worker.submit(small(prompt=prompt, seed=1), owner).id


def finish(worker: JobQueue, job_id: str) -> None:
    """Let a job be done, with a file where its video would be."""
    assert worker.store.claim("here") is not None
    worker.store.record(job_id, saved())
    output = worker.store.get(job_id).output
    output.parent.mkdir(exist_ok=True)
    output.write_bytes(b"x" * 1000)


def prompts(worker: JobQueue) -> list[str]:
    return [job.prompt for job in worker.store.queue()]


@pytest.mark.parametrize(
    "message",
    [
        None, 5, "", "[]", "{}", "nonsense", json.dumps({"act": "look"}), "[" * 5000, "x" * 300_000,
        json.dumps(VIEW | {"tab": "engines"}), json.dumps(VIEW | {"page": -1}), json.dumps(VIEW | {"state": "running"}),
        json.dumps(VIEW | {"act": "explode"}), json.dumps(VIEW | {"act": "cancel", "of": "../../etc"}),
        json.dumps(VIEW | {"act": "delete", "of": ""}), json.dumps(VIEW | {"act": "delete-old", "of": "0"}),
        json.dumps(VIEW | {"act": "open", "of": "01234567"}), json.dumps(VIEW | {"search": "x" * 201}),
        json.dumps(VIEW | {"values": []}), json.dumps(VIEW | {"number": "1"}),
    ],
)  # fmt: skip
def test_what_no_page_sends_is_refused_in_a_line(desk: JobsController, worker: JobQueue, message: Any) -> None:
    add(worker, "a red boat")
    says = json.loads(desk.act(message, *values())[-1])
    assert says["wrong"] and "There is no" in says["said"] and "\n" not in says["said"]
    assert prompts(worker) == ["a red boat"]


def test_ids_that_cannot_be_are_passed_over() -> None:
    asked = read(json.dumps(VIEW | {"open": "../x", "pair": ["01234567", 5], "page": 3}))
    assert (asked.open, asked.pair, asked.page) == ("", (), 3)


def test_several_prompts_and_variations_are_added_together(desk: JobsController, worker: JobQueue) -> None:
    drawn, says = act(desk, "add", values={"prompts": "a red boat\n\n  a blue ball ", "variations": "2"})
    assert says["said"] == "Added to the queue: 4 videos." and len(says["added"]) == 4
    assert prompts(worker) == ["a red boat"] * 2 + ["a blue ball"] * 2
    assert drawn["line"].count("<li") == 4
    assert len({job.batch for job in worker.store.queue()}) == 1
    act(desk, "add", values={"variations": "3"}, form=values(prompt="a calm sea", seed="40"))
    assert [job.request["seed"] for job in worker.store.queue()][4:] == [40, 41, 42]


@pytest.mark.parametrize(
    ("given", "shown", "said"),
    [
        ({"variations": "0"}, {}, "Give a number from 1 to 100."),
        ({"variations": "1e9"}, {}, "Give a number from 1 to 100."),
        ({"variations": "٣"}, {}, "Give a number from 1 to 100."),
        ({"variations": None}, {}, "Give a number from 1 to 100."),
        ({"prompts": "x\n" * 11, "variations": "100"}, {}, "at most 1,000 at once"),
        ({"prompts": ["x"]}, {"prompt": ""}, "The prompt is empty."),
        ({"prompts": "a boat"}, {"width": 33}, "multiples of 16"),
    ],
)
def test_what_cannot_be_added_adds_nothing(
    desk: JobsController, worker: JobQueue, given: dict[str, Any], shown: dict[str, Any], said: str
) -> None:
    _, says = act(desk, "add", values=given, form=values(**shown))
    assert said in says["said"] and says["wrong"]
    assert prompts(worker) == []


@pytest.mark.parametrize(
    ("move", "of", "order"),
    [
        ("up", "b", "bacd"), ("up", "a", "abcd"), ("up", "d", "abdc"),
        ("down", "a", "bacd"), ("down", "c", "abdc"), ("down", "d", "abcd"),
    ],
)  # fmt: skip
def test_a_move_is_past_one_neighbour(desk: JobsController, worker: JobQueue, move: str, of: str, order: str) -> None:
    ids = {prompt: add(worker, prompt) for prompt in "abcd"}
    act(desk, move, ids[of])
    assert "".join(prompts(worker)) == order


def test_saving_keeps_the_place_and_the_seed(desk: JobsController, worker: JobQueue) -> None:
    first, _ = add(worker, "a red boat"), add(worker, "a blue ball")
    _, says = act(desk, "edit", first)
    assert says["edit"]["request"]["prompt"] == "a red boat"
    _, says = act(desk, "save", first, form=values(prompt="a calm sea"))
    assert says["saved"] == first and prompts(worker) == ["a calm sea", "a blue ball"]
    assert worker.store.get(first).request["seed"] == 1
    act(desk, "save", first, form=values(prompt="a calm sea", seed="5"))
    assert worker.store.get(first).request["seed"] == 5
    worker.store.claim("here")
    _, says = act(desk, "save", first)
    assert "no longer queued" in says["said"] and "saved" not in says


def test_all_are_paused_and_cancelled(desk: JobsController, worker: JobQueue) -> None:
    for prompt in "abc":
        add(worker, prompt)
    drawn, _ = act(desk, "pause-all")
    assert all(job.held for job in worker.store.queue()) and "Go on with all" in drawn["line"]
    act(desk, "go-on-all")
    assert not any(job.held for job in worker.store.queue())
    drawn, says = act(desk, "cancel-all")
    assert says["said"] == "Cancelled: 3." and "Nothing waits or runs." in drawn["line"]


def test_what_is_drawn_already_is_not_sent_again(desk: JobsController, worker: JobQueue) -> None:
    add(worker, "a red boat")
    drawn, says = act(desk, "look")
    assert "a red boat" in drawn["line"]
    again, _ = act(desk, "look", marks=says["marks"])
    assert not any(isinstance(part, str) for part in again.values())
    add(worker, "a blue ball")
    again, _ = act(desk, "look", marks=says["marks"])
    assert isinstance(again["line"], str) and not isinstance(again["ended"], str)


def test_deleted_jobs_come_back_until_they_are_removed_for_good(desk: JobsController, worker: JobQueue) -> None:
    job = add(worker, "a red boat")
    finish(worker, job)
    output = worker.store.get(job).output
    drawn, says = act(desk, "delete", job, tab="history", open=job)
    assert says["undo"] == [job] and says["open"] == "" and drawn["detail"] == ""
    assert "No videos yet" in drawn["gallery"] and output.is_file()
    drawn, _ = act(desk, "undelete", job, tab="history")
    assert "a red boat" in drawn["gallery"] and "1 video, 1.0 KB" in drawn["room"]
    act(desk, "delete", job, tab="history")
    drawn, says = act(desk, "purge", tab="history", state="deleted")
    assert says["said"] == "Removed for good: “a red boat”." and not output.exists()
    assert worker.store.list(deleted=True) == []


def test_nobody_touches_what_is_anothers(
    desk: JobsController, worker: JobQueue, models: dict[str, ModelSpec], tmp_path: Path
) -> None:
    visitor = JobsController(worker, models, tmp_path / "outputs", owner="visitor")
    mine, theirs = add(worker, "a red boat"), add(worker, "a blue ball", "visitor")
    drawn, _ = act(visitor, "look")
    assert "a blue ball" in drawn["line"] and "a red boat" not in drawn["line"]
    for name in ("cancel", "up", "edit", "save", "open", "delete", "resume", "redo"):
        _, says = act(visitor, name, mine)
        assert says["said"] == "There is no such action or job. Load the page again.", name
    act(visitor, "cancel-all")
    assert prompts(worker) == ["a red boat"]
    # Whose machine it is may stop what waits on it, and sees no more of it.
    other = add(worker, "a calm sea", "visitor")
    assert "visitor" in act(desk, "look")[0]["line"]
    act(desk, "cancel", other)
    assert prompts(worker) == ["a red boat"]
    drawn, _ = act(desk, "look", tab="history")
    assert "a calm sea" not in drawn["gallery"]
    assert act(desk, "open", theirs, tab="history")[1]["wrong"]


def test_history_is_searched_and_paged(desk: JobsController, worker: JobQueue) -> None:
    for number in range(26):
        worker.cancel([add(worker, f"boat {number}")])
    drawn, _ = act(desk, "look", tab="history")
    assert drawn["gallery"].count("<li") == 24 and "boat 25" in drawn["gallery"]
    drawn, _ = act(desk, "page", tab="history", page=1)
    assert drawn["gallery"].count("<li") == 2 and "boat 0" in drawn["gallery"]
    drawn, _ = act(desk, "look", tab="history", search="17 BOAT")
    assert drawn["gallery"].count("<li") == 1
    assert "Nothing found." in act(desk, "look", tab="history", state="done")[0]["gallery"]


def test_a_video_that_is_gone_or_elsewhere_is_said(desk: JobsController, worker: JobQueue) -> None:
    job = add(worker, "a red boat")
    finish(worker, job)
    worker.store.get(job).output.unlink()
    drawn, _ = act(desk, "open", job, tab="history")
    assert "Its file is not there any more." in drawn["detail"] and "<video" not in drawn["detail"]
    assert "not there" in act(desk, "measure", tab="history", pair=[job, job])[1]["said"]
