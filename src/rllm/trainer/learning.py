"""Demonstrations and episodes in, optimizer updates out. Needs no engine: a stored run is replayed by it.

episodes ──► judge: rewards, groups, who is left out ──► advantages ──► rows
    rows of each policy ──► what trainer, reference and critic say of them ──► shares ──► updates

`learn` is a step of reinforcement learning; each of its stages is a function of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from rllm.algorithms.advantages import TurnAdvantages
from rllm.algorithms.context import AlgorithmContext
from rllm.algorithms.estimators import estimator_named
from rllm.algorithms.filters import GroupKey, is_reward
from rllm.algorithms.grouping import group_advantages
from rllm.algorithms.losses import (
    ActorCriticLoss,
    ImitationLoss,
    PolicyLoss,
    ValueLoss,
    has_gradient,
    policy_loss,
)
from rllm.algorithms.surrogates import OF_COVARIANCE, WholeVocabulary
from rllm.algorithms.task_sampler import TaskSampler
from rllm.config.algorithm import AlgorithmConfig
from rllm.config.distill import TEACHER
from rllm.config.learning import WITH_CRITIC
from rllm.config.schema import TrainConfig
from rllm.errors import ConfigError
from rllm.trainer.backends.base import Critic, SeparateCritic, TrainingBackend
from rllm.trainer.critic import explained_variance, with_gae
from rllm.trainer.judging import TIED, Judged, judge
from rllm.trainer.outcomes import num_sampled, require_known_roles, step_metrics
from rllm.trainer.policies import Policies
from rllm.trainer.reference import ModelScorer, begin_with
from rllm.trainer.row_scores import (
    adapted_kl_coef,
    kl_of,
    mean_kl,
    with_kl_paid,
    with_old_logprobs,
    with_reference,
)
from rllm.trainer.samples import group_shares, training_batch
from rllm.trainer.schedules import learning_rate, linear
from rllm.trainer.teacher import Teacher
from rllm.trainer.token_trace import OrderKey, TokenTrace, Traceable
from rllm.types.episode import Episode
from rllm.types.sample import TrainingBatch, TrainingSample

Demonstrations = Callable[[Sequence[Any], tuple[str | int, ...]], list[TrainingSample]]
"""(tasks, key of every draw) -> rows of one demonstration of each task."""


@dataclass(kw_only=True, slots=True)
class Learner:
    """The part of a run that turns demonstrations and episodes into weights."""

    config: TrainConfig
    policies: Policies
    tasks: TaskSampler[Any]
    demonstrations: Demonstrations | None
    """None without an expert."""
    references: Mapping[str, ModelScorer] = field(default_factory=dict[str, ModelScorer])
    """The reference of each policy, where `kl_coef` is set."""
    critics: Mapping[str, SeparateCritic] = field(default_factory=dict[str, SeparateCritic])
    """The critics with a trunk of their own, by policy."""
    teacher: Teacher | None = None
    """The teacher that pays the tokens of roles with the estimator `teacher`."""
    kl_coefs: dict[str, float] = field(default_factory=dict[str, float])
    """The values of an adaptive `kl_coef`, by policy; the configured one where it has not moved yet."""

    def backends(self) -> dict[str, TrainingBackend | Critic]:
        """The learners that a checkpoint holds, by their place in it."""
        alone = len(self.policies) == 1
        critics = {"critic" if alone else f"{name}/critic": each for name, each in self.critics.items()}
        return {**self.policies.backends(), **critics}

    def begin_reinforcement(self) -> None:
        """After a warm start: samplers that serve what was learned, optimizers without moments, critics that
        know as much as their policies, and references that are what these are now."""
        # First: critics and references below read the sampler's model, which a learner with parameters of its
        # own writes only when it publishes.
        self.policies.publish()
        self.policies.begin_phase()
        for name, critic in self.critics.items():
            critic.begin_with(self.policies[name].loaded_model.model)
        for name, reference in self.references.items():
            begin_with(reference, self.policies[name])

    def critic(self, policy: str) -> Critic:
        """The critic that expects the policy's rewards; with a shared trunk it is part of the policy."""
        backend = self.policies[policy].backend
        assert backend is not None, "a frozen policy has no critic"
        return self.critics.get(policy) or cast(Critic, backend)

    def kl_coef(self, policy: str) -> float:
        """The weight of the policy's divergence from its reference at this step."""
        return self.kl_coefs.get(policy, self.config.algorithm.kl_coef)

    def loss(self, policy: str, step: int) -> PolicyLoss:
        """The loss of a policy at a step of reinforcement learning."""
        algorithm, distill = self.config.algorithm, self.config.distill
        now = replace(
            algorithm,
            entropy_coef=linear(algorithm.entropy_coef, step, self.config.steps, 0.0),
            kl_coef=self.kl_coef(policy),
        )
        loss = policy_loss(now, context_of(self.config, step, now))
        if not distill.is_over_vocabulary:
            return loss
        return replace(loss, surrogate=WholeVocabulary(divergence=distill.divergence, beta=distill.jsd_beta))


