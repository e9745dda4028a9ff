"""Pack Tandem's requirements in small parts for a machine without a package registry.

    python tests/gpu/pack.py FOLDER [--part-mb 35] [--groups base,video]    with a registry; takes minutes
    . FOLDER/unpack.sh                                                      there, in bash

For Linux on x86-64 with Python 3.12 where PyTorch for CUDA 13, transformers and the rest of `THERE` are installed.
FOLDER then holds GROUP.tar.xz.00, .01, …, none larger than the flag allows. Source `unpack.sh` with all or some of the
parts in the same folder: parts that arrived earlier are kept in $TANDEM_THERE (/tmp/tandem-there), a group is unpacked
once it is complete, and PYTHONPATH is set. `base` is what every script in bench/gpu imports, `video` is ffmpeg,
`flash4` FlashAttention 4, `sol` the kernels of sparse attention for NVIDIA GPUs and `cluster` what a cluster's head
and nodes need besides. All are packed by default, in the versions of requirements*.txt. Requirements that are neither
packed nor known to be installed there are listed.
"""

import argparse
import hashlib
import io
import lzma
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
TARGET = {"python_version": "3.12", "sys_platform": "linux", "platform_machine": "x86_64", "extra": ""}
PLATFORMS = "_2_34 _2_31 _2_28 _2_27 _2_24 _2_17 2014 1"
# Who wants an exact version of another comes before it.
GROUPS: Mapping[str, str] = {
    "base": "diffusers importlib_metadata lazy-importer zipp ftfy wcwidth pydantic pydantic_core typing_inspection "
    "annotated_types typer rich filelock imageio-ffmpeg gguf torchao bitsandbytes nvidia-cudnn-frontend "
    "apache-tvm-ffi",
    "video": "imageio-ffmpeg",
    "flash4": "flash-attn-4 quack-kernels torch-c-dlpack-ext nvidia-cutlass-dsl "
    "nvidia-cutlass-dsl-libs-cu13 nvidia-cutlass-dsl-libs-base nvidia-cutlass-dsl-libs-core",
    "sol": "comfy-kitchen",
    "cluster": "ray fastapi starlette uvicorn python-multipart orjson opentelemetry-api jsonschema "
    "jsonschema-specifications referencing rpds-py msgpack",
}
THERE = (
    "torch triton numpy transformers accelerate huggingface-hub safetensors tokenizers onnx onnxruntime onnxscript "
    "psutil nvidia-ml-py regex requests pillow tqdm typing-extensions packaging einops protobuf cuda-bindings "
    "markdown-it-py pygments shellingham annotated-doc pytest pytest-timeout hypothesis"
)
LEFT_OUT = {
    "base": r"/stubs/|__pycache__|^test/|\.a$|bitsandbytes/lib\w+(?<!_cuda130)(?<!_cpu)\.so|imageio_ffmpeg/binaries/ff",
    "video": r"imageio_ffmpeg/(?!binaries/ff)|dist-info",
    "flash4": r"/stubs/|__pycache__|^test/|\.a$",
    "sol": r"__pycache__|^comfy_kitchen/backends/hip/",
    "cluster": r"__pycache__|^ray/(jars|rllib|dashboard/client|data|serve|train|tune|llm|cpp)/",
}

UNPACK = """\
# Source this in bash with all or some of the parts in the same folder; parts that arrived earlier are kept.
there=${TANDEM_THERE:-/tmp/tandem-there}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "$there/parts" "$there/site" "$there/start"
while read -r sum part; do
  file=$there/parts/$part
  if [ -e "$there/${part%%.*}.ready" ] || [ -e "$file" ] || [ ! -e "$here/$part" ]; then continue; fi
  cp "$here/$part" "$file.new" && echo "$sum  $file.new" | sha256sum -c --quiet && mv "$file.new" "$file"
done <<'LIST'
@LIST@
LIST
for wanted in @COUNTS@; do
  group=${wanted%:*}
  if [ -e "$there/$group.ready" ]; then continue; fi
  arrived=$(ls "$there/parts" | grep -c "^$group[.]tar[.]xz[.][0-9]*$" || true)
  if [ "$arrived" -lt "${wanted#*:}" ]; then echo "$group: $arrived of ${wanted#*:} parts arrived"; continue; fi
  if cat "$there/parts/$group".tar.xz.* | tar xJ -C "$there/site"; then
    touch "$there/$group.ready"
    rm "$there/parts/$group".tar.xz.*
  fi
done
# Python reads *.pth only in folders that are added so.
echo "import site; site.addsitedir('$there/site')" > "$there/start/sitecustomize.py"
export PYTHONPATH="$there/site:$there/start${PYTHONPATH:+:$PYTHONPATH}"
"""


