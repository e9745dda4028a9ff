"""Ray's processes on this machine: start them, see whether they run, and end them."""

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from runtime.core.errors import MachineError
from runtime.core.processes import kill_tree
from runtime.core.settings import ROOT

# Ray's names of what a node has: itself, and workers.
NODE, WORKERS = "tandem", "tandem-workers"
_SCRIPT = Path(__file__).with_name("ray_start.py")
# Shared memory of each machine. Files are sent in parts, so the amount does not depend on their size.
_OBJECT_STORE_BYTES = 160 << 20
_STARTED = "Ray runtime started"
_START_SECONDS = 120.0
_ENDING_SECONDS = 5.0
# Ray's log of a failed start, in a message.
_MOST_TEXT = 300
# Seconds until Ray takes a machine that does not answer for dead: period times failures.
_HEALTH = {"RAY_health_check_period_ms": "2000", "RAY_health_check_failure_threshold": "5"}


def check_installed() -> None:
    """Check that Ray is installed.

    Raises:
        MachineError: if not.
    """
    if importlib.util.find_spec("ray") is None:
        raise MachineError("server.cluster_no_ray")


def versions() -> dict[str, str]:
    """Return what all machines of a cluster must have in common: the versions of Tandem, Python and Ray."""
    from runtime import __version__

    python = ".".join(map(str, sys.version_info[:3]))
    return {"Tandem": __version__, "Python": python, "Ray": version("ray")}


def authenticate(key: str) -> None:
    """Have Ray require a key for every connection, in this process and all that it starts from now on."""
    os.environ.update(variables(key))


def variables(key: str) -> dict[str, str]:
    """Return the environment of Ray's processes."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": key,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        **_HEALTH,
    }


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class RayProcess:
    """Ray on this machine, which ends with this process. Close it when it is not needed any more.

    Args:
        arguments: of `ray start`.
        key: of the cluster.
        resources: of Ray, with amounts.

    Raises:
        MachineError: if Ray does not start.
    """

    def __init__(self, arguments: Mapping[str, str], key: str, resources: Mapping[str, float], cpus: int) -> None:
        # Ray lets everyone write to its own folder, so that is in one of this user's. The names are short: paths of
        # sockets have at most 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="tandem-ray-"))
        self._log = self._folder / "start.txt"
        flags = {
            **arguments,
            "include-log-monitor": "false",
            "num-cpus": str(cpus),
            "resources": json.dumps(resources),
            "object-store-memory": str(_OBJECT_STORE_BYTES),
            "temp-dir": str(self._folder / "r"),
            "log-color": "false",
        }
        command = [sys.executable, str(_SCRIPT)]
        command += [f"--{name}={value}" if value else f"--{name}" for name, value in flags.items()]
        environment = {**os.environ, **variables(key), "PYTHONPATH": os.pathsep.join([str(ROOT), *_python_path()])}
        with self._log.open("w", encoding="utf-8") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=ROOT,
                start_new_session=True,
            )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End Ray and all that it runs, and remove its files."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        kill_tree(self._process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self) -> None:
        end = time.monotonic() + _START_SECONDS
        while True:
            text = self._log.read_text(encoding="utf-8", errors="replace")
            if _STARTED in text:
                return
            if not self.alive or time.monotonic() > end:
                lines = [line.strip() for line in text.splitlines() if line.strip()]
                raise MachineError("server.cluster_ray_failed", output=" ".join(lines[-2:])[-_MOST_TEXT:])
            time.sleep(0.1)


def _python_path() -> list[str]:
    path = os.environ.get("PYTHONPATH", "")
    return path.split(os.pathsep) if path else []
