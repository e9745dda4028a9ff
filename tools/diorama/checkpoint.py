"""Save and load weights as safetensors, in files below 16 MB."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

PIECE = 15_000_000  # bytes
# Where a model directory in diffusers' layout keeps what the checkpoints call by shorter names.
SHIPPED = {"high": "transformer", "low": "transformer_2", "text": "text_encoder"}


def save_weights(state: dict[str, Tensor], folder: Path, name: str, dtype: torch.dtype = torch.float32) -> None:
    """Write ``state`` to ``folder`` as ``name-0.safetensors``, ``name-1.safetensors``, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, value in state.items():
        tensor = value.detach().to(dtype).cpu().clone(memory_format=torch.contiguous_format)
        if size + tensor.nbytes > PIECE and pieces[-1]:
            pieces.append({})
            size = 0
        pieces[-1][key] = tensor
        size += tensor.nbytes
    for number, piece in enumerate(pieces):
        # Written aside and renamed, so that being stopped in between costs nothing.
        save_file(piece, folder / f"{name}.part")
        (folder / f"{name}.part").replace(folder / f"{name}-{number}.safetensors")
    for old in folder.glob(f"{name}-*.safetensors"):
        if int(old.stem.rpartition("-")[2]) >= len(pieces):
            old.unlink()


def _files(folder: Path, name: str) -> list[Path]:
    pieces = sorted(folder.glob(f"{name}-*.safetensors"))
    return pieces or sorted((folder / SHIPPED.get(name, name)).glob("*.safetensors"))


def has_weights(folder: Path | None, name: str) -> bool:
    """Whether ``folder`` holds weights called ``name``: a checkpoint's or a shipped model's."""
    return folder is not None and bool(_files(folder, name))


def read_weights(folder: Path, name: str) -> dict[str, Tensor]:
    """What ``save_weights`` wrote, or that part of a shipped model directory, in float32."""
    state: dict[str, Tensor] = {}
    for path in _files(folder, name):
        state.update({key: value.float() for key, value in load_file(path).items()})
    if "shared.weight" in state:  # transformers writes tied weights once
        state["encoder.embed_tokens.weight"] = state["shared.weight"]
    return state


def load_weights(module: nn.Module, folder: Path, name: str) -> None:
    """Load what ``read_weights`` returns."""
    with torch.no_grad():
        module.load_state_dict(read_weights(folder, name))
