import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rllm.agents.conversation import ConversationAgent
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.environments.countdown import CountdownEnv
from rllm.environments.countdown_tasks import countdown_tasks
from rllm.environments.single_turn import SingleTurnEnvironment
from rllm.errors import ConfigError, InferenceError
from rllm.eval.comparison import compare
from rllm.eval.evaluation import Evaluation, results_in
from rllm.eval.judging import task_evaluator
from rllm.eval.plan import EvaluationPlan, hash_of
from rllm.eval.report import Prices, details_of, report_of
from rllm.eval.rescoring import rescore
from rllm.eval.results import Result, asked_of
from rllm.inference.scripted import ScriptedClient
from rllm.rewards.evaluator import Evaluator
from rllm.store.episodes import EpisodeStore
from rllm.types.episode import Episode, Outcome
from rllm.types.messages import Message, SamplingParams
from rllm.types.task import EpisodeId

TASKS = [
    {**task, "category": "even" if place % 2 == 0 else "odd"}
    for place, task in enumerate(countdown_tasks("test", 12, num_numbers=2))
]


class _Env(CountdownEnv):
    """Countdown whose tasks have a category."""

    @staticmethod
    def from_dict(info: dict[str, Any]) -> CountdownEnv:
        return CountdownEnv.from_dict({key: value for key, value in info.items() if key != "category"})


def _result(
    task: str, attempt: int = 0, *, right: bool = False, outcome: Outcome = Outcome.SCORED, **more: Any
) -> Result:
    return Result(
        episode=EpisodeId(task_id=task, attempt=attempt),
        outcome=outcome,
        is_correct=right,
        reward=float(right),
        **more,
    )


def _plan(**changes: Any) -> EvaluationPlan:
    plan: dict[str, Any] = {
        "name": "countdown",
        "model": "scripted",
        "agent": "conversation",
        "evaluator": "environment",
        "ways": {"sampled": SamplingParams()},
        "dataset_hash": hash_of(TASKS),
    }
    return EvaluationPlan(**(plan | changes))


def _answer(messages: Sequence[Message]) -> str:
    first, second = messages[-1]["content"].split(" target ")[0].split()
    return f"{first}+{second}"


def _engine(client: Any, **options: Any) -> AgentExecutionEngine:
    return AgentExecutionEngine(
        ConversationAgent, _Env, rollout_engine=client, max_steps=1, n_parallel_agents=4, **options
    )


async def _evaluate(directory: Path, client: Any, plan: EvaluationPlan, **options: Any) -> dict[str, Any]:
    with Evaluation(directory, plan) as evaluation:
        await evaluation.run_ways(_engine(client, **options), TASKS)
        return evaluation.report(ks=(1, 2) if plan.attempts > 1 else ())


async def test_a_report_has_every_count_and_a_stamp(tmp_path: Path) -> None:
    told = await _evaluate(tmp_path / "e", ScriptedClient(_answer), _plan())
    report = told["reports"]["sampled"]
    assert report["attempted"] == report["scored"] + report["truncated"] + report["failed"] == 12
    assert 0 < report["successes"] < 12
    assert set(report["categories"]) == {"even", "odd"}
    assert sum(each["attempted"] for each in report["categories"].values()) == 12
    assert report["tokens"]["completion"] > 0
    assert told["stamp"]["dataset_hash"] == hash_of(TASKS)
    assert len(told["stamp"]["prompt_hash"]) == 16


