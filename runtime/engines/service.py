"""The engines of this machine: offers to the planner, building, opening, verifying, and why an engine is stale."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from runtime.core.cancel import Cancel
from runtime.core.errors import EngineError, TandemError
from runtime.core.facts import Fact
from runtime.core.plan import EngineRef, is_block_program
from runtime.core.request import FINISHERS
from runtime.core.settings import Settings
from runtime.engines.build import BuildRequest, TimerFactory, build_engine, verify_engine
from runtime.engines.builders import BUILDERS
from runtime.engines.child import Report
from runtime.engines.key_parts import (
    architecture_digest,
    device_like,
    device_text,
    imported_key,
    runnable_programs,
    weights_digest,
)
from runtime.engines.offers import ModelOffers
from runtime.engines.store import EngineStore
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_index import IMPORTED, SWAPPED, UNREADABLE_KEY, EngineKey, EngineRecord
from runtime.planner.choice.key_differences import device_difference, differences
from runtime.planner.frame_networks import frame_dtype

if TYPE_CHECKING:
    import torch

    from runtime.engines.sessions import BlockSession, Session

_BYTES_PER_GB = 1e9

logger = logging.getLogger(__name__)


class OpenEngines(AbstractContextManager["OpenEngines"]):
    """The sessions of one component by program, and a context manager that closes them.

    Attributes:
        device: the torch device that they run on.
    """

    def __init__(self, sessions: Mapping[str, "Session"], stack: ExitStack, device: str) -> None:
        self.device = device
        self._sessions = sessions
        self._stack = stack

    def infer(self, program: str, **inputs: "torch.Tensor") -> dict[str, "torch.Tensor"]:
        """Run one program; see `Session.infer`."""
        return self._sessions[program].infer(**inputs)

    def write(self, program: str, inputs: Mapping[str, "torch.Tensor"], outputs: Mapping[str, "torch.Tensor"]) -> None:
        """Run one block program; see `BlockSession.write`."""
        cast("BlockSession", self._sessions[program]).write(inputs, outputs)

    @property
    def most_tokens(self) -> int:
        """The most tokens that all of these block engines take in one call."""
        return min(cast("BlockSession", session).most_tokens for session in self._sessions.values())

    def runs(self, program: str) -> bool:
        """Return whether one of the engines runs a program."""
        return program in self._sessions

    def release(self, program: str) -> None:
        """Free one program's buffers, see `Session.release`. Errors are logged: the result does not depend on it."""
        try:
            self._sessions[program].release()
        except Exception:  # libraries raise errors of any type
            logger.warning("An engine's buffers could not be freed", exc_info=True)

    def close(self) -> None:
        """Free the engines, which may be deleted from then on. Errors are logged: what runs next needs no engine."""
        try:
            self._stack.close()
        except Exception:  # libraries raise errors of any type
            logger.warning("An engine could not be freed", exc_info=True)

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Verified:
    """One engine after verification.

    Attributes:
        engine: with the result; `usable` is whether it passed.
        skipped: why it could not be verified on this machine; its state is unchanged.
    """

    engine: EngineRecord
    skipped: Fact | None = None


