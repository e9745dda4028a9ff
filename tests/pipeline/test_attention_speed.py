"""Attention kernels are measured once per GPU, size class and dtype, only if attention is automatic."""

from pathlib import Path
from typing import Any

import pytest

from runtime.core.plan import EngineRef
from runtime.pipeline.history_file import HistoryFile, measure_attention, unmeasured
from tests.planner.test_execution_options import A14B, TRITON, gpu_machine, plan


def test_measurements_serve_the_next_plan(tmp_path: Path) -> None:
    here = gpu_machine(packages=(*TRITON, ("flash-attn-4", "4.0")))
    history = HistoryFile(tmp_path, here)
    seconds = {"cudnn": 0.038, "flash": 0.06, "native": 0.039}
    measured: list[tuple[str, int, int, int, str, str]] = []

    def measure(kind: str, *rest: object) -> float:
        measured.append((kind, *rest))  # type: ignore[arg-type]
        if kind not in seconds:
            raise RuntimeError("no kernel image")
        return seconds[kind]

    first = plan(on=here)
    measure_attention(first, A14B, history, measure)
    assert [one[0] for one in measured] == ["native", "cudnn", "flash", "flash4"]
    assert measured[0][1:] == (first.tokens, 40, 128, "bfloat16", "cuda:0")
    second = plan(on=here, history=history.read())
    assert second.speed.attention == "cudnn"
    assert second.speed.attention_reason is not None
    assert second.speed.attention_reason.code == "planner.attention_measured"
    # Neither the same size nor one of its class is measured again; a much smaller one is.
    measure_attention(second, A14B, history, measure)
    measure_attention(plan(on=here, frames=61), A14B, history, measure)
    assert len(measured) == 4
    measure_attention(plan(on=here, frames=5), A14B, history, measure)
    assert len(measured) == 8


@pytest.mark.parametrize("values", [{"attention": "native"}, {"backends": {"all": "pytorch"}}])
def test_attention_is_measured_only_if_automatic(values: dict[str, Any]) -> None:
    here = gpu_machine()
    chosen = plan(on=here, **values)
    assert bool(unmeasured(chosen, A14B, (), here)) is ("attention" not in values)
    on_cpu = chosen.with_component("transformer", chosen.components["transformer"].replace(device="cpu"))
    assert not unmeasured(on_cpu, A14B, (), here)
    for program, measured in (("transformer", False), ("block_qkv", True)):
        use = EngineRef(id="0", program=program, builder="b", precision="float16", profile=((1, 1, 1),) * 3)
        part = chosen.components["transformer"].replace(backend="tensorrt", engines=(use,))
        on_engine = unmeasured(chosen.with_component("transformer", part), A14B, (), here)
        assert bool(on_engine) is (measured and "attention" not in values)
    full = chosen.with_component("transformer", chosen.components["transformer"].replace(dtype="float32"))
    assert not unmeasured(full, A14B, (), here)
