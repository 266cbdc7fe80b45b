"""Which trajectories of a stored run are imitated, and what of a step is learned then."""

from pathlib import Path
from typing import Any

import pytest

from rllm.config.supervised import ChatDataConfig
from rllm.errors import ConfigError
from rllm.store.episodes import EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.trainer.traces import model_of_run, successful_traces, task_key, to_learn, tokenizer_directories
from rllm.types.episode import Episode, Outcome, Step, Trajectory
from rllm.types.sample import NOT_SAMPLED
from rllm.types.task import Task

POLICIES = {
    "policies": {"one": {"path": "builtin:tiny"}, "two": {"path": "builtin:tiny"}},
    "roles": {"solver": {"policy": "one"}, "judge": {"policy": "two"}},
}


def step() -> Step:
    return Step(prompt_ids=[1], response_ids=[2, 3], logprobs=[-1.0, -2.0], policy_versions=[4, NOT_SAMPLED])


def episode(
    number: int, reward: float | None, *, role: str = "agent", question: str = "q", **fields: Any
) -> Episode:
    trajectory = Trajectory(name=role, reward=reward, steps=[step()])
    whole = {"outcome": Outcome.SCORED, "trajectories": [trajectory]} | fields
    task = {"task_id": f"t{number}", "question": question}
    return Episode(task=task, task_id=f"t{number}", id=f"t{number}:0", **whole)


def stored(path: Path, episodes: list[Episode], config: dict[str, Any] | None = None) -> str:
    with RunDirectory.create_or_open(path) as run:
        run.write_config(config or {})
        with EpisodeStore.open(run.store_path) as store:
            store.save_episodes("train", 0, episodes)
    return str(path)


def test_what_was_sampled_is_learned_whoever_sampled_it_and_what_was_not_is_not() -> None:
    learned = to_learn(step(), "here")
    assert (learned.prompt_ids, learned.response_ids, learned.logprobs) == ([1], [2, 3], [0.0, 0.0])
    assert learned.policy_versions == [0, NOT_SAMPLED]
    assert to_learn(Step(prompt_ids=[1], response_ids=[2]), "here").policy_versions == [0]
    for without_ids in (Step(response_ids=[2]), Step(prompt_ids=[1])):
        with pytest.raises(ConfigError, match=r"here .*prompt ids"):
            to_learn(without_ids, "here")


def test_two_visits_of_a_task_are_of_one_task() -> None:
    assert task_key(episode(1, 1.0)) == task_key(episode(2, 1.0))
    assert task_key(episode(1, 1.0)) != task_key(episode(1, 1.0, question="other"))
    tasks = [Task(id=f"t{number}", instruction="q", metadata={"task_id": "x", "a": 1}) for number in range(2)]
    assert len({task_key(Episode(task=each, task_id=each.id)) for each in tasks}) == 1
    assert task_key(Episode(task={"task_id": "t"}, task_id="t")) == "t", "it has no other content"
    assert task_key(Episode(task=None, task_id="t")) == "t"


def rewards_of(path: str, **data: Any) -> list[tuple[str, float]]:
    return [(each.where, each.reward) for each in successful_traces(ChatDataConfig(run=path, **data))]


def test_scored_trajectories_that_were_paid_enough_are_taken_in_their_order(tmp_path: Path) -> None:
    episodes = [
        episode(0, 1.0),
        episode(1, 0.5),
        episode(2, 1.5),
        episode(3, 2.0, outcome=Outcome.TRUNCATED),
        episode(4, 2.0, trajectories=[Trajectory(name="agent", reward=2.0)]),
    ]
    path = stored(tmp_path / "run", episodes)
    assert rewards_of(path) == [("episode t0:0 (agent)", 1.0), ("episode t2:0 (agent)", 1.5)]
    assert [reward for _, reward in rewards_of(path, min_reward=0.5)] == [1.0, 0.5, 1.5]
    with pytest.raises(ConfigError, match=r"5 .*`data\.min_reward` = 3 .*best was paid 2"):
        rewards_of(path, min_reward=3.0)
    nothing = stored(tmp_path / "failed", [episode(0, None, outcome=Outcome.POLICY_FAILURE)])
    with pytest.raises(ConfigError, match="none of"):
        rewards_of(nothing)


def test_of_each_task_the_best_paid_and_of_those_the_latest_are_kept(tmp_path: Path) -> None:
    rewards = [1.0, 3.0, 1.0, 2.0]
    episodes = [episode(number, reward) for number, reward in enumerate(rewards)]
    path = stored(tmp_path / "run", [*episodes, episode(9, 1.0, question="other")])
    for limit, kept in ((0, [0, 1, 2, 3, 9]), (1, [1, 9]), (2, [1, 3, 9]), (3, [1, 2, 3, 9])):
        traces = successful_traces(ChatDataConfig(run=path, max_per_task=limit))
        assert [each.where for each in traces] == [f"episode t{number}:0 (agent)" for number in kept]
    assert traces[0].token_ids() == {1, 2, 3}


def test_of_several_roles_one_is_named(tmp_path: Path) -> None:
    path = stored(tmp_path / "run", [episode(0, 1.0, role="solver"), episode(1, 2.0, role="judge")])
    assert rewards_of(path, role="judge") == [("episode t1:0 (judge)", 2.0)]
    for role, says in (("", "judge, solver"), ("teacher", "'teacher'.*judge, solver")):
        with pytest.raises(ConfigError, match=f"`data.role`.*{says}" if role else says):
            rewards_of(path, role=role)


def test_the_model_of_a_run_is_that_of_the_policy_which_plays_the_role(tmp_path: Path) -> None:
    one = ChatDataConfig(run=stored(tmp_path / "one", [episode(0, 1.0)]))
    with pytest.raises(ConfigError, match="--model"):
        model_of_run(one)
    assert tokenizer_directories(one) == []
    for name in ("model", "initial_model"):
        (tmp_path / "one" / name).mkdir()
    assert model_of_run(one) == tmp_path / "one" / "model"
    assert tokenizer_directories(one) == [tmp_path / "one" / name for name in ("model", "initial_model")]
    path = stored(tmp_path / "two", [episode(0, 1.0)], POLICIES)
    (tmp_path / "two" / "models" / "two").mkdir(parents=True)
    judge = ChatDataConfig(run=path, role="judge")
    assert model_of_run(judge) == tmp_path / "two" / "models" / "two"
    assert tokenizer_directories(judge) == [tmp_path / "two" / "models" / "two"]
    with pytest.raises(ConfigError, match="--model"):
        model_of_run(ChatDataConfig(run=path, role="solver"))
    other = ChatDataConfig(run=stored(tmp_path / "sft", [], {"kind": "sft"}))
    with pytest.raises(ConfigError, match="`rllm sft`"):
        model_of_run(other)
