"""One web app and one `serve` for all tests of this package, in the test process."""

from collections.abc import Iterator

import pytest

from tests.app_server import App, make_cache, serving_here


@pytest.fixture(scope="package")
def web_app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """The web app, which needs no login and no API key."""
    with serving_here(make_cache(tmp_path_factory.mktemp("web-app"))) as running:
        yield running


@pytest.fixture(scope="package")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """`serve`. It needs no API key until a test adds one; that test removes the file of keys."""
    with serving_here(make_cache(tmp_path_factory.mktemp("api")), page=False) as running:
        yield running
