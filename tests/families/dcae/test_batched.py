"""Batches of latent frames: any number, on engines and in PyTorch, and what happens where each step fails."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from runtime.core import settings as settings_module
from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import EngineError, InvalidRequestError, SettingsError
from runtime.core.events import EngineProgress, Event, FellBack
from runtime.core.facts import render
from runtime.core.settings import Settings
from runtime.engines.frame_decoders import builder_of, frame_engine, usable_engines
from runtime.engines.service import EngineService, OpenEngines
from runtime.families.dcae import load_decoder, make_batched_decode_fn
from runtime.machine.probe import probe
from runtime.models.spec import FRAME_BATCH, FRAME_DECODER
from tests import full_disk
from tests.engine_library import EngineLibrary
from tests.families.dcae import decoders

pytestmark = pytest.mark.usefixtures("forked_children")
BACKEND = "onnxruntime"


def add_engine(library: EngineLibrary, settings: Settings, decoder: Any, latent: tuple[int, int] = (3, 4)) -> None:
    """Add the engine of a decoder for a size of latents to the engine folder of some settings."""
    service = EngineService.from_settings(settings, probe())
    one = frame_engine(service, decoder.tandem_spec, builder_of(service, BACKEND, "cpu"), latent, "cpu")
    library.add(service, decoder.tandem_spec, FRAME_DECODER, one.key)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, engine_library: EngineLibrary) -> Path:
    """Return a cache folder with a decoder, and an engine of it in `engines`."""
    folder = tmp_path_factory.mktemp("home")
    decoders.save_autoencoder(folder / "weights" / "tiny")
    add_engine(engine_library, Settings(cache_dir=folder), load_decoder(str(folder / "weights" / "tiny")))
    return folder


@pytest.fixture
def found(home: Path, tmp_path: Path) -> Settings:
    """Return settings with a copy of the engine folder, which a test may damage."""
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


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "frames"), [(1, 1), (1, 8), (2, 4), (1, 9), (3, 7), (2, 16)])
def test_any_number_of_frames_is_decoded_on_an_engine(batch: int, frames: int, found: Settings, decoder: Any) -> None:
    latents = decoders.latents(batch, frames)
    with make_batched_decode_fn(decoder, backend=BACKEND, settings=found) as decode:
        assert close(decode(latents), expected_of(decoder, latents))
        assert decode.backend == BACKEND
        assert decode.engine
        assert not decode.fallbacks


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3, 8, 100])
def test_any_number_of_frames_is_decoded_in_pytorch(batch_size: int, found: Settings, decoder: Any) -> None:
    latents = decoders.latents(2, 5)
    decode = make_batched_decode_fn(decoder, batch_size, backend="pytorch", settings=found)
    assert close(decode(latents), expected_of(decoder, latents))
    assert (decode.backend, decode.engine, decode.fallbacks) == ("pytorch", "", ())


@pytest.mark.slow
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


@pytest.mark.slow
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


def refuses(caught: Any, code: str) -> None:
    """Check that an error has a code, one line on what is wrong, and one on what to do."""
    assert caught.value.code == code
    for line in (caught.value.what, caught.value.remedy):
        assert line and len(line.splitlines()) == 1 and line.isprintable()
        assert "{" not in line


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


@pytest.mark.slow
def test_an_engine_that_is_damaged_is_built_again(found: Settings, on_engine: Any, decoder: Any) -> None:
    (engine,) = (path for path in found.engines_dir.iterdir() if (path / "engine.json").exists())
    (engine / "engine.onnx").write_bytes(b"short")
    latents = decoders.latents(1, 3)
    assert close(on_engine(latents), expected_of(decoder, latents))
    assert on_engine.backend == BACKEND


@pytest.mark.slow
def test_an_engine_that_was_deleted_is_built_again(found: Settings, on_engine: Any, decoder: Any) -> None:
    service = EngineService.from_settings(found, probe())
    (record,) = service.store.index()
    service.store.delete(record.id)
    latents = decoders.latents(1, 3)
    assert close(on_engine(latents), expected_of(decoder, latents))
    assert (on_engine.backend, on_engine.engine, on_engine.fallbacks) == (BACKEND, record.id, ())


@pytest.mark.parametrize("what", ["file", "manifest", "shape"])
def test_engines_in_the_library_that_cannot_be_used_are_reported_or_passed_over(
    what: str, found: Settings, decoder: Any
) -> None:
    """With "auto", nothing is built: an unreadable engine is none, and one that fails to open is reported."""
    service = EngineService.from_settings(found, probe())
    (record,) = service.store.index()
    service.store.record_verification(record, seconds_per_call=record.pytorch_seconds_per_call / 2)
    folder = service.store.path(record.id)
    if what == "file":
        data = bytearray((folder / "engine.onnx").read_bytes())
        data[len(data) // 2] ^= 1
        (folder / "engine.onnx").write_bytes(data)
    else:
        text = (folder / "engine.json").read_text()
        changed = text[: len(text) // 2] if what == "manifest" else text.replace("3", "5")
        assert changed != text
        (folder / "engine.json").write_text(changed)
    decode = make_batched_decode_fn(decoder, settings=found)
    if what == "file":
        fails(decode, decoders.latents(1, 3), decoder, "engine.unusable")
    else:
        latents = decoders.latents(1, 3)
        assert close(decode(latents), expected_of(decoder, latents))
        assert (decode.backend, decode.engine, decode.fallbacks) == ("pytorch", "", ())


@pytest.mark.slow
def test_an_engine_that_was_built_for_another_size_is_reported(
    found: Settings, on_engine: Any, decoder: Any, engine_library: EngineLibrary
) -> None:
    """An engine whose folder has the files of one for other latents fails in the call, and PyTorch continues."""
    add_engine(engine_library, found, decoder, (2, 4))
    service = EngineService.from_settings(found, probe())
    real = EngineService.open
    records = {record.id: record for record in service.store.index()}
    assert len(records) == 2

    def swapped(self: EngineService, spec: Any, component: str, uses: Any, device: str) -> OpenEngines:
        (use,) = uses
        (wrong,) = set(records) - {use.id}
        return real(self, spec, component, [use.model_copy(update={"id": wrong})], device)

    with mock.patch.object(EngineService, "open", swapped):
        fails(on_engine, decoders.latents(1, 3), decoder, "engine.other_shape")


def test_an_engine_that_is_damaged_without_a_trace(found: Settings, on_engine: Any, decoder: Any) -> None:
    (engine,) = (path for path in found.engines_dir.iterdir() if (path / "engine.json").exists())
    data = bytearray((engine / "engine.onnx").read_bytes())
    data[len(data) // 2] ^= 1
    (engine / "engine.onnx").write_bytes(data)
    fails(on_engine, decoders.latents(1, 3), decoder, "engine.unusable")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "error", "code"),
    [
        (1, EngineError("engine.failed", error="x"), "engine.failed"),
        (2, EngineError("engine.failed", error="x"), "engine.failed"),
        (3, RuntimeError("CUDA error"), "execution.engine_failed"),
        (1, torch.OutOfMemoryError("full"), "execution.engine_out_of_memory"),
        (2, MemoryError(), "execution.engine_out_of_memory"),
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (lambda frames: frames[:, :, :-1], "engine.other_frames"),
        (lambda frames: frames[:-1], "engine.other_frames"),
        (lambda frames: frames[:, :1], "engine.other_frames"),
        (lambda frames: frames.masked_fill(frames > 0.5, torch.nan), "execution.engine_not_finite"),
        (lambda frames: frames * torch.inf, "execution.engine_not_finite"),
    ],
)
@pytest.mark.parametrize("call", [1, 2])
def test_an_engine_with_wrong_outputs(
    call: int, wrong: Callable[[torch.Tensor], torch.Tensor], code: str, on_engine: Any, decoder: Any
) -> None:
    real, calls = OpenEngines.infer, 0

    def infer(self: OpenEngines, program: str, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        nonlocal calls
        calls += 1
        outputs = real(self, program, **inputs)
        return {name: wrong(one) if calls == call else one for name, one in outputs.items()}

    with mock.patch.object(OpenEngines, "infer", infer):
        fails(on_engine, decoders.latents(1, 16), decoder, code)


def test_frames_before_a_failure_are_checked_too(on_engine: Any, decoder: Any) -> None:
    real, calls = OpenEngines.infer, 0

    def infer(self: OpenEngines, program: str, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError
        return {name: one * torch.nan for name, one in real(self, program, **inputs).items()}

    with mock.patch.object(OpenEngines, "infer", infer):
        fails(on_engine, decoders.latents(1, 16), decoder, "execution.engine_failed")


@pytest.mark.parametrize("backend", [BACKEND, "pytorch"])
def test_latents_that_are_not_finite_are_no_fault_of_the_engine(backend: str, found: Settings, decoder: Any) -> None:
    latents = decoders.latents(1, 9)
    expected = expected_of(decoder, latents)
    others = [number for number in range(9) if number != 3]
    with make_batched_decode_fn(decoder, backend=backend, settings=found) as decode:
        for value in (torch.nan, torch.inf, -torch.inf):
            latents[0, 3] = value
            frames = decode(latents)
            assert (decode.backend, decode.fallbacks) == (backend, ())
            assert not frames[0, 3].isfinite().all()
            assert close(frames[:, others], expected[:, others])


def test_an_engine_with_nan_is_found_among_latents_with_nan(on_engine: Any, decoder: Any) -> None:
    latents = decoders.latents(1, 9)
    latents[0, 3] = torch.nan
    real = OpenEngines.infer

    def infer(self: OpenEngines, program: str, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = real(self, program, **inputs)
        return {name: one * torch.nan for name, one in outputs.items()}

    with mock.patch.object(OpenEngines, "infer", infer):
        frames = on_engine(latents)
    assert frames[0].isfinite().flatten(1).all(1).tolist() == [number != 3 for number in range(9)]
    assert [fact.data["reason"].code for fact in on_engine.fallbacks] == ["execution.engine_not_finite"]


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


BAD_LATENTS = {
    "three axes": torch.zeros(8, 3, 4),
    "four axes": torch.zeros(2, 8, 3, 4),
    "six axes": torch.zeros(1, 1, 2, 8, 3, 4),
    "no axes": torch.tensor(1.0),
    "no frames": torch.zeros(1, 0, 8, 3, 4),
    "batch 0": torch.zeros(0, 2, 8, 3, 4),
    "no channels": torch.zeros(1, 2, 0, 3, 4),
    "no height": torch.zeros(1, 2, 8, 0, 4),
    "no width": torch.zeros(1, 2, 8, 3, 0),
    "int32": torch.zeros(1, 2, 8, 3, 4).int(),
    "uint8": torch.zeros(1, 2, 8, 3, 4).byte(),
    "bool": torch.zeros(1, 2, 8, 3, 4).bool(),
    "complex": torch.zeros(1, 2, 8, 3, 4, dtype=torch.complex64),
    "float8": torch.zeros(1, 2, 8, 3, 4).to(torch.float8_e4m3fn),
    "without data": torch.zeros(1, 2, 8, 3, 4, device="meta"),
}


@pytest.mark.parametrize("backend", [BACKEND, "pytorch"])
def test_other_latents_are_refused(backend: str, found: Settings, decoder: Any, subtests: pytest.Subtests) -> None:
    with make_batched_decode_fn(decoder, backend=backend, settings=found) as decode:
        for name, latents in BAD_LATENTS.items():
            with subtests.test(name):
                with pytest.raises(InvalidRequestError) as caught:
                    decode(latents)
                refuses(caught, "decode.latents_shape")
                assert not decode.fallbacks


@pytest.mark.parametrize("backend", [BACKEND, "pytorch"])
def test_latents_of_other_channels_are_refused_and_the_engine_stays(
    backend: str, found: Settings, decoder: Any
) -> None:
    with make_batched_decode_fn(decoder, backend=backend, settings=found) as decode:
        for channels in (1, 1, 7, 9, 16):
            with pytest.raises(InvalidRequestError) as caught:
                decode(torch.zeros(1, 2, channels, 3, 4))
            refuses(caught, "decode.latents_channels")
        latents = decoders.latents(1, 2)
        assert close(decode(latents), expected_of(decoder, latents))
        assert (decode.backend, decode.fallbacks) == (backend, ())


@pytest.mark.parametrize("kind", ["AutoencoderDC", "its decoder", "OWL's decoder"])
def test_channels_of_decoders_that_others_loaded_are_known(kind: str, found: Settings, tmp_path: Path) -> None:
    autoencoder: Any = decoders.autoencoder(decoders.DC)
    if kind == "OWL's decoder":
        decoders.save_owl(tmp_path / "owl")
        given: Any = load_decoder(str(tmp_path / "owl"))
    else:
        given = autoencoder.decoder if kind == "its decoder" else autoencoder
    with pytest.raises(InvalidRequestError) as caught:
        make_batched_decode_fn(given, backend="pytorch", settings=found)(torch.zeros(1, 2, 9, 4, 4))
    refuses(caught, "decode.latents_channels")


@pytest.mark.parametrize("size", [0, -1, -(2**40)])
def test_other_batch_sizes_are_refused(size: int, found: Settings, decoder: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make_batched_decode_fn(decoder, size, settings=found)
    refuses(caught, "decode.batch_size")


@pytest.mark.slow
@pytest.mark.parametrize("backend", [BACKEND, "pytorch"])
def test_latents_of_any_layout_and_dtype_are_decoded(backend: str, found: Settings, decoder: Any) -> None:
    latents = decoders.latents(2, 5)
    expected = expected_of(decoder, latents)
    views = {
        "frames first": latents.transpose(0, 1).contiguous().transpose(0, 1),
        "channels last": latents.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3),
        "every second": latents.repeat_interleave(2, dim=1)[:, ::2],
        "float64": latents.double(),
        "with a gradient": latents.clone().requires_grad_(),
    }
    with make_batched_decode_fn(decoder, 4, backend=backend, settings=found) as decode:
        for name, view in views.items():
            frames = decode(view)
            assert frames.dtype == view.dtype
            assert not frames.requires_grad
            assert close(frames.float(), expected), name
        alike = latents[:1, :1].expand(3, 3, -1, -1, -1)
        assert close(decode(alike), expected[:1, :1].expand(3, 3, -1, -1, -1))
        assert (decode.backend, decode.fallbacks) == (backend, ())


def in_threads(work: Callable[[int], None], count: int) -> None:
    """Call a function with each number, in threads at once."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_share_a_function(on_engine: Any, decoder: Any) -> None:
    given = [decoders.latents(1, 11, seed=number) for number in range(4)]
    frames: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        for _ in range(3):
            frames[number] = on_engine(given[number])

    in_threads(work, len(given))
    for number, latents in enumerate(given):
        assert close(frames[number], expected_of(decoder, latents))
    assert not on_engine.fallbacks


