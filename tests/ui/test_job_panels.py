"""The panels Queue and History on a real job queue that runs nothing: actions, and whose jobs they may touch."""

import gc
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runtime.core.events import Failed
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan
from runtime.models import requested
from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec
from runtime.queue.job_queue import JobQueue, combined
from runtime.queue.store import JobStore
from runtime.server.gradio_requests import RefusedError
from runtime.ui import form
from runtime.ui.formatting import paragraph
from runtime.ui.history_panel import HistoryPanel, read_view
from runtime.ui.panels import Call, read_call, respond
from runtime.ui.queue_panel import QueuePanel
from tests.facts import fact
from tests.image_files import saved, taking_images
from tests.plans import no_engines
from tests.queue.samples import add_job, sample_result
from tests.queue.test_worker import small
from tests.thread_queue import RunningQueue
from tests.ui.page_texts import UNKNOWN, line, message
from tests.ui.test_form import GOOD

WIDTH_33 = {"field": "width", "value": 33, "model": "tiny", "stride": 16, "able": [32, 48]}
VIEW: dict[str, Any] = {"search": "", "state": "all", "pages": 1, "stacks": [], "open": "", "pair": []}


@dataclass(frozen=True)
class Panels:
    """Both panels over one worker."""

    queue: QueuePanel
    history: HistoryPanel

    @classmethod
    def over(cls, worker: JobQueue, models: dict[str, ModelSpec], folder: Path, owner: str | None = None) -> "Panels":
        return cls(QueuePanel(worker, models, folder, owner), HistoryPanel(worker, models, folder, owner))


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
def desk(worker: JobQueue, models: dict[str, ModelSpec], tmp_path: Path) -> Panels:
    return Panels.over(worker, models, tmp_path / "outputs")


def values(**changes: Any) -> list[Any]:
    """Return a form for the tiny model."""
    size = {"model": "tiny", "width": 32, "height": 32, "frames": 5, "steps": 2, "fps": 8}
    given = GOOD | size | changes
    return [given[name] for name in form.NAMES]


