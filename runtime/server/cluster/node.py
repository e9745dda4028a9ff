"""A machine that joins the head of a cluster, and joins it again when the head was started again."""

import re
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Any

from runtime.core.errors import MachineError, TandemError
from runtime.core.processes import stop_on_signals
from runtime.core.settings import Settings
from runtime.core.untrusted_files import parse_json
from runtime.machine.probe import probe
from runtime.server.cluster.cluster_key import given_key
from runtime.server.cluster.ray_process import NODE, WORKERS, RayProcess, check_installed, versions

_ADDRESS = re.compile(r"(?:http://)?(\[[0-9a-fA-F:.]+\]|[\w.-]+):([0-9]{1,5})/?", re.ASCII)
_ANSWER_SECONDS = 5.0
_POLL_SECONDS = 1.0
# Answers that the head may miss before its Ray is taken for dead.
_MOST_MISSED = 5
_LEAST_DELAY, _MOST_DELAY = 1.0, 30.0
_UNAUTHORIZED = 401
_MOST_BYTES = 10_000


def join(address: str, settings: Settings, gpus: int, show: Callable[[str], None]) -> int:
    """Join a head until Ctrl-C or SIGTERM, again whenever the head was started again; return how often it was joined.

    Args:
        address: of the head's API, HOST:PORT.
        gpus: GPUs of one worker.
        show: called with lines for people.

    Raises:
        MachineError: if Ray is missing, or the head cannot be joined the first time.
        SettingsError: if there is no key.
    """
    check_installed()
    key = given_key(settings.cache_dir)
    count = len(probe().gpus)
    if count % gpus and gpus > 1:
        raise MachineError("server.cluster_gpus", count=count, size=gpus)
    joined, delay = 0, _LEAST_DELAY
    with stop_on_signals() as stop:
        while not stop.is_set():
            try:
                answer = ask(address, key)
                check_versions(answer)
                ray = _start(address, key, answer, count, gpus)
            except TandemError as error:
                if not joined:
                    raise
                show(f"{error} Next attempt in {delay:.0f} s.")
                stop.wait(delay)
                delay = min(2 * delay, _MOST_DELAY)
                continue
            joined, delay = joined + 1, _LEAST_DELAY
            show(f"Joined the head at {address}. Ctrl-C leaves it.")
            try:
                _wait(address, key, answer, ray, stop)
            finally:
                ray.close()
            if not stop.is_set():
                show("The head is gone or was started again.")
    return joined


def ask(address: str, key: str) -> dict[str, Any]:
    """Return how to join a head.

    Raises:
        MachineError: if it cannot be reached, does not accept the key, or is no head.
    """
    host, port = _parts_of(address)
    # With the name and the versions of this machine, so that the head can show why it does not join.
    query = urllib.parse.urlencode({"host": socket.gethostname(), **versions()})
    request = urllib.request.Request(
        f"http://{host}:{port}/v1/cluster/join?{query}", headers={"Authorization": f"Bearer {key}"}
    )
    # The key is for the head only, not for a proxy of the environment.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_ANSWER_SECONDS) as response:
            answer = parse_json(response.read(_MOST_BYTES))
        if not isinstance(answer["port"], int) or not isinstance(answer["versions"], dict):
            raise TypeError
    except urllib.error.HTTPError as error:
        with error:
            code = "server.cluster_key_wrong" if error.code == _UNAUTHORIZED else "server.cluster_not_a_head"
        raise MachineError(code, address=address) from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise MachineError("server.cluster_unreachable", address=address, error=str(reason)) from error
    except (ValueError, TypeError, LookupError, HTTPException) as error:
        raise MachineError("server.cluster_not_a_head", address=address) from error
    return dict(answer)


def _parts_of(address: str) -> tuple[str, str]:
    """Return the host and the port of an address.

    Raises:
        MachineError: if it has another form.
    """
    match = _ADDRESS.fullmatch(address.strip())
    if match is None:
        raise MachineError("server.cluster_address", address=address[:80])
    return match[1], match[2]


def check_versions(answer: Mapping[str, Any]) -> None:
    """Check that this machine has the versions of the head.

    Raises:
        MachineError: if not.
    """
    for name, version in versions().items():
        theirs = str(answer["versions"].get(name, "?"))[:40]
        if theirs != version:
            raise MachineError("server.cluster_version", name=name, theirs=theirs, own=version)


def _start(address: str, key: str, answer: Mapping[str, Any], count: int, gpus: int) -> RayProcess:
    host, _ = _parts_of(address)
    arguments = {"address": f"{host}:{answer['port']}", "num-gpus": str(count)}
    return RayProcess(arguments, key, {NODE: 1, WORKERS: max(count // gpus, 1)}, cpus=1)


def _wait(address: str, key: str, joined: Mapping[str, Any], ray: RayProcess, stop: threading.Event) -> None:
    """Return when Ray ended here, or the head is gone or was started again."""
    missed = 0
    while ray.alive and missed < _MOST_MISSED and not stop.wait(_POLL_SECONDS):
        try:
            answer = ask(address, key)
        except MachineError:
            missed += 1
            continue
        missed = 0
        if answer.get("session") != joined.get("session"):
            return
