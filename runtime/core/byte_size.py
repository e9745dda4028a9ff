"""Amounts of bytes as people say them."""

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def byte_size(count: int) -> str:
    """Return a number of bytes in the unit that suits it: "14.5 MB", "1.2 GB"."""
    unit = next((unit for unit in ("TB", "GB", "MB", "KB") if count >= UNITS[unit]), "B")
    return f"{count / UNITS[unit]:.1f} {unit}" if unit != "B" else f"{count} B"
