import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

import rllm
from rllm.errors import AgentError, ConfigError, InferenceError
from rllm.store.episodes import EpisodeStore
from rllm.tracking.jsonl import read_metrics
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.trainer.outcomes import require_one_that_did_not_fail
from rllm.trainer.replay import replay
from rllm.types.episode import Episode, Outcome
from rllm.types.task import AgentConfig, Task

SETTINGS: dict[str, Any] = {
    "steps": 2,
    "threads": 1,
    "rollout": {"tasks_per_step": 2, "group_size": 4, "num_parallel": 8, "retry_limit": 1},
    "evaluation": {"num_tasks": 2},
    "checkpoint": {"every_steps": 1},
}
WORDS = ("Up", "Down", "Left", "Right")
TASKS = [{"id": word, "question": word} for word in WORDS]
client = OpenAI(base_url="http://unused", api_key="any", max_retries=0)


@pytest.fixture(scope="module", autouse=True)
def close_client() -> Iterator[None]:
    yield
    client.close()


@rllm.rollout
def solve(task: Task, config: AgentConfig) -> None:
    client.with_options(base_url=config.base_url).chat.completions.create(
        model=config.model, messages=[{"role": "user", "content": str(task.instruction)}], max_tokens=2
    )


@rllm.evaluator
def score(task: dict[str, Any], episode: Episode) -> float:
    """Pays by the first token, so that attempts differ by chance."""
    return (episode.trajectories[0].steps[0].response_ids[0] % 5) / 4