@pytest.mark.slow
def test_threads_with_other_sizes_and_one_that_closes(found: Settings, decoder: Any) -> None:
    """Sizes without an engine run in PyTorch, and so does what comes after `close`."""
    given = [torch.randn(1, 5, 8, 3, width) for width in (4, 5, 4, 6)]
    expected = [expected_of(decoder, latents) for latents in given]
    problems: list[object] = []
    service = EngineService.from_settings(found, probe())
    (record,) = service.store.index()
    service.store.record_verification(record, seconds_per_call=record.pytorch_seconds_per_call / 2)
    decode = make_batched_decode_fn(decoder, settings=found)

    def work(number: int) -> None:
        try:
            for turn in range(6):
                if number == 2 and turn == 3:
                    decode.close()
                if not close(decode(given[number]), expected[number]):
                    problems.append((number, turn))
        except BaseException as error:
            problems.append(error)

    in_threads(work, len(given))
    assert (problems, decode.fallbacks, decode.backend) == ([], (), "pytorch")


def from_environment(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> Settings:
    """Return the settings with one variable."""
    monkeypatch.setenv(variable, value)
    return settings_module.load()


def refuses_variable(monkeypatch: pytest.MonkeyPatch, decoder: Any, variable: str, value: str, code: str) -> None:
    """Check that a function is refused because of one variable, which is named."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError) as caught:
        make_batched_decode_fn(decoder)
    refuses(caught, code)
    assert variable in caught.value.what


NONSENSE = [" ", "-1", "2", "perhaps", "真", "1.0", "true,false", "\x07", "x" * 5000]


@pytest.mark.usefixtures("cache_dir")
class TestEnvironment:
    """The variables that `make_batched_decode_fn` reads, by name. An empty one is not set."""

    @pytest.mark.parametrize(
        ("value", "enabled"),
        [(word, True) for word in ("true", "TRUE", "1", "yes", "on", " true ", "")]
        + [(word, False) for word in ("false", "False", "0", "no", "off", "false ")],
    )
    def test_tensorrt_enabled(self, value: str, enabled: bool, decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        assert from_environment(monkeypatch, "TENSORRT_ENABLED", value).decoder_tensorrt is enabled
        decode = make_batched_decode_fn(decoder, backend="tensorrt")
        code = "pipeline.backend_unsupported" if enabled else "decode.tensorrt_disabled"
        fails(decode, decoders.latents(1, 3), decoder, code)
        assert decode.fallbacks[0].data["backend"] == "tensorrt"

    def test_a_bad_tensorrt_enabled(
        self, decoder: Any, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
    ) -> None:
        for value in NONSENSE:
            with subtests.test(value[:20]):
                refuses_variable(monkeypatch, decoder, "TENSORRT_ENABLED", value, "settings.not_a_switch")

    @pytest.mark.parametrize(
        ("value", "precision"),
        [("fp16", "fp16"), ("BF16", "bf16"), (" fp32 ", "fp32"), ("", None)],
    )
    def test_tensorrt_precision(self, value: str, precision: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        assert from_environment(monkeypatch, "TENSORRT_PRECISION", value).decoder_precision == precision

    def test_a_bad_tensorrt_precision(
        self, decoder: Any, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
    ) -> None:
        for value in (*NONSENSE, "float16", "int8", "fp8", "fp16,bf16", "fp\uff11\uff16", "half"):
            with subtests.test(value[:20]):
                refuses_variable(monkeypatch, decoder, "TENSORRT_PRECISION", value, "settings.not_a_precision")

    @pytest.mark.slow
    def test_an_engine_is_built_in_tensorrt_cache_dir(
        self, decoder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = tmp_path / "own" / "with a space" / "引擎"
        monkeypatch.setenv("TENSORRT_CACHE_DIR", str(folder))
        with make_batched_decode_fn(decoder, backend=BACKEND) as decode:
            latents = decoders.latents(1, 3)
            assert close(decode(latents), expected_of(decoder, latents))
            assert (decode.backend, decode.fallbacks) == (BACKEND, ())
            assert (folder / decode.engine / "engine.json").is_file()

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["engines", "-1", "a/b/c", ""])
    def test_an_engine_in_tensorrt_cache_dir_is_used(
        self,
        name: str,
        decoder: Any,
        tmp_path: Path,
        cache_dir: Path,
        monkeypatch: pytest.MonkeyPatch,
        engine_library: EngineLibrary,
    ) -> None:
        monkeypatch.setenv("TENSORRT_CACHE_DIR", str(tmp_path / "own" / name) if name else "")
        folder = tmp_path / "own" / name if name else cache_dir / "engines"
        add_engine(engine_library, Settings(cache_dir=cache_dir, engine_cache_dir=folder), decoder)
        events: list[Event] = []
        with make_batched_decode_fn(decoder, backend=BACKEND, emit=events.append) as decode:
            latents = decoders.latents(1, 3)
            assert close(decode(latents), expected_of(decoder, latents))
            assert (decode.backend, decode.fallbacks, events) == (BACKEND, (), [])
            assert (folder / decode.engine / "engine.json").is_file()

    def test_a_bad_tensorrt_cache_dir(
        self, decoder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
    ) -> None:
        (tmp_path / "file").write_text("")
        values = [" ", "\t", "/dev/null", "~no-such-user/x", "x" * 300, "/x" * 5000, "a\nb", "a\x07", "\udcff"]
        for path in (*values, str(tmp_path / "file"), str(tmp_path / "file" / "below")):
            with subtests.test(ascii(path[:20])):
                refuses_variable(monkeypatch, decoder, "TENSORRT_CACHE_DIR", path, "settings.not_a_folder")

    @pytest.mark.parametrize("disk", ["ro,size=1m", "size=64k"])
    def test_a_tensorrt_cache_dir_that_cannot_be_written(
        self, disk: str, decoder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with full_disk.small_disk(tmp_path / "disk", disk) as folder:
            if disk != "ro,size=1m":
                full_disk.fill(folder)
            monkeypatch.setenv("TENSORRT_CACHE_DIR", str(folder))
            decode = make_batched_decode_fn(decoder, backend=BACKEND)
            latents = decoders.latents(1, 3)
            for _ in range(2):
                assert close(decode(latents), expected_of(decoder, latents))
            assert decode.backend == "pytorch"
            (fact,) = decode.fallbacks
            shown = render(fact).what
            assert len(shown.splitlines()) == 1
            assert str(folder) in shown or "TENSORRT_CACHE_DIR" in shown


def test_a_plan_of_tensorrt_has_a_profile_for_full_batches_and_one_for_fewer(home: Path) -> None:
    from runtime.engines.builders import BUILDERS
    from tests.plans import GPU_PACKAGES, gpu, machine

    decoder: Any = load_decoder(str(home / "weights" / "tiny"))
    here = machine(gpu=gpu(), torch_cuda="13.0", packages=GPU_PACKAGES)
    service = EngineService.from_settings(Settings(cache_dir=home), here)
    for name, profiles in (("onnx_tensorrt", 2), ("tensorrt_rtx", 2), ("inductor", 1)):
        one = frame_engine(service, decoder.tandem_spec, BUILDERS[name], (3, 4), "cuda:0")
        assert one.key.profiles[0].min == one.key.profiles[0].max == (FRAME_BATCH, 3, 4)
        assert len(one.key.profiles) == profiles
        assert one.takes_any is (profiles == 2)
        assert one.key.precision == "float16"
    both = frame_engine(service, decoder.tandem_spec, BUILDERS["onnx_tensorrt"], (3, 4), "cuda:0", precision="float32")
    assert both.key.precision == "float32"
    assert both.key.profiles[1].serves((1, 3, 4))
