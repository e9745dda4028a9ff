"""The published model: parameter counts agree with the libraries' classes, and it can be planned before a download."""

from pathlib import Path
from types import SimpleNamespace

import torch
from diffusers import AutoencoderKLHunyuanVideo, HunyuanVideoTransformer3DModel
from diffusers.quantizers.torchao.torchao_quantizer import TorchAoHfQuantizer
from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaModel

from runtime.families.hunyuan_video.known import KNOWN
from runtime.models.catalogue import look_up
from tests.families.wan.test_known import weights

(PUBLISHED,) = KNOWN


def test_parameter_counts_are_those_of_the_architectures() -> None:
    llama = LlamaConfig(
        vocab_size=128_320,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    clip = CLIPTextConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, projection_dim=768
    )
    with torch.device("meta"):
        modules = {
            "text_encoder": LlamaModel(llama),
            "text_encoder_2": CLIPTextModel(clip),
            "transformer": HunyuanVideoTransformer3DModel(**PUBLISHED.configs["transformer"]),
            "vae": AutoencoderKLHunyuanVideo(**PUBLISHED.configs["vae"]),
        }
    counted = {name: weights(module) for name, module in modules.items()}
    assert counted == PUBLISHED.parameters


def test_it_is_planned_with_before_its_weights_are_here() -> None:
    spec = look_up("HunyuanVideo", Path("none"))
    assert (spec.name, spec.is_downloaded, spec.license) == ("hunyuan-video", False, "tencent-hunyuan-community")
    assert spec.embedded_guidance
    # The folder's configuration has the shift, which decides the timesteps.
    assert spec.noise.timesteps(4) is None
    assert spec.noise.timesteps(2, 7.0) == [1000.0, 875.0]
    assert PUBLISHED.describes(spec)


def test_the_blocks_linear_layers_are_quantized_and_no_others() -> None:
    spec = look_up("hunyuan-video", Path("none"))
    with torch.device("meta"):
        module = HunyuanVideoTransformer3DModel(**PUBLISHED.configs["transformer"])
    quantizer = SimpleNamespace(modules_to_not_convert=spec.unquantized, offload=False)
    quantized = [
        (name, weight.numel())
        for name, weight in module.named_parameters()
        if TorchAoHfQuantizer.check_if_quantized_param(quantizer, module, weight, name, {}, param_device="cuda")
    ]
    assert all(name.startswith(("transformer_blocks.", "single_transformer_blocks.")) for name, _ in quantized)
    assert sum(count for _, count in quantized) == spec.transformer.block_parameters
