"""The configuration that Hydra composes for a published script, with all of verl's defaults in it."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from rllm.errors import ConfigError
from rllm.integrations.verl.keys import is_published, translated

SCRIPT = (
    *("algorithm.adv_estimator=grpo", "data.train_batch_size=8", "data.max_prompt_length=2048"),
    *("data.max_response_length=1024", "actor_rollout_ref.model.path=/models/tiny"),
    *("actor_rollout_ref.actor.optim.lr=1e-5", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
    *("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm", "actor_rollout_ref.rollout.n=8"),
    *("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.actor.use_dynamic_bsz=True"),
    *("actor_rollout_ref.rollout.val_kwargs.n=2", "trainer.n_gpus_per_node=8", "trainer.total_epochs=3"),
)


def composed(*overrides: str) -> Any:
    spec = importlib.util.find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    directory = Path(spec.origin).parent / "trainer" / "config"
    with initialize_config_dir(config_dir=str(directory), version_base=None):
        return compose("ppo_trainer", overrides=[*SCRIPT, *overrides])


@pytest.mark.parametrize("resolve", [False, True])
def test_what_hydra_composes_is_what_the_script_sets(resolve: bool) -> None:
    config = composed()
    if resolve:
        config = OmegaConf.to_container(config, resolve=True)
    assert is_published(config)
    assert translated(config, 64) == translated(list(SCRIPT), 64)


def test_a_composed_key_without_a_counterpart_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"`actor_rollout_ref\.actor\.entropy_coeff` is 0\.01"):
        translated(composed("actor_rollout_ref.actor.entropy_coeff=0.01"), 64)
    with pytest.raises(ConfigError, match=r"`algorithm\.use_pf_ppo` has no counterpart"):
        translated(composed("algorithm.use_pf_ppo=true"), 64)
