"""Amounts of bytes as people say them."""

_MIB, _GIB = 1 << 20, 1 << 30
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def byte_size(count: int) -> str:
    """Return a number of bytes in the unit that suits it: "14.5 MB", "1.2 GB"."""
    unit = next((unit for unit in ("TB", "GB", "MB", "KB") if count >= UNITS[unit]), "B")
    return f"{count / UNITS[unit]:.1f} {unit}" if unit != "B" else f"{count} B"


def memory_size(count: int) -> str:
    """Return bytes of memory in binary units, as memory is sold: "812 MiB", "3.4 GiB"."""
    return f"{count / _GIB:,.1f} GiB" if count >= _GIB else f"{count / _MIB:,.0f} MiB"
