"""Reads the names of the tensors in LoRA files by a family's tables of module names. Imports no torch.

    transformer_blocks.3.attn.to_q.lora_A.weight                 diffusers and peft, also below "transformer."
    diffusion_model.double_blocks.3.img_attn.proj.lora_B.weight  the names of the model's own code
    lora_unet_double_blocks_3_img_attn_qkv.lora_down.weight      kohya's scripts and musubi-tuner; with ".alpha"
    lora_transformer_transformer_blocks_3_attn_to_q.lora_up.weight   OneTrainer
    transformer_2.blocks.3.attn1.to_q.lora_A.style.weight        an expert, and the name that peft gave the adapter
    diffusion_model.blocks.3.norm3.diff                          a change of the whole tensor; "diff_b" of its bias
    lycoris_blocks_3_self_attn_q.lokr_w1                         LyCORIS: LoKr, and LoHa ("hada_w1_a")

A name is read by its structure: prefixes of programs, block, layer, and the role of the tensor. A prefix is removed
only if the name with it is not that of a layer. Some programs write underscores for dots, so layers are compared with
underscores.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from runtime.core.loras import BOTH, Expert
from runtime.models.registry import LoraChange, LoraLayer

# Before the names of layers: parts of pipelines, and wrappers of PyTorch and peft.
_PREFIX = re.compile(
    r"(?:base_model\.model|model|module|diffusion_model|pipe|dit|unet|net|transformer|(?P<low>transformer_2|low_noise_model)"
    r"|(?P<high>high_noise_model))\."
)
# The same of programs that write underscores for dots; the second is tried where the first leads to no layer.
_JOINED_PREFIXES = (
    re.compile(r"(?:lora|lycoris)_+"),
    re.compile(r"(?:lora|lycoris)_+(?:unet|dit|model|transformer|(?P<low>transformer_2))_+"),
)
# Wrappers of PyTorch, also of single blocks.
_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Roles in a layer, by the last part of the tensor's name; see `LoraChange`.
_ROLES = {
    "lora_A": "down",
    "lora_down": "down",
    "lora_B": "up",
    "lora_up": "up",
    "lora_B.bias": "up_bias",
    "lora_magnitude_vector": "magnitude",
    "dora_scale": "magnitude",
    "diff": "diff",
    "diff_m": "diff",
    "diff_b": "bias",
    "w_norm": "diff",
    "b_norm": "bias",
    "alpha": "alpha",
    **{name: name for name in ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")},
    **{name: name for name in ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")},
}
# peft writes the adapter's name after the part that has one.
_ROLE = re.compile(
    r"(?P<layer>.+)\.(?P<part>lora_(?:A|B|up|down|magnitude_vector)|(?:lokr|hada)_w[12](?:_[ab])?|dora_scale"
    r"|diff(?:_[bm])?|[wb]_norm|alpha)(?:\.(?!weight$|bias$)[^.]+)?(?:\.weight|(?P<bias>\.bias))?"
)
# A change of a block's or the head's modulation, a bare parameter that the tensor's name leaves out.
_MODULATION = "diff_m"
# Kinds of adapters that are not supported, by parts of their tensors' names.
_UNSUPPORTED = {
    "OFT": re.compile(r"\.b?oft_"),
    "IA3": re.compile(r"\.(?:ia3_l|on_input)\b"),
    "VeRA": re.compile(r"\.vera_"),
    "GLoRA": re.compile(r"\.[ab][12]\.weight$"),
    "Tucker": re.compile(r"\.(?:lora_mid|hada_t[12]|lokr_t2)\b"),
}
_STEPS = re.compile(r"(?<!\d)(\d{1,2})[\s_-]?steps?(?![a-z])", re.IGNORECASE)
_MAX_DISTILLED_STEPS = 16

Value = TypeVar("Value", int, float, tuple[float, ...])
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
        """Return the layer, role and expert of a tensor in a LoRA file; `None` for an unknown layer or role."""
        match = _ROLE.fullmatch(_WRAPPERS.sub("", tensor))
        role = match and _ROLES.get(match["part"] + (match["bias"] or ""))
        if match is None or role is None:
            return None
        name = match["layer"] + (".modulation" if match["part"] == _MODULATION else "")
        for layer, expert in _without_prefixes(name):
            modules = self._modules(_underscored(layer))
            if modules is not None:
                return LoraChange(LoraLayer(modules, swapped=_underscored(layer) in self._swapped), role, expert)
        return None

    def _modules(self, name: str) -> tuple[str, ...] | None:
        block = self._block.fullmatch(name)
        if block is None:
            return self._outside.get(name)
        diffusers, names = self._blocks[block[1]]
        modules = names.get(block[3])
        return None if modules is None else tuple(f"{diffusers}.{int(block[2])}.{module}" for module in modules)


def unsupported_kind(tensor: str) -> str | None:
    """Return the kind of adapter that a tensor's name belongs to, if that kind is known and not supported."""
    return next((kind for kind, pattern in _UNSUPPORTED.items() if pattern.search(tensor)), None)


def _without_prefixes(name: str) -> Iterator[tuple[str, Expert]]:
    """Yield the name of a layer with fewer and fewer prefixes, and the expert that they name."""
    expert: Expert = BOTH
    while True:
        yield name, expert
        for pattern in _JOINED_PREFIXES:
            joined = pattern.match(name)
            if joined is not None:
                yield name[joined.end() :], "low" if joined.groupdict().get("low") else expert
        prefix = _PREFIX.match(name)
        if prefix is None:
            return
        expert = "low" if prefix["low"] else "high" if prefix["high"] else expert
        name = name[prefix.end() :]


def _underscored(name: str) -> str:
    return name.replace(".", "_")


def _by_name(names: Names) -> dict[str, tuple[str, ...]]:
    """Return the modules by both of their names, with underscores."""
    many = {name: (target,) if isinstance(target, str) else target for name, target in names.items()}
    by_module = {_underscored(module): (module,) for modules in many.values() for module in modules}
    return by_module | {_underscored(name): modules for name, modules in many.items()}


class DistilledNames(NamedTuple):
    """LoRAs or models from step distillation, which need few steps and no guidance, by their file's or folder's name.

    Attributes:
        authors: patterns in such names, in the order they are searched, with the number of steps of those
            that do not state it.
        shifts: patterns, with the shift of the distillation.
        levels: patterns of those whose steps have given noise levels and each add new noise, with the levels.
    """

    authors: Mapping[re.Pattern[str], int]
    shifts: Mapping[re.Pattern[str], float]
    levels: Mapping[re.Pattern[str], tuple[float, ...]] = MappingProxyType({})

    def steps(self, path: Path) -> int | None:
        """Return for how many steps one was distilled; `None` if it was not."""
        for text in (path.stem, path.parent.name):
            stated = _STEPS.search(text)
            number = int(stated[1]) if stated else _first(self.authors, text)
            if number is not None:
                return number if 0 < number <= _MAX_DISTILLED_STEPS else None
        return None

    def shift(self, path: Path) -> float | None:
        """Return the shift with which one was distilled, if its name identifies its author."""
        return _first(self.shifts, path.stem, path.parent.name)

    def noise_levels(self, path: Path) -> tuple[float, ...]:
        """Return the noise levels of one whose steps each add new noise; empty for others."""
        return _first(self.levels, path.stem, path.parent.name) or ()


def _first(values: Mapping[re.Pattern[str], Value], *texts: str) -> Value | None:
    return next((value for text in texts for pattern, value in values.items() if pattern.search(text)), None)
