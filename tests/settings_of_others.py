"""Files with settings, written as ComfyUI, its VideoHelperSuite, Wan2GP and FramePack-Studio write them."""

import json
import subprocess
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from runtime.video.mp4 import find_ffmpeg
from tests.models.test_other_programs import EXPERTS, FRAMEPACK, WAN2GP, node

SEED = 1234


def prompt_in(name: str) -> str:
    """Return the prompt in the file of a name."""
    return f"a boat of {name}"


def write_all(folder: Path) -> list[Path]:
    """Write one file for each way in which a program writes its settings, all with `SEED`; return them."""
    image = PngInfo()
    image.add_text("prompt", json.dumps(_graph("comfyui.png")))
    image.add_text("workflow", json.dumps({"nodes": [], "extra": "x" * 300_000}))
    _picture(folder / "comfyui.png", image)
    (folder / "api.json").write_text(json.dumps(_graph("api.json")))
    tags = {"prompt": json.dumps(_graph("suite.mp4")), "workflow": "{}", "CreationTime": "2026-01-01"}
    _video(folder / "suite.mp4", tags, "-movflags", "use_metadata_tags")
    wan2gp = WAN2GP | {"prompt": prompt_in("wan2gp.mp4"), "seed": SEED}
    _video(
        folder / "wan2gp.mp4", {"comment": json.dumps(wan2gp, ensure_ascii=False, separators=(",", ":")) + " " * 1000}
    )
    framepack = FRAMEPACK | {"prompt": prompt_in("framepack.png"), "seed": SEED}
    image = PngInfo()
    for name, value in framepack.items():
        if isinstance(value, str | int | float | bool) or value is None:
            image.add_text(name, str(value))
    _picture(folder / "framepack.png", image)
    return [folder / name for name in ("comfyui.png", "api.json", "suite.mp4", "wan2gp.mp4", "framepack.png")]


def _graph(name: str) -> dict[str, Any]:
    inputs = EXPERTS["10"]["inputs"] | {"noise_seed": SEED}
    return EXPERTS | {"10": EXPERTS["10"] | {"inputs": inputs}, "14": node("PrimitiveString", value=prompt_in(name))}


def _picture(path: Path, texts: PngInfo) -> None:
    Image.new("RGB", (16, 16)).save(path, pnginfo=texts)


def _video(path: Path, tags: dict[str, str], *options: str) -> None:
    command = [find_ffmpeg(), "-v", "error", "-f", "lavfi", "-i", "color=s=16x16:d=0.2"]
    command += [word for name, value in tags.items() for word in ("-metadata", f"{name}={value}")]
    subprocess.run([*command, *options, str(path)], check=True)
