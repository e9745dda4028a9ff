"""Builds TensorRT plans from the exported ONNX file, and what the builders of TensorRT plans share.

The weights are part of the plan and of the key. TensorRT can replace them later (refit), but only by the names that
its parser gave to the file's constants, and the exporter folds weights into other constants: nothing would check whose
weights an engine holds.

The timing cache holds TensorRT's kernel measurements, which shorten the next build. There is one file per GPU and
TensorRT version in the engine folder. It is replaced by a rename: concurrent builds lose at most each other's
measurements. It begins with the SHA-256 of the rest, because TensorRT does not check its input.
"""

import contextlib
import hashlib
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.core.files import remove_partial_files, replace_file
from runtime.core.plan import is_sound_block
from runtime.core.request import SOUND_DECODERS
from runtime.engines.builders import Builder, BuildNeeds, output_reporter, weights_bytes
from runtime.engines.child import Report
from runtime.engines.key_parts import BLOCK_TOKENS, TOKENS_OPTION
from runtime.machine.probe import Gpu, Machine, gpu_index
from runtime.models.spec import FRAME_PROGRAMS, IMAGE_ENCODER, VAE_ENCODER, ModelSpec
from runtime.planner import constraints
from runtime.planner.choice.engine_index import EngineKey, ShapeProfile, serves_any_clip
from runtime.planner.memory_model import DTYPE_BYTES, denoise_bytes, encoder_step_bytes
from runtime.upstream.torch import clear_module

if TYPE_CHECKING:
    import torch

    from runtime.engines.component_programs import Program
    from runtime.engines.signatures import Shapes
    from runtime.engines.tensorrt_library import Messages, ReportLine

# "tensorrt" is a package that depends on the one for the installed CUDA.
PACKAGES = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12")
_FIRST_WITH_BFLOAT16 = 10
# Some releases of 10 and TensorRT for RTX can write a plan as a stream too; for an estimate, the first of TensorRT that
# always can counts.
_FIRST_WITH_STREAMS = 11
_GIB = 1 << 30
_MIB = 1 << 20
# The workspace is at most a quarter of the GPU's memory, so that enough is left for the rest of a job.
_WORKSPACE_SHARE = 4
_LARGEST_WORKSPACE = 16 * _GIB
# TensorRT's default; higher levels take much longer to build for little gain.
_OPTIMIZATION_LEVEL = 3
# TensorRT's libraries and torch, before weights are loaded.
_BASE_RAM = 4 * _GIB
# TensorRT's kernels and the CUDA context.
_BASE_VRAM = 1 * _GIB
# A plan without weights, and its ONNX file.
_BLOCK_DISK = 4 * _MIB
# Of a layer in a build's log: enough for a large network, and to recognize a fused layer.
_MOST_LAYERS = 3000
_MOST_TENSORS = 2
_LONGEST_NAME = 100
_LAYER_KEYS = ("Name", "LayerType", "TacticName")
_HASH_BYTES = 32
_MAX_CACHE_BYTES = 1 << 30
_WORKSPACE_PREFIX = ".building-"
_SMALLEST_STEP = 0.005


