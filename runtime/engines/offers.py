"""Offers the planner the engines that a component could run on: built ones, imported ones, and those to build.

Imports no torch. An engine that was not found equal to the model's own weights on this machine is never offered.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import NamedTuple

from runtime.core.facts import Fact
from runtime.core.loras import LoraUse
from runtime.core.plan import EngineRef, LatentSize, is_sound_block
from runtime.engines.builders import BUILDERS, Builder, BuildNeeds, builders_for
from runtime.engines.key_parts import TOKENS_OPTION, imported_key, runnable_programs
from runtime.engines.store import EngineStore
from runtime.machine.probe import Machine, free_disk_bytes
from runtime.models.spec import FRAME_PROGRAMS, VAE_ENCODER, ModelSpec, is_transformer
from runtime.models.vae_groups import GROUP_PROGRAMS, calls_of
from runtime.planner.choice.engine_index import (
    IMPORTED,
    STEPS,
    SWAPPED,
    EngineKey,
    EngineRecord,
    ShapeProfile,
    find,
    serves_any_clip,
)
from runtime.planner.choice.engine_offers import EngineOffer
from runtime.planner.choice.key_differences import OTHER_WEIGHTS, misfit
from runtime.planner.constraints import build_conflict
from runtime.planner.forecast import build_seconds
from runtime.planner.memory_model import call_flops

# The entry of `EngineKey.options` that states whether an imported engine's adapters are exact.
EXACT = "exact"
# Builders of TensorRT plans with several optimization profiles.
_PROFILED = frozenset({"onnx_tensorrt", "tensorrt_rtx"})
# Transformers of more parameters run on block engines on a GPU: one engine of all blocks takes gigabytes of disk and
# memory for each size and LoRA.
_MOST_WHOLE_PARAMETERS = 1_000_000_000


class _Engine(NamedTuple):
    """An engine that a component could run on; without a record it is not built."""

    use: EngineRef
    profile: ShapeProfile
    key: EngineKey
    record: EngineRecord | None


@dataclass(frozen=True)
class ModelOffers:
    """The offers for one model, as `planner.resolve.resolve` takes them. Reads the library once.

    Attributes:
        cache_dir: see `key_parts.weights_digest`.
    """

    spec: ModelSpec
    store: EngineStore
    machine: Machine
    cache_dir: Path | None

    def __call__(self, component: str, latent: LatentSize, device: str) -> list[EngineOffer]:
        """Return the offers for a component, those for the requested size first.

        An imported engine of another size is mentioned in the offers of its backend that have no engine yet.

        Args:
            latent: see `ExecutionPlan.engine_size`.
        """
        owner = self.spec.owner_of(component)
        if owner is not self.spec:
            return replace(self, spec=owner)(component, latent, device)
        if component == VAE_ENCODER and (self.spec.video is not None or self.spec.control_input is not None):
            problem = Fact("planner.no_video_engines")
            return [
                EngineOffer(backend=builder.backend, builder=builder.name, engines=(), problem=problem)
                for builder in builders_for(device)
                if builder.kind != "blocks"
            ]
        builders = _in_order(builders_for(device), self.spec, component, device)
        names = {builder.name for builder in builders}
        rest = [builder for name, builder in BUILDERS.items() if name not in names]
        offers = [
            *(self._offer(builder, component, latent, device) for builder in builders),
            *(self._unsupported(builder) for builder in rest if builder.programs(self.spec, component)),
        ]
        for record in imported_engines(self._index, self.spec, component, self.machine, device, self.cache_dir):
            profile = next((candidate for candidate in record.key.profiles if _serves(record, candidate, latent)), None)
            if profile is not None:
                size = _size(record.key.program, self.spec, latent) or latent
                offers.append(_imported(record, profile, _scale(record, self.spec, component, size)))
                continue
            sizes = served_sizes(record.key.program, record.key.profiles, self.spec)
            offers = [
                replace(offer, missing=Fact("engine.missing_but_imported", {"missing": offer.missing, "sizes": sizes}))
                if offer.backend == record.key.backend and offer.missing
                else offer
                for offer in offers
            ]
        return offers

    @cached_property
    def _index(self) -> list[EngineRecord]:
        return self.store.index()

    def key(self, builder: Builder, component: str, use: EngineRef, device: str) -> EngineKey:
        """Return the key of the engine that a builder would build now for the program, sizes and precision of `use`."""
        if use.program in FRAME_PROGRAMS:
            profiles = frame_profiles(builder.name, use.profile[2])
        else:
            profiles = (ShapeProfile(*use.profile),)
        return builder.key(
            self.spec,
            component,
            use.program,
            profiles,
            precision=use.precision,
            machine=self.machine,
            device=device,
            cache_dir=self.cache_dir,
        )

    def _offer(self, builder: Builder, component: str, latent: LatentSize, device: str) -> EngineOffer:
        sized = [
            (self._engine(builder, component, program, size, device), size)
            for program in builder.programs(self.spec, component)
            if (size := _size(program, self.spec, latent)) is not None
        ]
        engines = [engine for engine, _ in sized]
        absent = [engine for engine in engines if engine.record is None]
        missing, nearest = self._why_missing(absent[0].key, component) if absent else (None, None)
        problem = builder.unavailable(self.machine)
        if problem is None and absent:
            problem = self._why_not_built(builder, component, absent)
        scales = {
            engine.record.id: _scale(engine.record, self.spec, component, size)
            for engine, size in sized
            if engine.record is not None
        }
        built = [
            (engine_calls(engine.use, self.spec, latent) * scales[engine.record.id], engine.record)
            for engine in engines
            if engine.record is not None
        ]
        seconds = [calls * record.seconds_per_call for calls, record in built]
        building = (
            build_seconds(self.spec, component, engine.use.program, builder.name, engine.profile.opt, self._index)
            for engine in absent
        )
        return EngineOffer(
            backend=builder.backend,
            builder=builder.name,
            engines=tuple(engine.use for engine in engines),
            missing=missing,
            misfit=nearest,
            problem=problem,
            build_seconds=sum(building, 0.0),
            seconds=sum(seconds) if all(seconds) else 0.0,
            baselines=_added(
                [{path: calls * duration for path, duration in record.baselines.items()} for calls, record in built]
            ),
            file_bytes=sum(record.file_bytes for _, record in built),
            in_blocks=builder.kind == "blocks",
            # A CPU gains nothing from engines that read weights as inputs.
            on_request=builder.on_request(component, device),
            scaled=any(scale != 1.0 for scale in scales.values()),
        )

    def _engine(self, builder: Builder, component: str, program: str, size: LatentSize, device: str) -> _Engine:
        """Return the engine of a builder for a program at a latent size, built or not."""
        if program in FRAME_PROGRAMS:
            profile = frame_profiles(builder.name, size)[-1]
            precision = frame_precision(builder, self.spec, program, self.machine, device)
        else:
            profile = _profile(builder.name, program, self.spec, size, device)
            precision = builder.default_precision(self.spec, program, self.machine, device)
        use = EngineRef(
            id="",
            program=program,
            builder=builder.name,
            precision=precision,
            profile=(profile.min, profile.opt, profile.max),
        )
        key = self.key(builder, component, use, device)
        record = find(self._index, key, size)
        use = use.replace(
            id=key.digest() if record is None else record.id,
            build=record is None,
            tokens=int(dict(key.options).get(TOKENS_OPTION, 0)),
            context_bytes=0 if record is None else record.context_bytes,
        )
        return _Engine(use, profile, key, record)

    def _why_not_built(self, builder: Builder, component: str, absent: Sequence[_Engine]) -> Fact | None:
        """Return why engines cannot be built: the library's limit, or too small a machine; `None` if they can."""
        conflicts = (self.store.limit_conflict(self.spec, component, engine.key) for engine in absent)
        needs = [builder.needs(self.spec, engine.use.program, engine.profile) for engine in absent]
        return next(filter(None, conflicts), None) or self._too_small(needs)

    def _unsupported(self, builder: Builder) -> EngineOffer:
        """Return an offer that states why a builder does not support a device."""
        problem = builder.unavailable(self.machine) or Fact("planner.needs_gpu")
        in_blocks = builder.kind == "blocks"
        return EngineOffer(
            backend=builder.backend, builder=builder.name, engines=(), problem=problem, in_blocks=in_blocks
        )

    def _too_small(self, needs: list[BuildNeeds]) -> Fact | None:
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

    def _why_missing(self, key: EngineKey, component: str) -> tuple[Fact, Fact | None]:
        """Return why there is no engine for `key`: none was built, it is damaged, or the most similar one differs.

        The second fact names the most important difference in a few words.
        """
        existing = self.store.get(key)
        if existing is not None:
            return Fact("engine.existing_unusable", {"cause": existing.problem or existing.detail}), None
        for record, differing in self.store.similar(key, self.spec.vae.scale_factor_spatial):
            similar = (record.key.architecture, record.key.builder) == (key.architecture, key.builder)
            # The other expert's engine is relevant only if both experts run on one engine.
            if similar and (record.component == component or key.weights == SWAPPED):
                reasons = _with_loras(differing, record, self.spec.loras_of(component))
                return Fact("engine.nearest_differs", {"differences": reasons}), misfit(key, record.key)
        return Fact("engine.none_yet"), None


