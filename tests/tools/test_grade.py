"""Grading: clips from images as diffusers makes them, short prompts, and the judge that sees outlines alone."""

from pathlib import Path

import pytest
import torch
from diffusers import WanImageToVideoPipeline
from PIL import Image

from tools.diorama import export, grade, judge, nets, world
from tools.diorama.render import Renderer

SETTINGS = {"width": 64, "height": 32, "frames": 5, "steps": 3, "guidance_scale": 4.0, "guidance_scale_2": 3.0}


@pytest.mark.filterwarnings("ignore:`torch_dtype` is deprecated")
def test_a_batch_of_images_equals_diffusers_one_by_one(tmp_path: Path) -> None:
    export.export(tmp_path / "model", sizes=nets.REHEARSAL)
    pipe, _ = grade.load(tmp_path / "model", torch.device("cpu"))
    pictures = grade.images(world.sample(2, 5), SETTINGS, torch.device("cpu"))
    prompts = ["the boat sails left", "it rises"]
    many = grade.generate(grade.with_images(pipe), prompts, 7, SETTINGS, 2, pictures)
    boundary = pipe.config.boundary_ratio
    single = WanImageToVideoPipeline(**pipe.components, boundary_ratio=boundary, expand_timesteps=True)
    single.set_progress_bar_config(disable=True)
    for i, prompt in enumerate(prompts):
        raw = ((pictures[i] + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).numpy()
        clip = single(
            Image.fromarray(raw), prompt, negative_prompt="", width=64, height=32, num_frames=5, num_inference_steps=3,
            guidance_scale=4.0, guidance_scale_2=3.0, generator=torch.Generator().manual_seed(7 + i), output_type="pt",
        ).frames[0]  # fmt: skip
        assert (clip.transpose(0, 1) * 2 - 1 - many[i]).abs().max() < 1e-4


@pytest.mark.filterwarnings("ignore:`torch_dtype` is deprecated")
def test_settings_of_clips_from_images(tmp_path: Path) -> None:
    torch.manual_seed(0)
    export.export(tmp_path / "model", sizes=nets.REHEARSAL)
    pipe, defaults = grade.load(tmp_path / "model", torch.device("cpu"))
    for own, scale in (({}, 1), ({"image_guidance_scale": 2.0}, 2)):
        assert grade.image_setting(pipe, defaults | own, "default")[1]["guidance_scale"] == scale
    pictures, clips = grade.images(world.sample(1, 5), SETTINGS, torch.device("cpu")), {}
    for spec in ("4,3", "1,1", "image,1.001,1.001", "image,4,3"):
        chosen_pipe, chosen = grade.image_setting(pipe, SETTINGS, spec)
        clips[spec] = grade.generate(chosen_pipe, ["it rises"], 7, chosen, 1, pictures)
    # A scale of almost 1 leaves the pass with the image and the prompt, whatever the other pass is.
    assert (clips["image,1.001,1.001"] - clips["1,1"]).abs().max() < 1e-4
    assert (clips["image,4,3"] - clips["1,1"]).abs().max() > 1e-2
    assert (clips["4,3"] - clips["1,1"]).abs().max() > 2e-4


def test_pictures_are_first_frames_in_bytes() -> None:
    scenes = world.sample(2, 6)
    pictures = grade.images(scenes, SETTINGS, torch.device("cpu"))
    first = Renderer((64, 32), 5)(scenes)[:, 0]
    assert (pictures - first).abs().max() < 1 / 127 / 2 + 1e-3
    levels = (pictures + 1) * 127.5
    assert (levels - levels.round()).abs().max() < 1e-3
    clips = first[:, :, None].repeat(1, 1, 5, 1, 1)
    assert grade.likeness(clips, pictures)["worst"] > 50


def test_short_prompts_name_the_subject_and_the_motion() -> None:
    scenes, prompts = grade.requests(40, 5)
    short = [grade.short_prompt(scenes, i) for i in range(40)]
    assert "the boat sails right" in short
    assert all(len(a.split()) < len(b.split()) for a, b in zip(short, prompts, strict=True))


@pytest.mark.slow
def test_outlines_do_not_depend_on_colour() -> None:
    torch.manual_seed(0)
    model = judge.Judge(outlines=True).eval()
    clip = torch.rand(1, 3, 9, 112, 192) - 0.5
    grey = (clip * torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1, 1)).sum(1, keepdim=True)
    with torch.no_grad():
        seen, plain = model(clip), model(grey.expand(-1, 3, -1, -1, -1))
        dark = model(grey.expand(-1, 3, -1, -1, -1) - 0.3)
    for name in grade.READS["outlines"]:
        assert torch.allclose(seen[name], plain[name], atol=1e-3) and torch.allclose(seen[name], dark[name], atol=1e-3)


def test_each_judge_has_its_columns() -> None:
    torch.manual_seed(0)
    scenes, _ = grade.requests(8)
    models = {name: judge.Judge(outlines).eval() for name, outlines in judge.KINDS.items()}
    right = grade.read(models, torch.rand(8, 3, 33, 28, 48) * 2 - 1, scenes, torch.device("cpu"))
    assert set(right) == {f"{name} {attribute}" for name, row in grade.READS.items() for attribute in row}
    rows = grade.table(right, grade.groups(scenes))
    assert rows["held_out"]["count"] == 3 and 0 <= rows["all"]["outlines everything"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["judge", "outlines"])
def test_a_judge_learns_from_a_step(name: str) -> None:
    torch.manual_seed(0)
    model = judge.Judge(judge.KINDS[name])
    scenes = world.sample(4, 2)
    clips = Renderer((48, 28), judge.FRAMES, stride=judge.STRIDE)(scenes).transpose(1, 2)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = [float(judge.train_step(model, optimiser, clips, scenes)) for _ in range(4)]
    assert losses[-1] < losses[0]
