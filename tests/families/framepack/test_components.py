"""A folder of FramePack is read, and its loaded components make the latents and frames of diffusers' pipeline."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import HunyuanVideoFramepackPipeline
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from runtime.core.cancel import Cancel
from runtime.core.errors import InvalidRequestError, ModelError
from runtime.core.plan import ComponentPlan
from runtime.execution.text_encoder import PyTorchTextModel, joined
from runtime.families.framepack import components
from runtime.families.framepack.image_encoder import pixels_of
from runtime.families.framepack.spec import FAMILY, packed_tokens
from runtime.models.registry import read_spec
from runtime.models.sections import SamplingType, Sections
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_image_processor, load_module, load_scheduler, load_tokenizer
from runtime.pipeline.section_sampling import (
    Prompts,
    SectionConditioning,
    SectionedVideo,
    SectionProgress,
    finished_sections,
)
from runtime.planner.clip import check_size
from tests.families.framepack_models import pipeline

WIDTH, HEIGHT, STEPS, SEED = 48, 32, 2, 7
PROMPT = "a red boat sails left"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model."""
    saved = tmp_path_factory.mktemp("models") / "FramePackI2V"
    pipeline().save_pretrained(saved)
    return saved


def picture(seed: int) -> Image.Image:
    """Return a random image of the video's size."""
    values = np.random.default_rng(seed).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    return Image.fromarray(values)


