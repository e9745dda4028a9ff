"""Check on a GPU that TensorRT's current lean runtime rejects plans of other versions, as the session expects.

    PYTHONPATH=FOLDER python3 bench/gpu/check_lean.py [PLAN …]     FOLDER: the unpacked wheels tensorrt-lean-cu13-*

PLANs are of other versions, such as 8.6. Each file is opened in a process of its own; prints JSON.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

NAMES = ("bytes of zero", "random", "empty", "text")


def attempt(path: Path) -> None:
    """Open a file in the session and print the outcome."""
    sys.modules["tensorrt"] = importlib.import_module("tensorrt_lean_bindings")
    from runtime.core.errors import EngineError
    from runtime.engines.sessions.tensorrt import TensorRTSession

    try:
        TensorRTSession(path, device="cuda:0")
    except EngineError as error:
        outcome = {"refused": error.what}
    else:
        outcome = {"failed": "it was accepted"}
    sys.stdout.write(json.dumps(outcome) + "\n")
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """Try each file."""
    if len(sys.argv) == 3 and sys.argv[1] == "--attempt":
        attempt(Path(sys.argv[2]))
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        contents = (bytes(4096), os.urandom(1 << 16), b"", b"not a plan")
        files = {}
        for name, data in zip(NAMES, contents, strict=True):
            files[name] = Path(scratch) / name
            files[name].write_bytes(data)
        files |= {path: Path(path) for path in sys.argv[1:]}
        for name, path in files.items():
            command = [sys.executable, __file__, "--attempt", str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
            lines = done.stdout.strip().splitlines()
            found[name] = json.loads(lines[-1]) if lines else {"crashed": done.returncode, "end": done.stderr[-800:]}
    version = importlib.import_module("tensorrt_lean_bindings").__version__
    line = json.dumps({"part": "lean", "version": version, "found": found})
    sys.stdout.write(line + "\n")
    if "OUT" in os.environ:
        with (Path(os.environ["OUT"]) / "checks.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
