"""Measure and check block engines at Wan2.2-A14B's width on TensorRT.

    python bench/gpu/blocks.py engines|passes|sizes|clips|gpus|shipped|lost|endurance … [--seconds N]

    engines     builds the three engines through the library, or finds them; sizes, build times, errors, speeds
    passes      one forward pass of an expert with 40 blocks, at 480p and 720p: block engines, PyTorch, diffusers
    sizes       the same engine files at other sizes, with other weights (the second expert, a LoRA), offloaded by group
    clips       whole jobs of a model with 4 blocks: both experts, LoRA, offload, a step cache
    gpus        the same on two GPUs: shared by guidance, and by tokens
    shipped     the shipped model's clips on block engines, compared with PyTorch's
    lost        an illegal access in the middle of a step: the job resumes in PyTorch
    endurance   1,000 passes of a block without growth

Random weights of the true architecture. Engines and models stay in $TANDEM_CHECKS (/tmp/tandem-checks). Prints a JSON
object per result and appends it to $OUT/blocks.jsonl. `--tiny --device cpu --builder onnxruntime_blocks` tries the
script itself.
"""

import argparse
import gc
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file

from bench.gpu import build_child_opset17, results
from bench.gpu.check_common import psnr, ssim
from bench.gpu.speed import TEXT_TOKENS, as_diffusers, random_module, reference
from bench.gpu.timing import call_seconds
from runtime.core.cancel import Cancel
from runtime.core.events import Event, FellBack, VideoSaved
from runtime.core.plan import EngineRef, ExecutionPlan, Speed
from runtime.core.request import GenerationRequest
from runtime.engines import service as engine_service
from runtime.engines.build import BuildRequest, build_engine
from runtime.engines.builders import BUILDERS
from runtime.engines.service import EngineService, OpenEngines
from runtime.engines.store import EngineStore
from runtime.execution.block_engines import BlockEngines
from runtime.execution.residency import Residency
from runtime.families.wan.transformer import PyTorchDenoiser
from runtime.machine.probe import probe
from runtime.models.catalogue import find
from runtime.models.loras import with_loras
from runtime.models.spec import ModelSpec
from runtime.pipeline.pytorch_timer import PyTorchTimerFactory
from runtime.pipeline.run import run_job
from runtime.planner.choice.engine_index import EngineRecord, ShapeProfile
from runtime.planner.resolve import PlanningContext, resolve
from runtime.queue.job_queue import JobQueue
from runtime.queue.store import JobStore
from tests import tiny_models
from tests.gpu import wide_models
from tests.gpu.errors import relative_error
from tests.lora_files import factors, peft
from tests.pipeline.test_run import frames_of
from tests.waiting import until

HOME = Path(os.environ.get("TANDEM_CHECKS", "/tmp/tandem-checks"))
# Latent frames, height, width.
SIZES = {"480p": (21, 60, 104), "720p": (21, 90, 160), "480p, 17 frames": (5, 60, 104)}
TINY_SIZES = {"480p": (3, 6, 8), "720p": (3, 8, 8), "480p, 17 frames": (2, 6, 8)}
ANY = ShapeProfile.fixed((1, 1, 1))
REFERENCE_BLOCKS = 4

say = partial(results.say, "blocks.jsonl")


