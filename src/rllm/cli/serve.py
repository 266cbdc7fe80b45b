"""`rllm serve`: a model, a fleet, or other servers, behind the gateway until a signal; calls captured."""

import json
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from rllm.build.gateways import (
    Address,
    FleetSettings,
    build_gateway,
    fleet_gateway,
    ids_gateway,
    model_gateway,
)
from rllm.build.models import local_model_path, tokenizer_directory
from rllm.build.served import environment_server
from rllm.build.serving import GatewayOpener, Listening, serve_until_stopped
from rllm.cli.command import (
    Group,
    WordChoice,
    argument,
    chat_form,
    chat_template_option,
    example,
    json_option,
    max_thinking_tokens_option,
    option,
    options_of,
    shared,
    thinking_option,
    tool_form_option,
    trust_option,
)
from rllm.cli.terminal import facts, out
from rllm.config.schema import DTYPES
from rllm.errors import ConfigError

CAPTURES = ("logprobs", "token_ids", "usage")
DIALECTS = ("chat", "completions", "responses", "messages")

_Command = Callable[..., None]


@click.group("serve", cls=Group)
def command() -> None:
    """Serve a model or an environment, or capture calls to other servers."""


def _address_options(function: _Command) -> _Command:
    options = (
        click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
        click.option(
            "--port",
            type=click.IntRange(0, 65_535),
            default=8080,
            show_default=True,
            help="0 takes a free one.",
        ),
        click.option(
            "--ledger",
            type=click.Path(path_type=Path),
            default=Path("ledger"),
            show_default=True,
            help="Directory of the ledger, where every call is kept.",
        ),
        click.option("--token", help="Token that clients must send. A new one is made by default."),
        click.option("--no-auth", is_flag=True, help="Ask for no token; only on this machine's own address."),
        click.option("--require-session", is_flag=True, help="Refuse calls of sessions that nobody created."),
        click.option(
            "--json", "as_json", is_flag=True, help="Print one line of JSON when it listens; errors as JSON."
        ),
    )
    for each in reversed(options):
        function = each(function)
    return function


@dataclass(kw_only=True, slots=True, frozen=True)
class GatewayOptions:
    """The options of `rllm serve gateway`, as the user typed them."""

    upstreams: tuple[str, ...] = option(
        "--upstream", multiple=True, required=True, help="Base URL of a server; may be repeated."
    )
    dialect: str = option(
        "--dialect",
        type=WordChoice(DIALECTS),
        default="chat",
        show_default=True,
        help="What upstreams speak.",
    )
    api_key_env: str | None = option(
        "--api-key-env", help="Environment variable that holds the key for the upstreams."
    )
    tokenizer: str | None = option(
        "--tokenizer",
        metavar="DIR|NAME",
        help="Directory of the model's tokenizer, or a name of the model: prompts are made of ids here, and "
        "the one upstream, vLLM or SGLang, samples.",
    )
    model: str = option(
        "--model", default="", help="With --tokenizer: which of the upstream's models; it may be alone."
    )
    processed_logprobs: bool = option(
        "--processed-logprobs",
        is_flag=True,
        help="vLLM was started with `--logprobs-mode processed_logprobs`, which it does not tell.",
    )
    no_seeds: bool = option(
        "--no-seeds",
        is_flag=True,
        help="Leave the draws to the upstream, and refuse calls that name a seed: vLLM on a CPU ends with "
        "the "
        "first one that it is sent.",
    )
    trust_remote_code: bool = shared(trust_option)
    capture: str | None = option(
        "--capture",
        help="What the upstreams can give, such as `logprobs,token_ids,usage`, or `none`. By default "
        "servers are "
        "asked that say they are vLLM, SGLang or rLLM.",
    )
    connect_timeout_s: float = option(
        "--connect-timeout",
        type=click.FloatRange(min=0, min_open=True),
        default=5.0,
        show_default=True,
        metavar="SECONDS",
        help="Longest wait for a connection to an upstream.",
    )
    max_body_mib: int = option(
        "--max-body",
        type=click.IntRange(min=1),
        default=32,
        show_default=True,
        metavar="MIB",
        help="Largest body of a request, unpacked, in MiB; with --tokenizer less where the context is short.",
    )


