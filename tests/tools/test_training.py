"""Parts of the trainings: subject masks, resizing and roughness of latents, learning rates, losses."""

import json
import random
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from diffusers import AutoencoderDC
from safetensors.torch import load_file
from torch import nn

from runtime.families.interpolator.spec import WEIGHTS
from runtime.models.registry import read_spec
from tools.diorama import (
    captions,
    grade,
    motion,
    nets,
    train_dcae,
    train_experts,
    train_interpolation,
    train_text,
    train_vae,
    training,
    world,
)
from tools.diorama.checkpoint import load_weights, save_weights
from tools.diorama.render import Renderer, laplacian_variance

SIZE = (96, 64)


def test_subjects_are_drawn_inside_their_footprint() -> None:
    scenes = world.sample(6, 21, two_subjects=0.5)
    alone = world.Scenes(**(vars(scenes) | {"subject": torch.full_like(scenes.subject, -1)}))
    renderer = Renderer(SIZE, 9)
    seen = (renderer(scenes) - renderer(alone)).abs().amax(2)  # (B, T, H, W)
    cells = nn.functional.max_pool2d(seen, 8)
    latent = torch.cat([cells[:, :1], cells[:, 1:].unflatten(1, (-1, 4)).amax(2)], 1)
    inside = motion.footprint(scenes, SIZE, 9)
    assert inside.shape == latent.shape
    power = (latent * latent * inside).sum() / (latent * latent).sum()
    assert power > 0.97  # a little shadow falls outside
    assert inside.float().mean() < 0.45


def test_resizing_averages_over_areas() -> None:
    x = torch.randn(2, 3, 2, 14, 14)
    half = train_vae.shrink(x, (1, 2))
    assert torch.allclose(half, nn.functional.avg_pool3d(x, (1, 2, 2)), atol=1e-6)
    assert train_vae.shrink(x, (5, 7)).shape[-2:] == (10, 10)
    assert torch.allclose(train_vae.shrink(torch.ones(1, 1, 1, 14, 14), (5, 7)), torch.ones(1), atol=1e-6)
    with pytest.raises(ValueError, match="whole number"):
        train_vae.shrink(x, (3, 4))


def test_roughness_is_one_for_noise_and_small_for_slopes() -> None:
    torch.manual_seed(0)
    assert (train_vae.roughness(torch.randn(4, 16, 8, 16, 16)) - 1).abs().max() < 0.05
    slope = torch.linspace(-1, 1, 16).expand(1, 4, 8, 16, 16)
    assert train_vae.roughness(slope)[2] < 0.05


@pytest.mark.slow
def test_the_vae_trains_on_resized_latents() -> None:
    torch.manual_seed(0)
    model = nets.vae(nets.REHEARSAL)
    clip = torch.rand(2, 3, 5, 112, 112) * 2 - 1
    for by in train_vae.SHRINK:
        # In float32: some processors take minutes for a convolution's gradient in bfloat16.
        loss, mse = train_vae.loss_of(model, clip, train_vae.Aim(equivariance=0.5, shrink=by, smooth=0.1))
        loss.backward()
        assert float(loss.detach()) > float(mse.detach()) > 0
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.encoder.parameters())


def test_the_learning_rate_interpolates() -> None:
    clock = training.Clock(1.0, torch.device("cpu"))
    clock.steps = 1000
    rates = []
    for progress in (0.0, 0.5, 1.0):
        clock.progress = progress
        rates.append(clock.rate(100, 0.8, 0.4))
    assert rates == pytest.approx([0.8, 0.6, 0.4])


def test_sharpening_raises_gains_to_a_minimum_once() -> None:
    model = nets.expert(nets.REHEARSAL)
    train_experts.sharpen_text(model, 1.7)
    train_experts.sharpen_text(model, 1.5)
    for block in model.blocks:
        assert float(block.attn2.norm_q.weight.detach().mean()) == pytest.approx(1.7, rel=1e-4)


