"""Reading HunyuanVideo's folders: sizes, parameters, operations and refusals."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo, HunyuanVideoTransformer3DModel
from torch.utils.flop_counter import FlopCounterMode

from runtime.core.errors import ModelError
from runtime.core.plan import EAGER, ComponentPlan
from runtime.execution import attention
from runtime.families.hunyuan_video.transformer import PyTorchDenoiser
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec, attention_flops
from runtime.models.weights import load_module
from tests.plans import tiny_plan

Tiny = Callable[[str], ModelSpec]


def test_a_folder_is_read(tiny: Tiny) -> None:
    spec = tiny("hunyuan-video")
    assert spec.text_encoders == ("text_encoder", "text_encoder_2")
    assert spec.embedded_guidance
    assert not tiny("hunyuan-video-cfg").embedded_guidance
    assert spec.strides == (16, 16)
    assert spec.latent_shape(9, 32, 64) == (1, 16, 3, 4, 8)
    assert spec.tokens(9, 32, 64) == 3 * 2 * 4
    assert spec.flow_shift == spec.noise.shift == 7.0
    assert spec.timesteps == 2


def test_parameters_are_those_of_the_files(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("hunyuan-video")
    plan = tiny_plan(spec, tmp_path / "x.mp4")

    def loaded(name: str) -> int:
        part: ComponentPlan = plan.components[name]
        return sum(weight.numel() for weight in load_module(spec, name, part).parameters())

    # Of LLaMA, the last two layers and the norm are not loaded.
    assert {name: loaded(name) for name in spec.component_names} == spec.parameters


def test_operations_are_those_of_a_forward_pass(tiny: Tiny) -> None:
    spec = tiny("hunyuan-video")
    module = HunyuanVideoTransformer3DModel.from_pretrained(spec.directory, subfolder="transformer").eval()
    text, latents = 20, torch.randn(1, 16, 3, 16, 16)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        PyTorchDenoiser(module)(latents, torch.tensor([500.0, 6000.0]), torch.randn(1, 1 + text, 32))
    counted = counter.get_total_flops()
    tokens = spec.tokens(9, 128, 128)
    # PyTorch does not count attention on a CPU.
    attended = spec.transformer.num_layers * attention_flops(spec, tokens + text)
    assert counted == pytest.approx(spec.transformer.forward_flops(tokens, text) - attended, rel=0.15)


def test_the_plans_attention_kernel_runs(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, calls = tiny("hunyuan-video"), []
    module = HunyuanVideoTransformer3DModel.from_pretrained(spec.directory, subfolder="transformer").eval()
    denoiser, native = PyTorchDenoiser(module), attention.attention("native")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        calls.append(q.shape)
        return native(q, k, v)

    inputs = torch.randn(1, 16, 2, 4, 4), torch.tensor([500.0, 6000.0]), torch.randn(1, 8, 32)
    wanted = denoiser(*inputs)
    monkeypatch.setitem(attention._KINDS, "flash", attend)
    denoiser.compute(EAGER.replace(attention="flash"))
    assert torch.equal(denoiser(*inputs), wanted)
    assert calls == [(1, 2 * 2 * 2 + 7, 2, 16)] * 4


def test_the_decoders_operations_are_those_of_the_decoder(tiny: Tiny) -> None:
    spec = tiny("hunyuan-video")
    vae = AutoencoderKLHunyuanVideo.from_pretrained(spec.directory, subfolder="vae").eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        vae.decode(torch.randn(1, 16, 3, 8, 8))
    assert counter.get_total_flops() == pytest.approx(spec.vae.decode_flops(9, 64, 64), rel=0.15)


@pytest.mark.parametrize(
    ("component", "name", "value"),
    [
        ("transformer", "num_layers", 10_000),
        ("transformer", "num_layers", None),
        ("transformer", "image_condition_type", "token_replace"),
        ("transformer", "rope_axes_dim", [4, 6, 8]),
        ("transformer", "pooled_projection_dim", 16),
        ("transformer", "in_channels", 8),
        ("vae", "temporal_compression_ratio", 8),
        ("text_encoder", "hidden_size", 48),
        ("text_encoder", "num_hidden_layers", 2),
        ("text_encoder_2", "hidden_size", 32),
        ("scheduler", "use_dynamic_shifting", True),
        ("scheduler", "shift", -1.0),
    ],
)
def test_a_wrong_configuration_is_refused(component: str, name: str, value: Any, tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("hunyuan-video").directory, folder)
    read_spec(folder, "model")
    path = folder / component / ("scheduler_config.json" if component == "scheduler" else "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(ModelError):
        read_spec(folder, "model")


@pytest.mark.parametrize("component", ["text_encoder", "text_encoder_2", "transformer", "vae"])
def test_a_missing_component_is_refused(component: str, tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("hunyuan-video").directory, folder)
    shutil.rmtree(folder / component)
    with pytest.raises(ModelError):
        read_spec(folder, "model")
