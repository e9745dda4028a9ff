"""Models from a hub on loopback that breaks off, stalls, lies and refuses: what comes is right or is not there."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
from filelock import FileLock

from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import DownloadError, ModelError, OutputError
from runtime.models.catalogue import folders
from runtime.models.hub.download import Download, Offer, wanted
from runtime.models.hub.manifest import MANIFEST
from runtime.models.hub.progress import Progress
from runtime.models.hub.remote import Hub, Patience
from runtime.models.hub.verify import verify
from runtime.models.spec import ModelSpec
from tests.models.hub import COMMIT, REPOSITORY, Fault, LoopbackHub, Repository, of_folder, served
from tests.waiting import until

VAE = "vae/diffusion_pytorch_model.safetensors"
TEXT = "text_encoder/model.safetensors"
SMALL = "vae/config.json"
QUICK = Patience(seconds=0.3, tries=3, wait=0.01, longest_wait=0.05, longest_asked=10)


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Repository:
    """Return a tiny model as a repository, with what a repository has beside it."""
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


class Told:
    """What a download tells; `at` is called with each."""

    def __init__(self, at: Callable[[Progress], None] = lambda _: None) -> None:
        self.all: list[Progress] = []
        self._at = at

    def __call__(self, progress: Progress) -> None:
        self.all.append(progress)
        self._at(progress)

    @property
    def notes(self) -> str:
        return "\n".join(progress.note for progress in self.all)


def download(
    hub: LoopbackHub,
    weights: Path,
    *,
    revision: str | None = None,
    cancel: Cancel | None = None,
    tell: Told | None = None,
    patience: Patience = QUICK,
) -> tuple[ModelSpec, Offer]:
    """Fetch the model; return what it is, and what was offered before."""
    cancel = cancel or Cancel()
    with Download(wanted(REPOSITORY, revision), weights, Hub(hub.address, patience), tell or Told()) as fetching:
        offer = fetching.look(cancel)
        return fetching.run(offer, cancel), offer


def nothing_is_offered(weights: Path) -> bool:
    return list(folders(weights)) == ["diorama"]


def test_a_model_comes_whole_with_nothing_beside_and_is_used(
    hub: LoopbackHub, weights: Path, model: Repository, tiny_folder: Path
) -> None:
    tell = Told(lambda progress: None if nothing_is_offered(weights) else pytest.fail("half a model is offered"))
    spec, offer = download(hub, weights, tell=tell)
    assert spec.name == "Tiny-Diffusers"
    assert offer.listing.license == "apache-2.0"
    assert offer.fetched_bytes == offer.listing.total_bytes == sum(hub.sent.values())
    here = {path.relative_to(spec.directory).as_posix() for path in spec.directory.rglob("*") if path.is_file()}
    whole = {path.relative_to(tiny_folder).as_posix() for path in tiny_folder.rglob("*") if path.is_file()}
    assert here - {MANIFEST} <= whole
    for path in here - {MANIFEST}:
        assert (spec.directory / path).read_bytes() == model.files[path]
    assert not {"README.md", "vae/old.bin", "assets/a.png"} & {path for path, _, _ in hub.asked}
    assert [path.name for path in weights.iterdir()] == ["Tiny-Diffusers"]
    last = [progress for progress in tell.all if progress.file][-1]
    assert (last.number, last.count, last.done) == (len(offer.listing.files),) * 2 + (offer.listing.total_bytes,)
    counts = [progress.done for progress in tell.all if progress.total]
    assert counts == sorted(counts)

    before = hub.sent.copy()
    again, offer = download(hub, weights)
    assert (again, offer.fetched_bytes, hub.sent) == (spec, 0, before)


@pytest.mark.parametrize("how", ["break", "stall"])
def test_a_connection_that_breaks_or_stalls_goes_on_where_it_was(how: str, hub: LoopbackHub, weights: Path) -> None:
    hub.faults = {VAE: Fault(how, after=70_000, times=2), SMALL: Fault(how, after=10), TEXT: Fault(how, after=0)}
    tell = Told()
    _, offer = download(hub, weights, tell=tell)
    assert hub.asked_for(VAE) == ["", "bytes=70000-", "bytes=140000-"]
    assert hub.asked_for(SMALL) == ["", "bytes=10-"]
    assert sum(hub.sent.values()) == offer.listing.total_bytes
    assert ("The connection broke" if how == "break" else "silent for 0.3 s") in tell.notes


def test_a_hub_that_never_comes_back_is_given_up_and_what_came_is_kept(hub: LoopbackHub, weights: Path) -> None:
    hub.faults[VAE] = Fault("break", after=1000)
    hub.faults["api"] = Fault("503", times=2)

    def at(progress: Progress) -> None:
        if progress.file == VAE and progress.note:
            hub.faults[VAE] = Fault("503", times=99)

    with pytest.raises(DownloadError, match="3 times in a row") as caught:
        download(
            hub, weights, tell=Told(lambda told: hub.faults.update({VAE: Fault("503", times=9)} if told.done else {}))
        )
    assert "kept" in caught.value.remedy
    assert nothing_is_offered(weights)
    came = sum(hub.sent.values())
    hub.faults.clear()
    _, offer = download(hub, weights)
    assert offer.here_bytes == came
    assert sum(hub.sent.values()) == offer.listing.total_bytes


def test_one_that_begins_anew_each_time_and_breaks_off_is_not_tried_for_ever(hub: LoopbackHub, weights: Path) -> None:
    hub.faults[VAE] = Fault("break", after=1000)

    def at(progress: Progress) -> None:
        if progress.file == VAE and progress.note:
            hub.faults[VAE] = Fault("whole-break", after=1000, times=99)

    with pytest.raises(DownloadError, match="3 times in a row"):
        download(hub, weights, tell=Told(at))
    assert len(hub.asked_for(VAE)) <= 5


@pytest.mark.parametrize("how", ["whole", "elsewhere"])
def test_a_hub_without_ranges_gives_the_file_anew(how: str, hub: LoopbackHub, weights: Path) -> None:
    hub.faults[VAE] = Fault("break", after=5000)

    def at(progress: Progress) -> None:
        if progress.file == VAE and progress.note and len(hub.asked_for(VAE)) == 1:
            hub.faults[VAE] = Fault(how)

    spec, _ = download(hub, weights, tell=Told(at))
    assert (spec.directory / VAE).stat().st_size == len(hub.repositories[REPOSITORY].files[VAE])


@pytest.mark.parametrize("path", [VAE, SMALL])
@pytest.mark.parametrize(
    ("how", "why"), [("lie", "of another content"), ("longer", "longer than"), ("short", "shorter")]
)
def test_a_lie_is_fetched_once_more_and_then_refused(
    how: str, why: str, path: str, hub: LoopbackHub, weights: Path
) -> None:
    hub.faults[path] = Fault(how, times=1 if how != "short" else 2)
    tell = Told()
    spec, _ = download(hub, weights, tell=tell)
    assert f"{path} is {why}" in tell.notes
    assert (spec.directory / path).read_bytes() == hub.repositories[REPOSITORY].files[path]

    shutil.rmtree(weights)
    hub.faults[path] = Fault(how, times=99)
    with pytest.raises(DownloadError, match="twice") as caught:
        download(hub, weights)
    assert path in caught.value.what and why in caught.value.what
    assert nothing_is_offered(weights)
    partial = weights / ".Tiny-Diffusers.partial"
    assert not (partial / path).exists()
    assert not list((partial / ".coming").iterdir())


@pytest.mark.parametrize(
    ("fault", "what", "remedy"),
    [
        (Fault("401", headers={"x-error-code": "RepoNotFound"}), "no such repository", "HF_TOKEN"),
        (Fault("401", headers={"x-error-message": "Invalid credentials in Authorization header"}), "token", "Renew"),
        (Fault("403", headers={"x-error-code": "GatedRepo"}), "accepted its licence", "Accept it"),
        (Fault("403"), "403, not allowed", "HF_TOKEN"),
        (Fault("404", headers={"x-error-code": "RevisionNotFound"}), "no such revision", "--revision"),
        (Fault("404"), "404", "name"),
        (Fault("429", times=9), "too many requests, 3 times in a row", "kept"),
        (Fault("429", headers={"retry-after": "3600"}), "wait 3600 s", "kept"),
        (Fault("429", headers={"ratelimit": '"api";r=0;t=900'}), "wait 900 s", "kept"),
        (Fault("500", times=9), "failed with 500, 3 times in a row", "kept"),
        (Fault("stall", times=9), "silent for 0.3 s, 3 times in a row", "kept"),
        (Fault("garbage"), "does not answer as one does", "address"),
        (Fault("302 ftp://elsewhere/x"), "not safe to follow", "another hub"),
        (Fault("302 http://192.0.2.1/x"), "not safe to follow", "another hub"),
        (Fault("302 /api/models/Wan-AI/Tiny-Diffusers/revision/main", times=99), "in circles", "address"),
    ],
    ids=lambda value: value.how.split()[0] if isinstance(value, Fault) else None,
)
def test_what_a_hub_refuses_is_said(fault: Fault, what: str, remedy: str, hub: LoopbackHub, weights: Path) -> None:
    hub.faults["api"] = Fault(fault.how, times=fault.times, headers=fault.headers)
    with pytest.raises(DownloadError, match=what) as caught:
        download(hub, weights)
    assert remedy in caught.value.remedy
    assert not list(weights.iterdir())


def test_a_busy_hub_is_asked_again_and_a_file_that_is_gone_is_said(hub: LoopbackHub, weights: Path) -> None:
    hub.faults = {"api": Fault("429", headers={"ratelimit": '"api";r=0;t=1'}), SMALL: Fault("500", times=2)}
    tell = Told()
    download(hub, weights, tell=tell)
    assert "too many requests; trying again in 1 s" in tell.notes
    shutil.rmtree(weights)
    hub.faults[VAE] = Fault("404", headers={"x-error-code": "EntryNotFound"})
    with pytest.raises(DownloadError, match="404"):
        download(hub, weights)


def test_a_redirect_is_followed_and_another_host_is_not_told_who_asks(
    hub: LoopbackHub, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
    with served(**{"Tiny-Diffusers": hub.repositories[REPOSITORY]}) as cdn:
        hub.faults[VAE] = Fault(f"302 {cdn.address}/{REPOSITORY}/resolve/{COMMIT}/{VAE}")
        download(hub, weights)
        assert [authorization for *_, authorization in cdn.asked] == [""]
        assert {authorization for *_, authorization in hub.asked} == {"Bearer hf_secret"}
        # A mirror is not the hub that the token is for.
        shutil.rmtree(weights)
        download(cdn, weights)
        assert {authorization for *_, authorization in cdn.asked} == {""}


def test_what_is_no_text_to_video_model_is_found_before_its_weights_come(hub: LoopbackHub, weights: Path) -> None:
    hub.repositories[REPOSITORY].files["model_index.json"] = b'{"_class_name": "WanImageToVideoPipeline"}'
    with pytest.raises(ModelError, match="WanImageToVideoPipeline"):
        download(hub, weights)
    assert not any(path.endswith(".safetensors") for path in hub.sent)
    assert nothing_is_offered(weights)


def test_what_cannot_be_used_though_it_came_whole_is_not_offered(hub: LoopbackHub, weights: Path) -> None:
    files = hub.repositories[REPOSITORY].files
    files["vae/diffusion_pytorch_model.safetensors.index.json"] = b'{"weight_map": {"a": "missing.safetensors"}}'
    files["vae/diffusion_pytorch_model-00001-of-00001.safetensors"] = files.pop(VAE)
    with pytest.raises(ModelError, match=f"{REPOSITORY} came as the hub has it, and cannot be used") as caught:
        download(hub, weights)
    assert ".Tiny-Diffusers.partial may be deleted" in caught.value.remedy
    assert nothing_is_offered(weights)


def test_a_hub_that_cannot_be_reached_is_said_with_the_cause(weights: Path) -> None:
    with served() as hub:
        pass
    with pytest.raises(DownloadError, match=r"cannot be reached \(.+\), 3 times in a row"):
        download(hub, weights)


def test_a_disk_that_is_too_small_is_seen_before_anything_comes(
    hub: LoopbackHub, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 1 << 28
    monkeypatch.setattr("runtime.models.hub.download.shutil.disk_usage", lambda _: type("Disk", (), {"free": free})())
    with pytest.raises(DownloadError, match="disk is too small") as caught:
        download(hub, weights)
    assert "268.4 MB are free" in caught.value.what
    assert not hub.sent
    # What is here already is not counted.
    free += sum(len(content) for content in hub.repositories[REPOSITORY].files.values())
    download(hub, weights)
    free = 1000
    (weights / "Tiny-Diffusers" / SMALL).unlink()
    with pytest.raises(DownloadError, match=f"{len(hub.repositories[REPOSITORY].files[SMALL])} B are to come"):
        download(hub, weights)


def full(part: Path) -> BinaryIO:
    """Open a part that is on a full disk."""
    part.touch()
    return Path("/dev/full").open("ab", buffering=0)


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
def test_a_disk_that_fills_up_meanwhile_is_said(
    hub: LoopbackHub, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.models.hub.transfer._opened", full)
    with pytest.raises(OutputError, match="No space left") as caught:
        download(hub, weights)
    assert "kept" in caught.value.remedy


def test_cancelled_it_stops_at_once_even_where_the_hub_is_silent_and_goes_on_later(
    hub: LoopbackHub, weights: Path
) -> None:
    hub.faults[VAE] = Fault("stall", after=30_000)
    cancel = Cancel()

    def at(progress: Progress) -> None:
        if progress.file == VAE:
            cancel.request()

    began = time.monotonic()
    with pytest.raises(CancelledError):
        download(hub, weights, cancel=cancel, tell=Told(at), patience=Patience(seconds=60))
    assert time.monotonic() - began < 30
    assert nothing_is_offered(weights)
    _, offer = download(hub, weights)
    assert offer.here_bytes > 0
    assert hub.sent[TEXT] == len(hub.repositories[REPOSITORY].files[TEXT])


PROGRAM = """
import sys
from pathlib import Path
from runtime.cli.main import run
sys.exit(run(["models", "download", sys.argv[1], "--mirror", sys.argv[2], "--yes", "--json"]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_or_killed_it_goes_on_and_nothing_comes_twice(
    number: signal.Signals, hub: LoopbackHub, tmp_path: Path
) -> None:
    hub.faults[VAE] = Fault("slow")
    environment = os.environ | {"TANDEM_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM, REPOSITORY, hub.address]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(lambda: hub.sent[VAE] >= 20_000, meanwhile=lambda: process.poll() is None)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL), told
    weights = tmp_path / "weights"
    assert nothing_is_offered(weights)
    part = next((weights / ".Tiny-Diffusers.partial" / ".coming").iterdir()).stat().st_size
    assert part > 0
    spec, offer = download(hub, weights)
    assert hub.asked_for(VAE)[-1] == f"bytes={part}-"
    whole = len(hub.repositories[REPOSITORY].files[VAE])
    # What was on its way when the process ended is all that is sent again.
    assert hub.sent[VAE] - whole < 100_000
    assert offer.fetched_bytes == whole - part
    assert all(hub.sent[file.path] == file.size for file in offer.listing.files if file.path != VAE)
    assert not verify(spec.directory, Cancel(), lambda *_: None).wrong


def test_two_at_once_do_not_meet(hub: LoopbackHub, weights: Path) -> None:
    weights.mkdir()
    with FileLock(weights / ".Tiny-Diffusers.lock"), pytest.raises(DownloadError, match="already"):
        download(hub, weights)
    assert not hub.asked


def test_what_differs_is_found_and_nothing_else_is_fetched_again(hub: LoopbackHub, weights: Path) -> None:
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
    assert found.wrong == {
        TEXT: "of another content",
        SMALL: "missing",
        VAE: f"{size + 1:,} bytes instead of {size:,}",
    }
    hub.sent.clear()
    download(hub, weights)
    assert set(hub.sent) == {TEXT, SMALL, VAE}
    assert not verify(spec.directory, Cancel(), lambda *_: None).wrong
    assert (spec.directory / "tandem.json.mine").read_text() == "mine"
    assert [path.name for path in weights.iterdir()] == ["Tiny-Diffusers"]


def test_the_commit_stays_until_another_is_asked_for(hub: LoopbackHub, weights: Path) -> None:
    spec, _ = download(hub, weights)
    repository = hub.repositories[REPOSITORY]
    repository.files[SMALL] = repository.files[SMALL].replace(b"{", b"{ ", 1)
    repository.commit = "f" * 40
    hub.sent.clear()
    _, offer = download(hub, weights, revision="v1")
    assert offer.listing.commit == "f" * 40
    assert set(hub.sent) == {SMALL}
    assert (spec.directory / SMALL).read_bytes() == repository.files[SMALL]
    # What was fetched is gone from the hub: what is the same is kept.
    repository.commit = "e" * 40
    _, offer = download(hub, weights)
    assert (offer.listing.commit, offer.fetched_bytes) == ("e" * 40, 0)


def test_a_folder_of_somebody_elses_is_left_alone(hub: LoopbackHub, weights: Path, tiny_folder: Path) -> None:
    shutil.copytree(tiny_folder, weights / "Tiny-Diffusers")
    with pytest.raises(DownloadError, match="not put there by `models download`"):
        download(hub, weights)
    with pytest.raises(ModelError, match="no hashes"):
        verify(weights / "Tiny-Diffusers", Cancel(), lambda *_: None)
    shutil.rmtree(weights)
    hub.repositories["Other/Tiny-Diffusers"] = hub.repositories[REPOSITORY]
    download(hub, weights)
    with (
        Download(wanted("Other/Tiny-Diffusers", None), weights, Hub(hub.address, QUICK), Told()) as fetching,
        pytest.raises(DownloadError, match=f"from {REPOSITORY}"),
    ):
        fetching.look(Cancel())


@pytest.mark.skipif(sys.platform == "win32", reason="links")
def test_a_link_in_the_way_is_not_written_through(hub: LoopbackHub, weights: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    partial = weights / ".Tiny-Diffusers.partial"
    partial.mkdir(parents=True)
    (partial / "vae").symlink_to(outside)
    with pytest.raises(OutputError, match="is a link"):
        download(hub, weights)
    (weights / "Tiny-Diffusers").symlink_to(outside)
    with pytest.raises(DownloadError, match="is a link"):
        download(hub, weights)
    assert not list(outside.iterdir())


def test_what_is_here_under_another_of_its_names_is_not_fetched_again(
    hub: LoopbackHub, weights: Path, tiny_folder: Path
) -> None:
    shutil.copytree(tiny_folder, weights / "WAN2.1-t2v-1.3b")
    with (
        Download(wanted("wan2.1-1.3b", None), weights, Hub(hub.address, QUICK), Told()) as fetching,
        pytest.raises(DownloadError, match=r"here already, as WAN2\.1-t2v-1\.3b"),
    ):
        fetching.look(Cancel())
    assert not hub.asked


def test_an_exchange_that_was_cut_off_is_undone(hub: LoopbackHub, weights: Path) -> None:
    spec, _ = download(hub, weights)
    spec.directory.rename(weights / ".Tiny-Diffusers.before")
    hub.sent.clear()
    again, _ = download(hub, weights)
    assert again == spec
    assert not hub.sent


def test_a_damaged_manifest_is_said_and_a_damaged_beginning_is_fetched_anew(hub: LoopbackHub, weights: Path) -> None:
    hub.faults[VAE] = Fault("404")
    with pytest.raises(DownloadError):
        download(hub, weights)
    (weights / ".Tiny-Diffusers.partial" / MANIFEST).write_text("[]")
    spec, _ = download(hub, weights)
    (spec.directory / MANIFEST).write_text('{"files": {"../x": {"size": 1, "digest": ""}}}')
    with pytest.raises(ModelError, match="is damaged"):
        verify(spec.directory, Cancel(), lambda *_: None)
