"""State of a running job: its current plan, progress, warnings, checkpoints and result.

`run.run_job` makes a `RunContext`. The stages of the job read and update it; it emits their events, resumes from a
checkpoint and builds missing engines.
"""

import copy
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runtime.core.cancel import Cancel
from runtime.core.errors import CheckpointError, EngineError, OutputError
from runtime.core.events import EngineProgress, Event, FellBack, Resumed, Stage, StageStarted, VideoSaved, Warned
from runtime.core.facts import Fact
from runtime.core.plan import EAGER, EngineRef, ExecutionPlan
from runtime.core.request import NO_NAG, SOUND_DECODERS, UPSCALER
from runtime.execution.residency import Residency
from runtime.models.spec import CONNECTORS, IMAGE_ENCODER, LATENT_UPSAMPLER, VAE_ENCODER, ModelSpec
from runtime.models.weights import load_scheduler, with_given_levels
from runtime.pipeline.checkpoint import (
    Checkpoint,
    CheckpointFolder,
    CheckpointPolicy,
    restore_scheduler,
    scheduler_state,
)
from runtime.pipeline.metrics import Metrics
from runtime.pipeline.pytorch_timer import PyTorchTimerFactory
from runtime.pipeline.sampling import Conditioning, Guidance, SamplingState, Step, get_schedule
from runtime.pipeline.section_files import SectionFiles
from runtime.pipeline.section_sampling import SectionProgress
from runtime.planner.constraints import BF16_CAPABILITY
from runtime.planner.memory_model import DTYPE_BYTES
from runtime.upstream.torch import CompiledGraphs, compiled_graphs
from runtime.video.mp4 import video_scratch

Emit = Callable[[Event], None]

logger = logging.getLogger(__name__)

# Finding compiled code in memory takes less.
_COMPILED_SECONDS = 0.1
# Fields of a plan that fallbacks change while it runs.
_CHANGING_FIELDS = ("components", "strategy", "decode_flops", "memory", "seconds", "strategies", "split", "speed")


