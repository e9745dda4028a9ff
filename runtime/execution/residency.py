"""Loaded components: loaded on first use, kept or freed according to the plan, freed at the end of one `with`.

The plan's `offload` decides whether a kept component's weights are on the device or in memory (RAM) between uses.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from runtime.core.cancel import Cancel
from runtime.core.disk_caches import COMPILED, QUANTIZED
from runtime.core.facts import Fact
from runtime.core.plan import PYTORCH, ComponentPlan, ExecutionPlan, Speed, Split
from runtime.core.request import SOUND_DECODERS
from runtime.engines.service import EngineService, OpenEngines
from runtime.execution.attention import FP8 as FP8_ATTENTION
from runtime.execution.attention import kernels_of, problem, with_usable_attention
from runtime.execution.block_engines import BlockEngines
from runtime.execution.compilation import cache_compiled_code_in, limit_compiled_code
from runtime.execution.components import (
    CompilableVae,
    Denoiser,
    LatentUpsampler,
    PyTorchDenoiser,
    SoundDecoder,
    TextConnector,
    VideoDecoder,
    VideoEncoder,
    components_of,
)
from runtime.execution.engine_components import (
    EngineDenoiser,
    EngineGroupDecoder,
    EngineImageModel,
    EngineImageSampler,
    EngineSoundDecoder,
    EngineTextModel,
    EngineVideoDecoder,
    EngineVideoEncoder,
)
from runtime.execution.engine_failures import failure_of_engine
from runtime.execution.fp8_attention import build_kernel, rounding_of_attention
from runtime.execution.image_encoder import ImageEncoder
from runtime.execution.loading_ahead import LoadingAhead, Preparation
from runtime.execution.memory import release_cached_memory
from runtime.execution.offload import Placed, Placement, place, placement
from runtime.execution.parallel.proxies import GroupManager, Shared, SharedDenoiser, shared_speed
from runtime.execution.prompt_cache import PromptCache
from runtime.execution.text_encoder import PyTorchTextModel, TextEncoder
from runtime.models.quantization import NONE
from runtime.models.quantized_cache import QuantizedCache
from runtime.models.row_operations import compile_kernels
from runtime.models.spec import (
    CONNECTORS,
    IMAGE_ENCODER,
    LATENT_UPSAMPLER,
    VAE_ENCODER,
    ModelSpec,
    is_text_encoder,
    is_transformer,
)
from runtime.models.vae_groups import GROUP_PROGRAMS, IMAGE_PROGRAM
from runtime.models.weights import beside_others, load_image_processor, load_module, load_tokenizer
from runtime.upstream.torch import clear_module, import_compiler

# Model, component, its plan, and the device for its weights if it is not the plan's; see `load_module`.
Loader = Callable[[ModelSpec, str, ComponentPlan, str | None], torch.nn.Module]
# How long the end of a process waits until quantized weights are on the disk.
_FINISH_SECONDS = 30.0

# In the cache folder.
_PROMPTS = "prompts"
# With these placements hooks reference the module, as in bitsandbytes' layers: only the garbage collector frees it.
_HOOKED: tuple[Placement, ...] = ("blocks", "leaves")
# The name in the key of block engines, which serve all transformers.
_BLOCK_ENGINES = "block_engines"


class _Key(NamedTuple):
    """Identity of a loaded component, or of block engines: a plan can use it if all fields are equal."""

    directory: Path
    name: str
    device: str
    dtype: str
    quantization: str
    placement: Placement
    stamp: int
    engines: tuple[str, ...]
    loras: tuple[str, ...]
    split: Split | None
    computed: Speed | None


@dataclass(frozen=True)
class _Loaded:
    """A component in PyTorch and the placement of its weights."""

    part: Any
    placed: Placed
    module: torch.nn.Module

    def close(self) -> None:
        """Free the weights, even if a user of the part still references it."""
        clear_module(self.module)


class JobHooks(Protocol):
    """The job that uses components."""

    @property
    def plan(self) -> ExecutionPlan:
        """The job's plan."""

    @property
    def cancel(self) -> Cancel:
        """The job's cancellation token."""

    def loading(self, name: str) -> None:
        """Called before a component is loaded."""

    def fell_back(self, name: str, reason: Fact) -> None:
        """Record that a component runs in PyTorch from now on, and why."""

    def warn(self, fact: Fact) -> None:
        """Record a fact to show with the result."""

    def on_degraded(self, name: str, field: str, reason: Fact) -> None:
        """Record that the option `field` of the plan's `Speed` is not applied to a component, and why."""


