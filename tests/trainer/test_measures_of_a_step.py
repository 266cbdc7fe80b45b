"""Numbers of a step that are made of other numbers: bytes read, shares of a peak, ages and waits."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rllm.errors import ConfigError, CountError
from rllm.trainer import ahead, machine, sampler_work
from rllm.trainer.ahead import PublishedVersions, StepsAhead
from rllm.trainer.machine import RunMachine, bytes_of_pass, updates_since
from rllm.trainer.sampler_work import SamplerWork, rollout_bytes
from rllm.types.episode import Episode, Outcome, Step, Trajectory
from rllm.types.sample import NOT_SAMPLED

MACHINE = RunMachine(
    processor="Abacus",
    torch="2",
    threads=1,
    dtype="float32",
    attention="flash",
    optimizer="AdamW",
    sampler="the engine",
    sampler_dtype="bfloat16",
    sampler_attention="products",
    peak_flops=20.4e9,
    peak_bytes_per_s=5.25e9,
)


def test_a_machine_is_told_with_its_peak_and_the_attention_of_a_sampler_that_is_known() -> None:
    line = MACHINE.line()
    for part in (" 1 thread,", "bfloat16, attention products;", " 20 GFLOP/s", " 5.2 GB/s"):
        assert part in line
    other = replace(MACHINE, threads=2, sampler_attention="").line()
    for part in (" 2 threads,", "the engine in bfloat16;"):
        assert part in other


def test_a_share_of_the_peak_is_of_all_ranks_for_products_and_of_one_for_what_is_read() -> None:
    metrics = {
        "policy.a.update_flops": 100.0,
        "policy.a.update_s": 2.0,
        "policy.b.update_flops": 1.0,
        "policy.b.update_s": 0.0,
        "rollout_bytes": 60.0,
        "rollout_busy_s": 3.0,
    }
    peak = replace(MACHINE, peak_flops=10.0, peak_bytes_per_s=5.0)
    assert peak.shares(metrics, num_ranks=2) == {
        "policy.a.update_flops_share": 100.0 / 2.0 / (10.0 * 2),
        "rollout_bandwidth_share": 60.0 / 3.0 / 5.0,
    }


def test_what_learners_did_is_named_by_policy_and_critic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "update_work", lambda learners: dict(learners))
    before: Any = {"": (10, 1.0), "critic": (5, 0.5)}
    alone: Any = {"": (25, 3.0), "critic": (6, 0.75)}
    assert updates_since(before, alone) == {
        "update_flops": 15.0,
        "update_s": 2.0,
        "critic.update_flops": 1.0,
        "critic.update_s": 0.25,
    }
    before = {"a": (0, 0.0), "b": (7, 1.0), "a/critic": (0, 0.0)}
    several: Any = {"a": (3, 1.0), "b": (7, 1.0), "a/critic": (4, 2.0)}
    assert updates_since(before, several) == {
        "policy.a.update_flops": 3.0,
        "policy.a.update_s": 1.0,
        "policy.a.critic.update_flops": 4.0,
        "policy.a.critic.update_s": 2.0,
    }


def test_a_pass_reads_all_weights_but_an_embedding_that_is_not_the_output_layer(decoder: Any) -> None:
    for tied in (True, False):
        model = decoder(tied=tied)
        num_bytes = 4 * sum(each.numel() for each in model.parameters())
        assert bytes_of_pass(model) == num_bytes - (0 if tied else 4 * model.embed.weight.numel())


def test_a_sampler_reads_its_weights_every_step_and_the_keys_before_each_token(
    decoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an answer of four tokens behind five the last three read 6, 7 and 8 keys and values."""
    model = decoder(num_kv_heads=2, num_layers=2)
    facts = SimpleNamespace(model=model, num_layers=2, num_kv_heads=2, head_dim=6)
    now = {"solver": SamplerWork(steps=17, busy_s=4.5)}
    monkeypatch.setattr(sampler_work, "sampler_work", lambda clients: now)

    class Known(dict[str, Any]):
        def name_of(self, role: str) -> str:
            if role == "stray":
                raise ConfigError("no policy")
            return {"agent": "solver"}.get(role, role)

        def label_metrics(self, name: str, metrics: dict[str, float]) -> dict[str, float]:
            return {f"{name}.{each}": value for each, value in metrics.items()}

    policies: Any = Known(solver=SimpleNamespace(loaded_model=facts))
    steps = [Step(prompt_ids=[1] * 5, response_ids=[2] * 4), Step(prompt_ids=[1] * 3), Step(response_ids=[2])]
    episode = Episode(
        trajectories=[Trajectory(name=each, steps=steps) for each in ("agent", "judge", "stray")]
    )
    before = {"solver": SamplerWork(steps=10, busy_s=2.0)}
    read = rollout_bytes(policies, {}, before, [episode, episode], num_ranks=4)
    of_key = 2 * 2 * 2 * 6 * 4
    assert read == {
        "solver.rollout_bytes": 7 * bytes_of_pass(model) + 2 * (6 + 7 + 8) * of_key / 4,
        "solver.rollout_busy_s": 2.5,
    }


