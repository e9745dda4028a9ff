"""What `models.hub.client` relies on in huggingface_hub and its HTTP library; each test names what changed."""

import huggingface_hub
import pytest
from huggingface_hub import errors, utils

from runtime.models.hub import client

# The session is an httpx client: `TimeoutException` and the others are recognized by these names.
HTTP_ERRORS = ("TimeoutException", "ConnectError", "TransportError", "TooManyRedirects", "InvalidURL", "DecodingError")


@pytest.mark.parametrize("name", ["HfApi", "ModelInfo", "get_session", "hf_hub_url", "hf_raise_for_status"])
def test_the_library_exports(name: str) -> None:
    assert name in huggingface_hub.__all__


@pytest.mark.parametrize("name", ["build_hf_headers", "parse_ratelimit_headers"])
def test_the_librarys_utilities_exist(name: str) -> None:
    assert callable(getattr(utils, name))


@pytest.mark.parametrize(
    "name",
    ["GatedRepoError", "HfHubHTTPError", "OfflineModeIsEnabled", "RepositoryNotFoundError", "RevisionNotFoundError"],
)
def test_the_librarys_errors_exist(name: str) -> None:
    assert issubclass(getattr(errors, name), Exception)


@pytest.mark.parametrize("name", HTTP_ERRORS)
def test_the_http_librarys_errors_have_these_names(name: str) -> None:
    package = __import__(type(huggingface_hub.get_session()).__module__.partition(".")[0])
    assert issubclass(getattr(package, name), Exception)


def test_the_session_runs_response_hooks_before_it_follows_a_redirect() -> None:
    session = client._session()
    assert client._check_redirect in session.event_hooks["response"]
    assert client._session() is session
    assert session.event_hooks["response"].count(client._check_redirect) == 1
