"""`rllm serve`: a model, a fleet, or other servers, behind the gateway until a signal; calls captured."""

import json
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
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
from rllm.build.models import model_directory
from rllm.build.served import environment_server
from rllm.build.serving import GatewayOpener, Listening, serve_until_stopped
from rllm.cli.command import Group, WordChoice, example, json_option, trust_option
from rllm.cli.terminal import facts, out
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
    for option in reversed(options):
        function = option(function)
    return function


@command.command(
    "gateway",
    epilog=example(
        "rllm serve gateway --upstream http://127.0.0.1:8000/v1 --port 8080 --ledger runs/calls",
        "rllm serve gateway --upstream http://127.0.0.1:8000/v1 --tokenizer path/to/model",
        "OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=TOKEN python agent.py",
    ),
)
@click.option(
    "--upstream", "upstreams", multiple=True, required=True, help="Base URL of a server; may be repeated."
)
@click.option(
    "--dialect", type=WordChoice(DIALECTS), default="chat", show_default=True, help="What upstreams speak."
)
@click.option("--api-key-env", help="Environment variable that holds the key for the upstreams.")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    help="Directory of the model's tokenizer: prompts are made of ids here, and the one upstream, vLLM or "
    "SGLang, samples.",
)
@click.option(
    "--model", default="", help="With --tokenizer: which of the upstream's models; it may be alone."
)
@click.option(
    "--processed-logprobs",
    is_flag=True,
    help="vLLM was started with `--logprobs-mode processed_logprobs`, which it does not tell.",
)
@click.option(
    "--no-seeds",
    is_flag=True,
    help="Leave the draws to the upstream, and refuse calls that name a seed: vLLM on a CPU ends with the "
    "first one that it is sent.",
)
@trust_option
@click.option(
    "--capture",
    help="What the upstreams can give, such as `logprobs,token_ids,usage`, or `none`. By default servers are "
    "asked that say they are vLLM, SGLang or rLLM.",
)
@click.option(
    "--connect-timeout",
    "connect_timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest wait for a connection to an upstream.",
)
@click.option(
    "--max-body",
    "max_body_mib",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    metavar="MIB",
    help="Largest body of a request, unpacked, in MiB; with --tokenizer less where the context is short.",
)
@_address_options
def gateway(
    upstreams: tuple[str, ...],
    dialect: str,
    api_key_env: str | None,
    tokenizer: Path | None,
    model: str,
    processed_logprobs: bool,
    no_seeds: bool,
    trust_remote_code: bool,
    capture: str | None,
    connect_timeout_s: float,
    max_body_mib: int,
    **address: Any,
) -> None:
    """Capture every model call of any program, in front of vLLM, or of any server that speaks OpenAI's or
    Anthropic's protocol.

    Programs keep their own protocol: chat completions, completions, responses and messages are answered
    whatever the upstreams speak. A call is on disk before its answer leaves.

    With --tokenizer, a session's next prompt is made here by appending to the ids already seen, so that long
    conversations can be trained on as one; tools and JSON schemas are enforced where the upstream is vLLM.
    """
    if tokenizer is not None:
        _require_one_by_ids(upstreams, dialect)
        if capture is not None:
            raise ConfigError("--capture is given with --tokenizer, which captures everything; leave it out.")
    elif model:
        raise ConfigError("--model needs --tokenizer: without it, clients name the model themselves.")

    shared = {
        "api_key": _api_key(api_key_env),
        "processed_logprobs": processed_logprobs,
        "sends_seeds": not no_seeds,
        "connect_timeout_s": connect_timeout_s,
        "max_body_mib": max_body_mib,
    }
    if tokenizer is not None:
        trust = {"trust_remote_code": trust_remote_code, "model": model}
        _serve(lambda where: ids_gateway(where, upstreams[0], tokenizer, **trust, **shared), **address)
        return
    captured_fields = _capture_fields(capture)
    _serve(
        lambda where: nullcontext(
            build_gateway(where, upstreams, dialect=dialect, capture=captured_fields, **shared)
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


@command.command(
    "model",
    epilog=example(
        "rllm serve model runs/frozenlake-seed0 --port 8080",
        "rllm serve model path/to/model --no-auth --ledger runs/calls",
    ),
)
@click.argument("model", metavar="DIR_OR_RUN", type=click.Path(path_type=Path))
@click.option("--name", default="", help="What clients call the model; the directory's name by default.")
@click.option("--device", default="cpu", show_default=True, help="Where it runs, such as cpu or cuda.")
@click.option(
    "--threads", type=click.IntRange(min=0), default=0, help="Threads of torch; 0 takes one per core."
)
@click.option(
    "--num-slots",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Conversations that hold keys and values at the same time.",
)
@click.option(
    "--max-context",
    type=click.IntRange(min=0),
    default=0,
    help="Tokens of one conversation; 0 takes what the model was made for, up to 4096.",
)
@click.option(
    "--cache-tokens",
    type=click.IntRange(min=0),
    default=0,
    help="Tokens whose keys and values are kept at the same time; others wait. 0 takes half of the memory.",
)
@click.option(
    "--num-drafts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Tokens guessed ahead for an answer that is alone and repeats its prompt; the answer is the same.",
)
@trust_option
@_address_options
def model(
    model: Path,
    name: str,
    device: str,
    threads: int,
    num_slots: int,
    max_context: int,
    cache_tokens: int,
    num_drafts: int,
    trust_remote_code: bool,
    **address: Any,
) -> None:
    """Serve a model on the built-in engine, through the interface that agents are trained with.

    DIR_OR_RUN is a run, for its trained model, or a model directory in Hugging Face format.
    """
    model_directory(model)  # a wrong path is not worth taking an address for

    _serve(
        lambda where: model_gateway(
            where,
            model,
            name=name,
            device=device,
            trust_remote_code=trust_remote_code,
            threads=threads,
            num_slots=num_slots,
            max_context=max_context,
            cache_tokens=cache_tokens,
            num_drafts=num_drafts,
        ),
        **address,
    )


@command.command(
    "fleet",
    epilog=example(
        "rllm serve fleet path/to/model --server http://127.0.0.1:8000/v1 --server http://127.0.0.1:8001/v1",
        "rllm serve fleet runs/frozenlake-seed0 --replicas 2 --server-python vllm/bin/python --device cuda",
    ),
)
@click.argument("model", metavar="DIR_OR_RUN", type=click.Path(path_type=Path))
@click.option("--server", "servers", multiple=True, help="Base URL of a server that runs; may be repeated.")
@click.option(
    "--replicas", type=click.IntRange(min=0), default=0, help="vLLM servers to start on this machine instead."
)
@click.option("--server-python", default="", help="With --replicas: Python of an environment that has vLLM.")
@click.option(
    "--device", default="cpu", show_default=True, help="With --replicas: cpu, or cuda with a GPU for each."
)
@click.option("--dtype", default="float32", show_default=True, help="With --replicas: precision of weights.")
@click.option("--name", default="", help="What clients call the model; the directory's name by default.")
@click.option(
    "--max-context",
    type=click.IntRange(min=0),
    default=0,
    help="Tokens of one conversation; 0 takes what the servers read, of replicas up to 4096.",
)
@click.option("--api-key-env", help="Environment variable that holds the key for the servers.")
@click.option(
    "--processed-logprobs",
    is_flag=True,
    help="The servers were started with `--logprobs-mode processed_logprobs`, as replicas are.",
)
@click.option(
    "--no-seeds", is_flag=True, help="Leave the draws to the servers: vLLM on a CPU ends with the first seed."
)
@trust_option
@_address_options
def fleet(
    model: Path,
    servers: tuple[str, ...],
    replicas: int,
    server_python: str,
    device: str,
    dtype: str,
    name: str,
    max_context: int,
    api_key_env: str | None,
    processed_logprobs: bool,
    no_seeds: bool,
    trust_remote_code: bool,
    **address: Any,
) -> None:
    """Serve several vLLM or SGLang servers of one model under one address.

    DIR_OR_RUN is the model that they serve: a run, for its trained model, or a directory. Conversations go
    where their beginning was read, new ones to the least busy server; one that ends or hangs loses no call,
    and gets calls again once it answers.
    """
    if bool(servers) == bool(replicas):
        raise ConfigError(
            f"{len(servers)} --server and --replicas {replicas} are given; name servers that run, or say how "
            "many to start."
        )
    if replicas and not server_python:
        raise ConfigError("--replicas needs --server-python, the Python of an environment that has vLLM.")
    model_directory(model)  # a wrong path is not worth taking an address for
    settings = FleetSettings(
        servers=servers,
        replicas=replicas,
        server_python=server_python,
        device=device,
        dtype=dtype,
        max_context=max_context,
        api_key=_api_key(api_key_env),
        processed_logprobs=processed_logprobs,
        sends_seeds=not no_seeds,
    )

    _serve(
        lambda where: fleet_gateway(where, model, settings, name=name, trust_remote_code=trust_remote_code),
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