class TensorRTBuilder(Builder):
    """What the builders of TensorRT plans share."""

    backend: ClassVar[str] = "tensorrt"
    file_name: ClassVar[str] = "engine.plan"

    def default_precision(self, spec: ModelSpec, program: str, machine: Machine, device: str) -> str:
        """Return the fastest precision in which a program keeps its quality.

        - transformer: float16. Its sums and norms stay in float32, its activations are far below float16's limit, and
          float16's eleven bits are closer to the weights than bfloat16's eight.
        - text_encoder: bfloat16, in which UMT5 was trained; its feed-forward layers overflow in float16. It runs
          twice per clip, so float32 costs little time where bfloat16 is not available.
        - image_encoder and decoders of sound: float32, as their authors run them.
        - VAE: bfloat16, as PyTorch decodes with large models: in float32, TensorRT uses no tensor cores, and is slower
          than PyTorch with TF32 (376 against 133 ms on an H200). float16 leaves little range for its activations.
        """
        usual = _usual_precision(program)
        if usual == "bfloat16" and gpu_of_machine(machine, device).capability < constraints.BF16_CAPABILITY:
            return "float32"
        return usual

    def options(self, machine: Machine, device: str) -> tuple[tuple[str, str], ...]:
        """Return `EngineKey.options`. Sessions read cuda_graphs."""
        workspace = _workspace_bytes(machine, device) // _MIB
        return (
            ("cuda_graphs", "on"),
            ("optimization_level", str(_OPTIMIZATION_LEVEL)),
            ("workspace_mib", str(workspace)),
        )

    def packages(self, device: str) -> tuple[str, ...]:
        return (*PACKAGES, "torch")

    def needs(self, spec: ModelSpec, program: str, profile: ShapeProfile) -> BuildNeeds:
        precision = _usual_precision(program)
        weights = weights_bytes(spec, program, precision)
        # RAM: the parser's and the builder's copies of the weights, and the plan if TensorRT cannot write it piece by
        # piece. Disk: the ONNX file and the plan. GPU: the module, which is freed before TensorRT loads the weights;
        # kernels are measured at the largest size.
        copies = 2 if _major_version() >= _FIRST_WITH_STREAMS else 3
        return BuildNeeds(
            ram_bytes=_BASE_RAM + copies * weights,
            disk_bytes=2 * weights,
            vram_bytes=_BASE_VRAM + weights + 2 * activation_bytes(spec, program, profile, precision),
        )


@dataclass(frozen=True)
class OnnxTensorRT(TensorRTBuilder):
    """Builds plans with TensorRT's ONNX parser.

    Attributes:
        prepare: rewrites the exported file before it is parsed, for a TensorRT that lacks some of its operators.
    """

    name = "onnx_tensorrt"
    prepare: Callable[[Path], None] | None = None

    def build(self, program: "Program", key: EngineKey, folder: Path, report: Report) -> None:
        """Write `folder/engine.plan`.

        Raises:
            EngineError: if TensorRT cannot build it.
            torch.OutOfMemoryError: if the GPU's memory is too small.
        """
        import torch

        from runtime.engines import tensorrt_library
        from runtime.engines.onnx_export import export_onnx
        from runtime.engines.tensorrt_operators import FRAME_DECODER_OPERATORS

        trt = tensorrt_library.load()
        sizes = self.sizes(program, key)
        device, plan = gpu_of(program), folder / self.file_name
        with tempfile.TemporaryDirectory() as scratch:
            model = Path(scratch) / "model.onnx"
            report(Fact("engine.exporting_onnx"), None)
            operators = FRAME_DECODER_OPERATORS if program.name in FRAME_PROGRAMS else None
            export_onnx(program, enclosing(key.profiles), model, operators=operators)
            # TensorRT needs the GPU's memory, and has its own copy of the weights.
            free_weights(program.module)
            torch.cuda.empty_cache()
            if self.prepare is not None:
                self.prepare(model)
            report(Fact("engine.building_with", {"compiler": "TensorRT"}), 0.0)
            report_line = output_reporter(report)
            with (
                torch.cuda.device(device),
                tensorrt_library.listen(report_line) as messages,
                tensorrt_library.failures(device, "engine.tensorrt_build_failed"),
            ):
                _write_plan(trt, model, sizes, key, plan, messages, report_line)
        log_layers(trt, plan, device)

    def sizes(self, program: "Program", key: EngineKey) -> "list[Shapes]":
        """Return the shapes of a program's inputs, for each optimization profile of the plan."""
        return [program.shapes(profile) for profile in key.profiles]


