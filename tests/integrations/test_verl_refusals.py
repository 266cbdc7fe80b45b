"""What `backend = "verl"` refuses, by key, before any work; needs no verl."""

import importlib.util
from collections.abc import Mapping
from typing import Any

import pytest

from rllm import AgentTrainer
from rllm.agents.conversation import ConversationAgent
from rllm.build.configs import training_config
from rllm.build.training import build_run
from rllm.environments.frozenlake import FrozenLakeEnv
from rllm.errors import ConfigError
from rllm.integrations.verl.contract import require_contract, require_installed

REFUSED = {
    "optimizer.name=muon": r"`optimizer\.name` is 'muon', which the verl backend does not honour",
    "optimizer.logits_mb=64": r"`optimizer\.logits_mb` is 64",
    "optimizer.max_norm_factor=3.0": r"`optimizer\.max_norm_factor`",
    "model.dtype=bfloat16": r"`model\.dtype`",
    "model.device=cuda": r"`model\.device`",
    "lora.rank=4": r"`lora\.rank` is 4, but the verl backend trains all weights",
    "algorithm.loss=collections:Counter": r"`algorithm\.loss`|loss",
}


def test_what_verl_would_not_honour_is_refused_by_key(subtests: pytest.Subtests) -> None:
    for assignment in REFUSED:
        with subtests.test(assignment=assignment):
            settings = ("backend=verl", "optimizer.name=adamw", assignment)
            with pytest.raises(ConfigError, match=REFUSED[assignment]):
                build_run(training_config("frozenlake", None, settings), "unused")  # type: ignore[arg-type]


def test_a_critic_on_the_trunk_of_the_policy_is_refused() -> None:
    settings = ("backend=verl", "optimizer.name=adamw", "algorithm.estimator=gae", "critic.trunk=shared")
    with pytest.raises(ConfigError, match=r"`critic\.trunk` is \"shared\""):
        build_run(training_config("frozenlake", None, settings), "unused")  # type: ignore[arg-type]


@pytest.mark.skipif(importlib.util.find_spec("verl") is not None, reason="verl is installed")
def test_without_verl_the_extra_is_named() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'rllm\[verl\]'"):
        _trainer({"optimizer": {"name": "adamw"}, "warm_start": {"steps": 0}})


def test_a_backend_that_does_not_exist_is_refused_with_the_one_that_does() -> None:
    with pytest.raises(ConfigError, match=r"`verk`.*`verl`"):
        _trainer({}, "verk")


def test_an_object_that_is_no_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="it must have `shards`, `translated`, `require`, `policy`"):
        _trainer({}, "collections:Counter")


def test_a_library_that_has_changed_is_refused_with_what_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.9.7")
    contract = {"textwrap:dedent": ("text", "depth"), "textwrap:Gone": (), "textwrap:wrap": ("anything",)}
    with pytest.raises(ConfigError, match=r"verl 0\.9\.7 .*dedent .*depth; Gone ") as found:
        require_contract(contract)
    assert "wrap takes" not in str(found.value)  # it takes any keyword


@pytest.mark.parametrize("version", ["0.8.0", "0.9.0", "0.10.0", "0.10.0.dev1", "1.0"])
def test_a_verl_outside_the_pin_is_refused_with_its_version(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    with pytest.raises(ConfigError, match=rf"verl {version} .*pip install 'rllm\[verl\]'"):
        require_installed()


@pytest.mark.parametrize("version", ["0.9.1", "0.9.1.post1", "0.9.12"])
def test_a_verl_inside_the_pin_is_accepted(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    require_installed()


def _trainer(config: Mapping[str, Any], backend: str = "verl") -> AgentTrainer:
    return AgentTrainer(
        config,
        [{"task_id": "a", "rows": ["SF", "HG"]}],
        backend=backend,
        agent_class=ConversationAgent,
        env_class=FrozenLakeEnv,
    )
