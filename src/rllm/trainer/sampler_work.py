"""The bytes that a sampler in this process reads to answer: steps and episodes in, bytes and seconds out.

    engine: steps, busy seconds ─┬─► weights, once a step ───────────────────────────────┐
    episodes: prompts, answers ──┴─► keys and values of what stands before each token ───┴─► bytes

A token of an answer is bound by memory: the same numbers are read for each, and little is computed with them
(Pope et al. 2022, arXiv:2211.05102, section 2). It holds for the built-in decoder.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rllm.errors import ConfigError
from rllm.inference.local.client import LocalClient
from rllm.models.decoder import Decoder
from rllm.trainer.machine import bytes_of_pass
from rllm.trainer.policies import Policies
from rllm.types.episode import Episode


@dataclass(kw_only=True, slots=True, frozen=True)
class SamplerWork:
    """The work of a sampler since it was made."""

    steps: int
    busy_s: float


def sampler_work(clients: Mapping[str, object]) -> dict[str, SamplerWork]:
    """By policy, of the samplers in this process whose reading is known: those of the built-in decoder."""
    return {
        name: SamplerWork(steps=client.engine.counts.steps, busy_s=client.engine.counts.busy_s)
        for name, client in clients.items()
        if isinstance(client, LocalClient) and isinstance(client.engine.model, Decoder)
    }


def rollout_bytes(
    policies: Policies,
    clients: Mapping[str, object],
    before: Mapping[str, SamplerWork],
    episodes: Sequence[Episode],
    num_ranks: int,
) -> dict[str, float]:
    """`rollout_bytes` and `rollout_busy_s` of each policy since `before`, in which `episodes` were played.

    Each step of a sampler reads all weights once, and each token but an answer's first reads the keys and
    values of all tokens before it. Each of `num_ranks` played its share of the episodes; these are the bytes
    of one.
    """
    num_keys = dict.fromkeys(before, 0)
    for trajectory in (each for episode in episodes for each in episode.trajectories):
        try:
            name = policies.name_of(trajectory.name)
        except ConfigError:  # a role that no policy plays: its episode fails when samples are made of it
            continue
        if name in num_keys:
            for step in trajectory.steps:
                num_prompt, num_later = len(step.prompt_ids), max(0, len(step.response_ids) - 1)
                # Σ (prompt + i) over i = 1 … L: before the i-th of L later tokens stand the prompt and i of
                # the answer.
                num_keys[name] += num_later * (2 * num_prompt + num_later + 1) // 2
    metrics: dict[str, float] = {}
    for name, now in sampler_work(clients).items():
        facts = policies[name].loaded_model
        element = next(iter(facts.model.parameters())).element_size()
        num_steps = now.steps - before[name].steps
        of_key = 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim * element
        num_bytes = num_steps * bytes_of_pass(facts.model) + num_keys[name] * of_key / num_ranks
        work = {"rollout_bytes": float(num_bytes), "rollout_busy_s": now.busy_s - before[name].busy_s}
        metrics |= policies.label_metrics(name, work)
    return metrics
