"""`decode`: files of latents to MP4s, in constant memory; bad latents; Ctrl-C; metadata."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from runtime.cli.main import run
from runtime.core.cancel import Cancel, CancelledError
from runtime.core.estimates import Seconds
from runtime.core.events import Event, FramesDecoded, Warned
from runtime.core.settings import Settings
from runtime.engines.service import EngineService
from runtime.execution.components import components_of
from runtime.families.dcae import load_decoder
from runtime.machine.probe import probe
from runtime.models.catalogue import find
from runtime.models.latent_files import LatentFile
from runtime.models.weights import load_module
from runtime.pipeline.decode import Decoded, decode_file
from runtime.pipeline.decode_plan import DecodePlan, DecodeRequest
from runtime.pipeline.history_file import HistoryFile
from runtime.video.mp4 import find_ffmpeg, read_metadata
from tests import plans
from tests.cli.refusals import check_refusals, refused
from tests.families.dcae import decoders

pytestmark = pytest.mark.usefixtures("cache_dir")
SHAPE = (11, 8, 3, 4)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Return the folder of a decoder: 12×16 pixels of 3×4 latents."""
    decoders.save_autoencoder(tmp_path / "model")
    return str(tmp_path / "model")


def values(*shape: int) -> np.ndarray:
    """Return latents."""
    return np.random.default_rng(3).standard_normal(shape).astype("float32")


