"""The configuration that Hydra composes for a published script, with all of verl's defaults in it."""

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from rllm.config.loader import load_config
from rllm.errors import ConfigError
from rllm.integrations.verl.composed import is_composed
from rllm.integrations.verl.keys import is_published, translate
from rllm.integrations.verl.tables import FIXED, OF_CRITIC, PUBLISHED_DEFAULTS, TOGETHER, TRANSLATED
from rllm.integrations.verl.trees import leaves, nested

SCRIPT = (
    *("algorithm.adv_estimator=grpo", "data.train_batch_size=8", "data.max_prompt_length=2048"),
    *("data.max_response_length=1024", "actor_rollout_ref.model.path=/models/tiny"),
    *("actor_rollout_ref.actor.optim.lr=1e-5", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
    *("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm", "actor_rollout_ref.rollout.n=8"),
    *("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.actor.use_dynamic_bsz=True"),
    *("actor_rollout_ref.rollout.val_kwargs.n=2", "trainer.n_gpus_per_node=8", "trainer.total_epochs=3"),
)


def composed(*overrides: str) -> Any:
    """The script's configuration as Hydra gives it to a program."""
    return compose_all(*SCRIPT, *overrides)


def compose_all(*overrides: str) -> Any:
    spec = importlib.util.find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    directory = Path(spec.origin).parent / "trainer" / "config"
    with initialize_config_dir(config_dir=str(directory), version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


@functools.cache
def verls_values() -> dict[str, Any]:
    """Of every key, where a script sets none."""
    config = compose_all("actor_rollout_ref.rollout.name=vllm")
    return dict(leaves(OmegaConf.to_container(config, resolve=True)))


@pytest.mark.parametrize("resolve", [False, True])
def test_what_hydra_composes_is_what_the_script_sets(resolve: bool) -> None:
    config = composed()
    if resolve:
        config = OmegaConf.to_container(config, resolve=True)
    assert is_published(config)
    assert translate(config, 64) == translate(list(SCRIPT), 64)


def test_a_composed_key_without_a_counterpart_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"`actor_rollout_ref\.actor\.entropy_coeff` is 0\.01"):
        translate(composed("actor_rollout_ref.actor.entropy_coeff=0.01"), 64)
    with pytest.raises(ConfigError, match=r"`algorithm\.use_pf_ppo` is True, .*counterpart"):
        translate(composed("algorithm.use_pf_ppo=true"), 64)


@pytest.mark.parametrize("loss", ["vanilla", "gspo", "kl_cov", "sapo"])
@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_what_is_left_out_means_what_verl_says_of_it(loss: str, estimator: str) -> None:
    """Verl's own values, written out one by one, change nothing."""
    script = {
        "algorithm.adv_estimator": estimator,
        "actor_rollout_ref.actor.policy_loss.loss_mode": loss,
        "actor_rollout_ref.model.path": "/models/tiny",
        "actor_rollout_ref.rollout.n": 8,
    }
    refused = _NOT_OF_LOSS[loss] | (
        set() if estimator == "gae" else {"critic.optim.lr", "critic.cliprange_value"}
    )
    keys = {*TRANSLATED, *OF_CRITIC, *FIXED, *TOGETHER} - refused - _OURS
    defaults = {key: value for key, value in verls_values().items() if key in keys}
    assert len(defaults) > 30
    explicit = load_config(translate(nested({**defaults, **script}), 2048))
    ours = load_config(translate(nested(script), 2048))
    for name in ("gradient_checkpointing", "micro_batch_tokens"):  # no number depends on them
        setattr(explicit.optimizer, name, getattr(ours.optimizer, name))
    assert explicit == ours


_ACTOR = "actor_rollout_ref.actor"
_CLIP = {f"{_ACTOR}.clip_ratio{end}" for end in ("", "_low", "_high")}
_COV = {f"{_ACTOR}.policy_loss.{name}" for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")}
_KL_COV = {f"{_ACTOR}.policy_loss.{name}" for name in ("kl_cov_ratio", "ppo_kl_coef")}
_SAPO = {f"{_ACTOR}.tau_pos", f"{_ACTOR}.tau_neg"}
_DUAL = {f"{_ACTOR}.clip_ratio_c"}
_NOT_OF_LOSS = {
    "vanilla": _COV | _KL_COV | _SAPO,
    "gspo": _COV | _KL_COV | _SAPO | _DUAL,
    "kl_cov": _COV | _SAPO | _DUAL | _CLIP,
    "sapo": _COV | _KL_COV | _DUAL | _CLIP,
}
"""What verl does not look at, which is refused here where a script sets it."""
_OURS = {"actor_rollout_ref.rollout.seed", "critic.model.path"}
"""A seed that is left out is ours; a critic begins with the policy's weights."""


@pytest.mark.parametrize("resolve", [False, True])
def test_what_published_scripts_compose_beside_verls_own_keys_was_not_chosen(resolve: bool) -> None:
    """The published `agent_ppo_trainer` is verl's `ppo_trainer` with a section `rllm` and a few more keys."""
    if not OmegaConf.has_resolver("mul"):
        OmegaConf.register_new_resolver("mul", lambda one, other: int(one) * int(other))
    config: Any = composed()
    OmegaConf.set_struct(config, False)
    published = OmegaConf.merge(config, OmegaConf.create(nested(PUBLISHED_DEFAULTS)))
    published.rllm.agent.max_steps = 3
    if resolve:
        published = OmegaConf.to_container(published, resolve=True)
    assert is_composed(published)
    assert translate(published, 64) == translate([*SCRIPT, "rllm.agent.max_steps=3"], 64)
