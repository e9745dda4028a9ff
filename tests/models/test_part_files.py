"""Text encoders and VAEs in single files, combined with a transformer's."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from runtime.core.errors import ModelError, TandemError
from runtime.core.events import VideoSaved
from runtime.core.plan import ComponentPlan
from runtime.execution.residency import Residency
from runtime.models.catalogue import delete_files, find, own_files, stored_bytes, unusable
from runtime.models.single_file import reassemble
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module, load_stored
from tests import part_files, transformer_files
from tests.pipeline.runs import events_of
from tests.plans import tiny_plan

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
