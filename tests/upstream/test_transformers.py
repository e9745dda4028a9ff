"""transformers' private names that `runtime.upstream.transformers` uses: each test names what broke."""

import torch
from transformers import UMT5Config, UMT5EncoderModel

from runtime.upstream.transformers import relative_position_buckets


def test_umt5_puts_distances_into_buckets() -> None:
    config = UMT5Config(vocab_size=8, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    attention = UMT5EncoderModel(config).encoder.block[0].layer[0].SelfAttention
    buckets = relative_position_buckets(attention, torch.tensor([[-200, -1, 0, 1, 200]]))
    assert buckets.dtype == torch.int64
    assert buckets.tolist() == [[15, 1, 0, 17, 31]]
