"""LoRAs on a tiny LTX-2: the weights in every spelling equal diffusers' result, and others are refused by name."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_ltx2_lora_to_diffusers

from runtime.core.errors import ModelError
from runtime.core.events import VideoSaved
from runtime.core.loras import Lora
from runtime.core.plan import ComponentPlan
from runtime.execution.residency import Residency
from runtime.families.ltx2.lora_names import weight_shape
from runtime.models.loras import with_loras
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module
from tests.families.test_second_family import frames
from tests.lora_files import save
from tests.pipeline.runs import events_of
from tests.plans import tiny_plan
from tests.tiny_models import LTX2_ARCHITECTURES

Tiny = Callable[[str], ModelSpec]
Tensors = dict[str, torch.Tensor]
RANK = 3
# Before and after diffusers' conversion.
OWN_NAMES = {
    "audio_proj_in": "audio_patchify_proj",
    "proj_in": "patchify_proj",
    "av_cross_attn_video_scale_shift": "av_ca_video_scale_shift_adaln_single",
    "av_cross_attn_video_a2v_gate": "av_ca_a2v_gate_adaln_single",
    "av_cross_attn_audio_scale_shift": "av_ca_audio_scale_shift_adaln_single",
    "av_cross_attn_audio_v2a_gate": "av_ca_v2a_gate_adaln_single",
    "audio_prompt_adaln": "audio_prompt_adaln_single",
    "prompt_adaln": "prompt_adaln_single",
    "audio_time_embed": "audio_adaln_single",
    "time_embed": "adaln_single",
}


def module_of(spec: ModelSpec) -> torch.nn.Module:
    """Return the transformer without a LoRA."""
    module: torch.nn.Module = LTX2VideoTransformer3DModel.from_pretrained(spec.directory, subfolder="transformer")
    return module


def factors(spec: ModelSpec) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return (down, up) of every linear layer, by diffusers' name."""
    random, found = torch.Generator().manual_seed(0), {}
    for name, layer in module_of(spec).named_modules():
        if isinstance(layer, torch.nn.Linear):
            down = torch.randn(RANK, layer.in_features, generator=random)
            found[name] = (0.3 * down, 0.3 * torch.randn(layer.out_features, RANK, generator=random))
    return found


def named(spec: ModelSpec, prefix: str, rename: Callable[[str], str] = str) -> Tensors:
    """Return a file with these factors."""
    return {
        f"{prefix}{rename(name)}.lora_{letter}.weight": tensor
        for name, pair in factors(spec).items()
        for letter, tensor in zip("AB", pair, strict=True)
    }


def own(name: str) -> str:
    """Return the name of a layer in the model's own code."""
    first, separator, rest = name.partition(".")
    return OWN_NAMES.get(first, first) + separator + rest


def fused(spec: ModelSpec, lora: Path) -> Tensors:
    """Return the transformer's weights with a LoRA of strength 0.5."""
    part = ComponentPlan(backend="pytorch", device="cpu", dtype="float32", weights_bytes=0, reasons=())
    return load_module(with_loras(spec, [Lora(str(lora), 0.5)], lora.parent), "transformer", part).state_dict()


@pytest.mark.parametrize("architecture", LTX2_ARCHITECTURES)
@pytest.mark.parametrize("spelling", ["diffusers", "peft", "own"])
def test_every_spelling_changes_all_layers(architecture: str, spelling: str, tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny(architecture)
    tensors = {
        "diffusers": lambda: named(spec, "transformer."),
        "peft": lambda: named(spec, "base_model.model."),
        "own": lambda: named(spec, "diffusion_model.", own),
    }[spelling]()
    if spelling == "own":
        converted = _convert_non_diffusers_ltx2_lora_to_diffusers(tensors)
        assert converted.keys() == named(spec, "transformer.").keys()
    plain, changed = module_of(spec).state_dict(), fused(spec, save(tmp_path / "a.safetensors", tensors))
    for name, (down, up) in factors(spec).items():
        wanted = plain.pop(f"{name}.weight") + 0.5 * up @ down
        torch.testing.assert_close(changed[f"{name}.weight"], wanted, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(changed[name], tensor) for name, tensor in plain.items())


@pytest.mark.parametrize("architecture", LTX2_ARCHITECTURES)
def test_every_shape_in_the_table_equals_the_transformers(architecture: str, tiny: Tiny) -> None:
    spec = tiny(architecture)
    for name, tensor in module_of(spec).state_dict().items():
        if name.endswith(".weight"):
            assert weight_shape(spec, name.removesuffix(".weight")) == tuple(tensor.shape), name


def test_files_of_other_models_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("ltx-2")
    for name, code in (
        ("text_embedding_projection.aggregate_embed.lora_A.weight", "lora.unknown_tensor"),
        ("diffusion_model.transformer_blocks.2.attn1.to_q.lora_A.weight", "lora.larger_model"),
        ("diffusion_model.blocks.0.self_attn.q.lora_A.weight", "lora.unknown_tensor"),
    ):
        tensors = named(spec, "transformer.") | {name: torch.ones(RANK, 32)}
        with pytest.raises(ModelError) as caught:
            with_loras(spec, [Lora(str(save(tmp_path / "a.safetensors", tensors)))], tmp_path)
        assert caught.value.code == code


def test_a_lora_changes_a_video(tiny: Tiny, tmp_path: Path) -> None:
    style, pixels = save(tmp_path / "style.safetensors", named(tiny("ltx-2.3"), "transformer.")), []
    for loras in ((), (str(style),)):
        spec = with_loras(tiny("ltx-2.3"), [Lora(lora) for lora in loras], tmp_path)
        plan = tiny_plan(spec, tmp_path / "x.mp4", width=96, height=64, steps=2, loras=loras)
        with Residency() as residency:
            assert isinstance(events_of(plan, spec, residency)[-1], VideoSaved)
        pixels.append(frames(str(plan.output)))
    assert pixels[0] != pixels[1]
