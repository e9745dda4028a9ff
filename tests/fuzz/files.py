"""Read random damaged files: model folders, LoRAs, engine folders, files of the cache folder, files of jobs and videos.

Checked for each: it is read, or refused with one of Tandem's own errors, without more than five seconds, and the memory
of the process stays less than 200 MB above what it was after reading valid files.

A child process reads, so that a read that never ends can be killed. On a busy machine, every read can take long: a read
counts as a hang if it takes more than five seconds of processor time, or if it takes more than five seconds each of
three times, without the time for which it waited for a processor (Linux counts it).
"""

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import psutil
import torch
from hypothesis import strategies as st

from runtime.bench.result_files import read_json
from runtime.core import settings
from runtime.core.errors import TandemError
from runtime.core.loras import Lora
from runtime.core.plan import ExecutionPlan
from runtime.engines.imported.matching import ADAPTERS_FILE
from runtime.engines.key_parts import program_key_parts
from runtime.engines.sessions.imported import read_adapters
from runtime.engines.store import EngineStore
from runtime.execution.prompt_cache import PromptCache
from runtime.execution.text_encoder import TextEncoding
from runtime.models.catalogue import add_usable
from runtime.models.hub.files import read_manifest
from runtime.models.loras import loras_dir, with_loras
from runtime.models.registry import check_folder, read_spec
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_scheduler, load_tokenizer
from runtime.pipeline.checkpoint import CheckpointFolder
from runtime.pipeline.files import checkpoint_step
from runtime.pipeline.history_file import HistoryFile
from runtime.planner.requirements import needs
from runtime.video.mp4 import VideoWriter, read_metadata
from tests import lora_files, tiny_models
from tests.engines.engine_files import key, put
from tests.fuzz.examples import try_many
from tests.pipeline.test_checkpoint import checkpoint_of
from tests.plans import machine, tiny_plan

