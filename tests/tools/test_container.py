"""The Dockerfile, .dockerignore and the manifests agree with each other and with what the installer installs."""

import re
from pathlib import Path

import pytest

from tools import check_container as container
from tools import setup_env

ROOT = Path(__file__).parents[2]
STAGES = container.stages(container.DOCKERFILE.read_text(encoding="utf-8"))
PATTERNS = container.ignore_patterns(container.IGNORED.read_text(encoding="utf-8"))
TEXT = container.DOCKERFILE.read_text(encoding="utf-8")


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    sources = [
        (origin, one) for stage in STAGES.values() for origin, many, _ in container.copies(stage) for one in many
    ]
    assert len(sources) > 6
    for origin, source in sources:
        if origin is not None:
            assert origin in STAGES
        else:
            assert (ROOT / source).exists(), source
            assert not container.is_ignored(source, PATTERNS), source


@pytest.mark.parametrize(
    ("path", "ignored"),
    [
        (".git/config", True),
        (".venv/bin/python", True),
        ("Cache/api_keys.json", True),
        (".env", True),
        ("tests/conftest.py", True),
        ("runtime/core/__pycache__/plan.cpython-311.pyc", True),
        ("runtime/core/plan.py", False),
        ("requirements-gpu.txt", False),
        ("app.py", False),
    ],
)
def test_only_what_is_needed_is_sent_to_a_build(path: str, ignored: bool) -> None:
    assert container.is_ignored(path, PATTERNS) is ignored


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_images_run_as_a_user_with_a_volume_and_a_health_check(target: str) -> None:
    steps = [step for stage in container.chain(STAGES, target) for step in stage.steps]
    last = dict(steps)
    assert last["USER"] == "tandem" and steps[-1][0] == "USER"
    assert last["VOLUME"] == "/opt/tandem/Cache" and "/healthz" in last["HEALTHCHECK"]
    assert [stage.name for stage in STAGES.values() if stage.base not in STAGES] == ["python"]
    assert re.fullmatch(r"debian:\d+\.\d+-slim", STAGES["python"].base)


def test_versions_are_the_installers() -> None:
    assert set(re.findall(r"torch={2,3}([\d.]+)", TEXT)) == {setup_env.TORCH}
    assert f"TORCH_INDEX={setup_env.CPU_INDEX}" in TEXT
    pinned = re.search(r"^ray\S*==(\S+)$", (ROOT / "requirements-cluster.txt").read_text("utf-8"), re.MULTILINE)
    manifest = (ROOT / "deploy" / "kuberay.yaml").read_text(encoding="utf-8")
    assert pinned is not None and f'rayVersion: "{pinned[1]}"' in manifest
