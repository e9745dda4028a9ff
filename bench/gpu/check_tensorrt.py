"""Check TensorRT engines on a GPU (export, builder, session) against PyTorch.

    python bench/gpu/check_tensorrt.py build [--model M] [--precision P] [--only PROGRAM,…] [--latent F,H,W]
    python bench/gpu/check_tensorrt.py build --model hunyuan-video --blocks 2      # text encoders and VAE
    python bench/gpu/check_tensorrt.py blocks --builder tensorrt_blocks [--model M] [--blocks N] [--latent F,H,W]
    python bench/gpu/check_tensorrt.py blocks --builder tensorrt_blocks --model hunyuan-video --blocks 1
    python bench/gpu/check_tensorrt.py sections --model framepack --blocks 1 [--level L] [--jobs N] [--seconds S]
    python bench/gpu/check_tensorrt.py profiles | clip | job | damage | endurance [--precision P]

Each part prints a JSON object per result, and appends it to $OUT/checks.jsonl. Engines stay in
$TANDEM_CHECKS (/tmp/tandem-checks), so that a later part, or the same one after a time limit, builds nothing twice.
With --builder onnxruntime --device cpu the same parts run without a GPU.
"""

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from bench.gpu.check_blocks import blocks
from bench.gpu.check_clip import clip
from bench.gpu.check_common import CLIP, COMPONENTS, HOME, LARGE, Checks, profile_of, programs_of
from bench.gpu.check_damage import case, damage
from bench.gpu.check_job import job
from bench.gpu.check_sections import sections as compare_sections
from runtime.core.errors import EngineError
from runtime.engines.builders.tensorrt import enclosing
from runtime.engines.programs import load_program
from runtime.engines.store import EngineStore
from runtime.machine.probe import probe
from runtime.models.catalogue import find
from runtime.models.spec import VAE_ENCODER, ModelSpec
from runtime.planner.choice.engine_index import EngineRecord, ShapeProfile
from tests.gpu import tensorrt_8_6, wide_models
from tests.gpu.errors import relative_error


def build(checks: Checks) -> None:
    """Build each program in a child process, verify it there, and time it with and without CUDA graphs."""
    spec = checks.model()
    latent = checks.arguments.latent or (LARGE if checks.arguments.model in wide_models.NAMES else CLIP)
    wanted = checks.arguments.only.split(",") if checks.arguments.only else None
    chosen = [
        (component, program)
        for component, program in programs_of(spec)
        if (wanted is None or (program if component in {"vae", VAE_ENCODER} else component) in wanted)
    ]
    keys = {
        (component, program): checks.key(
            spec, component, program, (profile_of(program, latent),), checks.arguments.precision
        )
        for component, program in chosen
    }

    def one(item: tuple[str, str]) -> EngineRecord | None:
        with checks.going_on(f"build {item}"):
            return checks.engine(spec, item[0], keys[item])
        return None

    # Builds wait for compilers as much as for the GPU; they are timed below, alone.
    with ThreadPoolExecutor(checks.arguments.jobs) as pool:
        records = dict(zip(chosen, pool.map(one, chosen), strict=True))
    for (component, program), record in records.items():
        if record is not None:
            with checks.going_on(f"time {component} {program}"):
                report_engine(checks, spec, component, record)


def report_engine(checks: Checks, spec: ModelSpec, component: str, record: EngineRecord) -> None:
    """Report what an engine is and how fast it runs, compared with PyTorch in the same precision."""
    key = record.key
    profile = key.profiles[0]
    program = load_program(spec, component, key.program, device=checks.device, dtype=key.precision)
    inputs = program.inputs(profile.opt)
    found: dict[str, Any] = {"pytorch_ms": checks.milliseconds(lambda: program.run(**inputs), 10)}
    checks.synchronize()
    for graphs in ("off", "on"):
        started = time.perf_counter()
        with checks.open(record, cuda_graphs=graphs) as session:
            checks.synchronize()
            found["load_seconds"] = round(time.perf_counter() - started, 3)
            found[f"graphs_{graphs}_ms"] = checks.milliseconds(lambda: session.infer(**inputs), 10)
            found[f"graphs_{graphs}_captured"] = len(getattr(session, "_graphs", ()))
    checks.say(
        "engine",
        model=spec.name,
        component=component,
        program=key.program,
        precision=key.precision,
        size=str(profile),
        level=dict(key.options).get("optimization_level"),
        error=record.error,
        tolerance=record.tolerance,
        verified=record.verified,
        detail=record.detail,
        build_seconds=record.build_seconds,
        file_mib=round(record.file_bytes / (1 << 20), 2),
        id=record.id,
        **found,
    )


def sections(checks: Checks) -> None:
    """Compare a video of three sections on engines with PyTorch, and report each engine."""
    compare_sections(checks, report_engine)


