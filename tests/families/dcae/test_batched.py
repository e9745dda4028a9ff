"""Batches of latent frames: any number, on engines and in PyTorch, and what happens where each step fails."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from runtime.core import settings as settings_module
from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import EngineError, InvalidRequestError
from runtime.core.events import EngineProgress, Event, FellBack
from runtime.core.settings import Settings
from runtime.engines.frame_decoders import BATCH, build_frame_engine, builder_of, frame_engine, usable_engines
from runtime.engines.service import EngineService, OpenEngines
from runtime.families.dcae import load_decoder, make_batched_decode_fn
from runtime.machine.probe import probe
from runtime.models.spec import FRAME_DECODER
from tests.conftest import build_once
from tests.families.dcae import decoders

pytestmark = pytest.mark.usefixtures("forked_children")
BACKEND = "onnxruntime"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache folder with a decoder, and an engine of it in `engines`."""

    def build(folder: Path) -> str:
        decoders.save_autoencoder(folder / "weights" / "tiny")
        found = Settings(cache_dir=folder)
        service = EngineService.from_settings(found, probe())
        decoder: Any = load_decoder(str(folder / "weights" / "tiny"))
        one = frame_engine(service, decoder.tandem_spec, builder_of(service, BACKEND, "cpu"), (3, 4), "cpu")
        done = build_frame_engine(service, decoder.tandem_spec, one, lambda *_: None, Cancel())
        assert done.record is not None
        return done.record.id

    folder, _ = build_once(tmp_path_factory, "frame-decoder", build)
    return folder


@pytest.fixture
def found(home: Path, tmp_path: Path) -> Settings:
    """Return settings with a copy of the engine folder, which a test may damage."""
    import shutil

    shutil.copytree(home / "engines", tmp_path / "engines")
    return Settings(cache_dir=home, engine_cache_dir=tmp_path / "engines")


@pytest.fixture
def decoder(home: Path) -> Any:
    """Return the decoder in PyTorch."""
    return load_decoder(str(home / "weights" / "tiny"))


def expected_of(decoder: Any, latents: torch.Tensor) -> torch.Tensor:
    """Return the frames of latents, decoded one by one."""
    with torch.no_grad():
        frames = torch.cat([decoder(one[None]) for one in latents.flatten(0, 1)])
    return frames.unflatten(0, latents.shape[:2])


