"""Multi-turn GRPO from top to bottom, to read and to copy: what `rllm train` does, in one file.

    tasks ──► a group of attempts at each ──► rewards ──► advantages ──► token rows ──► one update ──► publish
      ▲                                                                                                  │
      └──────────────────────────────── the sampler has the new weights ◄────────────────────────────────┘

An agent crosses frozen lakes, one word a turn. Random weights never come to the goal, so the run begins with
a model that has seen an expert who strays:

    rllm train frozenlake --set steps=0 --output runs/imitator
    python recipes/grpo_in_one_file.py runs/imitator/model runs/walker --steps 20

It uses what rLLM is made of (engine, sampler, packing) and nothing of `rllm.trainer`, which adds what a long
run needs: checkpoints, failures, reports, several policies, many algorithms. For these settings it ends with
the same parameters as `AgentTrainer`, bit for bit; a test compares them.
"""

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from rllm.agents.frozenlake import FrozenLakeAgent
from rllm.algorithms.task_sampler import TaskSampler
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.environments.frozenlake import FrozenLakeEnv, lake_tasks
from rllm.inference.local.client import LocalClient
from rllm.models.batching import PackedBatch, micro_batches
from rllm.models.directory import LoadedModel, load_model, save_model
from rllm.models.packing import WeightedRow
from rllm.types.episode import Episode, Outcome, Trajectory
from rllm.types.messages import SamplingParams
from rllm.types.sample import NOT_SAMPLED, TrainingSample

AGENT_ARGS = {"show_neighbours": True, "view": 4}
"""What the imitator was shown of the lake."""


@dataclass(frozen=True)
class Settings:
    """The same names as in `rllm train --set`, without their sections."""

    seed: int = 0
    steps: int = 20
    tasks_per_step: int = 16
    group_size: int = 8
    """Attempts at each task, which are compared with each other."""
    updates_per_step: int = 2
    max_turns: int = 12
    max_tokens_per_turn: int = 4
    max_context: int = 512
    learning_rate: float = 1e-3
    clip: float = 0.2
    max_grad_norm: float = 1.0
    micro_batch_tokens: int = 16_384


