"""Colors of latents: the fit, its file, and previews of a tiny real model."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file

from runtime.core.disk_caches import LATENT_COLORS
from runtime.core.events import Cancelled, StepDone, VideoSaved
from runtime.execution.residency import Residency
from runtime.models.spec import LatentRgb, ModelSpec
from runtime.pipeline import previews
from runtime.pipeline.latent_colors import SIDE, DecodedColors, LatentColors
from runtime.video.preview import resize
from tests.full_disk import fill
from tests.pipeline.killing import forking
from tests.pipeline.runs import Choice, events_of, never
from tests.plans import tiny_plan

Tiny = Callable[[str], ModelSpec]


@pytest.fixture
def spec(tiny: Tiny) -> ModelSpec:
    return replace(tiny("wan2.1"), latent_rgb=None)


def clip(
    spec: ModelSpec, seed: int = 0, side: int = 8, kernel: int = 1
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Return latents, the colors that a linear map gives them, and frames whose last of each latent has them.

    Args:
        side: positions of a frame in width and in height.
        kernel: of the map.
    """
    random = torch.Generator().manual_seed(seed)
    channels, each, scale = spec.vae.z_dim, spec.vae.scale_factor_temporal, 8
    latents = torch.randn(1, channels, 3, side, side, generator=random)
    shape = (3 * SIDE * SIDE, channels, kernel, kernel)
    factors = torch.randn(shape, generator=torch.Generator().manual_seed(9)) * 0.2 / channels**0.5 / kernel
    around = F.pad(latents[0].transpose(0, 1), (kernel // 2,) * 4, mode="replicate")
    colors = F.pixel_shuffle(F.conv2d(around, factors) + 0.1, SIDE)
    wide = colors.repeat_interleave(scale // SIDE, dim=2).repeat_interleave(scale // SIDE, dim=3)
    frames = np.zeros((2 * each + 1, *wide.shape[2:], 3), np.uint8)
    frames[::each] = ((wide.permute(0, 2, 3, 1) + 1) * 127.5).round().byte().numpy()
    return latents, colors.permute(0, 2, 3, 1), frames


def decoded(
    spec: ModelSpec, latents: torch.Tensor, frames: np.ndarray, chunks: tuple[int, ...] = (1, 4)
) -> DecodedColors:
    found, start = DecodedColors(latents, spec.vae.scale_factor_temporal), 0
    for count in (*chunks, len(frames)):
        found.add(frames[start : start + count])
        start += count
    return found


@pytest.mark.parametrize("chunks", [(), (1, 4), (2, 3), (1, 1, 1, 1), (5,)])
def test_a_linear_map_is_recovered_stored_and_found(chunks: tuple[int, ...], spec: ModelSpec, tmp_path: Path) -> None:
    latents, _, frames = clip(spec)
    fit = LatentColors(tmp_path, spec)
    assert fit.colors(latents) is None
    fit.learn(decoded(spec, latents, frames, chunks))
    other, wanted, _ = clip(spec, 1)
    for one in (fit, LatentColors(tmp_path, spec)):
        found = one.colors(other)
        assert found is not None
        torch.testing.assert_close(found, wanted, atol=0.01, rtol=0)


def test_frames_with_fewer_pixels_than_colors_are_ignored(spec: ModelSpec, tmp_path: Path) -> None:
    small = DecodedColors(torch.randn(1, spec.vae.z_dim, 2, 24, 24), 4)
    small.add(np.zeros((5, 24, 24, 3), np.uint8))
    assert small.sums().positions == 0
    fit = LatentColors(tmp_path, spec)
    fit.learn(small)
    assert fit.colors(torch.randn(1, spec.vae.z_dim, 2, 24, 24)) is None


@pytest.mark.parametrize("side", [24, 48])
def test_a_map_of_neighborhoods_is_recovered_stored_and_found(side: int, spec: ModelSpec, tmp_path: Path) -> None:
    latents, _, frames = clip(spec, side=side, kernel=3)
    fit, learned = LatentColors(tmp_path, spec), decoded(spec, latents, frames)
    # Of large frames, every second position in each direction is used.
    assert learned.sums().positions == 3 * 24 * 24
    fit.learn(learned)
    other, wanted, _ = clip(spec, 1, side=12, kernel=3)
    for one in (fit, LatentColors(tmp_path, spec)):
        found = one.colors(other)
        assert found is not None
        torch.testing.assert_close(found, wanted, atol=0.01, rtol=0)
    # The colors of one position depend on it and those around it.
    other[:, :, 1, 5, 5] += 1
    changed = fit.colors(other)
    assert changed is not None and found is not None
    rows = (changed - found)[1].abs().amax(2).amax(1).view(-1, SIDE).amax(1)
    assert (rows > 1e-5).nonzero().flatten().tolist() == [4, 5, 6]


def test_few_positions_give_a_map_without_neighbors(spec: ModelSpec, tmp_path: Path) -> None:
    latents, _, frames = clip(spec, kernel=3)
    fit = LatentColors(tmp_path, spec)
    fit.learn(decoded(spec, latents, frames))
    before = fit.colors(latents)
    latents[:, :, 1, 5, 5] += 1
    after = fit.colors(latents)
    assert before is not None and after is not None
    assert (after - before)[1].abs().sum(2).nonzero().tolist() == [[10, 10], [10, 11], [11, 10], [11, 11]]


@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (33, 2)])
def test_latents_of_any_size_have_colors(shape: tuple[int, int], spec: ModelSpec, tmp_path: Path) -> None:
    latents, _, frames = clip(spec, side=24, kernel=3)
    fit = LatentColors(tmp_path, spec)
    fit.learn(decoded(spec, latents, frames))
    found = fit.colors(torch.randn(1, spec.vae.z_dim, 2, *shape))
    assert found is not None
    assert found.shape == (2, SIDE * shape[0], SIDE * shape[1], 3)


def test_models_of_many_channels_have_no_neighborhoods(spec: ModelSpec, tmp_path: Path) -> None:
    wide = replace(spec, vae=replace(spec.vae, z_dim=65))
    latents, colors, frames = clip(wide, side=24)
    fit = LatentColors(tmp_path, wide)
    fit.learn(decoded(wide, latents, frames))
    found = LatentColors(tmp_path, wide).colors(latents)
    assert found is not None
    torch.testing.assert_close(found, colors, atol=0.01, rtol=0)


def is_ignored_and_replaced(path: Path, spec: ModelSpec) -> None:
    """Check that a file gives no colors, and is replaced by the next video's, whose map is that of `clip`."""
    latents, colors, frames = clip(spec)
    folder = path.parents[1]
    fit = LatentColors(folder, spec)
    assert fit.colors(latents) is None
    fit.learn(decoded(spec, latents, frames))
    found = LatentColors(folder, spec).colors(latents)
    assert found is not None
    torch.testing.assert_close(found, colors, atol=0.01, rtol=0)
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_sums_of_an_earlier_version_are_replaced(spec: ModelSpec, tmp_path: Path) -> None:
    latents, _, frames = clip(spec)
    LatentColors(tmp_path, spec).learn(decoded(spec, latents, frames))
    (path,) = (tmp_path / "latent_colors").iterdir()
    inputs = torch.cat([latents[0], torch.ones(1, *latents.shape[2:])]).flatten(1).double()
    outputs = torch.randn(inputs.shape[1], 3 * SIDE * SIDE, dtype=torch.float64)
    old = {"gram": inputs @ inputs.T, "moments": inputs @ outputs, "lead": torch.zeros((), dtype=torch.float64)}
    safetensors.torch.save_file(old, path, metadata={"vae": path.stem})
    is_ignored_and_replaced(path, spec)


def test_the_published_map_is_used_until_the_fit_is_better(spec: ModelSpec, tmp_path: Path) -> None:
    published = LatentRgb(((0.01, 0.02, 0.03),) * spec.vae.z_dim, (0.0, 0.0, 0.0))
    model = replace(spec, latent_rgb=published)
    shapes = []
    for seed in range(3):
        latents, _, frames = clip(spec, seed)
        fit = LatentColors(tmp_path, model)
        found = fit.colors(latents)
        assert found is not None
        shapes.append(found.shape[1])
        fit.learn(decoded(spec, latents, frames))
    # The second clip shows that the map fitted to the first is better.
    assert shapes == [8, 8, 8 * SIDE]
    # A perfect published map stays.
    latents, _, frames = clip(spec)
    exact = torch.tensor([*published.factors])
    flat = torch.einsum("cfhw,cr->fhwr", latents[0], exact).repeat_interleave(8, 1).repeat_interleave(8, 2)
    frames[:: spec.vae.scale_factor_temporal] = ((flat.clamp(-1, 1) + 1) * 127.5).round().byte().numpy()
    fit = LatentColors(tmp_path / "other", model)
    fit.learn(decoded(spec, latents, frames))
    found = fit.colors(latents)
    assert found is not None and found.shape[1] == 8


def _nan(path: Path, data: bytes) -> None:
    path.write_bytes(data[:-64] + np.full(8, np.nan).tobytes())


def _negative(path: Path, data: bytes) -> None:
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    first, last = (start + offset for offset in header["gram"]["data_offsets"])
    path.write_bytes(data[:first] + np.full((last - first) // 8, -0.1).tobytes() + data[last:])


def _of_another(path: Path, data: bytes) -> None:
    path.write_bytes(data.replace(path.stem.encode(), b"0" * len(path.stem)))


HOSTILE: dict[str, Callable[[Path, bytes], object]] = {
    "cut": lambda path, data: path.write_bytes(data[:-100]),
    "empty": lambda path, _: path.write_bytes(b""),
    "text": lambda path, _: path.write_text("{}" * 100),
    "NaN": _nan,
    "shape": lambda path, data: path.write_bytes(
        data.replace(b"[]", b"[1]")[:8] + data[8:].replace(b"moments", b"momentz")
    ),
    "another VAE": _of_another,
    "negative": _negative,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_ignored_and_replaced(name: str, spec: ModelSpec, tmp_path: Path) -> None:
    latents, _, frames = clip(spec)
    LatentColors(tmp_path, spec).learn(decoded(spec, latents, frames))
    (path,) = (tmp_path / "latent_colors").iterdir()
    good = path.read_bytes()
    HOSTILE[name](path, good)
    assert path.read_bytes() != good
    is_ignored_and_replaced(path, spec)


def test_a_full_disk_and_a_folder_that_cannot_be_made_are_no_errors(
    spec: ModelSpec, tmp_path: Path, small_disk: Path
) -> None:
    latents, _, frames = clip(spec)
    (tmp_path / "file").write_text("")
    (small_disk / "latent_colors").mkdir()
    fill(small_disk)
    for folder in (tmp_path / "file", small_disk):
        fit = LatentColors(folder, spec)
        fit.learn(decoded(spec, latents, frames))
        assert fit.colors(latents) is not None
    assert not list((small_disk / "latent_colors").iterdir())


def _learn(spec: ModelSpec, folder: Path, together: Any) -> None:
    latents, _, frames = clip(spec)
    fit, found = LatentColors(folder, spec), decoded(spec, latents, frames)
    together.wait(120)
    for _ in range(25):
        fit.learn(found)


@pytest.mark.slow
def test_clips_of_two_processes_all_count(spec: ModelSpec, tmp_path: Path) -> None:
    context = forking()
    together = context.Barrier(2)
    started = [context.Process(target=_learn, args=(spec, tmp_path, together)) for _ in range(2)]
    for one in started:
        one.start()
    for one in started:
        one.join(120)
    assert [one.exitcode for one in started] == [0, 0]
    latents, _, frames = clip(spec)
    each = decoded(spec, latents, frames).sums().positions
    (file,) = (tmp_path / LATENT_COLORS.name).iterdir()
    gram = load_file(file)["gram"]
    assert float(gram[-1, -1]) == 50 * each


def psnr(preview: bytes, wanted: np.ndarray) -> float:
    """Return how near an animated preview is to frames, in dB."""
    image = Image.open(io.BytesIO(preview))
    frames = []
    for number in range(image.n_frames):  # type: ignore[attr-defined]  # of animations
        image.seek(number)
        frames.append(np.asarray(image.convert("RGB"), np.float64))
    return float(10 * np.log10(255**2 / np.mean((np.stack(frames) - np.stack(resize(wanted))) ** 2)))


@pytest.mark.slow
@pytest.mark.parametrize("stop", [never, lambda event: isinstance(event, StepDone)], ids=["saved", "cancelled"])
def test_the_second_job_has_better_previews(
    stop: Choice, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(previews, "_SECONDS", 0.0)
    monkeypatch.setattr(previews, "_SHARE", 1e6)
    model = tiny("wan2.1")
    gray = LatentRgb(((0.2, -0.2, 0.1),) * model.vae.z_dim, (0.5, 0.0, 0.0))
    plain, published = replace(model, latent_rgb=None), replace(model, latent_rgb=gray)
    found: dict[str, float] = {}
    with Residency() as residency:
        residency.cache_dir = tmp_path
        runs = [("constant", published, never), ("none", plain, stop), ("fitted", plain, never)]
        for name, spec, choice in runs:
            if name == "none":
                for path in (tmp_path / "latent_colors").iterdir():
                    path.unlink()
            frames: list[np.ndarray] = []
            plan = tiny_plan(spec, tmp_path / "x.mp4", seed=5)
            events = events_of(plan, spec, residency, cancel_at=choice, on_frames=lambda f: frames.append(f.copy()))  # noqa: B023 - called now
            assert isinstance(events[-1], VideoSaved if choice is never else Cancelled)
            last = [event.preview for event in events if isinstance(event, StepDone)][-1]
            if last is not None:
                found[name] = psnr(last, np.concatenate(frames)[:: spec.vae.scale_factor_temporal])
    if stop is not never:
        assert "fitted" not in found  # nothing was decoded before
        return
    assert "none" not in found
    assert found["fitted"] > found["constant"] + 3
    assert LATENT_COLORS.max_bytes > sum(path.stat().st_size for path in (tmp_path / "latent_colors").iterdir())
