"""Request fields as controls of the web form, generated from their declarations in `core.request`."""

import math
import re
from collections.abc import Sequence
from typing import Any

import gradio as gr

from runtime.core.errors import InvalidRequestError
from runtime.core.images import parse_reference
from runtime.core.loras import MAX_LORAS, Lora, parse_lora, read_loras
from runtime.core.request import COMPONENTS, FIELDS, GenerationRequest
from runtime.core.request_fields import (
    AUTO,
    AttentionKernel,
    Backends,
    Choice,
    ImageFile,
    ImageFiles,
    Loras,
    Name,
    Number,
    Prompt,
    Scales,
    StepCache,
    UpscalerName,
)
from runtime.server.video_requests import by_name

BACKEND = "backend_"
_LONGEST_LORAS = 4_000
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_DECIMAL = re.compile(r"[+-]?[0-9]{1,20}([.,][0-9]{0,20})?")


def control(name: str, **properties: Any) -> gr.components.Component:
    """Create the control of a field.

    Args:
        name: the field's name.
        properties: arguments of the component that depend on the model or the machine.
    """
    declared = FIELDS[name]
    shared: dict[str, Any] = {"label": declared.label, "info": declared.help, "elem_id": f"field-{name}", **properties}
    match declared:
        case Name():
            return gr.Dropdown(filterable=False, **shared)
        case Prompt():
            return gr.Textbox(lines=2, max_lines=6, **shared)
        case Number(placeholder=str(placeholder)) if placeholder:
            # A text field, because Gradio's number fields show 0 if they are empty.
            return gr.Textbox(placeholder=placeholder, max_lines=1, **shared)
        case Number():
            return gr.Number(**({"step": declared.step} if declared.step else {}), **shared)
        case Choice(choices=choices):
            titles = [(title, value) for value, title in choices.items()]
            return gr.Dropdown(filterable=False, **{"choices": titles, "value": titles[0][1], **shared})
        case Loras():
            return gr.Textbox(placeholder="name:0.8", lines=2, max_lines=MAX_LORAS, **shared)
    raise AssertionError(f"the field {name} has no control")


def unchanged(name: str) -> str:
    """Return the stored value of a choice that was not changed."""
    declared = FIELDS[name]
    if isinstance(declared, Choice | StepCache):
        return next(iter(declared.choices))
    return AUTO if isinstance(declared, UpscalerName) else declared.unset


def read(name: str, value: Any) -> Any:
    """Return a control's value as `GenerationRequest` takes it; invalid values are unchanged.

    Raises:
        InvalidRequestError: for LoRAs that are not names.
    """
    match FIELDS[name]:
        case Number(placeholder=str(placeholder), open=unset, whole=whole) if placeholder:
            text = value.strip() if isinstance(value, str) else value
            return unset if text is None or text == "" else _number(text, whole=whole)
        case Number(whole=True):
            return _number(value, whole=True)
        case Loras():
            return _read_loras(value)
        case ImageFiles():
            return value.splitlines() if isinstance(value, str) else value
        case ImageFile():
            return None if value == "" else value
    return value


def shown(name: str, stored: Any) -> Any:
    """Return the control's value for a stored one, of a form or a request; `None` if the control cannot show it."""
    declared = FIELDS[name]
    if isinstance(declared, Prompt):
        return stored if isinstance(stored, str) else None
    if isinstance(declared, Choice) and not isinstance(declared, AttentionKernel):
        return _choice(stored, tuple(declared.choices))
    if isinstance(declared, Loras):
        return loras_text(stored)
    if isinstance(declared, Number) and not declared.placeholder:
        return stored if isinstance(stored, int | float) and math.isfinite(stored) else None
    try:
        value = getattr(GenerationRequest(**{"prompt": "none", name: read(name, stored)}), name)
    except InvalidRequestError:
        value = GenerationRequest.model_fields[name].default
    if isinstance(declared, AttentionKernel | StepCache | UpscalerName):
        return value
    if isinstance(declared, ImageFiles | Scales):
        return stored_text(name, value)
    if isinstance(declared, ImageFile):
        return value or ""
    return "" if value in (None, AUTO) else f"{value:.17g}" if isinstance(value, int) else f"{value:.12g}"


def stored_text(name: str, value: Any) -> str:
    """Return the text of a hidden control for the value of its field; that of several files has one on each line."""
    if isinstance(FIELDS[name], Scales):
        return ", ".join(f"{scale:.12g}" for scale in value)
    return "\n".join(value) if isinstance(value, tuple) else value or ""


def shown_backends(stored: Any) -> dict[str, str]:
    """Return the value of each backend's control for the stored backends of a request."""
    try:
        request = GenerationRequest(prompt="none", backends=stored)
    except InvalidRequestError:
        return {f"{BACKEND}{name}": AUTO for name in COMPONENTS}
    return {f"{BACKEND}{name}": request.backend(name) for name in COMPONENTS}


def shown_backend(stored: Any) -> str | None:
    """Return the value of one backend's control for the stored value of that control."""
    declared = FIELDS["backends"]
    assert isinstance(declared, Backends)
    return _choice(stored, tuple(declared.choices))


def loras_text(stored: Any) -> str:
    """Return stored LoRAs of a form or a request, one on each line; empty for other values."""
    if isinstance(stored, str):
        return stored[:_LONGEST_LORAS]
    try:
        return "\n".join(str(lora) for lora in read_loras(stored)) if stored else ""
    except InvalidRequestError:
        return ""


def check_copies(request: GenerationRequest) -> None:
    """Check that a request names images and videos by their copies; a page cannot open files of its choice.

    Raises:
        InvalidRequestError: for a path.
    """
    for field, file in request.files:
        if parse_reference(file) is None:
            raise InvalidRequestError(field, "form.image_is_path", file=file[:60])


def _number(value: Any, *, whole: bool) -> Any:
    """Return the number in a text, with a decimal point or comma; other values are unchanged."""
    if not isinstance(value, str):
        return value
    if whole:
        return int(value) if _INTEGER.fullmatch(value) else value
    return float(value.replace(",", ".")) if _DECIMAL.fullmatch(value) else value


def _read_loras(value: Any) -> tuple[Lora, ...]:
    if value is None:
        return ()
    if not isinstance(value, str) or len(value) > _LONGEST_LORAS:
        raise InvalidRequestError("loras", "form.loras_not_text")
    return by_name(read_loras([parse_lora(line.strip()) for line in value.splitlines() if line.strip()]))


def _choice(stored: Any, choices: Sequence[str]) -> str | None:
    if not isinstance(stored, str):
        return None
    return stored if stored in choices else choices[0]