class TensorRTBlocks(OnnxTensorRT):
    """Builds block engines: plans without weights, for up to `tokens` tokens in a call.

    They have a profile for any number of tokens, and the larger ones another for full chunks: TensorRT 8.6 was 10 %
    faster with sizes that are known (width 5120, on an H200). Those of a sound's stream rarely get a full chunk.
    """

    name = "tensorrt_blocks"
    kind = "blocks"

    def sizes(self, program: "Program", key: EngineKey) -> "list[Shapes]":
        # The rest of a clip may be almost a full chunk, and a small one takes little time.
        ((low, usual, full),) = super().sizes(program, key)
        # With both, TensorRT 8.6 takes 34 instead of 20 s for `block_query`, which is no faster then.
        small = program.name == "block_query" or is_sound_block(program.name)
        return [(low, usual, full)] if small else [(low, usual, full), (full, full, full)]

    def options(self, machine: Machine, device: str) -> tuple[tuple[str, str], ...]:
        tokens = {TOKENS_OPTION: str(BLOCK_TOKENS)}
        options = dict(super().options(machine, device)) | tokens
        # The caller captures whole passes in CUDA graphs.
        del options["cuda_graphs"]
        return tuple(options.items())

    def default_precision(self, spec: ModelSpec, program: str, machine: Machine, device: str) -> str:
        """Return float16, but float32 for small models, which PyTorch computes in float32 on GPUs as well.

        Saved without loss, the shipped model's clips are 52 to 53 dB from PyTorch's in float16, and 64 dB in float32
        (H200, TensorRT 8.6).
        """
        return _block_precision(spec)

    def needs(self, spec: ModelSpec, program: str, profile: ShapeProfile) -> BuildNeeds:
        transformer = spec.transformer
        inputs = transformer.block_parameters // transformer.num_layers * DTYPE_BYTES[_block_precision(spec)]
        # TensorRT measures kernels with inputs and outputs of its own.
        activations = transformer.forward_bytes(BLOCK_TOKENS, DTYPE_BYTES["float32"], time_per_token=False)
        return BuildNeeds(
            ram_bytes=_BASE_RAM, disk_bytes=_BLOCK_DISK, vram_bytes=_BASE_VRAM + 2 * (inputs + activations)
        )


def free_weights(module: "torch.nn.Module") -> None:
    """Free the memory of a module that is not used any more, also where others refer to its tensors: exporters do."""
    storages = [tensor.untyped_storage() for tensor in (*module.parameters(), *module.buffers())]
    clear_module(module)
    for storage in storages:
        if storage.resizable():  # those of mapped files are not, and take no memory
            storage.resize_(0)


def log_layers(trt: Any, plan: Path, device: "torch.device") -> None:
    """Write what TensorRT made of a network to standard error, and so into the build's log: a JSON object per layer.

    Each has the layer's name, type and kernel, and the types and shapes of some of its tensors. It needs a plan built
    with `ProfilingVerbosity.DETAILED`, and enough memory to load it. A failure is written to the log.
    """
    import torch

    from runtime.engines import tensorrt_library
    from runtime.engines.sessions.tensorrt import deserialize

    with torch.cuda.device(device), tensorrt_library.listen() as messages:
        try:
            runtime = trt.Runtime(tensorrt_library.logger())
            lines = layer_lines(trt, deserialize(runtime, plan, messages))
        except Exception as error:  # bindings raise errors of any type, and the plan is complete
            lines = [f"The layers cannot be listed: {error}"]
    sys.stderr.writelines(f"{line}\n" for line in lines)


def layer_lines(trt: Any, engine: Any) -> list[str]:
    """Return a JSON object per layer of an engine, each on a line of limited length."""
    inspector = engine.create_engine_inspector()
    count = min(engine.num_layers, _MOST_LAYERS)
    return [
        layer_line(inspector.get_layer_information(index, trt.LayerInformationFormat.JSON)) for index in range(count)
    ]


