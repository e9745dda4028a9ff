"""Results in the format of `bench`, with invented values."""

from typing import Any


def spread(median: float, count: int = 3) -> dict[str, float]:
    """Return a spread of a tenth around a median."""
    return {"median": median, "low": 0.95 * median, "high": 1.05 * median, "count": count}


def configuration(name: str = "pytorch", seconds: float = 4.0, **changes: Any) -> dict[str, Any]:
    """Return a configuration that takes `seconds`."""
    shares = {"encode": 0.1, "denoise": 0.5, "decode": 0.3, "mux": 0.1, "total": 1.0}
    return {
        "name": name,
        "flags": "",
        "state": "measured",
        "why": "",
        "remedy": "",
        "runs_on": "PyTorch, float32",
        "request": {"prompt": "a red boat", "model": "diorama", "width": 64, "frames": 9, "steps": 4, "seed": 1},
        "plan": {},
        "runs": 3,
        "stages": {stage: spread(share * seconds) for stage, share in shares.items()},
        "step": spread(seconds / 8),
        "wall": spread(1.1 * seconds),
        "first": {"wall": 9.0, "load": 0.5, "timings": {"total": 8.0}},
        "load": spread(0.0),
        "build_seconds": 0.0,
        "engines": [],
        "memory": {"vram": {}, "gpu": {}, "ram": {"denoise": 1 << 28, "decode": 1 << 30}},
        "quality": None,
        "not_compared": "",
        "repeats": True,
        "warnings": [],
    } | changes


def failed(name: str, state: str = "failed", why: str = "It broke.") -> dict[str, Any]:
    """Return a configuration without measurements."""
    return configuration(name) | {
        "state": state,
        "why": why,
        "remedy": "Fix it.",
        "runs": 0,
        "stages": {},
        "step": None,
        "wall": None,
        "first": None,
        "load": None,
        "build_seconds": None,
    }


def result(*configurations: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a result; the first configuration is the reference."""
    return {
        "schema": 1,
        "kind": "bench",
        "created": "2026-11-21T12:00:00+00:00",
        "tandem": {"version": "0.1.0", "commit": "abc", "changed": False},
        "versions": {"torch": "2.13.0", "cuda": None},
        "machine": {"system": "Linux x86_64", "cpu": "Test CPU", "cores": 2, "gpus": []},
        "runs": 3,
        "warmup": 1,
        "together": True,
        "cancelled": False,
        "reference": configurations[0]["name"] if configurations else "",
        "reference_is": "PyTorch, float32",
        "noise_floor": None,
        "configurations": list(configurations),
    } | changes


def alike(psnr: float) -> dict[str, Any]:
    """Return how alike a clip is to the reference's."""
    return {"same": False, "psnr": psnr, "ssim": 0.99, "largest": 7}
