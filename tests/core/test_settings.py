"""Settings: flags over environment over file, and a page that knows them all."""

import json
from pathlib import Path

import pytest

from runtime.core import settings
from runtime.core.errors import SettingsError
from runtime.core.request import COMPONENTS


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


def test_what_visitors_may_is_read(tmp_path: Path) -> None:
    environ = {"TANDEM_CACHE_DIR": str(tmp_path), "TANDEM_SHARE_SIZE": "832x480", "TANDEM_SHARE_RATE": "5"}
    loaded = settings.load({"share": True, "share_frames": "49", "share_queue": None}, environ)
    assert (loaded.share, loaded.share_size, loaded.share_rate) == (True, (832, 480), 5)
    assert (loaded.share_frames, loaded.share_steps, loaded.share_queue) == (49, None, 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TANDEM_SHARE_FRAMES", "0"),
        ("TANDEM_SHARE_FRAMES", "many"),
        ("TANDEM_SHARE_STEPS", "1001"),
        ("TANDEM_SHARE_SIZE", "832"),
        ("TANDEM_SHARE_SIZE", "0x480"),
        ("TANDEM_SHARE_SIZE", "99999x480"),
        ("TANDEM_SHARE_QUEUE", "-1"),
        ("TANDEM_SHARE_QUEUE_ALL", "1.5"),
        ("TANDEM_SHARE_RATE", "nan"),
        ("TANDEM_SHARE", "perhaps"),
    ],
)
def test_a_limit_that_cannot_be_is_refused(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=name):
        settings.load({}, {"TANDEM_CACHE_DIR": str(tmp_path), name: value})


def test_a_link_and_another_host_do_not_go_together(tmp_path: Path) -> None:
    environ = {"TANDEM_CACHE_DIR": str(tmp_path), "TANDEM_HOST": "0.0.0.0", "TANDEM_AUTH": "me:secret"}
    with pytest.raises(SettingsError, match="exclude each other"):
        settings.load({"share": True}, environ)


def test_nothing_is_fetched_if_tandem_or_all_programs_are_told_so(tmp_path: Path) -> None:
    environ = {"TANDEM_CACHE_DIR": str(tmp_path)}
    assert settings.load({}, environ).offline == ""
    assert settings.load({"offline": True}, environ).offline == "--offline"
    assert settings.load({}, environ | {"HF_HUB_OFFLINE": "1"}).offline == "HF_HUB_OFFLINE"
    # Tandem's own word goes before.
    assert settings.load({}, environ | {"HF_HUB_OFFLINE": "1", "TANDEM_OFFLINE": "0"}).offline == ""
    (tmp_path / "settings.json").write_text('{"offline": true}')
    assert settings.load({}, environ | {"HF_HUB_OFFLINE": "0"}).offline.endswith("settings.json")
    with pytest.raises(SettingsError, match="exclude each other"):
        settings.load({"share": True}, environ)
    assert settings.load({"share": True, "offline": False}, environ | {"HF_HUB_OFFLINE": "1"}).share


@pytest.mark.parametrize(
    ("address", "taken"),
    [
        ("https://hub.example", "https://hub.example"),
        (" https://hub.example:8443/a/b/ ", "https://hub.example:8443/a/b"),
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("http://[::1]:5000", "http://[::1]:5000"),
        ("http://192.168.0.2:5000", None),
        ("https://", None),
        ("https://a b", None),
        ("https://hub.example:99999", None),
        ("ftp://hub.example", None),
        ("https://token@hub.example", None),
        ("hub", None),
    ],
)
def test_a_hub_is_an_address_by_https_or_on_this_machine(tmp_path: Path, address: str, taken: str | None) -> None:
    environ = {"TANDEM_CACHE_DIR": str(tmp_path), "TANDEM_HUB": address, "HF_ENDPOINT": "https://other.example"}
    if taken is None:
        with pytest.raises(SettingsError, match="TANDEM_HUB"):
            settings.load({}, environ)
    else:
        assert settings.load({}, environ).hub == taken
    assert settings.load({}, {"TANDEM_CACHE_DIR": str(tmp_path), "HF_ENDPOINT": address}).hub == address


