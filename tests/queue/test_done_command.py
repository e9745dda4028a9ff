"""The owner's command at the end of a video: what it receives, once for each end, and what is reported if it fails."""

import json
import logging
import sys
from pathlib import Path

import pytest

from runtime.core.errors import StoreError
from runtime.core.events import Cancelled, Event, Failed, VideoSaved, Warned
from runtime.core.progress import Progress
from runtime.queue.done_command import DoneCommand
from runtime.queue.store import JobStore
from tests.queue.samples import add_job, sample_result
from tests.waiting import until

# Writes its arguments and the facts to a line of a file, which is its first argument.
WRITE = """
import json, os, sys
facts = {name: os.environ.get(f"TANDEM_{name}") for name in
         ("JOB", "STATE", "VIDEO", "PROMPT", "SEED", "ERROR", "AUTH", "ON_DONE")}
with open(sys.argv[1], "a") as file:
    file.write(json.dumps([sys.argv[2:], facts]) + "\\n")
"""
FAILED = Failed.because_of(StoreError("queue.job_has_no_sections", job="x"))


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(tmp_path / "jobs.sqlite")


def end(store: JobStore, event: Event, prompt: str = "a red boat") -> str:
    """Store the end of a new job and return its id."""
    job = add_job(store, prompt, instance="x")
    assert store.log.record(job.id, event)
    return job.id


def test_it_receives_the_path_and_facts_once_for_each_end(
    store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_AUTH", "me:secret")
    monkeypatch.setenv("TANDEM_ON_DONE", "again")
    written = tmp_path / "written"
    command = DoneCommand(store, [sys.executable, "-c", WRITE, str(written)])
    prompt = "a boat; $(touch x) \n '"
    done, failed = end(store, sample_result(), prompt), end(store, FAILED)
    end(store, Cancelled())
    assert not store.log.record(done, sample_result()), "it has ended"
    # Its process died after the video was complete.
    late = add_job(store, instance="x").id
    assert store.interrupt(late, "x", sample_result()) == "done"
    assert command.wait() == {}
    entries = {line[1]["JOB"]: line for line in map(json.loads, written.read_text().splitlines())}
    assert entries.keys() == {done, failed, late}
    video = str(sample_result().video)
    common = {"SEED": "7", "AUTH": None, "ON_DONE": None}
    facts = {"JOB": done, "STATE": "done", "VIDEO": video, "PROMPT": prompt.strip(), "ERROR": ""}
    assert entries[done] == [[video], facts | common]
    facts = {"JOB": failed, "STATE": "failed", "VIDEO": "", "PROMPT": "a red boat", "ERROR": FAILED.what}
    assert entries[failed] == [[], facts | common]
    assert [entries[late][1]["STATE"], entries[late][0]] == ["done", [video]]


def test_a_failure_is_a_line_in_the_log_and_a_warning(
    store: JobStore, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    fails = "import sys; sys.stderr.write('Traceback\\nno such disk\\n'); sys.exit(3)"
    commands = {
        "queue.on_done_failed": [sys.executable, "-c", fails],
        "queue.on_done_not_started": [str(tmp_path / "none")],
        "queue.on_done_too_long": [sys.executable, "-c", "import time; time.sleep(60)"],
    }
    for code, words in commands.items():
        command = DoneCommand(store, words, limit_seconds=0.5 if code == "queue.on_done_too_long" else 60)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "runtime.queue.done_command"):
            job_id = end(store, sample_result())
            ((failed, fact),) = command.wait().items()
        assert failed == job_id
        assert fact.code == code
        assert len(caplog.messages) == 1 and "\n" not in caplog.messages[0]
        job, events = store.log.read(job_id)
        assert job.state == "done" and job.saved is not None
        assert [one.code for one in job.saved.warnings if not isinstance(one, str)] == ["pipeline.text_cut", code]
        assert [values["event"] for _, _, values in events] == ["VideoSaved", "Warned"]


def test_an_open_page_shows_the_warning_once() -> None:
    fact = FAILED.fact
    progress = Progress().after(sample_result(), 0.0).after(Warned(fact=fact), 1.0).after(Warned(fact=fact), 2.0)
    assert isinstance(progress.end, VideoSaved)
    assert progress.end.warnings[1:] == (fact,)


def test_nothing_is_added_to_a_job_that_runs_again(store: JobStore) -> None:
    job_id = end(store, FAILED)
    lease = store.find(job_id).lease
    store.start(job_id, "x")
    store.add_warning(job_id, FAILED.fact, lease)
    assert "Warned" not in [values["event"] for _, _, values in store.log.events(job_id)]


def test_the_next_job_does_not_wait_for_it(store: JobStore, tmp_path: Path) -> None:
    waits = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)"
    opened = tmp_path / "opened"
    command = DoneCommand(store, [sys.executable, "-c", waits, str(opened)])
    jobs = [end(store, sample_result()) for _ in range(3)]  # returns while the commands run
    until(lambda: store.find(jobs[-1]).state == "done")
    opened.touch()
    assert command.wait() == {}
