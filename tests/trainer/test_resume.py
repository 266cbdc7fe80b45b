"""A run killed with -9, or stopped with Ctrl-C or SIGTERM, ends as if never stopped. Who plays:
letter_game.py; who kills: killing.py; at every moment: test_kills.py."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rllm.files.atomic import verify_manifest
from rllm.models.directory import load_model, parameters_sha256
from rllm.store.episodes import EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.tracking.jsonl import read_metrics
from rllm.trainer.policies import saved_model_paths

Ask = Callable[..., dict[str, Any]]

LINES = [
    ("untrained", 0),
    *(("warm_start", step) for step in range(4)),
    ("before", 0),
    *(("train", step) for step in range(4)),
    ("after", 0),
]
MEASURED = ("_s", "_share")
"""Ends of names of what is never the same twice: seconds, and shares of what a machine can do."""
LOCKSTEP = {"inference": {"lockstep": True}}
"""For the pair; without it the last bit of what the sampler says depends on who was sampled beside
(test_kills.py)."""


def _result(run: Path, names: Sequence[str] = ("policy",)) -> dict[str, Any]:
    """Everything of a finished run, with policies of these names, that must not depend on its being
    interrupted."""
    directory = RunDirectory.read(run)
    with EpisodeStore.open(directory.store_path, read_only=True) as store:
        episodes = {
            (phase, step): [
                (
                    episode.id,
                    episode.outcome,
                    [
                        (
                            trajectory.name,
                            step.prompt_ids,
                            step.response_ids,
                            step.logprobs,
                            step.policy_versions,
                            step.reward,
                        )
                        for trajectory in episode.trajectories
                        for step in trajectory.steps
                    ],
                )
                for episode in store.episodes(phase, step)
            ]
            for phase in store.phases()
            for step in range(4)
        }
    summary = directory.summary()
    assert summary is not None
    return {
        "parameters": {
            name: parameters_sha256(load_model(path).model.state_dict_hf())
            for name, path in saved_model_paths(run, names).items()
        },
        "metrics": [
            {name: value for name, value in line.items() if not name.endswith(MEASURED)}
            for line in read_metrics(directory.metrics_path)
        ],
        "episodes": episodes,
        "reports": {name: summary[name] for name in ("untrained", "before", "after")},
        "sampled_tokens": summary["sampled_tokens"],
        "left over": sorted(path.name for path in run.rglob(".*")),
        "checkpoints": sorted(path.name for path in directory.checkpoints_path.iterdir()),
        "lies in the run": sorted(path.name for path in run.iterdir()),
    }


@pytest.fixture(scope="module")
def uninterrupted(ask: Ask, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[str]]:
    """(result, what was done to its files) of a run that nobody disturbed."""
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    ended = ask(run)
    assert ended["signal"] == 0
    return _result(run), ended["events"]


def test_an_undisturbed_run_is_complete_and_learned_something(
    uninterrupted: tuple[dict[str, Any], list[str]],
) -> None:
    result, _ = uninterrupted
    assert [(line["phase"], line["step"]) for line in result["metrics"]] == LINES
    assert all("loss" in line for line in result["metrics"] if line["phase"] == "train")
    assert [len(result["episodes"]["train", step]) for step in range(4)] == [6] * 4
    assert result["left over"] == []
    assert result["checkpoints"] == ["step-000006", "step-000008"]


def _steps_in_checkpoint(run: Path) -> tuple[int, int]:
    """(steps of the warm start, steps of training) of the newest checkpoint."""
    newest = max((run / "checkpoints").glob("step-*"))
    verify_manifest(newest)
    state = json.loads((newest / "state.json").read_text())
    return state["warm_steps"], state["steps"]


@pytest.mark.parametrize("way", ["interrupt", "terminate"])
def test_ctrl_c_and_sigterm_save_the_steps_that_are_done_and_the_run_ends_the_same(
    ask: Ask, uninterrupted: tuple[dict[str, Any], list[str]], tmp_path: Path, way: str
) -> None:
    run = tmp_path / "run"
    for line, saved in ((("warm_start", 2), (3, 0)), (("before", 0), (4, 0)), (("train", 0), (4, 1))):
        assert ask(run, **{f"{way}_at_line": line})["signal"] == 2
        assert _steps_in_checkpoint(run) == saved
    assert ask(run)["signal"] == 0
    assert _result(run) == uninterrupted[0]


@pytest.mark.parametrize("way", ["interrupt", "terminate"])
def test_ctrl_c_and_sigterm_in_the_middle_of_rollouts_end_them_and_the_run_ends_the_same(
    ask: Ask, uninterrupted: tuple[dict[str, Any], list[str]], tmp_path: Path, way: str
) -> None:
    run = tmp_path / "run"
    # 4 held-out tasks × 2 turns × 2 ways, twice; 12 answers and a canary a step of training.
    assert ask(run, **{f"{way}_at_answer": 32 + 13 + 5})["signal"] == 2
    assert _steps_in_checkpoint(run) == (4, 1)
    assert RunDirectory.read(run).writer_pid is None
    assert ask(run)["signal"] == 0
    assert _result(run) == uninterrupted[0]


# ---- a model that has learned to answer --------------------------------------------------------------------

TRAINED: dict[str, Any] = {
    "steps": 3,
    "warm_start": {"steps": 8, "episodes_per_step": 16},
    "rollout": {"max_tokens_per_turn": 20},
}
"""The untrained model writes until it is cut off, the trained one a letter: whoever resumes has never served
long rows."""


def test_a_trained_model_killed_between_steps_ends_with_the_same_weights_to_the_last_bit(
    ask: Ask, tmp_path: Path
) -> None:
    assert ask(tmp_path / "whole", changes=TRAINED)["signal"] == 0
    whole = _result(tmp_path / "whole")
    norms = [line["grad_norm"] for line in whole["metrics"] if line["phase"] == "train"]
    assert all(norm > 0.1 for norm in norms), "a step without gradient proves nothing"
    run = tmp_path / "run"
    assert ask(run, changes=TRAINED, die_at_line=["warm_start", 3])["signal"] == 9
    assert ask(run, changes=TRAINED, die_at_line=["train", 1])["signal"] == 9
    assert read_metrics(run / "metrics.jsonl")[-1]["step"] == 1  # on record, and behind the last checkpoint
    assert RunDirectory.read(run).summary() is None
    assert ask(run, changes=TRAINED)["signal"] == 0
    assert _result(run) == whole


FIRST_ATTEMPTS: dict[str, Any] = {
    **TRAINED,
    "rollout": {"max_tokens_per_turn": 20, "group_size": 5, "tasks_per_step": 3},
    "filters": {"first_attempts": 2},
}


def test_a_run_killed_between_the_first_attempts_and_the_rest_plays_the_same_rest(
    ask: Ask, tmp_path: Path
) -> None:
    assert ask(tmp_path / "whole", changes=FIRST_ATTEMPTS)["signal"] == 0
    whole = _result(tmp_path / "whole")
    lines = [line for line in whole["metrics"] if line["phase"] == "train"]
    assert all(line["episodes"] + line["attempts_not_played"] == 15 for line in lines)
    assert 0 < sum(line["attempts_not_played"] for line in lines) < 27, "some groups stop, some go on"
    run = tmp_path / "run"
    assert ask(run, changes=FIRST_ATTEMPTS, die_at_line=["before", 0])["signal"] == 9
    # Two turns each of the first two attempts at three tasks, then into the rest.
    assert ask(run, changes=FIRST_ATTEMPTS, die_at_answer=12 + 3)["signal"] == 9
    assert ask(run, changes=FIRST_ATTEMPTS, die_at_line=["train", 1])["signal"] == 9
    assert ask(run, changes=FIRST_ATTEMPTS)["signal"] == 0
    assert _result(run) == whole


# ---- two policies ------------------------------------------------------------------------------------------

PAIR = ("solver", "judge")


@pytest.fixture(scope="module")
def uninterrupted_pair(
    ask: Ask, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[str]]:
    run = tmp_path_factory.mktemp("uninterrupted") / "pair"
    ended = ask(run, game="pair", changes=LOCKSTEP)
    assert ended["signal"] == 0
    return _result(run, PAIR), ended["events"]


def test_two_policies_killed_in_the_middle_of_a_save_and_interrupted_end_the_same(
    ask: Ask, uninterrupted_pair: tuple[dict[str, Any], list[str]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    expected, events = uninterrupted_pair
    saving = [number for number, event in enumerate(events, start=1) if "step-000006.tmp" in event]
    assert any("judge" in events[number - 1] for number in saving)
    assert ask(run, game="pair", changes=LOCKSTEP, die_at_event=saving[len(saving) // 2])["signal"] == 9
    assert ask(run, game="pair", changes=LOCKSTEP, interrupt_at_line=["train", 2])["signal"] == 2
    assert _steps_in_checkpoint(run) == (4, 3)
    assert ask(run, game="pair", changes=LOCKSTEP)["signal"] == 0
    # The interrupted run saved where it stood; the newest two stay, and what did best in validation.
    summary = RunDirectory.read(run).summary()
    assert summary is not None
    best = f"step-{int(summary['best']['position']):06d}"
    assert _result(run, PAIR) == expected | {"checkpoints": sorted({"step-000007", "step-000008", best})}


# ---- a critic, a coefficient that adapts, a step that takes as many tasks as it needs ---------------------

PPO: dict[str, Any] = {
    "algorithm": {"estimator": "gae", "kl_coef": 0.05, "kl_target": 0.01},
    "critic": {"trunk": "separate"},
    "filters": {"dynamic": True, "max_rounds": 3, "min_reward_std": 0.21},
}
REMAX: dict[str, Any] = {"algorithm": {"estimator": "remax"}}


@pytest.fixture(scope="module")
def uninterrupted_ppo(ask: Ask, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[str]]:
    run = tmp_path_factory.mktemp("uninterrupted") / "ppo"
    ended = ask(run, changes=PPO)
    assert ended["signal"] == 0
    return _result(run), ended["events"]


def test_ppo_killed_in_the_middle_of_a_save_ends_the_same(
    ask: Ask, uninterrupted_ppo: tuple[dict[str, Any], list[str]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    expected, events = uninterrupted_ppo
    lines = [line for line in expected["metrics"] if line["phase"] == "train"]
    assert sum(line["tasks"] for line in lines) > 8, "a step of the game takes more tasks than it trains on"
    assert len({line["kl_coef"] for line in lines}) == 4
    saving = [number for number, event in enumerate(events, start=1) if "step-000006.tmp" in event]
    assert any("critic" in events[number - 1] for number in saving)
    assert ask(run, changes=PPO, die_at_event=saving[len(saving) // 2])["signal"] == 9
    assert [path.name for path in (run / "checkpoints").glob(".step-000006.tmp-*")]
    assert ask(run, changes=PPO)["signal"] == 0
    assert _result(run) == expected


def test_killed_around_the_end_of_the_warm_start_it_is_held_against_the_same_policy(
    ask: Ask, uninterrupted_ppo: tuple[dict[str, Any], list[str]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    expected, events = uninterrupted_ppo
    keeping = [number for number, event in enumerate(events, start=1) if "reference" in event]
    assert ask(run, changes=PPO, die_at_event=keeping[len(keeping) // 2])["signal"] == 9
    assert not (run / "reference").exists()
    assert ask(run, changes=PPO)["signal"] == 0
    assert (run / "reference" / "policy.safetensors").is_file()
    assert _result(run) == expected


def test_greedy_attempts_of_a_step_that_is_repeated_are_there_once(ask: Ask, tmp_path: Path) -> None:
    assert ask(tmp_path / "whole", changes=REMAX)["signal"] == 0
    assert ask(tmp_path / "run", changes=REMAX, die_at_line=["train", 2])["signal"] == 9
    assert ask(tmp_path / "run", changes=REMAX)["signal"] == 0
    resumed = _result(tmp_path / "run")
    assert resumed == _result(tmp_path / "whole")
    assert [len(resumed["episodes"]["train.greedy", step]) for step in range(4)] == [2] * 4


def test_a_finished_run_is_not_worked_on_again(ask: Ask, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert ask(run)["signal"] == 0
    before = _result(run)
    ended = ask(run)
    assert ended["signal"] == 0
    assert not any("checkpoints" in event or "metrics" in event for event in ended["events"])
    assert _result(run) == before
