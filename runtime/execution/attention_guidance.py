"""Normalized attention guidance (NAG): a negative prompt in a single pass, for models and LoRAs without guidance.

Paper: https://arxiv.org/abs/2505.21179. Attention to the prompt is moved away from attention to the negative prompt, by
queries that both share, and limited so that its values stay in the usual range. It runs in the attention to the text
alone, so the video's own attention is computed once.
"""

import torch

from runtime.execution.attention import Attention

# How many times as large as attention to the prompt the result may be, by the sum of magnitudes of a token, and its
# share in the sum with attention to the prompt. The authors' for Wan2.1 in 4 steps; ComfyUI-KJNodes has the same for
# LTX-2.
_TAU, _ALPHA = 2.5, 0.25
_SMALLEST = 1e-7


def attend_text(
    attend: Attention, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the result of attention to a text, (batch, tokens, heads × head width).

    Args:
        query: (batch, tokens, heads, head width).
        keys, values: (batch, text tokens, heads, head width); or of a prompt and a negative prompt, (2, …), for a batch
            of one, which are guided by the scale.
        scale: see `normalized`.
    """
    count = len(query)
    attended = attend(query, keys[:count], values[:count]).flatten(2)
    if len(keys) == count:
        return attended
    return normalized(attended, attend(query, keys[count:], values[count:]).flatten(2), scale)


def normalized(positive: torch.Tensor, negative: torch.Tensor, scale: float) -> torch.Tensor:
    """Return attention to a prompt, guided away from attention to a negative prompt.

    Source: equations 6 to 9 of the paper, as `nag` in https://github.com/ChenDarYen/ComfyUI-NAG.

    Args:
        positive, negative: results of attention, (batch, tokens, width).
        scale: 1 changes nothing.

    Returns:
        A tensor shaped like `positive`, in its dtype.
    """
    guided = (positive * scale).sub(negative, alpha=scale - 1)
    size, guided_size = (
        torch.linalg.vector_norm(states, ord=1, dim=-1, keepdim=True, dtype=torch.float32)
        for states in (positive, guided)
    )
    limited = torch.clamp(_TAU * size / guided_size.clamp_min(_SMALLEST), max=1.0)
    return positive * (1 - _ALPHA) + guided * (_ALPHA * limited).to(guided.dtype)
