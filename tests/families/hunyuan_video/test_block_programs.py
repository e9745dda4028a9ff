"""Transformers on block engines equal diffusers' modules, fall back to PyTorch, and run in jobs of both families."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from diffusers import HunyuanVideoTransformer3DModel

from runtime.core.errors import EngineError
from runtime.core.events import FellBack, VideoSaved
from runtime.core.facts import Fact
from runtime.core.plan import EAGER, EngineRef, Split
from runtime.engines.programs import load_program
from runtime.engines.service import OpenEngines
from runtime.execution.block_engines import BlockEngines
from runtime.execution.residency import Residency
from runtime.families.hunyuan_video.transformer import PyTorchDenoiser
from runtime.models.spec import ModelSpec
from tests.block_engine_files import in_blocks, stock
from tests.families.hunyuan_video.test_vae_programs import framepack_spec
from tests.families.test_second_family import frames, mean_difference
from tests.pipeline.runs import events_of
from tests.plans import tiny_plan, with_strategy

__all__ = ["framepack_spec"]

Tiny = Callable[[str], ModelSpec]
# Fewer than the clip's tokens, so that there are several chunks.
MOST_TOKENS = 64


class Engines:
    """Block programs in PyTorch with the interface of `OpenEngines`; call number `failing` fails as `fault` says."""

    most_tokens = MOST_TOKENS

    def __init__(self, spec: ModelSpec, failing: int = 0, fault: str = "", dtype: str = "float32") -> None:
        self.programs = {
            name: load_program(spec, "transformer", name, device="cpu", dtype=dtype) for name in spec.block_programs
        }
        self.calls: list[str] = []
        self._failing, self._fault = failing, fault

    def write(self, program: str, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        self.calls.append(program)
        failing = len(self.calls) == self._failing
        if failing and self._fault == "error":
            raise EngineError("engine.no_such_gpu", device="cpu")
        for name, found in self.programs[program].run(**inputs).items():
            outputs[name].copy_(torch.full_like(found, torch.nan) if failing else found)


def on_engines(spec: ModelSpec, engines: Engines | None, reasons: list[Fact], dtype: str = "float32") -> BlockEngines:
    """Return block engines of a model that record why they fail."""
    uses = [
        EngineRef(id=name, program=name, builder="b", precision=dtype, profile=((1, 1, 1),) * 3)
        for name in spec.block_programs
    ]
    opened = None if engines is None else cast("OpenEngines", engines)
    return BlockEngines(opened, spec, "transformer", uses, reasons.append, reasons.append)


@torch.no_grad()
@pytest.mark.parametrize("fault", ["", "error", "nan", "not opened"])
def test_a_pass_equals_diffusers(tiny: Tiny, fault: str) -> None:
    spec = tiny("hunyuan-video")
    module: Any = HunyuanVideoTransformer3DModel.from_pretrained(spec.directory / "transformer").eval()
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 16, 3, 8, 12, generator=generator)
    text = torch.randn(1, 1 + 7, 32, generator=generator)
    timestep, guidance = torch.tensor(500.0), torch.tensor([6000.0])
    expected = module(
        latents, timestep[None], text[:, 1:], torch.ones(1, 7), text[:, 0, :24], guidance, return_dict=False
    )[0]
    reasons: list[Fact] = []
    engines = None if fault == "not opened" else Engines(spec, failing=5 if fault else 0, fault=fault)
    denoiser = PyTorchDenoiser(module)
    denoiser.compute(EAGER, None, on_engines(spec, engines, reasons))
    found = denoiser(latents, torch.tensor([500.0, 6000.0]), text)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    codes = {"error": ["engine.no_such_gpu"], "nan": ["execution.engine_not_finite"]}
    assert [reason.code for reason in reasons] == codes.get(fault, [])
    if engines is not None and not fault:
        # Of the clip's 72 tokens two chunks, of the text's 7 tokens one, of both two; two blocks of each kind.
        counts = {name: engines.calls.count(name) for name in spec.block_programs}
        assert counts == {"block_qkv": 2 * 3 + 2 * 2, "block_feed_forward": 2 * 3, "block_single": 2 * 2}
    denoiser.forget()
    assert denoiser(latents, torch.tensor([500.0, 6000.0]), text).dtype == torch.float32
    assert not module.is_wide


@torch.no_grad()
def test_tokens_are_float32_between_blocks_with_weights_in_half_precision(tiny: Tiny) -> None:
    spec = tiny("hunyuan-video")
    generator = torch.Generator().manual_seed(0)
    latents, text = torch.randn(1, 16, 3, 8, 12, generator=generator), torch.randn(1, 1 + 7, 32, generator=generator)
    found = {}
    for dtype in (torch.float32, torch.float16):
        module: Any = HunyuanVideoTransformer3DModel.from_pretrained(spec.directory / "transformer").eval().to(dtype)
        reasons: list[Fact] = []
        denoiser = PyTorchDenoiser(module)
        name = str(dtype).removeprefix("torch.")
        denoiser.compute(EAGER, None, on_engines(spec, Engines(spec, dtype=name), reasons, name))
        found[dtype] = denoiser(latents, torch.tensor([500.0, 6000.0]), text).float()
        assert not reasons
    error = (found[torch.float16] - found[torch.float32]).norm() / found[torch.float32].norm()
    assert error < 5e-3


@pytest.mark.slow
def test_two_processes_on_engines_make_the_same_video(
    tiny: Tiny, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    spec, service = tiny("hunyuan-video"), stock(tiny("hunyuan-video"), tmp_path, tmp_path_factory)
    videos = []
    # One process has tokens of the clip only, the other has the text's too.
    for index, split in enumerate((None, Split(devices=("cpu", "cpu"), guidance=1, sequence=2, decode=False))):
        plan = with_strategy(tiny_plan(spec, tmp_path / f"{index}.mp4", width=160, height=96, steps=2))
        with Residency(service, keep_prompts=False) as residency:
            events = events_of(in_blocks(plan, spec).replace(split=split), spec, residency)
        assert isinstance(events[-1], VideoSaved), events[-1]
        assert events[-1].plan["components"]["transformer"]["backend"] == "onnxruntime"
        assert not any(isinstance(event, FellBack) for event in events)
        videos.append(plan.output)
    assert mean_difference(*(frames(str(video)) for video in videos)) < 0.1
