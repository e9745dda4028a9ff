"""Matches an imported engine with a component: finds the sizes that it serves and the adapters that it needs.

A file states names, dtypes and sizes, but not their meaning. Where that is ambiguous there are several matches, and
comparing the engine with PyTorch decides between them. Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.core.errors import EngineError
from runtime.core.facts import Fact
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
from runtime.models.folder import read_config
from runtime.models.spec import ModelSpec, is_transformer
from runtime.models.vae_groups import CLIP_PROGRAM
from runtime.planner.choice.engine_index import ShapeProfile

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
    """A component that an engine can replace, and how.

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
    """Return the components of a model that an engine can replace, the most likely first.

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
    target = component or kind
    if target not in spec.component_names:
        raise EngineError(
            "model.no_such_component",
            model=spec.title,
            component=str(target)[:40],
            choices=spec.component_names,
        )
    if target.partition("_2")[0] != kind:
        raise _Matcher(contract, spec, target).mismatch("engine.mismatch_kind", kind=kind)
    if kind == "vae":
        return _Matcher(contract, spec, kind).decoders()
    if kind == "text_encoder":
        return [_Matcher(contract, spec, kind).text_encoder()]
    experts = [name for name in spec.component_names if is_transformer(name)]
    return [_Matcher(contract, spec, name).transformer() for name in experts if component in {None, name}]


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


@dataclass(frozen=True)
class _Matcher:
    """Matches an engine with one component."""

    contract: Contract
    spec: ModelSpec
    component: str

    def mismatch(self, code: str, **data: Any) -> EngineError:
        """Return the error for an engine that cannot replace the component."""
        return EngineError(
            "engine.import_mismatch", component=self.component, model=self.spec.title, cause=Fact(code, data)
        )

    def transformer(self) -> Match:
        spec = self.spec
        if spec.image_input is not None and spec.image_input.tokens:
            # Engines take the embeddings of images in different ways.
            raise self.mismatch("engine.mismatch_image_embeddings")
        roles = self._roles()
        latents, text, time = roles["latents"], roles["text_embeds"], roles["timestep"]
        out = self._only_output(_CLIP_AXES)
        self._check_size(latents, 1, spec.transformer.in_channels)
        self._check_size(out, 1, spec.vae.z_dim)
        self._check_size(text, 2, spec.transformer.text_dim)
        if spec.timesteps > 1 and len(time.sizes) < len(("batch", "tokens")):
            raise self.mismatch("engine.mismatch_one_timestep")
        patch = spec.transformer.patch_size
        # Before the rows change: one timestep per token counts the clip's tokens.
        chain: list[Adapter] = [Timestep(len(time.sizes), time.dtype in _INTEGERS, patch, self._batch.size)]
        chain += self._text_adapters(text, roles.get(TEXT_MASK))
        unread, missing = self._uncovered_rows(latents, out)
        if any(missing):
            chain.append(RestoredRows(*missing))
        if any(unread):
            chain.append(UnreadRows(*unread))
        profiles = self._profiles(latents, (patch[1], patch[2]), unread)
        return self._match("transformer", profiles, chain, roles, {"velocity": out})

    def decoders(self) -> list[Match]:
        """Return a match with a decoder that needs denormalized latents, and one with a decoder that does not."""
        spec, contract = self.spec, self.contract
        (z,) = contract.inputs
        out = self._only_output(_CLIP_AXES)
        self._check_size(z, 1, spec.vae.z_dim)
        orders = {1: "bcfhw", 2: "bfchw", 4: "bfhwc"}
        order = next((orders[axis] for axis in orders if out.sizes[axis] == _COLORS), None)
        if order is None:
            raise self.mismatch("engine.mismatch_colors", output=str(out))
        # A shorter clip is padded.
        profiles = [
            ShapeProfile((1, *profile.min[1:]), profile.opt, profile.max)
            for profile in self._profiles(z, (1, 1), (0, 0))
        ]
        least = max(z.span(_FRAMES, profile)[0] for profile in range(contract.profiles))
        config = read_config(spec.directory / "vae" / "config.json")
        frames = ClipFrames(order, least, spec.vae.scale_factor_temporal)
        denormalized = Denormalised(tuple(config["latents_mean"]), tuple(config["latents_std"]))
        chains: list[list[Adapter]] = [[frames, denormalized], [frames]]
        return [self._match(CLIP_PROGRAM, profiles, chain, {"z": z}, {"frames": out}) for chain in chains]

    def text_encoder(self) -> Match:
        contract = self.contract
        masks = [port for port in contract.inputs if "mask" in port.name.lower()]
        ids = [port for port in contract.inputs if port not in masks]
        if len(ids) != 1 or len(masks) != 1:
            raise self.mismatch("engine.mismatch_ids_and_mask", inputs=[port.name for port in contract.inputs])
        out = self._only_output(_TEXT_AXES)
        self._check_size(out, 2, self.spec.transformer.text_dim)
        length, text_length = ids[0].span(1, 0), self.spec.max_sequence_length
        if not length[0] <= text_length <= length[2] and length[0] < text_length:
            raise self.mismatch("engine.mismatch_short_text", tokens=length[2], wanted=text_length)
        chain = [PaddedIds(length[0] if length[0] > text_length else 0)]
        names = {"input_ids": ids[0], "attention_mask": masks[0]}
        return self._match("text_encoder", [ShapeProfile.fixed((1, 1, 1))], chain, names, {"embeds": out})

    @property
    def _batch(self) -> Batch:
        sizes = [port.span(0, 0)[0] for port in self.contract.inputs if len(port.sizes) > 1]
        return Batch(max(sizes, default=1))

    def _match(
        self,
        program: str,
        profiles: Sequence[ShapeProfile],
        chain: Sequence[Adapter],
        inputs: Mapping[str, Port],
        outputs: Mapping[str, Port],
    ) -> Match:
        if not profiles:
            raise self.mismatch("engine.mismatch_sizes")
        defaults = {"input_ids": "int64", "attention_mask": "int64"}
        types = Types(
            tuple((role, port.dtype) for role, port in inputs.items() if port.dtype != defaults.get(role, "float32")),
            tuple((role, port.dtype) for role, port in outputs.items() if port.dtype != "float32"),
        )
        names = Names(
            tuple((role, port.name) for role, port in inputs.items()),
            tuple((role, port.name) for role, port in outputs.items()),
        )
        last: list[Adapter] = [types] if types.inputs or types.outputs else []
        return Match(
            component=self.component,
            program=program,
            profiles=tuple(dict.fromkeys(profiles)),
            batch=self._batch,
            adapters=(*chain, *last, names),
        )

    def _roles(self) -> dict[str, Port]:
        """Assign a transformer's inputs to roles: by name, then by the number of axes."""
        roles: dict[str, Port] = {}
        rest: list[Port] = []
        for port in self.contract.inputs:
            role = next((role for role, names in _ROLES.items() if port.name.lower() in names), None)
            if role is None or role in roles or not _fits_role(port, role):
                rest.append(port)
            else:
                roles[role] = port
        for port in list(rest):
            role = next((role for role in _ROLES if role not in roles and _looks_like(port, role)), None)
            if role is not None:
                roles[role] = port
                rest.remove(port)
        if rest:
            raise self.mismatch("engine.mismatch_extra_input", input=str(rest[0]))
        for role in ("latents", "timestep", "text_embeds"):
            if role not in roles:
                raise self.mismatch("engine.mismatch_missing_input", input=role)
        return roles

    def _text_adapters(self, text: Port, mask: Port | None) -> list[Adapter]:
        """Return the adapters for the text's length: none, repetitions, or padding under a mask."""
        text_length = self.spec.max_sequence_length
        low, _, high = text.span(1, 0)
        if mask is not None and mask.dtype not in _INTEGERS:
            raise self.mismatch("engine.mismatch_mask", mask=str(mask))
        if low <= text_length <= high:
            return [] if mask is None else [MaskedText(0)]
        if mask is not None and low > text_length:
            return [MaskedText(low)]
        times = -(-low // text_length)
        if low > text_length and times * text_length <= high:
            return [RepeatedText(times)]
        if high < text_length:
            raise self.mismatch("engine.mismatch_short_text", tokens=high, wanted=text_length)
        raise self.mismatch("engine.mismatch_long_text", tokens=low, wanted=text_length)

    def _uncovered_rows(self, latents: Port, out: Port) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the (rows, columns) that the engine does not read, and those that it reads but does not output."""
        unread, missing = [0, 0], [0, 0]
        patches = self.spec.transformer.patch_size[1:]
        for index, (axis, patch) in enumerate(zip((_HEIGHT, _WIDTH), patches, strict=True)):
            low, _, high = latents.span(axis, 0)
            if low != high:
                continue  # a dynamic size is used in multiples of the patch
            unread[index] = low % patch
            read = low - unread[index]
            size = out.sizes[axis]
            # The output may have the size of the input, or of the part that the engine reads.
            if size in {low, read} or size < 0:
                continue
            if size > low or unread[index] or not read:
                raise self.mismatch("engine.mismatch_output", input=str(latents), output=str(out))
            missing[index] = low - size
        return (unread[0], unread[1]), (missing[0], missing[1])

    def _profiles(self, clip: Port, patch: tuple[int, int], unread: tuple[int, int]) -> list[ShapeProfile]:
        """Return the sizes that an input of five axes allows; see `_side` for `patch` and `unread`."""
        profiles = []
        for index in range(self.contract.profiles):
            frames = self._frames(clip.span(_FRAMES, index))
            height = _side(clip.span(_HEIGHT, index), patch[0], unread[0], self._trained_sides(1))
            width = _side(clip.span(_WIDTH, index), patch[1], unread[1], self._trained_sides(0))
            if frames and height and width:
                low, best, high = zip(frames, height, width, strict=True)
                profiles.append(ShapeProfile(low, best, high))
        return profiles

    def _frames(self, span: Span) -> Span | None:
        """Return the latent frames that both a span and the model allow."""
        spec, stride = self.spec, self.spec.vae.scale_factor_temporal
        most = (max(*spec.frame_counts, spec.defaults.frames) - 1) // stride + 1
        best = span[1] or (spec.defaults.frames - 1) // stride + 1
        low, high = max(span[0], 1), min(span[2], max(most, span[0]))
        return (low, min(max(best, low), high), high) if low <= high else None

    def _trained_sides(self, index: int) -> Span:
        """Return the minimum, default and maximum width (index 0) or height (1) of the model's sizes, in latents."""
        default = (self.spec.defaults.width, self.spec.defaults.height)[index]
        sides = [size[index] for size in self.spec.sizes] + [default]
        scale = self.spec.vae.scale_factor_spatial
        return min(sides) // scale, default // scale, max(sides) // scale

    def _only_output(self, axes: int) -> Port:
        ports = [port for port in self.contract.outputs if len(port.sizes) == axes]
        if len(ports) != 1:
            raise self.mismatch(
                "engine.mismatch_outputs", outputs=[str(port) for port in self.contract.outputs], axes=axes
            )
        return ports[0]

    def _check_size(self, port: Port, axis: int, size: int) -> None:
        low, _, high = port.span(axis, 0)
        if not low <= size <= high:
            raise self.mismatch("engine.mismatch_size", tensor=str(port), axis=axis, size=low, own=size)


def _fits_role(port: Port, role: str) -> bool:
    axes = {"latents": (5,), "timestep": (0, 1, 2), "text_embeds": (3,), TEXT_MASK: (2,)}
    any_dtype = role in {"timestep", TEXT_MASK}
    return len(port.sizes) in axes[role] and (any_dtype or port.dtype in _FLOATS)


def _looks_like(port: Port, role: str) -> bool:
    # A tensor of two axes may be anything: only a known name makes it a mask or a timestep.
    return role != TEXT_MASK and _fits_role(port, role) and len(port.sizes) != len(("batch", "tokens"))


def _side(span: Span, patch: int, unread: int, trained: Span) -> Span | None:
    """Return the heights or widths, in latents, that a span allows and that are multiples of the patch.

    Args:
        unread: rows or columns that remain where the size is fixed.
        trained: the model's own range, for a file that states none.
    """
    if span[0] == span[2]:
        read = span[0] - unread
        return (read, read, read) if read and span[0] % patch == unread else None
    low, best, high = span if span[1] else (max(span[0], trained[0]), trained[1], min(span[2], trained[2]))
    low, high = -(-low // patch) * patch, high // patch * patch
    best = min(max(best // patch * patch, low), high)
    return (low, best, high) if not unread and patch <= low <= high else None