async def test_an_interrupted_evaluation_makes_only_what_is_missing(tmp_path: Path) -> None:
    asked: list[str] = []

    def counted(messages: Sequence[Message]) -> str:
        asked.append(messages[-1]["content"])
        return _answer(messages)

    plan = _plan(attempts=2)
    with Evaluation(tmp_path / "e", plan) as evaluation:
        enough = asyncio.Event()

        def stop_after_seven(way: str, result: Result) -> None:
            if len(evaluation.results["sampled"]) == 7:
                enough.set()

        run = asyncio.create_task(
            evaluation.run_ways(_engine(ScriptedClient(counted)), TASKS, stop_after_seven)
        )
        await enough.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    with EpisodeStore.open(tmp_path / "e" / "store.sqlite", read_only=True) as store:
        saved = store.count("sampled")
    assert saved >= 7
    asked.clear()
    told = await _evaluate(tmp_path / "e", ScriptedClient(counted), plan)
    assert len(asked) == 24 - saved
    whole = await _evaluate(tmp_path / "whole", ScriptedClient(_answer), plan)
    for name in ("success", "attempted", "pass_at_k", "categories", "tokens"):
        assert told["reports"]["sampled"][name] == whole["reports"]["sampled"][name]
    assert told["stamp"]["prompt_hash"] == whole["stamp"]["prompt_hash"]


async def test_infrastructure_failures_are_counted_and_made_again_on_resume(tmp_path: Path) -> None:
    def broken(messages: Sequence[Message]) -> str:
        if (
            messages[-1]["content"]
            == f"{' '.join(map(str, TASKS[3]['numbers']))} target {TASKS[3]['target']}"
        ):
            raise InferenceError("the server is gone")
        return _answer(messages)

    told = await _evaluate(tmp_path / "e", ScriptedClient(broken), _plan(), api_retries=0)
    report = told["reports"]["sampled"]
    assert (report["attempted"], report["failed"]) == (12, 1)
    assert report["success"] == report["successes"] / 12
    assert report["success_without_failed"] == report["successes"] / 11
    assert list(report["failures"]) == ["infrastructure_failure: the server is gone"]
    again = await _evaluate(tmp_path / "e", ScriptedClient(_answer), _plan())
    assert again["reports"]["sampled"]["failed"] == 0
    assert again["reports"]["sampled"]["attempted"] == 12
    assert len(results_in(tmp_path / "e")["sampled"]) == 12


async def test_a_server_that_is_gone_is_not_asked_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rllm.eval.evaluation.MAX_CONSECUTIVE_INFRA_FAILURES", 4)
    asked: list[str] = []

    def dies(messages: list[dict[str, Any]]) -> str:
        asked.append(messages[-1]["content"])
        if len(asked) > 3:
            raise InferenceError("the server is gone")
        return _answer(messages)

    with pytest.raises(InferenceError, match=r"4 attempts .*\(the server is gone\)"):
        await _evaluate(tmp_path / "e", ScriptedClient(dies), _plan(), api_retries=0)
    assert len(asked) < len(TASKS)
    told = await _evaluate(tmp_path / "e", ScriptedClient(_answer), _plan())
    assert (told["reports"]["sampled"]["attempted"], told["reports"]["sampled"]["failed"]) == (12, 0)


async def test_another_plan_is_refused_with_what_differs(tmp_path: Path) -> None:
    await _evaluate(tmp_path / "e", ScriptedClient(_answer), _plan())
    with pytest.raises(ConfigError, match=r"`seed` was 0 and is 1.*--fresh"):
        Evaluation(tmp_path / "e", _plan(seed=1))


def test_several_attempts_are_told_by_k_and_by_majority() -> None:
    results = [
        _result("a", 0, right=True, extracted="4"),
        _result("a", 1, extracted="5"),
        _result("a", 2, extracted="5"),
        _result("b", 0, extracted="9"),
        _result("b", 1, right=True, extracted="7"),
        _result("b", 2, right=True, extracted="7"),
    ]
    told = details_of(results, ks=(1, 3))
    assert told["pass_at_k"]["1"]["value"] == pytest.approx((1 / 3 + 2 / 3) / 2)
    assert told["pass_at_k"]["3"]["value"] == 1.0
    assert told["majority_at_k"]["3"]["value"] == 0.5
    assert told["majority_at_k"]["1"]["value"] == 0.5
    assert told["best_of_k"]["3"]["value"] == 1.0
    with pytest.raises(ConfigError, match="pass@4 of 3 attempts"):
        details_of(results, ks=(4,))


