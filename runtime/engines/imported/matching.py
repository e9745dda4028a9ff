"""Which component an engine made elsewhere can stand for, for which sizes, and through which adapters. Pure: no torch.

A file says names, types and sizes, not meanings. What that leaves open gives several fittings; comparing with PyTorch
decides between them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.core.errors import EngineError
from runtime.engines.identity import CLIP_PROGRAM
from runtime.engines.imported import adapters as bridges
from runtime.engines.imported.adapters import Adapter, Batch, Names, Types
from runtime.engines.imported.contract import Contract, Port, Span
from runtime.models.spec import ModelSpec, is_transformer
from runtime.planner.shapes import LatentSize, ShapeProfile

# What an engine is used with, beside it in its folder.
ADAPTERS_FILE = "adapters.json"
_CLIP_AXES, _TEXT_AXES = 5, 3
_FRAMES, _HEIGHT, _WIDTH = 2, 3, 4
_COLOURS = 3
_TIMES = ("timestep", "timesteps", "t", "time", "time_step")
_ROLES: Mapping[str, tuple[str, ...]] = {
    "latents": ("sample", "hidden_states", "latents", "latent", "latent_model_input", "noisy_latents", "x", "input"),
    "timestep": _TIMES,
    "text_embeds": ("encoder_hidden_states", "context", "text_embeds", "prompt_embeds", "text", "txt", "cond"),
    bridges.TEXT_MASK: ("encoder_attention_mask", "text_mask", "context_mask", "attention_mask", "mask"),
}
_FLOATS = frozenset({"float32", "float16", "bfloat16"})
_WHOLE = frozenset({"int64", "int32", "int8", "uint8", "bool"})
_OTHER = "Build an engine here with `build`, or import one that was exported for this model."


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """One way to use an engine.

    Attributes:
        component: of the model.
        program: what it computes, as `programs` names it.
        profiles: the latent sizes it serves.
        batch: clips a call.
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

    def lines(self) -> list[str]:
        """Return the adapters in words, a line each: what they do and cost."""
        guided = self.program == "transformer" or self.batch.size > 1
        shown = (self.batch, *self.adapters) if guided else self.adapters
        return [f"{adapter.title[0].upper()}{adapter.title[1:]}. {adapter.cost}" for adapter in shown]

    def to_json(self) -> dict[str, Any]:
        """Return the adapters as JSON values."""
        return {"batch": self.batch.size, "adapters": bridges.to_json(self.adapters)}


def fittings(contract: Contract, spec: ModelSpec, component: str | None = None) -> list[Fitting]:
    """Return the ways to use an engine with a model, the likeliest first.

    Args:
        component: whose place it is to take; `None` looks for it.

    Raises:
        EngineError: if there is none; says what differs.
    """
    types = _FLOATS | _WHOLE if contract.backend == "tensorrt" else (_FLOATS | _WHOLE) - {"bfloat16"}
    for port in (*contract.inputs, *contract.outputs):
        if port.dtype not in types:
            raise EngineError(f"The engine cannot be used: {port} is of a type that cannot be handed over.", _OTHER)
    kind = _kind(contract)
    wanted = component or kind
    if wanted not in spec.component_names:
        known = ", ".join(spec.component_names)
        raise EngineError(f"{spec.title} has no component {str(wanted)[:40]!r}.", f"Take one of {known}.")
    if wanted.partition("_2")[0] != kind:
        raise _unlike(spec, wanted, f"by its inputs and outputs it is a {kind.replace('_', ' ')}")
    if kind == "vae":
        return _decoders(contract, spec)
    if kind == "text_encoder":
        return [_text_encoder(contract, spec)]
    experts = [name for name in spec.component_names if is_transformer(name)]
    return [_transformer(contract, spec, name) for name in experts if component in {None, name}]


def _kind(contract: Contract) -> str:
    """Return the component that an engine looks like, by the number of axes of what goes in."""
    axes = [len(port.sizes) for port in contract.inputs]
    clips = axes.count(_CLIP_AXES)
    if clips == 1 and axes.count(_TEXT_AXES) >= 1:
        return "transformer"
    if clips == 1 and len(axes) == 1:
        return "vae"
    if not clips and contract.inputs and all(port.dtype in _WHOLE for port in contract.inputs):
        return "text_encoder"
    taken = "; ".join(map(str, contract.inputs)) or "nothing"
    raise EngineError(f"The engine is of no kind that is known here: it takes {taken}.", _OTHER)


