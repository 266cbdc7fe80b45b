"""Limits of values: each function raises ConfigError naming the key, the value and the limit."""

from rllm.errors import ConfigError, choices_of


def at_least(key: str, value: float, limit: float) -> None:
    if value < limit:
        raise ConfigError(f"`{key}` is {value}; it must be at least {limit}.")


def seed_in_range(key: str, value: int) -> None:
    if not 0 <= value < 2**63:
        raise ConfigError(f"`{key}` is {value}; it must be at least 0 and below 2**63.")


def finite(key: str, value: float) -> None:
    """0 or a finite number above."""
    if not 0.0 <= value < float("inf"):
        raise ConfigError(f"`{key}` is {value}; it must be a finite number, 0 or more.")


def positive(key: str, value: float) -> None:
    if not 0.0 < value < float("inf"):
        raise ConfigError(f"`{key}` is {value}; it must be a finite number above 0.")


def share(key: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"`{key}` is {value}; it must lie between 0 and 1.")


def one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"`{key}` is {value!r}; {choices_of(value, choices)}.")


def unused(section: str, values: object, name: str, why: str) -> None:
    """Raises ConfigError for a key that is not at its default although nothing looks at it, and says why."""
    value, default = getattr(values, name), getattr(type(values)(), name)
    if value != default:
        raise ConfigError(
            f"`{section}.{name}` is {value!r}, which does nothing here: {why}, or leave it at {default!r}."
        )