def test_a_vote_counts_what_answers_say_and_not_how() -> None:
    results = [
        _result("a", 0, extracted="7"),
        _result("a", 1, right=True, extracted="0.5"),
        _result("a", 2, right=True, extracted=r"\frac{1}{2}"),
        _result("b", 0, right=True, extracted="4"),
        _result("b", 1, extracted="0.5"),
        _result("b", 2, extracted="1/2"),
    ]
    assert details_of(results, ks=(3,))["majority_at_k"]["3"]["value"] == 0.5


def test_the_report_says_how_its_interval_was_made() -> None:
    assert report_of([_result("a"), _result("b", right=True)]).interval_method == "wilson"
    assert report_of([_result("a"), _result("a", 1, right=True), _result("b")]).interval_method == "bootstrap"


def test_majority_is_left_out_where_nobody_extracts_answers() -> None:
    told = details_of([_result("a", 0, right=True), _result("a", 1)], ks=(2,))
    assert "majority_at_k" not in told


def test_cost_is_told_only_where_prices_are() -> None:
    results = [_result("a", prompt_tokens=1_000_000, completion_tokens=500_000)]
    assert details_of(results)["cost"] is None
    assert details_of(results, prices=Prices(prompt=2.0, completion=8.0))["cost"] == 6.0
    with pytest.raises(ConfigError, match="price"):
        Prices(prompt=-1.0)


def test_the_interval_of_several_attempts_knows_that_they_share_tasks() -> None:
    """Ten attempts at each of ten tasks, half of them always solved: that is ten facts, not a hundred."""
    results = [_result(f"t{task}", each, right=task < 5) for task in range(10) for each in range(10)]
    low, high = report_of(results).success_interval
    assert high - low > 0.5
    always = report_of([_result("a", each, right=True) for each in range(8)])
    assert always.success_interval[0] < 0.5


def test_a_comparison_pairs_tasks_and_finds_what_changed() -> None:
    first = [_result(f"t{number}", right=number < 10) for number in range(40)]
    second = [_result(f"t{number}", right=number < 28 and number != 3) for number in range(1, 41)]
    found = compare(first, second)
    assert (found.tasks, found.only_in_first, found.only_in_second) == (39, 1, 1)
    assert (found.test, found.interval_method) == ("mcnemar", "newcombe")
    assert (found.first_failed, found.second_failed) == (0, 0)
    assert [each.task_id for each in found.worse] == ["t3"]
    assert len(found.better) == 18
    assert found.is_significant
    low, high = found.difference_interval
    assert found.difference == pytest.approx(17 / 39)
    assert low < found.difference < high
    with pytest.raises(ConfigError, match="in common"):
        compare(first, [_result("elsewhere")])


def test_a_comparison_of_tasks_that_repeat_an_instance_is_of_instances() -> None:
    """Four instances, sixteen tasks of each: that all sixteen of one changed is one change."""
    first = [_result(f"t{number}", instance=str(number % 4)) for number in range(64)]
    second = [_result(f"t{number}", right=number % 4 < 2, instance=str(number % 4)) for number in range(64)]
    found = compare(first, second)
    assert (found.difference, found.interval_method, found.test) == (0.5, "bootstrap", "sign_flip")
    assert not found.is_significant
    assert found.difference_interval[0] <= 0.0
    distinct = compare([replace(each, instance="") for each in first], second)
    assert (distinct.test, distinct.is_significant) == ("mcnemar", True)


def test_tasks_of_one_name_that_are_other_tasks_are_not_compared() -> None:
    first = [_result("lake-0", right=True, asked="four by four"), _result("lake-1", asked="same")]
    second = [_result("lake-0", asked="eight by eight"), _result("lake-1", asked="same")]
    with pytest.raises(ConfigError, match=r"1 tasks, .*'lake-0'.*other"):
        compare(first, second)
    assert asked_of({"question": "short", "grading": {"answer": "4"}}) == asked_of(
        {"question": "put otherwise", "grading": {"answer": "4"}, "grader": "exact"}
    )
    assert asked_of({"task_id": "lake-0", "size": 4}) != asked_of({"task_id": "lake-0", "size": 8})


