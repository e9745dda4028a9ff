"""Weights that are read onto a GPU while libraries are imported, at the start of a process that makes one video.

Importing diffusers and transformers takes seconds of one core; until then no module can hold weights. Text encoders
and transformers are read meanwhile (`models.tensor_stream.EarlyReads`), if the plan keeps all components on GPUs: its
forecast has their memory.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from runtime.core.disk_caches import QUANTIZED
from runtime.core.plan import ComponentPlan, ExecutionPlan
from runtime.execution.prompt_cache import PROMPTS, PromptCache
from runtime.models.folder import weight_files
from runtime.models.quantization import NONE, computed_in
from runtime.models.quantized_cache import QuantizedCache, quantized_key
from runtime.models.spec import ModelSpec, folder_of, is_text_encoder, is_transformer
from runtime.models.stored_weights import FileTensor, file_tensors, stays_packed
from runtime.models.tensor_stream import DTYPES, EarlyReads


def early_reads(spec: ModelSpec, plan: ExecutionPlan, cache_dir: Path | None) -> EarlyReads:
    """Return the early reads of a new job.

    Args:
        cache_dir: the cache folder; `None` without one.
    """
    return EarlyReads(partial(_needed, spec, plan, cache_dir))


def _needed(spec: ModelSpec, plan: ExecutionPlan, cache_dir: Path | None) -> Iterator[tuple[FileTensor, str]]:
    """Yield the tensors that the job reads as they are, and their devices, in the order of the job."""
    if plan.strategy.offload != "none" or not plan.strategy.keep_loaded:
        return
    for name in (*spec.text_encoders, *filter(is_transformer, plan.components)):
        part = plan.components[name]
        shared = plan.split is not None and plan.split.shares(name)
        if part.on_engine or shared or not part.device.startswith("cuda"):
            continue
        if is_text_encoder(name) and not _encodes(spec, plan, name, cache_dir):
            continue
        for tensor in _tensors(spec, name, part, cache_dir):
            yield tensor, part.device


def _encodes(spec: ModelSpec, plan: ExecutionPlan, name: str, cache_dir: Path | None) -> bool:
    """Whether the job certainly needs a text encoder: the embeddings of its prompt are not in the cache."""
    if spec.section is not None:  # each has a prompt of its own
        return False
    cache = PromptCache(None if cache_dir is None else cache_dir / PROMPTS)
    return cache.find(spec, plan.components[name], plan.prompt, name) is None


def _tensors(spec: ModelSpec, name: str, part: ComponentPlan, cache_dir: Path | None) -> Iterator[FileTensor]:
    """Yield the tensors of a component that need not be converted, in the order of its files."""
    if part.quantization != NONE and is_transformer(name):
        if cache_dir is not None:
            cache = QuantizedCache(cache_dir / QUANTIZED.name, writes=False)
            key = quantized_key(spec, name, part, computed_in(part), cache_dir)
            yield from cache.tensors(key).values() if cache.has(key) else ()
        return
    own = spec.files.get(name)
    if own is None:
        dtype = getattr(torch, part.dtype)
        for path in weight_files(spec.directory / folder_of(name)):
            yield from (tensor for tensor in file_tensors(path).values() if DTYPES.get(tensor.dtype) is dtype)
    elif is_transformer(name):
        packed = [weight for key, weight in own.weights.items() if stays_packed(key, weight, spec.unquantized)]
        tensors = [tensor for weight in packed for tensor in weight.parts]
        yield from sorted(tensors, key=lambda tensor: (tensor.path, tensor.offset))
