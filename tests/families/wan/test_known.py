"""Known models: parameter counts agree with the libraries' classes, every name finds its model."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKLWan,
    WanAnimateTransformer3DModel,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)
from safetensors.torch import load_file, save_file
from transformers import UMT5Config, UMT5EncoderModel

from runtime.core.errors import ModelError
from runtime.models.catalogue import find, folders, known_as, known_models, look_up, not_downloaded
from runtime.models.registry import published_models, read_spec
from runtime.models.spec import ModelSpec

KNOWN = published_models("wan")
Tiny = Callable[[str], ModelSpec]
NAMES = [known.name for known in KNOWN]


def weights(module: torch.nn.Module) -> int:
    """Return the number of weights, shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.slow
def test_parameter_counts_are_those_of_the_architectures(subtests: pytest.Subtests) -> None:
    counted: dict[str, int] = {}  # by class and configuration: several models have the same

    kinds = {
        kind.__name__: kind for kind in (WanTransformer3DModel, WanVACETransformer3DModel, WanAnimateTransformer3DModel)
    }

    def count(kind: type[torch.nn.Module], config: Mapping[str, Any]) -> int:
        given = {name: value for name, value in config.items() if value is not None and name != "_class_name"}
        key = f"{kind} {given}"
        if key not in counted:
            with torch.device("meta"):
                counted[key] = weights(kind(**given))
        return counted[key]

    for known in KNOWN:
        with subtests.test(known.name):
            config = known.configs["transformer"]
            kind = kinds[config.get("_class_name", "WanTransformer3DModel")]
            assert known.parameters["transformer"] == count(kind, config)
            assert known.parameters["vae"] == count(AutoencoderKLWan, known.configs["vae"])


def test_the_text_encoder_has_the_weights_of_umt5_xxl() -> None:
    config = UMT5Config(
        vocab_size=256384,
        d_model=4096,
        d_kv=64,
        d_ff=10240,
        num_layers=24,
        num_heads=64,
        feed_forward_proj="gated-gelu",
    )
    with torch.device("meta"):
        module = UMT5EncoderModel(config)
    tied = {name: parameter for name, parameter in module.named_parameters() if name != "encoder.embed_tokens.weight"}
    counted = sum(parameter.numel() for parameter in tied.values())
    assert {known.spec(Path()).parameters["text_encoder"] for known in KNOWN} == {counted}


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("wan2.2-t2v-a14b", "wan2.2-t2v-a14b"),
        ("WAN2.2-T2V-A14B", "wan2.2-t2v-a14b"),
        ("Wan-AI/Wan2.2-T2V-A14B-Diffusers", "wan2.2-t2v-a14b"),
        ("Wan2.2-T2V-A14B-Diffusers", "wan2.2-t2v-a14b"),
        ("a14b", "wan2.2-t2v-a14b"),
        ("ti2v-5B", "wan2.2-ti2v-5b"),
        ("wan2.1-1.3b", "wan2.1-t2v-1.3b"),
        ("Wan2.1-T2V-14B", "wan2.1-t2v-14b"),
    ],
)
def test_names(name: str, of: str, tmp_path: Path) -> None:
    spec = look_up(name, tmp_path)
    assert (spec.name, spec.is_downloaded, spec.license) == (of, False, "Apache-2.0")
    with pytest.raises(ModelError) as caught:
        find(name, tmp_path)
    assert caught.value.code == "model.weights_not_downloaded"
    assert caught.value.data["repository"].startswith("Wan-AI/Wan2")
    assert caught.value.data["folder"] == str(tmp_path)


def test_names_are_unique() -> None:
    for known in known_models():
        assert all(known_as(name) is known for name in known.names)
        assert all(name == name.lower() for name in known.names)
    assert known_as("wan") is None


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        look_up("no-such", tmp_path)
    assert caught.value.code == "model.unknown"
    assert {"diorama", *NAMES} <= set(caught.value.data["names"])
    with pytest.raises(ModelError) as caught:
        look_up("no/such/folder", tmp_path)
    assert caught.value.code == "model.folder_missing"
    assert caught.value.data["folder"].endswith("no/such/folder")


@pytest.mark.parametrize("folder", ["wan2.2-t2v-a14b", "Wan2.2-T2V-A14B", "Wan2.2-T2V-A14B-Diffusers"])
def test_downloaded_weights_are_found_by_every_name(folder: str, tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny("wan2.2-a14b").directory, tmp_path / folder)
    for name in ("A14B", "wan-ai/wan2.2-t2v-a14b-diffusers", folder.upper()):
        assert find(name, tmp_path).directory == tmp_path / folder
    assert "wan2.2-t2v-a14b" not in [spec.name for spec in not_downloaded(tmp_path)]
    assert len(not_downloaded(tmp_path)) == len(known_models()) - 1
    # Of another size than the published one: it keeps its own name.
    assert find("a14b", tmp_path).title == folder


def test_the_shipped_model_has_precedence(tmp_path: Path) -> None:
    assert list(folders(tmp_path)) == ["diorama"]
    assert find("Diorama", tmp_path).is_downloaded


def test_an_embedding_under_two_names_is_counted_once(tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny("wan2.1").directory, tmp_path / "twice")
    file = tmp_path / "twice" / "text_encoder" / "model.safetensors"
    tensors = load_file(file)
    names = ("shared.weight", "encoder.embed_tokens.weight")
    embedding = next(tensors[name] for name in names if name in tensors)
    save_file(tensors | {name: embedding.clone() for name in names}, file, metadata={"format": "pt"})
    assert read_spec(tmp_path / "twice", "twice").parameters == tiny("wan2.1").parameters
