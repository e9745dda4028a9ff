"""`jobs export` and `jobs join`: jobs and files, estimates, bad input, Ctrl-C."""

import json
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from runtime.cli.main import run
from runtime.core.plan import plain_output
from runtime.queue import storage
from runtime.queue.store import JobStore, open_store
from runtime.video.export_formats import FORMATS
from runtime.video.mp4 import read_metadata
from runtime.video.reader import read_info
from tests.app_server import ROOT
from tests.cli.refusals import check_refusals, refused
from tests.queue.samples import add_job
from tests.queue.test_retention import made
from tests.sounds import tone, write_clip
from tests.video.test_export import FRAMES, RATE, REQUEST, make
from tests.waiting import until


@pytest.fixture
def outputs(cache_dir: Path) -> Path:
    """Return the folder of videos."""
    folder = cache_dir / "outputs"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def store(outputs: Path) -> JobStore:
    return open_store(outputs.parent)


def answer(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Run a command and return its JSON."""
    assert run([*arguments, "--json"]) == 0
    values: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return values


def test_jobs_and_files_are_exported_and_joined(
    store: JobStore, outputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = made(store, outputs, None)
    video = make(outputs / f"{job}.mp4")
    done = answer(["jobs", "export", job[:6], "--format", "gif", "--start", "0.25"], capsys)
    assert (done["file"], done["frames"], done["format"]) == (str(outputs / f"{job}.gif"), FRAMES - 3, "gif")
    assert done["bytes"] == Path(done["file"]).stat().st_size and done["estimated_bytes"] > 0
    # The name of the file chooses the format; an existing file is replaced.
    (tmp_path / "a.webm").write_bytes(b"an older one")
    done = answer(["jobs", "export", str(video), "--out", str(tmp_path / "a.webm")], capsys)
    assert (done["format"], read_info(tmp_path / "a.webm").codec) == ("webm", "vp9")
    assert run(["jobs", "export", job, "--out", str(tmp_path / "a.zip"), "--end", "0.5"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'a.zip'}\n"
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert len(archive.namelist()) == 6
    names = [Path(answer(["jobs", "join", job, str(video)], capsys)["file"]).name for _ in range(2)]
    assert names == [f"{job}-joined.mp4", f"{job}-joined-2.mp4"]
    joined = outputs / names[1]
    assert (read_info(joined).frames, read_metadata(joined)["request"]) == (2 * FRAMES, REQUEST)
    # What looks after jobs' files leaves exported ones.
    store.delete(job)
    assert storage.purge(store, outputs, -1) == 1
    storage.tidy(store, outputs)
    assert {path.name for path in outputs.iterdir()} == {f"{job}.gif", *names}


def test_a_plan_states_each_format_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    video = make(tmp_path / "x.mp4")
    plans = answer(["jobs", "export", str(video), "--plan"], capsys)["plans"]
    assert [plan["format"] for plan in plans] == list(FORMATS)
    assert all(plan["estimated_bytes"] > 0 and plan["fps"] == RATE for plan in plans)
    assert [note["code"] for note in plans[0]["notes"]] == ["export.copied"]
    part = answer(["jobs", "export", str(video), "--plan", "--format", "webp", "--end", "0.5", "--width", "32"], capsys)
    (plan,) = part["plans"]
    assert (plan["width"], plan["height"], plan["frames"]) == (32, 24, 6)
    assert [path.name for path in tmp_path.iterdir()] == ["x.mp4"]


def test_sound_is_exported_without_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    video = str(write_clip(tmp_path / "x.mp4", tone(1.5)))
    for command in (["jobs", "export", video, "--start", "0.5"], ["jobs", "join", video, video]):
        for flags, codec in (([], "aac"), (["--lossless-sound"], "flac")):
            done = answer([*command, *flags, "--out", str(tmp_path / "y.mp4")], capsys)
            assert done["sound"] and read_info(tmp_path / "y.mp4").sound == (codec,)
    plans = answer(["jobs", "export", video, "--plan", "--lossless-sound"], capsys)["plans"]
    assert [plan["format"] for plan in plans] == list(FORMATS)
    assert {plan["format"]: plan["sound"] for plan in plans}["gif"] is False
    assert "export.no_sound" in [note["code"] for note in {plan["format"]: plan for plan in plans}["gif"]["notes"]]


def test_bad_input_is_refused_in_two_lines(
    store: JobStore, outputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    video = str(make(tmp_path / "x.mp4"))
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.mp4").write_text("a letter", encoding="utf-8")
    queued, gone = add_job(store), made(store, outputs, None)
    (outputs / f"{gone}.mp4").unlink()
    cases: list[tuple[list[str], str, dict[str, Any]]] = [
        (["00000000"], "queue.no_such_job", {}),
        ([queued.id], "export.no_job_video", {"state": "queued"}),
        ([gone], "source.unreadable", {}),
        ([str(tmp_path / "none.mp4")], "source.unreadable", {}),
        ([str(tmp_path)], "source.not_a_file", {}),
        (["a" * 300], "source.unreadable", {}),
        ([video, "--format", "png", "--out", str(tmp_path / ("a" * 300))], "video.not_writable", {}),
        ([str(tmp_path / "empty.mp4")], "source.empty", {}),
        ([str(tmp_path / "text.mp4")], "source.no_video", {}),
        (["a\nb"], "source.path_unreadable", {}),
        ([""], "source.path_unreadable", {}),
        ([video, "--format", "avi"], "request.not_a_choice", {"field": "format"}),
        ([video, "--start", "9"], "export.time_outside", {"field": "start"}),
        ([video, "--end", "nan"], "export.time_outside", {"field": "end"}),
        ([video, "--start", "x"], "cli.usage", {}),
        ([video, "--width", "65"], "request.out_of_range", {"field": "width", "nearest": 64}),
        ([video, "--out", "a\tb.gif"], "export.out_unreadable", {}),
        ([video, "--out", str(tmp_path / "none" / "a.gif")], "video.folder_missing", {}),
        ([video, "--out", video], "source.same_file", {}),
        ([video, "--out", str(tmp_path / "a.avi")], "export.suffix", {"format": "mp4"}),
        ([video, "--format", "gif", "--lossless-sound"], "export.no_lossless", {"format": "gif"}),
    ]
    check_refusals(cases, capsys, subtests, ["jobs", "export"])
    joins: list[tuple[list[str], str, dict[str, Any]]] = [
        ([video], "export.too_few", {}),
        ([video] * 51, "export.too_many", {"most": 50}),
        ([video, str(make(tmp_path / "y.mp4", fps=8))], "export.clips_differ", {"file": "y.mp4"}),
        ([video, video, "--out", video], "source.same_file", {}),
    ]
    check_refusals(joins, capsys, subtests, ["jobs", "join"])
    assert refused(["jobs", "join"], capsys).code == "cli.usage"
    assert not list(outputs.iterdir()) and not plain_output(outputs / "x.mp4").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="needs Ctrl-C of a terminal")
def test_ctrl_c_leaves_no_file(cache_dir: Path, tmp_path: Path) -> None:
    video = make(tmp_path / "x.mp4", count=150, width=640, height=480)
    command = [sys.executable, "app.py", "jobs", "export", str(video), "--format", "webm"]
    process = subprocess.Popen([*command, "--out", str(tmp_path / "y.webm")], cwd=ROOT, stderr=subprocess.PIPE)
    until(lambda: any(tmp_path.glob(".tandem-*/complete.webm")))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and b"Traceback" not in err
    assert [path.name for path in tmp_path.iterdir() if path != cache_dir] == ["x.mp4"]
