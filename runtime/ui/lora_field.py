"""The form's field for LoRAs: one a line, by their names. A page reads no files of its choice."""

from collections.abc import Sequence
from typing import Any

import gradio as gr

from runtime.core.errors import InvalidRequestError
from runtime.core.loras import MAX_LORAS, Lora, parse_lora, read_loras

_LONGEST = 4_000


def control() -> gr.Textbox:
    """Make the field, folded away."""
    with gr.Accordion("LoRAs", open=False, elem_id="loras", elem_classes="fold"):
        return gr.Textbox(
            label="Names",
            placeholder="name:0.8",
            info="From weights/loras in the cache folder, one a line: a name, or name:weight; high= or low= before it "
            "is for one expert. They are added to the transformers as these are loaded.",
            lines=2,
            max_lines=MAX_LORAS,
            elem_id="field-loras",
        )


def read(value: Any) -> tuple[Lora, ...]:
    """Read what the field holds; nothing is none.

    Raises:
        InvalidRequestError: for what is no list of names with weights.
    """
    if value is None:
        return ()
    if not isinstance(value, str) or len(value) > _LONGEST:
        raise InvalidRequestError("loras", "The LoRAs are no text, or too long.", "Write one a line: name:weight.")
    return by_name(read_loras([parse_lora(line.strip()) for line in value.splitlines() if line.strip()]))


def by_name(loras: Sequence[Lora]) -> tuple[Lora, ...]:
    """Return LoRAs that are all given by name.

    Raises:
        InvalidRequestError: for one that is a path.
    """
    for lora in loras:
        if not lora.is_name:
            raise InvalidRequestError(
                "loras",
                f"Here a LoRA is taken by its name, and {lora.file[:60]!r} is a path.",
                "Put the file into weights/loras in the cache folder and give its name, without .safetensors.",
            )
    return tuple(loras)


def shown(stored: Any) -> str:
    """Return stored LoRAs as the field shows them, of a form or of a video's request; nothing for what is neither."""
    if isinstance(stored, str):
        return stored[:_LONGEST]
    try:
        return "\n".join(str(lora) for lora in read_loras(stored)) if stored else ""
    except InvalidRequestError:
        return ""
