"""diffusers' private names that `runtime.upstream.diffusers` uses: each test names what broke."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from diffusers import AutoencoderKLWan, FirstBlockCacheConfig, WanTransformer3DModel
from diffusers.hooks import apply_group_offloading
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d
from transformers import UMT5EncoderModel

from runtime.models.spec import ModelSpec
from runtime.upstream import diffusers as private

ROOT = Path(__file__).parents[2]


def load(tiny: Callable[[str], ModelSpec]) -> Any:
    return WanTransformer3DModel.from_pretrained(tiny("wan2.1").directory, subfolder="transformer").eval()


def predict(module: Any, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(1, 16, 2, 4, 4, generator=generator)
    text = torch.randn(1, 4, 32, generator=generator)
    with torch.no_grad(), module.cache_context("cond"):
        output: torch.Tensor = module(latents, torch.tensor([500.0]), text, return_dict=False)[0]
    return output


def test_causal_convolutions_keep_their_padding() -> None:
    conv = WanCausalConv3d(2, 2, 3, padding=(1, 1, 1))
    assert private.causal_padding(conv) == (2, 1, 1)
    assert private.causal_padding(WanCausalConv3d(2, 2, (3, 1, 1), padding=(1, 0, 0))) == (2, 0, 0)


def test_the_decision_of_first_block_caching_is_replaced(tiny: Callable[[str], ModelSpec]) -> None:
    module = load(tiny)
    asked = []

    def changed(now: torch.Tensor, before: torch.Tensor) -> bool:
        asked.append((now.shape, before.shape))
        return len(asked) == 1

    calls = []
    module.blocks[1].register_forward_hook(lambda *_: calls.append(1))
    module.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    private.decide_first_block_cache(module, changed)
    first = predict(module)
    predict(module, seed=1)
    predict(module, seed=2)
    assert len(asked) == 2
    assert all(now == before for now, before in asked)
    assert predict(module).equal(predict(module))
    private.reset_step_cache(module)
    count = len(asked)
    assert predict(module).equal(first)
    assert len(asked) == count, "after a reset there is no earlier step to compare with"


def test_offload_groups_are_found_on_hooked_modules(tiny: Callable[[str], ModelSpec]) -> None:
    module = load(tiny)
    apply_group_offloading(module, onload_device=torch.device("cpu"), offload_type="leaf_level")
    hooks = [
        part._diffusers_hook.get_hook("group_offloading")
        for part in module.modules()
        if hasattr(part, "_diffusers_hook")
    ]
    moved = []
    for hook in filter(None, hooks):
        hook.group.offload_ = lambda: moved.append(1)
    private.offload_groups(module)
    assert len(moved) == len([hook for hook in hooks if hook is not None]) > 0


def test_models_list_parameters_that_stay_in_float32() -> None:
    assert "norm2" in private.kept_in_float32(WanTransformer3DModel, torch.bfloat16)
    assert private.kept_in_float32(AutoencoderKLWan, torch.bfloat16) == frozenset()
    assert private.kept_in_float32(UMT5EncoderModel, torch.float16) == {"wo"}
    assert private.kept_in_float32(UMT5EncoderModel, torch.bfloat16) == frozenset()


def test_blocks_of_gguf_are_dequantized_as_gguf_does() -> None:
    values = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    data = gguf.quantize(values, gguf.GGMLQuantizationType.Q5_0)
    expected = torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType.Q5_0))
    assert torch.equal(private.dequantize_gguf("Q5_0", torch.from_numpy(data), torch.float32), expected)


def test_blocks_of_two_streams_are_hooked_by_step_caches() -> None:
    block = type("Block", (torch.nn.Module,), {"forward": lambda self, hidden_states, other=None: hidden_states})
    module = WanTransformer3DModel(num_layers=0, num_attention_heads=1, attention_head_dim=16, ffn_dim=16)
    module.blocks = torch.nn.ModuleList([block(), block()])
    private.cache_single_stream(block)
    module.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    x = torch.ones(1, 5)
    with module.cache_context("cond"):
        for part in module.blocks:
            assert part(x).equal(x)
