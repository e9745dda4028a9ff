"""The imported engines that a job may use. No torch.

An engine that was not found equal to the model's own weights on this machine is never offered: a file does not state
whose weights it holds, and others give another picture or noise.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from runtime.core.facts import Fact
from runtime.core.plan import EngineUse, LatentSize
from runtime.engines.identity import device_text, program_key_parts, runnable_programs, versions_of
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec
from runtime.planner.engine_index import IMPORTED, EngineKey, EngineRecord, ShapeProfile
from runtime.planner.engine_offers import EngineOffer

# The entry of `EngineKey.options` that states whether the adapters are exact.
EXACT = "exact"


def imported_engines(
    index: Iterable[EngineRecord],
    spec: ModelSpec,
    component: str,
    machine: Machine,
    device: str,
    notes: Path | None,
) -> list[EngineRecord]:
    """Return the imported engines that are verified to hold a component's weights and run on this machine.

    Exact ones come first, then the fastest.

    Args:
        notes: see `identity.program_key_parts`.
    """
    programs = runnable_programs(spec, component)
    found = []
    for record in index:
        key = record.key
        if key.builder != IMPORTED or key.program not in programs or not record.usable:
            continue
        if key == key_here(key, spec, component, machine, device, notes):
            found.append(record)
    return sorted(found, key=lambda record: (not _exact(record), record.seconds_per_call, record.id))


def key_here(
    key: EngineKey, spec: ModelSpec, component: str, machine: Machine, device: str, notes: Path | None
) -> EngineKey:
    """Return the key that an imported engine must have to replace a component on this machine now.

    Sizes, precision and adapters are those of the file. The weights are those that it was compared with.

    Raises:
        TandemError: if the model's files or the device cannot be read.
    """
    architecture, weights = program_key_parts(spec, component, key.program, notes)
    return replace(
        key,
        architecture=architecture,
        weights=weights,
        versions=versions_of(*(name for name, _ in key.versions)),
        device=device_text(machine, device),
        system=machine.system,
    )


def served_sizes(program: str, profiles: Sequence[ShapeProfile], spec: ModelSpec) -> Fact:
    """Return the sizes that an engine serves, in pixels and frames."""
    if program == "text_encoder":
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
            sizes.append(Fact("engine.clip_range", {"low": low, "high": high}))
    return Fact("engine.served_sizes", {"sizes": sizes})


def offers_with(
    built: Sequence[EngineOffer], records: Sequence[EngineRecord], spec: ModelSpec, latent: LatentSize
) -> list[EngineOffer]:
    """Return all offers: first those of the builders, which are for the requested size.

    An imported engine of another size is mentioned in the offers of its backend that have no engine yet.
    """
    offers = list(built)
    for record in records:
        profile = next((profile for profile in record.key.profiles if serves(record, profile, latent)), None)
        if profile is not None:
            offers.append(_offer(record, profile))
            continue
        sizes = served_sizes(record.key.program, record.key.profiles, spec)
        offers = [
            replace(offer, missing=Fact("engine.missing_but_imported", {"missing": offer.missing, "sizes": sizes}))
            if offer.backend == record.key.backend and offer.missing
            else offer
            for offer in offers
        ]
    return offers


def serves(record: EngineRecord, profile: ShapeProfile, latent: LatentSize) -> bool:
    """Return whether an engine takes clips of a size; a text encoder does not depend on it."""
    return record.key.program == "text_encoder" or profile.serves(latent)


def _exact(record: EngineRecord) -> bool:
    return dict(record.key.options).get(EXACT) == "yes"


def _offer(record: EngineRecord, profile: ShapeProfile) -> EngineOffer:
    key = record.key
    use = EngineUse(
        id=record.id,
        program=key.program,
        builder=IMPORTED,
        precision=key.precision,
        profile=(profile.min, profile.opt, profile.max),
    )
    # Without a speed it is used only if its backend is requested.
    exact = _exact(record)
    return EngineOffer(
        backend=key.backend,
        builder=IMPORTED,
        uses=(use,),
        problem=Fact("engine.import_not_rebuilt"),
        seconds=record.seconds_per_call if exact else 0.0,
        pytorch_seconds=record.pytorch_seconds_per_call if exact else 0.0,
    )