def act(desk: Panels, name: str, of: str = "", **changes: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """Press a button; return the parts that were drawn, and the reply."""
    shown, given, drawn = changes.pop("form", values()), changes.pop("values", {}), changes.pop("drawn", {})
    panel = getattr(desk, changes.pop("tab", "queue"))
    reply = respond(panel, Call(name, of, given, VIEW | changes, shown, drawn))
    return reply["parts"], reply


def panel_call(action: str, target: str = "") -> Call:
    """Return what a button without a form sends."""
    return Call(action, target, {}, VIEW, [], {})


def add(worker: JobQueue, prompt: str, owner: str | None = None) -> str:
    return worker.submit(small(prompt=prompt, seed=1), owner).id


def finish(worker: JobQueue, job_id: str) -> None:
    """Let a job be done, with a file where its video would be."""
    assert worker.store.order.claim("here") is not None
    worker.store.log.record(job_id, sample_result())
    output = worker.store.get(job_id).output
    output.parent.mkdir(exist_ok=True)
    output.write_bytes(b"x" * 1000)


def test_the_card_of_a_failed_job_has_the_name_of_its_file(worker: JobQueue, desk: Panels) -> None:
    job = worker.store.get(add(worker, "a boat"))
    assert worker.store.order.claim("here") is not None
    worker.store.log.record(job.id, Failed(fact=Fact("video.disk_full", {"file": str(job.output)})))
    gallery = act(desk, "refresh", tab="history")[0]["gallery"]
    assert line("video.disk_full", file=job.output.name) in gallery
    detail = act(desk, "open", job.id, tab="history", open=job.id)[0]["detail"]
    assert line("video.disk_full", file=job.output) in detail


def prompts(worker: JobQueue) -> list[str]:
    return [job.prompt for job in worker.store.order.jobs()]


@pytest.mark.slow
def test_queued_jobs_keep_their_plans_as_text(worker: JobQueue, desk: Panels) -> None:
    jobs = worker.submit_all(combined(small(seed=1), [f"boat {n}" for n in range(40)], []))
    act(desk, "refresh")
    gc.collect()
    plans = sum(isinstance(one, ExecutionPlan) for one in gc.get_objects())
    # Those of the cache, and of the session's fixtures.
    assert plans < 30
    assert [job.prompt for job in jobs] == [f"boat {n}" for n in range(40)]


CALL: dict[str, Any] = {"action": "refresh", "target": "", "values": {}, "view": VIEW, "form": [], "drawn": {}}


def test_malformed_requests_are_rejected(subtests: pytest.Subtests) -> None:
    wrong = [json.dumps(CALL | {name: 5}).encode() for name in CALL]
    deep = json.dumps(CALL | {"form": json.loads("[" * 30 + "]" * 30)}).encode()
    for code, bodies in (
        ("not_json", [b"", b"nonsense", b"[" * 5000]),
        ("not_an_object", [b"[]"]),
        ("panel_call_incomplete", [b"{}", b'{"action": "refresh"}', *wrong]),
        ("call_too_large", [deep]),
        ("call_files", [json.dumps(CALL | {"values": {"url": "http://127.0.0.1"}}).encode()]),
    ):
        for body in bodies:
            with subtests.test(msg=f"{code}: {body[:60]!r}"):
                with pytest.raises(RefusedError) as refused:
                    read_call(body)
                assert refused.value.fact.code == f"server.{code}"


@pytest.mark.parametrize(("action", "count"), [("again", 1), ("variations", 4)])
def test_a_video_is_repeated_with_new_seeds(desk: Panels, worker: JobQueue, action: str, count: int) -> None:
    first = add(worker, "a red boat")
    finish(worker, first)
    _, says = act(desk, action, first, tab="history")
    added = worker.store.order.jobs()
    assert [job.prompt for job in added] == ["a red boat"] * count
    assert says["watch"] == added[0].id
    asked, before = [dict(job.request) for job in added], dict(worker.store.get(first).request)
    seeds = {request.pop("seed") for request in asked}
    assert before.pop("seed") == 1 and 1 not in seeds and len(seeds) == count
    assert asked == [before] * count


def test_the_variations_of_a_prompt_are_one_card_until_it_is_opened(desk: Panels, worker: JobQueue) -> None:
    alone = add(worker, "a calm sea")
    finish(worker, alone)
    ids = [job.id for job in worker.submit_all(combined(small(prompt="a red boat", seed=1), [], [1, 2, 3]))]
    for job_id in ids[:2]:
        finish(worker, job_id)

    def cards(**view: Any) -> list[str]:
        """Return the ids of each card, whose selection deletes and stars them all."""
        return re.findall(r'<li [^>]*data-job="([^"]+)"', act(desk, "refresh", tab="history", **view)[0]["gallery"])

    assert cards() == [" ".join(ids[:2]), alone]
    worker.cancel(ids)
    assert cards() == [" ".join(ids), alone]
    assert cards(stacks=[ids[1]]) == [*ids, alone]
    assert cards(state="done") == [" ".join(ids[:2]), alone]
    assert cards(search="boat") == [" ".join(ids)]
    assert cards(search=ids[0]) == [ids[0]]
    act(desk, "star", ids[2], tab="history")
    assert cards(state="starred") == [ids[2]]
    act(desk, "delete", " ".join(ids), tab="history")
    assert (cards(), cards(state="deleted")) == ([alone], [" ".join(ids)])


@pytest.mark.parametrize(
    ("panel", "changes"),
    [
        ("history", {"view": {}}), ("history", {"view": VIEW | {"pages": 0}}),
        ("history", {"view": VIEW | {"state": "running"}}), ("history", {"view": VIEW | {"search": "x" * 201}}),
        ("queue", {"action": "explode"}), ("queue", {"action": "cancel", "target": "../../etc"}),
        ("queue", {"action": "delete"}), ("history", {"action": "delete-old", "target": "0"}),
        ("queue", {"action": "open", "target": "01234567"}), ("history", {"action": "add"}),
    ],
)  # fmt: skip
def test_unknown_actions_are_rejected(desk: Panels, worker: JobQueue, panel: str, changes: dict[str, Any]) -> None:
    add(worker, "a red boat")
    reply = respond(getattr(desk, panel), read_call(json.dumps(CALL | changes).encode()))
    assert reply["error"] and reply["message"] == UNKNOWN
    assert prompts(worker) == ["a red boat"]


def test_invalid_ids_are_ignored() -> None:
    view = read_view(VIEW | {"open": "../x", "pair": ["01234567", 5], "pages": 3, "stacks": [[], "01234567"]})
    assert (view.open, view.pair, view.pages, view.stacks) == ("", (), 3, frozenset(["01234567"]))


def test_several_prompts_and_variations_are_added_together(desk: Panels, worker: JobQueue) -> None:
    drawn, says = act(desk, "add", values={"prompts": "a red boat\n\n  a blue ball ", "variations": "2"})
    assert says["message"] == "Added to the queue: 4 videos." and len(says["added"]) == 4
    assert prompts(worker) == ["a red boat"] * 2 + ["a blue ball"] * 2
    assert drawn["list"].count("<li") == 4
    assert len({job.batch for job in worker.store.order.jobs()}) == 1
    act(desk, "add", values={"variations": "3"}, form=values(prompt="a calm sea", seed="40"))
    assert [job.request["seed"] for job in worker.store.order.jobs()][4:] == [40, 41, 42]


def test_a_grid_is_added_with_one_seed(desk: Panels, worker: JobQueue) -> None:
    grid = {"grid_0": "steps", "values_0": "1..2", "grid_1": "", "values_1": "x", "grid_2": "fps", "values_2": "4,8"}
    _, says = act(desk, "add", values={"prompts": "a red boat\na blue ball", "variations": "1", **grid})
    assert says["message"] == "Added to the queue: 8 videos."
    jobs = worker.store.order.jobs()
    made = [(job.prompt[2:5], job.request["steps"], job.request["fps"]) for job in jobs]
    assert made == [(prompt, steps, fps) for prompt in ("red", "blu") for steps in (1, 2) for fps in (4, 8)]
    assert len({job.request["seed"] for job in jobs}) == len({job.batch for job in jobs}) == 1
    act(desk, "add", values={"variations": "2", "grid_0": "steps", "values_0": "1,2"})
    assert len({job.request["seed"] for job in worker.store.order.jobs()[8:]}) == 2
    unknown = message("ui.unknown_action")
    for wrong, expected in (
        ({"values_0": ""}, paragraph(fact("request.grid_without_values", value="'steps='"))),
        ({"grid_1": "steps", "values_1": "3"}, paragraph(fact("request.grid_repeated", field="steps"))),
        ({"grid_0": "image", "values_0": "/etc/passwd"}, unknown),
        ({"grid_0": "loras", "values_0": "../x"}, unknown),
        ({"grid_0": "width", "values_0": "32,33"}, paragraph(fact("planner.not_a_multiple", **WIDTH_33))),
    ):
        says = act(desk, "add", values={"variations": "1", "grid_0": "steps", "values_0": "1,2", **wrong})[1]
        assert says["error"] and says["message"] == expected
    assert len(worker.store.order.jobs()) == 12


@pytest.mark.parametrize(
    ("given", "shown", "expected"),
    [
        *(
            ({"variations": given}, {}, fact("ui.variations", given=given or "", maximum=100))
            for given in ("0", "1e9", "٣", None)
        ),
        ({"prompts": "x\n" * 11, "variations": "100"}, {}, fact("queue.batch_too_large", videos=1100, maximum=1000)),
        ({"prompts": ["x"]}, {"prompt": ""}, fact("request.prompt_empty")),
        ({"prompts": "a boat"}, {"width": 33}, fact("planner.not_a_multiple", **WIDTH_33)),
    ],
)
def test_invalid_requests_add_nothing(
    desk: Panels, worker: JobQueue, given: dict[str, Any], shown: dict[str, Any], expected: Fact
) -> None:
    _, says = act(desk, "add", values=given, form=values(**shown))
    assert says["message"] == paragraph(expected) and says["error"]
    assert prompts(worker) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("move", "of", "order"),
    [
        ("up", "b", "bacd"), ("up", "a", "abcd"), ("up", "d", "abdc"),
        ("down", "a", "bacd"), ("down", "c", "abdc"), ("down", "d", "abcd"),
        ("front", "d", "dabc"), ("front", "a", "abcd"),
    ],
)  # fmt: skip
def test_a_job_moves_past_one_neighbor(desk: Panels, worker: JobQueue, move: str, of: str, order: str) -> None:
    ids = {prompt: add(worker, prompt) for prompt in "abcd"}
    act(desk, move, ids[of])
    assert "".join(prompts(worker)) == order


