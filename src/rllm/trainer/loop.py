"""The training loop.

        tasks ──► engine ──► episodes ──► groups ──► advantages ──► samples ──► backend.update ──► new weights
                    ▲                                                                                │
                    └──────────────────────── publish_weights, canary ◄──────────────────────────────┘

`train` is the whole run: report, warm start, report, reinforcement, report. `reinforce` is the loop; what
happens between episodes and new weights is in `rllm.trainer.learning`. A run that was killed goes on from its
last checkpoint and ends with the same parameters as one that never stopped: tasks, samples and draws are
functions of the seed and the step, and what was recorded beyond the checkpoint is taken back first.
"""

import asyncio
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from rllm.algorithms.curriculum import Curriculum
from rllm.config.schema import TrainConfig
from rllm.engine.attempts import EpisodeEngine
from rllm.errors import AlarmError, ConfigError
from rllm.eval.evaluate import EvaluationReport, evaluate, results_on
from rllm.eval.skill import Measure, learning_facts, score_of, values_of
from rllm.eval.task_facts import TaskFacts
from rllm.store.episodes import GREEDY_PHASE, TRAIN_PHASE
from rllm.tracking.alarms import AlarmWatch
from rllm.tracking.base import Tracker, Trackers
from rllm.trainer.ahead import PublishedVersions, StepsAhead
from rllm.trainer.backends.base import TrainingBackend
from rllm.trainer.canary import Canary, CanaryScorer, row_to_score
from rllm.trainer.checkpoint import RunState
from rllm.trainer.cluster import ClusterEngine
from rllm.trainer.imitation import PlayExpert, warn_of_stalled_imitation
from rllm.trainer.learning import Learner, imitate, learn
from rllm.trainer.machine import RunMachine, update_work, updates_since
from rllm.trainer.outcomes import (
    ending_counts,
    require_known_roles,
    require_one_that_did_not_fail,
    role_facts,
    warn_of_full_contexts,
)
from rllm.trainer.patience import Patience
from rllm.trainer.policies import Policies
from rllm.trainer.record import RunRecord
from rllm.trainer.reference import save_references
from rllm.trainer.rollouts import Rollouts, sample_step, sampling_of
from rllm.trainer.sampler_work import rollout_bytes, sampler_work
from rllm.trainer.samplers import busy_s
from rllm.trainer.stopping import saved_when_stopped, stall_limit_s
from rllm.trainer.token_trace import TokenTrace, numbers_of_episodes
from rllm.types.episode import Episode
from rllm.types.sample import TrainingSample

Result = TypeVar("Result")


@dataclass(kw_only=True, slots=True)
class RunParts:
    """Everything that the loop works with; a `TrainingRun` opens it."""

    learner: Learner
    record: RunRecord
    tracker: Trackers
    clients: Mapping[str, CanaryScorer]
    """The clients that sample, by policy."""
    engine: EpisodeEngine
    heldout_tasks: Sequence[Any]
    """Reported before and after."""
    facts: TaskFacts
    """The facts of those tasks."""
    validation_tasks: Sequence[Any]
    """Evaluated while training; may be watched and tuned on. None of them is reported."""
    validation_facts: TaskFacts
    """The facts of those tasks."""
    curriculum: Curriculum[Any]
    """Which tasks come next."""
    state: RunState
    alarms: AlarmWatch
    """Looks at each step of reinforcement learning."""
    machine: RunMachine | None = None
    """The machine and its peak; None where a service computes, and on ranks that write nothing."""
    num_ranks: int = 1
    cluster: ClusterEngine | None = None
    """The engine, where episodes are played on other machines."""
    play_expert: PlayExpert | None = None
    """Where the expert of the warm start can be played."""
    # One thread, so that all ranks begin their collectives in the same order, and are told their device once.
    learner_thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "rllm-learner"))
    canaries: defaultdict[str, Canary] = field(default_factory=lambda: defaultdict(Canary))
    is_whole: bool = True
    """Whether `state`, weights and record belong together: not from the first update of a step until the step
    is on record."""

    def __post_init__(self) -> None:
        if self.config.inference.engine != "local":  # a server scores at no other temperature
            self.canaries = defaultdict(partial(Canary, 1.0))
        for name, last in self.state.canaries.items():
            self.canaries[name].restore(last)

    @property
    def config(self) -> TrainConfig:
        return self.learner.config

    @property
    def policies(self) -> Policies:
        return self.learner.policies

    def save(self) -> None:
        """Checkpoint the run as it stands."""
        self._note_canaries()
        self.record.save_checkpoint(self.state, self.learner.backends())

    def save_if_whole(self) -> None:
        """Checkpoint a run that is stopped, unless it is in the middle of a step: that is repeated."""
        if self.is_whole:
            self._note_canaries()
            self.record.save_now(self.state, self.learner.backends())

    def _note_canaries(self) -> None:
        self.state.canaries = {name: state for name, each in self.canaries.items() if (state := each.state())}


