"""What the catalogue promises, before anything of a benchmark is loaded."""

from pathlib import Path

import pytest

from rllm.agents.named import AGENTS
from rllm.config.loader import load_config
from rllm.config.schema import RolloutConfig
from rllm.data.transforms.registry import TRANSFORMS
from rllm.errors import ConfigError
from rllm.eval.catalogue import (
    ENVIRONMENT,
    benchmark_named,
    benchmark_names,
    benchmark_of,
    benchmarks,
)
from rllm.rewards.graders import GRADERS, grader_named

NAMED_IN_PLAN = {
    name
    for line in (
        "gsm8k math math500 aime24 aime25 aime26 amc olympiadbench minerva hmmt deepscaler deepcoder",
        "humaneval mbpp apps livecodebench codeforces taco bigcodebench mmlu mmlu-pro mmlu-redux",
        "gpqa-diamond arc-challenge hellaswag winogrande truthfulqa boolq commonsenseqa ceval bbh drop",
        "squad triviaqa nq hotpotqa 2wiki musique bamboogle browsecomp simpleqa hle ifeval ifbench bfcl",
        "multi-if wmt24pp flores-en-de geo3k mathvista mathvision mmmu countdown finqa tatqa longbench",
        "ruler swe-bench-verified swe-bench-lite swe-bench-pro terminal-bench frozenlake arithmetic",
        "word-problems",
    )
    for name in line.split()
}


def test_there_are_a_hundred_benchmarks_and_sixty_run_without_a_network() -> None:
    found = benchmarks()
    assert len(found) >= 100
    assert sum(each.offline for each in found) >= 60
    assert set(benchmark_names()) >= NAMED_IN_PLAN


def test_every_benchmark_of_the_catalogue_is_whole() -> None:
    for name in benchmark_names():
        benchmark = benchmark_named(name)
        assert benchmark.name == name
        assert benchmark.description.endswith("."), name
        assert benchmark.licence, name
        assert benchmark.citation, name
        assert benchmark.category == benchmark.category.lower(), name
        assert benchmark.agent in AGENTS, name
        load_config(benchmark.train)
        if benchmark.asks_questions:
            assert benchmark.evaluator in GRADERS, name
            assert benchmark.transform in TRANSFORMS, name
            assert "{{" in benchmark.prompt, name
            assert not benchmark.fields.keys() & benchmark.options.keys(), name
            assert benchmark.published_reading != "likelihood" or benchmark.evaluator == "choice", name
        else:
            assert benchmark.evaluator == ENVIRONMENT, name


def test_a_published_reading_is_one_that_the_grader_has() -> None:
    read = {each.evaluator for each in benchmarks() if each.published_reading}
    assert read == {"choice", "exact", "f1", "math", "search"}
    for name in read:
        grader_named(name, reading="lenient").close()


@pytest.mark.parametrize("name", ["gsm8k", "frozenlake", "reasoning-gym/chain_sum"])
def test_the_summary_is_plain_and_whole(name: str) -> None:
    summary = benchmark_named(name).summary()
    names = [
        "name",
        "category",
        "offline",
        "splits",
        "size",
        "agent",
        "evaluator",
        "published_reading",
        "licence",
    ]
    assert list(summary) == names
    assert summary["splits"][0] == "test"


def test_a_size_is_a_number_or_says_why_there_is_none() -> None:
    assert benchmark_named("gsm8k").size == 1319
    assert benchmark_named("frozenlake").size == "unlimited"
    assert benchmark_named("codeforces").size == "unknown"


def test_the_stamp_changes_with_the_prompt_alone() -> None:
    table = {
        "name": "mine",
        "description": "Mine.",
        "category": "own",
        "licence": "unknown",
        "citation": "",
        "agent": "conversation",
        "evaluator": "exact",
        "splits": {"test": {}},
        "source": {"kind": "hub", "repo": "org/name"},
        "transform": "own",
        "prompt": "{{question}}",
    }
    stamps = [
        benchmark_of(table | change, "mine.toml").stamp()["sha256"]
        for change in ({}, {"licence": "MIT"}, {"prompt": "Now: {{question}}"})
    ]
    assert stamps[0] == stamps[1] != stamps[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": "red"}, r"mine.toml.*no key `colour`"),
        ({"source": {"kind": "hub"}}, "mine.toml: `source` is incomplete"),
        ({"source": {"kind": "disk"}}, r"`source.kind`.*'disk'.*hub, archive, package"),
        ({"source": {"kind": "hub", "repo": "a/b", "speed": 2}}, "there is no `source.speed`"),
        ({"splits": {}}, "has no `splits`"),
        ({"splits": {"test": {"size": 3}}}, "there is no `splits.test.size`"),
        ({"prompt": ""}, "no `prompt`"),
        ({"published_reading": "loose"}, r"`published_reading`.*'loose'.*strict, lenient"),
    ],
)
def test_a_broken_file_is_refused_by_its_name(change: dict[str, object], message: str) -> None:
    table: dict[str, object] = {
        **dict.fromkeys(("name", "category", "licence", "citation", "agent", "evaluator"), "x"),
        "description": "X.",
        "splits": {"test": {}},
        "source": {"kind": "hub", "repo": "org/name"},
        "transform": "own",
        "prompt": "{{question}}",
    }
    with pytest.raises(ConfigError, match=message):
        benchmark_of(table | change, "mine.toml")


def test_an_unknown_benchmark_is_refused_with_the_nearest_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"`frozen_lake`.*`frozenlake`"):
        benchmark_named("frozen_lake")
    with pytest.raises(ConfigError, match="did you mean `reasoning-gym/chain_sum`"):
        benchmark_named("reasoning-gym/chainsum")
    with pytest.raises(ConfigError, match=r"frozenlake.*reasoning-gym/…"):
        benchmark_named("xyzzyxyzzy")
    with pytest.raises(ConfigError, match=r"`harbor:org/name`: collections .* rllm eval \./DIRECTORY"):
        benchmark_named("harbor:org/name")


def test_a_game_has_as_many_turns_in_training_as_its_rules_allow() -> None:
    """One that was cut off sooner could not be won."""
    cut_off = {
        each.name: each.task
        for each in benchmarks()
        for turns in [each.task.get("max_turns", each.task.get("max_steps", 0))]
        if each.agent in ("game", "frozenlake")
        and each.train.get("rollout", {}).get("max_turns", RolloutConfig().max_turns) < turns
    }
    assert not cut_off


def test_what_training_alone_may_set_is_what_its_tasks_and_its_agent_are_made_with() -> None:
    table = {"name": "x", "description": "", "category": "", "licence": "", "citation": "", "agent": "game"}
    table |= {"evaluator": ENVIRONMENT, "environment": "maze", "splits": {"test": {}}}
    with pytest.raises(ConfigError, match=r"mine: .*`train.task.agent`"):
        benchmark_of(table | {"train": {"task": {"agent": "tool"}}}, "mine")