def cache_of(count: int, midway: int) -> train_experts.Cache:
    """Random latents whose upper half shows subjects, the first ``midway`` entered midway."""
    torch.manual_seed(0)
    inside = torch.zeros(count, 2, 4, 4, dtype=torch.uint8)
    inside[:, :, :2] = 1
    wordings = train_experts.CAPTIONS + train_experts.IMAGE_CAPTIONS
    states = torch.randn(count, wordings, nets.TRAIN_TEXT_LENGTH, nets.REHEARSAL.text_dim).bfloat16()
    late = (torch.arange(count) < midway).to(torch.uint8)
    empty = torch.randn(nets.TRAIN_TEXT_LENGTH, nets.REHEARSAL.text_dim).bfloat16()
    return train_experts.Cache(torch.randn(count, 16, 2, 4, 4).bfloat16(), states, inside, late, empty)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # autocast leaves norms in float32
@pytest.mark.parametrize("images", [0.0, 0.5])
def test_the_loss_weights_subjects_and_returns_both_errors(images: float) -> None:
    model = nets.expert(nets.REHEARSAL)
    train_experts.shorten_text(model)
    cache = cache_of(4, midway=1 if images else 0)
    loss, errors = train_experts.loss_of(model, cache, 4, train_experts.Aim("low", 3.0, images))
    expected = (3 * errors[0] + errors[1]) / 4
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-4)


def test_clips_entered_midway_start_from_their_image() -> None:
    cache = cache_of(8, midway=8)
    seen: dict[str, torch.Tensor] = {}

    class Spy(nn.Module):
        def forward(self, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, **_: bool) -> tuple:
            seen.update(latents=latents, timestep=timestep, text=text)
            return (torch.zeros_like(latents),)

    train_experts.loss_of(Spy(), cache, 6, train_experts.Aim("high", 3.0, 1.0))
    first = seen["latents"][:, :, 0]
    assert all(any(torch.equal(one, clean) for clean in cache.latents[:, :, 0].float()) for one in first)
    assert bool((seen["timestep"].view(6, 2, -1)[:, 0] == 0).all())
    assert bool((seen["timestep"].view(6, 2, -1)[:, 1] > 800).all())


def test_the_first_latent_frame_can_count_for_more() -> None:
    cache = cache_of(4, midway=0)

    class Guess(nn.Module):
        def forward(self, latents: torch.Tensor, *_: torch.Tensor, **__: bool) -> tuple:
            wrong = torch.zeros_like(latents)
            wrong[:, :, 0] = 100
            return (wrong,)

    def loss(first: float) -> float:
        return float(train_experts.loss_of(Guess(), cache, 4, train_experts.Aim("low", first=first))[0])

    assert loss(3.0) == pytest.approx(loss(1.0) * 1.5, rel=0.01)  # 3 of 4 parts instead of 1 of 2


