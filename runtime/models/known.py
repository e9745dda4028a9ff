"""Published models, whether or not their weights are here: names, repositories and configurations. Reads no file."""

from collections.abc import Iterator
from dataclasses import replace

from runtime.models.registry import KnownModel, families
from runtime.models.spec import ModelSpec

_BYTES_PER_WEIGHT = 4


def known_models() -> Iterator[KnownModel]:
    """Return the published models of every family."""
    return (model for family in families() for model in family.known)


def known_as(name: str) -> KnownModel | None:
    """Return the published model with a name or alias, in upper or lower case."""
    return next((model for model in known_models() if name.strip().lower() in model.names), None)


def published(spec: ModelSpec) -> KnownModel | None:
    """Return the published model that a folder holds, by its name and its architecture."""
    known = known_as(spec.name) or known_as(spec.directory.name)
    return known if known is not None and known.describes(spec) else None


def download_bytes(spec: ModelSpec) -> int:
    """Return the most bytes that a known model's download takes: published weights have at most 4 bytes each."""
    return _BYTES_PER_WEIGHT * spec.total_parameters


def named(spec: ModelSpec) -> ModelSpec:
    """Return a folder's spec with the title, licence and sizes of the published model that it holds, if any.

    Values of its own `tandem.json` take precedence.
    """
    known = known_as(spec.directory.name)
    if known is None or spec.license != "unknown" or not known.describes(spec):
        return spec
    return replace(spec, title=known.title, license=known.license, sizes=known.sizes or spec.sizes)
