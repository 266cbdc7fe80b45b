"""The training loop.

        tasks ──► engine ──► episodes ──► groups ──► advantages ──► samples ──► backend.update ──► new weights
                    ▲                                                                                │
                    └──────────────────────── publish_weights, canary ◄──────────────────────────────┘

`train` is the whole run: report, warm start, report, reinforcement, report. `reinforce` is the loop. A run
that was killed goes on from its last checkpoint and ends with the same parameters as one that never stopped:
tasks, samples and draws are functions of the seed and the step, and what was recorded beyond the checkpoint
is taken back first.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from rllm.agents.base import BaseAgent
from rllm.algorithms.grouping import group_advantages, group_episodes
from rllm.algorithms.losses import ImitationLoss, PolicyLoss
from rllm.config.schema import TrainConfig
from rllm.data.sampler import TaskSampler
from rllm.engine.attempts import EpisodeEngine
from rllm.errors import ConfigError
from rllm.eval.evaluate import evaluate
from rllm.inference.local.client import LocalClient
from rllm.rendering.chat import ChatRenderer
from rllm.store.episodes import EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.tracking.base import Tracker
from rllm.trainer.backends.torch import TorchBackend
from rllm.trainer.canary import Canary
from rllm.trainer.checkpoint import RunState, save_checkpoint
from rllm.trainer.outcomes import call_counts, require_one_that_did_not_fail
from rllm.trainer.samples import training_batch
from rllm.trainer.warm_start import Demonstrate, demonstration_samples
from rllm.types.episode import Episode, Outcome
from rllm.types.messages import SamplingParams
from rllm.types.sample import TrainingBatch, TrainingSample

Result = TypeVar("Result")


@dataclass(kw_only=True, slots=True)
class Learner:
    """What turns demonstrations and episodes into weights.

    It needs no engine, so a stored run is replayed through it.
    """

    config: TrainConfig
    backend: TorchBackend
    tasks: TaskSampler[Any]
    make_agent: Callable[[], BaseAgent]
    demonstrate: Demonstrate | None
    renderer: ChatRenderer
    end_token_id: int
    """What ends a demonstrated answer: the token that the model has to sample there."""


@dataclass(kw_only=True, slots=True)
class TrainingRun:
    """Everything a run works with; `AgentTrainer` makes one from a configuration."""

    learner: Learner
    directory: RunDirectory
    store: EpisodeStore
    tracker: Tracker
    client: LocalClient
    engine: EpisodeEngine
    heldout_tasks: Sequence[Any]
    """Reported before and after."""
    validation_tasks: Sequence[Any]
    """Evaluated while training; may be watched and tuned on."""
    state: RunState
    save_model: Callable[[], None]
    learner_thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "rllm-learner"))
    canary: Canary = field(default_factory=Canary)

    @property
    def config(self) -> TrainConfig:
        return self.learner.config

    @property
    def backend(self) -> TorchBackend:
        return self.learner.backend


async def train(run: TrainingRun) -> dict[str, Any]:
    """The whole run; returns the summary that `summary.json` holds."""
    await report(run, "untrained")
    await warm_start(run)
    await report(run, "before")
    await reinforce(run)
    await report(run, "after")
    run.save_model()
    return summary_of(run.state)


async def reinforce(run: TrainingRun) -> None:
    """The reinforcement-learning loop: one batch of rollouts, then its updates, until all steps are done."""
    config, state = run.config, run.state
    run.tracker.begin("train")
    for step in range(state.steps, config.steps):
        with _timed(state, "train"):
            started = time.perf_counter()
            episodes = await sample_episodes(run, step)
            sampled_s = time.perf_counter() - started
            run.store.save_episodes("train", step, episodes)
            batch, metrics = await _in_learner(run, partial(learn, run.learner, episodes, step))
            if batch.samples:
                metrics |= await publish(run, batch.samples[0])
            state.steps = step + 1
            state.sampled_tokens += batch.token_counts["sampled"]
            metrics |= await validate(run, step)
        elapsed_s = time.perf_counter() - started
        metrics |= {
            "total_steps": config.steps,
            "tokens_per_s": batch.token_counts["sampled"] / sampled_s,
            "rollout_s": sampled_s,
            "step_s": elapsed_s,
            "policy_version": run.backend.policy_version,
            "run_s": wall_s(state),
        }
        run.tracker.log(step, "train", metrics)
        if state.steps % config.checkpoint.every_steps == 0 or state.steps == config.steps:
            save(run)


async def sample_episodes(run: TrainingRun, step: int) -> list[Episode]:
    """`tasks_per_step` × `group_size` episodes of one step, in the order of tasks and attempts."""
    rollout = run.config.rollout
    tasks = run.learner.tasks.batch(step * rollout.tasks_per_step, rollout.tasks_per_step)
    async with aclosing(
        run.engine.run(
            tasks,
            group_size=rollout.group_size,
            purpose=f"train/{step}",
            sampling=_sampling(run, temperature(run.config, step)),
        )
    ) as running:
        episodes = [episode async for episode in running]
    require_one_that_did_not_fail(episodes, run.config.inference.max_context)
    return sorted(episodes, key=lambda each: (each.task_id, each.rollout_idx))


def learn(learner: Learner, episodes: Sequence[Episode], step: int) -> tuple[TrainingBatch, dict[str, Any]]:
    """Episodes to optimizer updates. Needs no engine: a stored run is replayed through this very function."""
    algorithm = learner.config.algorithm
    groups, counts = group_episodes(episodes)
    advantages = group_advantages(groups, algorithm.estimator, counts)
    loss = PolicyLoss(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        aggregation=algorithm.aggregation,
        entropy_coef=_linear(algorithm.entropy_coef, step, learner.config.steps, 0.0),
    )
    batch = training_batch(episodes, advantages, drop_tied=not loss.needs_every_row)
    updates: list[dict[str, float]] = []
    for share in group_shares(batch.samples, algorithm.updates_per_step):
        updates.append(learner.backend.update(share, loss, learning_rate(learner.config, step)))
    rewards = [
        episode.reward for episode in episodes if episode.outcome in (Outcome.SCORED, Outcome.TRUNCATED)
    ]
    metrics: dict[str, Any] = {
        "success": sum(episode.is_correct for episode in episodes) / max(1, counts.learnable),
        "reward_mean": sum(rewards) / max(1, len(rewards)),
        "episodes": counts.episodes,
        "failed": counts.removed,
        "groups": counts.groups,
        "groups_tied": counts.tied,
        "groups_alone": counts.alone,
        "turns_mean": sum(len(each.trajectories[0].steps) for each in episodes) / max(1, len(episodes)),
        **call_counts(episodes),
        "learning_rate": learning_rate(learner.config, step),
        **{f"tokens.{name}": count for name, count in batch.token_counts.items()},
        **{
            name: sum(each[name] for each in updates) / len(updates)
            for name in (updates[0] if updates else ())
        },
    }
    if updates:
        # The first update still has the weights that sampled: any gap is a mismatch of the two passes.
        metrics["logprob_gap_first"] = updates[0]["logprob_gap_max"]
    return batch, metrics


async def warm_start(run: TrainingRun) -> None:
    """Imitation of the noisy expert, and a fresh optimizer for what follows."""
    config, state, warm = run.config, run.state, run.config.warm_start
    if warm.steps == 0:
        return
    if run.learner.demonstrate is None:
        raise ConfigError(
            f"`warm_start.steps` is {warm.steps} but there is no expert to imitate; set it to 0."
        )
    run.tracker.begin("warm_start")
    for step in range(state.warm_steps, warm.steps):
        with _timed(state, "warm_start"):
            metrics = await _in_learner(run, partial(imitate, run.learner, step))
            state.warm_steps = step + 1
        run.tracker.log(step, "warm_start", {**metrics, "total_steps": warm.steps, "run_s": wall_s(state)})
        if state.warm_steps == warm.steps:
            run.backend.reset_optimizer()
            run.backend.publish_weights()
            save(run)
        elif state.warm_steps % config.checkpoint.every_steps == 0:
            save(run)


def imitate(learner: Learner, step: int) -> dict[str, float]:
    """One supervised update on new demonstrations."""
    warm = learner.config.warm_start
    assert learner.demonstrate is not None, "warm_start checked it"
    position = step * warm.episodes_per_step
    samples = demonstration_samples(
        learner.tasks.batch(position, warm.episodes_per_step),
        learner.demonstrate,
        learner.make_agent,
        learner.renderer,
        learner.end_token_id,
        noise=warm.noise,
        key=(learner.config.seed, "warm_start", step),
    )
    rate = _linear(warm.learning_rate, step, warm.steps, learner.config.optimizer.final_lr_fraction)
    return learner.backend.update(samples, ImitationLoss(), rate)


async def publish(run: TrainingRun, sample: TrainingSample) -> dict[str, float]:
    """New weights to the sampler, and the proof that they arrived."""
    run.backend.publish_weights()
    return await run.canary.check(run.backend, run.client, sample)


async def report(run: TrainingRun, name: str) -> None:
    """Sampled and greedy success on the held-out tasks, unless it was measured before the run was
    interrupted."""
    state = run.state
    if name in state.reports:
        return
    run.tracker.begin(name)
    with _timed(state, f"report_{name}"):
        run.backend.publish_weights()
        sampled, episodes = await evaluate(run.engine, run.heldout_tasks, _sampling(run), f"report/{name}")
        if name != "untrained" or not run.config.warm_start.steps:  # else it may still learn not to fail
            require_one_that_did_not_fail(episodes, run.config.inference.max_context)
        greedy, greedy_episodes = await evaluate(
            run.engine, run.heldout_tasks, _sampling(run, 0.0), f"report/{name}"
        )
        run.store.save_episodes(name, 0, episodes)
        run.store.save_episodes(f"{name}.greedy", 0, greedy_episodes)
    state.reports[name] = {
        "success": sampled.success,
        "success_interval": list(sampled.success_interval),
        "greedy": greedy.success,
        "greedy_interval": list(greedy.success_interval),
        "sampled_report": sampled.to_dict(),
        "greedy_report": greedy.to_dict(),
    }
    run.tracker.log(
        0,
        name,
        {
            "success": sampled.success,
            "greedy": greedy.success,
            "failed": sampled.failed,
            "run_s": wall_s(state),
        },
    )
    save(run)


async def validate(run: TrainingRun, step: int) -> dict[str, float]:
    """Both curves, sampled and greedy, on the validation split, every so many steps."""
    every = run.config.evaluation.every_steps
    if not every or (step + 1) % every:
        return {}
    sampled, _ = await evaluate(run.engine, run.validation_tasks, _sampling(run), "validation")
    greedy, _ = await evaluate(run.engine, run.validation_tasks, _sampling(run, 0.0), "validation")
    return {
        "heldout_success": sampled.success,
        "heldout_success_low": sampled.success_interval[0],
        "heldout_success_high": sampled.success_interval[1],
        "heldout_greedy": greedy.success,
        "heldout_greedy_low": greedy.success_interval[0],
        "heldout_greedy_high": greedy.success_interval[1],
    }


def group_shares(samples: Sequence[TrainingSample], num_shares: int) -> Iterator[list[TrainingSample]]:
    """Samples by whole groups, dealt out in turn; empty shares are left out."""
    keys = sorted({sample.group_key for sample in samples})
    for number in range(num_shares):
        mine = set(keys[number::num_shares])
        if mine:
            yield [sample for sample in samples if sample.group_key in mine]


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of a reinforcement-learning step: linear warm-up, then linear decay to `final_lr_fraction`."""
    optimizer = config.optimizer
    if step < optimizer.warmup_steps:
        return optimizer.learning_rate * (step + 1) / (optimizer.warmup_steps + 1)
    return _linear(optimizer.learning_rate, step, config.steps, optimizer.final_lr_fraction)