@pytest.mark.parametrize(("images", "kind"), [(1.0, "image_guidance"), (0.0, "guidance"), (0.0, "image_guidance")])
def test_guidance_is_learnt_away_from_a_guess_without_the_image_or_the_caption(images: float, kind: str) -> None:
    cache = cache_of(4, midway=4 if images else 0)
    learnt = kind == "guidance" or images > 0

    class Guess(nn.Module):
        """Answers 0 without what guidance amplifies, else ``value``."""

        def __init__(self, value: float) -> None:
            super().__init__()
            self.value = value

        def forward(self, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, **_: bool) -> tuple:
            has_image = timestep.dim() == 2 and bool((timestep == 0).any())
            aided = not torch.equal(text[0], cache.empty) if kind == "guidance" else has_image
            return (torch.full_like(latents, self.value if aided else 0.0),)

    def loss(value: float, scale: float) -> float:
        torch.manual_seed(0)
        aim = train_experts.Aim("low", images=images, **{kind: scale})
        return float(train_experts.loss_of(Guess(value), cache, 4, aim)[0])

    # The target moves by (1.5 - 1) x (1 - 0), as far as a guess of 0.5 is from one of 1.
    value = 1.0 if learnt else 0.0
    assert loss(value, 1.5) == pytest.approx(loss(value / 2, 1.0), rel=1e-5)
    assert (loss(1.0, 1.5) == pytest.approx(loss(1.0, 1.0), rel=1e-3)) == (not learnt)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_a_deeper_expert_computes_the_same_and_learns(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nets.expert(nets.REHEARSAL)
    save_weights(model.state_dict(), tmp_path, "low")
    deep = nets.load_expert(tmp_path, "low", nets.REHEARSAL, 5)
    latents, text = torch.randn(1, 16, 2, 4, 4), torch.randn(1, 9, nets.REHEARSAL.text_dim)
    with torch.no_grad():
        answers = [m(latents, torch.tensor([700.0]), text, return_dict=False)[0] for m in (model, deep)]
    shallow, deeper = answers
    assert len(deep.blocks) == 5 and torch.allclose(shallow, deeper, atol=1e-6)
    assert len(nets.load_expert(tmp_path, "low", nets.REHEARSAL).blocks) == nets.REHEARSAL.layers
    train_experts.shorten_text(deep)
    train_experts.loss_of(deep, cache_of(4, 0), 4, train_experts.Aim("low"))[0].backward()
    assert all(bool(block.ffn.net[2].weight.grad.abs().sum() > 0) for block in deep.blocks)


def test_words_added_later_are_read_like_those_known(tmp_path: Path) -> None:
    old = nets.text_encoder(nets.REHEARSAL)
    state = dict(old.state_dict())
    known = 3 + len(captions.first_words())
    state["shared.weight"] = state["encoder.embed_tokens.weight"] = state["shared.weight"][
        : known + (-known) % 8
    ].clone()
    save_weights(state, tmp_path, "text")
    encoder, tok = nets.load_text(tmp_path, nets.REHEARSAL).eval(), nets.tokenizer()
    ids = train_text.tokens(["a blue taxi on the sea", "a blue cab on the lake"], tok).long()
    with torch.no_grad():
        states = train_text.embed(encoder, ids)
    assert not torch.equal(ids[0], ids[1]) and torch.equal(states[0], states[1])


def test_a_cache_is_shared_through_a_file(tmp_path: Path) -> None:
    made = [cache_of(4, midway=1), cache_of(2, midway=0)]
    train_experts.save_caches(made, tmp_path / "cache.pt")
    again = train_experts.load_caches(tmp_path / "cache.pt", torch.device("cpu"))
    assert [c.midway_share for c in again] == [0.25, 0.0]
    assert torch.equal(again[0].states, made[0].states) and torch.equal(again[1].latents, made[1].latents)


def test_lessons_show_more_of_what_is_hard() -> None:
    scenes = train_experts.lessons(400, 5, train_experts.Lessons(0.5, 0.25, 0.5, usual=0.2))
    assert len(scenes) == 400 and not world.held_out(scenes).any()
    assert bool((scenes.jitter[100:, 2:4] <= 1).all()) and scenes.jitter[:100, 2:4].max() > 1.5
    codes = torch.tensor([world.SUBJECTS.index(name) for name in train_experts.HARD])
    assert 0.65 < torch.isin(scenes.subject, codes).any(1).float().mean() < 0.85
    assert len(train_experts.lessons(40, 5, train_experts.Lessons(midway=0.25))) == 40


def test_captions_for_images_come_last() -> None:
    texts = train_experts.wordings(captions.facts(world.sample(1, 3), 0), random.Random(0))
    assert len(texts) == train_experts.CAPTIONS + train_experts.IMAGE_CAPTIONS


def test_blurred_clips_have_less_contrast_at_edges() -> None:
    clip = Renderer(SIZE, 5)(world.sample(2, 4)).transpose(1, 2)
    soft = nn.functional.avg_pool3d(clip, (1, 3, 3), 1, (0, 1, 1))
    assert bool((laplacian_variance(soft) < 0.6 * laplacian_variance(clip)).all())
    assert train_vae.edge_contrast(soft).mean() < 0.8 * train_vae.edge_contrast(clip).mean()
    soft[:, :, 1:] = clip[:, :, 1:]
    assert grade.sharpness(soft)["first_to_others"] < 0.6
    assert 0.9 < grade.sharpness(clip)["first_to_others"] < 1.1


def test_a_loss_on_sharpness_asks_for_contrast() -> None:
    torch.manual_seed(0)
    model = nets.vae(nets.REHEARSAL)
    clip = Renderer(SIZE, 5)(world.sample(1, 4)).transpose(1, 2)
    losses = []
    for share in (0.0, 0.85):
        torch.manual_seed(1)
        aim = train_vae.Aim(decoder_only=True, sharp=1.0, sharpness=(share, share))
        losses.append(float(train_vae.loss_of(model, clip, aim)[0].detach()))
    assert losses[1] > losses[0]  # an untrained decoder shows no edges


def test_averaged_weights_are_saved_with_the_current_ones(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    average = training.Average(model, 0.5)
    old = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1)
    save_weights(average.state(model), tmp_path, "part")
    again = nn.Linear(3, 2)
    load_weights(again, tmp_path, "part")
    assert torch.equal(again.weight, old)
    assert [f.name for f in tmp_path.iterdir()] == ["part-0.safetensors"]


@pytest.mark.slow
def test_the_deep_compression_autoencoder_trains_and_is_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = train_dcae.autoencoder(train_dcae.REHEARSAL)
    optimiser = training.Muon(model.named_parameters(), 3e-3, 0.01, skip=("conv_in", "conv_out"))
    images = next(train_dcae.frames(4, 1, 3, torch.device("cpu")))
    assert images.shape == (4, 3, *train_dcae.CROP)
    losses = []
    for _ in range(6):
        loss, mse = train_dcae.loss_of(model, images)
        loss.backward()
        optimiser.step(1.0)
        optimiser.zero_grad()
        losses.append(float(loss.detach()))
        assert losses[-1] > float(mse.detach()) > 0
    assert losses[-1] < losses[0]
    with mock.patch.object(train_dcae, "measure", partial(train_dcae.measure, count=8)):
        train_dcae.finish(model, torch.device("cpu"), tmp_path, {"steps": 6}, 3)
    spec = read_spec(tmp_path / train_dcae.NAME, "x")
    assert (spec.title, spec.defaults.fps, spec.only_decodes) == ("Diorama DC-AE", 16, True)
    latents = load_file(tmp_path / train_dcae.CLIP)["latents"].float()
    assert latents.shape == (3, 8, 7, 12)
    # The stored decoder undoes the scale of the stored clip: its frames are those that were measured.
    again = AutoencoderDC.from_pretrained(tmp_path / train_dcae.NAME)
    assert again.config.scaling_factor == model.config.scaling_factor != 1.0
    renderer = Renderer(train_dcae.LANDSCAPE, 3, torch.device("cpu"))
    clip = renderer(world.sample(1, train_dcae.CLIP_SEED, keep="held_out", two_subjects=1.0))[0]
    with torch.no_grad():
        decoded = again.decoder(latents / again.config.scaling_factor).clamp(-1, 1)
    facts = json.loads((tmp_path / "dcae.json").read_text())
    assert facts["steps"] == 6
    assert float(train_dcae.psnr((clip - decoded).square().mean())) == pytest.approx(facts["clip_psnr"], abs=0.01)


def test_the_trained_autoencoder_is_small_enough_to_ship() -> None:
    with torch.device("meta"):
        model = train_dcae.autoencoder(train_dcae.TRUE)
    assert 2 * sum(p.numel() for p in model.parameters()) < 2_050_000


def test_the_interpolator_learns_and_its_weights_are_those_that_ship(tmp_path: Path) -> None:
    clips = Renderer(train_interpolation.SIZE, 5)(world.sample(2, 1))
    before, between, after = train_interpolation.triples(clips, 3)
    assert before.shape == between.shape == after.shape == (3, 3, *reversed(train_interpolation.CROP))
    # What lies between is more like both than they are like each other.
    apart = (before - after).square().mean()
    assert max((before - between).square().mean(), (after - between).square().mean()) < apart
    arguments = ["x", "--out", str(tmp_path), "--minutes", "0.02", "--clips", "1", "--batch", "1", "--test", "2"]
    with mock.patch("sys.argv", arguments):
        train_interpolation.main()
    trained = load_file(tmp_path / f"{train_interpolation.NAME}-0.safetensors")
    shipped = load_file(WEIGHTS)
    assert {name: (value.shape, value.dtype) for name, value in trained.items()} == {
        name: (value.shape, value.dtype) for name, value in shipped.items()
    }
