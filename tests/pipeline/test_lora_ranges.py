"""LoRAs in a part of the steps, in tiny jobs: the weights of each step, equal videos after a resume, plans."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import InvalidRequestError
from runtime.core.events import Resumed, VideoSaved
from runtime.core.request import GenerationRequest
from runtime.execution.residency import Residency
from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module
from runtime.pipeline.checkpoint import CheckpointFolder, identity
from runtime.pipeline.files import stamps
from runtime.video.mp4 import read_metadata
from tests.pipeline.test_loras import Place
from tests.pipeline.test_run import frames_of
from tests.plans import with_strategy
from tests.transformer_files import FORMATS, wide_transformer

Tiny = Callable[[str], ModelSpec]


def test_each_step_has_the_weights_of_its_range(tiny: Tiny, tmp_path: Path) -> None:
    place = Place(tiny("wan2.2-a14b"), tmp_path)
    loaded: list[tuple[str, list[float]]] = []

    def load(spec: ModelSpec, name: str, part: Any, device: str | None) -> Any:
        loaded.append((name, [use.weight for use in spec.loras_of(name)]))
        return load_module(spec, name, part, device)

    video, asked = tmp_path / "x.mp4", ("style:0.8@0-0.25", "low=style:0.5@0.5-1", "high=style:0.3@0.25-0.5")
    plan, spec = place.plan(*asked, steps=4)
    assert list(plan.expert_steps.values()) == [2, 2], "the switch is after half of the steps"
    with Residency(load=load) as residency:
        assert isinstance(place.run(plan, spec, residency=residency)[-1], VideoSaved)
    transformers = [entry for entry in loaded if entry[0].startswith("transformer")]
    assert transformers == [("transformer", [0.8]), ("transformer", [0.3]), ("transformer_2", [0.5])]
    wanted = frames_of(video)
    request = GenerationRequest.from_mapping(read_metadata(video)["request"])
    assert tuple(map(str, request.loras)) == asked
    # A resume in each range.
    for step in (1, 2, 3):
        place.run(plan, spec, CheckpointFolder(tmp_path / "job"), stop=step)
    events = place.run(plan, spec, CheckpointFolder(tmp_path / "job"))
    assert any(isinstance(event, Resumed) for event in events)
    assert frames_of(video) == wanted
    # Checkpoints of other ranges are those of another video.
    whole = replace(spec, loras=tuple(use.in_all_steps() for use in spec.loras[:1]))
    ranged = replace(spec, loras=spec.loras[:1])
    assert identity(stamps(whole), plan) != identity(stamps(ranged), plan)


def test_a_range_of_all_steps_changes_nothing_and_of_some_less(tiny: Tiny, tmp_path: Path) -> None:
    place, video = Place(tiny("wan2.1"), tmp_path), tmp_path / "x.mp4"
    frames = []
    for loras in (("style:0.8",), ("style:0.8@0-0.5", "style:0.8@0.5-1"), ("style:0.8@0-0.5",), ()):
        place.run(*place.plan(*loras))
        frames.append(frames_of(video))
    assert frames[0] == frames[1]
    assert len({*frames}) == 3


@pytest.mark.parametrize(
    ("kind", "suffix", "offload"),
    [
        ("INT8", "safetensors", "group"),
        ("FP8 with scales", "safetensors", "sequential"),
        ("GGUF Q4_K", "gguf", "model"),
    ],
)
def test_layers_that_a_file_quantizes_get_the_loras_of_each_range(
    kind: str, suffix: str, offload: str, tiny: Tiny, tmp_path: Path
) -> None:
    shutil.copytree(tiny("wan2.1").directory, tmp_path / "weights" / "base")
    FORMATS[kind](tmp_path / "weights" / f"model.{suffix}", wide_transformer().state_dict())
    place, video = Place(find("model", tmp_path / "weights"), tmp_path), tmp_path / "x.mp4"
    assert place.spec.is_packed
    frames = []
    half, both = ("style:0.8@0-0.5",), ("style:0.8@0-0.5", "style:0.8@0.5-1")
    for loras, where in ((("style:0.8",), "none"), (both, offload), (half, "none"), (half, offload)):
        plan, spec = place.plan(*loras)
        assert isinstance(place.run(with_strategy(plan, offload=where), spec)[-1], VideoSaved)
        frames.append(frames_of(video))
    assert frames[0] == frames[1] != frames[2] == frames[3]


def test_the_plan_counts_loads_and_refuses_what_it_cannot(tiny: Tiny, tmp_path: Path) -> None:
    place = Place(tiny("wan2.1"), tmp_path)
    plain, _ = place.plan("style")
    plan, _ = place.plan("style@0-0.25", "style@0.5-0.75")
    (loads,) = (reason for reason in plan.components["transformer"].reasons if reason.code == "planner.lora_ranges")
    assert loads.data["loads"] == 4
    assert plan.seconds["load"].likely == pytest.approx(plain.seconds["load"].likely + 3 * loads.data["seconds"])
    refused: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
        "planner.lora_range_empty": (("style@0.1-0.2",), {}),
        "planner.lora_range_cached": (("style@0-0.5",), {"step_cache": "first-block"}),
    }
    for code, (loras, values) in refused.items():
        with pytest.raises(InvalidRequestError) as error:
            place.plan(*loras, **values)
        assert error.value.code == code
