"""Adapters between an imported engine and the program that it replaces: pure functions of named tensors.

`preprocess` changes the inputs, `postprocess` the outputs; tensors have the program's names. `matching` chooses the
adapters of an engine. Importing this module imports no torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from runtime.core.errors import EngineError
from runtime.core.facts import Fact

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

TEXT_MASK = "text_mask"
TRAINING_STEPS = 1000.0
_LATENT_AXES = 3
# Of `Timestep.axes`.
_PER_TOKEN = 2


class Adapter(ABC):
    """One conversion. Subclasses are frozen dataclasses, which are stored as JSON in the engine's folder."""

    # Whether the result stays what PyTorch computes, up to rounding.
    exact = True

    @abstractmethod
    def describe(self) -> Fact:
        """Return what it does and what that costs."""

    def preprocess(self, inputs: "Tensors") -> "Tensors":
        """Return the converted inputs."""
        return inputs

    def postprocess(self, outputs: "Tensors", inputs: "Tensors") -> "Tensors":
        """Return the converted outputs; `inputs` are the arguments of `preprocess`."""
        return outputs


@dataclass(frozen=True)
class Names(Adapter):
    """Renames tensors; `inputs` and `outputs` are (program's name, engine's name)."""

    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]

    def describe(self) -> Fact:
        pairs = [f"{program} = {engine}" for program, engine in (*self.inputs, *self.outputs)]
        return Fact("engine.adapter_names", {"pairs": pairs})

    def preprocess(self, inputs: "Tensors") -> "Tensors":
        return {engine: inputs[program] for program, engine in self.inputs}

    def postprocess(self, outputs: "Tensors", inputs: "Tensors") -> "Tensors":
        return {program: outputs[engine] for program, engine in self.outputs}


@dataclass(frozen=True)
class Types(Adapter):
    """Converts dtypes; the program's tensors are float32.

    Attributes:
        inputs: (program's name, torch's name of the engine's dtype).
        outputs: the same, for outputs that are not float32.
    """

    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]

    def describe(self) -> Fact:
        pairs = [f"{name} {dtype}" for name, dtype in (*self.inputs, *self.outputs)]
        return Fact("engine.adapter_types", {"pairs": pairs})

    def preprocess(self, inputs: "Tensors") -> "Tensors":
        import torch

        return inputs | {name: inputs[name].to(getattr(torch, dtype)) for name, dtype in self.inputs}

    def postprocess(self, outputs: "Tensors", inputs: "Tensors") -> "Tensors":
        return outputs | {name: outputs[name].float() for name, _ in self.outputs}


@dataclass(frozen=True)
class Batch:
    """Splits and joins batches for an engine of a fixed batch size."""

    size: int

    def describe(self) -> Fact:
        """Return what it does and what that costs."""
        if self.size == 1:
            return Fact("engine.adapter_two_calls")
        return Fact("engine.adapter_batch", {"size": self.size})

    def split(self, inputs: "Tensors") -> list["Tensors"]:
        """Return the inputs of each call; the last is filled up with repetitions."""
        import torch

        count = max(len(tensor) for tensor in inputs.values())
        if count == self.size:
            return [inputs]
        calls = []
        for start in range(0, count, self.size):
            chosen = torch.arange(start, start + self.size).clamp(max=count - 1)
            calls.append(
                {
                    name: tensor.index_select(0, chosen.to(tensor.device)) if len(tensor) == count else tensor
                    for name, tensor in inputs.items()
                }
            )
        return calls

    def join(self, calls: Sequence["Tensors"], count: int) -> "Tensors":
        """Return the first `count` samples of all calls' outputs."""
        import torch

        return {name: torch.cat([call[name] for call in calls])[:count] for name in calls[0]}


@dataclass(frozen=True)
class Timestep(Adapter):
    """Changes the shape of the timestep, and rounds it if the engine takes integers only.

    An engine that takes one value cannot make a video from an image whose first frame has a timestep of its own.

    Attributes:
        axes: 0 for a scalar, 1 for one value, 2 for one value per token.
        whole: whether the engine takes integers.
        patch: frames, rows and columns of a token, for one value per token.
        count: the engine's batch size.
    """

    axes: int
    whole: bool
    patch: tuple[int, int, int]
    count: int = 1

    def describe(self) -> Fact:
        codes = ("engine.adapter_timestep_scalar", "engine.adapter_timestep_value", "engine.adapter_timestep_per_token")
        shape = Fact(codes[self.axes])
        return Fact("engine.adapter_timestep_integer", {"shape": shape}) if self.whole else shape

    def preprocess(self, inputs: "Tensors") -> "Tensors":
        import torch

        timestep = inputs["timestep"].reshape(-1)
        if self.whole:
            timestep = timestep.round()
        if self.axes == _PER_TOKEN:
            frames, rows, columns = (
                size // patch for size, patch in zip(inputs["latents"].shape[-_LATENT_AXES:], self.patch, strict=True)
            )
            # Two are those of the first latent frame and of the others.
            by_frame = torch.cat([timestep[:1], timestep[-1:].expand(frames - 1)])
            return inputs | {"timestep": by_frame.repeat_interleave(rows * columns).expand(self.count, -1)}
        if not bool((timestep == timestep[-1]).all()):
            raise EngineError("engine.import_one_timestep")
        return inputs | {"timestep": timestep[-1] if self.axes == 0 else timestep[-1:].expand(self.count)}


