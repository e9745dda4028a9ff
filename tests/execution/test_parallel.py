"""Several processes on one CPU do what several GPUs do: the same results, and an end with a reason where one fails."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter

from runtime.core.cancel import Cancel
from runtime.core.errors import GroupError
from runtime.core.plan import ComponentPlan, Speed, Split
from runtime.execution.parallel.group import Limits
from runtime.execution.parallel.group_manager import GroupManager
from runtime.execution.parallel.proxies import SharedDenoiser, SharedVideoDecoder, Texts
from runtime.execution.parallel.ulysses import Tokens
from runtime.execution.video_decoder import longer_side
from runtime.families.wan.transformer import PyTorchDenoiser, block_step, install, share_tokens
from runtime.families.wan.vae import PyTorchVideoDecoder, StripDecoder
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module
from tests.tiny_models import ARCHITECTURES

Tiny = Callable[[str], ModelSpec]
PART = ComponentPlan(backend="pytorch", device="cpu", dtype="float32", weights_bytes=0, reasons=())
FOUR = Split(devices=("cpu",) * 4, guidance=2, sequence=2, decode=True)
TWO = Split(devices=("cpu",) * 2, guidance=1, sequence=2, decode=True)
SILENCE = 4.0
# (latent frames, height, width), and tokens: two share 30 and 3 of them, of which one has none, each pass.
SIZES = {(5, 4, 6): 30, (1, 2, 6): 3, (3, 6, 4): 18}


class Together(NamedTuple):
    """Processes with a whole model, and the same model in this one."""

    group_manager: GroupManager
    spec: ModelSpec
    denoiser: SharedDenoiser
    decoder: SharedVideoDecoder
    alone: PyTorchDenoiser
    whole: PyTorchVideoDecoder


def never() -> None:
    """Nobody asks to stop."""


@pytest.fixture(scope="module", params=["wan2.2-ti2v-5b"])
def together(request: pytest.FixtureRequest, tiny: Tiny) -> Iterator[Together]:
    """Four processes, two for each pass of guidance: TI2V-5B has a timestep for each token, too."""
    spec = tiny(request.param)
    module, vae = load_module(spec, "transformer", PART), load_module(spec, "vae", PART)
    alone = PyTorchDenoiser(module)
    group_manager = GroupManager()
    denoiser = group_manager.load(FOUR, spec, "transformer", PART, never).part
    decoder = group_manager.load(FOUR, spec, "vae", PART, never, Speed(channels_last=True)).part
    assert isinstance(denoiser, SharedDenoiser)
    assert isinstance(decoder, SharedVideoDecoder)
    yield Together(group_manager, spec, denoiser, decoder, alone, PyTorchVideoDecoder(vae))
    group_manager.dismiss()


@pytest.fixture(scope="module")
def pair() -> Iterator[GroupManager]:
    """Two processes that share the tokens of a pass."""
    group_manager = GroupManager()
    yield group_manager
    group_manager.dismiss()


def latents_of(spec: ModelSpec, size: tuple[int, int, int], seed: int = 0) -> torch.Tensor:
    """Return noise of a size."""
    return torch.randn((1, spec.vae.z_dim, *size), generator=torch.Generator().manual_seed(seed))


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Return two texts' embeddings."""
    first, second = torch.randn((2, 1, 512, 32), generator=torch.Generator().manual_seed(1))
    return first, second