class Loaded:
    """The components of a folder, loaded as a job loads them."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    def module(self, name: str) -> torch.nn.Module:
        """Load a component in float32."""
        part = ComponentPlan(backend="pytorch", device="cpu", dtype="float32", weights_bytes=0, reasons=())
        return load_module(self.spec, name, part)

    def text(self, prompt: str) -> torch.Tensor:
        """Return the embeddings of a prompt by both text encoders."""
        encoders = [
            components.text_encoder(
                self.spec, name, load_tokenizer(self.spec, name), PyTorchTextModel(self.module(name), "cpu")
            )
            for name in self.spec.text_encoders
        ]
        return joined([encoder.encode(prompt) for encoder in encoders]).embeds

    def conditioning(self, images: list[Image.Image], generator: torch.Generator) -> SectionConditioning:
        """Return what a video is made from."""
        model = components.image_model(self.module("image_encoder"), "cpu")
        embeds = components.image_encoder(load_image_processor(self.spec), model).encode(images[:1])
        vae = components.video_encoder(self.module("vae_encoder"), "cpu")
        first, *last = [vae.sample(pixels_of(image), generator) for image in images]
        prompts = Prompts(self.text(PROMPT))
        return SectionConditioning(lambda _: prompts, first, embeds, last[0] if last else None, guidance_scale=4.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampling_type", "last_image", "count"),
    [
        ("vanilla", False, 3),
        ("inverted_anti_drifting", True, 3),
        ("inverted_anti_drifting", False, 1),
        pytest.param("vanilla", False, 1, marks=pytest.mark.slow),
        pytest.param("inverted_anti_drifting", False, 3, marks=pytest.mark.slow),
    ],
)
def test_loaded_components_equal_the_pipeline(folder: Path, sampling_type: str, last_image: bool, count: int) -> None:
    loaded = Loaded(read_spec(folder, "framepack"))
    assert loaded.spec.section is not None
    sections = Sections(count, SamplingType(sampling_type), loaded.spec.section.latent_frames)
    images = [picture(1), picture(2)][: 1 + last_image]
    generator = torch.Generator("cpu").manual_seed(SEED)
    conditioning = loaded.conditioning(images, generator)
    denoiser = components.denoiser(loaded.module("transformer"))
    decoder = components.video_decoder(loaded.module("vae"), "cpu")
    made = list(
        finished_sections(
            SectionedVideo(sections, conditioning, load_scheduler(loaded.spec), STEPS, 0),
            SectionProgress.start(sections, conditioning.image, generator),
            lambda: nullcontext(denoiser),
            lambda: nullcontext(decoder.window),
            Cancel(),
        )
    )
    reference = HunyuanVideoFramepackPipeline.from_pretrained(folder)

    def by_pipeline(output_type: str) -> Any:
        return reference(
            image=images[0],
            last_image=images[1] if last_image else None,
            prompt=PROMPT,
            width=WIDTH,
            height=HEIGHT,
            num_frames=count * sections.overlap,
            num_inference_steps=STEPS,
            guidance_scale=4.0,
            sampling_type=sampling_type,
            generator=torch.Generator("cpu").manual_seed(SEED),
            output_type=output_type,
        ).frames

    latents = by_pipeline("latent")[-1]
    own = made[-1].progress.history
    kept = min(latents.shape[2], own.shape[2])
    if sections.inverted:
        own, latents = own[:, :, :kept], latents[:, :, :kept]
    else:
        own, latents = own[:, :, -kept:], latents[:, :, -kept:]
    assert latents.std() > 0.1
    assert abs(own - latents).max() < 1e-4
    frames = torch.full((sections.frames, HEIGHT, WIDTH, 3), torch.nan)
    for one in made:
        frames[list(one.section.frames)] = one.frames
    wanted = torch.from_numpy(by_pipeline("np")[0])
    assert abs((frames * 0.5 + 0.5).clamp(0, 1) - wanted).max() < 1e-4


def test_a_folder_is_read(folder: Path) -> None:
    spec = read_spec(folder, "framepack")
    assert spec.component_names == (
        "text_encoder",
        "text_encoder_2",
        "image_encoder",
        "vae_encoder",
        "transformer",
        "vae",
    )
    assert spec.embedded_guidance
    assert spec.flow_shift == spec.noise.shift == 7.0
    assert spec.section is not None
    assert (spec.section.latent_frames, spec.section.sampling_type) == (9, "inverted_anti_drifting")
    images = spec.image_input
    assert images is not None
    assert (images.required, images.last, images.tokens, images.width) == (True, "optional", 4, 32)
    loaded = Loaded(spec)
    for name in ("text_encoder_2", "image_encoder", "transformer", "vae"):
        assert sum(weight.numel() for weight in loaded.module(name).parameters()) == spec.parameters[name]


def test_a_clip_is_a_number_of_sections(folder: Path) -> None:
    spec = read_spec(folder, "framepack")
    assert [spec.sections(frames) for frames in (37, 73, 1801)] == [1, 2, 50]
    # Memory does not grow with the number of sections.
    assert {spec.latent_shape(frames, 64, 96) for frames in (37, 73, 1801)} == {(1, 4, 9, 8, 12)}
    assert spec.tokens(1801, 64, 96) == 9 * 4 * 6
    for frames in (37, 73, 1801):
        assert Sections(spec.sections(frames), SamplingType.VANILLA).frames == frames
        check_size(spec, 96, 64, frames)


@pytest.mark.parametrize(("frames", "able"), [(1, [37, 73]), (36, [37, 73]), (81, [73, 109]), (1800, [1765, 1801])])
def test_a_part_of_a_section_is_refused_with_the_nearest_lengths(folder: Path, frames: int, able: list[int]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_size(read_spec(folder, "framepack"), 96, 64, frames)
    assert caught.value.fact.code == "planner.frame_count"
    assert caught.value.fact.data["able"] == able


@pytest.mark.parametrize(
    ("name", "sampling_type"),
    [
        ("FramePack_F1_I2V_HY_20250503", "vanilla"),
        ("framepack-f1", "vanilla"),
        ("FramePackI2V_HY", "inverted_anti_drifting"),
        ("FramePack-f16", "inverted_anti_drifting"),
    ],
)
def test_the_order_of_sections_follows_the_name(folder: Path, tmp_path: Path, name: str, sampling_type: str) -> None:
    shutil.copytree(folder, tmp_path / name)
    spec = read_spec(tmp_path / name, "model")
    assert spec.section is not None
    assert spec.section.sampling_type == sampling_type
    assert spec.image_input is not None
    assert spec.image_input.last == ("none" if sampling_type == "vanilla" else "optional")


def test_tiles_of_an_image_equal_autoencoder_encode(folder: Path) -> None:
    reference = HunyuanVideoFramepackPipeline.from_pretrained(folder).vae
    reference.enable_tiling(32, 32, tile_sample_stride_height=24, tile_sample_stride_width=24)
    pixels = torch.rand(1, 3, 48, 64, generator=torch.Generator().manual_seed(3)) * 2 - 1
    own = components.video_encoder(Loaded(read_spec(folder, "framepack")).module("vae_encoder"), "cpu")
    with torch.no_grad():
        wanted = reference.encode(pixels[:, :, None]).latent_dist.sample(torch.Generator().manual_seed(5))
    got = own.sample(pixels, torch.Generator().manual_seed(5), tile=4)
    assert got.shape == (1, 4, 1, 6, 8)
    assert abs(got - wanted * reference.config.scaling_factor).max() < 1e-5


def test_operations_of_encoding_are_those_of_the_encoder(folder: Path) -> None:
    images = read_spec(folder, "framepack").image_input
    assert images is not None
    vae = HunyuanVideoFramepackPipeline.from_pretrained(folder).vae
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        vae.encode(torch.randn(1, 3, 1, 64, 64))
    assert counter.get_total_flops() == pytest.approx(images.vae.encode_flops(1, 64, 64), rel=0.15)


def test_tokens_are_those_of_a_pass() -> None:
    # Of 64 x 64 latents: 9 latent frames of 32 x 32 tokens, two more in full, one of 16 x 16, and 4 of 8 x 8.
    assert packed_tokens(9 * 32 * 32) == 11 * 32 * 32 + 16 * 16 + 4 * 8 * 8


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("transformer/config.json", "has_image_proj", False),
        ("transformer/config.json", "has_clean_x_embedder", False),
        ("transformer/config.json", "image_proj_dim", 16),
        ("transformer/config.json", "num_layers", 10_000),
        ("image_encoder/config.json", "hidden_size", 64),
        ("image_encoder/config.json", "num_hidden_layers", 10_000),
        ("image_encoder/config.json", "image_size", 10_000),
        ("image_encoder/config.json", "patch_size", 31),
        ("feature_extractor/preprocessor_config.json", "size", {"height": 60, "width": 60}),
        ("scheduler/scheduler_config.json", "_class_name", "UniPCMultistepScheduler"),
        ("scheduler/scheduler_config.json", "use_dynamic_shifting", True),
    ],
)
def test_a_wrong_configuration_is_refused(file: str, name: str, value: Any, folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    FAMILY.check(model, "model")
    path = model / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    for read in (FAMILY.check, read_spec):
        with pytest.raises(ModelError):
            read(model, "model")


@pytest.mark.parametrize("sampling_type", ["forward", "", False, ["vanilla"]])
def test_a_wrong_order_of_sections_is_refused(sampling_type: Any, folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    (model / "tandem.json").write_text(json.dumps({"sampling_type": sampling_type}))
    with pytest.raises(ModelError):
        FAMILY.check(model, "model")


@pytest.mark.parametrize("part", ["image_encoder", "feature_extractor", "transformer", "vae", "text_encoder_2"])
def test_a_missing_component_is_refused(part: str, folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    shutil.rmtree(model / part)
    with pytest.raises(ModelError):
        read_spec(model, "model")
