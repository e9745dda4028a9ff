"""Small upscalers with random weights as files of ncnn and as safetensors, and a picture."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from runtime.families.esrgan.spec import COMPACT, RRDB, parameters

COMPACT_CONFIG = {"kind": COMPACT, "features": 8, "depth": 2, "growth": 0, "scale": 4}
RRDB_CONFIG = {"kind": RRDB, "features": 8, "depth": 1, "growth": 4, "scale": 4}
# What ncnn writes before weights of 16 bits.
HALF = 0x01306B47
_LEAKY = " 9=2 -23310=1,2.000000e-01"


def picture(height: int, width: int) -> np.ndarray:
    """Return a picture with gradients, circles and edges, (3, height, width) float32 in 0 to 1, in steps of 1/255."""
    y, x = np.mgrid[0:height, 0:width].astype("float64")
    rings = 0.5 + 0.5 * np.sin(np.hypot(x - width / 3, y - height / 2) / 2.5)
    stripes = ((x + 2 * y) % 16 < 6).astype("float64")
    colors = np.stack([rings, x / max(width - 1, 1), 0.7 * stripes + 0.3 * y / max(height - 1, 1)])
    return (np.round(colors * 255) / 255).astype("float32")


def weights(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return random weights of a network by BasicSR's names; all have exact values in float16."""
    random = np.random.default_rng(7)
    values = {}
    for name, shape in parameters(config).items():
        spread = 0.5 / np.sqrt(np.prod(shape[1:])) if len(shape) > 1 else 0.1
        values[name] = (spread * random.standard_normal(shape)).astype("float16").astype("float32")
    return values


def save_safetensors(path: Path, config: dict[str, Any], prefix: str = "") -> None:
    """Store a network with weights of `weights`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({f"{prefix}{name}": torch.from_numpy(value) for name, value in weights(config).items()}, path)


def save_ncnn(path: Path, config: dict[str, Any], *, interpolated: float = 1.0, half: bool = True) -> None:
    """Store a network with weights of `weights` as ncnn does.

    Args:
        path: the `.param`; the `.bin` is beside it.
        interpolated: the factor of an interpolation at the end; 1 for none.
        half: whether weights have 16 bits.
    """
    layers = _compact(config, interpolated) if config["kind"] == COMPACT else _rrdb(config)
    blobs = sum(int(line.split()[3]) for line in layers)
    path.write_text("\n".join(["7767517", f"{len(layers)} {blobs}", *layers, ""]))
    data = b""
    values = weights(config)
    for name, value in values.items():
        if name.endswith(".weight") and value.ndim > 1:
            stored = value.astype("float16" if half else "float32").tobytes()
            data += struct.pack("<I", HALF if half else 0) + stored + bytes(-len(stored) % 4)
        else:
            data += value.tobytes()
    path.with_suffix(".bin").write_bytes(data)


def _convolution(source: str, target: str, channels: int, inputs: int, more: str = "") -> str:
    return f"Convolution {target} 1 1 {source} {target} 0={channels} 1=3 4=1 5=1 6={channels * inputs * 9}{more}"


def _compact(config: dict[str, Any], interpolated: float) -> list[str]:
    features, scale = config["features"], config["scale"]
    layers = ["Input in 0 1 data", "Split split 1 2 data a b"]
    last = "a"
    for index in range(config["depth"] + 1):
        layers += [_convolution(last, f"c{index}", features, features if index else 3)]
        layers += [f"PReLU p{index} 1 1 c{index} p{index} 0={features}"]
        last = f"p{index}"
    layers += [_convolution(last, "end", 3 * scale**2, features), f"PixelShuffle s 1 1 end s 0={scale}"]
    layers += [f"Interp r 1 1 b r 0=1 1={scale:e} 2={scale:e}"]
    if interpolated == 1.0:
        return [*layers, "BinaryOp sum 2 1 s r output"]
    return [*layers, "BinaryOp sum 2 1 s r sum", f"Interp i 1 1 sum output 0=3 1={interpolated:e} 2={interpolated:e}"]


def _rrdb(config: dict[str, Any]) -> list[str]:
    features, growth = config["features"], config["growth"]
    layers = ["Input in 0 1 data", _convolution("data", "first", features, 3)]
    layers += ["Split s0 1 3 first rest block x0_0"]
    last = "x0_0"
    for dense in range(3):
        # ncnn copies what several layers use.
        layers += [f"Split sd{dense} 1 6 {last} " + " ".join(f"d{dense}_{index}" for index in range(6))]
        outputs: list[str] = []
        for index in range(4):
            source = f"d{dense}_0"
            if outputs:
                joined = f"d{dense}_{index} " + " ".join(f"{name}_{index}" for name in outputs)
                source = f"j{dense}{index}"
                layers += [f"Concat {source} {len(outputs) + 1} 1 {joined} {source}"]
            name = f"g{dense}{index}"
            layers += [_convolution(source, name, growth, features + index * growth, _LEAKY)]
            layers += [f"Split s{name} 1 5 {name} " + " ".join(f"{name}_{copy}" for copy in range(5))]
            outputs.append(name)
        layers += [f"Concat j{dense} 5 1 d{dense}_4 " + " ".join(f"{name}_4" for name in outputs) + f" j{dense}"]
        layers += [_convolution(f"j{dense}", f"e{dense}", features, features + 4 * growth)]
        layers += [f"Eltwise r{dense} 2 1 e{dense} d{dense}_5 r{dense} 0=1 -23301=2,2.000000e-01,1.000000e+00"]
        last = f"r{dense}"
    layers += [f"Eltwise rr 2 1 {last} block rr 0=1 -23301=2,2.000000e-01,1.000000e+00"]
    layers += [_convolution("rr", "body", features, features), "BinaryOp sum 2 1 rest body sum"]
    layers += ["Interp u1 1 1 sum u1 0=1 1=2.000000e+00 2=2.000000e+00"]
    layers += [_convolution("u1", "up1", features, features, _LEAKY)]
    layers += ["Interp u2 1 1 up1 u2 0=1 1=2.000000e+00 2=2.000000e+00"]
    layers += [_convolution("u2", "up2", features, features, _LEAKY)]
    layers += [_convolution("up2", "hr", features, features, _LEAKY)]
    return [*layers, _convolution("hr", "output", 3, features)]
