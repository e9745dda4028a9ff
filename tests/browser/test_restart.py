"""Tandem is stopped while it generates a video and started again: the page shows the same job, which resumes."""

import json
import subprocess
import sys

import pytest

from tests.app_server import ROOT, environment, make_cache, serving
from tests.browser.conftest import OpenPage, ask, start, wait_for_state

pytestmark = pytest.mark.browser


def test_a_job_outlives_the_app(open_page: OpenPage, tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = make_cache(tmp_path_factory.mktemp("restart"))
    with serving(cache) as first:
        page = open_page(url=first.url)
        ask(page, "a red boat", long=True, steps=60)
        start(page)
        wait_for_state(page, "running")
        job = page.get_attribute("#status .status", "data-job")
    command = [sys.executable, "app.py", "jobs", "list", "--json"]
    listed = subprocess.run(
        command, cwd=ROOT, env=environment() | {"TANDEM_CACHE_DIR": str(cache)}, capture_output=True, check=True
    )
    assert [(one["id"], one["state"]) for one in json.loads(listed.stdout)["jobs"]] == [(job, "queued")]
    with serving(cache) as second:
        page = open_page(url=second.url)
        wait_for_state(page, "running", "done")
        assert page.get_attribute("#status .status", "data-job") == job
        wait_for_state(page, "done")
        assert "a red boat" in page.inner_text("#facts")
    assert len(list((cache / "outputs").iterdir())) == 1