@command.command(
    "gateway",
    epilog=example(
        "rllm serve gateway --upstream http://127.0.0.1:8000/v1 --port 8080 --ledger runs/calls",
        "rllm serve gateway --upstream http://127.0.0.1:8000/v1 --tokenizer path/to/model",
        "OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=TOKEN python agent.py",
    ),
)
@options_of(GatewayOptions, _address_options)
def gateway(options: GatewayOptions, **address: Any) -> None:
    """Capture every model call of any program, in front of vLLM, or of any server that speaks OpenAI's or
    Anthropic's protocol.

    Programs keep their own protocol: chat completions, completions, responses and messages are answered
    whatever the upstreams speak. A call is on disk before its answer leaves.

    With --tokenizer, a session's next prompt is made here by appending to the ids already seen, so that long
    conversations can be trained on as one; tools and JSON schemas are enforced where the upstream is vLLM.
    """
    if options.tokenizer is not None:
        _require_one_by_ids(options.upstreams, options.dialect)
        if options.capture is not None:
            raise ConfigError("--capture is given with --tokenizer, which captures everything; leave it out.")
    elif options.model:
        raise ConfigError("--model needs --tokenizer: without it, clients name the model themselves.")

    settings = {
        "api_key": _api_key(options.api_key_env),
        "processed_logprobs": options.processed_logprobs,
        "sends_seeds": not options.no_seeds,
        "connect_timeout_s": options.connect_timeout_s,
        "max_body_mib": options.max_body_mib,
    }
    if options.tokenizer is not None:
        tokenizer = tokenizer_directory(options.tokenizer)
        trust = {"trust_remote_code": options.trust_remote_code, "model": options.model}
        _serve(
            lambda where: ids_gateway(where, options.upstreams[0], tokenizer, **trust, **settings), **address
        )
        return
    captured_fields = _capture_fields(options.capture)
    _serve(
        lambda where: nullcontext(
            build_gateway(
                where, options.upstreams, dialect=options.dialect, capture=captured_fields, **settings
            )
        ),
        **address,
    )


def _capture_fields(names: str | None) -> frozenset[str] | None:
    if names is None:
        return None
    fields = frozenset(name for each in names.split(",") if (name := each.strip()) not in ("", "none"))
    if unknown := fields - set(CAPTURES):
        raise ConfigError(
            f"--capture is {names!r}, and nothing is called {', '.join(sorted(unknown))}; there are "
            f"{', '.join(CAPTURES)}, and none."
        )
    return fields


def _hosts(names: str) -> list[str]:
    return [name for each in names.split(",") if (name := each.strip())]


def _require_one_by_ids(upstreams: tuple[str, ...], dialect: str) -> None:
    if len(upstreams) > 1:
        raise ConfigError(
            f"--tokenizer is given with {len(upstreams)} upstreams; prompts made of ids go to one. Give one "
            "--upstream, leave --tokenizer out, or let several servers sample with: rllm serve fleet."
        )
    if dialect not in ("chat", "completions"):
        raise ConfigError(
            f"--dialect is {dialect}, but with --tokenizer the upstream is asked through /v1/completions, "
            "the one protocol that takes ids. Leave --dialect out."
        )


media_domains_option = click.option(
    "--allowed-media-domains",
    default="",
    metavar="HOST,HOST",
    help="Hosts that images at addresses are fetched from, such as images.example.org. By default none.",
)


def _label(model: str) -> str:
    """Return what clients call a model that is given by name; empty for a path, which has a name itself."""
    return "" if Path(model).exists() else model.rpartition("/")[2].rpartition(":")[2]


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelOptions:
    """The options of `rllm serve model`, as the user typed them."""

    model: str = argument(metavar="MODEL")
    name: str = option(
        "--name", default="", help="What clients call the model; the directory's name by default."
    )
    device: str = option(
        "--device", default="cpu", show_default=True, help="Where it runs, such as cpu or cuda."
    )
    dtype: str = option(
        "--dtype",
        type=WordChoice(DTYPES),
        default="auto",
        help="Data type of the model: float32, or bfloat16, which is faster on processors with instructions "
        "for it and changes some answers.  [default: float32]",
    )
    threads: int = option(
        "--threads", type=click.IntRange(min=0), default=0, help="Threads of torch; 0 takes one per core."
    )
    num_slots: int = option(
        "--num-slots",
        type=click.IntRange(min=1),
        default=64,
        show_default=True,
        help="Conversations that hold keys and values at the same time.",
    )
    max_context: int = option(
        "--max-context",
        type=click.IntRange(min=0),
        default=0,
        help="Tokens of one conversation; 0 takes what the model was made for, up to 4096.",
    )
    cache_tokens: int = option(
        "--cache-tokens",
        type=click.IntRange(min=0),
        default=0,
        help="Tokens whose keys and values are kept at the same time; others wait. 0 takes half of the "
        "free memory that the model leaves.",
    )
    num_drafts: int = option(
        "--num-drafts",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Tokens guessed ahead for an answer that is alone and repeats its prompt; the answer is the "
        "same.",
    )
    allowed_media_domains: str = shared(media_domains_option)
    tool_form: str = shared(tool_form_option)
    chat_template: str = shared(chat_template_option)
    thinking: str = shared(thinking_option)
    max_thinking_tokens: int = shared(max_thinking_tokens_option)
    trust_remote_code: bool = shared(trust_option)


