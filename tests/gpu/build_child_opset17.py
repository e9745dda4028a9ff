"""Entry point of a build's child process that rewrites models to opset 17 for TensorRT 8.6."""

from typing import Any
from unittest import mock

from runtime.engines import build
from runtime.engines.build import Job
from runtime.engines.builders.tensorrt import OnnxTensorRT
from runtime.engines.child import Report
from tests.gpu import tensorrt_8_6
from tests.gpu.opset17 import to_opset_17


def run_job(job: Job, report: Report) -> dict[str, Any]:
    """See `build.run_job`."""
    if not tensorrt_8_6.is_installed():
        return build.run_job(job, report)
    tensorrt_8_6.load()
    with mock.patch.object(build, "BUILDERS", {"onnx_tensorrt": OnnxTensorRT(prepare=to_opset_17)}):
        return build.run_job(job, report)