def context_of(config: TrainConfig, step: int, algorithm: AlgorithmConfig | None = None) -> AlgorithmContext:
    """The facts that estimators and losses may know at a step; `algorithm` is the section as it is then."""
    return AlgorithmContext(
        config=algorithm or config.algorithm, step=step, total_steps=config.steps, seed=config.seed
    )


def require_algorithm(config: TrainConfig) -> None:
    """Raises ConfigError for an estimator or a loss of the user's that cannot be found or used."""
    for name in config.estimators():
        rule = estimator_named(name)
        if (rule.needs_critic or rule.token_level) and name not in (*WITH_CRITIC, TEACHER):
            raise ConfigError(
                f"The estimator `{name}` asks a critic, which only {', '.join(WITH_CRITIC)} can; make its "
                "advantages of rewards."
            )
    policy_loss(config.algorithm)


def learn(
    learner: Learner,
    episodes: Sequence[Episode],
    step: int,
    greedy: Sequence[Episode] = (),
    *,
    trace: TokenTrace | None = None,
) -> tuple[TrainingBatch, dict[str, Any]]:
    """One step of reinforcement learning: the batch that was trained on, and what there is to say of it.

    `greedy`: one attempt more at each task, by the likeliest tokens, where an estimator compares with it.
    `trace` is given what was computed of each token.
    """
    config, policies = learner.config, learner.policies
    require_known_roles(episodes, config)
    judgement = judge(config, episodes, greedy)
    kl_rewards = (
        pay_for_divergence(learner, episodes, judgement) if config.algorithm.kl_in == "reward" else None
    )
    batch = rows(learner, episodes, judgement, greedy, step)
    metrics = step_metrics(episodes, judgement, batch)
    trained_samples: list[TrainingSample] = []
    for name, backend in policies.trainable():
        loss = learner.loss(name, step)
        ready = prepare(learner, name, backend, policies.samples_of(name, batch.samples), loss, kl_rewards)
        trained_samples += ready.samples
        if isinstance(backend, Traceable):
            backend.trace = trace
        ready.facts |= update(learner, name, backend, ready, loss, step)
        # For the next step: rewards and loss of this one were made with the coefficient as it was.
        if config.algorithm.kl_target and "divergence" in ready.facts:
            coef, kl = learner.kl_coef(name), ready.facts["divergence"]
            # This dict is that of the run's state, so the next checkpoint has the new value.
            learner.kl_coefs[name] = adapted_kl_coef(config.algorithm, coef, kl)
        metrics |= policies.label_metrics(name, ready.facts)
    batch.samples = sorted(trained_samples, key=lambda each: each.order_key)
    return batch, metrics