class _Use(NamedTuple):
    """One use of a component by a job."""

    spec: ModelSpec
    job: JobHooks
    name: str

    def key(self, part: ComponentPlan) -> _Key:
        """Return the key of the component if it is loaded as `part` states."""
        return _key(self.spec, self.name, self.job.plan, part)


class Residency:
    """Loaded components, shared by the jobs of one worker. Not safe between threads.

    Use as a context manager: leaving it frees everything.

    Attributes:
        cache_dir: the cache folder; `None` without one.
        load_seconds: time spent on loading and compiling so far.
        compile_seconds: the part of it spent on compiling.
        group_manager: the processes of jobs on several GPUs.
        prompts: the cache of text embeddings; `None` without one.

    Args:
        engines: opens engines; without it, plans must be for PyTorch.
        load: loads a component's module in PyTorch; `load_module` by default.
        keep_prompts: whether text embeddings are cached, if `engines` has a folder for them.
    """

    def __init__(
        self, engines: EngineService | None = None, load: Loader | None = None, *, keep_prompts: bool = True
    ) -> None:
        self._service = engines
        folder = self.cache_dir = None if engines is None else engines.cache_dir
        self._quantized = None if folder is None else QuantizedCache(folder / QUANTIZED.name)
        self._load = load or (lambda spec, name, part, device: load_module(spec, name, part, device, self._quantized))
        self._loaded: dict[_Key, Any] = {}
        self._ahead = LoadingAhead()
        self.load_seconds = 0.0
        self.group_manager = GroupManager()
        self.compile_seconds = 0.0
        self.prompts = None if folder is None or not keep_prompts else PromptCache(folder / _PROMPTS)
        self._compiled = None if folder is None else folder / COMPILED.name
        self._preparation = Preparation()
        self._compiles = False

    def __enter__(self) -> "Residency":
        """Start with nothing loaded."""
        return self

    def __exit__(self, *_: object) -> None:
        """Free everything, let quantized weights be written, and limit the cache of compiled code."""
        self.free()
        if self._quantized is not None:
            self._quantized.finish(_FINISH_SECONDS)
        if self._compiles and self._compiled is not None:
            limit_compiled_code(self._compiled)

    def free(self) -> None:
        """Free everything."""
        self._ahead.close()
        for key in list(self._loaded):
            self._drop(key)
        self.group_manager.stop_processes()

    @property
    def engines(self) -> EngineService:
        """Opens and builds engines."""
        assert self._service is not None, "the plan has engines, the residency has none"
        return self._service

    def is_loaded(self, spec: ModelSpec, plan: ExecutionPlan, name: str) -> bool:
        """Whether a component is loaded, or being loaded, in the form that the plan uses; the upscaler never is."""
        if name not in plan.model_components:
            return False
        keys = _keys(spec, name, plan, plan.components[name])
        return all(key in self._loaded or key in self._ahead for key in keys)

    def load_ahead(self, spec: ModelSpec, job: JobHooks, names: Sequence[str]) -> None:
        """Load components on a thread, in this order, while others run, if the plan keeps all loaded at once.

        The plan's forecast has their memory. What cannot be loaded there is loaded when it is used, and so are engines
        of ONNX Runtime: it keeps all threads of Python waiting meanwhile, so that the first step would begin later.
        """
        plan = job.plan
        self._prepare(spec, job, [name for name in names if plan.components[name].backend == PYTORCH])
        if plan.strategy.offload != "none" or not plan.strategy.keep_loaded:
            return
        self._free_all_but(spec, plan)
        for name in names:
            part = plan.components[name]
            key, blocks = _key(spec, name, plan, part), _block_engines_key(spec, part)
            if key.split is not None:
                continue
            loads: dict[_Key, Callable[[], Any]] = {}
            if not part.on_engine:
                loads[key] = partial(_load, spec, name, part, key.placement, self._load)
            if part.engines and part.backend != "onnxruntime":
                loads[key if part.on_engine else blocks] = partial(self._open, spec, name, part)
            for load_key, load in loads.items():
                if load_key not in self._loaded:
                    self._ahead.start(load_key, partial(_beside_others, part.device, load))

    def _prepare(self, spec: ModelSpec, job: JobHooks, names: Sequence[str]) -> None:
        """Do what the first step would wait for, on a thread, if components in PyTorch need it.

        That is to import the compiler, to try the attention kernel, and to compile the kernels of what is not compiled.
        """
        plan = job.plan
        work: list[Callable[[], object]] = [import_compiler] if plan.speed.compiled and names else []
        if plan.split is None:
            parts = [plan.components[name] for name in names if is_transformer(name)]
            tried = [part for part in parts if part.device.startswith("cuda") or kernels_of(plan.speed)]
            work += [partial(_try_kernels, plan.speed, part, spec, plan.tokens) for part in tried[:1]]
        if work:
            self._keep_compiled(job)
            self._preparation.start(work)

    def _open(self, spec: ModelSpec, name: str, part: ComponentPlan) -> OpenEngines:
        return self.engines.open(spec, name, part.engines, part.device)

    @contextmanager
    def text_encoder(self, spec: ModelSpec, job: JobHooks, name: str = "text_encoder") -> Iterator[TextEncoder]:
        """Yield the text encoder called `name`, loaded."""

        on_engine = partial(EngineTextModel, program=name, length=spec.encoders[name].max_tokens)
        with self._use(spec, job, name, on_engine) as model:
            yield components_of(spec).text_encoder(spec, name, load_tokenizer(spec, name), model)

    @contextmanager
    def text_connector(self, spec: ModelSpec, job: JobHooks) -> Iterator[TextConnector]:
        """Yield the connectors, loaded."""
        with self._use(spec, job, CONNECTORS, _no_engines) as connector:
            yield connector

    @contextmanager
    def latent_upsampler(self, spec: ModelSpec, job: JobHooks) -> Iterator[LatentUpsampler]:
        """Yield the upsampler of latents, loaded."""
        with self._use(spec, job, LATENT_UPSAMPLER, _no_engines) as upsampler:
            yield upsampler

    @contextmanager
    def sound_decoder(self, spec: ModelSpec, job: JobHooks, name: str) -> Iterator[SoundDecoder]:
        """Yield one of `SOUND_DECODERS`, loaded."""
        with self._use(spec, job, name, partial(EngineSoundDecoder, program=name)) as decoder:
            yield decoder

    @contextmanager
    def image_encoder(self, spec: ModelSpec, job: JobHooks) -> Iterator[ImageEncoder]:
        """Yield the image encoder, loaded."""
        with self._use(spec, job, IMAGE_ENCODER, EngineImageModel) as model:
            yield components_of(spec).image_encoder(load_image_processor(spec), model)

    @contextmanager
    def video_encoder(self, spec: ModelSpec, job: JobHooks) -> Iterator[VideoEncoder]:
        """Yield the VAE encoder, loaded."""
        on_engines: Any = partial(EngineVideoEncoder, scale=spec.vae.scale_factor_temporal)
        if IMAGE_PROGRAM in spec.programs[VAE_ENCODER]:
            on_engines = EngineImageSampler
        with self._vae_part(spec, job, VAE_ENCODER, on_engines) as encoder:
            yield encoder

    @contextmanager
    def denoiser(self, spec: ModelSpec, job: JobHooks, name: str) -> Iterator[Denoiser]:
        """Yield the transformer called `name`, loaded."""
        used: list[PyTorchDenoiser] = []

        def prepare(denoiser: Any, part: ComponentPlan) -> None:
            self._keep_compiled(job)
            engines = self._block_engines(spec, job, name, part)
            compute_as_planned(denoiser, part, spec, job, name, engines)
            used.append(denoiser)

        planned = job.plan.components[name]
        on_engines = partial(EngineDenoiser, timesteps=spec.timesteps)
        with self._use(spec, job, name, on_engines, prepare) as denoiser, ExitStack() as stack:
            if not isinstance(denoiser, EngineDenoiser):
                stack.enter_context(denoiser.caching(job.plan.step_cache))
            try:
                yield denoiser
            finally:
                for transformer in used:
                    self.compile_seconds += transformer.compile_seconds
                    self.load_seconds += transformer.compile_seconds
                    transformer.forget()
                if isinstance(denoiser, SharedDenoiser) and job.plan.speed.graphed:
                    denoiser.forget()
                self._drop_block_engines(spec, job.plan, name, planned)

    @contextmanager
    def video_decoder(self, spec: ModelSpec, job: JobHooks) -> Iterator[VideoDecoder]:
        """Yield the VAE decoder, loaded."""
        on_engines: Any = EngineGroupDecoder if GROUP_PROGRAMS.keys() & spec.programs["vae"] else EngineVideoDecoder
        with self._vae_part(spec, job, "vae", on_engines) as decoder:
            yield decoder

    @contextmanager
    def _vae_part(self, spec: ModelSpec, job: JobHooks, name: str, on_engines: Any) -> Iterator[Any]:
        """Yield the decoder or the encoder of a VAE, see `_use`; its kernels' compilation counts as loading."""
        used: list[CompilableVae] = []

        def prepare(vae: Any, _: ComponentPlan) -> None:
            if isinstance(vae, CompilableVae):
                self._keep_compiled(job)
                vae.compute(job.plan.speed, partial(job.on_degraded, name))
                used.append(vae)

        with self._use(spec, job, name, on_engines, prepare) as part:
            try:
                yield part
            finally:
                took = sum(entry.compile_seconds for entry in used)
                self.compile_seconds += took
                self.load_seconds += took

    def _block_engines(self, spec: ModelSpec, job: JobHooks, name: str, part: ComponentPlan) -> BlockEngines | None:
        """Return a transformer's block engines, which stay open for the next transformer that uses them, if any.

        If they cannot be opened, or failed earlier in the job, PyTorch computes their parts.
        """
        fail, key = partial(_fall_back, job, name), _block_engines_key(spec, part)
        if not part.in_blocks:
            failed = part.failed_engines
            return BlockEngines(None, spec, name, failed, fail, job.warn) if failed else None
        reason: Fact | None = None
        self._wait_for_load(key, job)
        try:
            if key not in self._loaded:
                started = time.perf_counter()
                ahead = self._ahead.take(key)
                self._loaded[key] = self.engines.open(spec, name, part.engines, part.device) if ahead is None else ahead
                self.load_seconds += time.perf_counter() - started
        except Exception as error:
            reason = failure_of_engine(error, part.device, "execution.engine_load_out_of_memory")
        # Outside of the handler: the exception's frames reference memory that is needed now.
        if reason is not None:
            fail(reason)
        return BlockEngines(self._loaded.get(key), spec, name, part.engines, fail, job.warn)

    def _drop_block_engines(self, spec: ModelSpec, plan: ExecutionPlan, name: str, planned: ComponentPlan) -> None:
        """Close a transformer's block engines, unless the plan keeps them or runs a later component on them."""
        if not planned.in_blocks:
            return
        failed = not plan.components[name].in_blocks
        if failed or not (plan.strategy.keeps(name) or plan.sharing_engines(name)[1:]):
            self._drop(_block_engines_key(spec, planned))

    def _wait_for_load(self, key: _Key, job: JobHooks) -> None:
        """Wait for a part that is being loaded ahead, unless the job is cancelled."""
        started = time.perf_counter()
        self._ahead.wait(key, job.cancel.check)
        self.load_seconds += time.perf_counter() - started

    def _keep_compiled(self, job: JobHooks) -> None:
        """Wait until the first step is prepared, and let compilers use the cache on disk."""
        self._preparation.wait(job.cancel.check)
        speed = job.plan.speed
        if self._compiled is not None and (speed.compiled or _runs_kernels(job.plan)):
            cache_compiled_code_in(self._compiled)
            self._compiles = True

    @contextmanager
    def _use(
        self,
        spec: ModelSpec,
        job: JobHooks,
        name: str,
        on_engines: Callable[[OpenEngines, Callable[[Fact], Any]], Any],
        prepare: Callable[[Any, ComponentPlan], None] = lambda *_: None,
    ) -> Iterator[Any]:
        """Yield a loaded component: `_build` makes it of a module, `on_engines` of engines and a fallback to PyTorch.

        `prepare` applies the job's plan to the component in PyTorch.
        """
        use, part = _Use(spec, job, name), job.plan.components[name]
        key = use.key(part)
        self._wait_for_load(key, job)

        def fall_back(reason: Fact) -> Any:
            nonlocal key
            replacement = part.in_pytorch(reason)
            self._drop(key)
            key = use.key(replacement)
            job.fell_back(name, reason)
            return self._in_pytorch(use, replacement, prepare)

        try:
            if part.on_engine:
                yield self._on_engines(use, part, on_engines, fall_back)
            elif key.split is not None:
                yield self._on_several_gpus(use, key)
            else:
                yield self._in_pytorch(use, part, prepare)
        finally:
            self._put_back(use, key, part)

    def _hold(self, use: _Use, part: ComponentPlan, make: Callable[[], Any]) -> Any:
        """Return what is loaded for a component, after making it if necessary."""
        self._free_all_but(use.spec, use.job.plan)
        key = use.key(part)
        if key not in self._loaded:
            strategy = use.job.plan.strategy
            if strategy.offload != "none" and use.name in strategy.freed:
                self.free()  # components of an earlier job that wait in RAM
            use.job.loading(use.name)
            started = time.perf_counter()
            ahead = self._ahead.take(key)
            self._loaded[key] = make() if ahead is None else ahead
            self.load_seconds += time.perf_counter() - started
        return self._loaded[key]

    def _in_pytorch(self, use: _Use, part: ComponentPlan, prepare: Callable[[Any, ComponentPlan], None]) -> Any:
        """Return a component in PyTorch, whose weights are where it computes."""
        key = use.key(part)
        waited = key in self._loaded
        loaded: _Loaded = self._hold(use, part, lambda: _load(use.spec, use.name, part, key.placement, self._load))
        for damaged in [] if self._quantized is None else self._quantized.take_reports():
            use.job.warn(damaged)
        if loaded.placed.waits_elsewhere:
            if waited:
                use.job.loading(use.name)
            started = time.perf_counter()
            loaded.placed.to_device()
            self.load_seconds += time.perf_counter() - started
        prepare(loaded.part, part)
        return loaded.part

    def _put_back(self, use: _Use, key: _Key, planned: ComponentPlan) -> None:
        """Free a component that was used, or move its weights to where they wait, unless the plan keeps it there."""
        plan = use.job.plan
        # Processes in which engines failed are not used with them again.
        failed = planned.in_blocks and key.split is not None and not plan.components[use.name].in_blocks
        freed = not plan.strategy.keeps(use.name) if key.placement == "device" else use.name in plan.strategy.freed
        if failed or freed:
            self._drop(key)
        elif isinstance(loaded := self._loaded.get(key), _Loaded):
            loaded.placed.to_host()
            if loaded.placed.waits_elsewhere:
                release_cached_memory()

    def _on_several_gpus(self, use: _Use, key: _Key) -> Any:
        """Return a component that the processes of the plan's split have loaded."""
        spec, job, name = use
        self._keep_compiled(job)
        part, split, check = job.plan.components[name], key.split, job.cancel.check
        assert split is not None
        store = self.engines.store if part.in_blocks else None
        shared: Shared = self._hold(
            use,
            part,
            lambda: self.group_manager.load(split, spec, name, part, check, key.computed, store, self._quantized),
        )
        shared.part.check = check
        if isinstance(shared.part, SharedDenoiser):
            shared.part.on_failed, shared.part.on_skipped = partial(_fall_back, job, name), job.warn
        return shared.part

    def _on_engines(
        self,
        use: _Use,
        part: ComponentPlan,
        on_engines: Callable[[OpenEngines, Callable[[Fact], Any]], Any],
        fall_back: Callable[[Fact], Any],
    ) -> Any:
        """Open a component's engines; return the component in PyTorch if that fails."""
        try:
            engines = self._hold(use, part, partial(self._open, use.spec, use.name, part))
            return on_engines(engines, fall_back)
        except Exception as error:
            reason = failure_of_engine(error, part.device, "execution.engine_load_out_of_memory")
        return fall_back(reason)

    def _free_all_but(self, spec: ModelSpec, plan: ExecutionPlan) -> None:
        """Free components of earlier jobs that this plan does not use."""
        keys = {key for name in plan.model_components for key in _keys(spec, name, plan, plan.components[name])}
        fit = self.group_manager.fits(plan.split)
        self._ahead.keep_only(keys)
        for key in [key for key in self._loaded if key not in keys or not (fit or key.split is None)]:
            self._drop(key)
        if not fit:
            self.group_manager.stop_processes()

    def _drop(self, key: _Key) -> None:
        entry = self._loaded.pop(key, None)
        if entry is not None:
            if key.device.startswith("cuda"):
                # What was loaded on a thread has memory of that thread's stream, which does not wait for the steps'.
                torch.cuda.synchronize(key.device)
            entry.close()
        del entry
        release_cached_memory(unreachable=key.placement in _HOOKED or key.quantization != NONE)


