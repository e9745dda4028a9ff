"""The form's field for the shift: a number, or nothing for the model's own."""

from collections.abc import Mapping
from typing import Any

import gradio as gr

from runtime.core.errors import InvalidRequestError
from runtime.core.request import AUTO, GenerationRequest
from runtime.models.known import published
from runtime.models.spec import ModelSpec
from runtime.ui.formatting import number


def control(values: Mapping[str, Any]) -> gr.Textbox:
    """Make the field; `values` are those of `model_values`."""
    # Text, because gradio's number fields show 0 where nothing is given.
    return gr.Textbox(**values, label="Shift", placeholder=AUTO, max_lines=1, elem_id="field-shift")


def model_values(spec: ModelSpec) -> dict[str, Any]:
    """Return the properties of the field that follow the model."""
    known = published(spec)
    own = f" ({spec.noise.shift:g} here" if spec.here and spec.noise.setting is not None else ""
    if own and known is not None and known.flow_shift != spec.noise.shift:
        own += f"; the model authors' code takes {known.flow_shift:g}"
    return {
        "value": "",
        "info": "How many steps go into layout and motion (higher) rather than detail (lower). "
        f"Empty: the model's own{own}{')' if own else ''}.",
    }


def read(value: Any) -> Any:
    """Return the number that the field holds, `None` for an empty one, and what is neither to be refused by name."""
    given = value.strip() if isinstance(value, str) else value
    return None if given in ("", None, AUTO) else number(given)


def shown(stored: Any) -> str:
    """Return a stored shift as the field shows it; nothing for the model's own and for what is none."""
    try:
        shift = GenerationRequest(prompt="none", shift=read(stored)).shift
    except InvalidRequestError:
        return ""
    return "" if shift is None else f"{shift:.12g}"
