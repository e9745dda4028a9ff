"""Why an engine is no longer what would be built here now: what it was built from, with or on is another."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from runtime.core.errors import TandemError
from runtime.engines.builders import BUILDERS
from runtime.engines.identity import device_like
from runtime.engines.imported.offering import key_here
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec
from runtime.planner.engine_index import IMPORTED, UNREADABLE_KEY, EngineKey, EngineRecord, differences


def why_stale(
    record: EngineRecord, models: Sequence[ModelSpec], machine: Machine, notes: Path | None = None
) -> list[str]:
    """Return what differs from the engine that this machine would build in its place, a phrase each.

    Empty for an engine that is of use here. Sizes and precision are taken as they are: other ones are other engines.

    Args:
        models: those at hand, the one that it was built from among them.
        notes: see `identity.program_key_parts`.
    """
    key = record.key
    if key == UNREADABLE_KEY:
        return []
    spec = next((spec for spec in models if spec.name == record.model), None)
    if spec is None or record.component not in spec.component_names:
        return [f"the model {record.model or 'it was built from'} is not here"]
    if key.builder != IMPORTED and key.builder not in BUILDERS:
        return [f"there is no builder {key.builder} any more"]
    spec = replace(spec, loras=record.loras)
    try:
        wanted = _wanted(record, spec, machine, device_like(key.device, machine), notes)
    except TandemError as error:
        return [error.what.rstrip(".")]
    return differences(wanted, key, spec.vae.scale_factor_spatial)


def _wanted(record: EngineRecord, spec: ModelSpec, machine: Machine, device: str, notes: Path | None) -> EngineKey:
    """Return the key of the engine that would be in its place now; of one made elsewhere, of it imported again."""
    key = record.key
    if key.builder == IMPORTED:
        return key_here(key, spec, record.component, machine, device, notes)
    return BUILDERS[key.builder].key(
        spec,
        record.component,
        key.program,
        key.profiles,
        precision=key.precision,
        machine=machine,
        device=device,
        notes=notes,
    )
