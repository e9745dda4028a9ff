"""Why an engine is no longer what would be built here now: what it was built from, with or on is another."""

from collections.abc import Sequence
from pathlib import Path

from runtime.core.errors import TandemError
from runtime.engines.builders import BUILDERS
from runtime.manager.engine_index import UNREADABLE_KEY, EngineRecord, differences
from runtime.manager.machine import Machine
from runtime.models.spec import ModelSpec


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
    device = "cuda:0" if " sm" in key.device and machine.gpus else "cpu"
    try:
        wanted = BUILDERS[key.builder].key(
            spec,
            record.component,
            key.program,
            key.profiles,
            precision=key.precision,
            machine=machine,
            device=device,
            notes=notes,
        )
    except KeyError:
        return [f"there is no builder {key.builder} any more"]
    except TandemError as error:
        return [error.what.rstrip(".")]
    # Weights that are handed over as the engine is loaded may be any of its architecture.
    return differences(wanted, key, spec.vae.scale_factor_spatial)