def test_a_comparison_of_several_attempts_uses_shares() -> None:
    first = [_result(f"t{task}", each, right=each == 0) for task in range(20) for each in range(4)]
    second = [_result(f"t{task}", each, right=each < 3) for task in range(20) for each in range(4)]
    found = compare(first, second)
    assert found.test == "sign_flip"
    assert found.difference == 0.5
    assert found.p_value < 0.01


async def test_stored_episodes_are_judged_again_without_the_model(tmp_path: Path) -> None:
    await _evaluate(tmp_path / "e", ScriptedClient(_answer), _plan())

    def generous(task: dict[str, Any], episode: Episode) -> bool:
        return "+" in episode.trajectories[0].steps[-1].model_response

    with pytest.raises(ConfigError, match="names no grader"):
        rescore(tmp_path / "e", tmp_path / "nobody", task_evaluator())
    assert not (tmp_path / "nobody").exists()
    again = rescore(tmp_path / "e", tmp_path / "again", Evaluator(generous))
    assert again.judged == 12
    assert again.report["reports"]["sampled"]["success"] == 1.0
    assert len(again.changed["sampled"]) == 12 - sum(
        each.is_correct for each in results_in(tmp_path / "e")["sampled"]
    )
    assert again.report["stamp"]["rescored_from"] == str(tmp_path / "e")
    assert all(each.is_correct for each in results_in(tmp_path / "again")["sampled"])


async def test_an_answer_that_the_second_judge_cannot_judge_has_failed_and_is_no_zero(tmp_path: Path) -> None:
    await _evaluate(tmp_path / "e", ScriptedClient(_answer), _plan(attempts=2))

    async def picky(task: dict[str, Any], episode: Episode) -> bool:
        if episode.task_id == TASKS[5]["task_id"]:
            raise ValueError("not this one")
        return True

    again = rescore(
        tmp_path / "e", tmp_path / "again", Evaluator(picky), by="picky", evaluator_hash="h", ks=(2,)
    )
    report = again.report["reports"]["sampled"]
    assert (report["attempted"], report["scored"], report["failed"], report["successes"]) == (24, 22, 2, 22)
    assert report["success_without_failed"] == 1.0
    assert report["pass_at_k"]["2"]["value"] == pytest.approx(11 / 12)
    assert list(report["failures"]) == [
        "infrastructure_failure: picky could not judge: ValueError: not this one"
    ]
    assert (again.report["stamp"]["evaluator"], again.report["stamp"]["evaluator_hash"]) == ("picky", "h")
    assert again.judged == 24


async def test_a_report_shows_the_strict_and_the_lenient_reading_side_by_side(tmp_path: Path) -> None:
    said = ["\\boxed{5}", "It is \\boxed{5}, because 2+3=5.", "\\boxed{6}, because 3+3=6.", "Hm."]
    tasks = [
        {"task_id": str(number), "question": text, "grader": "math", "grading": {"answer": "5"}}
        for number, text in enumerate(said)
    ]
    engine = AgentExecutionEngine(
        ConversationAgent,
        SingleTurnEnvironment,
        rollout_engine=ScriptedClient(lambda messages: messages[-1]["content"]),
        max_steps=1,
    )
    with Evaluation(tmp_path / "e", _plan(evaluator="math", dataset_hash=hash_of(tasks))) as evaluation:
        await evaluation.run_ways(engine, tasks)
        told = evaluation.report()
        evaluation.finish(told)
    report = told["reports"]["sampled"]
    assert {name: each["success"] for name, each in report["readings"].items()} == {
        "strict": 0.25,
        "lenient": 0.5,
    }
    assert report["success"] == 0.25, "a reward is of the strict reading"
    assert report["readings"]["lenient"]["interval_method"] == "wilson"
    again = rescore(tmp_path / "e", tmp_path / "again", task_evaluator())
    assert again.report["reports"]["sampled"]["readings"] == report["readings"]
    plain = await _evaluate(tmp_path / "plain", ScriptedClient(_answer), _plan())
    assert "readings" not in plain["reports"]["sampled"], "a world reads no text"