@pytest.mark.parametrize(
    ("of", "place", "order"),
    [("a", 3, "bcad"), ("d", 1, "dabc"), ("b", 2, "abcd"), ("b", 99, "acdb"), ("c", -5, "cabd")],
)
def test_a_job_is_dragged_to_a_place(desk: Panels, worker: JobQueue, of: str, place: int, order: str) -> None:
    ids = {prompt: add(worker, prompt) for prompt in "abcd"}
    _, says = act(desk, "move", ids[of], values={"place": place})
    assert "".join(prompts(worker)) == order
    assert says["announce"] == f"“{of}” is number {order.index(of) + 1} of 4."
    for wrong in ("1", None, True, 1.5):
        assert act(desk, "move", ids[of], values={"place": wrong})[1]["message"] == UNKNOWN
    assert "".join(prompts(worker)) == order


def test_a_duplicate_follows_its_job_with_a_new_seed(desk: Panels, worker: JobQueue) -> None:
    first, _ = add(worker, "a red boat"), add(worker, "a blue ball")
    act(desk, "duplicate", first)
    assert prompts(worker) == ["a red boat", "a red boat", "a blue ball"]
    seeds = [job.request["seed"] for job in worker.store.order.jobs()]
    assert seeds[0] == 1 != seeds[1]