def frame_profiles(builder: str, full: LatentSize) -> tuple[ShapeProfile, ...]:
    """Return the sizes that an engine of single frames is built for: full batches and, where it can, smaller ones.

    Args:
        full: (frames, height, width) of a full batch.
    """
    whole = ShapeProfile.fixed(full)
    return (whole, ShapeProfile((1, *full[1:]), full, full)) if builder in _PROFILED else (whole,)


def frame_precision(builder: Builder, spec: ModelSpec, program: str, machine: Machine, device: str) -> str:
    """Return the precision of engines of single frames: float16 on a GPU, whose error is a sixth of bfloat16's.

    An overflow is found when the engine is verified.
    """
    return builder.default_precision(spec, program, machine, device) if device == "cpu" else "float16"


def _scale(record: EngineRecord, spec: ModelSpec, component: str, size: LatentSize) -> float:
    """Return by which factor a call at a latent size takes longer than at the size that an engine was measured at."""
    serving = next((profile for profile in record.key.profiles if profile.serves(size)), None)
    if serves_any_clip(record.key.program) or serving is None or serving.opt == size:
        return 1.0
    return call_flops(spec, component, size) / call_flops(spec, component, serving.opt)


def engine_calls(use: EngineRef, spec: ModelSpec, latent: LatentSize) -> float:
    """Return how many calls of an engine, at the size it was measured at, one call of its component takes."""
    if use.program in {"vae_next", "vae_encoder_next"}:
        return latent[0] - 1
    if use.program in GROUP_PROGRAMS:
        return calls_of(use.program, _decoded(spec, latent))
    if not use.tokens:
        return 1
    if is_sound_block(use.program):
        # It was measured with about as many tokens as a sound has: their number changes its duration little.
        return spec.blocks
    patches = spec.transformer.patch_size
    tokens = prod(size // patch for size, patch in zip(latent, patches, strict=True))
    return tokens / use.tokens * spec.blocks


def imported_engines(
    index: Iterable[EngineRecord],
    spec: ModelSpec,
    component: str,
    machine: Machine,
    device: str,
    cache_dir: Path | None,
) -> list[EngineRecord]:
    """Return the imported engines that are verified to hold a component's weights and run on this machine.

    Exact ones come first, then the fastest.

    Args:
        cache_dir: see `key_parts.weights_digest`.
    """
    programs = runnable_programs(spec, component)
    records = [
        record
        for record in index
        if record.key.builder == IMPORTED
        and record.key.program in programs
        and record.usable
        and record.key == imported_key(record.key, spec, component, machine, device, cache_dir)
    ]
    return sorted(records, key=lambda record: (not _is_exact(record), record.seconds_per_call, record.id))


def served_sizes(program: str, profiles: Sequence[ShapeProfile], spec: ModelSpec) -> Fact:
    """Return the sizes that an engine serves, in pixels and frames."""
    if serves_any_clip(program):
        return Fact("engine.any_clip")
    scale, temporal = spec.vae.scale_factor_spatial, spec.vae.scale_factor_temporal

    def clip(latent: LatentSize) -> Fact:
        frames, height, width = latent
        size = {"width": width * scale, "height": height * scale}
        return Fact("engine.clip", {**size, "frames": temporal * (frames - 1) + 1})

    sizes = []
    for profile in profiles:
        low, high = clip(profile.min), clip(profile.max)
        if low == high:
            sizes.append(low)
        elif profile.min[1:] == profile.max[1:]:
            sizes.append(Fact("engine.clip_lengths", {**high.data, "fewest": low.data["frames"]}))
        else:
            sizes.append(Fact("engine.range", {"low": low, "high": high}))
    return Fact("engine.served_sizes", {"sizes": sizes})


def _imported(record: EngineRecord, profile: ShapeProfile, scale: float) -> EngineOffer:
    use = EngineRef(
        id=record.id,
        program=record.key.program,
        builder=IMPORTED,
        precision=record.key.precision,
        profile=(profile.min, profile.opt, profile.max),
        context_bytes=record.context_bytes,
    )
    # Without a speed it is used only if its backend is requested.
    exact = _is_exact(record)
    return EngineOffer(
        backend=record.key.backend,
        builder=IMPORTED,
        engines=(use,),
        problem=Fact("engine.import_not_rebuilt"),
        seconds=scale * record.seconds_per_call if exact else 0.0,
        baselines={path: scale * seconds for path, seconds in record.baselines.items()} if exact else {},
        scaled=scale != 1.0,
        file_bytes=record.file_bytes,
    )


def _added(baselines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Add seconds by path; a path that was not measured for all engines is left out."""
    paths = set.intersection(*map(set, baselines)) if baselines else set()
    return {path: sum(baseline[path] for baseline in baselines) for path in sorted(paths)}


def _is_exact(record: EngineRecord) -> bool:
    return dict(record.key.options).get(EXACT) == "yes"


def _serves(record: EngineRecord, profile: ShapeProfile, latent: LatentSize) -> bool:
    """Return whether an engine takes clips of a size."""
    return serves_any_clip(record.key.program) or profile.serves(latent)


def _size(program: str, spec: ModelSpec, latent: LatentSize) -> LatentSize | None:
    """Return the latent size that a program is called with for a clip; `None` if it is not called."""
    if serves_any_clip(program):
        return (1, 1, 1)
    if program in GROUP_PROGRAMS:
        return (GROUP_PROGRAMS[program], *latent[1:]) if calls_of(program, _decoded(spec, latent)) else None
    return (1, *latent[1:]) if program in STEPS else latent


def _decoded(spec: ModelSpec, latent: LatentSize) -> tuple[int, ...]:
    """Return the latent frames that are decoded at once: of a clip, or of the windows of sections."""
    return latent[:1] if spec.section is None else spec.section.windows


def _profile(builder: str, program: str, spec: ModelSpec, size: LatentSize, device: str) -> ShapeProfile:
    """Return the sizes that an engine is built for: all of the model's if that costs neither speed nor accuracy.

    OpenVINO is 20 % slower with dynamic sizes (measured), TensorRT optimizes for one size, and Inductor on a CPU runs
    the VAE fast only if it changes the layout of the convolutions' weights for one size.
    """
    if (builder, program, device) != ("inductor", "transformer", "cpu"):
        return ShapeProfile.fixed(size)
    trained = [
        spec.latent_shape(frames, height, width)[2:] for width, height in spec.sizes for frames in spec.frame_counts
    ]
    defaults = spec.defaults
    best = spec.latent_shape(defaults.frames, defaults.height, defaults.width)[2:]
    low, high = (tuple(limit(axis) for axis in zip(*trained, best, size, strict=True)) for limit in (min, max))
    return ShapeProfile((low[0], low[1], low[2]), best, (high[0], high[1], high[2]))


def _in_order(builders: Sequence[Builder], spec: ModelSpec, component: str, device: str) -> list[Builder]:
    """Return the builders with programs for a component; of those of one backend, the better kind comes first."""
    able = [builder for builder in builders if builder.programs(spec, component)]
    backends = list(dict.fromkeys(builder.backend for builder in able))
    large = is_transformer(component) and spec.parameters[component] > _MOST_WHOLE_PARAMETERS
    first = "blocks" if large and device != "cpu" else "component"
    return sorted(able, key=lambda builder: (backends.index(builder.backend), builder.kind != first))


def _with_loras(differing: list[Fact], record: EngineRecord, loras: tuple[LoraUse, ...]) -> list[Fact]:
    """Replace the difference in weights with the difference in LoRAs, if that is the cause."""
    stored, here = ([use.identity for use in uses] for uses in (record.loras, loras))
    if stored == here:
        return differing
    names = [f"{use.name} ×{use.weight:g}" for use in record.loras]
    reason = Fact("engine.differs_loras", {"loras": names}) if stored else Fact("engine.differs_no_lora")
    return [reason if fact.code == OTHER_WEIGHTS else fact for fact in differing]
