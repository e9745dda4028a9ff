"""Reading model folders, and refusing damaged or unsupported ones."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch.utils.flop_counter import FlopCounterMode

from runtime.core.errors import ModelError
from runtime.models.catalogue import find, folders
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_scheduler
from tests.tiny_models import ARCHITECTURES, VAES

Tiny = Callable[[str], ModelSpec]


@pytest.mark.parametrize(
    ("architecture", "experts", "channels", "strides", "expand"),
    [
        ("wan2.1", 1, 16, (16, 16), False),
        ("wan2.2-a14b", 2, 16, (16, 16), False),
        ("wan2.2-ti2v-5b", 1, 48, (32, 32), True),
    ],
)
def test_architectures_are_distinguished(
    architecture: str, experts: int, channels: int, strides: tuple[int, int], expand: bool, tiny: Tiny
) -> None:
    spec = tiny(architecture)
    assert (spec.experts, spec.vae.z_dim, spec.strides, spec.expand_timesteps) == (experts, channels, strides, expand)
    assert spec.boundary_ratio == (0.875 if experts > 1 else None)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_parameters_are_counted_from_the_files(architecture: str, tiny: Tiny) -> None:
    spec = tiny(architecture)
    module = WanTransformer3DModel.from_pretrained(spec.directory, subfolder="transformer")
    assert spec.parameters["transformer"] == sum(p.numel() for p in module.parameters())


def test_operations_of_a_forward_pass_equal_torchs_count(tiny: Tiny) -> None:
    spec = tiny("wan2.1")
    module = WanTransformer3DModel.from_pretrained(spec.directory, subfolder="transformer").eval()
    tokens, width = spec.tokens(frames=9, height=96, width=160), spec.transformer.width
    for block in module.blocks:
        # Not every CPU kernel of attention reports its operations: they are added by hand.
        block.attn1.processor = block.attn2.processor = ProjectionsOnly()
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        module(torch.randn(spec.latent_shape(frames=9, height=96, width=160)), torch.ones(1), torch.randn(1, 512, 32))
    attention = spec.transformer.num_layers * 4 * tokens * width * (tokens + 512)
    # What comes before and after the blocks is left out of the estimate: a few percent in so tiny a model.
    assert spec.transformer.forward_flops(tokens, 512) == pytest.approx(counter.get_total_flops() + attention, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", VAES)
def test_operations_of_decoding_equal_torchs_count(architecture: str, tiny: Tiny) -> None:
    spec = tiny(architecture)
    vae = AutoencoderKLWan.from_pretrained(spec.directory, subfolder="vae").eval()
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        vae.decode(torch.randn(spec.latent_shape(frames=9, height=96, width=160)))
    assert spec.vae.decode_flops(9, 96, 160) == pytest.approx(counter.get_total_flops(), rel=0.25)


class ProjectionsOnly:
    """An attention processor without the attention."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, *_):  # type: ignore[no-untyped-def]
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        value = attn.to_v(source).mean() + attn.to_k(source).mean()
        return attn.to_out[0](attn.to_q(hidden_states) + value)


def test_a_sidecar_adds_values_that_configs_lack(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("wan2.1").directory, folder)
    sidecar: dict[str, Any] = {
        "title": "Mine",
        "license": "MIT",
        "defaults": {"width": 64, "height": 32, "frames": 9, "fps": 8, "steps": 4, "guidance_scale": 2.0},
        "sizes": [[64, 32]],
        "frame_counts": [5, 9],
        "latent_rgb_factors": [[0.1, 0.2, 0.3]] * 16,
        "latent_rgb_bias": [0.0, 0.0, 0.0],
    }
    (folder / "tandem.json").write_text(json.dumps(sidecar))
    spec = read_spec(folder, "mine")
    assert (spec.title, spec.license, spec.defaults.steps, spec.sizes) == ("Mine", "MIT", 4, ((64, 32),))
    assert spec.latent_rgb is not None
    assert spec.defaults.guidance(from_image=True) == (2.0, None)
    other = {"image_guidance_scale": 1.5, "image_guidance_scale_2": 3.0}  # of two transformers; this model has one
    (folder / "tandem.json").write_text(json.dumps(sidecar | {"defaults": sidecar["defaults"] | other}))
    defaults = read_spec(folder, "mine").defaults
    assert (defaults.guidance(from_image=True), defaults.guidance(from_image=False)) == ((1.5, None), (2.0, None))
    ratios = {"transformer": [1.0, 0.5]}
    (folder / "tandem.json").write_text(json.dumps(sidecar | {"mag_ratios": ratios}))
    assert read_spec(folder, "mine").mag_ratios == {"transformer": (1.0, 0.5)}
    bad: Any
    for bad in ({"vae": [1.0]}, {"transformer": []}, {"transformer": [0.0]}, ratios | {"transformer_2": [1.0]}, [1.0]):
        (folder / "tandem.json").write_text(json.dumps(sidecar | {"mag_ratios": bad}))
        with pytest.raises(ModelError):
            read_spec(folder, "mine")
    (folder / "tandem.json").write_text("[]")
    with pytest.raises(ModelError) as refused:
        read_spec(folder, "mine")
    assert Path(refused.value.data["file"]).name == "tandem.json"


