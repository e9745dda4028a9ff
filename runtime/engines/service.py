"""The engines of this machine, as a job needs them: what they offer the planner, building one, opening one."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.core.cancel import Cancel
from runtime.core.errors import EngineError
from runtime.core.loras import LoraUse
from runtime.core.plan import EngineUse, LatentSize
from runtime.core.settings import Settings
from runtime.engines.build import BuildRequest, EmitProgress, build_engine
from runtime.engines.builders import BUILDERS, Builder, BuildNeeds
from runtime.engines.closeable import Closing
from runtime.engines.imported.offering import imported_engines, offers_with
from runtime.engines.store import EngineStore
from runtime.machine.probe import Machine, free_disk_bytes
from runtime.models.spec import ModelSpec
from runtime.planner.build_limits import no_room
from runtime.planner.build_time import build_seconds
from runtime.planner.constraints import Conflict
from runtime.planner.engine_index import IMPORTED, OTHER_WEIGHTS, SWAPPED, EngineKey, EngineRecord, find
from runtime.planner.engine_index import misfit as engine_misfit
from runtime.planner.engine_offers import EngineOffer, Offers
from runtime.planner.shapes import ShapeProfile

if TYPE_CHECKING:
    import torch

    from runtime.engines.sessions import Session

# What runs a component fastest as a rule; what is measured here counts for more.
_PREFERRED = {
    "cpu": ("onnxruntime", "inductor"),
    "cuda": ("onnx_tensorrt", "torch_tensorrt", "inductor", "onnxruntime"),
}
_NONE_YET = "there is none yet"
_BYTES_PER_GB = 1e9


class OpenEngines(Closing):
    """The sessions of one component, by program. Close it, or use it as a context manager."""

    def __init__(self, sessions: Mapping[str, "Session"], stack: ExitStack) -> None:
        self._sessions = sessions
        self._stack = stack

    def infer(self, program: str, **inputs: "torch.Tensor") -> dict[str, "torch.Tensor"]:
        """Run one program; see `Session.infer`."""
        return self._sessions[program].infer(**inputs)

    def runs(self, program: str) -> bool:
        """Whether one of the engines is for a program."""
        return program in self._sessions

    def close(self) -> None:
        """Free everything; the engines may be deleted from then on."""
        self._stack.close()


@dataclass(frozen=True)
class EngineService:
    """Engines kept in `store`; `notes` is the folder that remembers the weights' digests."""

    store: EngineStore
    machine: Machine
    notes: Path | None

    @classmethod
    def from_settings(cls, settings: Settings, machine: Machine) -> "EngineService":
        """Return the engines that the settings point at."""
        store = EngineStore(settings.engines_dir, int(settings.engine_cache_gb * _BYTES_PER_GB))
        return cls(store, machine, settings.cache_dir)

    def offers(self, spec: ModelSpec) -> Offers:
        """Return what `planner.resolve.resolve` asks, for one model; the library is read once."""
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
        emit_progress: EmitProgress,
        cancel: Cancel,
        *,
        again: bool = False,
    ) -> EngineRecord:
        """Build one engine, or return it where it is there; see `build.build_engine` for arguments and errors.

        Raises:
            EngineError: too if what is here is not what the plan was made for.
        """
        if use.builder == IMPORTED:
            raise EngineError(f"The engine {use.id} was imported, so it cannot be built here.", "Import it again.")
        key = self._key(BUILDERS[use.builder], spec, component, use.program, use.profile, use.precision, device)
        if key.digest() != use.id:
            raise EngineError(
                f"The engine {use.id} was planned for other weights or other versions of libraries than are here now.",
                "Start again: the plan is made anew then.",
            )
        request = BuildRequest(spec=spec, component=component, key=key, device=device, again=again)
        return build_engine(request, self.store, emit_progress, cancel)

    def problem(self, engine_id: str) -> str | None:
        """Read an engine's files and say what is wrong with them, `None` if nothing is."""
        record = self._record(engine_id)
        return _NONE_YET if record is None else record.problem or self.store.verify_hash(record)

    def open(self, spec: ModelSpec, component: str, uses: Iterable[EngineUse], device: str) -> OpenEngines:
        """Load a component's engines; they are neither deleted nor evicted while they are open.

        Raises:
            EngineError: if one is gone, damaged or cannot be loaded; it is kept out from then on.
            MemoryError, torch.OutOfMemoryError: if memory does not suffice.
        """
        from runtime.engines.sessions import open_session

        with ExitStack() as stack:
            sessions = {}
            for use in uses:
                record = self._record(use.id)
                if record is None or record.problem is not None:
                    why = "gone" if record is None else f"of no use: {record.problem}"
                    raise EngineError(f"The engine {use.id} is {why}.", "Build it anew.")
                folder = stack.enter_context(self.store.using(use.id))
                weights = _weights(spec, component, use, device)
                try:
                    session = open_session(folder, record, device=device, weights=weights)
                except EngineError as error:
                    self.store.report_problem(record, error.what)
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
        missing = misfit = ""
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
                if not missing:
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
            problem = room.reason, room.remedy
        return EngineOffer(
            backend=builder.backend,
            builder=builder.name,
            uses=tuple(uses),
            missing=missing,
            misfit=misfit,
            problem=problem and problem[0],
            remedy=problem[1] if problem else "",
            badge=room.badge if room else "",
            build_seconds=build_time,
            seconds=seconds,
            pytorch_seconds=pytorch_seconds,
            file_bytes=file_bytes,
        )

    def _refusal(self, builder: Builder) -> EngineOffer:
        """Return an offer that says why a builder is not for a device."""
        why, remedy = builder.unavailable(self.machine) or ("it needs an NVIDIA GPU", "Take another backend.")
        return EngineOffer(backend=builder.backend, builder=builder.name, uses=(), problem=why, remedy=remedy)

    def _no_room(self, needs: list[BuildNeeds]) -> Conflict | None:
        """Say why there can be no room here to build what is missing, `None` if there may be."""
        machine = self.machine
        if machine.disk_free_bytes is None:
            machine = replace(machine, disk_free_bytes=free_disk_bytes(self.store.folder))
        return no_room(
            max(need.ram_bytes for need in needs),
            max(need.vram_bytes for need in needs),
            max(need.disk_bytes for need in needs),
            machine,
        )

    def _why(self, key: EngineKey, spec: ModelSpec, component: str) -> tuple[str, str]:
        """Say why there is no engine for `key`: none was built, it is broken, or another differs in something.

        The second is for what else the nearest was built, in a few words.
        """
        there = self.store.get(key)
        if there is not None:
            return f"the one that is there is of no use: {there.problem or there.detail}", ""
        for record, differing in self.store.near(key, spec.vae.scale_factor_spatial):
            alike = (record.key.architecture, record.key.builder) == (key.architecture, key.builder)
            # The other expert's engine says nothing about this one's, unless both run on one.
            if alike and (record.component == component or key.weights == SWAPPED):
                told = _with_loras(differing, record, spec.loras_of(component))
                return f"the nearest was {_listed(told)}", engine_misfit(key, record.key)
        return _NONE_YET, ""

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
    """Return the size that a program is called with for a clip of `latent`."""
    if program == "text_encoder":
        return (1, 1, 1)
    return (1, *latent[1:]) if program in {"vae_first", "vae_next"} else latent


def _profile(builder: str, program: str, spec: ModelSpec, size: LatentSize, device: str) -> ShapeProfile:
    """Return the sizes that an engine is built for: all of the model's where that costs neither speed nor truth.

    OpenVINO is a fifth slower with dynamic sizes (measured), TensorRT tunes for one, and Inductor on a CPU is fast with
    the VAE only where it lays its convolutions out for one size.
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


def _with_loras(differing: list[str], record: EngineRecord, wanted: tuple[LoraUse, ...]) -> list[str]:
    """Say of an engine of other weights with which LoRAs it was built, where that is what differs."""
    there, here = ([use.identity for use in uses] for uses in (record.loras, wanted))
    if there == here or OTHER_WEIGHTS not in differing:
        return differing
    names = " and ".join(f"{use.name} ×{use.weight:g}" for use in record.loras)
    told = f"built with the LoRA {names}" if there else "built without this LoRA"
    return [told if said == OTHER_WEIGHTS else said for said in differing]


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
