"""Compiled blocks: shared by all blocks of a kind, equal to uncompiled ones, replaced by them after a failure."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from runtime.core.events import VideoSaved
from runtime.core.facts import Fact
from runtime.core.locks import held
from runtime.core.plan import Speed
from runtime.execution.compilation import (
    CompiledStep,
    cache_compiled_code_in,
    discard_compiled_code,
    limit_compiled_code,
)
from runtime.execution.residency import Residency
from runtime.families.wan import vae
from runtime.families.wan.transformer import PyTorchDenoiser
from runtime.models.spec import ModelSpec
from tests.families.wan.test_transformer import Case
from tests.pipeline.runs import events_of
from tests.plans import Alone, tiny_plan

Tiny = Callable[[str], ModelSpec]
FLASH4, USE_FLASH4 = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Begin and end with nothing compiled."""
    discard_compiled_code()
    counters.clear()
    yield
    discard_compiled_code()


def places_of(folder: Path) -> dict[str, Path]:
    """Return where compilers cache code, by environment variable."""
    return {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder / "triton", FLASH4: folder / "flash4"}


def forget_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset these variables until the end of the test."""
    for name in (*places_of(Path()), USE_FLASH4):
        monkeypatch.setenv(name, "")  # The present value is restored after the test.
        monkeypatch.delenv(name)


@pytest.mark.slow
@pytest.mark.compiler
def test_inductor_caches_compiled_code_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = places_of(tmp_path / "compiled")
    forget_places(monkeypatch)
    cache_compiled_code_in(tmp_path / "compiled")
    step = CompiledStep(torch.nn.functional.silu)
    x = torch.linspace(-3, 3, 64)
    with torch.no_grad():
        assert (step(x) - torch.nn.functional.silu(x)).abs().max() < 1e-6
    assert step.seconds > 0
    assert len(list((tmp_path / "compiled").iterdir())) > 1
    cache_compiled_code_in(tmp_path / "other")
    assert {name: os.environ[name] for name in places} == {name: str(place) for name, place in places.items()}
    assert os.environ[USE_FLASH4] == "1"


def test_kernels_of_flash_attention_are_cached_where_files_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_places(monkeypatch)
    (tmp_path / "compiled").touch()
    cache_compiled_code_in(tmp_path / "compiled")
    assert not {FLASH4, USE_FLASH4} & os.environ.keys()
    kernels = tmp_path / "new" / "compiled" / "flash4"
    for _ in range(2):
        forget_places(monkeypatch)
        cache_compiled_code_in(kernels.parent)
        assert kernels.is_dir()
        assert (os.environ[FLASH4], os.environ[USE_FLASH4]) == (str(kernels), "1")


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
@torch.no_grad()
def test_all_blocks_of_both_experts_share_one_compilation(tiny: Tiny) -> None:
    case = Case(tiny("wan2.2-ti2v-5b"))
    denoisers = [PyTorchDenoiser(case.load(), Speed(compiled=True, text_kept=True)) for _ in range(2)]
    for denoiser in denoisers:
        for text in case.texts:
            wanted = case.wanted(text, 500.0)
            got = denoiser(case.latents, torch.tensor(500.0), text)
            assert (got - wanted).norm() / wanted.norm() < 2e-6
    assert counters["stats"]["unique_graphs"] == 1
    assert denoisers[0].compile_seconds > 0


@pytest.mark.usefixtures("traced")
@torch.no_grad()
def test_a_function_that_cannot_be_compiled_runs_uncompiled_with_a_reason() -> None:
    reasons: list[Fact] = []

    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    step = CompiledStep(breaks, reasons.append)
    for _ in range(3):
        assert step(torch.zeros(2)).tolist() == [1.0, 1.0]
    (reason,) = reasons
    assert reason.code == "execution.compilation_failed"
    assert "\n" not in reason.data["error"]


@pytest.mark.usefixtures("traced")
@torch.no_grad()
def test_any_number_of_sizes_is_compiled() -> None:
    reasons: list[Fact] = []
    step = CompiledStep(lambda x: x * 2 + 1, reasons.append)
    for size in range(2, 14):
        assert torch.equal(step(torch.ones(size)), torch.full((size,), 3.0))
    assert not reasons


@pytest.mark.usefixtures("traced")
@torch.no_grad()
def test_out_of_memory_is_not_a_compilation_failure() -> None:
    calls = 0

    def full(_: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        raise MemoryError

    step = CompiledStep(lambda x: x)
    step._compiled = full
    with pytest.raises(MemoryError):
        step(torch.zeros(1))
    assert calls == 1


@pytest.mark.usefixtures("traced")
@torch.no_grad()
def test_attention_kernels_of_pytorch_are_part_of_a_compiled_block(tiny: Tiny) -> None:
    case = Case(tiny("wan2.1"))
    denoiser = PyTorchDenoiser(case.load(), Speed(compiled=True, attention="flash"))
    wanted = case.wanted(case.texts[0], 500.0)
    got = denoiser(case.latents, torch.tensor(500.0), case.texts[0])
    assert (got - wanted).norm() / wanted.norm() < 2e-6
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
@torch.no_grad()
def test_attention_of_other_libraries_is_one_call_in_a_compiled_block(tiny: Tiny) -> None:
    case = Case(tiny("wan2.1"))
    large = torch.randn(1, 16, 4, 48, 48, generator=torch.Generator().manual_seed(3))
    wanted = case.reference(large, torch.tensor([500.0]), case.texts[0], return_dict=False)[0]
    denoiser = PyTorchDenoiser(case.load(), Speed(compiled=True, attention="fp8"))
    got = denoiser(large, torch.tensor(500.0), case.texts[0])
    error = (got - wanted).norm() / wanted.norm()
    # 2304 tokens: enough for FP8, which shows.
    assert 1e-4 < error < 0.1


def test_compilation_of_the_vaes_kernels_is_counted(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vae, "triton_runs_on", lambda _: True)
    monkeypatch.setattr(vae, "import_module", lambda _: vae)
    spec = tiny("wan2.1")
    plan = tiny_plan(spec, tmp_path / "x.mp4", compile="always")
    job = Alone(plan.replace(speed=plan.speed.replace(channels_last=True, vae_kernels=True)))
    latents = torch.randn(1, 16, 1, 4, 6, generator=torch.Generator().manual_seed(5))
    taken = [0.0]
    with Residency() as residency:
        for _ in range(2):
            with residency.video_decoder(spec, job) as decoder:
                list(decoder.frames(latents, 1))
            taken.append(residency.compile_seconds)
    assert not job.fallen
    # Once: then it is there.
    assert 0 < taken[1] == taken[2] <= residency.load_seconds


@pytest.mark.slow
def test_a_job_whose_compiler_fails_completes_with_a_warning(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("ptxas is not here")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=fails))
    spec = tiny("wan2.2-a14b")
    plan = tiny_plan(spec, tmp_path / "x.mp4", compile="always")
    assert plan.speed.compiled
    with Residency() as residency:
        saved = events_of(plan, spec, residency)[-1]
    assert isinstance(saved, VideoSaved), saved
    assert saved.plan["speed"]["compiled"] is False
    (reasons,) = [warning for warning in saved.warnings if warning.code == "pipeline.degraded"]
    assert (reasons.data["component"], reasons.data["reason"].code) == ("transformer", "execution.compilation_failed")
    assert saved.request["compile"] == "always"


def test_the_least_recently_used_compiled_code_is_removed_beyond_the_limit(tmp_path: Path) -> None:
    folder = tmp_path / "compiled"
    (folder / "ab").mkdir(parents=True)
    for number, name in enumerate(("ab/old.so", "ab/read", "new.py")):
        (folder / name).write_bytes(bytes(100))
        os.utime(folder / name, (number, number))
    os.utime(folder / "ab" / "read", (9, 1))  # written early, read late
    limit_compiled_code(folder, 250)
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == ["new.py", "read"]
    limit_compiled_code(folder, 100)
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["read"]
    with held(folder / ".lock", seconds=0):
        limit_compiled_code(folder, 0)
    assert (folder / "ab" / "read").exists(), "another process removes files"
