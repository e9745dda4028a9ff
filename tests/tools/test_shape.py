"""The measure of subjects' shapes: silhouettes fitted to masks, and the segmenter's training."""

import pytest
import torch

from tools.diorama import segment, shape, training, world
from tools.diorama.render import Renderer

SIZE = (192, 112)


@pytest.mark.slow
def test_silhouettes_fit_subjects_and_not_ellipses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape, "CANDIDATES", 2)
    monkeypatch.setattr(shape, "STEPS", 15)
    scenes = world.sample(60, 3, keep="any", two_subjects=0)
    names = ("boat", "star", "cat")
    firsts = [int((scenes.subject[:, 0] == world.SUBJECTS.index(name)).nonzero()[0, 0]) for name in names]
    scenes = scenes[torch.tensor(firsts)]
    masks = Renderer(SIZE, 33, stride=33).masks(scenes)
    right = shape.fit(masks, scenes)
    blobs = shape.fit(shape.ellipses(masks.flatten(0, 1)).unflatten(0, masks.shape[:2]), scenes)
    assert right.iou.min() > 0.95 and right.edge.max() < 0.5
    assert blobs.iou.max() < 0.85 and blobs.edge.min() > 1
    rows = shape.table(right, scenes, torch.tensor([True, False, False]))
    assert set(rows) >= {"all", "full", "brief", *names} and rows["brief"]["clips"] == 1


def test_the_largest_region_is_kept_with_its_near_parts() -> None:
    masks = torch.zeros(2, 40, 60)
    masks[0, 5:20, 5:20] = 0.9
    masks[0, 5:20, 22:26] = 0.9  # two pixels apart
    masks[0, 30:35, 50:55] = 1.0
    kept = shape.largest(masks)
    assert torch.equal(kept[0, :25], masks[0, :25]) and not kept[0, 25:].any() and not kept[1].any()


def test_half_of_the_prompts_are_brief() -> None:
    scenes, prompts, brief = shape.requests(64)
    assert len(scenes) == len(prompts) == 64 and int(brief.sum()) == 32 and not scenes.two.any()
    full = [p for p, b in zip(prompts, brief.tolist(), strict=True) if not b]
    assert sum(map(len, full)) > 1.5 * sum(len(p) for p, b in zip(prompts, brief.tolist(), strict=True) if b)
    assert bool(world.held_out(scenes)[:12].all())


def test_masks_cover_what_the_renderer_draws_and_distort_with_it() -> None:
    torch.manual_seed(0)
    scenes = world.sample(3, 21, two_subjects=0.5)
    alone = world.Scenes(**(vars(scenes) | {"subject": torch.full_like(scenes.subject, -1)}))
    renderer = Renderer((96, 64), 9, stride=8)
    masks, frames = renderer.masks(scenes), renderer(scenes)
    seen = (frames - renderer(alone)).abs().amax(2) > 0.35
    assert (seen & (masks > 0.3)).sum() > 0.9 * seen.sum()
    warped, moved = segment.distort(frames.flatten(0, 1), masks.flatten(0, 1))
    assert warped.shape == (6, 3, 64, 96) and 0.7 < moved.sum() / masks.sum() < 1.4


@pytest.mark.slow
def test_the_segmenter_trains() -> None:
    torch.manual_seed(0)
    model = segment.Segmenter()
    optimiser = training.Muon(model.named_parameters(), 3e-3, 0.01, skip=("down.0.0", "out"))
    frames = torch.rand(4, 3, 32, 48) * 0.2 - 1
    masks = torch.zeros(4, 32, 48)
    masks[:, 8:20, 10:30] = 1
    frames[:, 0] += masks
    losses = []
    for _ in range(8):
        loss, _ = segment.loss_of(model, frames, masks)
        loss.backward()
        training.average_gradients(list(model.parameters()))
        optimiser.step(1.0)
        optimiser.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