def test_engines_are_kept_where_and_as_large_as_asked(tmp_path: Path) -> None:
    environ = {"TANDEM_CACHE_DIR": str(tmp_path)}
    assert settings.load({}, environ).engines_dir == tmp_path / "engines"
    assert settings.load({}, environ).engine_cache_gb == 50
    (tmp_path / "settings.json").write_text(
        json.dumps({"engine_cache_gb": 2.5, "engine_cache_dir": str(tmp_path / "a")})
    )
    assert settings.load({}, environ).engine_cache_gb == 2.5
    assert settings.load({}, environ).engines_dir == tmp_path / "a"
    environ |= {"TENSORRT_CACHE_DIR": str(tmp_path / "b"), "TANDEM_ENGINE_CACHE_GB": "0"}
    assert settings.load({}, environ).engines_dir == tmp_path / "b"
    assert settings.load({}, environ).engine_cache_gb == 0
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("value", ["many", "-1", "nan", "inf", "1e999", "50GB"])
def test_a_size_that_cannot_be_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(SettingsError, match="TANDEM_ENGINE_CACHE_GB"):
        settings.load({}, {"TANDEM_CACHE_DIR": str(tmp_path), "TANDEM_ENGINE_CACHE_GB": value})


@pytest.mark.parametrize("name", ["file", "x" * 300, "~no-such-user/engines"])
def test_an_engine_folder_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    value = name if name.startswith("~") else str(tmp_path / name)
    with pytest.raises(SettingsError, match="TENSORRT_CACHE_DIR"):
        settings.load({}, {"TANDEM_CACHE_DIR": str(tmp_path), "TENSORRT_CACHE_DIR": value})


@pytest.mark.parametrize("name", [*settings.VARIABLES.values(), settings.CACHE_VARIABLE])
def test_every_variable_is_in_the_docs(name: str) -> None:
    assert f"`{name}`" in (settings.ROOT / "docs" / "settings.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("flags", "backends"),
    [
        ((False, False, False), {}),
        ((True, False, False), dict.fromkeys(COMPONENTS, "tensorrt")),
        ((True, True, False), {"text_encoder": "tensorrt"}),
        ((True, False, True), {"transformer": "tensorrt", "transformer_2": "tensorrt"}),
        ((True, True, True), dict.fromkeys(COMPONENTS[:3], "tensorrt")),
    ],
)
def test_launch_flags_preset_backends(tmp_path: Path, flags: tuple[bool, bool, bool], backends: dict[str, str]) -> None:
    enable, text_encoders, transformer = flags
    value = settings.tensorrt_from_flags(enable=enable, text_encoders=text_encoders, transformer=transformer)
    assert settings.load({"tensorrt": value}, {"TANDEM_CACHE_DIR": str(tmp_path)}).backends == backends


def test_a_part_on_tensorrt_needs_tensorrt_enabled() -> None:
    with pytest.raises(SettingsError, match="--tensorrt-transformer was given, but TensorRT is not enabled") as caught:
        settings.tensorrt_from_flags(enable=False, text_encoders=False, transformer=True)
    assert "--enable-tensorrt" in caught.value.remedy


@pytest.mark.parametrize(
    ("value", "parts"),
    [("none", ()), ("ALL", ("text-encoders", "transformer", "vae")), ("vae, transformer", ("transformer", "vae"))],
)
def test_parts_on_tensorrt_by_variable(tmp_path: Path, value: str, parts: tuple[str, ...]) -> None:
    environ = {"TANDEM_CACHE_DIR": str(tmp_path), "TANDEM_TENSORRT": value}
    assert settings.load({}, environ).tensorrt == parts


@pytest.mark.parametrize("value", ["yes", "all,vae", "unet", ",", "text_encoder"])
def test_parts_that_cannot_be_are_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(SettingsError, match="TANDEM_TENSORRT") as caught:
        settings.load({}, {"TANDEM_CACHE_DIR": str(tmp_path), "TANDEM_TENSORRT": value})
    assert "text-encoders" in caught.value.remedy


def test_a_settings_file_of_the_wrong_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(json.dumps({"tensorrt": True}))
    with pytest.raises(SettingsError, match=r"settings\.json is 'True'"):
        settings.load({}, {"TANDEM_CACHE_DIR": str(tmp_path)})
