"""Logins: the check of user and password, and the limits of wrong attempts."""

import contextlib
import ipaddress
import secrets
from collections import deque
from collections.abc import Callable

# Wrong attempts in a minute: from one address, and from all.
_PER_ADDRESS = 10
_OVERALL = 100
_MINUTE = 60.0
# Beyond the overall limit: one address without a wrong attempt in the last minute, each second.
_NEXT_SECONDS = 1.0
# One customer of a provider has at least this network.
_IPV6_NETWORK = 64


def login_check(auth: tuple[str, str]) -> Callable[[str, str], bool]:
    """Return the function that checks a login. Its time depends on neither the user nor the password that is right."""
    expected = tuple(text.encode("utf-8", "surrogatepass") for text in auth)

    def check(user: str, password: str) -> bool:
        attempt = tuple(text.encode("utf-8", "surrogatepass") for text in (user, password))
        # Both are compared in any case.
        return all([secrets.compare_digest(actual, right) for actual, right in zip(attempt, expected, strict=True)])

    return check


def forwarded_address(forwarded_for: str) -> str | None:
    """Return the visitor's network in the header X-Forwarded-For of the tunnel; `None` if it has none.

    It is the last public address: the share server's own proxies append private ones, and what a visitor sends comes
    first.
    """
    for text in reversed(forwarded_for.split(",")):
        try:
            address = ipaddress.ip_address(text.strip())
        except ValueError:
            return None
        if address.is_global:
            return network_of(str(address))
    return None


def network_of(address: str) -> str:
    """Return an address as the limits count it: IPv6 by network."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    if ip.version == 4:  # noqa: PLR2004
        return str(ip)
    return str(ipaddress.ip_network((ip, _IPV6_NETWORK), strict=False))


class LoginLimits:
    """Limits wrong attempts to log in, by address if it is known and overall. Times are in seconds, ascending.

    The overall limit alone would let anybody lock out all others. Beyond it, an address that made no wrong attempt in
    the last minute may still try, one each second.
    """

    def __init__(self) -> None:
        self._wrong: deque[tuple[float, str | None]] = deque()
        self._let_through = float("-inf")

    def admits(self, address: str | None, now: float) -> bool:
        """Return whether an attempt may be made now. It counts as wrong until `right` is called.

        Args:
            address: see `network_of`; `None` if it is not known.
        """
        while self._wrong and now - self._wrong[0][0] >= _MINUTE:
            self._wrong.popleft()
        attempts = sum(source == address for _, source in self._wrong) if address is not None else 0
        if attempts >= _PER_ADDRESS:
            return False
        if len(self._wrong) >= _OVERALL:
            if attempts or now - self._let_through < _NEXT_SECONDS:
                return False
            self._let_through = now
        self._wrong.append((now, address))
        return True

    def right(self, address: str | None, now: float) -> None:
        """Take back the attempt that was admitted at `now`: it was right."""
        with contextlib.suppress(ValueError):  # more than a minute ago
            self._wrong.remove((now, address))