def test_a_duplicate_of_a_paused_job_is_paused(desk: Panels, worker: JobQueue) -> None:
    first, _ = add(worker, "a red boat"), add(worker, "a blue ball")
    act(desk, "pause-all")
    act(desk, "duplicate", first)
    assert [job.held for job in worker.store.order.jobs()] == [True, True, True]
    act(desk, "unpause", first)
    act(desk, "duplicate", first)
    assert [job.held for job in worker.store.order.jobs()] == [False, False, True, True]


@pytest.mark.slow
def test_a_long_queue_is_shown_in_parts(worker: JobQueue, desk: Panels) -> None:
    jobs = worker.submit_all(combined(small(seed=1), [f"boat {n}" for n in range(60)], []))
    first = act(desk, "refresh")[0]["list"]
    assert first.count("<li data-key=") == 50 and "boat 49" in first and "boat 50" not in first
    assert "10 further jobs" in first and "Cancel 60 queued and running jobs?" in first
    assert re.search("60 videos, about [^<]* in total", first)
    assert act(desk, "refresh", rows=2)[0]["list"].count("<li data-key=") == 60
    for hostile in (0, -1, True, 10**9, "2", None, [2]):
        assert act(desk, "refresh", rows=hostile)[0]["list"] == first
    # A job that is shown moves past those that are not, and the total is that of all.
    assert act(desk, "move", jobs[0].id, values={"place": 55})[1]["announce"].endswith("is number 55 of 60.")
    assert "boat 0<" not in act(desk, "refresh")[0]["list"]
    act(desk, "pause", jobs[58].id)
    paused = act(desk, "refresh")[0]["list"]
    assert "Pause all" in paused
    act(desk, "pause-all")
    assert "Resume all" in act(desk, "refresh")[0]["list"]
    assert len(worker.store.order.jobs(paused=False)) == 0
    act(desk, "cancel-all")
    assert worker.store.order.jobs() == []


