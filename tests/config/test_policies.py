from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.config import TrainConfig, config_dict, load_config
from rllm.config.policies import ONLY_POLICY
from rllm.errors import ConfigError

TWO = ["policies.solver.path=builtin:tiny", "policies.judge.trainable=false"]


def test_a_run_that_names_no_policy_has_one_for_every_role() -> None:
    config = load_config(["model.path=builtin:small"])
    assert config.policies == {}
    assert [(name, each.path) for name, each in config.named_policies.items()] == [
        (ONLY_POLICY, "builtin:small")
    ]
    assert config.policy_of("anything") == ONLY_POLICY
    assert config.estimator_of("anything") == "grpo"


def test_sections_with_names_of_the_users_are_filled_key_by_key_and_the_rest_has_its_default(
    tmp_path: Path,
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[policies.big]\npath = "builtin:small"\nlearning_rate = 1e-4\n'
        "[policies.referee]\ntrainable = false\n"
        '[roles.solver]\npolicy = "big"\nestimator = "dr_grpo"\n[roles.judge]\npolicy = "referee"\n'
    )
    config = load_config(file, ["roles.solver.temperature=1", "roles.solver.reward_weight=0.5"])
    assert config.named_policies["big"].path == "builtin:small"
    assert config.named_policies["referee"].path == "builtin:tiny"
    assert (config.policies["referee"].trainable, config.policies["big"].trainable) == (False, True)
    assert (config.policy_of("solver"), config.policy_of("judge")) == ("big", "referee")
    assert (config.estimator_of("solver"), config.estimator_of("judge")) == ("dr_grpo", "grpo")
    assert config.role("solver").temperature == 1.0
    assert type(config.role("solver").temperature) is float


def test_what_a_run_writes_down_is_what_it_loads_again() -> None:
    config = load_config([*TWO, "roles.solver.max_tokens=9"])
    written = config_dict(config)
    assert written["policies"]["judge"] == {
        "path": "",
        "trainable": False,
        "learning_rate": 0.0,
        "lora_rank": -1,
        "lora_alpha": 0.0,
        "lora_targets": [],
        "servers": [],
    }
    assert load_config(written) == config
    assert load_config(config, ["roles.solver.max_tokens=3"]).role("solver").max_tokens == 3
    assert config.role("solver").max_tokens == 9


def test_a_role_is_played_by_the_policy_of_its_name_where_none_is_chosen() -> None:
    config = load_config(TWO)
    assert (config.policy_of("solver"), config.policy_of("judge")) == ("solver", "judge")
    with pytest.raises(ConfigError, match=r"set `roles\.critic\.policy`"):
        config.policy_of("critic")


def test_what_cannot_be_honoured_is_refused_by_its_key(subtests: pytest.Subtests) -> None:
    for assignments, named in [
        (["policies=3"], r"`policies` is a section; set one of its keys, such as `policies\.NAME\.path`"),
        (["policies.solver=3"], r"`policies\.solver` is a section; .* `policies\.solver\.path`"),
        (["policies.solver.pth=a"], r"did you mean `policies\.solver\.path`"),
        (["roles.solver.estimater=grpo"], r"did you mean `roles\.solver\.estimator`"),
        (["roles.solver.max_tokens=few"], r"`roles\.solver\.max_tokens` is 'few'"),
        (["roles.solver.max_tokens=-1"], r"`roles\.solver\.max_tokens` is -1"),
        (["roles.solver.temperature=nan"], r"`roles\.solver\.temperature` is nan"),
        (["roles.solver.reward_weight=-1"], r"`roles\.solver\.reward_weight` is -1"),
        (["roles.solver.history=forget"], r"`roles\.solver\.history`.*'forget'.*keep"),
        (["roles.solver.estimator=best"], r"`roles\.solver\.estimator`.*'best'.*grpo"),
        (["roles.judge.policy=referee"], r"`roles\.judge\.policy`.*'referee'.*policy"),
        ([*TWO, "roles.judge.policy=referee"], r"choose one of solver, judge"),
        ([*TWO, "roles.critic.estimator=grpo"], r"none is chosen for the role `critic`"),
        (["policies.a.trainable=false"], r"No policy is trainable \(a\)"),
        (["policies.a.trainable=false", "policies.b.trainable=false"], r"No policy is trainable \(a, b\)"),
        ([*TWO, "policies.judge.learning_rate=1e-3"], r"but the policy is frozen"),
        (["policies.solver.learning_rate=-1"], r"`policies\.solver\.learning_rate` is -1"),
        (['policies."../up".path=a'], r"names a directory of the run"),
    ]:
        with subtests.test(assignments=assignments, named=named):
            tree: dict[str, object] | list[str] = assignments
            if "../up" in assignments[0]:
                tree = {"policies": {"../up": {"path": "a"}}}
            with pytest.raises(ConfigError, match=named):
                load_config(tree)


def test_a_group_of_one_is_refused_where_any_role_compares_attempts() -> None:
    alone = ["rollout.group_size=1", "algorithm.estimator=reinforce_plus_plus"]
    assert load_config([*alone, "roles.judge.temperature=1.0"]).rollout.group_size == 1
    with pytest.raises(ConfigError, match="grpo compares attempts"):
        load_config([*alone, "roles.judge.estimator=grpo"])


@given(st.dictionaries(st.from_regex(r"[a-z][a-z0-9_-]{0,8}", fullmatch=True), st.booleans(), max_size=5))
def test_named_policies_are_those_that_were_named(trainable: dict[str, bool]) -> None:
    tree = {"policies": {name: {"trainable": value} for name, value in trainable.items()}}
    if trainable and not any(trainable.values()):
        with pytest.raises(ConfigError):
            load_config(tree)
        return
    config = load_config(tree)
    assert {name: each.trainable for name, each in config.named_policies.items()} == (
        trainable or {ONLY_POLICY: True}
    )
    assert TrainConfig().policies == {}, "a default is nobody's to change"
