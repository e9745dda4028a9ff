"""Check `engines import` on a GPU, with a plan that has other inputs and outputs.

    python bench/gpu/check_import.py [--model diorama|wan2.1-1.3b] [--rows 45] [--columns 80] [--frames 5]

Builds, from a model's transformer, a plan as third parties build it: sample (1,16,-1,45,80) half, timestep (1) int64,
encoder_hidden_states (1,4096,…) half, output (1,16,-1,44,80). Imports it, compares it with PyTorch in float32 at all
sizes, runs a clip on it, and imports invalid files. Each result is a JSON object on a line, also in
$OUT/checks.jsonl. With --builder onnxruntime --device cpu the same runs without a GPU, from the ONNX file itself.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn

from bench.gpu import build_child_opset17
from bench.gpu.check_clip import PROMPT
from bench.gpu.check_common import HOME, Checks, psnr, ssim
from runtime.core.cancel import Cancel
from runtime.core.errors import EngineError
from runtime.core.events import Event, FellBack, VideoSaved
from runtime.core.facts import Fact
from runtime.core.request import GenerationRequest
from runtime.engines.builders import tensorrt
from runtime.engines.imported.importing import Imported, import_engine, inspect_engine
from runtime.engines.onnx_export import OPSET
from runtime.engines.programs import load_program
from runtime.engines.service import EngineService
from runtime.engines.sessions import open_session
from runtime.engines.sessions.imported import AdaptedSession
from runtime.engines.store import EngineStore
from runtime.execution.residency import Residency
from runtime.machine.probe import probe
from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec
from runtime.pipeline.run import run_job
from runtime.planner.choice.engine_index import ShapeProfile
from runtime.planner.resolve import PlanningContext, resolve
from tests.gpu import tensorrt_8_6
from tests.gpu.errors import relative_error
from tests.gpu.opset17 import to_opset_17
from tests.pipeline.test_run import frames_of

TEXT_TOKENS = 4096
SUFFIXES = {"onnx_tensorrt": ".plan", "onnxruntime": ".onnx"}


class Foreign(nn.Module):
    """A transformer as third parties export it: half-precision inputs and outputs, an integer timestep, an unused row.

    Args:
        form: `forms.transformer.TransformerForm`.
        patch: of tokens.
    """

    def __init__(self, form: nn.Module, patch: tuple[int, int, int]) -> None:
        super().__init__()
        self.form, self.patch = form, patch

    def forward(
        self, sample: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor
    ) -> torch.Tensor:
        """Return the velocity in half precision, of the rows and columns that complete patches cover."""
        height, width = (side - side % patch for side, patch in zip(sample.shape[-2:], self.patch[1:], strict=True))
        out: torch.Tensor = self.form(
            sample[..., :height, :width].float(), timestep.float(), encoder_hidden_states.float()
        )
        return out.half()


def make(checks: Checks, spec: ModelSpec, component: str, path: Path) -> Path:
    """Write the engine file if it is missing."""
    if path.is_file():
        return path
    most = checks.arguments.frames
    frames = (1, max(1, most // 2 + 1), most)
    rows, columns = checks.arguments.rows, checks.arguments.columns
    dtype = "float16" if checks.device.startswith("cuda") else "float32"
    program = load_program(spec, component, "transformer", device=checks.device, dtype=dtype)
    form = Foreign(program.module, spec.transformer.patch_size).eval()

    def sample(count: int) -> tuple[int, ...]:
        return (1, spec.transformer.in_channels, count, rows, columns)

    text = (1, TEXT_TOKENS, spec.transformer.text_dim)
    example = (
        torch.randn(sample(frames[1]), device=checks.device).half(),
        torch.full((1,), 700, dtype=torch.int64, device=checks.device),
        torch.randn(text, device=checks.device).half(),
    )
    free = {2: torch.export.Dim("frames", min=frames[0], max=frames[2])} if frames[0] != frames[2] else {}
    started = time.perf_counter()
    with torch.no_grad():
        program_graph = torch.export.export(form, example, dynamic_shapes=(free, {}, {}), strict=False)
    names = ["sample", "timestep", "encoder_hidden_states"]
    exported = torch.onnx.export(
        program_graph, dynamo=True, opset_version=OPSET, input_names=names, output_names=["out_sample"], verbose=False
    )
    assert exported is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx_file = path.with_suffix(".onnx")
    exported.save(onnx_file, external_data=False)
    if checks.arguments.builder == "onnx_tensorrt":
        profiles = [{"sample": sample(count), "timestep": (1,), "encoder_hidden_states": text} for count in frames]
        latent = (frames[1], rows, columns)
        key = checks.key(spec, component, "transformer", (ShapeProfile.fixed(latent),), "float16")
        build_plan(checks, onnx_file, (profiles[0], profiles[1], profiles[2]), key, path)
        onnx_file.unlink()
    checks.say("made", file=path.name, bytes=path.stat().st_size, seconds=round(time.perf_counter() - started, 1))
    return path


def build_plan(checks: Checks, model_file: Path, shapes: Any, key: Any, plan: Path) -> None:
    """Build a plan from an ONNX file with the builder's steps."""
    from runtime.engines import tensorrt_library

    trt = tensorrt_library.load()
    if tensorrt_8_6.is_installed():
        to_opset_17(model_file)
    log = plan.with_suffix(".log")
    with log.open("w", encoding="utf-8") as file, torch.cuda.device(checks.device):

        def report(line: str, share: float | None) -> None:
            file.write(f"{line}\n")

        with tensorrt_library.listen(report) as logger:
            tensorrt._write_plan(trt, model_file, [shapes], key, plan, logger, report)


