"""`rllm doctor algorithm`: a loss or an estimator by name in, a table of verdicts out.

NAME ──► a loss, or an estimator ──► rllm.algorithms.checks ──► passed, failed or noted
"""

import difflib
import inspect
from dataclasses import asdict
from typing import Any

import click
from rich.text import Text

from rllm.cli.command import WordChoice, example, json_option, print_json
from rllm.cli.terminal import out, print_next, table
from rllm.config.algorithm import LOSSES, PAPER_BOUND, AlgorithmConfig
from rllm.config.callables import made_from, name_of, takes
from rllm.config.names import object_named
from rllm.errors import ConfigError

ENTRY_POINTS = "rllm.algorithms"
KINDS = ("loss", "estimator")
_WANTED = (
    "write a loss as `def my_loss(tokens: TokenInputs) -> Tensor` and an estimator as "
    "`def my_advantages(rewards_G)` or `def my_advantages(attempts, context)`"
)
_STYLES = {"passed": "green", "failed": "bold red", "noted": "yellow"}


@click.command(
    "algorithm",
    epilog=example(
        "rllm doctor algorithm my_file.py:my_loss          a loss: (tokens: TokenInputs) -> Tensor [M]",
        "rllm doctor algorithm my_file.py:my_advantages    an estimator: rewards_G -> advantages_G",
        "rllm doctor algorithm gspo --json                 a built-in one",
    ),
)
@click.argument("name")
@click.option("--kind", type=WordChoice(KINDS), help="Which of the two, where its signature does not tell.")
@json_option
@click.pass_context
def command(ctx: click.Context, name: str, kind: str | None, as_json: bool) -> None:
    """Check an algorithm of your own: is it what the trainer counts on?

    A loss: its gradient against finite differences, its direction, and that neither the order of rows, nor
    the split into micro-batches, nor untrained tokens change it. An estimator: that the order of attempts
    changes nothing, and what shifting, scaling and equal rewards do. Then both from episodes to the gradient,
    as the trainer applies them: what ties count, and the update that is to be expected beside the gradient of
    the expected reward. Exit code 1 when a check fails.
    """
    from rllm.algorithms.checks import CheckVerdict, check_estimator, group_form
    from rllm.algorithms.context import AlgorithmContext
    from rllm.algorithms.estimators import Estimator, estimator_named, sees_attempts
    from rllm.algorithms.loss_checks import check_loss, columns_read
    from rllm.algorithms.surrogates import own_function
    from rllm.trainer.update_checks import check_update

    algorithm, reads = _algorithm_named(name), list[str]()
    kind = kind or _kind_of(algorithm, name)
    if kind == "loss":
        terms = own_function(name, AlgorithmContext()).terms if ":" in name else algorithm.terms
        checks = check_loss(
            terms,
            needs_every_row=getattr(algorithm, "needs_every_row", True),
            needs_whole_groups=getattr(algorithm, "needs_whole_groups", True),
        )
        reads = columns_read(terms)
    else:
        if isinstance(algorithm, Estimator) or takes(algorithm, 2) or sees_attempts(algorithm):
            algorithm = group_form(estimator_named(name))
        checks = check_estimator(algorithm)
    if not any(each.verdict is CheckVerdict.FAILED for each in checks):
        # A loss is applied with unbiased advantages, so that what is measured is the loss's own doing.
        settings = {"estimator": "rloo"} | {kind: name}
        checks += check_update([f"algorithm.{key}={value}" for key, value in settings.items()], reads)
    failures = [each for each in checks if each.verdict is CheckVerdict.FAILED]
    if as_json:
        print_json(
            {
                "algorithm": name,
                "kind": kind,
                "sound": not failures,
                "checks": [asdict(each) for each in checks],
            }
        )
    else:
        check_table = table("check", "verdict", "detail", prose=("detail",))
        for each in checks:
            check_table.add_row(each.name, Text(each.verdict, style=_STYLES[each.verdict]), Text(each.detail))
        console = out()
        console.print(f"\n{name}, a{'n' if kind == 'estimator' else ''} {kind}", style="bold", soft_wrap=True)
        console.print(check_table)
        if failures:
            console.print(f"{len(failures)} of {len(checks)} checks failed: mend those first.", style="red")
        else:
            words = ["rllm", "train", "frozenlake", "--set", f"algorithm.{kind}={name}"]
            # The benchmark sets a bound for PPO's ratio; it is refused by a loss that would not look at it.
            unbound = kind == "loss" and name != "ppo"
            words += ["--set", f"algorithm.clip_high={PAPER_BOUND:g}"] if unbound else []
            print_next(console, [(words, "train with it")])
    if failures:
        ctx.exit(1)


def _algorithm_named(name: str) -> Any:
    """The function or object; of a class an instance of it."""
    if ":" in name or name.endswith(".py"):
        algorithm = object_named(name, group=ENTRY_POINTS, what="algorithm")
        return made_from(algorithm) if inspect.isclass(algorithm) else algorithm
    return _built_in(name)


def _built_in(name: str) -> Any:
    from rllm.algorithms.estimators import ESTIMATORS
    from rllm.algorithms.losses import policy_loss

    if name in LOSSES:
        return policy_loss(AlgorithmConfig(loss=name))
    if name not in ESTIMATORS:
        names = (*ESTIMATORS, *LOSSES)
        nearest = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean `{nearest[0]}`?" if nearest else f"there are {', '.join(names)}."
        raise ConfigError(
            f"There is no algorithm `{name}`; {hint} One of your own is named file.py:function."
        )
    if ESTIMATORS[name].token_level:
        raise ConfigError(
            f"`{name}` makes its advantages token by token, from more than the rewards of a group; "
            "there is nothing of it to check here."
        )
    return ESTIMATORS[name]


def _kind_of(algorithm: Any, name: str) -> str:
    if callable(getattr(algorithm, "terms", None)):
        return "loss"
    from rllm.algorithms.estimators import Estimator

    if isinstance(algorithm, Estimator):
        return "estimator"
    if not callable(algorithm):
        raise ConfigError(
            f"`{name}` is {algorithm!r:.80} (a {type(algorithm).__name__}), no algorithm; {_WANTED}."
        )
    parameters = list(inspect.signature(algorithm).parameters.values())
    first = parameters[0] if parameters else None
    if first is not None:
        annotation = getattr(first.annotation, "__name__", str(first.annotation))
        if "TokenInputs" in annotation or first.name == "tokens":
            return "loss"
        if first.name.startswith(("reward", "attempt")) or "Attempt" in annotation:
            return "estimator"
    raise ConfigError(
        f"`{name}` does not tell whether {name_of(algorithm)} is a loss or an estimator; say it with --kind, "
        f"or {_WANTED}."
    )