def test_an_edited_job_keeps_its_place_and_seed(desk: Panels, worker: JobQueue) -> None:
    first, _ = add(worker, "a red boat"), add(worker, "a blue ball")
    _, says = act(desk, "edit", first)
    assert says["edit"]["request"]["prompt"] == "a red boat"
    _, says = act(desk, "save", first, form=values(prompt="a calm sea"))
    assert says["saved"] == first and prompts(worker) == ["a calm sea", "a blue ball"]
    assert worker.store.get(first).request["seed"] == 1
    act(desk, "save", first, form=values(prompt="a calm sea", seed="5"))
    assert worker.store.get(first).request["seed"] == 5
    worker.store.order.claim("here")
    _, says = act(desk, "save", first)
    assert says["message"] == message("queue.job_not_queued", job=first) and "saved" not in says


def test_all_are_paused_and_cancelled(desk: Panels, worker: JobQueue) -> None:
    for prompt in "abc":
        add(worker, prompt)
    drawn, _ = act(desk, "pause-all")
    assert all(job.held for job in worker.store.order.jobs()) and "Resume all" in drawn["list"]
    act(desk, "unpause-all")
    assert not any(job.held for job in worker.store.order.jobs())
    drawn, says = act(desk, "cancel-all")
    assert says["message"] == "Cancelled: 3." and "The queue is empty." in drawn["list"]


def test_unchanged_parts_are_not_sent_again(desk: Panels, worker: JobQueue) -> None:
    add(worker, "a red boat")
    drawn, says = act(desk, "refresh")
    assert "a red boat" in drawn["list"]
    again, _ = act(desk, "refresh", drawn=says["digests"])
    assert again == {}
    add(worker, "a blue ball")
    again, _ = act(desk, "refresh", drawn=says["digests"])
    assert set(again) == {"list"}


def test_deleted_jobs_can_be_restored_until_they_are_purged(desk: Panels, worker: JobQueue) -> None:
    job = add(worker, "a red boat")
    finish(worker, job)
    output = worker.store.get(job).output
    drawn, says = act(desk, "delete", job, tab="history", open=job)
    assert says["undo"] == [job] and "Restore" in drawn["detail"]
    assert "No videos yet" in drawn["gallery"] and output.is_file()
    drawn, _ = act(desk, "restore", job, tab="history")
    assert "a red boat" in drawn["gallery"] and "1 video, 1.0 KB" in drawn["storage"]
    act(desk, "delete", job, tab="history")
    drawn, says = act(desk, "purge", tab="history", state="deleted")
    assert says["message"] == "Removed permanently: “a red boat”." and not output.exists()
    assert worker.store.list(deleted=True) == []


def test_users_cannot_change_jobs_of_others(
    desk: Panels, worker: JobQueue, models: dict[str, ModelSpec], tmp_path: Path
) -> None:
    visitor = Panels.over(worker, models, tmp_path / "outputs", owner="visitor")
    mine, theirs = add(worker, "a red boat"), add(worker, "a blue ball", "visitor")
    drawn, _ = act(visitor, "refresh")
    assert "a blue ball" in drawn["list"] and "a red boat" not in drawn["list"]
    history = {"open", "again", "star", "unstar"}
    for name in (*history, "cancel", "up", "front", "duplicate", "edit", "save", "delete", "resume"):
        _, says = act(visitor, name, mine, tab="history" if name in history else "queue")
        assert says["message"] == UNKNOWN, name
    act(visitor, "cancel-all")
    assert prompts(worker) == ["a red boat"]
    # Whose machine it is may stop what waits on it, and sees no more of it.
    other = add(worker, "a calm sea", "visitor")
    assert "visitor" in act(desk, "refresh")[0]["list"]
    assert act(desk, "duplicate", other)[1]["message"] == UNKNOWN
    act(desk, "cancel", other)
    assert prompts(worker) == ["a red boat"]
    drawn, _ = act(desk, "refresh", tab="history")
    assert "a calm sea" not in drawn["gallery"]
    assert act(desk, "open", theirs, tab="history")[1]["error"]


