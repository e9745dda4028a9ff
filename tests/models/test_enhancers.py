"""What the setting names: chat models in folders, published ones, damaged ones, downloads; chat servers."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.core import settings
from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import EnhancerError, SettingsError, TandemError
from runtime.core.settings import Settings
from runtime.models.catalogue import folders, transformer_files, unusable
from runtime.models.chat_server import ask_server
from runtime.models.enhancers import (
    CHAT_MODEL,
    PUBLISHED,
    LocalEnhancer,
    RemoteEnhancer,
    enhancer_of,
    folder_of_enhancer,
)
from runtime.models.hub.client import Hub
from runtime.models.hub.download import Download, downloaded, source_of
from runtime.models.hub.files import verify
from tests.chat_models import ChatServer, chat_server, save_chat_model
from tests.models.hub import Repository, of_folder, served
from tests.models.test_download import QUICK
from tests.preprocessor_files import configured, pickle_weights, truncate_weights

MESSAGES = [{"role": "user", "content": "a red boat"}]
SERVER = "http://127.0.0.1:9/v1"


def named(folder: Path, **variables: str) -> Settings:
    """Return the settings with variables of the enhancer, by the end of their names."""
    cache = {"TANDEM_CACHE_DIR": str(folder)}
    return settings.load({}, cache | {f"TANDEM_{name.upper()}": text for name, text in variables.items()})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat") / "mine")


def test_a_folder_a_name_and_a_server_are_enhancers(saved: Path, tmp_path: Path) -> None:
    expected = LocalEnhancer(saved, "mine", 1554)
    assert enhancer_of(named(tmp_path, enhancer=str(saved))) == expected
    link = folder_of_enhancer("mine", tmp_path / "weights")
    link.parent.mkdir(parents=True)
    link.symlink_to(saved)
    assert enhancer_of(named(tmp_path, enhancer="mine")) == LocalEnhancer(link, "mine", 1554)
    assert enhancer_of(named(tmp_path, enhancer="someone/mine")) == LocalEnhancer(link, "mine", 1554)
    assert not {*folders(tmp_path / "weights")} & {"enhancers", "mine"}
    assert not unusable(tmp_path / "weights", ()) and not transformer_files(tmp_path / "weights")
    loaded = named(tmp_path, enhancer=f"{SERVER}/", enhancer_model="small", enhancer_key="secret")
    remote = enhancer_of(loaded)
    assert remote == RemoteEnhancer(SERVER, "small", "secret") and remote.title == "small (127.0.0.1:9)"
    assert "secret" not in f"{remote} {loaded}"


REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "none": ({}, "enhancer.none"),
    "published": ({"enhancer": PUBLISHED[1].repository.upper()}, "enhancer.not_downloaded"),
    "repository": ({"enhancer": "someone/chat"}, "enhancer.repository_not_downloaded"),
    "path": ({"enhancer": "/no/such/folder"}, "enhancer.no_such_folder"),
    "server without a model": ({"enhancer": SERVER}, "enhancer.no_model_name"),
    "server elsewhere": (
        {"enhancer": "https://example.org/v1", "enhancer_model": "small", "offline": "1"},
        "enhancer.offline",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_enhancer_that_is_not_there_is_refused_by_name(case: str, tmp_path: Path) -> None:
    variables, code = REFUSED[case]
    with pytest.raises(EnhancerError) as caught:
        enhancer_of(named(tmp_path, **variables))
    assert caught.value.code == code and caught.value.remedy
    own = named(tmp_path, enhancer=SERVER, enhancer_model="small", offline="1")
    assert isinstance(enhancer_of(own), RemoteEnhancer)  # on this machine


@pytest.mark.parametrize(
    "address", ["http://", "http://user:word@host/v1", "https://host/v1?key=1", "http://host:0/v1", "http://a b/v1"]
)
def test_an_address_that_is_none_is_refused_without_its_text(address: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        named(tmp_path, enhancer=address)
    assert caught.value.code == "settings.not_an_enhancer" and "word" not in str(caught.value.fact)
    with pytest.raises(SettingsError) as caught:
        named(tmp_path, enhancer_key="s\u00e9cret key")
    assert caught.value.code == "settings.not_a_word" and "cret" not in str(caught.value.fact)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pickled": (pickle_weights, "model.pickled"),
    "truncated": (truncate_weights, "model.file_damaged"),
    "without configuration": (lambda folder: (folder / "config.json").unlink(), "model.file_missing"),
    "without tokenizer": (lambda folder: (folder / "tokenizer_config.json").unlink(), "model.file_missing"),
    "without template": (lambda folder: (folder / "chat_template.jinja").unlink(), "enhancer.no_chat_template"),
    "other class": (configured("config.json", architectures=["T5Model"]), "enhancer.not_a_chat_model"),
    "no class": (configured("config.json", architectures=7), "enhancer.not_a_chat_model"),
    "quantized": (configured("config.json", quantization_config={"bits": 4}), "enhancer.quantized"),
    "own code": (configured("tokenizer_config.json", auto_map={"a": "b"}), "model.tokenizer_runs_code"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_chat_model_is_refused(damage: str, saved: Path, tmp_path: Path) -> None:
    change, code = DAMAGE[damage]
    folder = tmp_path / "chat"
    folder.mkdir()
    for file in saved.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    change(folder)
    with pytest.raises(TandemError) as caught:
        enhancer_of(named(tmp_path, enhancer=str(folder)))
    assert caught.value.code == code


def test_chat_models_are_downloaded_and_no_pickles(saved: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    repository = of_folder(saved)
    more = {"README.md": b"#", "pytorch_model.bin": b"pickled", "onnx/model.onnx": b"1", "merges.txt": b"a b"}
    with served() as hub:
        hub.repositories[PUBLISHED[0].repository] = Repository(repository.files | more)
        hub.repositories["someone/chat"] = Repository(repository.files)
        hub.repositories["someone/none"] = Repository({"config.json": b"{}", "model.safetensors": b"1"})
        for name, own in ((PUBLISHED[0].name, False), ("someone/chat", True)):
            with Download(source_of(name, None, enhancer=own), weights, Hub(hub.address, QUICK), lambda _: None) as one:
                plan = one.plan(Cancel())
                assert plan.listing.license == ("Apache-2.0" if not own else "apache-2.0")
                one.run(plan, Cancel())
        none = Download(
            source_of("someone/none", None, enhancer=True), weights, Hub(hub.address, QUICK), lambda _: None
        )
        with none, pytest.raises(TandemError) as caught:
            none.run(none.plan(Cancel()), Cancel())
        assert caught.value.code == "hub.model_unusable"
    folder = folder_of_enhancer(PUBLISHED[0].name, weights)
    names = {path.relative_to(folder / CHAT_MODEL).as_posix() for path in (folder / CHAT_MODEL).rglob("*")}
    assert names == {*repository.files, "merges.txt"}
    assert downloaded(weights) == [folder_of_enhancer("chat", weights), folder]
    assert not verify(folder, Cancel(), lambda *_: None).differences
    enhancer = enhancer_of(named(tmp_path, enhancer=PUBLISHED[0].name))
    assert enhancer == LocalEnhancer(folder / CHAT_MODEL, PUBLISHED[0].title, 1554)


@pytest.fixture(scope="module")
def shared_server() -> Iterator[ChatServer]:
    with chat_server() as running:
        yield running


@pytest.fixture
def server(shared_server: ChatServer) -> ChatServer:
    fresh = ChatServer(shared_server.address)
    vars(shared_server).update(vars(fresh))
    return shared_server


def test_a_server_is_asked_in_openais_format(server: ChatServer) -> None:
    assert ask_server(RemoteEnhancer(server.address, "small", "secret"), MESSAGES, Cancel()) == server.text
    assert ask_server(RemoteEnhancer(server.address, "small"), MESSAGES, Cancel()) == server.text
    assert server.keys == ["Bearer secret", None]
    asked = server.asked[0]
    assert (asked["model"], asked["messages"], asked["temperature"]) == ("small", MESSAGES, 0)


FAILURES: dict[str, tuple[dict[str, Any], str]] = {
    "key": ({"status": 401}, "enhancer.key_refused"),
    "model": ({"status": 404}, "enhancer.not_found"),
    "busy": ({"status": 429}, "enhancer.server_busy"),
    "failed": ({"status": 500}, "enhancer.status"),
    "elsewhere": ({"status": 307}, "enhancer.status"),
    "html": ({"body": b"<html>"}, "enhancer.wrong_format"),
    "other json": ({"body": b'{"choices": []}'}, "enhancer.wrong_format"),
    "a list": ({"body": b"[" * 100_000}, "enhancer.wrong_format"),
    "no text": ({"body": b'{"choices": [{"message": {"content": 7}}]}'}, "enhancer.wrong_format"),
    "thoughts": ({"body": b'{"choices": [{"message": {"content": null}}]}'}, "enhancer.answer_empty"),
    "endless": ({"body": b" " * (1 << 21)}, "enhancer.wrong_format"),
    "silent": ({"seconds": 30.0}, "enhancer.silent"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_server_that_fails_is_one_line(failure: str, server: ChatServer) -> None:
    values, code = FAILURES[failure]
    vars(server).update(values)
    with pytest.raises(EnhancerError) as caught:
        ask_server(
            RemoteEnhancer(server.address, "small", "secret"), MESSAGES, Cancel(), 0.3 if "seconds" in values else 60
        )
    assert caught.value.code == code and "secret" not in f"{caught.value} {caught.value.remedy}"


def test_no_server_and_a_cancelled_question(server: ChatServer) -> None:
    with pytest.raises(EnhancerError) as caught:
        ask_server(RemoteEnhancer(SERVER, "small"), MESSAGES, Cancel())
    assert caught.value.code == "enhancer.unreachable"
    server.seconds, cancel = 30.0, Cancel()
    threading.Timer(0.2, cancel.request).start()
    began = time.monotonic()
    with pytest.raises(CancelledError):
        ask_server(RemoteEnhancer(server.address, "small"), MESSAGES, cancel)
    assert time.monotonic() - began < 20
