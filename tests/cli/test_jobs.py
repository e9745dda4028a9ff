"""`jobs …`, and jobs of `generate` in the store."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.cli import terminal
from runtime.cli.main import run
from runtime.core.events import Failed, Planned, Warned
from runtime.core.facts import Fact, render, sentence
from runtime.core.request import GenerationRequest
from runtime.models.spec import ModelSpec
from runtime.planner.resolve import PlanningContext, resolve
from runtime.queue.instances import Instance, WorkerRegistry
from runtime.queue.store import open_store
from runtime.video.mp4 import find_ffmpeg, read_metadata
from tests.cli.test_generate import command
from tests.facts import fact
from tests.plans import machine
from tests.queue.samples import add_job, sample_plan, sample_request, sample_result
from tests.waiting import until

Tiny = Callable[[str], ModelSpec]


@pytest.fixture(autouse=True)
def empty(cache_dir: Path) -> Path:
    return cache_dir


def answer(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> tuple[dict[str, Any], str]:
    """Run a command and return its JSON and its text."""
    assert run([*arguments, "--json"]) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return json.loads(out.splitlines()[-1]), err


def stream(video: Path) -> bytes:
    """Return the video's own bytes, without what the file says about itself."""
    arguments = [find_ffmpeg(), "-v", "error", "-i", str(video), "-map", "0:v", "-c", "copy", "-f", "h264", "-"]
    return subprocess.run(arguments, capture_output=True, check=True).stdout


def test_listing_and_searching(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["jobs", "list"], capsys) == (
        {"cluster": [], "unreadable": [], "jobs": [], "builds": []},
        f"{fact('cli.no_jobs')}\n",
    )
    store = open_store(cache_dir)
    boat, kite = add_job(store, "a red boat"), add_job(store, "a blue kite")
    store.request_cancel([boat.id])
    found, text = answer(["jobs", "list"], capsys)
    assert [(job["id"], job["state"]) for job in found["jobs"]] == [(kite.id, "queued"), (boat.id, "cancelled")]
    assert kite.id in text and "a blue kite" in text
    assert [job["id"] for job in answer(["jobs", "list", "--search", "BOAT"], capsys)[0]["jobs"]] == [boat.id]
    assert [job["id"] for job in answer(["jobs", "list", "--state", "queued"], capsys)[0]["jobs"]] == [kite.id]
    refused, _ = answer(["jobs", "list", "--state", "asleep"], capsys, 2)
    assert (refused["error"]["code"], refused["error"]["data"]["value"]) == ("request.not_a_choice", "'asleep'")


