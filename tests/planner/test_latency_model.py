"""The time forecast, against what an H200 measured, and what adds to it."""

from typing import Any

import pytest

from runtime.core.estimates import MemoryStrategy, Seconds
from runtime.machine.probe import Gpu
from runtime.planner import latency_model
from runtime.planner.latency_model import Work
from tests.planner.test_memory_model import BF16, OF_VAE, load, rows
from tests.plans import GIB, machine
from tests.true_sizes import spec

ONE = Work(calls={"text_encoder": 2, "transformer": 40, "transformer_2": 40, "vae": 1}, frames=81, engine_seconds={})
CLIP = (832, 480, 81)


def gpu(name: str, capability: tuple[int, int] = (9, 0)) -> Any:
    """Return a machine with one GPU."""
    return machine(gpu=Gpu(name, capability, 140 * GIB, 140 * GIB, "580.0"), torch_cuda="13.0")


@pytest.mark.parametrize("row", [*rows("transformer"), *rows("vae")])
def test_an_h200_takes_what_was_measured(row: dict[str, Any]) -> None:
    model = spec(OF_VAE[row["model"]] if row["part"] == "vae" else row["model"])
    held = load(model, tuple(row["size"]), dict.fromkeys(model.component_names, row["dtype"]))
    work = Work(calls={}, frames=row["size"][2], engine_seconds={})
    found = latency_model.compute_seconds(held, work, row["part"], gpu("NVIDIA H200"), MemoryStrategy())
    assert found.likely == pytest.approx(row["seconds"], rel=0.2)
    assert found.low < row["seconds"] < found.high
    assert not found.measured


@pytest.mark.parametrize(
    ("faster", "slower"),
    [
        (gpu("NVIDIA H200"), gpu("NVIDIA A100-SXM4-80GB", (8, 0))),
        (gpu("NVIDIA A100-SXM4-80GB", (8, 0)), gpu("NVIDIA GeForce RTX 4090", (8, 9))),
        (gpu("NVIDIA GeForce RTX 4090", (8, 9)), gpu("NVIDIA GeForce RTX 4060 Laptop GPU", (8, 9))),
        (gpu("NVIDIA GeForce RTX 4060 Laptop GPU", (8, 9)), gpu("Tesla T4", (7, 5))),
    ],
)
def test_a_slower_gpu_takes_longer(faster: Any, slower: Any) -> None:
    held = load(spec("wan2.2-a14b"), CLIP)
    for part in ("transformer", "vae"):
        one, other = (
            latency_model.compute_seconds(held, ONE, part, where, MemoryStrategy()) for where in (faster, slower)
        )
        assert one.likely < other.likely


def test_an_unknown_gpu_is_less_certain() -> None:
    held = load(spec("wan2.2-a14b"), CLIP)
    known, unknown = (
        latency_model.compute_seconds(held, ONE, "transformer", gpu(name), MemoryStrategy())
        for name in ("NVIDIA H200", "NVIDIA X1")
    )
    assert unknown.high / unknown.low > known.high / known.low


def test_an_engine_takes_what_it_was_measured_to_take() -> None:
    work = Work(calls=ONE.calls, frames=81, engine_seconds={"transformer": 2.0})
    found = latency_model.compute_seconds(
        load(spec("wan2.2-a14b"), CLIP), work, "transformer", gpu("NVIDIA H200"), MemoryStrategy()
    )
    assert (found.likely, found.measured) == (2.0, True)


@pytest.mark.parametrize(
    ("offload", "times"),
    [("none", 0), ("model", 1), ("group", 40), ("sequential", 40)],
)
def test_weights_are_brought_as_often_as_they_are_used(offload: str, times: int) -> None:
    held = load(spec("wan2.2-a14b"), CLIP)
    found = latency_model.transfer_seconds(held, MemoryStrategy(offload=offload), "transformer", 40)
    gigabytes = 28.6 * times
    assert gigabytes / 25 <= found.likely <= gigabytes / 6 + 1e-9
    assert found.low <= found.likely <= found.high


def test_bringing_blocks_hides_behind_computing_and_bringing_parts_does_not() -> None:
    compute, transfer = Seconds(10, 8, 12, measured=True), Seconds(4, 3, 5)
    group = latency_model.stage_seconds(compute, transfer, MemoryStrategy(offload="group"))
    model = latency_model.stage_seconds(compute, transfer, MemoryStrategy(offload="model"))
    assert (group.low, group.likely, group.high, group.measured) == (8, 10.4, 17, False)
    assert (model.low, model.likely, model.high, model.measured) == (11, 14, 17, False)
    assert latency_model.stage_seconds(compute, Seconds(0, 0, 0), MemoryStrategy()).measured


def test_a_cpu_takes_longer_with_fewer_cores() -> None:
    held = load(spec("wan2.1-1.3b"), CLIP, dict.fromkeys(BF16, "float32"), "cpu")
    found = latency_model.compute_seconds(held, ONE, "transformer", machine(), MemoryStrategy())
    assert found.low < found.likely < found.high
    assert found.likely == pytest.approx(latency_model.flops(held, ONE, "transformer") / 80e9)


def test_loading_is_by_the_size_on_disk() -> None:
    small, large = (latency_model.load_seconds(load(spec(name), CLIP)) for name in ("wan2.1-1.3b", "wan2.2-a14b"))
    assert small.low < small.likely < small.high
    assert large.likely > 3 * small.likely