def temperature(config: TrainConfig, step: int) -> float:
    """The sampling temperature of a reinforcement-learning step."""
    first = config.rollout.temperature
    return _linear(first, step, config.steps, (config.rollout.final_temperature or first) / first)


def save(run: TrainingRun) -> None:
    """Checkpoint the run as it stands."""
    save_checkpoint(run.directory.checkpoints_path, run.state, run.backend, run.config.checkpoint.keep)


def wall_s(state: RunState) -> float:
    """Seconds of work on the run so far."""
    return sum(state.phase_s.values())


def summary_of(state: RunState) -> dict[str, Any]:
    """What `summary.json` holds."""
    return {
        **state.reports,
        "wall_s": wall_s(state),
        "phase_s": state.phase_s,
        "sampled_tokens": state.sampled_tokens,
    }


def _linear(peak: float, step: int, total: int, final_fraction: float) -> float:
    return peak * (1.0 - (1.0 - final_fraction) * step / max(1, total - 1))


def _sampling(run: TrainingRun, temperature: float = 1.0) -> SamplingParams:
    config = run.config
    return SamplingParams(
        temperature=temperature,
        max_tokens=config.rollout.max_tokens_per_turn or config.inference.max_context,
    )


async def _in_learner(run: TrainingRun, work: Callable[[], Result]) -> Result:
    """Heavy work in the one learner thread, so that the event loop and the live view stay responsive."""
    return await asyncio.get_running_loop().run_in_executor(run.learner_thread, work)


@contextmanager
def _timed(state: RunState, phase: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        state.phase_s[phase] = state.phase_s.get(phase, 0.0) + time.perf_counter() - started
