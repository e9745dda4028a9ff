"""Models that make control frames in the weights folder: published ones, folders of others, damaged ones, downloads."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.core.cancel import Cancel
from runtime.core.errors import DownloadError, ModelError
from runtime.core.preprocessors import PERSON_DETECTOR, POSE_ESTIMATOR
from runtime.core.request import BY_MODEL, DEPTH, POSE
from runtime.models.catalogue import decoder_folders, folders, transformer_files, unusable
from runtime.models.hub.client import Hub
from runtime.models.hub.download import Download, downloaded, source_of
from runtime.models.hub.files import verify
from runtime.models.preprocessors import (
    PREPROCESSORS,
    PUBLISHED,
    find_preprocessor,
    missing_model,
    published_preprocessor,
)
from tests.models.hub import LoopbackHub, Repository, served
from tests.models.test_download import QUICK
from tests.preprocessor_files import configured, pickle_weights, save_depth, save_pose, truncate_weights

_BY_KIND: dict[str, Callable[[Path], Path]] = {DEPTH: save_depth, POSE: save_pose}


@pytest.mark.parametrize("kind", BY_MODEL)
def test_a_missing_model_is_named_with_its_license(kind: str, tmp_path: Path) -> None:
    error = missing_model(kind, tmp_path)
    assert error is not None and (error.code, error.field) == ("preprocess.model_missing", "preprocess")
    assert error.fact.data["license"] == "Apache-2.0" and published_preprocessor(error.fact.data["name"])
    _BY_KIND[kind](tmp_path)
    assert missing_model(kind, tmp_path) is None
    find_preprocessor(kind, tmp_path, tmp_path)
    if kind == POSE:  # one of both parts is not enough
        (tmp_path / PREPROCESSORS / PUBLISHED[1].name / PERSON_DETECTOR).rename(tmp_path / "gone")
        assert missing_model(kind, tmp_path) is not None


def test_its_folders_are_no_models_of_videos(tmp_path: Path) -> None:
    save_pose(tmp_path)
    assert not decoder_folders(tmp_path).keys() & {PREPROCESSORS, PUBLISHED[1].name}
    assert not unusable(tmp_path, ()) and not transformer_files(tmp_path)
    assert PREPROCESSORS not in folders(tmp_path)


def test_a_folder_of_another_name_is_used_if_there_is_no_published_one(tmp_path: Path) -> None:
    # As it is on the hub: a folder that is the part.
    own = save_depth(tmp_path, "mine") / "depth_estimator"
    own.rename(tmp_path / "preprocessors" / "another")
    shutil.rmtree(own.parent)
    use = find_preprocessor(DEPTH, tmp_path, None)
    assert (use.title, use.license) == ("another", "unknown")
    save_depth(tmp_path)
    use = find_preprocessor(DEPTH, tmp_path, None)
    assert (use.title, use.license) == (PUBLISHED[0].title, "Apache-2.0")


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pickled": (pickle_weights, "model.pickled"),
    "truncated": (truncate_weights, "model.file_damaged"),
    "without weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.weights_missing"),
    "without processor": (lambda folder: (folder / "preprocessor_config.json").unlink(), "model.file_missing"),
    "metric": (configured("config.json", depth_estimation_type="metric"), "model.config_invalid"),
    "weights from elsewhere": (configured("config.json", backbone="resnet50"), "model.config_invalid"),
    "code from elsewhere": (configured("config.json", attn_implementation="some/kernel"), "model.config_invalid"),
    "many layers": (configured("config.json", num_hidden_layers=999), "model.config_invalid"),
    "large pictures": (configured("preprocessor_config.json", size={"height": 9_999}), "model.config_invalid"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_model_is_refused(damage: str, tmp_path: Path) -> None:
    change, code = DAMAGE[damage]
    change(save_depth(tmp_path) / "depth_estimator")
    with pytest.raises(ModelError) as caught:
        find_preprocessor(DEPTH, tmp_path, None)
    assert caught.value.code == code


def test_a_changed_file_is_another_model(tmp_path: Path) -> None:
    folder = save_depth(tmp_path) / "depth_estimator"
    first = find_preprocessor(DEPTH, tmp_path, tmp_path)
    assert find_preprocessor(DEPTH, tmp_path, tmp_path) == first
    configured("preprocessor_config.json", image_mean=[0.5, 0.5, 0.5])(folder)
    assert find_preprocessor(DEPTH, tmp_path, tmp_path).digest != first.digest


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    """Serve the parts of the model of poses as they are published."""
    folder = save_pose(tmp_path / "published")
    with served() as hub:
        for number, part in enumerate(PUBLISHED[1].parts):
            files = {path.name: path.read_bytes() for path in (folder / part.at_root).iterdir()}
            files |= {"README.md": b"#", "pytorch_model.bin": b"pickled"}
            hub.repositories[part.repository] = Repository(files, commit=str(number) * 40)
        yield hub


def download(hub: LoopbackHub, weights: Path, name: str) -> None:
    with Download(source_of(name, None), weights, Hub(hub.address, QUICK), lambda _: None) as transfer:
        transfer.run(transfer.plan(Cancel()), Cancel())


def test_both_parts_are_downloaded_as_one_model(hub: LoopbackHub, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    download(hub, weights, PUBLISHED[1].parts[0].repository)
    use = find_preprocessor(POSE, weights, None)
    assert (use.title, use.license) == (PUBLISHED[1].title, "Apache-2.0") and set(use.folders) == {
        POSE_ESTIMATOR,
        PERSON_DETECTOR,
    }
    (folder,) = downloaded(weights)
    assert folder == weights / PREPROCESSORS / PUBLISHED[1].name
    assert not list(folder.rglob("*.bin")) and not verify(folder, Cancel(), lambda *_: None).differences
    sent = dict(hub.sent)
    download(hub, weights, PUBLISHED[1].name)
    assert hub.sent == sent


def test_a_repository_with_another_model_is_refused(hub: LoopbackHub, tmp_path: Path) -> None:
    repository = hub.repositories[PUBLISHED[1].parts[1].repository]
    repository.files["config.json"] = b'{"architectures": ["BertModel"]}'
    with pytest.raises(ModelError) as caught:
        download(hub, tmp_path / "weights", PUBLISHED[1].name)
    assert caught.value.code == "hub.model_unusable"
    assert caught.value.fact.data["cause"].code == "preprocess.no_model"
    del repository.files["model.safetensors"]
    with pytest.raises(DownloadError) as refused:
        download(hub, tmp_path / "others", PUBLISHED[1].name)
    assert refused.value.code == "hub.only_pickled_weights"