class RunContext:
    """The state of a job while it runs.

    It is a context manager. While it is open, the job's engines are protected from deletion. If an exception ends it,
    it saves the job's progress.

    Attributes:
        plan: the current plan, fallbacks included.
        warnings: facts emitted so far, to show with the result.
        current: the running stage and its component.
        conditioning: the encoded prompt; `None` until it is encoded.
        sampling: progress of sampling; `None` before the first step.
        section: progress of a video that is made in sections; `None` before its images are encoded.
        section_files: where its finished sections, or segments, are; `None` for another video.
        segments_done: finished segments of a video that is made in several.
        control_frames: what a model made of the control video, see `preprocessing.make_control_frames`; `None` if none
            does, or before that. `preprocess_seconds` is how long it took in this run; 0 if they were in the cache.
        progress_at: time of the last change of `conditioning` or `sampling`, from `time.perf_counter`.
        earlier: facts about earlier runs of the job, see `VideoSaved`.
        counts_for_history: whether the run is a whole job with one plan, so that the history gets its timings.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        spec: ModelSpec,
        emit: Emit,
        cancel: Cancel,
        residency: Residency,
        metrics: Metrics,
        checkpoints: CheckpointFolder | None = None,
    ) -> None:
        self.plan = plan
        self.spec = spec
        self.emit = emit
        self.cancel = cancel
        self.residency = residency
        self.metrics = metrics
        self.warnings: list[Fact] = []
        self.current: tuple[Stage, str] = ("load", "text_encoder")
        self.conditioning: Conditioning | None = None
        self.sampling: SamplingState | None = None
        self.section: SectionProgress | None = None
        self.progress_at = time.perf_counter()
        self.earlier: dict[str, Any] = {}
        self.counts_for_history = True
        self._compiled_before = residency.compile_seconds, compiled_graphs()
        self._planned = plan
        self._folder = checkpoints
        self._policy = CheckpointPolicy(checkpoints, spec, emit)
        self._engines_in_use = ExitStack()
        self._ready: set[str] = set()
        self.section_files: SectionFiles | None = None
        self.segments_done = 0
        self.control_frames: np.ndarray | None = None
        self.preprocess_seconds = 0.0
        if spec.section is not None or plan.sections > 1:
            # Without a folder for the job's progress, until the end of the run.
            folder = checkpoints.path if checkpoints else self._engines_in_use.enter_context(video_scratch(plan.output))
            self.section_files = SectionFiles(folder, plan.width, plan.height, plan.fps)

    def __enter__(self) -> "RunContext":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Release the engines; save a checkpoint if the job did not finish, whose exception stays the one raised."""
        self._engines_in_use.close()
        if kind is not None and issubclass(kind, Exception):
            try:
                self._save_checkpoint()
            except Exception:  # such as on a lost device, from which nothing can be copied
                logger.exception("The job's progress could not be saved")

    @property
    def compiled(self) -> bool:
        """Whether this run has compiled code, or loaded it from the cache on the disk, on one device."""
        speed = self.plan.speed
        planned = self._planned.speed
        whole = (speed.compiled, speed.vae_kernels) == (planned.compiled, planned.vae_kernels)
        whole = whole and (speed.compiled or speed.vae_kernels)
        return self.compiled_seconds > _COMPILED_SECONDS and whole and self.plan.split is None

    @property
    def compiled_seconds(self) -> float:
        """Seconds spent on compiling in this run."""
        return self.residency.compile_seconds - self._compiled_before[0]

    @property
    def compiled_graphs(self) -> CompiledGraphs:
        """The graphs that this run has compiled, or loaded from the cache."""
        return compiled_graphs().since(self._compiled_before[1])

    @property
    def folder(self) -> Path | None:
        """The folder of the job's progress; `None` if it is not saved."""
        return None if self._folder is None else self._folder.path

    def cache_folder(self) -> Path:
        """Return the cache; without one, a folder that is removed at the end of the run."""
        cache = self.residency.cache_dir
        return cache or self._engines_in_use.enter_context(video_scratch(self.plan.output))

    @property
    def step(self) -> int:
        """Denoising steps done."""
        if self.section is not None:
            return self.section.sections * self.plan.steps + self.section.steps
        return 0 if self.sampling is None else self.sampling.steps

    @property
    def resumable(self) -> bool:
        """Whether a checkpoint of the job is on disk."""
        return self._policy.saved

    def warn(self, fact: Fact) -> None:
        """Emit a fact to show with the result, unless this run or an earlier one has emitted it."""
        if fact not in self.warnings:
            self.warnings.append(fact)
            self.emit(Warned(fact=fact))

    def begin_stage(self, stage: Stage, name: str) -> None:
        """Emit that a stage begins for a component."""
        self.current = (stage, name)
        self.emit(StageStarted(stage=stage, part=name))

    def loading(self, name: str) -> None:
        """Emit that a component is being loaded."""
        self.cancel.check()
        self.begin_stage("load", name)

    def fell_back(self, name: str, reason: Fact) -> None:
        """Replace a component's engine by PyTorch in the plan, and report it."""
        part = self.plan.components[name]
        backend = part.backend if part.engines else self.plan.request.backend(name)
        event = FellBack(component=name, backend=backend, reason=reason)
        self.plan = self.plan.with_component(name, part.in_pytorch(reason))
        if event.fact not in self.warnings:
            self.warnings.append(event.fact)
            self.emit(event)

    def leave_float16(self) -> bool:
        """Plan transformers, loaded in float16 for block engines that failed, in a precision that does not overflow.

        That is bfloat16, or float32 on devices without it.

        Returns:
            Whether there is such a transformer. It is loaded again when it is next used.
        """
        overflowing = [name for name, part in self.plan.components.items() if part.failed_engines]
        overflowing = [name for name in overflowing if self.plan.components[name].dtype == "float16"]
        for name in overflowing:
            part = self.plan.components[name]
            dtype = "bfloat16" if _computes_bfloat16(part.device) else "float32"
            size = part.weights_bytes * DTYPE_BYTES[dtype] // DTYPE_BYTES[part.dtype]
            reason = Fact("pipeline.left_float16", {"component": name, "dtype": dtype})
            changed = part.replace(dtype=dtype, weights_bytes=size, failed_engines=(), reasons=(*part.reasons, reason))
            self.plan = self.plan.with_component(name, changed)
            self.warn(reason)
        return bool(overflowing)

    def on_degraded(self, name: str, field: str, reason: Fact) -> None:
        """Reset an option of the plan's `Speed` that cannot be applied; the job is slower, with the same result."""
        self.plan = self.plan.replace(speed=self.plan.speed.replace(**{field: getattr(EAGER, field)}))
        self.warn(Fact("pipeline.degraded", {"component": name, "reason": reason}))

    def schedule(self, stage: int = 0) -> tuple[Any, list[Step]]:
        """Return a new scheduler before its first step, and the steps of a stage that denoises.

        Raises:
            ModelError: if the model's scheduler cannot be loaded.
        """
        # A copy, because setting the timesteps does not reset everything that a step changes.
        scheduler = copy.deepcopy(self._scheduler)
        plan, refinement = self.plan_of(stage), self.plan.refinement
        if stage and refinement is not None:
            scheduler = with_given_levels(scheduler)
            return scheduler, get_schedule(plan, scheduler, None, refinement.levels)
        sigmas = self.spec.noise.sigmas(plan.steps)
        boundary, by_size = self.spec.boundary_ratio, self.spec.noise.by_size
        return scheduler, get_schedule(plan, scheduler, boundary, sigmas, by_size)

    def steps_before(self, stage: int) -> int:
        """Return the number of steps of the stages before one."""
        return sum(self.plan_of(number).denoising_steps for number in range(stage))

    def plan_of(self, stage: int) -> ExecutionPlan:
        """Return the plan of a stage that denoises; segments have the same."""
        return self.plan if self.plan.refinement is None else self.plan.by_stage[stage]

    @cached_property
    def _scheduler(self) -> Any:
        return load_scheduler(self.spec, self.plan.shift)

    def record_conditioning(self, conditioning: Conditioning, section: SectionProgress | None = None) -> None:
        """Record that the prompt and the images are encoded, and save a checkpoint.

        Args:
            section: the progress before the first section of a video that is made in sections.
        """
        self.conditioning, self.section = conditioning, section
        self.progress_at = time.perf_counter()
        self._save_checkpoint()

    def record_step(
        self, steps: int, latents: torch.Tensor, scheduler: Any, guidance: Guidance, stage: int = 0
    ) -> SamplingState:
        """Record and return the progress of sampling after `steps` steps of all stages."""
        state = None
        try:
            state = scheduler_state(scheduler)
        except CheckpointError as error:
            self.warn(Fact("pipeline.step_not_resumable", {"cause": error.fact}))
        self.sampling = SamplingState(steps, latents, state, guidance, stage)
        self.progress_at = time.perf_counter()
        return self.sampling

    def record_segment(
        self, conditioning: Conditioning, latents: torch.Tensor, scheduler: Any, guidance: Guidance, number: int
    ) -> None:
        """Record that a segment is on disk, and what the next one, `number`, is made from; save a checkpoint."""
        self.conditioning = conditioning
        self.record_step(self.steps_before(number), latents, scheduler, guidance, number)
        self._save_checkpoint()

    def checkpoint_step(self, steps: Sequence[Step], seconds: float, *, resumable: bool = True) -> None:
        """Save a checkpoint if one is due; always between the two transformers and after the last step of a stage.

        Args:
            steps: of the stage.
            seconds: duration of the last step.
            resumable: whether sampling can be resumed after this step; with a step cache, only after some steps.
        """
        self._policy.add_step(seconds)
        if not resumable:
            return
        done = self.step - self.steps_before(0 if self.sampling is None else self.sampling.stage)
        boundary = done < len(steps) and steps[done].expert != steps[done - 1].expert
        if boundary or done == len(steps) or self._policy.due(self._make_checkpoint):
            self._save_checkpoint()

    def checkpoint_section_step(self, seconds: float) -> None:
        """Save a checkpoint within a section if one is due; always after its last step.

        Args:
            seconds: duration of the last step.
        """
        assert self.section is not None
        self.progress_at = time.perf_counter()
        self._policy.add_step(seconds)
        if self.section.steps == self.plan.steps or self._policy.due(self._make_checkpoint):
            self._save_checkpoint()

    def record_section(self, progress: SectionProgress) -> None:
        """Record that a section is finished and its file on disk, and save a checkpoint."""
        self.section = progress
        self.progress_at = time.perf_counter()
        self._save_checkpoint()

    def start_over(self) -> None:
        """Remove the job's progress, of which a part is damaged; a later run starts from the beginning."""
        self.conditioning = self.section = self.sampling = None
        self._policy.forget()
        if self._folder is not None:
            self._folder.clear()

    def resume(self) -> None:
        """Continue from the checkpoint of an earlier run; one that cannot be used is reported and removed."""
        if self._folder is None:
            return
        try:
            checkpoint = self._folder.load(self.spec, self.plan)
            if checkpoint is not None and checkpoint.sampling is not None and checkpoint.sampling.scheduler is not None:
                restore_scheduler(self.schedule(checkpoint.sampling.stage)[0], checkpoint.sampling.scheduler)
            if self.section_files is not None:
                self.section_files.begin(0 if checkpoint is None else checkpoint.parts)
        except (CheckpointError, OutputError) as error:
            self._folder.clear()
            self.warn(Fact("pipeline.checkpoint_unusable", {"cause": error.fact}))
            return
        if checkpoint is None:
            return
        if _decisions(checkpoint.planned) == _decisions(self.plan):
            # Keep the fallbacks of the earlier run, unless the job is planned differently now.
            self.plan = self.plan.replace(**{name: getattr(checkpoint.plan, name) for name in _CHANGING_FIELDS})
        complete = checkpoint.conditioning.negative is not None or not wants_negative(self.plan)
        self.conditioning = checkpoint.conditioning if complete else None
        self.sampling, self.section = checkpoint.sampling, checkpoint.section
        for fact in checkpoint.warnings:
            self.warn(fact)
        self.metrics.add_earlier(checkpoint.timings, checkpoint.load_seconds)
        self.earlier = {
            "step": checkpoint.step,
            "timings": dict(checkpoint.timings),
            "load_seconds": round(checkpoint.load_seconds, 3),
        }
        self.counts_for_history = False
        self._policy.found(checkpoint)
        self.emit(Resumed(step=checkpoint.step, of=checkpoint.of))

    def _save_checkpoint(self) -> None:
        problem = self._policy.save(self._make_checkpoint)
        if problem is not None:
            self.warn(problem)

    def _make_checkpoint(self) -> Checkpoint | None:
        """Return the job's progress; `None` if there is nothing to resume from."""
        if self.conditioning is None:
            return None
        if self.sampling is not None and self.sampling.scheduler is None and self.step < self.plan.total_steps:
            return None
        return Checkpoint(
            planned=self._planned,
            plan=self.plan,
            of=self.plan.total_steps,
            conditioning=self.conditioning,
            sampling=self.sampling,
            section=self.section,
            warnings=tuple(self.warnings),
            timings=self.metrics.timings(),
            load_seconds=self.metrics.load_seconds,
        )

    def result(self, *, sound: bool) -> VideoSaved:
        """Return the result of the job, once all frames are encoded.

        Args:
            sound: whether the video has sound.
        """
        return VideoSaved(
            video=self.plan.output,
            request=self.plan.request_json(),
            plan=self.plan.to_json(),
            timings=self.metrics.timings(),
            load_seconds=round(self.metrics.load_seconds, 3),
            peak_memory_bytes=self.metrics.peak_bytes(),
            warnings=tuple(self.warnings),
            earlier=self.earlier,
            sections=self._made(),
            sound=sound,
            passes_left_out=0 if self.sampling is None else self.sampling.guidance.left_out,
        )

    def _made(self) -> tuple[int, int, int] | None:
        """Return `VideoSaved.sections`."""
        if self.segments_done:
            segments = self.spec.segments_of(self.plan.frames)
            frames = sum(len(segments[number].frames) for number in range(self.segments_done))
            return self.segments_done, segments.count, frames
        if self.section is None:
            return None
        sections, done = self.spec.sections_of(self.plan.frames), self.section.sections
        frames = sum(len(sections[number].frames) for number in range(done)) + len(sections[done - 1].pending)
        return done, sections.count, frames

    def build_engines(self) -> None:
        """Build missing and damaged engines of the components that the remaining stages need.

        If an engine cannot be built, PyTorch runs the component.

        Raises:
            CancelledError: within a tenth of a second of the request; the partial build is removed.
            PausedError: once the current engine is built.
        """
        needed, failed = self._needed(), set[str]()
        for name, part in self.plan.components.items():
            if name not in needed or name in failed:
                continue
            self.cancel.check_pause()
            if self.plan.fell_back(name):
                self.fell_back(name, part.reasons[0])
            elif part.engines and not self.residency.is_loaded(self.spec, self.plan, name):
                try:
                    for use in part.engines:
                        self._build_engine(name, use)
                except EngineError as error:
                    failed.update(self.plan.sharing_engines(name))
                    for component in self.plan.sharing_engines(name):
                        self.fell_back(component, error.fact)
                else:
                    built = part.replace(engines=tuple(use.replace(build=False) for use in part.engines))
                    self.plan = self.plan.with_component(name, built)

    def load_ahead(self) -> None:
        """Load what the remaining stages need while the prompt is encoded, without text encoders.

        The embeddings of the prompt may be in the cache. Transformers whose LoRAs change between steps are loaded by
        the steps.
        """
        needed = self._needed() - {*self.spec.text_encoders, CONNECTORS}
        needed -= {name for name in needed if any(use.has_range for use in self.spec.loras_of(name))}
        self.residency.load_ahead(self.spec, self, [name for name in self.plan.model_components if name in needed])

    def _needed(self) -> set[str]:
        """Return the components that the remaining stages need."""
        steps = [step for stage in range(len(self.plan.by_stage)) for step in self.schedule(stage)[1]]
        in_parts = self.section_files is not None
        remaining = steps if in_parts else steps[self.step :]
        needed = {"vae", UPSCALER} | {step.expert for step in remaining}
        needed |= {LATENT_UPSAMPLER} if self.sampling is None or self.sampling.stage == 0 else set()
        needed |= {*SOUND_DECODERS} if self.plan.sound and self.plan.sound_shape else set()
        needed |= {VAE_ENCODER} if in_parts and self.spec.section is None else set()
        if self.conditioning is None:
            needed |= {*self.spec.text_encoders, CONNECTORS, IMAGE_ENCODER, VAE_ENCODER}
        return needed

    def _build_engine(self, name: str, use: EngineRef) -> None:
        engines = self.residency.engines
        if use.id in self._ready:  # for another component
            return
        waits = self.plan.builds_later or self.plan.request.build == "never"
        problem = None if use.build or waits else engines.problem(use.id)
        if problem is not None:
            self.warn(Fact("pipeline.engine_rebuilt", {"component": name, "engine": use.id, "problem": problem}))
        if use.build or problem is not None:
            self.begin_stage("build", name)
            device = self.plan.components[name].device
            again = self.plan.request.build == "always" or problem is not None
            engines.build(
                self.spec,
                name,
                use,
                device,
                partial(self._report_build, name),
                self.cancel,
                again=again,
                timers=PyTorchTimerFactory(engines),
            )
        # Building the next engine may evict others from the library, but not this one.
        self._engines_in_use.enter_context(engines.store.using(use.id))
        self._ready.add(use.id)

    def _report_build(self, name: str, progress: Fact, share: float | None) -> None:
        self.emit(EngineProgress(component=name, progress=progress, share=share))


def _computes_bfloat16(device: str) -> bool:
    """Return whether a device has instructions for bfloat16; CPUs compute faster in float32."""
    return device.startswith("cuda") and torch.cuda.get_device_capability(device) >= BF16_CAPABILITY


def wants_negative(plan: ExecutionPlan) -> bool:
    """Return whether a plan needs the negative prompt: for guidance, or for that of attention."""
    return plan.nag > NO_NAG or any(scale > 1 for scale in (plan.guidance_scale, plan.guidance_scale_2 or 0))


def _decisions(plan: ExecutionPlan) -> tuple[Any, ...]:
    """Return what a plan decides about how the clip is computed, for comparison with another plan."""
    parts = [
        (name, part.backend, part.device, part.dtype, part.quantization, [use.id for use in part.engines])
        for name, part in plan.components.items()
    ]
    settings = [plan.request.backend(name) for name in plan.components], plan.request.attention, plan.request.compile
    speed = plan.speed
    code = speed.compiled, speed.vae_kernels
    return parts, settings, plan.strategy, speed.attention, speed.sparse_tau, code, plan.split