def take(checks: Checks, service: EngineService, spec: ModelSpec, path: Path, component: str | None = None) -> Imported:
    """Import a file."""
    log: list[Fact] = []
    return import_engine(
        path, spec, component, service, lambda line, _: log.append(line), Cancel(), build_child_opset17.run_job
    )


def carried(checks: Checks, service: EngineService, spec: ModelSpec, path: Path) -> Imported:
    """Import the plan and report its signature, its adapters and its error."""
    started = time.perf_counter()
    contract = inspect_engine(path, checks.device, lambda line, share: None, Cancel(), build_child_opset17.run_job)
    checks.say("contract", lines=list(map(str, contract.describe())), seconds=round(time.perf_counter() - started, 1))
    started = time.perf_counter()
    done = take(checks, service, spec, path)
    record = done.engine
    checks.say(
        "imported",
        id=record.id,
        component=record.component,
        serves=str(done.serves),
        lines=list(map(str, done.describe())),
        error=record.error,
        tolerance=record.tolerance,
        usable=record.usable,
        detail=str(record.detail),
        ms=1000 * record.seconds_per_call,
        pytorch_ms=1000 * record.pytorch_seconds_per_call,
        seconds=round(time.perf_counter() - started, 1),
    )
    return done


@torch.inference_mode()
def errors(checks: Checks, service: EngineService, spec: ModelSpec, done: Imported) -> None:
    """Compare by size; then with zeros instead of repeats, and the content of the unused row."""
    program = load_program(spec, done.engine.component, "transformer", device=checks.device, dtype="float32")
    (profile,) = done.engine.key.profiles
    found: dict[str, float] = {}
    folder = service.store.path(done.engine.id)
    with open_session(folder, done.engine, device=checks.device, weights=dict) as session:
        assert isinstance(session, AdaptedSession)
        sizes = sorted({profile.min, profile.opt, profile.max})
        for latent in (*sizes, profile.min, profile.opt, profile.opt, profile.opt):
            inputs = program.inputs(latent, seed=len(found))
            reference = program.run(**inputs)["velocity"]
            found[f"{latent} call {len(found)}"] = relative_error(session.infer(**inputs)["velocity"], reference)
        inputs = program.inputs(profile.opt)
        reference = program.run(**inputs)["velocity"]
        names = dict(session._adapters[-1].inputs)  # type: ignore[attr-defined]
        latents = torch.nn.functional.pad(inputs["latents"], (0, done_columns(done), 0, done_rows(done)))
        text = inputs["text_embeds"]
        zeros = torch.nn.functional.pad(text, (0, 0, 0, TEXT_TOKENS - text.shape[1]))
        given = {
            names["latents"]: latents.half(),
            names["timestep"]: inputs["timestep"].round().long(),
            names["text_embeds"]: zeros.half(),
        }
        (out,) = session._inner.infer(**given).values()
        with_zeros = relative_error(out[..., : latents.shape[-2], :], reference)
        given[names["text_embeds"]] = text.repeat(1, TEXT_TOKENS // text.shape[1], 1).half()
        (first,) = (value.clone() for value in session._inner.infer(**given).values())
        unread = latents.clone()
        unread[..., profile.opt[1] :, :], unread[..., profile.opt[2] :] = 9.0, 9.0
        (second,) = session._inner.infer(**(given | {names["latents"]: unread.half()})).values()
        unread_matters = relative_error(second, first)
    checks.say(
        "errors",
        by_size=found,
        zeros_for_text=with_zeros,
        repeats_for_text=relative_error(first, reference),
        unread_row_matters=unread_matters,
    )


def done_rows(done: Imported) -> int:
    """Return how many input rows the engine ignores."""
    return next((getattr(adapter, "rows", 0) for adapter in done.match.adapters if hasattr(adapter, "rows")), 0)


def done_columns(done: Imported) -> int:
    """Return how many input columns the engine ignores."""
    return next((getattr(adapter, "columns", 0) for adapter in done.match.adapters if hasattr(adapter, "columns")), 0)


def clip(checks: Checks, service: EngineService, spec: ModelSpec, done: Imported) -> None:
    """Run a clip by `run_job` on the imported engine, compared with PyTorch."""
    out = Path(os.environ.get("OUT", HOME))
    frames = {}
    (profile,) = done.engine.key.profiles
    scale, temporal = spec.vae.scale_factor_spatial, spec.vae.scale_factor_temporal
    size = {
        "frames": temporal * (profile.max[0] - 1) + 1,
        "height": profile.max[1] * scale,
        "width": profile.max[2] * scale,
        "steps": checks.arguments.steps,
    }
    for asked in (done.engine.key.backend, "pytorch"):
        wanted = {"prompt": PROMPT, "seed": 7, "backends": {"all": "pytorch", "transformer": asked}, "build": "never"}
        request = GenerationRequest.from_mapping({**wanted, **size})
        plan = resolve(request, spec, PlanningContext(checks.machine, HOME / f"clip-{asked}.mp4", service.offers(spec)))
        if checks.device == "cpu":
            plan = plan.replace(components={name: p.replace(device="cpu") for name, p in plan.components.items()})
        events: list[Event] = []
        with Residency(service) as residency:
            run_job(plan, spec, events.append, Cancel(), residency)
        if not isinstance(events[-1], VideoSaved):
            checks.say("clip", asked=asked, failed=events[-1])
            continue
        saved = events[-1]
        shutil.copy(saved.video, out / f"import-{asked}.mp4")
        pixels = torch.frombuffer(bytearray(frames_of(saved.video)), dtype=torch.uint8)
        frames[asked] = pixels.reshape(-1, size["height"], size["width"], 3)
        checks.say(
            "clip",
            asked=asked,
            backends={name: part["backend"] for name, part in saved.plan["components"].items()},
            reasons={name: part["reason"] for name, part in saved.plan["components"].items()},
            fell_back=[str(event.reason) for event in events if isinstance(event, FellBack)],
            seconds=saved.timings,
        )
    if len(frames) > 1:
        ours, theirs = frames.values()
        checks.say("clips", psnr_db=psnr(ours, theirs), ssim=ssim(ours, theirs))


def bad(checks: Checks, service: EngineService, spec: ModelSpec, path: Path) -> None:
    """Import files that are no engine for this model: each gives a one-line error and leaves nothing."""
    folder = HOME / "bad"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    content, suffix = path.read_bytes(), path.suffix

    def flipped(position: int) -> bytes:
        return content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :]

    contents: dict[str, bytes] = {
        "empty": b"",
        "text": b"not an engine\n" * 1000,
        "random": os.urandom(1 << 20),
        "cut": content[: len(content) // 2],
        "cut to 64 bytes": content[:64],
        "tag flipped": flipped(0),
        "layout flipped": flipped(5),
        "size flipped": flipped(17),
        "of another TensorRT": content[:24] + bytes([10, 3, 0, 26]) + content[28:],
        "parts flipped": flipped(40),
        "longer": content + b"\0",
    }
    cases: list[tuple[str, Path, ModelSpec, str | None]] = []
    for name, data in contents.items():
        target = folder / f"{name.replace(' ', '-')}{suffix}"
        target.write_bytes(data)
        cases.append((name, target, spec, None))
    (folder / f"folder{suffix}").mkdir()
    (folder / f"link{suffix}").symlink_to(path)
    other = folder / "other.bin"
    shutil.copy(path, other)
    cases += [
        ("folder", folder / f"folder{suffix}", spec, None),
        ("link", folder / f"link{suffix}", spec, None),
        ("gone", folder / f"gone{suffix}", spec, None),
        ("another ending", other, spec, None),
        ("another component", path, spec, "vae"),
    ]
    if spec.experts > 1:
        cases.append(("the other expert's weights", path, spec, "transformer_2"))
    if spec.name != "diorama":
        cases.append(("another model's", path, find("diorama", Path("none")), None))
    before = {record.id for record in service.store.index()}
    unlike = []
    for name, target, wanted, component in cases:
        try:
            done = take(checks, service, wanted, target, component)
        except EngineError as error:
            checks.say("bad", kind=name, refused=error.what, remedy=error.remedy)
        else:
            # Bytes after a complete ONNX file, or that only a plan has, may have no effect.
            unlike.append(name)
            checks.say("bad", kind=name, imported=done.engine.id, error=done.engine.error, detail=done.engine.detail)
            if done.engine.id not in before:
                service.store.delete(done.engine.id)
    left = {record.id for record in service.store.index()} - before
    hidden = [entry.name for entry in service.store.folder.iterdir() if entry.name.startswith((".building", ".trash"))]
    checks.say("bad files", of=len(cases), imported=unlike, left=sorted(left), hidden=hidden)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="diorama", help="diorama or wan2.1-1.3b")
    parser.add_argument("--blocks", type=int, default=2, help="of a random model's transformer")
    parser.add_argument("--rows", type=int, default=45, help="latent rows that the plan takes")
    parser.add_argument("--columns", type=int, default=80)
    parser.add_argument("--frames", type=int, default=5, help="latent frames at most")
    parser.add_argument("--steps", type=int, default=4, help="of the clip")
    parser.add_argument("--level", type=int, default=2, help="TensorRT's optimisation level, 0 to 5")
    parser.add_argument("--builder", default="onnx_tensorrt", choices=SUFFIXES)
    parser.add_argument("--device", default="cuda:0")
    parser.set_defaults(part="import")
    arguments = parser.parse_args()
    if tensorrt_8_6.is_installed():
        tensorrt_8_6.load()
    HOME.mkdir(parents=True, exist_ok=True)
    checks = Checks(arguments, probe(), EngineStore(HOME / "imported", 1 << 40))
    service = EngineService(checks.store, checks.machine, HOME)
    started = time.perf_counter()
    spec = checks.model()
    shape = f"{arguments.rows}x{arguments.columns}x{arguments.frames}"
    path = HOME / "foreign" / f"{arguments.model}-{arguments.blocks}-{shape}{SUFFIXES[arguments.builder]}"
    with checks.going_on("make"):
        make(checks, spec, "transformer", path)
    done: Imported | None = None
    with checks.going_on("import"):
        done = carried(checks, service, spec, path)
    parts: list[Callable[[], None]] = [lambda: bad(checks, service, spec, path)]
    if done is not None:
        imported = done
        parts = [lambda: errors(checks, service, spec, imported), *parts]
        if arguments.model == "diorama":  # a random model's text encoder has another width
            parts.insert(1, lambda: clip(checks, service, spec, imported))
    for part in parts:
        with checks.going_on("import"):
            part()
    checks.say("end", seconds=round(time.perf_counter() - started, 1))


if __name__ == "__main__":
    main()