@command.command(
    "model",
    epilog=example(
        "rllm serve model runs/frozenlake-seed0 --port 8080",
        "rllm serve model path/to/model --no-auth --ledger runs/calls",
    ),
)
@options_of(ModelOptions, _address_options)
def model(options: ModelOptions, **address: Any) -> None:
    """Serve a model on the built-in engine, through the interface that agents are trained with.

    MODEL is a run, for its trained model, a model directory in Hugging Face format, a name of `rllm model
    pull`, or one of the hub, such as Qwen/Qwen3-0.6B.
    """
    path = local_model_path(options.model)  # a wrong name is not worth taking an address for

    _serve(
        lambda where: model_gateway(
            where,
            path,
            name=options.name or _label(options.model),
            device=options.device,
            dtype=options.dtype,
            form=chat_form(options),
            trust_remote_code=options.trust_remote_code,
            threads=options.threads,
            num_slots=options.num_slots,
            max_context=options.max_context,
            cache_tokens=options.cache_tokens,
            num_drafts=options.num_drafts,
            allowed_media_domains=_hosts(options.allowed_media_domains),
        ),
        **address,
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class FleetOptions:
    """The options of `rllm serve fleet`, as the user typed them."""

    model: str = argument(metavar="MODEL")
    servers: tuple[str, ...] = option(
        "--server", multiple=True, help="Base URL of a server that runs; may be repeated."
    )
    replicas: int = option(
        "--replicas",
        type=click.IntRange(min=0),
        default=0,
        help="vLLM servers to start on this machine instead.",
    )
    server_python: str = option(
        "--server-python", default="", help="With --replicas: Python of an environment that has vLLM."
    )
    device: str = option(
        "--device",
        default="cpu",
        show_default=True,
        help="With --replicas: cpu, or cuda with a GPU for each.",
    )
    dtype: str = option(
        "--dtype", default="float32", show_default=True, help="With --replicas: precision of weights."
    )
    name: str = option(
        "--name", default="", help="What clients call the model; the directory's name by default."
    )
    max_context: int = option(
        "--max-context",
        type=click.IntRange(min=0),
        default=0,
        help="Tokens of one conversation; 0 takes what the servers read, of replicas up to 4096.",
    )
    api_key_env: str | None = option(
        "--api-key-env", help="Environment variable that holds the key for the servers."
    )
    processed_logprobs: bool = option(
        "--processed-logprobs",
        is_flag=True,
        help="The servers were started with `--logprobs-mode processed_logprobs`, as replicas are.",
    )
    no_seeds: bool = option(
        "--no-seeds",
        is_flag=True,
        help="Leave the draws to the servers: vLLM on a CPU ends with the first seed.",
    )
    allowed_media_domains: str = shared(media_domains_option)
    trust_remote_code: bool = shared(trust_option)


@command.command(
    "fleet",
    epilog=example(
        "rllm serve fleet path/to/model --server http://127.0.0.1:8000/v1 --server http://127.0.0.1:8001/v1",
        "rllm serve fleet runs/frozenlake-seed0 --replicas 2 --server-python vllm/bin/python --device cuda",
    ),
)
@options_of(FleetOptions, _address_options)
def fleet(options: FleetOptions, **address: Any) -> None:
    """Serve several vLLM or SGLang servers of one model under one address.

    MODEL is the model that they serve: a run, for its trained model, a directory, or a name. Conversations go
    where their beginning was read, new ones to the least busy server; one that ends or hangs loses no call,
    and gets calls again once it answers.
    """
    if bool(options.servers) == bool(options.replicas):
        raise ConfigError(
            f"{len(options.servers)} --server and --replicas {options.replicas} are given; name servers "
            "that run, or say how many to start."
        )
    if options.replicas and not options.server_python:
        raise ConfigError("--replicas needs --server-python, the Python of an environment that has vLLM.")
    path = local_model_path(options.model)  # a wrong name is not worth taking an address for
    settings = FleetSettings(
        servers=options.servers,
        replicas=options.replicas,
        server_python=options.server_python,
        device=options.device,
        dtype=options.dtype,
        max_context=options.max_context,
        api_key=_api_key(options.api_key_env),
        processed_logprobs=options.processed_logprobs,
        sends_seeds=not options.no_seeds,
        allowed_media_domains=_hosts(options.allowed_media_domains),
    )

    _serve(
        lambda where: fleet_gateway(
            where,
            path,
            settings,
            name=options.name or _label(options.model),
            trust_remote_code=options.trust_remote_code,
        ),
        **address,
    )


@command.command(
    "environment",
    epilog=example(
        "rllm serve environment frozenlake --port 8000",
        "rllm serve environment wordle --port 8000 --sessions 64 --json",
    ),
)
@click.argument("name", metavar="BENCHMARK")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65_535), default=8000, show_default=True, help="0 takes a free one."
)
@click.option(
    "--sessions",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Episodes that are played at the same time.",
)
@click.option("--no-auth", is_flag=True, help="Needed for an address that others reach: OpenEnv has no keys.")
@json_option
def environment(name: str, host: str, port: int, sessions: int, no_auth: bool, as_json: bool) -> None:
    """Serve the environment of a benchmark by OpenEnv's protocol, to OpenEnv's clients and trainers.

    A reset takes `seed`, the number of a task, and `split`; an action is {"answer": TEXT}.
    """
    if host not in ("127.0.0.1", "localhost", "::1") and not no_auth:
        raise ConfigError(f"--host {host} is reached by others, and OpenEnv asks for no key; add --no-auth.")
    url, serve = environment_server(name, host=host, port=port, sessions=sessions)
    if as_json:
        print(json.dumps({"url": url, "environment": name, "sessions": sessions}), flush=True)
    else:
        rows = [("environment", name), ("address", url), ("sessions", str(sessions))]
        out().print(facts(rows))
    serve()


