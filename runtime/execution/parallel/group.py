"""The processes of several GPUs as one: started, told what to do, watched, and ended together.

Whoever leads computes nothing with them and joins none of their exchanges: whatever happens to one of them, this
process goes on. One that dies, breaks or does not answer any more ends all of them, with an error that says which and
why.
"""

import contextlib
import json
import logging
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from runtime.core import errors
from runtime.core.errors import GroupError, TandemError
from runtime.core.plan import Split
from runtime.execution.parallel.ipc import Message, Wire

ROOT = Path(__file__).parents[3]
_POLL_SECONDS = 0.1
_ENDING_SECONDS = 5.0
_LOG_BYTES = 8 << 20
_TAIL_BYTES, _TAIL_LINES, _LINE_LENGTH = 16_384, 30, 200
# On one machine nothing needs to be heard beyond it.
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds after which processes count as hanging.

    Attributes:
        start: until all are there: they import PyTorch.
        silence: without a sign of life.
        first: of each kind of work, when it is done the first time: weights are read, code may be compiled.
        later, times: for the next time, or so many times what it took so far, whichever is more.
        patience: that who cancels has with work that goes on.
    """

    start: float = 300.0
    silence: float = 60.0
    first: float = 1800.0
    later: float = 120.0
    times: float = 20.0
    patience: float = 30.0


class Group:
    """Processes, one for each device of a split.

    Use `call`, or `send` and `collect`; from one thread. `close` ends them.

    Args:
        check: called ten times a second while it is waited for: what it raises ends the processes.

    Raises:
        GroupError: if they cannot be started.
    """

    def __init__(self, split: Split, check: Callable[[], None], limits: Limits | None = None) -> None:
        self.split = split
        self.alive = True
        self.taken_bytes = [0] * len(split.devices)
        self._peaks = [0] * len(split.devices)
        self._limits = limits or Limits()
        self._anew = False
        self._slowest: dict[str, float] = {}
        self._doing = ""
        self._began = 0.0
        self._said: queue.Queue[tuple[int, Message | None]] = queue.Queue()
        self._ended: dict[int, int] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="tandem-gpus-"))
        pairs = [socket.socketpair() for _ in split.devices]
        try:
            self._launcher = self._launch([theirs.fileno() for _, theirs in pairs])
        except OSError as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            reason = error.strerror or str(error)
            raise GroupError("parallel.not_started", count=len(split.devices), reason=reason) from error
        finally:
            for _, theirs in pairs:
                theirs.close()
        self._wires = [Wire(ours) for ours, _ in pairs]
        self._last_heard = [time.monotonic()] * len(pairs)
        for number, wire in enumerate(self._wires):
            threading.Thread(target=self._listen, args=(number, wire), daemon=True).start()
        threading.Thread(target=self._hear_of_ends, daemon=True).start()
        self._begin("start")
        self.collect(check, limit=self._limits.start, silence=False)

    def _launch(self, ends: list[int]) -> "subprocess.Popen[bytes]":
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with (self._folder / "launcher.log").open("wb") as log:
            launcher = subprocess.Popen(
                [sys.executable, "-m", "runtime.execution.parallel.launcher"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self._folder,
                env={**_LOOPBACK, **os.environ, "PYTHONPATH": path},
                pass_fds=ends,
                start_new_session=True,
            )
        job = {
            "devices": list(self.split.devices),
            "sequence": self.split.sequence,
            "folder": str(self._folder),
            "ends": ends,
        }
        assert launcher.stdin is not None
        with contextlib.suppress(OSError):  # it died at once: that is told where it is waited for
            launcher.stdin.write(json.dumps(job).encode() + b"\n")
            launcher.stdin.flush()
        return launcher

    @property
    def peak_bytes(self) -> int:
        """The most that one of them allocated on its GPU since `reset_peak_memory`."""
        return max(self._peaks)

    def reset_peak_memory(self) -> None:
        """Have `peak_bytes` start again."""
        self._anew = True
        self._peaks = [0] * len(self._peaks)

    def call(
        self, do: str, check: Callable[[], None], tensors: Sequence[torch.Tensor] = (), **values: Any
    ) -> list[Message]:
        """Have all of them do something, and return their answers in order; see `send` and `collect`."""
        self.send(do, tensors, **values)
        return self.collect(check)

    def send(self, do: str, tensors: Sequence[torch.Tensor] = (), **values: Any) -> None:
        """Tell all of them to do something.

        Args:
            do: a method of `rank.Rank`.
            values: JSON values for it.

        Raises:
            GroupError: if one of them does not take it.
        """
        self._begin(do)
        here = [tensor.detach().cpu() for tensor in tensors]
        for number, wire in enumerate(self._wires):
            try:
                wire.be_patient(self._limits.silence)
                wire.send({"do": do, "anew": self._anew, **values}, here)
            except BlockingIOError:
                self._fail(number, self._silent())
            except OSError:  # it is gone: `collect` tells why
                pass
        self._anew = False

    def collect(self, check: Callable[[], None], limit: float | None = None, *, silence: bool = True) -> list[Message]:
        """Wait for all of them, and return their answers in order.

        Raises:
            GroupError: if one of them is gone, breaks or does not answer.
            TandemError: that one of them told.
            torch.OutOfMemoryError, MemoryError: if memory ran out in one of them.
        """
        answers: dict[int, Message] = {}
        limit = self._limit() if limit is None else limit
        while len(answers) < len(self._wires):
            self._check(check)
            try:
                number, message = self._said.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                self._look(answers, limit, silence=silence)
                continue
            if message is None:
                self._fail(number, "is gone: its process ended", number)
            elif "failed" in message.said:
                self._fail_as_told(number, message.said)
            else:
                self._note(number, message.said)
                answers[number] = message
        took = time.monotonic() - self._began
        self._slowest[self._doing] = max(took, self._slowest.get(self._doing, 0.0))
        return [Message(answers[number].said.get("done", {}), answers[number].tensors) for number in sorted(answers)]

    def close(self) -> None:
        """End all of them; safe to call twice."""
        if not self.alive:
            return
        self.alive = False
        launcher = self._launcher
        assert launcher.stdin is not None
        # The launcher ends them and sees them off, so that none stays as a zombie.
        with contextlib.suppress(OSError):
            launcher.stdin.close()
        try:
            launcher.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
        for wire in self._wires:
            wire.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _begin(self, do: str) -> None:
        self._doing, self._began = do, time.monotonic()
        for number in range(len(self.split.devices)):
            with contextlib.suppress(OSError):
                log = self._folder / f"{number}.log"
                if log.stat().st_size > _LOG_BYTES:
                    os.truncate(log, 0)

    def _limit(self) -> float:
        slowest = self._slowest.get(self._doing)
        limits = self._limits
        return limits.first if slowest is None else max(limits.later, limits.times * slowest)

    def _check(self, check: Callable[[], None]) -> None:
        try:
            check()
        except BaseException:
            # What runs is soon done; it is not worth to start all of them anew, unless it does not end.
            if time.monotonic() - self._began > self._limits.patience or self._doing == "start":
                self.close()
                raise

    def _look(self, answers: dict[int, Message], limit: float, *, silence: bool) -> None:
        """Look for those that hang."""
        now = time.monotonic()
        for number, heard in enumerate(self._last_heard):
            if silence and now - max(heard, self._began) > self._limits.silence:
                self._fail(number, self._silent())
        if now - self._began > limit:
            late = next(number for number in range(len(self._wires)) if number not in answers)
            self._fail(late, f"is not done after {limit:.0f} s ({self._doing})")

    def _silent(self) -> str:
        return f"does not answer since {self._limits.silence:.0f} s"

    def _note(self, number: int, said: dict[str, Any]) -> None:
        self._peaks[number] = max(self._peaks[number], int(said.get("peak", 0)))
        self.taken_bytes[number] = int(said.get("taken", 0))

    def _fail_as_told(self, number: int, said: dict[str, Any]) -> NoReturn:
        kind, what = str(said["failed"]), str(said["what"])
        if kind in {"VRAM", "RAM"}:
            logger.error("%s: out of memory\n%s", self._title(number), self._tail(number))
            self.close()
            raise torch.OutOfMemoryError(what) if kind == "VRAM" else MemoryError(what)
        error: Any = getattr(errors, kind, None)
        if isinstance(error, type) and issubclass(error, TandemError):
            self.close()
            raise error(said["fact"]["code"], **said["fact"]["data"])
        self._fail(number, f"failed: {_first_line(what)}")

    def _fail(self, number: int, why: str, gone: int | None = None) -> NoReturn:
        """End all of them because of one."""
        if gone is not None:
            number, code = self._first_end(number)
            why = why if code is None else f"{why} {_said_of(code)}"
        tail = self._tail(number)
        title = self._title(number)
        logger.error("%s %s. The end of its log:\n%s", title, why, tail)
        self.close()
        last = tail.strip().splitlines()[-1:]
        data = {"gpu": title, "why": why}
        if not last:
            raise GroupError("parallel.failed", **data)
        raise GroupError("parallel.failed_with_log", **data, last=_first_line(last[0]))

    def _first_end(self, number: int) -> tuple[int, int | None]:
        """Return whose end was the first, and how it ended: others may have gone because of it."""
        deadline = time.monotonic() + 2.0
        while not self._ended and time.monotonic() < deadline and self._launcher.poll() is None:
            time.sleep(_POLL_SECONDS / 10)
        return next(iter(dict(self._ended).items()), (number, None))

    def _title(self, number: int) -> str:
        return f"GPU {number + 1} of {len(self.split.devices)} ({self.split.devices[number]})"

    def _tail(self, number: int) -> str:
        lines: list[str] = []
        for log in (self._folder / f"{number}.log", self._folder / "launcher.log"):
            with contextlib.suppress(OSError), log.open("rb") as file:
                file.seek(max(log.stat().st_size - _TAIL_BYTES, 0))
                lines = file.read().decode("utf-8", "replace").strip().splitlines()[-_TAIL_LINES:]
            if lines:
                break
        return "\n".join(re.sub(r"[\x00-\x08\x0b-\x1f]", "", line) for line in lines)

    def _listen(self, number: int, wire: Wire) -> None:
        while (message := wire.receive()) is not None:
            self._last_heard[number] = time.monotonic()
            if "alive" not in message.said:
                self._said.put((number, message))
        self._said.put((number, None))

    def _hear_of_ends(self) -> None:
        pipe = self._launcher.stdout
        assert pipe is not None
        with contextlib.suppress(OSError, ValueError), pipe:
            for line in pipe:
                with contextlib.suppress(ValueError, KeyError):
                    told = json.loads(line)
                    self._ended.setdefault(int(told["number"]), int(told["code"]))


def _said_of(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"by signal {-code} ({signal.Signals(-code).name})"
    return f"by signal {-code}"


def _first_line(text: str) -> str:
    line = (text.strip().splitlines() or [""])[0]
    return line if len(line) <= _LINE_LENGTH else f"{line[:_LINE_LENGTH]}…"
