"""Measures what PyTorch would run instead of an engine, so that the planner can compare both.

Text encoders, transformers and VAEs are the family's own, as a plan without engines runs them. Instead of a block
engine, the form that it was exported from is measured, in the plan's dtype. The child process that builds or verifies
an engine calls a `PyTorchTimer`, which it receives with its job.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from runtime.core.cancel import Cancel
from runtime.core.errors import InvalidRequestError, MachineError, ran_out
from runtime.core.facts import Fact
from runtime.core.images import NO_BORDERS
from runtime.core.plan import PYTORCH, ComponentPlan, ExecutionPlan, LatentSize, is_block_program
from runtime.core.request import ALL, CONTROL_VIDEOS, SOUND_DECODERS, GenerationRequest
from runtime.engines.key_parts import tokens_of
from runtime.engines.service import EngineService
from runtime.machine.probe import gpu_index
from runtime.models.quantization import FP8, compute_dtype, fp8_weight
from runtime.models.spec import ModelSpec
from runtime.models.vae_groups import GROUP_PROGRAMS, IMAGE_PROGRAM
from runtime.pipeline.history_file import HistoryFile
from runtime.planner import constraints
from runtime.planner.choice.engine_index import STEPS, EngineKey, serves_any_clip
from runtime.planner.resolve import PlanningContext, resolve

if TYPE_CHECKING:
    import torch

    from runtime.execution.components import ImageSampler, PyTorchDenoiser

EAGER, COMPILED = "eager", "compiled"
_TIMESTEP = 500.0
# Of a prompt.
_TOKENS = 24


@dataclass(frozen=True, kw_only=True)
class PyTorchTimer:
    """What PyTorch would run instead of an engine. Picklable; imports torch when it is called.

    Attributes:
        spec: the model; its LoRAs do not matter.
        component: whose engine it is.
        plan: for PyTorch alone, at the engine's size: dtypes, attention kernel, placement, the VAE's chunks.
        compiles: whether to measure compiled code too; text encoders are never compiled.
        tokens: of one call of a block engine.
    """

    spec: ModelSpec
    component: str
    plan: ExecutionPlan
    compiles: bool
    tokens: int

    def __call__(self, program: str, size: LatentSize) -> dict[str, float]:
        """Return the median seconds of one call, "eager" and "compiled".

        What runs out of memory, and compiled code that fails, is left out.

        Args:
            program: the engine's.
            size: latent frames, height and width of the call.
        """
        import torch

        part = self.plan.components[self.component]
        by_program: dict[str, Callable[..., dict[str, float]]] = {
            "text_encoder": self._text_encoder,
            "text_encoder_2": self._text_encoder,
            "image_encoder": self._image_encoder,
            "vae_encoder_first": self._encoder,
            "vae_encoder_next": self._encoder,
            IMAGE_PROGRAM: self._image_sampler,
            "transformer": self._transformer,
        }
        measure = self._block_part if is_block_program(program) else by_program.get(program, self._decoder)
        try:
            return measure(program, size, part, torch.device(part.device))
        except Exception as error:
            if ran_out(error) is None:
                raise
            return {}

    def _transformer(self, _: str, size: LatentSize, part: ComponentPlan, device: "torch.device") -> dict[str, float]:
        import torch

        from runtime.engines.verify import seconds_of
        from runtime.execution.components import PROMPTED, UNPROMPTED
        from runtime.execution.residency import Residency, compute_as_planned

        latents = torch.randn(1, self.spec.transformer.in_channels, *size, device=device)
        timestep = torch.tensor(_TIMESTEP, device=device)
        texts = torch.randn(2, self.spec.context_tokens, self.spec.transformer.text_dim, device=device)
        texts[:, _TOKENS - self.spec.max_sequence_length :] = 0
        first, second = texts.split(1)
        job = _Measured(self.plan)
        with Residency() as residency, residency.denoiser(self.spec, job, self.component) as opened:
            denoiser = cast("PyTorchDenoiser", opened)

            def call() -> object:
                if denoiser.pairs:
                    return denoiser.together(latents, timestep, {PROMPTED: first, UNPROMPTED: second})
                return denoiser(latents, timestep, first)

            def measure(plan: ExecutionPlan) -> float:
                job.plan = plan
                compute_as_planned(denoiser, part, self.spec, job, self.component)
                return seconds_of(call, device) / (2 if denoiser.pairs else 1)

            return self._both(job, measure)

    def _decoder(self, program: str, size: LatentSize, part: ComponentPlan, device: "torch.device") -> dict[str, float]:
        import torch

        from runtime.engines.verify import seconds_of
        from runtime.execution.residency import Residency

        frames, height, width = size
        strategy = self.plan.strategy
        chunk = max(1, min(strategy.decode_chunk, self.plan.latent_shape[2] - 1))
        job = _Measured(self.plan)
        with Residency() as residency, residency.video_decoder(self.spec, job) as opened:
            decoder: Any = opened

            def decode(count: int) -> Iterator[object]:
                latents = torch.randn(1, self.spec.vae.z_dim, count, height, width, device=device)
                return decoder.frames(latents, chunk, strategy.decode_tile)

            def seconds() -> float:
                if program in GROUP_PROGRAMS:
                    latents = torch.randn(1, self.spec.vae.z_dim, *size, device=device)
                    return seconds_of(lambda: decoder.group(latents, strategy.decode_tile), device)
                if program == "vae_clip":
                    return seconds_of(lambda: deque(decode(frames), 0), device)
                if program == "vae_first":
                    return seconds_of(lambda: deque(decode(1), 0), device)
                if strategy.decode_tile is not None:
                    return seconds_of(lambda: deque(decode(1 + chunk), 0), device) / (1 + chunk) * frames
                begun: list[Iterator[object]] = []

                def begin() -> None:
                    begun[:] = [decode(1 + chunk)]
                    next(begun[0])

                return seconds_of(lambda: deque(begun[0], 0), device, begin) / chunk * frames

            def measure(plan: ExecutionPlan) -> float:
                job.plan = plan
                decoder.compute(plan.speed, lambda name, reason: job.on_degraded(self.component, name, reason))
                return seconds()

            return self._both(job, measure)

    def _text_encoder(self, _: str, __: LatentSize, part: ComponentPlan, device: "torch.device") -> dict[str, float]:
        import torch

        from runtime.engines.verify import seconds_of
        from runtime.execution.text_encoder import PyTorchTextModel
        from runtime.models.weights import load_module

        model = PyTorchTextModel(load_module(self.spec, self.component, part), device)
        ids = torch.ones(1, self.spec.encoders[self.component].max_tokens, dtype=torch.int64)
        mask = (torch.arange(ids.shape[1])[None] < _TOKENS).long()
        return {EAGER: seconds_of(lambda: model(ids, mask), device)}

    def _image_encoder(self, _: str, __: LatentSize, part: ComponentPlan, device: "torch.device") -> dict[str, float]:
        from PIL.Image import Image, new

        from runtime.engines.verify import seconds_of
        from runtime.execution.residency import Residency

        images: list[Image] = [new("RGB", (self.plan.width, self.plan.height))]
        with Residency() as residency, residency.image_encoder(self.spec, _Measured(self.plan)) as encoder:
            return {EAGER: seconds_of(lambda: encoder.encode(images), device)}

    def _encoder(self, program: str, _: LatentSize, part: ComponentPlan, device: "torch.device") -> dict[str, float]:
        import torch

        from runtime.engines.verify import seconds_of
        from runtime.execution.residency import Residency

        image = torch.zeros(3, self.plan.height, self.plan.width)
        steps, tile = self.plan.latent_shape[2] - 1, self.plan.strategy.decode_tile
        with Residency() as residency, residency.video_encoder(self.spec, _Measured(self.plan)) as encoder:
            first = seconds_of(lambda: encoder.latents([image], 1, tile), device)
            if program == "vae_encoder_first" or not steps:
                return {EAGER: first}
            # PyTorch encodes a clip at once, and only the frames that differ.
            whole = seconds_of(lambda: encoder.latents([image], self.plan.frames, tile), device)
            return {EAGER: max(whole - first, 0.0) / steps}

    def _image_sampler(self, _: str, __: LatentSize, part: ComponentPlan, device: "torch.device") -> dict[str, float]:
        import torch

        from runtime.engines.verify import seconds_of
        from runtime.execution.residency import Residency

        pixels, generator = torch.zeros(1, 3, self.plan.height, self.plan.width), torch.Generator()
        with Residency() as residency, residency.video_encoder(self.spec, _Measured(self.plan)) as opened:
            encoder = cast("ImageSampler", opened)
            return {
                EAGER: seconds_of(lambda: encoder.sample(pixels, generator, self.plan.strategy.decode_tile), device)
            }

    def _block_part(
        self, program: str, size: LatentSize, part: ComponentPlan, device: "torch.device"
    ) -> dict[str, float]:
        import torch

        from runtime.engines.fp8 import matrices_of
        from runtime.engines.programs import load_program
        from runtime.engines.verify import seconds_of
        from runtime.execution.compilation import CompiledStep

        # If FP8 was not requested, the plan has it only because a clip of the model's own size does not fit otherwise.
        in_fp8 = self.plan.request.quantization == FP8
        dtype = compute_dtype(part, bfloat16=True) if in_fp8 else part.dtype
        loaded = load_program(self.spec, self.component, program, device=part.device, dtype=dtype, tokens=self.tokens)
        tensors: dict[str, Any] = loaded.inputs(size)
        if in_fp8:
            tensors |= {name: fp8_weight(tensors[name]) for name in matrices_of(loaded.module)}
        inputs = tuple(tensors.values())
        job = _Measured(self.plan)

        def measure(plan: ExecutionPlan) -> float:
            run: Any = loaded.module
            if plan.speed.compiled:
                run = CompiledStep(run, lambda reason: job.on_degraded(self.component, "compiled", reason))
            with torch.no_grad():
                return seconds_of(lambda: run(*inputs), device)

        return self._both(job, measure)

    def _both(self, job: "_Measured", measure: Callable[[ExecutionPlan], float]) -> dict[str, float]:
        """Return the seconds that a function measures with each kind of code."""
        durations = {}
        for kind in (EAGER, COMPILED) if self.compiles else (EAGER,):
            speed = self.plan.speed.replace(compiled=kind == COMPILED, vae_kernels=kind == COMPILED)
            try:
                seconds = measure(self.plan.replace(speed=speed))
            except Exception as error:
                if ran_out(error) is None:
                    raise
                continue
            if kind == EAGER or not job.degraded & {"compiled", "vae_kernels"}:
                durations[kind] = seconds
        return durations


@dataclass
class _Measured:
    """A job for `Residency`, of one component.

    Attributes:
        degraded: the options of `Speed` that could not be applied.
    """

    plan: ExecutionPlan
    cancel: Cancel = field(default_factory=Cancel)
    degraded: set[str] = field(default_factory=set)

    def loading(self, name: str) -> None:
        """Nothing watches."""

    def fell_back(self, name: str, reason: Fact) -> None:
        """No component has an engine."""

    def warn(self, fact: Fact) -> None:
        """Nothing watches."""

    def on_degraded(self, _: str, field: str, __: Fact) -> None:
        """Record an option that could not be applied."""
        self.degraded.add(field)


@dataclass(frozen=True)
class PyTorchTimerFactory:
    """Plans PyTorch for engines of a library; see `engines.build.TimerFactory`."""

    engines: EngineService

    def __call__(self, spec: ModelSpec, component: str, key: EngineKey, device: str) -> PyTorchTimer | None:
        """Return the timer for an engine's size; `None` if PyTorch cannot make such a clip here.

        Networks of single frames and decoders of sound run in PyTorch as their programs do, which are measured anyway.
        """
        if spec.only_decodes or component in SOUND_DECODERS:
            return None
        spec = replace(
            spec,
            loras=(),
            image=None,
            last_image=None,
            keyframes=(),
            video=None,
            **cast("dict[str, Any]", dict.fromkeys(CONTROL_VIDEOS)),
            references=(),
            outpaint=NO_BORDERS,
            extend=None,
            extend_frames=1,
            join=None,
            interpolator=None,
            upscaler=None,
        ).for_images()
        machine = self.engines.machine
        values = {"prompt": "none", "model": spec.name, "backends": {ALL: PYTORCH}, "gpus": 1, "seed": 0}
        if key.precision == FP8:
            # These engines replace weights that PyTorch would have in FP8.
            values["quantization"] = FP8
        cache = self.engines.cache_dir
        history = () if cache is None else HistoryFile(cache, machine).read()
        index = 0 if device == "cpu" else gpu_index(device)
        try:
            request = GenerationRequest.from_mapping(values | _size(spec, key))
            plan = resolve(request, spec, PlanningContext(machine, Path("none.mp4"), history=history, gpu=index))
        except (InvalidRequestError, MachineError):
            return None
        on_cpu = plan.components[component].device == "cpu"
        settings = constraints.ComponentSettings(
            component="transformer",
            backend=PYTORCH,
            offload=plan.strategy.offload,
            quantization=plan.strategy.quantization,
        )
        able = constraints.compile_conflict(settings, machine) is None
        # On a CPU blocks are compiled only on request, which takes as long as a build.
        compiles = able and not on_cpu
        return PyTorchTimer(spec=spec, component=component, plan=plan, compiles=compiles, tokens=tokens_of(key))


def _size(spec: ModelSpec, key: EngineKey) -> dict[str, int]:
    """Return the request's size for an engine; the model's own where the engine serves any."""
    if serves_any_clip(key.program):
        return {}
    frames, height, width = key.profiles[0].opt
    size = {"width": width * spec.vae.scale_factor_spatial, "height": height * spec.vae.scale_factor_spatial}
    if key.program in {*STEPS, *GROUP_PROGRAMS}:
        return size
    return size | {"frames": (frames - 1) * spec.vae.scale_factor_temporal + 1}
