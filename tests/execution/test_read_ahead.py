"""The files of the next component are read ahead if they fit into free memory."""

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.core.plan import ExecutionPlan
from runtime.execution.offload import next_files, read_ahead
from runtime.models.spec import ModelSpec
from tests.plans import tiny_plan
from tests.waiting import until


def on_cuda(plan: ExecutionPlan) -> ExecutionPlan:
    """Return the plan with its components on a GPU."""
    return plan.replace(components={n: p.replace(device="cuda:0") for n, p in plan.components.items()})


def test_files_of_the_next_component(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> None:
    spec = tiny("wan2.2-a14b")
    here = tiny_plan(spec, tmp_path / "x.mp4")
    plan = on_cuda(here)
    files = {name: sorted((spec.directory / name).glob("*.safetensors")) for name in plan.components}
    assert next_files(spec, plan, "transformer", ["transformer"]) == files["transformer_2"] != []
    assert next_files(spec, plan, "transformer", ["transformer", "transformer_2"]) == files["vae"]
    assert next_files(spec, plan, "vae", ["vae"]) == []
    # On a CPU, reading would slow down the computation.
    assert next_files(spec, here, "transformer", ["transformer"]) == []


def position(path: Path) -> int:
    """Return how far this process has read a file that it holds open, -1 if it does not."""
    for number in Path("/proc/self/fd").iterdir():
        try:
            if number.resolve() == path.resolve():
                status = (Path("/proc/self/fdinfo") / number.name).read_text()
                return int(status.split()[1])
        except OSError:
            continue
    return -1


@pytest.mark.skipif(not Path("/proc/self/fdinfo").is_dir(), reason="reads /proc/self/fdinfo")
def test_reading_ahead_ends_with_its_block_and_needs_free_memory(tmp_path: Path) -> None:
    # Sparse, and too large to be read to its end during the test.
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.truncate(1 << 42)
    with read_ahead([path], free_bytes=1 << 60):
        until(lambda: position(path) > 0)
    assert position(path) == -1
    with read_ahead([path], free_bytes=1 << 42):
        assert position(path) == -1
    with read_ahead([tmp_path / "gone"], free_bytes=1 << 60), read_ahead([]):
        pass
