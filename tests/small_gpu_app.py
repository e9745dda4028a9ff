"""Run `app.py` as if the machine had a GPU with little memory. Plans can be viewed; nothing can run.

python -m tests.small_gpu_app FREE_GIB FLAGS...
"""

import sys

from runtime.machine import probe
from tests.plans import GPU_PACKAGES, gpu
from tests.plans import machine as described

if __name__ == "__main__":
    free_gib, *flags = sys.argv[1:]
    small = described(gpu=gpu(free_gib=float(free_gib)), torch_cuda="13.0", packages=GPU_PACKAGES)
    probe.probe = lambda *_: small
    from runtime.cli.main import main
    from runtime.queue.job_queue import JobQueue

    JobQueue.start_workers = lambda *_, **__: None  # type: ignore[method-assign] # they would import PyTorch in vain
    main(flags)
