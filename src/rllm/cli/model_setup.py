"""`rllm model setup`, `list`, `show`, `swap`, `test` and `remove`: models on servers, by names of one's own.

questions or flags ──► ModelEntry ──► one tiny request ──► RLLM_HOME/models.json (no key in it)
"""

import asyncio
import os
from dataclasses import asdict, dataclass
from typing import Any

import click
from rich.text import Text

from rllm.build.connection_check import Trial, try_model, wait_for_server
from rllm.build.model_settings import (
    ENVIRONMENT,
    KEYRING,
    ModelEntry,
    ModelSettings,
    drop_from_keyring,
    keep_in_keyring,
    key_of,
    settings_path,
)
from rllm.build.providers import (
    PROVIDERS,
    ModelPlace,
    provider_named,
    resolve_model,
)
from rllm.cli.command import argument, example, json_option, option, options_of, print_json, shared
from rllm.cli.model_wizard import Wizard, require_address, require_no_key
from rllm.cli.terminal import err, facts, out, print_next, print_sentence, table
from rllm.errors import ConfigError, InferenceError


@dataclass(kw_only=True, slots=True, frozen=True)
class SetupOptions:
    """The options of `rllm model setup`, as the user typed them."""

    name: str = argument(required=False, default="")
    provider: str = option("--provider", default="", metavar="NAME", help=f"One of {', '.join(PROVIDERS)}.")
    model: str = option("--model", default="", help="What the provider calls it.")
    base_url: str = option(
        "--base-url", default="", metavar="URL", help="Where it is served.  [default: the provider's]"
    )
    key_variable: str = option(
        "--key-variable", default="", metavar="VAR", help="The environment variable that holds the key."
    )
    in_keyring: bool = option(
        "--keyring", is_flag=True, help="Keep the key in the system's keyring: it is asked for."
    )
    no_key: bool = option("--no-key", is_flag=True, help="The server takes none.")
    as_default: bool = option("--default", is_flag=True, help="Use it where no model is named.")
    wait_s: float = option(
        "--wait",
        type=click.FloatRange(min=0),
        default=30.0,
        metavar="SECONDS",
        help="How long a server on this machine may take to start listening.  [default: 30]",
    )
    no_test: bool = option("--no-test", is_flag=True, help="Do not ask it anything before it is kept.")
    as_json: bool = shared(json_option)


@click.command(
    "setup",
    epilog=example(
        "rllm model setup                                            asks what it needs to know",
        "rllm model setup judge --provider openai --model gpt-5-mini",
        "rllm model setup local --base-url http://127.0.0.1:8000/v1",
        "rllm model setup --provider anthropic --model NAME --keyring < key.txt",
    ),
)
@options_of(SetupOptions)
def setup(options: SetupOptions) -> None:
    """Keep a model on a server under a NAME, for --model of other commands.

    Without --provider and --base-url it asks. A key is never written to a file: it stays in the environment,
    or goes to the system's keyring. Nothing is kept when the model does not answer.
    """
    if sum(map(bool, (options.key_variable, options.in_keyring, options.no_key))) > 1:
        raise click.UsageError("Give one of --key-variable, --keyring and --no-key.")
    for flag, value in (
        ("NAME", options.name),
        ("--model", options.model),
        ("--key-variable", options.key_variable),
    ):
        require_no_key(flag, value)
    require_address("--base-url", options.base_url)
    asks = not options.provider and not options.base_url
    if asks and options.as_json:
        raise click.UsageError("--json asks nothing: give --provider or --base-url, and --model.")
    wizard = Wizard(asks=asks)
    provider = options.provider or wizard.provider(options.base_url)
    facts_of = provider_named(provider)
    base_url = options.base_url or wizard.base_url(facts_of, provider)
    key, secret = wizard.key(facts_of, options.key_variable, options.in_keyring, options.no_key)
    probe = ModelPlace(
        name=options.model,
        base_url=base_url or facts_of.base_url,
        protocol=facts_of.protocol,
        api_key=secret,
        key_from=key.removeprefix(ENVIRONMENT),
    )
    if not options.no_test and not asks:
        probe.client()  # an extra that is missing is named before anybody waits
        remark = f"Nothing listens at {probe.base_url} yet; waiting up to {options.wait_s:g} s."
        asyncio.run(wait_for_server(probe.base_url, options.wait_s, lambda: err().print(remark, style="dim")))
    model = options.model or wizard.model(probe)
    settings = ModelSettings.load()
    name = options.name or wizard.name(provider, settings)
    entry = ModelEntry(name=name, provider=provider, model=model, base_url=base_url, key=key)
    trial = None if options.no_test else _tried_before_keeping(entry, probe, wizard)
    if key == KEYRING and secret is not None:
        keep_in_keyring(name, secret)
    settings.entries[name] = entry
    if options.as_default or not settings.default:
        settings.default = name
    settings.save()
    if options.as_json:
        print_json({**_facts(entry, settings), "test": asdict(trial) if trial else None})
        return
    print_sentence(out(), f"`{name}` is kept in {settings_path()}.")
    if trial:
        _print_trial(trial)
    print_next(
        out(),
        [
            (["rllm", "eval", "gsm8k", "--model", name, "--max-examples", "20"], "measure it"),
            (["rllm", "model", "list"], "see what there is"),
        ],
    )


