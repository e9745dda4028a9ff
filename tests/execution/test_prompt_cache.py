"""Prompts are embedded once, across processes; other weights or a damaged file are a cache miss."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runtime.core.cancel import Cancel
from runtime.core.events import Event, StageStarted, VideoSaved, Warned
from runtime.core.plan import ExecutionPlan
from runtime.execution.prompt_cache import PromptCache
from runtime.execution.residency import Residency
from runtime.execution.text_encoder import TextEncoding
from runtime.models.spec import ModelSpec
from runtime.pipeline.run import run_job
from tests import tiny_models
from tests.full_disk import fill
from tests.hostile_files import HOSTILE
from tests.plans import no_engines, tiny_plan, with_strategy

Tiny = Callable[[str], ModelSpec]


def encoding(value: float) -> TextEncoding:
    """Return something that a text encoder could have made."""
    return TextEncoding(torch.full((1, 4, 8), value), ("zebra",), True)


def test_embeddings_are_found_by_this_process_and_the_next(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    part = tiny_plan(spec, tmp_path / "x.mp4").components["text_encoder"]
    cache = PromptCache(tmp_path / "prompts")
    assert cache.find(spec, part, "a red boat") is None
    cache.keep(spec, part, "a red boat", encoding(2.0))
    for one in (cache, PromptCache(tmp_path / "prompts")):
        found = one.find(spec, part, "a red boat")
        assert found is not None
        assert torch.equal(found.embeds, encoding(2.0).embeds)
        assert (found.unknown_words, found.cut) == (("zebra",), True)
    fresh = PromptCache(tmp_path / "prompts")
    assert fresh.find(spec, part, "a red boat ") is None
    assert fresh.find(spec, part.replace(dtype="bfloat16"), "a red boat") is None
    assert fresh.find(spec, part.replace(device="cuda:0"), "a red boat") is None
    assert PromptCache(None).find(spec, part, "a red boat") is None


def test_other_weights_are_a_miss(tmp_path: Path) -> None:
    from runtime.models.registry import read_spec

    spec = read_spec(tiny_models.build("wan2.1", tmp_path / "model"), "model")
    part = tiny_plan(spec, tmp_path / "x.mp4").components["text_encoder"]
    cache = PromptCache(tmp_path / "prompts")
    cache.keep(spec, part, "a red boat", encoding(2.0))
    assert cache.find(spec, part, "a red boat") is not None
    (tmp_path / "model" / "text_encoder" / "model.safetensors").touch()
    assert cache.find(spec, part, "a red boat") is None


@pytest.mark.timeout(30, func_only=True)
@pytest.mark.parametrize("kind", HOSTILE)
def test_something_else_than_a_small_file_is_a_miss(kind: str, tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    part = tiny_plan(spec, tmp_path / "x.mp4").components["text_encoder"]
    folder = tmp_path / "prompts"
    PromptCache(folder).keep(spec, part, "a red boat", encoding(2.0))
    (path,) = folder.iterdir()
    path.unlink()
    HOSTILE[kind](path)
    cache = PromptCache(folder)
    assert cache.find(spec, part, "a red boat") is None
    cache.keep(spec, part, "a red boat", encoding(3.0))
    # Only a folder cannot be replaced.
    assert (PromptCache(folder).find(spec, part, "a red boat") is None) == (kind == "folder")


def test_a_large_file_is_a_miss(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    part = tiny_plan(spec, tmp_path / "x.mp4").components["text_encoder"]
    large = TextEncoding(torch.zeros(1, 1, (64 << 18) + 1), (), False)
    PromptCache(tmp_path).keep(spec, part, "a red boat", large)
    assert PromptCache(tmp_path).find(spec, part, "a red boat") is None


@pytest.mark.parametrize("damage", [b"", b"junk", None])
def test_a_damaged_file_is_a_miss_and_is_removed(damage: bytes | None, tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    part = tiny_plan(spec, tmp_path / "x.mp4").components["text_encoder"]
    PromptCache(tmp_path).keep(spec, part, "a red boat", encoding(2.0))
    (path,) = tmp_path.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-8] if damage is None else damage)
    assert PromptCache(tmp_path).find(spec, part, "a red boat") is None
    assert not path.exists()


def test_the_number_of_entries_is_limited(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")
    part = tiny_plan(spec, tmp_path / "x.mp4").components["text_encoder"]
    cache = PromptCache(tmp_path)
    for number in range(70):
        cache.keep(spec, part, f"boat {number}", encoding(number))
    assert len(list(tmp_path.iterdir())) == 64
    assert len(cache._encodings) == 8
    last = PromptCache(tmp_path).find(spec, part, "boat 69")
    assert last is not None
    assert last.embeds[0, 0, 0] == 69


def test_a_second_clip_loads_no_text_encoder_and_is_identical(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("wan2.1")

    def made(name: str, **values: object) -> tuple[ExecutionPlan, list[Event]]:
        plan = with_strategy(tiny_plan(spec, tmp_path / name, **values), keep_loaded=False)
        events: list[Event] = []
        with Residency(no_engines(tmp_path)) as residency:
            run_job(plan, spec, events.append, Cancel(), residency)
        assert isinstance(events[-1], VideoSaved), events[-1]
        return plan, events

    first = made("1.mp4", prompt="a red zebra", negative_prompt="blue ball")
    again = made("2.mp4", prompt="a red zebra", negative_prompt="blue ball")
    other = made("3.mp4", prompt="a blue boat", negative_prompt="blue ball")
    loads = [
        [event.part for event in events if isinstance(event, StageStarted) and event.stage == "load"]
        for _, events in (first, again, other)
    ]
    assert ["text_encoder" in parts for parts in loads] == [True, False, True]
    warned = [[event for event in events if isinstance(event, Warned)] for _, events in (first, again)]
    assert warned[0] == warned[1] != []
    assert frames(tmp_path / "1.mp4") == frames(tmp_path / "2.mp4")


def frames(path: Path) -> bytes:
    """Return a video's pixels."""
    import subprocess

    from runtime.video.mp4 import find_ffmpeg

    command = [str(find_ffmpeg()), "-v", "error", "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    return subprocess.run(command, capture_output=True, check=True).stdout


def test_a_full_disk_leaves_no_partial_file_and_old_ones_are_removed(tiny: Tiny, small_disk: Path) -> None:
    spec = tiny("wan2.1")
    part = tiny_plan(spec, small_disk / "x.mp4").components["text_encoder"]
    folder = small_disk / "prompts"
    cache = PromptCache(folder)
    cache.keep(spec, part, "a red boat", encoding(2.0))
    (kept,) = folder.iterdir()
    filler = fill(small_disk)
    cache.keep(spec, part, "a kite", encoding(3.0))
    assert list(folder.iterdir()) == [kept]
    assert cache.find(spec, part, "a kite") is not None
    assert PromptCache(folder).find(spec, part, "a kite") is None
    filler.unlink()
    killed = folder / "0123.4567.tmp"
    killed.write_bytes(b"half")
    os.utime(killed, (0, 0))
    cache.keep(spec, part, "a house", encoding(4.0))
    assert len(list(folder.iterdir())) == 2 and not killed.exists()
