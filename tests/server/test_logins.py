"""Logins: limits of wrong attempts, addresses behind the tunnel, and the check of user and password."""

import pytest

from runtime.server.logins import LoginLimits, forwarded_address, login_check, network_of


def test_wrong_attempts_of_one_address_do_not_shut_others_out() -> None:
    limits = LoginLimits()
    admitted = [limits.admits("9.9.9.9", second) for second in range(20)]
    assert admitted == [True] * 10 + [False] * 10
    assert limits.admits("1.1.1.1", 20)
    # Those of the first second are forgotten after a minute.
    assert not limits.admits("9.9.9.9", 59)
    assert limits.admits("9.9.9.9", 60)


def test_right_attempts_do_not_count() -> None:
    limits = LoginLimits()
    for second in range(500):
        assert limits.admits("9.9.9.9", second / 100)
        limits.right("9.9.9.9", second / 100)


def test_beyond_the_overall_limit_an_address_without_wrong_attempts_gets_through() -> None:
    limits = LoginLimits()
    for number in range(100):
        assert limits.admits(f"1.1.1.{number}", number / 10)
    assert limits.admits("2.2.2.2", 10)
    assert not limits.admits("2.2.2.3", 10.5)
    assert limits.admits("2.2.2.3", 11)
    for second in range(12, 50):
        assert not limits.admits("1.1.1.5", second)
        assert not limits.admits("2.2.2.2", second)
    assert limits.admits("1.1.1.5", 200)


def test_without_addresses_the_overall_limit_applies() -> None:
    limits = LoginLimits()
    assert all(limits.admits(None, number / 100) for number in range(100))
    assert limits.admits(None, 1)
    assert not limits.admits(None, 1.5)
    assert limits.admits(None, 2)


@pytest.mark.parametrize(
    ("header", "address"),
    [
        ("9.9.9.9", "9.9.9.9"),
        ("8.8.8.8, 9.9.9.9", "9.9.9.9"),
        ("8.8.8.8, 9.9.9.9, 10.0.0.1, 127.0.0.1", "9.9.9.9"),
        ("2a00:1450:4001:1:2:3:4:5", "2a00:1450:4001:1::/64"),
        ("10.0.0.1", None),
        ("", None),
        ("8.8.8.8, unknown", None),
        ("x" * 5000, None),
    ],
)
def test_the_last_public_address_is_the_visitors(header: str, address: str | None) -> None:
    assert forwarded_address(header) == address


def test_networks() -> None:
    assert network_of("192.168.1.5") == "192.168.1.5"
    assert network_of("2a00:1450:4001:1::1") == network_of("2a00:1450:4001:1:ffff::1")
    assert network_of("testclient") == "testclient"


@pytest.mark.parametrize(
    ("user", "password", "right"),
    [
        ("visitor", "tokaru-melisu", True),
        ("visitor", "tokaru-melis", False),
        ("visitor", "", False),
        ("visito", "tokaru-melisu", False),
        ("", "", False),
        ("vísitor", "tokaru-melisu", False),
        ("\ud800", "\ud800", False),
    ],
)
def test_user_and_password_are_compared_as_bytes(user: str, password: str, right: bool) -> None:
    assert login_check(("visitor", "tokaru-melisu"))(user, password) is right


def test_a_login_may_hold_any_characters() -> None:
    assert login_check(("jürgen", "пароль 密码"))("jürgen", "пароль 密码")


def test_both_parts_of_a_login_are_always_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    import secrets

    compared: list[bytes] = []
    compare = secrets.compare_digest

    def recorded(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return compare(one, other)

    monkeypatch.setattr(secrets, "compare_digest", recorded)
    assert not login_check(("visitor", "right"))("unknown", "wrong")
    assert compared == [b"unknown", b"wrong"]
