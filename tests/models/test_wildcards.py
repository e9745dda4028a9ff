"""Lists of prompt templates: files of the cache folder."""

from pathlib import Path

import pytest

from runtime.core.errors import InvalidRequestError
from runtime.core.request import AUTO, GenerationRequest
from runtime.models.wildcards import with_prompt


def request(prompt: str, **changes: object) -> GenerationRequest:
    return GenerationRequest.from_mapping({"prompt": prompt, "seed": 1, **changes})


def test_a_template_becomes_the_prompt_once(tmp_path: Path) -> None:
    folder = tmp_path / "wildcards" / "sea"
    folder.mkdir(parents=True)
    (folder / "places.txt").write_bytes("\ufeff# places\n\n  am grünen Kai \r\n".encode())
    made = with_prompt(request("a boat __sea/places__"), tmp_path)
    assert (made.prompt, made.template, made.seed) == ("a boat am grünen Kai", "a boat __sea/places__", 1)
    # As it is stored: the list may change, and the prompt may look like a template.
    (folder / "places.txt").unlink()
    assert with_prompt(made.replace(prompt="{a|b}"), tmp_path).prompt == "{a|b}"


def test_a_random_seed_is_drawn_for_a_template_only(tmp_path: Path) -> None:
    assert with_prompt(request("a {b} boat", seed=AUTO), tmp_path).seed == AUTO
    drawn = {with_prompt(request("a {b|c} boat", seed=AUTO), tmp_path).seed for _ in range(2)}
    assert len(drawn) == 2 and AUTO not in drawn


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, "request.list_missing"),
        (b"\n# nothing\n", "request.list_empty"),
        (b"\xff", "request.list_unreadable"),
        (b"a" * (5 << 20), "request.list_too_large"),
        (b"a" * 6_000, "request.text_too_long"),
        (b"a\x07b", "request.control_character"),
    ],
)
def test_lists_that_cannot_be_used_are_refused(tmp_path: Path, content: bytes | None, code: str) -> None:
    path = tmp_path / "wildcards" / "colors.txt"
    path.parent.mkdir()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidRequestError) as refused:
        with_prompt(request("__colors__"), tmp_path)
    assert (refused.value.field, refused.value.code) == ("prompt", code)


def test_lists_are_inside_their_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    for prompt in ("__../secret__", "__/etc/passwd__", "__..\\secret__", f"__{tmp_path}/secret__"):
        try:
            assert with_prompt(request(prompt), tmp_path).prompt == prompt
        except InvalidRequestError as error:
            assert error.code == "request.list_missing"
