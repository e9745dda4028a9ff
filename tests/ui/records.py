"""Records of engines that are in no store."""

from dataclasses import replace
from typing import Any

from runtime.core.facts import Fact
from runtime.planner.engine_index import EngineFile, EngineKey, EngineRecord


def record(key: EngineKey, **values: Any) -> EngineRecord:
    """Return the record of a good engine of a tiny model, with some fields changed."""
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
        error=1e-6,
        tolerance=1e-4,
        verified=True,
        detail=Fact("engine.compared", {"error": 1e-6, "where": "velocity", "tolerance": 1e-4}),
        built_at=1.0,
        last_used=1.0,
    )
    return replace(made, **values)
