"""Prompts to text embeddings: tokenizing, and the text model in PyTorch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import regex
import torch
import torch.nn.functional as F

from runtime.core.errors import ModelError
from runtime.core.prompt_weights import WeightedText, read_weights

_WORD = regex.compile(r"[\p{L}\p{N}]")


@dataclass(frozen=True)
class TextEncoding:
    """A prompt's embeddings.

    Attributes:
        embeds: (1, max_sequence_length, text width), zero beyond the prompt's end; or without tokens beyond its end.
        unknown_words: words without a token, in the prompt's order.
        cut: whether the prompt was longer than `max_sequence_length` tokens.
    """

    embeds: torch.Tensor
    unknown_words: tuple[str, ...]
    cut: bool


def joined(encodings: Sequence[TextEncoding]) -> TextEncoding:
    """Return what several text encoders make of a prompt as one.

    The embeddings of further encoders, padded with zeros to the width of the first one's, come before these. Unknown
    words and the cut are the first encoder's: further ones summarize a prompt, whose end they may miss.
    """
    first, *rest = encodings
    embeds = first.embeds
    for encoding in rest:
        missing = embeds.shape[2] - encoding.embeds.shape[2]
        embeds = torch.cat([F.pad(encoding.embeds.to(embeds), (0, missing)), embeds], dim=1)
    return replace(first, embeds=embeds)


# (1, max_sequence_length) token ids and mask, int64, to (1, max_sequence_length, text width), zero beyond the mask.
TextModel = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class TextEncoder:
    """A tokenizer and a model that embeds its tokens.

    Args:
        max_sequence_length: tokens of every prompt; shorter ones are padded, longer ones are cut.
        clean: applied to a prompt before it is tokenized.
    """

    def __init__(
        self, tokenizer: Any, model: TextModel, max_sequence_length: int, clean: Callable[[str], str] = str
    ) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._length = max_sequence_length
        self._clean = clean

    def encode(self, prompt: str) -> TextEncoding:
        """Return the prompt's embeddings; the empty prompt is allowed.

        With weights, see `core.prompt_weights`, an embedding is scaled in relation to that of the empty prompt at the
        same place. A token has the weight of its last character. Source: `ClipTokenWeightEncoder` of ComfyUI's
        `sd1_clip.py`, which does so for T5 and UMT5 too.

        Raises:
            ModelError: for weights, if the tokenizer does not know the places of tokens.
        """
        weighted = read_weights(self._clean(prompt))
        text = weighted.text
        embeds = self._embeds(text)
        if weighted.weights:
            empty = self._embeds("")
            weights = self._token_weights(weighted).to(embeds).unsqueeze(-1)
            embeds = torch.where(weights == 1, embeds, empty + (embeds - empty) * weights)
        whole = self._tokenizer(text, add_special_tokens=True).input_ids
        return TextEncoding(embeds, self._unknown(text), len(whole) > self._length)

    def _tokens(self, text: str, **more: Any) -> Any:
        return self._tokenizer(
            [text],
            padding="max_length",
            max_length=self._length,
            truncation=True,
            add_special_tokens=True,
            return_attention_mask=True,
            return_tensors="pt",
            **more,
        )

    def _embeds(self, text: str) -> torch.Tensor:
        inputs = self._tokens(text)
        return self._model(inputs.input_ids, inputs.attention_mask)

    def _token_weights(self, weighted: WeightedText) -> torch.Tensor:
        """Return the weight of each token, (1, max_sequence_length); 1 for those that stand for no character."""
        if not self._tokenizer.is_fast:
            raise ModelError("model.tokenizer_without_places")
        places = self._tokens(weighted.text, return_offsets_mapping=True).offset_mapping[0].tolist()
        return torch.tensor([[weighted.weights[end - 1] if end > start else 1.0 for start, end in places]])

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


class PyTorchTextModel:
    """A text encoder of transformers, such as `UMT5EncoderModel`, called for its last hidden state.

    Args:
        module: the model; offloading may keep its weights on another device until it is called.
        device: where it computes.
    """

    def __init__(self, module: torch.nn.Module, device: str | torch.device) -> None:
        self._module = module
        self._device = torch.device(device)

    # Not in inference mode: offloading hooks change weights while the module runs.
    @torch.no_grad()
    def __call__(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """See `TextModel`; the result has the module's dtype."""
        ids, mask = ids.to(self._device), mask.to(self._device)
        embeds: torch.Tensor = self._module(ids, mask).last_hidden_state * mask.unsqueeze(-1)
        return embeds