@pytest.mark.parametrize("size", SIZES)
def test_a_pass_is_what_one_process_makes_of_it(size: tuple[int, int, int], together: Together) -> None:
    assert together.spec.tokens(4 * size[0] - 3, 16 * size[1], 16 * size[2]) == SIZES[size]
    latents, when = latents_of(together.spec, size), torch.tensor(500)
    positive, negative = texts()
    wanted = together.alone(latents, when, positive), together.alone(latents, when, negative)
    assert (wanted[0] - wanted[1]).abs().max() > 1e-3
    for made, one in zip(together.denoiser.pair(latents, when, positive, negative), wanted, strict=True):
        torch.testing.assert_close(made, one, rtol=0, atol=1e-5)
    # And where a step has no guidance.
    torch.testing.assert_close(together.denoiser(latents, when, negative), wanted[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [(8, 32, 32), (3, 46, 62)], ids=["even", "odd"])
def test_attention_in_fp8_rounds_as_in_one_process(size: tuple[int, int, int], tiny: Tiny, pair: GroupManager) -> None:
    spec, speed = tiny("wan2.1"), Speed(attention="fp8")
    latents, when, text = latents_of(spec, size), torch.tensor(500), texts()[0]
    module = load_module(spec, "transformer", PART)
    exact = PyTorchDenoiser(module)(latents, when, text)
    wanted = PyTorchDenoiser(module, speed)(latents, when, text)
    assert (wanted - exact).abs().max() > 1e-3
    with closing(pair.load(TWO, spec, "transformer", PART, never, speed)) as shared:
        assert isinstance(shared.part, SharedDenoiser)
        torch.testing.assert_close(shared.part(latents, when, text), wanted, rtol=0, atol=1e-5)


def test_both_experts_are_compiled_once(tiny: Tiny, tmp_path: Path) -> None:
    spec, counter = tiny("wan2.2-a14b"), CompileCounter()
    compiled = torch.compile(block_step, backend=counter, fullgraph=True, dynamic=False)
    dist.init_process_group("gloo", init_method=(tmp_path / "meet").as_uri(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        tokens = Tokens(dist.group.WORLD)
        tokens.count = 3
        for name in ("transformer", "transformer_2"):
            denoiser = PyTorchDenoiser(load_module(spec, name, PART))
            module = denoiser._module
            install(module, step=compiled)
            share_tokens(module, tokens)
            denoiser(latents_of(spec, (1, 2, 6)), torch.tensor(500), texts()[0])
            assert counter.frame_count == 1
    finally:
        dist.destroy_process_group()


def test_texts_are_sent_once_and_two_are_kept() -> None:
    known = Texts()
    one, two, three = (torch.zeros(1, 2, 3) for _ in range(3))
    assert known.number([one, two])[:3] == ([0, 1], [], [0, 1])
    assert known.number([one, two]) == ([0, 1], [], [], [])
    assert known.number([two])[:3] == ([1], [], [])
    numbers, forgotten, new, sent = known.number([two, three])
    assert (numbers, forgotten, new) == ([1, 2], [0], [2])
    assert sent[0] is three
    assert known.number([one])[1:3] == ([1], [3])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("size", [(3, 6, 22), (2, 17, 4)], ids=["wide", "high"])
def test_strips_are_parts_of_whole_frames(architecture: str, size: tuple[int, int, int], tiny: Tiny) -> None:
    spec = tiny(architecture)
    # In float32 rounding hides a row too few at the edge of what is seen: both are 1e-5.
    vae: Any = load_module(spec, "vae", PART).double()
    latents = latents_of(spec, size)
    whole = PyTorchVideoDecoder(vae)
    along = longer_side(latents) - 2
    for count, speed in ((2, Speed()), (3, Speed(channels_last=True))):
        whole.compute(speed)
        wanted = torch.cat(list(whole.frames(latents, 2)))
        strips = [
            torch.cat(list(StripDecoder(vae, "cpu", number, count, speed).frames(latents, 2)))
            for number in range(count)
        ]
        assert all(strip.shape[along] < wanted.shape[along] for strip in strips)
        torch.testing.assert_close(torch.cat(strips, dim=along), wanted, rtol=0, atol=5e-7)


@pytest.mark.parametrize("chunk", [1, 3])
def test_frames_come_together(chunk: int, together: Together) -> None:
    latents = latents_of(together.spec, (4, 6, 5))
    wanted = torch.cat(list(together.whole.frames(latents, chunk)))
    made = torch.cat(list(together.decoder.frames(latents, chunk)))
    assert made.dtype == torch.uint8
    assert (made.float() - (wanted + 1) * 127.5).abs().max() <= 0.51


def test_who_stops_looking_leaves_nothing_behind(together: Together) -> None:
    latents = latents_of(together.spec, (4, 6, 5))
    frames = together.decoder.frames(latents, 1)
    next(frames)
    frames.close()  # type: ignore[attr-defined]
    test_frames_come_together(2, together)


def test_a_cancelled_pass_ends_and_the_processes_stay(together: Together) -> None:
    cancel = Cancel()
    cancel.request()
    positive, _ = texts()
    latents, when = latents_of(together.spec, (1, 2, 6)), torch.tensor(500)
    together.denoiser.check = cancel.check
    # It is whoever runs the steps that stops.
    made = together.denoiser(latents, when, positive)
    together.denoiser.check = never
    torch.testing.assert_close(made, together.denoiser(latents, when, positive))


def test_one_that_does_not_answer_ends_them_all(together: Together) -> None:
    group = together.group_manager.group
    assert group is not None
    processes = psutil.Process(group._launcher.pid).children()
    assert len(processes) == 4
    positive, negative = texts()
    group._limits = Limits(silence=SILENCE)
    processes[2].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(GroupError, match=r"GPU 3 of 4 \(cpu\) does not answer since 4 s"):
        # More than a socket holds: it cannot even be told.
        together.denoiser.pair(latents_of(together.spec, (3, 60, 40)), torch.tensor(500), positive, negative)
    assert SILENCE < time.monotonic() - began < 2 * SILENCE + 10
    assert together.group_manager.group is None
    assert not any(process.is_running() for process in processes)
    assert group._launcher.poll() is not None