def pixels(video: Path) -> np.ndarray:
    """Return the frames of a video, (n, height, width, 3)."""
    size = read_metadata(video)["decode"]
    command = [find_ffmpeg(), "-v", "error", "-i", str(video), "-vf", "scale=in_color_matrix=bt709"]
    done = subprocess.run([*command, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"], capture_output=True, check=True)
    return np.frombuffer(done.stdout, np.uint8).reshape(-1, size["height"], size["width"], 3)


def luma(frames: np.ndarray) -> np.ndarray:
    """Return the brightness of frames, which the file has for each pixel; colors are shared by four."""
    found: np.ndarray = frames @ np.array([0.2126, 0.7152, 0.0722])
    return found


@pytest.mark.parametrize("kind", ["npy", "float16.npy", "safetensors", "bfloat16.safetensors", "batch.safetensors"])
def test_files_of_each_kind_are_decoded(
    kind: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    latents = values(*SHAPE)
    file, out = tmp_path / f"world.{kind}", tmp_path / "world.mp4"
    if kind.endswith("npy"):
        np.save(file, latents.astype("float16" if "float16" in kind else "float32"))
    else:
        tensor = torch.from_numpy(latents)
        tensor = tensor.bfloat16() if "bfloat16" in kind else tensor
        named = {"latents": tensor[:10].reshape(2, 5, *SHAPE[1:]) if "batch" in kind else tensor}
        save_file(named | ({"actions": torch.zeros(3)} if kind == "safetensors" else {}), file)
    assert run(["decode", str(file), "--model", model, "--out", str(out), "--fps", "7", "--crf", "0", "--json"]) == 0
    done = json.loads(capsys.readouterr().out.splitlines()[-1])
    count = 10 if "batch" in kind else 11
    assert pixels(out).shape == (count, 12, 16, 3)
    assert (done["video"], done["frames"], done["fps"], done["backend"]) == (str(out), count, 7, "pytorch")
    described = read_metadata(out)["decode"]
    assert (described["latents"], described["model"], described["frames"]) == (file.name, "model", count)
    decoder: Any = load_decoder(model)
    with torch.no_grad():
        expected = decoder(torch.from_numpy(latents[:count]) * decoder.tandem_spec.vae.latent_factor)
    shown = ((expected.clamp(-1, 1).permute(0, 2, 3, 1) + 1) * 127.5).numpy()
    assert np.abs(luma(pixels(out)) - luma(shown)).mean() < 2


def test_the_forecast_is_an_estimate_until_a_file_was_decoded(model: str, cache_dir: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "z.npy", values(*SHAPE))
    decode_request = request(model, tmp_path / "z.npy", tmp_path / "z.mp4")
    settings, machine = Settings(cache_dir=cache_dir), probe()
    engines = EngineService.from_settings(settings, machine)

    def forecast() -> Seconds:
        with LatentFile(decode_request.latents) as file:
            plan = DecodePlan.of(decode_request, file, tmp_path, machine)
        return plan.seconds(machine, HistoryFile(cache_dir, machine).read())

    estimate = forecast()
    assert not estimate.known
    assert 0 < estimate.low < estimate.likely < estimate.high
    with_gpu = plans.machine(gpu=plans.gpu(), torch_cuda="13.0")
    with LatentFile(decode_request.latents) as file:
        on_gpu = DecodePlan.of(decode_request, file, tmp_path, with_gpu)
    assert on_gpu.device == "cuda:0"
    assert 0 < on_gpu.seconds(with_gpu, ()).likely < estimate.likely
    done = decode_to_file(decode_request, engines, lambda _: None, cache_dir)
    assert forecast().known
    assert forecast().likely == pytest.approx(done.seconds, rel=0.01)


def test_channels_are_shown_side_by_side(tmp_path: Path) -> None:
    decoders.save_owl(tmp_path / "owl")  # of four channels
    np.save(tmp_path / "z.npy", values(3, 8, 8, 8))
    arguments = ["decode", str(tmp_path / "z.npy"), "--model", str(tmp_path / "owl"), "--crf", "0", "--channels"]
    assert run([*arguments, "rgb,3", "--out", str(tmp_path / "both.mp4")]) == 0
    assert run([*arguments, "3", "--out", str(tmp_path / "depth.mp4")]) == 0
    both, depth = pixels(tmp_path / "both.mp4"), pixels(tmp_path / "depth.mp4")
    assert (both.shape, depth.shape) == ((3, 64, 128, 3), (3, 64, 64, 3))
    assert np.abs(both[:, :, 64:].astype(int) - depth).max() <= 3
    assert int(depth.max(3).astype(int).max() - depth.min(3).astype(int).max()) <= 3  # gray


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["wan2.1", "hunyuan-video"])
def test_latents_of_video_models_are_decoded_by_their_vae(
    architecture: str, tiny: Callable[[str], Any], tmp_path: Path
) -> None:
    spec = tiny(architecture)
    latents = values(2, spec.vae.z_dim, 7, 4, 4)
    np.save(tmp_path / "clips.npy", latents)
    np.save(tmp_path / "one.npy", latents[1])
    sizes = []
    for name in ("clips", "one"):
        out = tmp_path / f"{name}.mp4"
        arguments = ["--model", str(spec.directory), "--out", str(out), "--crf", "0", "--backend", "inductor"]
        assert run(["decode", str(tmp_path / f"{name}.npy"), *arguments]) == 0
        sizes.append(len(pixels(out)))
        assert len(read_metadata(out)["decode"]["fallbacks"]) == 1
    assert sizes == [50, 25]
    # The file is read a few frames at a time; the frames are those of the whole clip.
    part: Any = load_part(spec)
    whole = torch.cat(list(part.frames(torch.from_numpy(latents[1:]), 1)))
    shown = ((whole.clamp(-1, 1) + 1) * 127.5).cpu().numpy()
    assert np.abs(luma(pixels(tmp_path / "one.mp4")) - luma(shown)).mean() < 2


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["wan2.1", "hunyuan-video"])
@pytest.mark.parametrize("short", [True, False])
def test_frames_are_decoded_in_tiles_where_memory_is_short(
    short: bool, architecture: str, tiny: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny(architecture)
    scale = spec.vae.scale_factor_spatial
    tile = 256 // scale
    latents = values(spec.vae.z_dim, 2, 4, tile + 4)
    np.save(tmp_path / "wide.npy", latents)
    part = load_part(spec)
    expected = torch.cat([one for one in part.frames(torch.from_numpy(latents[None]), 1, tile) if len(one)])
    engines = EngineService.from_settings(Settings(cache_dir=tmp_path), probe())
    if short:
        engines = replace(engines, machine=replace(engines.machine, ram_free_bytes=1))
    real, used = type(part).frames, []

    def frames(self: Any, latents: Any, chunk: int, tile: int | None = None) -> Any:
        used.append(tile)
        for one in real(self, latents, chunk, tile):
            yield one if tile else one[:1]
            if not tile:
                raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(type(part), "frames", frames)
    asked = replace(request(str(spec.directory), tmp_path / "wide.npy", tmp_path / "wide.mp4"), crf=0)
    events: list[Event] = []
    done = decode_to_file(asked, engines, events.append, tmp_path)
    assert used == ([tile] if short else [None, tile])
    assert [fact.code for fact in done.fallbacks] == ["planner.decoded_in_tiles"]
    assert sum(isinstance(event, Warned) for event in events) == 1
    assert done.frames == len(expected)
    shown = ((expected.clamp(-1, 1) + 1) * 127.5).numpy()
    assert np.abs(luma(pixels(tmp_path / "wide.mp4"))[-1] - luma(shown)[-1]).mean() < 2


def load_part(spec: Any) -> Any:
    """Return a model's VAE decoder in PyTorch."""
    from runtime.core.plan import ComponentPlan

    part = ComponentPlan(backend="pytorch", device="cpu", dtype="float32", weights_bytes=0, reasons=())
    return components_of(spec).video_decoder(load_module(spec, "vae", part), "cpu")


def test_bad_latents_are_refused_and_leave_nothing(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    """The rules of files are tested in `tests.models.test_latent_files`."""
    with_nan = values(*SHAPE)
    with_nan[9, 0, 0, 0] = np.nan
    np.save(tmp_path / "nan.npy", with_nan)
    np.save(tmp_path / "channels.npy", values(11, 9, 3, 4))
    np.save(tmp_path / "axes.npy", values(8, 3, 4))
    save_file({"latents": torch.full((4, 8, 3, 4), torch.inf)}, tmp_path / "inf.safetensors")
    out = tmp_path / "bad.mp4"
    command = ["decode", "--model", model, "--out", str(out)]
    of_file: list[tuple[list[str], str, dict[str, Any]]] = [
        ([str(tmp_path / "nan.npy")], "latents.not_finite", {"file": "nan.npy", "frame": 9}),
        ([str(tmp_path / "inf.safetensors")], "latents.not_finite", {"file": "inf.safetensors", "frame": 0}),
        ([str(tmp_path / "channels.npy")], "latents.channels", {"wanted": 8, "found": 9, "shape": "11×9×3×4"}),
        ([str(tmp_path / "axes.npy")], "latents.axes", {"file": "axes.npy", "shape": "8×3×4"}),
        ([str(tmp_path / "none.npy")], "latents.unreadable", {"file": str(tmp_path / "none.npy")}),
        ([""], "latents.path_unreadable", {}),
    ]
    # Values are checked while they are decoded; everything else before anything is printed or loaded.
    check_refusals(of_file[:2], capsys, subtests, command, began=True)
    check_refusals(of_file[2:], capsys, subtests, command)
    assert not out.exists()
    assert not list(tmp_path.glob(".tandem*"))


def test_bad_latents_of_a_video_model_are_refused_whatever_the_tiles(
    tiny: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tiny("wan2.1")
    latents = values(spec.vae.z_dim, 2, 4, 4)
    latents[0, 1] = np.nan
    np.save(tmp_path / "nan.npy", latents)
    command = ["decode", str(tmp_path / "nan.npy"), "--model", str(spec.directory), "--out", str(tmp_path / "x.mp4")]
    refusal = refused(command, capsys, began=True)
    assert (refusal.code, refusal.data["frame"]) == ("latents.not_finite", 1)


def test_bad_arguments_are_refused(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    np.save(tmp_path / "z.npy", values(*SHAPE))
    cases: list[tuple[list[str], str, dict[str, Any]]] = [
        (["--channels", "depth"], "latents.channels_invalid", {"field": "channels", "value": "depth"}),
        (["--channels", "3"], "latents.no_such_channel", {"channel": "3", "last": 2}),
        (["--fps", "0"], "request.out_of_range", {"field": "fps", "value": "0", "low": 1, "high": 120}),
        (["--fps", "100000"], "request.out_of_range", {"field": "fps", "value": "100000", "nearest": 120}),
        (["--crf", "99"], "request.out_of_range", {"field": "crf", "value": "99", "low": 0, "high": 51}),
        (["--backend", "tensorflow"], "request.not_a_choice", {"field": "backend", "value": "'tensorflow'"}),
        (["--out", "video.avi"], "video.not_mp4", {}),
        (["--model", "no-such"], "model.unknown", {"name": "no-such"}),
        (["--model", "diorama"], "latents.channels", {"wanted": 16, "found": 11}),
    ]
    given = ["decode", str(tmp_path / "z.npy"), "--model", model, "--out", str(tmp_path / "z.mp4")]
    check_refusals(cases, capsys, subtests, given)
    assert refused(["generate", "a boat", "--model", model], capsys).code == "model.only_decodes"
    assert "--fps is 0" in refused([*given, "--fps", "0"], capsys).what


@pytest.mark.parametrize(
    ("shape", "given", "takes_it"),
    [((4, 32, 3, 4), "diorama", "diorama-dcae"), ((16, 3, 4, 4), "diorama-dcae", "diorama")],
)
def test_models_that_take_the_latents_are_named(
    shape: tuple[int, ...], given: str, takes_it: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "z.npy", values(*shape))
    command = ["decode", str(tmp_path / "z.npy"), "--model", given, "--out", str(tmp_path / "z.mp4")]
    found = refused(command, capsys)
    assert (found.code, found.data["models"]) == ("latents.of_another_model", [takes_it])


def request(model: str, latents: Path, out: Path) -> DecodeRequest:
    """Return a request."""
    return DecodeRequest(latents=latents, spec=find(model, Path("none")), output=out)


def decode_to_file(
    decode_request: DecodeRequest,
    engines: EngineService,
    emit: Callable[[Event], None],
    cache_dir: Path,
    cancel: Cancel | None = None,
) -> Decoded:
    """Plan a request and decode its file."""
    settings = Settings(cache_dir=cache_dir)
    with LatentFile(decode_request.latents) as file:
        plan = DecodePlan.of(decode_request, file, settings.weights_dir, engines.machine)
        return decode_file(plan, file, settings, engines, emit, cancel or Cancel())


def test_cancelling_leaves_nothing(model: str, tmp_path: Path) -> None:
    np.save(tmp_path / "z.npy", values(400, *SHAPE[1:]))
    cancel, events = Cancel(), []

    def emit(event: Event) -> None:
        events.append(event)
        if isinstance(event, FramesDecoded):
            cancel.request()

    out = tmp_path / "z.mp4"
    with pytest.raises(CancelledError):
        engines = EngineService.from_settings(Settings(cache_dir=tmp_path), probe())
        decode_to_file(request(model, tmp_path / "z.npy", out), engines, emit, tmp_path, cancel)
    assert sum(isinstance(event, FramesDecoded) for event in events) < 5
    assert not out.exists()
    assert not list(tmp_path.glob(".tandem*"))
