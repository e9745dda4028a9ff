"""Entry point of a build's child process that rewrites models to opset 17 for TensorRT 8.6."""

from typing import Any
from unittest import mock

from runtime.engines import build
from runtime.engines.build import Job
from runtime.engines.builders.tensorrt import OnnxTensorRT, TensorRTBlocks
from runtime.engines.child import Report
from tests.gpu import tensorrt_8_6
from tests.gpu.opset17 import to_opset_17


def run_job(job: Job, report: Report) -> dict[str, Any]:
    """See `build.run_job`."""
    if not tensorrt_8_6.is_installed():
        return build.run_job(job, report)
    tensorrt_8_6.load()
    builders = {builder.name: builder(prepare=to_opset_17) for builder in (OnnxTensorRT, TensorRTBlocks)}
    with mock.patch.object(build, "BUILDERS", builders):
        return build.run_job(job, report)
