"""Views of evaluations: tables in the terminal, and a page that can be sent to somebody."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from rllm.build.asked import Asked
from rllm.cli.terminal import (
    facts,
    is_partial,
    mean_return,
    out,
    print_next,
    print_sentence,
    rate,
    rate_with_interval,
    score_with_interval,
    table,
)
from rllm.eval.catalogue import benchmark_named
from rllm.eval.comparison import Change, Comparison
from rllm.eval.rescoring import Rescored
from rllm.eval.words import INTERVAL_METHODS, baselines_sentence, endings_text, instances_sentence
from rllm.files.atomic import write_atomic
from rllm.store.run_directory import RunDirectory, is_run
from rllm.types.episode import Outcome
from rllm.view.export import default_address, exported_page, requests_of
from rllm.view.sources import Sources

PAGE = "report.html"
_CHANGES_SHOWN = 10
_COUNTS = ("attempted", "scored", "truncated", "failed")
_SHOWN = {
    "training": "Shown as in training; --with-rules explains the rules.",
    "benchmark": "Shown with rules; --as-trained shows tasks as training does.",
}
_MADE_AGAIN = str(Outcome.INFRASTRUCTURE_FAILURE)


def write_page(directory: Path) -> Path:
    """The page of a finished evaluation as a file beside its episodes."""
    sources = Sources([directory])
    address = default_address(sources)
    write_atomic(directory / PAGE, exported_page(sources, address, requests_of(sources, address)))
    return directory / PAGE


def print_reports(request: Asked, report: Mapping[str, Any], directory: Path, page: Path) -> None:
    console, stamp, reports = out(), report["stamp"], report["reports"]
    tasks = request.program.dataset if request.program else f"{stamp['split']} tasks"
    print_sentence(console, f"\n{request.name}, {tasks}: {request.place.title}", style="bold")
    if dtype := stamp.get("dtype"):
        print_sentence(
            console, f"The model computes in {dtype}; some answers differ from float32.", style="dim"
        )
    if settings := stamp.get("settings"):
        is_own_agent = stamp["agent"] != benchmark_named(request.benchmark).agent
        instructions = (
            f"{stamp['agent']} says itself what the model is told."
            if is_own_agent
            else _SHOWN[settings["of"]]
        )
        print_sentence(console, instructions, style="dim")
    console.print(_scores(reports))
    print_sentence(console, Text(f"{_instances(reports)}{_baselines(report)}"))
    console.print(
        f"attempted = scored + truncated + failed; a failure counts as no success. {_method(reports)}",
        style="dim",
    )
    if skip_reasons := stamp.get("skipped"):
        name, why = next(iter(skip_reasons.items()))
        print_sentence(
            console,
            f"{len(skip_reasons)} tasks cannot be run here and were skipped. The first is {name}: {why}",
            style="yellow",
        )
    if any(each.get("readings") for each in reports.values()):
        console.print(_readings(reports))
        if sentence := _published_reading(request):
            print_sentence(console, sentence, style="dim")
    for way, each in reports.items():
        if "pass_at_k" in each:
            console.print(_by_k(way, each))
        if "selection" in each:
            _print_selection(console, each["selection"])
        if len(each.get("categories", {})) > 1:
            console.print(_categories(way, each["categories"]))
        _print_endings(console, way, each)
        _print_failures(console, way, each)
        if each["cut_off"]:
            limit = stamp["ways"][way]["max_tokens"] if stamp["ways"][way] else "what it may be"
            own = (
                "the program's own max_tokens, or "
                if request.program and "max_tokens" not in request.sampling
                else ""
            )
            print_sentence(
                console,
                f"{way}: {each['cut_off']} attempts ran into {own}max_tokens ({limit}); "
                "--sampling max_tokens=N allows more.",
                style="yellow",
            )
        if cut := each.get("thoughts_cut"):
            print_sentence(
                console,
                f"{way}: the thought of {cut} attempts was cut, at --max-thinking-tokens or at max_tokens.",
                style="yellow",
            )
    if any(kind.startswith(_MADE_AGAIN) for each in reports.values() for kind in each["failures"]):
        console.print("The same command makes the attempts again that the infrastructure failed.")
    tokens = {
        name: sum(each["tokens"][name] for each in reports.values()) for name in ("prompt", "completion")
    }
    costs = [each["cost"] for each in reports.values() if each["cost"] is not None]
    usage = f"{tokens['prompt']:,} prompt and {tokens['completion']:,} sampled tokens"
    console.print(usage + (f", cost {sum(costs):,.4f}" if costs else ""), style="dim")
    for way, each in reports.items():
        if (p50 := each["latency_s"]["p50"]) is not None:
            latency = f"half of the attempts waited up to {p50:.3g} s for the model"
            console.print(f"{way}: {latency}, 95 % up to {each['latency_s']['p95']:.3g} s", style="dim")
    console.print(f"\nEpisodes {directory}", soft_wrap=True)
    console.print(f"Page     {page}", soft_wrap=True)
    print_next(console, _following(request, directory))


def show_evaluation(directory: RunDirectory, state: Text) -> None:
    """Print what `rllm runs show` says of a stored evaluation."""
    console, config, summary = out(), directory.config(), directory.summary()
    console.print(Text.assemble((str(directory.path), "bold"), "  ", state), soft_wrap=True)
    names = ("name", "split", "agent", "evaluator", "base_url", "attempts", "seed")
    lines: list[tuple[str, str | Text]] = [(each, str(config[each])) for each in names if config.get(each)]
    console.print(facts([("model", str(config["model"]["path"])), *lines]))
    if summary is not None:
        console.print(_scores(summary["reports"]))
        if "baselines" in summary:  # one of an earlier version has none
            print_sentence(console, Text(f"{_instances(summary['reports'])}{_baselines(summary)}"))
        for way, report in summary["reports"].items():
            _print_endings(console, way, report)
            _print_failures(console, way, report)
        if any(each.get("readings") for each in summary["reports"].values()):
            console.print(_readings(summary["reports"]))


def print_comparison(
    first: Path,
    second: Path,
    comparisons: Mapping[str, Comparison],
    differing: Mapping[str, tuple[Any, Any]],
) -> None:
    """`differing`: what the two differ in beside their models."""
    console = out()
    comparison_table = table(
        "", "tasks", str(first), str(second), "difference [95 % interval]", "p", right=("tasks", "p")
    )
    for way, each in comparisons.items():
        low, high = each.difference_interval
        style = ("green" if each.difference > 0 else "red") if each.is_significant else "dim"
        comparison_table.add_row(
            way,
            str(each.tasks),
            rate(each.first),
            rate(each.second),
            Text(f"{100 * each.difference:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}] points", style=style),
            f"{each.p_value:.3g}",
        )
    console.print(comparison_table)
    for way, each in comparisons.items():
        verdict = "differ" if each.is_significant else "cannot be told apart"
        print_sentence(
            console,
            f"{way}: at 5 % the two {verdict} ({each.test.replace('_', ' ')} over {each.tasks} tasks, "
            f"{len(each.better)} better, {len(each.worse)} worse; interval: {each.interval_method}).",
        )
        for label, changes in (("better", each.better), ("worse", each.worse)):
            if changes:
                print_sentence(console, f"  {label}: {_change_list(changes)}", style="dim")
        if each.first_failed or each.second_failed:
            print_sentence(
                console,
                f"  attempts that failed, and count as no success: {each.first_failed} and "
                f"{each.second_failed}.",
                style="yellow",
            )
        if each.only_in_first or each.only_in_second:
            alone = f"{each.only_in_first} and {each.only_in_second}"
            print_sentence(console, f"  left out: {alone} tasks that only one has.", style="yellow")
    if differing:
        pairs = "; ".join(f"{name}: {one} and {other}" for name, (one, other) in differing.items())
        print_sentence(console, f"The two differ in more than the model: {pairs}.", style="yellow")
    print_next(
        console,
        [(["rllm", "runs", "show", str(second), "--phase", next(iter(comparisons))], "look at the episodes")],
    )


def print_rescored(source: Path, target: Path, rescoring: Rescored) -> None:
    console = out()
    num_changes = sum(len(each) for each in rescoring.changed.values())
    print_sentence(
        console, f"\n{source}, judged again by {rescoring.report['stamp']['evaluator']}", style="bold"
    )
    console.print(_scores(rescoring.report["reports"]))
    for way, each in rescoring.report["reports"].items():
        _print_failures(console, way, each)
    console.print(
        f"{num_changes} of {rescoring.judged} verdicts changed.", style="yellow" if num_changes else "dim"
    )
    print_next(console, [(["rllm", "eval", "--compare", str(source), str(target)], "see where")])


def _print_selection(console: Console, selection: Mapping[str, Any]) -> None:
    """The success of handing in one attempt a task, between chance and an oracle."""
    num_attempts, num_tasks = selection["attempts"], selection["tasks"]
    rows = (
        ("pass@1", "pass_at_1"),
        (f"selected by {selection['by']}", "selected"),
        (f"pass@{num_attempts}, an oracle's", "pass_at_n"),
    )
    shown = table(f"one of {num_attempts} attempts", "success [95 % interval]")
    for title, name in rows:
        low, high = selection[name]["interval"]
        shown.add_row(title, f"{rate(selection[name]['value'])} [{100 * low:.1f}, {100 * high:.1f}]")
    console.print(shown)
    if selection["unsettled"]:
        print_sentence(
            console,
            f"At {selection['unsettled']} of {num_tasks} tasks the selector did not tell the best attempts "
            "apart, so the first of them was taken.",
            style="yellow",
        )


def _print_endings(console: Console, way: str, report: Mapping[str, Any]) -> None:
    endings = report.get("endings", {})  # a report of an earlier version has none
    if not endings:
        return
    late = any("timeout" in name for name in endings)
    hint = " --episode-timeout SECONDS allows more time without the model." if late else ""
    print_sentence(console, f"{way} ended: {endings_text(endings)}.{hint}", style="yellow" if late else "dim")


def _print_failures(console: Console, way: str, report: Mapping[str, Any]) -> None:
    for kind, count in report["failures"].items():
        print_sentence(console, f"{way}: {count} × {kind}", style="red")


def _scores(reports: Mapping[str, Any]) -> Any:
    has_scores = any("score" in report for report in reports.values())
    has_returns = any(
        is_partial(report["mean_reward"], report["success_without_failed"]) for report in reports.values()
    )
    score_table = table(
        "",
        "success [95 % interval]",
        *(("return",) if has_returns else ()),
        *(("score, of 100",) if has_scores else ()),
        "without failed",
        *_COUNTS,
        "turns",
        right=(*_COUNTS, "turns"),
        spare=(
            *("failed", "attempted"),
            *(("score, of 100",) if has_scores else ()),
            *("truncated", "scored", "turns", "without failed"),
        ),
    )
    for name, report in reports.items():
        score_table.add_row(
            name,
            rate_with_interval(report["success"], report["success_interval"]),
            *((mean_return(report["mean_reward"]),) if has_returns else ()),
            *(
                (score_with_interval(report.get("score"), report.get("score_interval")),)
                if has_scores
                else ()
            ),
            rate(report["success_without_failed"]),
            *(str(report[count]) for count in _COUNTS),
            f"{report['mean_turns']:.1f}",
        )
    return score_table


def _instances(reports: Mapping[str, Any]) -> str:
    """The number of instances behind the scores."""
    return instances_sentence(next(iter(reports.values())))


def _baselines(report: Mapping[str, Any]) -> str:
    return f" {baselines_sentence(report['baselines'])}" if report["baselines"] else ""


_READINGS = {
    "strict": "strict reading",
    "lenient": "lenient reading",
    "sum": "by the sum",
    "token": "per token",
    "character": "per character",
}
"""Column titles of the readings of an answer and of the ways to compare choices."""


def _readings(reports: Mapping[str, Any]) -> Any:
    """The pay of each reading of the same answers."""
    names = dict.fromkeys(name for report in reports.values() for name in report.get("readings", ()))
    reading_table = table("success", *(_READINGS.get(str(name), str(name)) for name in names))
    for name, report in reports.items():
        if read := report.get("readings"):
            cells = (read[each] for each in names)
            reading_table.add_row(
                name, *(rate_with_interval(each["success"], each["success_interval"]) for each in cells)
            )
    return reading_table


def _published_reading(request: Asked) -> str:
    reading = "" if request.program else benchmark_named(request.benchmark).published_reading
    if reading == "likelihood":
        return (
            ""
            if request.likelihood
            else f"Most published figures of {request.name} compare how likely a model finds each choice "
            "and read no text, so neither column is beside them: --likelihood character does as they do."
        )
    if request.likelihood:
        return ""
    return f"Published figures of {request.name} are of the {reading} reading." if reading else ""


def _method(reports: Mapping[str, Any]) -> str:
    """The method of the scores' intervals."""
    methods = {each["interval_method"] for each in reports.values()}
    return f"Intervals: {' and '.join(INTERVAL_METHODS[each] for each in sorted(methods))}."


