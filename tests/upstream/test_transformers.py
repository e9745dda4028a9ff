"""transformers' private names that `runtime.upstream.transformers` uses: each test names what broke."""

from typing import Any

import torch
from transformers import UMT5Config, UMT5EncoderModel

from runtime.upstream.transformers import mark_initialized, relative_position_buckets


def test_umt5_puts_distances_into_buckets() -> None:
    config = UMT5Config(vocab_size=8, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    attention = UMT5EncoderModel(config).encoder.block[0].layer[0].SelfAttention
    buckets = relative_position_buckets(attention, torch.tensor([[-200, -1, 0, 1, 200]]))
    assert buckets.dtype == torch.int64
    assert buckets.tolist() == [[15, 1, 0, 17, 31]]


def test_parameters_that_are_marked_get_no_random_values() -> None:
    config = UMT5Config(vocab_size=8, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    encoder: Any = UMT5EncoderModel(config)
    marked, other = (layer.weight for layer in (encoder.encoder.block[0].layer[0].SelfAttention.q, encoder.shared))
    with torch.no_grad():
        marked.fill_(7)
        other.fill_(7)
    mark_initialized(marked)
    for module in encoder.modules():
        module._is_hf_initialized = False
    encoder.initialize_weights()
    assert bool((marked == 7).all())
    assert not bool((other == 7).any())