def compute_as_planned(
    denoiser: PyTorchDenoiser,
    part: ComponentPlan,
    spec: ModelSpec,
    job: JobHooks,
    name: str,
    engines: BlockEngines | None = None,
) -> None:
    """Apply the plan's `Speed` and block engines to a denoiser.

    An attention kernel that cannot be used is reported and replaced.
    """
    head_width = spec.transformer.attention_head_dim
    speed, problems = with_usable_attention(job.plan.speed, part.device, denoiser.dtype, head_width)
    for field, reason in problems.items():
        job.on_degraded(name, field, reason)
    denoiser.compute(speed, partial(job.on_degraded, name), engines)


def _runs_kernels(plan: ExecutionPlan) -> bool:
    """Whether PyTorch computes on a GPU, where Triton and packages of attention compile kernels."""
    return any(part.backend == PYTORCH and part.device.startswith("cuda") for part in plan.components.values())


def _try_kernels(speed: Speed, part: ComponentPlan, spec: ModelSpec, tokens: int) -> None:
    """Run the kernels of a transformer once, on a thread of its own; `compute_as_planned` finds those of attention.

    Args:
        tokens: of the clip; kernels of attention in FP8 are built for their number.
    """
    sizes, dtype = spec.transformer, getattr(torch, part.dtype)
    heads, head_width = sizes.num_attention_heads, sizes.attention_head_dim
    in_fp8 = speed.attention == FP8_ATTENTION
    with _current(part.device):
        reasons = [problem(kind, part.device, dtype, head_width) for kind in kernels_of(speed).values()]
        if not speed.compiled:
            calls = components_of(spec).row_calls(spec, part, speed)
            of_attention = rounding_of_attention(sizes.width, dtype, part.device) if in_fp8 else ()
            compile_kernels((*calls, *of_attention), part.device)
        if in_fp8 and not any(reasons) and part.device.startswith("cuda"):
            build_kernel(tokens, heads, head_width, part.device)


