"""`--settings-of FILE`: the settings of a file that Tandem or another program wrote, as fields of a request."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.cli import terminal
from runtime.core.errors import OutputError
from runtime.core.facts import Fact, shortened
from runtime.core.request import FIELDS
from runtime.core.untrusted_files import BYTE_ORDER_MARK, MAX_JSON_BYTES, parse_json, read_file
from runtime.models.other_programs import JSON_FILE, OtherSettings, read_settings
from runtime.video.file_tags import read_tags


def settings_of(file: str) -> dict[str, Any]:
    """Return the fields of a request in a video, a PNG or a JSON file; print what was not taken.

    Raises:
        OutputError: if the file cannot be read or has no settings.
    """
    path = Path(file).expanduser()
    tags = _read_json(path) if path.suffix.lower() == ".json" else read_tags(path)
    request = _own_request(tags)
    found = OtherSettings("Tandem", request) if request is not None else read_settings(tags)
    if found is None:
        raise OutputError("cli.no_settings", file=path)
    found = found.checked()
    names = [FIELDS[name].label.lower() for name in found.values]
    terminal.line(str(Fact("cli.settings_taken", {"file": path.name, "program": found.program, "names": names})))
    if found.left_out:
        left_out = [f"{name} ({value})" for name, value in found.left_out]
        terminal.warning(str(Fact("cli.settings_left_out", {"names": left_out})))
    if found.model:
        data = {"theirs": shortened(found.model), "model": found.nearest_model}
        terminal.warning(str(Fact("cli.settings_model" if found.nearest_model else "cli.settings_model_unknown", data)))
    return found.values


def _read_json(path: Path) -> dict[str, str]:
    try:
        return {JSON_FILE: read_file(path, MAX_JSON_BYTES).removeprefix(BYTE_ORDER_MARK).decode()}
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise OutputError("video.unreadable_file", file=path, error=reason) from error


def _own_request(tags: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the request that Tandem has stored; `None` if there is none."""
    text = tags.get("comment", tags.get(JSON_FILE, ""))
    try:
        made = parse_json(text.encode())
    except ValueError:
        return None
    made = made.get("tandem", made) if isinstance(made, dict) else None
    request = made.get("request") if isinstance(made, dict) else None
    return {name: value for name, value in request.items() if value is not None} if isinstance(request, dict) else None
