"""Tiled decoding: blend weights sum to one, tiles equal the whole frame, and calls match the forecast."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.core.cancel import Cancel, CancelledError
from runtime.core.events import Event, FramesDecoded, VideoSaved
from runtime.core.tiles import spans, times_decoded
from runtime.execution.decoded_frames import blend_weights
from runtime.execution.residency import Residency
from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec
from runtime.pipeline.run import run_job
from runtime.pipeline.sampling import decode
from runtime.planner import memory_model
from tests.pipeline.test_parity import sample
from tests.plans import Alone, tiny_plan, with_strategy

Tiny = Callable[[str], ModelSpec]


@given(st.integers(1, 120), st.integers(4, 60), st.sampled_from([8, 16]))
def test_blend_weights_of_a_pixel_sum_to_one(length: int, tile: int, scale: int) -> None:
    placed = spans(length, tile)
    total = torch.zeros(length * scale)
    for span, share in zip(placed, blend_weights(placed, scale), strict=True):
        assert share.min() > 0
        total[span.start * scale : span.end * scale] += share
    assert torch.allclose(total, torch.ones_like(total))


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "chunk"), [("wan2.1", 1), ("wan2.1", 2), ("wan2.2-ti2v-5b", 1)])
@torch.inference_mode()
def test_a_tile_is_decoded_like_a_whole_frame(architecture: str, chunk: int, tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny(architecture)
    latents = torch.randn((1, spec.vae.z_dim, 3, 8, 6), generator=torch.Generator().manual_seed(1))
    scale = spec.vae.scale_factor_spatial
    with Residency() as residency, residency.video_decoder(spec, Alone(tiny_plan(spec, tmp_path / "x.mp4"))) as decoder:
        assert torch.equal(
            torch.cat(list(decoder.frames(latents, chunk, 8))), torch.cat(list(decoder.frames(latents, chunk)))
        )
        batches = list(decoder.frames(latents, chunk, 5))
        corner = torch.cat(list(decoder.frames(latents[..., :5, :5], chunk)))
    tiled = torch.cat(batches)
    assert tiled.shape == (9, 8 * scale, 6 * scale, 3)
    # The corner is no other tile's.
    alone = (slice(None), slice(0, 3 * scale), slice(0, scale))
    assert (tiled[alone] - corner[alone]).abs().max() < 1e-3
    # The reader can stop after each call: 2 × 2 tiles.
    assert sum(len(batch) == 0 for batch in batches) == 4 * (3 if chunk == 1 else 2)


@pytest.mark.parametrize(("height", "width", "tile"), [(8, 6, 5), (6, 15, 4), (4, 9, 8)])
@torch.inference_mode()
def test_calls_of_the_decoder_match_the_forecast(
    height: int, width: int, tile: int, tiny: Tiny, tmp_path: Path
) -> None:
    spec = tiny("wan2.1")
    latents = torch.zeros((1, spec.vae.z_dim, 2, height, width))
    with Residency() as residency, residency.video_decoder(spec, Alone(tiny_plan(spec, tmp_path / "x.mp4"))) as decoder:
        seen: list[tuple[int, int]] = []
        vae: Any = vars(decoder)["_vae"]
        vae.decoder.mid_block.attentions[0].register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[3:]))
        batches = list(decoder.frames(latents, 1, tile))
    # Two calls a tile: the first latent frame, and the other.
    assert sum(h * w for h, w in seen) == pytest.approx(2 * height * width * times_decoded(height, width, tile))
    assert set(seen) == {(min(height, tile), min(width, tile))}
    load = memory_model.Workload(
        spec=spec,
        device="cuda:0",
        dtypes={"vae": "float32"},
        engine_bytes={},
        engine_seconds={},
        tokens=0,
        latent_shape=(1, spec.vae.z_dim, 2, height, width),
        height=height * spec.vae.scale_factor_spatial,
        width=width * spec.vae.scale_factor_spatial,
    )
    assert memory_model.clip_bytes(load) == sum(batch.half().nbytes for batch in batches)


@pytest.mark.slow
def test_the_shipped_models_tiled_frames_equal_whole_frames(tmp_path: Path) -> None:
    spec = find("diorama", tmp_path)
    prompt = "a blue rocket flies up over the city at night"
    plan = tiny_plan(spec, tmp_path / "x.mp4", prompt=prompt, width=192, height=112, frames=5, steps=6)
    with Residency() as residency:
        latents = sample(spec, plan, residency)
        with residency.video_decoder(spec, Alone(plan)) as decoder:
            whole = torch.cat(list(decode(decoder, latents, 2, Cancel()))).float()
            tiled = torch.cat(list(decode(decoder, latents, 2, Cancel(), 16))).float()
    psnr = 10 * math.log10(255**2 / (whole - tiled).square().mean().item())
    assert psnr > 45


def test_a_job_decodes_in_tiles(tiny: Tiny, tmp_path: Path) -> None:
    spec, out = tiny("wan2.1"), tmp_path / "x.mp4"
    plan = with_strategy(tiny_plan(spec, out), decode_tile=4)
    events: list[Event] = []
    with Residency() as residency:
        run_job(plan, spec, events.append, Cancel(), residency)
    assert isinstance(events[-1], VideoSaved), events[-1]
    assert events[-1].plan["decode_tile"] == 4
    assert [event.frames for event in events if isinstance(event, FramesDecoded)][-1] == plan.frames


def test_cancelling_does_not_wait_for_the_last_tile(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    latents = torch.zeros((1, spec.vae.z_dim, 2, 4, 16))
    cancel = Cancel()
    with Residency() as residency, residency.video_decoder(spec, Alone(tiny_plan(spec, tmp_path / "x.mp4"))) as decoder:
        frames = decode(decoder, latents, 1, cancel, 4)
        cancel.request()
        with pytest.raises(CancelledError):
            next(frames)
