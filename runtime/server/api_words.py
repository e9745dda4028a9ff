"""Names of settings in messages for programs."""

from runtime.core.facts import Words


class ApiWords(Words):
    """Names of settings in messages for programs: the request's fields."""

    def setting(self, name: str, value: str | None = None) -> str:
        """Return a field's name, or "offload=group" with a value."""
        return name if value is None else f"{name}={value}"
