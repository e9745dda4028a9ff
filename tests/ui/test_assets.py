"""What lies in `frontend_assets/`: complete, readable in both schemes, and known to the shipped model."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.models.catalogue import folders
from runtime.ui import theme

READABLE, VISIBLE = 4.5, 3.0
PAIRS = (
    ("body_text_color", "body_background_fill"),
    ("body_text_color_subdued", "body_background_fill"),
    ("body_text_color_subdued", "background_fill_secondary"),
    ("block_info_text_color", "body_background_fill"),
    ("input_placeholder_color", "input_background_fill"),
    ("button_primary_text_color", "button_primary_background_fill"),
    ("button_primary_text_color_hover", "button_primary_background_fill_hover"),
    ("button_secondary_text_color", "button_secondary_background_fill"),
    ("checkbox_label_text_color_selected", "checkbox_label_background_fill_selected"),
    ("error_text_color", "error_background_fill"),
)
BORDERS = tuple(
    (border, ground)
    for border in (
        "input_border_color",
        "checkbox_border_color",
        "checkbox_label_border_color",
        "button_secondary_border_color",
    )
    for ground in ("body_background_fill", "input_background_fill")
)


def luminance(colour: str) -> float:
    """Return WCAG 2's relative luminance of #rrggbb."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def pairs() -> Iterator[tuple[str, str, str, float]]:
    for scheme in ("light", "dark"):
        for color, ground in PAIRS:
            yield scheme, color, ground, READABLE
        for color, ground in BORDERS:
            yield scheme, color, ground, VISIBLE


@pytest.mark.parametrize(("scheme", "color", "ground", "least"), list(pairs()))
def test_contrast_follows_wcag(scheme: str, color: str, ground: str, least: float) -> None:
    colors = json.loads((theme.ASSETS / "theme.json").read_text(encoding="utf-8"))[scheme]
    light, dark = sorted((luminance(colors[color]), luminance(colors[ground])), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= least


def test_assets_name_no_other_host() -> None:
    for path in filter(Path.is_file, theme.ASSETS.iterdir()):
        addresses = re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]+", path.read_text(encoding="utf-8"))
        assert [address for address in addresses if "www.w3.org" not in address] == [], path


def test_style_names_the_font_files_and_no_others() -> None:
    named = set(re.findall(r'url\("tandem/fonts/([^"]+)"\)', (theme.ASSETS / "style.css").read_text(encoding="utf-8")))
    assert named == {path.name for path in (theme.ASSETS / "fonts").glob("*.woff2")}


def test_the_theme_loads() -> None:
    assert theme.theme().body_background_fill == "#f6f1e7"
    assert "</style>" in theme.head()


def test_examples_use_words_that_the_shipped_model_knows() -> None:
    from transformers import AutoTokenizer

    shipped = folders(Path("none")).get("diorama")
    assert shipped is not None
    tokenizer = AutoTokenizer.from_pretrained(shipped / "tokenizer")
    for example in theme.examples():
        assert 0 < len(example["title"]) < 24
        assert tokenizer.unk_token_id not in tokenizer(example["prompt"]).input_ids, example["prompt"]
