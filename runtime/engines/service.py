"""The engines of this machine for jobs: what they offer the planner, building one, and opening those of a component."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.core.cancel import Cancel
from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.core.loras import LoraUse
from runtime.core.plan import EngineUse, LatentSize
from runtime.core.settings import Settings
from runtime.engines.build import BuildRequest, build_engine
from runtime.engines.builders import BUILDERS, Builder, BuildNeeds
from runtime.engines.child import Report
from runtime.engines.imported.offering import imported_engines, offers_with
from runtime.engines.store import EngineStore
from runtime.machine.probe import Machine, free_disk_bytes
from runtime.models.spec import ModelSpec
from runtime.planner.constraints import build_conflict
from runtime.planner.engine_index import IMPORTED, OTHER_WEIGHTS, SWAPPED, EngineKey, EngineRecord, ShapeProfile, find
from runtime.planner.engine_index import misfit as engine_misfit
from runtime.planner.engine_offers import EngineOffer, Offers
from runtime.planner.forecast import build_seconds

if TYPE_CHECKING:
    import torch

    from runtime.engines.sessions import Session

# The builders by the speed of their engines as a rule; measurements on this machine take precedence.
_PREFERRED = {
    "cpu": ("onnxruntime", "inductor"),
    "cuda": ("onnx_tensorrt", "torch_tensorrt", "inductor", "onnxruntime"),
}
_BYTES_PER_GB = 1e9


class OpenEngines:
    """The sessions of one component by program, and a context manager that closes them."""

    def __init__(self, sessions: Mapping[str, "Session"], stack: ExitStack) -> None:
        self._sessions = sessions
        self._stack = stack

    def infer(self, program: str, **inputs: "torch.Tensor") -> dict[str, "torch.Tensor"]:
        """Run one program; see `Session.infer`."""
        return self._sessions[program].infer(**inputs)

    def runs(self, program: str) -> bool:
        """Return whether one of the engines runs a program."""
        return program in self._sessions

    def close(self) -> None:
        """Free the engines, which may be deleted from then on."""
        self._stack.close()

    def __enter__(self) -> "OpenEngines":
        """Return the engines; leaving the block closes them."""
        return self

    def __exit__(self, *_: object) -> None:
        """Free the engines."""
        self.close()


@dataclass(frozen=True)
class EngineService:
    """The engines in `store`; `notes` is the folder with the weights' digests."""

    store: EngineStore
    machine: Machine
    notes: Path | None

    @classmethod
    def from_settings(cls, settings: Settings, machine: Machine) -> "EngineService":
        """Return the service for the engine folder in the settings."""
        store = EngineStore(settings.engines_dir, int(settings.engine_cache_gb * _BYTES_PER_GB))
        return cls(store, machine, settings.cache_dir)

    def offers(self, spec: ModelSpec) -> Offers:
        """Return the function that gives `planner.resolve.resolve` the engines of one model; reads the library once."""
        index: list[EngineRecord] = []

        def of(component: str, latent: LatentSize, device: str) -> list[EngineOffer]:
            if not index:
                index.extend(self.store.index())
            names = _PREFERRED[device.partition(":")[0]]
            built = [
                *(self._offer(BUILDERS[name], spec, component, latent, device, index) for name in names),
                *(self._refusal(BUILDERS[name]) for name in BUILDERS if name not in names),
            ]
            imported = imported_engines(index, spec, component, self.machine, device, self.notes)
            return offers_with(built, imported, spec, latent)

        return of

    def build(
        self,
        spec: ModelSpec,
        component: str,
        use: EngineUse,
        device: str,
        emit_progress: Report,
        cancel: Cancel,
        *,
        again: bool = False,
    ) -> EngineRecord:
        """Build one engine, or return it if it exists; see `build.build_engine` for arguments and errors.

        Raises:
            EngineError: also if weights or library versions are not those of the plan.
        """
        if use.builder == IMPORTED:
            raise EngineError("engine.imported_not_built", engine=use.id)
        key = self._key(BUILDERS[use.builder], spec, component, use.program, use.profile, use.precision, device)
        if key.digest() != use.id:
            raise EngineError("engine.planned_for_others", engine=use.id)
        request = BuildRequest(spec=spec, component=component, key=key, device=device, again=again)
        return build_engine(request, self.store, emit_progress, cancel)

    def problem(self, engine_id: str) -> Fact | None:
        """Read an engine's files and return the problem; None if they are intact."""
        record = self._record(engine_id)
        return Fact("engine.none_yet") if record is None else record.problem or self.store.verify_hash(record)

    def open(self, spec: ModelSpec, component: str, uses: Iterable[EngineUse], device: str) -> OpenEngines:
        """Load a component's engines; they are not deleted or evicted while they are open.

        Raises:
            EngineError: if one is gone, damaged or cannot be loaded; it is not used from then on.
            MemoryError, torch.OutOfMemoryError: if memory runs out.
        """
        from runtime.engines.sessions import open_session

        with ExitStack() as stack:
            sessions = {}
            for use in uses:
                record = self._record(use.id)
                if record is None:
                    raise EngineError("engine.gone", engine=use.id)
                if record.problem is not None:
                    raise EngineError("engine.unusable", engine=use.id, cause=record.problem)
                folder = stack.enter_context(self.store.using(use.id))
                weights = _weights(spec, component, use, device)
                try:
                    session = open_session(folder, record, device=device, weights=weights)
                except EngineError as error:
                    self.store.report_problem(record, error.fact)
                    raise
                stack.callback(session.close)
                sessions[use.program] = session
            return OpenEngines(sessions, stack.pop_all())

    def _record(self, engine_id: str) -> EngineRecord | None:
        return next((record for record in self.store.index() if record.id == engine_id), None)

    def _offer(
        self,
        builder: Builder,
        spec: ModelSpec,
        component: str,
        latent: LatentSize,
        device: str,
        index: list[EngineRecord],
    ) -> EngineOffer:
        problem = builder.unavailable(self.machine)
        uses: list[EngineUse] = []
        needs: list[BuildNeeds] = []
        missing: Fact | None = None
        misfit: Fact | None = None
        build_time = 0.0
        seconds = pytorch_seconds = 0.0
        file_bytes = 0
        for program in spec.programs[component]:
            size = _size(program, latent)
            profile = _profile(builder.name, program, spec, size, device)
            precision = builder.default_precision(program, self.machine, device)
            sizes = (profile.min, profile.opt, profile.max)
            key = self._key(builder, spec, component, program, sizes, precision, device)
            found = find(index, key, size)
            use = EngineUse(
                id=key.digest(),
                program=program,
                builder=builder.name,
                precision=precision,
                profile=sizes,
                build=found is None,
            )
            if found is None:
                needs.append(builder.needs(spec, program, profile))
                build_time += build_seconds(spec, component, program, builder.name, profile.opt, index)
                if missing is None:
                    missing, misfit = self._why(key, spec, component)
            else:
                use = use.replace(id=found.id)
                calls = latent[0] - 1 if program == "vae_next" else 1
                seconds += calls * found.seconds_per_call
                pytorch_seconds += calls * found.pytorch_seconds_per_call
                file_bytes += found.file_bytes
            uses.append(use)
        room = self._no_room(needs) if problem is None and needs else None
        if room is not None:
            problem = room
        return EngineOffer(
            backend=builder.backend,
            builder=builder.name,
            uses=tuple(uses),
            missing=missing,
            misfit=misfit,
            problem=problem,
            build_seconds=build_time,
            seconds=seconds,
            pytorch_seconds=pytorch_seconds,
            file_bytes=file_bytes,
        )

    def _refusal(self, builder: Builder) -> EngineOffer:
        """Return an offer that states why a builder does not support a device."""
        problem = builder.unavailable(self.machine) or Fact("planner.needs_gpu")
        return EngineOffer(backend=builder.backend, builder=builder.name, uses=(), problem=problem)

    def _no_room(self, needs: list[BuildNeeds]) -> Fact | None:
        """Return why this machine is too small to build what is missing; None if it is not."""
        machine = self.machine
        if machine.disk_free_bytes is None:
            machine = replace(machine, disk_free_bytes=free_disk_bytes(self.store.folder))
        conflict = build_conflict(
            max(need.ram_bytes for need in needs),
            max(need.vram_bytes for need in needs),
            max(need.disk_bytes for need in needs),
            machine,
        )
        return None if conflict is None else conflict.fact

    def _why(self, key: EngineKey, spec: ModelSpec, component: str) -> tuple[Fact, Fact | None]:
        """Return why there is no engine for `key`: none was built, it is damaged, or the most similar one differs.

        The second fact names the most important difference in a few words.
        """
        existing = self.store.get(key)
        if existing is not None:
            return Fact("engine.existing_unusable", {"cause": existing.problem or existing.detail}), None
        for record, differing in self.store.near(key, spec.vae.scale_factor_spatial):
            similar = (record.key.architecture, record.key.builder) == (key.architecture, key.builder)
            # The other expert's engine is relevant only if both experts run on one engine.
            if similar and (record.component == component or key.weights == SWAPPED):
                reasons = _with_loras(differing, record, spec.loras_of(component))
                return Fact("engine.nearest_differs", {"differences": reasons}), engine_misfit(key, record.key)
        return Fact("engine.none_yet"), None

    def _key(
        self,
        builder: Builder,
        spec: ModelSpec,
        component: str,
        program: str,
        profile: tuple[LatentSize, LatentSize, LatentSize],
        precision: str,
        device: str,
    ) -> EngineKey:
        return builder.key(
            spec,
            component,
            program,
            (ShapeProfile(*profile),),
            precision=precision,
            machine=self.machine,
            device=device,
            notes=self.notes,
        )


