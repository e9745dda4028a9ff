"""Enhances prompts: in the web app and the HTTP API with `Enhancements`, on the command line with `enhanced_here`.

A chat model in a folder runs as a task in the worker process, before the videos that wait; a server is asked on a
thread of this process. Imports no torch.
"""

import logging
import math
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import InvalidRequestError, LimitError, TandemError
from runtime.core.events import Failed
from runtime.core.facts import Fact
from runtime.core.request import FIELDS, GenerationRequest
from runtime.core.settings import Settings
from runtime.core.templates import is_template, literal
from runtime.machine.probe import Machine
from runtime.models.chat_server import ask_server
from runtime.models.enhancers import Enhancer, LocalEnhancer, RemoteEnhancer, enhancer_of, problem_of
from runtime.models.folder import read_vocabulary
from runtime.models.prompt_guides import asked, instructions, most_characters, prompt_in
from runtime.models.registry import family_of
from runtime.models.spec import ModelSpec
from runtime.planner.placement import usable_gpus
from runtime.queue.job_queue import JobQueue
from runtime.queue.records import EnhancePrompt

# Prompts that are enhanced at once, of each owner and of all.
_MOST_OPEN, _MOST_OPEN_ALL = 2, 8
# Ended ones that are remembered.
_MOST_KEPT = 50
_HOUR_SECONDS, _MINUTE_SECONDS = 3600.0, 60

