"""A TOML file, `--set a.b=c` assignments or a mapping ──► a validated configuration of a run.

An unknown key is an error that suggests the nearest known one; so is a value of the wrong type. Later sources
win: defaults, then the file, then assignments in their order.
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol, TypeGuard, TypeVar, cast, get_args, get_type_hints

from rllm.config.schema import TrainConfig
from rllm.errors import ConfigError


class RunConfig(Protocol):
    """A dataclass of sections and keys, each with its default."""

    def validate(self) -> None:
        """Raises ConfigError for the first value that cannot be honoured."""
        ...


AnyConfig = TypeVar("AnyConfig", bound=RunConfig)


def load_config(
    source: "TrainConfig | Mapping[str, Any] | str | Path | Iterable[str] | None" = None,
    assignments: Iterable[str] = (),
    *,
    base: Mapping[str, Any] | None = None,
) -> TrainConfig:
    """The configuration that `source` describes, on top of `base`, with `assignments` on top of both.

    `source`: a TrainConfig, a mapping (an OmegaConf config counts), the path of a TOML file, a list of
    "a.b=c", or None. Raises ConfigError naming the key, the value and the mend.
    """
    return load_as(TrainConfig, source, assignments, base=base)


def load_as(
    kind: type[AnyConfig],
    source: "AnyConfig | Mapping[str, Any] | str | Path | Iterable[str] | None" = None,
    assignments: Iterable[str] = (),
    *,
    base: Mapping[str, Any] | None = None,
) -> AnyConfig:
    """The same for a run of any kind, such as `SftConfig`."""
    tree: dict[str, Any] = {}
    _merge(tree, base or {})
    if isinstance(source, kind):
        _merge(tree, config_dict(source))
    elif isinstance(source, str | Path):
        _merge(tree, read_toml(Path(source)))
    elif _is_mapping(source):
        _merge(tree, _plain(source))
    elif source is not None:
        for assignment in cast("Iterable[str]", source):
            _merge(tree, parse_assignment(assignment))
    for assignment in assignments:
        _merge(tree, parse_assignment(assignment))
    config = kind()
    _fill(config, tree, "")
    if isinstance(config, TrainConfig):
        config.settle()
    config.validate()
    return config


def config_dict(config: Any) -> dict[str, Any]:
    """The configuration as nested plain dicts, every key present: what `config.json` of a run holds."""
    return {each.name: _as_plain(getattr(config, each.name)) for each in fields(config)}


def _as_plain(value: Any) -> Any:
    if _is_mapping(value):
        return {key: _as_plain(each) for key, each in value.items()}
    return config_dict(value) if is_dataclass(value) else value


def read_toml(path: Path) -> dict[str, Any]:
    """Raises ConfigError when the file is missing or no valid TOML."""
    if not path.is_file():
        raise ConfigError(f"There is no configuration file {path}.")
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def parse_assignment(text: str) -> dict[str, Any]:
    """`"a.b=c"` as `{"a": {"b": c}}`; the value is read as TOML, or as plain text where it is none."""
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"`{text}` sets nothing; write it as section.key=value.")
    try:
        literal = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        literal = value.strip()
    *sections, last = key.strip().split(".")
    tree: dict[str, Any] = {last: literal}
    for section in reversed(sections):
        tree = {section: tree}
    return tree


def _is_mapping(value: Any) -> TypeGuard[Mapping[Any, Any]]:
    return isinstance(value, Mapping)


def _plain(mapping: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): _plain(value) if _is_mapping(value) else value for key, value in mapping.items()}


def _merge(tree: dict[str, Any], update: Mapping[str, Any]) -> None:
    for key, value in update.items():
        if _is_mapping(value):
            if not isinstance(tree.get(key), dict):
                tree[key] = {}
            _merge(tree[key], value)
        else:
            tree[key] = value


def _fill(section: object, tree: Mapping[str, Any], prefix: str) -> None:
    types = get_type_hints(type(section))
    for key, value in tree.items():
        if key not in types:
            raise ConfigError(_unknown_key(f"{prefix}{key}", key, types))
        current, kind = getattr(section, key), _kind_of_entries(types[key])
        if kind is not None:
            _require_section(value, f"{prefix}{key}", f"{prefix}{key}.NAME.{fields(kind)[0].name}")
            for name, entry in value.items():
                current[name] = current.get(name) or kind()
                place = f"{prefix}{key}.{name}"
                _require_section(entry, place, f"{place}.{fields(kind)[0].name}")
                _fill(current[name], entry, f"{place}.")
        elif is_dataclass(current):
            _require_section(value, f"{prefix}{key}", f"{prefix}{key}.{fields(current)[0].name}")
            _fill(current, value, f"{prefix}{key}.")
        else:
            setattr(section, key, _convert(f"{prefix}{key}", value, current))


def _kind_of_entries(annotation: Any) -> type[Any] | None:
    """The dataclass of a section whose keys are names, such as `policies`; None for any other key."""
    arguments = get_args(annotation)
    return arguments[1] if len(arguments) == 2 and is_dataclass(arguments[1]) else None  # pyright: ignore[reportReturnType]


def _require_section(value: Any, place: str, example: str) -> None:
    if not _is_mapping(value):
        raise ConfigError(f"`{place}` is a section; set one of its keys, such as `{example}`.")


def _unknown_key(path: str, key: str, keys: Mapping[str, Any]) -> str:
    nearest = difflib.get_close_matches(key, keys, n=1)
    hint = (
        f"did you mean `{path[: len(path) - len(key)]}{nearest[0]}`?"
        if nearest
        else f"known: {', '.join(keys)}."
    )
    return f"There is no configuration key `{path}`; {hint}"


def _convert(path: str, value: Any, current: object) -> Any:
    expected_type = type(current)
    if expected_type is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if expected_type is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if type(value) is not expected_type:
        raise ConfigError(
            f"`{path}` is {value!r}, of type {type(value).__name__}; it must be of type "
            f"{expected_type.__name__}."
        )
    return value
