"""Runs the owner's command when a video is done or fails: the setting `on_done`.

The process that stores a video's end starts it, once. A process that is killed between the two starts none.
"""

import logging
import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from runtime.core.errors import StoreError
from runtime.core.events import Failed, VideoSaved
from runtime.core.facts import Fact, shortened
from runtime.core.processes import describe_exit, kill_tree
from runtime.queue.records import JobRecord
from runtime.queue.store import JobStore

# Seconds after which it is killed, with all that it started.
LIMIT_SECONDS = 300.0
# How many run at once in this process; the others wait for them.
_AT_ONCE = 4
# Of the end of its standard error.
_TAIL_BYTES = 2_000
# Secrets, and a setting that would run the command again for each video that the command makes.
_NOT_PASSED_ON = frozenset({"TANDEM_AUTH", "TANDEM_ENHANCER_KEY", "TANDEM_ON_DONE"})

logger = logging.getLogger(__name__)


class DoneCommand:
    """Runs a command for each video of a store whose end this process stores, each in a thread of its own.

    Args:
        store: its videos; the command is called from now on.
        command: program and arguments. The path of a finished MP4 is the last argument; no shell reads any. Empty runs
            none.
        limit_seconds: see `LIMIT_SECONDS`.
    """

    def __init__(self, store: JobStore, command: Sequence[str], limit_seconds: float = LIMIT_SECONDS) -> None:
        self._store = store
        self._command = list(command)
        self._limit_seconds = limit_seconds
        self._places = threading.BoundedSemaphore(_AT_ONCE)
        self._threads: list[threading.Thread] = []
        self._failures: dict[str, Fact] = {}
        if command:
            store.log.on_end = self._start

    def wait(self) -> Mapping[str, Fact]:
        """Wait for the commands that run; return by job id why some have failed."""
        for thread in self._threads:
            thread.join()
        return self._failures

    def _start(self, job_id: str, end: VideoSaved | Failed) -> None:
        # A daemon: an app that stops does not wait, and the command goes on.
        thread = threading.Thread(target=self._follow, args=(job_id, end), name="on-done", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system allows no more threads
            logger.warning("job %s: the command at its end is not started: %s", job_id, error)
            return
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]

    def _follow(self, job_id: str, end: VideoSaved | Failed) -> None:
        """Run the command for one video; what went wrong is a line in the log and a warning of the video."""
        try:
            with self._places:
                job = self._store.find(job_id)
                failure = self._run(job, end)
            if failure is not None:
                logger.warning("job %s: %s", job_id, failure)
                self._failures[job_id] = failure
                self._store.add_warning(job_id, failure, job.lease)
        except StoreError as error:  # the job was deleted, or the store cannot be used
            logger.warning("job %s: the command at its end: %s", job_id, error)

    def _run(self, job: JobRecord, end: VideoSaved | Failed) -> Fact | None:
        """Run the command and return why it failed."""
        video = [str(end.video)] if isinstance(end, VideoSaved) else []
        program = Path(self._command[0]).name
        try:
            with tempfile.TemporaryFile() as errors:
                # Its own session: Ctrl-C in the terminal is for Tandem, and the limit ends all that it started.
                process = subprocess.Popen(
                    [*self._command, *video],
                    env=_environment(job, end),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    start_new_session=True,
                )
                try:
                    code = process.wait(self._limit_seconds)
                except subprocess.TimeoutExpired:
                    kill_tree(process.pid)
                    process.wait()
                    return Fact("queue.on_done_too_long", {"program": program, "seconds": self._limit_seconds})
                errors.seek(max(errors.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
                lines = errors.read().decode(errors="replace").split("\n")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            return Fact("queue.on_done_not_started", {"program": program, "error": reason})
        if code == 0:
            return None
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        how = describe_exit(code) + (f": {shortened(last)}" if last else "")
        return Fact("queue.on_done_failed", {"program": program, "how": how})


def _environment(job: JobRecord, end: VideoSaved | Failed) -> dict[str, str]:
    """Return the environment of the command: that of Tandem, and facts about the video."""
    facts = {
        "TANDEM_JOB": job.id,
        "TANDEM_STATE": "done" if isinstance(end, VideoSaved) else "failed",
        "TANDEM_VIDEO": str(end.video) if isinstance(end, VideoSaved) else "",
        "TANDEM_PROMPT": str(job.request.get("prompt", "")),
        "TANDEM_SEED": str(job.request.get("seed", "")),
        "TANDEM_ERROR": end.what if isinstance(end, Failed) else "",
    }
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    return inherited | {name: value.replace("\0", "") for name, value in facts.items()}
