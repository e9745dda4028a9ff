"""A child process that works on a job, told in JSON: a crash there is an error here, never the end of the app.

The job goes in on standard input, which then stays open: its end tells the child that its parent is gone. Back come
JSON lines, {"line", "share"}, then {"done"} or {"failed", "remedy", "kind"}. Whatever else is written, on standard
error or by libraries on standard output, is the log. The child leads its own process group: Ctrl-C does not reach it,
and it goes together with the compilers that it started.
"""

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "runtime.engines.build_child")
_POLL_SECONDS = 0.1
_ENDING_SECONDS = 5.0
_READING_SECONDS = 2.0
_LINES_KEPT = 30
_LINE_LENGTH = 500
_LOG_BYTES = 8 << 20
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Outcome:
    """How the child ended.

    Attributes:
        done: what it found, or `None`.
        failed, remedy: what went wrong in its own words; empty if it died without any.
        kind: of failure: "told" (an error of ours with a remedy), "memory", "disk" or "defect".
        signal: what killed it, if something did.
        exit_code: if nothing did.
        log: the last lines of its log.
    """

    done: Mapping[str, Any] | None
    failed: str
    remedy: str
    kind: str
    signal: int | None
    exit_code: int | None
    log: str


class BuildLog:
    """The log of one build: the last lines in memory, the first megabytes in a file, as long as the disk takes them."""

    def __init__(self, path: Path) -> None:
        self._started = time.monotonic()
        self._tail: deque[str] = deque(maxlen=_LINES_KEPT)
        self._lock = threading.Lock()
        self._room = _LOG_BYTES
        self._file: IO[str] | None = None
        with contextlib.suppress(OSError):
            self._file = path.open("w", encoding="utf-8", errors="backslashreplace")

    def add(self, line: str) -> None:
        """Add a line; safe between threads."""
        # Escape sequences are for terminals.
        line = re.sub(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f]", "", line)[:_LINE_LENGTH].rstrip()
        if not line:
            return
        with self._lock:
            self._tail.append(line)
            if self._file is not None and self._room > 0:
                text = f"{time.monotonic() - self._started:8.1f} s  {line}\n"
                self._room -= len(text)
                with contextlib.suppress(OSError, ValueError):  # the disk is full, or the file closed
                    self._file.write(text)
                    self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with self._lock, contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()

    def tail(self) -> str:
        """Return the last lines."""
        with self._lock:
            return "\n".join(self._tail)


def run_child(
    job: Mapping[str, Any],
    scratch: Path,
    log: Path,
    report: Callable[[str, float | None], None],
    check: Callable[[], None],
    command: Sequence[str] = COMMAND,
) -> Outcome:
    """Run a job in a child process and wait for it.

    Args:
        job: JSON values.
        scratch: where it works and keeps temporary files.
        log: the file that its log goes to.
        report: called with each line of progress and the share done, where that is known; on this thread.
        check: called about ten times a second; what it raises ends the child and everything that the child started.

    Raises:
        OSError: if no process can be started.
    """
    with contextlib.closing(BuildLog(log)) as lines:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=scratch,
            env=_environment(scratch),
            start_new_session=True,
        )
        try:
            last = _work_with(process, job, lines, report, check) or {}
        finally:
            _kill(process)
            for pipe in (process.stdin, process.stdout, process.stderr):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()
    return Outcome(
        done=last.get("done"),
        failed=str(last.get("failed", "")),
        remedy=str(last.get("remedy", "")),
        kind=str(last.get("kind", "defect")),
        signal=-process.returncode if process.returncode < 0 else None,
        exit_code=process.returncode if process.returncode >= 0 else None,
        log=lines.tail(),
    )


def _work_with(
    process: subprocess.Popen[bytes],
    job: Mapping[str, Any],
    lines: BuildLog,
    report: Callable[[str, float | None], None],
    check: Callable[[], None],
) -> dict[str, Any] | None:
    """Hand over the job, follow the child to its end and return its last message."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    said: queue.Queue[dict[str, Any] | None] = queue.Queue()
    readers = [
        threading.Thread(target=_read_messages, args=(process.stdout, said, lines), daemon=True),
        threading.Thread(target=_read_lines, args=(process.stderr, lines), daemon=True),
    ]
    for reader in readers:
        reader.start()
    with contextlib.suppress(OSError):  # it died at once: the log says why
        process.stdin.write(json.dumps(job).encode() + b"\n")
        process.stdin.flush()
    last = _follow(process, said, lines, report, check)
    _end_well(process, check, patient=last is not None)
    _kill(process)
    for reader in readers:
        # Somebody who left the group may hold the pipes open: the log is then taken as it is.
        reader.join(_READING_SECONDS)
    return last


def _environment(scratch: Path) -> dict[str, str]:
    temporary = {name: str(scratch) for name in ("TMPDIR", "TEMP", "TMP")}
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"), "TRITON_CACHE_DIR": str(scratch / "triton")}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, **temporary, **caches, "PYTHONPATH": path}


def _follow(
    process: subprocess.Popen[bytes],
    said: "queue.Queue[dict[str, Any] | None]",
    lines: BuildLog,
    report: Callable[[str, float | None], None],
    check: Callable[[], None],
) -> dict[str, Any] | None:
    """Pass on the child's progress until its last message, or until it is gone."""
    gone = False
    while True:
        check()
        try:
            message = said.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            # What the child started may hold its pipe open, so its end is looked for too.
            if gone:
                return None
            gone = process.poll() is not None
            continue
        if message is None or "done" in message or "failed" in message:
            return message
        line, share = str(message.get("line", "")), message.get("share")
        lines.add(line)
        report(line, float(share) if isinstance(share, int | float) else None)


def _end_well(process: subprocess.Popen[bytes], check: Callable[[], None], *, patient: bool) -> None:
    """Give the child a moment to end by itself, for its exit code and the end of its log."""
    end = time.monotonic() + (_ENDING_SECONDS if patient else 2 * _POLL_SECONDS)
    while process.poll() is None and time.monotonic() < end:
        check()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_SECONDS)


def _read_messages(pipe: IO[bytes], said: "queue.Queue[dict[str, Any] | None]", lines: BuildLog) -> None:
    with contextlib.suppress(OSError, ValueError):
        for line in pipe:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if isinstance(message, dict):
                said.put(message)
            else:  # from before the child took its standard output for itself
                lines.add(line.decode("utf-8", "replace"))
    said.put(None)


def _read_lines(pipe: IO[bytes], lines: BuildLog) -> None:
    rest = b""
    with contextlib.suppress(OSError, ValueError):
        # Not line by line: what is written may have no line's end for gigabytes.
        while data := os.read(pipe.fileno(), _READ_BYTES):
            *whole, rest = re.split(rb"[\r\n]", rest + data)
            rest = rest[-_READ_BYTES:]
            for line in whole:
                lines.add(line.decode("utf-8", "replace"))
    lines.add(rest.decode("utf-8", "replace"))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the child and all that it started, also what left its process group."""
    started: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        started = psutil.Process(process.pid).children(recursive=True)
    if sys.platform != "win32":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    for other in started:
        with contextlib.suppress(psutil.Error):
            other.kill()
    if process.poll() is None:
        process.kill()
        process.wait()
