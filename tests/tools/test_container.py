"""The Dockerfile, .dockerignore and the manifests agree with each other and with what the installer installs."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from runtime.cli.main import app
from runtime.core.settings import Settings
from tools import check_container as container
from tools import setup_env

ROOT = Path(__file__).parents[2]
STAGES = container.stages(container.DOCKERFILE.read_text(encoding="utf-8"))
PATTERNS = container.ignore_patterns(container.IGNORED.read_text(encoding="utf-8"))
PORT = Settings.model_fields["port"].default
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


def _containers(text: str) -> Iterator[tuple[list[str], set[str]]]:
    """Return the arguments and the environment variables of each container of a manifest or of Compose's services."""
    for part in yaml.safe_load_all(text):
        for service in part.get("services", {}).values():
            yield service.get("command", ["--host", "0.0.0.0"]), set(service.get("environment", {}))
        for one in part["spec"]["template"]["spec"]["containers"] if part.get("kind") == "Deployment" else ():
            names = {given["name"] for given in one.get("env", ())}
            yield one["args"], names | ({"TANDEM_AUTH", "TANDEM_CLUSTER_KEY"} if "envFrom" in one else set())


def _parsed(command: Any, arguments: list[str]) -> dict[str, Any]:
    """Return the values of a command line's last command, by name; unknown commands and flags are errors."""
    context = command.make_context(command.name, [*arguments])
    rest = [*context._protected_args, *context.args]
    found: dict[str, Any] = context.params
    return _parsed(command.commands[rest[0]], rest[1:]) if rest else found


@pytest.mark.parametrize("file", ["compose.yaml", "deploy/kubernetes.yaml"])
def test_commands_ports_and_variables_are_those_of_the_command_line(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    joined = []
    for arguments, variables in _containers(text):
        given = _parsed(typer.main.get_command(app), arguments)
        if "join" in given:
            joined.append(given["join"].rpartition(":")[2])
            assert variables == {"TANDEM_CLUSTER_KEY"}
        else:
            assert given["host"] == "0.0.0.0" and given.get("port") is None
    assert joined == [str(PORT)]
    assert set(re.findall(r"\b(?:containerPort|port): (\d+)", text)) <= {str(PORT)}
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "runtime").rglob("*.py"))
    for variable in set(re.findall(r"TANDEM_\w+", text)) - {"TANDEM_TARGET"}:
        assert f'"{variable}"' in source


def test_pods_run_as_the_images_user() -> None:
    (user,) = re.findall(r"useradd .*--uid[= ](\d+)", TEXT)
    for part in yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text(encoding="utf-8")):
        if part["kind"] == "Deployment":
            context = part["spec"]["template"]["spec"]["securityContext"]
            assert context["runAsNonRoot"] and context["runAsUser"] == context["fsGroup"] == int(user)
            volumes = {one["name"] for one in part["spec"]["template"]["spec"]["volumes"]}
            (one,) = part["spec"]["template"]["spec"]["containers"]
            assert {mount["name"] for mount in one["volumeMounts"]} == volumes
            assert one["securityContext"]["readOnlyRootFilesystem"]
