"""Downloads of a model whose components are in three repositories, from a hub on loopback."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.core.cancel import Cancel
from runtime.core.errors import DownloadError
from runtime.models.catalogue import find
from runtime.models.hub.client import Hub
from runtime.models.hub.download import Download, delete_model, source_of
from runtime.models.hub.files import read_manifest, verify
from runtime.models.registry import published_models
from runtime.models.spec import ModelSpec
from tests.families.framepack_models import pipeline
from tests.models.hub import Fault, LoopbackHub, Repository, served
from tests.models.test_download import QUICK

KNOWN = published_models("framepack")
F1 = next(known for known in KNOWN if known.name == "framepack-f1-i2v")
TRANSFORMER, IMAGE, SHARED = (part.repository for part in F1.parts)
ROOT = "diffusion_pytorch_model.safetensors"
TEXT = "text_encoder/model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("framepack")
    pipeline().save_pretrained(directory)
    return directory


@pytest.fixture
def hub(folder: Path) -> Iterator[LoopbackHub]:
    """Serve the model's components as they are published."""
    with served() as hub:
        for number, part in enumerate(F1.parts):
            files = {"README.md": b"#", "model_index.json": b"of another model"}
            for path in folder.rglob("*"):
                inside = path.relative_to(folder).as_posix()
                if path.is_file() and inside.partition("/")[0] in {*part.folders, part.at_root}:
                    files[inside.removeprefix(f"{part.at_root}/")] = path.read_bytes()
            hub.repositories[part.repository] = Repository(files, commit=str(number) * 40)
        yield hub


def download(hub: LoopbackHub, weights: Path) -> ModelSpec:
    with Download(source_of(F1.name, None), weights, Hub(hub.address, QUICK), lambda _: None) as transfer:
        spec = transfer.run(transfer.plan(Cancel()), Cancel())
        assert spec is not None
        return spec


def test_the_files_of_all_repositories_become_one_model(hub: LoopbackHub, folder: Path, tmp_path: Path) -> None:
    spec = download(hub, tmp_path)
    for path in folder.rglob("*.safetensors"):
        assert (spec.directory / path.relative_to(folder)).read_bytes() == path.read_bytes()
    assert not (spec.directory / "README.md").exists()
    found = find(F1.name, tmp_path)
    assert found.section is not None and found.section.sampling_type == "vanilla"
    assert not verify(spec.directory, Cancel(), lambda *_: None).differences
    manifest = read_manifest(spec.directory)
    assert manifest is not None and manifest.repository == TRANSFORMER
    assert [manifest.commit_of(name) for name in (TRANSFORMER, IMAGE, SHARED)] == ["0" * 40, "1" * 40, "2" * 40]


def test_a_complete_model_is_not_fetched_again(hub: LoopbackHub, tmp_path: Path) -> None:
    download(hub, tmp_path)
    sent = dict(hub.sent)
    download(hub, tmp_path)
    assert hub.sent == sent


def test_files_that_arrived_before_a_cut_are_not_fetched_again(hub: LoopbackHub, folder: Path, tmp_path: Path) -> None:
    hub.faults[ROOT] = Fault("break", times=20)
    with pytest.raises(DownloadError):
        download(hub, tmp_path)
    size = (folder / TEXT).stat().st_size
    assert hub.sent[TEXT] == size
    hub.faults.clear()
    spec = download(hub, tmp_path)
    assert hub.sent[TEXT] == size
    assert not verify(spec.directory, Cancel(), lambda *_: None).differences


@pytest.mark.parametrize("missing", [TRANSFORMER, IMAGE, SHARED])
def test_a_missing_repository_is_named(hub: LoopbackHub, missing: str, tmp_path: Path) -> None:
    del hub.repositories[missing]
    with pytest.raises(DownloadError) as caught:
        download(hub, tmp_path)
    assert (caught.value.fact.code, caught.value.fact.data["repository"]) == ("hub.no_repository", missing)


def test_a_gated_repository_is_named(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.faults[ROOT] = Fault("403", headers={"x-error-code": "GatedRepo"})
    with pytest.raises(DownloadError) as caught:
        download(hub, tmp_path)
    assert (caught.value.fact.code, caught.value.fact.data["repository"]) == ("hub.gated", TRANSFORMER)


def test_wrong_content_is_refused(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.faults[ROOT] = Fault("wrong", times=5)
    with pytest.raises(DownloadError) as caught:
        download(hub, tmp_path)
    assert caught.value.fact.code == "hub.content_mismatch"


def test_a_repository_without_its_component_is_named(hub: LoopbackHub, tmp_path: Path) -> None:
    del hub.repositories[IMAGE].files["image_encoder/model.safetensors"]
    with pytest.raises(DownloadError) as caught:
        download(hub, tmp_path)
    assert (caught.value.fact.code, caught.value.fact.data["repository"]) == ("hub.no_safetensors", IMAGE)


def test_it_is_verified_and_deleted_as_one_model(hub: LoopbackHub, tmp_path: Path) -> None:
    spec = download(hub, tmp_path)
    damaged = spec.directory / "transformer" / ROOT
    damaged.write_bytes(bytes(damaged.stat().st_size))
    assert set(verify(spec.directory, Cancel(), lambda *_: None).differences) == {f"transformer/{ROOT}"}
    assert delete_model(tmp_path, spec.directory.name) > 0
    assert not spec.directory.exists()
