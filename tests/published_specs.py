"""Specs of the published models at full size, without weights."""

from dataclasses import replace
from pathlib import Path

from runtime.models.catalogue import look_up
from runtime.models.spec import ModelSpec

# By the names that the measurements use.
_PUBLISHED = {
    "wan2.1-1.3b": "wan2.1-t2v-1.3b",
    "wan2.2-a14b": "wan2.2-t2v-a14b",
    "wan2.2-ti2v-5b": "wan2.2-ti2v-5b",
}


def spec(model: str) -> ModelSpec:
    """Return the spec of one of `_PUBLISHED` for videos without images, marked as downloaded."""
    return replace(look_up(_PUBLISHED[model], Path("none")), is_downloaded=True).for_text()
