"""`generate`, mostly in this process: output, Ctrl-C, progress line."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from runtime.cli.generate import queue_missing_engines
from runtime.cli.main import run
from runtime.cli.terminal import progress_text
from runtime.core.events import Planned, StageStarted, StepDone
from runtime.core.plan import plain_output
from runtime.core.progress import Progress
from runtime.core.request import GenerationRequest
from runtime.core.units import duration
from runtime.engines.service import EngineService
from runtime.engines.store import EngineStore
from runtime.models.spec import ModelSpec
from runtime.planner.resolve import PlanningContext, resolve
from runtime.queue.store import open_store
from runtime.video.mp4 import read_metadata
from runtime.video.reader import read_info
from tests.cli.refusals import refused
from tests.facts import fact
from tests.families.esrgan.networks import COMPACT_CONFIG, save_safetensors
from tests.plans import machine, tiny_plan
from tests.umask import users_umask

ROOT = Path(__file__).parents[2]
SMALL = ["--width", "64", "--height", "32", "--frames", "9", "--fps", "8"]

Tiny = Callable[[str], ModelSpec]


def command(spec: ModelSpec, out: Path, *flags: str) -> list[str]:
    """Return the arguments of a small clip."""
    prompt = ["generate", "a red boat", "--model", str(spec.directory), "--out", str(out)]
    return [sys.executable, str(ROOT / "app.py"), *prompt, *SMALL, *flags]


@pytest.mark.slow
def test_a_process_prints_json_on_standard_output_and_text_on_standard_error(
    tiny: Tiny, cache_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    folder.mkdir(mode=0o755)
    out, before = folder / "boat.mp4", folder.stat().st_mode
    weights = cache_dir / "weights" / "upscalers" / "small.safetensors"
    save_safetensors(weights, COMPACT_CONFIG)
    for path in (weights, *weights.parents[:3]):
        path.chmod(0o700 if path.is_dir() else 0o600)
    flags = ("--steps", "2", "--seed", "7", "--guidance", "5,2", "--upscale", "2", "--upscaler", "small", "--json")
    arguments = command(tiny("wan2.2-a14b"), out, *flags)
    on_done = {"TANDEM_ON_DONE": f"{sys.executable} -c 'raise SystemExit(3)'"}
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, umask=0o022, env=os.environ | on_done)
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert result["video"] == str(out)
    assert result["seed"] == result["request"]["seed"] == 7
    assert (result["request"]["guidance_scale"], result["request"]["guidance_scale_2"]) == (5.0, 2.0)
    assert set(result["plan"]["components"]) == {"text_encoder", "transformer", "transformer_2", "vae", "upscaler"}
    for part in result["plan"]["components"].values():
        assert (part["backend"], part["engine"]) == ("pytorch", None)
        assert part["reason"]
    assert set(result["timings"]) == {"encode", "denoise", "decode", "upscale", "mux", "total"}
    plain = plain_output(out)
    assert [(read_info(video).width, read_info(video).height) for video in (out, plain)] == [(128, 64), (64, 32)]
    assert result["load_seconds"] > 0
    assert result["peak_memory_bytes"] > 1e6
    assert sum(warning in done.stderr for warning in result["warnings"] if "exit code 3" in warning) == 1
    assert "Denoising" in done.stderr
    assert done.stderr.splitlines()[-1] == str(out)
    assert "Diorama" not in done.stderr and "Time: about" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr  # libraries stay quiet
    assert read_metadata(out)["request"] == result["request"]
    assert not (cache_dir / "outputs").exists()
    if os.name == "posix":  # the folder that the user chose keeps its permissions, and the cache is private
        assert (out.stat().st_mode & 0o777, folder.stat().st_mode) == (0o644, before)
        assert plain.stat().st_mode & 0o777 == 0o644
        assert [path for path in (cache_dir, *cache_dir.rglob("*")) if path.stat().st_mode & 0o077] == []


def test_without_out_the_video_is_saved_in_the_cache_folder_which_is_private(
    tiny: Tiny, cache_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = command(tiny("wan2.1"), tmp_path / "unused.mp4", "--steps", "1")[2:]
    position = arguments.index("--out")
    del arguments[position : position + 2]
    with users_umask(0o022):
        assert run(arguments) == 0
    (video,) = (cache_dir / "outputs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-a-red-boat-[0-9a-f]{6}\.mp4", video.name)
    out, err = capfd.readouterr()
    assert out == f"{video.resolve()}\n"
    assert "Time: about" in err.partition("Loading the")[0], "the forecast comes first"
    assert "Saved. Seed" in err
    made = [cache_dir, *cache_dir.rglob("*")]
    assert {"jobs.sqlite", "tandem.log", "prompts", "outputs"} <= {path.name for path in made}
    if os.name == "posix":
        assert [path for path in made if path.stat().st_mode & 0o077] == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_leaves_no_file(tiny: Tiny, cache_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    arguments = command(tiny("wan2.2-a14b"), out / "boat.mp4", "--steps", "1000")
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "Denoising" in line:
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait() == 130
    assert "Stopping" in rest
    assert str(fact("cli.nothing_saved")) in rest
    assert "Traceback" not in rest
    assert list(out.iterdir()) == []


NATIVE = """
import hashlib, subprocess
from runtime.cli.exit_codes import cancel_on_signals
with cancel_on_signals(" To resume it: x"):
    print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # no Python code runs for many minutes
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("numbers", [[signal.SIGINT, signal.SIGINT], [signal.SIGTERM]])
def test_a_long_native_call_can_be_ended(numbers: list[int]) -> None:
    arguments = [sys.executable, "-c", NATIVE]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.send_signal(numbers[0])
        assert "Stopping…" in process.stderr.readline()
        for number in numbers[1:]:
            process.send_signal(number)
        try:
            assert process.wait(60) == 130
        finally:
            process.kill()
        assert "To resume it: x" in process.stderr.read()
    child.wait(20)


