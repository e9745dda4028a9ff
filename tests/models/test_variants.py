"""Variants of published models: downloaded from a hub on loopback, and used with their LoRAs."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.cli.main import run
from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import DownloadError, ModelError, TandemError
from runtime.core.loras import Lora
from runtime.core.request import GenerationRequest
from runtime.models import catalogue
from runtime.models.catalogue import find, known_models, known_variant, stored_bytes, unusable
from runtime.models.hub.client import Hub
from runtime.models.hub.download import Download, DownloadPlan, DownloadProgress, delete_model, partial_bytes, source_of
from runtime.models.hub.files import read_manifest, verify
from runtime.models.loras import stated, variant_loras, with_loras
from runtime.models.spec import ModelSpec
from runtime.models.variants import DESCRIPTION, LORA_FOLDER
from runtime.planner.resolve import PlanningContext, resolve
from tests.facts import fact
from tests.models.hub import COMMIT, Fault, LoopbackHub, Repository, served
from tests.models.test_download import QUICK
from tests.planner.test_table import here
from tests.variant_files import BASE, HIGH, LOW, NAME, publish

REPACKAGED = "Comfy-Org/Wan_2.2_ComfyUI_Repackaged"
TEXT = "text_encoder/model.safetensors"


@pytest.fixture(scope="module")
def published(tiny: Callable[[str], ModelSpec], tmp_path_factory: pytest.TempPathFactory) -> LoopbackHub:
    hub = LoopbackHub()
    publish(hub, tiny("wan2.2-a14b").directory, tmp_path_factory.mktemp("published"))
    return hub


@pytest.fixture
def hub(published: LoopbackHub) -> Iterator[LoopbackHub]:
    with served() as hub:
        hub.repositories = dict(published.repositories)
        yield hub


def download(
    hub: LoopbackHub,
    weights: Path,
    cancel: Cancel | None = None,
    report: Callable[[DownloadProgress], None] = lambda _: None,
    name: str = NAME,
) -> DownloadPlan:
    cancel = cancel or Cancel()
    with Download(source_of(name, None), weights, Hub(hub.address, QUICK), report) as transfer:
        plan = transfer.plan(cancel)
        assert transfer.run(plan, cancel) is not None
        return plan


def test_a_variant_is_one_model_with_its_own_transformers_and_loras(hub: LoopbackHub, tmp_path: Path) -> None:
    known = known_variant(NAME.upper())
    assert known is not None
    plan = download(hub, tmp_path)
    assert not any(path.startswith("transformer") and path.endswith(".safetensors") for path in hub.sent)
    assert plan.listing.license == known.model.license
    assert plan.fetched_bytes == plan.listing.total_bytes
    assert set(plan.listing.repositories) == {
        known.model.repository,
        *(file.repository for file in known.variant.files.values()),
    }

    spec = find(NAME, tmp_path)
    assert (spec.name, spec.title, spec.license, spec.experts) == (NAME, known.title, known.model.license, 2)
    assert spec.directory == tmp_path / NAME and not unusable(tmp_path, ())
    assert {path.name for path in spec.single_files.values()} == {Path(HIGH).name, Path(LOW).name}
    assert spec.transformer_files["transformer"].title == "FP8 with scales" and spec.is_packed
    assert (spec.defaults.steps, spec.defaults.guidance(from_image=False)) == (4, (1.0, 1.0))
    assert stored_bytes(spec) >= plan.listing.total_bytes

    # Nothing else has to be set.
    used = with_loras(spec, (), tmp_path)
    assert [use.expert for use in used.loras] == ["high", "low"]
    request = GenerationRequest(prompt="a boat", model=NAME, frames=9, width=64, height=32)
    made = resolve(request, used, PlanningContext(here(ram=64), tmp_path / "x.mp4"))
    assert (made.steps, made.guidance_scale, len(made.loras)) == (4, 1.0, 2)
    assert made.shift == 5.0 and made.shift_reason == fact("planner.shift_of_variant", shift=5.0)
    # Settings that a video stores name the files, whose strength can be changed so; none is applied twice.
    stored = [use.requested() for use in made.loras]
    assert [lora.file for lora in stored] == [lora.file for lora in variant_loras(spec, tmp_path)]
    assert all(lora.is_name for lora in stored)
    weaker = Lora(stored[0].file, 0.5)
    again = with_loras(spec, (weaker,), tmp_path)
    assert {(use.file, use.weight) for use in again.loras} == {(stored[0].file, 0.5), (stored[1].file, 1.0)}
    # A machine without the folder, such as a node of a cluster, is told all of it.
    told = GenerationRequest.from_mapping(stated(request.model_dump(mode="json"), used))
    assert (told.steps, told.shift, [lora.file for lora in told.loras]) == (4, 5.0, [lora.file for lora in stored])
    # A transformer's file by its path is the same model without the LoRAs.
    assert find(str(spec.location), tmp_path).variant is None

    sent = dict(hub.sent)
    assert download(hub, tmp_path).fetched_bytes == 0 and dict(hub.sent) == sent
    assert not verify(spec.directory, Cancel(), lambda *_: None).differences
    delete_model(tmp_path, NAME)
    with pytest.raises(ModelError) as caught:
        find(NAME, tmp_path)
    assert caught.value.code == "variant.not_downloaded"


def test_components_of_another_download_are_used_again(hub: LoopbackHub, tmp_path: Path) -> None:
    download(hub, tmp_path, name=BASE)
    hub.sent.clear()
    plan = download(hub, tmp_path)
    assert not any(path.startswith(("text_encoder/model", "vae/diff")) for path in hub.sent)
    assert plan.fetched_bytes < plan.listing.total_bytes
    delete_model(tmp_path, "Wan2.2-T2V-A14B-Diffusers")
    assert not verify(tmp_path / NAME, Cancel(), lambda *_: None).differences


def test_an_interrupted_download_resumes(hub: LoopbackHub, tmp_path: Path) -> None:
    cancel, size = Cancel(), len(hub.repositories[REPACKAGED].files[HIGH])

    def cancel_within(progress: DownloadProgress) -> None:
        if progress.file == Path(HIGH).name and progress.file_done > 0:
            cancel.request()

    hub.faults[HIGH] = Fault("slow")
    with pytest.raises(CancelledError):
        download(hub, tmp_path, cancel, cancel_within)
    assert NAME not in catalogue.folders(tmp_path)
    received, text = partial_bytes(tmp_path, NAME), hub.sent[TEXT]
    assert 0 < hub.sent[HIGH] < size
    hub.requests.clear()
    plan = download(hub, tmp_path)
    assert plan.downloaded_bytes >= received - 10_000 and hub.sent[TEXT] == text
    (resumed,) = hub.ranges_of(HIGH)
    assert resumed.startswith("bytes=")
    assert find(NAME, tmp_path).experts == 2


@pytest.mark.parametrize("how", ["wrong", "longer"])
def test_wrong_content_is_refused(how: str, hub: LoopbackHub, tmp_path: Path) -> None:
    hub.faults[LOW] = Fault(how, times=2)
    with pytest.raises(DownloadError) as caught:
        download(hub, tmp_path)
    assert caught.value.code == "hub.content_mismatch"
    assert NAME not in catalogue.folders(tmp_path)


def test_a_hub_with_other_files_is_refused_before_a_file_is_fetched(
    hub: LoopbackHub, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    with subtests.test("a published hash differs"):
        known = known_variant("wan2.2-t2v-a14b-q4")
        assert known is not None
        for file in known.variant.files.values():
            hub.repositories.setdefault(file.repository, Repository({}))
            hub.repositories[file.repository].files.setdefault(file.path, b"GGUF")
        with pytest.raises(DownloadError) as caught:
            download(hub, tmp_path, name="wan2.2-t2v-a14b-q4")
        assert caught.value.code == "hub.other_file" and not hub.sent
    with subtests.test("a file is gone"):
        files = hub.repositories[REPACKAGED].files
        hub.repositories[REPACKAGED] = Repository({path: data for path, data in files.items() if path != LOW})
        with pytest.raises(DownloadError) as caught:
            download(hub, tmp_path)
        assert caught.value.fact == fact("hub.no_file", repository=REPACKAGED, file=LOW)


def test_a_full_disk_is_reported_before_a_file_is_fetched(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=(1 << 28) + 1000))
    with pytest.raises(DownloadError) as caught:
        download(hub, tmp_path)
    assert caught.value.code == "hub.disk_full" and not hub.sent


def test_a_damaged_folder_is_listed_with_the_reason(hub: LoopbackHub, tmp_path: Path) -> None:
    download(hub, tmp_path)
    folder = tmp_path / NAME
    description = json.loads((folder / DESCRIPTION).read_text())
    for change in ({"transformer": "../x.gguf"}, {"steps": 0}, {"more": 1}):
        (folder / DESCRIPTION).write_text(json.dumps(description | change))
        assert unusable(tmp_path, ())[NAME].code == "variant.damaged", change
    (folder / DESCRIPTION).write_text(json.dumps(description))
    (folder / LORA_FOLDER / description["loras"][0]["file"]).unlink()
    with pytest.raises(TandemError) as caught:
        with_loras(find(NAME, tmp_path), (), tmp_path)
    assert caught.value.code == "lora.unknown"
    shutil.rmtree(folder / "vae")
    assert NAME in unusable(tmp_path, ())


def test_the_catalogue_s_variants_are_complete() -> None:
    for model in known_models():
        for variant in model.variants:
            assert sum(component.startswith("transformer") for component in model.components) == len(
                variant.transformers
            )
            assert (variant.steps is None) == (not variant.loras)
            assert variant.replaced <= set(model.components)
            for file in variant.files.values():
                assert file.bytes > 10**8 and len(file.sha256) in {0, 64}
            names = [file.name for file in variant.files.values()]
            assert len({*names}) == len(names)


def test_variants_on_the_command_line(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path))
    mirror = ("--mirror", hub.address)
    for refused in (
        ("models", "download", BASE, "--variant", "q9"),
        ("models", "download", "hunyuan-video", "--variant", "fits"),
        ("models", "download", BASE, "--variant", "fp8", "--without-transformers"),
        ("models", "download", BASE, "--variant", "fp8", "--revision", "main"),
        ("generate", "a boat", "--model", NAME),
    ):
        assert run([*refused]) == 2
        written = capsys.readouterr()
        assert len(written.err.strip().splitlines()) == 2, written.err
    assert not hub.sent
    assert run(["models", "download", BASE, "--variant", "fp8", "--yes", *mirror, "--json"]) == 0
    written = capsys.readouterr()
    assert json.loads(written.out.splitlines()[-1])["name"] == NAME
    assert "License: Apache-2.0" in written.out + written.err
    assert run(["models", "show", NAME, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (shown["variant"]["model"], shown["defaults"]["steps"]) == (BASE, 4)
    manifest = read_manifest(tmp_path / "weights" / NAME)
    assert manifest is not None and manifest.commit == COMMIT
    assert run(["models", "show", BASE, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["variant"] for row in shown["variants"]] == ["original", "fp8", "q4"]