@dataclass(frozen=True)
class EngineService:
    """The engines in `store`.

    Attributes:
        cache_dir: stores the digests of weights; see `key_parts.weights_digest`.
        idle_builds: see `planner.resolve.PlanningContext`.
    """

    store: EngineStore
    machine: Machine
    cache_dir: Path | None
    idle_builds: bool = False

    @classmethod
    def from_settings(cls, settings: Settings, machine: Machine) -> "EngineService":
        """Return the service for the engine folder in the settings."""
        store = EngineStore(settings.engines_dir, int(settings.engine_cache_gb * _BYTES_PER_GB))
        return cls(store, machine, settings.cache_dir, settings.idle_builds)

    def offers(self, spec: ModelSpec) -> ModelOffers:
        """Return the function that gives `planner.resolve.resolve` the engines of one model."""
        return ModelOffers(spec, self.store, self.machine, self.cache_dir)

    def build(
        self,
        spec: ModelSpec,
        component: str,
        use: EngineRef,
        device: str,
        emit_progress: Report,
        cancel: Cancel,
        *,
        again: bool = False,
        timers: TimerFactory | None = None,
    ) -> EngineRecord:
        """Build one engine, or return it if it exists; see `build.build_engine` for arguments and errors.

        Args:
            timers: makes what measures PyTorch instead of the engine.

        Raises:
            EngineError: also if weights or library versions are not those of the plan.
        """
        if use.builder == IMPORTED:
            raise EngineError("engine.imported_not_built", engine=use.id)
        spec = spec.owner_of(component)
        key = self.offers(spec).key(BUILDERS[use.builder], component, use, device)
        if key.digest() != use.id:
            raise EngineError("engine.planned_for_others", engine=use.id)
        request = replace(self.request(spec, component, key, device, timers), again=again)
        return build_engine(request, self.store, emit_progress, cancel)

    def request(
        self, spec: ModelSpec, component: str, key: EngineKey, device: str, timers: TimerFactory | None
    ) -> BuildRequest:
        """Return the request to build or verify an engine; `timers` as in `build`."""
        return BuildRequest(
            spec=spec,
            component=component,
            key=key,
            device=device,
            timer=timers and timers(spec, component, key, device),
            pytorch_dtype=frame_dtype(self.machine, device) if component in FINISHERS else "",
            cache_dir=self.cache_dir,
        )

    def problem(self, engine_id: str) -> Fact | None:
        """Read an engine's files and return the problem; None if they are intact."""
        record = _record(self.store, engine_id)
        return Fact("engine.none_yet") if record is None else record.problem or self.store.verify_hash(record)

    def open(self, spec: ModelSpec, component: str, uses: Iterable[EngineRef], device: str) -> OpenEngines:
        """Load a component's engines; see `open_engines`."""
        return open_engines(self.store, spec, component, uses, device)

    def verify(
        self,
        engines: Iterable[EngineRecord],
        models: Sequence[ModelSpec],
        emit_progress: Report,
        cancel: Cancel,
        *,
        timers: TimerFactory | None = None,
    ) -> Iterator[Verified]:
        """Compare engines with PyTorch one after the other, and store the results.

        Args:
            models: the models whose weights they may have.
            emit_progress, cancel: see `build.build_engine`.
            timers: see `build`.

        Raises:
            CancelledError: if cancelled.
        """
        for record in engines:
            cancel.check()
            if record.key == UNREADABLE_KEY:
                yield Verified(record)
                continue
            try:
                spec, component = self.owner(record, models)
                device = self.device_of(record)
                request = self.request(spec, component, record.key, device, timers)
                yield Verified(verify_engine(record, request, self.store, emit_progress, cancel))
            except TandemError as error:
                yield Verified(record, error.fact)

    def owner(self, record: EngineRecord, models: Sequence[ModelSpec]) -> tuple[ModelSpec, str]:
        """Return the model and component that an engine was built from, or can run if it has no weights.

        Raises:
            EngineError: if none of the models has its weights.
        """
        key, name = record.key, record.key.program
        # The model that it was built from comes first.
        for spec in sorted(models, key=lambda spec: spec.name != record.model):
            if spec.family != key.family:
                continue
            components = [part for part in spec.component_names if name in runnable_programs(spec, part)]
            for component in sorted(components, key=lambda part: part != record.component):
                try:
                    with_loras = replace(spec, loras=record.loras)
                    if key.architecture != architecture_digest(spec, component, name):
                        continue
                    # Reading all weights takes minutes.
                    if key.weights == SWAPPED or key.weights == weights_digest(with_loras, component, self.cache_dir):
                        return spec, component
                except (TandemError, OSError, ValueError):  # a damaged model matches no engine
                    continue
        raise EngineError("engine.no_model_with_weights", engine=record.id, model=record.model)

    def why_stale(self, record: EngineRecord, models: Sequence[ModelSpec]) -> list[Fact]:
        """Return how an engine differs from the one that this machine would build now; empty for a usable engine.

        Sizes and precision are not compared: other ones make another engine.

        Args:
            models: all models of this machine.
        """
        key = record.key
        if key == UNREADABLE_KEY:
            return []
        spec, component = next((spec for spec in models if spec.name == record.model), None), record.component
        if is_block_program(key.program) and (spec is None or component not in spec.component_names):
            # They belong to an architecture, and serve all models of it.
            with suppress(EngineError):
                spec, component = self.owner(record, models)
        if spec is None or component not in spec.component_names:
            return [Fact("engine.stale_without_model", {"model": record.model})]
        if key.builder != IMPORTED and key.builder not in BUILDERS:
            return [Fact("engine.stale_without_builder", {"builder": key.builder})]
        spec, device = replace(spec, loras=record.loras), device_like(key.device, self.machine)
        try:
            if key.builder == IMPORTED:
                current_key = imported_key(key, spec, component, self.machine, device, self.cache_dir)
            else:
                current_key = BUILDERS[key.builder].key(
                    spec,
                    component,
                    key.program,
                    key.profiles,
                    precision=key.precision,
                    machine=self.machine,
                    device=device,
                    cache_dir=self.cache_dir,
                )
        except TandemError as error:
            return [error.fact]
        return differences(current_key, key, spec.vae.scale_factor_spatial)

    def device_of(self, record: EngineRecord) -> str:
        """Return the device of this machine that an engine was built for.

        Raises:
            EngineError: if there is none.
        """
        machine = self.machine
        devices = ["cpu", *(f"cuda:{index}" for index in range(len(machine.gpus)))]
        for device in devices:
            if device_text(machine, device) == record.key.device and record.key.system == machine.system:
                return device
        here = device_text(machine, device_like(record.key.device, machine))
        cause = device_difference(record.key.device, here)
        raise EngineError("engine.other_device", engine=record.id, cause=cause)


