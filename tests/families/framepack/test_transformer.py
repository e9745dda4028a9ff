"""FramePack's passes: what a section sees is set for each section, in recorded passes and in several processes too."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import HunyuanVideoFramepackTransformer3DModel

from runtime.core.plan import ComponentPlan, Speed, Split
from runtime.execution import cuda_graphs
from runtime.execution.attention import attention, sparse_kernel
from runtime.execution.components import SectionDenoiser, SectionInputs
from runtime.execution.parallel.proxies import GroupManager, SharedSectionDenoiser
from runtime.families.framepack.transformer import PyTorchSectionDenoiser
from runtime.models.registry import read_spec
from runtime.models.sections import Section, Sections
from runtime.models.spec import ModelSpec
from tests.families.framepack_models import LATENT_CHANNELS, pipeline

PART = ComponentPlan(backend="pytorch", device="cpu", dtype="float32", weights_bytes=0, reasons=())
TWO = Split(devices=("cpu",) * 2, guidance=1, sequence=2, decode=False)
TIME = torch.tensor(500.0)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """A tiny model."""
    saved = tmp_path_factory.mktemp("models") / "FramePackI2V"
    pipeline().save_pretrained(saved)
    return read_spec(saved, "framepack")


def load(spec: ModelSpec) -> Any:
    """Return the transformer in float32."""
    module = HunyuanVideoFramepackTransformer3DModel.from_pretrained(spec.directory, subfolder="transformer")
    return module.to(torch.float32).eval().requires_grad_(False)


def sections(spec: ModelSpec) -> Sections:
    """Return the sections of a video, whose positions differ."""
    return spec.sections_of(3 * 36 + 1)


def noise(seed: int, *shape: int) -> torch.Tensor:
    """Return seeded noise with a first axis of 1."""
    return torch.randn((1, *shape), generator=torch.Generator().manual_seed(seed))


def seen(spec: ModelSpec, number: int, size: tuple[int, int] = (4, 6)) -> SectionInputs:
    """Return what a section sees; all of it differs between sections."""
    assert spec.image_input is not None
    return SectionInputs(
        section=sections(spec)[number],
        clean=noise(10 + number, LATENT_CHANNELS, 2, *size),
        history_2x=noise(20 + number, LATENT_CHANNELS, 2, *size),
        history_4x=noise(30 + number, LATENT_CHANNELS, 16, *size),
        image_embeds=noise(40 + number, spec.image_input.tokens, spec.image_input.width),
        guidance_scale=4.0 + number,
    )


def given(
    spec: ModelSpec, text: int = 7, size: tuple[int, int] = (4, 6)
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return latents, a timestep and a text, of CLIP's embedding and `text` tokens."""
    return noise(1, LATENT_CHANNELS, 9, *size), TIME, noise(2, 1 + text, spec.transformer.text_dim)


def wanted(spec: ModelSpec, number: int, text: int = 7, size: tuple[int, int] = (4, 6)) -> torch.Tensor:
    """Return the prediction of a new denoiser, which has seen one section only."""
    denoiser = PyTorchSectionDenoiser(load(spec))
    denoiser.see(seen(spec, number, size))
    return denoiser(*given(spec, text, size))


def test_a_section_is_the_same_after_json(spec: ModelSpec) -> None:
    for section in sections(spec):
        assert Section.from_json(section.as_json()) == section


def test_fused_projections_change_nothing(spec: ModelSpec) -> None:
    denoiser = PyTorchSectionDenoiser(load(spec), Speed(fused=True))
    denoiser.see(seen(spec, 1))
    torch.testing.assert_close(denoiser(*given(spec)), wanted(spec, 1), rtol=0, atol=1e-5)


def test_the_images_and_the_texts_tokens_are_exact_with_sparse_attention(spec: ModelSpec) -> None:
    size, text, module = (12, 16), 7, load(spec)
    denoiser = PyTorchSectionDenoiser(module, Speed(sparse_tau=1.0))
    denoiser.see(seen(spec, 1, size))
    exact, sparse = wanted(spec, 1, text, size), denoiser(*given(spec, text, size))
    assert 1e-6 < (sparse - exact).norm() / exact.norm() < 0.5
    assert spec.image_input is not None
    last = spec.image_input.tokens + text
    assert module.single_transformer_blocks[-1].attend is attention(sparse_kernel(1.0, last))
    denoiser.begin_step(fresh=True, exact=True)
    assert torch.equal(denoiser(*given(spec, text, size)), exact)


class Recorded:
    """A CUDA graph without a GPU: like one, it reads the tensors that the function read when it was recorded."""

    made = 0

    def __init__(self, function: Callable[..., torch.Tensor], *arguments: Any, **_: Any) -> None:
        type(self).made += 1
        self._function, self._text = function, arguments[2]
        self._denoiser: Any = function.__self__  # type: ignore[attr-defined]
        self._seen = self._denoiser._context

    def replay(self, latents: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        """Call the function with the tensors of the recording."""
        current, self._denoiser._context = self._denoiser._context, self._seen
        try:
            return self._function(latents, timestep, self._text)
        finally:
            self._denoiser._context = current


def test_a_pass_that_is_recorded_once_serves_all_sections_of_a_size(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "_Recorded", Recorded)
    monkeypatch.setattr(Recorded, "made", 0)
    denoiser = PyTorchSectionDenoiser(load(spec), Speed(graphed=True))
    arguments = given(spec)
    for number in range(3):
        denoiser.see(seen(spec, number))
        for _ in range(2):
            torch.testing.assert_close(denoiser(*arguments), wanted(spec, number), rtol=0, atol=1e-6)
    assert Recorded.made == 1
    # Another size is recorded, and what was recorded before is not replayed with it.
    denoiser.see(seen(spec, 1, (6, 4)))
    got = denoiser(*given(spec, size=(6, 4)))
    torch.testing.assert_close(got, wanted(spec, 1, size=(6, 4)), rtol=0, atol=1e-6)
    assert Recorded.made == 2


@pytest.fixture(scope="module")
def shared(spec: ModelSpec) -> Iterator[SharedSectionDenoiser]:
    """The transformer in two processes."""
    manager = GroupManager()
    with closing(manager.load(TWO, spec, "transformer", PART, lambda: None)) as found:
        assert isinstance(found.part, SharedSectionDenoiser)
        yield found.part
    manager.stop_processes()


# The number of all tokens is even and odd.
@pytest.mark.parametrize("text", [7, 8])
def test_two_processes_make_the_passes_of_one(text: int, shared: SharedSectionDenoiser, spec: ModelSpec) -> None:
    denoiser: SectionDenoiser = shared
    for number in (0, 2):
        denoiser.see(seen(spec, number))
        got = denoiser(*given(spec, text))
        torch.testing.assert_close(got, wanted(spec, number, text), rtol=0, atol=1e-5)
    # A section without what it sees would be another one.
    assert not torch.allclose(wanted(spec, 0, text), wanted(spec, 2, text), rtol=0, atol=1e-3)


def test_two_processes_see_another_size(shared: SharedSectionDenoiser, spec: ModelSpec) -> None:
    changed = replace(seen(spec, 1, (6, 6)), guidance_scale=5.0)
    shared.see(changed)
    got = shared(*given(spec, size=(6, 6)))
    torch.testing.assert_close(got, wanted(spec, 1, size=(6, 6)), rtol=0, atol=1e-5)