def rows(
    learner: Learner, episodes: Sequence[Episode], judgement: Judged, greedy: Sequence[Episode], step: int
) -> TrainingBatch:
    """The rows that are trained on, with their advantages; every token that was sampled is counted, those of
    `greedy` as dropped.

    What ties is among them, whatever the loss: only `algorithm.ties = "drop"` leaves it out.
    """
    config = learner.config
    turn_advantages = advantages(config, judgement, step)
    if config.algorithm.ties == "drop":
        judgement.leave_out(tied_groups(config, judgement, turn_advantages), TIED)
    batch = training_batch(
        episodes,
        turn_advantages,
        rewards=judgement.rewards,
        exclusion_reasons=judgement.left_out,
        is_trained=learner.policies.is_trained,
    )
    if greedy:
        batch.token_counts["dropped.greedy"] = num_sampled(greedy)
        batch.token_counts["sampled"] += num_sampled(greedy)
    return batch


def advantages(config: TrainConfig, judgement: Judged, step: int) -> dict[str, TurnAdvantages]:
    """Uid -> advantages of the turns. Where they are made of rows, in `prepare`, each is the number of its
    turn until then."""
    turn_advantages = group_advantages(
        judgement.groups,
        config.estimator_of,
        judgement.counts,
        rewards=judgement.rewards,
        weight_of=lambda role: config.role(role).reward_weight,
        baselines=judgement.baselines,
        gamma=config.algorithm.gamma,
        credit=config.algorithm.credit,
        context=context_of(config, step),
    )
    _weigh_continued_groups(config, judgement, turn_advantages)
    for (_, role), group in judgement.groups.items():
        if is_token_level(config, role):
            # From 1: rows whose numbers are all 0 would pass for rows without a gradient.
            turn_advantages |= {
                each.uid: np.arange(1.0, len(each.steps) + 1.0) for each in group.trajectories
            }
    return turn_advantages


def _weigh_continued_groups(
    config: TrainConfig, judgement: Judged, advantages: dict[str, TurnAdvantages]
) -> None:
    """Multiply the advantages of groups that were played on after their first attempts, so that they stand
    for those that were not.

    Raises ConfigError for an estimator of the user's that learns from attempts which were paid alike.
    """
    solved_ids = set(judgement.tasks_solved_first)
    for (task_id, role), group in judgement.groups.items():
        weight = judgement.task_weights.get(task_id, 1.0)
        for each in group.trajectories:
            turns = advantages[each.uid]
            if task_id in solved_ids and any(np.any(turn) for turn in turns):
                raise ConfigError(
                    f"`{config.estimator_of(role)}` gives advantages to attempts at task {task_id} that were "
                    "all paid alike, of which `filters.first_attempts` leaves out the rest; set that to 0, "
                    "or mend the estimator."
                )
            if weight != 1.0:
                advantages[each.uid] = [weight * turn for turn in turns]


def tied_groups(
    config: TrainConfig, judgement: Judged, advantages: Mapping[str, TurnAdvantages]
) -> list[GroupKey]:
    """The groups that comparing attempts at one task teaches nothing: every turn of theirs has advantage 0.

    Of estimators that compare something else none ties, whatever its advantages are.
    """
    return [
        key
        for key, group in judgement.groups.items()
        if estimator_named(config.estimator_of(key[1])).compares_attempts
        and not any(np.any(turn) for each in group.trajectories for turn in advantages[each.uid])
    ]


@dataclass(kw_only=True, slots=True)
class Heard:
    """The scores of all rows of a step by trainer and reference, before there were advantages."""

    rows: dict[OrderKey, TrainingSample] = field(default_factory=dict[OrderKey, TrainingSample])
    facts: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    """By policy."""