class Parts(io.RawIOBase):
    """Files NAME.00, NAME.01, … of so many bytes at most, written as one."""

    def __init__(self, folder: Path, name: str, limit: int) -> None:
        super().__init__()
        self._folder, self._name, self._limit = folder, name, limit
        self._room, self.paths = 0, list[Path]()

    def write(self, data: Any) -> int:
        """Append, to a new file where the last one is full."""
        left = memoryview(data)
        while left:
            if not self._room:
                self.paths.append(self._folder / f"{self._name}.{len(self.paths):02}")
                self.paths[-1].write_bytes(b"")
                self._room = self._limit
            with self.paths[-1].open("ab") as file:
                written = file.write(left[: self._room])
            self._room, left = self._room - written, left[written:]
        return len(data)


def exact(wanted: Iterable[Requirement]) -> dict[str, str]:
    """Return the exact versions that requirements name for the target, by canonical name."""
    chosen = [one for one in wanted if one.marker is None or one.marker.evaluate(TARGET)]
    return {canonicalize_name(one.name): pin.version for one in chosen for pin in one.specifier if pin.operator == "=="}


def read(file: Path) -> list[Requirement]:
    """Return what a requirements file asks for."""
    lines = [line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines()]
    return [Requirement(line) for line in lines if line]


def needs(wheel: Path) -> list[Requirement]:
    """Return what a wheel needs on the target."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    wanted = [Requirement(line.partition(":")[2].strip()) for line in lines if line.startswith("Requires-Dist:")]
    return [one for one in wanted if one.marker is None or one.marker.evaluate(TARGET)]


def download(name: str, version: str | None, folder: Path) -> Path:
    """Fetch the wheel of one package for the target."""
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    command += ["--implementation", "cp", "--python-version", TARGET["python_version"]]
    for platform in PLATFORMS.split():
        command += ["--platform", f"manylinux{platform}_x86_64"]
    before = set(folder.iterdir())
    subprocess.run([*command, f"{name}=={version}" if version else name], check=True)
    (wheel,) = set(folder.iterdir()) - before
    sys.stdout.write(f"{wheel.name}\n")
    return wheel


def pack(wheels: Iterable[Path], folder: Path, group: str, limit: int) -> list[Path]:
    """Write one group's parts, with the files of wheels as they lie once installed; return them."""
    parts: Any = Parts(folder, f"{group}.tar.xz", limit)
    left_out = re.compile(LEFT_OUT[group])
    with lzma.open(parts, "wb", preset=4) as packed, tarfile.open(fileobj=packed, mode="w|") as archive:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as files:
                for info in files.infolist():
                    member = tarfile.TarInfo(re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", info.filename))
                    if info.is_dir() or left_out.search(member.name):
                        continue
                    member.size, member.mode = info.file_size, (info.external_attr >> 16) & 0o777 or 0o644
                    with files.open(info) as content:
                        archive.addfile(member, content)
    return list(parts.paths)


def write_script(folder: Path, packed: Mapping[str, list[Path]]) -> None:
    """Write `unpack.sh` for groups of parts."""
    paths = [path for group in packed.values() for path in group]
    listed = "\n".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()} {path.name}" for path in paths)
    counts = " ".join(f"{group}:{len(paths)}" for group, paths in packed.items())
    (folder / "unpack.sh").write_text(UNPACK.replace("@LIST@", listed).replace("@COUNTS@", counts), encoding="utf-8")


def main() -> None:
    """Pack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part-mb", type=int, default=35, help="megabytes of a part at most")
    parser.add_argument("--groups", default=",".join(GROUPS))
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    versions = exact(one for file in ROOT.glob("requirements*.txt") for one in read(file))
    here, wanted = {canonicalize_name(name) for name in THERE.split()}, dict[str, str]()
    packed: dict[str, list[Path]] = {}
    for group in arguments.groups.split(","):
        for old in folder.glob(f"{group}.tar.xz.*"):
            old.unlink()
        with tempfile.TemporaryDirectory() as scratch:
            wheels = []
            for name, _, version in (one.partition("==") for one in GROUPS[group].split()):
                known = canonicalize_name(name)
                here.add(known)
                wheels.append(download(name, version or versions.get(known), Path(scratch)))
                versions = exact(needs(wheels[-1])) | versions
                wanted |= {canonicalize_name(need.name): f"{name} wants {need}" for need in needs(wheels[-1])}
            packed[group] = pack(wheels, folder, group, arguments.part_mb * 1_000_000)
        sys.stdout.write(f"{group}: {', '.join(f'{path.stat().st_size:,}' for path in packed[group])} bytes\n")
    for name in wanted.keys() - here:
        sys.stdout.write(f"{wanted[name]}, which is not packed\n")
    write_script(folder, packed)


if __name__ == "__main__":
    main()
