"""Job diagnostics for support: versions, machine, plan, events, and the end of the log.

Prompts and paths are left out by default.
"""

import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime import __version__
from runtime.core.request import PROMPT_SOURCES
from runtime.core.settings import ROOT
from runtime.core.untrusted_files import open_file
from runtime.machine.probe import Machine
from runtime.pipeline.files import slug
from runtime.queue.records import JobRecord
from runtime.queue.store import JobStore

_LOG_LINES = 60
_LOG_BYTES = 1 << 18
_REDACTED = "…"
_PRIVATE = ("prompt", *PROMPT_SOURCES, "negative_prompt")
# Data of facts that quotes the prompt; "what" is text of an earlier version, which may.
_PRIVATE_DATA = frozenset({"words", "what"})


def report(
    store: JobStore, job: JobRecord, machine: Machine, log_file: Path, cache_dir: Path, *, with_prompt: bool
) -> dict[str, Any]:
    """Return the diagnostics of a job as JSON types.

    Args:
        with_prompt: whether to include prompts and paths.
    """
    events = [{"n": n, "at": at, **event} for n, at, event in store.log.events(job.id)]
    report = {
        "id": job.id,
        "state": job.state,
        "held": job.held,
        "created": job.created,
        "started": job.started,
        "ended": job.ended,
        "request": dict(job.request),
        "plan": None if job.plan is None else job.plan.to_json(),
        "output": str(job.output),
        "result": None if job.saved is None else job.saved.model_dump(mode="json"),
        "failure": None if job.failure is None else job.failure.error_json(),
        "versions": {"tandem": __version__, "python": platform.python_version(), **dict(machine.packages)}
        | {"torch": machine.torch_version},
        "machine": {name: value for name, value in machine.to_json().items() if name != "packages"},
        "events": events,
        "log": _tail(log_file),
    }
    if with_prompt:
        return report
    # Default file names start with the prompt's first words.
    texts = [*(str(job.request.get(name) or "") for name in _PRIVATE), slug(job.prompt)]
    folders = [job.output.parent, cache_dir, ROOT, Path(sys.prefix), Path(sys.base_prefix), Path.home()]
    if job.plan is not None:
        texts += [job.plan.prompt, job.plan.negative_prompt, *(use.name for use in job.plan.inputs.values())]
        folders += [job.plan.model_directory, *(use.path.parent for use in job.plan.loras)]
    scrubbed: dict[str, Any] = scrub(report, texts, [str(folder) for folder in folders])
    for place in (scrubbed["request"], (scrubbed["result"] or {}).get("request", {})):
        for name in _PRIVATE:
            place.pop(name, None)
    return scrubbed


def scrub(value: Any, texts: Sequence[str], folders: Sequence[str]) -> Any:
    """Remove private texts, data of facts that quotes the prompt, and paths from JSON types.

    Args:
        texts: removed from all strings.
        folders: of paths below them only the file's name is kept.
    """
    whole = [re.compile(rf"(?<!\w){re.escape(text)}(?!\w)") for text in sorted(filter(None, texts), key=len)[::-1]]
    places = sorted({folder for folder in folders if len(folder) > 1}, key=len, reverse=True)
    path = (
        re.compile(f"(?:{'|'.join(map(re.escape, places))})" + rf"(?:[\w.@%+~ -]*[{re.escape(os.sep)}])*")
        if places
        else None
    )

    def clean(node: Any) -> Any:
        if isinstance(node, str):
            for text in whole:
                node = text.sub(_REDACTED, node)
            return node if path is None else path.sub(f"{_REDACTED}{os.sep}", node)
        if isinstance(node, Mapping):
            if node.keys() == {"code", "data"}:
                node = {**node, "data": {key: item for key, item in node["data"].items() if key not in _PRIVATE_DATA}}
            return {key: clean(item) for key, item in node.items()}
        if isinstance(node, list | tuple):
            return [clean(item) for item in node]
        return node

    return clean(value)


def _tail(log_file: Path) -> list[str]:
    try:
        with open_file(log_file) as file:
            file.seek(-min(_LOG_BYTES, os.fstat(file.fileno()).st_size), os.SEEK_END)
            return file.read(_LOG_BYTES).decode("utf-8", "replace").splitlines()[-_LOG_LINES:]
    except OSError:
        return []
