"""Programs of block engines: the parts of a transformer's blocks around attention, with their weights as inputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from runtime.core.plan import LatentSize, is_sound_block
from runtime.engines.component_programs import SMALLEST_DYNAMIC, Program
from runtime.engines.fp8 import Fp8Part
from runtime.engines.key_parts import SOUND_TOKENS
from runtime.engines.signatures import IOSignature, Shapes, TensorSignature
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_index import ShapeProfile

# The named size of the axis that counts tokens.
TOKENS = "tokens"
# Of all norms, in every published configuration.
_EPS = 1e-6


class BlockTensor(NamedTuple):
    """Sizes of an input or output of a `BlockPart`, `TOKENS` for the tokens, and its dtype if not the precision."""

    sizes: tuple[int | str, ...]
    dtype: str = ""

    def shape(self, tokens: int) -> tuple[int, ...]:
        """Return the shape for a number of tokens."""
        return tuple(tokens if isinstance(size, str) else size for size in self.sizes)


class BlockPart(nn.Module):
    """The form of a block engine's program: a part of a transformer's block that computes each token by itself.

    It is called with `inputs` and then `weights`, and returns `outputs`, in these orders. `x` is (tokens, width),
    float32; `modulation` has rows of an adaptive norm, float32. Queries, keys, values and attended values are
    (tokens, width of all heads), the heads concatenated, in the dtype of the weights.

    Attributes:
        inputs, outputs: names.
        weights: the path of the parameter within a block, by the name of the input for it.
        tensors: by name.
        variadic: whether `forward` takes its tensors as one variadic argument.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: Mapping[str, str]
    tensors: Mapping[str, BlockTensor]
    variadic: bool = False
    _swap_index: torch.Tensor

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """Normalise over the last axis in float32: `torch.nn.RMSNorm`, spelt out."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS)
        return normed if weight is None else normed * weight.float()


class UniformBlockPart(BlockPart):
    """A part of blocks in which all tokens, queries, keys and values have one width.

    Attributes:
        rows: of `modulation`.
    """

    rows: int

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        transformer = spec.transformer
        self._heads = transformer.num_attention_heads
        head_width, width, inner = transformer.attention_head_dim, transformer.width, transformer.ffn_dim
        # The index of the other of two adjacent channels.
        self.register_buffer("_swap_index", torch.arange(head_width) ^ 1, persistent=False)
        square, vector = BlockTensor((width, width)), BlockTensor((width,))
        self.tensors = {
            **dict.fromkeys(("attended", "q", "k", "v", "query"), BlockTensor((TOKENS, width))),
            **{name: square if name.endswith("_weight") else vector for name in self.weights},
            "x": BlockTensor((TOKENS, width), "float32"),
            "modulation": BlockTensor((self.rows, width), "float32"),
            **dict.fromkeys(("cos", "sin"), BlockTensor((TOKENS, head_width), "float32")),
            # Norms of queries and keys are in the model's dtype, unlike those of the stream.
            **dict.fromkeys(("norm_weight", "norm_bias"), BlockTensor((width,), "float32")),
            "expand_weight": BlockTensor((inner, width)),
            "expand_bias": BlockTensor((inner,)),
            "contract_weight": BlockTensor((width, inner)),
            "both_weight": BlockTensor((width, width + inner)),
        }

    def _layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return F.layer_norm(x, (x.shape[-1],), weight, bias, _EPS)

    def _modulated(self, x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self._layer_norm(x) * (1 + scale) + shift

    def _rotated(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate adjacent channels; `x` is (tokens, width), float32, the tables are `rotation_tables`'."""
        x = x.view(x.shape[0], self._heads, -1)
        # TensorRT runs a gather 15 % faster than splitting and joining channels (8.6, the whole part, on an H200).
        return (x * cos.unsqueeze(1) + x.index_select(-1, self._swap_index) * sin.unsqueeze(1)).flatten(1)


@dataclass(frozen=True)
class BlockProgram(Program):
    """A program of block engines, whose weights are inputs. Its profiles do not depend on the latents' size.

    Attributes:
        dtype: the dtype of activations, by name.
        placed: the device of its inputs.
        tokens: the most tokens of one call.
    """

    dtype: str
    placed: torch.device
    tokens: int

    @property
    def part(self) -> BlockPart:
        """The form."""
        return cast("BlockPart", self.module)

    @property
    def device(self) -> torch.device:
        return self.placed

    @property
    def input_names(self) -> tuple[str, ...]:
        return (*self.part.inputs, *self.part.weights)

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.part.outputs

    @property
    def usual_tokens(self) -> int:
        """The tokens of most calls: `tokens`, but fewer in the stream of a sound, which a call takes whole."""
        return min(self.tokens, SOUND_TOKENS) if is_sound_block(self.name) else self.tokens

    def inputs(self, latent: LatentSize, seed: int = 0) -> dict[str, torch.Tensor]:
        """Return random inputs for `usual_tokens`; products with the weights keep the magnitude of activations."""
        return self.inputs_for(self.usual_tokens, seed)

    def inputs_for(self, tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
        """Return random inputs for a number of tokens. They are drawn on the CPU, so equal on every device."""
        generator = torch.Generator("cpu").manual_seed(seed)

        def draw(name: str) -> torch.Tensor:
            tensor = self.part.tensors[name]
            values = torch.randn(tensor.shape(tokens), generator=generator)
            if isinstance(self.module, Fp8Part):
                return self.module.drawn(name, values).to(self.device, getattr(torch, tensor.dtype or self.dtype))
            values = values / values.shape[1] ** 0.5 if name in self.part.weights and values.ndim > 1 else values
            return values.to(self.device, getattr(torch, tensor.dtype or self.dtype))

        return {name: draw(name) for name in self.input_names}

    def shapes(self, profile: ShapeProfile) -> Shapes:
        return self.shapes_of(1), self.shapes_of(self.usual_tokens), self.shapes_of(self.tokens)

    def shapes_of(self, tokens: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of all inputs for a number of tokens."""
        return {name: self.part.tensors[name].shape(tokens) for name in self.input_names}

    def export(self, profile: ShapeProfile, *, cut: bool = False) -> torch.export.ExportedProgram:
        tokens = torch.export.Dim(TOKENS, min=SMALLEST_DYNAMIC, max=self.tokens)
        shapes = [
            {axis: tokens for axis, size in enumerate(self.part.tensors[name].sizes) if size == TOKENS}
            for name in self.input_names
        ]
        example = tuple(
            torch.empty(tensor.shape(self.tokens), dtype=getattr(torch, tensor.dtype or self.dtype), device=self.device)
            for tensor in map(self.part.tensors.__getitem__, self.input_names)
        )
        dynamic = (tuple(shapes),) if self.part.variadic else tuple(shapes)
        with torch.no_grad():
            return torch.export.export(self.module, example, dynamic_shapes=dynamic, strict=False)

    def signature(self, profile: ShapeProfile, example: dict[str, torch.Tensor]) -> IOSignature:
        def describe(name: str) -> TensorSignature:
            tensor = self.part.tensors[name]
            sizes = tuple(size if isinstance(size, int) else (size, 1) for size in tensor.sizes)
            return TensorSignature(name, tensor.dtype or self.dtype, sizes)

        return IOSignature(
            tuple(map(describe, self.input_names)),
            tuple(map(describe, self.output_names)),
            {TOKENS: (1, self.tokens)},
        )
