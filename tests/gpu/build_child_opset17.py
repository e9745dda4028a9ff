"""Entry point of a build's child process that rewrites models to opset 17 for TensorRT 8.6."""

from typing import Any

from runtime.engines import build_child, builders
from runtime.engines.build_child import Job
from runtime.engines.builders.onnx_tensorrt import OnnxTensorRT
from runtime.engines.child import Report
from tests.gpu import tensorrt_8_6
from tests.gpu.opset17 import to_opset_17


def run_job(job: Job, report: Report) -> dict[str, Any]:
    """See `build_child.run_job`."""
    if tensorrt_8_6.is_installed():
        tensorrt_8_6.load()
        builders.BUILDERS = {"onnx_tensorrt": OnnxTensorRT(prepare=to_opset_17)}
    return build_child.run_job(job, report)