async def test_waits_are_told_of_the_step_that_was_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 0.0}
    monkeypatch.setattr(ahead.time, "perf_counter", lambda: clock["now"])
    gates = [asyncio.Event() for _ in range(4)]

    async def sample(step: int) -> Any:
        await gates[step].wait()
        return step

    steps = StepsAhead(sample, steps_ahead=2, num_steps=4)
    first: asyncio.Task[Any] = asyncio.create_task(steps.step(0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    clock["now"] = 5.0
    gates[0].set()
    assert await first == 0
    assert steps.metrics == {
        "rollout_s": 5.0,
        "sampling_s": 5.0,
        "waited_s": 0.0,
        "steps_waiting": 0.0,
        "steps_under_way": 2.0,
    }
    gates[1].set()
    for _ in range(3):
        await asyncio.sleep(0)
    clock["now"] = 12.0
    assert await steps.step(1) == 1
    assert steps.metrics == {
        "rollout_s": 0.0,
        "sampling_s": 5.0,
        "waited_s": 7.0,
        "steps_waiting": 0.0,
        "steps_under_way": 2.0,
    }
    await steps.close()
    alone = StepsAhead(sample, steps_ahead=0, num_steps=4)
    assert await alone.step(0) == 0
    assert alone.metrics == {"rollout_s": 0.0}


def _episode(*versions: int, role: str = "agent", outcome: Outcome = Outcome.SCORED) -> Episode:
    step = Step(response_ids=[0] * len(versions), policy_versions=list(versions))
    return Episode(outcome=outcome, trajectories=[Trajectory(name=role, steps=[step])])


def test_an_age_is_the_number_of_publishes_since_the_oldest_token() -> None:
    backend = SimpleNamespace(policy_version=0)
    policies: Any = SimpleNamespace(
        trainable=lambda: [("policy", backend)], is_trained=lambda role: role != "judge"
    )
    config: Any = SimpleNamespace(policy_of=lambda role: "policy")
    versions = PublishedVersions(policies, config)
    for backend.policy_version in (2, 2, 4, 6):  # two updates a step; one step published nothing new
        versions.note()
    ages = [versions.staleness(_episode(*each)) for each in ((6,), (4, 6), (NOT_SAMPLED, 2), (0, 6), ())]
    assert ages == [[0], [1], [2], [3], []]
    assert versions.staleness(_episode(0, role="judge")) == []
    episodes = [_episode(6), _episode(4), _episode(2), _episode(0, outcome=Outcome.POLICY_FAILURE)]
    assert versions.require_fresh(episodes, 2) == {"staleness_mean": 1.0, "staleness_max": 2}
    with pytest.raises(CountError, match="2 publishes"):
        versions.require_fresh(episodes, 1)
    assert versions.require_fresh([_episode(2)], 2) == {"staleness_mean": 2.0, "staleness_max": 2}
    assert versions.require_fresh([], 0) == {"staleness_mean": 0.0, "staleness_max": 0}
