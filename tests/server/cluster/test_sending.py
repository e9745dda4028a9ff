"""What a head sends to a node: models in single files, LoRAs and engines, each verified, and nothing twice."""

import contextlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from runtime.core.events import Failed, VideoSaved
from runtime.core.request import GenerationRequest
from runtime.core.settings import Settings
from runtime.engines import manifest
from runtime.engines.builders import BUILDERS
from runtime.engines.store import EngineStore
from runtime.machine.probe import probe
from runtime.models.catalogue import find
from runtime.models.requested import model_for
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_index import EngineRecord, ShapeProfile
from runtime.planner.resolve import PlanningContext, resolve
from runtime.queue.records import JobRecord
from runtime.queue.store import JobStore
from runtime.server.cluster import transfer
from runtime.server.cluster.node_worker import NodeWorker
from runtime.server.cluster.sending import Sender
from tests import lora_files, part_files
from tests.engines import engine_files
from tests.sounds import loudness, pitch, sound_in, tone, write_clip
from tests.transformer_files import save_gguf, wide_transformer
from tests.video.test_reader import H264, make

pytestmark = pytest.mark.slow

_worker: NodeWorker


def _start(cache: str) -> None:
    global _worker  # noqa: PLW0603 - of the node's process
    os.environ["TANDEM_CACHE_DIR"] = cache
    _worker = NodeWorker()


def _call(method: str, values: tuple[Any, ...]) -> Any:
    found = getattr(_worker, method)(*values)
    return list(found) if method == "run" else found


