"""Refusals on the command line: exit code 2, one line with the problem, one with the remedy, JSON, no traceback."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from runtime.cli.main import run


class Refusal(NamedTuple):
    """What a refused command has printed, and the code and data of its JSON."""

    what: str
    to_do: str
    code: str
    data: Mapping[str, Any]


def refused(arguments: Sequence[str], capsys: pytest.CaptureFixture[str], *, began: bool = False) -> Refusal:
    """Run a command that must be refused, and check its two lines against its JSON.

    Only a plan that is refused for memory has lines before them, with the memory strategies.

    Args:
        began: whether the command may have begun its work, whose lines come first.
    """
    capsys.readouterr()
    assert run([*arguments, "--json"]) == 2
    out, err = capsys.readouterr()
    *before, what, to_do = err.strip().splitlines()
    result = json.loads(out.strip().splitlines()[-1])
    error = result["error"]
    assert began or bool(before) == ("ladder" in result), err
    assert (what, to_do) == (f"Error: {error['what']}", f"To do: {error['remedy']}")
    assert len(to_do) > len("To do: ...")
    assert "Traceback" not in err
    assert error["defect"] is False
    return Refusal(what, to_do, error["code"], error["data"])


def check_refusals(
    cases: Iterable[tuple[Sequence[str], str, Mapping[str, Any]]],
    capsys: pytest.CaptureFixture[str],
    subtests: pytest.Subtests,
    command: Sequence[str] = (),
    *,
    began: bool = False,
) -> None:
    """Check the code of each case's refusal, and some of its data.

    Args:
        cases: arguments, code, data.
        command: what stands before the arguments.
        began: see `refused`.
    """
    for arguments, code, data in cases:
        with subtests.test(msg=ascii(" ".join(arguments))[:60]):
            found = refused([*command, *arguments], capsys, began=began)
            assert (found.code, {name: found.data.get(name) for name in data}) == (code, dict(data))
