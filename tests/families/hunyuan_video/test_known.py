"""The published model: parameter counts agree with the libraries' classes, and it can be planned before a download."""

from pathlib import Path
from types import SimpleNamespace

import torch
from diffusers import AutoencoderKLHunyuanVideo, HunyuanVideoTransformer3DModel
from diffusers.quantizers.torchao.torchao_quantizer import TorchAoHfQuantizer
from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig

from runtime.core.estimates import MemoryStrategy
from runtime.families.hunyuan_video.conditioning import ShortLlama
from runtime.models.catalogue import look_up
from runtime.models.registry import published_models
from runtime.planner import memory_model
from tests.families.wan.test_known import weights
from tests.planner.test_memory_model import workload

(PUBLISHED,) = published_models("hunyuan_video")


def test_parameter_counts_are_those_of_the_architectures() -> None:
    llama = LlamaConfig(**PUBLISHED.configs["text_encoder"])
    clip = CLIPTextConfig(**PUBLISHED.configs["text_encoder_2"])
    with torch.device("meta"):
        modules = {
            "text_encoder": ShortLlama(llama),
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


def test_an_offloaded_text_encoder_needs_its_own_largest_layer() -> None:
    spec = look_up("hunyuan-video", Path("none"))
    with torch.device("meta"):
        llama = ShortLlama(LlamaConfig(**PUBLISHED.configs["text_encoder"]))
    sizes = [sum(p.numel() for p in module.parameters(recurse=False)) for module in llama.modules()]
    held = workload(spec, (960, 544, 129), dict.fromkeys(spec.component_names, "bfloat16"))
    first, second, *_ = memory_model.stages(held, MemoryStrategy(offload="group"))
    assert first.weights_bytes == 2 * max(sizes)
    # Activations come after the embedding, and need less.
    assert first.working_bytes == 0
    assert second.weights_bytes == 2 * spec.parameters["text_encoder_2"]


def test_two_double_blocks_are_on_the_device_of_a_transformer_offloaded_in_blocks() -> None:
    spec = look_up("hunyuan-video", Path("none"))
    with torch.device("meta"):
        module = HunyuanVideoTransformer3DModel(**PUBLISHED.configs["transformer"])
    sizes = [sum(p.numel() for p in block.parameters()) for block in module.transformer_blocks]
    others = sum(
        p.numel() for name, p in module.named_parameters() if "transformer_blocks." not in name or "embedder" in name
    )
    held = workload(spec, (960, 544, 129), dict.fromkeys(spec.component_names, "bfloat16"))
    *_, transformer, _ = memory_model.stages(held, MemoryStrategy(offload="group"))
    # Of biases, the forecast has those of all blocks.
    assert 1 <= transformer.weights_bytes / (2 * (sum(sizes[:2]) + others)) < 1.02


def test_both_text_encoders_are_freed_after_their_stage() -> None:
    spec = look_up("hunyuan-video", Path("none"))
    dtypes = dict.fromkeys(spec.component_names, "bfloat16")
    strategy = MemoryStrategy(keep_loaded=True, freed=spec.text_encoders)
    *_, decode = memory_model.stages(workload(spec, (960, 544, 129), dtypes), strategy)
    assert decode.weights_bytes == 2 * (spec.parameters["transformer"] + spec.parameters["vae"])


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