@dataclass(frozen=True)
class RepeatedText(Adapter):
    """Fills a longer text sequence with repetitions of the complete text, padding included.

    A transformer that attends to text without positions gives a token that appears n times n times the weight, so
    nothing changes if all tokens are repeated. Zeros would change the result: the transformer attends to its zero
    padding, and more of it takes attention from the words. Measured along a clip of diorama, for 512 tokens extended
    to 4,096: with zeros the velocity is 4 % to 48 % off, with repetitions 1e-6.

    Attributes:
        times: how often the model's own sequence fits into the engine's.
    """

    times: int

    def describe(self) -> Fact:
        return Fact("engine.adapter_repeated_text", {"times": self.times})

    def preprocess(self, inputs: "Tensors") -> "Tensors":
        return inputs | {"text_embeds": inputs["text_embeds"].repeat(1, self.times, 1)}


@dataclass(frozen=True)
class MaskedText(Adapter):
    """Pads the text with zeros that the engine's attention mask excludes.

    Attributes:
        length: of the engine's sequence; 0 keeps the text's length.
    """

    length: int

    def describe(self) -> Fact:
        if not self.length:
            return Fact("engine.adapter_full_mask")
        return Fact("engine.adapter_masked_text", {"length": self.length})

    def preprocess(self, inputs: "Tensors") -> "Tensors":
        text = inputs["text_embeds"]
        batch, tokens, width = text.shape
        length = self.length or tokens
        padded, mask = text.new_zeros(batch, length, width), text.new_zeros(batch, length)
        padded[:, :tokens], mask[:, :tokens] = text, 1.0
        return inputs | {"text_embeds": padded, TEXT_MASK: mask}


@dataclass(frozen=True)
class UnreadRows(Adapter):
    """Adds rows and columns that the engine takes but never reads: patches of two ignore the last of 45 rows.

    The clip has the size of the rows that are read, so nothing is lost.
    """

    rows: int
    columns: int

    def describe(self) -> Fact:
        return Fact("engine.adapter_unread_rows", {"edge": _edge(self.rows, self.columns)})

    def preprocess(self, inputs: "Tensors") -> "Tensors":
        return inputs | {"latents": _extend(inputs["latents"], self.rows, self.columns)}

    def postprocess(self, outputs: "Tensors", inputs: "Tensors") -> "Tensors":
        height, width = inputs["latents"].shape[-2:]
        return outputs | {"velocity": outputs["velocity"][..., :height, :width]}


@dataclass(frozen=True)
class RestoredRows(Adapter):
    """Reconstructs rows and columns that the engine does not output from their neighbors.

    The velocity is noise minus clean latents. Its noise differs from row to row, so the neighbor's velocity is useless,
    but the neighbor's clean latents are similar. Rectified flow has x = (1 - s)·clean + s·noise with s = t / 1000, so
    clean = x - s·velocity in the last row that exists, and velocity = (x - clean) / s in the one that does not.
    Measured along a clip of diorama: the row's clean latents are 13 % to 16 % off, its velocity 10 % at the first step
    and 61 % at the last; the neighbor's velocity would be 84 % off at every step.
    """

    rows: int
    columns: int

    exact = False

    @property
    def edge(self) -> Fact:
        """How many rows and columns are reconstructed."""
        return _edge(self.rows, self.columns)

    def describe(self) -> Fact:
        return Fact("engine.adapter_restored_rows", {"edge": self.edge})

    def postprocess(self, outputs: "Tensors", inputs: "Tensors") -> "Tensors":
        velocity, latents = outputs["velocity"].float(), inputs["latents"].float()
        height, width = velocity.shape[-2:]
        sigma = (inputs["timestep"].reshape(-1)[:1].float() / TRAINING_STEPS).to(latents.device)
        clean = latents[..., :height, :width] - sigma * velocity
        restored = (latents - _extend(clean, self.rows, self.columns)) / sigma
        restored[..., :height, :width] = velocity
        return outputs | {"velocity": restored}


