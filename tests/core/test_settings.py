"""Settings: precedence, validation, and their documentation."""

import json
import sys
from pathlib import Path

import pytest

from runtime.core import settings
from runtime.core.errors import SettingsError
from runtime.core.request import COMPONENTS, FINISHERS


def test_flags_take_precedence_over_environment_over_file(tmp_path: Path) -> None:
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
    with pytest.raises(SettingsError) as refused:
        settings.load({}, environ)
    assert refused.value.code == "settings.host_without_password"
    assert settings.load({"auth": "me:s3cret:x"}, environ).auth == ("me", "s3cret:x")


def test_limits_for_visitors(tmp_path: Path) -> None:
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
def test_an_invalid_limit_is_refused(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(SettingsError) as refused:
        settings.load({}, {"TANDEM_CACHE_DIR": str(tmp_path), name: value})
    assert refused.value.data["source"] == name


def test_a_command_is_split_without_a_shell(tmp_path: Path) -> None:
    environ = {"TANDEM_CACHE_DIR": str(tmp_path)}
    assert settings.load({}, environ).on_done == ()
    (tmp_path / "settings.json").write_text(json.dumps({"on_done": ["copy it", "a'b"]}))
    assert settings.load({}, environ).on_done == ("copy it", "a'b")
    loaded = settings.load({}, environ | {"TANDEM_ON_DONE": '"my script" --to "a b" # $HOME;'})
    assert loaded.on_done == ("my script", "--to", "a b", "#", "$HOME;")
    assert settings.split_command("'my script' a", windows=False) == ["my script", "a"]
    windows = r'"C:\Program Files\copy.exe" C:\to it' "'s"
    assert settings.split_command(windows, windows=True) == [r"C:\Program Files\copy.exe", r"C:\to", "it's"]
    assert settings._is_batch_file("x.CMD .", windows=True) and not settings._is_batch_file("x.cmd", windows=False)
    for wrong in ('"open', '""', 'a "b'):
        with pytest.raises(SettingsError) as refused:
            settings.load({}, environ | {"TANDEM_ON_DONE": wrong})
        assert (refused.value.code, refused.value.data["source"]) == ("settings.not_a_command", "TANDEM_ON_DONE")
    for value in ([], [1], 5, ["a\0"], True, [["a"]]):
        (tmp_path / "settings.json").write_text(json.dumps({"on_done": value}))
        if value == []:
            assert settings.load({}, environ).on_done == ()
            continue
        with pytest.raises(SettingsError) as refused:
            settings.load({}, environ)
        assert refused.value.code == "settings.not_a_command"


def test_a_link_excludes_another_host(tmp_path: Path) -> None:
    environ = {"TANDEM_CACHE_DIR": str(tmp_path), "TANDEM_HOST": "0.0.0.0", "TANDEM_AUTH": "me:secret"}
    with pytest.raises(SettingsError) as refused:
        settings.load({"share": True}, environ)
    assert refused.value.code == "settings.share_with_host"


def test_downloads_are_disabled_by_tandem_or_huggingface_variables(tmp_path: Path) -> None:
    environ = {"TANDEM_CACHE_DIR": str(tmp_path)}
    assert settings.load({}, environ).offline == ""
    assert settings.load({"offline": True}, environ).offline == "--offline"
    assert settings.load({}, environ | {"HF_HUB_OFFLINE": "1"}).offline == "HF_HUB_OFFLINE"
    # Tandem's own variable takes precedence.
    assert settings.load({}, environ | {"HF_HUB_OFFLINE": "1", "TANDEM_OFFLINE": "0"}).offline == ""
    (tmp_path / "settings.json").write_text('{"offline": true}')
    assert settings.load({}, environ | {"HF_HUB_OFFLINE": "0"}).offline.endswith("settings.json")
    with pytest.raises(SettingsError) as refused:
        settings.load({"share": True}, environ)
    assert refused.value.code == "settings.share_offline"
    assert settings.load({"share": True, "offline": False}, environ | {"HF_HUB_OFFLINE": "1"}).share


@pytest.mark.parametrize(
    ("address", "hub"),
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
def test_a_hub_needs_https_unless_it_is_on_this_machine(tmp_path: Path, address: str, hub: str | None) -> None:
    environ = {"TANDEM_CACHE_DIR": str(tmp_path), "TANDEM_HUB": address, "HF_ENDPOINT": "https://other.example"}
    if hub is None:
        with pytest.raises(SettingsError) as refused:
            settings.load({}, environ)
        codes = {"settings.hub_without_https", "settings.hub_with_password", "settings.not_a_hub"}
        assert refused.value.code in codes and refused.value.data["source"] == "TANDEM_HUB"
    else:
        assert settings.load({}, environ).hub == hub
    assert settings.load({}, {"TANDEM_CACHE_DIR": str(tmp_path), "HF_ENDPOINT": address}).hub == address


def test_folder_and_size_of_the_engine_library(tmp_path: Path) -> None:
    environ = {"TANDEM_CACHE_DIR": str(tmp_path)}
    assert settings.load({}, environ).engines_dir == tmp_path / "engines"
    assert settings.load({}, environ).engine_cache_gb == 50
    other = environ | {"FRAMEPACK_TENSORRT_CACHE_DIR": str(tmp_path / "c")}
    assert settings.load({}, other).engines_dir == tmp_path / "c"
    (tmp_path / "settings.json").write_text(
        json.dumps({"engine_cache_gb": 2.5, "engine_cache_dir": str(tmp_path / "a")})
    )
    assert settings.load({}, environ).engine_cache_gb == 2.5
    assert settings.load({}, environ).engines_dir == tmp_path / "a"
    environ |= {"FRAMEPACK_TENSORRT_CACHE_DIR": str(tmp_path / "c")}
    assert settings.load({}, environ).engines_dir == tmp_path / "a"
    environ |= {"TENSORRT_CACHE_DIR": str(tmp_path / "b"), "TANDEM_ENGINE_CACHE_GB": "0"}
    assert settings.load({}, environ).engines_dir == tmp_path / "b"
    assert settings.load({}, environ).engine_cache_gb == 0
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("value", ["many", "-1", "nan", "inf", "1e999", "50GB"])
def test_an_invalid_library_size_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(SettingsError) as refused:
        settings.load({}, {"TANDEM_CACHE_DIR": str(tmp_path), "TANDEM_ENGINE_CACHE_GB": value})
    assert refused.value.code == "settings.not_gigabytes"


@pytest.mark.parametrize("variable", ["TENSORRT_CACHE_DIR", "FRAMEPACK_TENSORRT_CACHE_DIR"])
@pytest.mark.parametrize(
    "name",
    ["file", "file/below", "x" * 300, *(["con", "a?/b"] if sys.platform == "win32" else ["~no-such-user/engines"])],
)
def test_an_invalid_engine_folder_is_refused(tmp_path: Path, name: str, variable: str) -> None:
    (tmp_path / "file").write_text("")
    value = name if name.startswith("~") else str(tmp_path / name)
    with pytest.raises(SettingsError) as refused:
        settings.load({}, {"TANDEM_CACHE_DIR": str(tmp_path), variable: value})
    assert (refused.value.code, refused.value.fact.data["source"]) == ("settings.not_a_folder", variable)


@pytest.mark.parametrize("name", [*settings.VARIABLES.values(), settings.CACHE_VARIABLE])
def test_every_variable_is_in_the_docs(name: str) -> None:
    assert f"`{name}`" in (settings.ROOT / "docs" / "settings.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("flags", "backends"),
    [
        ((False, False, False), {}),
        ((True, False, False), dict.fromkeys(COMPONENTS, "tensorrt")),
        (
            (True, True, False),
            dict.fromkeys(("text_encoder", "text_encoder_2", "connectors", "image_encoder"), "tensorrt"),
        ),
        ((True, False, True), {"transformer": "tensorrt", "transformer_2": "tensorrt"}),
        (
            (True, True, True),
            dict.fromkeys(
                {*COMPONENTS} - {"vae_encoder", "latent_upsampler", "vae", "audio_vae", "vocoder", *FINISHERS},
                "tensorrt",
            ),
        ),
    ],
)
def test_launch_flags_preset_backends(tmp_path: Path, flags: tuple[bool, bool, bool], backends: dict[str, str]) -> None:
    enable, text_encoders, transformer = flags
    value = settings.tensorrt_from_flags(enable=enable, text_encoders=text_encoders, transformer=transformer)
    assert settings.load({"tensorrt": value}, {"TANDEM_CACHE_DIR": str(tmp_path)}).backends == backends


def test_a_tensorrt_part_needs_enable_tensorrt() -> None:
    with pytest.raises(SettingsError) as caught:
        settings.tensorrt_from_flags(enable=False, text_encoders=False, transformer=True)
    assert caught.value.code == "settings.tensorrt_not_enabled"
    assert "--enable-tensorrt" in caught.value.remedy


@pytest.mark.parametrize(
    ("value", "parts"),
    [("none", ()), ("ALL", ("text-encoders", "transformer", "vae")), ("vae, transformer", ("transformer", "vae"))],
)
def test_tensorrt_parts_by_variable(tmp_path: Path, value: str, parts: tuple[str, ...]) -> None:
    environ = {"TANDEM_CACHE_DIR": str(tmp_path), "TANDEM_TENSORRT": value}
    assert settings.load({}, environ).tensorrt == parts


@pytest.mark.parametrize("value", ["yes", "all,vae", "unet", ",", "text_encoder"])
def test_unknown_tensorrt_parts_are_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(SettingsError) as caught:
        settings.load({}, {"TANDEM_CACHE_DIR": str(tmp_path), "TANDEM_TENSORRT": value})
    assert caught.value.code == "settings.tensorrt_invalid"
    assert "text-encoders" in caught.value.remedy


def test_a_settings_file_of_the_wrong_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(json.dumps({"tensorrt": True}))
    with pytest.raises(SettingsError, match=r"settings\.json is 'True'"):
        settings.load({}, {"TANDEM_CACHE_DIR": str(tmp_path)})


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"port": True}, "settings.not_a_count"),
        ({"port": 7000.5}, "settings.not_a_count"),
        ({"share_queue": True}, "settings.not_a_count"),
        ({"engine_cache_gb": [1]}, "settings.not_gigabytes"),
        ({"browser": "perhaps"}, "settings.not_a_switch"),
        ({"idle_builds": "perhaps"}, "settings.not_a_switch"),
        ({"offline": 3}, "settings.not_a_switch"),
        ({"auth": "me:"}, "settings.auth_invalid"),
        ({"auth": 5}, "settings.auth_invalid"),
        ({"host": " "}, "settings.empty"),
        ({"model": "a\x07b"}, "settings.empty"),
        ({"engine_cache_dir": 5}, "settings.not_a_folder"),
        ({"share_size": "832 by 480"}, "settings.not_a_size"),
        ({"hub": "hub"}, "settings.not_a_hub"),
        ({"prot": 1}, "settings.unknown"),
        ([], "settings.unknown"),
    ],
    ids=str,
)
def test_an_invalid_settings_file_is_refused_with_its_name(tmp_path: Path, values: object, code: str) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(values))
    with pytest.raises(SettingsError) as caught:
        settings.load({}, {"TANDEM_CACHE_DIR": str(tmp_path)})
    assert caught.value.code == code
    assert str(file) in (caught.value.data.get("source"), caught.value.data.get("file"))
    assert len(caught.value.what.splitlines()) == len(caught.value.remedy.splitlines()) == 1


def test_names_of_unknown_settings_are_shortened(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(json.dumps({f"{number}\n{'x' * 5000}": 1 for number in range(50)}))
    with pytest.raises(SettingsError) as caught:
        settings.load({}, {"TANDEM_CACHE_DIR": str(tmp_path)})
    assert "\n" not in caught.value.what
    assert len(caught.value.what) < 500 + len(str(tmp_path))


def test_a_password_is_not_changed(tmp_path: Path) -> None:
    environ = {"TANDEM_CACHE_DIR": str(tmp_path), "TANDEM_AUTH": "me: a:b "}
    assert settings.load({}, environ).auth == ("me", " a:b ")