def trainer_of(run: Path, changes: dict[str, Any] | None = None, **more: Any) -> AgentTrainer:
    options = {"train_dataset": TASKS, "agent_flow": solve, "evaluator": score, "output": run} | more
    return AgentTrainer({**SETTINGS, **(changes or {})}, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    trainer_of(run).train()
    return run


def test_a_program_that_solves_its_tasks_alike_at_first_is_not_run_again(tmp_path: Path) -> None:
    changes = {"steps": 1, "warm_start": {"steps": 0}, "filters": {"first_attempts": 2}}
    trainer_of(tmp_path, changes, evaluator=rllm.evaluator(lambda task, episode: 1.0)).train()
    (line,) = [each for each in read_metrics(tmp_path / "metrics.jsonl") if each["phase"] == "train"]
    assert (line["episodes"], line["attempts_not_played"], line["calls"], line["groups_tied"]) == (4, 4, 4, 2)


def test_a_program_is_trained_on_exactly_the_tokens_that_its_calls_sampled(finished: Path) -> None:
    lines = [line for line in read_metrics(finished / "metrics.jsonl") if line["phase"] == "train"]
    assert len(lines) == 2
    version = 0
    with EpisodeStore.open(finished / "store.sqlite", read_only=True) as store:
        for line in lines:
            episodes = list(store.episodes("train", line["step"]))
            assert len(episodes) == line["episodes"] == line["calls"] == 8
            assert {episode.outcome for episode in episodes} == {Outcome.SCORED}
            steps = [step for episode in episodes for step in episode.trajectories[0].steps]
            assert {each for step in steps for each in step.policy_versions} == {version}
            assert sum(len(step.response_ids) for step in steps) == line["tokens.sampled"]
            assert all(len(step.response_ids) <= 2 for step in steps), "the program's own max_tokens"
            assert line["logprob_gap_first"] < 1e-4
            assert line["unclaimed_calls"] == line["failed_calls"] == 0
            version = line["policy_version"]
    assert version > 0
    assert episodes[0].trajectories[0].name == "solve"
    assert episodes[0].task["question"] in WORDS


def test_a_run_of_a_program_leaves_what_every_run_leaves_and_nothing_of_its_gateway(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert names >= {"config.json", "store.sqlite", "metrics.jsonl", "model", "summary.json", "curve.png"}
    assert "gateway" not in names
    config = json.loads((finished / "config.json").read_text())
    assert config["task"]["environment"] == "solve"
    assert config["inference"]["lockstep"] is False


def test_a_run_of_a_program_replays_without_an_engine(finished: Path) -> None:
    assert replay(trainer_of(finished).run).is_identical


def test_a_stopped_run_of_a_program_goes_on(finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "summary.json").unlink()
    shutil.rmtree(max((run / "checkpoints").iterdir()))
    for name in ("gateway", "gateway-1", "gateway-2"):  # of three ranks that were killed
        (run / name).mkdir()
    summary = trainer_of(run).train().summary
    assert summary["sampled_tokens"] > 0
    assert not list(run.glob("gateway*"))
    lines = [line["step"] for line in read_metrics(run / "metrics.jsonl") if line["phase"] == "train"]
    assert lines == [0, 1]


def test_a_program_that_always_fails_stops_the_run_with_its_error_and_line(tmp_path: Path) -> None:
    def broken(task: Task, config: AgentConfig) -> None:
        raise KeyError("answer")

    with pytest.raises(AgentError, match=r"2 episodes .* 2 .*KeyError: 'answer' \(File "):
        trainer_of(tmp_path / "run", agent_flow=broken).train()


def test_a_prompt_that_does_not_fit_says_which_key_to_raise(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match=r"`inference\.max_context`, which is 2,"):
        trainer_of(tmp_path / "run", {"inference": {"max_context": 2}}).train()


def _failed(outcome: Outcome) -> Episode:
    return Episode(outcome=outcome, info={"error": {"type": "ValueError", "message": "bad"}})


@pytest.mark.parametrize(
    ("outcomes", "error"),
    [
        ([Outcome.POLICY_FAILURE, Outcome.INFRASTRUCTURE_FAILURE], AgentError),
        ([Outcome.INFRASTRUCTURE_FAILURE] * 2, InferenceError),
        ([Outcome.POLICY_FAILURE, Outcome.SCORED], None),
        ([], None),
    ],
)
def test_only_a_batch_in_which_everything_failed_stops_a_run(
    outcomes: Sequence[Outcome], error: type[Exception] | None
) -> None:
    episodes = [_failed(outcome) for outcome in outcomes]
    if error is None:
        require_one_that_did_not_fail(episodes, 512)
        return
    with pytest.raises(error, match=r"2 episodes .* 2 .*ValueError: bad"):
        require_one_that_did_not_fail(episodes, 512)


def test_demonstrations_warm_a_program_up(tmp_path: Path) -> None:
    def demonstrate(task: dict[str, Any], noise: float, rng: Any) -> list[tuple[Any, str]]:
        return [(task["question"], "yes")]

    changes = {"steps": 0, "warm_start": {"steps": 30, "episodes_per_step": 8}}
    run = tmp_path / "run"

    def said_yes(task: dict[str, Any], episode: Episode) -> bool:
        return episode.trajectories[0].steps[0].model_response == "yes"

    summary = trainer_of(run, changes, demonstrate=demonstrate, evaluator=said_yes).train().summary
    assert summary["untrained"]["success"] == 0.0
    assert summary["before"]["greedy"] == 1.0


class Agent(rllm.BaseAgent): ...


class Env(rllm.BaseEnv): ...


@pytest.mark.parametrize(
    ("changes", "more", "named"),
    [
        ({}, {"agent_class": Agent}, "Given agent_class, agent_flow, evaluator"),
        ({}, {"evaluator": None}, "Given agent_flow; give either"),
        ({}, {"agent_flow": None, "evaluator": None}, "neither agent, program nor workflow"),
        ({}, {"workflow_class": object}, "Given agent_flow, evaluator, workflow_class"),
        ({}, {"agent_args": {"size": 3}}, "`agent_args` is given"),
        ({}, {"agent_flow": 3}, "is no program"),
        ({}, {"train_dataset": []}, "`train_dataset` is empty"),
        ({}, {"train_dataset": [{"id": 1}, {"id": 1}]}, "the task id '1' in row 0 and in row 1"),
        ({}, {"train_dataset": ["text"]}, "row 0 is 'text'"),
        ({}, {"train_dataset": [{"question": 3}]}, "instruction of row 0 is 3"),
        ({"inference": {"lockstep": True}}, {}, "`inference.lockstep` is true"),
        ({"algorithm": {"gamma": 0.9}}, {}, r"`algorithm.gamma`.*0.9.*nothing"),
        ({"rollout": {"max_turns": 3}}, {}, r"`rollout.max_turns`.*3.*nothing"),
        ({"task": {"num_train_tasks": 3}}, {}, "`task.num_train_tasks` is 3"),
        ({"warm_start": {"steps": 3}}, {}, "no expert to imitate"),
    ],
)
def test_what_a_program_cannot_be_trained_with_is_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Any], more: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        trainer_of(tmp_path / "run", changes, **more)
    assert list(tmp_path.iterdir()) == []


def test_an_agent_cannot_leave_the_length_of_its_answers_open(letters: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`rollout\.max_tokens_per_turn` is 0"):
        letters.make_trainer(tmp_path / "run", {"rollout": {"max_tokens_per_turn": 0}})


def test_a_program_goes_on_while_the_model_that_it_asks_learns(tmp_path: Path) -> None:
    changes = {"steps": 6, "schedule": {"kind": "async", "max_staleness": 2}}
    trainer_of(tmp_path / "run", changes).train()
    lines = [each for each in read_metrics(tmp_path / "run" / "metrics.jsonl") if each["phase"] == "train"]
    assert max(line["staleness_max"] for line in lines) == 2
    assert all(line["episodes"] == line["calls"] == 8 for line in lines)
    assert all(line["tokens.sampled"] == line["tokens.trained"] for line in lines)
    assert replay(trainer_of(tmp_path / "run", changes).run).is_identical
