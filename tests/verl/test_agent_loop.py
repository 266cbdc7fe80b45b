"""An agent of ours in verl's real AgentLoopWorker; its servers are our engine with the built-in model."""

import asyncio
import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rllm.integrations.verl.platform import use_cpu

use_cpu()

from hydra import compose, initialize_config_dir  # noqa: E402
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker  # noqa: E402
from verl.workers.rollout.replica import TokenOutput  # noqa: E402

import verl  # noqa: E402
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


@register("lake")
class LakeLoop(RllmAgentLoop):
    agent_class, env_class = FrozenLakeAgent, FrozenLakeEnv
"""


class Servers:
    """What verl calls its server manager, over our engine."""

    tokenizer = None

    def __init__(self, client: LocalClient) -> None:
        self.client = client

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **options: Any
    ) -> TokenOutput:
        output = await self.client.generate_ids(list(prompt_ids), SamplingParams(max_tokens=2, seed=7))
        return TokenOutput(
            token_ids=output.completion_ids, log_probs=output.logprobs, stop_reason=str(output.finish_reason)
        )


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    create_model(tmp_path / "model")
    model = "actor_rollout_ref.model.path"
    overrides = [
        f"{model}={tmp_path / 'model'}",
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

    async def play() -> Any:
        client = LocalClient(load_model(tmp_path / "model"), lockstep=False)
        try:
            return await AgentLoopWorker(config, Servers(client)).generate_sequences(batch)
        finally:
            await client.close()

    return asyncio.get_event_loop_policy().new_event_loop().run_until_complete(play())


def test_episodes_come_back_as_the_tensors_that_verl_trains_on(played: Any) -> None:
    batch = played.batch
    assert batch["responses"].shape == (4, 256)
    masks = batch["response_mask"]
    assert (masks[:, 0] == 1).all()  # the first token was sampled
    assert ((masks.diff(dim=1) == 1).sum(dim=1) >= 1).all()  # and, behind an observation, others
    assert (batch["rollout_log_probs"][masks == 1] < 0.0).all()
    assert (batch["rollout_log_probs"][masks == 0] == 0.0).all()
    assert set(batch["rm_scores"].sum(dim=1).tolist()) <= {0.0, 1.0}
