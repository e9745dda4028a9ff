"""The shipped model: its size, diffusers' layout, and the words that its tokenizer knows."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline
from transformers import AutoTokenizer

from tools.diorama import export, judge, nets, train_experts
from tools.diorama.checkpoint import save_weights

DIORAMA = Path(__file__).resolve().parents[2] / "runtime/models/embedded/diorama"


@pytest.fixture(scope="module")
def pipe() -> WanPipeline:
    """Load the shipped model with diffusers."""
    return WanPipeline.from_pretrained(DIORAMA, dtype=torch.float32)


def test_shipped_models_are_at_most_45_megabytes() -> None:
    assert sum(f.stat().st_size for f in DIORAMA.parent.rglob("*") if f.is_file()) <= 45e6


@pytest.mark.slow
def test_diffusers_loads_it_and_makes_a_clip(pipe: WanPipeline) -> None:
    pipe.set_progress_bar_config(disable=True)
    clip = pipe("a red boat", width=64, height=64, num_frames=5, num_inference_steps=2, output_type="pt").frames
    assert clip.shape == (1, 5, 3, 64, 64)
    assert bool(torch.isfinite(clip).all()) and clip.std() > 0.05


def test_the_schedule_is_wans(pipe: WanPipeline) -> None:
    config = pipe.scheduler.config
    assert type(pipe.scheduler).__name__ == "UniPCMultistepScheduler"
    assert config.prediction_type == "flow_prediction" and config.use_flow_sigmas
    assert pipe.config.boundary_ratio == 0.875


def test_the_tokenizer_round_trips_and_marks_unknown_words() -> None:
    shipped, made = AutoTokenizer.from_pretrained(DIORAMA / "tokenizer"), nets.tokenizer()
    text = "Two Hot-Air balloons, gently rising; it's a ZEPPELIN!"
    ids = shipped(text).input_ids
    assert ids == made(text).input_ids
    assert ids.count(shipped.unk_token_id) == 1 and ids[-1] == shipped.eos_token_id
    assert shipped.convert_ids_to_tokens(ids)[:3] == ["two", "hot", "air"]


def test_the_sidecar_has_the_fields_of_the_app() -> None:
    sidecar = json.loads((DIORAMA / "tandem.json").read_text())
    assert set(sidecar["defaults"]) >= {"width", "height", "frames", "fps", "steps", "guidance_scale"}
    assert [sidecar["defaults"]["width"], sidecar["defaults"]["height"]] in sidecar["sizes"]
    assert torch.tensor(sidecar["latent_rgb_factors"]).shape == (16, 3)
    assert torch.tensor(sidecar["latent_rgb_bias"]).shape == (3,)


@pytest.mark.slow
def test_decoding_at_once_equals_decoding_in_chunks(pipe: WanPipeline) -> None:
    clip = torch.rand(1, 3, 17, 32, 48, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        latents = pipe.vae.encode(clip).latent_dist.mean
        assert (latents - nets.encode_clip(pipe.vae, clip)[0]).abs().max() < 1e-3
        again = pipe.vae.decode(latents).sample
        assert (again - nets.decode_clip(pipe.vae, latents).clamp(-1, 1)).abs().max() < 1e-3


def test_short_text_equals_padded_text() -> None:
    torch.manual_seed(0)
    model = nets.expert(nets.REHEARSAL).eval()
    latents, text = torch.randn(1, 16, 2, 4, 4), torch.randn(1, nets.TRAIN_TEXT_LENGTH, nets.REHEARSAL.text_dim)
    text[:, 9:] = 0
    padded = torch.cat([text, text.new_zeros(1, nets.TEXT_LENGTH - text.shape[1], text.shape[2])], 1)
    with torch.no_grad():
        whole = model(latents, torch.tensor([700.0]), padded, return_dict=False)[0]
        train_experts.shorten_text(model)
        short = model(latents, torch.tensor([700.0]), text, return_dict=False)[0]
    assert (whole - short).abs().max() < 1e-4


def test_the_judge_answers_every_question() -> None:
    with torch.no_grad():
        logits = judge.Judge().eval()(torch.zeros(1, 3, 9, 112, 192))
    assert {k: v.shape[1] for k, v in logits.items()} == {
        "count": 2, "backdrop": 6, "time": 4, "weather": 3, "subject": 12, "motion": 6, "colour": 12,
    }  # fmt: skip


def test_the_sidecar_is_what_the_export_writes() -> None:
    shipped = json.loads((DIORAMA / "tandem.json").read_text())
    made = export.sidecar(shipped["latent_rgb_factors"], shipped["latent_rgb_bias"])
    # `tools.mag_ratios` adds those.
    assert set(shipped.pop("mag_ratios")) == {"transformer", "transformer_2"}
    assert shipped == made and shipped["from_images"]


def test_a_blend_lies_between_two_weights(tmp_path: Path) -> None:
    ours, theirs = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    save_weights(theirs.state_dict(), tmp_path, "part")
    expected = 0.75 * ours.weight.detach() + 0.25 * theirs.weight.detach()
    export.blend(ours, tmp_path, "part", 0.75)
    assert torch.allclose(ours.weight, expected, atol=1e-6)
