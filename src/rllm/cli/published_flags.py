"""Published flags and commands: aliases of configuration keys and of our flags, or refused with a successor.

rllm train … --group-size 16   ──► --set rollout.group_size=16
rllm eval … --temperature 0.6  ──► --sampling temperature=0.6
rllm train … --epochs 2        ──► UsageError that names `steps`
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from rllm.errors import ConfigError

Decorated = Callable[..., Any]


def alias_options(into: str, keys: Mapping[str, str]) -> Callable[[Decorated], Decorated]:
    """Options that are short for `KEY=VALUE` words of the command's argument `into`; words that were typed
    there come later, so they win. The same key twice, here and there, is the command's to judge."""
    return lambda command: _with_options(
        command, [(flag, into, key, f"`{key}`.") for flag, key in keys.items()]
    )


def _with_options(command: Decorated, rows: Sequence[tuple[str, str, str, str]]) -> Decorated:
    names = {f"published_{flag.strip('-').replace('-', '_')}": (into, key) for flag, into, key, _ in rows}

    @functools.wraps(command)
    def with_aliases(*args: Any, **options: Any) -> Any:
        for name, (into, key) in names.items():
            value = options.pop(name)
            if value is not None:
                options[into] = (f"{key}={value}", *options[into])
        return command(*args, **options)

    for flag, _, _, text in reversed(rows):
        name = f"published_{flag.strip('-').replace('-', '_')}"
        with_aliases = click.option(flag, name, default=None, metavar="VALUE", help=text)(with_aliases)
    return with_aliases


def refused_options(successors: Mapping[str, str]) -> Callable[[Decorated], Decorated]:
    """Hidden options that end the command with their successor."""

    def decorate(command: Decorated) -> Decorated:
        for flag, successor in successors.items():
            command = click.option(
                flag,
                expose_value=False,
                hidden=True,
                is_flag=flag in _SWITCHES,
                callback=functools.partial(_refuse, successor),
                is_eager=True,
            )(command)
        return command

    return decorate


def accepted_switches(*flags: str) -> Callable[[Decorated], Decorated]:
    """Hidden switches for what is the case anyway."""

    def decorate(command: Decorated) -> Decorated:
        for flag in flags:
            command = click.option(flag, expose_value=False, hidden=True, is_flag=True)(command)
        return command

    return decorate


def _refuse(successor: str, ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value not in (None, False):
        raise click.UsageError(f"{parameter.opts[0]} has no counterpart: {successor}", ctx)


def sampling_file_option(command: Decorated) -> Decorated:
    """`--sampling-params 'k=v,k=v'`, or `@FILE` with a mapping in YAML or JSON, as words of --sampling."""

    @functools.wraps(command)
    def with_file(*args: Any, sampling_params: str, **options: Any) -> Any:
        options["sampling"] = (*sampling_words(sampling_params), *options["sampling"])
        return command(*args, **options)

    return click.option(
        "--sampling-params", default="", metavar="K=V,…|@FILE", help="Several of --sampling at once."
    )(with_file)


def sampling_words(text: str) -> list[str]:
    """The words of `--sampling` in such a text. Raises ConfigError for a file that is no mapping."""
    if not text.startswith("@"):
        return [word.strip() for word in text.split(",") if word.strip()]
    import yaml  # of the extra `worker`; JSON is YAML too

    path = Path(text[1:])
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--sampling-params {text} cannot be read: {error}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} holds {values!r:.80}; it must be a mapping such as {{temperature: 0.6}}.")
    return [f"{name}={value}" for name, value in values.items()]


_SWITCHES = frozenset(
    (
        "--ui",
        "--relogin",
        "--no-dedup",
        "--no-save-episodes",
        "--snapshot",
        "--dedup",
        "--local",
        "--force",
        "--with-rules",
    )
)

_SANDBOXES = (
    "a benchmark says itself where its programs run: `sandbox` of its settings, or "
    "--set task.environment_args.sandbox=…"
)
_RECORD = "a run is named by its directory, --output; look at it with `rllm runs show`"
_UI = "look at a run with `rllm runs show`, its page is report.html, nothing is sent anywhere"

