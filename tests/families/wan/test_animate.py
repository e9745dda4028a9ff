"""Animate's transformer equals diffusers', its specification counts what diffusers' modules have, LoRAs find layers."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanAnimateTransformer3DModel
from torch.utils.flop_counter import FlopCounterMode

from runtime.core.errors import ModelError
from runtime.core.loras import Lora
from runtime.core.plan import Speed
from runtime.execution.components import PROMPTED, UNPROMPTED
from runtime.families.wan.lora_names import FACE_BLOCKS
from runtime.families.wan.transformer import PyTorchDenoiser
from runtime.families.wan.transformer_spec import AnimateTransformerSpec
from runtime.models.loras import with_loras
from runtime.models.registry import ABSENT, family_of, read_spec
from runtime.models.spec import IMAGE_ENCODER, VAE_ENCODER, ModelSpec
from runtime.models.weights import load_module
from tests.families.ltx2.test_several_gpus import PART
from tests.families.wan.test_transformer import close
from tests.lora_files import save
from tests.tiny_models import ANIMATE

Tiny = Callable[[str], ModelSpec]
FRAMES, SIDE = 9, 16


def reference(spec: ModelSpec) -> Any:
    """Return the transformer as diffusers computes it."""
    module = WanAnimateTransformer3DModel.from_pretrained(spec.directory, subfolder="transformer")
    return module.to(torch.float32).eval().requires_grad_(False)


class Inputs:
    """What a pass takes: latents, those of the poses, texts with an image's embeddings, and a face."""

    def __init__(self, spec: ModelSpec) -> None:
        generator = torch.Generator().manual_seed(1)
        self.latents = torch.randn(1, 36, 4, 6, 8, generator=generator)
        self.poses = torch.randn(1, 16, 3, 6, 8, generator=generator)
        self.texts = list(torch.randn(2, 1, 512, spec.transformer.text_dim, generator=generator))
        self.image = torch.randn(1, 5, 24, generator=generator)
        self.face = torch.randint(0, 256, (FRAMES, SIDE, SIDE, 3), dtype=torch.uint8, generator=generator)

    @property
    def joined(self) -> torch.Tensor:
        """The latents as a `Denoiser` takes them."""
        return torch.cat([self.latents, torch.nn.functional.pad(self.poses, (0, 0, 0, 0, 1, 0))], dim=1)

    def with_image(self, text: torch.Tensor) -> torch.Tensor:
        """A text after the image, as a `Denoiser` takes it."""
        return torch.cat([torch.nn.functional.pad(self.image, (0, text.shape[2] - 24)), text], dim=1)

    def by_diffusers(self, module: Any, text: torch.Tensor, *, black: bool = False) -> torch.Tensor:
        """The prediction, without the prompt with a black face."""
        pixels = self.face.permute(3, 0, 1, 2)[None].float() / 127.5 - 1
        pixels = pixels * 0 - 1 if black else pixels
        out: torch.Tensor = module(
            self.latents, torch.tensor([400.0]), text, self.image, self.poses, pixels, return_dict=False
        )[0]
        return out


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
    spec = tiny(ANIMATE)
    module, given = reference(spec), Inputs(spec)
    wanted = [
        given.by_diffusers(module, text, black=black) for text, black in zip(given.texts, (False, True), strict=True)
    ]
    denoiser = PyTorchDenoiser(reference(spec), speed)
    encoded: list[int] = []
    denoiser._module.motion_encoder.register_forward_hook(lambda _, args, __: encoded.append(len(args[0])))
    denoiser.steer((), given.face)
    timestep, texts = torch.tensor(400.0), [given.with_image(text) for text in given.texts]
    for _ in range(2):
        got = denoiser.together(given.joined, timestep, dict(zip((PROMPTED, UNPROMPTED), texts, strict=True)))
        assert all(close(a, b) for a, b in zip(got, wanted, strict=True))
    assert not close(wanted[0], wanted[1])
    # The face is encoded once: in batches, and one black frame.
    assert encoded == [4, 4, 1, 1]
    denoiser.steer((), given.face.flip(0))
    assert not close(denoiser(given.joined, timestep, texts[0]), wanted[0])