async def train(loaded: LoadedModel, tasks: Sequence[dict[str, Any]], settings: Settings) -> None:
    """Change the weights of `loaded` until all steps are done."""
    client = LocalClient(
        loaded, num_slots=256, max_context=settings.max_context, max_prefill_tokens=16_384, lockstep=True
    )
    engine = AgentExecutionEngine(
        FrozenLakeAgent,
        FrozenLakeEnv,
        AGENT_ARGS,
        rollout_engine=client,
        n_parallel_agents=256,
        max_steps=settings.max_turns,
        max_prompt_length=0,  # the context is the only limit
        max_response_length=0,
        requires_ids=True,
        seed=settings.seed,
    )
    optimizer = torch.optim.AdamW(
        loaded.model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    order = TaskSampler(tasks, seed=settings.seed, purpose="tasks")
    version, norm = 0, 0.0
    client.publish(version)
    try:
        for step in range(settings.steps):
            batch = order.batch(step * settings.tasks_per_step, settings.tasks_per_step)
            episodes = await sample(engine, batch, step, settings)
            compared = groups(episodes)
            for number in range(settings.updates_per_step):  # each on its share of the tasks
                share = compared[number :: settings.updates_per_step]
                rows = [row for group in share for row in rows_of(group)]
                norm = update(loaded.model, optimizer, rows, settings)
                version += 1
            client.publish(version)  # the sampler has these very parameters: it drops what it computed before
            mean_reward = np.concatenate([rewards(group) for group in compared]).mean()
            print(f"step {step + 1:3d}   mean reward {mean_reward:.3f}   gradient norm {norm:.3f}")
    finally:
        await client.close()


async def sample(
    engine: AgentExecutionEngine, tasks: Sequence[dict[str, Any]], step: int, settings: Settings
) -> list[Episode]:
    """`group_size` attempts at each task, in the order of tasks and attempts.

    Every draw comes from (seed, step, task, attempt, turn), whichever attempt is done first.
    """
    sampling = SamplingParams(temperature=1.0, max_tokens=settings.max_tokens_per_turn)
    run = engine.run(tasks, group_size=settings.group_size, purpose=f"train/{step}", sampling=sampling)
    async with aclosing(run) as running:
        return sorted([each async for each in running], key=lambda each: (each.task_id, each.rollout_idx))


def groups(episodes: Sequence[Episode]) -> list[list[Episode]]:
    """The attempts at each task; what failed through no fault of the policy is left out, not paid 0."""
    by_task: dict[str, list[Episode]] = {}
    for episode in episodes:
        if episode.outcome in (Outcome.SCORED, Outcome.TRUNCATED):
            by_task.setdefault(episode.task_id, []).append(episode)
    return list(by_task.values())


def rewards(group: Sequence[Episode]) -> np.ndarray:
    """[G] what each attempt was paid."""
    return np.array([episode.trajectories[0].reward for episode in group], dtype=np.float64)


def rows_of(group: Sequence[Episode]) -> Iterator[TrainingSample]:
    """Token rows of the attempts at one task, each with its advantage at the tokens that the policy sampled.

    advantage = (reward - mean) / (standard deviation + 1e-6), over the group: Shao et al. 2024 (GRPO,
    arXiv:2402.03300), section 4.1.2. All tokens of an attempt have the same.
    """
    rewards_G = rewards(group)
    advantages_G = (rewards_G - rewards_G.mean()) / (rewards_G.std() + 1e-6)
    for episode, advantage in zip(group, advantages_G.tolist(), strict=True):
        for segment, (ids, versions, logprobs) in enumerate(segments(episode.trajectories[0])):
            versions_T = np.array(versions, dtype=np.int64)
            yield TrainingSample(
                token_ids_T=np.array(ids, dtype=np.int64),
                policy_versions_T=versions_T,
                logprobs_T=np.array(logprobs, dtype=np.float32),
                advantages_T=np.where(versions_T == NOT_SAMPLED, 0.0, advantage).astype(np.float32),
                group_key=(episode.task_id, episode.trajectories[0].name),
                order_key=(episode.task_id, episode.rollout_idx, 0, segment),
            )


def segments(trajectory: Trajectory) -> list[tuple[list[int], list[int], list[float]]]:
    """(ids, version of the policy that sampled each, log-probability) of each stretch of a conversation.

    A prompt that begins with all that was read and written before goes on with the same row, id by id: what
    was sampled is what is trained on. Where an agent has rewritten its history, a new row begins.
    """
    rows: list[tuple[list[int], list[int], list[float]]] = []
    for step in trajectory.steps:
        if not rows or step.prompt_ids[: len(rows[-1][0])] != rows[-1][0]:
            rows.append(([], [], []))
        ids, versions, logprobs = rows[-1]
        new_ids = step.prompt_ids[len(ids) :]
        ids += new_ids + step.response_ids
        versions += [NOT_SAMPLED] * len(new_ids) + step.policy_versions
        logprobs += [0.0] * len(new_ids) + step.logprobs
    return rows


def update(
    model: Any, optimizer: torch.optim.Optimizer, samples: Sequence[TrainingSample], settings: Settings
) -> float:
    """One step along the gradient of the mean loss of the sampled tokens; returns the gradient's norm.

    A token counts 1 / (tokens of the update), fixed before rows are split into micro-batches, so that their
    losses add up to that of the whole. Rows with advantage 0 count, and have no gradient to compute.
    """
    num_trained = sum(sample.num_trainable for sample in samples)
    rows = [
        WeightedRow(index=index, sample=sample, weights_T=sample.trainable_T / num_trained)
        for index, sample in enumerate(samples)
        if sample.advantages_T.any()
    ]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(
            parameter
        )  # where all groups tie it stays so, and momentum moves on
    for batch in micro_batches(rows, settings.micro_batch_tokens, next(model.parameters()).device):
        (ppo_loss(model, batch, settings.clip) * batch.weights_M).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
    optimizer.step()
    return float(norm)


def ppo_loss(model: Any, batch: PackedBatch, clip: float) -> torch.Tensor:
    """[M] loss of each sampled token: -min(r A, clip(r, 1 - ε, 1 + ε) A) with r = π(token) / π_old(token).

    Schulman et al. 2017 (PPO, arXiv:1707.06347), equation 7. What attempts begin with is computed once: U
    different predictions are those of M tokens.
    """
    logprobs_U = -F.cross_entropy(model.logits(batch.states(model)), batch.targets_U, reduction="none")
    ratio_M = torch.exp(batch.of_tokens(logprobs_U) - batch.old_logprobs_M)
    clipped_M = ratio_M.clamp(1.0 - clip, 1.0 + clip)
    return -torch.minimum(ratio_M * batch.advantages_M, clipped_M * batch.advantages_M)


def main() -> None:
    parser = argparse.ArgumentParser(description="Multi-turn GRPO on FrozenLake.")
    parser.add_argument("model", type=Path, help="directory of the model to begin with")
    parser.add_argument("output", type=Path, help="directory for the trained one")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps is {arguments.steps}; it must be 1 or more")
    loaded = load_model(arguments.model)
    asyncio.run(
        train(loaded, lake_tasks("train", 10_000), Settings(steps=arguments.steps, seed=arguments.seed))
    )
    save_model(loaded, arguments.output)


if __name__ == "__main__":
    main()
