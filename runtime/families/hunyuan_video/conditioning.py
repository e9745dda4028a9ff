"""Prompts to embeddings: LLaMA's of each token, and CLIP's of the whole prompt.

Tokens are not padded. In both models a token attends to earlier ones only, so padding changes no other token's
embedding, and the transformer masks it.
"""

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel

from runtime.core.prompt_weights import read_weights
from runtime.execution.text_encoder import TextEncoder, TextEncoding, TextModel
from runtime.families.hunyuan_video.spec import CLIP_TOKENS, SKIPPED_LAYERS, TEMPLATE_TOKENS

# `DEFAULT_PROMPT_TEMPLATE` of diffusers' `pipeline_hunyuan_video`, whose import loads every HunyuanVideo pipeline.
# LLaMA reads the instruction; the transformer gets the tokens after it.
TEMPLATE = (
    "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the following aspects: "
    "1. The main content and theme of the video."
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
    "4. background environment, light, style and atmosphere."
    "5. camera angles, movements, and transitions used in the video:<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
)


class ShortLlama(LlamaModel):
    """A `LlamaModel` without the layers whose output is not used, and without the norm after them.

    Its last hidden state is `hidden_states[-3]` of the whole model.
    """

    # Weights of the skipped layers are in the files.
    _keys_to_ignore_on_load_unexpected = (r"^(model\.)?layers\.", r"^(model\.)?norm\.")

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        del self.layers[-SKIPPED_LAYERS:]
        self.norm = nn.Identity()
        # One call embeds a whole text.
        self.config.use_cache = False


class LlamaEncoder(TextEncoder):
    """LLaMA with the template around the prompt.

    Args:
        max_sequence_length: tokens of the prompt and the end of the template; longer texts are cut.
    """

    def __init__(self, tokenizer: Any, model: TextModel, max_sequence_length: int) -> None:
        super().__init__(tokenizer, model, TEMPLATE_TOKENS + max_sequence_length)

    def encode(self, prompt: str) -> TextEncoding:
        """Return the embeddings of the prompt's tokens, (1, tokens, width), without padding."""
        prompt = read_weights(prompt).text
        text = TEMPLATE.format(prompt)
        whole = self._tokenizer(text).input_ids
        embeds = _embeds(self._tokenizer, self._model, text, self._length)
        return TextEncoding(embeds[:, TEMPLATE_TOKENS:], self._unknown(prompt), len(whole) > self._length)


class ClipEncoder(TextEncoder):
    """CLIP's embedding of a prompt: that of its last token, which ends the text."""

    def __init__(self, tokenizer: Any, model: TextModel) -> None:
        super().__init__(tokenizer, model, CLIP_TOKENS)

    def encode(self, prompt: str) -> TextEncoding:
        """Return the embedding, (1, 1, width)."""
        prompt = read_weights(prompt).text
        whole = self._tokenizer(prompt).input_ids
        embeds = _embeds(self._tokenizer, self._model, prompt, self._length)
        return TextEncoding(embeds[:, -1:], self._unknown(prompt), len(whole) > self._length)


def _embeds(tokenizer: Any, model: TextModel, text: str, most: int) -> torch.Tensor:
    inputs = tokenizer([text], max_length=most, truncation=True, return_attention_mask=True, return_tensors="pt")
    return model(inputs.input_ids, inputs.attention_mask)
