"""A process that decodes images: started with the first one, kept for others, and killed when a limit is reached.

It uses little memory, ends with this process, and is started again after it was killed. It decodes one image at a time.
"""

import atexit
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from PIL import Image

from runtime.core.cancel import never
from runtime.core.errors import MachineError
from runtime.core.processes import describe_exit
from runtime.video.image_messages import DecodingError, receive, send

# Of one image: processor time; time, of which a busy machine needs more; memory. An image with the most pixels
# takes a third of the time and two thirds of the memory.
SECONDS = 10.0
WAIT_SECONDS = 60.0
MEMORY_BYTES = 1536 << 20
_START_SECONDS = 60.0
_POLL_SECONDS = 0.05
_TRIES = 2
_ROOT = Path(__file__).parents[2]
# Isolated from the folder that the program was started in, which a plain -c adds to the path.
_PROGRAM = "import sys; sys.path[0] = sys.argv[1]; from runtime.video.image_decoder import main; main()"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decoded:
    """A decoded image: its size and, if asked for, its pixels, RGB with 8 bits."""

    width: int
    height: int
    pixels: bytes

    def image(self) -> Image.Image:
        """Return it as an image of Pillow."""
        return Image.frombytes("RGB", (self.width, self.height), self.pixels)


class ImageProcess:
    """Decodes images in a child process, one at a time. Thread-safe.

    Args:
        seconds, wait_seconds, memory: limits for one image, see `SECONDS`.
    """

    def __init__(
        self, seconds: float = SECONDS, wait_seconds: float = WAIT_SECONDS, memory: int = MEMORY_BYTES
    ) -> None:
        self._limits = {"seconds": seconds, "wait": wait_seconds, "memory": memory}
        self._child: _Child | None = None
        self._inherited: _Child | None = None
        self._turn = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The id of the child process, if it runs."""
        child = self._child
        return None if child is None else child.process.pid

    def decode(self, data: bytes, *, pixels: bool = True, check: Callable[[], None] = never) -> Decoded:
        """Decode the image in a file's content.

        Args:
            pixels: whether they are returned.
            check: called many times a second; an exception that it raises ends the decoding.

        Raises:
            DecodingError: if the image is refused, damaged, or takes too much time or memory.
            MachineError: if no process can be started.
        """
        with self._my_turn(check):
            for _ in range(_TRIES):
                answer = self._ask(data, pixels, check)
                if answer is not None:
                    return answer
        # It was killed twice, probably by the system for its memory.
        raise DecodingError("image.memory", most=self._limits["memory"])

    def close(self) -> None:
        """End the child process."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()

    def forget(self) -> None:
        """Forget the child process, which is another process's after a fork."""
        self._inherited, self._child = self._child, None  # kept, so that Python does not report it as leaked
        self._turn = threading.Lock()

    @contextlib.contextmanager
    def _my_turn(self, check: Callable[[], None]) -> Iterator[None]:
        while not self._turn.acquire(timeout=_POLL_SECONDS):
            check()
        try:
            yield
        finally:
            self._turn.release()

    def _ask(self, data: bytes, pixels: bool, check: Callable[[], None]) -> Decoded | None:
        """Have the child decode an image; return `None` if the child was killed by someone else meanwhile."""
        if self._child is None:
            self._child = _Child()
        child = self._child
        if child.ready:
            child.begin()
        talk: Future[tuple[dict[str, Any], bytes]] = Future()
        arguments = (child, {**self._limits, "pixels": pixels}, data, talk)
        # The pipes block, and not every system can wait for several of them.
        thread = threading.Thread(target=_talk, args=arguments, name="image-process", daemon=True)
        thread.start()
        try:
            while not wait([talk], _POLL_SECONDS).done:
                check()
                child.check(self._limits)
            answer, content = talk.result()
        except (OSError, EOFError, ValueError, KeyError):
            self.close()
            self._explain_end(child)
            return None
        except BaseException:
            self.close()
            raise
        finally:
            thread.join()
        if "code" in answer:
            return self._refused(answer)
        width, height = answer["width"], answer["height"]
        if pixels and len(content) != 3 * width * height:
            raise DecodingError("image.damaged")
        return Decoded(width, height, content)

    def _refused(self, answer: dict[str, Any]) -> Decoded:
        if answer.get("reason"):
            logger.info("An image is refused: %s", answer["reason"])
        if answer["code"]:
            raise DecodingError(answer["code"], **answer["data"])
        # What a library has not freed after an error must not count for the next image.
        self.close()
        raise DecodingError("image.memory", most=self._limits["memory"])

    def _explain_end(self, child: "_Child") -> None:
        """Find out why the child ended before it has answered; return if that was not its image.

        Raises:
            DecodingError: if that was its image.
            MachineError: if it has not started.
        """
        code = child.process.wait()
        if not child.ready:
            raise MachineError("image.no_process", reason=describe_exit(code))
        logger.warning("The process that decodes images ended: %s", describe_exit(code))
        if sys.platform != "win32":
            if code in {-signal.SIGXCPU, -signal.SIGALRM}:
                raise DecodingError("image.slow", seconds=self._limits["seconds"])
            if code < 0 and code != -signal.SIGKILL:  # a decoder crashed
                raise DecodingError("image.damaged")


class _Child:
    """The child process.

    Attributes:
        process: it.
        ready: whether it has started.
        since: when it started, or began with its image.
    """

    def __init__(self) -> None:
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(_ROOT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # glibc reserves 64 MiB of addresses for each thread otherwise.
                env={**os.environ, "MALLOC_ARENA_MAX": "1"},
                # Ctrl-C in the terminal does not reach it.
                start_new_session=True,
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except OSError as error:
            raise MachineError("image.no_process", reason=error.strerror or str(error)) from error
        self.ready = False
        self.since = time.monotonic()
        self._spent = 0.0

    def kill(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not sent cannot be flushed
                    pipe.close()

    def begin(self) -> None:
        """Start to count the time of an image."""
        self._spent = self._processor_seconds()
        self.since = time.monotonic()
        self.ready = True

    def check(self, limits: dict[str, float]) -> None:
        """Check the limits of the image, which the process checks too where the system can.

        Raises:
            DecodingError: if one is reached.
            MachineError: if the process does not start.
        """
        waited = time.monotonic() - self.since
        if not self.ready:
            if waited > _START_SECONDS:
                raise MachineError("image.no_process", reason=f"no answer in {_START_SECONDS:.0f} s")
            return
        if waited > limits["wait"] or self._processor_seconds() - self._spent > limits["seconds"]:
            raise DecodingError("image.slow", seconds=limits["seconds"])
        with contextlib.suppress(psutil.Error):
            if psutil.Process(self.process.pid).memory_info().rss > limits["memory"]:
                raise DecodingError("image.memory", most=limits["memory"])

    def _processor_seconds(self) -> float:
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(self.process.pid).cpu_times()
            return float(times.user + times.system)
        return self._spent


def _talk(child: _Child, request: dict[str, Any], data: bytes, talk: "Future[tuple[dict[str, Any], bytes]]") -> None:
    """Send a request, and receive the answer."""
    stdin, stdout = child.process.stdin, child.process.stdout
    assert stdin is not None and stdout is not None
    try:
        if not child.ready:
            receive(stdout)
            child.begin()
        send(stdin, request, data)
        talk.set_result(receive(stdout))
    except BaseException as error:
        talk.set_exception(error)


PROCESS = ImageProcess()
atexit.register(PROCESS.close)
if sys.platform != "win32":
    os.register_at_fork(after_in_child=PROCESS.forget)
