"""The history file: written by real jobs, read by the next plan, safe against damage and concurrent writers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.core.events import Event, StageStarted, VideoSaved
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.execution.residency import Residency
from runtime.models.spec import ModelSpec
from runtime.pipeline.history_file import HistoryFile
from runtime.planner.history import CompileSeconds, Run, compile_seconds, compiled_code
from runtime.planner.memory_model import Workload
from runtime.planner.resolve import PlanningContext, resolve
from runtime.upstream.torch import CompiledGraphs
from tests.pipeline.killing import forking
from tests.pipeline.runs import events_of
from tests.planner.test_history import RUN
from tests.plans import machine, tiny_plan

Tiny = Callable[[str], ModelSpec]


@pytest.fixture
def history(tmp_path: Path) -> HistoryFile:
    """Nothing remembered yet."""
    return HistoryFile(tmp_path, machine())


def sized(count: int) -> list[Run]:
    """Return so many runs of different sizes."""
    return [RUN.replace(flops=1e9 * (1 + number)) for number in range(count)]


def run(spec: ModelSpec, history: HistoryFile, plan: ExecutionPlan, stop_at: str = "") -> list[Event]:
    """Run a job, cancelled when the stage `stop_at` starts."""
    with Residency() as residency:
        return events_of(
            plan,
            spec,
            residency,
            cancel_at=lambda event: isinstance(event, StageStarted) and event.stage == stop_at,
            history=history,
        )


def test_the_history_corrects_the_next_plan(tiny: Tiny, tmp_path: Path, history: HistoryFile) -> None:
    spec = tiny("wan2.2-a14b")
    before = tiny_plan(spec, tmp_path / "x.mp4")
    saved = run(spec, history, before)[-1]
    assert isinstance(saved, VideoSaved)
    assert {known.kind.component for known in history.read()} == {"text_encoder", "transformer", "vae"}

    request = GenerationRequest.from_mapping(before.request_json())
    after = resolve(request, spec, PlanningContext(machine(), tmp_path / "x.mp4", history=history.read()))
    assert not any(seconds.measured for seconds in before.seconds.values())
    # If other programs used the processor meanwhile, the seconds count, but not as measured.
    quiet = not any(known.loaded for known in history.read())
    for stage in ("encode", "denoise", "decode", "total"):
        assert (after.seconds[stage].measured, after.seconds[stage].known) == (quiet, True)
    for stage in ("encode", "denoise", "decode"):
        assert after.seconds[stage].likely == pytest.approx(saved.timings[stage], abs=0.002)
    assert all(stage.measured for stage in after.memory)
    # Another length is nearer to what was measured than to the estimate.
    longer = resolve(
        request.replace(frames=17), spec, PlanningContext(machine(), tmp_path / "x.mp4", history=history.read())
    )
    assert longer.seconds["decode"].inferred
    assert longer.seconds["decode"].likely > after.seconds["decode"].likely


def test_only_the_first_job_of_a_process_records_memory(tiny: Tiny, tmp_path: Path, history: HistoryFile) -> None:
    spec = tiny("wan2.1")
    run(spec, history, tiny_plan(spec, tmp_path / "x.mp4"))
    run(spec, history, tiny_plan(spec, tmp_path / "x.mp4", frames=5))
    recorded = [(known.kind.component, known.excess_bytes is not None) for known in history.read()]
    # The second job encoded as many tokens; the memory that the first one recorded stays.
    assert sorted(recorded) == [
        ("text_encoder", True),
        ("transformer", False),
        ("transformer", True),
        ("vae", False),
        ("vae", True),
    ]


def test_a_cancelled_job_is_not_recorded(tiny: Tiny, tmp_path: Path, history: HistoryFile) -> None:
    spec = tiny("wan2.1")
    run(spec, history, tiny_plan(spec, tmp_path / "x.mp4"), stop_at="denoise")
    assert history.read() == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not JSON",
        "[]",
        "null",
        "{}",
        '{"version": 1}',
        '{"version": 2, "runs": []}',
        '{"version": 1, "runs": 7}',
        '{"version": 1, "runs": [{}]}',
        '{"version": 1, "runs": [null]}',
        '{"version": 1, "runs": [' + json.dumps(RUN.model_dump(mode="json") | {"flops": 0}) + "]}",
    ],
)
def test_a_damaged_history_is_empty_and_is_replaced(text: str, tmp_path: Path, history: HistoryFile) -> None:
    (tmp_path / "history.json").write_text(text)
    assert history.read() == ()
    history.add([RUN])
    assert history.read() == (RUN,)


def test_a_binary_history_is_empty(tmp_path: Path, history: HistoryFile) -> None:
    (tmp_path / "history.json").write_bytes(b"\xff\xfe\x00")
    assert history.read() == ()


def test_a_run_replaces_the_previous_one_of_its_kind(history: HistoryFile) -> None:
    history.add(sized(3))
    again = sized(1)[0].replace(seconds=9.0)
    history.add([again])
    assert history.read() == (*sized(3)[1:], again.replace(jobs=2))


def test_the_history_has_a_maximum_size(tmp_path: Path, history: HistoryFile) -> None:
    history.add(sized(500))
    assert history.read() == tuple(sized(500)[-400:])
    assert (tmp_path / "history.json").stat().st_size < 200_000


def test_an_unwritable_history_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    history = HistoryFile(tmp_path / "file", machine())
    history.add([RUN])
    assert history.read() == ()


def _add(folder: Path, start: float, together: Any) -> None:
    history = HistoryFile(folder, machine())
    together.wait(60)
    for number in range(20):
        history.add([RUN.replace(flops=start + number)])


@pytest.mark.slow
def test_concurrent_processes_lose_no_runs(tmp_path: Path, history: HistoryFile) -> None:
    context = forking()
    together = context.Barrier(2)
    writers = [context.Process(target=_add, args=(tmp_path, start, together)) for start in (1000.0, 2000.0)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert {known.flops for known in history.read()} == {start + n for start in (1000.0, 2000.0) for n in range(20)}
    assert [path.name for path in tmp_path.iterdir()] == ["history.json"]


def test_the_history_is_read_again_only_after_a_change(tmp_path: Path, history: HistoryFile) -> None:
    history.add(sized(1))
    first = history.read()
    assert history.read() is first
    HistoryFile(tmp_path, machine()).add(sized(3))
    assert len(history.read()) == 3
    (tmp_path / "history.json").unlink()
    assert history.read() == ()


def test_compiled_code_counts_while_it_is_in_the_cache(tiny: Tiny, tmp_path: Path, history: HistoryFile) -> None:
    spec = tiny("wan2.1")
    plan = tiny_plan(spec, tmp_path / "x.mp4", compile="always")
    backends = {name: part.backend for name, part in plan.components.items()}
    code = compiled_code(Workload.of(plan, spec), machine(), backends, "none", plan.speed)
    for graphs, seconds, known in (
        (CompiledGraphs(compiled=2), 9.0, CompileSeconds(9.0, None, on_disk=True)),
        (CompiledGraphs(cached=2), 2.0, CompileSeconds(9.0, 2.0, on_disk=True)),
        # Compiled again: the seconds from the cache stay known.
        (CompiledGraphs(cached=1, compiled=1), 8.0, CompileSeconds(8.0, 2.0, on_disk=True)),
        # Triton's kernels alone are not counted as graphs.
        (CompiledGraphs(), 1.0, CompileSeconds(8.0, 1.0, on_disk=True)),
    ):
        history.add_compilation(plan, spec, seconds, graphs)
        assert compile_seconds(history.read(), code) == known
    shutil.rmtree(tmp_path / "compiled")
    assert compile_seconds(history.read(), code) == CompileSeconds(8.0, None, on_disk=False)
    history.add_compilation(plan, spec, 7.0, CompiledGraphs())
    assert compile_seconds(history.read(), code) == CompileSeconds(7.0, 1.0, on_disk=True)
    shutil.rmtree(tmp_path / "compiled")
    # In memory already.
    history.add_compilation(plan, spec, 0.0, CompiledGraphs())
    assert compile_seconds(history.read(), code) == CompileSeconds(7.0, 1.0, on_disk=True)
