"""Base of the immutable pydantic models that are stored or sent between processes."""

from typing import Any

from pydantic import BaseModel, ConfigDict
from typing_extensions import Self


class FrozenModel(BaseModel):
    """A model whose fields cannot be set; unknown fields are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other values for some fields, as `dataclasses.replace` does; they are not validated."""
        unknown = changes.keys() - type(self).model_fields.keys()
        assert not unknown, f"{type(self).__name__} has no {', '.join(unknown)}"
        copy = self.model_copy(update=changes)
        for cached in (
            copy.__dict__.keys() - type(self).model_fields.keys()
        ):  # results of `cached_property` for the old values
            del copy.__dict__[cached]
        return copy
