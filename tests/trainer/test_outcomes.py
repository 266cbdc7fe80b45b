"""What is said of a step's episodes: rewards, failures, calls, and when there is nothing to learn."""

import logging
from typing import Any

import pytest

from rllm.algorithms.grouping import GroupingCounts
from rllm.config.loader import load_config
from rllm.errors import AgentError, ConfigError, InferenceError
from rllm.trainer.judging import Judged, judge
from rllm.trainer.outcomes import (
    call_counts,
    num_sampled,
    require_known_roles,
    require_one_that_did_not_fail,
    role_facts,
    step_metrics,
    warn_of_full_contexts,
)
from rllm.types.episode import Episode, Outcome, Step, TerminationReason, Trajectory
from rllm.types.sample import TrainingBatch

FULL = TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED


def episode(
    reward: float | None = 1.0, *, roles: tuple[str, ...] = ("agent",), steps: int = 2, **fields: Any
) -> Episode:
    trajectories = [
        Trajectory(name=role, reward=reward, steps=[Step(response_ids=[1, 2, 3]) for _ in range(steps)])
        for role in roles
    ]
    return Episode(
        trajectories=trajectories, **{"outcome": Outcome.SCORED, "is_correct": bool(reward)} | fields
    )


def failed(outcome: Outcome, error: dict[str, str] | None = None, **fields: Any) -> Episode:
    return Episode(outcome=outcome, info={"error": error} if error else {}, **fields)


def judged(first_attempts: int = 0, **counts: int) -> Judged:
    known = GroupingCounts(**counts)
    return Judged(groups={}, counts=known, rewards={}, left_out={}, first_attempts=first_attempts)


def metrics_of(episodes: list[Episode], judgement: Judged) -> dict[str, Any]:
    return step_metrics(episodes, judgement, TrainingBatch(samples=[], token_counts={"sampled": 9}))


def test_success_and_reward_are_means_over_what_did_not_fail() -> None:
    episodes = [
        episode(1.0),
        episode(0.0),
        episode(0.5, outcome=Outcome.TRUNCATED, is_correct=False, steps=4),
        failed(Outcome.INFRASTRUCTURE_FAILURE),
        failed(Outcome.INFRASTRUCTURE_FAILURE),
        failed(Outcome.POLICY_FAILURE),
    ]
    metrics = metrics_of(episodes, judged(episodes=6, removed=3, groups=2, tied=1))
    assert metrics["success"] == pytest.approx(1 / 3)
    assert metrics["reward_mean"] == pytest.approx(0.5)
    assert metrics["turns_mean"] == pytest.approx(8 / 6)
    assert {name: value for name, value in metrics.items() if name.startswith("failed")} == {
        "failed": 3,
        "failed.infrastructure_failure": 2,
        "failed.policy_failure": 1,
    }
    assert sum(count for name, count in metrics.items() if name.startswith("ended.")) == 3
    assert (metrics["episodes"], metrics["groups"], metrics["groups_tied"]) == (6, 2, 1)
    assert metrics["groups_rejected"] == metrics["groups_without_baseline"] == 0
    assert metrics["tokens.sampled"] == 9
    assert "tasks_solved_first" not in metrics


def test_the_baseline_of_a_role_is_the_mean_of_what_its_greedy_attempts_were_paid() -> None:
    config = load_config(['algorithm.estimator="remax"'])
    attempts = [episode(1.0, task_id="t", roles=("solver", "solver", "judge"))]
    greedy = episode(0.0, task_id="t", roles=("solver", "solver", "solver", "judge"))
    for trajectory, reward in zip(greedy.trajectories, (1.0, 0.5, 0.0, 0.25), strict=True):
        trajectory.reward = reward
    found = judge(config, attempts, [greedy])
    assert found.baselines == {("t", "solver"): 0.5, ("t", "judge"): 0.25}
    assert found.without_baseline == []


def test_nothing_played_is_no_division_by_nothing() -> None:
    metrics = metrics_of([], judged())
    assert (metrics["success"], metrics["reward_mean"], metrics["turns_mean"]) == (0.0, 0.0, 0.0)
    played = episode(1.0, rollout_idx=0)
    one = metrics_of([played], judged())
    assert (one["success"], one["reward_mean"]) == (1.0, 1.0)
    assert one["turns_mean"] == len(played.trajectories[0].steps) > 0


def test_with_first_attempts_the_means_are_of_those_alone() -> None:
    episodes = [episode(float(each == 3), rollout_idx=each, roles=("a", "b")) for each in range(4)]
    judgement = judged(first_attempts=2)
    judgement.tasks_solved_first, judgement.attempts_not_played = ["a", "b"], 5
    metrics = metrics_of(episodes, judgement)
    assert (metrics["success"], metrics["reward_mean"]) == (0.0, 0.0)
    assert (metrics["tasks_solved_first"], metrics["attempts_not_played"]) == (2, 5)
    assert metrics["role.a.trajectories"] == 2
    assert metrics_of(episodes, judged())["success"] == 0.25


