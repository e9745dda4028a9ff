"""Downloads small wheels of TensorRT and torch-tensorrt to read their names. Installs nothing and needs no GPU.

TensorRT's Python bindings want its libraries, which are gigabytes. A library with the same few entry points that does
nothing is enough to import them and look at their classes.
"""

import functools
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FETCHED = ROOT / ".pytest_cache" / "wheels"
# Read off the complete TensorRT 8.6.0 (`tensorrt==8.6.0`, Python 3.10), whose wheel has 800 MB, by
#     python -m tests.engines.contract.wheels tensorrt > tests/engines/contract/tensorrt_8_6.json
RECORDED_8_6 = Path(__file__).with_name("tensorrt_8_6.json")
ENTRY_POINTS = (
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
)
Names = dict[str, list[str]]


@functools.cache
def unpacked(requirement: str) -> Path:
    """Return the folder with a wheel's content, for this Python; the test is skipped where it cannot be fetched."""
    folder = FETCHED / f"{requirement}-py{sys.version_info[0]}{sys.version_info[1]}"
    if folder.is_dir():
        return folder
    new = folder.with_name(f"{folder.name}.new-{os.getpid()}")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(new)]
    try:
        done = subprocess.run([*pip, requirement], capture_output=True, text=True, check=False, timeout=120)
        wheels = list(new.glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            pytest.skip(f"{requirement} cannot be fetched: {(done.stderr.strip().splitlines() or ['no wheel'])[-1]}")
        with zipfile.ZipFile(wheels[0]) as archive:
            # Libraries that want CUDA; torch-tensorrt's Python part works without its own.
            archive.extractall(new, [name for name in archive.namelist() if "/lib/" not in name])
        wheels[0].unlink()
        if not folder.is_dir():
            new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return folder


def pinned(package: str) -> str:
    """Return the version of a package in requirements-gpu.txt."""
    text = (ROOT / "requirements-gpu.txt").read_text(encoding="utf-8")
    found = re.search(rf"^{re.escape(package)}==([\d.]+)", text, re.MULTILINE)
    assert found is not None, f"{package} is not pinned"
    return found.group(1)


def stand_ins(major: int) -> Path:
    """Return a folder with libraries that have TensorRT's names and entry points, and do nothing."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler")
    folder = FETCHED / f"stand-ins-{major}"
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "stand_in.c"
    source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in ENTRY_POINTS), encoding="utf-8")
    for library in ("nvinfer", "nvinfer_lean", "nvinfer_plugin", "nvonnxparser"):
        name = f"lib{library}.so.{major}"
        if not (folder / name).is_file():
            built = folder / f"{name}.{os.getpid()}"
            subprocess.run([compiler, "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", built, source], check=True)
            built.rename(folder / name)
    return folder


def environment_with(packages: list[Path], libraries: Path) -> dict[str, str]:
    """Return this process's environment with more folders of packages and of libraries."""
    paths = {"PYTHONPATH": packages, "LD_LIBRARY_PATH": [libraries]}
    return os.environ | {
        name: os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get(name)])])
        for name, folders in paths.items()
    }


def run(module: str, *arguments: object, packages: list[Path], libraries: Path) -> list[str]:
    """Run a module of the tests in a process of its own, with more folders of packages and of libraries.

    Return the lines of its standard output.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment_with([*packages, ROOT], libraries),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@functools.cache
def names_of(requirement: str, module: str) -> Names:
    """Return the public names of every class of a TensorRT package."""
    libraries = stand_ins(int(requirement.partition("==")[2].partition(".")[0]))
    lines = run(__name__, module, packages=[unpacked(requirement)], libraries=libraries)
    names: Names = json.loads("".join(lines))
    return names


def recorded_8_6() -> Names:
    """Return the names of TensorRT 8.6.0."""
    names: Names = json.loads(RECORDED_8_6.read_text(encoding="utf-8"))
    return names


def read_names(module: str) -> Names:
    """Return the public names of every class of an importable TensorRT package."""
    # Not all that the bindings ask of the libraries is there.
    sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_GLOBAL)
    package = importlib.import_module(module)
    classes = {name: value for name, value in vars(package).items() if inspect.isclass(value)}
    return {name: [name for name in dir(value) if name[0] != "_"] for name, value in sorted(classes.items())}


def main(module: str) -> None:
    """Print a package's names, a class per line."""
    lines = [f"{json.dumps(name)}: {json.dumps(members)}" for name, members in read_names(module).items()]
    sys.stdout.write("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1])
