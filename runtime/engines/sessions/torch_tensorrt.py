"""Runs a TensorRT plan that torch-tensorrt built: the same session, under the names of the program."""

import json
from collections.abc import Mapping
from pathlib import Path

from runtime.core.errors import EngineError
from runtime.engines.builders.torch_tensorrt import NAMES_FILE
from runtime.engines.sessions.tensorrt import TensorRTSession
from runtime.engines.tensorrt_library import REMEDY


class TorchTensorRTSession(TensorRTSession):
    """See `TensorRTSession`; the names of the plan's tensors are read from beside it."""

    def __init__(self, plan: Path, *, device: str, cuda_graphs: bool = True) -> None:
        names = read_names(plan.with_name(NAMES_FILE))
        super().__init__(plan, device=device, cuda_graphs=cuda_graphs, names=names)


def read_names(path: Path) -> Mapping[str, str]:
    """Return the program's name of each of the plan's tensors.

    Raises:
        EngineError: if the file is missing or not what the builder wrote.
    """
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{path.name} cannot be read: {error}.", REMEDY) from error
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise EngineError(f"{path.name} is not what the builder wrote.", REMEDY)
    return names
