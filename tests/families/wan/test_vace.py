"""VACE's transformer equals diffusers', its specification counts what diffusers' modules have, LoRAs find layers."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanVACETransformer3DModel
from torch.utils.flop_counter import FlopCounterMode

from runtime.core.errors import ModelError
from runtime.core.plan import Speed
from runtime.execution.components import PROMPTED, UNPROMPTED
from runtime.families.wan.transformer import PyTorchDenoiser
from runtime.families.wan.transformer_spec import VaceTransformerSpec
from runtime.models.registry import ABSENT, family_of, read_spec
from runtime.models.spec import VAE_ENCODER, ModelSpec
from tests.families.wan.test_spec import ProjectionsOnly
from tests.families.wan.test_transformer import close
from tests.tiny_models import VACE_ARCHITECTURES

Tiny = Callable[[str], ModelSpec]
SCALES = (0.5, 1.5)


def reference(spec: ModelSpec) -> Any:
    """Return the transformer as diffusers computes it."""
    module = WanVACETransformer3DModel.from_pretrained(spec.directory, subfolder="transformer")
    return module.to(torch.float32).eval().requires_grad_(False)


def inputs(spec: ModelSpec) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return latents, control latents and two texts."""
    generator = torch.Generator().manual_seed(1)
    latents, control = (torch.randn(1, count, 3, 6, 8, generator=generator) for count in (16, 96))
    return latents, control, list(torch.randn(2, 1, 7, spec.transformer.text_dim, generator=generator))


@pytest.mark.parametrize(
    "speed",
    [
        Speed(),
        Speed(text_kept=True, fused=True, paired=True),
        Speed(compiled=True),
    ],
    ids=["plain", "all", "compiled"],
)
@pytest.mark.usefixtures("traced")
@torch.no_grad()
def test_predictions_equal_diffusers(speed: Speed, tiny: Tiny) -> None:
    spec = tiny("wan2.1-vace")
    module, (latents, control, texts) = reference(spec), inputs(spec)
    wanted = [
        module(latents, torch.tensor([400.0]), text, None, control, torch.tensor(SCALES), return_dict=False)[0]
        for text in texts
    ]
    denoiser = PyTorchDenoiser(reference(spec), speed)
    denoiser.steer(SCALES)
    joined, timestep = torch.cat([latents, control], dim=1), torch.tensor(400.0)
    if speed.paired:
        got = list(denoiser.together(joined, timestep, dict(zip((PROMPTED, UNPROMPTED), texts, strict=True))))
    else:
        got = [denoiser(joined, timestep, text) for text in texts]
    assert not close(wanted[0], wanted[1])
    assert all(close(a, b) for a, b in zip(got, wanted, strict=True))
    # The branch has an effect, and so has each scale.
    for scales in ((0.5, 1.0), (1.0, 1.5)):
        denoiser.steer(scales)
        assert not close(denoiser(joined, timestep, texts[0]), wanted[0])


@torch.no_grad()
def test_step_caches_skip_the_control_branch(tiny: Tiny) -> None:
    spec = tiny("wan2.1-vace")
    module, (latents, control, texts) = reference(spec), inputs(spec)
    joined, calls = torch.cat([latents, control], dim=1), [0, 0]
    for number, block in enumerate(module.vace_blocks):
        block.attn1.to_q.register_forward_hook(lambda *_, number=number: calls.__setitem__(number, calls[number] + 1))
    denoiser = PyTorchDenoiser(module)
    alone = denoiser(joined, torch.tensor(900.0), texts[0]), denoiser(joined, torch.tensor(899.0), texts[0])
    assert calls == [2, 2]
    for step_cache, computed in (("first-block:1.0", [4, 3]), ("magcache:0.1", [3, 3])):
        calls[:] = [2, 2]
        with denoiser.caching(step_cache):
            denoiser.begin_step(fresh=True, exact=True)
            first = denoiser(joined, torch.tensor(900.0), texts[0])
            denoiser.begin_step(fresh=False, exact=True)
            second = denoiser(joined, torch.tensor(899.0), texts[0])
        assert calls == computed, step_cache
        assert close(first, alone[0])
        # The residual of all blocks has the hints; without them, or with them twice, it would be far away.
        assert (second - alone[1]).norm() / alone[1].norm() < 0.02, step_cache