def open_engines(
    store: EngineStore, spec: ModelSpec, component: str, uses: Iterable[EngineRef], device: str
) -> OpenEngines:
    """Load a component's engines; they are not deleted or evicted while they are open.

    Raises:
        EngineError: if one is gone, damaged or cannot be loaded; it is not used from then on.
        MemoryError, torch.OutOfMemoryError: if memory runs out.
        Exception: of any type, if a library fails otherwise.
    """
    from runtime.engines.sessions import open_session

    with ExitStack() as stack:
        sessions = {}
        for use in uses:
            record = _record(store, use.id)
            if record is None:
                raise EngineError("engine.gone", engine=use.id)
            if record.problem is not None:
                raise EngineError("engine.unusable", engine=use.id, cause=record.problem)
            folder = stack.enter_context(store.using(use.id))
            weights = _weights(spec, component, use, device)
            try:
                session = open_session(folder, record, device=device, weights=weights, hashed=store.hashed(record))
            except EngineError as error:
                store.report_problem(record, error.fact)
                raise
            stack.callback(session.close)
            sessions[use.program] = session
        return OpenEngines(sessions, stack.pop_all(), device)


def _record(store: EngineStore, engine_id: str) -> EngineRecord | None:
    return next((record for record in store.index() if record.id == engine_id), None)


def _weights(
    spec: ModelSpec, component: str, use: EngineRef, device: str
) -> Callable[[], Mapping[str, "torch.Tensor"]]:
    def load() -> Mapping[str, "torch.Tensor"]:
        from runtime.engines.programs import load_program

        program = load_program(spec, component, use.program, device=device, dtype=use.precision)
        return program.module.state_dict()

    return load