def test_the_list_has_pages(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(cache_dir)
    made = [add_job(store).id for _ in range(5)][::-1]
    found: list[str] = []
    after: list[str] = []
    while True:
        page, _ = answer(["jobs", "list", "--limit", "2", *after], capsys)
        found += [job["id"] for job in page["jobs"]]
        assert len(page["jobs"]) <= 2
        if "after" not in page:
            break
        after = ["--after", page["after"]]
    assert found == made
    assert [job["id"] for job in answer(["jobs", "list", "--limit", "0"], capsys)[0]["jobs"]] == made
    assert answer(["jobs", "list", "--after", "zzzz"], capsys, 2)[0]["error"]


def test_builds_are_listed_with_their_progress(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(cache_dir)
    request = {"prompt": "a boat"}
    assert store.add_idle_build(sentence("VAE"), cache_dir, request, {"e1"})
    found, text = answer(["jobs", "list"], capsys)
    (build,) = found["builds"]
    assert (build["state"], build["idle"], build["share"]) == ("queued", True, None)
    (row,) = [line for line in text.splitlines() if build["id"] in line]
    assert "idle" in row and row.endswith("  VAE")
    with Instance(store.path) as own:
        WorkerRegistry(store.database).register(f"{own.id}.0", 0)
        assert store.order.claim(f"{own.id}.0")
        store.log.set_live_progress(build["id"], {"fact": Fact("engine.compiling").model_dump(), "share": 0.25})
        found, text = answer(["jobs", "list", "--state", "running"], capsys)
        assert [(one["progress"], one["share"]) for one in found["builds"]] == [("Compiling.", 0.25)]
        assert "running, 25%" in text


def test_a_job_of_a_dead_process_is_interrupted(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = add_job(open_store(cache_dir), instance="dead")
    found, _ = answer(["jobs", "list"], capsys)
    assert [(one["id"], one["state"], one["resumable"]) for one in found["jobs"]] == [(job.id, "interrupted", True)]


@pytest.mark.parametrize("act", ["show", "resume", "extend", "delete", "undelete"])
def test_an_unknown_id_is_refused_in_two_lines(act: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["jobs", act, "1a2b3c4d"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    what, remedy = render(fact("queue.no_such_job", job="1a2b3c4d"))
    assert err.splitlines() == [f"Error: {what}", f"To do: {remedy}"]


def test_a_job_whose_folder_is_gone_is_resumed_with_another_file(
    tiny: Tiny, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tiny("wan2.1")
    request = GenerationRequest(
        prompt="a boat", model=str(spec.directory), width=64, height=32, frames=9, steps=1, seed=1
    )
    plan = resolve(request, spec, PlanningContext(machine(), tmp_path / "gone" / "x.mp4"))
    store = open_store(cache_dir)
    job = store.add(request, plan, instance="dead")
    store.log.record(job.id, Planned(plan=plan))
    refused, _ = answer(["jobs", "resume", job.id], capsys, 2)
    assert refused["error"]["code"] == "video.folder_missing"
    assert "--out" in refused["error"]["remedy"]
    assert store.find(job.id).state == "interrupted", "nothing is lost by the refusal"
    done, _ = answer(["jobs", "resume", job.id, "--out", str(tmp_path / "y.mp4")], capsys)
    assert done["video"] == str(tmp_path / "y.mp4")
    assert (tmp_path / "y.mp4").is_file()
    assert store.find(job.id).output == tmp_path / "y.mp4"


def test_a_finished_job_is_extended_with_its_settings(
    tiny: Tiny, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--steps", "2", "--guidance", "1", "--interpolate", "2", "--seed", "7")
    first, _ = answer(command(tiny("wan2.2-ti2v-5b"), tmp_path / "x.mp4", *flags)[2:], capsys)
    store = open_store(cache_dir)
    (job,) = store.list()
    both, _ = answer(["jobs", "extend", job.id[:6], "--prompt", "it sinks", "--frames", "5"], capsys)
    used, frames = both["request"], first["request"]["frames"]
    assert (used["prompt"], used["frames"], used["steps"], used["interpolate"]) == ("it sinks", 5, 2, "2")
    assert used["extend"].endswith("/x.plain.mp4") and used["image"] is None and used["seed"] != 7
    assert both["plan"]["parts"] == [{"prompt": "a red boat", "frames": frames}, {"prompt": "it sinks", "frames": 4}]
    saved = store.list()[0].saved
    assert saved is not None and saved.frames == 2 * (frames + 4)
    for arguments, code in (
        (["--seconds", "nan"], "request.not_a_number"),
        (["--steps", "0"], "request.out_of_range"),
        (["--prompt", " "], "request.prompt_empty"),
    ):
        refused, _ = answer(["jobs", "extend", job.id, *arguments], capsys, 2)
        assert refused["error"]["code"] == code
    (tmp_path / "x.mp4").unlink()
    refused, _ = answer(["jobs", "extend", job.id], capsys, 2)
    assert refused["error"]["code"] == "queue.no_video"


def test_deletion_asks_and_can_be_undone(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(cache_dir)
    jobs = [add_job(store) for _ in range(2)]
    ids = [job.id for job in jobs]
    refused, _ = answer(["jobs", "delete", *ids], capsys, 2)  # there is no terminal here
    assert "--yes" in refused["error"]["remedy"]
    refused, _ = answer(["jobs", "delete", ids[0], ids[1][:3], "--yes"], capsys, 2)
    assert refused["error"]["code"] == "queue.short_job_id"
    refused, _ = answer(["jobs", "delete", ids[0], "nothing", "--yes"], capsys, 2)
    assert len(store.list()) == 2
    deleted, text = answer(["jobs", "delete", *ids, "--yes"], capsys)
    assert deleted == {"deleted": ids}
    assert text == f"{fact('cli.jobs_deleted', jobs=' '.join(ids), days=7)}\n"
    assert f"jobs undelete {' '.join(ids)}" in text
    assert answer(["jobs", "list"], capsys)[0] == {"cluster": [], "unreadable": [], "jobs": [], "builds": []}
    assert answer(["jobs", "undelete", ids[1]], capsys)[0] == {"undeleted": [ids[1]]}
    assert [job.id for job in store.list()] == [ids[1]]


def test_diagnostics_contain_no_prompt_and_no_paths(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(cache_dir)
    job = store.add(sample_request(prompt="a zorp at home", negative_prompt="blurry"), sample_plan(), instance="a")
    store.log.record(job.id, Planned(plan=sample_plan()))
    store.log.record(job.id, Warned(fact=Fact("pipeline.unknown_words", {"words": ["zorp"], "field": "prompt"})))
    store.log.record(
        job.id,
        Failed(fact=Fact("queue.store_locked", {"file": sample_plan().output, "log": cache_dir / "logs" / "x.log"})),
    )
    printed, text = answer(["jobs", "show", job.id[:7]], capsys)
    report = printed["job"]
    assert (report["id"], report["state"]) == (job.id, "failed")
    assert report["versions"]["torch"] and report["machine"]["cores"]
    assert report["plan"]["components"]["vae"]["reason"]
    assert [event["event"] for event in report["events"]] == ["Planned", "Warned", "Failed"]
    assert report["events"][1]["fact"] == {"code": "pipeline.unknown_words", "data": {"field": "prompt"}}
    assert report["failure"]["data"] == {"file": "…/boat.mp4", "log": "…/x.log"}
    assert report["failure"]["what"] == str(fact("queue.store_locked", file="…/boat.mp4"))
    for private in ("zorp", "blurry", "/nowhere", str(cache_dir), str(Path.home())):
        assert private not in json.dumps(report) + text, private
    printed, text = answer(["jobs", "show", job.id, "--with-prompt"], capsys)
    assert printed["job"]["request"]["prompt"] == "a zorp at home"
    assert "/nowhere/boat.mp4" in text
    assert "None" not in text and "{}" not in text and "[]" not in text


def test_a_finished_job_is_not_resumed(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(cache_dir)
    job = add_job(store, instance="a")
    store.log.record(job.id, sample_result())
    refused, _ = answer(["jobs", "resume", job.id], capsys, 2)
    assert (refused["error"]["code"], refused["error"]["data"]["job"]) == ("queue.job_done", job.id)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_killed_job_resumes_at_its_checkpoint(
    tiny: Tiny, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit, and while another process, as the web app, looks for work in the same store."""
    out = tmp_path / "boat.mp4"
    flags = ("--steps", "500", "--seed", "7")
    with subprocess.Popen(command(tiny("wan2.2-a14b"), out, *flags), stderr=subprocess.DEVNULL) as process:
        store = open_store(cache_dir)

        def kept() -> bool:
            assert store.order.claim("app") is None
            events = [values for job in store.list() for _, _, values in store.log.events(job.id)]
            return any(values["event"] == "CheckpointSaved" and values["step"] for values in events)

        until(kept, meanwhile=lambda: process.poll() is None)
        os.kill(process.pid, signal.SIGKILL)
    (killed,) = store.list()
    store.close()
    assert not out.exists()
    found, _ = answer(["jobs", "list"], capsys)
    assert [(job["id"], job["state"]) for job in found["jobs"]] == [(killed.id, "interrupted")]
    resumed, _ = answer(["jobs", "resume", killed.id[:6]], capsys)
    assert resumed["video"] == str(out)
    assert resumed["seed"] == 7
    assert read_metadata(out)["job"] == killed.id
    store = open_store(cache_dir)
    assert store.get(killed.id).state == "done"
    events = [values for _, _, values in store.log.events(killed.id)]
    assert next(values["step"] for values in events if values["event"] == "Resumed") > 0
    whole = tmp_path / "whole.mp4"
    answer(command(tiny("wan2.2-a14b"), whole, *flags)[2:], capsys)
    assert stream(out) == stream(whole)
    assert [job.state for job in store.list()] == ["done", "done"]


def test_without_a_store_the_video_is_made_with_a_warning(
    tiny: Tiny, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cache_dir / "jobs.sqlite").mkdir(parents=True)
    out = tmp_path / "boat.mp4"
    result, text = answer(command(tiny("wan2.1"), out, "--steps", "1")[2:], capsys)
    assert out.is_file()
    assert result["video"] == str(out)
    refused, _ = answer(["jobs", "list"], capsys, 2)
    cause = fact(refused["error"]["code"], **refused["error"]["data"])
    assert cause.code == "queue.store_unusable"
    assert f"Note: {fact('queue.job_not_stored', cause=cause)}\n" in text


def test_a_store_of_a_newer_version_is_refused(
    tiny: Tiny, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_store(cache_dir).close()
    import sqlite3

    with sqlite3.connect(cache_dir / "jobs.sqlite") as connection:
        connection.execute("PRAGMA user_version = 999")
    connection.close()
    out = tmp_path / "boat.mp4"
    _, text = answer(command(tiny("wan2.1"), out, "--steps", "1")[2:], capsys)
    assert out.is_file()
    refused, _ = answer(["jobs", "list"], capsys, 2)
    cause = fact(refused["error"]["code"], **refused["error"]["data"])
    assert (cause.code, cause.data["version"]) == ("queue.store_too_new", 999)
    assert f"Note: {fact('queue.job_not_stored', cause=cause)}\n" in text


def test_control_characters_of_prompts_do_not_reach_the_terminal(
    cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(cache_dir)
    job = add_job(store, "a \u202ered\u2069 boat \u200f\u061c")
    found, text = answer(["jobs", "list"], capsys)
    assert found["jobs"][0]["prompt"] == job.prompt
    assert r"a \u202ered\u2069 boat \u200f\u061c" in text
    _, text = answer(["jobs", "show", job.id, "--with-prompt"], capsys)
    assert "\u202e" not in text and r"\u202e" in text
    terminal.line("\x1b[31mred\x07 \x9b here")
    terminal.error("\x1b]0;title\x07", "do\u2028this")
    assert capsys.readouterr().err == ("\\x1b[31mred\\x07 \\x9b here\nError: \\x1b]0;title\\x07\nTo do: do this\n")


def test_only_a_job_with_sections_ends_early(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(cache_dir)
    whole = store.add(sample_request(), sample_plan())
    assert answer(["jobs", "finish", whole.id], capsys, 2)[0]["error"]["code"] == "queue.job_has_no_sections"
    job = store.add(sample_request(), sample_plan().replace(sections=3))
    found, _ = answer(["jobs", "finish", job.id], capsys)
    assert found == {"finishing": job.id}
    assert store.get(job.id).finish
