"""Normalized attention guidance equals the authors', in transformers of each kind and on block engines."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel

from runtime.core.facts import Fact
from runtime.core.plan import EAGER, Speed
from runtime.execution.attention_guidance import normalized
from runtime.execution.components import PROMPTED
from runtime.execution.parallel.proxies import shared_speed
from runtime.families.wan.spec import MAX_SEQUENCE_LENGTH
from runtime.families.wan.transformer import PyTorchDenoiser
from runtime.models.spec import ModelSpec
from tests.families.hunyuan_video.test_block_programs import Engines, on_engines
from tests.families.ltx2 import test_transformer as ltx2
from tests.families.wan.test_vace import SCALES
from tests.families.wan.test_vace import inputs as vace_inputs
from tests.families.wan.test_vace import reference as vace_reference
from tests.tiny_models import LTX2_ARCHITECTURES

Tiny = Callable[[str], ModelSpec]
SCALE = 11.0
NAG = EAGER.replace(nag=SCALE)
TIMESTEP = torch.tensor(400.0)


def nag(z_positive: torch.Tensor, z_negative: torch.Tensor, scale: float, tau: float, alpha: float) -> torch.Tensor:
    """Return guided attention: `nag` of https://github.com/ChenDarYen/ComfyUI-NAG/blob/main/utils.py (MIT license)."""
    z_guidance = z_positive * scale - z_negative * (scale - 1)
    eps = 1e-6
    norm_positive = torch.norm(z_positive, p=1, dim=-1, keepdim=True).clamp_min(eps).expand_as(z_positive)
    norm_guidance = torch.norm(z_guidance, p=1, dim=-1, keepdim=True).clamp_min(eps).expand_as(z_guidance)
    s = norm_guidance / norm_positive
    z_guidance = z_guidance * torch.minimum(s, s.new_full((1,), tau)) / s
    return z_guidance * alpha + z_positive * (1 - alpha)


