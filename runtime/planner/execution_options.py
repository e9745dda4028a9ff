"""Chooses PyTorch's execution options: attention kernel, compilation, caching of the text, CUDA graphs. Pure.

Each choice has its reason. Measurements on this machine take precedence over rules, which rest on an H200
(bench/h200.md).
"""

from collections.abc import Sequence
from typing import NamedTuple

from runtime.core.errors import InvalidRequestError, MachineError
from runtime.core.estimates import MemoryStrategy, Seconds, basis
from runtime.core.facts import Fact
from runtime.core.plan import PYTORCH, Speed
from runtime.core.request import AUTO, OFF
from runtime.core.sparse_attention import HEAD_WIDTH, LEAST_TOKENS, is_sparse, tau_of
from runtime.core.step_cache import NONE
from runtime.machine.probe import Gpu, Machine
from runtime.models.quantization import FP8
from runtime.models.spec import VAE_ENCODER, ModelSpec, attention_flops, is_transformer
from runtime.planner import constraints
from runtime.planner.constraints import ATTENTION_KERNELS, Conflict
from runtime.planner.forecast import ForecastInputs, call_seconds, compiled_speedup, memory
from runtime.planner.history import attention_seconds, clips_made, compile_seconds, compiled_code, device_name
from runtime.planner.memory_model import DTYPE_BYTES

# Share of free memory for cached keys and values of the text. They save 0.1 % of the time of a large model, 10 % of a
# small one's.
_TEXT_SHARE = 0.02
# Up to this many tokens leave a large GPU partly idle, so that one call with both passes is faster than two calls.
_PAIRED_TOKENS = 4096
# Kernels that diffusers launches per block, and seconds per launch: a call of the embedded model (8 blocks) takes 8 ms
# on an H200, mostly for launches.
_KERNELS_PER_BLOCK, _LAUNCH_SECONDS = 60, 5e-6
# A measured call includes launches, so it is launch-bound up to this multiple of their time.
_MEASURED_CALL_RATIO = 4.0
# Blocks of a video and its sound launch several times as many kernels, those of the sound for few values: on an H200,
# launching LTX-2's 48 blocks takes up to 0.3 s, a third of it without any kernel running (bench/gpu/ltx2.py). Up to so
# many tokens of the video they are recorded instead of compiled, if the graphs' memory leaves a share of free memory.
_GRAPHED_TOKENS, _GRAPHED_SHARE = 20_000, 0.9
# Seconds of compiling a model, blocks and VAE, if it was not measured on this machine: 6 s on an H200's host with 16
# cores, 2 s from the cache on the disk. Inductor compiles on all cores; with few, it took 20 s.
_COMPILE_SECONDS, _COMPILE_CORES, _COMPILE_AT_MOST = 6.0, 16, 20.0
_FROM_CACHE_SECONDS = 2.0
# The VAE's Triton kernels alone, which are compiled one after the other.
_VAE_COMPILE_SECONDS, _VAE_FROM_CACHE_SECONDS = 5.0, 1.0
# Clips that are counted besides those of the same size that this machine has made: this one and another.
_CLIPS_AHEAD = 2


def shared_options(inputs: ForecastInputs) -> Speed:
    """Return the options that all memory strategies share: the attention kernel and options that take memory.

    Raises:
        InvalidRequestError, MachineError: if a requested option is not possible.
    """
    workload, lacks = inputs.workload, inputs.workload.spec.lacks
    channels_last = workload.cuda and "channels_last" not in lacks
    if not inputs.loaded:
        reason = Fact("planner.engines_compute")
        return Speed(attention_reason=reason, compiled_reason=reason, channels_last=channels_last)
    attention, reason = choose_attention(inputs)
    sparse_tau = None
    if is_sparse(inputs.request.attention) and workload.tokens >= LEAST_TOKENS:
        sparse_tau = tau_of(inputs.request.attention)
    size = text_bytes(workload.spec, _dtype(inputs), texts=2 if inputs.calls["text_encoder"] > 1 else 1)
    keep_text = size <= _TEXT_SHARE * inputs.free_bytes and "text_kept" not in lacks
    apart = bool(inputs.in_blocks) or _passes_apart(inputs) or "paired" in lacks
    return Speed(
        attention=attention,
        sparse_tau=sparse_tau,
        nag=inputs.nag,
        attention_reason=reason,
        text_kept=keep_text,
        text_bytes=size if keep_text else 0,
        paired=workload.cuda and inputs.guided and workload.tokens <= _PAIRED_TOKENS and not apart,
        channels_last=channels_last,
    )


