"""LTX-2 in several processes: passes, step caches and whole clips equal those of one."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter

from runtime.core.plan import EAGER, ComponentPlan, Speed, Split
from runtime.execution.components import ISOLATED, PROMPTED, SKIPPING, UNPROMPTED
from runtime.execution.parallel.group import Group
from runtime.execution.parallel.proxies import GroupManager, SharedStreamDenoiser
from runtime.execution.parallel.rank_process import Message
from runtime.execution.parallel.ulysses import Tokens
from runtime.execution.streams import Streams
from runtime.families.ltx2.transformer import PyTorchStreamDenoiser, block_step, install, share_tokens
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module
from tests.families.ltx2.test_parity import make, planned
from tests.families.ltx2.test_transformer import PASSES, SKIPPED, STREAMS, TIMES, Inputs, inputs, made
from tests.plans import with_strategy
from tests.tiny_models import LTX2_ARCHITECTURES

Tiny = Callable[[str], ModelSpec]
PART = ComponentPlan(backend="pytorch", device="cpu", dtype="float32", weights_bytes=0, reasons=())
TWO = Split(devices=("cpu",) * 2, guidance=1, sequence=2, decode=False)
SPEEDS = {"ltx-2": Speed(fused=True, text_kept=True), "ltx-2.3": EAGER}
# Shares of 45 tokens are not even.
ODD = replace(STREAMS, video=(1, 16, 3, 3, 5))
# Also even shares; a keyframe and a given frame; and one token, so that a process has none.
CLIPS = (STREAMS, replace(ODD, keyframes=(16,), given=2), replace(STREAMS, video=(1, 16, 1, 1, 1)))


@pytest.fixture(scope="module")
def group() -> Iterator[GroupManager]:
    """Two processes that share the tokens of a pass."""
    manager = GroupManager()
    yield manager
    manager.stop_processes()


@pytest.fixture(scope="module")
def load(group: GroupManager, tiny: Tiny) -> "Load":
    """Return a function that loads a transformer in both processes while entered."""

    @contextmanager
    def loaded(architecture: str, speed: Speed, streams: Streams) -> Iterator[SharedStreamDenoiser]:
        with closing(group.load(TWO, tiny(architecture), "transformer", PART, lambda: None, speed)) as shared:
            assert isinstance(shared.part, SharedStreamDenoiser)
            shared.part.see(streams, SKIPPED)
            yield shared.part

    return loaded


Load = Callable[[str, Speed, Streams], AbstractContextManager[SharedStreamDenoiser]]


def alone(spec: ModelSpec, streams: Streams = STREAMS, speed: Speed = EAGER) -> tuple[PyTorchStreamDenoiser, Inputs]:
    """Return the transformer in this process, and inputs with the keyframes of a clip."""
    module = load_module(spec, "transformer", PART)
    batch, channels, frames, height, width = streams.video
    taken = replace(streams, video=(batch, channels, len(streams.keyframes) + frames, height, width))
    return made(module, speed, streams), inputs(module, taken)


@pytest.mark.parametrize("architecture", LTX2_ARCHITECTURES)
def test_a_pass_of_two_processes_equals_that_of_one(
    architecture: str, tiny: Tiny, load: Load, subtests: pytest.Subtests
) -> None:
    results = []
    with load(architecture, SPEEDS[architecture], STREAMS) as shared:
        for streams in CLIPS:
            denoiser, given = alone(tiny(architecture), streams)
            shared.see(streams, SKIPPED)
            for times in TIMES:
                for which in PASSES:
                    with subtests.test(streams=streams.video, times=times, which=which):
                        wanted = denoiser(given.latents, TIMES[times], given.text, which)
                        results.append(wanted)
                        got = shared(given.latents, TIMES[times], given.text, which)
                        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
        # As after a clip whose passes were CUDA graphs.
        shared.forget()
        shared.see(streams, SKIPPED)
        got = shared(given.latents, TIMES[times], given.text, which)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    assert all(one.std() > 0.1 for one in results)


def test_reduced_attention_equals_that_of_one_process(tiny: Tiny, load: Load, subtests: pytest.Subtests) -> None:
    streams = replace(STREAMS, video=(1, 16, 5, 21, 21))
    exact, given = alone(tiny("ltx-2"), streams)
    without = exact(given.latents, TIMES["text"], given.text)
    for speed in (Speed(attention="fp8"), Speed(sparse_tau=1.0)):
        with subtests.test(speed=speed), load("ltx-2", speed, streams) as shared:
            denoiser, _ = alone(tiny("ltx-2"), streams, speed)
            wanted = denoiser(given.latents, TIMES["text"], given.text)
            assert (wanted - without).norm() > 1e-4 * without.norm()
            got = shared(given.latents, TIMES["text"], given.text)
            # Products of other numbers of rows differ in their last bits, and a few values are rounded the other way.
            assert (got - wanted).norm() < 0.05 * (wanted - without).norm()


def steps_of(denoiser: PyTorchStreamDenoiser | SharedStreamDenoiser, given: Inputs) -> list[torch.Tensor]:
    """Return the predictions of steps whose streams change by little, much and little, one after the other."""
    run = partial(denoiser, timestep=TIMES["text"], text_embeds=given.text)
    video, sound = ODD.split(given.latents)
    factors = ((1.0, 1.0), (1.001, 1.001), (1.0, 1.5), (1.5, 1.5), (1.501, 1.501))
    denoiser.begin_step(fresh=True, exact=True)
    return [run(ODD.join(video * one, sound * other)).clone() for one, other in factors]


@pytest.mark.parametrize("step_cache", ["first-block:0.02", "taylorseer:2"])
def test_processes_that_share_a_pass_skip_blocks_together(step_cache: str, tiny: Tiny, load: Load) -> None:
    denoiser, given = alone(tiny("ltx-2.3"), ODD)
    exact = steps_of(denoiser, given)
    with denoiser.caching(step_cache), load("ltx-2.3", EAGER, ODD) as shared, shared.caching(step_cache):
        wanted = steps_of(denoiser, given)
        for got, one in zip(steps_of(shared, given), wanted, strict=True):
            torch.testing.assert_close(got, one, rtol=0, atol=1e-5)
    assert sum(torch.equal(one, whole) for one, whole in zip(wanted, exact, strict=True)) == 3


def test_blocks_of_a_shared_pass_are_compiled_once(tiny: Tiny, tmp_path: Path) -> None:
    counter = CompileCounter()
    compiled = torch.compile(block_step, backend=counter, fullgraph=True, dynamic=False)
    denoiser, given = alone(tiny("ltx-2.3"))
    wanted = denoiser(given.latents, TIMES["text"], given.text)
    dist.init_process_group("gloo", init_method=(tmp_path / "meet").as_uri(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        install(denoiser._module, step=compiled)
        share_tokens(denoiser._module, Tokens(dist.group.WORLD))
        got = denoiser(given.latents, TIMES["text"], given.text)
    finally:
        dist.destroy_process_group()
    assert counter.frame_count == 1
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("guidance", "sequence"), [(4, 1), (2, 2)])
def test_a_clip_of_several_processes_equals_that_of_one(
    guidance: int, sequence: int, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny("ltx-2.3")
    plan = with_strategy(planned(spec, 3.0, tmp_path, steps=3), keep_loaded=True)
    split = TWO.replace(devices=("cpu",) * (guidance * sequence), guidance=guidance, sequence=sequence)
    wanted, passes, call = make(spec, plan), [], Group.call

    def recorded(self: Group, task: str, *given: Any, **values: Any) -> list[Message]:
        answers = call(self, task, *given, **values)
        if task == "forward":
            passes.append([answer.values["passes"] for answer in answers])
        return answers

    monkeypatch.setattr(Group, "call", recorded)
    got = make(spec, plan.replace(split=split))
    # The four passes, by their numbers. Of the processes that share one, the first returns it.
    shares = {(4, 1): [[0], [1], [2], [3]], (2, 2): [[0, 2], [], [1, 3], []]}
    assert passes == [shares[guidance, sequence]] * 3
    for name in ("video", "sound"):
        ours, theirs = getattr(got, name), getattr(wanted, name)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_passes_are_computed_together_as_one_after_the_other(tiny: Tiny) -> None:
    denoiser, given = alone(tiny("ltx-2"))
    texts = dict.fromkeys((PROMPTED, SKIPPING, ISOLATED), given.text) | {UNPROMPTED: given.text + 1}
    together = denoiser.together(given.latents, TIMES["text"], texts)
    for got, (which, text) in zip(together, texts.items(), strict=True):
        assert torch.equal(got, denoiser(given.latents, TIMES["text"], text, which))
