"""`rllm eval`: a benchmark or program and a model in, success with its interval and every count out.

rllm eval NAME --model …   ──► evals/NAME-… : every episode, summary.json, report.html
rllm eval --compare A B    ──► task by task, with a test
rllm eval --rescore A      ──► the same answers, judged again
"""

import hashlib
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from rllm.build.asked import Asked
from rllm.build.evaluation import prepare
from rllm.build.stored_evaluations import compare_evaluations, rescore_evaluation
from rllm.cli.command import example, options_of, print_json
from rllm.cli.eval_options import EvalOptions
from rllm.cli.eval_view import PAGE, print_comparison, print_reports, print_rescored, write_page
from rllm.cli.plan import require_place, unused_directory
from rllm.cli.published_flags import (
    EVAL_REFUSED,
    EVAL_SAMPLING,
    accepted_switches,
    alias_options,
    refused_options,
    sampling_file_option,
)
from rllm.cli.terminal import err, print_sentence
from rllm.errors import ConfigError
from rllm.eval.report import Prices
from rllm.eval.results import Result
from rllm.store.run_directory import is_run
from rllm.tracking.console import readable_seconds
from rllm.tracking.pace import Reminder, StepPace

ROOT = Path("evals")
LINE_EVERY_S = 10.0
"""The interval of progress lines where there is no terminal."""


@click.command(
    "eval",
    epilog=example(
        "rllm eval frozenlake --model runs/frozenlake-seed0",
        "rllm eval gsm8k --base-url http://127.0.0.1:8000/v1 --model NAME --max-examples 200",
        "rllm eval math500 --model NAME --base-url URL --attempts 8 --sampling temperature=0.6 --k 1 --k 8",
        "rllm eval flow.py:solve --evaluator flow.py:score --dataset my.jsonl --model runs/flow-solve-seed0",
        "rllm eval --compare evals/before evals/after        paired, task by task, with a test",
        "rllm eval --rescore evals/before                    judge the stored answers again",
    ),
)
@options_of(
    EvalOptions,
    sampling_file_option,
    alias_options("sampling", EVAL_SAMPLING),
    refused_options(EVAL_REFUSED),
    accepted_switches("--no-ui", "--save-episodes", "--no-snapshot"),
)
@click.pass_context
def command(ctx: click.Context, options: EvalOptions) -> None:
    """Measure a model on a benchmark's held-out tasks.

    On the built-in engine every task is tried sampled at temperature 1 and greedily; with --sampling,
    --attempts or a server as you say. A failed episode counts as no success, and the counts say how many
    there were. Every episode is kept: the same command again goes on with what was interrupted, and repeats
    nothing. Ends with exit code 1 when every episode failed.

    A PROGRAM, named as for `rllm train`, is run on the tasks of --dataset. With --base-url and without
    --sampling it says itself how to sample.
    """
    if options.comparing and options.rescoring:
        raise click.UsageError("--compare and --rescore are two different things; give one of them.", ctx)
    if options.comparing:
        _compare(options, ctx)
        return
    if options.rescoring:
        ctx.exit(_exit_code(_rescore(options, ctx)))
    if not options.benchmark or options.others:
        raise click.UsageError("Say what to measure on: one benchmark or program.", ctx)
    request = options.request()
    ks = options.sizes(request.attempts)
    directory = _directory(request, options)
    require_place(directory)
    report = _run(request, directory, ks, options.prices, options.as_json)
    summary = {**_head(request, report, directory), **report["reports"], "stamp": report["stamp"]}
    if options.as_json:
        print_json(summary)
    else:
        print_reports(request, report, directory, directory / PAGE)
    ctx.exit(_exit_code(report))


def _exit_code(report: dict[str, Any]) -> int:
    """1 where nothing was measured, because everything failed."""
    return int(all(each["failed"] == each["attempted"] for each in report["reports"].values()))


def _run(
    request: Asked, directory: Path, ks: tuple[int, ...], prices: Prices, as_json: bool
) -> dict[str, Any]:
    ready = prepare(request)
    with _progress() as progress:
        bar = progress.add_task(request.place.title, total=ready.num_attempts, told="")

        def begin(num_done: int) -> None:
            progress.update(bar, completed=num_done)
            if num_done and not as_json:
                missing = ready.num_attempts - num_done
                remark = (
                    f"goes on: {missing} are missing" if missing else "is finished; --fresh makes another"
                )
                print_sentence(err(), f"{directory} has {num_done} attempts and {remark}.", style="dim")

        lines = not (as_json or progress.live.is_started)
        try:
            with _Watch(progress, bar, prices, lines=lines) as watch:
                return ready.run_to_end(
                    directory,
                    ks=ks,
                    prices=prices,
                    on_begin=begin,
                    on_result=watch.note,
                    on_report=lambda report: write_page(directory),
                )
        except KeyboardInterrupt as interrupt:
            raise click.Abort(_left_by(directory)) from interrupt


def _left_by(directory: Path) -> str:
    """The words for somebody who pressed Ctrl-C."""
    if not is_run(directory):
        return "Interrupted before anything was asked."
    words = shlex.join(["--output", str(directory)])
    return f"Interrupted. What was finished is in {directory}; the same command with {words} goes on."


