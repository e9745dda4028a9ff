"""Keys and engine folders for tests: real manifests, and a few bytes as the engine."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.engines import manifest
from runtime.engines.store import EngineStore
from runtime.planner.choice.engine_index import EngineFile, EngineKey, EngineRecord, ShapeProfile

_KEY = EngineKey(
    program="transformer",
    family="wan",
    architecture="a" * 64,
    weights="b" * 64,
    export_revision=1,
    profiles=(ShapeProfile((1, 14, 24), (9, 14, 24), (21, 60, 104)),),
    precision="float32",
    backend="inductor",
    builder="inductor",
    options=(("threads", "2"),),
    versions=(("torch", "2.13.0"),),
    device="x86_64 avx512",
    system="Linux x86_64",
)


def key(**changes: Any) -> EngineKey:
    """Return a key, with some fields changed."""
    return replace(_KEY, **changes)


def record(key: EngineKey, **changes: Any) -> EngineRecord:
    """Return the record of a verified engine that is in no store, with some fields changed."""
    made = EngineRecord(
        id=key.digest(),
        key=key,
        model="diorama",
        component="transformer",
        files=(EngineFile("engine.pt2", 600, "0" * 64),),
        file_bytes=600,
        build_seconds=60.0,
        seconds_per_call=0.1,
        pytorch_seconds_per_call=0.3,
        baselines={"eager": 0.3},
        error=1e-6,
        tolerance=1e-4,
        verified=True,
        detail=Fact("engine.compared", {"error": 1e-6, "where": "velocity", "tolerance": 1e-4}),
        built_at=1.0,
        last_used=1.0,
    )
    return replace(made, **changes)


def put(folder: Path, key: EngineKey, content: bytes = b"engine" * 100, **changes: Any) -> EngineRecord:
    """Put a finished engine into a folder and return its record."""
    (folder / "engine.pt2").write_bytes(content)
    files = manifest.hashed_files(folder, "engine.pt2")
    finished = record(key, files=files, file_bytes=sum(file.bytes for file in files), **changes)
    manifest.write(folder, finished)
    return finished


def add(store: EngineStore, key: EngineKey, content: bytes = b"engine" * 100, **changes: Any) -> EngineRecord:
    """Build an engine in a workspace and insert it."""
    store.folder.mkdir(exist_ok=True)
    with store.building(key.digest(), wait=lambda: None), store.workspace(key.digest()) as work:
        (work.engine / manifest.LOG_NAME).write_text("built\n")
        put(work.engine, key, content, **changes)
        return store.insert(work.engine, key.digest())


@contextlib.contextmanager
def refusal(*codes: str) -> Iterator[pytest.ExceptionInfo[EngineError]]:
    """Expect an `EngineError` with one of some codes."""
    with pytest.raises(EngineError) as refused:
        yield refused
    assert refused.value.code in codes


def same(one: EngineRecord, other: EngineRecord) -> bool:
    """Whether two records are equal, NaN counting as equal to itself."""
    if math.isnan(one.error) and math.isnan(other.error):
        one, other = replace(one, error=0.0), replace(other, error=0.0)
    return one == other


def visible(store: EngineStore) -> list[str]:
    """Return the names of all entries in the store; no lock may be held, and their folder is left out."""
    if (store.folder / ".locks").is_dir():
        assert list((store.folder / ".locks").iterdir()) == []
    return sorted(path.name for path in store.folder.iterdir() if path.name != ".locks")
