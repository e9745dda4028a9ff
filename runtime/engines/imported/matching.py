"""Matches an engine that was made elsewhere with a component: for which sizes, and through which adapters. No torch.

A file states names, dtypes and sizes, but not their meaning. Where that is ambiguous there are several matches, and
comparing the engine with PyTorch decides between them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.core.plan import LatentSize
from runtime.engines.identity import CLIP_PROGRAM
from runtime.engines.imported.adapters import (
    TEXT_MASK,
    Adapter,
    Batch,
    ClipFrames,
    Denormalised,
    MaskedText,
    Names,
    PaddedIds,
    RepeatedText,
    RestoredRows,
    Timestep,
    Types,
    UnreadRows,
    adapters_to_json,
)
from runtime.engines.imported.contract import Contract, Port, Span
from runtime.models.spec import ModelSpec, is_transformer
from runtime.planner.engine_index import ShapeProfile

# The file with contract and adapters in an imported engine's folder.
ADAPTERS_FILE = "adapters.json"
_CLIP_AXES, _TEXT_AXES = 5, 3
_FRAMES, _HEIGHT, _WIDTH = 2, 3, 4
_COLORS = 3
_ROLES: Mapping[str, tuple[str, ...]] = {
    "latents": ("sample", "hidden_states", "latents", "latent", "latent_model_input", "noisy_latents", "x", "input"),
    "timestep": ("timestep", "timesteps", "t", "time", "time_step"),
    "text_embeds": ("encoder_hidden_states", "context", "text_embeds", "prompt_embeds", "text", "txt", "cond"),
    TEXT_MASK: ("encoder_attention_mask", "text_mask", "context_mask", "attention_mask", "mask"),
}
_FLOATS = frozenset({"float32", "float16", "bfloat16"})
_INTEGERS = frozenset({"int64", "int32", "int8", "uint8", "bool"})


@dataclass(frozen=True, kw_only=True)
class Match:
    """One way to use an engine.

    Attributes:
        component: the component that it replaces.
        program: what it computes; see `programs`.
        profiles: the latent sizes that it serves.
        batch: clips per call.
        adapters: in the order in which inputs pass them.
    """

    component: str
    program: str
    profiles: tuple[ShapeProfile, ...]
    batch: Batch
    adapters: tuple[Adapter, ...]

    @property
    def exact(self) -> bool:
        """Whether all adapters keep what PyTorch computes, up to rounding."""
        return all(adapter.exact for adapter in self.adapters)

    def describe(self) -> list[Fact]:
        """Return the effect and the cost of each adapter."""
        guided = self.program == "transformer" or self.batch.size > 1
        batch = [self.batch.describe()] if guided else []
        return [*batch, *(adapter.describe() for adapter in self.adapters)]

    def to_json(self) -> dict[str, Any]:
        """Return the adapters as JSON values."""
        return {"batch": self.batch.size, "adapters": adapters_to_json(self.adapters)}


def find_matches(contract: Contract, spec: ModelSpec, component: str | None = None) -> list[Match]:
    """Return the ways to use an engine with a model, the most likely first.

    Args:
        component: the component to replace; None tries all.

    Raises:
        EngineError: if there is none; its cause is the first difference.
    """
    types = _FLOATS | _INTEGERS if contract.backend == "tensorrt" else (_FLOATS | _INTEGERS) - {"bfloat16"}
    for port in (*contract.inputs, *contract.outputs):
        if port.dtype not in types:
            raise EngineError("engine.import_dtype_unsupported", tensor=str(port))
    kind = _kind(contract)
    wanted = component or kind
    if wanted not in spec.component_names:
        raise EngineError(
            "engine.component_unknown",
            model=spec.title,
            component=str(wanted)[:40],
            components=list(spec.component_names),
        )
    if wanted.partition("_2")[0] != kind:
        raise _mismatch(spec, wanted, Fact("engine.mismatch_kind", {"kind": kind}))
    if kind == "vae":
        return _decoders(contract, spec)
    if kind == "text_encoder":
        return [_text_encoder(contract, spec)]
    experts = [name for name in spec.component_names if is_transformer(name)]
    return [_transformer(contract, spec, name) for name in experts if component in {None, name}]


def _kind(contract: Contract) -> str:
    """Return the component that an engine looks like, by the number of axes of its inputs."""
    axes = [len(port.sizes) for port in contract.inputs]
    clips = axes.count(_CLIP_AXES)
    if clips == 1 and axes.count(_TEXT_AXES) >= 1:
        return "transformer"
    if clips == 1 and len(axes) == 1:
        return "vae"
    if not clips and contract.inputs and all(port.dtype in _INTEGERS for port in contract.inputs):
        return "text_encoder"
    raise EngineError("engine.import_kind_unknown", inputs=[str(port) for port in contract.inputs])


def _transformer(contract: Contract, spec: ModelSpec, component: str) -> Match:
    roles = _roles(contract, spec, component)
    latents, text, time = roles["latents"], roles["text_embeds"], roles["timestep"]
    out = _only_output(contract, spec, component, _CLIP_AXES)
    _check_size(spec, component, latents, 1, spec.transformer.in_channels)
    _check_size(spec, component, out, 1, spec.vae.z_dim)
    _check_size(spec, component, text, 2, spec.transformer.text_dim)
    batch = _batch(contract)
    chain: list[Adapter] = list(_text_adapters(spec, component, text, roles.get(TEXT_MASK)))
    patch = spec.transformer.patch_size
    unread, missing = _uncovered_rows(spec, component, latents, out)
    if any(missing):
        chain.append(RestoredRows(*missing))
    if any(unread):
        chain.append(UnreadRows(*unread))
    # Before the rows change: one timestep per token counts the clip's tokens.
    chain.insert(0, Timestep(len(time.sizes), time.dtype in _INTEGERS, patch, batch.size))
    profiles = []
    for profile in range(contract.profiles):
        frames = _frames(latents.span(_FRAMES, profile), spec)
        height = _side(latents.span(_HEIGHT, profile), patch[1], unread[0], _sides(spec, 1))
        width = _side(latents.span(_WIDTH, profile), patch[2], unread[1], _sides(spec, 0))
        if frames and height and width:
            profiles.append(_profile(frames, height, width))
    return _match(spec, component, "transformer", profiles, batch, chain, roles, {"velocity": out})


def _decoders(contract: Contract, spec: ModelSpec) -> list[Match]:
    """Return a match with a decoder that needs denormalized latents, and one with a decoder that does not."""
    (z,) = contract.inputs
    out = _only_output(contract, spec, "vae", _CLIP_AXES)
    _check_size(spec, "vae", z, 1, spec.vae.z_dim)
    orders = {1: "bcfhw", 2: "bfchw", 4: "bfhwc"}
    order = next((orders[axis] for axis in orders if out.sizes[axis] == _COLORS), None)
    if order is None:
        raise _mismatch(spec, "vae", Fact("engine.mismatch_colors", {"output": str(out)}))
    profiles = []
    for profile in range(contract.profiles):
        frames = _frames(z.span(_FRAMES, profile), spec)
        height = _side(z.span(_HEIGHT, profile), 1, 0, _sides(spec, 1))
        width = _side(z.span(_WIDTH, profile), 1, 0, _sides(spec, 0))
        if frames and height and width:
            # A shorter clip is padded.
            profiles.append(_profile((1, frames[1], frames[2]), height, width))
    least = max(z.span(_FRAMES, profile)[0] for profile in range(contract.profiles))
    config = json.loads((spec.directory / "vae" / "config.json").read_text(encoding="utf-8"))
    frames_adapter = ClipFrames(order, least, spec.vae.scale_factor_temporal)
    denormalized = Denormalised(tuple(config["latents_mean"]), tuple(config["latents_std"]))
    chains: list[list[Adapter]] = [[frames_adapter, denormalized], [frames_adapter]]
    return [
        _match(spec, "vae", CLIP_PROGRAM, profiles, _batch(contract), chain, {"z": z}, {"frames": out})
        for chain in chains
    ]


def _text_encoder(contract: Contract, spec: ModelSpec) -> Match:
    component = "text_encoder"
    masks = [port for port in contract.inputs if "mask" in port.name.lower()]
    ids = [port for port in contract.inputs if port not in masks]
    if len(ids) != 1 or len(masks) != 1:
        inputs = [port.name for port in contract.inputs]
        raise _mismatch(spec, component, Fact("engine.mismatch_ids_and_mask", {"inputs": inputs}))
    out = _only_output(contract, spec, component, _TEXT_AXES)
    _check_size(spec, component, out, 2, spec.transformer.text_dim)
    length, wanted = ids[0].span(1, 0), spec.max_sequence_length
    if not length[0] <= wanted <= length[2] and length[0] < wanted:
        raise _mismatch(spec, component, Fact("engine.mismatch_short_text", {"tokens": length[2], "wanted": wanted}))
    chain = [PaddedIds(length[0] if length[0] > wanted else 0)]
    names = {"input_ids": ids[0], "attention_mask": masks[0]}
    profiles = [ShapeProfile.fixed((1, 1, 1))]
    return _match(spec, component, component, profiles, _batch(contract), chain, names, {"embeds": out})


def _match(
    spec: ModelSpec,
    component: str,
    program: str,
    profiles: Sequence[ShapeProfile],
    batch: Batch,
    chain: Sequence[Adapter],
    inputs: Mapping[str, Port],
    outputs: Mapping[str, Port],
) -> Match:
    if not profiles:
        raise _mismatch(spec, component, Fact("engine.mismatch_sizes"))
    given = {"input_ids": "int64", "attention_mask": "int64"}
    types = Types(
        tuple((role, port.dtype) for role, port in inputs.items() if port.dtype != given.get(role, "float32")),
        tuple((role, port.dtype) for role, port in outputs.items() if port.dtype != "float32"),
    )
    names = Names(
        tuple((role, port.name) for role, port in inputs.items()),
        tuple((role, port.name) for role, port in outputs.items()),
    )
    last: list[Adapter] = [types] if types.inputs or types.outputs else []
    return Match(
        component=component,
        program=program,
        profiles=tuple(dict.fromkeys(profiles)),
        batch=batch,
        adapters=(*chain, *last, names),
    )


def _roles(contract: Contract, spec: ModelSpec, component: str) -> dict[str, Port]:
    """Assign the inputs to roles: by name, then by the number of axes."""
    roles: dict[str, Port] = {}
    left: list[Port] = []
    for port in contract.inputs:
        role = next((role for role, names in _ROLES.items() if port.name.lower() in names), None)
        if role is None or role in roles or not _fits_role(port, role):
            left.append(port)
        else:
            roles[role] = port
    for port in list(left):
        role = next((role for role in _ROLES if role not in roles and _looks_like(port, role)), None)
        if role is not None:
            roles[role] = port
            left.remove(port)
    if left:
        raise _mismatch(spec, component, Fact("engine.mismatch_extra_input", {"input": str(left[0])}))
    for role in ("latents", "timestep", "text_embeds"):
        if role not in roles:
            raise _mismatch(spec, component, Fact("engine.mismatch_missing_input", {"input": role}))
    return roles


def _fits_role(port: Port, role: str) -> bool:
    axes = {"latents": (5,), "timestep": (0, 1, 2), "text_embeds": (3,), TEXT_MASK: (2,)}
    any_dtype = role in {"timestep", TEXT_MASK}
    return len(port.sizes) in axes[role] and (any_dtype or port.dtype in _FLOATS)


def _looks_like(port: Port, role: str) -> bool:
    # A tensor of two axes may be anything: only a known name makes it a mask or a timestep.
    return role != TEXT_MASK and _fits_role(port, role) and len(port.sizes) != len(("batch", "tokens"))


def _text_adapters(spec: ModelSpec, component: str, text: Port, mask: Port | None) -> list[Adapter]:
    """Return the adapters for the text's length: none, repetitions, or padding under a mask."""
    own = spec.max_sequence_length
    low, _, high = text.span(1, 0)
    if mask is not None and mask.dtype not in _INTEGERS:
        raise _mismatch(spec, component, Fact("engine.mismatch_mask", {"mask": str(mask)}))
    if low <= own <= high:
        return [] if mask is None else [MaskedText(0)]
    if mask is not None and low > own:
        return [MaskedText(low)]
    times = -(-low // own)
    if low > own and times * own <= high:
        return [RepeatedText(times)]
    if high < own:
        raise _mismatch(spec, component, Fact("engine.mismatch_short_text", {"tokens": high, "wanted": own}))
    raise _mismatch(spec, component, Fact("engine.mismatch_long_text", {"tokens": low, "wanted": own}))


def _uncovered_rows(
    spec: ModelSpec, component: str, latents: Port, out: Port
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the (rows, columns) that the engine does not read, and those that it reads but does not output."""
    unread, missing = [0, 0], [0, 0]
    for index, (axis, patch) in enumerate(zip((_HEIGHT, _WIDTH), spec.transformer.patch_size[1:], strict=True)):
        low, _, high = latents.span(axis, 0)
        if low != high:
            continue  # a dynamic size is used in multiples of the patch
        unread[index] = low % patch
        read = low - unread[index]
        given = out.sizes[axis]
        # The output may have the size of the input, or of the part that the engine reads.
        if given in {low, read} or given < 0:
            continue
        if given > low or unread[index] or not read:
            raise _mismatch(
                spec, component, Fact("engine.mismatch_output", {"input": str(latents), "output": str(out)})
            )
        missing[index] = low - given
    return (unread[0], unread[1]), (missing[0], missing[1])


def _frames(span: Span, spec: ModelSpec) -> Span | None:
    """Return the latent frames that both a span and the model allow."""
    stride = spec.vae.scale_factor_temporal
    most = (max(*spec.frame_counts, spec.defaults.frames) - 1) // stride + 1
    best = span[1] or (spec.defaults.frames - 1) // stride + 1
    low, high = max(span[0], 1), min(span[2], max(most, span[0]))
    return (low, min(max(best, low), high), high) if low <= high else None


def _side(span: Span, patch: int, unread: int, usual: Span) -> Span | None:
    """Return the heights or widths, in latents, that a span allows and that are multiples of the patch.

    Args:
        unread: rows or columns that remain where the size is fixed.
        usual: the model's own range, for a file that states none.
    """
    if span[0] == span[2]:
        read = span[0] - unread
        return (read, read, read) if read and span[0] % patch == unread else None
    low, best, high = span if span[1] else (max(span[0], usual[0]), usual[1], min(span[2], usual[2]))
    low, high = -(-low // patch) * patch, high // patch * patch
    best = min(max(best // patch * patch, low), high)
    return (low, best, high) if not unread and patch <= low <= high else None


def _sides(spec: ModelSpec, index: int) -> Span:
    """Return the minimum, default and maximum width (index 0) or height (1) of the model's sizes, in latents."""
    usual = (spec.defaults.width, spec.defaults.height)[index]
    made_for = [size[index] for size in spec.sizes] + [usual]
    low, best, high = (side // spec.vae.scale_factor_spatial for side in (min(made_for), usual, max(made_for)))
    return low, best, high


def _profile(frames: Span, height: Span, width: Span) -> ShapeProfile:
    low, best, high = ((frames[index], height[index], width[index]) for index in range(3))
    sizes: tuple[LatentSize, LatentSize, LatentSize] = (low, best, high)
    return ShapeProfile(*sizes)


def _batch(contract: Contract) -> Batch:
    sizes = [port.span(0, 0)[0] for port in contract.inputs if len(port.sizes) > 1]
    return Batch(max(sizes, default=1))


def _only_output(contract: Contract, spec: ModelSpec, component: str, axes: int) -> Port:
    found = [port for port in contract.outputs if len(port.sizes) == axes]
    if len(found) != 1:
        outputs = [str(port) for port in contract.outputs]
        raise _mismatch(spec, component, Fact("engine.mismatch_outputs", {"outputs": outputs, "axes": axes}))
    return found[0]


def _check_size(spec: ModelSpec, component: str, port: Port, axis: int, size: int) -> None:
    low, _, high = port.span(axis, 0)
    if not low <= size <= high:
        raise _mismatch(
            spec, component, Fact("engine.mismatch_size", {"tensor": str(port), "axis": axis, "size": low, "own": size})
        )


def _mismatch(spec: ModelSpec, component: str, cause: Fact) -> EngineError:
    return EngineError("engine.import_mismatch", component=component, model=spec.title, cause=cause)
