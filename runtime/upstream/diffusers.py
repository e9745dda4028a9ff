"""Private names of diffusers that Tandem uses, each with the reason.

`tests/upstream/test_diffusers.py` fails if a release of diffusers changes one of them.
"""

import importlib.util
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


@cache
def scheduler_names() -> frozenset[str]:
    """Return the names of diffusers' schedulers.

    Reason: importing diffusers imports torch, which planning does not need; the names are in the text of the package.
    """
    package = importlib.util.find_spec("diffusers")
    places = package.submodule_search_locations if package else None
    folders = [Path(place) / "schedulers" for place in places or ()]
    classes = re.compile(r"^class (\w+)\([^)]*\bSchedulerMixin\b", re.MULTILINE)
    texts = [path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("scheduling_*.py")]
    return frozenset(name for text in texts for name in classes.findall(text) if not name.startswith("Flax"))


def use_scipy(scheduler: type) -> None:
    """Give the module of a scheduler's class scipy, for beta sigmas.

    Raises:
        ImportError: if it is not installed.

    Reason: scipy was hidden from diffusers (`upstream.libraries`).
    """
    import scipy.stats
    from diffusers.utils import import_utils

    import_utils._scipy_available = True
    vars(sys.modules[scheduler.__module__])["scipy"] = scipy


def use_bitsandbytes() -> None:
    """Let diffusers quantize with bitsandbytes.

    Raises:
        ImportError: if it is not installed.

    Reason: bitsandbytes was hidden from diffusers (`upstream.libraries`).
    """
    import bitsandbytes
    from diffusers.quantizers.bitsandbytes import utils
    from diffusers.utils import import_utils

    import_utils._bitsandbytes_available, import_utils._bitsandbytes_version = True, bitsandbytes.__version__
    utils.bnb = bitsandbytes


def causal_padding(conv: Any) -> tuple[int, int, int]:
    """Return a causal convolution's padding: (frames before, rows, columns).

    Reason: `WanCausalConv3d` keeps its padding in `_padding`, as (left, right, top, bottom, before, after), and sets
    the public `padding` to zero.
    """
    columns, _, rows, _, before, after = conv._padding
    assert after == 0
    return before, rows, columns


def reset_step_cache(transformer: Any) -> None:
    """Clear what a transformer's step cache holds of earlier steps.

    Reason: `CacheMixin` has no public counterpart; pipelines call this method after a clip.
    """
    transformer._reset_stateful_cache()


def decide_first_block_cache(transformer: Any, changed: Callable[[Any, Any], bool]) -> None:
    """Replace the decision of first-block caching, after `enable_cache`.

    Args:
        changed: takes the first block's residual and that of the last computed step; returns whether to compute the
            other blocks. Without an earlier step they are always computed.

    Reason: `FirstBlockCacheConfig` has a threshold only. Processes that share a pass must decide alike.
    """
    from diffusers.hooks.first_block_cache import _FBC_LEADER_BLOCK_HOOK

    hook = _hook(transformer, _FBC_LEADER_BLOCK_HOOK)

    def compute(residual: Any) -> bool:
        before = hook.state_manager.get_state().head_block_residual
        return before is None or changed(residual, before)

    hook._should_compute_remaining_blocks = compute


def keep_mag_cache_in(transformer: Any, new_state: Callable[[], Any]) -> None:
    """Replace the state of MagCache's hooks, after `enable_cache`.

    Args:
        new_state: makes the state of one guidance pass, a `MagCacheState`.

    Reason: `MagCacheConfig` reuses residuals unchanged, and has no option for another state.
    """
    from diffusers.hooks.mag_cache import _MAG_CACHE_LEADER_BLOCK_HOOK

    # The hooks of all blocks share this object.
    _hook(transformer, _MAG_CACHE_LEADER_BLOCK_HOOK).state_manager._state_cls = new_state


def cache_single_stream(block: type) -> None:
    """Let step caches hook blocks of a class that take and return one tensor of hidden states, their first argument.

    Reason: diffusers registers some classes of blocks, and `enable_cache` raises for others.
    """
    from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry

    single = TransformerBlockMetadata(return_hidden_states_index=0, hidden_states_argument_name="hidden_states")
    TransformerBlockRegistry.register(model_class=block, metadata=single)


def _hook(transformer: Any, name: str) -> Any:
    """Return the hook with a name that one of a transformer's parts has."""
    registries = (getattr(part, "_diffusers_hook", None) for part in transformer.modules())
    return next(hook for registry in registries if registry is not None and (hook := registry.get_hook(name)))


def offload_groups(module: Any) -> None:
    """Move the weights that group offloading loaded ahead back to memory (RAM).

    Reason: hooks load a layer's weights as the layer before it runs in the first call; a layer that is called once
    keeps them. There is no public function to end that.
    """
    for part in module.modules():
        registry = getattr(part, "_diffusers_hook", None)
        hook = registry and registry.get_hook("group_offloading")
        if hook is not None:
            hook.group.offload_()


def kept_in_float32(module: Any, dtype: Any) -> frozenset[str]:
    """Return parts of parameter names that `from_pretrained` keeps in float32 when it loads in a dtype.

    Args:
        module: a model of diffusers or transformers.
        dtype: torch's.

    Reason: modules made without `from_pretrained` need the same dtypes. For transformers, see `_get_dtype_plan`.
    """
    import torch

    names = getattr(module, "_keep_in_fp32_modules", None) or ()
    if hasattr(module, "_keep_in_fp32_modules_strict"):
        strict = module._keep_in_fp32_modules_strict or ()
        names = (*names, *strict) if dtype == torch.float16 else strict
    return frozenset(names)


def dequantize_gguf(kind: str, data: Any, dtype: Any) -> Any:
    """Return the values of GGUF's blocks, (rows, values), or flat if the bytes are.

    Args:
        kind: GGUF's name of the type.
        data: (rows, bytes) or (bytes), uint8.
        dtype: torch's, for the scales and the result.

    Reason: the public `dequantize_gguf_tensor` takes a subclass of tensors whose `__torch_function__` slows every
    operation down, and computes in float16 only.
    """
    from diffusers.quantizers.gguf import utils
    from gguf import GGMLQuantizationType

    number = GGMLQuantizationType[kind]
    block, nbytes = utils.GGML_QUANT_SIZES[number]
    values = utils.dequantize_functions[number](data.reshape(-1, nbytes), block, nbytes, dtype)
    return values.reshape(*data.shape[:-1], -1)


def use_bitsandbytes_layers(module: Any, skip: list[str], config: Any) -> None:
    """Replace all linear layers of a module without weights by those of bitsandbytes.

    Args:
        skip: names of layers that are not replaced.
        config: diffusers' quantization configuration.

    Reason: `from_pretrained` calls this for quantized files; there is no public function for it.
    """
    from diffusers.quantizers.bitsandbytes.utils import replace_with_bnb_linear

    replace_with_bnb_linear(module, modules_to_not_convert=skip, quantization_config=config)
