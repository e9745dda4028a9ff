"""LTX-2's transformer on block engines equals diffusers', falls back to PyTorch, and makes whole clips."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from runtime.core.errors import EngineError
from runtime.core.events import FellBack, VideoSaved
from runtime.core.facts import Fact
from runtime.core.plan import EAGER, Speed
from runtime.engines.block_programs import BlockProgram
from runtime.engines.block_reference import compare_blocks, random_text
from runtime.engines.key_parts import architecture_digest
from runtime.engines.programs import load_program
from runtime.engines.reference import encoded_prompt
from runtime.engines.service import OpenEngines
from runtime.execution.components import ISOLATED, PROMPTED, SKIPPING
from runtime.execution.residency import Residency
from runtime.execution.streams import Streams
from runtime.families.ltx2.block_programs import BLOCK_PARTS
from runtime.families.ltx2.spec import BLOCK_PROGRAMS
from runtime.families.ltx2.transformer import PyTorchStreamDenoiser
from runtime.models.spec import ModelSpec
from tests.block_engine_files import forecast_of_blocks, in_blocks, stock
from tests.engines.test_block_reference import Part, Tensors, key_of
from tests.families.hunyuan_video.test_block_programs import MOST_TOKENS, Engines, on_engines
from tests.families.ltx2.test_transformer import (
    PASSES,
    SKIPPED,
    STREAMS,
    TIMES,
    by_diffusers,
    error_of,
    inputs,
    load,
    random_module,
)
from tests.families.test_second_family import frames, mean_difference
from tests.pipeline.runs import events_of
from tests.planner.test_live_bytes import Counted, attend
from tests.plans import tiny_plan
from tests.sounds import sound_in
from tests.tiny_models import LTX2_ARCHITECTURES

Tiny = Callable[[str], ModelSpec]


def blocks(
    spec: ModelSpec, module: Any, engines: Engines | None, reasons: list[Fact], dtype: str = "float32"
) -> PyTorchStreamDenoiser:
    """Return a denoiser on block engines."""
    denoiser = PyTorchStreamDenoiser(module)
    denoiser.compute(EAGER, None, on_engines(spec, engines, reasons, dtype))
    denoiser.see(STREAMS, SKIPPED)
    return denoiser


@pytest.mark.parametrize("architecture", LTX2_ARCHITECTURES)
def test_passes_of_each_kind_equal_diffusers(architecture: str, tiny: Tiny) -> None:
    spec, reasons = tiny(architecture), list[Fact]()
    assert set(BLOCK_PARTS) == set(BLOCK_PROGRAMS) == set(spec.block_programs)
    reference, engines = load(spec), Engines(spec)
    denoiser, given = blocks(spec, load(spec), engines, reasons), inputs(reference)
    for times in TIMES.values():
        for which in PASSES:
            engines.calls.clear()
            wanted = by_diffusers(reference, given, times, which)
            assert error_of(denoiser(given.latents, times, given.text, which), wanted) < 5e-6, which
            # Of the video's 72 tokens two chunks, also if those of the first frame have a timestep of their own; of the
            # sound's nine tokens one. Both streams have a call for each part of the two blocks.
            counts = {name: engines.calls.count(name) for name in spec.block_programs}
            assert counts == {name: 2 if "sound" in name else 4 for name in spec.block_programs}
    assert not reasons


@pytest.mark.parametrize("fault", ["error", "nan", "not opened"])
def test_pytorch_continues_where_an_engine_fails(fault: str, tiny: Tiny) -> None:
    spec, reasons = tiny("ltx-2.3"), list[Fact]()
    reference = load(spec)
    engines = None if fault == "not opened" else Engines(spec, failing=6, fault=fault)
    denoiser, given = blocks(spec, load(spec), engines, reasons), inputs(reference)
    for which in (PROMPTED, SKIPPING, ISOLATED):
        wanted = by_diffusers(reference, given, TIMES["image"], which)
        assert error_of(denoiser(given.latents, TIMES["image"], given.text, which), wanted) < 5e-6, which
    codes = {"error": ["engine.no_such_gpu"], "nan": ["execution.engine_not_finite"]}
    assert [reason.code for reason in reasons] == codes.get(fault, [])
    # Tokens are of the weights' dtype again once the engines are not used any more.
    denoiser.forget()
    assert not denoiser._module.is_wide


@pytest.mark.parametrize("architecture", LTX2_ARCHITECTURES)
def test_weights_in_half_precision_lose_as_little_as_in_pytorch(architecture: str, tiny: Tiny) -> None:
    spec, reasons = tiny(architecture), list[Fact]()
    reference = load(spec)
    given, half = inputs(reference), Engines(spec, dtype="bfloat16")
    wanted = by_diffusers(reference, given, TIMES["text"])
    denoiser = blocks(spec, load(spec).bfloat16(), half, reasons, "bfloat16")
    plain = PyTorchStreamDenoiser(load(spec).bfloat16(), EAGER)
    plain.see(STREAMS, SKIPPED)
    errors = [error_of(one(given.latents, TIMES["text"], given.text), wanted) for one in (denoiser, plain)]
    assert errors[0] < min(0.03, 1.2 * errors[1])
    # The same parts in PyTorch, after a failure.
    again = blocks(spec, load(spec).bfloat16(), None, reasons, "bfloat16")
    assert error_of(again(given.latents, TIMES["text"], given.text), wanted) < min(0.03, 1.2 * errors[1])
    assert not reasons


def test_adjacent_channels_are_rotated_if_the_model_has_such_pairs(tiny: Tiny) -> None:
    torch.manual_seed(3)
    spec, reasons = tiny("ltx-2"), list[Fact]()
    spec = replace(spec, transformer=replace(cast("Any", spec.transformer), splits_heads=False))
    module = random_module(rope_type="interleaved")
    given = inputs(module)
    wanted = by_diffusers(module, given, TIMES["text"])
    denoiser = blocks(spec, module, Engines(spec), reasons)
    assert error_of(denoiser(given.latents, TIMES["text"], given.text), wanted) < 5e-6
    assert not reasons


def test_kept_text_works_on_engines(tiny: Tiny) -> None:
    spec, reasons = tiny("ltx-2"), list[Fact]()
    reference, denoiser = load(spec), PyTorchStreamDenoiser(load(spec))
    denoiser.compute(Speed(text_kept=True, compiled=True, fused=True), None, on_engines(spec, Engines(spec), reasons))
    denoiser.see(STREAMS, SKIPPED)
    given = inputs(reference)
    for _ in range(2):
        found = denoiser(given.latents, TIMES["text"], given.text)
        assert error_of(found, by_diffusers(reference, given, TIMES["text"])) < 5e-6
    assert not reasons


def verified(spec: ModelSpec, program: str, after: Callable[[Mapping[str, torch.Tensor], Tensors], Tensors]) -> bool:
    """Verify a part in PyTorch, changed by `after`."""
    loaded = load_program(spec, "transformer", program, device="cpu", dtype="float32", tokens=MOST_TOKENS)
    assert isinstance(loaded, BlockProgram)
    session, key = Part(loaded, after), key_of(spec, program, "float32")
    found = compare_blocks(session, spec, "transformer", key, "cpu", random_text(spec))
    assert found.passed == (found.error < 1e-4), found.detail
    return found.passed


@pytest.mark.parametrize("architecture", LTX2_ARCHITECTURES)
def test_parts_of_both_streams_are_verified(architecture: str, tiny: Tiny) -> None:
    spec = tiny(architecture)
    spec = replace(spec, defaults=replace(spec.defaults, width=96, height=64, frames=17))
    # Connectors make the transformer's text of the text encoder's states, so the text is random.
    assert encoded_prompt(spec, "cpu") is None

    def off(_: Mapping[str, torch.Tensor], outputs: Tensors) -> Tensors:
        *others, (name, last) = outputs.items()
        return {**dict(others), name: last * 1.05}

    for program in spec.block_programs:
        assert verified(spec, program, lambda _, outputs: outputs), program
    for program in ("block_cross", "block_sound_query"):
        assert not verified(spec, program, off), program


def test_keys_of_engines_differ_with_what_the_parts_are_made_from(tiny: Tiny) -> None:
    spec = tiny("ltx-2")
    transformer: Any = spec.transformer
    changes: tuple[dict[str, Any], ...] = (
        {"gated": True},
        {"modulated_text": True},
        {"splits_heads": False},
        {"sound_head_dim": 10},
        {},
    )
    digests = [
        architecture_digest(replace(spec, transformer=replace(transformer, **one)), "transformer", "block_qkv")
        for one in changes
    ]
    assert len(set(digests)) == len(changes)
    other = replace(spec, transformer=replace(transformer, num_layers=7))
    assert architecture_digest(other, "transformer", "block_qkv") == digests[-1]


class Untouched(Engines):
    """Engines whose outputs stay as they are: what is counted is the memory between them."""

    most_tokens = 512

    def write(self, program: str, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        for output in outputs.values():
            output.zero_()


@torch.no_grad()
def test_memory_between_engines_is_as_forecast(tiny: Tiny) -> None:
    sizes = {"num_attention_heads": 8, "attention_head_dim": 128}
    changes: dict[str, Any] = {
        **sizes,
        "cross_attention_dim": 1024,
        "audio_num_attention_heads": 8,
        "audio_attention_head_dim": 64,
    }
    changes |= {"audio_cross_attention_dim": 512, "rope_type": "split"}
    changes |= dict.fromkeys(("gated_attn", "cross_attn_mod", "audio_gated_attn", "audio_cross_attn_mod"), True)
    module, spec = random_module(**changes).bfloat16(), tiny("ltx-2.3")
    transformer: Any = spec.transformer
    spec = replace(spec, transformer=replace(transformer, **sizes, sound_heads=8, sound_head_dim=64))
    streams = Streams((1, 16, 9, 16, 16), (1, 4, 9, 4), 24.0)
    given, denoiser = inputs(module, streams), PyTorchStreamDenoiser(module)
    denoiser.compute(EAGER, None, on_engines(spec, Untouched(spec, dtype="bfloat16"), [], "bfloat16"))
    denoiser.see(streams, SKIPPED)
    module.kernels.choose(module.transformer_blocks)
    for block in module.transformer_blocks:
        block.attend = block.attend_text = block.attend_other = attend
    with Counted([*module.parameters(), *module.buffers(), *given]) as counted:
        denoiser(given.latents, TIMES["text"], given.text)
    forecast = forecast_of_blocks(spec, streams.video, 512, Untouched.most_tokens)
    assert 0.85 * forecast <= counted.peak <= 1.01 * forecast


@pytest.mark.slow
def test_a_job_on_engines_makes_the_same_clip(
    tiny: Tiny, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, seen, failing = tiny("ltx-2.3"), list[str](), set[int]()
    write = OpenEngines.write

    def watch(self: OpenEngines, program: str, given: Mapping[str, torch.Tensor], outputs: Any) -> None:
        seen.append(program)
        write(self, program, given, outputs)
        if len(seen) in failing:
            raise EngineError("engine.failed", error="on purpose")

    def clip(name: str, *, on_engines: bool) -> tuple[bytes, np.ndarray, int]:
        """Return frames, samples and the number of fallbacks of a clip with all kinds of passes."""
        size = {"width": 96, "height": 64, "steps": 2, "guidance_scale": 3.0, "sound": "lossless"}
        plan = tiny_plan(spec, tmp_path / f"{name}.mp4", **size)
        seen.clear()
        with Residency(service, keep_prompts=False) as residency:
            events = events_of(in_blocks(plan, spec) if on_engines else plan, spec, residency)
        assert isinstance(events[-1], VideoSaved), events[-1]
        found = sound_in(plan.output)
        assert found is not None
        fallen = sum(isinstance(event, FellBack) for event in events)
        return frames(str(plan.output)), found[1].samples, fallen

    monkeypatch.setattr(OpenEngines, "write", watch)
    service = stock(spec, tmp_path, tmp_path_factory)
    pixels, samples, _ = clip("pytorch", on_engines=False)
    assert not seen
    for name, failing_calls in (("engines", set()), ("failing", {30})):
        failing |= failing_calls
        found = clip(name, on_engines=True)
        # One chunk of each stream in two blocks, two steps of four passes; or until one fails.
        calls = 30 if failing else len(spec.block_programs) * 2 * 2 * 4
        assert (len(seen), found[2]) == (calls, len(failing))
        assert set(seen) == set(spec.block_programs)
        assert mean_difference(found[0], pixels) < 0.1
        assert abs(found[1] - samples).max() < 1e-3
