"""Downloads from a hub on loopback that disconnects, stalls, sends wrong content and refuses."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
from filelock import FileLock

from runtime.core.cancel import Cancel, CancelledError
from runtime.core.digests import file_digests, known_digests
from runtime.core.errors import DownloadError, ModelError, OutputError
from runtime.core.facts import Fact
from runtime.models.catalogue import folders
from runtime.models.hub.client import Hub, RetryPolicy
from runtime.models.hub.download import Download, DownloadPlan, DownloadProgress, source_of
from runtime.models.hub.files import MANIFEST, verify
from runtime.models.spec import ModelSpec
from tests.models.hub import COMMIT, REPOSITORY, Fault, LoopbackHub, Repository, of_folder, served
from tests.waiting import until

VAE = "vae/diffusion_pytorch_model.safetensors"
TEXT = "text_encoder/model.safetensors"
SMALL = "vae/config.json"
QUICK = RetryPolicy(timeout=0.3, tries=3, wait=0.01, max_wait=0.05, max_retry_after=10)


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Repository:
    """Return a tiny model as a repository that also has other files."""
    repository = of_folder(tiny_folder)
    repository.files |= {"README.md": b"#", "vae/old.bin": b"pickled", "assets/a.png": b"\0"}
    return repository


@pytest.fixture(scope="module")
def tiny_folder(tiny: Callable[[str], ModelSpec]) -> Path:
    return tiny("wan2.1").directory


@pytest.fixture
def hub(model: Repository) -> Iterator[LoopbackHub]:
    """Serve the model."""
    with served(**{REPOSITORY.rpartition("/")[2]: Repository(dict(model.files))}) as hub:
        yield hub


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return tmp_path / "weights"


class Reports:
    """The progress that a download reports; `at` is called with each."""

    def __init__(self, at: Callable[[DownloadProgress], None] = lambda _: None) -> None:
        self.all: list[DownloadProgress] = []
        self._at = at

    def __call__(self, progress: DownloadProgress) -> None:
        self.all.append(progress)
        self._at(progress)

    @property
    def notes(self) -> list[Fact]:
        """Every note, and the cause of each that has one."""
        notes = [progress.note for progress in self.all if progress.note]
        return notes + [note.data["cause"] for note in notes if "cause" in note.data]


def download(
    hub: LoopbackHub,
    weights: Path,
    *,
    revision: str | None = None,
    cancel: Cancel | None = None,
    report: Reports | None = None,
    policy: RetryPolicy = QUICK,
) -> tuple[ModelSpec, DownloadPlan]:
    """Fetch the model; return it and what was planned."""
    cancel = cancel or Cancel()
    with Download(source_of(REPOSITORY, revision), weights, Hub(hub.address, policy), report or Reports()) as fetching:
        plan = fetching.plan(cancel)
        spec = fetching.run(plan, cancel)
        assert spec is not None
        return spec, plan


def no_download_is_listed(weights: Path) -> bool:
    return list(folders(weights)) == ["diorama"]


def test_a_download_holds_the_models_files_only_and_can_be_used(
    hub: LoopbackHub, weights: Path, model: Repository, tiny_folder: Path
) -> None:
    report = Reports(
        lambda progress: None if no_download_is_listed(weights) else pytest.fail("an incomplete model is listed")
    )
    spec, plan = download(hub, weights, report=report)
    assert spec.name == "Tiny-Diffusers"
    assert plan.listing.license == "apache-2.0"
    assert plan.fetched_bytes == plan.listing.total_bytes == sum(hub.sent.values())
    found = {path.relative_to(spec.directory).as_posix() for path in spec.directory.rglob("*") if path.is_file()}
    original = {path.relative_to(tiny_folder).as_posix() for path in tiny_folder.rglob("*") if path.is_file()}
    assert found - {MANIFEST} <= original
    for path in found - {MANIFEST}:
        assert (spec.directory / path).read_bytes() == model.files[path]
    assert not {"README.md", "vae/old.bin", "assets/a.png"} & {path for path, _, _ in hub.requests}
    assert [path.name for path in weights.iterdir()] == ["Tiny-Diffusers"]
    last = [progress for progress in report.all if progress.file][-1]
    assert (last.number, last.count, last.done) == (len(plan.listing.files),) * 2 + (plan.listing.total_bytes,)
    counts = [progress.done for progress in report.all if progress.total]
    assert counts == sorted(counts)

    before = hub.sent.copy()
    again, plan = download(hub, weights)
    assert (again, plan.fetched_bytes, hub.sent) == (spec, 0, before)


def test_the_digests_of_weights_are_known_after_a_download(hub: LoopbackHub, weights: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for _ in ("fetched", "verified"):
        with Download(source_of(REPOSITORY, None), weights, Hub(hub.address, QUICK), Reports(), cache) as fetching:
            spec = fetching.run(fetching.plan(Cancel()), Cancel())
        assert spec is not None
        paths = [path for component in spec.component_names for path in spec.weight_paths(component)]
        assert known_digests(paths, cache) == file_digests(paths, None)
        shutil.rmtree(cache)


@pytest.mark.parametrize("how", ["break", "stall"])
def test_a_file_resumes_after_a_disconnect_or_stall(how: str, hub: LoopbackHub, weights: Path) -> None:
    hub.faults = {VAE: Fault(how, after=70_000, times=2), SMALL: Fault(how, after=10), TEXT: Fault(how, after=0)}
    report = Reports()
    _, plan = download(hub, weights, report=report)
    assert hub.ranges_of(VAE) == ["", "bytes=70000-", "bytes=140000-"]
    assert hub.ranges_of(SMALL) == ["", "bytes=10-"]
    assert sum(hub.sent.values()) == plan.listing.total_bytes
    assert (Fact("hub.disconnected") if how == "break" else Fact("hub.silent", {"seconds": 0.3})) in report.notes


def test_attempts_are_limited_and_partial_files_are_kept(hub: LoopbackHub, weights: Path) -> None:
    hub.faults[VAE] = Fault("break", after=1000)
    hub.faults["api"] = Fault("503", times=2)

    def at(progress: DownloadProgress) -> None:
        if progress.done:
            hub.faults[VAE] = Fault("503", times=9)

    with pytest.raises(DownloadError) as caught:
        download(hub, weights, report=Reports(at))
    assert (caught.value.code, caught.value.data["failures"]) == ("hub.unavailable", 3)
    assert caught.value.data["cause"] == Fact("hub.failed", {"status": 503})
    assert no_download_is_listed(weights)
    came = sum(hub.sent.values())
    hub.faults.clear()
    _, plan = download(hub, weights)
    assert plan.downloaded_bytes == came
    assert sum(hub.sent.values()) == plan.listing.total_bytes


def test_a_hub_that_restarts_the_file_each_time_is_given_up(hub: LoopbackHub, weights: Path) -> None:
    hub.faults[VAE] = Fault("break", after=1000)

    def at(progress: DownloadProgress) -> None:
        if progress.file == VAE and progress.note:
            hub.faults[VAE] = Fault("whole-break", after=1000, times=99)

    with pytest.raises(DownloadError) as caught:
        download(hub, weights, report=Reports(at))
    assert (caught.value.code, caught.value.data["failures"]) == ("hub.unavailable", 3)
    assert len(hub.ranges_of(VAE)) <= 5


@pytest.mark.parametrize("how", ["whole", "elsewhere"])
def test_a_hub_without_ranges_sends_the_file_from_its_start(how: str, hub: LoopbackHub, weights: Path) -> None:
    hub.faults[VAE] = Fault("break", after=5000)

    def at(progress: DownloadProgress) -> None:
        if progress.file == VAE and progress.note and len(hub.ranges_of(VAE)) == 1:
            hub.faults[VAE] = Fault(how)

    spec, _ = download(hub, weights, report=Reports(at))
    assert (spec.directory / VAE).stat().st_size == len(hub.repositories[REPOSITORY].files[VAE])


@pytest.mark.parametrize("path", [VAE, SMALL])
@pytest.mark.parametrize(
    ("how", "code"), [("wrong", "hub.file_hash"), ("longer", "hub.file_other_size"), ("short", "hub.file_other_size")]
)
def test_wrong_content_is_fetched_once_more_and_then_refused(
    how: str, code: str, path: str, hub: LoopbackHub, weights: Path
) -> None:
    hub.faults[path] = Fault(how, times=1 if how != "short" else 2)
    report = Reports()
    spec, _ = download(hub, weights, report=report)
    assert code in {note.code for note in report.notes}
    assert (spec.directory / path).read_bytes() == hub.repositories[REPOSITORY].files[path]

    shutil.rmtree(weights)
    hub.faults[path] = Fault(how, times=99)
    with pytest.raises(DownloadError) as caught:
        download(hub, weights)
    cause = caught.value.data["cause"]
    assert (caught.value.code, cause.code, cause.data["file"]) == ("hub.content_mismatch", code, path)
    assert no_download_is_listed(weights)
    partial = weights / ".Tiny-Diffusers.partial"
    assert not (partial / path).exists()
    assert not list((partial / ".coming").iterdir())


def unavailable(code: str, **data: object) -> Fact:
    return Fact("hub.unavailable", {"cause": Fact(code, data), "failures": 3})


def limited(seconds: float) -> Fact:
    return Fact("hub.busy", {"cause": Fact("hub.rate_limited"), "seconds": seconds})


@pytest.mark.parametrize(
    ("fault", "fact"),
    [
        (Fault("401", headers={"x-error-code": "RepoNotFound"}), Fact("hub.no_repository", {"repository": REPOSITORY})),
        (
            Fault("401", headers={"x-error-message": "Invalid credentials in Authorization header"}),
            Fact("hub.token_refused"),
        ),
        (Fault("403", headers={"x-error-code": "GatedRepo"}), Fact("hub.gated", {"repository": REPOSITORY})),
        (Fault("403"), Fact("hub.forbidden")),
        (Fault("404", headers={"x-error-code": "RevisionNotFound"}), Fact("hub.no_revision")),
        (Fault("404"), Fact("hub.status", {"status": 404})),
        (Fault("429", times=9), unavailable("hub.rate_limited")),
        (Fault("429", headers={"retry-after": "3600"}), limited(3600.0)),
        (Fault("429", headers={"ratelimit": '"api";r=0;t=900'}), limited(900.0)),
        (Fault("500", times=9), unavailable("hub.failed", status=500)),
        (Fault("stall", times=9), unavailable("hub.silent", seconds=0.3)),
        (Fault("garbage"), Fact("hub.malformed_answer")),
        (Fault("302 ftp://elsewhere/x"), Fact("hub.unsafe_redirect", {"target": "ftp://elsewhere/x"})),
        (Fault("302 http://192.0.2.1/x"), Fact("hub.unsafe_redirect", {"target": "http://192.0.2.1/x"})),
        (
            Fault("302 /api/models/Wan-AI/Tiny-Diffusers/revision/main", times=99),
            Fact("hub.redirect_loop"),
        ),
    ],
    ids=lambda value: value.how.split()[0] if isinstance(value, Fault) else value.code,
)
def test_each_refusal_of_a_hub_has_a_code(fault: Fault, fact: Fact, hub: LoopbackHub, weights: Path) -> None:
    hub.faults["api"] = Fault(fault.how, times=fault.times, headers=fault.headers)
    with pytest.raises(DownloadError) as caught:
        download(hub, weights)
    assert caught.value.fact == fact
    assert caught.value.remedy
    assert not list(weights.iterdir())


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"rfilename": "vae/x.safetensors", "lfs": {"size": 10}},
        {"rfilename": "vae/x.safetensors", "lfs": 5},
        {"size": 5},
    ],
)
def test_a_malformed_file_entry_refuses_the_repository(
    extra: dict[str, object], hub: LoopbackHub, weights: Path
) -> None:
    hub.repositories[REPOSITORY].extra = [extra]
    with pytest.raises(DownloadError) as caught:
        download(hub, weights)
    assert caught.value.code == "hub.malformed_answer"


def test_a_busy_hub_is_retried_and_a_missing_file_is_an_error(hub: LoopbackHub, weights: Path) -> None:
    hub.faults = {"api": Fault("429", headers={"ratelimit": '"api";r=0;t=1'}), SMALL: Fault("500", times=2)}
    report = Reports()
    download(hub, weights, report=report)
    assert Fact("hub.retrying", {"cause": Fact("hub.rate_limited"), "seconds": 1}) in report.notes
    shutil.rmtree(weights)
    hub.faults[VAE] = Fault("404", headers={"x-error-code": "EntryNotFound"})
    with pytest.raises(DownloadError) as caught:
        download(hub, weights)
    assert caught.value.fact == Fact("hub.status", {"status": 404})


def test_a_redirect_to_another_origin_does_not_carry_the_token(
    hub: LoopbackHub, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
    url = f"{hub.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", url)
    with served(**{"Tiny-Diffusers": hub.repositories[REPOSITORY]}) as cdn:
        hub.faults[VAE] = Fault(f"302 {cdn.address}/{REPOSITORY}/resolve/{COMMIT}/{VAE}")
        download(hub, weights)
        assert [authorization for *_, authorization in cdn.requests] == [""]
        assert {authorization for *_, authorization in hub.requests} == {"Bearer hf_secret"}
        # A mirror is not the hub that the token is for.
        shutil.rmtree(weights)
        download(cdn, weights)
        assert {authorization for *_, authorization in cdn.requests} == {""}


def test_an_unsupported_model_is_refused_before_its_weights_are_fetched(hub: LoopbackHub, weights: Path) -> None:
    hub.repositories[REPOSITORY].files["model_index.json"] = b'{"_class_name": "SkyReelsV2Pipeline"}'
    with pytest.raises(ModelError) as refused:
        download(hub, weights)
    assert (refused.value.code, refused.value.data["pipeline"]) == ("model.family_unknown", "SkyReelsV2Pipeline")
    assert not any(path.endswith(".safetensors") for path in hub.sent)
    assert no_download_is_listed(weights)


def test_a_complete_download_that_cannot_be_used_is_not_listed(hub: LoopbackHub, weights: Path) -> None:
    files = hub.repositories[REPOSITORY].files
    files["vae/diffusion_pytorch_model.safetensors.index.json"] = b'{"weight_map": {"a": "missing.safetensors"}}'
    files["vae/diffusion_pytorch_model-00001-of-00001.safetensors"] = files.pop(VAE)
    with pytest.raises(ModelError) as caught:
        download(hub, weights)
    assert (caught.value.code, caught.value.data["repository"]) == ("hub.model_unusable", REPOSITORY)
    assert caught.value.data["folder"].endswith(".Tiny-Diffusers.partial")
    assert no_download_is_listed(weights)


def test_an_unreachable_hub_is_reported_with_the_cause(weights: Path) -> None:
    with served() as hub:
        pass
    with pytest.raises(DownloadError) as caught:
        download(hub, weights)
    assert (caught.value.code, caught.value.data["failures"]) == ("hub.unavailable", 3)
    assert caught.value.data["cause"].code == "hub.unreachable"
    assert caught.value.data["cause"].data["reason"]


def test_free_disk_space_is_checked_before_anything_is_fetched(
    hub: LoopbackHub, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 1 << 28
    monkeypatch.setattr("runtime.models.hub.download.shutil.disk_usage", lambda _: type("Disk", (), {"free": free})())
    with pytest.raises(DownloadError) as caught:
        download(hub, weights)
    assert (caught.value.code, caught.value.data["free"]) == ("hub.disk_full", free)
    assert not hub.sent
    # Files that are downloaded already are not counted.
    free += sum(len(content) for content in hub.repositories[REPOSITORY].files.values())
    download(hub, weights)
    free = 1000
    (weights / "Tiny-Diffusers" / SMALL).unlink()
    with pytest.raises(DownloadError) as caught:
        download(hub, weights)
    assert caught.value.data["needed"] == len(hub.repositories[REPOSITORY].files[SMALL])


def full(part: Path) -> BinaryIO:
    """Open a part that is on a full disk."""
    part.touch()
    return Path("/dev/full").open("ab", buffering=0)


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
def test_a_full_disk_is_an_output_error(hub: LoopbackHub, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.models.hub.client._open_part", full)
    with pytest.raises(OutputError) as caught:
        download(hub, weights)
    assert caught.value.fact == Fact("hub.cannot_write", {"folder": weights, "reason": "No space left on device"})


def test_cancel_does_not_wait_for_a_silent_hub_and_the_download_resumes(hub: LoopbackHub, weights: Path) -> None:
    hub.faults[VAE] = Fault("stall", after=30_000)
    cancel = Cancel()

    def at(progress: DownloadProgress) -> None:
        if progress.file == VAE:
            cancel.request()

    began = time.monotonic()
    with pytest.raises(CancelledError):
        download(hub, weights, cancel=cancel, report=Reports(at), policy=RetryPolicy(timeout=60))
    assert time.monotonic() - began < 30
    assert no_download_is_listed(weights)
    _, plan = download(hub, weights)
    assert plan.downloaded_bytes > 0
    assert hub.sent[TEXT] == len(hub.repositories[REPOSITORY].files[TEXT])


PROGRAM = """
import sys
from pathlib import Path
from runtime.cli.main import run
sys.exit(run(["models", "download", sys.argv[1], "--mirror", sys.argv[2], "--yes", "--json"]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_killed_download_resumes_and_fetches_nothing_twice(
    number: signal.Signals, hub: LoopbackHub, tmp_path: Path
) -> None:
    hub.faults[VAE] = Fault("slow")
    environment = os.environ | {"TANDEM_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM, REPOSITORY, hub.address]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(lambda: hub.sent[VAE] >= 20_000, meanwhile=lambda: process.poll() is None)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL), errors
    weights = tmp_path / "weights"
    assert no_download_is_listed(weights)
    part = next((weights / ".Tiny-Diffusers.partial" / ".coming").iterdir()).stat().st_size
    assert part > 0
    spec, plan = download(hub, weights)
    assert hub.ranges_of(VAE)[-1] == f"bytes={part}-"
    size = len(hub.repositories[REPOSITORY].files[VAE])
    # Only data in transit when the process ended is sent again.
    assert hub.sent[VAE] - size < 100_000
    assert plan.fetched_bytes == size - part
    assert all(hub.sent[file.path] == file.size for file in plan.listing.files if file.path != VAE)
    assert not verify(spec.directory, Cancel(), lambda *_: None).differences


def test_two_downloads_of_one_model_exclude_each_other(hub: LoopbackHub, weights: Path) -> None:
    weights.mkdir()
    with FileLock(weights / ".Tiny-Diffusers.lock"), pytest.raises(DownloadError) as caught:
        download(hub, weights)
    assert caught.value.fact == Fact("hub.download_running", {"model": "Tiny-Diffusers"})
    assert not hub.requests


def test_verify_finds_damage_and_only_damaged_files_are_fetched_again(hub: LoopbackHub, weights: Path) -> None:
    spec, _ = download(hub, weights)
    (spec.directory / "tandem.json.mine").write_text("mine")
    damaged = bytearray((spec.directory / TEXT).read_bytes())
    damaged[-1] ^= 1
    (spec.directory / TEXT).write_bytes(damaged)
    (spec.directory / SMALL).unlink()
    with (spec.directory / VAE).open("ab") as stream:
        stream.write(b"x")
    found = verify(spec.directory, Cancel(), lambda *_: None)
    size = len(hub.repositories[REPOSITORY].files[VAE])
    assert found.differences == {
        TEXT: Fact("hub.file_hash", {"file": TEXT}),
        SMALL: Fact("hub.file_missing", {"file": SMALL}),
        VAE: Fact("hub.file_size", {"file": VAE, "size": size + 1, "expected": size}),
    }
    hub.sent.clear()
    download(hub, weights)
    assert set(hub.sent) == {TEXT, SMALL, VAE}
    assert not verify(spec.directory, Cancel(), lambda *_: None).differences
    assert (spec.directory / "tandem.json.mine").read_text() == "mine"
    assert [path.name for path in weights.iterdir()] == ["Tiny-Diffusers"]


def test_the_commit_is_kept_until_another_is_requested(hub: LoopbackHub, weights: Path) -> None:
    spec, _ = download(hub, weights)
    repository = hub.repositories[REPOSITORY]
    repository.files[SMALL] = repository.files[SMALL].replace(b"{", b"{ ", 1)
    repository.commit = "f" * 40
    hub.sent.clear()
    _, plan = download(hub, weights, revision="v1")
    assert plan.listing.commit == "f" * 40
    assert set(hub.sent) == {SMALL}
    assert (spec.directory / SMALL).read_bytes() == repository.files[SMALL]
    # The downloaded commit is gone from the hub: unchanged files are kept.
    repository.commit = "e" * 40
    _, plan = download(hub, weights)
    assert (plan.listing.commit, plan.fetched_bytes) == ("e" * 40, 0)


def test_a_folder_that_was_not_downloaded_is_left_alone(hub: LoopbackHub, weights: Path, tiny_folder: Path) -> None:
    shutil.copytree(tiny_folder, weights / "Tiny-Diffusers")
    with pytest.raises(DownloadError) as refused:
        download(hub, weights)
    assert refused.value.code == "hub.not_a_download"
    with pytest.raises(ModelError) as unverified:
        verify(weights / "Tiny-Diffusers", Cancel(), lambda *_: None)
    assert unverified.value.fact == Fact("hub.no_manifest", {"model": "Tiny-Diffusers"})
    shutil.rmtree(weights)
    hub.repositories["Other/Tiny-Diffusers"] = hub.repositories[REPOSITORY]
    download(hub, weights)
    with (
        Download(source_of("Other/Tiny-Diffusers", None), weights, Hub(hub.address, QUICK), Reports()) as fetching,
        pytest.raises(DownloadError) as caught,
    ):
        fetching.plan(Cancel())
    assert (caught.value.code, caught.value.data["repository"]) == ("hub.other_repository", REPOSITORY)


@pytest.mark.skipif(sys.platform == "win32", reason="links")
def test_links_are_not_written_through(hub: LoopbackHub, weights: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    partial = weights / ".Tiny-Diffusers.partial"
    partial.mkdir(parents=True)
    (partial / "vae").symlink_to(outside)
    with pytest.raises(OutputError) as partial_is_link:
        download(hub, weights)
    assert partial_is_link.value.fact == Fact("hub.partial_is_link", {"folder": partial / "vae"})
    (weights / "Tiny-Diffusers").symlink_to(outside)
    with pytest.raises(DownloadError) as folder_is_link:
        download(hub, weights)
    assert folder_is_link.value.fact == Fact("hub.folder_is_link", {"folder": weights / "Tiny-Diffusers"})
    assert not list(outside.iterdir())


def test_a_model_downloaded_under_another_name_is_not_fetched_again(
    hub: LoopbackHub, weights: Path, tiny_folder: Path
) -> None:
    shutil.copytree(tiny_folder, weights / "WAN2.1-t2v-1.3b")
    with (
        Download(source_of("wan2.1-1.3b", None), weights, Hub(hub.address, QUICK), Reports()) as fetching,
        pytest.raises(DownloadError) as caught,
    ):
        fetching.plan(Cancel())
    assert (caught.value.code, caught.value.data["model"]) == ("hub.not_a_download", "WAN2.1-t2v-1.3b")
    assert not hub.requests


def test_an_interrupted_exchange_of_folders_is_undone(hub: LoopbackHub, weights: Path) -> None:
    spec, _ = download(hub, weights)
    spec.directory.rename(weights / ".Tiny-Diffusers.before")
    hub.sent.clear()
    again, _ = download(hub, weights)
    assert again == spec
    assert not hub.sent


def test_a_damaged_manifest_is_an_error_and_a_damaged_partial_one_is_ignored(hub: LoopbackHub, weights: Path) -> None:
    hub.faults[VAE] = Fault("404")
    with pytest.raises(DownloadError):
        download(hub, weights)
    (weights / ".Tiny-Diffusers.partial" / MANIFEST).write_text("[]")
    spec, _ = download(hub, weights)
    (spec.directory / MANIFEST).write_text('{"files": {"../x": {"size": 1, "digest": ""}}}')
    with pytest.raises(ModelError) as caught:
        verify(spec.directory, Cancel(), lambda *_: None)
    assert caught.value.fact == Fact("hub.manifest_damaged", {"file": f"Tiny-Diffusers/{MANIFEST}"})


def test_components_for_single_files_are_fetched_without_transformers(hub: LoopbackHub, weights: Path) -> None:
    source = replace(source_of(REPOSITORY, None), without_transformers=True)
    with Download(source, weights, Hub(hub.address, QUICK), Reports()) as fetching:
        assert fetching.run(fetching.plan(Cancel()), Cancel()) is None
    folder = weights / source.folder
    assert (folder / "vae" / "diffusion_pytorch_model.safetensors").is_file()
    assert not any(folder.glob("transformer*/*.safetensors"))
    # The transformer follows when the model is downloaded whole.
    spec, plan = download(hub, weights)
    assert [file.path.partition("/")[0] for file in plan.missing] == ["transformer"]
    assert spec.directory == folder
