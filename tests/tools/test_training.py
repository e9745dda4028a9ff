"""Parts of the trainings: subject masks, resizing and roughness of latents, learning rates, losses."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tools.diorama import motion, nets, train_experts, train_vae, training, world
from tools.diorama.checkpoint import load_weights, save_weights
from tools.diorama.render import Renderer

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


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # autocast leaves norms in float32
@pytest.mark.parametrize("images", [0.0, 0.5])
def test_the_loss_weights_subjects_and_returns_both_errors(images: float) -> None:
    torch.manual_seed(0)
    model = nets.expert(nets.REHEARSAL)
    train_experts.shorten_text(model)
    inside = torch.zeros(4, 2, 4, 4, dtype=torch.uint8)
    inside[:, :, :2] = 1
    states = torch.randn(4, train_experts.CAPTIONS, nets.TRAIN_TEXT_LENGTH, nets.REHEARSAL.text_dim)
    ids = torch.zeros(4, train_experts.CAPTIONS, nets.TRAIN_TEXT_LENGTH, dtype=torch.int16)
    cache = train_experts.Cache(torch.randn(4, 16, 2, 4, 4).bfloat16(), ids, inside, states.bfloat16())
    loss, errors = train_experts.loss_of(model, cache, 4, "low", 3.0, images)
    expected = (3 * errors[0] + errors[1]) / 4
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-4)


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
