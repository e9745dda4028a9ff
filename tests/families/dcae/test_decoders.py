"""Decoders of single frames: equality with diffusers and with a reference of OWL's; folders that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.core.errors import ModelError
from runtime.engines.programs import load_program
from runtime.families.dcae import load_decoder
from runtime.families.dcae.owl_programs import folded
from runtime.families.dcae.sources import spec_of
from runtime.models.registry import read_spec
from runtime.models.spec import FRAME_DECODER
from tests.families.dcae import decoders


@pytest.mark.parametrize("config", [decoders.DC, decoders.DC_BATCH_NORM, decoders.DC_INTERPOLATED])
@pytest.mark.parametrize("size", [(3, 4), (2, 3)])  # linear attention, and quadratic
@torch.no_grad()
def test_an_autoencoder_equals_diffusers(config: dict[str, Any], size: tuple[int, int], tmp_path: Path) -> None:
    model = decoders.save_autoencoder(tmp_path, config)
    z = torch.randn(5, 8, *size)
    expected = model.decode(z).sample
    decoder = load_decoder(str(tmp_path))
    assert torch.equal(decoder(z), expected)
    spec = read_spec(tmp_path, "x")
    program = load_program(spec, FRAME_DECODER, FRAME_DECODER, device="cpu", dtype="float32")
    found = program.run(latent_frames=z)["decoded_frames"]
    assert (found - expected).abs().max() / expected.abs().max() < 1e-5
    assert found.shape[2:] == spec.vae.frame_size(*size)  # type: ignore[attr-defined] # of a frame decoder
    assert spec.parameters == {FRAME_DECODER: sum(one.numel() for one in decoder.state_dict().values())}


@pytest.mark.parametrize("config", [decoders.OWL, decoders.OWL_LANDSCAPE])
@pytest.mark.parametrize("middle", [False, True])
@pytest.mark.parametrize("prefix", ["", "decoder."])
@torch.no_grad()
def test_owls_decoder_equals_its_description(config: dict[str, Any], middle: bool, prefix: str, tmp_path: Path) -> None:
    reference = decoders.save_owl(tmp_path, config, middle=middle, prefix=prefix)
    z = torch.randn(3, 8, 8, 8)
    expected = reference(z)
    found = load_decoder(str(tmp_path))(z)
    assert found.shape == expected.shape == (3, config["channels"], *config["sample_size"])
    assert (found - expected).abs().max() / expected.abs().max() < 1e-5


def test_weight_norm_is_folded_as_torch_computes_it() -> None:
    torch.manual_seed(0)
    layer = decoders.conv(4, 6, 3)
    (name,) = (name for name in folded(layer.state_dict()) if name.endswith("weight"))
    assert name == "weight"
    assert torch.allclose(folded(layer.state_dict())["weight"], layer.weight, atol=1e-7)
    # As older versions of torch name them.
    old = {"a.weight_g": layer.parametrizations.weight.original0, "a.weight_v": layer.parametrizations.weight.original1}
    assert torch.allclose(folded(old)["a.weight"], layer.weight, atol=1e-7)


def test_a_world_models_scale_is_read(tmp_path: Path) -> None:
    decoders.save_autoencoder(tmp_path / "dc")
    decoders.save_owl(tmp_path / "owl", decoders.OWL | {"vae_scale": 0.63})
    specs: list[Any] = [read_spec(tmp_path / name, name) for name in ("dc", "owl")]
    assert [spec.vae.latent_factor for spec in specs] == [2.0, 0.63]
    assert all(spec.only_decodes and spec.component_names == (FRAME_DECODER,) for spec in specs)


@pytest.mark.slow
@pytest.mark.parametrize("config", [decoders.DC, decoders.DC_BATCH_NORM, decoders.DC_INTERPOLATED])
@pytest.mark.parametrize("whole", [True, False])
@torch.no_grad()
def test_a_module_of_diffusers_is_stored_as_a_folder(config: dict[str, Any], whole: bool, tmp_path: Path) -> None:
    model = decoders.autoencoder(config)
    spec = spec_of(model if whole else model.decoder, tmp_path)
    assert spec is not None
    z = torch.randn(2, 8, 3, 4)
    assert torch.equal(load_decoder(str(spec.directory))(z), model.decode(z).sample)
    # The same weights again are the same folder; others are another.
    assert spec_of(model if whole else model.decoder, tmp_path) == spec
    other = decoders.autoencoder(config, seed=5)
    assert spec_of(other, tmp_path) != spec
    assert len(list(tmp_path.iterdir())) == 2


def test_owls_own_module_is_stored_as_a_folder(tmp_path: Path) -> None:
    class Config:
        pass

    reference: Any = decoders.Reference(decoders.OWL).eval()
    reference.config = Config()
    vars(reference.config).update(decoders.OWL)
    spec = spec_of(reference, tmp_path)
    assert spec is not None
    z = torch.randn(2, 8, 8, 8)
    with torch.no_grad():
        assert torch.allclose(load_decoder(str(spec.directory))(z), reference(z), atol=1e-5)


def test_another_module_has_no_folder(tmp_path: Path) -> None:
    assert spec_of(torch.nn.Conv2d(8, 3, 1), tmp_path) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"latent_channels": "many"}, "model.config_invalid"),
        ({"latent_channels": 0}, "model.config_invalid"),
        ({"decoder_layers_per_block": [1]}, "model.config_invalid"),
        ({"decoder_block_out_channels": [8] * 40}, "model.config_invalid"),
        ({"decoder_block_out_channels": None}, "model.config_invalid"),
        ({"scaling_factor": 0}, "model.config_invalid"),
        ({"latent_channels": 10**9}, "model.number_too_large"),
        ({"_class_name": "AutoencoderXL"}, "model.family_unknown"),
    ],
)
def test_a_wrong_configuration_is_refused(changes: dict[str, Any], code: str, tmp_path: Path) -> None:
    decoders.save_autoencoder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError) as caught:
        read_spec(tmp_path, "x")
    assert caught.value.code == code


def test_missing_and_mismatched_weights_are_refused(tmp_path: Path) -> None:
    decoders.save_autoencoder(tmp_path)
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    state = load_file(path)
    save_file({name: one for name, one in state.items() if name != "decoder.conv_in.bias"}, path)
    with pytest.raises(ModelError) as caught:
        load_decoder(str(tmp_path))
    assert caught.value.code == "model.component_incomplete"
    save_file(state | {"decoder.conv_in.bias": torch.zeros(7)}, path)
    with pytest.raises(ModelError) as caught:
        load_decoder(str(tmp_path))
    assert caught.value.code == "model.component_incomplete"
    (tmp_path / "more.pt").write_bytes(b"")
    with pytest.raises(ModelError) as caught:
        load_decoder(str(tmp_path))
    assert caught.value.code == "model.pickled"


def test_a_model_that_makes_videos_is_no_frame_decoder() -> None:
    with pytest.raises(ModelError) as caught:
        load_decoder("diorama")
    assert caught.value.code == "model.no_frame_decoder"
