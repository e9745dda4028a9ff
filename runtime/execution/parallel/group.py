"""The coordinator of several GPUs: starts a process for each, sends them tasks, and ends all when one fails.

The coordinator computes nothing with them and joins no collectives, so it survives whatever happens to them. If one
process ends, fails or stops responding, all are ended, with an error that names it and the reason.
"""

import contextlib
import logging
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch
import torch.multiprocessing

from runtime.core import errors
from runtime.core.errors import GroupError, TandemError
from runtime.core.facts import Fact, cut
from runtime.core.locks import scratch_folder
from runtime.core.plan import Split
from runtime.core.processes import describe_exit, kill_tree
from runtime.execution.parallel import rank_process
from runtime.execution.parallel.rank_process import Message, receive, send

_POLL_SECONDS = 0.1
_EXIT_SECONDS = 2.0
_ENDING_SECONDS = 5.0
_LOG_BYTES = 8 << 20
_TAIL_BYTES, _TAIL_LINES, _LINE_LENGTH = 16_384, 30, 200

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds after which processes count as hanging.

    Attributes:
        start: for starting, which imports PyTorch.
        silence: without a heartbeat, or without progress of a message.
        first: for the first task of a kind, which may read weights or compile.
        later, times: for later tasks, the larger of `later` and `times` the slowest one so far.
        patience: for the running task after a cancellation.
    """

    start: float = 300.0
    silence: float = 60.0
    first: float = 1800.0
    later: float = 120.0
    times: float = 20.0
    patience: float = 30.0


class Group:
    """One process for each device of a split.

    Use `call`, or `send` and `collect`, from one thread. `close` ends the processes.

    Args:
        check: called ten times a second while waiting; if it raises during the start, the processes are ended.

    Attributes:
        processes: in the order of the split's devices.
        alive: whether the processes run.
        reserved_bytes: memory that PyTorch reserves in each process, as of its last answer.

    Raises:
        GroupError: if they cannot be started.
    """

    def __init__(self, split: Split, check: Callable[[], None], limits: Limits | None = None) -> None:
        self.split = split
        self.alive = True
        self.reserved_bytes = [0] * len(split.devices)
        self._peaks = [0] * len(split.devices)
        self._reset_peak = False
        self._limits = limits or Limits()
        self._slowest: dict[str, float] = {}
        self._task = ""
        self._began = 0.0
        self._exit = contextlib.ExitStack()
        self._folder = self._exit.enter_context(scratch_folder())
        # CUDA does not survive a fork. On CPUs the processes are forks of one server, which imports PyTorch once.
        method = "spawn" if split.devices[0].startswith("cuda") else "forkserver"
        context: Any = torch.multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload([rank_process.__name__])
        self._heartbeats: Any = context.RawArray("d", len(split.devices))
        self.processes: list[Any] = []
        self._connections: list[Connection] = []
        for number in range(len(split.devices)):
            parent_end, child_end = context.Pipe()
            self._connections.append(parent_end)
            arguments = (number, split, self._folder, child_end, self._heartbeats)
            process = context.Process(target=rank_process.serve, args=arguments, name=f"gpu-{number}", daemon=True)
            try:
                process.start()
            except OSError as error:
                self.close()
                reason = error.strerror or str(error)
                raise GroupError("parallel.not_started", count=len(split.devices), reason=reason) from error
            finally:
                child_end.close()
            self.processes.append(process)
        self._begin("start")
        self.collect(check, limit=self._limits.start, silence=False)

    @property
    def peak_bytes(self) -> int:
        """The most that one process allocated on its GPU since `reset_peak_memory`."""
        return max(self._peaks)

    def reset_peak_memory(self) -> None:
        """Restart the measurement of `peak_bytes`, in the processes with the next task."""
        self._reset_peak = True
        self._peaks = [0] * len(self._peaks)

    def call(
        self, task: str, check: Callable[[], None], tensors: Sequence[torch.Tensor] = (), **values: Any
    ) -> list[Message]:
        """Have all processes do a task, and return their answers in order; see `send` and `collect`."""
        self.send(task, tensors, **values)
        return self.collect(check)

    def send(self, task: str, tensors: Sequence[torch.Tensor] = (), **values: Any) -> None:
        """Send a task to all processes.

        Args:
            task: a method of `rank_process.Rank`.
            values: JSON values for it.

        Raises:
            GroupError: if a process does not read it.
        """
        self._begin(task)
        tensors = [tensor.cpu() for tensor in tensors]  # once for all processes
        for number, connection in enumerate(self._connections):
            try:
                send(connection, {"task": task, "reset_peak": self._reset_peak, **values}, tensors)
            except BlockingIOError:
                self._fail(number, self._silent())
            except OSError:  # its process ended: `collect` reports how
                pass
        self._reset_peak = False

    def collect(self, check: Callable[[], None], limit: float | None = None, *, silence: bool = True) -> list[Message]:
        """Wait for the answers of all processes, and return them in order.

        Raises:
            GroupError: if a process ended, failed or does not respond.
            TandemError: if a process raised it.
            torch.OutOfMemoryError, MemoryError: if a process ran out of memory.
        """
        answers: dict[int, Message] = {}
        limit = self._limit() if limit is None else limit
        while len(answers) < len(self._connections):
            self._check(check)
            pending = [number for number in range(len(self._connections)) if number not in answers]
            ready = wait(
                [process.sentinel for process in self.processes] + [self._connections[number] for number in pending],
                _POLL_SECONDS,
            )
            if any(process.sentinel in ready for process in self.processes):
                self._fail_ended(pending[0])
            for number in pending:
                if self._connections[number] in ready:
                    answers[number] = self._receive(number)
            self._find_hanging(answers, limit, silence=silence)
        took = time.monotonic() - self._began
        self._slowest[self._task] = max(took, self._slowest.get(self._task, 0.0))
        return [Message(answers[number].values["done"], answers[number].tensors) for number in sorted(answers)]

    def close(self) -> None:
        """End all processes; may be called twice."""
        if not self.alive:
            return
        self.alive = False
        for process in self.processes:
            kill_tree(process.pid)
        for process in self.processes:
            process.join(_ENDING_SECONDS)
        for connection in self._connections:
            connection.close()
        self._exit.close()

    def _begin(self, task: str) -> None:
        self._task, self._began = task, time.monotonic()
        for number, connection in enumerate(self._connections):
            _set_timeout(connection, self._limits.silence)
            with contextlib.suppress(OSError):
                log = self._folder / f"{number}.log"
                if log.stat().st_size > _LOG_BYTES:
                    os.truncate(log, 0)

    def _limit(self) -> float:
        slowest = self._slowest.get(self._task)
        limits = self._limits
        return limits.first if slowest is None else max(limits.later, limits.times * slowest)

    def _check(self, check: Callable[[], None]) -> None:
        try:
            check()
        except BaseException:
            # A running task ends soon, and restarting the processes takes longer; only a hanging one is not waited for.
            if time.monotonic() - self._began > self._limits.patience or self._task == "start":
                self.close()
                raise

    def _receive(self, number: int) -> Message:
        """Return the answer of a process.

        Raises:
            as `collect`.
        """
        try:
            message = receive(self._connections[number])
        except BlockingIOError:
            self._fail(number, self._silent())
        except (OSError, EOFError):
            self._fail_ended(number)
        if "failed" in message.values:
            self._fail_as_reported(number, message.values["failed"])
        self._peaks[number] = max(self._peaks[number], int(message.values.get("peak", 0)))
        self.reserved_bytes[number] = int(message.values.get("reserved", 0))
        return message

    def _find_hanging(self, answers: dict[int, Message], limit: float, *, silence: bool) -> None:
        now = time.monotonic()
        for number in range(len(self.processes)):
            if silence and now - max(self._heartbeats[number], self._began) > self._limits.silence:
                self._fail(number, self._silent())
            if number not in answers and now - self._began > limit:
                self._fail(number, Fact("parallel.task_timeout", {"task": self._task, "seconds": limit}))

    def _silent(self) -> Fact:
        return Fact("parallel.not_responding", {"seconds": self._limits.silence})

    def _fail_as_reported(self, number: int, failure: dict[str, Any]) -> NoReturn:
        """Raise the error that a process reported."""
        memory, text = failure.get("memory"), failure["text"]
        if memory is not None:
            logger.error("%s: out of memory\n%s", self._title(number), self._tail(number))
            self.close()
            raise torch.OutOfMemoryError(text) if memory == "VRAM" else MemoryError(text)
        if "fact" in failure:
            error: type[TandemError] = getattr(errors, failure["type"])
            self.close()
            raise error(failure["fact"]["code"], **failure["fact"]["data"])
        # A collective also fails if another process ended, which is then the cause.
        if wait([process.sentinel for process in self.processes], _POLL_SECONDS):
            self._fail_ended(number)
        self._fail(number, Fact("parallel.task_failed", {"error": _first_line(text)}))

    def _fail_ended(self, number: int) -> NoReturn:
        """End all processes because one ended, by default `number`, which closed its connection."""
        ready = wait([process.sentinel for process in self.processes], _EXIT_SECONDS)
        code = None
        for ended, process in enumerate(self.processes):
            if process.sentinel in ready:
                process.join(_EXIT_SECONDS)
                number, code = ended, process.exitcode
                break
        how = "closed its connection" if code is None else describe_exit(code)
        self._fail(number, Fact("parallel.process_ended", {"exit": how}))

    def _fail(self, number: int, cause: Fact) -> NoReturn:
        """End all processes because of one, and raise the cause with the last line of its log."""
        tail = self._tail(number)
        logger.error("%s: %s The end of its log:\n%s", self._title(number), cause, tail)
        self.close()
        data = {"gpu": number + 1, "gpus": len(self.split.devices), "device": self.split.devices[number]}
        last = tail.splitlines()[-1:]
        if not last:
            raise GroupError("parallel.failed", **data, cause=cause)
        raise GroupError("parallel.failed_with_log", **data, cause=cause, last=_first_line(last[0]))

    def _title(self, number: int) -> str:
        return f"GPU {number + 1} of {len(self.split.devices)} ({self.split.devices[number]})"

    def _tail(self, number: int) -> str:
        """Return the last lines of a process's log."""
        log = self._folder / f"{number}.log"
        try:
            with log.open("rb") as file:
                file.seek(max(log.stat().st_size - _TAIL_BYTES, 0))
                lines = file.read().decode("utf-8", "replace").strip().splitlines()[-_TAIL_LINES:]
        except OSError:
            return ""
        return "\n".join(re.sub(r"[\x00-\x08\x0b-\x1f]", "", line) for line in lines)


def _set_timeout(connection: Connection, seconds: float) -> None:
    """Let a connection raise `BlockingIOError` if the other end neither reads nor writes for that long, whole seconds.

    A stopped process would otherwise block a message that is larger than the socket's buffer.
    """
    timeout = struct.pack("ll", int(seconds), 0)
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, timeout)


def _first_line(text: str) -> str:
    line = (text.strip().splitlines() or [""])[0]
    return cut(line, _LINE_LENGTH)
