"""Which files of a repository are taken, and which repositories are refused."""

from typing import Any

import pytest

from runtime.core.errors import DownloadError
from runtime.models.hub.listing import RemoteFile, read_listing

WHOLE = (
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
BESIDE = (
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
    "image_encoder/model.safetensors",
)


def entry(path: str, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"rfilename": path, "size": 10, "blobId": "a" * 40}
    if path.endswith((".safetensors", ".bin")):
        found["lfs"] = {"size": 1000, "sha256": "b" * 64}
    return found | changes


def info(*paths: str, **changes: Any) -> dict[str, Any]:
    return {"sha": "c" * 40, "siblings": [entry(path) for path in paths]} | changes


def test_only_what_is_loaded_is_taken_small_files_first() -> None:
    listing = read_listing("a/b", info(*BESIDE, *reversed(WHOLE)))
    assert [file.path for file in listing.files[:1]] == ["model_index.json"]
    assert {file.path for file in listing.files} == set(WHOLE)
    weights = [file.is_weights for file in listing.files]
    assert weights == sorted(weights)
    assert listing.total_bytes == 8 * 10 + 4 * 1000
    assert RemoteFile("vae/config.json", 10, "git:" + "a" * 40) in listing.files
    assert RemoteFile("vae/diffusion_pytorch_model.safetensors", 1000, "sha256:" + "b" * 64) in listing.files


@pytest.mark.parametrize(
    ("answer", "license_name"),
    [
        ({"cardData": {"license": "mit"}, "tags": ["license:other"]}, "mit"),
        ({"cardData": None, "tags": ["x", "license:apache-2.0"]}, "apache-2.0"),
        ({"cardData": {"license": ["a"]}, "tags": 5}, ""),
        ({}, ""),
    ],
)
def test_the_licence_is_read(answer: dict[str, Any], license_name: str) -> None:
    assert read_listing("a/b", info(*WHOLE, **answer)).license == license_name


@pytest.mark.parametrize(
    "path", ["../x", "vae/../../x", "/etc/passwd", "~/x", "vae\\x", "C:/x", "vae/..", "vae/a\nb", "..\\..\\x"]
)
def test_a_name_that_leads_out_of_the_folder_refuses_the_whole_repository(path: str) -> None:
    with pytest.raises(DownloadError, match="leads out of its folder"):
        read_listing("a/b", info(*WHOLE, path))


@pytest.mark.parametrize(
    ("paths", "why"),
    [
        (tuple(path for path in WHOLE if path != "model_index.json"), "has no model_index.json"),
        (tuple(path for path in WHOLE if not path.startswith("vae")), "no safetensors for its vae"),
        ((*(path for path in WHOLE if not path.startswith("vae")), "vae/x.bin"), "only pickled weights"),
        ((*WHOLE, "vae/Config.json"), "upper and lower case"),
        ((*WHOLE, "transformer_2/config.json"), "no safetensors for its transformer_2"),
    ],
)
def test_what_is_no_pipeline_is_refused(paths: tuple[str, ...], why: str) -> None:
    with pytest.raises(DownloadError, match=why):
        read_listing("a/b", info(*paths))


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"sha": "main", "siblings": []},
        {"sha": "c" * 40, "siblings": "many"},
        {"sha": "c" * 40, "siblings": ["a"]},
        {"sha": "c" * 40, "siblings": [{"rfilename": 5}]},
    ],
)
def test_what_is_no_hubs_answer_is_refused(answer: dict[str, Any]) -> None:
    with pytest.raises(DownloadError, match="does not answer as one does"):
        read_listing("a/b", answer)


@pytest.mark.parametrize(
    "changes",
    [
        {"size": None},
        {"size": -1},
        {"size": True},
        {"size": 1 << 60},
        {"blobId": "xyz"},
        {"blobId": None},
        {"lfs": {"size": 10}},
        {"lfs": {"size": 10, "sha256": "B" * 64}},
    ],
)
def test_a_file_that_could_not_be_checked_is_refused(changes: dict[str, Any]) -> None:
    siblings = [entry(path, **(changes if path == "vae/config.json" else {})) for path in WHOLE]
    with pytest.raises(DownloadError, match=r"size and hash of vae/config\.json"):
        read_listing("a/b", info(siblings=siblings))
