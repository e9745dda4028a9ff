"""The exportable forms of what starts from images equal diffusers' and transformers' modules."""

from collections.abc import Callable, Mapping
from typing import cast

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import CLIPVisionModel

from runtime.core.plan import EngineRef, Speed
from runtime.engines.component_programs import CACHE, TEXT_PADDING, cut_text
from runtime.engines.programs import load_program
from runtime.engines.service import OpenEngines
from runtime.execution.block_engines import BlockEngines
from runtime.families.wan.transformer import PyTorchDenoiser
from runtime.models.spec import ModelSpec, is_transformer
from tests.engines.conftest import relative
from tests.tiny_models import IMAGE_ARCHITECTURES

Tiny = Callable[[str], ModelSpec]
CLIP_ARCHITECTURES = ("wan2.1-i2v", "wan2.1-flf2v")


@pytest.mark.parametrize("architecture", IMAGE_ARCHITECTURES)
def test_transformers_with_given_frames_equal_diffusers(tiny: Tiny, architecture: str) -> None:
    spec = tiny(architecture)
    for component in filter(is_transformer, spec.component_names):
        module = WanTransformer3DModel.from_pretrained(spec.directory / component).eval()
        program = load_program(spec, component, "transformer", device="cpu", dtype="float32")
        inputs = program.inputs((3, 6, 8))
        assert inputs["latents"].shape[1] == 36
        assert inputs["text_embeds"].shape[1] == spec.context_tokens
        texts, image = inputs["text_embeds"], None
        if spec.context_tokens > 512:
            image, texts = texts[:, :-512, :24], texts[:, -512:]
            image = image.unflatten(1, (2, -1)).flatten(0, 1) if architecture == "wan2.1-flf2v" else image
        with torch.inference_mode():
            (expected,) = module(inputs["latents"], inputs["timestep"], texts, image, return_dict=False)
            assert relative(program.run(**inputs)["velocity"], expected) < 1e-5
            cut = cut_text(inputs, spec.context_tokens - 510)
            assert cut["text_embeds"].shape[1] + cut[TEXT_PADDING].item() == spec.context_tokens
            assert cut["text_embeds"].shape[1] < spec.context_tokens - 400
            assert relative(program.module(*cut.values()), expected) < 1e-5


@pytest.mark.parametrize("frames", [1, 2, 4])
def test_a_first_frame_has_its_own_timestep(tiny: Tiny, frames: int) -> None:
    spec = tiny("wan2.2-ti2v-5b")
    module = WanTransformer3DModel.from_pretrained(spec.directory / "transformer").eval()
    program = load_program(spec, "transformer", "transformer", device="cpu", dtype="float32")
    inputs = program.inputs((frames, 6, 8))
    assert inputs["timestep"].tolist() == [0, 700]
    for first in (0.0, 700.0):
        inputs["timestep"] = torch.tensor([first, 700.0])
        per_token = torch.full((1, frames, 12), 700.0)
        per_token[:, 0] = first
        with torch.inference_mode():
            (expected,) = module(inputs["latents"], per_token.flatten(1), inputs["text_embeds"], return_dict=False)
        assert relative(program.run(**inputs)["velocity"], expected) < 1e-5
        # The same on PyTorch's path, with a scalar for equal timesteps.
        time = inputs["timestep"] if first == 0 else inputs["timestep"][1]
        other = PyTorchDenoiser(WanTransformer3DModel.from_pretrained(spec.directory / "transformer").eval())
        assert relative(other(inputs["latents"], time, inputs["text_embeds"]), expected) < 1e-5