@torch.no_grad()
def test_step_caches_skip_the_attention_to_the_face(tiny: Tiny) -> None:
    spec = tiny(ANIMATE)
    module, given = reference(spec), Inputs(spec)
    calls = [0, 0]
    for number, block in enumerate(module.face_adapter):
        block.to_q.register_forward_hook(lambda *_, number=number: calls.__setitem__(number, calls[number] + 1))
    denoiser, text = PyTorchDenoiser(module), given.with_image(given.texts[0])
    denoiser.steer((), given.face)
    alone = [denoiser(given.joined, torch.tensor(time), text) for time in (900.0, 899.0)]
    assert calls == [2, 2]
    for step_cache, computed in (("first-block:1.0", [4, 3]), ("magcache:0.1", [3, 3])):
        calls[:] = [2, 2]
        with denoiser.caching(step_cache):
            denoiser.begin_step(fresh=True, exact=True)
            first = denoiser(given.joined, torch.tensor(900.0), text)
            denoiser.begin_step(fresh=False, exact=True)
            second = denoiser(given.joined, torch.tensor(899.0), text)
        assert calls == computed, step_cache
        assert close(first, alone[0])
        assert (second - alone[1]).norm() / alone[1].norm() < 0.02, step_cache


def test_the_specification_of_a_folder(tiny: Tiny) -> None:
    spec = tiny(ANIMATE)
    assert isinstance(spec.transformer, AnimateTransformerSpec) and spec.transformer.face_blocks == 2
    assert spec.control_input is not None and spec.image_input is not None
    assert spec.control_input.face_side == SIDE and spec.control_input.required == ("control", "face")
    assert (spec.image_input.kind, spec.image_input.required, spec.image_input.tokens) == ("character", True, 5)
    assert [*spec.programs] == ["text_encoder", IMAGE_ENCODER, VAE_ENCODER, "transformer", "vae"]
    assert spec.programs[VAE_ENCODER] == spec.programs["transformer"] == ()
    assert spec.block_programs == tiny("wan2.1-i2v").block_programs != ()
    assert spec.video_input is None and not spec.unsupported and not spec.starts_from_images
    assert spec.latent_shape(9, 32, 64) == (1, 16, 4, 4, 8)
    assert (spec.defaults.frames, spec.defaults.fps, spec.defaults.guidance_scale) == (77, 30, 1.0)
    module = reference(spec)
    assert spec.parameters["transformer"] == sum(parameter.numel() for parameter in module.parameters())
    in_blocks = sum(
        layer.weight.numel()
        for name, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear) and not any(part in name for part in spec.unquantized)
    )
    # Layers for CLIP's embeddings are not counted, as in other models.
    of_image = sum(layer.weight.numel() for name, layer in module.named_modules() if "add_" in name and "proj" in name)
    assert spec.transformer.block_parameters == in_blocks - of_image


@torch.no_grad()
def test_operations_are_those_of_diffusers_module(tiny: Tiny) -> None:
    spec = tiny(ANIMATE)
    module, given = reference(spec), Inputs(spec)
    with FlopCounterMode(display=False) as counter:
        given.by_diffusers(module, given.texts[0])
    counts, tokens, width = counter.get_flop_counts(), 4 * 3 * 4, spec.transformer.width
    layers = [f"WanAnimateTransformer3DModel.face_adapter.{n}.{layer}" for n in (0, 1) for layer in ("to_q", "to_out")]
    adapter = sum(sum(counts[layer].values()) for layer in layers) + 2 * 4 * tokens * 3 * width
    plain = tiny("wan2.1").transformer
    blocks = plain.forward_flops(tokens, 512) * spec.transformer.num_layers / plain.num_layers
    assert spec.transformer.forward_flops(tokens, 512) - blocks == adapter