def _transformer(contract: Contract, spec: ModelSpec, component: str) -> Fitting:
    roles = _roles(contract, spec, component)
    latents, text, time = roles["latents"], roles["text_embeds"], roles["timestep"]
    out = _only_output(contract, spec, component, _CLIP_AXES)
    _want(spec, component, latents, 1, spec.transformer.in_channels, "channels")
    _want(spec, component, out, 1, spec.vae.z_dim, "channels")
    _want(spec, component, text, 2, spec.transformer.text_dim, "text values per token")
    batch = _batch(contract)
    chain: list[Adapter] = list(_text(spec, component, text, roles.get(bridges.TEXT_MASK)))
    patch = spec.transformer.patch_size
    unread, missing = _grid(spec, component, latents, out)
    if any(missing):
        chain.append(bridges.RestoredRows(*missing))
    if any(unread):
        chain.append(bridges.UnreadRows(*unread))
    # After the rows: a timestep per token counts the clip's tokens.
    chain.insert(0, bridges.Timestep(len(time.sizes), time.dtype in _WHOLE, patch, batch.size))
    profiles = []
    for profile in range(contract.profiles):
        frames = _frames(latents.span(_FRAMES, profile), spec)
        height = _side(latents.span(_HEIGHT, profile), patch[1], unread[0], _sides(spec, 1))
        width = _side(latents.span(_WIDTH, profile), patch[2], unread[1], _sides(spec, 0))
        if frames and height and width:
            profiles.append(_profile(frames, height, width))
    names = {role: port for role, port in roles.items() if port is not None}
    return _fitting(spec, component, "transformer", contract, profiles, batch, chain, names, {"velocity": out})


def _decoders(contract: Contract, spec: ModelSpec) -> list[Fitting]:
    """Return a decoder that puts the model's mean and deviation back by itself, and one that does not."""
    (z,) = contract.inputs
    out = _only_output(contract, spec, "vae", _CLIP_AXES)
    _want(spec, "vae", z, 1, spec.vae.z_dim, "channels")
    orders = {1: "bcfhw", 2: "bfchw", 4: "bfhwc"}
    order = next((orders[axis] for axis in orders if out.sizes[axis] == _COLOURS), None)
    if order is None:
        raise _unlike(spec, "vae", f"none of the axes of its output {out} is three colours")
    profiles = []
    for profile in range(contract.profiles):
        frames = _frames(z.span(_FRAMES, profile), spec)
        height = _side(z.span(_HEIGHT, profile), 1, 0, _sides(spec, 1))
        width = _side(z.span(_WIDTH, profile), 1, 0, _sides(spec, 0))
        if frames and height and width:
            # A shorter clip is filled up.
            profiles.append(_profile((1, frames[1], frames[2]), height, width))
    least = max(z.span(_FRAMES, profile)[0] for profile in range(contract.profiles))
    config = json.loads((spec.directory / "vae" / "config.json").read_text(encoding="utf-8"))
    frames_adapter = bridges.ClipFrames(order, least, spec.vae.scale_factor_temporal)
    plain = bridges.Denormalised(tuple(config["latents_mean"]), tuple(config["latents_std"]))
    chains: list[list[Adapter]] = [[frames_adapter, plain], [frames_adapter]]
    return [
        _fitting(spec, "vae", CLIP_PROGRAM, contract, profiles, _batch(contract), chain, {"z": z}, {"frames": out})
        for chain in chains
    ]


def _text_encoder(contract: Contract, spec: ModelSpec) -> Fitting:
    component = "text_encoder"
    masks = [port for port in contract.inputs if "mask" in port.name.lower()]
    ids = [port for port in contract.inputs if port not in masks]
    if len(ids) != 1 or len(masks) != 1:
        taken = ", ".join(port.name for port in contract.inputs)
        raise _unlike(
            spec, component, f"it takes {taken}, and wanted are ids and a mask, without which padding is read"
        )
    out = _only_output(contract, spec, component, _TEXT_AXES)
    _want(spec, component, out, 2, spec.transformer.text_dim, "values per token")
    length, wanted = ids[0].span(1, 0), spec.max_sequence_length
    if not length[0] <= wanted <= length[2] and length[0] < wanted:
        raise _unlike(spec, component, f"it reads {length[2]} tokens, and the model {wanted}")
    chain = [bridges.PaddedIds(length[0] if length[0] > wanted else 0)]
    names = {"input_ids": ids[0], "attention_mask": masks[0]}
    profiles = [ShapeProfile.fixed((1, 1, 1))]
    return _fitting(spec, component, component, contract, profiles, _batch(contract), chain, names, {"embeds": out})


def _fitting(
    spec: ModelSpec,
    component: str,
    program: str,
    contract: Contract,
    profiles: Sequence[ShapeProfile],
    batch: Batch,
    chain: Sequence[Adapter],
    inputs: Mapping[str, Port],
    outputs: Mapping[str, Port],
) -> Fitting:
    if not profiles:
        raise _unlike(spec, component, "it serves no size that the model makes")
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
    return Fitting(
        component=component,
        program=program,
        profiles=tuple(dict.fromkeys(profiles)),
        batch=batch,
        adapters=(*chain, *last, names),
    )