class Setup:
    """The model with few blocks, the engine library, and the device."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device: str = arguments.device
        self.cuda = self.device.startswith("cuda")
        self.builder: str = arguments.builder
        self.tiny: bool = arguments.tiny
        self.sizes = TINY_SIZES if self.tiny else SIZES
        self.machine = probe()
        self.ends = time.monotonic() + arguments.seconds
        self.store = EngineStore(HOME / "engines", 10**11)
        self.service = EngineService(self.store, self.machine, HOME)

    @property
    def model(self) -> ModelSpec:
        """A model of A14B's width with few blocks, created once."""
        if self.tiny:
            folder = HOME / "tiny"
            if not folder.exists():
                tiny_models.build("wan2.2-a14b", folder)
        else:
            folder = wide_models.build("wan2.2-a14b", HOME / "wan2.2-a14b", REFERENCE_BLOCKS)
        return find(str(folder), Path("none"))

    def module(self, layers: int, dtype: torch.dtype) -> Any:
        """Return a transformer of the model's width with random weights."""
        shape = self.model.transformer
        config = {
            "num_attention_heads": shape.num_attention_heads,
            "attention_head_dim": shape.attention_head_dim,
            "ffn_dim": shape.ffn_dim,
            "text_dim": shape.text_dim,
            "num_layers": layers,
        }
        made = random_module(self.device, lambda: WanTransformer3DModel(**config), dtype)
        made.rope = type(made.rope)(shape.attention_head_dim, (1, 2, 2), 1024).to(self.device)
        return made

    def given(self, size: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return latents, a timestep and a text."""
        generator = torch.Generator(self.device).manual_seed(1)
        latents = torch.randn(1, 16, *self.sizes[size], device=self.device, generator=generator)
        text = torch.randn(1, TEXT_TOKENS, self.model.transformer.text_dim, device=self.device, generator=generator)
        return latents, torch.tensor(500.0, device=self.device), text

    def engines(self, spec: ModelSpec) -> list[EngineRecord]:
        """Return the block engines of a model; those that are missing are built."""
        builder, records = BUILDERS[self.builder], []
        for program in spec.block_programs:
            key = builder.key(
                spec,
                "transformer",
                program,
                (ANY,),
                precision=builder.default_precision(spec, program, self.machine, self.device),
                machine=self.machine,
                device=self.device,
                cache_dir=HOME,
            )
            timer = PyTorchTimerFactory(self.service)(spec, "transformer", key, self.device)
            request = BuildRequest(spec=spec, component="transformer", key=key, device=self.device, timer=timer)
            found = self.store.get(key)
            started = time.perf_counter()
            record = found or build_engine(request, self.store, lambda *_: None, Cancel(), build_child_opset17.run_job)
            if found is None:
                say(
                    part="engine",
                    program=program,
                    plan_bytes=record.file_bytes,
                    build_seconds=record.build_seconds,
                    with_verification=round(time.perf_counter() - started, 1),
                    error=record.error,
                    largest_error=record.largest_error,
                    verified=record.verified,
                    detail=str(record.detail),
                    ms=1000 * record.seconds_per_call,
                    baselines_ms={name: 1000 * seconds for name, seconds in record.baselines.items()},
                    context_mib=record.context_bytes >> 20,
                )
            records.append(record)
        return records

    @contextmanager
    def opened(self, spec: ModelSpec) -> Iterator[tuple[OpenEngines, Sequence[EngineRef]]]:
        """Yield the model's block engines, loaded."""
        uses = [
            EngineRef(
                id=record.id,
                program=record.key.program,
                builder=self.builder,
                precision=record.key.precision,
                profile=(ANY.min, ANY.opt, ANY.max),
            )
            for record in self.engines(spec)
        ]
        with engine_service.open_engines(self.store, spec, "transformer", uses, self.device) as engines:
            yield engines, uses

    @contextmanager
    def trying(self, **what: Any) -> Iterator[None]:
        """Report a failure and continue.

        Raises:
            TimeoutError: if the time limit has passed.
        """
        if time.monotonic() > self.ends:
            raise TimeoutError
        try:
            yield
        except TimeoutError:
            raise
        except Exception as error:
            traceback.print_exc()
            say(**what, failed=f"{type(error).__name__}: {str(error)[:400]}")
        finally:
            gc.collect()
            if self.cuda:
                torch.cuda.empty_cache()


def used_bytes() -> int:
    """Return the GPU memory in use by all processes."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def timed(run: Callable[[], object], repeats: int) -> dict[str, float]:
    """Return median, least and most seconds of a call by CUDA events, after a call to warm up."""
    run()
    seconds = [call_seconds(run, cuda=torch.cuda.is_available()) for _ in range(repeats)]
    return {"seconds": round(statistics.median(seconds), 4), "least": min(seconds), "most": max(seconds)}


def fail(*facts: object) -> None:
    """Raise where a job would report and go on."""
    raise RuntimeError(" ".join(map(str, facts)))


def convert(module: Any, precision: str) -> None:
    """Convert the weights that are in 16 bits to a precision, in place."""
    for parameter in module.parameters():
        if parameter.dtype in {torch.bfloat16, torch.float16}:
            parameter.data = parameter.data.to(getattr(torch, precision))


def engine_pass(
    module: Any, engines: OpenEngines, uses: Sequence[EngineRef], spec: ModelSpec, speed: Speed
) -> PyTorchDenoiser:
    """Return the denoiser of a module on block engines; a failure of an engine raises."""
    denoiser = PyTorchDenoiser(module)
    denoiser.compute(speed, fail, BlockEngines(engines, spec, "transformer", uses, fail, fail))
    return denoiser


def allocated_bytes() -> int:
    """Return what PyTorch has allocated on the GPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def outside_bytes() -> int:
    """Return the GPU memory in use that is not PyTorch's."""
    return used_bytes() - torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


class Passes:
    """Passes of one expert with random weights, at 480p and 720p."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.module = setup.module(3 if setup.tiny else 40, torch.bfloat16)
        self._blocks = self.module.blocks
        self._inputs = {size: setup.given(size) for size in ("480p", "720p")}
        with torch.no_grad():
            self._wanted = {
                size: reference(self.module, *tensors, REFERENCE_BLOCKS) for size, tensors in self._inputs.items()
            }

    def measure(self, variant: str, run: Callable[..., torch.Tensor], before: int, sizes: str = "480p 720p") -> None:
        """Report the duration of a pass, the memory that it takes, and its error over the first blocks."""
        for size in sizes.split():
            with self.setup.trying(part="pass", variant=variant, size=size), torch.no_grad():
                call = partial(run, *self._inputs[size])
                if self.setup.cuda:
                    torch.cuda.reset_peak_memory_stats()
                found = timed(call, 3 if size == "480p" else 2)
                peak = torch.cuda.max_memory_allocated() - before if self.setup.cuda else 0
                self.module.blocks = self._blocks[:REFERENCE_BLOCKS]
                try:
                    error = relative_error(call().float(), self._wanted[size])
                finally:
                    self.module.blocks = self._blocks
                say(part="pass", variant=variant, size=size, **found, working_bytes=peak, error_of_4_blocks=error)

    def in_pytorch(self, variant: str, speed: Speed, sizes: str = "480p 720p") -> None:
        """Measure PyTorch as a job runs it."""
        with self.setup.trying(part="pass", variant=variant):
            before, denoiser = allocated_bytes(), PyTorchDenoiser(self.module)
            denoiser.compute(speed, fail)
            self.measure(variant, denoiser, before, sizes)
            denoiser.forget()

    def by_diffusers(self) -> None:
        """Measure diffusers itself."""
        for block in self._blocks:
            block.__dict__.pop("forward", None)
        self.module.__dict__.pop("forward", None)
        as_diffusers(self.module)

        def run(latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            predicted: torch.Tensor = self.module(
                latents.bfloat16(), timestep.reshape(1), text.bfloat16(), return_dict=False
            )[0]
            return predicted

        self.measure("diffusers", run, allocated_bytes())


def passes(setup: Setup) -> None:
    """Measure a pass of one expert on block engines, in PyTorch and by diffusers: the same weights, in one run."""
    spec, run = setup.model, Passes(setup)
    run.by_diffusers()
    attentions = ("flash4", "cudnn", "fp8") if setup.cuda else ("native",)
    with setup.trying(part="pass", variant="block engines"):
        before, outside = allocated_bytes(), outside_bytes()
        with setup.opened(spec) as (engines, uses):
            say(part="pass", variant="block engines", bytes_outside_of_pytorch=outside_bytes() - outside)
            convert(run.module, uses[0].precision)
            for attention in attentions:
                denoiser = engine_pass(run.module, engines, uses, spec, Speed(attention=attention, text_kept=True))
                run.measure(
                    f"block engines, {attention}", denoiser, before, "480p" if attention == "cudnn" else "480p 720p"
                )
                denoiser.forget()
    convert(run.module, "bfloat16")
    compiled = Speed(compiled=True, text_kept=True, fused=True)
    if setup.cuda:
        run.in_pytorch("compiled, FlashAttention 4", compiled.replace(attention="flash4"))
        run.in_pytorch("FlashAttention 4", compiled.replace(attention="flash4", compiled=False), "480p")
    run.in_pytorch("compiled, PyTorch's attention", compiled, "480p")


def clip(
    setup: Setup, spec: ModelSpec, name: str, residency: Residency, gpus: int = 1, **values: Any
) -> tuple[ExecutionPlan, list[Event]]:
    """Run one job from request to MP4; return its plan and events."""
    request = GenerationRequest.from_mapping(
        {"prompt": "a red boat sails left", "seed": 7, "model": spec.name, "build": "never", "gpus": gpus} | values
    )
    own = with_loras(spec, request.loras, HOME)
    plan = resolve(request, own, PlanningContext(setup.machine, HOME / f"{name}.mp4", setup.service.offers(own)))
    events: list[Event] = []
    run_job(plan, own, events.append, Cancel(), residency)
    return plan, events


def pixels(plan: ExecutionPlan) -> torch.Tensor:
    """Return a clip's frames, uint8."""
    frames = torch.frombuffer(bytearray(frames_of(plan.output)), dtype=torch.uint8)
    return frames.reshape(-1, plan.height, plan.width, 3)


def report_clip(
    name: str, plan: ExecutionPlan, events: list[Event], wanted: torch.Tensor | None
) -> torch.Tensor | None:
    """Report a job and its difference from another clip; return its frames."""
    saved = [event for event in events if isinstance(event, VideoSaved)]
    if not saved:
        say(part="clip", name=name, failed=str(events[-1]))
        return None
    frames = pixels(plan)
    components = saved[0].plan["components"]
    compared = {} if wanted is None else {"psnr_db": psnr(frames, wanted), "ssim": ssim(frames, wanted)}
    say(
        part="clip",
        name=name,
        **compared,
        backends={part: values["backend"] for part, values in components.items()},
        engines={part: values["engines"] for part, values in components.items()},
        offload=plan.strategy.offload,
        gpus=plan.gpus,
        fell_back=[str(event.fact) for event in events if isinstance(event, FellBack)],
        warnings=list(map(str, saved[0].warnings)),
        seconds=saved[0].timings,
        peak_memory_bytes=saved[0].peak_memory_bytes,
        forecast_bytes=plan.memory_bytes,
    )
    return frames


def clips(setup: Setup) -> None:
    """Run whole jobs on the same engine files: sizes, both experts, LoRA, offload, a step cache."""
    lora = HOME / "lora.safetensors"
    if not lora.exists():
        save_file({name: (0.02 * one).half() for name, one in peft(factors(setup.model.transformer)).items()}, lora)
    compare_clips(
        setup,
        [
            ("480p, 17 frames", {}),
            ("LoRA", {"loras": [str(lora)]}),
            ("offload group", {"offload": "group"}),
            ("offload model", {"offload": "model"}),
            ("step cache", {"step_cache": "first-block", "steps": 8}),
            ("480p, 81 frames", {"frames": 81}),
            ("720p, 81 frames", {"frames": 81} if setup.tiny else {"width": 1280, "height": 720, "frames": 81}),
        ],
    )


def gpus(setup: Setup) -> None:
    """Run whole jobs on two GPUs, which share a pass by guidance or by tokens."""
    compare_clips(
        setup,
        [
            ("guidance on two GPUs", {"gpus": 2}),
            ("tokens on two GPUs", {"gpus": 2, "guidance_scale": 1.0}),
            ("tokens on two GPUs, 81 frames", {"gpus": 2, "guidance_scale": 1.0, "frames": 81}),
        ],
    )


def compare_clips(setup: Setup, cases: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Run jobs in PyTorch and on block engines, and compare their clips."""
    spec = setup.model
    setup.engines(spec)
    width, height = (64, 48) if setup.tiny else (832, 480)
    small = {"width": width, "height": height, "frames": 17, "steps": 4}
    backend = BUILDERS[setup.builder].backend
    on_engines = {"transformer": backend, "transformer_2": backend}
    for name, values in cases:
        with setup.trying(part="clip", name=name):
            asked = {"attention": "native", **small, **values}
            with Residency(setup.service) as residency:
                plan, events = clip(setup, spec, "pytorch", residency, backends={"all": "pytorch"}, **asked)
                wanted = report_clip(f"{name}, PyTorch", plan, events, None)
            with Residency(setup.service) as residency:
                plan, events = clip(setup, spec, "engines", residency, backends=on_engines, **asked)
                report_clip(f"{name}, block engines", plan, events, wanted)


def shipped(setup: Setup) -> None:
    """Compare the shipped model's clip on block engines with PyTorch's."""
    spec = find("diorama", Path("none"))
    setup.engines(spec)
    backend = BUILDERS[setup.builder].backend
    on_engines = {"transformer": backend, "transformer_2": backend}
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        *((f"seed {seed}", {"seed": seed}, {"offload": "group"}) for seed in (7, 8, 9)),
        *((f"seed {seed}, lossless", {"seed": seed, "crf": 0}, {"offload": "group"}) for seed in (7, 8, 9)),
        ("step cache", {"step_cache": "first-block"}, {}),
    ]
    for name, values, own in cases:
        with setup.trying(part="clip", name=f"shipped, {name}"):
            wanted = None
            for backends, more in (({"all": "pytorch"}, {}), (on_engines, own)):
                with Residency(setup.service) as residency:
                    title = f"shipped-{'engines' if more or wanted is not None else 'pytorch'}"
                    plan, events = clip(setup, spec, title, residency, backends=backends, **values, **more)
                found = report_clip(f"shipped, {name}, {title}", plan, events, wanted)
                wanted = found if wanted is None else wanted


def lost(setup: Setup) -> None:
    """Make an engine write to an invalid address in the middle of a step of a job in the app's own worker."""
    spec = find("diorama", Path("none"))
    setup.engines(spec)
    planted = HOME / "planted"
    planted.mkdir(parents=True, exist_ok=True)
    (planted / "once").touch()
    (planted / "sitecustomize.py").write_text(_INVALID_ADDRESS.format(once=str(planted / "once")))
    os.environ["PYTHONPATH"] = f"{planted}:{os.environ.get('PYTHONPATH', '')}"
    store = JobStore(HOME / "jobs.sqlite")
    queue = JobQueue(HOME, HOME / "outputs", setup.service, None, store)
    queue.start_workers(HOME / "log.txt")
    request = GenerationRequest.from_mapping(
        {
            "prompt": "a red boat sails left",
            "seed": 7,
            "steps": 8,
            "build": "never",
            "offload": "group",
            "backends": {"transformer": "tensorrt", "transformer_2": "tensorrt"},
        }
    )
    try:
        job = queue.submit(request)
        until(lambda: not job.open)
        end = job.progress.end
        say(
            part="lost",
            end=type(end).__name__,
            planted_was_used=not (planted / "once").exists(),
            deaths=[death["how"] for death in store.log.deaths(job.id)],
            warnings=list(map(str, end.warnings)) if isinstance(end, VideoSaved) else str(end),
            backends={name: part["backend"] for name, part in end.plan["components"].items()}
            if isinstance(end, VideoSaved)
            else {},
        )
    finally:
        queue.close()


# The 100th call of a block engine in a worker gives it an address that no allocation has.
_INVALID_ADDRESS = """
import os, sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
own = Path(__file__).resolve().parent
hidden = PathFinder.find_spec("sitecustomize", [one for one in sys.path if Path(one).resolve() != own])
if hidden is not None and hidden.loader is not None:
    hidden.loader.exec_module(module_from_spec(hidden))
if any("spawn_main" in argument for argument in sys.orig_argv):
    from runtime.engines.sessions.tensorrt import TensorRTBlockSession
    write, calls = TensorRTBlockSession.write, [0]

    def written(self, inputs, outputs):
        calls[0] += 1
        if calls[0] == 100 and os.path.exists("{once}"):
            os.unlink("{once}")
            import torch

            class Elsewhere(torch.Tensor):
                def data_ptr(self):
                    return 0x7f0000000000

            outputs = {{name: one.as_subclass(Elsewhere) for name, one in outputs.items()}}
        write(self, inputs, outputs)

    TensorRTBlockSession.write = written
"""


def endurance(setup: Setup) -> None:
    """Run a block 1,000 times, and report memory before and after."""
    spec = setup.model
    tensors = setup.given("480p, 17 frames")
    with setup.opened(spec) as (engines, uses), torch.no_grad():
        module = setup.module(1, getattr(torch, uses[0].precision))
        denoiser = engine_pass(module, engines, uses, spec, Speed(text_kept=True))
        memory = []
        for number in range(1011):
            denoiser(*tensors)
            if number in {10, 510, 1010}:
                if setup.cuda:
                    torch.cuda.synchronize()
                memory.append((used_bytes(), psutil.Process().memory_info().rss))
    say(part="endurance", passes=1000, gpu_bytes=[gpu for gpu, _ in memory], process_bytes=[rss for _, rss in memory])


def sizes(setup: Setup) -> None:
    """Compare passes on the same engine files at several sizes and with other weights, over the first blocks."""
    spec = setup.model
    for expert in ("first", "second", "with a LoRA"):
        module = setup.module(REFERENCE_BLOCKS, torch.bfloat16)
        if expert == "second":
            for parameter in module.parameters():
                parameter.data = parameter.data.flip(0) if parameter.ndim > 1 else parameter.data
        if expert == "with a LoRA":
            for block in module.blocks:
                for layer in (block.attn1.to_q, block.ffn.net[2]):
                    down = torch.randn(16, layer.in_features, device=setup.device) * layer.in_features**-0.5
                    up = torch.randn(layer.out_features, 16, device=setup.device) * 0.02
                    layer.weight.data += (up @ down).to(layer.weight.dtype)
        convert(module, "bfloat16")
        for size in setup.sizes if expert == "first" else ("480p, 17 frames",):
            with setup.trying(part="size", size=size, weights=expert), torch.no_grad():
                tensors = setup.given(size)
                wanted = reference(module, *tensors, REFERENCE_BLOCKS)
                with setup.opened(spec) as (engines, uses):
                    convert(module, uses[0].precision)
                    denoiser = engine_pass(module, engines, uses, spec, Speed())
                    error = relative_error(denoiser(*tensors).float(), wanted)
                    say(part="size", size=size, weights=expert, engines=[use.id for use in uses], error=error)
                    denoiser.forget()


def main() -> None:
    """Run the chosen parts."""
    parts: dict[str, Callable[[Setup], object]] = {
        "engines": lambda setup: setup.engines(setup.model),
        "passes": passes,
        "sizes": sizes,
        "clips": clips,
        "gpus": gpus,
        "shipped": shipped,
        "lost": lost,
        "endurance": endurance,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="+", choices=parts)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--builder", default="tensorrt_blocks")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=3600.0)
    setup = Setup(parser.parse_args())
    try:
        for name in parser.parse_args().part:
            with setup.trying(part=name):
                parts[name](setup)
    except TimeoutError:
        say(part=name, failed="no time left")


if __name__ == "__main__":
    main()