def text_bytes(spec: ModelSpec, dtype: str, texts: int) -> int:
    """Return the bytes of the texts' keys and values in all blocks of one transformer."""
    sound = spec.sound_latents
    width = spec.transformer.width + (0 if sound is None else sound.width)
    values = 2 * spec.blocks * spec.context_tokens * width
    return texts * values * DTYPE_BYTES[dtype]


def _dtype(inputs: ForecastInputs) -> str:
    """Return the largest dtype of the transformers that PyTorch loads."""
    return max((inputs.workload.dtypes[name] for name in inputs.loaded), key=lambda dtype: DTYPE_BYTES[dtype])


def _passes_apart(inputs: ForecastInputs) -> bool:
    """Return whether guidance passes must be separate calls: with caches, and on several GPUs."""
    return inputs.request.guidance_cache != OFF or inputs.step_cache != NONE or inputs.workload.split is not None


def _recordable(inputs: ForecastInputs) -> bool:
    """Return whether all calls of one kind run the same kernels, and those of one GPU alone.

    Calls differ where they skip blocks. GPUs that share the tokens of a pass exchange them; those that only share the
    passes of a step do not. Their processes keep block engines from clip to clip, which a clip's end would drop.
    """
    split = inputs.workload.split
    alone = split is None or (split.sequence == 1 and not inputs.in_blocks)
    return inputs.step_cache == NONE and alone


def for_strategy(inputs: ForecastInputs, strategy: MemoryStrategy) -> tuple[Speed, Seconds, Conflict | None]:
    """Complete the shared options for a memory strategy.

    Returns:
        The options, the compilation time before the first step, and why the request's options exclude the strategy.
    """
    base = inputs.base
    if inputs.loaded:
        on_device = strategy.offload in {"none", "model"}
        resident = strategy.offload == "none" and strategy.quantization == "none"
        lacks = inputs.workload.spec.lacks
        base = base.replace(
            text_kept=base.text_kept and on_device,
            text_bytes=base.text_bytes if on_device else 0,
            # Block engines read the weights of each projection.
            fused=inputs.workload.cuda and resident and not inputs.in_blocks and "fused" not in lacks,
        )
        base = base.replace(graphed=_graphed(inputs, strategy, base))
        in_int8, reason = _int8_kernels(inputs, strategy)
        base = base.replace(int8_kernels=in_int8, int8_reason=reason)
    kernels = _kernels(inputs, strategy, base)
    decided = _compiled(inputs, strategy, base, kernels)
    seconds = Seconds(0, 0, 0, measured=True)
    if decided.now or kernels.now:
        # One time for both, since they are compiled in the same job.
        seconds = _compiling(inputs, strategy, base, blocks=decided.now).first
    speed = base.replace(
        compiled=decided.now,
        compiled_later=decided.later,
        compiled_reason=decided.reason,
        vae_kernels=kernels.now or (decided.now and _has_kernels(inputs, strategy, base)),
    )
    return speed, seconds, decided.against


def choose_attention(inputs: ForecastInputs) -> tuple[str, Fact]:
    """Return the attention kernel and the reason; with sparse attention, the kernel where attention stays exact.

    Raises:
        InvalidRequestError, MachineError: if the requested kernel cannot run on this machine, or with this model.
    """
    requested = inputs.request.attention
    if requested not in {AUTO, "native"}:
        _check_attention(requested, inputs)
    if "attention" in inputs.workload.spec.lacks:
        return "native", Fact("planner.attention_of_family")
    if not is_sparse(requested):
        if requested != AUTO:
            return requested, Fact("planner.attention_asked", {"attention": requested})
        return _fastest_exact(inputs)
    exact, _ = _fastest_exact(inputs)
    tokens = inputs.workload.tokens
    if tokens < LEAST_TOKENS:
        return exact, Fact("planner.sparse_short", {"exact": exact, "tokens": tokens, "least": LEAST_TOKENS})
    data = {"attention": requested, "tau": tau_of(requested), "exact": exact}
    return exact, Fact("planner.sparse_asked", data)


