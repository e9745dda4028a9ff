"""LTX-2's components in single files: of the publishers', with the transformer, and apart, as ComfyUI has them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.core.errors import ModelError
from runtime.core.plan import ComponentPlan
from runtime.families.ltx2 import part_files
from runtime.families.ltx2.components import MODULES, latent_upsampler
from runtime.families.ltx2.spec import FAMILY
from runtime.models.catalogue import find, unusable
from runtime.models.registry import published_models
from runtime.models.single_file import reassemble
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module, load_stored
from runtime.server.cluster.transfer import bundle_files
from tests.families.ltx2.published_files import (
    PARTS,
    PREFIX,
    folder_state,
    gemma_state,
    own_names,
    part_names,
    save_combined,
    save_gemma,
)
from tests.families.ltx2.test_parity import make, planned
from tests.tiny_models import LTX2_ARCHITECTURES, LTX2_DISTILLED
from tests.transformer_files import State

Tiny = Callable[[str], ModelSpec]
FLOAT32 = ComponentPlan(backend="pytorch", device="cpu", dtype="float32", weights_bytes=0, reasons=())
KNOWN = {model.name: model for model in published_models("ltx2")}


def bare_folder(spec: ModelSpec, folder: Path) -> Path:
    """Copy a model without any weights: tokenizer, scheduler, and configurations, for tiny sizes are in no table."""
    shutil.copytree(spec.directory, folder / "base", ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def same(module: torch.nn.Module, held: State) -> bool:
    """Return whether a module has exactly these tensors."""
    state = module.state_dict()
    return state.keys() == held.keys() and all(torch.equal(state[name], tensor) for name, tensor in held.items())


@pytest.mark.parametrize("architecture", LTX2_ARCHITECTURES)
def test_a_published_file_has_all_components_but_the_text_encoder(
    architecture: str, tiny: Tiny, tmp_path: Path
) -> None:
    whole, folder = tiny(architecture), bare_folder(tiny(architecture), tmp_path)
    path, gemma = folder / "ltx-dev.safetensors", folder / "gemma.safetensors"
    save_combined(path, whole, folder_state(whole, "transformer"))
    save_gemma(gemma, gemma_state(whole), "transformers")
    spec = find("ltx-dev", folder)
    assert spec.single_files == {
        "text_encoder": gemma,
        **dict.fromkeys(("transformer", "connectors", "vae", "vae_encoder", "audio_vae", "vocoder"), path),
    }
    for name in ("transformer", *PARTS):
        assert same(load_module(spec, name, FLOAT32), folder_state(whole, name)), name
        assert same(load_stored(spec, name), folder_state(whole, name)), name
    configs = {name: spec.files[name].config for name in spec.single_files}
    assert reassemble(spec.single_files, configs, spec.directory) == spec
    # Sent to another computer once.
    assert [file for file in bundle_files(spec).values() if file in {path, gemma}] == [path, gemma]
    assert unusable(folder, {"base", "ltx-dev"}) == {}


def test_a_published_file_makes_the_same_video(tiny: Tiny, tmp_path: Path) -> None:
    whole, folder = tiny("ltx-2.3"), bare_folder(tiny("ltx-2.3"), tmp_path)
    save_combined(folder / "ltx-dev.safetensors", whole, folder_state(whole, "transformer"))
    save_gemma(folder / "gemma.safetensors", gemma_state(whole), "transformers")
    plan = planned(whole, 1.0, tmp_path, steps=2)
    # Products of a mapped file's tensors differ in their last bits: it places them elsewhere.
    for ours, theirs in zip(make(find("ltx-dev", folder), plan)[:2], make(whole, plan)[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("style", ["comfyui", "fp4_mixed", "gguf"])
def test_components_of_other_programs_are_combined(style: str, tiny: Tiny, tmp_path: Path) -> None:
    version = {"comfyui": 0, "fp4_mixed": 0, "gguf": 1}[style]
    whole = tiny(LTX2_DISTILLED[version])
    weights = bare_folder(whole, tmp_path / "weights")
    folders = {name: tmp_path / name for name in ("diffusion_models", "vae", "text_encoders", "latent_upscale_models")}
    for folder in folders.values():
        folder.mkdir()
    states = {name: folder_state(whole, name) for name in (*PARTS, "latent_upsampler", "transformer")}
    named = {name: part_names(name, states[name]) for name in (*PARTS, "latent_upsampler")}
    transformer = folders["diffusion_models"] / "ltx-distilled.safetensors"
    save_file(
        {f"{PREFIX}{name}": tensor.clone() for name, tensor in own_names(states["transformer"]).items()}, transformer
    )
    files = {
        "video.safetensors": {name.removeprefix("vae."): tensor for name, tensor in named["vae"].items()},
        "sound.safetensors": named["audio_vae"] | named["vocoder"],
    }
    for name, state in files.items():
        save_file(state, folders["vae"] / name)
    save_file(named["connectors"], folders["text_encoders"] / "connectors.safetensors")
    save_file(named["latent_upsampler"], folders["latent_upscale_models"] / "upscaler-x2.safetensors")
    gemma = folders["text_encoders"] / f"gemma.{'gguf' if style == 'gguf' else 'safetensors'}"
    held = save_gemma(gemma, gemma_state(whole), style)
    spec = find(str(transformer), weights)
    places = {name: path.name for name, path in spec.single_files.items()}
    assert places == {
        "text_encoder": gemma.name,
        "connectors": "connectors.safetensors",
        "vae_encoder": "video.safetensors",
        "transformer": transformer.name,
        "latent_upsampler": "upscaler-x2.safetensors",
        "vae": "video.safetensors",
        "audio_vae": "sound.safetensors",
        "vocoder": "sound.safetensors",
    }
    for name in (*PARTS, "latent_upsampler"):
        assert same(load_module(spec, name, FLOAT32), states[name]), name
    loaded: Any = load_module(spec, "text_encoder", FLOAT32)
    assert same(loaded.model.language_model, held)
    assert spec.refinement == whole.refinement
    statistics = latent_upsampler(spec, loaded, "cpu"), latent_upsampler(whole, loaded, "cpu")
    assert all(torch.equal(*pair) for pair in zip(*map(_tensors, statistics), strict=True))
    for path, component in ((gemma, "text_encoder"), (folders["vae"] / "sound.safetensors", "audio_vae")):
        with pytest.raises(ModelError) as refused:
            find(str(path), weights)
        assert (refused.value.code, refused.value.data["component"]) == ("model.file_is_part", component)


def _tensors(upsampler: object) -> list[torch.Tensor]:
    return [value for value in vars(upsampler).values() if isinstance(value, torch.Tensor)]


def test_what_files_lack_is_named(tiny: Tiny, tmp_path: Path, subtests: pytest.Subtests) -> None:
    whole, folder = tiny("ltx-2"), bare_folder(tiny("ltx-2"), tmp_path)
    path = folder / "ltx-dev.safetensors"
    save_combined(path, whole, folder_state(whole, "transformer"))
    with subtests.test("text encoder"), pytest.raises(ModelError) as caught:
        find("ltx-dev", folder)
    assert caught.value.code == "model.file_unfit"
    assert (caught.value.data["cause"].code, caught.value.data["cause"].data) == (
        "model.weights_missing",
        {"component": "text_encoder"},
    )
    save_gemma(folder / "gemma.safetensors", gemma_state(whole), "comfyui")
    complete = load_file(path)

    def refused(change: Callable[[State], object]) -> ModelError:
        state = dict(complete)
        change(state)
        save_file(state, path)
        with pytest.raises(ModelError) as caught:
            find("ltx-dev", folder)
        return caught.value

    cases: dict[str, tuple[Callable[[State], object], str]] = {
        "vocoder": (_without("vocoder."), "model.weights_missing"),
        "connectors": (_without(f"{PREFIX}video_emb", f"{PREFIX}audio_emb", "text_emb"), "model.weights_missing"),
    }
    for name, (change, code) in cases.items():
        with subtests.test(name):
            error = refused(change)
            assert error.data["cause"].code == code
            assert error.data["cause"].data == {"component": name}
    last = "vocoder.resblocks.2.convs2.1.weight"
    damages: dict[str, tuple[Callable[[State], object], str]] = {
        "a tensor less": (_without(last), "model.file_tensor_missing"),
        "another shape": (lambda state: state.update({last: torch.zeros(2, 2, 5)}), "model.file_other_shape"),
        "a tensor more": (lambda state: state.update({"vae.extra": torch.zeros(2)}), "model.file_tensor_unknown"),
    }
    for name, (change, code) in damages.items():
        with subtests.test(name):
            error = refused(change)
            assert error.code == code
            for line in (error.what, error.remedy):
                assert line and "\n" not in line
    with subtests.test("truncated"):
        save_file(complete, path)
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(ModelError) as caught:
            find("ltx-dev", folder)
        assert caught.value.code == "model.file_damaged"


def _without(*starts: str) -> Callable[[State], object]:
    def change(state: State) -> None:
        for name in [name for name in state if name.startswith(starts)]:
            del state[name]

    return change


def test_a_damaged_part_beside_the_transformer_is_named(tiny: Tiny, tmp_path: Path) -> None:
    whole, folder = tiny("ltx-2.3"), bare_folder(tiny("ltx-2.3"), tmp_path)
    save_combined(folder / "ltx-dev.safetensors", whole, folder_state(whole, "transformer"))
    state = gemma_state(whole)
    state.pop("layers.1.mlp.up_proj.weight")
    save_gemma(folder / "gemma.safetensors", state, "transformers")
    with pytest.raises(ModelError) as caught:
        find("ltx-dev", folder)
    assert (caught.value.code, caught.value.data["file"]) == ("model.file_tensor_missing", "gemma.safetensors")


@pytest.mark.parametrize("component", [*PARTS, "latent_upsampler"])
def test_the_sizes_of_published_components_are_known(component: str) -> None:
    configs = [model.configs[component] for model in KNOWN.values() if component in model.configs]
    candidates = [config for number, config in enumerate(configs) if config not in configs[:number]]
    for config in candidates:
        with torch.device("meta"):
            module = MODULES[component].from_config(dict(config))
        shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        part = FAMILY.part_files[component]
        assert part.config_of(shapes, candidates) == config
        assert part.parameters(config) == shapes


def test_a_component_of_another_version_does_not_fit() -> None:
    first, later = (dict(KNOWN[name].configs) for name in ("ltx-2", "ltx-2.3-distilled"))
    for component in ("vae", "vocoder", "connectors", "latent_upsampler", "audio_vae", "text_encoder"):
        fits = FAMILY.part_files[component].fits
        shared = first[component] == later[component]
        for ours, theirs in ((first, later), (later, first)):
            assert fits(ours[component], ours["transformer"])
            assert fits(ours[component], theirs["transformer"]) == shared
    # Of sizes that no published model has, none is ruled out.
    other = {**first["vae"], "block_out_channels": [8, 8, 8, 8]}
    assert part_files.of_same_version("vae", other, first["transformer"])
