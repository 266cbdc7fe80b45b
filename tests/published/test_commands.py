"""Every published command, flag and benchmark is accepted, or refused with what takes its place."""

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from rllm.build.asked import Asked, task_places
from rllm.build.evaluation import prepare
from rllm.build.providers import resolve_model
from rllm.cli.main import rllm as front_door
from rllm.cli.published_flags import SFT_KEYS, TRAIN_KEYS, sampling_words
from rllm.config.loader import config_dict
from rllm.config.schema import TrainConfig
from rllm.config.supervised import SftConfig
from rllm.data.registry import DatasetRegistry
from rllm.errors import ConfigError
from rllm.eval.catalogue import benchmark_named
from rllm.eval.published_benchmarks import successor

HERE = Path(__file__).parent
COMMANDS = {
    command: flags.split()
    for command, _, flags in (line.partition(":") for line in (HERE / "flags.txt").read_text().splitlines())
}
"""Published command -> its flags that were missing here."""
BENCHMARKS = (HERE / "benchmarks.txt").read_text().split()


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))


def command_of(words: str) -> click.Command | None:
    """The command itself; None where it is not here."""
    command: click.Command = front_door
    for name in words.split()[1:]:
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), name)
        if found is None:
            return None
        command = found
    return command


def typed(*words: str) -> Result:
    return CliRunner().invoke(front_door, words, prog_name="rllm")


def test_a_published_command_is_here_or_names_its_successor(subtests: pytest.Subtests) -> None:
    for words in COMMANDS:
        with subtests.test(words=words):
            if command_of(words) is None:
                done = typed(*words.split()[1:])
                assert done.exit_code == 2
                assert "has no counterpart: " in done.output


@pytest.mark.parametrize(
    ("words", "flag"), [(words, flag) for words, flags in COMMANDS.items() for flag in flags]
)
def test_a_published_flag_is_taken_or_names_its_successor(words: str, flag: str) -> None:
    command = command_of(words)
    if command is None:
        return  # refused as a whole, whatever is typed behind it
    (option,) = (each for each in command.params if flag in each.opts)
    assert isinstance(option, click.Option)
    if option.hidden and option.callback is not None:
        done = typed(*words.split()[1:], *([flag] if option.is_flag else [flag, "x"]))
        assert done.exit_code == 2
        assert f"{flag} has no counterpart: " in done.output
    else:
        assert option.hidden or option.help


@pytest.mark.parametrize(
    ("keys", "config"), [(TRAIN_KEYS, TrainConfig()), (SFT_KEYS, SftConfig())], ids=["train", "sft"]
)
def test_an_alias_is_of_a_key_that_exists(keys: dict[str, str], config: TrainConfig | SftConfig) -> None:
    for key in keys.values():
        value = config_dict(config)
        for name in key.split("."):
            value = value[name]


def test_an_alias_sets_its_key_and_an_assignment_wins() -> None:
    """Seen by what the configuration says of a value that it refuses, before anything is loaded."""
    words = ("train", "frozenlake", "--no-ui", "--group-size", "-4")
    assert "`rollout.group_size` is -4" in typed(*words).output
    assert "`rollout.group_size` is -3" in typed(*words, "--set", "rollout.group_size=-3").output
    assert "`--sampling nonsense`" in typed("train", "frozenlake", "--sampling-params", "nonsense=1").output


def test_a_published_benchmark_is_here_or_names_its_successor(subtests: pytest.Subtests) -> None:
    for name in BENCHMARKS:
        with subtests.test(name=name):
            if successor(name) is None:
                assert benchmark_named(name).name
            else:
                with pytest.raises(ConfigError, match=f"`{name}` is not here"):
                    benchmark_named(name)


@pytest.mark.parametrize(
    ("published", "own"),
    [("mmlu_pro", "mmlu-pro"), ("AIME_2025", "aime25"), ("swebench_verified", "swe-bench-verified")],
)
def test_a_benchmark_has_one_name_in_all_its_spellings(published: str, own: str) -> None:
    assert benchmark_named(published) == benchmark_named(own)


def test_software_tasks_are_no_conversation_unless_somebody_says_so() -> None:
    for name in ("swebench_verified", "swe-bench-verified", "swe-bench-lite", "swe-bench-pro"):
        with pytest.raises(ConfigError, match=r"rows\.jsonl --agent swe"):
            prepare(Asked(benchmark=name, place=resolve_model("builtin:tiny")))


