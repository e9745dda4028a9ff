"""Where a chat model runs."""

import pytest

from runtime.planner.chat_model import least_bytes, place_chat_model

GB = 10**9
# Weights, free bytes of the GPU and of the machine: on the GPU, and the dtype; `None` if it fits nowhere.
CASES = [
    (1.5, 8, 32, (True, "bfloat16")),
    (1.5, 2, 32, (False, "float32")),
    (1.5, None, 8, (False, "float32")),
    (4, None, 16, (False, "bfloat16")),
    (4, 8, 6, None),
    (4, None, 6, None),
]


@pytest.mark.parametrize(("weights", "gpu", "ram", "expected"), CASES)
def test_it_runs_where_it_fits(
    weights: float, gpu: float | None, ram: float, expected: tuple[bool, str] | None
) -> None:
    placed = place_chat_model(int(weights * GB), None if gpu is None else int(gpu * GB), int(ram * GB))
    assert (None if placed is None else (placed.on_gpu, placed.dtype)) == expected
    assert placed is None or placed.bytes >= least_bytes(int(weights * GB))
