"""Several processes on one CPU in place of GPUs: equal results, and an error that names the process that fails."""

import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, cast

import psutil
import pytest
import torch
import torch.distributed as dist
from diffusers import HunyuanVideoTransformer3DModel, WanTransformer3DModel
from torch._dynamo.testing import CompileCounter

from runtime.core.cancel import Cancel
from runtime.core.errors import GroupError
from runtime.core.facts import Fact
from runtime.core.plan import ComponentPlan, Speed, Split
from runtime.execution.components import PROMPTED, UNPROMPTED, components_of
from runtime.execution.decoded_frames import longer_side
from runtime.execution.parallel.group import Limits
from runtime.execution.parallel.proxies import GroupManager, SentTexts, SharedDenoiser, SharedVideoDecoder
from runtime.execution.parallel.rank_process import Rank
from runtime.execution.parallel.ulysses import Tokens
from runtime.families.wan.transformer import PyTorchDenoiser, block_step, install, share_tokens
from runtime.families.wan.vae import PyTorchVideoDecoder, StripDecoder
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module

MODULES_OF: dict[str, Any] = {"wan2.1": WanTransformer3DModel, "hunyuan-video": HunyuanVideoTransformer3DModel}
Tiny = Callable[[str], ModelSpec]
PART = ComponentPlan(backend="pytorch", device="cpu", dtype="float32", weights_bytes=0, reasons=())
FOUR = Split(devices=("cpu",) * 4, guidance=2, sequence=2, decode=True)
TWO = Split(devices=("cpu",) * 2, guidance=1, sequence=2, decode=True)
SILENCE = 4.0
# (latent frames, height, width) and tokens. Two processes share a pass; with 3 tokens one has only one of its own.
SIZES = {(5, 4, 6): 30, (1, 2, 6): 3, (3, 6, 4): 18}


class Loaded(NamedTuple):
    """A model in a group of processes, and the same model in this process."""

    group_manager: GroupManager
    spec: ModelSpec
    denoiser: SharedDenoiser
    decoder: SharedVideoDecoder
    local_denoiser: PyTorchDenoiser
    local_decoder: PyTorchVideoDecoder


def not_cancelled() -> None:
    """Continue in any case."""


@pytest.fixture(scope="module")
def loaded(tiny: Tiny) -> Iterator[Loaded]:
    """Four processes, two for each pass of guidance, with TI2V-5B, which also has a timestep for each token."""
    spec = tiny("wan2.2-ti2v-5b")
    module, vae = load_module(spec, "transformer", PART), load_module(spec, "vae", PART)
    group_manager = GroupManager()
    denoiser = group_manager.load(FOUR, spec, "transformer", PART, not_cancelled).part
    decoder = group_manager.load(FOUR, spec, "vae", PART, not_cancelled, Speed(channels_last=True)).part
    assert isinstance(denoiser, SharedDenoiser)
    assert isinstance(decoder, SharedVideoDecoder)
    yield Loaded(group_manager, spec, denoiser, decoder, PyTorchDenoiser(module), PyTorchVideoDecoder(vae))
    group_manager.stop_processes()


@pytest.fixture(scope="module")
def two_processes() -> Iterator[GroupManager]:
    """Two processes that share the tokens of a pass."""
    group_manager = GroupManager()
    yield group_manager
    group_manager.stop_processes()