def pay_for_divergence(learner: Learner, episodes: Sequence[Episode], judgement: Judged) -> Heard:
    """Subtract a trajectory's divergence from the reference, summed over its tokens, from what it is paid.

    Where tokens are paid one by one, `prepare` does that.
    """
    config, policies = learner.config, learner.policies
    trajectories = {
        (episode.task_id, episode.rollout_idx, index): trajectory
        for episode in episodes
        for index, trajectory in enumerate(episode.trajectories)
    }
    everything = training_batch(
        episodes,
        {each.uid: np.zeros(len(each.steps)) for each in trajectories.values()},
        rewards=judgement.rewards,
        exclusion_reasons=judgement.left_out,
        is_trained=policies.is_trained,
    )
    kl_rewards = Heard()
    for name, backend in policies.trainable():
        coef = learner.kl_coef(name)
        mine = policies.samples_of(name, everything.samples)
        # All rows: which of them have a gradient is not known before there are advantages.
        mine, kl_rewards.facts[name] = score_rows(learner, name, backend, mine, mine)
        for sample in mine:
            kl_rewards.rows[sample.order_key] = sample
            trajectory = trajectories[sample.order_key[:3]]
            # Looked up for each row, because earlier rows of the trajectory have paid their part already.
            reward = judgement.rewards.get(trajectory.uid, trajectory.reward)
            if is_reward(reward) and not is_token_level(config, trajectory.name):
                cost = coef * float(kl_of(sample, config.algorithm.kl_kind).sum())
                judgement.rewards[trajectory.uid] = reward - cost
    return kl_rewards


def score_rows(
    learner: Learner,
    name: str,
    backend: TrainingBackend,
    samples: list[TrainingSample],
    rows_with_gradient: list[TrainingSample],
) -> tuple[list[TrainingSample], dict[str, float]]:
    """Samples with what the trainer and the reference say of them, as far as the configuration wants it.

    `rows_with_gradient`: those of them that a forward pass of the update goes through; the trainer says
    nothing of the others, because nobody would look at it.
    """
    algorithm, facts = learner.config.algorithm, dict[str, float]()
    if not samples:
        return samples, facts
    if algorithm.old_logprobs == "trainer":
        scored_rows, sampler_gaps = with_old_logprobs(rows_with_gradient, backend)
        facts |= sampler_gaps
        again = {each.order_key: each for each in scored_rows}
        samples = [again.get(each.order_key, each) for each in samples]
    if name in learner.references:
        samples = with_reference(samples, learner.references[name])
        facts |= {"kl_coef": learner.kl_coef(name), "divergence": mean_kl(samples, algorithm.kl_kind)}
    return samples, facts


@dataclass(kw_only=True, slots=True)
class Ready:
    """The batch that one policy learns from in a step."""

    samples: list[TrainingSample]
    critic_samples: list[TrainingSample] = field(default_factory=list[TrainingSample])
    """The samples that its critic learns from: those whose advantages it made."""
    facts: dict[str, float]


def prepare(
    learner: Learner,
    name: str,
    backend: TrainingBackend,
    samples: list[TrainingSample],
    loss: PolicyLoss,
    kl_rewards: Heard | None,
) -> Ready:
    """Rows with all that the updates of a policy need; its critic is asked here."""
    config, algorithm = learner.config, learner.config.algorithm
    if kl_rewards is None:
        rows_with_gradient = [each for each in samples if has_gradient(each, loss)]
        samples, facts = score_rows(learner, name, backend, samples, rows_with_gradient)
    else:
        # `pay_for_divergence` had these rows scored when they had no advantages yet.
        facts = kl_rewards.facts[name]
        samples = [
            replace(kl_rewards.rows[each.order_key], advantages_T=each.advantages_T) for each in samples
        ]
    if learner.teacher is not None:
        samples, teacher_metrics = learner.teacher.teach(samples)
        facts |= teacher_metrics
    critic_rows = [each for each in samples if asks_critic(config, each.group_key[1])]
    if not critic_rows:
        return Ready(samples=samples, facts=facts)
    if kl_rewards is not None:
        coef = learner.kl_coef(name)
        # `pay_for_divergence` leaves out roles that are paid token by token, so nobody pays twice.
        critic_rows = [with_kl_paid(each, coef, algorithm.kl_kind) for each in critic_rows]
    # Once for all updates of the step: values and returns are those of the critic before the first.
    critic_targets = with_gae(
        critic_rows,
        learner.critic(name).values(critic_rows),
        gamma=algorithm.gamma,
        lam=algorithm.gae_lambda,
        weight_of=lambda role: config.role(role).reward_weight,
    )
    facts["explained_variance"] = explained_variance(critic_targets)
    others = [each for each in samples if not asks_critic(config, each.group_key[1])]
    if name in learner.critics:  # what it said is no concern of the policy
        mine = [replace(each, values_T=None, returns_T=None) for each in critic_targets]
    else:
        mine = critic_targets
    return Ready(
        samples=sorted([*mine, *others], key=lambda each: each.order_key),
        critic_samples=critic_targets,
        facts=facts,
    )