def close(frames: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether frames are equal up to float32's rounding."""
    return frames.shape == expected.shape and bool((frames - expected).norm() / expected.norm() < 1e-5)


@pytest.mark.parametrize(("batch", "frames"), [(1, 1), (1, 8), (2, 4), (1, 9), (3, 7), (2, 16)])
def test_any_number_of_frames_is_decoded_on_an_engine(batch: int, frames: int, found: Settings, decoder: Any) -> None:
    latents = decoders.latents(batch, frames)
    with make_batched_decode_fn(decoder, backend=BACKEND, settings=found) as decode:
        assert close(decode(latents), expected_of(decoder, latents))
        assert decode.backend == BACKEND
        assert decode.engine
        assert not decode.fallbacks


@pytest.mark.parametrize("batch_size", [1, 3, 8, 100])
def test_any_number_of_frames_is_decoded_in_pytorch(batch_size: int, found: Settings, decoder: Any) -> None:
    latents = decoders.latents(2, 5)
    decode = make_batched_decode_fn(decoder, batch_size, backend="pytorch", settings=found)
    assert close(decode(latents), expected_of(decoder, latents))
    assert (decode.backend, decode.engine, decode.fallbacks) == ("pytorch", "", ())


def test_frames_have_the_dtype_of_the_latents_and_can_be_changed(found: Settings, decoder: Any) -> None:
    for backend in (BACKEND, "pytorch"):
        decode = make_batched_decode_fn(decoder, backend=backend, settings=found)
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            assert decode(decoders.latents(1, 3).to(dtype)).dtype == dtype
        first = decode(decoders.latents(1, 8))
        kept = first.clone()
        for seed in range(3):  # later calls write nothing into it
            decode(decoders.latents(1, 8, seed=seed))
        assert torch.equal(first, kept)
        # Not a tensor of inference mode.
        (first * torch.ones(1, requires_grad=True)).sum().backward()
        decode.close()


def test_the_fastest_engine_in_the_library_is_used(found: Settings, decoder: Any) -> None:
    service = EngineService.from_settings(found, probe())
    (record,) = service.store.index()
    for seconds, backend in ((record.pytorch_seconds_per_call / 2, BACKEND), (1e3, "pytorch")):
        service.store.record_verification(record, seconds_per_call=seconds)
        with make_batched_decode_fn(decoder, settings=found) as decode:
            decode(decoders.latents(1, 8))
            assert decode.backend == backend
            assert not decode.fallbacks
    assert not usable_engines(service, decoder.tandem_spec, (3, 5), "cpu")


def test_another_size_opens_another_engine(found: Settings, decoder: Any) -> None:
    events: list[Event] = []
    with make_batched_decode_fn(decoder, backend=BACKEND, settings=found, emit=events.append) as decode:
        decode(decoders.latents(1, 2))
        first = decode.engine
        assert not events
        wide = torch.randn(1, 2, 8, 2, 5)
        assert close(decode(wide), expected_of(decoder, wide))
        assert decode.backend == BACKEND
        assert decode.engine != first
        assert any(isinstance(event, EngineProgress) for event in events)
    service = EngineService.from_settings(found, probe())
    assert len(service.store.index()) == 2
    assert [service.why_stale(record, [decoder.tandem_spec]) for record in service.store.index()] == [[], []]


def fails(decode: Any, latents: torch.Tensor, decoder: Any, code: str) -> None:
    """Check that PyTorch took over, for a reason, and that later calls run in PyTorch too."""
    for _ in range(2):
        assert close(decode(latents), expected_of(decoder, latents))
        assert (decode.backend, decode.engine) == ("pytorch", "")
    (fact,) = decode.fallbacks
    assert fact.code == "decode.fell_back"
    assert fact.data["reason"].code == code


@pytest.fixture
def reported() -> list[Event]:
    """Return a list for events."""
    return []


@pytest.fixture
def on_engine(found: Settings, decoder: Any, reported: list[Event]) -> Iterator[Any]:
    """Return a function that decodes on the engine."""
    with make_batched_decode_fn(decoder, backend=BACKEND, settings=found, emit=reported.append) as decode:
        yield decode


def test_an_engine_that_cannot_be_built(found: Settings, decoder: Any, reported: list[Event]) -> None:
    decode = make_batched_decode_fn(decoder, backend="tensorrt", settings=found, emit=reported.append)
    fails(decode, decoders.latents(1, 3), decoder, "pipeline.backend_unsupported")
    (event,) = reported
    assert isinstance(event, FellBack)
    assert (event.component, event.backend) == (FRAME_DECODER, "tensorrt")


def test_a_build_that_fails(on_engine: Any, decoder: Any) -> None:
    error = EngineError("engine.compiler_failed", error="no space")
    with mock.patch("runtime.engines.frame_decoders.build_engine", side_effect=error):
        fails(on_engine, decoders.latents(1, 3), decoder, "engine.compiler_failed")


def test_a_build_that_is_cancelled(found: Settings, decoder: Any) -> None:
    cancel = Cancel()
    cancel.request()
    decode = make_batched_decode_fn(decoder, backend=BACKEND, settings=found, cancel=cancel)
    for _ in range(2):
        with pytest.raises(CancelledError):
            decode(torch.randn(1, 2, 8, 2, 6))


def test_an_engine_that_is_damaged_is_built_again(found: Settings, on_engine: Any, decoder: Any) -> None:
    (engine,) = (path for path in found.engines_dir.iterdir() if (path / "engine.json").exists())
    (engine / "engine.onnx").write_bytes(b"short")
    latents = decoders.latents(1, 3)
    assert close(on_engine(latents), expected_of(decoder, latents))
    assert on_engine.backend == BACKEND


def test_an_engine_that_is_damaged_without_a_trace(found: Settings, on_engine: Any, decoder: Any) -> None:
    (engine,) = (path for path in found.engines_dir.iterdir() if (path / "engine.json").exists())
    data = bytearray((engine / "engine.onnx").read_bytes())
    data[len(data) // 2] ^= 1
    (engine / "engine.onnx").write_bytes(data)
    fails(on_engine, decoders.latents(1, 3), decoder, "engine.unusable")


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineError("engine.failed", error="x"), "engine.failed"),
        (RuntimeError("CUDA error"), "execution.engine_failed"),
        (torch.OutOfMemoryError("full"), "execution.engine_out_of_memory"),
        (MemoryError(), "execution.engine_out_of_memory"),
    ],
)
def test_an_engine_that_fails_at_a_call(
    call: int, error: Exception, code: str, on_engine: Any, decoder: Any, reported: list[Event]
) -> None:
    latents = decoders.latents(1, 20)  # three batches
    real, calls = OpenEngines.infer, 0

    def infer(self: OpenEngines, program: str, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        return real(self, program, **inputs)

    with mock.patch.object(OpenEngines, "infer", infer):
        fails(on_engine, latents, decoder, code)
    assert calls == call
    assert [type(event) for event in reported] == [FellBack]


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (lambda frames: frames[:, :, :-1], "execution.engine_failed"),
        (lambda frames: frames.masked_fill(frames > 0.5, torch.nan), "execution.engine_not_finite"),
        (lambda frames: frames * torch.inf, "execution.engine_not_finite"),
    ],
)
def test_an_engine_with_wrong_outputs(
    wrong: Callable[[torch.Tensor], torch.Tensor], code: str, on_engine: Any, decoder: Any
) -> None:
    real, calls = OpenEngines.infer, 0

    def infer(self: OpenEngines, program: str, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        nonlocal calls
        calls += 1
        outputs = real(self, program, **inputs)
        return {name: wrong(one) if calls == 2 else one for name, one in outputs.items()}

    with mock.patch.object(OpenEngines, "infer", infer):
        fails(on_engine, decoders.latents(1, 16), decoder, code)


def test_latents_with_nan_are_no_fault_of_the_engine(on_engine: Any) -> None:
    latents = decoders.latents(1, 9)
    latents[0, 3] = torch.nan
    frames = on_engine(latents)
    assert on_engine.backend == BACKEND
    assert not on_engine.fallbacks
    assert frames[0, 4].isfinite().all()


def test_memory_that_runs_out_in_pytorch_halves_the_batches(found: Settings, decoder: Any) -> None:
    latents = decoders.latents(1, 9)
    sizes: list[int] = []
    expected = expected_of(decoder, latents)

    class Small(torch.nn.Module):
        def __init__(self, most: int) -> None:
            super().__init__()
            self.decoder, self.most = decoder, most

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sizes.append(len(x))
            if len(x) > self.most:
                raise torch.OutOfMemoryError("full")
            found: torch.Tensor = self.decoder(x)
            return found

    decode = make_batched_decode_fn(Small(2), backend="pytorch", settings=found)
    assert close(decode(latents), expected)
    assert sizes == [8, 4, 2, 2, 2, 2, 1]
    assert [fact.code for fact in decode.fallbacks] == ["decode.smaller_batches"] * 2
    with pytest.raises(torch.OutOfMemoryError):
        make_batched_decode_fn(Small(0), backend="pytorch", settings=found)(latents)


def test_an_unknown_module_runs_in_pytorch(found: Settings) -> None:
    module = torch.nn.Conv2d(8, 3, 1).eval()
    decode = make_batched_decode_fn(module, backend=BACKEND, settings=found)
    fails(decode, decoders.latents(1, 3), module, "decode.decoder_unknown")
    # No engine was asked for.
    decode = make_batched_decode_fn(module, settings=found)
    decode(decoders.latents(1, 3))
    assert not decode.fallbacks


@pytest.mark.parametrize(
    "latents",
    [torch.zeros(8, 3, 4), torch.zeros(2, 8, 3, 4), torch.zeros(1, 0, 8, 3, 4), torch.zeros(1, 2, 8, 3, 4).int()],
)
def test_other_latents_are_refused(latents: torch.Tensor, found: Settings, decoder: Any) -> None:
    decode = make_batched_decode_fn(decoder, backend="pytorch", settings=found)
    with pytest.raises(InvalidRequestError) as caught:
        decode(latents)
    assert caught.value.code == "decode.latents_shape"
    with pytest.raises(InvalidRequestError):
        make_batched_decode_fn(decoder, 0, settings=found)


def test_threads_share_a_function(on_engine: Any, decoder: Any) -> None:
    given = [decoders.latents(1, 11, seed=number) for number in range(4)]
    frames: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        for _ in range(3):
            frames[number] = on_engine(given[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, latents in enumerate(given):
        assert close(frames[number], expected_of(decoder, latents))
    assert not on_engine.fallbacks


def test_the_environment_sets_the_library_the_precision_and_the_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_dir: Path
) -> None:
    monkeypatch.setenv("TENSORRT_CACHE_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("TENSORRT_ENABLED", "false")
    monkeypatch.setenv("TENSORRT_PRECISION", "BF16")
    found = settings_module.load()
    assert found.cache_dir == cache_dir
    assert found.engines_dir == tmp_path / "elsewhere"
    assert not found.decoder_tensorrt
    assert found.decoder_precision == "bf16"
    monkeypatch.setenv("TENSORRT_PRECISION", "int8")
    with pytest.raises(Exception, match="TENSORRT_PRECISION"):
        settings_module.load()


def test_a_plan_of_tensorrt_has_a_profile_for_full_batches_and_one_for_fewer(home: Path) -> None:
    from runtime.engines.builders import BUILDERS
    from tests.plans import GPU_PACKAGES, gpu, machine

    decoder: Any = load_decoder(str(home / "weights" / "tiny"))
    here = machine(gpu=gpu(), torch_cuda="13.0", packages=GPU_PACKAGES)
    service = EngineService.from_settings(Settings(cache_dir=home), here)
    for name, profiles in (("onnx_tensorrt", 2), ("tensorrt_rtx", 2), ("inductor", 1)):
        one = frame_engine(service, decoder.tandem_spec, BUILDERS[name], (3, 4), "cuda:0")
        assert one.key.profiles[0].min == one.key.profiles[0].max == (BATCH, 3, 4)
        assert len(one.key.profiles) == profiles
        assert one.takes_any is (profiles == 2)
        assert one.key.precision == "float16"
    both = frame_engine(service, decoder.tandem_spec, BUILDERS["onnx_tensorrt"], (3, 4), "cuda:0", precision="float32")
    assert both.key.precision == "float32"
    assert both.key.profiles[1].serves((1, 3, 4))