def _check_attention(requested: str, inputs: ForecastInputs) -> None:
    """Check that a requested kernel runs on this machine and with this model."""
    against = constraints.attention_conflict(requested, inputs.machine)
    if against is not None:
        usable = against.fact.code != "machine.no_gpu"
        code = "planner.attention_unavailable" if usable else "planner.attention_needs_gpu"
        raise MachineError(code, attention=requested, cause=against.fact)
    dtype, spec = _dtype(inputs), inputs.workload.spec
    if "attention" in spec.lacks:
        raise InvalidRequestError("attention", "family.option_unsupported", option=["attention"], model=spec.title)
    if DTYPE_BYTES[dtype] > DTYPE_BYTES["float16"]:
        raise InvalidRequestError(
            "attention", "planner.attention_needs_16bit", attention=requested, model=spec.title, dtype=dtype
        )
    width = spec.transformer.attention_head_dim
    if is_sparse(requested) and width != HEAD_WIDTH:
        raise InvalidRequestError(
            "attention",
            "planner.sparse_head_width",
            attention=requested,
            model=spec.title,
            width=width,
            needs=HEAD_WIDTH,
        )


def _fastest_exact(inputs: ForecastInputs) -> tuple[str, Fact]:
    """Return the fastest exact attention kernel, measured or usual, and the reason."""
    dtype = _dtype(inputs)
    if not inputs.workload.cuda:
        return "native", Fact("planner.attention_on_cpu")
    if DTYPE_BYTES[dtype] > DTYPE_BYTES["float16"]:
        return "native", Fact("planner.attention_dtype", {"dtype": dtype})
    able = exact_attentions(inputs.machine)
    flops = attention_flops(inputs.workload.spec, inputs.workload.tokens)
    seconds = attention_seconds(inputs.history, device_name(inputs.machine, inputs.workload.device), dtype, flops)
    measured = {kernel: latency for kernel, latency in seconds.items() if kernel in able}
    if measured:
        best = min(measured, key=lambda kind: measured[kind].likely)
        figures = {kernel: latency.likely for kernel, latency in measured.items()}
        how = basis(measured=all(latency.measured for latency in measured.values()))
        return best, Fact("planner.attention_measured", {"attention": best, "seconds": figures, "basis": how})
    return _by_rule(inputs.machine.gpus[0], able)


def exact_attentions(machine: Machine) -> list[str]:
    """Return the exact attention kernels that run on this machine's GPU; only these are chosen automatically."""
    return [
        name
        for name, kernel in ATTENTION_KERNELS.items()
        if kernel.exact and constraints.attention_conflict(name, machine) is None
    ]


def _by_rule(gpu: Gpu, able: Sequence[str]) -> tuple[str, Fact]:
    # Newer architectures than Hopper were not measured.
    if gpu.capability[:1] == constraints.HOPPER[:1] and "flash4" in able:
        chosen = "flash4"
    elif gpu.capability >= constraints.HOPPER:
        chosen = "cudnn"
    elif gpu.capability >= constraints.BF16_CAPABILITY:
        chosen = "flash"
    else:
        return "native", Fact("planner.attention_old_gpu", {"gpu": gpu.name})
    return chosen, Fact("planner.attention_by_rule", {"attention": chosen, "gpu": gpu.name})


def _graphed(inputs: ForecastInputs, strategy: MemoryStrategy, base: Speed) -> bool:
    """Return whether transformers' calls are recorded as CUDA graphs."""
    spec = inputs.workload.spec
    if not inputs.workload.cuda or strategy.offload != "none" or not _recordable(inputs) or "graphed" in spec.lacks:
        return False
    # Each kind of pass with sound has a graph of its own, so a step may leave some out.
    if spec.sound_latents is None and inputs.request.guidance_cache != OFF:
        return False
    # A graph would replay the kernels of the step in which it was recorded.
    if base.sparse_tau is not None:
        return False
    if spec.sound_latents is None:
        return strategy.quantization == "none" and _launch_bound(inputs, strategy, base)
    if inputs.request.compile == "always" or spec.is_packed or strategy.quantization not in {"none", FP8}:
        return False
    needed = max(
        stage.peak_bytes + stage.allocator_slack_bytes
        for stage in memory(inputs, strategy, base.replace(graphed=True))
        if is_transformer(stage.component)
    )
    return inputs.workload.tokens <= _GRAPHED_TOKENS and needed <= _GRAPHED_SHARE * inputs.free_bytes


def _launch_bound(inputs: ForecastInputs, strategy: MemoryStrategy, base: Speed) -> bool:
    """Return whether launching kernels takes longer than running them."""
    call = call_seconds(inputs, strategy, inputs.loaded[0], base)
    # A call is a share of a step: each GPU's own pass takes longer where they share the passes.
    split = inputs.workload.split
    seconds = call.likely * (1 if split is None else split.guidance)
    launches = _KERNELS_PER_BLOCK * inputs.workload.spec.blocks * _LAUNCH_SECONDS
    return seconds < (_MEASURED_CALL_RATIO if call.known else 1.0) * launches