def layer_line(text: str) -> str:
    """Shorten what TensorRT's inspector says about a layer, which is a page for a large one."""
    from runtime.engines import tensorrt_library

    try:
        layer = json.loads(text)
    except ValueError:
        return tensorrt_library.one_line(text)
    if not isinstance(layer, dict):  # the name alone, of a plan without details
        return tensorrt_library.one_line(json.dumps(layer))
    short: dict[str, Any] = {key: str(layer[key])[:_LONGEST_NAME] for key in _LAYER_KEYS if layer.get(key)}
    for key in ("Inputs", "Outputs"):
        tensors = layer.get(key) or []
        short[key] = [
            f"{tensor.get('Format/Datatype', '')} {tensor.get('Dimensions', '')}"[:_LONGEST_NAME] for tensor in tensors
        ]
        if len(tensors) > _MOST_TENSORS:
            short[key] = [*short[key][:_MOST_TENSORS], f"and {len(tensors) - _MOST_TENSORS} more"]
    return json.dumps(short, ensure_ascii=False)


def _write_plan(
    trt: Any,
    model: Path,
    sizes: "Sequence[Shapes]",
    key: EngineKey,
    plan: Path,
    messages: "Messages",
    report: "ReportLine",
) -> None:
    from runtime.engines import tensorrt_library

    options = dict(key.options)
    builder, network, _parser, config = prepare_build(trt, tensorrt_library.logger(), model)
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, int(options["workspace_mib"]) << 20)
    config.builder_optimization_level = int(options["optimization_level"])
    if hasattr(trt.PreviewFeature, "PROFILE_SHARING_0806"):
        # Later versions always share a profile between contexts.
        config.set_preview_feature(trt.PreviewFeature.PROFILE_SHARING_0806, True)
    _set_precision(trt, config, key.precision)
    add_profiles(builder, config, network, sizes, messages)
    # TensorRT does not keep a reference to the monitor.
    monitor = progress_monitor(trt, report)
    if monitor is not None:
        config.progress_monitor = monitor
    cache_file = timing_cache_path(plan.parent, key.device, trt.__version__)
    cache = config.create_timing_cache(read_timing_cache(cache_file))
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, ignore_mismatch=False)
    serialize(trt, builder, network, config, plan, messages)
    write_timing_cache(cache_file, bytes(memoryview(config.get_timing_cache().serialize())))


def serialize(trt: Any, builder: Any, network: Any, config: Any, plan: Path, messages: "Messages") -> None:
    """Build a network and write its plan, piece by piece where TensorRT can: then no copy of it is in memory.

    Raises:
        EngineError: if TensorRT cannot build it.
        OSError: if the file cannot be written.
        torch.OutOfMemoryError: if the GPU's memory is too small.
    """
    with plan.open("wb") as file:
        if not hasattr(builder, "build_serialized_network_to_stream"):
            built = builder.build_serialized_network(network, config)
            if built is None:
                raise messages.failure("engine.tensorrt_build_failed")
            file.write(built)
            return
        failed: list[OSError] = []

        class Writer(trt.IStreamWriter):  # type: ignore[misc] # the base class is known at run time only
            def __init__(self) -> None:
                trt.IStreamWriter.__init__(self)

            def write(self, data: bytes) -> int:
                try:
                    return file.write(data)
                except OSError as error:  # an exception would end in TensorRT
                    failed.append(error)
                    return 0

        # TensorRT does not keep a reference to the writer.
        writer = Writer()
        done = builder.build_serialized_network_to_stream(network, config, writer)
        if failed:
            raise failed[0]
        if not done:
            raise messages.failure("engine.tensorrt_build_failed")


def prepare_build(trt: Any, logger: Any, model: Path) -> tuple[Any, Any, Any, Any]:
    """Return a builder, the network of an ONNX file, its parser, and a configuration that lists layers in detail.

    The parser owns the weights: keep it until the plan is built.

    Raises:
        EngineError: if TensorRT cannot read the file.
    """
    builder = trt.Builder(logger)
    network = create_network(trt, builder)
    parser = trt.OnnxParser(network, logger)
    parse(trt, parser, model)
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    return builder, network, parser, config


def parse(trt: Any, parser: Any, model: Path) -> None:
    """Read an ONNX file into a parser's network.

    Raises:
        EngineError: if TensorRT does not support it.
    """
    from runtime.engines import tensorrt_library

    if not parser.parse_from_file(str(model)):
        reasons = "; ".join(parser.get_error(index).desc() for index in range(parser.num_errors))
        raise EngineError(
            "engine.tensorrt_parse_failed", version=trt.__version__, detail=tensorrt_library.one_line(reasons)
        )


