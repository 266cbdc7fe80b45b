from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.truncation import treat_truncated
from rllm.config import load_config
from rllm.config.policies import TruncationConfig
from rllm.types.episode import Episode, Outcome, TerminationReason, Trajectory

LIMITS = {
    "max_turns": TerminationReason.MAX_TURNS_EXCEEDED,
    "prompt_length": TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED,
    "response_length": TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED,
    "timeout": TerminationReason.TIMEOUT,
    "cost": TerminationReason.MAX_COST_EXCEEDED,
}
TREATMENTS = ("mask", "zero", "penalise", "keep")


def _cut_off(reason: TerminationReason, reward: Any = 0.75, outcome: Outcome = Outcome.TRUNCATED) -> Episode:
    """As the engine of agents leaves it: episode and trajectory say the same."""
    trajectory = Trajectory(uid="mine", reward=reward, termination_reason=reason, outcome=outcome)
    return Episode(task_id="t", trajectories=[trajectory], termination_reason=reason, outcome=outcome)


def test_each_limit_has_each_treatment_and_no_say_about_the_others(subtests: pytest.Subtests) -> None:
    for limit in LIMITS:
        for treatment in TREATMENTS:
            with subtests.test(limit=limit, treatment=treatment):
                others = dict.fromkeys(LIMITS, "keep")
                config = TruncationConfig(**{**others, limit: treatment, "penalty": 0.5})
                for name, reason in LIMITS.items():
                    treated = treat_truncated([_cut_off(reason)], config)
                    mine = treatment if name == limit else "keep"
                    assert treated.masked == ({"mine"} if mine == "mask" else set())
                    assert treated.rewards == {"zero": {"mine": 0.0}, "penalise": {"mine": 0.25}}.get(
                        mine, {}
                    )


def test_by_default_only_those_out_of_turns_are_learned_from() -> None:
    config = load_config(["steps=1"]).rollout.truncation
    masked = {
        name: bool(treat_truncated([_cut_off(reason)], config).masked) for name, reason in LIMITS.items()
    }
    assert masked == {name: name != "max_turns" for name in LIMITS}


@given(
    st.sampled_from([each for each in TerminationReason if each not in LIMITS.values()]),
    st.sampled_from(list(Outcome)),
)
def test_what_no_limit_cut_off_is_as_it_is(reason: TerminationReason, outcome: Outcome) -> None:
    treated = treat_truncated([_cut_off(reason, outcome=outcome)], TruncationConfig(max_turns="mask"))
    assert (treated.masked, treated.rewards) == (set(), {})


@pytest.mark.parametrize("outcome", [Outcome.POLICY_FAILURE, Outcome.INFRASTRUCTURE_FAILURE])
def test_a_failure_is_none_of_its_business(outcome: Outcome) -> None:
    episode = _cut_off(TerminationReason.TIMEOUT, reward=None, outcome=outcome)
    treated = treat_truncated([episode], TruncationConfig(timeout="zero"))
    assert (treated.masked, treated.rewards) == (set(), {})


def test_of_several_roles_only_those_that_were_cut_off_are_treated() -> None:
    episode = _cut_off(TerminationReason.TIMEOUT)
    episode.trajectories += [
        Trajectory(uid="done before", reward=1.0, termination_reason=TerminationReason.ENV_DONE),
        Trajectory(uid="says nothing", reward=1.0),
        Trajectory(uid="out of turns", termination_reason=TerminationReason.MAX_TURNS_EXCEEDED),
    ]
    assert treat_truncated([episode], TruncationConfig()).masked == {"mine", "says nothing"}
    # A role may be cut off in an episode that ran to its end.
    episode.outcome, episode.termination_reason = Outcome.SCORED, TerminationReason.ENV_DONE
    assert treat_truncated([episode], TruncationConfig()).masked == {"mine"}


def test_a_reward_that_is_none_is_left_to_be_named_unless_it_does_not_count() -> None:
    episode = _cut_off(TerminationReason.TIMEOUT, reward=None)
    assert treat_truncated([episode], TruncationConfig(timeout="penalise")).rewards == {}
    assert treat_truncated([episode], TruncationConfig(timeout="zero")).rewards == {"mine": 0.0}
