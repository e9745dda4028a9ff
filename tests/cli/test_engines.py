"""The engine commands: JSON output and invalid input."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from runtime.cli import terminal
from runtime.cli.engines import parse_size
from runtime.cli.main import run
from runtime.core.errors import InvalidRequestError
from runtime.engines.store import EngineStore
from runtime.models.spec import ModelSpec
from runtime.queue.instances import Instance, WorkerRegistry
from runtime.queue.store import JobStore
from tests.cli.refusals import check_refusals
from tests.engines.engine_files import key, put
from tests.facts import fact
from tests.queue.samples import add_job
from tests.umask import users_umask, usual_modes
from tests.waiting import until


def stock(cache_dir: Path, count: int) -> list[str]:
    """Put engines into the library, the first used longest ago, and return their ids."""
    store = EngineStore(cache_dir / "engines", 10**9)
    ids = []
    for number in range(count):
        wanted = key(weights=f"{number:064x}")
        with store.building(wanted.digest(), lambda: None), store.workspace(wanted.digest()) as room:
            put(room.engine, wanted)
            ids.append(store.insert(room.engine, wanted.digest()).id)
    return ids


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, object]:
    """Run a command and return its JSON."""
    assert run([*arguments, "--json"]) == code
    value = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert isinstance(value, dict)
    return value


def test_an_empty_library(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = printed(["engines", "list"], capsys)
    assert listed["engines"] == []
    assert listed["total_bytes"] == 0
    assert listed["folder"] == str(cache_dir.resolve() / "engines")
    assert printed(["engines", "prune"], capsys)["deleted"] == []
    assert printed(["engines", "verify"], capsys) == {"ok": True, "engines": []}
    assert run(["engines", "verify"]) == 0
    assert capsys.readouterr().err == f"{fact('cli.no_engines')}\n"


def test_list_pin_prune_delete(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = stock(cache_dir, 3)
    listed = printed(["engines", "list"], capsys)
    assert [row["id"] for row in listed["engines"]] == [third, second, first]  # type: ignore[attr-defined]
    # Built on another machine, too.
    assert all(str(fact("engine.differs_weights")) in row["stale"] for row in listed["engines"])  # type: ignore[attr-defined]
    total = listed["total_bytes"]
    assert isinstance(total, int)
    printed(["engines", "pin", first[:8]], capsys)
    pruned = printed(["engines", "prune", "--max-size", f"{total - 100}B"], capsys)
    assert pruned["deleted"] == [second]
    assert pruned["enough"] is True
    pruned = printed(["engines", "prune", "--max-size", "0B"], capsys)
    assert pruned["deleted"] == [third]
    assert pruned["enough"] is False
    printed(["engines", "unpin", first], capsys)
    assert printed(["engines", "delete", first], capsys)["deleted"] == [first]
    assert printed(["engines", "list"], capsys)["engines"] == []


@pytest.mark.slow
@pytest.mark.usefixtures("forked_children")
def test_build_estimates_and_reports_the_whole_time(
    tiny: Callable[[str], ModelSpec], cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["--width", "64", "--height", "32", "--frames", "9"]
    arguments = ["build", "--model", str(tiny("wan2.1").directory), "--backend", "text_encoder=onnxruntime", *size]
    assert run([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    done = json.loads(out)
    (engine,) = done["engines"]
    assert err.startswith(f"{fact('cli.engines_to_build', engines=1, seconds=done['estimated_seconds'])}\n")
    assert f"{fact('cli.engines_ready', ready=1, engines=1, seconds=done['seconds'])}\n" in err
    # The child's start, loading, comparison and measurements count, besides building.
    assert 0.9 * done["seconds"] < engine["build_seconds"] <= done["seconds"]
    assert run([*arguments, "--again", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["estimated_seconds"] == engine["build_seconds"], "the history of this machine counts"
    assert run(arguments) == 0
    assert capsys.readouterr().err.startswith(f"{fact('cli.engines_built')}\n")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_children")
def test_a_build_makes_room_for_a_video_and_continues(
    tiny: Callable[[str], ModelSpec], cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, lines, makes_room = JobStore(cache_dir / "jobs.sqlite"), list[str](), str(fact("cli.build_makes_room"))
    library = EngineStore(cache_dir / "engines", 10**9)
    while_it_waited: list[Any] = []
    monkeypatch.setattr(terminal, "line", lines.append)

    def make_video() -> None:
        with Instance(store.path) as app:
            until(lambda: len(lines) > 2)  # the child reports what it does
            video = add_job(store, instance=app.id)
            until(lambda: makes_room in lines)
            while_it_waited.extend([library.index(), [path.name for path in library.folder.glob("[0-9a-f]*")]])
            store.request_cancel([video.id])
            store.put_back(video.id)

    with ThreadPoolExecutor() as threads:
        video = threads.submit(make_video)
        size = ["--width", "64", "--height", "32", "--frames", "9"]
        model = str(tiny("wan2.1").directory)
        assert run(["build", "--model", model, "--backend", "text_encoder=onnxruntime", *size]) == 0
        video.result()
    assert while_it_waited == [[], []] and lines.count(makes_room) == 1
    (engine,) = library.index()
    assert engine.usable
    store.close()


def test_builds_of_the_command_line_wait_for_videos_that_are_made(cache_dir: Path) -> None:
    store = JobStore(cache_dir / "jobs.sqlite")
    queued = add_job(store)
    assert not store.order.has_video()  # nothing makes it
    registry = WorkerRegistry(store.database)
    registry.register("aa.1", 1)
    assert not store.order.has_video()
    registry.register("aa.0", 0)
    assert store.order.has_video()
    assert store.order.claim("aa.1") == store.get(queued.id) and not store.order.has_video()
    store.put_back(queued.id)
    assert store.order.claim("aa.0") == store.get(queued.id) and store.order.has_video()
    store.hold([queued.id], True)
    store.put_back(queued.id)
    assert not store.order.has_video()


def test_an_engine_without_its_model_is_not_verified(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (engine,) = stock(cache_dir, 1)
    found = printed(["engines", "verify", engine], capsys)["engines"][0]  # type: ignore[index]
    assert found["skipped"] == str(fact("engine.no_model_with_weights", engine=engine, model=found["model"]))


@pytest.mark.slow
def test_export_is_compared_with_pytorch(
    tiny: Callable[[str], ModelSpec], cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(tiny("wan2.2-ti2v-5b").directory), "--width", "64", "--height", "64", "--frames", "9"]
    with users_umask(0o022):
        out = printed(["export", "--component", "vae", "--out", str(tmp_path / "x"), *arguments], capsys)
    files = out["files"]
    assert isinstance(files, list)
    assert [Path(file["path"]).name for file in files] == ["vae_first.onnx", "vae_next.onnx"]
    assert all(file["error"] < 1e-5 and Path(file["path"]).stat().st_size == file["bytes"] for file in files)
    paths = [tmp_path / "x", *(Path(file["path"]) for file in files)]
    assert [path.stat().st_mode & 0o777 for path in paths] == usual_modes(1, 2)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0B", 0),
        ("1.5GB", 1_500_000_000),
        ("500MB", 5 * 10**8),
        ("2 gb", 2 * 10**9),
        (".5kb", 500),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "1", "20", "-1GB", "nan", "inf", "1e400", "10 GiB", "GB", "½", "1,5GB", "٣", "9" * 400]
)
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        parse_size(text)


def test_bad_input_is_refused(cache_dir: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests) -> None:
    no_gpu = {"code": "machine.no_gpu", "data": {}}
    cases: list[tuple[list[str], str, dict[str, Any]]] = [
        (["engines", "delete", "zz"], "engine.not_found", {"engine": "zz"}),
        (["engines", "delete", ""], "engine.not_found", {"engine": ""}),
        (["engines", "delete", "../../etc"], "engine.not_found", {"engine": "../../etc"}),
        (["engines", "delete"], "cli.usage", {"help": "./install.sh engines delete --help"}),
        (["engines", "verify", "0000"], "engine.not_found", {"engine": "0000"}),
        (["engines", "pin", "x\x07"], "engine.not_found", {"engine": "x\x07"}),
        (["engines", "prune", "--max-size", "much"], "cli.size_invalid", {"field": "max_size", "value": "'much'"}),
        (["build", "--backend", "all=tensorrt"], "pipeline.not_buildable", {"backend": "tensorrt", "cause": no_gpu}),
        (["build", "--quantization", "fp8"], "planner.quantization_needs_gpu", {"cause": no_gpu}),
        (["build", "--width", "190"], "planner.not_a_multiple", {"field": "width", "able": [176, 192]}),
        (["build", "--backend", "vae"], "request.not_a_backend", {"field": "backends", "value": "'vae'"}),
        (["export", "--component", "eyes"], "model.no_such_component", {"component": "'eyes'"}),
        (["export", "--out", " "], "cli.folder_unreadable", {"field": "out"}),
        (["export", "--out", "/proc/none/x"], "cli.folder_not_created", {"folder": "/proc/none/x"}),
    ]
    check_refusals(cases, capsys, subtests)