def latents_of(spec: ModelSpec, size: tuple[int, int, int], seed: int = 0) -> torch.Tensor:
    """Return seeded noise of a size, (latent frames, height, width)."""
    return torch.randn((1, spec.vae.z_dim, *size), generator=torch.Generator().manual_seed(seed))


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the embeddings of two texts."""
    first, second = torch.randn((2, 1, 512, 32), generator=torch.Generator().manual_seed(1))
    return first, second


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_a_pass_equals_that_of_one_process(size: tuple[int, int, int], loaded: Loaded) -> None:
    assert loaded.spec.tokens(4 * size[0] - 3, 16 * size[1], 16 * size[2]) == SIZES[size]
    latents, timestep = latents_of(loaded.spec, size), torch.tensor(500)
    positive, negative = texts()
    expected = loaded.local_denoiser(latents, timestep, positive), loaded.local_denoiser(latents, timestep, negative)
    assert (expected[0] - expected[1]).abs().max() > 1e-3
    guided = {PROMPTED: positive, UNPROMPTED: negative}
    for result, one in zip(loaded.denoiser.together(latents, timestep, guided), expected, strict=True):
        torch.testing.assert_close(result, one, rtol=0, atol=1e-5)
    # A step without guidance.
    torch.testing.assert_close(loaded.denoiser(latents, timestep, negative), expected[1], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(8, 32, 32), (3, 46, 62)], ids=["even", "odd"])
def test_fp8_attention_rounds_as_in_one_process(
    size: tuple[int, int, int], tiny: Tiny, two_processes: GroupManager
) -> None:
    spec, speed = tiny("wan2.1"), Speed(attention="fp8")
    latents, timestep, text = latents_of(spec, size), torch.tensor(500), texts()[0]
    module = load_module(spec, "transformer", PART)
    exact = PyTorchDenoiser(module)(latents, timestep, text)
    expected = PyTorchDenoiser(module, speed)(latents, timestep, text)
    assert (expected - exact).abs().max() > 1e-3
    with closing(two_processes.load(TWO, spec, "transformer", PART, not_cancelled, speed)) as shared:
        assert isinstance(shared.part, SharedDenoiser)
        torch.testing.assert_close(shared.part(latents, timestep, text), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "size"), [("wan2.1", (4, 20, 22)), ("hunyuan-video", (3, 22, 26))])
def test_sparse_attention_equals_that_of_one_process(
    architecture: str, size: tuple[int, int, int], tiny: Tiny, two_processes: GroupManager
) -> None:
    spec, speed = tiny(architecture), Speed(sparse_tau=1.0)
    latents, text, timestep = latents_of(spec, size), texts()[0], torch.tensor(500)
    if architecture == "hunyuan-video":
        text, timestep = text[:, :90], torch.tensor([500.0, 6000.0])
    local = components_of(spec).denoiser(load_module(spec, "transformer", PART))
    exact = local(latents, timestep, text)
    local.compute(speed)
    sparse = local(latents, timestep, text)
    assert (sparse - exact).abs().max() > 1e-4
    with closing(two_processes.load(TWO, spec, "transformer", PART, not_cancelled, speed)) as shared:
        assert isinstance(shared.part, SharedDenoiser)
        torch.testing.assert_close(shared.part(latents, timestep, text), sparse, rtol=0, atol=1e-5)
        shared.part.begin_step(fresh=True, exact=True)
        torch.testing.assert_close(shared.part(latents, timestep, text), exact, rtol=0, atol=1e-5)
        shared.part.begin_step(fresh=False, exact=False)
        torch.testing.assert_close(shared.part(latents, timestep, text), sparse, rtol=0, atol=1e-5)


# Two processes attend in 5, 3 and 2 parts.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "heads", "kind"), [("wan2.1", 20, "native"), ("hunyuan-video", 6, "native"), ("wan2.1", 4, "fp8")]
)
def test_heads_are_exchanged_in_parts(
    architecture: str, heads: int, kind: str, tiny: Tiny, two_processes: GroupManager, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny(architecture).directory, tmp_path / "model")
    kind_of_module = MODULES_OF[architecture]
    config = kind_of_module.load_config(folder, subfolder="transformer")
    torch.manual_seed(2)
    more_heads = kind_of_module.from_config(config | {"num_attention_heads": heads, "num_layers": 1})
    more_heads.save_pretrained(folder / "transformer")
    spec = read_spec(folder, architecture)
    # An odd number of tokens.
    latents = latents_of(spec, (3, 6, 10) if kind == "native" else (5, 42, 42))
    text, timestep = texts()[0], torch.tensor(500)
    if architecture == "hunyuan-video":
        text, timestep = text[:, :9], torch.tensor([500.0, 6000.0])
    speed = Speed(attention=kind)
    local = components_of(spec).denoiser(load_module(spec, "transformer", PART))
    exact = local(latents, timestep, text)
    local.compute(speed)
    expected = local(latents, timestep, text)
    assert kind == "native" or (expected - exact).abs().max() > 1e-4
    with closing(two_processes.load(TWO, spec, "transformer", PART, not_cancelled, speed)) as shared:
        assert isinstance(shared.part, SharedDenoiser)
        torch.testing.assert_close(shared.part(latents, timestep, text), expected, rtol=0, atol=1e-5)


def test_both_experts_are_compiled_once(tiny: Tiny, tmp_path: Path) -> None:
    spec, counter = tiny("wan2.2-a14b"), CompileCounter()
    compiled = torch.compile(block_step, backend=counter, fullgraph=True, dynamic=False)
    dist.init_process_group("gloo", init_method=(tmp_path / "meet").as_uri(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        tokens = Tokens(dist.group.WORLD)
        for name in ("transformer", "transformer_2"):
            denoiser = PyTorchDenoiser(load_module(spec, name, PART))
            module = denoiser._module
            install(module, step=compiled)
            share_tokens(module, tokens)
            denoiser(latents_of(spec, (1, 2, 6)), torch.tensor(500), texts()[0])
            assert counter.frame_count == 1
    finally:
        dist.destroy_process_group()


def test_a_process_frees_texts_that_are_not_used_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rank, "_join", lambda *_: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    rank = Rank(0, Split(devices=("cpu",), guidance=1, sequence=1, decode=False), tmp_path)

    class Denoiser:
        def begin_step(self, *, fresh: bool, exact: bool) -> None:
            prepared.append((fresh, exact))

        def __call__(
            self, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, which: str
        ) -> torch.Tensor:
            return text

    prepared: list[tuple[bool, bool]] = []
    rank._denoisers["transformer"] = cast("Any", Denoiser())
    latents, timestep = torch.zeros(1), torch.tensor(500)
    steps: list[tuple[list[int], list[int], list[int]]] = [([0, 1], [0, 1], []), ([1, 2], [2], [0])]
    for numbers, new, forget in steps:
        task = {
            "name": "transformer",
            "texts": numbers,
            "which": ["", ""],
            "fresh": False,
            "exact": True,
            "beside": None,
        }
        embeddings = [torch.tensor([number]) for number in new]
        _, results = rank.forward({**task, "new": new, "forget": forget}, [latents, timestep, *embeddings])
        assert [int(result) for result in results] == numbers
        assert sorted(rank._texts) == numbers
    assert prepared == [(False, True)] * 2


def test_each_text_is_sent_once_and_two_are_kept() -> None:
    known = SentTexts()
    one, two, three = (torch.zeros(1, 2, 3) for _ in range(3))
    assert known.number([one, two])[:3] == ([0, 1], [], [0, 1])
    assert known.number([one, two]) == ([0, 1], [], [], [])
    assert known.number([two])[:3] == ([1], [], [])
    numbers, forgotten, new, sent = known.number([two, three])
    assert (numbers, forgotten, new) == ([1, 2], [0], [2])
    assert sent[0] is three
    assert known.number([one])[1:3] == ([1], [3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "size"),
    [
        ("wan2.1", (3, 6, 22)),
        ("wan2.1", (2, 17, 4)),
        ("wan2.2-ti2v-5b", (2, 6, 22)),
        pytest.param("wan2.2-ti2v-5b", (2, 17, 4), marks=pytest.mark.slow),
    ],
)
def test_strips_equal_parts_of_whole_frames(architecture: str, size: tuple[int, int, int], tiny: Tiny) -> None:
    spec = tiny(architecture)
    # In float64: the error of float32, 1e-5, is as large as that of one missing row at a strip's edge.
    vae: Any = load_module(spec, "vae", PART).double()
    latents = latents_of(spec, size)
    decoder = PyTorchVideoDecoder(vae)
    along = longer_side(latents) - 2
    for count, speed in ((2, Speed()), (3, Speed(channels_last=True))):
        decoder.compute(speed)
        expected = torch.cat(list(decoder.frames(latents, 2)))
        strips = [
            torch.cat(list(StripDecoder(vae, "cpu", number, count, speed).frames(latents, 2)))
            for number in range(count)
        ]
        assert all(strip.shape[along] < expected.shape[along] for strip in strips)
        torch.testing.assert_close(torch.cat(strips, dim=along), expected, rtol=0, atol=5e-7)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 3])
def test_strips_are_joined_to_frames(chunk: int, loaded: Loaded) -> None:
    latents = latents_of(loaded.spec, (4, 6, 5))
    expected = torch.cat(list(loaded.local_decoder.frames(latents, chunk)))
    frames = torch.cat(list(loaded.decoder.frames(latents, chunk)))
    assert frames.dtype == torch.uint8
    assert (frames.float() - (expected + 1) * 127.5).abs().max() <= 0.51


@pytest.mark.slow
def test_frames_that_are_not_consumed_do_not_block_the_next_clip(loaded: Loaded) -> None:
    latents = latents_of(loaded.spec, (4, 6, 5))
    frames = loaded.decoder.frames(latents, 1)
    next(frames)
    frames.close()  # type: ignore[attr-defined]
    test_strips_are_joined_to_frames(2, loaded)


def test_a_cancelled_pass_completes_and_the_processes_stay(loaded: Loaded) -> None:
    cancel = Cancel()
    cancel.request()
    positive, _ = texts()
    latents, timestep = latents_of(loaded.spec, (1, 2, 6)), torch.tensor(500)
    loaded.denoiser.check = cancel.check
    # The sampling loop stops the job; the pass is completed.
    result = loaded.denoiser(latents, timestep, positive)
    loaded.denoiser.check = not_cancelled
    torch.testing.assert_close(result, loaded.denoiser(latents, timestep, positive))


@pytest.mark.slow
def test_a_process_that_does_not_respond_ends_the_group(loaded: Loaded) -> None:
    group = loaded.group_manager.group
    assert group is not None
    processes = [psutil.Process(process.pid) for process in group.processes]
    assert len(processes) == 4
    positive, negative = texts()
    group._limits = Limits(silence=SILENCE)
    processes[2].send_signal(signal.SIGSTOP)
    with pytest.raises(GroupError) as failed:
        # The message is larger than the socket's buffer, so that sending it blocks.
        loaded.denoiser.together(
            latents_of(loaded.spec, (3, 60, 40)), torch.tensor(500), {PROMPTED: positive, UNPROMPTED: negative}
        )
    assert failed.value.data["gpu"] == 3
    assert failed.value.data["cause"] == Fact("parallel.not_responding", {"seconds": SILENCE})
    assert loaded.group_manager.group is None
    assert not any(process.is_running() for process in processes)
