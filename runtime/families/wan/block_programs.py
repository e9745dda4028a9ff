"""Block engines of Wan's transformer: the parts of a block between its attentions, with the weights as inputs.

A part computes each token by itself, so it takes any number of tokens of any clip, and its engine serves every block,
both experts and every LoRA. The parts of one block, and what runs between them:

    block_qkv            x -> q, k, v              norm 1, projections, norms of q and k, rotary embedding
      self-attention     q, k, v -> attended
    block_query          x, attended -> x, query   output projection, norm 2, projection and norm of the text's query
      cross-attention    query, text -> attended
    block_feed_forward   x, attended -> x          output projection, norm 3, feed-forward

All arithmetic of the residual stream is float32, as in `programs.TransformerForm`; matrix products are in the dtype of
the weights, or in FP8 (`engines.fp8`). `modulation` is shift, scale and gate of self-attention, then of the
feed-forward: the block's table plus the timestep's vectors.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from runtime.engines.block_programs import BlockPart, UniformBlockPart
from runtime.engines.fp8 import Weight, linear


class BlockQKV(UniformBlockPart):
    """Queries, keys and values of self-attention, from the residual stream."""

    rows = 6
    inputs = ("x", "modulation", "cos", "sin")
    outputs = ("q", "k", "v")
    weights: Mapping[str, str] = {
        "q_weight": "attn1.to_q.weight",
        "q_bias": "attn1.to_q.bias",
        "rms_q": "attn1.norm_q.weight",
        "k_weight": "attn1.to_k.weight",
        "k_bias": "attn1.to_k.bias",
        "rms_k": "attn1.norm_k.weight",
        "v_weight": "attn1.to_v.weight",
        "v_bias": "attn1.to_v.bias",
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
        q = self._rotated(self._rms_norm(linear(normed, q_weight, q_bias), rms_q), cos, sin)
        k = self._rotated(self._rms_norm(linear(normed, k_weight, k_bias), rms_k), cos, sin)
        return q.to(dtype), k.to(dtype), linear(normed, v_weight, v_bias).to(dtype)


class BlockQuery(UniformBlockPart):
    """The residual stream after self-attention, and the queries of cross-attention."""

    rows = 6
    inputs = ("x", "attended", "modulation")
    outputs = ("x", "query")
    weights: Mapping[str, str] = {
        "out_weight": "attn1.to_out.0.weight",
        "out_bias": "attn1.to_out.0.bias",
        "norm_weight": "norm2.weight",
        "norm_bias": "norm2.bias",
        "q_weight": "attn2.to_q.weight",
        "q_bias": "attn2.to_q.bias",
        "rms_q": "attn2.norm_q.weight",
    }

    def forward(
        self,
        x: torch.Tensor,
        attended: torch.Tensor,
        modulation: torch.Tensor,
        out_weight: Weight,
        out_bias: torch.Tensor,
        norm_weight: torch.Tensor,
        norm_bias: torch.Tensor,
        q_weight: Weight,
        q_bias: torch.Tensor,
        rms_q: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stream and the queries, each (tokens, width)."""
        dtype = out_weight.dtype
        x = x + linear(attended, out_weight, out_bias).float() * modulation[2:3]
        normed = self._layer_norm(x, norm_weight, norm_bias).to(dtype)
        return x, self._rms_norm(linear(normed, q_weight, q_bias), rms_q).to(dtype)


class BlockFeedForward(UniformBlockPart):
    """The residual stream after cross-attention and the feed-forward."""

    rows = 6
    inputs = ("x", "attended", "modulation")
    outputs = ("x",)
    weights: Mapping[str, str] = {
        "out_weight": "attn2.to_out.0.weight",
        "out_bias": "attn2.to_out.0.bias",
        "expand_weight": "ffn.net.0.proj.weight",
        "expand_bias": "ffn.net.0.proj.bias",
        "contract_weight": "ffn.net.2.weight",
        "contract_bias": "ffn.net.2.bias",
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
        dtype = out_weight.dtype
        x = x + linear(attended, out_weight, out_bias).float()
        normed = self._modulated(x, modulation[3:4], modulation[4:5]).to(dtype)
        inner = F.gelu(linear(normed, expand_weight, expand_bias), approximate="tanh")
        return x + linear(inner, contract_weight, contract_bias).float() * modulation[5:6]


BLOCK_PARTS: Mapping[str, type[BlockPart]] = {
    "block_qkv": BlockQKV,
    "block_query": BlockQuery,
    "block_feed_forward": BlockFeedForward,
}
