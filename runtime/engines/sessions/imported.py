"""Runs an imported engine through its adapters, with the tensors of the program that it replaces."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from runtime.core.errors import EngineError, first_line
from runtime.core.facts import Fact
from runtime.core.untrusted_files import read_json
from runtime.engines.imported.adapters import Adapter, Batch, RestoredRows, adapters_from_json
from runtime.engines.imported.contract import Contract
from runtime.engines.imported.matching import ADAPTERS_FILE
from runtime.engines.manifest import Content
from runtime.engines.sessions import Session, Weights
from runtime.engines.sessions.onnxruntime import OUT_OF_MEMORY, load_session, model_of
from runtime.engines.verify import Case, Verification, compare
from runtime.planner.choice.engine_index import EngineRecord


class AdaptedSession(Session):
    """An engine with its adapters. A larger batch is run in several calls.

    Args:
        inner: the engine with its own tensors.
        batch: the engine's batch size.
        adapters: in the order in which inputs pass them.
    """

    def __init__(self, inner: Session, batch: Batch, adapters: tuple[Adapter, ...]) -> None:
        self._inner = inner
        self._batch = batch
        self._adapters = adapters
        self.context_bytes = inner.context_bytes

    def release(self) -> None:
        self._inner.release()

    def close(self) -> None:
        self._inner.close()

    @property
    def restored(self) -> RestoredRows | None:
        """The adapter that reconstructs missing outputs, if there is one."""
        return next((adapter for adapter in self._adapters if isinstance(adapter, RestoredRows)), None)

    def unrestored(self) -> "AdaptedSession":
        """Return a session on the same engine without that adapter, for comparison. Do not close it."""
        adapters = tuple(adapter for adapter in self._adapters if adapter is not self.restored)
        return AdaptedSession(self._inner, self._batch, adapters)

    @torch.inference_mode()
    def infer(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        count = max(len(tensor) for tensor in inputs.values())
        calls = self._batch.split(inputs)
        if len(calls) == 1:
            outputs = self._call(calls[0])
            return outputs if count == self._batch.size else self._batch.join([outputs], count)
        # The engine reuses its buffers, so each call's outputs are copied.
        results = [{name: tensor.clone() for name, tensor in self._call(call).items()} for call in calls]
        return self._batch.join(results, count)

    def _call(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        original = []
        for adapter in self._adapters:
            original.append(inputs)
            inputs = adapter.preprocess(inputs)
        outputs: dict[str, torch.Tensor] = self._inner.infer(**inputs)
        for adapter, before in zip(reversed(self._adapters), reversed(original), strict=True):
            outputs = adapter.postprocess(outputs, before)
        return outputs


class OnnxFileSession(Session):
    """An ONNX file with its own tensor names and dtypes; tensors pass through host memory."""

    def __init__(self, model: Path | bytes, contract: Contract, *, provider: str, precision: str, device: str) -> None:
        self._session: Any = load_session(model, provider=provider, precision=precision, device=torch.device(device))
        self._types = {port.name: getattr(torch, port.dtype) for port in contract.inputs}
        self._names = [port.name for port in contract.outputs]
        self._device = torch.device(device)

    def close(self) -> None:
        self._session = None

    def infer(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        arrays = {name: tensor.to("cpu", self._types[name]).contiguous().numpy() for name, tensor in inputs.items()}
        try:
            outputs = self._session.run(self._names, arrays)
        except Exception as error:  # ONNX Runtime's errors derive from Exception
            if OUT_OF_MEMORY in str(error):
                raise MemoryError(str(error)) from error
            raise EngineError("engine.failed", error=first_line(error)[:300]) from error
        return {
            name: torch.from_numpy(output).to(self._device) for name, output in zip(self._names, outputs, strict=True)
        }


def open_engine(
    folder: Path, record: EngineRecord, content: Content, *, device: str, weights: Weights
) -> AdaptedSession:
    """See `sessions.open_session`."""
    contract, batch, chain = read_adapters(folder)
    inner: Session
    if contract.backend == "tensorrt":
        from runtime.engines.sessions.tensorrt import TensorRTSession, uses_cuda_graphs

        inner = TensorRTSession(content, device=device, cuda_graphs=uses_cuda_graphs(record))
    else:
        provider = dict(record.key.options).get("provider", "cpu")
        model = model_of(folder, record, content)
        inner = OnnxFileSession(model, contract, provider=provider, precision=record.key.precision, device=device)
    return AdaptedSession(inner, batch, chain)


def read_adapters(folder: Path) -> tuple[Contract, Batch, tuple[Adapter, ...]]:
    """Return the contract, batch and adapters that were chosen at import.

    Raises:
        EngineError: if the file is missing or damaged.
    """
    try:
        value = read_json(folder / ADAPTERS_FILE)
        chain = adapters_from_json(value["adapters"])
        return Contract.from_json(value["contract"]), Batch(int(value["batch"])), chain
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError("engine.adapters_damaged", file=ADAPTERS_FILE, error=first_line(error)) from error


def compare_imported(session: Session, cases: Sequence[Case], program: str, precision: str) -> Verification:
    """Compare an imported engine with PyTorch; see `verify.compare`.

    Rows that an adapter reconstructs have no tolerance; the result states how far they are off.
    """
    restored = session.restored if isinstance(session, AdaptedSession) else None
    if restored is None or not isinstance(session, AdaptedSession):
        return compare(session, cases, program, precision)
    verification = compare(session.unrestored(), [_without(case, restored) for case in cases], program, precision)
    if math.isnan(verification.error):
        return verification
    error = max(_restored_error(session, case, restored) for case in cases if case.required)
    return replace(
        verification,
        detail=Fact(
            "engine.compared_restored", {"compared": verification.detail, "edge": restored.edge, "error": error}
        ),
    )


def _without(case: Case, missing: RestoredRows) -> Case:
    """Return a case without the rows and columns that an engine does not output."""
    if case.expected is None:
        return case
    height, width = _computed_size(case.expected["velocity"], missing)
    return case._replace(expected={"velocity": case.expected["velocity"][..., :height, :width]})


def _restored_error(session: AdaptedSession, case: Case, missing: RestoredRows) -> float:
    """Return the relative error of the reconstructed rows and columns."""
    assert case.expected is not None
    expected = case.expected["velocity"]
    height, width = _computed_size(expected, missing)
    difference, strip = session.infer(**case.inputs)["velocity"].to(expected) - expected, expected.clone()
    # Only the reconstructed part counts.
    for tensor in (difference, strip):
        tensor[..., :height, :width] = 0.0
    return float(difference.norm() / strip.norm())


def _computed_size(velocity: torch.Tensor, missing: RestoredRows) -> tuple[int, int]:
    return velocity.shape[-2] - missing.rows, velocity.shape[-1] - missing.columns