def test_history_is_searched_and_loaded_in_pages(desk: Panels, worker: JobQueue) -> None:
    for number in range(50):
        worker.store.request_cancel([add_job(worker.store, f"boat {number}").id])
    drawn, _ = act(desk, "refresh", tab="history")
    assert drawn["gallery"].count("<li") == 48 and "boat 49" in drawn["gallery"]
    assert 'data-key="more">' in drawn["gallery"]
    drawn, says = act(desk, "more", tab="history", pages=2)
    assert drawn == {} and says["cards"].count("<li") == 2 and "boat 0" in says["cards"] and not says["more"]
    # A refresh keeps all that is shown.
    drawn, _ = act(desk, "refresh", tab="history", pages=2)
    assert drawn["gallery"].count("<li") == 50 and 'data-key="more" hidden' in drawn["gallery"]
    drawn, _ = act(desk, "refresh", tab="history", search="17 BOAT")
    assert drawn["gallery"].count("<li") == 1
    assert "No video matches." in act(desk, "refresh", tab="history", state="done")[0]["gallery"]


def test_starred_clips_are_kept_at_hand(desk: Panels, worker: JobQueue) -> None:
    first, second = (add(worker, prompt) for prompt in ("a red boat", "a blue ball"))
    worker.cancel([first, second])
    assert "No starred videos." in act(desk, "refresh", tab="history", state="starred")[0]["gallery"]
    drawn, says = act(desk, "star", first, tab="history")
    assert "gallery" not in drawn and says["announce"] == "Starred: “a red boat”."
    drawn, _ = act(desk, "refresh", tab="history", state="starred")
    assert "a red boat" in drawn["gallery"] and "a blue ball" not in drawn["gallery"]
    assert 'data-action="unstar"' in drawn["gallery"] and 'aria-pressed="true"' in drawn["gallery"]
    act(desk, "unstar", f"{first} {second}", tab="history")
    assert not any(job.starred for job in worker.store.list())


def test_a_missing_or_moved_video_is_reported(desk: Panels, worker: JobQueue) -> None:
    job = add(worker, "a red boat")
    finish(worker, job)
    worker.store.get(job).output.unlink()
    drawn, _ = act(desk, "open", job, tab="history", open=job)
    assert "The video file is missing." in drawn["detail"] and "<video" not in drawn["detail"]
    outside = worker.store.get(job).output.parents[1] / "elsewhere.mp4"
    outside.write_bytes(b"x")
    with worker.store.database.writing() as connection:
        connection.execute("UPDATE jobs SET output = ?", (str(outside),))
    drawn, _ = act(desk, "refresh", tab="history", open=job)
    for part in (drawn["gallery"], drawn["detail"]):
        assert f"Saved outside the outputs folder: {outside}" in part and "<video" not in part
    assert act(desk, "measure", tab="history", pair=[job, job])[1]["message"] == message("ui.video_missing")


def test_an_edited_or_repeated_job_keeps_its_image(
    desk: Panels, worker: JobQueue, models: dict[str, ModelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = models["tiny"] = taking_images(models["tiny"])
    monkeypatch.setattr(requested, "find", lambda *_: spec)
    image = saved(tmp_path / "boat.png")
    first = worker.submit(small(image=str(image), image_position=10)).id
    image.unlink()
    kept = worker.store.get(first).request["image"]
    assert kept.startswith("sha256:") and kept.endswith("/boat.png")
    edited = act(desk, "edit", first)[1]["edit"]["request"]
    filled = {name: shown["value"] for name, shown in form.filled(edited, models).items() if "value" in shown}
    act(desk, "save", first, form=values(**(filled | {"prompt": "a calm sea"})))
    act(desk, "duplicate", first)
    for job in worker.store.order.jobs():
        assert (job.request["prompt"], job.request["image"]) == ("a calm sea", kept)
        assert job.request["image_position"] == 10.0
    assert len(worker.store.order.jobs()) == 2