def test_a_data_set_has_one_name_in_all_its_spellings() -> None:
    DatasetRegistry.register_dataset("math", [{"question": "1 + 1?"}], "train")
    DatasetRegistry.register_dataset("my-rows", [{"question": "2 + 2?"}], "train")
    for name in ("math", "hendrycks_math"):
        rows = DatasetRegistry.load_dataset(name, "train")
        assert rows is not None
        assert rows[0]["question"] == "1 + 1?"
    assert DatasetRegistry.dataset_exists("my_rows")
    DatasetRegistry.register_dataset("my_rows", [{"question": "3 + 3?"}], "train")
    assert [DatasetRegistry.load_dataset(name, "train") for name in ("my-rows", "my_rows")] != [None, None]
    exact = DatasetRegistry.load_dataset("my_rows", "train")
    assert exact is not None
    assert exact[0]["question"] == "3 + 3?"


def test_places_of_tasks_are_read_and_bounded() -> None:
    assert task_places("3,7,10-12, 7") == (3, 7, 10, 11, 12)
    assert task_places("") == ()
    for text in ("-1", "5-", "5-3", "a", "1-2-3", "0-99999999999999", "9" * 5000):
        with pytest.raises(ConfigError, match="--task-indices has"):
            task_places(text)
    with pytest.raises(ConfigError, match="no task"):
        task_places(" ,")
    request = Asked(benchmark="frozenlake", place=resolve_model("builtin:tiny"), indices=(1, 4))
    assert request.chosen("abcde") == ["b", "e"]
    with pytest.raises(ConfigError, match=r"has 4, .* 3 tasks"):
        request.chosen("abc")


def test_attempts_that_fit_no_memory_are_refused() -> None:
    request = Asked(benchmark="frozenlake", place=resolve_model("builtin:tiny"), attempts=10**11)
    with pytest.raises(ConfigError, match="attempts is 100000000000"):
        prepare(request)


def test_a_filter_says_which_tasks_are_measured() -> None:
    tasks = [{"numbers": [1, 2], "target": target, "level": level} for target, level in ((3, "a"), (4, "b"))]

    def chosen(expression: str, **more: Any) -> list[int]:
        place = resolve_model("builtin:tiny")
        request = Asked(benchmark="countdown", place=place, expression=expression, **more)
        return [each["target"] for each in request.chosen(tasks)]

    assert chosen('level == "b"') == [4]
    assert chosen("target > 2", indices=(0,)) == [3]
    for expression, word in (
        ("target > 9", "keeps none of 2 tasks"),
        ("goal > 1", "`goal`"),
        ("(", "be read"),
    ):
        with pytest.raises(ConfigError, match=word):
            chosen(expression)


def test_so_many_tasks_are_measured_of_those_that_a_filter_keeps(tmp_path: Path) -> None:
    """Those at the end of the data set are looked at as well."""
    rows = [{"question": f"{n} + 0?", "answer": str(n), "category": "ab"[n >= 6]} for n in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert typed("dataset", "register", "mine", "rows.jsonl", "--evaluator", "math").exit_code == 0
    place = resolve_model("builtin:tiny")
    mine = Asked(benchmark="mine", place=place, expression='category == "b"', num_tasks=2)
    assert [task["question"] for task in prepare(mine).tasks] == ["6 + 0?", "7 + 0?"]
    lakes = Asked(benchmark="frozenlake", place=place, expression="size == 6", num_tasks=3)
    assert [task["size"] for task in prepare(lakes).tasks] == [6, 6, 6]


def test_what_is_made_here_needs_no_pull() -> None:
    done = typed("dataset", "pull", "countdown")
    assert (done.exit_code, "nothing to fetch" in done.output) == (0, True)
    assert typed("dataset", "pull", "countdwon").exit_code == 2


def test_sampling_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("temperature: 0.6\ntop_p: 0.95\n")
    (tmp_path / "s.json").write_text('{"max_tokens": 64}')
    assert sampling_words("@s.yaml") == ["temperature=0.6", "top_p=0.95"]
    assert sampling_words("@s.json") == ["max_tokens=64"]
    assert sampling_words("temperature=1, top_k=3") == ["temperature=1", "top_k=3"]
    for name in ("absent.yaml", "list.yaml"):
        (tmp_path / "list.yaml").write_text("- 1\n")
        with pytest.raises(ConfigError, match=name):
            sampling_words(f"@{name}")
