"""What children that build, import or verify ONNX engines load, for the fixture `forked_children`."""

import importlib
import logging
import warnings

import torch
from tqdm import tqdm

for module in ("onnxruntime", "runtime.engines.build", "runtime.engines.imported.contract", "runtime.engines.programs"):
    importlib.import_module(module)

# The exporter loads most of its modules and tables at its first use.
tqdm.monitor_interval = 0  # no thread, which would not be in a fork
logging.disable()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.onnx.export(torch.nn.Linear(1, 1), (torch.zeros(1, 1),), dynamo=True, verbose=False)
logging.disable(logging.NOTSET)
