from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.config import TrainConfig, config_dict, load_config
from rllm.config.loader import parse_assignment
from rllm.errors import ConfigError


def _leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for each in fields(section):
        value = getattr(section, each.name)
        if is_dataclass(value):
            yield from _leaves(value, f"{prefix}{each.name}.")
        else:
            yield f"{prefix}{each.name}", value


NAMED = ("policies", "roles")
"""Sections of sections, each under a name of the user's; see test_policies.py."""
LEAVES = {key: value for key, value in _leaves(TrainConfig()) if key not in NAMED}
SECTIONS = sorted({key.rpartition(".")[0] for key in LEAVES} - {""})
REFUSED_BY = {
    int: ["1.5", "true", '"three"', "[1]", "{a = 1}"],
    float: ['"fast"', "true", "[0.5]", "{a = 1}"],
    str: ["true", "[1]", "{a = 1}"],
    dict: ["1", '"text"', "[1]"],
    list: ["1", '"text"', "{a = 1}"],
    bool: ["1", '"yes"', "0.0"],
}


def _tree(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _read(config: TrainConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def test_every_key_refuses_a_value_of_another_type_and_says_which_it_takes() -> None:
    for key, default in LEAVES.items():
        kind = type(default)
        for text in REFUSED_BY[kind]:
            with pytest.raises(ConfigError, match=rf"`{key}` is .*type {kind.__name__}"):
                load_config([f"{key}={text}"])


def test_every_key_takes_its_own_default_from_a_mapping_and_from_text() -> None:
    for key, default in LEAVES.items():
        assert _read(load_config(_tree(key, default)), key) == default, key
        if not isinstance(default, dict):
            text = str(default).lower() if isinstance(default, bool) else str(default)
            assert _read(load_config([f"{key}={text}"]), key) == default, key


def test_an_unknown_key_is_refused_with_a_suggestion(subtests: pytest.Subtests) -> None:
    for assignment, hint in [
        ("sead=1", "did you mean `seed`"),
        ("rolout.group_size=4", "did you mean `rollout`"),
        ("rollout.groupsize=4", "did you mean `rollout.group_size`"),
        ("optimizer.learning_rat=1", "did you mean `optimizer.learning_rate`"),
        ("zzz=1", "known: seed, steps"),
        ("rollout.zzz=1", "known: tasks_per_step"),
        ("rollout.group_size.x=1", "must be of type int"),
        ("rollout=5", "`rollout` is a section; set one of its keys"),
        ("rollout..group_size=5", "no configuration key `rollout.`"),
    ]:
        with (
            subtests.test(assignment=assignment, hint=hint),
            pytest.raises(ConfigError, match=hint.replace(".", r"\.")),
        ):
            load_config([assignment])


@pytest.mark.parametrize("text", ["seed", "=5", "", "  =5"])
def test_an_assignment_that_sets_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"section.key=value"):
        load_config([text])


def test_defaults_yield_to_the_file_and_the_file_to_assignments_in_their_order(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("seed = 5\nsteps = 7\n[rollout]\ngroup_size = 4\nmax_turns = 3\n")
    config = load_config(
        file, ["steps=9", "rollout.max_turns=5", "rollout.max_turns=6"], base={"seed": 1, "threads": 2}
    )
    assert (config.seed, config.steps, config.threads) == (5, 9, 2)
    assert (config.rollout.group_size, config.rollout.max_turns) == (4, 6)
    assert config.rollout.tasks_per_step == TrainConfig().rollout.tasks_per_step


class _LikeOmegaConf(Mapping[str, Any]):
    """A mapping that is no dict, all the way down."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = {
            key: _LikeOmegaConf(value) if isinstance(value, dict) else value for key, value in values.items()
        }

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def test_any_mapping_counts_also_one_that_is_no_dict() -> None:
    source = _LikeOmegaConf({"rollout": {"group_size": 4}, "task": {"environment_args": {"size": 5}}})
    config = load_config(source, ["rollout.max_turns=3"])
    assert (config.rollout.group_size, config.rollout.max_turns) == (4, 3)
    assert config.task.environment_args == {"size": 5}
    assert type(config.task.environment_args) is dict


def test_a_config_is_a_source_and_is_not_changed_by_what_comes_on_top() -> None:
    first = load_config(["seed=3", "task.environment_args.size=4"])
    second = load_config(first, ["steps=1", "task.environment_args.size=8"])
    assert (second.seed, second.steps, second.task.environment_args) == (3, 1, {"size": 8})
    assert first.task.environment_args == {"size": 4}
    assert first.steps == TrainConfig().steps


def test_what_a_run_writes_down_is_what_it_loads_again() -> None:
    config = load_config(["seed=4", "optimizer.learning_rate=3e-4", "task.environment_args.size=6"])
    written = config_dict(config)
    assert load_config(written) == config
    assert config_dict(load_config(written)) == written
    assert {key for key in LEAVES if _get(written, key) is not None} == set(LEAVES)


def _get(tree: dict[str, Any], key: str) -> Any:
    value: Any = tree
    for part in key.split("."):
        value = value[part]
    return value


def test_a_value_that_is_no_toml_is_text(subtests: pytest.Subtests) -> None:
    for text, value in [
        ("model.path=builtin:small", "builtin:small"),
        ("model.path=/models/a b#1", "/models/a b#1"),
        ("model.path = 'quoted'", "quoted"),
        ("model.path=", ""),
        ("model.path=a=b", "a=b"),
        ("model.path=true story", "true story"),
    ]:
        with subtests.test(text=text, value=value):
            assert parse_assignment(text) == {"model": {"path": value}}


def test_a_whole_number_is_taken_where_a_fraction_is_wanted_and_not_the_other_way_round() -> None:
    temperature = load_config(["rollout.temperature=1"]).rollout.temperature
    assert (temperature, type(temperature)) == (1.0, float)
    with pytest.raises(ConfigError, match="type int"):
        load_config(["steps=3.0"])


def test_one_free_dictionary_is_filled_key_by_key() -> None:
    config = load_config(["task.environment_args.size=5", "task.environment_args.is_slippery=true"])
    assert config.task.environment_args == {"size": 5, "is_slippery": True}


def test_a_file_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"file .*absent.toml"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="no configuration file"):
        load_config(str(tmp_path))
    (tmp_path / "broken.toml").write_text("seed = \n")
    with pytest.raises(ConfigError, match=r"broken.toml .*TOML"):
        load_config(tmp_path / "broken.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary.toml .*TOML"):
        load_config(tmp_path / "binary.toml")


@given(st.dictionaries(st.sampled_from(["seed", "steps", "threads"]), st.integers(0, 10**9)))
def test_what_is_set_is_what_one_gets_and_the_rest_stays(values: dict[str, int]) -> None:
    config = load_config(values)
    assert {key: getattr(config, key) for key in values} == values
    assert load_config([f"{key}={value}" for key, value in values.items()]) == config


def test_a_section_is_not_a_value(subtests: pytest.Subtests) -> None:
    for section in SECTIONS:
        with subtests.test(section=section), pytest.raises(ConfigError, match=f"`{section}` is a section"):
            load_config(_tree(section, "fast"))
