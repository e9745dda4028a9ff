"""A page whose server has stopped says so, and goes on once it is back."""

import pytest

from tests.browser.conftest import OpenPage, ask, wait_for_state
from tests.served import make_cache, serving

pytestmark = pytest.mark.browser


def test_a_page_does_not_pretend(open_page: OpenPage, tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(make_cache(tmp_path_factory.mktemp("gone"))) as other:
        page = open_page(url=other.url)
        ask(page, "a red boat", long=True)
        page.click("#generate")
        wait_for_state(page, "running")
    page.wait_for_function("() => document.querySelector('#offline').textContent.includes('does not answer')")
    assert page.is_hidden("#status .line")
    assert page.input_value("#field-prompt textarea") == "a red boat"