def _serve(
    open_gateway: GatewayOpener,
    *,
    token: str | None,
    no_auth: bool,
    as_json: bool,
    **address: Any,
) -> None:
    if no_auth and token is not None:
        raise ConfigError("--token and --no-auth exclude each other; leave one of them out.")
    if token == "":
        raise ConfigError("--token is empty; choose one, leave it out to have one made, or say --no-auth.")
    where = Address(token=None if no_auth else token or "", **address)
    stopped_by = serve_until_stopped(
        open_gateway, where, lambda listening: _print_listening(listening, where, as_json)
    )
    if stopped_by is signal.SIGINT:
        raise click.Abort("Interrupted; what was in flight is recorded.")


def _print_listening(gateway: Listening, where: Address, as_json: bool) -> None:
    if as_json:
        listening = {
            "url": gateway.url,
            "base_url": gateway.base_url,
            "token": gateway.token,
            "ledger": str(where.ledger.resolve()),
            "pid": os.getpid(),
        }
        click.echo(json.dumps(listening))
        return
    console = out()
    console.print(f"\nListening on {gateway.url}", style="bold", soft_wrap=True)
    console.print(facts([("ledger", str(where.ledger)), ("models", ", ".join(gateway.models) or "–")]))
    key = gateway.token or "none"
    console.print("\nPrograms are captured with:")
    for line in (
        f"export OPENAI_BASE_URL={gateway.url}/v1",
        f"export OPENAI_API_KEY={key}",
        f"export ANTHROPIC_BASE_URL={gateway.url}",
        f"export ANTHROPIC_API_KEY={key}",
    ):
        console.print(f"  {line}", style="bold", soft_wrap=True)
    console.print(
        f"\nOne session a program: {gateway.url}/sessions/NAME/v1; its calls: GET /sessions/NAME/traces.\n"
        "Ctrl-C stops it.",
        style="dim",
        soft_wrap=True,
    )


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not key:
        raise ConfigError(
            f"--api-key-env is {variable}, which is not set; export it, or leave the option out."
        )
    return key