def _int8_kernels(inputs: ForecastInputs, strategy: MemoryStrategy) -> tuple[bool, Fact | None]:
    """Return whether kernels multiply layers that files store in INT8, and why; no reason if there are none."""
    files = inputs.workload.spec.transformer_files.values()
    if strategy.quantization != "none" or inputs.in_blocks or not any(each.in_int8 for each in files):
        return False, None
    if inputs.request.quantization == "none":
        return False, Fact("planner.int8_asked")
    against = constraints.int8_problem(inputs.machine if inputs.workload.cuda else None)
    return (True, Fact("planner.int8_kernels")) if against is None else (False, against)


class _Compilation(NamedTuple):
    """Whether code of PyTorch's components is compiled.

    Attributes:
        now: for this clip.
        against: why they cannot be, if that was requested.
        later: for later clips, when no video waits.
    """

    now: bool
    reason: Fact
    against: Conflict | None = None
    later: bool = False


class _Compiling(NamedTuple):
    """The time that compiling takes, and the clips that share it.

    Attributes:
        first: before this clip.
        later: seconds before each later clip, in a process of its own or in this one.
        clips: how many clips are counted, this one included.
        when_idle: seconds before the next clip, if the code is compiled when no video waits; `None` if it is not.
    """

    first: Seconds
    later: float
    clips: int
    when_idle: float | None

    def decide(self, saved: float) -> _Compilation:
        """Return whether compiling takes fewer seconds than it saves of all counted clips: before this one, or later.

        Args:
            saved: seconds of each clip.
        """
        seconds, measured = self.first.likely, self.first.measured
        data = {"seconds": seconds, "saved": max(saved, 0.0), "measured": measured, "clips": self.clips}
        if saved * self.clips > seconds + self.later * (self.clips - 1):
            return _Compilation(True, Fact("planner.compiled_pays_off", data))
        # The next plan counts this clip too.
        if self.when_idle is not None and saved * (self.clips + 1) > self.when_idle:
            return _Compilation(False, Fact("planner.compiled_later", data), later=True)
        return _Compilation(False, Fact("planner.not_compiled_pays_off", data))


def _compiling(inputs: ForecastInputs, strategy: MemoryStrategy, base: Speed, *, blocks: bool) -> _Compiling:
    """Return the time that compiling takes: as measured here, else as on an H200's host.

    Args:
        blocks: whether blocks of transformers are compiled; otherwise the VAE's kernels are alone.
    """
    workload = inputs.workload
    backends = {name: how for name, how in inputs.backends.items() if blocks or not is_transformer(name)}
    code = compiled_code(workload, inputs.machine, backends, strategy.quantization, base)
    measured = compile_seconds(inputs.history, code)
    fresh = min(max(_COMPILE_SECONDS * _COMPILE_CORES / inputs.machine.cores, _COMPILE_SECONDS), _COMPILE_AT_MOST)
    cached = _FROM_CACHE_SECONDS
    if not blocks:
        fresh, cached = _VAE_COMPILE_SECONDS, _VAE_FROM_CACHE_SECONDS
    cached = cached if measured.cached is None else measured.cached
    known = measured.cached if measured.on_disk else measured.fresh
    likely = (cached if measured.on_disk else fresh) if known is None else known
    return _Compiling(
        first=Seconds(likely, likely / 2, likely * 2, measured=known is not None),
        later=0.0 if inputs.long_lived else cached,
        clips=_CLIPS_AHEAD + clips_made(inputs.history, workload),
        when_idle=cached if inputs.compiles_when_idle and not measured.on_disk else None,
    )


def _has_kernels(inputs: ForecastInputs, strategy: MemoryStrategy, base: Speed) -> bool:
    """Return whether the VAE can use Triton kernels; they read weights that hooks of an offload would move."""
    in_pytorch = any(inputs.backends.get(name) == PYTORCH for name in ("vae", VAE_ENCODER))
    able = base.channels_last and "compiled_vae" not in inputs.workload.spec.lacks
    resident = strategy.offload in {"none", "model"}
    return able and resident and in_pytorch and inputs.machine.version_of("triton") is not None


