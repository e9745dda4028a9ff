"""Writes the table of request options in docs/commands.md from their declarations: `python -m tools.request_table`."""

import re
from pathlib import Path

from runtime.cli.request_flags import PRESET_HELP, PRESETS, metavar
from runtime.core.request import FIELDS

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
_TABLE = re.compile(r"(?<=<!-- options -->\n).*?(?=<!-- end of options -->)", re.DOTALL)


def updated(page: str) -> str:
    """Return the text of docs/commands.md with the table of now."""
    rows = [("option", "what", "default"), ("---", "---", "---")]
    for declared in FIELDS.values():
        if declared.flag:
            name = declared.docs.partition(".")[0]
            link = f" See [{name}]({declared.docs})." if declared.docs else ""
            repeat = " Repeatable." if declared.repeatable else ""
            rows.append((f"`{declared.flag} {metavar(declared)}`", f"{declared.help}{repeat}{link}", declared.unset))
    rows.append((f"`--preset {'|'.join(PRESETS)}`", PRESET_HELP, ""))
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows]
    return _TABLE.sub(lambda _: "".join(lines), page)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