def profiles(checks: Checks) -> None:
    """Check one engine with two profiles: correct in both, an immediate error outside."""
    spec = find("diorama", Path("none"))
    two: tuple[ShapeProfile, ...] = (
        ShapeProfile((5, 10, 16), CLIP, CLIP),
        ShapeProfile((2, 4, 4), (3, 8, 8), (5, 8, 14)),
    )
    if checks.arguments.builder != "onnx_tensorrt":
        # The others build for one range.
        two = (enclosing(two),)
    key = checks.key(spec, "transformer", "transformer", two, checks.arguments.precision)
    record = checks.engine(spec, "transformer", key)
    program = load_program(spec, "transformer", "transformer", device=checks.device, dtype="float32")
    errors = {}
    with checks.open(record) as session:
        for latent in (CLIP, (3, 8, 8), (5, 10, 16), (2, 4, 4), (4, 6, 12), (7, 12, 20), CLIP, CLIP):
            inputs = program.inputs(latent)
            errors[str(latent)] = relative_error(session.infer(**inputs)["velocity"], program.run(**inputs)["velocity"])
        try:
            session.infer(**program.inputs((9, 16, 24)))
        except EngineError as error:
            checks.say("outside", refused=error.what)
        else:
            checks.say("outside", failed="a size outside both profiles was accepted")
        again = relative_error(session.infer(**inputs)["velocity"], program.run(**inputs)["velocity"])
    checks.say(
        "two profiles",
        precision=key.precision,
        errors=errors,
        after_refusal=again,
        verified=record.verified,
        detail=record.detail,
        build_seconds=record.build_seconds,
    )


def endurance(checks: Checks) -> None:
    """Check that 1,000 calls, and opening and closing, do not grow GPU memory or process memory."""
    spec = find("diorama", Path("none"))
    for component, name in (COMPONENTS[1], COMPONENTS[4]):
        key = checks.key(spec, component, name, (profile_of(name, CLIP),), checks.arguments.precision)
        record = checks.engine(spec, component, key)
        program = load_program(spec, component, name, device=checks.device, dtype=key.precision)
        inputs = program.inputs(key.profiles[0].opt)
        with checks.going_on(f"endurance {name}"):
            calls(checks, name, record, inputs)
        with checks.going_on(f"opening {name}"):
            openings(checks, name, record, inputs)


def calls(checks: Checks, name: str, record: EngineRecord, inputs: dict[str, torch.Tensor]) -> None:
    """Run a session 1,000 times; the VAE's caches are reused."""
    for graphs in ("off", "on"):
        with checks.open(record, cuda_graphs=graphs) as session:
            before, first = (0, 0), None
            for index in range(checks.arguments.calls):
                out = session.infer(**inputs)
                caches = {key: value for key, value in out.items() if key.startswith("cache_")}
                inputs = inputs | caches
                if not caches:
                    first = out["velocity"].clone() if first is None else first
                if index == checks.arguments.calls // 10:
                    checks.synchronize()
                    before = checks.used_bytes()
            checks.synchronize()
            after = checks.used_bytes()
        checks.say(
            "calls",
            program=name,
            graphs=graphs,
            calls=checks.arguments.calls,
            gpu_growth_bytes=after[0] - before[0],
            host_growth_bytes=after[1] - before[1],
            last_equals_first=None if first is None else bool(torch.equal(first, out["velocity"])),
        )


def openings(checks: Checks, name: str, record: EngineRecord, inputs: dict[str, torch.Tensor]) -> None:
    """Open, run and close a session 20 times."""
    used = []
    for _ in range(20):
        with checks.open(record) as session:
            for _ in range(3):
                session.infer(**inputs)
        del session
        if checks.device.startswith("cuda"):
            torch.cuda.empty_cache()
        used.append(checks.used_bytes())
    checks.say(
        "openings",
        program=name,
        gpu_growth_bytes=used[-1][0] - used[4][0],
        host_growth_bytes=used[-1][1] - used[4][1],
    )


def main() -> None:
    """Run one part."""
    parts: dict[str, Callable[[Checks], None]] = {
        part.__name__: part for part in (build, blocks, sections, profiles, clip, job, damage, case, endurance)
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=parts)
    parser.add_argument("--model", default="diorama", help=f"diorama, {', '.join(wide_models.NAMES)}")
    parser.add_argument("--blocks", type=int, default=2, help="of a random model's transformer")
    parser.add_argument("--precision", default="default", help="default, float32 or float16")
    parser.add_argument("--only", help="components, and the VAE's programs: text_encoder,vae_first,vae_encoder_first …")
    parser.add_argument("--latent", type=lambda text: tuple(map(int, text.split(","))), help="frames,height,width")
    parser.add_argument("--level", type=int, default=3, help="TensorRT's optimisation level, 0 to 5")
    parser.add_argument("--jobs", type=int, default=1, help="builds at once")
    parser.add_argument("--seconds", type=float, default=3600, help="of `sections`: give up builds after so many")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--builder", default="onnx_tensorrt")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--folder", help="for `case`")
    arguments = parser.parse_args()
    if tensorrt_8_6.is_installed():
        tensorrt_8_6.load()
    checks = Checks(arguments, probe(), EngineStore(HOME / "engines", 1 << 40))
    started = time.perf_counter()
    with checks.going_on(arguments.part):
        parts[arguments.part](checks)
    checks.say("end", seconds=round(time.perf_counter() - started, 1))


if __name__ == "__main__":
    main()