class NagProcessor:
    """A processor of diffusers' attention to a text, with the authors' guidance.

    It takes a prompt and a negative prompt as a batch of two, or as the halves of a text's tokens.
    """

    def __call__(
        self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, *_: object
    ) -> torch.Tensor:
        query = attn.norm_q(attn.to_q(hidden_states))

        def guided(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            heads = [tensor.unflatten(2, (attn.heads, -1)).transpose(1, 2) for tensor in (query, keys, values)]
            pairs = zip(*(tensor.split(1) for tensor in heads[1:]), strict=True)
            attended = [F.scaled_dot_product_attention(heads[0], *pair).transpose(1, 2).flatten(2) for pair in pairs]
            return nag(attended[0], attended[1], SCALE, 2.5, 0.25)

        texts = encoder_hidden_states
        if len(texts) == 1:
            texts = torch.cat(texts.chunk(2, dim=1))
        image: torch.Tensor | None = None
        if getattr(attn, "add_k_proj", None) is not None:
            image, texts = texts[:, :-MAX_SEQUENCE_LENGTH], texts[:, -MAX_SEQUENCE_LENGTH:]
        out = guided(attn.norm_k(attn.to_k(texts)), attn.to_v(texts))
        if image is not None:
            out = out + guided(attn.norm_added_k(attn.add_k_proj(image)), attn.add_v_proj(image))
        if getattr(attn, "to_gate_logits", None) is not None:
            gates = 2 * torch.sigmoid(attn.to_gate_logits(hidden_states))
            out = (out.unflatten(2, (attn.heads, -1)) * gates[..., None]).flatten(2)
        result: torch.Tensor = attn.to_out[0](out)
        return result


def guide(module: Any) -> Any:
    """Return diffusers' transformer with the authors' attention to the text."""
    for block in (*getattr(module, "blocks", ()), *getattr(module, "vace_blocks", ())):
        block.attn2.set_processor(NagProcessor())
    for block in getattr(module, "transformer_blocks", ()):
        for attention in (block.attn2, block.audio_attn2):
            attention.set_processor(NagProcessor())
    return module


def close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether two results differ by rounding in float32 at most."""
    return bool((got - wanted).norm() / wanted.norm() < 1e-5)


@torch.no_grad()
def test_the_result_is_limited_and_scale_1_changes_nothing() -> None:
    positive, negative = torch.randn(2, 3, 50, 24, generator=torch.Generator().manual_seed(1)).unbind()
    positive[0, 0] = 0
    for scale in (1.0, 2.0, 11.0, 100.0):
        assert close(normalized(positive, negative, scale), nag(positive, negative, scale, 2.5, 0.25))
    assert close(normalized(positive, negative, 1.0), positive)
    largest = (0.75 + 0.25 * 2.5) * positive.abs().sum(-1)
    assert (normalized(positive, negative, 100.0).abs().sum(-1) <= largest + 1e-4).all()


@torch.no_grad()
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("model", ["wan2.1", "wan2.2-ti2v-5b", "wan2.1-i2v"])
def test_wan_equals_the_authors(model: str, tiny: Tiny) -> None:
    spec = tiny(model)

    def load() -> Any:
        module = WanTransformer3DModel.from_pretrained(spec.directory, subfolder="transformer")
        return module.to(torch.float32).eval().requires_grad_(False)

    generator = torch.Generator().manual_seed(1)
    module = guide(load())
    latents = torch.randn(1, module.config.in_channels, 3, 6, 8, generator=generator)
    texts = torch.randn(2, MAX_SEQUENCE_LENGTH, spec.transformer.text_dim, generator=generator)
    image, given = None, texts
    if module.config.image_dim is not None:
        image = torch.randn(1, 5, module.config.image_dim, generator=generator).expand(2, -1, -1)
        padded = F.pad(image, (0, texts.shape[2] - image.shape[2]))
        given = torch.cat([padded, texts], dim=1)
    times = torch.full((1, 3 * 3 * 4) if spec.expand_timesteps else (1,), 400.0)
    wanted = module(latents, times, texts, image, return_dict=False)[0]
    reasons: list[Fact] = []
    for speed in (NAG, NAG.replace(text_kept=True, fused=True), NAG.replace(text_kept=True, compiled=True)):
        denoiser = PyTorchDenoiser(load(), speed)
        assert close(denoiser(latents, TIMESTEP, given), wanted)
        # A text alone is not guided, and a negative prompt that equals the prompt changes nothing.
        alone = denoiser(latents, TIMESTEP, given[:1])
        assert not close(alone, wanted)
        assert close(denoiser(latents, TIMESTEP, given[:1].expand(2, -1, -1)), alone)
    denoiser.compute(NAG)
    with denoiser.caching("first-block:0.1"):
        for fresh, given_latents in ((True, latents), (False, latents * 1.001)):
            denoiser.begin_step(fresh=fresh, exact=True)
            # The second step adds the guided blocks' change of the first one.
            got = denoiser(given_latents, TIMESTEP, given)
            assert (got - wanted).norm() / wanted.norm() < (1e-5 if fresh else 5e-3)
    denoiser.compute(NAG, None, on_engines(spec, Engines(spec), reasons))
    assert close(denoiser(latents, TIMESTEP, given), wanted)
    assert not reasons


@torch.no_grad()
def test_control_blocks_are_guided_too(tiny: Tiny) -> None:
    spec = tiny("wan2.1-vace")
    latents, control, texts = vace_inputs(spec)
    both = torch.cat(texts)
    wanted = guide(vace_reference(spec))(
        latents, TIMESTEP[None], both, None, control, torch.tensor(SCALES), return_dict=False
    )[0]
    denoiser = PyTorchDenoiser(vace_reference(spec), NAG)
    denoiser.steer(SCALES)
    assert close(denoiser(torch.cat([latents, control], dim=1), TIMESTEP, both), wanted)


@torch.no_grad()
@pytest.mark.parametrize("architecture", LTX2_ARCHITECTURES)
def test_both_streams_of_ltx_2_are_guided(architecture: str, tiny: Tiny) -> None:
    spec, reasons = tiny(architecture), list[Fact]()
    module = guide(ltx2.load(spec))
    given = ltx2.inputs(module)
    negative = ltx2.inputs(module, seed=2).text
    in_one = given._replace(text=torch.cat([given.text, negative], dim=1))
    wanted = ltx2.by_diffusers(module, in_one, TIMESTEP)
    both = torch.cat([given.text, negative])
    denoiser = ltx2.made(ltx2.load(spec), NAG)
    assert ltx2.error_of(denoiser(given.latents, TIMESTEP, both), wanted) < 1e-5
    assert ltx2.error_of(denoiser(given.latents, TIMESTEP, given.text), wanted) > 1e-3
    denoiser.compute(NAG, None, on_engines(spec, Engines(spec), reasons))
    assert ltx2.error_of(denoiser(given.latents, TIMESTEP, both, which=PROMPTED), wanted) < 1e-5
    assert not reasons


def test_several_gpus_use_the_same_scale() -> None:
    assert shared_speed(Speed(nag=SCALE, paired=True), "transformer") == NAG
    assert shared_speed(NAG, "vae") == EAGER
