"""Work on the engine library that waits its turn among the videos: building, importing, verifying, deleting, pruning.

A chore says what it does while it does it; the worker's thread runs it, anybody may look or cancel.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from runtime.core.cancel import Cancel
from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.core.request import GenerationRequest
from runtime.core.units import byte_size
from runtime.engines import library
from runtime.engines.imported.importing import describe_matches, device_here, import_engine, inspect_engine
from runtime.engines.imported.matching import find_matches
from runtime.engines.service import EngineService
from runtime.models.spec import ModelSpec
from runtime.pipeline.build_engines import build_all, wanted_engines

TaskState = Literal["queued", "running", "done", "failed", "cancelled"]
Kind = Literal["build", "look", "import", "verify", "delete", "prune", "download"]

# Frees the models that are loaded.
Free = Callable[[], None]

_LOG_LINES = 200


@dataclass
class Task:
    """One piece of work on its way. Read it from any thread; only the worker changes it.

    Attributes:
        kind, title: what it is, for programs and for people.
        work: does it; it is given the chore, to say how far it is, and what frees the loaded models, and returns what
            came of it in a sentence.
        line, share: what was said last, and how much is done, 0 to 1, where that is known.
        log: what was said so far, and the end of a failed build's own log.
        said, remedy: what came of it, and what to do about that.
        found: what was found out about an imported file, a line each.
        request, part: all that it takes to do a build later, in whichever process.
    """

    kind: Kind
    title: str
    work: Callable[["Task", Free], str] = field(repr=False)
    id: str = field(default_factory=lambda: secrets.token_hex(4))
    cancel: Cancel = field(default_factory=Cancel, repr=False)
    state: TaskState = "queued"
    line: str = ""
    share: float | None = None
    log: list[str] = field(default_factory=list, repr=False)
    said: str = ""
    remedy: str = ""
    found: tuple[str, ...] = ()
    request: GenerationRequest | None = None
    part: str | None = None
    started_at: float = 0.0
    ended_at: float = 0.0

    @property
    def open(self) -> bool:
        """Whether it waits or runs."""
        return self.state in {"queued", "running"}

    def start(self) -> None:
        """Note that it runs."""
        self.state, self.started_at = "running", time.time()

    def tell(self, line: str, share: float | None) -> None:
        """Say how far it is."""
        if line != self.line:
            self.write(line)
        self.line, self.share = line, share

    def report(self, fact: Fact, share: float | None) -> None:
        """Say how far an engine's build is."""
        self.tell(str(fact), share)

    def write(self, text: str) -> None:
        """Add to the log; the oldest lines go where it grows long."""
        self.log = [*self.log, *text.splitlines()][-_LOG_LINES:]

    def end(self, state: TaskState, said: str, remedy: str = "") -> None:
        """Note how it ended."""
        self.said, self.remedy, self.ended_at = said, remedy, time.time()
        self.state = state


def building(
    request: GenerationRequest, spec: ModelSpec, engines: EngineService, part: str | None = None, title: str = ""
) -> Task:
    """Return the chore of building the engines that a request wants, for all parts or the component `part`.

    Engines that are there are kept, unless the request says `build="always"`.
    """

    def work(task: Task, free: Free) -> str:
        task.tell("Looking for what is to be built", None)
        narrowed = request if part is None else _only(request, part)
        wanted = wanted_engines(narrowed, spec, engines)
        if not wanted:
            return "Nothing is to be built: PyTorch was chosen for every part."
        # Builders measure: what is loaded for videos would be in their way.
        free()
        failed: list[EngineError] = []
        made: list[str] = []

        def tell(fact: Fact, share: float | None) -> None:
            done = len(made) + len(failed)
            task.report(fact, (done + (share or 0.0)) / len(wanted))

        for one in build_all(wanted, spec, engines, tell, task.cancel, again=request.build == "always"):
            if one.error is None:
                made.append(one.wanted.use.id)
            else:
                failed.append(one.error)
                task.write("\n".join(filter(None, (one.error.what, one.error.remedy, one.error.log))))
        if failed and not made:
            raise failed[0]
        said = f"{len(made)} of {len(wanted)} ready."
        return f"{said} {failed[0].what}" if failed else said

    return Task("build", title or f"Engines for {spec.title}", work, request=request, part=part)


