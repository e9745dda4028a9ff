"""VACE in several processes: passes, step caches and whole clips equal those of one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.core.plan import EAGER, Speed
from runtime.execution.components import PROMPTED, UNPROMPTED
from runtime.execution.parallel.group import Group
from runtime.execution.parallel.proxies import GroupManager, SharedControlDenoiser
from runtime.families.wan.transformer import PyTorchDenoiser
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module
from tests.families.ltx2.test_several_gpus import PART, TWO
from tests.families.wan.test_vace import SCALES, inputs
from tests.pipeline.test_control import planned
from tests.pipeline.test_from_video import Clip, final_latents
from tests.plans import with_strategy

Tiny = Callable[[str], ModelSpec]
Load = Callable[[Speed], AbstractContextManager[SharedControlDenoiser]]
# Shares of 36, 45 and 1 tokens: even, padded, and of one process only.
SIZES = ((3, 6, 8), (3, 6, 10), (1, 2, 2))


@pytest.fixture(scope="module")
def load(tiny: Tiny) -> Iterator[Load]:
    """Return a function that loads the transformer in two processes, which share the tokens of a pass."""
    manager = GroupManager()

    @contextmanager
    def loaded(speed: Speed) -> Iterator[SharedControlDenoiser]:
        with closing(manager.load(TWO, tiny("wan2.1-vace"), "transformer", PART, lambda: None, speed)) as shared:
            assert isinstance(shared.part, SharedControlDenoiser)
            shared.part.steer(SCALES)
            yield shared.part

    yield loaded
    manager.stop_processes()


def alone(spec: ModelSpec, speed: Speed = EAGER) -> PyTorchDenoiser:
    """Return the transformer in this process."""
    denoiser = PyTorchDenoiser(load_module(spec, "transformer", PART), speed)
    denoiser.steer(SCALES)
    return denoiser


def joined(size: tuple[int, int, int]) -> torch.Tensor:
    """Return latents of a size with those of a control video."""
    return torch.randn(1, 16 + 96, *size, generator=torch.Generator().manual_seed(2))


def test_a_pass_of_two_processes_equals_that_of_one(tiny: Tiny, load: Load, subtests: pytest.Subtests) -> None:
    spec, timestep = tiny("wan2.1-vace"), torch.tensor(400.0)
    texts = dict(zip((PROMPTED, UNPROMPTED), inputs(spec)[2], strict=True))
    denoiser = alone(spec)
    for speed in (EAGER, Speed(text_kept=True, fused=True)):
        with load(speed) as shared:
            for size in SIZES:
                with subtests.test(speed=speed, size=size):
                    latents = joined(size)
                    wanted = [denoiser(latents, timestep, text) for text in texts.values()]
                    got = shared.together(latents, timestep, texts)
                    for one, other in zip(got, wanted, strict=True):
                        assert other.std() > 0.1
                        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
            shared.steer((1.0, 1.5))
            denoiser.steer((1.0, 1.5))
            other = denoiser(joined(SIZES[0]), timestep, texts[PROMPTED])
            torch.testing.assert_close(shared(joined(SIZES[0]), timestep, texts[PROMPTED]), other, rtol=0, atol=1e-5)
            denoiser.steer(SCALES)


def test_control_latents_are_sent_once(tiny: Tiny, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, text, channels, call = tiny("wan2.1-vace"), inputs(tiny("wan2.1-vace"))[2][0], list[list[int]](), Group.call

    def recorded(self: Group, task: str, check: Any, tensors: Sequence[torch.Tensor] = (), **values: Any) -> Any:
        if task == "forward":
            channels.append([tensor.shape[1] for tensor in tensors if tensor.ndim == 5])
        return call(self, task, check, tensors, **values)

    monkeypatch.setattr(Group, "call", recorded)
    denoiser, latents = alone(spec), joined(SIZES[1])
    with load(EAGER) as shared:
        for number in range(3):
            # The noise changes in each step, and then the control video; a clip's end forgets it.
            latents[:, : 16 if number < 2 else None] *= 0.9
            got, wanted = (each(latents, torch.tensor(400.0), text) for each in (shared, denoiser))
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
        shared.forget()
        shared.steer(SCALES)
        torch.testing.assert_close(shared(latents, torch.tensor(400.0), text), wanted, rtol=0, atol=1e-5)
    assert channels == [[16, 96], [16], [16, 96], [16, 96]]


def test_reduced_attention_equals_that_of_one_process(tiny: Tiny, load: Load, subtests: pytest.Subtests) -> None:
    spec, timestep = tiny("wan2.1-vace"), torch.tensor(400.0)
    text = inputs(spec)[2][0]
    # FP8 is used for 2,048 tokens and more; sparse attention has blocks of 64 tokens.
    for speed, size in ((Speed(attention="fp8"), (8, 32, 32)), (Speed(sparse_tau=1.0), (3, 24, 24))):
        with subtests.test(speed=speed), load(speed) as shared:
            latents = joined(size)
            without = alone(spec)(latents, timestep, text)
            wanted = alone(spec, speed)(latents, timestep, text)
            assert (wanted - without).norm() > 1e-4 * without.norm()
            got = shared(latents, timestep, text)
            # Products of other numbers of rows differ in their last bits, and a few values are rounded the other way.
            assert (got - wanted).norm() < 0.05 * (wanted - without).norm()


@pytest.mark.parametrize("step_cache", ["first-block:0.05", "magcache:0.1", "taylorseer:2"])
def test_processes_that_share_a_pass_skip_blocks_together(step_cache: str, tiny: Tiny, load: Load) -> None:
    spec, denoiser = tiny("wan2.1-vace"), alone(tiny("wan2.1-vace"))
    text, latents = inputs(spec)[2][0], joined(SIZES[1])

    def steps(one: PyTorchDenoiser | SharedControlDenoiser) -> list[torch.Tensor]:
        one.begin_step(fresh=True, exact=True)
        return [one(latents * (1 + step / 1000), torch.tensor(900.0 - step), text).clone() for step in range(4)]

    exact = steps(denoiser)
    with denoiser.caching(step_cache), load(EAGER) as shared, shared.caching(step_cache):
        wanted = steps(denoiser)
        for got, one in zip(steps(shared), wanted, strict=True):
            torch.testing.assert_close(got, one, rtol=0, atol=1e-5)
    assert 0 < sum(torch.equal(one, whole) for one, whole in zip(wanted, exact, strict=True)) < len(exact)


@pytest.mark.slow
@pytest.mark.parametrize(("guidance", "sequence"), [(2, 1), (2, 2)])
def test_a_clip_of_several_processes_equals_that_of_one(
    guidance: int, sequence: int, tiny: Tiny, tmp_path: Path
) -> None:
    values = {"control_scale": [0.5, 2], "guidance_scale_2": 2.5, "steps": 2}
    clip = planned(tiny("wan2.2-vace"), tmp_path, "control", "mask", "references", **values)
    clip = Clip(with_strategy(clip.plan, keep_loaded=True), clip.spec)
    wanted = final_latents(clip, tmp_path / "alone")
    split = TWO.replace(devices=("cpu",) * (guidance * sequence), guidance=guidance, sequence=sequence)
    got = final_latents(Clip(clip.plan.replace(split=split), clip.spec), tmp_path / "shared")
    assert wanted.std() > 0.1
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
