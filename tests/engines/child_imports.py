"""What processes load that are forked in tests: they build or verify ONNX engines, or run jobs or a part of one."""

import gc
import importlib
import logging
import warnings

import torch
from tqdm import tqdm

for module in (
    "diffusers.schedulers.scheduling_unipc_multistep",
    "onnxruntime",
    "runtime.engines.build",
    "runtime.engines.imported.contract",
    "runtime.engines.programs",
    "runtime.execution.parallel.rank_process",
    "runtime.families.ltx2.components",
    "runtime.families.wan.components",
    "runtime.pipeline.run",
    "transformers.models.umt5.modeling_umt5",
):
    importlib.import_module(module)

# The exporter loads most of its modules and tables at its first use.
tqdm.monitor_interval = 0  # no thread, which would not be in a fork
logging.disable()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.onnx.export(torch.nn.Linear(1, 1), (torch.zeros(1, 1),), dynamo=True, verbose=False)
logging.disable(logging.NOTSET)

# Collections of garbage in the forks skip what was imported.
gc.collect()
gc.freeze()
