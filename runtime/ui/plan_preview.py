"""What Generate would do now, known in milliseconds: plans made of what is remembered of the machine and the library.

Nothing is loaded. The engine library is read when it has changed, this machine every few seconds, and a model's weights
are told apart once, on a thread of their own: until that is done, plans know of no engines and say so.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.core.errors import TandemError
from runtime.core.plan import ExecutionPlan, LatentSize
from runtime.core.request import GenerationRequest
from runtime.engines.service import EngineService
from runtime.machine.probe import Machine
from runtime.models.loras import with_loras
from runtime.models.spec import ModelSpec
from runtime.planner.engine_index import EngineRecord
from runtime.planner.engine_offers import EngineOffer, Offers, no_offers
from runtime.planner.history import History
from runtime.planner.resolve import resolve

# Free memory changes slowly; asking a GPU's driver takes longer than a plan.
_MACHINE_SECONDS = 3.0
# As long as a page waits for a model that is seen for the first time.
_PATIENCE_SECONDS = 0.05
_NOWHERE = Path("none.mp4")

Stamp = tuple[tuple[str, int], ...]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Foreseen:
    """What would happen.

    Attributes:
        plan: `None` where the request cannot be carried out.
        error: why not.
        offers: the engines that a component could run on, the one to prefer first; those that the plan chose from.
        records: the engine library.
        complete: whether engines are known yet.
        spec: the model, with the request's LoRAs.
    """

    plan: ExecutionPlan | None
    error: TandemError | None
    offers: Offers
    records: Sequence[EngineRecord]
    complete: bool
    spec: ModelSpec


class Foresight:
    """Plans from memory, for any number of pages. Safe between threads.

    Args:
        probe: tells what the machine has, as a new job would find it.
        history: tells what jobs took here.
        weights_dir: in which LoRAs are known by name.
    """

    def __init__(
        self,
        engines: EngineService,
        probe: Callable[[], Machine],
        history: Callable[[], History],
        weights_dir: Path = _NOWHERE,
    ) -> None:
        self._engines = engines
        self._probe = probe
        self._history = history
        self._weights_dir = weights_dir
        self._lock = threading.Lock()
        self._machine = probe()
        self._machine_at = time.monotonic()
        self._stamp: Stamp = ()
        self._records: tuple[EngineRecord, ...] | None = None
        self._known: dict[tuple[object, ...], Offers] = {}
        self._reading: dict[Path, threading.Thread] = {}

    def machine(self) -> Machine:
        """Return this machine as it was a few seconds ago at most."""
        with self._lock:
            if time.monotonic() - self._machine_at > _MACHINE_SECONDS:
                self._machine, self._machine_at = self._probe(), time.monotonic()
            return self._machine

    def library(self) -> tuple[Stamp, Sequence[EngineRecord]]:
        """Return the engines, and what changes whenever one comes, goes or is written to."""
        stamp = _stamp(self._engines.store.folder)
        with self._lock:
            if self._records is None or stamp != self._stamp:
                self._records = tuple(self._engines.store.index())
                self._stamp = stamp
                self._known.clear()
            return self._stamp, self._records

    def foresee(self, request: GenerationRequest, spec: ModelSpec) -> Foreseen:
        """Return what would happen to a request; what cannot be is an answer too, not an exception."""
        _, records = self.library()
        machine = self.machine()
        complete = self._is_read(spec)
        offers = self._offers(spec) if complete else no_offers
        try:
            spec = with_loras(spec, request.loras, self._weights_dir)
            offers = self._offers(spec) if complete else no_offers
            plan = resolve(request, spec, machine, _NOWHERE, offers, self._history())
        except TandemError as error:
            return Foreseen(None, error, offers, records, complete, spec)
        return Foreseen(plan, None, offers, records, complete, spec)

    def _offers(self, spec: ModelSpec) -> Offers:
        """Return what the service offers, each answer remembered until the library or the model changes."""
        key = (spec.name, _changed(spec), tuple((use.identity, use.expert) for use in spec.loras))
        with self._lock:
            if key in self._known:
                return self._known[key]
        ask = self._engines.offers(spec)
        answers: dict[tuple[str, LatentSize, str], Sequence[EngineOffer]] = {}

        def offers(component: str, latent: LatentSize, device: str) -> Sequence[EngineOffer]:
            asked = (component, latent, device)
            if asked not in answers:
                answers[asked] = ask(component, latent, device)
            return answers[asked]

        with self._lock:
            return self._known.setdefault(key, offers)

    def _is_read(self, spec: ModelSpec) -> bool:
        """Whether the model's weights are told apart; begins to read them if not, and waits a moment."""
        with self._lock:
            reading = self._reading.get(spec.directory)
            if reading is None:
                reading = threading.Thread(target=self._read, args=(spec,), name="foresight", daemon=True)
                self._reading[spec.directory] = reading
                reading.start()
        reading.join(_PATIENCE_SECONDS)
        return not reading.is_alive()

    def _read(self, spec: ModelSpec) -> None:
        defaults = spec.defaults
        latent = spec.latent_shape(defaults.frames, defaults.height, defaults.width)[2:]
        try:
            for component in spec.component_names:
                self._offers(spec)(component, latent, "cpu")
        except TandemError:  # the plan meets it too, and says it
            return
        except Exception:
            logger.exception("The engines of %s could not be looked up", spec.name)


def _stamp(folder: Path) -> Stamp:
    """Return the engines' folders with the time of their last change: names come and go, `engine.json` is renamed."""
    try:
        found = [path for path in folder.iterdir() if not path.name.startswith(".")]
        return tuple(sorted((path.name, path.lstat().st_mtime_ns) for path in found))
    except OSError:
        return ()


def _changed(spec: ModelSpec) -> str:
    folders = (spec.directory / name for name in spec.component_names)
    return "-".join(str(folder.stat().st_mtime_ns) if folder.is_dir() else "" for folder in folders)
