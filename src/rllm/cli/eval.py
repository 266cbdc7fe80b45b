"""`rllm eval`: a benchmark or program and a model in, success with its interval and every count out.

rllm eval NAME --model …   ──► evals/NAME-… : every episode, summary.json, report.html
rllm eval --compare A B    ──► task by task, with a test
rllm eval --rescore A      ──► the same answers, judged again
"""

import asyncio
import hashlib
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rllm.build.asked import Asked, task_places
from rllm.build.configs import ProgramNames
from rllm.build.evaluation import prepare
from rllm.build.evaluation_engines import answering
from rllm.build.judges import judge_of_stored, judge_place
from rllm.build.sampling import assignments_of
from rllm.cli.command import example, json_option, print_json, trust_option
from rllm.cli.eval_view import PAGE, print_comparison, print_reports, print_rescored, write_page
from rllm.cli.plan import require_place, unused_directory
from rllm.cli.programs import is_program
from rllm.cli.published_flags import (
    EVAL_REFUSED,
    EVAL_SAMPLING,
    accepted_switches,
    alias_options,
    refused_options,
    sampling_file_option,
)
from rllm.cli.terminal import err, print_sentence
from rllm.engine.event_loop import run
from rllm.errors import ConfigError
from rllm.eval.catalogue import benchmark_named
from rllm.eval.comparison import compare
from rllm.eval.evaluation import results_in
from rllm.eval.plan import differing_conditions, require_evaluation
from rllm.eval.report import Prices, require_ks
from rllm.eval.rescoring import rescore
from rllm.eval.results import Result
from rllm.inference.providers import ModelPlace, resolve_model
from rllm.store.run_directory import RunDirectory, is_run
from rllm.tracking.console import readable_seconds
from rllm.worker.step_host import open_workers

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
@click.argument("benchmark", metavar="BENCHMARK|PROGRAM", required=False, default="")
@click.argument("others", nargs=-1, metavar="")
@click.option(
    "--model",
    default="",
    metavar="DIR|NAME",
    help="A run, for its trained model, a model directory in Hugging Face format, builtin:tiny, a name of "
    "`rllm model list`, PROVIDER:MODEL, or ORG/NAME of the hub, fetched once and kept. With "
    "--base-url, the name that the server knows it by.",
)
@click.option(
    "--base-url",
    default="",
    metavar="URL",
    help="An OpenAI-compatible server; its key is read from OPENAI_API_KEY.",
)
@click.option(
    "--agent", default="", metavar="NAME", help="Who acts: a built-in agent, or file.py:Class or :function."
)
@click.option(
    "--evaluator", default="", metavar="NAME", help="What judges: a built-in grader, or my_flow.py:score."
)
@click.option(
    "--judge-model",
    default="",
    metavar="NAME",
    help="The model that an LLM judge asks, or that chooses for --select model, as for --model.",
)
@click.option("--judge-base-url", default="", metavar="URL", help="The server of --judge-model.")
@click.option(
    "--dataset", default="", metavar="FILE|NAME", help="A program's tasks: a file, or a registered data set."
)
@click.option(
    "--as-trained/--with-rules",
    "as_trained",
    default=None,
    help="Show the tasks of a world as `rllm train` does, without their rules, or with them.  [default: as "
    "trained for runs of it and built-in models that are here, else with rules]",
)
@click.option("--split", default="", help="Which tasks of a benchmark.  [default: its test split]")
@click.option(
    "--max-examples",
    "--num-tasks",
    "num_tasks",
    type=click.IntRange(min=1),
    help="At most so many tasks.  [default: all; 256 of a world that makes its own]",
)
@click.option(
    "--task-indices",
    "indices",
    default="",
    metavar="N,N-N",
    help="Only these of the tasks, by their places: 0, 3,7,12 or 0-9.",
)
@click.option(
    "--filter",
    "expression",
    default="",
    metavar="EXPR",
    help="Only tasks of whose fields this holds, so many of them at most: comparisons with and, or, not, in.",
)
@click.option(
    "--attempts", type=click.IntRange(min=1), default=1, show_default=True, help="Tries at each task."
)
@click.option(
    "--select",
    default="",
    metavar="tests|majority|model",
    help="Hand in one of the attempts at a software-engineering task, chosen without the hidden tests: by "
    "tests that its author could see, by equal patches, or by the model (or --judge-model).",
)
@click.option(
    "--k", "ks", type=click.IntRange(min=1), multiple=True, help="Tell pass@k, majority@k and best-of-k."
)
@click.option(
    "--sampling", multiple=True, metavar="K=V", help="Such as temperature=0.6, top_p=0.95, max_tokens=2048."
)
@click.option("--concurrency", type=click.IntRange(min=1), default=None, help="Episodes at the same time.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the sampling."
)
@click.option(
    "--threads", type=click.IntRange(min=0), default=0, help="Threads of torch; 0 takes one per core."
)
@trust_option
@click.option("--prompt-price", type=float, default=0.0, help="Of a million prompt tokens, to tell the cost.")
@click.option("--completion-price", type=float, default=0.0, help="Of a million sampled tokens.")
@click.option("--output", type=click.Path(path_type=Path), help="Where it is kept.  [default: in evals/]")
@click.option("--resume", is_flag=True, help="Go on with --output, and refuse to begin anew.")
@click.option("--fresh", is_flag=True, help="Begin anew beside an evaluation that is there.")
@click.option("--compare", "comparing", is_flag=True, help="Compare two stored evaluations.")
@click.option("--rescore", "rescoring", is_flag=True, help="Judge a stored evaluation again.")
@click.option(
    "--way", default="", help="Which part to compare, such as greedy.  [default: the first in both]"
)
@json_option
@sampling_file_option
@alias_options("sampling", EVAL_SAMPLING)
@refused_options(EVAL_REFUSED)
@accepted_switches("--no-ui", "--save-episodes", "--no-snapshot")
@click.pass_context
def command(
    ctx: click.Context,
    benchmark: str,
    others: tuple[str, ...],
    model: str,
    base_url: str,
    agent: str,
    evaluator: str,
    judge_model: str,
    judge_base_url: str,
    dataset: str,
    as_trained: bool | None,
    split: str,
    num_tasks: int | None,
    indices: str,
    expression: str,
    attempts: int,
    select: str,
    ks: tuple[int, ...],
    sampling: tuple[str, ...],
    concurrency: int | None,
    seed: int,
    threads: int,
    trust_remote_code: bool,
    prompt_price: float,
    completion_price: float,
    output: Path | None,
    resume: bool,
    fresh: bool,
    comparing: bool,
    rescoring: bool,
    way: str,
    as_json: bool,
) -> None:
    """Measure a model on a benchmark's held-out tasks.

    On the built-in engine every task is tried sampled at temperature 1 and greedily; with --sampling,
    --attempts or a server as you say. A failed episode counts as no success, and the counts say how many
    there were. Every episode is kept: the same command again goes on with what was interrupted, and repeats
    nothing. Ends with exit code 1 when every episode failed.

    A PROGRAM, named as for `rllm train`, is run on the tasks of --dataset. With --base-url and without
    --sampling it says itself how to sample.
    """
    prices = Prices(prompt=prompt_price, completion=completion_price)
    if comparing and rescoring:
        raise click.UsageError("--compare and --rescore are two different things; give one of them.", ctx)
    if comparing:
        _compare([benchmark, *others], way, as_json, ctx)
        return
    judge = judge_place(judge_model, judge_base_url)
    if rescoring:
        if not benchmark or others:
            raise click.UsageError("Give one stored evaluation to judge again: rllm eval --rescore DIR.", ctx)
        report = _rescore(Path(benchmark), evaluator, judge, output, ks, prices, as_json)
        ctx.exit(_exit_code(report))
    if not benchmark or others:
        raise click.UsageError("Say what to measure on: one benchmark or program.", ctx)
    if not is_program(benchmark, dataset):
        benchmark_named(benchmark)  # a misspelt name is told before anything is said of the model
    request = Asked(
        open_workers=open_workers,
        benchmark="" if is_program(benchmark, dataset) else benchmark,
        program=ProgramNames(program=benchmark, evaluator=evaluator, dataset=dataset)
        if is_program(benchmark, dataset)
        else None,
        place=resolve_model(model, base_url=base_url),
        agent=agent,
        as_trained=as_trained,
        evaluator=evaluator,
        split=split,
        num_tasks=num_tasks,
        indices=task_places(indices),
        expression=expression,
        attempts=attempts,
        sampling=assignments_of(sampling),
        seed=seed,
        concurrency=concurrency or 0,
        threads=threads,
        trust_remote_code=trust_remote_code,
        judge=judge,
        select=select,
    )
    ks = _ks(ks, attempts)
    directory = _directory(request, output, resume=resume, fresh=fresh)
    require_place(directory)
    report = _run(request, directory, ks, prices, as_json)
    summary = {**_head(request, report, directory), **report["reports"], "stamp": report["stamp"]}
    if as_json:
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

        try:
            return run(
                ready.run(
                    directory,
                    ks=ks,
                    prices=prices,
                    on_begin=begin,
                    on_result=_watch(progress, bar, prices, lines=not (as_json or progress.live.is_started)),
                    on_report=lambda report: write_page(directory),
                )
            )
        except KeyboardInterrupt as interrupt:
            raise click.Abort(_left_by(directory)) from interrupt


