"""One engine by a real builder in a real child process: built, verified, found, verified again, deleted."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runtime.core.cancel import Cancel
from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.engines.build import BuildRequest, build_engine
from runtime.engines.builders import BUILDERS
from runtime.engines.programs import load_program
from runtime.engines.service import EngineService
from runtime.engines.sessions import open_session
from runtime.engines.store import EngineStore
from runtime.machine.probe import probe
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_index import ShapeProfile, find
from tests.engines.engine_files import visible


def ignore(fact: Fact, fraction: float | None) -> None:
    """Ignore progress."""


@pytest.mark.slow
def test_a_real_engine_from_build_to_deletion(
    tiny: Callable[[str], ModelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "2")
    spec, machine, size = tiny("wan2.1"), probe(), (1, 4, 4)
    key = BUILDERS["onnxruntime"].key(
        spec,
        "transformer",
        "transformer",
        (ShapeProfile.fixed(size),),
        precision="float32",
        machine=machine,
        device="cpu",
    )
    store = EngineStore(tmp_path / "with a space" / "engines", 1 << 40)
    service = EngineService(store, machine, None)
    request = BuildRequest(spec=spec, component="transformer", key=key, device="cpu")
    reported: list[Fact] = []
    record = build_engine(request, store, lambda fact, _: reported.append(fact), Cancel())
    assert Fact("engine.comparing") in reported
    assert record.usable
    assert record.error <= record.tolerance == 1e-4
    assert min(record.build_seconds, record.seconds_per_call, record.pytorch_seconds_per_call) > 0
    assert find(store.index(), key, size) == record
    assert visible(store) == [record.id]

    with store.using(record.id) as folder, open_session(folder, record, device="cpu", weights=dict) as session:
        program = load_program(spec, "transformer", "transformer", device="cpu", dtype="float32")
        inputs = program.inputs(size, seed=1)
        torch.testing.assert_close(session.infer(**inputs)["velocity"], program.run(**inputs)["velocity"])

    [verified] = service.verify(store.index(), [spec], ignore, Cancel())
    assert verified.engine.usable
    assert verified.skipped is None

    engine = store.path(record.id) / record.files[0].name
    data = bytearray(engine.read_bytes())
    data[len(data) // 2] ^= 1
    engine.write_bytes(data)
    changed = Fact("engine.file_changed", {"file": "engine.onnx"})
    with pytest.raises(EngineError) as refused:
        open_session(store.path(record.id), record, device="cpu", weights=dict)
    assert refused.value.fact == Fact("engine.unusable", {"engine": record.id, "cause": changed})
    [verified] = service.verify(store.index(), [spec], ignore, Cancel())
    assert verified.engine.problem == changed
    store.delete(record.id)
    assert visible(store) == []