def _roles(contract: Contract, spec: ModelSpec, component: str) -> dict[str, Port]:
    """Say which input is what: by name, and by the number of axes where a name is not known."""
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
        raise _unlike(spec, component, f"it takes {left[0]} too, which a text-to-video model has nothing for")
    for role, words in (("latents", "latents"), ("timestep", "a timestep"), ("text_embeds", "text embeddings")):
        if role not in roles:
            raise _unlike(spec, component, f"none of its inputs is {words}")
    return roles


def _fits_role(port: Port, role: str) -> bool:
    axes = {"latents": (5,), "timestep": (0, 1, 2), "text_embeds": (3,), bridges.TEXT_MASK: (2,)}
    whole_or_not = role in {"timestep", bridges.TEXT_MASK} or port.dtype in _FLOATS
    return len(port.sizes) in axes[role] and whole_or_not


def _looks_like(port: Port, role: str) -> bool:
    # Two axes may be anything, so only a known name makes a mask of them.
    return role != bridges.TEXT_MASK and _fits_role(port, role) and len(port.sizes) != len(("batch", "tokens"))


def _text(spec: ModelSpec, component: str, text: Port, mask: Port | None) -> list[Adapter]:
    """Bridge the lengths of the text: nothing, repeats, a mask, or a refusal."""
    own = spec.max_sequence_length
    low, _, high = text.span(1, 0)
    if mask is not None and mask.dtype not in _WHOLE:
        raise _unlike(spec, component, f"its mask {mask} may be factors or summands: nothing in the file says which")
    if low <= own <= high:
        return [] if mask is None else [bridges.MaskedText(0)]
    if mask is not None and low > own:
        return [bridges.MaskedText(low)]
    times = -(-low // own)
    if low > own and times * own <= high:
        return [bridges.RepeatedText(times)]
    if high < own:
        raise _unlike(spec, component, f"it reads {high} text tokens, and the model attends to {own}, padding included")
    raise _unlike(
        spec,
        component,
        f"it reads {low} text tokens, no multiple of the model's {own}, and has no mask: the model was not trained to "
        "attend to more padding",
    )


def _grid(spec: ModelSpec, component: str, latents: Port, out: Port) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the rows and columns that the engine does not read, and those that it reads and does not give."""
    unread, missing = [0, 0], [0, 0]
    for index, (axis, patch) in enumerate(zip((_HEIGHT, _WIDTH), spec.transformer.patch_size[1:], strict=True)):
        low, _, high = latents.span(axis, 0)
        if low != high:
            continue  # its size is a multiple of the patch: nothing is left over
        unread[index] = low % patch
        read = low - unread[index]
        given = out.sizes[axis]
        # A decoder of patches may give what it was given, or what it read.
        if given in {low, read} or given < 0:
            continue
        if given > low or unread[index] or not read:
            raise _unlike(spec, component, f"of {latents} it makes {out}")
        missing[index] = low - given
    return (unread[0], unread[1]), (missing[0], missing[1])


def _frames(span: Span, spec: ModelSpec) -> Span | None:
    """Return latent frames that are in a span and that the model was made for."""
    stride = spec.vae.scale_factor_temporal
    most = (max(*spec.frame_counts, spec.defaults.frames) - 1) // stride + 1
    best = span[1] or (spec.defaults.frames - 1) // stride + 1
    low, high = max(span[0], 1), min(span[2], max(most, span[0]))
    return (low, min(max(best, low), high), high) if low <= high else None


def _side(span: Span, patch: int, unread: int, usual: Span) -> Span | None:
    """Return heights or widths in latents that are in a span and a multiple of the patch: there nothing is lost.

    Args:
        unread: what is left over where the size is fixed.
        usual: the model's own, for a file that names none.
    """
    if span[0] == span[2]:
        read = span[0] - unread
        return (read, read, read) if read and span[0] % patch == unread else None
    low, best, high = span if span[1] else (max(span[0], usual[0]), usual[1], min(span[2], usual[2]))
    low, high = -(-low // patch) * patch, high // patch * patch
    best = min(max(best // patch * patch, low), high)
    return (low, best, high) if not unread and patch <= low <= high else None


def _sides(spec: ModelSpec, index: int) -> Span:
    """Return the least, usual and largest width (index 0) or height (1) that the model was made for, in latents."""
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
        given = "; ".join(map(str, contract.outputs)) or "nothing"
        raise _unlike(spec, component, f"it gives {given}, and wanted is one tensor of {axes} axes")
    return found[0]


def _want(spec: ModelSpec, component: str, port: Port, axis: int, size: int, words: str) -> None:
    low, _, high = port.span(axis, 0)
    if not low <= size <= high:
        raise _unlike(spec, component, f"{port} has {low} {words}, and the model {size}")


def _unlike(spec: ModelSpec, component: str, why: str) -> EngineError:
    return EngineError(f"The engine cannot stand for the {component} of {spec.title}: {why}.", _OTHER)
