"""The faster transformer equals diffusers' for each architecture."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanTransformerBlock

from runtime.core.plan import ComponentPlan, EngineRef, Speed
from runtime.execution.block_engines import BlockEngines
from runtime.execution.components import PROMPTED, UNPROMPTED
from runtime.families.wan.transformer import PyTorchDenoiser, block_step, fuse, install
from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module

Tiny = Callable[[str], ModelSpec]
# In one transformer of Wan2.2-A14B nothing differs from Wan2.1.
MODELS = ("wan2.1", "wan2.2-ti2v-5b", "diorama")


class Case:
    """A model's transformer as diffusers computes it, and inputs of two texts."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.reference = self.load()
        generator = torch.Generator().manual_seed(1)
        self.latents = torch.randn(1, spec.vae.z_dim, 3, 6, 8, generator=generator)
        size = (2, 1, 7, spec.transformer.text_dim)
        self.texts = list(torch.randn(size, generator=generator))

    def load(self) -> Any:
        """Return the transformer."""
        module = WanTransformer3DModel.from_pretrained(self.spec.directory, subfolder="transformer")
        return module.to(torch.float32).eval().requires_grad_(False)

    def wanted(self, text: torch.Tensor, timestep: float) -> torch.Tensor:
        """Return diffusers' prediction, with a timestep per token where the model was made with one."""
        shape = (1, 3 * 3 * 4) if self.spec.expand_timesteps else (1,)
        output: torch.Tensor = self.reference(self.latents, torch.full(shape, timestep), text, return_dict=False)[0]
        return output


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tiny: Tiny) -> Iterator[Case]:
    name: str = request.param
    yield Case(find(name, Path("none")) if name == "diorama" else tiny(name))