def _is_strongly_typed(trt: Any) -> bool:
    """Whether networks can keep to the model's dtypes: TensorRT 8.6 cannot, 10 can, 11 always does."""
    return hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")


def create_network(trt: Any, builder: Any) -> Any:
    """Return an empty network, strongly typed where TensorRT supports it."""
    if _is_strongly_typed(trt):
        return builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    return builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH))


def _set_precision(trt: Any, config: Any, precision: str) -> None:
    """Restrict the builder to a precision.

    Raises:
        EngineError: if this TensorRT version does not support it.
    """
    # By default TensorRT rounds float32 factors to 10 bits.
    config.clear_flag(trt.BuilderFlag.TF32)
    if _is_strongly_typed(trt) or precision == "float32":
        return
    if precision == "bfloat16":
        raise EngineError("engine.tensorrt_without_bfloat16", version=trt.__version__)
    # TensorRT chooses the layers that run in float16. If even one must stay in float32, 8.6 runs the whole transformer
    # in float32 (measured). Overflows are found when the engine is compared with PyTorch.
    config.set_flag(trt.BuilderFlag.FP16)


def add_profiles(builder: Any, config: Any, network: Any, sizes: "Sequence[Shapes]", messages: "Messages") -> None:
    """Add a profile for each of the sizes, if the network has dynamic inputs.

    Raises:
        EngineError: if TensorRT refuses one.
    """
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    if all(min(tensor.shape, default=0) >= 0 for tensor in inputs):
        return
    for low, best, high in sizes:
        profile = builder.create_optimization_profile()
        for tensor in inputs:
            profile.set_shape(tensor.name, low[tensor.name], best[tensor.name], high[tensor.name])
        if config.add_optimization_profile(profile) < 0:
            raise messages.failure("engine.tensorrt_profile_refused")


@dataclass
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


class BuildPhases:
    """Combines the nested phases of TensorRT's builder into one increasing fraction. Thread-safe."""

    def __init__(self, report: "ReportLine") -> None:
        self._report = report
        self._running: dict[str, _Phase] = {}
        self._reported = 0.0
        self._lock = threading.Lock()

    def start(self, name: str, parent: str | None, steps: int) -> None:
        """Start a phase within its parent."""
        with self._lock:
            self._running[name] = _Phase(parent, max(steps, 1))
            fraction = self._reported
        self._report(name, fraction)

    def step(self, name: str, step: int) -> None:
        """Complete a step, counted from 0."""
        with self._lock:
            phase = self._running.get(name)
            if phase is None:
                return
            phase.done = step + 1
            roots = [root for root, phase in self._running.items() if phase.parent is None]
            fraction = max((self._fraction(root) for root in roots), default=0)
            if fraction < self._reported + _SMALLEST_STEP:
                return
            self._reported = fraction
        self._report(name, fraction)

    def finish(self, name: str) -> None:
        """End a phase, which may be before its last step."""
        with self._lock:
            self._running.pop(name, None)

    def _fraction(self, name: str) -> float:
        phase = self._running[name]
        children = [child for child, entry in self._running.items() if entry.parent == name]
        inner = max((self._fraction(child) for child in children), default=0.0)
        return min((phase.done + inner) / phase.steps, 1.0)


def progress_monitor(trt: Any, report: "ReportLine") -> Any | None:
    """Return a `tensorrt.IProgressMonitor` that reports, or None if TensorRT has none (8.6)."""
    if not hasattr(trt, "IProgressMonitor"):
        return None
    phases = BuildPhases(report)

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc] # the base class is known at run time only
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            phases.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            phases.step(phase_name, step)
            return True

        def phase_finish(self, phase_name: str) -> None:
            phases.finish(phase_name)

    return Monitor()