State = Literal["running", "done", "failed", "cancelled"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EnhancerRequest:
    """A prompt to enhance.

    Attributes:
        prompt: as it was written.
        instructions: the system prompt.
        most: how many characters the enhanced prompt may have.
    """

    prompt: str
    instructions: str
    most: int

    @classmethod
    def of(
        cls, prompt: object, spec: ModelSpec, *, from_image: bool = False, expanded: bool = False
    ) -> "EnhancerRequest":
        """Return the request for a prompt of a model.

        Args:
            from_image: whether the video begins with an image.
            expanded: whether it was made of a template, and is none.

        Raises:
            InvalidRequestError: if it is no valid prompt, or a template, which stands for several prompts.
        """
        text = str(FIELDS["prompt"].check("prompt", prompt))
        if not expanded and is_template(text):
            raise InvalidRequestError("prompt", "enhancer.template")
        tokens, guide = spec.max_sequence_length, family_of(spec.family).prompt_guide
        system_prompt = instructions(guide, tokens, read_vocabulary(spec.directory), from_image=from_image)
        return cls(text, system_prompt, most_characters(tokens))

    @classmethod
    def of_video(cls, request: GenerationRequest, spec: ModelSpec) -> "EnhancerRequest":
        """Return the request for the prompt of a video, which was made of its template."""
        return cls.of(request.prompt, spec, from_image=request.image is not None, expanded=True)

    @property
    def messages(self) -> list[dict[str, str]]:
        """What a chat model is asked."""
        return asked(self.instructions, self.prompt)


def enhanced_here(
    requests: Sequence[EnhancerRequest], enhancer: Enhancer, machine: Machine, cancel: Cancel
) -> Iterator[str]:
    """Yield the enhanced prompt of each request, in this process; a chat model is loaded once.

    Raises:
        EnhancerError, ModelError, MachineError: if one is not enhanced.
        CancelledError: on cancel.
    """
    if isinstance(enhancer, RemoteEnhancer):
        for request in requests:
            yield prompt_in(ask_server(enhancer, request.messages, cancel), request.most)
        return
    # It imports torch, which takes seconds that a refused request does not need.
    from runtime.execution.chat_model import loaded

    gpu = next(iter(usable_gpus(machine)), None)
    with loaded(enhancer, gpu, lambda: None) as model:
        for request in requests:
            yield prompt_in(model.answer(request.messages, cancel.check), request.most)


def with_enhanced(request: GenerationRequest, prompt: str) -> GenerationRequest:
    """Return a request with an enhanced prompt, which stands as it is, and the prompt that it was made of."""
    template = request.template or (literal(prompt) if is_template(prompt) else None)
    return request.replace(prompt=prompt, template=template, original_prompt=request.prompt)


@dataclass(frozen=True)
class Progress:
    """How far an enhancement is.

    Attributes:
        line: what happens now.
        prompt: the enhanced prompt; empty until it is done.
        problem: why there is none.
    """

    state: State
    line: Fact | None = None
    prompt: str = ""
    problem: Fact | None = None


class Enhancement(ABC):
    """One prompt that is enhanced. Safe between threads.

    Attributes:
        id: unknown to others.
        owner: whose it is; `None` for the owner of this Tandem.
    """

    def __init__(self, owner: str | None) -> None:
        self.id = secrets.token_hex(16)
        self.owner = owner

    @abstractmethod
    def progress(self) -> Progress:
        """Return how far it is."""

    @abstractmethod
    def cancel(self) -> None:
        """Stop it."""


class _ByTask(Enhancement):
    """By a chat model in the worker process."""

    def __init__(self, owner: str | None, request: EnhancerRequest, enhancer: LocalEnhancer, worker: JobQueue) -> None:
        super().__init__(owner)
        work = EnhancePrompt(
            folder=enhancer.folder,
            title=enhancer.title,
            parameters=enhancer.parameters,
            instructions=request.instructions,
            prompt=request.prompt,
            most=request.most,
        )
        self._worker = worker
        self._task = worker.add_task(work, Fact("task.enhance"), first=True)

    def progress(self) -> Progress:
        task = self._task
        if task.state == "done" and task.found:
            return Progress("done", prompt=task.found[0])
        if task.state == "failed":
            return Progress("failed", problem=task.result or Fact("enhancer.stopped"))
        if not task.open:
            return Progress("cancelled", problem=Fact("enhancer.stopped"))
        # The queue's other work runs first: a task waits for what runs.
        waits = Fact("task.enhancement_waits")
        return Progress("running", waits if task.state == "queued" else Fact("task.enhancing"))

    def cancel(self) -> None:
        self._worker.cancel([self._task.id])


class _ByServer(Enhancement):
    """By a server."""

    def __init__(self, owner: str | None, request: EnhancerRequest, enhancer: RemoteEnhancer) -> None:
        super().__init__(owner)
        self._cancel = Cancel()
        self._progress = Progress("running", Fact("task.enhancing"))
        threading.Thread(target=self._run, args=(request, enhancer), name="enhancement", daemon=True).start()

    def progress(self) -> Progress:
        return self._progress

    def cancel(self) -> None:
        self._cancel.request()

    def _run(self, request: EnhancerRequest, enhancer: RemoteEnhancer) -> None:
        try:
            prompt = prompt_in(ask_server(enhancer, request.messages, self._cancel), request.most)
            self._progress = Progress("done", prompt=prompt)
        except CancelledError:
            self._progress = Progress("cancelled", problem=Fact("enhancer.stopped"))
        except TandemError as error:
            self._progress = Progress("failed", problem=error.fact)
        except Exception as error:  # internal error: one line for the user, the traceback in the log
            logger.exception("A prompt could not be enhanced")
            self._progress = Progress("failed", problem=Failed.because_of(error).fact)


class Enhancements:
    """The prompts that are enhanced, and those that were lately. Safe between threads.

    Args:
        settings: name the enhancer.
    """

    def __init__(self, worker: JobQueue, settings: Settings) -> None:
        self._worker, self._settings = worker, settings
        self._all: list[Enhancement] = []
        # Those of the last hour, by owner: when they began, in seconds since 1970.
        self._times: dict[str | None, deque[float]] = {}
        self._lock = threading.Lock()

    def problem(self) -> Fact | None:
        """Return why no prompt can be enhanced; `None` if one can."""
        error = problem_of(self._settings)
        return None if error is None else error.fact

    def start(self, request: EnhancerRequest, owner: str | None = None, per_hour: int | None = None) -> Enhancement:
        """Enhance a prompt.

        Args:
            per_hour: how many an owner may enhance in an hour; `None` for any number.

        Raises:
            LimitError: if too many are being enhanced, or were in the last hour.
            TandemError: see `models.enhancers.enhancer_of`.
        """
        enhancer = enhancer_of(self._settings)
        with self._lock:
            self._admit(owner, per_hour, time.time())
            if isinstance(enhancer, LocalEnhancer):
                started: Enhancement = _ByTask(owner, request, enhancer, self._worker)
            else:
                started = _ByServer(owner, request, enhancer)
            self._all.append(started)
        return started

    def find(self, enhancement: str, owner: str | None = None) -> Enhancement | None:
        """Return one of an owner by its id; `None` if it is unknown, or ended long ago."""
        with self._lock:
            return next((one for one in self._all if (one.id, one.owner) == (enhancement, owner)), None)

    def _admit(self, owner: str | None, per_hour: int | None, now: float) -> None:
        """Count a new one of an owner, and forget old ones.

        Raises:
            LimitError: if the owner may not add another one.
        """
        running = [one for one in self._all if one.progress().state == "running"]
        self._all = [*[one for one in self._all if one not in running][-_MOST_KEPT:], *running]
        of_owner = sum(one.owner == owner for one in running)
        if of_owner >= _MOST_OPEN or len(running) >= _MOST_OPEN_ALL:
            raise LimitError("enhancer.busy", maximum=_MOST_OPEN if of_owner >= _MOST_OPEN else _MOST_OPEN_ALL)
        times = self._times.setdefault(owner, deque())
        while times and times[0] <= now - _HOUR_SECONDS:
            times.popleft()
        if per_hour is not None and len(times) >= per_hour:
            minutes = max(1, math.ceil((times[-per_hour] + _HOUR_SECONDS - now) / _MINUTE_SECONDS))
            raise LimitError("enhancer.rate", maximum=per_hour, minutes=minutes)
        times.append(now)
