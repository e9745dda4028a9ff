"""Runs a job in a child process, so that a crash of a library is an error in this process, and its memory is freed.

The child is started by `multiprocessing` and returns JSON messages through a pipe. Its standard output and standard
error go to a file, which becomes the log. It leads its own process group, is killed together with everything that it
started, and ends when this process does.
"""

import contextlib
import errno
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, TypeAdapter

from runtime.core.errors import TandemError, first_line, ran_out
from runtime.core.facts import Fact
from runtime.core.processes import end_with_parent, kill_tree, lead_own_group, use_no_semaphores

Job = TypeVar("Job")
# Receives progress, and the fraction that is done, where it is known.
Report = Callable[[Fact, float | None], None]
# Runs in the child: receives the job and a function for progress, and returns JSON values.
Entry = Callable[[Job, Report], dict[str, Any]]
FailureKind = Literal["user", "memory", "disk", "internal"]

# A new process, because CUDA does not work in a fork of one that has used it, and a fork copies locks of threads.
_START_METHOD = "spawn"
_POLL_SECONDS = 0.1
_ENDING_SECONDS = 5.0
_TAIL_LINES = 30
_TAIL_BYTES = 1 << 16
_LINE_LENGTH = 500
_LOG_BYTES = 8 << 20
# A compiler in an endless loop must not fill the disk: beyond this the output starts over.
_MOST_OUTPUT_BYTES = 1 << 30
_FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# How a compiler or linker, whose errno is unknown, reports a full disk.
_FULL_DISK_TEXT = re.compile("|".join(os.strerror(number) for number in sorted(_FULL_DISK)))
_CONTROL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f]")


class _Progress(BaseModel):
    type: Literal["progress"] = "progress"
    fact: Fact
    fraction: float | None


class _Done(BaseModel):
    type: Literal["done"] = "done"
    result: dict[str, Any]


class _Failed(BaseModel):
    type: Literal["failed"] = "failed"
    fact: Fact
    kind: FailureKind
    details: str


_Message = _Progress | _Done | _Failed
_MESSAGE: TypeAdapter[_Message] = TypeAdapter(_Message)


@dataclass(frozen=True)
class Outcome:
    """How a child ended.

    Attributes:
        result: what the entry returned; None if it failed.
        failure: what went wrong; None if the child died without reporting an error.
        kind: "user" (a `TandemError`), "memory", "disk" or "internal".
        signal: the signal that killed it, if any.
        exit_code: its exit code, if it was not killed.
        log: the last lines of its log.
    """

    result: dict[str, Any] | None
    failure: Fact | None
    kind: FailureKind
    signal: int | None
    exit_code: int | None
    log: str


def run_child(
    entry: Entry[Job], job: Job, scratch: Path, log: Path, report: Report, check: Callable[[], None]
) -> Outcome:
    """Run `entry(job, report)` in a child process and wait for it.

    Args:
        entry: a function that a new process can import.
        job: its argument; must be picklable.
        scratch: the child's folder for temporary files.
        log: the file for the child's log.
        report: called with progress and the fraction done, where known; on this thread.
        check: called about ten times a second; an exception that it raises ends the child and all that it started.

    Raises:
        OSError: if no process can be started.
    """
    context: Any = multiprocessing.get_context(_START_METHOD)
    receiver, sender = context.Pipe(duplex=False)
    output = scratch / "output.log"
    output.touch()
    with receiver, sender:
        process: BaseProcess = context.Process(
            target=_main, args=(entry, job, scratch, output, sender), name="tandem-child"
        )
        process.start()
        assert process.pid is not None
        sender.close()  # so that the pipe ends with the child
        try:
            last = _follow(process, receiver, output, report, check)
            # The child may end by itself, for its exit code and the end of its log.
            end = time.monotonic() + (_ENDING_SECONDS if last is not None else 2 * _POLL_SECONDS)
            while process.is_alive() and time.monotonic() < end:
                check()
                process.join(_POLL_SECONDS)
        finally:
            kill_tree(process.pid)
            process.join(_ENDING_SECONDS)  # longer only in a system call that does not return
    tail = _write_log(output, log, last.details if isinstance(last, _Failed) else "")
    kind: FailureKind = last.kind if isinstance(last, _Failed) else "internal"
    code = process.exitcode or 0
    return Outcome(
        result=last.result if isinstance(last, _Done) else None,
        failure=last.fact if isinstance(last, _Failed) else None,
        kind="disk" if _FULL_DISK_TEXT.search(tail) else kind,
        signal=-code if code < 0 else None,
        exit_code=code if code >= 0 else None,
        log=tail,
    )


