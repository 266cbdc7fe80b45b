"""The questions of `rllm model setup`: who serves a model, where, with which key, and its name.

flags that were left open ──► Wizard: a question, again until the answer will do ──► an answer
                                └ what looks like a key is taken nowhere but where a key is asked for
"""

import asyncio
import os
import re
import sys
from collections.abc import Callable, Sequence

import click

from rllm.build.connection_check import served_models
from rllm.build.model_settings import ENVIRONMENT, KEYRING, ModelEntry, ModelSettings, keyring_key
from rllm.build.providers import PROVIDERS, ModelPlace, Provider, provider_named
from rllm.cli.terminal import err, print_sentence
from rllm.errors import ConfigError, InferenceError, printable
from rllm.types.addresses import require_base_url

_SHOWN_MODELS = 12
_LIKE_A_KEY = re.compile(r"(?:sk|pk|gsk|xai|fw|hf|tgp|key|r8)[-_][\w-]{12,}|[0-9a-fA-F]{32,}|AIza[\w-]{20,}")


def require_no_key(what: str, value: str) -> None:
    """Raises ConfigError for what looks like a key where none belongs: it would be written to a file. The
    value is not repeated."""
    if _LIKE_A_KEY.fullmatch(value):
        raise ConfigError(
            f"{what} looks like a key, which would end in a file in clear text. Nothing was kept: put it "
            "into an environment variable, or give it where the key is asked for (--keyring)."
        )


def require_address(what: str, value: str) -> None:
    """Raises ConfigError for a malformed base URL, and for one that may hold a key."""
    if value:
        require_base_url(what, value)


class Wizard:
    """Answers what the flags left open: by questions, or where nobody is asked by what can be known."""

    def __init__(self, *, asks: bool) -> None:
        self.asks = asks

    def provider(self, base_url: str) -> str:
        if base_url:
            return "server"
        names = list(PROVIDERS)
        for number, each in enumerate(names, 1):
            err().print(f"  {number:>2}  {each:<12}{PROVIDERS[each].title}", soft_wrap=True)
        while True:
            reply = click.prompt("Who serves the model? (number or name)", default="1", err=True)
            if reply.isdecimal() and 1 <= int(reply) <= len(names):
                return names[int(reply) - 1]
            try:
                provider_named(reply)
            except ConfigError as error:
                print_sentence(err(), str(error) if not reply.isdecimal() else f"It is 1 to {len(names)}.")
                continue
            return reply

    def base_url(self, provider: Provider, name: str) -> str:
        """Empty takes the provider's own."""
        if provider.base_url and provider.needs_key:
            return ""
        if not self.asks:
            if not provider.base_url:
                raise ConfigError(f"`{name}` needs --base-url, such as {provider.url_example}.")
            return ""
        url = self._reply(
            f"Base URL (such as {provider.url_example or provider.base_url})",
            provider.base_url,
            lambda url: require_address("That", url),
        )
        return "" if url == provider.base_url else url

    def key(
        self, provider: Provider, variable: str, in_keyring: bool, no_key: bool
    ) -> tuple[str, str | None]:
        """(what the entry says, the key itself). Raises ConfigError for a key that is not there."""
        if no_key:
            return "", None
        if in_keyring:
            return KEYRING, self._secret()
        variable_name = variable or provider.key_variable
        if variable_name and os.environ.get(variable_name):
            if not variable:
                err().print(f"The key is taken from {variable_name}.", style="dim")
            return f"{ENVIRONMENT}{variable_name}", os.environ[variable_name]
        if variable or (provider.needs_key and not self.asks):
            raise ConfigError(
                f"{variable_name} is not set; export it, or keep the key in the keyring with --keyring"
                f"{f' (keys are made at {provider.keys_at})' if provider.keys_at else ''}."
            )
        if not self.asks:
            return "", None
        if not provider.needs_key and not click.confirm("Does it need a key?", default=False, err=True):
            return "", None
        print_sentence(
            err(),
            f"{variable_name} is not set, so the key goes to the system's keyring, and to no file."
            if variable_name
            else "The key goes to the system's keyring, and to no file.",
        )
        return KEYRING, self._secret()

    def _secret(self) -> str:
        """Typed without being shown, or a line of stdin; never a flag, which others could see."""
        keyring_key("rllm")  # a machine without a keyring says so before somebody looks for the key
        if sys.stdin.isatty() or self.asks:
            secret = click.prompt("Key (it is not shown)", hide_input=True, err=True)
        else:
            secret = sys.stdin.readline()
        if not secret.strip():
            raise ConfigError("The key is empty; nothing was kept.")
        return secret.strip()

    def model(self, place: ModelPlace) -> str:
        """The name of a server's only model, or the one that the user types."""
        try:
            names = asyncio.run(served_models(place))
        except InferenceError as error:
            if not self.asks:
                raise
            print_sentence(err(), str(error))
            names = []
        if not self.asks:
            if len(names) == 1:
                return names[0]
            if names:
                raise ConfigError(f"Give --model; {place.base_url} serves {_name_list(names)}.")
            wants = "" if place.api_key else " If it wants a key, give --key-variable or --keyring."
            raise ConfigError(f"Give --model; {place.base_url} does not say what it serves.{wants}")
        if names:
            print_sentence(err(), f"It serves {_name_list(names)}.")
        default = names[0] if len(names) == 1 else ""
        return self._reply("Model", default, lambda name: require_no_key("That", name))

    def name(self, provider: str, settings: ModelSettings) -> str:
        default = provider if provider not in settings.entries else ""
        return self._reply("What shall it be called here?", default, _require_name) if self.asks else provider

    def _reply(self, question: str, default: str, require: Callable[[str], None]) -> str:
        """The answer to a question, which is repeated until the answer is valid."""
        prompt = f"{question} [{printable(default)}]" if default else question
        while True:
            reply: str = click.prompt(prompt, default=default or None, show_default=False, err=True).strip()
            try:
                require(reply)
            except ConfigError as error:
                print_sentence(err(), str(error))
                continue
            return reply

    def keeps_anyway(self, error: Exception) -> bool:
        if not self.asks:
            return False
        print_sentence(err(), f"It does not answer: {error}")
        return click.confirm("Keep it anyway?", default=False, err=True)


def _require_name(name: str) -> None:
    require_no_key("That", name)
    ModelEntry(name=name, provider="server", model="any")  # which says what is wrong with it


def _name_list(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN_MODELS
    text = ", ".join(names[:_SHOWN_MODELS])
    return f"{text} and {more} more" if more > 0 else text
