"""Read random damaged files: model folders, LoRAs, engine folders, files of the cache folder and videos.

Checked for each: it is read, or refused with one of Tandem's own errors, within five seconds, and the process's memory
grows by less than 200 MB.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from runtime.core import settings
from runtime.core.errors import TandemError
from runtime.core.loras import Lora
from runtime.engines.imported.matching import ADAPTERS_FILE
from runtime.engines.sessions.imported import read_adapters
from runtime.engines.store import EngineStore
from runtime.models.catalogue import add_usable
from runtime.models.hub.files import read_manifest
from runtime.models.loras import loras_dir, with_loras
from runtime.models.registry import check_folder, read_spec
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_scheduler, load_tokenizer
from runtime.pipeline.history_file import HistoryFile
from runtime.planner.requirements import needs
from runtime.video.mp4 import VideoWriter, read_metadata
from tests import lora_files, tiny_models
from tests.engines.engine_files import key, put
from tests.fuzz.examples import try_many
from tests.plans import machine

MAX_SECONDS = 5.0
MAX_MB = 200
KINDS = ("model", "lora", "engine", "cache", "video")
_MAX_BASE_BYTES = 10 << 20
_NUMBERS = (0, -1, 1, 2, 3, 7, 10**6, 10**9, 10**400, 0.5, 1e308, float("inf"), float("-inf"), float("nan"))
_VALUES: tuple[Any, ...] = (
    *_NUMBERS,
    None,
    True,
    False,
    "",
    "x",
    "../x",
    "/dev/zero",
    "x\0y",
    "\n",
    "ü" * 300,
    [],
    {},
    [[]],
    [{}],
    {"": 0},
)
_TEXTS = (
    b"", b"{", b"[]", b"null", b"{}", b"1", b"{" * 9, b"[" * 100_000, b'{"a":' * 100_000, b'{"a":1,"a":2}',
    b'{"a":"\\ud800"}', b"\xff\xfe", b"\x80\x02}q\x00.", b"[" + b"[]," * 900_000 + b"[]]",
    b'"' + b"x" * 3_000_000 + b'"', b"[1" + b"0" * 5_000 + b"]",
)  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One change of a file, made by its own random numbers.

    Attributes:
        kind: a value, a name, bytes, the length, the whole text, or what stands in the file's place.
        seed: of the random numbers.
    """

    kind: str
    seed: int


CHANGES = st.builds(
    Change,
    kind=st.sampled_from(["value"] * 8 + ["name"] * 2 + ["bytes"] * 3 + ["length", "text", "place"]),
    seed=st.integers(0, 2**32),
)
EXAMPLES = st.tuples(st.integers(0, 2**32), st.lists(CHANGES, max_size=3))


@dataclass
class Reader:
    """The files that are changed, and counts of what became of them."""

    folder: Path
    spec: ModelSpec
    video: Path
    found: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    most_mb: float = 0.0

    def run(self, kind: str, examples: int, seed: int) -> None:
        """Read a number of random files of one kind."""
        read: Callable[[random.Random, list[Change]], None] = getattr(self, f"_{kind}")
        try_many(EXAMPLES, lambda one: self._judge(kind, lambda: read(random.Random(one[0]), one[1])), examples, seed)

    def _judge(self, kind: str, read: Callable[[], None]) -> None:
        place = self.folder / "example"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        began, before = time.monotonic(), _start_measuring()
        signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
        try:
            read()
            self.found[f"{kind}: read"] += 1
        except TandemError as error:
            assert error.what
            assert "\n" not in error.what
            self.found[f"{kind}: refused"] += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self.slowest = max(self.slowest, time.monotonic() - began)
        grown = _peak_mb() - before
        self.most_mb = max(self.most_mb, grown)
        assert grown < MAX_MB, f"{kind}: {grown:.0f} MB"

    def _model(self, chance: random.Random, changes: list[Change]) -> None:
        folder = self.folder / "example" / "weights" / "model"
        shutil.copytree(self.spec.directory, folder, copy_function=_link)
        names = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
        for change in changes:
            _apply(change, folder / chance.choice([*names, Path("tandem.json"), Path("x/y")]))
        with contextlib.suppress(TandemError):
            check_folder(folder, "model")
        offered = add_usable({}, folder.parent)
        assert "diorama" in offered
        spec = read_spec(folder, "model")
        needs(spec, machine(), ())
        load_tokenizer(spec)
        load_scheduler(spec)

    def _lora(self, chance: random.Random, changes: list[Change]) -> None:
        path = loras_dir(self.folder / "example") / "a.safetensors"
        path.parent.mkdir()
        _link(self.folder / "lora.safetensors", path)
        for change in changes:
            _apply(change, path)
        with_loras(self.spec, [Lora("a", chance.choice([1.0, 0.5]))], self.folder / "example")

    def _engine(self, chance: random.Random, changes: list[Change]) -> None:
        folder = self.folder / "example" / key().digest()
        shutil.copytree(self.folder / "engine", folder, copy_function=_link)
        for change in changes:
            _apply(change, folder / chance.choice(["engine.json", "engine.json", "engine.pt2", ADAPTERS_FILE]))
        store = EngineStore(folder.parent, 10**9)
        for record in store.index():
            store.verify_hash(record)
        store.similar(key(precision="float16"))
        store.prune()
        store.total_bytes()
        read_adapters(folder)

    def _cache(self, chance: random.Random, changes: list[Change]) -> None:
        folder = self.folder / "example"
        shutil.copytree(self.folder / "cache", folder, dirs_exist_ok=True, copy_function=_link)
        for change in changes:
            _apply(
                change, folder / chance.choice(["settings.json", "settings.json", "history.json", "tandem-files.json"])
            )
        HistoryFile(folder, machine()).read()
        with contextlib.suppress(TandemError):
            read_manifest(folder)
        settings.load(environ={"TANDEM_CACHE_DIR": str(folder)})

    def _video(self, chance: random.Random, changes: list[Change]) -> None:
        del chance
        path = self.folder / "example" / "a.mp4"
        _link(self.video, path)
        for change in changes:
            _apply(change, path)
        read_metadata(path)


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[Reader]:
    """Make valid files to damage, and let nothing run longer than the limit, in a `with` block."""
    spec = read_spec(tiny_models.build("wan2.2-a14b", folder / "tiny"), "tiny")
    lora_files.save(folder / "lora.safetensors", lora_files.wan(lora_files.factors(spec.transformer), alpha=2.0))
    (folder / "engine").mkdir()
    put(folder / "engine", key())
    port = {"name": "x", "dtype": "float32", "sizes": [1, -1], "ranges": [[[1, 1], [1, 2], [1, 4]]]}
    contract = {"backend": "tensorrt", "made_by": "", "inputs": [port], "outputs": [port], "precision": "float16"}
    adapters = [{"kind": "Names", "inputs": [["a", "b"]], "outputs": [["c", "d"]]}, {"kind": "PaddedIds", "length": 8}]
    text = json.dumps({"contract": contract, "batch": 1, "adapters": adapters})
    (folder / "engine" / ADAPTERS_FILE).write_text(text)
    (folder / "cache").mkdir()
    values = {"port": 7860, "auth": ["a", "b"], "tensorrt": "all", "share_size": [64, 64], "engine_cache_gb": 5.5}
    (folder / "cache" / "settings.json").write_text(json.dumps(values))
    run = {"kind": "x", "flops": 1.0, "seconds": 1.0, "working_bytes": 1, "excess_bytes": None}
    (folder / "cache" / "history.json").write_text(json.dumps({"version": 1, "runs": [run]}))
    file = {"size": 1, "digest": f"git:{'a' * 40}"}
    listed = {"repository": "a/b", "commit": "a" * 40, "license": "", "files": {"vae/config.json": file}}
    (folder / "cache" / "tandem-files.json").write_text(json.dumps(listed))
    video = folder / "video.mp4"
    with VideoWriter(video, 32, 32, 8, 30) as writer:
        writer.write(np.zeros((4, 32, 32, 3), np.uint8))
        writer.close_stream()
        writer.finish("a boat", {"tandem": {"prompt": "a boat", "seed": 1}})

    def stop(*_: object) -> None:
        raise AssertionError("it takes longer than the limit")

    before = signal.signal(signal.SIGALRM, stop)
    try:
        yield Reader(folder, spec, video)
    finally:
        signal.signal(signal.SIGALRM, before)