def _fall_back(job: JobHooks, name: str, reason: Fact) -> None:
    """Report, once, that block engines failed: their component and the later ones that use them run in PyTorch."""
    if job.plan.components[name].in_blocks:
        for component in job.plan.sharing_engines(name):
            job.fell_back(component, reason)


def _load(spec: ModelSpec, name: str, part: ComponentPlan, how: Placement, load: Loader) -> _Loaded:
    """Load a component in PyTorch and place its weights according to the plan."""
    module = load(spec, name, part, None if how == "device" else "cpu")
    return _Loaded(_build(spec, name, module, part), place(module, how, part), module)


def _build(spec: ModelSpec, name: str, module: Any, part: ComponentPlan) -> Any:
    """Make a component of its module."""
    components = components_of(spec)
    if is_text_encoder(name):
        return PyTorchTextModel(module, part.device)
    if is_transformer(name):
        return components.denoiser(module)
    if name == CONNECTORS:
        return components.text_connector(module, part.device)
    if name == LATENT_UPSAMPLER:
        return components.latent_upsampler(spec, module, part.device)
    if name in SOUND_DECODERS:
        return components.sound_decoder(name, module, part.device)
    # A family without images has no functions for them.
    if name == IMAGE_ENCODER:
        return components.image_model(module, part.device)
    if name == VAE_ENCODER:
        return components.video_encoder(module, part.device)
    return components.video_decoder(module, part.device)


