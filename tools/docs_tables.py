"""Update the tables of README.md and docs/ that follow from code: `python -m tools.docs_tables`.

They are the options of commands, what runs on which GPU, and the lines that are written by hand.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from runtime.cli.flags import PRESET_HELP, PRESETS, metavar
from runtime.core.request import FIELDS
from runtime.core.request_fields import Choice
from runtime.core.units import byte_size
from runtime.models.catalogue import KnownVariant, known_models
from runtime.models.variants import PublishedFile
from runtime.planner.variants import variant_bytes
from tools import card_fits

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
CARDS = ROOT / "docs" / "cards.md"
MODELS = ROOT / "docs" / "models.md"
COMMANDS = ROOT / "docs" / "commands.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
_OPTIONS = re.compile(r"(?<=<!-- options -->\n).*?(?=<!-- end of options -->)", re.DOTALL)
_VARIANTS = re.compile(r"(?<=<!-- variants -->\n).*?(?=<!-- end of variants -->)", re.DOTALL)
_CARD_TABLES = {"by card": card_fits.by_card, "by machine": card_fits.by_machine, "readme": card_fits.for_readme}
_CARDS = re.compile(r"(<!-- cards (?P<name>[a-z ]+) -->\n).*?(<!-- end of cards -->)", re.DOTALL)
# | part (`path`, `path`) | lines | reason |
_PART = re.compile(r"^\| (?P<part>[^|]*\((?P<paths>`[^|]+`)\)) \| (?P<lines>[\d,]+) \|", re.MULTILINE)


def with_options(page: str) -> str:
    """Return the text of docs/commands.md with the table of options as declared now."""
    rows = [("option", "what", "default"), ("---", "---", "---")]
    for declared in FIELDS.values():
        if declared.flag:
            name = declared.docs.partition(".")[0]
            link = f" See [{name}]({declared.docs})." if declared.docs else ""
            repeat = " Repeatable." if declared.repeatable else ""
            off = f", `{declared.off_flag}`" if isinstance(declared, Choice) and declared.off_flag else ""
            rows.append(
                (f"`{declared.flag} {metavar(declared)}`{off}", f"{declared.help}{repeat}{link}", declared.unset)
            )
    rows.append((f"`--preset {'|'.join(PRESETS)}`", PRESET_HELP, ""))
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows]
    return _OPTIONS.sub(lambda _: "".join(lines), page)


def with_cards(page: str) -> str:
    """Return the text of a page with the tables of what runs on which GPU as the planner forecasts it now."""
    return _CARDS.sub(lambda found: f"{found[1]}\n{_CARD_TABLES[found['name']]()}\n{found[3]}", page)


def with_variants(page: str) -> str:
    """Return the text of docs/models.md with the table of variants in the catalogue."""
    rows = [("model", "variant", "download", "transformers", "LoRA"), ("---", "---", "---:", "---", "---")]
    for model in known_models():
        for variant in model.variants:
            size, is_exact = variant_bytes(KnownVariant(model, variant))
            files = _names(list(variant.transformers.values()))
            loras = _names([lora.file for lora in variant.loras])
            name = f"`{variant.name}`: {variant.title}"
            size_text = byte_size(size) if is_exact else f"at most {byte_size(size)}"
            rows.append((f"`{model.name}`", name, size_text, files, loras or "–"))
    lines = ["| " + " | ".join(row) + " |\n" for row in rows]
    return _VARIANTS.sub(lambda _: "\n" + "".join(lines) + "\n", page)


def _names(files: Sequence[PublishedFile]) -> str:
    """Return the repository and the names of files, of which all are in one."""
    repositories = {file.repository for file in files}
    assert len(repositories) <= 1, "a row of the table has room for one repository"
    names = ", ".join(f"`{file.name}`" for file in files)
    return "".join(f"`{repository}`: {names}" for repository in repositories)


def hand_written(page: str) -> dict[str, tuple[int, int]]:
    """Return the lines that docs/architecture.md states for each part, and those counted now.

    Raises:
        FileNotFoundError: if a path of the table matches no file.
    """
    return {
        found["part"]: (int(found["lines"].replace(",", "")), _lines(re.findall(r"`([^`]+)`", found["paths"])))
        for found in _PART.finditer(page)
    }


def with_lines(page: str) -> str:
    """Return the text of docs/architecture.md with the lines counted now, rounded to tens."""
    counted = hand_written(page)
    return _PART.sub(lambda found: f"| {found['part']} | {round(counted[found['part']][1], -1):,} |", page)


def _lines(paths: Iterable[str]) -> int:
    """Count the lines of files, patterns and folders (ending in /), relative to runtime/ or to the repository."""
    total = 0
    for path in paths:
        base = ROOT if path.startswith("frontend_assets/") else ROOT / "runtime"
        files = list(base.glob(f"{path}**/*.py" if path.endswith("/") else path))
        if not files:
            raise FileNotFoundError(path)
        total += sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    return total


if __name__ == "__main__":
    for file, updated in (
        (COMMANDS, with_options),
        (ARCHITECTURE, with_lines),
        (CARDS, with_cards),
        (MODELS, with_variants),
        (README, with_cards),
    ):
        file.write_text(updated(file.read_text(encoding="utf-8")), encoding="utf-8")