def _weights(
    spec: ModelSpec, component: str, use: EngineUse, device: str
) -> Callable[[], Mapping[str, "torch.Tensor"]]:
    def load() -> Mapping[str, "torch.Tensor"]:
        from runtime.engines.programs import load_program

        program = load_program(spec, component, use.program, device=device, dtype=use.precision)
        return program.module.state_dict()

    return load


def _size(program: str, latent: LatentSize) -> LatentSize:
    """Return the latent size that a program is called with for a clip."""
    if program == "text_encoder":
        return (1, 1, 1)
    return (1, *latent[1:]) if program in {"vae_first", "vae_next"} else latent


def _profile(builder: str, program: str, spec: ModelSpec, size: LatentSize, device: str) -> ShapeProfile:
    """Return the sizes that an engine is built for: all of the model's if that costs neither speed nor accuracy.

    OpenVINO is 20 % slower with dynamic sizes (measured), TensorRT optimizes for one size, and Inductor on a CPU runs
    the VAE fast only if it changes the layout of the convolutions' weights for one size.
    """
    if (builder, program, device) != ("inductor", "transformer", "cpu"):
        return ShapeProfile.fixed(size)
    made_for = [
        spec.latent_shape(frames, height, width)[2:] for width, height in spec.sizes for frames in spec.frame_counts
    ]
    defaults = spec.defaults
    best = spec.latent_shape(defaults.frames, defaults.height, defaults.width)[2:]
    low, high = (tuple(limit(axis) for axis in zip(*made_for, best, size, strict=True)) for limit in (min, max))
    return ShapeProfile((low[0], low[1], low[2]), best, (high[0], high[1], high[2]))


def _with_loras(differing: list[Fact], record: EngineRecord, wanted: tuple[LoraUse, ...]) -> list[Fact]:
    """Replace the difference in weights with the difference in LoRAs, if that is the cause."""
    there, here = ([use.identity for use in uses] for uses in (record.loras, wanted))
    if there == here:
        return differing
    names = [f"{use.name} ×{use.weight:g}" for use in record.loras]
    reason = Fact("engine.differs_loras", {"loras": names}) if there else Fact("engine.differs_no_lora")
    return [reason if fact.code == OTHER_WEIGHTS else fact for fact in differing]