def _no_engines(engines: OpenEngines, _: Callable[[Fact], Any]) -> Any:
    """No family has engines of these components."""
    raise AssertionError(engines)


def _beside_others(device: str, load: Callable[[], Any]) -> Any:
    """Load on a thread of its own, which has a current device and, on a GPU, a stream of its own.

    On the stream of the steps, each tensor would wait for all kernels that are queued there.
    """
    with beside_others(), _current(device):
        if not device.startswith("cuda"):
            return load()
        stream = _loading_stream(device)
        with torch.cuda.stream(stream):
            try:
                return load()
            finally:
                stream.synchronize()


@cache
def _loading_stream(device: str) -> "torch.cuda.Stream":
    """Return one stream per device: memory that was freed on a stream is used again there only."""
    return torch.cuda.Stream(device)


def _current(device: str) -> AbstractContextManager[object]:
    """Make a GPU this thread's current one in a `with` block; nothing for a CPU."""
    return torch.cuda.device(device) if device.startswith("cuda") else nullcontext()


def _keys(spec: ModelSpec, name: str, plan: ExecutionPlan, part: ComponentPlan) -> list[_Key]:
    """Return the keys of everything that is held for a component."""
    key = _key(spec, name, plan, part)
    return [key, _block_engines_key(spec, part)] if part.in_blocks and key.split is None else [key]