@pytest.mark.parametrize(
    ("architecture", "kind", "required", "last", "tokens"),
    [
        ("wan2.2-ti2v-5b", "first_frame", False, "none", 0),
        ("wan2.2-i2v-a14b", "channels", True, "optional", 0),
        ("wan2.1-i2v", "channels", True, "none", 5),
        ("wan2.1-flf2v", "channels", True, "required", 10),
    ],
)
def test_how_models_start_from_images(
    architecture: str, kind: str, required: bool, last: str, tokens: int, tiny: Tiny
) -> None:
    spec = tiny(architecture)
    found = spec.image_input
    assert found is not None
    assert (found.kind, found.required, found.last, found.tokens) == (kind, required, last, tokens)
    with_clip = ("image_encoder",) if tokens else ()
    assert spec.component_names[:-1] == (
        "text_encoder", *with_clip, "vae_encoder", *("transformer", "transformer_2")[: spec.experts]
    )  # fmt: skip
    assert 0 < spec.parameters["vae_encoder"] < spec.parameters["vae"]
    assert spec.for_text().component_names == tuple(
        name for name in spec.component_names if name not in {"image_encoder", "vae_encoder"}
    )


def test_a_model_of_text_takes_no_images(tiny: Tiny) -> None:
    for architecture in ("wan2.1", "wan2.2-a14b"):
        assert tiny(architecture).image_input is None
        assert "vae_encoder" not in tiny(architecture).component_names


@pytest.mark.parametrize(
    ("config", "change", "code"),
    [
        ("transformer", {"in_channels": 35}, "model.channels_differ"),
        ("transformer", {"pos_embed_seq_len": 9}, "model.config_invalid"),
        ("image_encoder", {"hidden_size": 25}, "model.config_invalid"),
        ("image_encoder", {"image_size": 10**7}, "model.number_too_large"),
        ("image_encoder", {"patch_size": 0}, "model.config_invalid"),
        ("image_encoder", None, "model.file_missing"),
        ("image_processor", None, "model.file_missing"),
    ],
)
def test_a_broken_image_model_is_refused(
    config: str, change: dict[str, int] | None, code: str, tiny: Tiny, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("wan2.1-i2v").directory, folder)
    path = folder / config / ("preprocessor_config.json" if config == "image_processor" else "config.json")
    if change is None:
        path.unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError) as refused:
        read_spec(folder, "i2v")
    assert refused.value.code == code


def test_sharded_weights_are_counted_and_must_exist(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("wan2.1").directory, folder)
    module = WanTransformer3DModel.from_pretrained(folder, subfolder="transformer")
    shutil.rmtree(folder / "transformer")
    module.save_pretrained(folder / "transformer", max_shard_size="40KB")
    shards = sorted((folder / "transformer").glob("*-of-*.safetensors"))
    assert len(shards) > 1
    assert read_spec(folder, "x").parameters == tiny("wan2.1").parameters
    shards[0].unlink()
    with pytest.raises(ModelError) as refused:
        read_spec(folder, "x")
    assert refused.value.code == "model.file_unreadable"


def test_an_unknown_scheduler_is_named(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("wan2.1").directory, folder)
    for name in ("WanPipeline", "NoSuchScheduler"):
        (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps({"_class_name": name}))
        with pytest.raises(ModelError) as refused:
            load_scheduler(read_spec(folder, "x"))
        assert (refused.value.code, refused.value.data["scheduler"]) == ("model.scheduler_unknown", name)


@pytest.mark.parametrize("name", ["UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler"])
def test_dynamic_shifting_is_refused(name: str, tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny("wan2.1").directory, tmp_path / "model")
    config = {"_class_name": name, "use_dynamic_shifting": True}
    (tmp_path / "model" / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as refused:
        read_spec(tmp_path / "model", "x")
    assert refused.value.code == "model.dynamic_shifting"


def test_models_in_the_weights_folder_are_found_by_name(tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny("wan2.1").directory, tmp_path / "mine")
    assert "diorama" in folders(tmp_path)
    assert find("mine", tmp_path).directory == tmp_path / "mine"
    assert find(str(tmp_path / "mine"), Path("none")).name == "mine"
