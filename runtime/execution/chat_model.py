"""A chat model in PyTorch, which enhances prompts: a model of transformers, from a folder with safetensors."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import psutil
import torch

from runtime.core.errors import EnhancerError, MachineError, ModelError, first_line
from runtime.execution.memory import release_cached_memory
from runtime.models.enhancers import LocalEnhancer, check_chat_model
from runtime.planner.chat_model import ChatPlacement, least_bytes, place_chat_model
from runtime.upstream.libraries import transformers

# Of an answer: more than any prompt has.
_MOST_TOKENS = 512
# Of the instructions and the request together.
_MOST_READ = 16_384


@contextlib.contextmanager
def loaded(enhancer: LocalEnhancer, gpu: int | None, free: Callable[[], None]) -> Iterator["ChatModel"]:
    """Load a chat model where it fits, and free it at the end of a `with` block.

    Args:
        gpu: index of the GPU; `None` without one.
        free: frees other models, which are kept if there is memory for all.

    Raises:
        MachineError: if it does not fit.
        ModelError: see `ChatModel`.
    """
    placement = _placement(enhancer, gpu)
    # Models on a GPU that leave no place there, or in RAM, make room first.
    if placement is None or (gpu is not None and not placement.on_gpu):
        free()
        placement = _placement(enhancer, gpu)
    if placement is None:
        needed, available = least_bytes(enhancer.parameters), psutil.virtual_memory().available
        raise MachineError("enhancer.no_memory", model=enhancer.title, needed=needed, free=available)
    device = f"cuda:{gpu}" if placement.on_gpu else "cpu"
    models = [ChatModel(enhancer, device, placement.dtype)]
    try:
        yield models[0]
    finally:
        models.clear()
        release_cached_memory(unreachable=True)


def _placement(enhancer: LocalEnhancer, gpu: int | None) -> ChatPlacement | None:
    on_gpu = None if gpu is None else torch.cuda.mem_get_info(gpu)[0]
    return place_chat_model(enhancer.parameters, on_gpu, psutil.virtual_memory().available)


class ChatModel:
    """A chat model, loaded. Its answers are the same each time.

    Args:
        device: torch's name of it.
        dtype: of its weights, by torch's name.

    Raises:
        ModelError: if it is pickled, damaged or incomplete, or transformers has no such model.
    """

    def __init__(self, enhancer: LocalEnhancer, device: str, dtype: str) -> None:
        check_chat_model(enhancer.folder)
        self._title, self._device = enhancer.title, device
        # Nothing is fetched, and no code of the folder runs.
        shared: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        folder = str(enhancer.folder)
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, **shared)
            model, loading = transformers.AutoModelForCausalLM.from_pretrained(
                folder, use_safetensors=True, dtype=getattr(torch, dtype), output_loading_info=True, **shared
            )
        except Exception as error:  # of any type
            raise ModelError("enhancer.unloadable", model=self._title, reason=first_line(error)[:200]) from error
        if loading["missing_keys"]:
            raise ModelError("enhancer.weights_missing", model=self._title, missing=len(loading["missing_keys"]))
        self._model: Any = model.eval().requires_grad_(requires_grad=False).to(device)

    @torch.inference_mode()
    def answer(self, messages: Sequence[Mapping[str, str]], check: Callable[[], None]) -> str:
        """Return the most likely answer to messages, of at most 512 tokens.

        Args:
            messages: each with "role" and "content".
            check: called before each token; raises an exception to end.

        Raises:
            EnhancerError: if the model's template does not take the messages, or they are too long.
        """
        try:
            inputs = self._encoded(messages)
        except Exception as error:  # of the template, of any type
            raise EnhancerError(
                "enhancer.template_failed", model=self._title, reason=first_line(error)[:200]
            ) from error
        length = inputs["input_ids"].shape[1]
        most = min(_MOST_READ, int(getattr(self._model.config, "max_position_embeddings", _MOST_READ)) - _MOST_TOKENS)
        if length > most:
            raise EnhancerError("enhancer.prompt_too_long", model=self._title, tokens=length, most=max(most, 0))

        def stops(ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            check()
            return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

        # The model's own settings for sampling would be warned about.
        settings = transformers.GenerationConfig(
            do_sample=False,
            max_new_tokens=_MOST_TOKENS,
            eos_token_id=self._model.generation_config.eos_token_id,
            bos_token_id=self._model.generation_config.bos_token_id,
            pad_token_id=self._padding(),
        )
        ids = self._model.generate(**inputs, generation_config=settings, stopping_criteria=[stops])
        return str(self._tokenizer.decode(ids[0, length:], skip_special_tokens=True))

    def _encoded(self, messages: Sequence[Mapping[str, str]]) -> Any:
        """Return the model's inputs. Some templates have no system role: the first message then holds both texts."""
        # Models that can think or not are asked not to; other templates ignore it.
        options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt", "enable_thinking": False}
        try:
            inputs = self._tokenizer.apply_chat_template(list(messages), **options)
        except Exception:  # of the template, of any type
            text = "\n\n".join(message["content"] for message in messages)
            inputs = self._tokenizer.apply_chat_template([{"role": "user", "content": text}], **options)
        return inputs.to(self._device)

    def _padding(self) -> int:
        """Return the token of padding, which no answer has, but which `generate` asks for."""
        ids = (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id)
        return next((int(token) for token in ids if token is not None), 0)
