"""Prepare later clips while no video waits: load what runs them, and compile what PyTorch runs. Imports torch."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import islice

import torch

from runtime.core.cancel import Cancel
from runtime.core.errors import MachineError
from runtime.core.events import Event, Warned
from runtime.core.facts import Fact
from runtime.core.plan import PYTORCH, ExecutionPlan
from runtime.execution.components import Denoiser
from runtime.execution.residency import Residency
from runtime.models.spec import ModelSpec, is_transformer
from runtime.pipeline.history_file import HistoryFile
from runtime.pipeline.metrics import Metrics
from runtime.pipeline.run_context import RunContext
from runtime.pipeline.sampling import Guidance, Step, decode, denoise, first_latents, get_noise
from runtime.pipeline.stages import encode_given, encode_prompt, steer

# The first chunk of frames, and one of those that follow, which have another shape.
_CHUNKS = 2


def load_ahead(plan: ExecutionPlan, spec: ModelSpec, cancel: Cancel, residency: Residency) -> None:
    """Load what encodes the prompt, denoises and decodes, if the plan keeps all of it loaded.

    Args:
        plan: of later clips.
        cancel: checked before each component.

    Raises:
        TandemError: if something cannot be loaded.
    """
    if not plan.strategy.keep_loaded or plan.split is not None:
        return
    with (
        Metrics(plan.components["transformer"].device, residency) as metrics,
        RunContext(plan, spec, lambda _: None, cancel, residency, metrics) as context,
    ):
        for name in plan.model_components:
            cancel.check()
            if name in spec.text_encoders:
                loaded: AbstractContextManager[object] = residency.text_encoder(spec, context, name)
            elif is_transformer(name):
                loaded = residency.denoiser(spec, context, name)
            elif name == "vae":
                loaded = residency.video_decoder(spec, context)
            else:  # it runs once a clip
                continue
            with loaded:
                pass


def compile_ahead(
    plan: ExecutionPlan, spec: ModelSpec, cancel: Cancel, residency: Residency, history: HistoryFile | None
) -> Fact:
    """Run the first step of a plan and decode its first frames, so that their code is compiled; return the result.

    The code stays in this process and in the cache on the disk. The weights are those that `residency` has loaded, else
    they are loaded. Videos made in sections and several GPUs are not supported.

    Args:
        plan: with compiled code; of the size and the settings of later clips.
        cancel: checked before each forward pass and each chunk of frames, and while weights are loaded, but not while
            code is compiled.
        history: receives the time that compiling took.

    Raises:
        MachineError: if the code cannot be compiled.
        torch.OutOfMemoryError: if memory runs out.
    """
    assert plan.split is None and spec.section is None
    reasons: list[Fact] = []

    def note(event: Event) -> None:
        if isinstance(event, Warned) and event.fact.code == "pipeline.degraded":
            reasons.append(event.fact.data["reason"])

    with (
        Metrics(plan.components["transformer"].device, residency) as metrics,
        RunContext(plan, spec, note, cancel, residency, metrics) as context,
    ):
        latents = _first_step(context)
        if plan.components["vae"].backend == PYTORCH and plan.components["vae"].device != "cpu":
            with residency.video_decoder(spec, context) as decoder:
                chunks = decode(decoder, latents, plan.strategy.decode_chunk, cancel, plan.strategy.decode_tile)
                with contextlib.closing(chunks):
                    for _ in islice(chunks, _CHUNKS):
                        pass
        if reasons:
            raise MachineError("task.not_compiled", cause=reasons[0])
        # It is in memory already if an earlier attempt made room for a video after it had compiled.
        seconds = context.compiled_seconds if context.compiled else 0.0
        if history is not None:
            history.add_compilation(context.plan, spec, seconds, context.compiled_graphs)
    return Fact("task.compiled", {"seconds": seconds})


def _first_step(context: RunContext) -> torch.Tensor:
    """Return the latents after the first step, or noise if engines compute the transformers."""
    plan, spec = context.plan, context.spec
    if all(part.engines for name, part in plan.components.items() if is_transformer(name)):
        return get_noise(plan).to(plan.components["vae"].device)
    context.load_ahead()
    conditioning = encode_given(context, encode_prompt(context)).suppressing_as(plan)
    scheduler, steps = context.schedule()
    latents = first_latents(get_noise(plan), conditioning.video, scheduler, steps[0])

    @contextlib.contextmanager
    def open_expert(first: Step) -> Iterator[Denoiser]:
        with context.residency.denoiser(spec.with_ranges(first.ranges), context, first.expert) as denoiser:
            steer(context, denoiser)
            yield denoiser

    (done,) = denoise(
        latents, steps[:1], scheduler, conditioning, open_expert, context.cancel, guidance=Guidance.of(plan)
    )
    return done.latents
