"""Machines of a cluster that run nothing, and why: in a file of the head, for the command `jobs`."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from runtime.core.facts import Fact, cut
from runtime.core.files import replace_file
from runtime.core.frozen import FrozenModel
from runtime.queue.instances import is_alive

_FILE = Path("cluster") / "problems.json"
_LONGEST = 40


class Problem(FrozenModel):
    """Why a machine's worker does not start, or why the machine was refused."""

    host: str
    fact: Fact


class Problems(FrozenModel):
    """The problems of a cluster, and the app that is its head."""

    head: str
    machines: tuple[Problem, ...] = ()

    def write(self, cache_dir: Path) -> None:
        """Replace the file; without problems, there is none. A folder that cannot be written is no error."""
        path = cache_dir / _FILE
        with suppress(OSError):
            if self.machines:
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, self.model_dump_json().encode())
            else:
                path.unlink(missing_ok=True)


def problems_of(cache_dir: Path, store_path: Path | None) -> Sequence[Problem]:
    """Return the problems of the cluster whose head runs with this cache folder; none without a head."""
    try:
        problems = Problems.model_validate_json((cache_dir / _FILE).read_bytes())
    except (OSError, ValidationError):  # there is none, or another version wrote it
        return ()
    return problems.machines if store_path is not None and is_alive(store_path, problems.head) else ()


def refusal(head_versions: Mapping[str, str], theirs: Mapping[str, str]) -> Fact | None:
    """Return why a machine may not join: its versions are not those of the head; `None` if it may.

    Args:
        theirs: by the same names; what it does not name is not compared.
    """
    differences = {
        name: theirs[name] for name in head_versions if theirs.get(name, head_versions[name]) != head_versions[name]
    }
    if not differences:
        return None
    text = ", ".join(f"{name} {cut(version, _LONGEST)}" for name, version in differences.items())
    return Fact(
        "server.cluster_refused",
        {"found": text, "wanted": ", ".join(f"{name} {head_versions[name]}" for name in differences)},
    )
