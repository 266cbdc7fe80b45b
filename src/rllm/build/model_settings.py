"""The models that a person has set up: RLLM_HOME/models.json, for its owner's eyes, without any key in it.

    {"version": 1, "default": "judge", "models": {"judge":
        {"provider": "openai", "model": "gpt-5-mini", "base_url": "", "key": "env:OPENAI_API_KEY"}}}

A key is where the entry says: `env:NAME`, `keyring` (service `rllm`, user = the entry's name), or nowhere.
"""

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rllm.errors import ConfigError, MissingExtraError
from rllm.files.atomic import StorageErrors, write_atomic
from rllm.files.home import rllm_home

ENVIRONMENT, KEYRING = "env:", "keyring"
_VERSION = 1
_SERVICE = "rllm"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelEntry:
    """One model on a server."""

    name: str
    """The local name."""
    provider: str
    """One of `rllm.build.providers.PROVIDERS`."""
    model: str
    """The provider's name of it."""
    base_url: str = ""
    """Empty takes the provider's."""
    key: str = ""
    """`env:NAME`, `keyring`, or empty where none is needed."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"A model is to be called {self.name!r}; use letters, digits, dots, `_` and `-`, at most 64."
            )
        if not self.model:
            raise ConfigError(
                f"The model `{self.name}` says nothing about which model of {self.provider} it is."
            )
        if self.base_url and not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"The base URL of `{self.name}` is {self.base_url!r}; it begins with http:// or https://."
            )


@dataclass(kw_only=True, slots=True)
class ModelSettings:
    """All that were set up, and which of them is the default."""

    entries: dict[str, ModelEntry] = field(default_factory=dict[str, ModelEntry])
    default: str = ""

    @classmethod
    def load(cls, path: Path | None = None) -> "ModelSettings":
        """Empty where there is no file. Raises ConfigError, naming the file, for one that cannot be read."""
        path = path or settings_path()
        try:
            data = json.loads(path.read_text())
            if data["version"] != _VERSION:
                raise ConfigError(
                    f"{path} is of version {data['version']}, and this rllm reads {_VERSION}; update rllm."
                )
            entries = {name: ModelEntry(name=name, **each) for name, each in data["models"].items()}
            return cls(entries=entries, default=str(data.get("default", "")))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path} cannot be read ({error}); mend it, or delete it and run rllm model setup again."
            ) from error

    def save(self, path: Path | None = None) -> None:
        """Whole or not at all, readable by its owner alone. Raises StorageError when the disk refuses."""
        path = path or settings_path()
        with StorageErrors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(path, json.dumps(self._as_written(), indent=2) + "\n")
        path.chmod(0o600)  # there is no key in it: which models somebody uses is nobody else's business

    def _as_written(self) -> dict[str, Any]:
        models = {name: asdict(each) for name, each in self.entries.items()}
        for each in models.values():
            del each["name"]
        return {"version": _VERSION, "default": self.default, "models": models}


def settings_path() -> Path:
    return rllm_home() / "models.json"


def key_of(entry: ModelEntry) -> tuple[str | None, str]:
    """(the key, where it came from). Raises ConfigError when it is not there."""
    if not entry.key:
        return None, ""
    if entry.key == KEYRING:
        key = keyring_key(entry.name)
        if key is None:
            raise ConfigError(
                f"The system's keyring has no key for `{entry.name}`; run rllm model setup {entry.name} "
                "again."
            )
        return key, "the keyring"
    variable = entry.key.removeprefix(ENVIRONMENT)
    if not os.environ.get(variable):
        raise ConfigError(f"The model `{entry.name}` needs a key in {variable}, which is not set.")
    return os.environ[variable], variable


def keyring_key(name: str) -> str | None:
    """The key kept for a model; None where there is none."""
    return _with_keyring("read", lambda keyring: keyring.get_password(_SERVICE, name))


def keep_in_keyring(name: str, key: str) -> None:
    """Raises ConfigError where this machine has no keyring, MissingExtraError without the package."""
    _with_keyring("written", lambda keyring: keyring.set_password(_SERVICE, name, key))


def drop_from_keyring(name: str) -> None:
    """Nothing happens where there is none."""

    def drop(keyring: Any) -> None:
        if keyring.get_password(_SERVICE, name) is not None:
            keyring.delete_password(_SERVICE, name)

    _with_keyring("changed", drop)


def _with_keyring(what: str, act: Any) -> Any:
    try:
        import keyring
        import keyring.errors
    except ModuleNotFoundError as error:
        raise MissingExtraError("keyring", "keyring") from error
    try:
        return act(keyring)
    except keyring.errors.KeyringError as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"The system's keyring cannot be {what} ({reason}); keep the key in an environment variable."
        ) from error