async def train(run: RunParts) -> dict[str, Any]:
    """The whole run; returns the summary that `summary.json` holds."""
    limit_s, report_path = stall_limit_s(run.config), run.record.path / "stall.txt"
    async with saved_when_stopped(
        run.engine,
        run.save_if_whole,
        limit_s=limit_s,
        report_path=report_path,
        clients=run.clients.values(),
    ):
        measures_start = run.config.evaluation.at_start
        # Without a warm start these are the weights of `before`, which are measured once.
        if measures_start and run.config.warm_start.steps:
            await report(run, "untrained")
        await warm_start(run)
        if measures_start:
            await report(run, "before")
        await reinforce(run)
        await report(run, "after")
    run.record.save_models(run.policies)
    return await asyncio.to_thread(summary_of, run)


async def reinforce(run: RunParts) -> None:
    """The reinforcement-learning loop: one batch of rollouts, then its updates, until all steps are done.

    With an asynchronous schedule the next steps are being sampled meanwhile.
    """
    config, steps_ahead = run.config, run.config.schedule.steps_ahead
    sample = partial(sample_step, run.engine, run.learner, run.curriculum)
    ahead = StepsAhead(sample, steps_ahead=steps_ahead, num_steps=config.steps)
    try:
        await _reinforce(run, ahead)
    finally:
        await ahead.close()


async def _reinforce(run: RunParts, ahead: StepsAhead) -> None:
    config, state = run.config, run.state
    run.tracker.begin("train")
    versions = PublishedVersions(run.policies, config)
    for step in range(state.steps, config.steps):
        # Also where the run is resumed behind the evaluation that ended it.
        if state.has_ended_early:
            break
        with state.time_phase("train"):
            start_s, sampled_s = time.perf_counter(), _sampler_busy_s(run)
            work_before = sampler_work(run.clients)
            rollouts = await ahead.step(step)
            updates_before = update_work(run.learner.backends())
            read = rollout_bytes(run.policies, run.clients, work_before, rollouts.episodes, run.num_ranks)
            # `StepsAhead` promises this; rows that were too old would not show in anything else.
            ages = versions.require_fresh(rollouts.episodes, config.schedule.steps_ahead)
            run.curriculum.observe(step, rollouts.episodes)
            run.is_whole = False
            trace = TokenTrace()
            learn_step = partial(learn, run.learner, rollouts.episodes, step, rollouts.greedy, trace=trace)
            # Recording episodes needs nothing that learning makes of them, so it does not have to wait.
            (batch, metrics), _ = await asyncio.gather(
                in_learner(run, learn_step), asyncio.to_thread(record, run.record, rollouts, step)
            )
            metrics |= updates_since(updates_before, run.learner.backends())
            numbers = numbers_of_episodes(rollouts.episodes, batch.samples, trace)
            # Behind both: the store keeps these numbers beside episodes that it already has.
            await asyncio.to_thread(run.record.save_token_numbers, TRAIN_PHASE, step, numbers)
            metrics |= await publish(run, batch.samples)
            versions.note()
            state.steps = step + 1
            # With the tasks of steps that are sampled ahead, which a run that goes on plays again.
            state.curriculum = run.curriculum.state()
            state.sampled_tokens += batch.token_counts["sampled"]
            metrics |= await validate(run, step)
        elapsed_s = time.perf_counter() - start_s
        metrics |= _with_shares(run, metrics | read)
        metrics |= {
            **rollouts.metrics(),
            "tasks_pooled": run.curriculum.num_pooled,
            **ahead.metrics,
            **(ages | _idle_shares(run, ahead, sampled_s, elapsed_s) if config.schedule.steps_ahead else {}),
            **(run.cluster.metrics() if run.cluster is not None else {}),
            "grading_s": rollouts.grading_share() * ahead.metrics["rollout_s"],
            "total_steps": config.steps,
            # With steps ahead sampling goes on during the whole step, and `rollout_s` is only what was waited
            # for.
            "tokens_per_s": batch.token_counts["sampled"]
            / (elapsed_s if config.schedule.steps_ahead else ahead.metrics["rollout_s"]),
            "step_s": elapsed_s,
            "run_s": state.wall_s,
        }
        # Before the checkpoint: a line beyond it is taken back when the run goes on, and one that the process
        # did not live to write would be missing for ever.
        run.tracker.log(step, "train", metrics)
        run.is_whole = True
        alarm_events = run.alarms.observe({"step": step, **metrics})
        for event in alarm_events:
            run.tracker.note(f"Alarm: {event}")
        # `is_best` notes the score in the state, so it is asked before that is saved.
        is_best = "heldout_success" in metrics and state.is_best(metrics["heldout_success"])
        is_last = state.steps == config.steps or state.has_ended_early
        if state.steps % config.checkpoint.period == 0 or is_best or is_last:
            run.save()
        if alarm_events and config.stop_on_alarm:
            run.save()
            raise AlarmError(
                f"{alarm_events[0]} The run stopped because `stop_on_alarm` is true; the same command goes "
                "on with it after this step, and without the key it goes to its end."
            )


