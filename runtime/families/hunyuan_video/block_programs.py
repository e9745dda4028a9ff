"""Block engines of HunyuanVideo's transformer: the parts of a block around attention, with the weights as inputs.

A part computes each token by itself, so its engine serves every clip and every block. Double blocks have layers for the
clip's tokens and layers of the same sizes for the text's, which share engines. The parts, and what runs between them:

    block_qkv            x -> q, k, v              norm, projections, norms of q and k, rotary embedding; all blocks
      attention          q, k, v of all tokens -> attended
    block_feed_forward   x, attended -> x          output projection, norm, feed-forward; double blocks
    block_single         x, attended -> x          norm, inner layer, output projection; single blocks

Paths of weights are those of the views that `transformer` makes of a block. The residual stream is float32; matrix
products are in the dtype of the weights, or in FP8 (`engines.fp8`). FramePack's blocks are the same.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from runtime.engines.block_programs import BlockPart, BlockTensor, UniformBlockPart
from runtime.engines.fp8 import Weight, linear
from runtime.models.spec import ModelSpec


class _BlockPart(UniformBlockPart):
    """Norms of queries and keys are those of each head."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        rms = BlockTensor((spec.transformer.attention_head_dim,))
        self.tensors = {**self.tensors, "rms_q": rms, "rms_k": rms}

    def _rotated_heads(
        self, x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Normalise each head in float32 and rotate adjacent channels; `x` is (tokens, width)."""
        return self._rotated(self._rms_norm(x.view(x.shape[0], self._heads, -1), weight), cos, sin)


class BlockQKV(_BlockPart):
    """Queries, keys and values, from the residual stream; `modulation` is shift and scale."""

    rows = 2
    inputs = ("x", "modulation", "cos", "sin")
    outputs = ("q", "k", "v")
    weights: Mapping[str, str] = {
        "q_weight": "to_q.weight",
        "q_bias": "to_q.bias",
        "rms_q": "norm_q.weight",
        "k_weight": "to_k.weight",
        "k_bias": "to_k.bias",
        "rms_k": "norm_k.weight",
        "v_weight": "to_v.weight",
        "v_bias": "to_v.bias",
    }

    def forward(
        self,
        x: torch.Tensor,
        modulation: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        q_weight: Weight,
        q_bias: torch.Tensor,
        rms_q: torch.Tensor,
        k_weight: Weight,
        k_bias: torch.Tensor,
        rms_k: torch.Tensor,
        v_weight: Weight,
        v_bias: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v, each (tokens, width); `cos` and `sin` are (tokens, head width), float32."""
        dtype = q_weight.dtype
        normed = self._modulated(x, modulation[0:1], modulation[1:2]).to(dtype)
        q = self._rotated_heads(linear(normed, q_weight, q_bias), rms_q, cos, sin)
        k = self._rotated_heads(linear(normed, k_weight, k_bias), rms_k, cos, sin)
        return q.to(dtype), k.to(dtype), linear(normed, v_weight, v_bias).to(dtype)


class BlockFeedForward(UniformBlockPart):
    """The residual stream after attention and the feed-forward; `modulation` is gate, shift, scale and gate."""

    rows = 4
    inputs = ("x", "attended", "modulation")
    outputs = ("x",)
    weights: Mapping[str, str] = {
        "out_weight": "to_out.weight",
        "out_bias": "to_out.bias",
        "expand_weight": "expand.weight",
        "expand_bias": "expand.bias",
        "contract_weight": "contract.weight",
        "contract_bias": "contract.bias",
    }

    def forward(
        self,
        x: torch.Tensor,
        attended: torch.Tensor,
        modulation: torch.Tensor,
        out_weight: Weight,
        out_bias: torch.Tensor,
        expand_weight: Weight,
        expand_bias: torch.Tensor,
        contract_weight: Weight,
        contract_bias: torch.Tensor,
    ) -> torch.Tensor:
        """Return the stream, (tokens, width)."""
        x = x + linear(attended, out_weight, out_bias).float() * modulation[0:1]
        normed = self._modulated(x, modulation[1:2], modulation[2:3]).to(out_weight.dtype)
        inner = F.gelu(linear(normed, expand_weight, expand_bias), approximate="tanh")
        return x + linear(inner, contract_weight, contract_bias).float() * modulation[3:4]


class BlockSingle(UniformBlockPart):
    """The residual stream after a single block; `modulation` is shift, scale and gate."""

    rows = 3
    inputs = ("x", "attended", "modulation")
    outputs = ("x",)
    weights: Mapping[str, str] = {
        "expand_weight": "expand.weight",
        "expand_bias": "expand.bias",
        "both_weight": "contract.weight",
        "both_bias": "contract.bias",
    }

    def forward(
        self,
        x: torch.Tensor,
        attended: torch.Tensor,
        modulation: torch.Tensor,
        expand_weight: Weight,
        expand_bias: torch.Tensor,
        both_weight: Weight,
        both_bias: torch.Tensor,
    ) -> torch.Tensor:
        """Return the stream, (tokens, width)."""
        normed = self._modulated(x, modulation[0:1], modulation[1:2]).to(expand_weight.dtype)
        inner = F.gelu(linear(normed, expand_weight, expand_bias), approximate="tanh").to(attended.dtype)
        out = linear(torch.cat([attended, inner], dim=1), both_weight, both_bias)
        return x + out.float() * modulation[2:3]


BLOCK_PARTS: Mapping[str, type[BlockPart]] = {
    "block_qkv": BlockQKV,
    "block_feed_forward": BlockFeedForward,
    "block_single": BlockSingle,
}