def _link(source: Any, target: Any) -> None:
    os.link(source, target)


def _apply(change: Change, path: Path) -> None:
    """Change a file, which may not exist; the original stays, as both are links to one file."""
    chance = random.Random(change.seed)
    is_small = path.is_file() and not path.is_symlink() and path.stat().st_size < _MAX_BASE_BYTES
    data = path.read_bytes() if is_small else b""
    if path.is_dir() and not path.is_symlink():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if change.kind == "place":
        _put_in_place(path, chance.choice(["fifo", "device", "folder", "loop", "nothing", "sparse"]))
    else:
        path.write_bytes(_changed(change.kind, data, chance, path.suffix == ".safetensors"))


def _put_in_place(path: Path, kind: str) -> None:
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path)
        case "sparse":
            path.touch()
            os.truncate(path, 1 << 40)


def _changed(kind: str, data: bytes, chance: random.Random, is_safetensors: bool) -> bytes:
    if kind == "text":
        text = chance.choice(_TEXTS)
        return len(text).to_bytes(8, "little") + text if is_safetensors and chance.random() < 0.5 else text
    if kind == "length":
        return (
            data[: chance.randrange(len(data) + 1)] if chance.random() < 0.7 else data + bytes(chance.randrange(1, 99))
        )
    if kind in {"value", "name"}:
        start = 8 + int.from_bytes(data[:8], "little") if is_safetensors else len(data)
        with contextlib.suppress(ValueError, RecursionError):
            values = json.loads(data[8:start] if is_safetensors else data)
            _change_one(values, kind, chance)
            text = json.dumps(values).encode()
            return len(text).to_bytes(8, "little") + text + data[start:] if is_safetensors else text
    changed = bytearray(data or b"x")
    for _ in range(chance.randrange(1, 9)):
        # Most of what matters is in the first kilobytes.
        changed[min(int(chance.paretovariate(0.3)) - 1, len(changed) - 1)] = chance.randrange(256)
    return bytes(changed)


def _change_one(values: Any, kind: str, chance: random.Random) -> None:
    """Replace, remove or rename one value, anywhere in JSON."""
    while isinstance(values, dict | list) and values:
        place = chance.choice(list(values) if isinstance(values, dict) else range(len(values)))
        inner = values[place]
        if isinstance(inner, dict | list) and inner and chance.random() < 0.8:
            values = inner
            continue
        if kind == "value":
            values[place] = chance.choice([*_VALUES, [inner] * 5, [1] * 50_000])
        elif isinstance(values, dict) and chance.random() < 0.5:
            values[chance.choice(["", "x", "__metadata__", "a.b", "_class_name"])] = values.pop(place)
        else:
            del values[place]
        return


def _start_measuring() -> float:
    """Set the peak of the process's memory to the memory in use, and return it in MB."""
    with contextlib.suppress(OSError):  # another system than Linux
        Path("/proc/self/clear_refs").write_text("5")
    return _peak_mb()


def _peak_mb() -> float:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), 0.0)