def test_an_ffmpeg_that_cannot_encode_is_refused_before_the_job_exists(
    tiny: Tiny, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ffmpeg = tmp_path / "ffmpeg"
    ffmpeg.write_text("#!/bin/sh\n[ $1 = -version ] || { echo Unknown encoder libx264 >&2; exit 1; }\n", "utf-8")
    ffmpeg.chmod(0o755)
    for program, code, data in (
        (ffmpeg, "video.no_encoder", {"program": str(ffmpeg), "line": "Unknown encoder libx264"}),
        (tmp_path / "none", "video.no_ffmpeg", {}),
    ):
        monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(program))
        found = refused(command(tiny("wan2.1"), tmp_path / "x.mp4")[2:], capsys)
        assert (found.code, found.data) == (code, data)
    assert not (cache_dir / "jobs.sqlite").exists()


def test_a_video_of_many_hours_is_confirmed_on_a_terminal(
    tiny: Tiny, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.cli.generate._ASK_SECONDS", 0)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda: "n")
    arguments = command(tiny("wan2.1"), tmp_path / "x.mp4", "--steps", "1")[2:]
    assert run(arguments) == 130
    assert "Time: about" in capsys.readouterr().err.partition("[y/N]")[0]
    assert not (cache_dir / "jobs.sqlite").exists()
    assert run([*arguments, "--yes"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'x.mp4'}\n"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_shows_a_live_line(tiny: Tiny, cache_dir: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    arguments = command(tiny("wan2.2-a14b"), tmp_path / "boat.mp4", "--steps", "300")
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    shown = b""
    with subprocess.Popen(arguments, stderr=theirs, stdout=subprocess.DEVNULL, env=environment) as process:
        os.close(theirs)
        while process.poll() is None or select.select([ours], [], [], 0)[0]:
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    shown += os.read(ours, 65536)
                except OSError:  # the other end is closed
                    break
    os.close(ours)
    text = shown.decode()
    assert process.returncode == 0
    assert re.search(r"Denoising · step \d+/300 · \d+\.\d\d s/step · \d+ s left", text)


def test_the_progress_line_has_stage_step_speed_and_time_left(tiny: Tiny, tmp_path: Path) -> None:
    planned = Planned(plan=tiny_plan(tiny("wan2.2-a14b"), tmp_path / "x.mp4"))
    progress = Progress().after(planned, 0.0).after(StageStarted(stage="denoise", part="transformer"), 0.0)
    assert re.search(r"Denoising · step 0/4 · \d+ s left$", progress_text(progress))
    progress = progress.after(StepDone(step=1, of=4, seconds=2.0, part="transformer"), 2.0)
    assert "step 1/4 · 2.00 s/step" in progress_text(progress)
    assert progress_text(progress).endswith(" left")


def test_durations() -> None:
    shown = {0: "0 s", 8.4: "8 s", 59.6: "1 min 0 s", 125: "2 min 5 s", 3725: "1 h 2 min"}
    assert {seconds: duration(seconds) for seconds in shown} == shown


def test_a_missing_package_is_an_error_with_a_remedy(cache_dir: Path) -> None:
    # -S leaves site-packages out.
    done = subprocess.run([sys.executable, "-S", str(ROOT / "app.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    what, remedy = done.stderr.splitlines()
    assert what.startswith("Error: ") and "'typer'" in what
    assert remedy.startswith("To do: ") and "./install.sh" in remedy


@pytest.mark.parametrize(
    ("stored", "codes"),
    [
        (True, ["cli.builds_queued", "cli.builds_known"]),
        (False, ["cli.builds_not_stored"] * 2),
    ],
)
def test_idle_builds_are_queued_or_the_reason_is_printed(
    stored: bool, codes: list[str], tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, engines = tiny("wan2.1"), EngineService(EngineStore(tmp_path / "engines", 10**12), machine(), tmp_path)
    if not stored:
        (tmp_path / "jobs.sqlite").mkdir()
    store = open_store(tmp_path)
    assert store.temporary != stored
    for code in codes:
        capsys.readouterr()
        request = GenerationRequest(prompt="a boat", width=64, height=32, frames=9, build="idle")
        plan = resolve(request, spec, PlanningContext(engines.machine, tmp_path / "x.mp4", engines.offers(spec)))
        queue_missing_engines(store, store.add(request, plan), plan, spec, engines.store)
        said = fact(code) if stored else fact(code, cause=store.problem)
        assert capsys.readouterr().err == f"{'' if stored else 'Note: '}{said}\n"
    assert len(list(store.list(kinds=["build"]))) == stored
    # A plan without missing engines has nothing to queue.
    capsys.readouterr()
    never = request.replace(build="never")
    plan = resolve(never, spec, PlanningContext(engines.machine, tmp_path / "x.mp4", engines.offers(spec)))
    queue_missing_engines(store, store.add(never, plan), plan, spec, engines.store)
    assert not capsys.readouterr().err
    store.close()
