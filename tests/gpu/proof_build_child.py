"""The child process of a build, as `build_child` is; for TensorRT 8.6 the model is rewritten to opset 17."""

from runtime.engines import build_child, builders
from runtime.engines.builders.onnx_tensorrt import OnnxTensorRT
from tests.gpu import tensorrt_8_6
from tests.gpu.opset17 import to_opset_17

if __name__ == "__main__":
    if tensorrt_8_6.is_installed():
        tensorrt_8_6.load()
        builders.BUILDERS = {"onnx_tensorrt": OnnxTensorRT(prepare=to_opset_17)}
    build_child.main()
