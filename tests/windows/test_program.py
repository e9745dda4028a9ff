"""The program on Windows: commands that need no model, a clip of the shipped model, the web app, and Windows' files."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

from runtime.core.files import replace_file
from runtime.core.locks import held, is_held, scratch_folder
from tests.windows.conftest import Check

REPO = Path(__file__).parents[2]
PROMPT = "ein rotes Boot, ünï 红船"
ENCODINGS = ("cp437", "cp850", "cp1252", "utf-8", "ascii")
# With about 350 characters; Windows' limit is 260 unless the program and the system allow more.
LONG = Path(*["a folder with a long name, number " + str(number) * 20 for number in range(1, 7)])


def app(*args: str, cache: Path, timeout: float = 300, **environment: str) -> "subprocess.CompletedProcess[bytes]":
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TANDEM"))}
    return subprocess.run(
        [sys.executable, str(REPO / "app.py"), *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=variables | {"TANDEM_CACHE_DIR": str(cache)} | environment,
        check=False,
        timeout=timeout,
    )


def found(done: "subprocess.CompletedProcess[bytes]") -> object:
    """Return 0, or the exit code and the end of the messages."""
    traceback = b"Traceback" in done.stderr
    return (
        0
        if done.returncode == 0 and not traceback
        else (done.returncode, done.stderr.decode("utf-8", "replace")[-300:])
    )


def refused(done: "subprocess.CompletedProcess[bytes]") -> object:
    """Return the exit code and the number of lines of messages."""
    return done.returncode, len(done.stderr.splitlines())


def test_commands_that_need_no_model(tmp_path: Path, check: Check) -> None:
    lines = (
        ("--version",), ("--help",), ("doctor",), ("plan", PROMPT), ("models", "list"), ("models", "show", "diorama"),
        ("jobs", "list"), ("engines", "list"), ("plan", PROMPT, "--json"),
    )  # fmt: skip
    for line in lines:
        check(" ".join(line), 0, found(app(*line, cache=tmp_path)))
    check("plan --backend no-such", (2, 2), refused(app("plan", PROMPT, "--backend", "no-such", cache=tmp_path)))


def test_encodings_of_the_console(tmp_path: Path, check: Check) -> None:
    for encoding in ENCODINGS:
        done = app("plan", PROMPT, cache=tmp_path, PYTHONIOENCODING=encoding)
        check(f"plan, output in {encoding}", 0, found(done))
        done.stdout.decode(encoding)
        done = app("models", "show", "no such ünï 红船", cache=tmp_path, PYTHONIOENCODING=encoding)
        check(f"a refusal, output in {encoding}", (2, 2), refused(done))


def test_names_of_outputs(tmp_path: Path, check: Check) -> None:
    for name in ("con.mp4", "NUL.mp4", "com1.mp4", "aux.x.mp4", "a: b.mp4", "what?.mp4", "a<b.mp4"):
        done = app("generate", PROMPT, "--steps", "1", "--out", str(tmp_path / name), cache=tmp_path / "cache")
        check(f"generate --out {name} is refused", (2, 2), refused(done))
    check("and nothing is left", [], [path.name for path in tmp_path.iterdir() if path.suffix == ".mp4"])


def test_paths(tmp_path: Path, check: Check) -> None:
    for name in ("with blanks", "ünïcode 红船", "a&b (x86) 50% off!", "caret^'quote"):
        cache = tmp_path / name
        check(f"cache folder {name}", 0, found(app("plan", PROMPT, cache=cache)))
    verbatim = Path(f"\\\\?\\{tmp_path / 'verbatim'}")
    check(r"cache folder \\?\C:\...", 0, found(app("jobs", "list", cache=verbatim)))
    upper = Path(str(tmp_path / "with blanks").upper())
    check("cache folder in other case", 0, found(app("jobs", "list", cache=upper)))
    try:
        (tmp_path / LONG).mkdir(parents=True)
        (tmp_path / LONG).resolve()
    except OSError:
        return  # this Windows, or Wine, has no long paths
    check("cache folder of 350 characters", 0, found(app("jobs", "list", cache=tmp_path / LONG)))


def test_a_clip_and_its_job(tmp_path: Path, check: Check) -> None:
    out, cache = tmp_path / "ein Bild ünï 红船.mp4", tmp_path / "cache"
    done = app("generate", PROMPT, "--steps", "2", "--seed", "7", "--out", str(out), cache=cache, timeout=540)
    check("generate: a clip of the shipped model", 0, found(done))
    check("generate: the video is an MP4", b"ftyp", out.read_bytes()[4:8] if out.exists() else b"")
    left = [path.name for path in tmp_path.iterdir() if path not in (out, cache) and ".plain." not in path.name]
    check("generate: nothing else is left", [], left)
    jobs = json.loads(app("jobs", "list", "--json", cache=cache).stdout or b"null")
    check("jobs list: the job is done", True, "done" in json.dumps(jobs))


def test_the_web_app(tmp_path: Path, check: Check) -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM")}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen(
        [sys.executable, str(REPO / "app.py"), "--port", str(port), "--no-browser"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=variables | {"TANDEM_CACHE_DIR": str(tmp_path), "TANDEM_IDLE_BUILDS": "0"},
    ) as server:
        timer = threading.Timer(240, server.kill)
        timer.start()
        assert server.stdout is not None
        printed, url = "", None
        for line in server.stdout:
            printed += line.decode("utf-8", "replace")
            if url := re.search(r"http://127\.0\.0\.1:\d+", printed):
                break
        try:
            check("the web app prints its address", True, url is not None or printed[-300:])
            if url is not None:
                for path in ("/", "/v1/videos"):
                    with urllib.request.urlopen(url[0] + path, timeout=60) as answer:
                        check(f"the web app answers {path}", 200, answer.status)
        finally:
            timer.cancel()
            subprocess.run(["taskkill", "/f", "/t", "/pid", str(server.pid)], capture_output=True, check=False)
            server.kill()


def test_files(tmp_path: Path, check: Check) -> None:
    path = tmp_path / "settings.json"
    replace_file(path, b"old", sync=True)
    opened, waited = threading.Event(), time.monotonic()

    def read() -> None:
        with path.open("rb"):
            opened.set()
            time.sleep(0.3)

    reader = threading.Thread(target=read)
    reader.start()
    opened.wait()
    replace_file(path, b"new")
    check("an open file is replaced once it is closed", True, time.monotonic() - waited >= 0.25)
    reader.join()
    check("its content", b"new", path.read_bytes())
    with path.open("rb"):
        try:
            replace_file(path, b"newer")
            result: object = "replaced"
        except PermissionError:
            result = "PermissionError"
    check("a file that stays open is not replaced", "PermissionError", result)
    check("and nothing else is left", ["settings.json"], [left.name for left in tmp_path.iterdir()])


def test_locks(tmp_path: Path, check: Check) -> None:
    lock = tmp_path / "lock"
    code = (
        "import pathlib, sys, time; from runtime.core.locks import held\n"
        "with held(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE, cwd=REPO) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        check("a lock of another process", True, is_held(lock))
        holder.kill()
        holder.wait()
        check("a lock of a killed process", False, is_held(lock))
    with held(lock, seconds=1):
        check("a lock of this process", True, is_held(lock))
    with scratch_folder(tmp_path) as folder:
        (folder / "a").mkdir()
        (folder / "a" / "b").write_text("x")
    check("a scratch folder is removed", False, folder.exists())