@dataclass(frozen=True)
class Denormalised(Adapter):
    """Applies the model's mean and standard deviation to latents, for a decoder that does not do so itself.

    Attributes:
        mean, std: one number per channel, from the VAE's configuration.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def describe(self) -> Fact:
        return Fact("engine.adapter_denormalized")

    def preprocess(self, inputs: "Tensors") -> "Tensors":
        z = inputs["z"]
        shape = (1, -1, 1, 1, 1)
        return inputs | {"z": z * z.new_tensor(self.std).view(shape) + z.new_tensor(self.mean).view(shape)}


@dataclass(frozen=True)
class ClipFrames(Adapter):
    """Adapts a decoder of whole clips: n latent frames are 4(n - 1) + 1 frames.

    The decoder is causal, so latent frames that are appended do not change the frames before them, and are cut off.

    Attributes:
        order: of the decoder's axes: "bcfhw", "bfchw" or "bfhwc".
        least: minimum number of latent frames; a shorter clip is padded with its last one.
        per_latent: frames per latent frame.
    """

    order: str
    least: int
    per_latent: int

    def describe(self) -> Fact:
        if self.least > 1:
            return Fact("engine.adapter_clip_padded", {"per_latent": self.per_latent, "least": self.least})
        return Fact("engine.adapter_clip", {"per_latent": self.per_latent})

    def preprocess(self, inputs: "Tensors") -> "Tensors":
        import torch

        z = inputs["z"]
        missing = self.least - z.shape[2]
        if missing <= 0:
            return inputs
        return inputs | {"z": torch.cat([z, z[:, :, -1:].expand(-1, -1, missing, -1, -1)], dim=2)}

    def postprocess(self, outputs: "Tensors", inputs: "Tensors") -> "Tensors":
        frames = outputs["frames"].permute([self.order.index(axis) for axis in "bfhwc"])[0]
        count = self.per_latent * (inputs["z"].shape[2] - 1) + 1
        return outputs | {"frames": frames[:count].float().clamp(-1.0, 1.0)}


@dataclass(frozen=True)
class PaddedIds(Adapter):
    """Pads token ids under the attention mask, cuts embeddings to the original length, and zeroes their padding.

    Attributes:
        length: of the engine's sequence; 0 keeps the original length.
    """

    length: int

    def describe(self) -> Fact:
        if not self.length:
            return Fact("engine.adapter_zero_padding")
        return Fact("engine.adapter_padded_ids", {"length": self.length})

    def preprocess(self, inputs: "Tensors") -> "Tensors":
        if not self.length:
            return inputs
        padded = {}
        for name in ("input_ids", "attention_mask"):
            padded[name] = inputs[name].new_zeros(len(inputs[name]), self.length)
            padded[name][:, : inputs[name].shape[1]] = inputs[name]
        return inputs | padded

    def postprocess(self, outputs: "Tensors", inputs: "Tensors") -> "Tensors":
        mask = inputs["attention_mask"]
        embeds = outputs["embeds"][:, : mask.shape[1]].float()
        return outputs | {"embeds": embeds * mask.unsqueeze(-1).to(embeds)}


# The class names are stored in engines' folders.
_ADAPTERS: tuple[Any, ...] = (
    Names,
    Types,
    Timestep,
    RepeatedText,
    MaskedText,
    UnreadRows,
    RestoredRows,
    Denormalised,
    ClipFrames,
    PaddedIds,
)


def adapters_to_json(adapters: Sequence[Adapter]) -> list[dict[str, Any]]:
    """Return adapters as JSON values."""
    return [{"kind": type(adapter).__name__, **asdict(adapter)} for adapter in adapters]  # type: ignore[call-overload]


def adapters_from_json(values: Sequence[Mapping[str, Any]]) -> tuple[Adapter, ...]:
    """Parse the result of `adapters_to_json`.

    Raises:
        KeyError, TypeError: if it is anything else.
    """
    kinds = {kind.__name__: kind for kind in _ADAPTERS}
    return tuple(
        kinds[value["kind"]](**{name: _tuples(field) for name, field in value.items() if name != "kind"})
        for value in values
    )


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _edge(rows: int, columns: int) -> Fact:
    if not columns:
        return Fact("engine.edge_rows", {"rows": rows})
    if not rows:
        return Fact("engine.edge_columns", {"columns": columns})
    return Fact("engine.edge_rows_and_columns", {"rows": rows, "columns": columns})


def _extend(tensor: "torch.Tensor", rows: int, columns: int) -> "torch.Tensor":
    """Repeat the last row and column."""
    import torch

    if rows:
        tensor = torch.cat([tensor, tensor[..., -1:, :].expand(*tensor.shape[:-2], rows, -1)], dim=-2)
    if columns:
        tensor = torch.cat([tensor, tensor[..., -1:].expand(*tensor.shape[:-1], columns)], dim=-1)
    return tensor
