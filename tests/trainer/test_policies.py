"""Several roles, several models, one run: who learns from what, what is kept where, and what is refused."""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rllm.build.models import model_directory
from rllm.config.loader import load_config
from rllm.config.schema import TrainConfig
from rllm.environments.world import World
from rllm.errors import ConfigError
from rllm.models.directory import load_model, parameters_sha256
from rllm.store.episodes import EpisodeStore
from rllm.tracking.jsonl import read_metrics
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.trainer.learning import imitate, learn
from rllm.trainer.policies import create_initial_models, load_initial_models, require_models, save_model_by
from rllm.trainer.replay import replay
from rllm.types.episode import Episode

Make = Callable[..., Any]
FROZEN_JUDGE = {"policies": {"judge": {"trainable": False}}}
SMALL = {"steps": 2, "warm_start": {"steps": 2}, "checkpoint": {"every_steps": 1}}
FINISHED = {**SMALL, **FROZEN_JUDGE, "roles": {"solver": {"temperature": 0.7, "max_tokens": 2}}}


def _sha256(model: Path) -> str:
    return parameters_sha256(load_model(model).model.state_dict_hf())


@pytest.fixture(scope="module")
def finished(letters: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Solvers that learn and sample in their own way, and a judge that is frozen."""
    run = tmp_path_factory.mktemp("runs") / "run"
    letters.make_pair_trainer(run, FINISHED).train()
    return run


READING = {f"policy.judge.rollout_{name}" for name in ("bytes", "busy_s", "bandwidth_share")}
"""Metrics of a policy that answers and does not learn."""


def test_a_frozen_policy_plays_and_does_not_change_and_the_other_learns(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    for name, trainable in (("solver", True), ("judge", False)):
        before, after = (_sha256(finished / place / name) for place in ("initial_models", "models"))
        assert (before != after) == trainable
        assert summary["policies"][name]["parameters_sha256"] == after
        assert summary["policies"][name]["trainable"] == trainable
    last = [each for each in read_metrics(finished / "metrics.jsonl") if each["phase"] == "train"][-1]
    versions = {name: facts["policy_version"] for name, facts in summary["policies"].items()}
    assert versions == {"solver": last["policy.solver.policy_version"], "judge": 0}
    for line in read_metrics(finished / "metrics.jsonl"):
        if line["phase"] == "train":
            for role in ("solver", "judge") if "heldout_success" in line else ():
                assert {f"role.{role}.heldout_reward", f"role.{role}.heldout_greedy"} <= line.keys()
            assert {name for name in line if name.startswith("policy.judge.")} <= READING
            assert line["policy.solver.canary_gap"] < 1e-4
            assert line["policy.solver.logprob_gap_sampler"] < 1e-4
            dropped = line["tokens.dropped.untrained"]
            assert dropped > 0
            assert line["tokens.sampled"] == dropped + sum(
                line[f"tokens.{name}"] for name in ("trained", "dropped.failed", "dropped.tied")
            )
    assert sorted(path.name for path in (finished / "checkpoints" / "step-000004").iterdir()) == [
        "about.json",
        "manifest.json",
        "solver",
        "state.json",
    ]
    assert not (finished / "model").exists()


def test_every_token_carries_the_version_of_the_policy_that_plays_its_role(finished: Path) -> None:
    version = 2  # updates of the solver's warm start
    with EpisodeStore.open(finished / "store.sqlite", read_only=True) as store:
        for line in read_metrics(finished / "metrics.jsonl"):
            if line["phase"] != "train":
                continue
            seen: dict[str, set[int]] = {}
            for episode in store.episodes("train", line["step"]):
                for trajectory in episode.trajectories:
                    for step in trajectory.steps:
                        seen.setdefault(trajectory.name, set()).update(step.policy_versions)
            assert seen == {"solver": {version}, "judge": {0}}
            version = line["policy.solver.policy_version"]


def test_a_role_samples_in_its_own_way_in_training_and_greedily_where_all_do(finished: Path) -> None:
    with EpisodeStore.open(finished / "store.sqlite", read_only=True) as store:
        for phase, temperatures in (
            ("train", {"solver": 0.7, "judge": 1.0}),
            ("after.greedy", {"solver": 0.0, "judge": 0.0}),
        ):
            steps = [
                (trajectory.name, step)
                for episode in store.episodes(phase)
                for trajectory in episode.trajectories
                for step in trajectory.steps
            ]
            assert {
                (role, step.model_output.temperature) for role, step in steps if step.model_output
            } == set(temperatures.items())
            assert max(len(step.response_ids) for role, step in steps if role == "solver") == 2
            assert max(len(step.response_ids) for role, step in steps if role == "judge") == 3


def test_a_run_of_two_policies_replays_without_an_engine(letters: ModuleType, finished: Path) -> None:
    result = replay(letters.make_pair_trainer(finished, FINISHED).run)
    assert result.differences == []
    assert result.is_identical


def test_a_replay_finds_a_frozen_model_that_was_changed(
    letters: ModuleType, finished: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(run / "models" / "judge")
    shutil.copytree(run / "models" / "solver", run / "models" / "judge")
    assert not replay(letters.make_pair_trainer(run, FINISHED).run).is_identical


def test_reports_and_steps_say_what_each_role_was_paid(finished: Path) -> None:
    report = json.loads((finished / "summary.json").read_text())["after"]["sampled_report"]
    assert {role: facts["trajectories"] for role, facts in report["roles"].items()} == {
        "judge": 4,
        "solver": 8,
    }
    line = [each for each in read_metrics(finished / "metrics.jsonl") if each["phase"] == "train"][-1]
    with EpisodeStore.open(finished / "store.sqlite", read_only=True) as store:
        paid = [
            trajectory.reward
            for episode in store.episodes("train", line["step"])
            for trajectory in episode.trajectories
            if trajectory.name == "solver"
        ]
    assert line["role.solver.trajectories"] == len(paid) == 12
    assert line["role.solver.reward_mean"] == pytest.approx(sum(reward or 0.0 for reward in paid) / 12)


def test_of_several_models_one_has_to_be_named(finished: Path) -> None:
    with pytest.raises(ConfigError, match=r"judge, solver"):
        model_directory(finished)
    assert model_directory(finished / "models" / "judge") == finished / "models" / "judge"


# ---- one step of learning, from stored episodes ------------------------------------------------------------


@pytest.fixture(scope="module")
def episodes(finished: Path) -> list[Episode]:
    with EpisodeStore.open(finished / "store.sqlite", read_only=True) as store:
        return list(store.episodes("train", 0))


@pytest.fixture
def learned(letters: ModuleType, tmp_path: Path) -> Make:
    """Metrics, and the weights of each policy, after `learn` on some episodes from fresh weights."""

    def learn_from(
        episodes: list[Episode], changes: dict[str, Any] | None = None, **more: Any
    ) -> tuple[dict[str, Any], dict[str, list[torch.Tensor]]]:
        trainer = letters.make_pair_trainer(tmp_path, changes, **more)
        create_initial_models(trainer.config, tmp_path)
        learner = trainer.run.make_learner(load_initial_models(trainer.config, tmp_path))
        _, metrics = learn(learner, episodes, 0)
        return metrics, {
            name: [each.detach() for each in policy.loaded_model.model.parameters()]
            for name, policy in learner.policies.items()
        }

    return learn_from


def _same(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def test_a_policy_learns_from_its_own_roles_alone(episodes: list[Episode], learned: Make) -> None:
    _, weights = learned(episodes)
    for episode in episodes:
        for trajectory in episode.trajectories:
            if trajectory.name == "judge":
                trajectory.reward = 1.0 - (trajectory.reward or 0.0)
    _, others = learned(episodes)
    assert _same(weights["solver"], others["solver"])
    assert not _same(weights["judge"], others["judge"])


def test_a_weight_of_nothing_is_as_frozen_and_half_a_weight_is_half_an_advantage(
    episodes: list[Episode], learned: Make
) -> None:
    metrics, weights = learned(episodes, {"roles": {"judge": {"reward_weight": 0.0}}})
    assert metrics["tokens.dropped.untrained"] > 0
    assert "policy.judge.loss" not in metrics
    _, frozen = learned(episodes, FROZEN_JUDGE)
    assert _same(weights["judge"], frozen["judge"])
    assert _same(weights["solver"], frozen["solver"])
    once = {"algorithm": {"updates_per_step": 1}, "optimizer": {"max_grad_norm": 1e9}}
    whole, _ = learned(episodes, once)
    half, _ = learned(episodes, {**once, "roles": {"judge": {"reward_weight": 0.5}}})
    assert half["policy.judge.grad_norm"] == pytest.approx(whole["policy.judge.grad_norm"] / 2, rel=1e-5)
    assert half["policy.solver.grad_norm"] == whole["policy.solver.grad_norm"]


def test_each_role_has_the_estimator_that_the_map_or_the_configuration_gives_it(
    episodes: list[Episode], learned: Make
) -> None:
    plain, _ = learned(episodes)
    mapped, weights = learned(
        episodes, traj_group_adv_estimator_map={"solver": "grpo", "judge": "reinforce_plus_plus"}
    )
    configured, others = learned(episodes, {"roles": {"judge": {"estimator": "reinforce_plus_plus"}}})
    assert mapped == configured
    assert all(_same(weights[name], others[name]) for name in weights)
    assert mapped["policy.solver.loss"] == plain["policy.solver.loss"]
    assert mapped["policy.judge.loss"] != plain["policy.judge.loss"]


def test_each_policy_has_a_learning_rate_of_its_own(episodes: list[Episode], learned: Make) -> None:
    metrics, _ = learned(episodes, {"policies": {"judge": {"learning_rate": 5e-4}}})
    assert metrics["policy.judge.learning_rate"] == 5e-4
    assert metrics["policy.solver.learning_rate"] == 1e-3, "as a model made here was tuned with"


def test_the_trainers_own_logprobs_make_a_step_independent_of_the_samplers_last_bit(
    episodes: list[Episode], learned: Make
) -> None:
    _, weights = learned(episodes)
    for episode in episodes:
        for trajectory in episode.trajectories:
            for step in trajectory.steps:
                step.logprobs = [logprob - 1e-6 for logprob in step.logprobs]
    _, others = learned(episodes)
    assert _same(weights["solver"], others["solver"])
    _, sampled = learned(episodes, {"algorithm": {"old_logprobs": "sampler"}})
    assert not _same(weights["solver"], sampled["solver"])


def test_one_policy_may_play_all_roles(episodes: list[Episode], learned: Make) -> None:
    metrics, weights = learned(episodes, {"policies": None, "model": {"path": "builtin:tiny"}})
    assert list(weights) == ["policy"]
    assert metrics["grad_norm"] > 0.0
    assert metrics["role.judge.trajectories"] == 6


def test_a_role_whose_name_was_mistyped_is_named(episodes: list[Episode], learned: Make) -> None:
    with pytest.raises(ConfigError, match=r"`roles\.sovler` .*`roles\.solver`"):
        learned(episodes, {"roles": {"sovler": {"policy": "solver", "temperature": 0.5}}})


def test_a_role_that_no_policy_is_chosen_for_is_named_before_anything_is_learned(
    letters: ModuleType, tmp_path: Path
) -> None:
    class WithCritic(letters.PairWorkflow):  # type: ignore[name-defined, misc]
        async def say(self, role: str, question: str) -> Any:
            return await super().say("critic" if role == "judge" else role, question)

    changes = {**SMALL, "warm_start": {"steps": 0}}
    trainer = letters.make_pair_trainer(tmp_path / "run", changes, workflow_class=WithCritic)
    with pytest.raises(ConfigError, match=r"role `critic`; .*`roles\.critic\.policy`"):
        trainer.train()


def test_demonstrations_go_to_the_policy_of_their_role(letters: ModuleType, tmp_path: Path) -> None:
    trainer = letters.make_pair_trainer(tmp_path, FROZEN_JUDGE)
    create_initial_models(trainer.config, tmp_path)
    learner = trainer.run.make_learner(load_initial_models(trainer.config, tmp_path))
    frozen = learner.policies["judge"].parameters_sha256()
    losses = [imitate(learner, step) for step in range(3)]
    assert all(name.startswith("policy.solver.") for each in losses for name in each)
    assert losses[2]["policy.solver.loss"] < losses[0]["policy.solver.loss"]
    assert learner.policies["judge"].parameters_sha256() == frozen
    assert learner.demonstrations is not None
    rows = learner.demonstrations(letters.TASKS[:2], (0,))
    assert [row.group_key for row in rows] == [
        (task["task_id"], role) for task in letters.TASKS[:2] for role in ("solver", "solver", "judge")
    ]
    end = learner.policies["solver"].end_token_id
    assert all(row.token_ids_T[-1] == end and row.trainable_T[-1] for row in rows)


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "more", "named"),
    [
        ({"rollout": {"max_turns": 3}}, {}, r"`rollout\.max_turns`.*3.*nothing"),
        ({}, {"agent_args": {"a": 1}}, r"`agent_args` is given"),
        ({}, {"workflow_class": dict}, r"`workflow_class` is <class 'dict'>"),
        ({}, {"demonstrate": None}, "no expert to imitate"),
        ({}, {"evaluator": print}, "Given evaluator, workflow_class"),
        ({}, {"traj_group_adv_estimator_map": {"judge": "best"}}, r"`roles\.judge\.estimator` is 'best'"),
        (
            {"roles": {"judge": {"estimator": "grpo"}}},
            {"traj_group_adv_estimator_map": {"judge": "dr_grpo"}},
            "give one of them",
        ),
    ],
)
def test_what_a_workflow_cannot_honour_is_refused(
    letters: ModuleType, tmp_path: Path, changes: dict[str, Any], more: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        letters.make_pair_trainer(tmp_path / "run", changes, **more)
    assert list(tmp_path.iterdir()) == []


def test_a_context_beyond_the_positions_of_a_built_in_model_is_refused() -> None:
    require_models(load_config(["inference.max_context=512"]))
    with pytest.raises(ConfigError, match=r"inference\.max_context.*positions"):
        require_models(load_config(["inference.max_context=1000000"]))


ON_SERVERS = ["inference.engine=vllm", "inference.lockstep=false", "inference.servers=['http://x:1/v1']"]


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        ([], False),
        (["model.vision=train"], False),
        (["model.vision=train", "lora.rank=2"], True),
        (["model.vision=lora", "lora.rank=2"], False),
        (["model.vision=lora"], True),
        (["lora.rank=2"], False),
        (ON_SERVERS, False),
        ([*ON_SERVERS, "lora.rank=2"], True),
    ],
    ids=str,
)
def test_a_tower_is_trained_whole_or_by_an_adapter_and_of_a_text_model_not_at_all(
    tmp_path: Path, changes: list[str], is_refused: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "seeing", "vision_config": {}}))
    refused = pytest.raises(ConfigError, match=r"lora\.rank")
    with refused if is_refused else nullcontext():
        require_models(load_config([f"model.path={tmp_path}", *changes]))
    if any(each.startswith("model.vision") for each in changes):
        with pytest.raises(ConfigError, match=r"model\.vision"):
            require_models(load_config(changes))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (["model.path=hub:tiny"], r"`model\.path`"),
        (["model.path=builtin:giant"], r"`model\.path`"),
        (["policies.a.path=builtin:giant", "policies.b.path=builtin:tiny"], r"`policies\.a\.path`"),
        (["policies.a.learning_rate=1", "model.path=builtin:giant"], r"`model\.path`"),
    ],
    ids=str,
)
def test_a_built_in_model_that_there_is_not_is_refused_by_the_key_that_names_it(
    changes: list[str], key: str
) -> None:
    with pytest.raises(ConfigError, match=key):
        require_models(load_config(changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"policies": {"a": {}, "b": {}}}, r"The policies are a, b, but `agent_class` is played by one"),
        ({"roles": {"agent": {"temperature": 0.5}}}, r"`roles\.agent\.temperature` is 0\.5"),
    ],
)
def test_what_only_workflows_have_is_refused_for_agents(
    letters: ModuleType, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        letters.make_trainer(tmp_path / "run", changes)


@pytest.mark.parametrize(("name", "value"), [("workflow_args", {"n": 1}), ("open_workers", print)])
def test_what_only_a_workflow_takes_is_refused_without_one(
    letters: ModuleType, tmp_path: Path, name: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=f"`{name}` is given"):
        letters.make_trainer(tmp_path / "run", **{name: value})


@pytest.mark.parametrize("make", ["make_trainer", "make_pair_trainer", "make_program_trainer"])
def test_the_world_says_which_tasks_are_one_instance_however_an_agent_is_brought(
    letters: ModuleType, tmp_path: Path, make: str
) -> None:
    world = World(env_class=letters.LetterEnv, tasks=lambda *_, **__: [], identity=lambda task: "all alike")
    trainer = getattr(letters, make)(tmp_path / "run", world=world)
    assert (len(trainer.tasks.heldout), trainer.tasks.facts().distinct) == (4, 1)


def test_two_ranks_write_a_file_each_of_a_model_that_is_read_as_one(
    tiny_directory: Path, on_two_ranks: Make, tmp_path: Path
) -> None:
    model = load_model(tiny_directory)
    on_two_ranks(lambda ranks: save_model_by(ranks, model, tmp_path / "model"))
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == 2
    assert (tmp_path / "model" / "model.safetensors.index.json").is_file(), "others look files up in it"
    weights = load_model(tmp_path / "model").model.state_dict_hf()
    for name, weight in model.model.state_dict_hf().items():
        assert torch.equal(weights[name], weight), name


def test_a_run_of_programs_or_workflows_has_defaults_of_its_own(letters: ModuleType) -> None:
    """Their calls come at any time, and their answers end where they like."""

    def program(task: Any, config: Any) -> None: ...

    tasks = [{"id": "a", "instruction": "say a"}]
    of_workflow = AgentTrainer({}, letters.TASKS, workflow_class=letters.PairWorkflow).config
    of_program = AgentTrainer({}, tasks, agent_flow=program, evaluator=lambda task, episode: 1.0).config
    for config in (of_workflow, of_program):
        assert not config.inference.lockstep
        assert config.inference.max_context == 2048
        assert (config.rollout.max_tokens_per_turn, config.warm_start.steps) == (0, 0)
    assert of_workflow.algorithm.old_logprobs == "trainer"
    assert of_program.algorithm.old_logprobs == TrainConfig().algorithm.old_logprobs
