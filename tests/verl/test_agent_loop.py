"""Agents and workflows of ours as agent loops of verl; its servers are our engine with the built-in model."""

import asyncio
import importlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rllm.integrations.verl.platform import use_cpu

use_cpu()

from hydra import compose, initialize_config_dir  # noqa: E402
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker, DictConfigWrap  # noqa: E402
from verl.utils.dataset.rl_dataset import RLHFDataset  # noqa: E402
from verl.workers.config import HFModelConfig  # noqa: E402
from verl.workers.rollout.replica import TokenOutput  # noqa: E402

import verl  # noqa: E402
from rllm.errors import AgentError, ConfigError  # noqa: E402
from rllm.inference.local.client import LocalClient  # noqa: E402
from rllm.models.builtin import create_model  # noqa: E402
from rllm.models.directory import load_model  # noqa: E402
from rllm.types.messages import SamplingParams  # noqa: E402
from verl import DataProto  # noqa: E402

LOOP = """
from verl.experimental.agent_loop.agent_loop import register

from rllm.agents.frozenlake import FrozenLakeAgent
from rllm.environments.frozenlake import FrozenLakeEnv
from rllm.integrations.verl.agent_loop import RllmAgentLoop
from rllm.workflows import SolverJudgeWorkflow


@register("lake")
class LakeLoop(RllmAgentLoop):
    agent_class, env_class = FrozenLakeAgent, FrozenLakeEnv
    max_tokens = 2


def how_long(task, answer):
    return float(len(answer))


class PairLoop(RllmAgentLoop):
    workflow_class, workflow_args = SolverJudgeWorkflow, {"n_solutions": 2, "reward_function": how_long}
    max_tokens = 3
"""


class Servers:
    """What verl calls its server manager, over our engine."""

    tokenizer = None

    def __init__(self, client: LocalClient) -> None:
        self.client = client
        self.requests: list[dict[str, Any]] = []

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **options: Any
    ) -> TokenOutput:
        self.requests.append(sampling_params)
        sampling = SamplingParams(
            temperature=sampling_params["temperature"],
            max_tokens=sampling_params["max_tokens"],
            seed=len(self.requests),
        )
        output = await self.client.generate_ids(list(prompt_ids), sampling)
        return TokenOutput(
            token_ids=output.completion_ids,
            log_probs=output.logprobs,
            stop_reason=str(output.finish_reason),
            extra_fields={"global_steps": 4},
        )


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    create_model(tmp_path / "model")
    overrides = [
        f"actor_rollout_ref.model.path={tmp_path / 'model'}",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.mode=async",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.prompt_length=128",
        "actor_rollout_ref.rollout.response_length=256",
        "actor_rollout_ref.rollout.agent.default_agent_loop=lake",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.n_gpus_per_node=1",
    ]
    config_dir = os.path.join(os.path.dirname(verl.__file__), "trainer/config")
    with initialize_config_dir(config_dir=config_dir, version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    (tmp_path / "lake_loop.py").write_text(LOOP)
    monkeypatch.syspath_prepend(tmp_path)
    return config


def with_servers(config: Any, work: Callable[[Servers], Awaitable[Any]]) -> Any:
    async def play() -> Any:
        client = LocalClient(load_model(Path(config.actor_rollout_ref.model.path)), lockstep=False)
        try:
            return await work(Servers(client))
        finally:
            await client.close()

    with asyncio.Runner() as runner:
        return runner.run(play())


def test_episodes_come_back_as_the_tensors_that_verl_trains_on(config: Any) -> None:
    importlib.import_module("lake_loop")
    tasks = np.empty(4, dtype=object)
    tasks[:] = [{"desc": ["SFF", "FFF", "FFG"], "max_steps": 3} for _ in range(4)]
    prompts = np.empty(4, dtype=object)
    prompts[:] = [[{"role": "user", "content": "go"}] for _ in range(4)]
    batch = DataProto(
        batch=None,
        non_tensor_batch={
            "task": tasks,
            "raw_prompt": prompts,
            "agent_name": np.array(["lake"] * 4, dtype=object),
            "index": np.arange(4),
            "uid": np.array(list("aabb"), dtype=object),
            "data_source": np.array(["x"] * 4, dtype=object),
            "reward_model": np.array([{"ground_truth": ""}] * 4, dtype=object),
        },
        meta_info={"global_steps": 1, "validate": False},
    )

    played = with_servers(config, lambda servers: AgentLoopWorker(config, servers).generate_sequences(batch))
    tensors = played.batch
    assert tensors["responses"].shape == (4, 256)
    masks = tensors["response_mask"]
    assert (masks[:, 0] == 1).all()  # the first token was sampled
    assert ((masks.diff(dim=1) == 1).sum(dim=1) >= 1).all()  # and, behind an observation, others
    assert (tensors["rollout_log_probs"][masks == 1] < 0.0).all()
    assert (tensors["rollout_log_probs"][masks == 0] == 0.0).all()
    assert set(tensors["rm_scores"].sum(dim=1).tolist()) <= {0.0, 1.0}


def loop_of(name: str, config: Any, servers: Servers) -> Any:
    """As verl's workers make it."""
    model = HFModelConfig(path=config.actor_rollout_ref.model.path)
    return getattr(importlib.import_module("lake_loop"), name)(
        trainer_config=DictConfigWrap(config=config),
        server_manager=servers,
        tokenizer=model.tokenizer,
        processor=None,
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(config.data),
    )


def test_each_trajectory_of_a_workflow_is_a_row_with_its_own_reward(config: Any) -> None:
    requests: list[dict[str, Any]] = []

    async def run(servers: Servers) -> Any:
        loop = loop_of("PairLoop", config, servers)
        outputs = await loop.run({"temperature": 0.9, "top_p": 1.0, "top_k": -1}, task={"question": "2 + 2?"})
        requests.extend(servers.requests)
        return outputs

    outputs = with_servers(config, run)
    assert [each.extra_fields["rllm_role"] for each in outputs] == ["solver", "solver", "judge"]
    assert [each.extra_fields["rllm_trajectory"] for each in outputs] == [0, 1, 2]
    assert {each.extra_fields[f"{end}_global_steps"] for each in outputs for end in ("min", "max")} == {4}
    tokenizer = load_model(Path(config.actor_rollout_ref.model.path)).tokenizer
    for solver in outputs[:2]:
        text = tokenizer.decode(solver.response_ids)
        assert solver.reward_score == len(text.strip())
        assert tokenizer.decode(solver.prompt_ids).count("2 + 2?") == 1
    assert outputs[2].reward_score in (0.0, outputs[0].reward_score, outputs[1].reward_score)
    assert all(len(each.response_ids) <= 3 and all(each.response_mask) for each in outputs)
    assert {(each["temperature"], each["max_tokens"], each["top_k"]) for each in requests} == {(0.9, 3, -1)}


def test_an_episode_that_failed_has_no_row(config: Any) -> None:
    with pytest.raises(AgentError, match="text under"):
        with_servers(config, lambda servers: loop_of("PairLoop", config, servers).run({}, task={"x": 1}))


def test_a_prompt_beyond_what_verl_pads_to_is_refused(config: Any) -> None:
    task = {"question": "why? " * 60}
    with pytest.raises(ConfigError, match=r"`data\.max_prompt_length` is 128"):
        with_servers(config, lambda servers: loop_of("PairLoop", config, servers).run({}, task=task))