def installed_version() -> str | None:
    """Return the version of the installed TensorRT, without importing it."""
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def enclosing(profiles: Sequence[ShapeProfile]) -> ShapeProfile:
    """Return one profile that serves all sizes of the given ones; its optimal size is the first one's."""
    low, high = profiles[0].min, profiles[0].max
    for profile in profiles[1:]:
        low = (min(low[0], profile.min[0]), min(low[1], profile.min[1]), min(low[2], profile.min[2]))
        high = (max(high[0], profile.max[0]), max(high[1], profile.max[1]), max(high[2], profile.max[2]))
    return ShapeProfile(low, profiles[0].opt, high)


def gpu_of(program: "Program") -> "torch.device":
    """Return the GPU to build on: the one that holds the weights, else the first."""
    import torch

    return torch.device("cuda", program.device.index or 0)


def _major_version() -> int:
    """Return the major version of the installed TensorRT, 0 without one."""
    installed = installed_version()
    return 0 if installed is None else int(installed.partition(".")[0])


def _block_precision(spec: ModelSpec) -> str:
    return "float32" if spec.small else "float16"


def _usual_precision(program: str) -> str:
    if program == "transformer":
        return "float16"
    if program in {IMAGE_ENCODER, *SOUND_DECODERS}:
        return "float32"
    return "bfloat16" if _major_version() >= _FIRST_WITH_BFLOAT16 else "float32"


def activation_bytes(spec: ModelSpec, program: str, profile: ShapeProfile, precision: str) -> int:
    """Return the bytes of a program's activations at a profile's largest size."""
    frames, height, width = profile.max
    if program == "transformer":
        tokens = prod(size // patch for size, patch in zip(profile.max, spec.transformer.patch_size, strict=True))
        return denoise_bytes(spec, tokens, precision)
    if serves_any_clip(program):
        return 0
    if program in SOUND_DECODERS:
        assert spec.sound_latents is not None
        return round(frames * spec.sound_latents.parts[program].values) * DTYPE_BYTES[precision]
    scale = spec.vae.scale_factor_spatial
    if program.startswith(VAE_ENCODER):
        return encoder_step_bytes(spec, height * scale, width * scale, precision)
    return spec.vae.decode_bytes(frames, height * scale, width * scale, DTYPE_BYTES[precision])


def gpu_of_machine(machine: Machine, device: str) -> Gpu:
    """Return the GPU of a torch device.

    Raises:
        EngineError: if the device is no GPU of the machine.
    """
    index = gpu_index(device)
    if not device.startswith("cuda") or index >= len(machine.gpus):
        raise EngineError("engine.tensorrt_needs_gpu", device=device)
    return machine.gpus[index]


def _workspace_bytes(machine: Machine, device: str) -> int:
    return min(gpu_of_machine(machine, device).total_bytes // _WORKSPACE_SHARE, _LARGEST_WORKSPACE)


def timing_cache_path(folder: Path, device: str, version: str) -> Path:
    """Return the timing cache of a GPU and TensorRT version.

    Args:
        folder: the engine's folder in the store, or in a workspace of the store.
    """
    store = folder.parent.parent if folder.parent.name.startswith(_WORKSPACE_PREFIX) else folder.parent
    digest = hashlib.sha256(f"{device}\n{version}".encode()).hexdigest()[:16]
    return store / f".timing-{digest}"


def read_timing_cache(path: Path) -> bytes:
    """Return a timing cache; empty if it is missing or damaged."""
    try:
        if path.stat().st_size > _MAX_CACHE_BYTES:
            return b""
        data = path.read_bytes()
    except OSError:
        return b""
    cache = data[_HASH_BYTES:]
    return cache if hashlib.sha256(cache).digest() == data[:_HASH_BYTES] else b""


def write_timing_cache(path: Path, cache: bytes) -> None:
    """Replace a timing cache. Errors are ignored: the next build only takes longer."""
    with contextlib.suppress(OSError):
        remove_partial_files(path.parent)
        replace_file(path, hashlib.sha256(cache).digest() + cache)
