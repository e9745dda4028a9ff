"""Reads the names of the tensors in LoRA files by a family's tables of module names. Imports no torch.

    transformer_blocks.3.attn.to_q.lora_A.weight                 diffusers and peft, also below "transformer."
    diffusion_model.double_blocks.3.img_attn.proj.lora_B.weight  the names of the model's own code
    lora_unet_double_blocks_3_img_attn_qkv.lora_down.weight      kohya's scripts and musubi-tuner; with ".alpha"
    lora_transformer_transformer_blocks_3_attn_to_q.lora_up.weight   OneTrainer
    diffusion_model.blocks.3.norm3.diff                          a change of the whole tensor; "diff_b" of its bias

Some programs write underscores for dots, so all names are compared with underscores.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from runtime.models.registry import LoraChange, LoraLayer

_PREFIXES = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
    "lora_unet_",
    "lora_transformer_",
)
# Roles in a module, by the suffix of the tensor's name; see `LoraChange`.
_ROLES = {
    "lora_A.weight": "down",
    "lora_A.default.weight": "down",
    "lora_down.weight": "down",
    "lora_B.weight": "up",
    "lora_B.default.weight": "up",
    "lora_up.weight": "up",
    "lora_B.bias": "bias",
    "diff_b": "bias",
    "diff": "diff",
    "alpha": "alpha",
}
_ROLE = re.compile(rf"(.+)\.({'|'.join(map(re.escape, _ROLES))})")
_STEPS = re.compile(r"(?<!\d)(\d{1,2})[\s_-]?steps?(?![a-z])", re.IGNORECASE)
_MAX_DISTILLED_STEPS = 16

# diffusers' name of a module by its name in files, or its names if one layer in files is several in diffusers.
Names = Mapping[str, str | tuple[str, ...]]


class Blocks(NamedTuple):
    """Numbered blocks with the same modules.

    Attributes:
        original: their name in files, before the number.
        diffusers: their name in diffusers, which files may have, too.
        names: of the modules in a block.
    """

    original: str
    diffusers: str
    names: Names


class LoraNames:
    """A family's names of modules in LoRA files.

    Args:
        blocks: the kinds of blocks.
        outside: names of the modules outside of the blocks.
        swapped: those among the names in files whose halves of rows are in the other order in diffusers.
    """

    def __init__(self, blocks: Collection[Blocks], outside: Names, swapped: Collection[str] = ()) -> None:
        self._outside = _by_name(outside)
        self._blocks = {
            _underscored(name): (kind.diffusers, _by_name(kind.names))
            for kind in blocks
            for name in (kind.original, kind.diffusers)
        }
        self._block = re.compile(rf"({'|'.join(self._blocks)})_([0-9]{{1,4}})_(.+)")
        self._swapped = frozenset(map(_underscored, swapped))

    def change_of(self, tensor: str) -> LoraChange | None:
        """Return the layer and factor of a tensor in a LoRA file; `None` for an unknown layer."""
        name = tensor
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        found = _ROLE.fullmatch(name)
        if found is None:
            return None
        module = _underscored(found[1])
        modules = self._modules(module)
        if modules is None:
            return None
        return LoraChange(LoraLayer(modules, swapped=module in self._swapped), _ROLES[found[2]])

    def _modules(self, name: str) -> tuple[str, ...] | None:
        block = self._block.fullmatch(name)
        if block is None:
            return self._outside.get(name)
        diffusers, names = self._blocks[block[1]]
        modules = names.get(block[3])
        return None if modules is None else tuple(f"{diffusers}.{int(block[2])}.{module}" for module in modules)


def _underscored(name: str) -> str:
    return name.replace(".", "_")


def _by_name(names: Names) -> dict[str, tuple[str, ...]]:
    """Return the modules by both of their names, with underscores."""
    many = {name: (found,) if isinstance(found, str) else found for name, found in names.items()}
    own = {_underscored(module): (module,) for modules in many.values() for module in modules}
    return own | {_underscored(name): modules for name, modules in many.items()}


def distilled_steps(lora: Path, authors: Mapping[re.Pattern[str], int]) -> int | None:
    """Return for how many steps a LoRA was distilled, by its file's or folder's name; `None` if it was not.

    LoRAs from step distillation need few steps and no guidance.

    Args:
        authors: patterns in the names of such LoRAs, in the order they are searched, with the number of steps of those
            that do not state it.
    """
    for text in (lora.stem, lora.parent.name):
        given = _STEPS.search(text)
        number = int(given[1]) if given else next((steps for name, steps in authors.items() if name.search(text)), None)
        if number is not None:
            return number if 0 < number <= _MAX_DISTILLED_STEPS else None
    return None