def looking(path: Path, spec: ModelSpec, component: str | None, engines: EngineService) -> Task:
    """Return the chore of opening an engine file and saying what it could stand for. It runs what is in it: ask before.

    Args:
        component: whose place it is to take; `None` looks for it.
    """

    def work(task: Task, free: Callable[[], None]) -> str:
        task.tell(f"Opening {path.name}", None)
        # A plan that is opened lies in the GPU's memory.
        free()
        contract = inspect_engine(path, device_here(engines.machine), task.report, task.cancel)
        task.found = tuple(map(str, contract.describe()))
        matches = find_matches(contract, spec, component)
        task.found += tuple(map(str, describe_matches(matches, spec)))
        return "It can be imported, if it holds the model's own weights."

    return Task("look", f"Look into {path.name}", work)


def importing(path: Path, spec: ModelSpec, component: str | None, engines: EngineService) -> Task:
    """Return the chore of importing an engine file. It runs what is in it: ask before.

    Args:
        component: whose place it is to take; `None` looks for the one whose weights it holds.
    """

    def work(task: Task, free: Callable[[], None]) -> str:
        # It is compared with the model's own weights, and both want memory.
        free()
        device = device_here(engines.machine)
        done = import_engine(path, spec, component, engines, device, task.report, task.cancel)
        task.found = tuple(map(str, done.describe()))
        if done.compared:
            return f"Imported as {done.engine.id}: {done.engine.detail}"
        return (
            f"Imported as {done.engine.id}. Memory did not allow to compare it with PyTorch, and before that it is not "
            "used: close other programs, then press Verify."
        )

    return Task("import", f"Import {path.name}", work)


def verifying(engine_id: str, models: Sequence[ModelSpec], engines: EngineService) -> Task:
    """Return the chore of proving one engine against PyTorch."""

    def work(task: Task, free: Free) -> str:
        chosen = library.choose(engines.store, [engine_id])
        free()
        store, machine = engines.store, engines.machine
        (found,) = library.verify(store, chosen, models, machine, task.report, task.cancel, engines.notes)
        if found.skipped is not None:
            raise EngineError(found.skipped.code, **found.skipped.data)
        record = found.engine
        if not record.usable:
            raise EngineError("engine.verified_wrong", cause=record.problem or record.detail)
        return f"Right: {record.detail}"

    return Task("verify", f"Verify {engine_id}", work)


def deleting(engine_id: str, engines: EngineService) -> Task:
    """Return the chore of deleting one engine."""

    def work(_task: Task, free: Free) -> str:
        chosen = library.choose(engines.store, [engine_id])
        return f"Deleted, {byte_size(_freeing(lambda: library.delete(engines.store, chosen), free))} freed."

    return Task("delete", f"Delete {engine_id}", work)


def pruning(engines: EngineService) -> Task:
    """Return the chore of deleting what is beyond the library's cap, the least recently used first."""

    def work(_task: Task, free: Free) -> str:
        # Engines that are only held for the next video may go too.
        free()
        done = library.prune(engines.store)
        kept = "" if done.enough else " Pinned engines and those in use stay."
        engines_gone = f"{len(done.deleted)} engine{'' if len(done.deleted) == 1 else 's'}"
        return f"Deleted {engines_gone}; {byte_size(done.total_bytes)} are left.{kept}"

    return Task("prune", "Delete what is beyond the limit", work)


def _only(request: GenerationRequest, part: str) -> GenerationRequest:
    """Return the request with a backend named for one part alone: the others then want nothing."""
    values = request.to_json() | {"backends": {part: request.backend(part)}}
    return GenerationRequest.from_mapping(values)


def _freeing(delete: Callable[[], int], free: Free) -> int:
    """Delete; an engine that is only held for the next video is let go of first."""
    try:
        return delete()
    except EngineError:
        free()
        return delete()
