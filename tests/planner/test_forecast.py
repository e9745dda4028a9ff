"""The latency estimate, compared with H200 measurements, and its parts.

The constants are fitted to rows of measured_h200.jsonl with "fitted": true. The split is by rule, not by result:
transformers are fitted to the models of 1.3 and 5 billion parameters, and the model of 14 billion is held out;
decoders are fitted to 832×480, and smaller and larger frames are held out. The only row of the text encoder is fitted.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.core.estimates import MemoryStrategy, Seconds
from runtime.core.request import GenerationRequest
from runtime.machine.probe import Gpu
from runtime.models.catalogue import look_up
from runtime.planner import forecast
from runtime.planner.memory_model import Workload
from runtime.planner.resolve import PlanningContext, resolve
from tests.planner.test_memory_model import BF16, OF_VAE, rows, workload
from tests.plans import GIB, machine
from tests.published_specs import spec

CLIP = (832, 480, 81)


def gpu(name: str, capability: tuple[int, int] = (9, 0)) -> Any:
    """Return a machine with one GPU."""
    return machine(gpu=Gpu(name, capability, 140 * GIB, 140 * GIB, "580.0"), torch_cuda="13.0")


def measured_workload(row: dict[str, Any]) -> Workload:
    """Return the workload of a measurement."""
    model = spec(row["model"] if row["part"] == "transformer" else OF_VAE[row["model"]])
    return workload(model, tuple(row.get("size", CLIP)), dict.fromkeys(model.component_names, row["dtype"]))


@pytest.mark.parametrize("row", [*rows("transformer", fitted=False), *rows("vae", fitted=False)])
def test_the_estimate_is_near_held_out_measurements(row: dict[str, Any]) -> None:
    found = forecast.compute_seconds(measured_workload(row), row["part"], gpu("NVIDIA H200"), MemoryStrategy())
    assert found.likely == pytest.approx(row["seconds"], rel=0.2)
    assert found.low < row["seconds"] < found.high
    assert not found.measured


def test_the_constants_are_those_of_the_fitted_rows() -> None:
    rate, bandwidth = next((rate * 1e12, memory * 1e9) for name, rate, memory in forecast._GPUS if name == "H200")
    # Shares of the seconds, so that short and long passes count alike.
    matrix = []
    for row in (param.values[0] for param in rows("transformer", fitted=True)):
        held = measured_workload(row)
        traffic = held.spec.transformer.num_layers * held.tokens * held.spec.transformer.width / bandwidth
        by_timestep = (0.0, traffic) if held.spec.expand_timesteps else (traffic, 0.0)
        matrix.append(np.array([held.flops("transformer") / rate, *by_timestep]) / row["seconds"])
    products, plain, per_token = np.linalg.lstsq(np.array(matrix), np.ones(len(matrix)))[0]
    assert pytest.approx(1 / products, rel=0.01) == forecast._MATRIX_SHARE
    assert pytest.approx(plain, rel=0.01) == forecast._BLOCK_TRAFFIC
    assert pytest.approx(per_token, rel=0.01) == forecast._BLOCK_TRAFFIC_TIME_PER_TOKEN
    shares, matrix = [], []
    for row in (param.values[0] for param in rows("vae", fitted=True)):
        held = measured_workload(row)
        full = row["dtype"] == "float32"
        channels = np.log(held.spec.vae.last_channels / forecast._DECODE_CHANNELS)
        matrix.append(np.array([full, not full, channels], float))
        shares.append(np.log(held.flops("vae") / rate / row["seconds"]))
    full_share, half_share, power = np.linalg.lstsq(np.array(matrix), np.array(shares))[0]
    assert forecast._DECODE_SHARE["float32"] == pytest.approx(np.exp(full_share), rel=0.01)
    assert forecast._DECODE_SHARE["bfloat16"] == pytest.approx(np.exp(half_share), rel=0.01)
    assert pytest.approx(power, rel=0.01) == forecast._DECODE_POWER
    (text,) = (param.values[0] for param in rows("text_encoder", fitted=True))
    seconds = measured_workload(text).flops("text_encoder") / (forecast._TEXT_SHARE * rate)
    assert seconds == pytest.approx(text["seconds"], rel=0.05)


@pytest.mark.parametrize(
    ("total", "step", "recording"),
    [(9.7, 0.82, 0.0), (9.6, 0.82, 0.0), (6.1, 0.33, 0.8), (5.4, 0.23, 0.8)],
    ids=["offloaded, 24 GB", "offloaded, 12 GB", "bfloat16", "FP8"],
)
def test_what_follows_the_steps_of_a_clip_with_sound_is_near_measurements(
    total: float, step: float, recording: float
) -> None:
    """Clips of 121 frames of 768×512 in 8 steps: "Whole clips with sound" in bench/h200.md.

    A prompt took four of 48 layers of Gemma there, so it is left out. Recording a pass took at least 0.8 s.
    """
    model = replace(look_up("ltx-2", Path("none")), is_downloaded=True).for_text()
    request = GenerationRequest(prompt="a red boat", model="ltx-2", width=768, height=512, frames=121)
    where = PlanningContext(gpu("NVIDIA H200"), Path("x.mp4"))
    seconds = resolve(request, model, where).seconds
    measured = total - 8 * step - recording
    after = seconds["decode"] + seconds["mux"]
    assert after.likely == pytest.approx(measured, rel=0.25)
    assert after.low < measured < after.high
    assert seconds["decode"].likely == pytest.approx(0.9, rel=0.1)
    stages = (seconds[name].likely for name in ("encode", "denoise", "decode", "mux"))
    assert seconds["total"].likely == pytest.approx(sum(stages))


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
    held = workload(spec("wan2.2-a14b"), CLIP)
    for part in ("transformer", "vae"):
        one, other = (forecast.compute_seconds(held, part, where, MemoryStrategy()) for where in (faster, slower))
        assert one.likely < other.likely


def test_an_unknown_gpu_is_less_certain() -> None:
    held = workload(spec("wan2.2-a14b"), CLIP)
    known, unknown = (
        forecast.compute_seconds(held, "transformer", gpu(name), MemoryStrategy())
        for name in ("NVIDIA H200", "NVIDIA X1")
    )
    assert unknown.high / unknown.low > known.high / known.low


def test_the_estimate_of_a_measured_engine_is_its_measurement() -> None:
    held = replace(
        workload(spec("wan2.2-a14b"), CLIP), engine_seconds={"transformer": 2.0}, engine_bytes={"transformer": 1}
    )
    found = forecast.compute_seconds(held, "transformer", gpu("NVIDIA H200"), MemoryStrategy())
    assert (found.likely, found.measured) == (2.0, True)


@pytest.mark.parametrize(
    ("offload", "times"),
    [("none", 0), ("model", 1), ("group", 40), ("sequential", 40)],
)
def test_weights_are_transferred_once_per_use(offload: str, times: int) -> None:
    held = workload(spec("wan2.2-a14b"), CLIP)
    found = forecast.transfer_seconds(held, MemoryStrategy(offload=offload), "transformer", 40)
    gigabytes = 28.6 * times
    assert gigabytes / 25 <= found.likely <= gigabytes / 6 + 1e-9
    assert found.low <= found.likely <= found.high


def test_transfers_of_blocks_overlap_with_computation() -> None:
    compute, transfer = Seconds(10, 8, 12, measured=True), Seconds(4, 3, 5)
    group = forecast.stage_seconds(compute, transfer, MemoryStrategy(offload="group"))
    model = forecast.stage_seconds(compute, transfer, MemoryStrategy(offload="model"))
    assert (group.low, group.likely, group.high, group.measured) == (8, 10.4, 17, False)
    assert (model.low, model.likely, model.high, model.measured) == (11, 14, 17, False)
    assert forecast.stage_seconds(compute, Seconds(0, 0, 0), MemoryStrategy()).measured


def test_a_cpu_takes_longer_with_fewer_cores() -> None:
    held = workload(spec("wan2.1-1.3b"), CLIP, dict.fromkeys(BF16, "float32"), "cpu")
    found = forecast.compute_seconds(held, "transformer", machine(), MemoryStrategy())
    assert found.low < found.likely < found.high
    assert found.likely == pytest.approx(held.flops("transformer") / 80e9)


def test_loading_is_by_the_size_on_disk() -> None:
    small, large = (forecast.load_seconds(workload(spec(name), CLIP)) for name in ("wan2.1-1.3b", "wan2.2-a14b"))
    assert small.low < small.likely < small.high
    assert large.likely > 3 * small.likely
