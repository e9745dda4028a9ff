"""Whole benchmarks of tiny real models: order of runs, measurements, failures and files."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.bench import benchmark
from runtime.bench.benchmark import Bench, Setup
from runtime.bench.configurations import Configuration
from runtime.bench.recorder import Recorder, UnwrittenHistory, changed_fields
from runtime.core.cancel import Cancel
from runtime.core.errors import EngineError, InvalidRequestError
from runtime.core.facts import Fact
from runtime.core.plan import EngineRef
from runtime.core.request import GenerationRequest
from runtime.engines.service import EngineService
from runtime.engines.sessions.onnxruntime import OnnxRuntimeSession
from runtime.engines.store import EngineStore
from runtime.families.wan.vae import PyTorchVideoDecoder
from runtime.machine.probe import probe
from runtime.models.spec import ModelSpec
from runtime.video.mp4 import read_metadata
from tests.plans import tiny_plan
from tests.queue.samples import sample_result

# Each runs whole benchmarks.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_children")]

CLIP = {"prompt": "a red boat", "width": 64, "height": 32, "frames": 5, "steps": 4, "seed": 3, "fps": 8}


@dataclass
class Done:
    """A finished benchmark and the lines that it reported."""

    bench: Bench
    lines: list[str]
    folder: Path

    def result(self) -> dict[str, Any]:
        """Return its result, which JSON can hold."""
        values: dict[str, Any] = json.loads(json.dumps(self.bench.to_json(), allow_nan=False))
        return values

    def one(self, name: str) -> dict[str, Any]:
        """Return one configuration of the result."""
        return next(one for one in self.result()["configurations"] if one["name"] == name)


@dataclass(frozen=True)
class BenchRunner:
    """A model and an engine library for benchmarks."""

    spec: ModelSpec
    home: Path

    def configuration(self, name: str, **values: Any) -> Configuration:
        """Return a configuration of the clip."""
        only = bool(values.pop("only_if_new", False))
        asked = {**CLIP, "model": str(self.spec.directory), "backends": {"all": "pytorch"}, **values}
        return Configuration(name=name, flags="", request=GenerationRequest.from_mapping(asked), only_if_new=only)

    def run(
        self,
        folder: Path,
        configurations: Sequence[Configuration],
        cancel_at: Callable[[str], bool] = lambda _: False,
        **changes: Any,
    ) -> Done:
        """Run a benchmark; `it is cancelled at the first line for which `cancel_at` is true."""
        machine = probe()
        engines = EngineService(EngineStore(self.home / "engines", 10**10), machine, self.home)
        setup = Setup(
            machine=machine,
            engines=engines,
            history=UnwrittenHistory(self.home, machine),
            weights_dir=self.home / "weights",
            folder=folder,
            runs=2,
        )
        cancel, lines = Cancel(), []

        def report(line: str) -> None:
            lines.append(line)
            if cancel_at(line):
                cancel.request()

        bench = Bench.of(replace(setup, **changes), configurations, report)
        bench.measure(cancel)
        return Done(bench, lines, folder)


@pytest.fixture(scope="module")
def runner(tiny: Callable[[str], ModelSpec], tmp_path_factory: pytest.TempPathFactory) -> BenchRunner:
    """Return a bench with an empty engine library."""
    return BenchRunner(tiny("wan2.2-a14b"), tmp_path_factory.mktemp("runner"))


@pytest.fixture(scope="module")
def done(runner: BenchRunner, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Return a benchmark of everything that can become of a configuration but a failure on the way."""
    on_text = {"all": "pytorch", "text_encoder": "onnxruntime"}
    configurations = [
        runner.configuration("pytorch"),
        runner.configuration("onnx text", backends=on_text),
        runner.configuration("more steps", steps=5),
        runner.configuration("no size", width=65),
        runner.configuration("trt", backends={"vae": "tensorrt"}),
        runner.configuration("again", only_if_new=True),
    ]
    return runner.run(tmp_path_factory.mktemp("done"), configurations, keep_videos=True)


def test_configurations_take_turns_after_warm_up(done: Done) -> None:
    measured = ["pytorch", "onnx text", "more steps"]
    forecast = next(line for line in done.lines if line.startswith("Measuring"))
    assert forecast.startswith("Measuring pytorch, onnx text, more steps, again: 2 runs of each, in turn, about ")
    assert "Engines to build before that: 1, about " in forecast
    warm = [line.partition(":")[0] for line in done.lines if "warm-up" in line]
    runs = [line.partition(":")[0] for line in done.lines if ": run " in line]
    assert done.bench.together
    assert warm == measured
    assert runs == measured * 2
    assert [one["runs"] for one in done.result()["configurations"]] == [2, 2, 2, 0, 0, 0]


def test_stages_steps_loading_and_building_are_measured_separately(done: Done) -> None:
    one = done.one("onnx text")
    assert set(one["stages"]) == {"encode", "denoise", "decode", "mux", "total"}
    for figure in one["stages"].values():
        assert 0 <= figure["low"] <= figure["median"] <= figure["high"]
        assert figure["count"] == 2
    assert one["step"]["count"] == 8
    assert one["wall"]["low"] >= one["stages"]["total"]["low"]
    # The engine was built in the first run, which loads; those that count find all in place.
    assert one["build_seconds"] > 0.5 and one["first"]["load"] > 0
    assert one["load"]["high"] < one["first"]["load"]
    (engine,) = one["engines"]
    assert engine["built_now"] and engine["program"] == "text_encoder" and engine["build_seconds"] > 0
    assert done.one("pytorch")["build_seconds"] == 0 and done.one("pytorch")["engines"] == []


def test_every_run_encodes_the_prompt(done: Done, runner: BenchRunner) -> None:
    for name in ("pytorch", "onnx text", "more steps"):
        assert done.one(name)["stages"]["encode"]["low"] > 0
    assert not (runner.home / "prompts").exists()


def test_request_plan_and_engines_are_in_the_result(done: Done) -> None:
    result = done.result()
    assert (result["schema"], result["kind"], result["reference"]) == (1, "bench", "pytorch")
    assert result["reference_is"] == "PyTorch, float32"
    assert result["versions"]["torch"] == torch.__version__
    assert result["machine"]["cores"] == probe().cores
    assert done.one("more steps")["request"]["steps"] == 5
    assert done.one("onnx text")["plan"]["components"]["text_encoder"]["backend"] == "onnxruntime"
    assert done.one("onnx text")["runs_on"].startswith("ONNX Runtime, float32 (text_encoder)")


def test_memory_is_measured_by_stage(done: Done) -> None:
    memory = done.one("pytorch")["memory"]
    assert memory["vram"] == memory["gpu"] == {}
    assert {"encode", "denoise", "decode", "save"} <= set(memory["ram"])
    assert all(0 <= peak < 4 << 30 for peak in memory["ram"].values())
    assert max(memory["ram"].values()) > 1 << 18


def test_the_clip_is_compared_with_the_reference_and_its_noise_floor(done: Done) -> None:
    floor = done.result()["noise_floor"]
    assert floor["same"] and floor["ssim"] == 1
    assert all(done.one(name)["repeats"] is True for name in ("pytorch", "onnx text", "more steps"))
    assert done.one("pytorch")["quality"] is None
    close, far = done.one("onnx text")["quality"], done.one("more steps")["quality"]
    assert close["same"] or close["psnr"] > 50
    assert far["psnr"] < 45


def test_a_configuration_that_cannot_run_has_a_row_with_the_reason(done: Done) -> None:
    refused, absent, again = (done.one(name) for name in ("no size", "trt", "again"))
    assert refused["state"] == "refused" and "width is 65" in refused["why"] and "64 or 80" in refused["remedy"]
    assert absent["state"] == "refused" and "PyTorch instead of TensorRT" in absent["why"]
    assert again["state"] == "same" and "pytorch" in again["why"]
    assert refused["stages"] == absent["stages"] == again["stages"] == {}


def test_keep_videos_keeps_one_video_of_each_configuration(done: Done) -> None:
    names = sorted(path.name for path in done.folder.iterdir())
    assert names == ["more-steps-3.mp4", "onnx-text-2.mp4", "pytorch-1.mp4"]
    facts = read_metadata(done.folder / "more-steps-3.mp4")
    assert facts is not None and facts["request"]["steps"] == 5


def test_measurements_with_a_failed_engine_are_deleted(
    runner: BenchRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    infer: Callable[..., dict[str, torch.Tensor]] = OnnxRuntimeSession.infer
    seen = 0

    def failing(self: OnnxRuntimeSession, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        nonlocal seen
        seen += 1
        if seen > 2:  # a job reads the prompt and the negative one
            raise EngineError("text", what="The engine failed: on purpose.", remedy="Nothing to do.")
        return infer(self, **inputs)

    monkeypatch.setattr(OnnxRuntimeSession, "infer", failing)
    on_text = {"all": "pytorch", "text_encoder": "onnxruntime"}
    short = {"frames": 5, "steps": 1}
    configurations = [
        runner.configuration("pytorch", **short),
        runner.configuration("onnx text", backends=on_text, **short),
    ]
    done = runner.run(tmp_path, configurations)
    one = done.one("onnx text")
    assert one["state"] == "fell back" and "on purpose" in one["why"]
    assert one["stages"] == {} and one["first"] is None and one["quality"] is None and one["runs"] == 0
    assert done.one("pytorch")["runs"] == 2
    assert list(tmp_path.iterdir()) == []


def test_deviations_from_the_plan_are_detected(runner: BenchRunner, tmp_path: Path) -> None:
    plan = tiny_plan(runner.spec, tmp_path / "x.mp4")
    part = plan.components["vae"]
    built = part.replace(
        engines=(EngineRef(id="e", program="p", builder="b", precision="x", profile=((1, 1, 1),) * 3),)
    )
    to_build = built.replace(engines=(built.engines[0].replace(build=True),))
    assert changed_fields(plan.with_component("vae", to_build), plan.with_component("vae", built)) == []
    other = plan.replace(strategy=plan.strategy.replace(decode_tile=8, offload="model"), free_bytes=1)
    assert changed_fields(plan, other) == ["strategy", "free_bytes"]
    assert changed_fields(plan, plan.with_component("vae", part.in_pytorch(Fact("planner.took_over")))) == ["vae"]
    recorder = Recorder("cpu")
    with recorder.measuring():
        pass
    assert "deviated from its plan (memory ran out)" in recorder.measurement(sample_result()).fell_back[0]
    recorder.add_plans(plan, plan, {})
    assert recorder.measurement(sample_result()).fell_back == ()


def test_the_history_is_not_changed(runner: BenchRunner, done: Done) -> None:
    assert not (runner.home / "history.json").exists()
    assert done.bench.setup.history.read() == ()


def test_out_of_memory_fails_instead_of_measuring_another_strategy(
    runner: BenchRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = PyTorchVideoDecoder.frames

    def short(self: PyTorchVideoDecoder, latents: torch.Tensor, *rest: Any) -> Iterator[torch.Tensor]:
        if latents.shape[4] == 6:
            raise MemoryError
        return frames(self, latents, *rest)

    monkeypatch.setattr(PyTorchVideoDecoder, "frames", short)
    configurations = [runner.configuration("fits"), runner.configuration("large", width=48, on_out_of_memory="any")]
    done = runner.run(tmp_path, configurations, runs=1, warmup=0)
    large = done.one("large")
    assert large["state"] == "failed" and "Out of memory" in large["why"] and large["remedy"] and large["stages"] == {}
    assert done.one("fits")["state"] == "measured"


def test_configurations_are_loaded_in_turn_if_memory_is_short(
    runner: BenchRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "fit_together", lambda _: False)
    short = {"frames": 5, "steps": 1}
    configurations = [runner.configuration("one", **short), runner.configuration("two", width=48, **short)]
    done = runner.run(tmp_path, configurations)
    assert not done.bench.together
    names = [line.partition(":")[0] for line in done.lines if "warm-up" in line or ": run " in line]
    assert names == ["one", "one", "two", "two"] * 2
    assert done.one("one")["state"] == done.one("two")["state"] == "measured"
    assert done.one("two")["quality"] is None and done.one("two")["not_compared"] == "another size"
    # Loaded for each turn, it still counts apart from what the stages take.
    assert done.one("two")["first"]["load"] > 0
    assert not any(entry.residency._loaded for entry in done.bench.entries)


def test_cancellation_keeps_the_measurements(runner: BenchRunner, tmp_path: Path) -> None:
    configurations = [runner.configuration("one", steps=2), runner.configuration("two", steps=1)]
    done = runner.run(tmp_path, configurations, lambda line: line.startswith("one: run 1"))
    result = done.result()
    assert result["cancelled"]
    assert [(one["state"], one["runs"]) for one in result["configurations"]] == [("measured", 1), ("waiting", 0)]
    assert list(tmp_path.iterdir()) == []


def test_the_first_error_is_raised_if_nothing_can_be_planned(runner: BenchRunner, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        runner.run(tmp_path, [runner.configuration("one", width=65), runner.configuration("two", height=33)])
    assert (refused.value.field, refused.value.data["value"]) == ("width", 65)


def test_a_failed_reference_does_not_stop_the_others(runner: BenchRunner, tmp_path: Path) -> None:
    configurations = [runner.configuration("no size", width=65), runner.configuration("good")]
    done = runner.run(tmp_path, configurations, runs=1, warmup=0)
    assert done.one("good")["state"] == "measured"
    assert done.one("good")["not_compared"] == "no reference"
    assert done.result()["noise_floor"] is None