def _left_by(directory: Path) -> str:
    """The words for somebody who pressed Ctrl-C."""
    if not is_run(directory):
        return "Interrupted before anything was asked."
    words = shlex.join(["--output", str(directory)])
    return f"Interrupted. What was finished is in {directory}; the same command with {words} goes on."


def _watch(progress: Progress, bar: Any, prices: Prices, *, lines: bool) -> Callable[[str, Result], None]:
    """Running score, tokens, cost and failures beside the bar; as `lines` where nobody sees one."""
    counts: Counter[str] = Counter()
    began_at = told_at = time.monotonic()

    def on_result(way: str, result: Result) -> None:
        nonlocal began_at, told_at
        if not counts["all"]:  # until then a model may have been loaded
            began_at = told_at = time.monotonic()
        counts.update(
            all=1,
            right=int(result.is_correct),
            failed=int(result.has_failed),
            prompt=result.prompt_tokens,
            completion=result.completion_tokens,
        )
        status = f"{counts['right'] / counts['all']:.1%} right, {counts['completion']:,} tokens"
        if (cost := prices.cost(counts["prompt"], counts["completion"])) is not None:
            status += f", cost {cost:,.4f}"
        if counts["failed"]:
            status += f", {counts['failed']} failed"
        progress.update(bar, advance=1, told=status)
        if lines and (now := time.monotonic()) - told_at >= LINE_EVERY_S:
            told_at, task = now, progress.tasks[0]
            left_s = (now - began_at) / max(1, counts["all"] - 1) * ((task.total or 0) - task.completed)
            position = f"{task.completed:.0f} of {task.total:.0f}"
            err().print(f"{position}  {status}, {readable_seconds(left_s)} left", soft_wrap=True)

    return on_result


