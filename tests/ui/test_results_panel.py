"""The strip of recent videos in Make, and the actions on the video that is shown."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec
from runtime.pipeline.files import POSTER
from runtime.queue.job_queue import JobQueue, combined
from runtime.ui.jobs_panel import example_of
from runtime.ui.panels import Call, respond
from runtime.ui.results_panel import ResultsPanel
from tests.queue.test_worker import small
from tests.ui.test_job_panels import add, finish, models, panel_call, worker

__all__ = ["models", "worker"]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the files whose folder was opened: no window is opened in tests."""
    calls: list[str] = []
    monkeypatch.setattr(typer, "launch", lambda path, locate: calls.append(path) if locate else None)
    yield calls


@pytest.fixture
def panel(worker: JobQueue, models: dict[str, ModelSpec], tmp_path: Path) -> Callable[[bool], ResultsPanel]:
    return lambda opens: ResultsPanel(worker, models, tmp_path / "outputs", opens_folders=opens)


def shown(panel: ResultsPanel) -> list[str]:
    return re.findall(r'data-show="([0-9a-f]{8})"', respond(panel, panel_call("refresh"))["parts"]["strip"])


def test_running_videos_come_first_then_finished_ones_the_newest_first(
    worker: JobQueue, panel: Callable[[bool], ResultsPanel]
) -> None:
    assert respond(panel(False), panel_call("refresh"))["parts"]["strip"] == ""
    first, second = add(worker, "a red boat"), add(worker, "a blue ball")
    finish(worker, first)
    finish(worker, second)
    running = add(worker, "a kite")
    assert worker.store.order.claim("here") is not None
    add(worker, "queued")
    assert shown(panel(False)) == [running, second, first]


def test_a_video_that_is_not_served_is_not_offered(worker: JobQueue, panel: Callable[[bool], ResultsPanel]) -> None:
    """`generate --out` puts a video into any folder."""
    here, elsewhere, last = (add(worker, "a red boat") for _ in range(3))
    for job in (here, elsewhere, last):
        finish(worker, job)
    saved = worker.store.get(elsewhere)
    assert saved is not None and saved.output is not None
    saved.output.unlink()
    assert shown(panel(False)) == [last, here]
    assert respond(panel(False), panel_call("delete", last))["show"] == here


def test_earlier_prompts_are_found_as_they_were_typed(worker: JobQueue, panel: Callable[[bool], ResultsPanel]) -> None:
    for prompt in ("a red boat", "a {red|blue} ball", "a red boat"):
        add(worker, prompt)

    def prompts(search: object) -> list[str]:
        found: list[str] = respond(panel(False), Call("prompts", values={"search": search}))["prompts"]
        return found

    assert prompts("") == ["a red boat", "a {red|blue} ball"] == prompts(5)
    assert prompts("boat a") == ["a red boat"]
    assert prompts("kite") == []


def test_a_contact_sheet_is_saved_for_a_batch(worker: JobQueue, panel: Callable[[bool], ResultsPanel]) -> None:
    single = add(worker, "a red boat")
    first, _ = worker.submit_all(combined(small(), [], [1, 2]))
    assert respond(panel(False), panel_call("sheet", single))["error"]
    says = respond(panel(False), panel_call("sheet", first.id))["message"]
    outputs = first.output.parent
    assert all(path.name in says for path in outputs.glob("grid-*")) and len(list(outputs.glob("grid-*"))) == 2


def test_a_deleted_video_is_replaced_by_the_newest_left(
    worker: JobQueue, panel: Callable[[bool], ResultsPanel]
) -> None:
    first, second = add(worker, "a red boat"), add(worker, "a blue ball")
    finish(worker, first)
    finish(worker, second)
    reply = respond(panel(False), panel_call("delete", second))
    assert (reply["show"], reply["undo"]) == (first, [second])
    assert respond(panel(False), panel_call("delete", first))["show"] == ""


def test_a_group_has_one_card_and_its_next_video_replaces_a_discarded_one(
    worker: JobQueue, panel: Callable[[bool], ResultsPanel]
) -> None:
    alone = add(worker, "a red boat")
    finish(worker, alone)
    first, second, third = (
        job.id for job in worker.submit_all(combined(small(prompt="a kite", seed=1), [], [1, 2, 3]))
    )
    for job in (first, second):
        finish(worker, job)
    strip = respond(panel(False), panel_call("refresh"))["parts"]["strip"]
    assert re.findall(r'data-show="(\w+)" data-members="([^"]+)"', strip) == [
        (second, f"{first} {second} {third}"),
        (alone, alone),
    ]
    assert worker.store.order.claim("here") is not None
    assert shown(panel(False)) == [second, alone]
    # One that runs is stopped and stays.
    assert "show" not in respond(panel(False), panel_call("discard", third))
    assert worker.store.get(third).pending == "cancel"
    replies = [respond(panel(False), panel_call("discard", job)) for job in (first, second)]
    assert [reply["show"] for reply in replies] == [second, third]
    assert respond(panel(False), panel_call("restore", first))["show"] == first


def test_folders_are_opened_on_this_machine_only(
    worker: JobQueue, panel: Callable[[bool], ResultsPanel], opened: list[str]
) -> None:
    job = add(worker, "a red boat")
    assert respond(panel(True), panel_call("reveal", job))["error"]  # there is no file yet
    finish(worker, job)
    assert respond(panel(False), panel_call("reveal", job))["error"]
    assert opened == []
    assert "error" not in respond(panel(True), panel_call("reveal", job))
    assert opened == [str(worker.store.get(job).output)]


def test_the_example_of_a_model_is_the_last_clip_that_it_made(
    worker: JobQueue, models: dict[str, ModelSpec], tmp_path: Path
) -> None:
    spec = models["tiny"]
    assert example_of(worker.store, spec) == ""
    first, second, visitors = add(worker, "a red boat"), add(worker, "a blue ball"), add(worker, "a kite", "visitor")
    for job in (first, second, visitors):
        finish(worker, job)
        folder = worker.store.folder(job)
        assert folder is not None
        folder.mkdir(parents=True, exist_ok=True)
        (folder / POSTER).write_bytes(b"x")
    assert example_of(worker.store, spec).startswith(f"tandem/poster/{second}.webp?")
    # The shipped model brings its own.
    assert example_of(worker.store, find("diorama", tmp_path / "weights")).startswith("data:image/webp;base64,")
