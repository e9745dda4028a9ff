"""Check a clip with every component on engines against `diffusers.WanPipeline` in float32."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers.pipelines.wan.pipeline_wan import prompt_clean

from bench.gpu.check_common import CHUNK, CLIP, Checks, profile_of, programs_of, psnr, ssim
from runtime.core.cancel import Cancel
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.engines.sessions import Session
from runtime.execution.components import PROMPTED
from runtime.models.spec import IMAGE_ENCODER, VAE_ENCODER, ModelSpec
from runtime.models.weights import load_scheduler, load_tokenizer
from runtime.pipeline.sampling import Conditioning, Step, decode, denoise, get_noise, get_schedule
from runtime.planner.choice.engine_index import EngineRecord
from runtime.planner.resolve import PlanningContext, resolve
from tests.gpu.errors import relative_error
from tests.plans import with_strategy
from tests.wan_pipeline import load_pipeline, run_pipeline

# Random models are checked on a small clip: TensorRT 8.6 stores the full attention matrix.
SMALL = (3, 30, 52)
# A clip of text has no images to encode.
ENCODERS = frozenset({IMAGE_ENCODER, VAE_ENCODER})
STEPS = 8
PROMPT = "a red boat sails left on a calm sea at sunset"


class EngineDenoiser:
    """A transformer session with the interface of the sampling loop."""

    pairs = False

    def __init__(self, session: Session, timesteps: int) -> None:
        self._session, self._timesteps = session, timesteps

    def begin_step(self, *, fresh: bool, exact: bool) -> None:
        """Nothing differs from step to step."""

    def __call__(
        self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor, which: str = PROMPTED
    ) -> torch.Tensor:
        given = {"latents": latents, "timestep": timestep.expand(self._timesteps).float(), "text_embeds": text_embeds}
        return self._session.infer(**given)["velocity"]


class EngineDecoder:
    """The two VAE sessions with the interface of the sampling loop."""

    def __init__(self, first: Session, following: Session) -> None:
        self._first = first
        self._next = following

    def frames(self, latents: torch.Tensor, chunk: int, _tile: int | None = None) -> Iterator[torch.Tensor]:
        out = self._first.infer(z=latents[:, :, :1])
        yield out.pop("frames")
        for start in range(1, latents.shape[2], chunk):
            out = self._next.infer(z=latents[:, :, start : start + chunk], **out)
            yield out.pop("frames")


def clip(checks: Checks) -> None:
    """Compare a clip on engines with PyTorch in float32: latents by step, frames, seconds."""
    spec = checks.model()
    if spec.name == "diorama":
        request, latent, chunk = GenerationRequest(prompt=PROMPT, seed=7), CLIP, CHUNK
    else:
        latent, chunk = checks.arguments.latent or SMALL, 1
        frames, height, width = latent
        scale = spec.vae.scale_factor_spatial
        request = GenerationRequest(
            prompt=PROMPT, seed=7, width=width * scale, height=height * scale, frames=4 * frames - 3, steps=STEPS
        )
    plan = with_strategy(resolve(request, spec, PlanningContext(checks.machine, Path("x.mp4"))), decode_chunk=chunk)
    parts = {
        name: part.replace(device=checks.device, dtype="float32", backend="pytorch")
        for name, part in plan.components.items()
    }
    plan = plan.replace(components=parts)
    # The reference is float32 indeed: cuDNN rounds factors to 10 bits otherwise.
    backends: Any = torch.backends
    backends.cudnn.conv.fp32_precision = "ieee"
    there = [item for item in programs_of(spec) if item[0] not in ENCODERS]

    def build(item: tuple[str, str]) -> EngineRecord:
        profiles = (profile_of(item[1], latent, chunk),)
        return checks.engine(spec, item[0], checks.key(spec, *item, profiles, checks.arguments.precision))

    # The second expert after the first: it finds what the first has timed.
    experts = [item for item in there if item[1] == "transformer"]
    lines = [experts, *([item] for item in there if item not in experts)]
    with ThreadPoolExecutor(checks.arguments.jobs) as pool:
        built = pool.map(lambda line: [(item, build(item)) for item in line], lines)
        records = dict(pair for line in built for pair in line)

    reference = run_pytorch(spec, plan, checks.device)
    reference()
    checks.synchronize()
    started = time.perf_counter()
    wanted = reference()
    checks.synchronize()
    checks.say("PyTorch float32", model=spec.name, size=latent, seconds=time.perf_counter() - started, steps=plan.steps)
    del reference
    for graphs in ("off", "on"):
        sessions = {item: checks.open(record, cuda_graphs=graphs) for item, record in records.items()}
        try:
            run_engines(spec, plan, sessions)
            checks.synchronize()
            started = time.perf_counter()
            got = run_engines(spec, plan, sessions)
            checks.synchronize()
            seconds = time.perf_counter() - started
        finally:
            for session in sessions.values():
                session.close()
        checks.say(
            "clip",
            model=spec.name,
            graphs=graphs,
            precisions={f"{component} {program}": r.key.precision for (component, program), r in records.items()},
            verified={f"{component} {program}": r.verified for (component, program), r in records.items()},
            seconds=seconds,
            text_error=relative_error(got[0], wanted[0]),
            latent_error_by_step=[float(f"{relative_error(a, b):.3g}") for a, b in zip(got[1], wanted[1], strict=True)],
            psnr_db=round(psnr(got[2], wanted[2]), 2),
            ssim=round(ssim(got[2], wanted[2]), 5),
            frames=len(got[2]),
        )


Made = tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]


def run_pytorch(spec: ModelSpec, plan: ExecutionPlan, device: str) -> Callable[[], Made]:
    """Return text embeddings, the latents after each step and the frames, from `WanPipeline`."""
    pipeline = load_pipeline(spec, device)

    def run() -> Made:
        embeds, _ = pipeline.encode_prompt(
            plan.prompt, do_classifier_free_guidance=False, max_sequence_length=spec.max_sequence_length
        )
        latents: list[torch.Tensor] = []

        def keep(_: Any, step: int, timestep: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            latents.append(given["latents"].clone())
            return given

        (frames,) = run_pipeline(pipeline, plan, "np", callback_on_step_end=keep)
        return embeds, latents, torch.from_numpy(frames).mul(255).round().to(torch.uint8)

    return run


def run_engines(spec: ModelSpec, plan: ExecutionPlan, sessions: dict[tuple[str, str], Session]) -> Made:
    """Return the same, from sessions."""
    tokenizer = load_tokenizer(spec)

    def encode(prompt: str) -> torch.Tensor:
        tokens = tokenizer(
            [prompt_clean(prompt)],
            padding="max_length",
            max_length=spec.max_sequence_length,
            truncation=True,
            return_tensors="pt",
        )
        session = sessions["text_encoder", "text_encoder"]
        given = {"input_ids": tokens.input_ids, "attention_mask": tokens.attention_mask}
        return session.infer(**given)["embeds"].clone()

    conditioning = Conditioning(encode(plan.prompt), encode(plan.negative_prompt))

    @contextmanager
    def expert(first: Step) -> Iterator[Any]:
        yield EngineDenoiser(sessions[first.expert, "transformer"], spec.timesteps)

    latents = sample(spec, plan, conditioning, expert)
    decoder = EngineDecoder(sessions["vae", "vae_first"], sessions["vae", "vae_next"])
    frames = torch.cat(list(decode(decoder, latents[-1], plan.strategy.decode_chunk, Cancel())))
    return conditioning.positive, latents, frames


def sample(spec: ModelSpec, plan: ExecutionPlan, conditioning: Conditioning, expert: Any) -> list[torch.Tensor]:
    """Return the latents after each step."""
    scheduler = load_scheduler(spec)
    steps = get_schedule(plan, scheduler, spec.boundary_ratio)
    return [done.latents.clone() for done in denoise(get_noise(plan), steps, scheduler, conditioning, expert, Cancel())]