def _block_engines_key(spec: ModelSpec, part: ComponentPlan) -> _Key:
    engines = tuple(use.id for use in part.engines)
    return _Key(spec.directory, _BLOCK_ENGINES, part.device, part.dtype, NONE, "device", 0, engines, (), None, None)


def _key(spec: ModelSpec, name: str, plan: ExecutionPlan, part: ComponentPlan) -> _Key:
    where = placement(name, part, plan.strategy.offload)
    files = spec.component_files(name)
    stamp = max((path.stat().st_mtime_ns for path in files), default=0)  # loading names what is missing
    split = plan.split if plan.split is not None and plan.split.shares(name) and not part.on_engine else None
    # A module is the same with and without block engines. Processes of several GPUs open their own.
    engines = tuple(use.id for use in part.engines) if part.on_engine or split is not None else ()
    if split is not None and part.failed_engines:
        engines = tuple(f"failed {use.id}" for use in part.failed_engines)
    computed = None if split is None else shared_speed(plan.speed, name)
    # The order matters: sums are rounded.
    loras = tuple(use.identity for use in spec.loras_of(name))
    where_from = files[0].parent if name in spec.files else spec.directory
    return _Key(
        where_from, name, part.device, part.dtype, part.quantization, where, stamp, engines, loras, split, computed
    )