def _by_k(way: str, report: Mapping[str, Any]) -> Any:
    measures = [name for name in ("pass_at_k", "majority_at_k", "best_of_k") if name in report]
    measure_table = table(
        way, *(name.replace("_at_", "@").replace("best_of_k", "best of k") for name in measures)
    )
    for k in report["pass_at_k"]:
        cells = (report[name].get(k) for name in measures)
        measure_table.add_row(
            f"k = {k}", *(rate_with_interval(each["value"], each["interval"]) for each in cells if each)
        )
    return measure_table


def _categories(way: str, categories: Mapping[str, Any]) -> Any:
    category_table = table(f"{way}, by category", "success", "attempted", right=("attempted",))
    for name, each in categories.items():
        category_table.add_row(
            name, rate_with_interval(each["success"], each["success_interval"]), str(each["attempted"])
        )
    return category_table


def _change_list(changes: list[Change]) -> str:
    text = ", ".join(
        f"{each.task_id} ({each.before:.0%} → {each.after:.0%})" for each in changes[:_CHANGES_SHOWN]
    )
    return text + (f" and {len(changes) - _CHANGES_SHOWN} more" if len(changes) > _CHANGES_SHOWN else "")


def _following(request: Asked, directory: Path) -> list[tuple[list[str], str]]:
    """The commands to type next, and their effects: this evaluation first."""
    look = (["rllm", "runs", "show", str(directory)], "look at the episodes")
    is_of_run = not request.place.is_server and is_run(Path(request.place.path))
    if is_of_run or (request.program is None and "train" not in benchmark_named(request.benchmark).splits):
        return [look]
    # A file is measured whole, so training on it would be training on what was measured.
    if request.program is not None and Path(request.program.dataset).is_file():
        return [look]
    name = request.program.program if request.program else request.benchmark
    flags = {"--agent": request.agent, "--evaluator": request.evaluator}
    if request.program is not None:
        flags["--dataset"] = request.program.dataset
    flags["--model"] = "builtin:tiny" if request.place.is_server else request.place.path
    words = [word for flag, value in flags.items() if value for word in (flag, value)]
    purpose = "train a model that is here on it" if request.place.is_server else "train it further"
    return [look, (["rllm", "train", name, *words, "--fresh"], purpose)]
