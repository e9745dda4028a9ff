"""The plan preview of Make: what Generate would do with the form as it is now, in milliseconds.

Plans come from cached facts about the machine and the engine library; nothing is loaded. The library is read again when
it changes, the machine every few seconds, and a model's weights are identified once in a thread; until that is done,
plans consider no engines and are marked incomplete.
"""

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.core.errors import TandemError
from runtime.core.plan import PYTORCH, ExecutionPlan
from runtime.core.request import AUTO, GenerationRequest
from runtime.engines.service import EngineService
from runtime.machine.probe import Machine
from runtime.models.loras import with_loras
from runtime.models.registry import KnownModel
from runtime.models.requested import with_finishers, with_inputs
from runtime.models.spec import ModelSpec, folder_of
from runtime.models.wildcards import with_prompt
from runtime.planner.choice.engine_index import EngineRecord
from runtime.planner.choice.engine_offers import EngineOffer, Offers, no_offers
from runtime.planner.history import History
from runtime.planner.requirements import Fit, fit
from runtime.planner.resolve import PlanningContext, resolve
from runtime.planner.variants import Candidate, candidates

# Free memory changes slowly; a query of the GPU driver takes longer than a plan.
_MACHINE_SECONDS = 3.0
# How long a page waits for the identification of a model's weights.
_WAIT_SECONDS = 0.05
_NOWHERE = Path("none.mp4")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preview:
    """The plan for the form as it is now.

    Attributes:
        plan: `None` if the request cannot be carried out.
        error: why not.
        offers: the engines that the plan chose from, by component, preferred first.
        records: the engine library.
        complete: whether the model's engines are known.
        spec: the model with the request's LoRAs.
    """

    plan: ExecutionPlan | None
    error: TandemError | None
    offers: Offers
    records: Sequence[EngineRecord]
    complete: bool
    spec: ModelSpec

    def offers_for(self, component: str) -> Sequence[EngineOffer]:
        """Return the engines for a component of the plan, built or not."""
        assert self.plan is not None
        return self.offers(component, self.plan.engine_size(component), self.plan.components[component].device)

    def build_seconds(self, components: Iterable[str]) -> float | None:
        """Return about how long Build takes for components of the plan; `None` if unknown, or nothing is missing."""
        if self.plan is None or not self.complete:
            return None
        request = self.plan.request
        missing = [offer for name in components for offer in to_build(request.backend(name), self.offers_for(name))]
        # Components may share engines.
        return sum({tuple(use.id for use in offer.engines): offer.build_seconds for offer in missing}.values()) or None


def to_build(requested: str, offered: Sequence[EngineOffer]) -> list[EngineOffer]:
    """Return the offers that Build builds for the requested backend."""
    missing = [
        offer
        for offer in offered
        if requested in {AUTO, offer.backend} and requested != PYTORCH and offer.problem is None and not offer.ready
    ]
    if requested != AUTO:
        return missing[:1]
    missing = [offer for offer in missing if not offer.on_request]
    # Of engines of whole transformers and of their blocks, one kind for each backend is built.
    kinds = {offer.backend: offer.in_blocks for offer in reversed(missing)}
    return [offer for offer in missing if offer.in_blocks == kinds[offer.backend]]