def _with_shares(run: RunParts, metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics of a step, with their shares of the machine's peak."""
    return metrics if run.machine is None else metrics | run.machine.shares(metrics, run.num_ranks)


def _sampler_busy_s(run: RunParts) -> float:
    """Seconds that a sampler had work, as their mean over the policies; NaN where nobody has measured it."""
    times = [math.nan if (each := busy_s(client)) is None else each for client in run.clients.values()]
    return sum(times) / max(1, len(times))


def _idle_shares(run: RunParts, ahead: StepsAhead, sampled_s: float, elapsed_s: float) -> dict[str, float]:
    """Shares of a step in which nothing was learned, for want of episodes, and nothing sampled."""
    shares = {"trainer_idle": ahead.metrics["rollout_s"] / elapsed_s}
    now_s = _sampler_busy_s(run)
    if not math.isnan(now_s):
        shares["sampler_idle"] = max(0.0, 1.0 - (now_s - sampled_s) / elapsed_s)
    return shares


def record(to: RunRecord, rollouts: Rollouts, step: int) -> None:
    """Every episode of a step; a step that is on no checkpoint yet is sampled and recorded again."""
    to.save_episodes(TRAIN_PHASE, step, rollouts.episodes)
    if rollouts.greedy:
        to.save_episodes(GREEDY_PHASE, step, rollouts.greedy)


async def warm_start(run: RunParts) -> None:
    """Imitation of the noisy expert, and a fresh optimizer for what follows."""
    config, state, warm = run.config, run.state, run.config.warm_start
    if warm.steps == 0:
        return
    if run.learner.demonstrations is None:
        raise ConfigError(
            f"`warm_start.steps` is {warm.steps} but there is no expert to imitate; set it to 0."
        )
    run.tracker.begin("warm_start")
    for step in range(state.warm_steps, warm.steps):
        await asyncio.sleep(0)  # Ctrl-C takes effect here, where the run is whole
        run.is_whole = False
        with state.time_phase("warm_start"):
            updates_before = update_work(run.learner.backends())
            metrics = await in_learner(run, partial(imitate, run.learner, step))
            metrics |= updates_since(updates_before, run.learner.backends())
            state.warm_steps = step + 1
        metrics = _with_shares(run, metrics)
        run.tracker.log(step, "warm_start", {**metrics, "total_steps": warm.steps, "run_s": state.wall_s})
        # Before the last checkpoint, with which a run goes on behind the warm start and never comes here
        # again. The references have to be on disk by then: such a run loads them.
        if state.warm_steps == warm.steps:
            run.learner.begin_reinforcement()
            if run.learner.references:
                references = run.learner.references
                run.record.write(partial(save_references, references=references, policies=run.policies))
        run.is_whole = True
        if state.warm_steps % config.checkpoint.period == 0 or state.warm_steps == warm.steps:
            run.save()


async def publish(run: RunParts, samples: Sequence[TrainingSample]) -> dict[str, Any]:
    """New weights to the sampler of every policy that learned, and the proof that they arrived."""
    metrics: dict[str, Any] = {}
    for name, backend in run.policies.trainable():
        canary: dict[str, float] = {}
        # A policy without rows was not updated either.
        if mine := run.policies.samples_of(name, samples):
            await in_learner(run, backend.publish_weights)  # it waits for a step of the engine
            canary = await run.canaries[name].check(backend, run.clients[name], mine)
            canary |= await in_learner(run, partial(update_kl, backend, mine))
        metrics |= run.policies.label_metrics(name, {**canary, "policy_version": backend.policy_version})
    return metrics


KL_ROWS = 16
"""Rows that the divergence of a step is measured on."""


def update_kl(backend: TrainingBackend, samples: Sequence[TrainingSample]) -> dict[str, float]:
    """Return `update_kl`, the mean of KL(policy before, policy after) in nats per sampled token.

    It is Schulman's k3 estimator (2020, http://joschu.net/blog/kl-approx.html) on evenly spaced rows that the
    policy before sampled. Empty where none of them has a sampled token.
    """
    rows = [sample for sample in samples if sample.num_trainable]
    rows = rows[:: max(1, len(rows) // KL_ROWS)][:KL_ROWS]
    if not rows:
        return {}
    # Without their other columns, which not all rows of a batch have.
    bare = [row_to_score(row.token_ids_T, row.policy_versions_T, row.temperature) for row in rows]
    ratios = [
        new_T[row.trainable_T].astype(np.float64) - row.logprobs_T[row.trainable_T]
        for row, new_T in zip(rows, backend.score(bare), strict=True)
    ]
    log_ratio = np.concatenate(ratios)
    return {"update_kl": float(np.mean(np.expm1(log_ratio) - log_ratio))}


async def report(run: RunParts, name: str) -> None:
    """Sampled and greedy success on the held-out tasks, unless it was measured before the run was
    interrupted."""
    config, state = run.config, run.state
    if name in state.reports:
        return
    run.tracker.begin(name)
    with state.time_phase(f"report_{name}"):
        # Empties the sampler's caches, as they are where a resumed run measures this.
        run.policies.publish()
        on_progress = _progress(run.tracker, 2 * len(run.heldout_tasks))
        sampled_report, episodes = await evaluate(
            run.engine, run.heldout_tasks, sampling_of(config), f"report/{name}", on_progress, facts=run.facts
        )
        if name != "untrained" or not config.warm_start.steps:  # else it may still learn not to fail
            require_one_that_did_not_fail(episodes, config.inference.max_context)
        warn_of_full_contexts(episodes, config.inference.max_context)
        if name == "before" and config.warm_start.steps:
            await warn_of_stalled_imitation(
                sampled_report, episodes, run.play_expert, run.heldout_tasks, config.warm_start
            )
        require_known_roles(episodes, config)
        greedy, greedy_episodes = await evaluate(
            run.engine,
            run.heldout_tasks,
            sampling_of(config, 0.0),
            f"report/{name}",
            on_progress,
            facts=run.facts,
        )
        teacher_metrics = await _teacher_metrics(run, episodes)
        run.record.save_episodes(name, 0, episodes)
        run.record.save_episodes(greedy_phase(name), 0, greedy_episodes)
        score = score_of(results_on(episodes, run.facts), run.facts)
    state.reports[name] = {
        "success": sampled_report.success,
        "success_interval": list(sampled_report.success_interval),
        "greedy": greedy.success,
        "greedy_interval": list(greedy.success_interval),
        "return": sampled_report.mean_reward,
        "sampled_report": _report_dict(sampled_report, episodes),
        "greedy_report": _report_dict(greedy, greedy_episodes),
        **score,
        **teacher_metrics,
    }
    run.tracker.log(
        0,
        name,
        {
            "success": sampled_report.success,
            "greedy": greedy.success,
            "failed": sampled_report.failed + greedy.failed,
            **ending_counts([*episodes, *greedy_episodes]),
            **({"score": score["score"]} if score else {}),
            **teacher_metrics,
            "run_s": state.wall_s,
        },
    )
    run.save()


def _progress(tracker: Tracker, total: int) -> Callable[[Episode], None]:
    """Tells whoever watches of each episode."""
    tracker.advance(0, total)
    num_done = itertools.count(1)
    return lambda episode: tracker.advance(next(num_done), total)


def _report_dict(report: EvaluationReport, episodes: Sequence[Episode]) -> dict[str, Any]:
    """With `roles`, where there are several."""
    roles = role_facts(episodes)
    return report.to_dict() | ({"roles": roles} if roles else {})


async def _teacher_metrics(run: RunParts, episodes: Sequence[Episode]) -> dict[str, float]:
    """The distance of the student from its teacher on sampled episodes, where it has one."""
    if run.learner.teacher is None:
        return {}
    return await in_learner(run, partial(run.learner.teacher.measure, episodes, run.policies))


async def validate(run: RunParts, step: int) -> dict[str, float]:
    """Both curves, sampled and greedy, on the validation split, every so many steps."""
    config, every = run.config, run.config.evaluation_period
    if not every or not run.validation_tasks or (step + 1) % every:
        return {}
    metrics: dict[str, float] = {}
    for name, sampling in (("success", sampling_of(config)), ("greedy", sampling_of(config, 0.0))):
        report_line, episodes = await evaluate(
            run.engine, run.validation_tasks, sampling, "validation", facts=run.validation_facts
        )
        metrics |= {
            f"heldout_{name}": report_line.success,
            f"heldout_{name}_low": report_line.success_interval[0],
            f"heldout_{name}_high": report_line.success_interval[1],
        }
        if name == "success":
            metrics |= note_gain(run, episodes)
            teacher_metrics = await _teacher_metrics(run, episodes)
            metrics |= {f"heldout_{measure}": value for measure, value in teacher_metrics.items()}
        for role, facts in role_facts(episodes).items():
            metrics[f"role.{role}.heldout_{'reward' if name == 'success' else name}"] = facts["reward_mean"]
    return metrics


def note_gain(run: RunParts, episodes: Sequence[Episode]) -> dict[str, float]:
    """Whether an evaluation between shows a gain; with the last one that was waited for, the run ends."""
    limit, state = run.config.evaluation.patience, run.state
    if not limit:
        return {}
    patience = Patience(**state.patience)
    returns = values_of(results_on(episodes, run.validation_facts), Measure.RETURN)
    patience.note(returns, run.validation_facts.instances)
    state.patience, state.has_ended_early = patience.state(), patience.flat >= limit
    return {"heldout_flat": float(patience.flat)}


def greedy_phase(name: str) -> str:
    """The phase under which the greedy episodes of a report are stored."""
    return f"{name}.greedy"


def summary_of(run: RunParts) -> dict[str, Any]:
    """The content of `summary.json`."""
    state = run.state
    num_played = {
        name: results_on(run.record.episodes(phase), run.facts)
        for name, phase in (("before", "before"), ("greedy", greedy_phase("before")), ("after", "after"))
    }
    skill_facts = learning_facts(**num_played, facts=run.facts)
    # Nothing was reinforced that could have failed, or nothing measured that it could be compared with.
    if not (state.steps and "before" in state.reports):
        skill_facts |= {"skill": {}, "kinds": []}
    reports = dict(state.reports)
    if not run.config.warm_start.steps and "before" in reports:
        reports.setdefault("untrained", dict(reports["before"]))
    return {
        **reports,
        "tasks": run.facts.to_dict(),
        **skill_facts,
        "wall_s": state.wall_s,
        "phase_s": state.phase_s,
        "sampled_tokens": state.sampled_tokens,
        "best": state.best,
        "machines": run.record.machines(),
        **({"ended_early_after": state.steps} if state.has_ended_early else {}),
        **({"policies": run.policies.facts()} if len(run.policies) > 1 else {}),
    }


async def in_learner(run: RunParts, work: Callable[[], Result]) -> Result:
    """Heavy work in the one learner thread, so that the event loop and the live view stay responsive."""
    return await asyncio.get_running_loop().run_in_executor(run.learner_thread, partial(_as_error, work))


def _as_error(work: Callable[[], Result]) -> Result:
    """The result of `work`. A future takes no StopIteration, and whoever waits for it would wait for ever;
    SystemExit would end the process without a word."""
    try:
        return work()
    except (StopIteration, SystemExit) as error:
        raise RuntimeError(f"Code that a step of learning calls raised {error!r}.") from error
