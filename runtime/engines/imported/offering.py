"""Which imported engines a job may take. Pure but for the weights' digests: no torch.

One that was not found equal to the model's own weights on this machine is never offered, whether it was asked for or
not: nothing in a file says whose weights it holds, and others give another picture or noise.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from runtime.core.plan import EngineUse, LatentSize
from runtime.engines.identity import device_text, program_key_parts, runnable_programs, versions_of
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec
from runtime.planner.engine_index import IMPORTED, EngineKey, EngineRecord
from runtime.planner.engine_offers import EngineOffer
from runtime.planner.shapes import ShapeProfile

# What an engine's `options` say of adapters that lose something.
EXACT = "exact"
_NOT_BUILT = "it was made elsewhere, so it is not built here"
_REMEDY = "Import it again where it is gone."


def imported_engines(
    index: Iterable[EngineRecord],
    spec: ModelSpec,
    component: str,
    machine: Machine,
    device: str,
    notes: Path | None,
) -> list[EngineRecord]:
    """Return the imported engines that hold a component's weights, as was proven, and run here.

    Those that lose nothing come first, then the fastest.

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
    """Return the key that an imported engine must have to run here now, in the place of a component.

    What the file itself fixed stays: sizes, precision, adapters. Weights are those that it was compared with.

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


def served(program: str, profiles: Sequence[ShapeProfile], spec: ModelSpec) -> str:
    """Return the sizes that an engine serves, in pixels and frames."""
    if program == "text_encoder":
        return "clips of any size"
    scale, temporal = spec.vae.scale_factor_spatial, spec.vae.scale_factor_temporal
    words = []
    for profile in profiles:
        (fewest, *small), (most, *large) = profile.min, profile.max
        # As people ask for a size: width first.
        low, high = (f"{width * scale}x{height * scale}" for height, width in (small, large))
        frames = [temporal * (latent - 1) + 1 for latent in (fewest, most)]
        count = f"{frames[0]} to {frames[1]} frames" if fewest != most else f"{frames[0]} frames"
        words.append(f"{low if low == high else f'{low} to {high}'}, {count}")
    return "; or ".join(words)


def offers_with(
    built: Sequence[EngineOffer], records: Sequence[EngineRecord], spec: ModelSpec, latent: LatentSize
) -> list[EngineOffer]:
    """Return all offers: those of the builders first, which were made for the size that is asked for.

    An imported engine of another size is named where its backend has nothing that is ready.
    """
    offers = list(built)
    for record in records:
        profile = next((profile for profile in record.key.profiles if serves(record, profile, latent)), None)
        if profile is not None:
            offers.append(_offer(record, profile))
            continue
        aside = f"the imported one serves {served(record.key.program, record.key.profiles, spec)}"
        offers = [
            replace(offer, missing=f"{offer.missing}; {aside}")
            if offer.backend == record.key.backend and offer.missing
            else offer
            for offer in offers
        ]
    return offers


def serves(record: EngineRecord, profile: ShapeProfile, latent: LatentSize) -> bool:
    """Whether an engine takes clips of a size; a text encoder sees none."""
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
    # Without a speed it is taken only where its backend is asked for.
    unasked = _exact(record)
    return EngineOffer(
        backend=key.backend,
        builder=IMPORTED,
        uses=(use,),
        problem=_NOT_BUILT,
        remedy=_REMEDY,
        seconds=record.seconds_per_call if unasked else 0.0,
        pytorch_seconds=record.pytorch_seconds_per_call if unasked else 0.0,
    )