def close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether two results differ by rounding in float32 at most."""
    return bool((got - wanted).norm() / wanted.norm() < 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "speed",
    [Speed(), Speed(text_kept=True), Speed(fused=True), Speed(text_kept=True, fused=True, paired=True)],
    ids=["plain", "text kept", "fused", "all"],
)
@torch.no_grad()
def test_predictions_equal_diffusers(case: Case, speed: Speed) -> None:
    denoiser = PyTorchDenoiser(case.load(), speed)
    for timestep in (999.0, 300.0):
        wanted = [case.wanted(text, timestep) for text in case.texts]
        assert not close(wanted[0], wanted[1])
        given = torch.tensor(timestep)
        if speed.paired:
            texts = dict(zip((PROMPTED, UNPROMPTED), case.texts, strict=True))
            got = list(denoiser.together(case.latents, given, texts))
        else:
            got = [denoiser(case.latents, given, text) for text in case.texts]
        assert all(close(a, b) for a, b in zip(got, wanted, strict=True))


@torch.no_grad()
def test_texts_are_distinguished_and_freed(case: Case) -> None:
    denoiser = PyTorchDenoiser(case.load(), Speed(text_kept=True))
    given = torch.tensor(500.0)
    # More texts than are kept, and one that was changed into another in its place.
    texts = [*case.texts, case.texts[0] * 2, case.texts[0]]
    for text in texts:
        assert close(denoiser(case.latents, given, text), case.wanted(text, 500.0))
    assert len(denoiser._texts) == 2
    denoiser.forget()
    assert not denoiser._texts
    assert close(denoiser(case.latents, given, texts[1]), case.wanted(texts[1], 500.0))


@torch.no_grad()
def test_keys_and_values_are_computed_once(case: Case) -> None:
    module = case.load()
    denoiser = PyTorchDenoiser(module, Speed(text_kept=True))
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    for block in module.blocks:
        block.attn2.to_k.register_forward_hook(count)
    for timestep in (900.0, 800.0, 700.0):
        for text in case.texts:
            denoiser(case.latents, torch.tensor(timestep), text)
    assert calls == 2 * len(module.blocks)


@torch.no_grad()
def test_rotations_depend_on_the_size(case: Case) -> None:
    denoiser = PyTorchDenoiser(case.load())
    for size in ((2, 4, 10), (2, 10, 4), (2, 4, 10)):
        latents = torch.randn(1, case.spec.vae.z_dim, *size, generator=torch.Generator().manual_seed(2))
        shape = (1, size[0] * size[1] * size[2] // 4) if case.spec.expand_timesteps else (1,)
        wanted = case.reference(latents, torch.full(shape, 500.0), case.texts[0], return_dict=False)[0]
        assert close(denoiser(latents, torch.tensor(500.0), case.texts[0]), wanted)


@torch.no_grad()
def test_fused_parts_are_views_and_adapters_are_not_fused(tiny: Tiny) -> None:
    case = Case(tiny("wan2.1"))
    module = case.load()
    adapted = module.blocks[1].attn1
    adapted.to_q = torch.nn.Sequential(adapted.to_q)
    fuse(module)
    whole = module.blocks[0].attn1
    assert whole.to_q.weight.data_ptr() == whole.to_qkv.weight.data_ptr()
    assert whole.to_v.weight.untyped_storage().data_ptr() == whole.to_qkv.weight.untyped_storage().data_ptr()
    assert not hasattr(adapted, "to_qkv")
    install(module)
    got = module(case.latents, torch.tensor([500.0]), case.texts[0])[0]
    assert close(got, case.wanted(case.texts[0], 500.0))


def test_bfloat16_is_closer_to_float32_than_diffusers(tiny: Tiny) -> None:
    case = Case(tiny("wan2.2-a14b"))
    wanted = case.wanted(case.texts[0], 500.0)
    low = case.load()
    low.to(torch.bfloat16)
    theirs = low(case.latents.bfloat16(), torch.tensor([500.0]), case.texts[0].bfloat16(), return_dict=False)[0].float()
    ours = PyTorchDenoiser(low)(case.latents, torch.tensor(500.0), case.texts[0]).float()
    error = (ours - wanted).norm() / wanted.norm()
    assert error < 0.03
    assert error < 1.2 * (theirs - wanted).norm() / wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_hidden_states_stay_in_float32_where_engines_are_replaced(dtype: torch.dtype, tiny: Tiny) -> None:
    case = Case(tiny("wan2.2-a14b"))
    wanted = case.wanted(case.texts[0], 500.0)
    part = ComponentPlan(backend="pytorch", device="cpu", dtype=str(dtype)[6:], weights_bytes=0, reasons=())
    denoiser = PyTorchDenoiser(load_module(case.spec, "transformer", part))
    narrow = denoiser(case.latents, torch.tensor(500.0), case.texts[0]).float()
    uses = [
        EngineRef(id="0", program=program, builder="b", precision=part.dtype, profile=((1, 1, 1),) * 3)
        for program in case.spec.block_programs
    ]
    denoiser.compute(Speed(), None, BlockEngines(None, case.spec, "transformer", uses, print, print))
    wide = denoiser(case.latents, torch.tensor(500.0), case.texts[0])
    assert wide.dtype == dtype
    errors = [float((made.float() - wanted).norm() / wanted.norm()) for made in (wide, narrow)]
    assert errors[0] < errors[1] < (0.03 if dtype == torch.bfloat16 else 0.004)
    # Without engines, everything is as before.
    denoiser.forget()
    assert torch.equal(denoiser(case.latents, torch.tensor(500.0), case.texts[0]).float(), narrow)


@torch.no_grad()
def test_adapters_have_the_same_effect_as_in_diffusers(tiny: Tiny) -> None:
    case = Case(tiny("wan2.1"))
    module = case.load()
    fuse(module)
    denoiser = PyTorchDenoiser(module, Speed(fused=True))
    with torch.no_grad():
        for block, other in zip(module.blocks, case.reference.blocks, strict=True):
            # An adapter merged into the weights, as LoRA is.
            merged = block.attn1.to_q.weight.data * 1.5
            block.attn1.to_q.weight.data = merged
            other.attn1.to_q.weight.data = merged
    denoiser.compute(Speed(fused=True))
    assert close(denoiser(case.latents, torch.tensor(500.0), case.texts[0]), case.wanted(case.texts[0], 500.0))
    assert type(module) is WanTransformer3DModel


def test_caching_hooks_work_on_the_replaced_blocks(tiny: Tiny) -> None:
    from diffusers import FirstBlockCacheConfig

    case = Case(tiny("wan2.1"))
    module = case.load()
    denoiser = PyTorchDenoiser(module)
    assert all(type(block) is WanTransformerBlock and block.step is block_step for block in module.blocks)
    module.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    with module.cache_context("cond"), torch.no_grad():
        got = denoiser(case.latents, torch.tensor(500.0), case.texts[0])
    assert close(got, case.wanted(case.texts[0], 500.0))
