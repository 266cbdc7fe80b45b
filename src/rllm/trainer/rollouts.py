"""The episodes of a step, round by round until there is enough to compare.

    next tasks ──► group_size attempts each ──► tasks with signal < tasks_per_step? ──yes, dynamic──┐
        ▲    └ `filters.first_attempts` of them first;   │ no, or that was the last round           │
        │      the rest where these did not settle it    │                                          │
        └────────────────────────────────────────────────┼──────────────────────────────────────────┘
                                                         └──► one greedy attempt each, where an estimator asks

Which tasks come next is the curriculum's to say; what it knows is part of the run's state.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from rllm.algorithms.curriculum import Curriculum
from rllm.config.schema import TrainConfig
from rllm.engine.attempts import EpisodeEngine
from rllm.trainer.judging import needs_greedy, tasks_solved_first, tasks_with_signal
from rllm.trainer.learning import Learner
from rllm.trainer.outcomes import require_one_that_did_not_fail
from rllm.trainer.schedules import temperature
from rllm.trainer.trainable import fail_untrainable
from rllm.types.episode import CUT_THOUGHT, Episode, Step
from rllm.types.messages import FinishReason, SamplingParams
from rllm.types.task import EpisodeId, task_id_of, with_id


@dataclass(kw_only=True, slots=True)
class Rollouts:
    """The episodes of one step, in the order of tasks and attempts."""

    tasks: list[Any] = field(default_factory=list[Any])
    episodes: list[Episode] = field(default_factory=list[Episode])
    greedy: list[Episode] = field(default_factory=list[Episode])
    """One attempt at each task by the likeliest tokens: compared with, never trained on."""
    rounds: int = 0

    def grading_share(self) -> float:
        """The part of the episodes' seconds that graders took."""
        grading_s = all_s = 0.0
        for step in self._steps():
            timings = step.timings
            grading_s += timings.get("grader_s", 0.0)
            all_s += timings.get("model_s", 0.0) + timings.get("env_s", timings.get("grader_s", 0.0))
        return grading_s / all_s if all_s else 0.0

    def _steps(self) -> Iterator[Step]:
        return (
            step for each in self.episodes for trajectory in each.trajectories for step in trajectory.steps
        )

    def metrics(self) -> dict[str, int | float]:
        """`unparsed_tool_markup`: turns whose tool calls could not be read; `thoughts_cut`: turns whose
        thought was cut; `answers_cut`: share of answers that ended at their token limit."""
        steps = list(self._steps())
        reasons = [step.model_output.finish_reason for step in steps if step.model_output is not None]
        return {
            **({"answers_cut": reasons.count(FinishReason.LENGTH) / len(reasons)} if reasons else {}),
            "tasks": len(self.tasks),
            "rounds": self.rounds,
            "unparsed_tool_markup": sum(bool(step.info.get("unparsed_markup")) for step in steps),
            "thoughts_cut": sum(bool(step.info.get(CUT_THOUGHT)) for step in steps),
        }


async def sample_step(
    engine: EpisodeEngine, learner: Learner, curriculum: Curriculum[Any], step: int
) -> Rollouts:
    """`group_size` attempts at each of `tasks_per_step` tasks and, with `filters.dynamic`, at as many further
    tasks as there were without signal, round after round.

    The tasks are observed once the step is learned from.
    """
    config, rollouts = learner.config, Rollouts()
    if not config.schedule.steps_ahead:
        # What canary and validation left in the sampler's caches would change the batches, and with them the
        # last bit of log-probabilities; a run that was resumed has not seen them.
        learner.policies.publish()
    sampling = sampling_of(config, temperature(config, step))
    telling = set[str]()
    # Without filters nothing is ever `telling`, and `max_rounds` is 1.
    while len(telling) < config.rollout.tasks_per_step and rollouts.rounds < max_rounds(config):
        missing = config.rollout.tasks_per_step - len(telling)
        tasks = curriculum.batch(step, missing)
        if config.filters.rejects or config.filters.first_attempts:
            # Counted over all rounds, so that tasks of a later round are not taken for those of an earlier
            # one.
            tasks = [with_id(task, number) for number, task in enumerate(tasks, start=len(rollouts.tasks))]
        episodes = await _sample_groups(engine, learner, tasks, f"train/{step}", sampling)
        rollouts.episodes += episodes
        rollouts.tasks += tasks
        rollouts.rounds += 1
        require_one_that_did_not_fail(rollouts.episodes, config.inference.max_context)
        if config.filters.rejects:
            telling = tasks_with_signal(config, rollouts.episodes, learner.policies.is_trained)
    if needs_greedy(config):
        groups_compared = [
            task
            for number, task in enumerate(rollouts.tasks)
            if not config.filters.rejects or task_id_of(task, number) in telling
        ]
        purpose = f"train/{step}/greedy"
        rollouts.greedy = await _sample(engine, groups_compared, purpose, sampling_of(config, 0.0), 1)
    rollouts.episodes.sort(key=lambda each: (each.task_id, each.rollout_idx))
    return rollouts


def step_of(purpose: str) -> int:
    """The step that episodes are sampled for, whose `purpose` begins with `train/STEP`; -1 for what is played
    between steps, which the trainer waits for."""
    phase, _, rest = purpose.partition("/")
    step = rest.partition("/")[0]
    return int(step) if phase == "train" and step.isdecimal() else -1


def max_rounds(config: TrainConfig) -> int:
    """Rounds that a step may take at most."""
    return config.filters.max_rounds if config.filters.dynamic else 1


def sampling_of(config: TrainConfig, temperature: float = 1.0) -> SamplingParams:
    """The sampling parameters of answers; at temperature 0 the likeliest tokens."""
    return SamplingParams(
        temperature=temperature,
        max_tokens=config.rollout.max_tokens_per_turn or config.inference.max_context,
    )


def _id_of(task: Any) -> str:
    """The id of a task that has one."""
    return task_id_of(task, 0)


async def _sample_groups(
    engine: EpisodeEngine, learner: Learner, tasks: Sequence[Any], purpose: str, sampling: SamplingParams
) -> list[Episode]:
    """`group_size` attempts at each task; of tasks that their first attempts settle, these alone.

    Which tasks those are follows from the first attempts, which are the same on all ranks and after a resume.
    """
    config, group_size = learner.config, learner.config.rollout.group_size
    first = config.filters.first_attempts
    episodes = await _sample(engine, tasks, purpose, sampling, first or group_size)
    fail_untrainable(episodes, learner.policies, config.rollout.max_failed_fraction)
    if not first:
        return episodes
    solved_ids = tasks_solved_first(config, episodes)
    if open_tasks := [task for task in tasks if _id_of(task) not in solved_ids]:
        first_ids = {
            EpisodeId(task_id=_id_of(task), attempt=each) for task in open_tasks for each in range(first)
        }
        others = await _sample(engine, open_tasks, purpose, sampling, group_size, first_ids)
        fail_untrainable(others, learner.policies, config.rollout.max_failed_fraction)
        episodes += others
    return episodes


async def _sample(
    engine: EpisodeEngine,
    tasks: Sequence[Any],
    purpose: str,
    sampling: SamplingParams,
    group_size: int,
    skip: Collection[EpisodeId] = (),
) -> list[Episode]:
    run = engine.run(tasks, group_size=group_size, purpose=purpose, sampling=sampling, skip=skip)
    async with aclosing(run) as running:
        return sorted([each async for each in running], key=lambda each: (each.task_id, each.rollout_idx))
