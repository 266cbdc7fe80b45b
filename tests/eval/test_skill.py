"""What training was worth: scores, skill over what needs none, kinds that collapse. By hand and by brute
force."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from rllm.eval.report import report_of
from rllm.eval.results import Result, result_of
from rllm.eval.skill import Measure, SkillVerdict, by_kind, learning_facts, measure_of, score_of, skill_of
from rllm.eval.statistics import effective_size, percentiles, resampled_means, wilson_interval
from rllm.eval.task_facts import TaskFacts, also_in, task_facts
from rllm.types.episode import Episode, Outcome, Trajectory
from rllm.types.task import EpisodeId, Task, tasks_of


def results(rights: Sequence[bool], rewards: Sequence[float] | None = None) -> list[Result]:
    return [
        Result(
            episode=EpisodeId(task_id=str(place)),
            outcome=Outcome.SCORED,
            is_correct=right,
            reward=float(right) if rewards is None else rewards[place],
        )
        for place, right in enumerate(rights)
    ]


def facts_of(
    count: int, *, repeat: int = 1, kinds: Sequence[str] = (), paid: Mapping[str, float] | None = None
) -> TaskFacts:
    """`repeat` tasks of each instance; every policy with the same return on each task."""
    ids = [str(place) for place in range(count)]
    return TaskFacts(
        instances={name: str(int(name) // repeat) for name in ids},
        kinds=dict(zip(ids, kinds or [""] * count, strict=True)),
        baselines={policy: dict.fromkeys(ids, value) for policy, value in (paid or {}).items()},
    )


def learned(
    before: Sequence[bool], greedy: Sequence[bool], after: Sequence[bool], facts: TaskFacts
) -> dict[str, object]:
    told = learning_facts(before=results(before), greedy=results(greedy), after=results(after), facts=facts)
    return dict(told["skill"], kinds=told["kinds"])


def test_a_policy_that_only_came_to_the_constant_has_gained_nothing() -> None:
    """What "always add" comes to is no skill, however far the warm start was below it."""
    sums = [place % 3 != 0 for place in range(240)]
    before = [place % 5 == 0 for place in range(240)]
    constant = {str(place): float(is_sum) for place, is_sum in enumerate(sums)}
    facts = facts_of(
        240, kinds=["sums" if each else "differences" for each in sums], paid={"random": 0.1, "optimum": 1.0}
    )
    facts = TaskFacts(
        instances=facts.instances, kinds=facts.kinds, baselines={**facts.baselines, "always +": constant}
    )
    told = learned(before, before, sums, facts)
    assert told["reference"] == "always +"
    assert told["difference"] == 0.0
    assert told["verdict"] == SkillVerdict.NO_DIFFERENCE
    differences, gained = told["kinds"]  # type: ignore[misc]
    assert (differences["kind"], differences["after"], differences["verdict"]) == (
        "differences",
        0.0,
        SkillVerdict.LOST,
    )
    assert (gained["kind"], gained["tasks"], gained["verdict"]) == ("sums", 160, SkillVerdict.GAINED)


def test_skill_is_over_the_greatest_of_baselines_and_the_greedy_start() -> None:
    after, greedy = [place < 180 for place in range(200)], [place < 100 for place in range(200)]
    told = learned(greedy, greedy, after, facts_of(200, paid={"random": 0.2, "optimum": 1.0}))
    assert (told["reference"], told["difference"]) == ("before, greedy", pytest.approx(0.4))
    assert told["verdict"] == SkillVerdict.GAINED
    told = learned(
        greedy, greedy, after, facts_of(200, paid={"random": 0.2, "always x": 0.95, "optimum": 1.0})
    )
    assert (told["reference"], told["verdict"]) == ("always x", SkillVerdict.LOST)
    assert told["difference"] == pytest.approx(-0.05)


def test_tasks_that_repeat_an_instance_make_nothing_surer() -> None:
    """Sixteen copies of each of 16 instances say as much as the 16, and far less than 256."""
    rng = np.random.default_rng(0)
    right = rng.random(16) < 0.6
    copies = [bool(right[place // 16]) for place in range(256)]
    facts = facts_of(256, repeat=16)
    nothing = [False] * 256
    (low, high), _ = learned(nothing, nothing, copies, facts)["interval"], None  # type: ignore[misc]
    alone, _ = skill_of(
        {str(k): float(v) for k, v in enumerate(right)},
        {"x": dict.fromkeys(map(str, range(16)), 0.0)},
        {str(k): str(k) for k in range(16)},
    )
    assert (low, high) == pytest.approx(alone.interval)
    wilson_low, wilson_high = wilson_interval(sum(copies), 256)
    assert high - low > 3 * (wilson_high - wilson_low)
    report = report_of(facts.described(results(copies)))
    assert (report.distinct, report.effective_size, report.interval_method) == (16, 16.0, "bootstrap")
    assert report.success_interval == pytest.approx((low, high))


def test_intervals_of_repeated_instances_cover_as_often_as_they_say() -> None:
    """64 tasks of 40 instances of uneven numbers, each won or lost in all its tasks alike."""
    rng, covered, trials = np.random.default_rng(3), 0, 200
    weights = rng.dirichlet(np.ones(40))
    chances = rng.random(40)
    truth = float(weights @ chances)
    for trial in range(trials):
        drawn = rng.choice(40, size=400, p=weights)
        # The instances of this world are drawn anew too: each has a chance of its own.
        wins = rng.random(40) < chances
        values = wins[drawn].astype(float)[:, None]
        draws = resampled_means(values, drawn.tolist(), seed=trial, resamples=300)[:, 0]
        low, high = percentiles(draws, len(set(drawn.tolist())))
        covered += low <= truth <= high
    assert covered / trials > 0.85


def test_effective_size_is_that_of_kish() -> None:
    assert effective_size(list("abcd")) == 4.0
    assert effective_size(list("aaab")) == 16 / 10
    assert effective_size([]) == 0.0


def test_a_score_is_0_for_chance_and_100_for_the_optimum() -> None:
    facts = facts_of(100, paid={"random": 0.25, "optimum": 0.85})
    for share, score in ((0.25, 0.0), (0.85, 100.0), (0.55, 50.0)):
        told = score_of(results([place < round(100 * share) for place in range(100)]), facts)
        assert told["score"] == pytest.approx(score)
        assert told["score_interval"][0] < score < told["score_interval"][1]
    assert score_of(results([True]), facts_of(1, paid={"random": 0.5})) == {}, "nobody knows the optimum"
    assert score_of(results([True]), facts_of(1, paid={"random": 1.0, "optimum": 1.0})) == {}, (
        "chance is the optimum"
    )


def test_a_task_that_pays_in_shares_is_measured_by_its_return() -> None:
    assert measure_of(results([True, False])) is Measure.SUCCESS
    assert measure_of(results([True, False]), results([True, False], [1.0, -0.5])) is Measure.RETURN
    told = learning_facts(
        before=results([False] * 8, [0.25] * 8),
        greedy=results([False] * 8, [0.25] * 8),
        after=results([True] * 8, [0.75] * 8),
        facts=facts_of(8, paid={"random": 0.5}),
    )["skill"]
    assert (told["measure"], told["reference"], told["difference"]) == ("return", "random", 0.25)
    assert told["verdict"] == SkillVerdict.NO_DIFFERENCE, "eight alike are no proof"


def test_one_instance_proves_nothing() -> None:
    facts = facts_of(64, repeat=64)
    told = learned([False] * 64, [False] * 64, [True] * 64, facts)
    assert (told["difference"], told["verdict"]) == (1.0, SkillVerdict.NO_DIFFERENCE)


def test_kinds_are_of_the_same_pairs() -> None:
    facts = facts_of(8, kinds=["a", "b"] * 4)
    before, after = (
        {str(place): float(place in won) for place in range(8)} for won in ((0, 1), (0, 2, 4, 6))
    )
    assert [
        (each["kind"], each["tasks"], each["before"], each["after"]) for each in by_kind(before, after, facts)
    ] == [
        ("a", 4, 0.25, 1.0),
        ("b", 4, 0.25, 0.0),
    ]


def test_rows_are_one_instance_whatever_they_are_called() -> None:
    rows: list[Task | dict[str, str]] = [
        {"id": "a", "question": "1 + 1"},
        {"task_id": "b", "question": "1 + 1"},
        {"id": "c", "question": "1 + 2"},
        Task("d", "1 + 1"),
        Task("e", "1 + 3"),
        {"task_id": "f"},
        {"task_id": "g"},
    ]
    facts = task_facts([*tasks_of(rows[:3]), *rows[3:]])
    assert facts.instances["a"] == facts.instances["b"]
    assert facts.distinct == 6, "the two without anything but a name are two"
    assert also_in(facts, tasks_of([{"id": "z", "question": "1 + 2"}])) == ["c"]


def test_an_attempt_of_several_roles_is_worth_its_success_and_not_the_sum_of_their_pay() -> None:
    """A judge who is paid 1 and a solver who is paid 0.5 do not come to 1.5 times a success."""

    def attempt(task: str, is_correct: bool, *pay: float) -> Result:
        roles = [Trajectory(name=f"role {place}", reward=each) for place, each in enumerate(pay)]
        return result_of(
            Episode(task_id=task, trajectories=roles, is_correct=is_correct, outcome=Outcome.SCORED)
        )

    several = [attempt("0", True, 1.0, 0.5), attempt("1", False, 1.0, 0.0)]
    assert measure_of(several) is Measure.SUCCESS
    facts = facts_of(2, paid={"random": 0.0, "optimum": 1.0})
    assert score_of(several, facts)["score"] == 50.0
    alone = [attempt("0", True, 0.25), attempt("1", False, 0.0)]
    assert measure_of(alone) is Measure.RETURN
    assert score_of(alone, facts)["score"] == 12.5