def _kernels(inputs: ForecastInputs, strategy: MemoryStrategy, base: Speed) -> _Compilation:
    """Return whether the VAE uses Triton kernels, whether or not blocks of transformers are compiled.

    Args:
        base: the other options.
    """
    workload, mode = inputs.workload, inputs.request.compile
    if not workload.cuda or inputs.backends["vae"] != PYTORCH or "compiled_vae" in workload.spec.lacks:
        return _Compilation(False, base.compiled_reason or Fact("planner.not_compiled_in_blocks"))
    if mode == "never":
        return _Compilation(False, Fact("planner.not_compiled_asked"))
    part = constraints.ComponentSettings(component="vae", backend=PYTORCH, offload=strategy.offload)
    against = constraints.compile_conflict(part, inputs.machine)
    if against is not None:
        return _Compilation(False, Fact("planner.not_compiled", {"cause": against.fact}))
    if mode == "always":
        return _Compilation(_has_kernels(inputs, strategy, base), Fact("planner.compiled_asked"))
    return _compiling(inputs, strategy, base, blocks=False).decide(_saved(inputs, strategy, base, "vae"))


def _compiled(inputs: ForecastInputs, strategy: MemoryStrategy, base: Speed, kernels: _Compilation) -> _Compilation:
    """Return whether blocks of transformers are compiled, and what is compiled for later clips.

    Args:
        base: the other options.
        kernels: from `_kernels`.
    """
    if inputs.in_pytorch:
        return _blocks_compiled(inputs, strategy, base, kernels)
    if not inputs.workload.cuda or inputs.backends["vae"] != PYTORCH:
        return kernels
    return kernels._replace(now=False, reason=Fact("planner.only_vae_compiles", {"how": kernels.reason}))


def _blocks_compiled(
    inputs: ForecastInputs, strategy: MemoryStrategy, base: Speed, kernels: _Compilation
) -> _Compilation:
    workload, mode = inputs.workload, inputs.request.compile
    if mode == "never":
        return _Compilation(False, Fact("planner.not_compiled_asked"))
    if "compiled" in workload.spec.lacks:
        return _Compilation(False, Fact("planner.not_compiled", {"cause": Fact("planner.family_never_compiles")}))
    part = constraints.ComponentSettings(
        component="transformer", backend=PYTORCH, offload=strategy.offload, quantization=strategy.quantization
    )
    against = constraints.compile_conflict(part, inputs.machine)
    if mode == "always":
        return _Compilation(against is None, Fact("planner.compiled_asked"), against)
    if against is not None:
        return _Compilation(False, Fact("planner.not_compiled", {"cause": against.fact}))
    if base.graphed and workload.spec.sound_latents is not None:
        return _Compilation(False, Fact("planner.not_compiled_graphed"))
    if not workload.cuda:
        return _Compilation(False, Fact("planner.not_compiled_on_cpu"))
    # What the VAE's kernels save is saved anyway if they are used alone.
    saving = inputs.in_pytorch if kernels.now else (*inputs.in_pytorch, "vae")
    saved = sum(_saved(inputs, strategy, base, name) for name in saving)
    return _compiling(inputs, strategy, base, blocks=True).decide(saved)


def _saved(inputs: ForecastInputs, strategy: MemoryStrategy, base: Speed, name: str) -> float:
    """Return how many seconds of a clip compiled code saves in a component, less than 0 if it is slower."""
    if inputs.backends[name] != PYTORCH:
        return 0.0
    before, after = (
        call_seconds(inputs, strategy, name, base.replace(compiled=compiled, vae_kernels=compiled))
        for compiled in (False, True)
    )
    faster = after.likely
    if is_transformer(name) and not after.known:
        faster = before.likely / compiled_speedup(inputs.workload.spec, strategy.quantization)
    return (before.likely - faster) * inputs.calls[name]


def with_less_memory(speed: Speed, offload: str, quantization: str) -> Speed:
    """Return the options for a lower-memory strategy: without those that take memory or that it excludes."""
    resident = offload == "none" and quantization == "none"
    excluded = offload in {"group", "sequential"} or quantization.startswith("bnb-")
    return speed.replace(
        compiled=speed.compiled and not excluded,
        compiled_later=False,
        vae_kernels=speed.vae_kernels and offload not in {"group", "sequential"},
        text_kept=False,
        text_bytes=0,
        paired=False,
        graphed=False,
        fused=speed.fused and resident,
        int8_kernels=speed.int8_kernels and quantization == "none",
        int8_reason=speed.int8_reason if quantization == "none" else None,
    )


def check_compile(mode: str, offload: str, quantization: str, machine: Machine) -> None:
    """Check that requested compilation is possible on this machine and with the other settings.

    Raises:
        InvalidRequestError, MachineError: if it is not.
    """
    if mode != "always":
        return
    part = constraints.ComponentSettings(
        component="transformer", backend=PYTORCH, offload=offload, quantization=quantization
    )
    against = constraints.compile_conflict(part, machine)
    if against is not None and against.setting:
        raise against.refusal
    if against is not None:
        raise MachineError("planner.compile_unavailable", cause=against.fact)