def test_each_role_has_its_own_means() -> None:
    episodes = [episode(1.0, roles=("solver", "judge")), episode(0.0, roles=("solver",), steps=4)]
    facts = role_facts(episodes)
    assert list(facts) == ["judge", "solver"]
    assert facts["solver"]["reward_mean"] == 0.5
    assert (facts["solver"]["turns_mean"], facts["solver"]["trajectories"]) == (3.0, 2)
    assert (facts["judge"]["reward_mean"], facts["judge"]["trajectories"]) == (1.0, 1)
    assert (
        role_facts([*episodes, failed(Outcome.POLICY_FAILURE, trajectories=[Trajectory(name="c")])]) == facts
    )
    assert role_facts([episode()]) == {}, "one role is what the episodes are"


def test_calls_are_added_up_where_somebody_counts_them() -> None:
    assert call_counts([episode()]) == {}
    with_calls = [episode(metrics={"calls": 3.0, "failed_calls": 1.0}), episode(metrics={"calls": 2.0})]
    assert call_counts([*with_calls, episode()]) == {"calls": 5, "failed_calls": 1}


def test_every_sampled_token_counts() -> None:
    assert num_sampled([episode(steps=2, roles=("a", "b")), episode(steps=1)]) == 3 * 5


def test_a_step_of_failures_alone_ends_the_run_and_says_whose_they_were() -> None:
    require_one_that_did_not_fail([], 64)
    require_one_that_did_not_fail([failed(Outcome.POLICY_FAILURE), episode(0.0)], 64)
    gone = failed(
        Outcome.INFRASTRUCTURE_FAILURE,
        {
            "type": "OSError",
            "message": "gone",
            "traceback": 'x\n  File "a.py", line 3\n  File "b.py", line 4\n',
        },
    )
    with pytest.raises(InferenceError, match=r'All 2 .*, 2 of .*OSError: gone \(File "b\.py", line 4\)'):
        require_one_that_did_not_fail([gone, gone], 64)
    bug = failed(Outcome.POLICY_FAILURE, {"type": "ValueError", "message": "bug"})
    with pytest.raises(AgentError, match=r"All 3 .*, 2 of .*OSError"):
        require_one_that_did_not_fail([gone, gone, bug], 64)
    with pytest.raises(InferenceError, match="no cause"):
        require_one_that_did_not_fail([failed(Outcome.INFRASTRUCTURE_FAILURE)], 64)
    full = failed(Outcome.POLICY_FAILURE, termination_reason=FULL)
    with pytest.raises(AgentError, match=r"`inference\.max_context`, .* 64"):
        require_one_that_did_not_fail([full, full], 64)
    with pytest.raises(AgentError, match="checkpoint"):
        require_one_that_did_not_fail([full, bug], 64)


@pytest.mark.parametrize(("num_full", "num_others", "warns"), [(1, 1, True), (1, 2, False), (0, 0, False)])
def test_contexts_that_are_full_are_warned_of_from_half_of_the_episodes_on(
    caplog: pytest.LogCaptureFixture, num_full: int, num_others: int, warns: bool
) -> None:
    episodes = [episode(termination_reason=FULL)] * num_full + [episode()] * num_others
    with caplog.at_level(logging.WARNING, "rllm.trainer.outcomes"):
        warn_of_full_contexts(episodes, 64)
    assert bool(caplog.records) is warns
    if warns:
        assert f"{num_full} of {num_full + num_others} " in caplog.text
        assert "`inference.max_context`, which is 64" in caplog.text


def test_a_role_without_a_policy_ends_the_run_where_it_is_no_exception() -> None:
    settings = {
        "policies": {"one": {"path": "builtin:tiny"}, "two": {"path": "builtin:tiny"}},
        "roles": {"solver": {"policy": "one"}, "judge": {"policy": "two"}},
        "rollout": {"max_failed_fraction": 0.5},
    }
    config = load_config(settings)
    good, stray = episode(roles=("solver", "judge")), episode(roles=("solver", "stranger"))
    require_known_roles([good, stray], config)
    with pytest.raises(ConfigError, match="stranger"):
        require_known_roles([good, stray, stray], config)
    with pytest.raises(ConfigError, match=r"`roles\.judge` .*`roles\.judges`"):
        require_known_roles(
            [episode(roles=("solver", "judges"))],
            load_config(settings | {"policies": {"one": {"path": "builtin:tiny"}}, "roles": {"judge": {}}}),
        )