def _follow(
    process: BaseProcess, receiver: "Connection[Any, Any]", output: Path, report: Report, check: Callable[[], None]
) -> _Done | _Failed | None:
    """Report the child's progress until its last message; return None if it ended without one."""
    while True:
        check()
        if output.stat().st_size > _MOST_OUTPUT_BYTES:
            os.truncate(output, 0)
        # A process that the child started may hold the pipe open, so the child's end is watched too.
        ready = wait([receiver, process.sentinel], _POLL_SECONDS)
        if receiver in ready or (ready and receiver.poll()):
            try:
                message = _MESSAGE.validate_json(receiver.recv_bytes())
            except (EOFError, OSError, ValueError):
                return None
            if not isinstance(message, _Progress):
                return message
            report(message.fact, message.fraction)
        elif ready:
            return None


def _write_log(output: Path, log: Path, details: str) -> str:
    """Write a readable copy of the child's output, limited in length, and return its last lines."""
    with output.open("rb") as file:
        head = _lines(file.read(_LOG_BYTES))
        rest = file.tell() < output.stat().st_size
        file.seek(max(0, output.stat().st_size - _TAIL_BYTES))
        tail = _lines(file.read()) if rest else head
    added = _lines(details.encode())
    with contextlib.suppress(OSError):  # the disk is full
        log.write_text("\n".join([*head, *added, ""]), encoding="utf-8", errors="backslashreplace")
    return "\n".join([*tail, *added][-_TAIL_LINES:])


def _lines(data: bytes) -> list[str]:
    """Return the lines of terminal output without control characters, each limited in length."""
    lines = (
        _CONTROL.sub("", line.decode("utf-8", "replace"))[:_LINE_LENGTH].rstrip() for line in re.split(rb"[\r\n]", data)
    )
    return [line for line in lines if line]


def _main(entry: Entry[Job], job: Job, scratch: Path, output: Path, sender: "Connection[Any, Any]") -> None:
    """Run in the child: prepare the process, call the entry, and send what it returned or raised."""
    lead_own_group()
    end_with_parent()
    use_no_semaphores()
    # Standard output and standard error, of Python and of libraries.
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    # Temporary files of this process and of compilers.
    os.chdir(scratch)
    tempfile.tempdir = str(scratch)
    os.environ.update({name: str(scratch) for name in ("TMPDIR", "TEMP", "TMP")})
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(scratch / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(scratch / "triton")
    started = time.monotonic()

    def send(message: _Message) -> None:
        sender.send_bytes(message.model_dump_json().encode())

    def report(fact: Fact, fraction: float | None = None) -> None:
        os.write(2, f"{time.monotonic() - started:8.1f} s  {fact}\n".encode())
        send(_Progress(fact=fact, fraction=fraction))

    try:
        send(_Done(result=entry(job, report)))
        code = 0
    except BaseException as error:
        send(_failure(error))
        code = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Libraries may crash while they are torn down; the result is complete.
    os._exit(code)


def _failure(error: BaseException) -> _Failed:
    details = "".join(traceback.format_exception(error))
    if isinstance(error, TandemError):
        return _Failed(fact=error.fact, kind="user", details=details)
    name = type(error).__name__
    kind: FailureKind = "internal"
    if ran_out(error) is not None:
        kind = "memory"
    elif isinstance(error, OSError) and error.errno in _FULL_DISK:
        kind = "disk"
    text = first_line(error)
    return _Failed(
        fact=Fact("engine.child_exception", {"error": name if text == name else f"{name}: {text}"}),
        kind=kind,
        details=details,
    )