def test_the_specification_of_a_folder(tiny: Tiny) -> None:
    for architecture in VACE_ARCHITECTURES:
        spec = tiny(architecture)
        assert isinstance(spec.transformer, VaceTransformerSpec) and spec.control_input is not None
        assert (spec.transformer.vace_layers, spec.transformer.vace_in_channels) == ((0, 2), 96)
        assert spec.experts == 1 + (architecture == "wan2.2-vace")
        assert spec.blocks == 6 and spec.control_input.scales((0.5,)) == (0.5, 0.5)
        assert spec.programs[VAE_ENCODER] == spec.programs["transformer"] == ()
        assert spec.block_programs == tiny("wan2.1").block_programs != ()
        assert spec.image_input is not None and spec.image_input.kind == "control"
        assert spec.video_input is None and not spec.unsupported
        assert VAE_ENCODER in spec.for_text().programs
        module = reference(spec)
        assert spec.parameters["transformer"] == sum(parameter.numel() for parameter in module.parameters())
        in_blocks = sum(
            layer.weight.numel()
            for name, layer in module.named_modules()
            if isinstance(layer, torch.nn.Linear) and "blocks" in name and "proj_out" not in name
        )
        assert spec.transformer.block_parameters == in_blocks


@torch.no_grad()
def test_operations_are_those_of_diffusers_module(tiny: Tiny) -> None:
    spec = tiny("wan2.1-vace")
    module, (latents, control, texts) = reference(spec), inputs(spec)
    for block in (*module.blocks, *module.vace_blocks):
        block.attn1.processor = block.attn2.processor = ProjectionsOnly()
    with FlopCounterMode(display=False) as counter:
        module(latents, torch.tensor([400.0]), texts[0], None, control, return_dict=False)
    counts = counter.get_flop_counts()
    # Embeddings and the last projection are not counted; attention is added by hand.
    left_out = ("patch_embedding", "vace_patch_embedding", "condition_embedder", "proj_out")
    wanted = counter.get_total_flops() - sum(
        sum(counts[f"WanVACETransformer3DModel.{name}"].values()) for name in left_out
    )
    tokens, width = 3 * 3 * 4, spec.transformer.width
    wanted += spec.blocks * 4 * tokens * width * (tokens + 7)
    assert spec.transformer.forward_flops(tokens, 7) == wanted


@pytest.mark.parametrize(
    "change",
    [{"vace_layers": [1, 2]}, {"vace_layers": [0, 4]}, {"vace_layers": [0, 2, 2]}, {"vace_layers": []},
     {"vace_layers": "all"}, {"vace_in_channels": 95}, {"image_dim": 24}],
    ids=str,
)  # fmt: skip
def test_wrong_control_branches_are_refused(change: dict[str, Any], tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("wan2.1-vace").directory, folder)
    path = folder / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError) as refused:
        read_spec(folder, "model")
    assert refused.value.code == "model.config_invalid"


def test_loras_find_the_control_branchs_layers(tiny: Tiny) -> None:
    spec, family = tiny("wan2.1-vace"), family_of("wan")
    module = reference(spec)
    layers = {
        name: layer
        for name, layer in module.named_modules()
        if getattr(layer, "weight", None) is not None and "vace_" in name
    }
    names = {"attn1": "self_attn", "attn2": "cross_attn", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o"}
    names |= {"ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2", "proj_in": "before_proj", "proj_out": "after_proj"}
    plain = replace(spec, transformer=tiny("wan2.1").transformer)
    assert len(layers) > 20
    for name, layer in layers.items():
        assert family.lora_weight_shape(spec, name) == tuple(layer.weight.shape), name
        assert family.lora_weight_shape(plain, name) == ABSENT
        original = name
        for ours, theirs in names.items():
            original = original.replace(f".{ours}", f".{theirs}")
        if name.rpartition(".")[2].startswith("norm"):
            continue
        for stored in (f"diffusion_model.{original}.lora_A.weight", f"transformer.{name}.lora_A.weight"):
            change = family.lora_change(stored)
            assert change is not None and change.layer.modules == (name,), stored
    assert family.lora_weight_shape(spec, "vace_blocks.1.proj_in") is None
    assert family.lora_weight_shape(spec, "vace_blocks.2.attn1.to_q") is None
