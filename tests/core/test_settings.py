"""Settings: flags over environment over file, and a README that knows them all."""

import json
from pathlib import Path

import pytest

from runtime.core import settings
from runtime.core.errors import SettingsError


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    environ = {"TANDEM_CACHE_DIR": str(tmp_path)}
    assert settings.load({}, environ).port == 7860
    (tmp_path / "settings.json").write_text(json.dumps({"port": 7001, "browser": False}))
    assert settings.load({}, environ).port == 7001
    assert settings.load({}, environ).browser is False
    environ["TANDEM_PORT"] = "7002"
    assert settings.load({"port": None}, environ).port == 7002
    assert settings.load({"port": "7003"}, environ).port == 7003


def test_other_machines_need_a_password(tmp_path: Path) -> None:
    environ = {"TANDEM_CACHE_DIR": str(tmp_path), "TANDEM_HOST": "0.0.0.0"}
    with pytest.raises(SettingsError, match="password"):
        settings.load({}, environ)
    assert settings.load({"auth": "me:s3cret:x"}, environ).auth == ("me", "s3cret:x")


@pytest.mark.parametrize("name", [*settings.VARIABLES.values(), settings.CACHE_VARIABLE])
def test_every_variable_is_in_the_readme(name: str) -> None:
    assert name in (settings.ROOT / "README.md").read_text(encoding="utf-8")