def _progress() -> Progress:
    console = err()
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
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


def _directory(request: Asked, output: Path | None, *, resume: bool, fresh: bool) -> Path:
    """Where the evaluation is kept: the same question has the same place."""
    if resume and fresh:
        raise ConfigError("--resume goes on and --fresh begins anew; give one of them.")
    if output is None:
        output = ROOT / _name_of(request)
    if resume and not is_run(output):
        raise ConfigError(
            f"There is no evaluation in {output} to go on with; leave --resume out to begin one."
        )
    if fresh:
        return unused_directory(output)
    return output


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
    }
    parts = [f"{name}{value}" for name, value in identity.items() if value not in ("", None)]
    return re.sub(r"[^\w.=+-]+", "_", "-".join([label, *parts]))[:180]


def _compare(names: list[str], way: str, as_json: bool, ctx: click.Context) -> None:
    paths = [Path(name) for name in names if name]
    if len(paths) != 2:
        raise click.UsageError("Give two stored evaluations to compare: rllm eval --compare A B.", ctx)
    first, second = (results_in(path) for path in paths)
    common_ways = [name for name in first if name in second]
    if way and way not in common_ways:
        raise ConfigError(f"There is no `{way}` in both; both have {', '.join(common_ways) or 'nothing'}.")
    if not common_ways:
        raise ConfigError(
            f"{paths[0]} has {', '.join(first)} and {paths[1]} has {', '.join(second)}: none in both."
        )
    ways = [way] if way else common_ways
    comparisons = {name: compare(first[name], second[name]) for name in ways}
    configs = [RunDirectory.read(path).config() for path in paths]
    differing = differing_conditions(configs[0], configs[1], ways)
    if as_json:
        as_dicts = {name: each.to_dict() for name, each in comparisons.items()}
        places = {"first": str(paths[0]), "second": str(paths[1])}
        print_json({**places, "differing": differing, "comparisons": as_dicts})
    else:
        print_comparison(paths[0], paths[1], comparisons, differing)


def _rescore(
    source: Path,
    evaluator: str,
    place: ModelPlace | None,
    output: Path | None,
    ks: tuple[int, ...],
    prices: Prices,
    as_json: bool,
) -> dict[str, Any]:
    config = RunDirectory.read(source).config()
    require_evaluation(config, source)
    judge = judge_of_stored(config, evaluator, place)
    assert judge.evaluator is not None, "a stored evaluation is judged by somebody"
    if place is not None:
        asyncio.run(answering(place))
    target = output or unused_directory(source.with_name(f"{source.name}-rescored"))
    rescoring = rescore(
        source,
        target,
        judge.evaluator,
        by=judge.name,
        evaluator_hash=judge.hash,
        ks=_ks(ks, config["attempts"]),
        prices=prices,
    )
    write_page(target)
    if as_json:
        num_changes = {way: len(each) for way, each in rescoring.changed.items()}
        print_json(
            {**rescoring.report, "output": str(target), "judged": rescoring.judged, "changed": num_changes}
        )
    else:
        print_rescored(source, target, rescoring)
    return rescoring.report


def _ks(ks: tuple[int, ...], attempts: int) -> tuple[int, ...]:
    """Which k are told: those that were asked for, else one and all where there are several attempts."""
    sizes = ks or (tuple(sorted({1, attempts})) if attempts > 1 else ())
    require_ks(sizes, attempts)
    return sizes
