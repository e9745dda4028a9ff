"""Entry points of a build's child process that rewrites models to opset 17 for TensorRT 8.6."""

import sys
from pathlib import Path
from typing import Any
from unittest import mock

from runtime.engines import build
from runtime.engines.build import Job
from runtime.engines.builders import tensorrt
from runtime.engines.builders.tensorrt import OnnxTensorRT, TensorRTBlocks
from runtime.engines.child import Report
from tests.gpu import tensorrt_8_6
from tests.gpu.opset17 import float32_nodes, to_opset_17

# Not those that are compiled during the build.
_TACTIC_SOURCES = ("CUBLAS", "CUBLAS_LT", "CUDNN", "EDGE_MASK_CONVOLUTIONS")


def run_job(job: Job, report: Report) -> dict[str, Any]:
    """See `build.run_job`."""
    if not tensorrt_8_6.is_installed():
        return build.run_job(job, report)
    tensorrt_8_6.load()
    builders = {builder.name: builder(prepare=to_opset_17) for builder in (OnnxTensorRT, TensorRTBlocks)}
    with mock.patch.object(build, "BUILDERS", builders):
        return build.run_job(job, report)


def run_typed_job(job: Job, report: Report) -> dict[str, Any]:
    """Build in the precisions of the exported file, as later versions of TensorRT do: see `_keep_types`."""
    usual = tensorrt.prepare_build

    def prepare(trt: Any, logger: Any, model: Path) -> tuple[Any, Any, Any, Any]:
        builder, network, parser, config = usual(trt, logger, model)
        _keep_types(trt, network, config, float32_nodes(model))
        return builder, network, parser, config

    with mock.patch.object(tensorrt, "prepare_build", prepare):
        return run_job(job, report)


def _keep_types(trt: Any, network: Any, config: Any, float32: set[str]) -> None:
    """Let layers compute in the exported file's precision, and measure only kernels of that precision.

    8.6 by itself chooses float16 also for sums that overflow in it, and measures float32 kernels of every layer, which
    takes minutes for wide depthwise convolutions.

    Args:
        float32: names of the nodes that compute in float32.
    """
    heavy = (trt.LayerType.CONVOLUTION, trt.LayerType.MATRIX_MULTIPLY)
    counts = [0, 0]
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.name in float32:
            kind = trt.float32
        elif layer.type in heavy:
            kind = trt.float16
        else:
            continue
        counts[kind == trt.float16] += 1
        layer.precision = kind
        for output in range(layer.num_outputs):
            layer.set_output_type(output, kind)
    text = f"{counts[0]} layers in float32 of {len(float32)}, {counts[1]} in float16, {network.num_layers} in all\n"
    sys.stderr.write(text)
    config.set_flag(trt.BuilderFlag.PREFER_PRECISION_CONSTRAINTS)
    config.set_tactic_sources(sum(1 << int(getattr(trt.TacticSource, name)) for name in _TACTIC_SOURCES))
