"""The guidance cache with LTX-2's four passes: what is left out, what a step takes over, resumes, several processes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from runtime.core.cancel import Cancel
from runtime.core.events import Event, Paused, Resumed, StepDone, VideoSaved
from runtime.core.plan import ComponentPlan
from runtime.execution.components import ISOLATED, PROMPTED, SKIPPING, UNPROMPTED, Denoiser
from runtime.families.ltx2.transformer import PyTorchStreamDenoiser
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module, load_scheduler
from runtime.pipeline.sampling import Conditioning, Guidance, Step, StepResult, denoise, get_noise, get_schedule
from runtime.pipeline.stream_guidance import StreamSampling
from tests.families.ltx2.test_faults import Clip, whole
from tests.families.ltx2.test_parity import make, planned
from tests.families.ltx2.test_several_gpus import TWO
from tests.families.ltx2.test_transformer import STREAMS, inputs
from tests.image_files import with_saved
from tests.plans import tiny_plan, with_strategy
from tests.tiny_models import LTX2_DISTILLED

Tiny = Callable[[str], ModelSpec]
PART = ComponentPlan(backend="pytorch", device="cpu", dtype="float32", weights_bytes=0, reasons=())
PASSES = (PROMPTED, UNPROMPTED, SKIPPING, ISOLATED)


@pytest.mark.parametrize(
    ("video", "sound", "agrees"),
    [(0.95, 0.95, True), (0.95, 0.8, False), (0.8, 0.95, False), (0.95, float("nan"), False)],
)
def test_a_pass_is_left_out_if_both_streams_agree(video: float, sound: float, agrees: bool) -> None:
    # Each stream has its own size.
    streams = torch.ones(STREAMS.video), 100 * torch.ones(STREAMS.sound)
    prompted = STREAMS.join(*streams)
    other = STREAMS.join(video * streams[0], sound * streams[1])
    before = Guidance(0.1, {ISOLATED: prompted}, left_out=3)
    after = before.after({PROMPTED: prompted, UNPROMPTED: 0 * prompted, SKIPPING: other}, STREAMS.split)
    # What this step left out is computed in the next one.
    assert ([*after.differences], after.left_out) == ([SKIPPING] if agrees else [], 4)


def test_a_step_takes_over_the_differences_of_the_one_before(tiny: Tiny, tmp_path: Path) -> None:
    spec, passes = tiny("ltx-2.3"), list[str]()
    plan = planned(spec, 3.0, tmp_path, steps=3)
    sampling = StreamSampling.of(plan, spec)
    assert sampling is not None
    module = load_module(spec, "transformer", PART)
    denoiser = PyTorchStreamDenoiser(module)
    denoiser.see(sampling.streams, sampling.guidance.skipping_blocks)
    texts = inputs(module).text, inputs(module, seed=2).text

    def predict(latents: torch.Tensor, timestep: torch.Tensor, which: str) -> torch.Tensor:
        return denoiser(latents, timestep, texts[which == UNPROMPTED], which)

    class Recorded:
        """The denoiser, which records the kind of each pass."""

        pairs = False
        begin_step, together = denoiser.begin_step, denoiser.together

        def __call__(
            self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor, which: str = PROMPTED
        ) -> torch.Tensor:
            passes.append(which)
            return denoiser(latents, timestep, text_embeds, which)

    @contextmanager
    def expert(_: Step) -> Iterator[Denoiser]:
        yield Recorded()

    scheduler = load_scheduler(spec, plan.shift)
    steps = get_schedule(plan, scheduler, None, spec.noise.sigmas(plan.steps), spec.noise.by_size)
    noise, text = get_noise(plan), Conditioning(*texts)
    of_steps: list[StepResult] = list(
        denoise(noise, steps, scheduler, text, expert, Cancel(), guidance=Guidance(1e6), sampling=sampling)
    )
    assert passes == [*PASSES, PROMPTED, *PASSES]
    assert [done.guidance.left_out for done in of_steps] == [0, 3, 3]
    first = {which: predict(noise, steps[0].timestep, which) for which in PASSES}
    latents = of_steps[0].latents
    second = predict(latents, steps[1].timestep, PROMPTED)
    velocity = sampling.velocity(
        {which: second - (first[PROMPTED] - first[which]) for which in PASSES},
        latents,
        steps[1].sigma,
        plan.guidance_scale,
    )
    torch.testing.assert_close(of_steps[1].estimate, latents - steps[1].sigma * velocity, rtol=0, atol=1e-4)


def at_step(step: int) -> Callable[[Event], bool]:
    """Return a condition for pausing after a step."""
    return lambda event: isinstance(event, StepDone) and event.step == step


def clip_of(spec: ModelSpec, folder: Path, **values: object) -> Clip:
    """Plan a clip with guidance and lossless sound in a folder that does not exist yet."""
    out = folder / "out" / "x.mp4"
    out.parent.mkdir(parents=True)
    fields = {"negative_prompt": "a boat", "guidance_scale": 3.0, "sound": "lossless", "guidance_cache": "0.2"}
    return Clip(spec, tiny_plan(spec, out, **fields | values), folder / "job")


@pytest.mark.slow
def test_resuming_after_any_step_gives_the_same_frames_and_sound(tiny: Tiny, tmp_path: Path) -> None:
    spec, files = with_saved(tiny("ltx-2.3"), ("image", "last_image"), tmp_path)
    clip, exact = (clip_of(spec, tmp_path / cache, steps=5, guidance_cache=cache, **files) for cache in ("0.2", "off"))
    assert whole(clip) != whole(exact)
    for step in (1, 2, 3):
        assert clip.run(at_step(step))[-1] == Paused(step=step, of=5)
    events = clip.run()
    assert Resumed(step=3, of=5) in events
    saved = events[-1]
    assert isinstance(saved, VideoSaved)
    assert 2 <= saved.passes_left_out <= 6
    assert clip.seen_and_heard == whole(clip)


@pytest.mark.slow
def test_the_second_stage_keeps_the_number_of_passes_that_the_first_left_out(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny(LTX2_DISTILLED[1]).in_stages(2)
    saved = clip_of(spec, tmp_path / "clip", stages="2", steps=3, width=128, height=64).run()[-1]
    assert isinstance(saved, VideoSaved), saved
    assert saved.passes_left_out > 0


@pytest.mark.slow
def test_two_processes_leave_out_the_same_passes(tiny: Tiny, tmp_path: Path) -> None:
    spec = tiny("ltx-2")
    plan = with_strategy(planned(spec, 3.0, tmp_path, steps=4, guidance_cache="0.2"), keep_loaded=True)
    wanted, without = make(spec, plan), make(spec, plan.replace(guidance_cache="off"))
    got = make(spec, plan.replace(split=TWO))
    for name in ("video", "sound"):
        torch.testing.assert_close(getattr(got, name), getattr(wanted, name), rtol=0, atol=1e-5)
        assert (getattr(wanted, name) - getattr(without, name)).abs().max() > 1e-4
