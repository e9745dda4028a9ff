"""TensorRT for RTX on a GPU that it supports: engines of a tiny model are built, verified and opened again.

./install.sh test --all tests/gpu/test_tensorrt_rtx.py
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.core.cancel import Cancel
from runtime.engines.build import BuildRequest, build_engine, verify_engine
from runtime.engines.builders import BUILDERS
from runtime.engines.sessions.tensorrt_rtx import CACHE_FILE
from runtime.engines.store import EngineStore
from runtime.machine.probe import probe
from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_index import ShapeProfile

pytestmark = pytest.mark.gpu

CASES = [
    ("tensorrt_rtx", "text_encoder", "text_encoder", ShapeProfile.fixed((1, 1, 1))),
    ("tensorrt_rtx", "transformer", "transformer", ShapeProfile.fixed((3, 8, 6))),
    ("tensorrt_rtx", "vae", "vae_first", ShapeProfile.fixed((1, 8, 6))),
    ("tensorrt_rtx", "vae", "vae_next", ShapeProfile.fixed((2, 8, 6))),
    *(
        (builder, "transformer", program, ShapeProfile.fixed((1, 1, 1)))
        for builder in ("tensorrt_rtx_blocks", "tensorrt_rtx_blocks_fp8")
        for program in ("block_qkv", "block_query", "block_feed_forward")
    ),
]


@pytest.mark.parametrize(("builder", "component", "program", "profile"), CASES)
def test_an_engine_equals_pytorch_and_keeps_its_kernels(
    builder: str,
    component: str,
    program: str,
    profile: ShapeProfile,
    tiny: Callable[[str], ModelSpec],
    tmp_path: Path,
) -> None:
    machine, maker = probe(), BUILDERS[builder]
    # FP8 products need widths that are multiples of 16.
    spec = find("diorama", Path("none")) if builder.endswith("fp8") else tiny("wan2.2-a14b")
    problem = maker.unavailable(machine)
    if problem is not None:
        pytest.skip(str(problem))
    precision = maker.default_precision(spec, program, machine, "cuda:0")
    key = maker.key(spec, component, program, (profile,), precision=precision, machine=machine, device="cuda:0")
    store = EngineStore(tmp_path, 1 << 40)
    request = BuildRequest(spec=spec, component=component, key=key, device="cuda:0")
    record = build_engine(request, store, lambda fact, share: None, Cancel())
    assert record.usable
    with store.using(record.id) as folder:
        compiled = (folder / CACHE_FILE).read_bytes()
    again = verify_engine(record, request, store, lambda fact, share: None, Cancel())
    assert again.usable
    assert again.error == pytest.approx(record.error, rel=1e-3)
    with store.using(record.id) as folder:
        assert len((folder / CACHE_FILE).read_bytes()) >= len(compiled) > 0