class _Watch:
    """Running score, tokens, cost, failures and time left beside the bar; as lines without a terminal:
    every ten seconds while answers come, and every minute while none does."""

    def __init__(self, progress: Progress, bar: Any, prices: Prices, *, lines: bool) -> None:
        self._progress, self._bar, self._prices, self._lines = progress, bar, prices, lines
        self._counts: Counter[str] = Counter()
        self._pace = StepPace()
        self._reminder = Reminder(self._print_line)
        self._answers = Reminder(self._print_line, every_s=LINE_EVERY_S)
        self._status = "no answer yet"

    def __enter__(self) -> "_Watch":
        if self._lines:
            self._reminder.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._reminder.__exit__()

    def note(self, way: str, result: Result) -> None:
        counts = self._counts
        if not counts["all"]:  # until then a model may have been loaded
            self._answers.note()
        counts.update(
            all=1,
            right=int(result.is_correct),
            failed=int(result.has_failed),
            prompt=result.prompt_tokens,
            completion=result.completion_tokens,
        )
        self._pace.step(counts["all"])
        self._status = f"{counts['right'] / counts['all']:.1%} right, {counts['completion']:,} tokens"
        if (cost := self._prices.cost(counts["prompt"], counts["completion"])) is not None:
            self._status += f", cost {cost:,.4f}"
        if counts["failed"]:
            self._status += f", {counts['failed']} failed"
        self._progress.update(self._bar, advance=1, told=self._status + self._left())
        if self._lines:
            self._answers.look()

    def _left(self) -> str:
        task = self._progress.tasks[0]
        missing = round((task.total or 0) - task.completed)
        left_s = self._pace.left_s(self._counts["all"] + missing)
        return "" if left_s is None else f", {readable_seconds(left_s)} left"

    def _print_line(self) -> None:
        self._reminder.note()
        self._answers.note()
        task = self._progress.tasks[0]
        position = f"{task.completed:.0f} of {task.total:.0f}"
        err().print(f"{position}  {self._status}{self._left()}", soft_wrap=True)


def _progress() -> Progress:
    console = err()
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[told]}", markup=False),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=False,
    )


def _head(request: Asked, report: dict[str, Any], directory: Path) -> dict[str, Any]:
    stamp = report["stamp"]
    name = {"program": request.program.program} if request.program else {"benchmark": request.benchmark}
    return {
        **name,
        "split": stamp["split"],
        "model": stamp["model"]["path"],
        "seed": request.seed,
        "output": str(directory),
    }


def _directory(request: Asked, options: EvalOptions) -> Path:
    """Where the evaluation is kept: the same question has the same place."""
    if options.resume and options.fresh:
        raise ConfigError("--resume goes on and --fresh begins anew; give one of them.")
    output = ROOT / _name_of(request) if options.output is None else options.output
    if options.resume and not is_run(output):
        raise ConfigError(
            f"There is no evaluation in {output} to go on with; leave --resume out to begin one."
        )
    return unused_directory(output) if options.fresh else output


def _name_of(request: Asked) -> str:
    """A directory's name that says what was asked for beyond the defaults."""
    path = Path(request.place.path)
    # A model of the hub is a link to the files of a commit, whose hash says little.
    here = path if path.is_symlink() else path.resolve()
    label = f"{request.directory_name}-{request.place.name or here.name}"
    identity = {
        "split": request.split,
        "n": request.num_tasks,
        "tasks": ",".join(map(str, request.indices)),
        "filter": request.expression and hashlib.sha256(request.expression.encode()).hexdigest()[:8],
        "attempts": request.attempts if request.attempts > 1 else None,
        "sampling": "+".join(f"{name}={value}" for name, value in request.sampling.items()),
        "agent": request.agent,
        "shown": {None: "", True: "as-trained", False: "with-rules"}[request.as_trained],
        "evaluator": "" if request.program else request.evaluator,
        "judge": request.judge.name if request.judge else "",
        "seed": request.seed or None,
        "few": request.few_shot or None,
        "likelihood": request.likelihood,
        "dtype": "" if request.dtype in ("auto", "float32") else request.dtype,
        "form": "+".join(f"{name}={Path(value).name}" for name, value in request.form.changes().items()),
    }
    parts = [f"{name}{value}" for name, value in identity.items() if value not in ("", None)]
    return re.sub(r"[^\w.=+-]+", "_", "-".join([label, *parts]))[:180]


def _compare(options: EvalOptions, ctx: click.Context) -> None:
    paths = [Path(name) for name in (options.benchmark, *options.others) if name]
    if len(paths) != 2:
        raise click.UsageError("Give two stored evaluations to compare: rllm eval --compare A B.", ctx)
    comparisons, differing = compare_evaluations(paths[0], paths[1], options.way)
    if options.as_json:
        as_dicts = {name: each.to_dict() for name, each in comparisons.items()}
        places = {"first": str(paths[0]), "second": str(paths[1])}
        print_json({**places, "differing": differing, "comparisons": as_dicts})
    else:
        print_comparison(paths[0], paths[1], comparisons, differing)


def _rescore(options: EvalOptions, ctx: click.Context) -> dict[str, Any]:
    if not options.benchmark or options.others:
        raise click.UsageError("Give one stored evaluation to judge again: rllm eval --rescore DIR.", ctx)
    source = Path(options.benchmark)
    target = options.output or unused_directory(source.with_name(f"{source.name}-rescored"))
    rescoring = rescore_evaluation(
        source, target, options.evaluator, options.judge, sizes=options.sizes, prices=options.prices
    )
    write_page(target)
    if options.as_json:
        num_changes = {way: len(each) for way, each in rescoring.changed.items()}
        print_json(
            {**rescoring.report, "output": str(target), "judged": rescoring.judged, "changed": num_changes}
        )
    else:
        print_rescored(source, target, rescoring)
    return rescoring.report
