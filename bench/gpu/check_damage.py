"""Check damaged engines, each opened in a process of its own, so that crashes are detected."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.gpu.check_common import CLIP, COMPONENTS, HOME, Checks, profile_of
from runtime.core.errors import EngineError
from runtime.engines import manifest
from runtime.engines.programs import load_program
from runtime.engines.sessions import open_session
from runtime.models.catalogue import find
from tests.gpu.errors import relative_error

# What it is called, the engine file, whether the manifest is made to fit, options of `case`.
Case = tuple[str, bytes | None, bool, tuple[str, ...]]
SCRIPT = Path(__file__).with_name("check_tensorrt.py")


def damage(checks: Checks) -> None:
    """Open damaged engines, each in a process of its own, so that crashes are detected."""
    spec = find("diorama", Path("none"))
    records = {
        program: checks.engine(
            spec,
            component,
            checks.key(spec, component, program, (profile_of(program, CLIP),), checks.arguments.precision),
        )
        for component, program in (COMPONENTS[0], COMPONENTS[1])
    }
    intact = checks.store.path(records["transformer"].id)
    other = (checks.store.path(records["text_encoder"].id) / records["text_encoder"].files[0].name).read_bytes()
    name = records["transformer"].files[0].name
    plan = (intact / name).read_bytes()

    def flipped(position: int) -> bytes:
        return plan[:position] + bytes([plan[position] ^ 0xFF]) + plan[position + 1 :]

    # What the hash must catch, then what only the library can: the same with a hash that fits.
    found_by_hash = {
        **{f"byte {position} flipped": flipped(position) for position in (0, 9, len(plan) // 3, len(plan) - 1)},
        "cut in half": plan[: len(plan) // 2],
        "empty": b"",
        "one byte too long": plan + b"\0",
        "another engine's": other,
    }
    forged = {
        **{f"byte {position} flipped": flipped(position) for position in (0, 3, 9, 17, 40)},
        "cut in half": plan[: len(plan) // 2],
        "cut to 64 bytes": plan[:64],
        "empty": b"",
        "random": os.urandom(4096),
        "another engine's": other,
    }
    # No guarantee covers these: someone who can forge a hash can put code into a plan.
    inside = {f"byte {position} flipped": flipped(position) for position in (len(plan) // 3, len(plan) // 2)}
    cases: list[Case] = [(kind, data, False, ()) for kind, data in found_by_hash.items()]
    cases += [(f"hash forged, {kind}", data, True, ()) for kind, data in forged.items()]
    cases += [(f"not promised: hash forged, {kind}", data, True, ()) for kind, data in inside.items()]
    cases += [("intact", plan, False, ()), ("intact, another shape", plan, False, ("--latent", "5,8,8"))]
    cases += [("intact, no file", None, False, ())]
    scratch = HOME / "damage"
    shutil.rmtree(scratch, ignore_errors=True)

    def run(case: Case) -> tuple[str, dict[str, Any]]:
        kind, data, forge, options = case
        # The folder's name is the engine's id.
        folder = scratch / f"{abs(hash(kind))}" / intact.name
        shutil.copytree(intact, folder)
        (folder / name).unlink()
        if data is not None:
            (folder / name).write_bytes(data)
        if forge:
            manifest.write(folder, replace(manifest.read(folder), files=manifest.hashed_files(folder, name)))
        command = [sys.executable, str(SCRIPT), "case", "--device", checks.device, "--folder", str(folder), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        lines = done.stdout.strip().splitlines()
        if done.returncode or not lines:
            return kind, {"crashed": done.returncode, "end": done.stderr[-500:]}
        outcome: dict[str, Any] = json.loads(lines[-1])
        return kind, outcome

    with ThreadPoolExecutor(4) as pool:
        outcomes = dict(pool.map(run, cases))
    shutil.rmtree(scratch, ignore_errors=True)
    bad = []
    for kind, outcome in outcomes.items():
        expected = "ran" if kind == "intact" else "refused"
        if expected not in outcome and not kind.startswith("not promised"):
            bad.append(kind)
        checks.say("case", kind=kind, **outcome)
    checks.say("cases", of=len(outcomes), unlike_expected=bad)


def case(checks: Checks) -> None:
    """Open the engine in a folder, run it once and print the outcome."""
    folder = Path(checks.arguments.folder)
    record = manifest.read(folder)
    spec = find("diorama", Path("none"))
    outcome: dict[str, Any]
    try:
        problem = record.problem or manifest.check_sizes(folder, record)
        # The store says so before anything is opened; opening must say so too.
        outcome = {"store": problem} if problem else {}
        program = load_program(spec, "transformer", "transformer", device=checks.device, dtype="float32")
        inputs = program.inputs(checks.arguments.latent or CLIP)
        with open_session(folder, record, device=checks.device, weights=dict) as session:
            out = session.infer(**inputs)["velocity"]
            checks.synchronize()
            outcome["ran"] = relative_error(out, program.run(**inputs)["velocity"])
    except EngineError as error:
        outcome["refused"] = error.what
    except Exception as error:
        outcome["raised"] = repr(error)
    sys.stdout.write(json.dumps(outcome) + "\n")
    sys.stdout.flush()
    os._exit(0)
