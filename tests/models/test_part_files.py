"""Text encoders and VAEs in single files, combined with a transformer's."""

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file, save_file
from transformers import CLIPVisionModel

from runtime.cli.main import run
from runtime.core.errors import ModelError, TandemError
from runtime.core.events import VideoSaved
from runtime.core.plan import ComponentPlan
from runtime.execution.residency import Residency
from runtime.families.wan import part_files as wan_files
from runtime.models.catalogue import delete_files, find, own_files, stored_bytes, unusable
from runtime.models.registry import published_models, read_spec
from runtime.models.single_file import reassemble
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module, load_stored
from tests import part_files, transformer_files
from tests.pipeline.runs import events_of
from tests.plans import tiny_plan

KNOWN = published_models("wan")
Tiny = Callable[[str], ModelSpec]
FLOAT32 = ComponentPlan(backend="pytorch", device="cpu", dtype="float32", weights_bytes=0, reasons=())


@pytest.fixture
def weights(tiny: Tiny, tmp_path: Path) -> Path:
    """A weights folder with a transformer's file, and a model's folder without text encoder and VAE."""
    folder = tmp_path / "weights"
    shutil.copytree(tiny("wan2.1").directory, folder / "base")
    for part in ("text_encoder", "transformer"):
        shutil.rmtree(folder / "base" / part)
    # Its configuration has the tiny VAE's sizes, which are those of no published one.
    (folder / "base" / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    (folder / "base" / "vae" / "config.json").write_text(json.dumps(dict(part_files.vae().config)))
    transformer_files.save_plain(
        folder / "wan.safetensors", dict(transformer_files.wide_transformer().state_dict()), torch.float16
    )
    return folder


def same(module: torch.nn.Module, held: dict[str, Any]) -> bool:
    found = dict(module.named_parameters())
    return found.keys() == held.keys() and all(
        torch.allclose(found[name], tensor.float(), rtol=0, atol=1e-6) for name, tensor in held.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("style", ["comfyui", "wan", "gguf"])
def test_parts_in_single_files_are_combined(style: str, weights: Path) -> None:
    folder = weights / "text_encoders"
    folder.mkdir()
    path = folder / f"umt5.{'gguf' if style == 'gguf' else 'safetensors'}"
    held = {
        "text_encoder": part_files.save_text_encoder(path, part_files.weights(part_files.text_encoder()), style),
        "vae": part_files.weights(part_files.vae()),
    }
    save_file(part_files.original_vae_names(held["vae"]), weights / "wan_vae.safetensors")
    # Of another width, for another model.
    other = part_files.weights(part_files.text_encoder(64))
    part_files.save_text_encoder(weights / "a.safetensors", other, "wan")
    spec = find("wan", weights)
    assert spec.single_files["text_encoder"] == path
    assert spec.directory == weights / "base"
    for name, own in held.items():
        assert same(load_module(spec, name, FLOAT32), own)
        assert same(load_stored(spec, name), own)
        assert spec.parameters[name] == sum(tensor.numel() for tensor in own.values())
    configs = {name: spec.files[name].config for name in spec.single_files}
    assert reassemble(spec.single_files, configs, spec.directory) == spec
    # Parts are no models of their own.
    assert unusable(weights, {"base", "wan"}) == {}
    with pytest.raises(ModelError) as refused:
        find(str(path), weights)
    assert refused.value.code == "model.file_is_part"
    assert refused.value.remedy
    if style == "gguf":
        with Residency() as residency:
            events = list(events_of(tiny_plan(spec, weights / "x.mp4"), spec, residency))
        assert isinstance(events[-1], VideoSaved), events[-1]


def test_an_image_encoder_in_a_file_embeds_as_its_folder(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    shutil.copytree(tiny("wan2.1-i2v").directory, folder / "base")
    encoder = CLIPVisionModel.from_pretrained(folder / "base" / "image_encoder").eval()
    shutil.rmtree(folder / "base" / "transformer")
    (folder / "base" / "image_encoder" / "model.safetensors").unlink()
    text = json.loads((folder / "base" / "text_encoder" / "config.json").read_text())
    sizes = {"in_channels": 36, "image_dim": 24, "added_kv_proj_dim": 256, "text_dim": text["d_model"]}
    transformer = transformer_files.wide_transformer(**sizes)
    transformer_files.save_plain(folder / "wan.safetensors", dict(transformer.state_dict()), torch.float16)
    (tmp_path / "clip_vision").mkdir()
    path = tmp_path / "clip_vision" / "clip_vision_h.safetensors"
    # As ComfyUI's: with the prefix of transformers before release 5, and the layer after the model.
    file = {f"vision_model.{name.removeprefix('vision_model.')}": own for name, own in encoder.state_dict().items()}
    beside = {"visual_projection.weight": torch.ones(8, 24), "vision_model.embeddings.position_ids": torch.arange(5)}
    save_file(file | beside, path)
    spec = find("wan", folder)
    assert spec.single_files["image_encoder"] == path
    assert spec.parameters["image_encoder"] == sum(own.numel() for own in encoder.parameters())
    loaded: Any = load_module(spec, "image_encoder", FLOAT32)
    pixels = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        states = [one(pixels, output_hidden_states=True).hidden_states[-2] for one in (loaded, encoder)]
    assert torch.equal(*states)
    with pytest.raises(ModelError) as refused:
        find(str(path), folder)
    assert (refused.value.code, refused.value.data["component"]) == ("model.file_is_part", "image_encoder")
    # Without one layer it is damaged.
    save_file({name: own for name, own in file.items() if "layers.2.mlp.fc2.bias" not in name}, path)
    with pytest.raises(ModelError) as damaged:
        find("wan", folder)
    assert damaged.value.fact.code == "model.file_tensor_missing"


WIDE = {"in_channels": 48, "out_channels": 48}


@pytest.fixture(scope="module")
def made(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of `large`."""
    place = tmp_path_factory.mktemp("large")
    folder, whole = place / "weights", place / "whole"
    transformer = transformer_files.wide_transformer(**WIDE).half().float()
    shutil.copytree(tiny("wan2.2-ti2v-5b").directory, whole)
    vae = AutoencoderKLWan.from_pretrained(whole / "vae")
    vae.load_state_dict(part_files.weights(vae))
    for name, module in (("transformer", transformer), ("vae", vae)):
        shutil.rmtree(whole / name)
        module.save_pretrained(whole / name)
    shutil.copytree(whole, folder / "base")
    shutil.rmtree(folder / "base" / "transformer")
    (folder / "base" / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    transformer_files.save_plain(folder / "wan.safetensors", dict(transformer.state_dict()), torch.float32)
    save_file(part_files.original_vae_22_names(dict(vae.state_dict())), folder / "Wan2.2_VAE.safetensors")
    return place


@pytest.fixture
def large(made: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A weights folder with Wan2.2-TI2V-5B at tiny size, whose VAE is a file; and the same in diffusers' format."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path / "weights", tmp_path / "whole"


@pytest.mark.slow
def test_the_vae_of_wan_2_2_in_a_file_encodes_and_decodes_as_its_folder(large: tuple[Path, Path]) -> None:
    folder, whole = large
    spec, expected = find("wan", folder), read_spec(whole, "whole")
    assert spec.single_files["vae"] == folder / "Wan2.2_VAE.safetensors"
    assert spec.vae == expected.vae
    assert spec.parameters["vae"] == expected.parameters["vae"]
    held = dict(AutoencoderKLWan.from_pretrained(whole / "vae").state_dict())
    assert same(load_module(spec, "vae", FLOAT32), held)
    modules: list[Any] = [load_module(one, "vae", FLOAT32) for one in (spec, expected)]
    own, other = modules
    assert own.config.latents_mean == other.config.latents_mean
    clip, latents = torch.randn(1, 3, 9, 64, 64), torch.randn(1, 48, 3, 4, 4)
    with torch.no_grad():
        encoded = [module.encode(clip).latent_dist.mode() for module in (own, other)]
        decoded = [module.decode(latents).sample for module in (own, other)]
    assert torch.equal(*encoded)
    assert torch.equal(*decoded)
    assert decoded[0].std() > 0.01
    frames: list[np.ndarray] = []
    for model in (spec, replace(expected, image_input=spec.image_input, expand_timesteps=spec.expand_timesteps)):
        parts: list[np.ndarray] = []
        with Residency() as residency:
            plan = tiny_plan(model, whole.parent / f"{model.name}.mp4", seed=5)
            events = list(events_of(plan, model, residency, on_frames=lambda part: parts.append(part.copy())))  # noqa: B023 - called now
        assert isinstance(events[-1], VideoSaved), events[-1]
        frames.append(np.concatenate(parts))
    assert np.array_equal(frames[0], frames[1])


@pytest.mark.parametrize(
    ("names", "config"),
    [(part_files.original_vae_names, known.configs["vae"]) for known in KNOWN if known.name == "wan2.1-t2v-14b"]
    + [(part_files.original_vae_22_names, known.configs["vae"]) for known in KNOWN if known.name == "wan2.2-ti2v-5b"],
)
def test_published_vaes_are_recognised_without_a_folder(names: Any, config: dict[str, Any]) -> None:
    with torch.device("meta"):
        vae = AutoencoderKLWan(**config)
    original = names(dict(vae.state_dict()))
    assert not set(original) & set(vae.state_dict())
    renamed = wan_files.vae_names(list(original))
    shapes = {renamed[name]: tuple(tensor.shape) for name, tensor in original.items()}
    assert shapes == {name: tuple(tensor.shape) for name, tensor in vae.state_dict().items()}
    published = [known.configs["vae"] for known in KNOWN]
    assert wan_files.vae_config(shapes, published) == config
    assert wan_files.vae_parameters(config) == shapes
    assert len(config.get("latents_mean", vae.config.latents_mean)) == config["z_dim"]


TENSOR = "decoder.upsamples.0.upsamples.0.residual.2.weight"


def _change_header(path: Path, change: Callable[[list[int]], object]) -> None:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header[TENSOR]["shape"])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def _turned(shape: list[int]) -> None:
    shape[0], shape[1] = 2 * shape[0], shape[1] // 2


def _larger(shape: list[int]) -> None:
    shape[0] *= 2


def _save_changed(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    state = load_file(path)
    change(state)
    save_file(state, path)


def _pickle(path: Path) -> None:
    torch.save(load_file(path), path.with_suffix(".pth"))
    path.unlink()


BAD_VAES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "model.file_damaged"),
    "cut in its header": (lambda path: path.write_bytes(path.read_bytes()[:100]), "model.file_no_format"),
    "empty": (lambda path: path.write_bytes(b""), "model.file_damaged"),
    "another shape of the same size": (lambda path: _change_header(path, _turned), "model.file_other_shape"),
    "a shape that is too large": (lambda path: _change_header(path, _larger), "model.tensors_invalid"),
    "a tensor less": (
        lambda path: _save_changed(path, lambda state: state.pop(TENSOR)),
        "model.file_tensor_missing",
    ),
    "a tensor more": (
        lambda path: _save_changed(path, lambda state: state.update(more=torch.zeros(1))),
        "model.file_tensor_unknown",
    ),
    "pickle": (lambda path: path.write_bytes(pickle.dumps({})), "model.pickled"),
    "pickle with its own name": (_pickle, "model.pickled"),
}


@pytest.mark.parametrize("name", BAD_VAES)
def test_a_bad_vae_is_refused(name: str, large: tuple[Path, Path]) -> None:
    folder, _ = large
    change, code = BAD_VAES[name]
    change(folder / "Wan2.2_VAE.safetensors")
    (given,) = folder.glob("Wan2.2_VAE*")
    with pytest.raises(ModelError) as refused:
        find("wan", folder)
    assert refused.value.code == code
    for message in (refused.value.what, refused.value.remedy):
        assert message and "\n" not in message
    assert "Wan2.2_VAE" in refused.value.what
    with pytest.raises(ModelError) as alone:
        find(str(given), folder)
    assert alone.value.remedy


def test_a_bad_vae_is_refused_by_commands_before_anything_runs(
    large: tuple[Path, Path], cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = large
    change, code = BAD_VAES["a tensor less"]
    change(folder / "Wan2.2_VAE.safetensors")
    cache_dir.mkdir()
    folder.rename(cache_dir / "weights")
    for command in ("plan", "generate"):
        assert run([command, "a red boat", "--model", "wan", "--json"]) == 2
        out, err = capsys.readouterr()
        what, to_do = err.strip().splitlines()
        assert what.startswith("Error: ") and "Wan2.2_VAE" in what
        assert to_do.startswith("To do: ")
        assert json.loads(out.splitlines()[-1])["error"]["code"] == code
    given = next(path for path in (cache_dir / "weights").glob("Wan2.2_VAE*"))
    assert run(["plan", "a red boat", "--model", str(given), "--json"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 2


def test_a_vae_alone_makes_no_videos(large: tuple[Path, Path]) -> None:
    with pytest.raises(ModelError) as refused:
        find(str(large[0] / "Wan2.2_VAE.safetensors"), large[0])
    assert (refused.value.code, refused.value.data["component"]) == ("model.file_is_part", "vae")


def test_invalid_configurations_of_installed_vaes_are_passed_over(
    large: tuple[Path, Path], subtests: pytest.Subtests
) -> None:
    folder, _ = large
    other = folder / "a"
    shutil.copytree(folder / "base", other)
    config = other / "vae" / "config.json"
    valid = json.loads(config.read_text())
    wrong: list[dict[str, Any]] = [{"num_res_blocks": 10**9}, {"base_dim": "4"}, {"dim_mult": 3}, {"z_dim": None}, {}]
    for values in wrong:
        with subtests.test(values=values):
            config.write_text(json.dumps(valid | values if values else {}))
            assert find("wan", folder).files["vae"].config["latents_std"] == [1.5] * 48


BAD = {
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-9]), {"model.file_damaged"}),
    "pickle": (lambda path: path.write_bytes(pickle.dumps({})), {"model.pickled"}),
    "no layer": (
        lambda path: part_files.save_text_encoder(path, _without(".wo."), "wan"),
        {"model.file_tensor_missing"},
    ),
    "shape": (
        lambda path: part_files.save_text_encoder(path, _without("", "layer.1.layer_norm"), "wan"),
        {"model.file_other_shape"},
    ),
}


def _without(name: str, shortened: str = "-") -> dict[str, torch.Tensor]:
    state = part_files.weights(part_files.text_encoder())
    found = {one: tensor for one, tensor in state.items() if not name or f"1.layer.1.DenseReluDense{name}" not in one}
    return {one: tensor[:-1] if shortened in one else tensor for one, tensor in found.items()}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_in_one_line(case: str, weights: Path) -> None:
    path = weights / "umt5.safetensors"
    part_files.save_text_encoder(path, part_files.weights(part_files.text_encoder()), "wan")
    change, codes = BAD[case]
    change(path)
    with pytest.raises(TandemError) as refused:
        find(str(path), weights)
    assert refused.value.code in codes
    assert refused.value.remedy
    # The transformer then lacks a text encoder.
    with pytest.raises(TandemError) as lacking:
        find("wan", weights)
    assert lacking.value.code.startswith("model.")


def test_a_models_own_files_are_deleted(weights: Path) -> None:
    state = dict(transformer_files.wide_transformer().state_dict())
    for expert in ("high", "low"):
        transformer_files.save_plain(weights / f"x-{expert}-noise.safetensors", state, torch.float16)
    size = (weights / "x-low-noise.safetensors").stat().st_size
    assert [path.name for path in own_files("x", weights)] == ["x-high-noise.safetensors", "x-low-noise.safetensors"]
    assert delete_files("x", weights) == 2 * size
    assert own_files("x", weights) == []
    assert (weights / "wan.safetensors").exists()
    assert delete_files("base", weights) == 0


def test_sizes_of_models(tiny: Tiny) -> None:
    spec = tiny("wan2.1")
    assert stored_bytes(spec) == sum(path.stat().st_size for path in spec.directory.rglob("*") if path.is_file())
