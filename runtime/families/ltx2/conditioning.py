"""Prompts to embeddings: the states of all of Gemma's layers, and what the connectors make of them.

Tokens are not padded: Gemma's positions are relative, so padding changes no other token's states, and the connectors
put learned registers in its place.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from runtime.core.prompt_weights import read_weights
from runtime.execution.text_encoder import TextEncoder, TextEncoding
from runtime.families.ltx2.spec import MAX_SEQUENCE_LENGTH, VISION


class GemmaStates(Gemma3ForConditionalGeneration):
    """Gemma 3 without the parts for images and for the words that follow.

    Its result is the states of each token before the first layer and after every layer, joined as diffusers'
    `LTX2Pipeline` does, in place of the last hidden state.
    """

    _keys_to_ignore_on_load_unexpected = (VISION.pattern,)
    _tied_weights_keys: Mapping[str, str] = {}

    def __init__(self, config: Gemma3Config) -> None:
        super().__init__(config)
        del self.model.vision_tower, self.model.multi_modal_projector, self.lm_head

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        """Return the joined states as `last_hidden_state`, (1, tokens, width × states)."""
        states = self.model.language_model(
            input_ids, attention_mask=attention_mask, output_hidden_states=True, use_cache=False
        ).hidden_states
        return SimpleNamespace(last_hidden_state=torch.stack(states, dim=-1).flatten(2))


class GemmaEncoder(TextEncoder):
    """Gemma's states of a prompt's tokens, without padding."""

    def encode(self, prompt: str) -> TextEncoding:
        """Return the states, (1, tokens, width × states); prompts beyond the longest are cut."""
        text = read_weights(prompt).text.strip()
        inputs = self._tokenizer(
            [text], max_length=self._length, truncation=True, return_attention_mask=True, return_tensors="pt"
        )
        whole = self._tokenizer(text).input_ids
        states = self._model(inputs.input_ids, inputs.attention_mask)
        return TextEncoding(states, self._unknown(text), len(whole) > self._length)


class PyTorchConnectors:
    """A `LTX2TextConnectors`, see `execution.components.TextConnector`.

    The result is the embeddings for the video and those for the sound, one after the other in each token.
    """

    def __init__(self, module: Any, device: str | torch.device) -> None:
        self._module, self._device = module, torch.device(device)

    # Not in inference mode: offloading hooks change weights while the module runs.
    @torch.no_grad()
    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of a text's tokens and of the registers that follow them."""
        count = states.shape[1]
        padded = F.pad(states.to(self._device, self._module.dtype), (0, 0, 0, MAX_SEQUENCE_LENGTH - count))
        mask = (torch.arange(MAX_SEQUENCE_LENGTH, device=self._device) < count).long()[None]
        video, sound, _ = self._module(padded, mask, padding_side="right")
        return torch.cat([video, sound], dim=2)
