"""`models list`, `models download` and `models verify`: output, confirmation and invalid input."""

import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.cli.main import run
from runtime.cli.models import describe, progress_text
from runtime.core.facts import Fact, render
from runtime.core.preprocessors import DEPTH_ESTIMATOR
from runtime.core.units import byte_size
from runtime.models.catalogue import known_as
from runtime.models.hub.download import DownloadProgress
from runtime.models.preprocessors import PUBLISHED
from runtime.models.spec import ModelSpec
from runtime.planner.requirements import needs
from tests.cli.refusals import check_refusals, refused
from tests.facts import fact
from tests.models.hub import Fault, LoopbackHub, of_folder, served
from tests.plans import machine
from tests.preprocessor_files import save_depth

KNOWN = "Wan2.1-T2V-1.3B-Diffusers"
VAE = "vae/diffusion_pytorch_model.safetensors"


@pytest.fixture
def hub(tiny: Callable[[str], ModelSpec], cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """Serve a tiny model under a published one's name, where the settings point to."""
    with served(**{KNOWN: of_folder(tiny("wan2.1").directory)}) as hub:
        monkeypatch.setenv("TANDEM_HUB", f"{hub.address}/")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield hub


def answer(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> tuple[dict[str, object], str]:
    """Run a command and return its JSON and its text."""
    assert run([*arguments, "--json"]) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return json.loads(out.splitlines()[-1]), " ".join(err.split())


def test_a_published_model_is_downloaded_listed_planned_and_verified(
    hub: LoopbackHub, few_models: None, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, text = answer(["models", "download", "wan2.1-1.3b", "--yes"], capsys)
    folder = cache_dir.resolve() / "weights" / KNOWN
    assert result["folder"] == str(folder)
    assert result["license"] == "Apache-2.0"
    assert result["bytes"] == result["fetched_bytes"] == sum(hub.sent.values())
    assert f"License: Apache-2.0. Text: {hub.address}/Wan-AI/{KNOWN}" in text
    assert "1 of 10: model_index.json" in text
    assert str(fact("cli.model_downloaded", model=KNOWN, fetched=result["bytes"])) in text

    listed, text = answer(["models", "list"], capsys)
    models = {model["name"]: model for model in listed["models"]}  # type: ignore[attr-defined]
    assert "wan2.1-t2v-1.3b" not in models
    assert models[KNOWN]["repository"] == f"Wan-AI/{KNOWN}"
    assert models[KNOWN]["bytes"] == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert models[KNOWN]["defaults"]["flow_shift"] == 3.0
    assert models["wan2.2-t2v-a14b"]["defaults"]["published_flow_shift"] == 12.0
    shown, text = answer(["models", "show", "wan2.2-t2v-a14b"], capsys)
    assert shown == models["wan2.2-t2v-a14b"]
    assert "guidance 4 and 3, shift 12 in the model authors' code, negative prompt the model authors' own" in text
    assert run(["plan", "a boat", "--model", "wan2.1-1.3b", "--width", "64", "--height", "64", "--frames", "5"]) == 0
    capsys.readouterr()

    result, text = answer(["models", "verify", "wan2.1-1.3b"], capsys)
    assert result["ok"] is True
    assert "verified, 10 files" in text
    with (folder / VAE).open("r+b") as stream:
        stream.seek(100_000)
        stream.write(b"damage")
    for names in (["wan2.1-1.3b"], [KNOWN], [f"Wan-AI/{KNOWN}"], [str(folder)], []):
        result, text = answer(["models", "verify", *names], capsys, code=2)
        assert str(fact("hub.file_hash", file=VAE)) in text
        assert f"models download Wan-AI/{KNOWN}" in text
    hub.sent.clear()
    result, _ = answer(["models", "download", f"Wan-AI/{KNOWN}", "--yes"], capsys)
    assert set(hub.sent) == {VAE}
    assert answer(["models", "verify"], capsys)[0]["ok"] is True
    _, text = answer(["models", "download", KNOWN], capsys)
    assert str(fact("cli.model_complete", model=KNOWN)) in text
    assert "License" not in text


def test_a_model_of_control_frames_is_downloaded_listed_and_verified(
    hub: LoopbackHub, few_models: None, cache_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, folder = PUBLISHED[0], save_depth(tmp_path / "published")
    repository = model.parts[0].repository
    hub.repositories[repository] = of_folder(folder / DEPTH_ESTIMATOR)
    result, text = answer(["models", "download", model.name, "--yes"], capsys)
    assert result["license"] == "Apache-2.0" and f"License: Apache-2.0. Text: {hub.address}/{repository}" in text
    listed, _ = answer(["models", "list"], capsys)
    rows: Any = listed["preprocessors"]
    assert {row["name"]: row["here"] for row in rows} == {model.name: True, PUBLISHED[1].name: False}
    verified, _ = answer(["models", "verify", model.name], capsys)
    assert verified["ok"]


def test_download_asks_first_and_can_be_declined(
    hub: LoopbackHub, cache_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["models", "download", "wan2.1-1.3b"]
    assert run(command) == 2
    error = capsys.readouterr().err
    assert "License: Apache-2.0" in error
    what, remedy = render(fact("cli.license_not_confirmed"))
    assert error.endswith(f"\nError: {what}\nTo do: {remedy}\n")
    assert "--yes" in remedy

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for typed, code in (("\n", 130), ("no\n", 130), ("", 130), ("Yes\n", 0)):
        assert not hub.sent
        monkeypatch.setattr("sys.stdin", Terminal(typed))
        assert run(command) == code
    assert hub.sent


@pytest.mark.parametrize("how", ["flag", "TANDEM_OFFLINE", "HF_HUB_OFFLINE", "file"])
def test_offline_sends_no_request(
    how: str, hub: LoopbackHub, cache_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--offline"] if how == "flag" else []
    if how == "file":
        cache_dir.mkdir()
        (cache_dir / "settings.json").write_text('{"offline": true}')
    elif how != "flag":
        monkeypatch.setenv(how, "1")
    found = refused(["models", "download", "wan2.1-1.3b", "--yes", *flags], capsys)
    assert found.code == "hub.offline"
    expected = {"flag": "--offline or TANDEM_OFFLINE", "file": "settings.json"}.get(how, how)
    assert expected in found.what
    assert not hub.requests
    # The rest works as ever, and the flag is gone with its command.
    assert run(["jobs", "list", *flags]) == 0
    assert run(["plan", "a boat", "--model", "diorama", *flags]) == 0
    if how == "flag":
        capsys.readouterr()
        answer(["models", "download", "wan2.1-1.3b", "--yes"], capsys)


def test_invalid_names_revisions_and_mirrors_are_refused(
    hub: LoopbackHub, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    def mirror(address: str) -> list[str]:
        return ["wan2.1-1.3b", "--mirror", address]

    cases: list[tuple[list[str], str, dict[str, Any]]] = [
        (["no/such/model"], "hub.name_invalid", {"name": "no/such/model"}),
        (["../x"], "hub.name_invalid", {"name": "../x"}),
        (["wan"], "hub.name_invalid", {"name": "wan"}),
        (["a/b..c"], "hub.name_invalid", {"name": "a/b..c"}),
        (["wan", "--variant", "fits"], "hub.name_invalid", {"name": "wan"}),
        (["wan2.1-1.3b", "--variant", "fits"], "variant.none", {"field": "variant"}),
        (["wan2.1-1.3b", "--revision", ""], "cli.revision_unreadable", {"field": "revision"}),
        (mirror("hub.example"), "settings.not_a_hub", {"source": "--mirror"}),
        (mirror("http://hub.example"), "settings.hub_without_https", {"source": "--mirror"}),
        (mirror("https://me:secret@hub.example"), "settings.hub_with_password", {"source": "--mirror"}),
        (mirror("https://hub.example/?x=1"), "settings.not_a_hub", {"source": "--mirror"}),
        (mirror("file:///etc"), "settings.not_a_hub", {"source": "--mirror"}),
        (mirror("https://[::1"), "settings.not_a_hub", {"source": "--mirror"}),
    ]
    download = ["models", "download", "--yes"]
    check_refusals(cases, capsys, subtests, download)
    by_hub: list[tuple[list[str], str, dict[str, Any]]] = [
        (["Wan-AI/Nothing"], "hub.no_repository", {"repository": "Wan-AI/Nothing"}),
        (["wan2.1-1.3b", "--revision", "v9"], "hub.no_revision", {}),
    ]
    check_refusals(by_hub, capsys, subtests, download, began=True)
    secret = refused([*download, *mirror("https://me:secret@hub.example")], capsys)
    assert "secret" not in str(secret)


def test_hf_endpoint_is_validated_when_it_is_used(
    cache_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TANDEM_HUB", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example")
    assert run(["plan", "a boat", "--model", "diorama"]) == 0
    capsys.readouterr()
    found = refused(["models", "download", "wan2.1-1.3b", "--yes"], capsys)
    assert found.code == "settings.hub_without_https"
    assert str(found.data["source"]).startswith("HF_ENDPOINT")
    # What huggingface_hub cannot read is kept from it.
    monkeypatch.delenv("HF_ENDPOINT")
    monkeypatch.setenv("TANDEM_UNUSABLE_HF_ENDPOINT", "http://[")
    found = refused(["models", "download", "wan2.1-1.3b", "--yes"], capsys)
    assert found.code == "settings.not_a_hub"
    assert str(found.data["source"]).startswith("HF_ENDPOINT")


def test_verifying_a_model_that_was_not_downloaded_is_refused(
    hub: LoopbackHub, tiny: Callable[[str], ModelSpec], cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, text = answer(["models", "verify"], capsys)
    assert result == {"ok": True, "models": []}
    assert text == str(fact("cli.no_models_downloaded"))
    shutil.copytree(tiny("wan2.1").directory, cache_dir / "weights" / "mine")
    assert refused(["models", "verify", "mine"], capsys).code == "hub.no_manifest"
    assert refused(["models", "verify", "diorama"], capsys).code == "hub.no_manifest"
    assert refused(["models", "verify", "no-such"], capsys).code == "model.unknown"


def test_a_broken_connection_is_reported_with_the_received_bytes(
    hub: LoopbackHub, few_models: None, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.faults[VAE] = Fault("404")
    assert run(["models", "download", "wan2.1-1.3b", "--yes"]) == 2
    came = sum(hub.sent.values())
    capsys.readouterr()
    listed, text = answer(["models", "list"], capsys)
    models = {model["name"]: model for model in listed["models"]}  # type: ignore[attr-defined]
    assert models["wan2.1-t2v-1.3b"]["begun_bytes"] == came
    assert f" {byte_size(came)} of it " in text
    _, text = answer(["models", "show", "wan2.1-t2v-1.3b"], capsys)
    assert re.search(rf" {byte_size(came)} [^`]*`\./install\.sh models download wan2\.1-t2v-1\.3b`", text)
    result, text = answer(["models", "download", "wan2.1-1.3b", "--yes"], capsys)
    assert result["fetched_bytes"] == result["bytes"] - came  # type: ignore[operator]
    assert "already downloaded; " in text


def test_a_scheduler_that_differs_from_the_authors_code_is_reported() -> None:
    known = known_as("a14b")
    assert known is not None
    spec = known.spec(Path("none"))
    need = needs(spec, machine())
    for shift, says in (
        (3.0, "shift 3 (12 in the model authors' code), "),
        (12.0, "shift 12, "),
        (None, "shift 12 in the model authors'"),
    ):
        assert says in describe(replace(spec, flow_shift=shift), need)[1]
    assert "shift 5, " in describe(replace(spec, experts=1, flow_shift=5.0), need)[1]


@pytest.mark.parametrize(
    ("progress", "says"),
    [
        (DownloadProgress(note=Fact("hub.asking", {"host": "huggingface.co"})), "Asking huggingface.co"),
        (
            DownloadProgress(
                file="a", number=2, count=9, done=5 * 10**9, total=10**10, rate=10.0**8, seconds_left=50.0
            ),
            "━━━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌ 5.0 GB of 10.0 GB · 100.0 MB/s · 50 s left · 2/9 a",
        ),
        (
            DownloadProgress(file="a", number=2, count=9, done=0, total=10, note=Fact("hub.disconnected")),
            f"╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 0 B of 10 B · {str(fact('hub.disconnected')).rstrip('.')}",
        ),
    ],
)
def test_the_progress_line(progress: DownloadProgress, says: str) -> None:
    assert progress_text(progress) == says
