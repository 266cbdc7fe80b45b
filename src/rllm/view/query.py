"""The parameters of a request for a page: texts and numbers by name, each within its limits."""

from collections.abc import Mapping

from rllm.errors import ConfigError, choices_of


class Query:
    """The parameters of one request. Each method raises ConfigError, naming value and limit."""

    def __init__(self, values: Mapping[str, list[str]]) -> None:
        self._values = values

    def text(self, name: str, default: str = "") -> str:
        return self._values.get(name, [default])[0]

    def texts(self, name: str) -> list[str]:
        return self._values.get(name, [])

    def optional_text(self, name: str) -> str | None:
        return self.text(name) or None

    def choice(self, name: str, choices: Mapping[str, object], default: str = "") -> str:
        value = self.text(name, default)
        if value not in choices:
            raise ConfigError(f"`{name}` is {value[:80]!r}; {choices_of(value[:80], filter(None, choices))}.")
        return value

    def number(self, name: str, default: int, *, low: int = 0, high: int = 2**53) -> int:
        number = self.optional_number(name, low=low, high=high)
        return default if number is None else number

    def optional_number(self, name: str, *, low: int = 0, high: int = 2**53) -> int | None:
        text = self.text(name)
        if not text:
            return None
        try:
            number = int(text)
        except ValueError:
            raise ConfigError(f"`{name}` is {text[:80]!r}; it must be a whole number.") from None
        if not low <= number <= high:
            raise ConfigError(f"`{name}` is {number}; choose {low} to {high}.")
        return number

    def flag(self, name: str) -> bool | None:
        """None where it is not asked for."""
        text = self.text(name)
        return None if text == "" else text in ("1", "true", "yes")
