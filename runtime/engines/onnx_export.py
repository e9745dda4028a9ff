"""Writes a program as ONNX: opset 18, external data where protobuf's 2 GB would not hold the weights."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import torch

from runtime.engines.io_signature import METADATA_KEY
from runtime.engines.programs import CACHE, Program
from runtime.planner.shapes import ShapeProfile

OPSET = 18
# A protobuf message ends at 2 GiB; the graph needs room beside the weights.
_MAX_INLINE_BYTES = 1_900_000_000
# In a graph every name is given once, so caches that go out are not called what those that come in are.
_NEW = "new_"
_MORE_THAN_ANY = 100
TENSOR_NAMES = {f"{_NEW}{CACHE}{index}": f"{CACHE}{index}" for index in range(_MORE_THAN_ANY)}


def export_onnx(program: Program, profile: ShapeProfile, path: Path, *, cut: bool = False) -> None:
    """Write `path`, and the weights beside it as `path` + ".data" where they are large.

    The file's tensors have the program's names, but for those in `TENSOR_NAMES`.

    Args:
        program: of any dtype and device; its tensors are the file's.
        profile: sizes are dynamic where its minimum and maximum differ.
        cut: whether the transformer's text is cut (`programs.cut_text`).

    Raises:
        torch.onnx.errors.OnnxExporterError: if torch has no translation for an operator.
    """
    edges = program.edges(profile, program.example(profile, cut=cut))
    large = sum(tensor.nbytes for tensor in program.module.state_dict().values()) > _MAX_INLINE_BYTES
    with _quiet():
        exported = torch.onnx.export(
            program.export(profile, cut=cut),
            dynamo=True,
            opset_version=OPSET,
            input_names=[edge.name for edge in edges.inputs],
            output_names=[_NEW + name if name.startswith(CACHE) else name for name in program.output_names],
            external_data=large,
            verbose=False,
        )
    assert exported is not None
    exported.model.metadata_props[METADATA_KEY] = edges.to_text()
    exported.save(path, external_data=large)


def check_structure(path: Path) -> None:
    """Check a file against the ONNX standard.

    Raises:
        onnx.checker.ValidationError: if it breaks it.
    """
    onnx.checker.check_model(str(path), full_check=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's remarks about packages that are not installed, and torch's about its own code, to itself."""
    exporter = logging.getLogger("torch.onnx")
    level = exporter.level
    exporter.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        exporter.setLevel(level)