def update(
    learner: Learner, name: str, backend: TrainingBackend, ready: Ready, loss: PolicyLoss, step: int
) -> dict[str, float]:
    """The updates of a policy and its critic in one step, each on a share of the tasks; means of their
    metrics."""
    config, critic = learner.config, learner.critics.get(name)
    rate = learning_rate(config, step, learner.policies[name].learning_rate)
    value_loss = ValueLoss(clip=config.critic.clip, aggregation=loss.aggregation)
    on_one_trunk = critic is None and ready.critic_samples
    both = ActorCriticLoss(policy=loss, value=value_loss, coef=config.critic.coef) if on_one_trunk else loss
    of_policy: list[dict[str, float]] = []
    of_critic: list[dict[str, float]] = []
    for share in group_shares(ready.samples, config.algorithm.updates_per_step):
        if step >= config.critic.warmup_steps:
            covariance_rows = (
                loss.surrogate.chosen(share) if isinstance(loss.surrogate, OF_COVARIANCE) else share
            )
            of_policy.append(backend.update(covariance_rows, both, rate))
        task_ids = {each.group_key[0] for each in share}
        critic_targets = [each for each in ready.critic_samples if each.group_key[0] in task_ids]
        if critic is not None and critic_targets:
            of_critic.append(critic.update(critic_targets, value_loss, config.critic.learning_rate or rate))
    metrics = {"learning_rate": rate, **means(of_policy)}
    if of_policy and "logprob_gap_max" in of_policy[0]:
        # The first update still has the weights that sampled: any gap is a mismatch of the two passes.
        metrics["logprob_gap_first"] = of_policy[0]["logprob_gap_max"]
        if config.algorithm.old_logprobs == "sampler":
            metrics["sampler_kl"] = of_policy[0]["kl"]
    theirs = {f"critic.{each}": value for each, value in means(of_critic).items() if "logprob" not in each}
    return metrics | theirs


def means(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each metric over the updates that have it; updates that were left out are added up."""
    names = dict.fromkeys(name for each in updates for name in each)
    by_name = {name: [each[name] for each in updates if name in each] for name in names}
    return {
        name: sum(values) if name == "skipped_updates" else sum(values) / len(values)
        for name, values in by_name.items()
    }


def is_token_level(config: TrainConfig, role: str) -> bool:
    """Whether the role's advantages are made token by token, by a critic or a teacher."""
    return estimator_named(config.estimator_of(role)).token_level


def asks_critic(config: TrainConfig, role: str) -> bool:
    return estimator_named(config.estimator_of(role)).needs_critic


def imitate(learner: Learner, step: int) -> dict[str, Any]:
    """One supervised update of each policy that learns, on new demonstrations of its roles."""
    config, warm = learner.config, learner.config.warm_start
    assert learner.demonstrations is not None, "warm_start checked it"
    tasks = learner.tasks.batch(step * warm.episodes_per_step, warm.episodes_per_step)
    demonstrations = learner.demonstrations(tasks, (config.seed, "warm_start", step))
    rate = linear(warm.learning_rate, step, warm.steps, config.optimizer.final_lr_fraction)
    metrics: dict[str, Any] = {}
    for name, backend in learner.policies.trainable():
        if samples := learner.policies.samples_of(name, demonstrations):
            metrics |= learner.policies.label_metrics(name, backend.update(samples, ImitationLoss(), rate))
    return metrics
