"""Which files of a repository are listed, and which repositories are refused."""

from typing import Any

import pytest
from huggingface_hub import ModelInfo

from runtime.core.errors import DownloadError
from runtime.core.facts import Fact
from runtime.models.hub.files import RemoteFile, read_listing

LOADED = (
    "model_index.json",
    "scheduler/scheduler_config.json",
    "tokenizer/tokenizer.json",
    "tokenizer/spiece.model",
    "text_encoder/config.json",
    "text_encoder/model.safetensors.index.json",
    "text_encoder/model-00001-of-00002.safetensors",
    "text_encoder/model-00002-of-00002.safetensors",
    "transformer/config.json",
    "transformer/diffusion_pytorch_model.safetensors",
    "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors",
)
NOT_LOADED = (
    "README.md",
    ".gitattributes",
    "assets/logo.png",
    "text_encoder/model.safetensors",
    "text_encoder/pytorch_model.bin",
    "transformer/diffusion_pytorch_model.fp16.safetensors",
    "transformer/diffusion_pytorch_model.fp16.safetensors.index.json",
    "transformer/modeling.py",
    "transformer/deeper/config.json",
    "vae/config.json -> ..",
    "vae/.hidden.json",
    "tokenizer/tokenizer.pkl",
    "safety_checker/model.safetensors",
)


def entry(path: str, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"rfilename": path, "size": 10, "blobId": "a" * 40}
    if path.endswith((".safetensors", ".bin")):
        found["lfs"] = {"size": 1000, "sha256": "b" * 64, "pointerSize": 130}
    return found | changes


def info(*paths: str, **changes: Any) -> ModelInfo:
    return ModelInfo(**({"id": "a/b", "sha": "c" * 40, "siblings": [entry(path) for path in paths]} | changes))


def test_only_files_that_are_loaded_are_listed_small_ones_first() -> None:
    listing = read_listing("a/b", info(*NOT_LOADED, *reversed(LOADED)))
    assert [file.path for file in listing.files[:1]] == ["model_index.json"]
    assert {file.path for file in listing.files} == set(LOADED)
    weights = [file.is_weights for file in listing.files]
    assert weights == sorted(weights)
    assert listing.total_bytes == 8 * 10 + 4 * 1000
    assert RemoteFile(path="vae/config.json", size=10, digest="git:" + "a" * 40) in listing.files
    assert (
        RemoteFile(path="vae/diffusion_pytorch_model.safetensors", size=1000, digest="sha256:" + "b" * 64)
        in listing.files
    )


@pytest.mark.parametrize(
    ("answer", "license_name"),
    [
        ({"cardData": {"license": "mit"}, "tags": ["license:other"]}, "mit"),
        ({"cardData": None, "tags": ["x", "license:apache-2.0"]}, "apache-2.0"),
        ({"cardData": {"license": ["a"]}, "tags": 5}, ""),
        ({}, ""),
    ],
)
def test_the_license_is_read(answer: dict[str, Any], license_name: str) -> None:
    assert read_listing("a/b", info(*LOADED, **answer)).license == license_name


@pytest.mark.parametrize(
    "path", ["../x", "vae/../../x", "/etc/passwd", "~/x", "vae\\x", "C:/x", "vae/..", "vae/a\nb", "..\\..\\x"]
)
def test_a_path_outside_the_folder_refuses_the_repository(path: str) -> None:
    with pytest.raises(DownloadError) as caught:
        read_listing("a/b", info(*LOADED, path))
    assert caught.value.fact == Fact("hub.path_outside", {"repository": "a/b", "path": path})


@pytest.mark.parametrize(
    ("paths", "code", "component"),
    [
        (tuple(path for path in LOADED if path != "model_index.json"), "hub.not_a_pipeline", None),
        (tuple(path for path in LOADED if not path.startswith("vae")), "hub.no_safetensors", "vae"),
        ((*(path for path in LOADED if not path.startswith("vae")), "vae/x.bin"), "hub.only_pickled_weights", "vae"),
        ((*LOADED, "vae/Config.json"), "hub.names_differ_in_case", None),
        ((*LOADED, "transformer_2/config.json"), "hub.no_safetensors", "transformer_2"),
    ],
)
def test_a_repository_that_is_not_a_pipeline_is_refused(
    paths: tuple[str, ...], code: str, component: str | None
) -> None:
    with pytest.raises(DownloadError) as caught:
        read_listing("a/b", info(*paths))
    assert (caught.value.code, caught.value.data.get("component")) == (code, component)


@pytest.mark.parametrize("answer", [{"sha": None}, {"sha": "main"}, {"sha": 5}, {"sha": "C" * 40}])
def test_an_answer_without_a_commit_is_refused(answer: dict[str, Any]) -> None:
    with pytest.raises(DownloadError) as caught:
        read_listing("a/b", info(*LOADED, **answer))
    assert caught.value.code == "hub.malformed_answer"


@pytest.mark.parametrize(
    "changes",
    [
        {"size": None},
        {"size": -1},
        {"size": True},
        {"size": 1 << 60},
        {"blobId": "xyz"},
        {"blobId": None},
        {"lfs": {"size": None, "sha256": "b" * 64, "pointerSize": 1}},
        {"lfs": {"size": 10, "sha256": "B" * 64, "pointerSize": 1}},
    ],
)
def test_a_file_that_cannot_be_verified_is_refused(changes: dict[str, Any]) -> None:
    siblings = [entry(path, **(changes if path == "vae/config.json" else {})) for path in LOADED]
    with pytest.raises(DownloadError) as caught:
        read_listing("a/b", info(siblings=siblings))
    assert caught.value.fact == Fact("hub.no_hash", {"file": "vae/config.json"})


def test_a_large_file_without_weights_refuses_the_repository() -> None:
    siblings = [entry(path) for path in LOADED] + [entry("scheduler/more.json", size=1 << 30)]
    with pytest.raises(DownloadError) as refused:
        read_listing("a/b", info(siblings=siblings))
    assert refused.value.fact == Fact("hub.file_too_large", {"file": "scheduler/more.json", "size": 1 << 30})
