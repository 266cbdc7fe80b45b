"""A stored run ──► the trajectories of it that are worth imitating, by the token ids that were sampled.

store.sqlite ──► training episodes ──► scored, of the role, paid enough ──► at most so many a task ──► Traces

Nothing is encoded again, so the model that learns must have the tokenizer of the one that sampled. Episodes
of the reports before and after are never among them: what is measured on stays unseen.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllm.config.loader import load_config
from rllm.config.schema import TrainConfig
from rllm.config.supervised import ChatDataConfig
from rllm.errors import ConfigError
from rllm.rendering.tokens import TextTokenizer
from rllm.store.episodes import TRAIN_PHASE, EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.types.episode import Episode, Outcome, Step, Trajectory
from rllm.types.sample import NOT_SAMPLED
from rllm.types.task import Task


@dataclass(kw_only=True, slots=True, frozen=True)
class Trace:
    """One trajectory of a stored run."""

    where: str
    """Its episode, for people."""
    task: str
    """The question, whatever the visit: two passes over a task have one of these."""
    reward: float
    trajectory: Trajectory
    """Its steps are to be learned: no log-probability of another policy is left in them."""

    def token_ids(self) -> set[int]:
        return {token for step in self.trajectory.steps for token in (*step.prompt_ids, *step.response_ids)}


def successful_traces(data: ChatDataConfig) -> list[Trace]:
    """Those of `data.run` that `data` chooses, in the order of the run.

    Raises ConfigError where none is left, a role must be chosen, or ids were not recorded.
    """
    run = RunDirectory.read(Path(data.run))
    traces: list[Trace] = []
    roles: set[str] = set()
    num_episodes, best = 0, float("-inf")
    with EpisodeStore.open(run.store_path, read_only=True) as store:
        for episode in store.episodes(TRAIN_PHASE):
            num_episodes += 1
            if episode.outcome is not Outcome.SCORED:
                continue
            for trajectory in episode.trajectories:
                roles.add(trajectory.name)
                reward = episode.reward if trajectory.reward is None else trajectory.reward
                if data.role in ("", trajectory.name):
                    best = max(best, reward)
                    if reward >= data.min_reward and trajectory.steps:
                        traces.append(_trace(episode, trajectory, reward))
    require_one_role(data, roles)
    if not traces:
        best_text = f"the best was paid {best:g}" if best > float("-inf") else "none of them was scored"
        raise ConfigError(
            f"None of the {num_episodes} training episodes in {data.run} was paid `data.min_reward` = "
            f"{data.min_reward:g} or more ({best_text}); lower it, or take another run."
        )
    return _at_most(traces, data.max_per_task)


def model_of_run(data: ChatDataConfig) -> Path:
    """The model that the run has made, of the policy that plays `data.role`."""
    run = RunDirectory.read(Path(data.run))
    config = _config_of(run)
    path = run.model_path if len(config.named_policies) == 1 else run.path / "models" / _policy(config, data)
    if not path.is_dir():
        raise ConfigError(
            f"{data.run} has not finished, so it has no model to go on from; let it end, or give --model."
        )
    return path


def tokenizer_directories(data: ChatDataConfig) -> list[Path]:
    """Where the tokenizer may lie that the ids of the run belong to."""
    run = RunDirectory.read(Path(data.run))
    config = _config_of(run)
    name = next(iter(config.named_policies)) if len(config.named_policies) == 1 else _policy(config, data)
    final = [run.model_path, run.path / "models" / name]
    initial = [run.path / "initial_model", run.path / "initial_models" / name]
    return [path for path in (*final, *initial, Path(config.named_policies[name].path)) if path.is_dir()]


def require_same_tokens(
    traces: Iterable[Trace], theirs: TextTokenizer, mine: TextTokenizer, run: str
) -> None:
    """Raises ConfigError unless every recorded id is the same text to both tokenizers."""
    for token in sorted(set[int]().union(*(trace.token_ids() for trace in traces))):
        there, here = theirs.token_text(token), mine.token_text(token)
        if there != here:
            raise ConfigError(
                f"Token {token} of {run} is {there!r}, and {here!r} to the model that is to learn it; give a "
                "--model with the tokenizer of the run."
            )


def _trace(episode: Episode, trajectory: Trajectory, reward: float) -> Trace:
    where = f"episode {episode.id} ({trajectory.name})"
    steps = [to_learn(step, where) for step in trajectory.steps]
    return Trace(
        where=where,
        task=task_key(episode),
        reward=reward,
        trajectory=Trajectory(name=trajectory.name, steps=steps),
    )


def to_learn(step: Step, where: str) -> Step:
    """The step as a demonstration: what was sampled is to be learned, whoever sampled it and how."""
    if not step.prompt_ids or not step.response_ids:
        raise ConfigError(
            f"{where} has a step with {len(step.prompt_ids)} prompt ids and {len(step.response_ids)} sampled "
            "ids: its engine did not return tokens. Train on its conversations instead, as a file."
        )
    versions = step.policy_versions or [0] * len(step.response_ids)
    return Step(
        prompt_ids=step.prompt_ids,
        response_ids=step.response_ids,
        logprobs=[0.0] * len(step.response_ids),
        policy_versions=[NOT_SAMPLED if version == NOT_SAMPLED else 0 for version in versions],
    )


def task_key(episode: Episode) -> str:
    """A key of the task's content, without the id of this visit; the id where it has no other content."""
    task: Any = episode.task
    made_of = [task.instruction, task.metadata] if isinstance(task, Task) else task
    if isinstance(made_of, dict):
        made_of = {key: value for key, value in made_of.items() if key != "task_id"}
    return json.dumps(made_of, sort_keys=True, default=str) if made_of else episode.task_id


def _at_most(traces: Sequence[Trace], limit: int) -> list[Trace]:
    """At most `limit` of each task: the best paid, and of those the latest."""
    if not limit:
        return list(traces)
    places: defaultdict[str, list[int]] = defaultdict(list)
    for place, trace in enumerate(traces):
        places[trace.task].append(place)
    first_traces = {
        place
        for mine in places.values()
        for place in sorted(mine, key=lambda place: (-traces[place].reward, -place))[:limit]
    }
    return [trace for place, trace in enumerate(traces) if place in first_traces]


def require_one_role(data: ChatDataConfig, roles: Collection[str]) -> None:
    """Raises ConfigError where the role has to be named, or is not there."""
    names = ", ".join(sorted(roles))
    if data.role and data.role not in roles:
        raise ConfigError(f"`data.role` is {data.role!r}; the training episodes have {names or 'none'}.")
    if not data.role and len(roles) > 1:
        raise ConfigError(
            f"The training episodes of {data.run} have several roles; set `data.role` to one of {names}."
        )


def _config_of(run: RunDirectory) -> TrainConfig:
    values = run.config()
    if "kind" in values:
        raise ConfigError(f"{run.path} is a run of `rllm {values['kind']}`, which has no episodes.")
    return load_config(values)


def _policy(config: TrainConfig, data: ChatDataConfig) -> str:
    return config.policy_of(data.role)
