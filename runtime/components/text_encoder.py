"""Prompt to embeddings. Knows nothing about guidance or the loop."""

from dataclasses import dataclass
from typing import Any, Protocol

import regex
import torch
from diffusers.pipelines.wan.pipeline_wan import prompt_clean

_WORD = regex.compile(r"[\p{L}\p{N}]")


@dataclass(frozen=True)
class TextEncoding:
    """A prompt, read.

    Attributes:
        embeds: (1, max_sequence_length, text width), zero beyond the prompt's end.
        unknown_words: words that the model has no token for, in the prompt's order.
        cut: whether the prompt was longer than the model reads.
    """

    embeds: torch.Tensor
    unknown_words: tuple[str, ...]
    cut: bool


class TextEncoder(Protocol):
    """Encodes one prompt."""

    def encode(self, prompt: str) -> TextEncoding:
        """Return the prompt's embeddings; the empty prompt is allowed."""
        ...


class PyTorchTextEncoder:
    """A UMT5 encoder and its tokenizer, as `diffusers.WanPipeline.encode_prompt` uses them."""

    def __init__(self, tokenizer: Any, module: torch.nn.Module, max_sequence_length: int) -> None:
        self._tokenizer = tokenizer
        self._module = module
        self._length = max_sequence_length
        self._device = next(module.parameters()).device

    @torch.inference_mode()
    def encode(self, prompt: str) -> TextEncoding:
        """Return the prompt's embeddings in the module's dtype."""
        text = prompt_clean(prompt)
        inputs = self._tokenizer(
            [text],
            padding="max_length",
            max_length=self._length,
            truncation=True,
            add_special_tokens=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        ids, mask = inputs.input_ids.to(self._device), inputs.attention_mask.to(self._device)
        embeds = self._module(ids, mask).last_hidden_state * mask.unsqueeze(-1)
        whole = self._tokenizer(text, add_special_tokens=True).input_ids
        return TextEncoding(embeds, self._unknown(text), len(whole) > self._length)

    def _unknown(self, text: str) -> tuple[str, ...]:
        unknown_id = self._tokenizer.unk_token_id
        if unknown_id is None or not self._tokenizer.is_fast:
            return ()
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        pieces = [
            text[start:end]
            for token, (start, end) in zip(encoding.input_ids, encoding.offset_mapping, strict=True)
            if token == unknown_id
        ]
        return tuple(dict.fromkeys(piece for piece in pieces if _WORD.search(piece)))