TRAIN_KEYS = {
    "--group-size": "rollout.group_size",
    "--batch-size": "rollout.tasks_per_step",
    "--lr": "optimizer.learning_rate",
    "--lora-rank": "lora.rank",
    "--max-steps": "steps",
    "--val-freq": "evaluation.every_steps",
    "--save-freq": "checkpoint.every_steps",
    "--val-split": "evaluation.split",
    "--temperature": "rollout.temperature",
    "--top-p": "rollout.top_p",
    "--max-tokens": "rollout.max_tokens_per_turn",
}
WITH_RULES = {"--with-rules": "a pretrained model sees the rules by itself; --recipe pretrained asks for it"}
TRAIN_REFUSED = {
    **WITH_RULES,
    "--epochs": "a run here has `steps` of `rollout.tasks_per_step` tasks each: --max-steps N",
    "--train-split": "training tasks are those of the split `train`; a program's are those of --dataset",
    "--project": _RECORD,
    "--experiment": _RECORD,
    "--ui": _UI,
    "--sandbox-backend": _SANDBOXES,
    "--sandbox-concurrency": "episodes run side by side as --concurrency says: `rollout.num_parallel`",
}
EVAL_SAMPLING = {"--temperature": "temperature", "--top-p": "top_p", "--max-tokens": "max_tokens"}
EVAL_REFUSED = {
    "--no-save-episodes": "every episode is kept, so that an interrupted evaluation goes on",
    "--episodes-dir": "every episode is in the store of --output; `rllm runs show DIR` reads it",
    "--ui": _UI,
    "--sandbox-backend": _SANDBOXES,
    "--sandbox-concurrency": "tasks run side by side as --concurrency says",
    "--snapshot": "sandboxes are kept warm by themselves (docs/sandbox.md)",
    "--warm-queue-size": "sandboxes are kept warm by themselves (docs/sandbox.md)",
}
SFT_KEYS = {
    "--train-file": "data.dataset",
    "--val-file": "data.val_dataset",
    "--batch-size": "batch_size",
    "--epochs": "epochs",
    "--lr": "optimizer.learning_rate",
    "--lora-rank": "lora.rank",
    "--lr-schedule": "optimizer.schedule",
    "--max-length": "data.max_length",
    "--save-freq": "checkpoint.every_steps",
    "--val-freq": "evaluation.every_steps",
}
LEARNING_KEYS = {name: TRAIN_KEYS[name] for name in ("--lr", "--lora-rank")}
"""The flags of other commands that train."""
SFT_REFUSED = {
    "--backend": "supervised learning runs in this process; start several by `torchrun`",
    "--gpus": "start as many processes as there are devices by `torchrun`; `model.device` says which",
    "--tokenize-method": "every answer of the assistant is learned, end token included, and nothing else",
    "--train-split": "give the rows as a file; `rllm dataset export NAME FILE --split train` writes one",
    "--val-split": "give the rows as a file; `rllm dataset export NAME FILE --split test` writes one",
    "--max-examples": "give a file with the rows to learn, or end after `--set max_steps=N`",
    "--project": _RECORD,
    "--experiment": _RECORD,
}
_TEMPLATES = "there is one project; docs/frameworks.md shows programs of each framework"
_DIRECTORY = "name the directory itself: `rllm init DIR`"
INIT_REFUSED = {
    "--evaluator": "every project is made with one, evaluator.py",
    "--output-dir": _DIRECTORY,
    "-o": _DIRECTORY,
    "--template": _TEMPLATES,
    "-t": _TEMPLATES,
}
REFUSED_COMMANDS = {
    "login": "there is no service to log in to: keys of model servers are kept by `rllm model setup`",
    "snapshot": "sandboxes are kept warm by themselves (docs/sandbox.md); nothing has to be created before",
    "setup": "`rllm model setup`",
}
"""Published commands without a counterpart of their own."""
