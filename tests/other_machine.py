"""`app.py` on a machine with a GPU of little memory: what the page says of it is planned, and nothing of it is run.

python -m tests.other_machine FREE_GIB FLAGS...
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

    main(flags)