MAX_SECONDS = 5.0
MAX_MB = 200
# A read is killed after this many times its limit.
_PATIENCE = 6
_ATTEMPTS = 3
_MAX_MESSAGE = 1000
_SLOWEST = 5
_MAX_BASE_BYTES = 10 << 20
# A list of 600,000 values may be multiplied once more.
_MAX_BYTES_OF_MANY = 20 << 20
_PROMPT = "a red boat"
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
        kind: a value, many values in place of one, a name, bytes, the length, the whole text, or what stands in the
            file's place.
        seed: of the random numbers.
    """

    kind: str
    seed: int


CHANGES = st.builds(
    Change,
    kind=st.sampled_from(["value"] * 8 + ["name"] * 2 + ["bytes"] * 3 + ["many", "length", "text", "place"]),
    seed=st.integers(0, 2**32),
)
EXAMPLES = st.tuples(st.integers(0, 2**32), st.lists(CHANGES, max_size=3))


@dataclass(frozen=True)
class Places:
    """The valid files.

    Attributes:
        folder: of all files; the damaged ones are in its folder "example".
        plan: of the job that has the checkpoint.
    """

    folder: Path
    spec: ModelSpec
    plan: ExecutionPlan

    @property
    def example(self) -> Path:
        """Where damaged files are."""
        return self.folder / "example"


# Writes damaged files and returns what reads them.
Make = Callable[[Places, random.Random, list[Change]], Callable[[], object]]


def _model(places: Places, chance: random.Random, changes: list[Change]) -> Callable[[], object]:
    folder = places.example / "weights" / "model"
    shutil.copytree(places.spec.directory, folder, copy_function=_link)
    names = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    for change in changes:
        _apply(change, folder / chance.choice([*names, Path("tandem.json"), Path("x/y")]))

    def read() -> None:
        with contextlib.suppress(TandemError):
            check_folder(folder, "model")
        offered = add_usable({}, folder.parent)
        assert "diorama" in offered
        spec = read_spec(folder, "model")
        needs(spec, machine(), ())
        load_tokenizer(spec)
        load_scheduler(spec)

    return read


def _lora(places: Places, chance: random.Random, changes: list[Change]) -> Callable[[], object]:
    path = loras_dir(places.example) / "a.safetensors"
    path.parent.mkdir()
    _link(places.folder / "lora.safetensors", path)
    for change in changes:
        _apply(change, path)
    return lambda: with_loras(places.spec, [Lora("a", chance.choice([1.0, 0.5]))], places.example)


def _engine(places: Places, chance: random.Random, changes: list[Change]) -> Callable[[], object]:
    folder = places.example / key().digest()
    shutil.copytree(places.folder / "engine", folder, copy_function=_link)
    for change in changes:
        _apply(change, folder / chance.choice(["engine.json", "engine.json", "engine.pt2", ADAPTERS_FILE]))

    def read() -> None:
        store = EngineStore(folder.parent, 10**9)
        for record in store.index():
            store.verify_hash(record)
        store.similar(key(precision="float16"))
        store.prune()
        store.total_bytes()
        read_adapters(folder)

    return read


def _cache(places: Places, chance: random.Random, changes: list[Change]) -> Callable[[], object]:
    folder = places.example
    shutil.copytree(places.folder / "cache", folder, dirs_exist_ok=True, copy_function=_link)
    names = [path.name for path in sorted(folder.iterdir())]
    for change in changes:
        _apply(change, folder / chance.choice([*names, "settings.json"]))

    def read() -> None:
        HistoryFile(folder, machine()).read()
        program_key_parts(places.spec, "vae", "vae", folder)
        for refusing in (lambda: read_manifest(folder), lambda: read_json(str(folder / "bench.json"))):
            with contextlib.suppress(TandemError):
                refusing()
        settings.load(environ={"TANDEM_CACHE_DIR": str(folder)})

    return read


def _job(places: Places, chance: random.Random, changes: list[Change]) -> Callable[[], object]:
    folder = places.example
    shutil.copytree(places.folder / "job", folder, dirs_exist_ok=True, copy_function=_link)
    names = [path.relative_to(folder) for path in sorted(folder.rglob("*.safetensors"))]
    for change in changes:
        _apply(change, folder / chance.choice(names))

    def read() -> None:
        PromptCache(folder / "prompts").find(places.spec, places.plan.components["text_encoder"], _PROMPT)
        checkpoint_step(folder)
        CheckpointFolder(folder).load(places.spec, places.plan)

    return read


def _video(places: Places, chance: random.Random, changes: list[Change]) -> Callable[[], object]:
    del chance
    path = places.example / "a.mp4"
    _link(places.folder / "video.mp4", path)
    for change in changes:
        _apply(change, path)
    return lambda: read_metadata(path)


KINDS: Mapping[str, Make] = {
    "model": _model,
    "lora": _lora,
    "engine": _engine,
    "cache": _cache,
    "job": _job,
    "video": _video,
}
Example = tuple[str, int, list[Change]]


class Reading(NamedTuple):
    """What became of the files of one example.

    Attributes:
        text: the message of an error, or a traceback.
        seconds: of the read, without the time for which it waited for a processor.
        processor_seconds: of the read and of ffmpeg.
        mb: the most memory above that after reading valid files.
    """

    outcome: Literal["read", "refused", "failed", "killed"]
    text: str
    seconds: float
    processor_seconds: float
    mb: float


def _serve(connection: Connection, folder: Path, kinds: Mapping[str, Make]) -> None:
    """Read the files of each example that arrives, in a process of its own."""
    spec = read_spec(folder / "tiny", "tiny")
    places = Places(folder, spec, tiny_plan(spec, folder / "x.mp4"))
    for make in kinds.values():  # imports what reading needs
        _empty(places.example)
        make(places, random.Random(0), [])()
    before = _start_measuring()
    while True:
        kind, seed, changes = connection.recv()
        _empty(places.example)
        read = kinds[kind](places, random.Random(seed), changes)
        connection.send(None)
        connection.send(_timed(read, before))


def _timed(read: Callable[[], object], before: float) -> Reading:
    outcome: Literal["read", "refused", "failed"] = "read"
    text = ""
    _start_measuring()
    began, used = time.monotonic() - _waited_seconds(), _processor_seconds()
    try:
        read()
    except TandemError as error:
        outcome, text = "refused", error.what
    except BaseException:
        outcome, text = "failed", traceback.format_exc()
    seconds = time.monotonic() - _waited_seconds() - began
    return Reading(outcome, text, seconds, _processor_seconds() - used, _peak_mb() - before)


@dataclass
class Reader:
    """The process that reads, and what became of the files.

    Attributes:
        found: number of examples by kind and outcome.
        readings: all reads but those that were repeated.
        repeated: reads that took longer than the limit, and not the next time.
    """

    folder: Path
    kinds: Mapping[str, Make] = field(default_factory=lambda: KINDS)
    seconds: float = MAX_SECONDS
    found: Counter[str] = field(default_factory=Counter)
    readings: list[tuple[Reading, Example]] = field(default_factory=list)
    repeated: int = 0
    _process: BaseProcess | None = None
    _connection: Connection | None = None

    def run(self, kind: str, examples: int, seed: int) -> None:
        """Read a number of random files of one kind."""
        try_many(EXAMPLES, lambda one: self.judge((kind, *one)), examples, seed, shrink=False)

    def judge(self, example: Example) -> None:
        """Read the files of one example and check what becomes of it."""
        kind = example[0]
        for _ in range(_ATTEMPTS):
            reading = self._read(example)
            assert reading.outcome != "failed", f"{example}\n{reading.text}"
            assert reading.processor_seconds < self.seconds, (example, reading)
            assert reading.mb < MAX_MB, (example, reading)
            if reading.seconds < self.seconds and reading.outcome != "killed":
                break
            self.repeated += 1
        assert reading.seconds < self.seconds and reading.outcome != "killed", (example, reading)
        if reading.outcome == "refused":
            assert reading.text and "\n" not in reading.text and len(reading.text) < _MAX_MESSAGE, (example, reading)
        self.found[f"{kind}: {reading.outcome}"] += 1
        self.readings.append((reading, example))

    def summary(self) -> dict[str, Any]:
        """Return counts, and the slowest and largest reads, as JSON types."""

        def most(attribute: str) -> list[Any]:
            first = sorted(self.readings, key=lambda one: -getattr(one[0], attribute))[:_SLOWEST]
            return [[round(getattr(one, attribute), 2), str(example)] for one, example in first]

        return {
            "files": self.found.total(),
            "by kind": dict(sorted(self.found.items())),
            "repeated": self.repeated,
            "slowest, s": most("seconds"),
            "most processor time, s": most("processor_seconds"),
            "most memory, MB": most("mb"),
        }

    def _read(self, example: Example) -> Reading:
        if self._process is None:
            # Each process is a copy of one that has imported everything.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([__name__])
            self._connection, other = context.Pipe()
            self._process = context.Process(target=_serve, args=(other, self.folder, self.kinds), daemon=True)
            self._process.start()
            other.close()
        assert self._connection is not None
        try:
            self._connection.send(example)
            self._connection.recv()
            used, waited = _processor_seconds(self._process.pid), _waited_seconds(self._process.pid)
            if self._connection.poll(_PATIENCE * self.seconds):
                reading: Reading = self._connection.recv()
                return reading
        except EOFError:
            self.close()
            return Reading("failed", "the process died", 0.0, 0.0, 0.0)
        used = _processor_seconds(self._process.pid) - used
        waited = _waited_seconds(self._process.pid) - waited
        self.close()
        return Reading("killed", "", _PATIENCE * self.seconds - waited, used, 0.0)

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._connection is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(self._process.pid).children(recursive=True):
                    child.kill()
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = self._connection = None


@contextlib.contextmanager
def reading(folder: Path, kinds: Mapping[str, Make] | None = None, seconds: float = MAX_SECONDS) -> Iterator[Reader]:
    """Make valid files to damage, and yield what reads them when they are damaged.

    Args:
        kinds: other kinds than `KINDS`.
        seconds: the limit of one read.
    """
    spec = read_spec(tiny_models.build("wan2.2-a14b", folder / "tiny"), "tiny")
    lora_files.save(folder / "lora.safetensors", lora_files.wan(lora_files.factors(spec.transformer), alpha=2.0))
    (folder / "engine").mkdir()
    put(folder / "engine", key())
    port = {"name": "x", "dtype": "float32", "sizes": [1, -1], "ranges": [[[1, 1], [1, 2], [1, 4]]]}
    contract = {"backend": "tensorrt", "made_by": "", "inputs": [port], "outputs": [port], "precision": "float16"}
    adapters = [{"kind": "Names", "inputs": [["a", "b"]], "outputs": [["c", "d"]]}, {"kind": "PaddedIds", "length": 8}]
    text = json.dumps({"contract": contract, "batch": 1, "adapters": adapters})
    (folder / "engine" / ADAPTERS_FILE).write_text(text)
    _make_cache(folder / "cache", spec)
    plan = tiny_plan(spec, folder / "x.mp4")
    CheckpointFolder(folder / "job").save(checkpoint_of(spec, folder / "x.mp4"), spec)
    embeds = torch.zeros(1, spec.max_sequence_length, spec.transformer.text_dim)
    encoding = TextEncoding(embeds, ("zebra",), cut=False)
    PromptCache(folder / "job" / "prompts").keep(spec, plan.components["text_encoder"], _PROMPT, encoding)
    with VideoWriter(folder / "video.mp4", 32, 32, 8, 30) as writer:
        writer.write(np.zeros((4, 32, 32, 3), np.uint8))
        writer.close_stream()
        writer.finish("a boat", {"tandem": {"prompt": "a boat", "seed": 1}})
    with contextlib.closing(Reader(folder, kinds or KINDS, seconds)) as reader:
        yield reader


def _make_cache(folder: Path, spec: ModelSpec) -> None:
    folder.mkdir()
    values = {"port": 7860, "auth": ["a", "b"], "tensorrt": "all", "share_size": [64, 64], "engine_cache_gb": 5.5}
    (folder / "settings.json").write_text(json.dumps(values))
    run = {"kind": "x", "flops": 1.0, "seconds": 1.0, "working_bytes": 1, "excess_bytes": None}
    (folder / "history.json").write_text(json.dumps({"version": 1, "runs": [run]}))
    file = {"size": 1, "digest": f"git:{'a' * 40}"}
    listed = {"repository": "a/b", "commit": "a" * 40, "license": "", "files": {"vae/config.json": file}}
    (folder / "tandem-files.json").write_text(json.dumps(listed))
    (folder / "bench.json").write_text(json.dumps({"schema": 1, "rows": [{"name": "x", "seconds": [1.5, 2]}]}))
    program_key_parts(spec, "vae", "vae", folder)  # writes the digests of weights


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


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
    if kind in {"value", "name", "many"}:
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
    """Replace, multiply, remove or rename one value, anywhere in JSON."""
    while isinstance(values, dict | list) and values:
        place = chance.choice(list(values) if isinstance(values, dict) else range(len(values)))
        inner = values[place]
        if isinstance(inner, dict | list) and inner and chance.random() < 0.8:
            values = inner
            continue
        if kind == "value":
            values[place] = chance.choice([*_VALUES, [inner] * 5])
        elif kind == "many":
            values[place] = _many(chance, inner)
        elif isinstance(values, dict) and chance.random() < 0.5:
            values[chance.choice(["", "x", "__metadata__", "a.b", "_class_name"])] = values.pop(place)
        else:
            del values[place]
        return


def _many(chance: random.Random, inner: Any) -> Any:
    """Return a list or object of many equal values."""
    value = chance.choice([inner, 1, -1, "", "x", 0.5, None, [], {}, [[]], {"size": 0}])
    count = chance.choice([1_000, 9_000, 19_000, 100_000, 600_000])
    count = min(count, 1 + _MAX_BYTES_OF_MANY // len(json.dumps(value)))
    if chance.random() < 0.5:
        return [value] * count
    return {str(number): value for number in range(count)}


def _processor_seconds(process: int | None = None) -> float:
    """Return the processor time of a process, by default this one, and of its children that have ended."""
    times = psutil.Process(process).cpu_times()
    return float(sum(times[:4]))


def _waited_seconds(process: int | None = None) -> float:
    """Return for how long a process was ready to run but had no processor; 0 on other systems than Linux."""
    try:
        text = Path(f"/proc/{process or 'self'}/schedstat").read_text()
    except OSError:
        return 0.0
    return int(text.split()[1]) / 1e9


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