@pytest.mark.parametrize(
    "change",
    [{"inject_face_latents_blocks": 3}, {"inject_face_latents_blocks": 0}, {"motion_encoder_size": 24},
     {"motion_encoder_channel_sizes": {"16": 8}}, {"latent_channels": 15}, {"image_dim": None}, {"image_dim": 32},
     {"in_channels": 35}, {"face_encoder_num_heads": "all"}],
    ids=str,
)  # fmt: skip
def test_wrong_face_encoders_are_refused(change: dict[str, Any], tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny(ANIMATE).directory, folder)
    path = folder / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError) as refused:
        read_spec(folder, "model")
    assert refused.value.code == "model.config_invalid"


def test_a_lora_changes_blocks_and_attentions_to_the_face(tiny: Tiny, tmp_path: Path) -> None:
    """Keys and values of a face are one layer in the names of Wan's own code, and two in diffusers'."""
    spec, random, tensors = tiny(ANIMATE), torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    module, given = reference(spec), Inputs(spec)
    for name, wan in (("blocks.1.ffn.net.2", "blocks.1.ffn.2"), ("face_adapter.1.to_out", f"{FACE_BLOCKS}.1.linear2")):
        tensors |= _factors(wan, [module.get_submodule(name)], random)
    keys_values = [module.get_submodule(f"face_adapter.0.{name}") for name in ("to_k", "to_v")]
    tensors |= _factors(f"{FACE_BLOCKS}.0.linear1_kv", keys_values, random)
    style = save(tmp_path / "style.safetensors", tensors)
    wanted, predictions = given.by_diffusers(module, given.texts[0]), []
    for loras in ([Lora(str(style), 0.5)], []):
        denoiser = PyTorchDenoiser(load_module(with_loras(spec, loras, tmp_path), "transformer", PART))
        denoiser.steer((), given.face)
        predictions.append(denoiser(given.joined, torch.tensor(400.0), given.with_image(given.texts[0])))
    assert close(predictions[0], wanted)
    assert (predictions[1] - wanted).norm() > 0.01 * wanted.norm()


def _factors(name: str, layers: list[Any], random: torch.Generator) -> dict[str, torch.Tensor]:
    """Return the factors of a change of a layer that is these in diffusers, and add half of it to them."""
    down = torch.randn(2, layers[0].in_features, generator=random)
    up = 0.3 * torch.randn(sum(layer.out_features for layer in layers), 2, generator=random)
    for layer, part in zip(layers, up.chunk(len(layers)), strict=True):
        layer.weight.data += 0.5 * part @ down
    prefix = f"diffusion_model.{name}"
    return {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}


def test_loras_find_the_layers_of_the_face(tiny: Tiny) -> None:
    spec, family = tiny(ANIMATE), family_of("wan")
    module = reference(spec)
    layers = {
        name: layer
        for name, layer in module.named_modules()
        if name.startswith(("face_adapter.", "pose_")) and getattr(layer, "weight", None) is not None
    }
    plain = replace(spec, transformer=tiny("wan2.1").transformer)
    assert len(layers) == 2 * 6 + 1
    for name, layer in layers.items():
        assert family.lora_weight_shape(spec, name) == tuple(layer.weight.shape), name
        assert family.lora_weight_shape(plain, name) == ABSENT
        change = family.lora_change(f"transformer.{name}.lora_A.weight")
        assert change is not None and change.layer.modules == (name,)
    change = family.lora_change("diffusion_model.face_adapter.fuser_blocks.1.linear1_kv.lora_A.weight")
    assert change is not None and change.layer.modules == ("face_adapter.1.to_k", "face_adapter.1.to_v")
    assert family.lora_weight_shape(spec, "face_adapter.2.to_q") is None