@click.command("list", epilog=example("rllm model list", "rllm model list --json"))
@json_option
def list_models(as_json: bool) -> None:
    """List the models that were set up, and the providers whose key is in the environment."""
    settings = ModelSettings.load()
    rows = [_facts(each, settings) for each in settings.entries.values()]
    ready = [
        {"provider": name, "key_variable": each.key_variable}
        for name, each in PROVIDERS.items()
        if each.needs_key and each.base_url and os.environ.get(each.key_variable)
    ]
    if as_json:
        print_json({"models": rows, "default": settings.default or None, "ready": ready})
        return
    console = out()
    if rows:
        model_table = table("name", "provider", "model", "address", "key")
        for row in rows:
            mark = " (default)" if row["is_default"] else ""
            style = "" if row["key_is_there"] else "red"
            model_table.add_row(
                row["name"] + mark, row["provider"], row["model"], row["base_url"], Text(row["key"], style)
            )
        console.print(model_table)
    else:
        console.print("No model is set up yet.")
    for each in ready:
        print_sentence(
            console, f"{each['key_variable']} is set: --model {each['provider']}:MODEL works at once."
        )
    print_next(
        console,
        [
            (["rllm", "model", "setup"], "add one"),
            (["rllm", "model", "create", "tiny-0"], "or make a tiny one that runs here"),
        ],
    )


@click.command("show", epilog=example("rllm model show", "rllm model show judge --json"))
@click.argument("name", required=False, default="")
@json_option
def show(name: str, as_json: bool) -> None:
    """Show what is kept of a model; without NAME, of the default."""
    settings = ModelSettings.load()
    row = _facts(_entry_named(name or settings.default, settings), settings)
    if as_json:
        print_json(row)
        return
    out().print(facts((field.replace("_", " "), str(value)) for field, value in row.items()))
    print_next(out(), [(["rllm", "model", "test", row["name"]], "ask it something")])


@click.command("swap", epilog=example("rllm model swap judge"))
@click.argument("name")
@json_option
def swap(name: str, as_json: bool) -> None:
    """Make another model the default: what commands use where none is named."""
    settings = ModelSettings.load()
    settings.default = _entry_named(name, settings).name
    settings.save()
    if as_json:
        print_json({"default": name})
        return
    out().print(f"`{name}` is the default.")


def _entry_named(name: str, settings: ModelSettings) -> ModelEntry:
    """Raises ConfigError for a model that nobody set up."""
    if name not in settings.entries:
        title = f"No model `{name}` was set up" if name else "No model is the default"
        raise ConfigError(
            f"{title}; there is {', '.join(settings.entries) or 'none at all'}. Add one: rllm model setup"
        )
    return settings.entries[name]


@click.command("test", epilog=example("rllm model test judge", "rllm model test openai:gpt-5-mini --json"))
@click.argument("name", required=False, default="")
@click.option(
    "--base-url", default="", metavar="URL", help="NAME is what this server calls it; key in OPENAI_API_KEY."
)
@json_option
def test(name: str, base_url: str, as_json: bool) -> None:
    """Ask a model on a server one tiny question, and say how long it took or what is wrong.

    Without NAME the default is asked. Ends with exit code 1 when it does not answer.
    """
    place = resolve_model(name, base_url=base_url)
    if not place.is_server:
        raise ConfigError(
            f"{place.path} is not on a server; ask it with: rllm eval frozenlake --model {place.path}"
        )
    trial = asyncio.run(try_model(place))
    if as_json:
        print_json({"model": place.name, "address": place.base_url, **asdict(trial)})
        return
    _print_trial(trial)


@click.command("remove", epilog=example("rllm model remove judge"))
@click.argument("name")
@json_option
def remove(name: str, as_json: bool) -> None:
    """Forget a model that was set up, and its key in the keyring."""
    settings = ModelSettings.load()
    entry = settings.entries.pop(_entry_named(name, settings).name)
    if settings.default == name:
        settings.default = next(iter(settings.entries), "")
    if entry.key == KEYRING:
        drop_from_keyring(name)
    settings.save()
    if as_json:
        print_json({"removed": name, "default": settings.default or None})
        return
    out().print(f"`{name}` is forgotten.")


def _tried_before_keeping(entry: ModelEntry, probe: ModelPlace, wizard: Wizard) -> Trial | None:
    place = ModelPlace(
        name=entry.model,
        base_url=probe.base_url,
        protocol=probe.protocol,
        api_key=probe.api_key,
        key_from=probe.key_from,
    )
    try:
        return asyncio.run(try_model(place))
    except (ConfigError, InferenceError) as error:
        if wizard.keeps_anyway(error):
            return None
        kind = ConfigError if isinstance(error, ConfigError) else InferenceError
        raise kind(f"Nothing was kept: {error} (--no-test keeps it unasked.)") from error


def _facts(entry: ModelEntry, settings: ModelSettings) -> dict[str, Any]:
    """Without the key itself."""
    try:
        key_of(entry)
        is_there = True
    except ConfigError:
        is_there = False
    return {
        **asdict(entry),
        "base_url": entry.base_url or PROVIDERS[entry.provider].base_url,
        "key": entry.key.removeprefix(ENVIRONMENT) or "none",
        "key_is_there": is_there,
        "is_default": settings.default == entry.name,
    }


def _print_trial(trial: Trial) -> None:
    out().print(
        facts(
            [
                ("answered in", f"{trial.latency_s:.2f} s"),
                ("it said", trial.reply or "(nothing within 16 tokens)"),
                ("tokens", f"{trial.prompt_tokens} in, {trial.completion_tokens} out"),
            ]
        )
    )