class PlanPreview:
    """Plans for any number of pages. Thread-safe.

    Args:
        probe: returns the machine as a new job would find it.
        history: returns the measured durations of earlier jobs.
        weights_dir: folder in which LoRAs, and models of control frames, are found.
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
        self._stamp: tuple[tuple[str, int], ...] = ()
        self._records: tuple[EngineRecord, ...] | None = None
        self._known: dict[tuple[object, ...], Offers] = {}
        self._identifying: dict[Path, threading.Thread] = {}

    @property
    def weights_dir(self) -> Path:
        """The user's models."""
        return self._weights_dir

    @property
    def cache_dir(self) -> Path | None:
        """The cache, if there is one."""
        return self._engines.cache_dir

    def machine(self) -> Machine:
        """Return the machine as probed a few seconds ago at most."""
        with self._lock:
            if time.monotonic() - self._machine_at > _MACHINE_SECONDS:
                self._machine, self._machine_at = self._probe(), time.monotonic()
            return self._machine

    def library(self) -> Sequence[EngineRecord]:
        """Return the engines; they are read again when one was added, removed or written to."""
        stamp = _stamp(self._engines.store.folder)
        with self._lock:
            if self._records is None or stamp != self._stamp:
                self._records = tuple(self._engines.store.index())
                self._stamp = stamp
                self._known.clear()
            return self._records

    def preview(self, request: GenerationRequest, spec: ModelSpec) -> Preview:
        """Return the plan for a request, or the error why there is none."""
        records = self.library()
        complete = self._is_identified(spec)
        offers = self._offers(spec) if complete else no_offers
        try:
            request = with_prompt(request, self._engines.cache_dir)
            spec = with_loras(spec.in_stages(int(request.stages)), request.loras, self._weights_dir)
            spec = with_finishers(spec, request, self._weights_dir)
            spec = with_inputs(spec, request, self._weights_dir, self._engines.cache_dir, keep=False, needs_image=False)
            offers = self._offers(spec) if complete else no_offers
            context = PlanningContext(
                self.machine(),
                _NOWHERE,
                offers,
                self._history(),
                compares=True,
                idle_builds=self._engines.idle_builds,
            )
            plan = resolve(request, spec, context, builds_later=True)
        except TandemError as error:
            return Preview(None, error, offers, records, complete, spec)
        return Preview(plan, None, offers, records, complete, spec)

    def fit(self, spec: ModelSpec) -> Fit:
        """Return whether a model's default clip runs here, on engines only if its weights are identified already."""
        with self._lock:
            thread = self._identifying.get(spec.directory)
        ready = thread is not None and not thread.is_alive()
        return fit(spec, self.machine(), self._history(), self._offers(spec) if ready else no_offers)

    def variants(self, model: KnownModel) -> tuple[Candidate, ...]:
        """Return a published model's original and its variants on this machine."""
        return candidates(model, self.machine(), self._history())

    def _offers(self, spec: ModelSpec) -> Offers:
        """Return the engine service's offers, cached until the library, the model or the GPUs change."""
        machine, engines = self.machine(), self._engines
        gpus = _names(machine)
        upscaler = None if spec.upscaler is None else (spec.upscaler.name, _modified(spec.upscaler))
        loras = tuple((use.identity, use.expert) for use in spec.loras)
        key = (spec.name, _modified(spec), upscaler, loras, gpus, spec.video is not None, spec.interpolator is not None)
        with self._lock:
            if key in self._known:
                return self._known[key]
        if gpus != _names(engines.machine):  # another machine of a cluster
            engines = replace(engines, machine=machine)
        offers = functools.cache(engines.offers(spec))
        with self._lock:
            return self._known.setdefault(key, offers)

    def _is_identified(self, spec: ModelSpec) -> bool:
        """Return whether the model's weights are identified; if not, start a thread that does it and wait briefly."""
        with self._lock:
            thread = self._identifying.get(spec.directory)
            if thread is None:
                thread = threading.Thread(target=self._identify, args=(spec,), name="plan-preview", daemon=True)
                self._identifying[spec.directory] = thread
                thread.start()
        thread.join(_WAIT_SECONDS)
        return not thread.is_alive()

    def _identify(self, spec: ModelSpec) -> None:
        """Look up the engines of every component, which hashes the model's weights once."""
        defaults = spec.defaults
        latent = spec.latent_shape(defaults.frames, defaults.height, defaults.width)[2:]
        try:
            for component in spec.component_names:
                self._offers(spec)(component, latent, "cpu")
        except TandemError:  # the plan fails with it too
            return
        except Exception:
            logger.exception("The engines of %s could not be looked up", spec.name)


def _names(machine: Machine) -> tuple[str, ...]:
    return tuple(gpu.name for gpu in machine.gpus)


def _stamp(folder: Path) -> tuple[tuple[str, int], ...]:
    """Return the names of the engines' folders with their modification times."""
    try:
        paths = [path for path in folder.iterdir() if not path.name.startswith(".")]
        return tuple(sorted((path.name, path.lstat().st_mtime_ns) for path in paths))
    except OSError:
        return ()


def _modified(spec: ModelSpec) -> str:
    """Return the modification times of the model's folders."""
    folders = [spec.directory / folder_of(name) for name in spec.component_names if name not in spec.files]
    folders += [path for files in spec.files.values() for path in files.paths]
    return "-".join(str(folder.stat().st_mtime_ns) if folder.exists() else "" for folder in folders)