@pytest.mark.parametrize(("architecture", "frames"), [("wan2.1-i2v", 1), ("wan2.1-i2v", 13), ("wan2.2-ti2v-5b", 1)])
def test_steps_of_the_encoder_equal_diffusers(tiny: Tiny, architecture: str, frames: int) -> None:
    spec = tiny(architecture)
    vae = AutoencoderKLWan.from_pretrained(spec.directory / "vae").eval()
    names = spec.programs["vae_encoder"]
    steps = [load_program(spec, "vae_encoder", name, device="cpu", dtype="float32") for name in names]
    scale = spec.vae.scale_factor_spatial
    clip = torch.rand(frames, 2 * scale, 4 * scale, 3, generator=torch.Generator().manual_seed(0)) * 2 - 1
    shape = (1, -1, 1, 1, 1)
    mean, std = torch.tensor(vae.config.latents_mean).view(shape), torch.tensor(vae.config.latents_std).view(shape)
    with torch.inference_mode():
        expected = (vae.encode(clip.permute(3, 0, 1, 2)[None]).latent_dist.mode() - mean) / std
    found = steps[0].run(frames=clip[:1])
    latents = [found.pop("z")]
    # A model that encodes nothing but the image has one step, without caches.
    assert (len(names), bool(found)) == ((1, False) if architecture == "wan2.2-ti2v-5b" else (2, True))
    for start in range(1, frames, 4):
        found = steps[1].run(frames=clip[start : start + 4], **found)
        latents.append(found.pop("z"))
    assert latents[-1].dtype is torch.float32
    assert all(name.startswith(CACHE) and cache.is_contiguous() for name, cache in found.items())
    assert relative(torch.cat(latents, dim=2), expected) < 1e-5
    size = 2 * scale, 4 * scale, 4
    stated = spec.image_input.vae.encoder_cache_bytes(*size) if spec.image_input is not None else 0
    assert not found or stated == sum(cache.nbytes for cache in found.values())


@pytest.mark.parametrize("architecture", CLIP_ARCHITECTURES)
def test_the_image_encoder_equals_transformers(tiny: Tiny, architecture: str) -> None:
    spec = tiny(architecture)
    module = CLIPVisionModel.from_pretrained(spec.directory / "image_encoder").eval()
    program = load_program(spec, "image_encoder", "image_encoder", device="cpu", dtype="float32")
    inputs = program.inputs((1, 1, 1))
    with torch.inference_mode():
        expected = module(inputs["pixels"], output_hidden_states=True).hidden_states[-2]
    assert relative(program.run(**inputs)["embeds"], expected) < 1e-5


class BlockParts:
    """Parts of blocks in PyTorch, with the interface of `OpenEngines`; at most eight tokens a call."""

    most_tokens = 8

    def __init__(self, spec: ModelSpec) -> None:
        names = spec.block_programs
        self.programs = {name: load_program(spec, "transformer", name, device="cpu", dtype="float32") for name in names}
        self.calls: list[tuple[int, float]] = []

    def write(self, program: str, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """Record the number of tokens and a value of their modulation, and compute."""
        self.calls.append((len(inputs["x"]), float(inputs["modulation"][0, 0])))
        for name, result in self.programs[program].run(**inputs).items():
            outputs[name].copy_(result)


@pytest.mark.parametrize("architecture", ["wan2.2-ti2v-5b", "wan2.1-flf2v"])
def test_blocks_on_engines_equal_diffusers(tiny: Tiny, architecture: str) -> None:
    spec = tiny(architecture)
    module = WanTransformer3DModel.from_pretrained(spec.directory / "transformer").eval()
    inputs = load_program(spec, "transformer", "transformer", device="cpu", dtype="float32").inputs((3, 6, 8))
    texts, image, time = inputs["text_embeds"], None, inputs["timestep"]
    if architecture == "wan2.1-flf2v":
        texts, image = texts[:, 10:], texts[:, :10, :24].unflatten(1, (2, -1)).flatten(0, 1)
    else:
        time = torch.tensor([[0.0] * 12 + [700.0] * 24])
    with torch.inference_mode():
        (expected,) = module(inputs["latents"], time, texts, image, return_dict=False)
    parts = BlockParts(spec)
    uses = [
        EngineRef(id="0", program=name, builder="b", precision="float32", profile=((1, 1, 1),) * 3)
        for name in parts.programs
    ]
    denoiser = PyTorchDenoiser(WanTransformer3DModel.from_pretrained(spec.directory / "transformer").eval())
    engines = BlockEngines(cast("OpenEngines", parts), spec, "transformer", uses, print, print)
    denoiser.compute(Speed(), None, engines)
    assert relative(denoiser(inputs["latents"], inputs["timestep"], inputs["text_embeds"]), expected) < 1e-5
    assert not engines.failed
    tokens, modulations = zip(*parts.calls[:5], strict=True)
    # The 12 tokens of a first frame with its own timestep are in calls of their own.
    assert tokens == ((8, 4, 8, 8, 8) if spec.timesteps > 1 else (8, 8, 8, 8, 4))
    assert len(set(modulations)) == spec.timesteps
    assert len(set(modulations[:2])) == len(set(modulations[2:])) == 1