class Node:
    """A node's worker in a process of its own, without Ray."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.calls: list[tuple[Any, ...]] = []
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, spawn, _start, (str(cache),))

    def begin(self, method: str, *values: Any) -> "Future[Any]":
        self.calls.append((method, *values))
        return self._pool.submit(_call, method, values)

    def end(self, begun: "Future[Any]") -> Any:
        return begun.result(120)

    def check(self) -> None:
        """No job stops here."""

    def call(self, method: str, *values: Any) -> Any:
        return self.end(self.begin(method, *values))

    def received(self) -> list[str]:
        """Return the names of the files that were sent since the last call."""
        found = [str(values[3]) for values in self.calls if values[0] == "complete"]
        self.calls.clear()
        return found

    def close(self) -> None:
        self._pool.shutdown()


class Head:
    """A head's folders, and what it sends to a node."""

    def __init__(self, cache: Path, node: Node) -> None:
        self.settings = Settings(cache_dir=cache)
        self.store = JobStore(cache / "jobs.sqlite")
        self.library = EngineStore(cache / "engines", 10**9)
        empty: frozenset[str] = frozenset()
        self.sender = Sender(node, self.settings, self.library, empty, empty)

    def job(self, **fields: object) -> JobRecord:
        """Queue a tiny video and claim it."""
        tiny = {"prompt": "a red boat", "width": 64, "height": 32, "frames": 5, "steps": 2, "seed": 1}
        request = GenerationRequest.from_mapping(tiny | fields)
        spec = model_for(request, self.settings.weights_dir, self.settings.cache_dir)
        plan = resolve(request, spec, PlanningContext(probe(), self.settings.cache_dir / "outputs" / "x.mp4"))
        claimed = self.store.order.claim_job(self.store.add(request, plan).id, "head.node0")
        assert claimed is not None
        return claimed

    def prepare(self, record: JobRecord) -> Any:
        return self.sender.prepare(record, self.store, contextlib.nullcontext())


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    made = Node(tmp_path_factory.mktemp("node"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[[str], ModelSpec], node: Node) -> Head:
    cache = tmp_path_factory.mktemp("head")
    shutil.copytree(tiny("wan2.1").directory, cache / "weights" / "base")
    return Head(cache, node)


def test_a_model_of_two_gguf_files_and_a_lora_are_sent_once(head: Head, node: Node, tmp_path: Path) -> None:
    weights = head.settings.weights_dir
    state = dict(wide_transformer().state_dict())
    for expert in ("high", "low"):
        (weights / f"{expert}_noise").mkdir()
        save_gguf(weights / f"{expert}_noise" / "wan_x (v1).gguf", state, "Q8_0")
    spec = find(str(weights / "high_noise" / "wan_x (v1).gguf"), weights)
    lora = lora_files.save(tmp_path / "style.safetensors", lora_files.peft(lora_files.factors(spec.transformer)))
    fields = {"model": str(weights / "high_noise" / "wan_x (v1).gguf"), "loras": [{"file": str(lora)}]}
    record = head.job(**fields)
    order = head.prepare(record)
    sent = node.received()
    assert {"high_noise/wan_x (v1).gguf", "low_noise/wan_x (v1).gguf"} < set(sent)
    assert not [name for name in sent if name.startswith("transformer")]
    events = [value for kind, value in node.call("run", order) if kind in {"event", "outcome"}]
    assert isinstance(events[-1], VideoSaved), events[-1]
    node.received()
    head.prepare(head.job(**fields))
    assert node.received() == []
    # What is damaged there is sent again.
    there = next((node.cache / "weights" / transfer.BUNDLES).rglob("low_noise/*.gguf"))
    there.write_bytes(b"damaged")
    head.prepare(head.job(**fields))
    assert node.received() == ["low_noise/wan_x (v1).gguf"]


def test_text_encoder_and_vae_in_single_files_and_a_video_are_sent(head: Head, node: Node, tmp_path: Path) -> None:
    weights = head.settings.weights_dir
    base = weights / "a model without"
    shutil.copytree(weights / "base", base, ignore=shutil.ignore_patterns("text_encoder", "transformer", "diff*"))
    (base / "vae" / "config.json").write_text(json.dumps(dict(part_files.vae().config)))
    for folder in ("diffusion_models", "text_encoders", "vae"):
        (weights / folder).mkdir()
    # Two files have the same name.
    encoder = part_files.weights(part_files.text_encoder())
    part_files.save_text_encoder(weights / "text_encoders" / "x.safetensors", encoder, "comfyui")
    vae = part_files.original_vae_names(part_files.weights(part_files.vae()))
    save_file(vae, weights / "vae" / "x.safetensors")
    path = weights / "diffusion_models" / "wan_y.gguf"
    save_gguf(path, dict(wide_transformer().state_dict()), "Q8_0")
    spec = find(str(path), weights)
    assert spec.directory == base and len(set(spec.single_files.values())) == 3
    clip = make(tmp_path / "clip.mp4", *H264, inputs=("-f", "lavfi", "-i", "testsrc=size=64x32:rate=16:duration=1"))
    record = head.job(model=str(path), video=str(clip))
    clip.unlink()
    order = head.prepare(record)
    assert record.plan is not None and record.plan.video is not None
    files = {"wan_y.gguf", "text_encoder.x.safetensors", "vae.x.safetensors", record.plan.video.digest}
    assert files < set(node.received())
    events = [value for kind, value in node.call("run", order) if kind in {"event", "outcome"}]
    assert isinstance(events[-1], VideoSaved), events[-1]


def test_a_video_comes_back_with_its_sound(
    head: Head, node: Node, tiny: Callable[[str], ModelSpec], tmp_path: Path
) -> None:
    shutil.copytree(tiny("wan2.2-ti2v-5b").directory, head.settings.weights_dir / "continues")
    clip = write_clip(tmp_path / "loud.mp4", tone(7 / 8), count=7)
    order = head.prepare(head.job(model="continues", extend=str(clip), sound="lossless", interpolate="2"))
    parts: dict[str, bytes] = {}
    outcome: Any = None
    for kind, value in node.call("run", order):
        if kind == "part":
            name, _, data = value
            parts[name] = parts.get(name, b"") + data
        elif kind == "outcome":
            outcome = value
    assert isinstance(outcome, VideoSaved) and outcome.sound
    for name in transfer.VIDEOS:
        (tmp_path / name).write_bytes(parts[name])
        codec, sound = sound_in(tmp_path / name) or ("", tone(0))
        assert (codec, sound.samples.shape) == ("flac", (1, (7 + 4) * 48_000 // 8))
        assert abs(pitch(sound, 0.1, 0.8) - 440) < 1 and loudness(sound, 0.9, 1.3) == 0


def test_a_video_that_a_node_cannot_run_is_refused_before_it_begins(head: Head, node: Node) -> None:
    order = head.prepare(head.job(model="base"))
    request = {**order.record.request, "gpus": 2}
    sent = node.call("run", replace(order, record=order.record.model_copy(update={"request": request, "begun": False})))
    ((kind, refused),) = sent
    assert kind == "outcome" and isinstance(refused, Failed)


def engine(head: Head, content: bytes = b"engine" * 100, **changes: Any) -> EngineRecord:
    """Add an engine of the model to the head's library."""
    spec = find("base", head.settings.weights_dir)
    profiles = (ShapeProfile.fixed((2, len(content), 8)),)
    key = BUILDERS["onnxruntime"].key(
        spec, "transformer", "transformer", profiles, precision="float32", machine=probe(), device="cpu"
    )
    return engine_files.add(head.library, replace(key, **changes), content, model="base", component="transformer")


@pytest.mark.parametrize(
    ("changes", "sent"),
    [
        ({}, True),
        ({"versions": (("torch", "1.0"),)}, False),
        ({"device": "NVIDIA H200 sm90 CUDA 13.0"}, False),
        ({"system": "Plan9 vax"}, False),
        ({"weights": "0" * 64}, False),
        ({"export_revision": 1}, False),
    ],
)
def test_an_engine_is_sent_if_the_node_would_build_the_same(
    head: Head, node: Node, changes: dict[str, Any], sent: bool
) -> None:
    made = engine(head, os.urandom(40 + len(str(changes))), **changes)
    record = head.job(model="base")
    for _ in range(2):
        head.prepare(record)
    assert (made.id in node.call("describe").engines) == sent == (made.id in head.sender.engines)
    names = [name for name in node.received() if name in {"engine.json", "engine.pt2"}]
    assert names == (["engine.pt2", "engine.json"] if sent else [])
    if sent:
        there = node.cache / "engines" / made.id
        assert manifest.check_hashes(there, made) is None


def test_a_damaged_engine_is_not_installed(head: Head, node: Node, caplog: pytest.LogCaptureFixture) -> None:
    made = engine(head, b"x" * 333)
    (head.library.path(made.id) / "engine.pt2").write_bytes(b"y" * 333)
    head.prepare(head.job(model="base"))
    assert made.id not in node.call("describe").engines | head.sender.engines
    assert "could not be sent" in caplog.text
