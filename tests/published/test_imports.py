"""Every import of published programs resolves, or is refused by its name with what takes its place."""

import importlib
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from rllm.config.loader import config_dict
from rllm.config.schema import TrainConfig
from rllm.data.registry import DatasetRegistry
from rllm.errors import ConfigError
from rllm.published import table


def rows_of(file: str) -> list[tuple[str, str]]:
    lines = (Path(__file__).parent / file).read_text().splitlines()
    return [
        (module, name)
        for module, _, names in (line.partition(": ") for line in lines)
        for name in names.split()
    ]


ROWS = rows_of("imports.txt")
"""Module and name of every import that was counted in published programs."""
INVENTORY = rows_of("inventory.txt")
"""Of what published rLLM has beside them, whoever uses it."""


def imported(module: str, name: str) -> object:
    """`from module import name`, without the note that it is a published name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return getattr(importlib.import_module(module), name)


def test_a_published_import_resolves_or_names_its_successor(subtests: pytest.Subtests) -> None:
    for module, name in [*ROWS, *INVENTORY]:
        with subtests.test(module=module, name=name):
            try:
                assert imported(module, name) is not None
            except (ImportError, AttributeError) as error:
                place, _, successor = str(error).partition(" has no counterpart here: ")
                assert "published rLLM" in place
                assert len(successor) > 20


def test_no_more_rows_are_refused_than_these() -> None:
    assert len(ROWS) == 146
    without_counterpart = [
        (module, name)
        for module, name in ROWS
        if name in table.REFUSED_NAMES.get(module, {})
        or any(module == each or module.startswith(f"{each}.") for each in table.REFUSED_MODULES)
    ]
    assert len(without_counterpart) <= 52


REFUSALS = {
    *table.REFUSED_MODULES.values(),
    *(each for names in table.REFUSED_NAMES.values() for each in names.values()),
}


def test_a_successor_is_there(subtests: pytest.Subtests) -> None:
    """Names of this package, keys of the configuration and pages, as a refusal writes them."""
    for reason in sorted(REFUSALS):
        with subtests.test(reason=reason):
            for name in re.findall(r"rllm(?:\.\w+)+", reason):
                module, _, attribute = name.rpartition(".")
                try:
                    importlib.import_module(name)
                except ImportError:
                    getattr(importlib.import_module(module), attribute)
            for page in re.findall(r"docs/\w+\.md", reason):
                assert (Path(__file__).parents[2] / page).is_file()
            for section, key in re.findall(r"`(\w+)\.(\w+)`", reason):
                if section not in ("os", "config", "rllm"):
                    assert key in config_dict(TrainConfig())[section], f"{section}.{key}"


def test_a_name_that_is_refused_is_not_there_for_hasattr() -> None:
    """`from module import name` says why, and programs that ask before go another way."""
    for module, name in (
        ("rllm.agents", "Agent"),
        ("rllm.trainer.sft", "SFTSpec"),
        ("rllm.tools", "ToolRegistry"),
    ):
        assert not hasattr(importlib.import_module(module), name)
        with pytest.raises(ModuleNotFoundError, match=rf"`{module}\.{name}` .*counterpart"):
            exec(f"from {module} import {name}", {})
    with pytest.raises(ModuleNotFoundError, match=r"`rllm\.sdk\.chat` of published rLLM"):
        exec("from rllm.sdk import chat", {})


def test_all_names_of_a_published_module_come_at_once() -> None:
    names: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        exec("from rllm.sdk import *", names)
    assert {"session", "get_chat_client", "trajectory"} <= names.keys()


def test_every_row_of_the_table_leads_somewhere(subtests: pytest.Subtests) -> None:
    for module, name in [(module, name) for module, names in table.NAMES.items() for name in names]:
        with subtests.test(module=module, name=name):
            home, _, own_name = table.NAMES[module][name].partition(":")
            assert imported(module, name) is getattr(importlib.import_module(home), own_name or name)


def test_a_published_name_says_once_where_it_lives() -> None:
    code = """
from rllm.agents.math_agent import MathAgent
from rllm.agents.math_agent import MathAgent as again
def late():
    from rllm.engine.rollout.openai_engine import OpenAIEngine
    return OpenAIEngine
print(late().__name__)
"""
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "OpenAIEngine\n"
    assert done.stderr.count("`from rllm.agents.math import MathAgent`") == 1
    assert "<string>:2: DeprecationWarning" in done.stderr


def test_a_module_that_has_published_names_keeps_its_own() -> None:
    from rllm.engine import rollout
    from rllm.engine.rollout import run_trajectory

    assert run_trajectory.__module__ == "rllm.engine.rollout"
    assert rollout.__spec__ is not None
    assert type(rollout.__spec__.loader).__name__ == "SourceFileLoader"
    with pytest.raises(AttributeError, match=r"`rllm\.engine\.rollout` has no attribute `Nonsense`"):
        _ = rollout.Nonsense


@pytest.mark.parametrize("module", ["rllm.nonsense", "rllm.sdk.nonsense", "rllm.engine.rollout.nonsense"])
def test_a_module_that_nobody_published_is_not_there(module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=module):
        importlib.import_module(module)


def test_the_import_of_the_package_stays_light() -> None:
    """Processor time, the interpreter's own start included; measured: 0.03 s."""
    code = "import rllm, time; print(time.process_time())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.3


def test_the_registry_has_the_data_sets_of_this_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path))
    from rllm.published.datasets import PublishedRegistry

    assert imported("rllm.data.dataset", "DatasetRegistry") is PublishedRegistry
    DatasetRegistry.register_dataset("mine", [{"question": "1?"}], "train")
    assert [row["question"] for row in PublishedRegistry.load_dataset("mine", "train") or ()] == ["1?"]
    assert PublishedRegistry.load_dataset("mine", "test") is None
    assert PublishedRegistry.load_dataset("gsm8k", "train") is None


def test_data_sets_that_are_made_here_have_rows_under_their_published_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path))
    from rllm.environments.countdown import CountdownEnv
    from rllm.environments.countdown_problems import solutions
    from rllm.published.datasets import PublishedRegistry
    from rllm.rewards.reward_functions import countdown_reward_fn

    train = PublishedRegistry.load_dataset("countdown", "train")
    test = PublishedRegistry.load_dataset("countdown", "test")
    assert train is not None
    assert test is not None
    assert (len(train), len(test)) == (4096, 512)
    assert not {row["question"] for row in train} & {row["question"] for row in test}
    for row in train[:20]:
        problem = CountdownEnv.from_dict({key: row[key] for key in ("numbers", "target")}).problem
        (solution, *_) = solutions(problem, "+-")
        assert row["nums"] == row["numbers"]
        assert countdown_reward_fn(row, f"<answer>{solution}</answer>").reward == 1.0
    DatasetRegistry.register_dataset("countdown", train[:2], "train")
    assert len(PublishedRegistry.load_dataset("countdown", "train") or ()) == 2


@pytest.mark.parametrize("name", ["VerlEngine", "TinkerEngine"])
def test_an_engine_that_only_a_run_makes_says_so(name: str) -> None:
    engine = imported("rllm.engine", name)
    assert callable(engine)
    with pytest.raises(ConfigError, match="AgentTrainer"):
        engine(config=None)


def test_trainers_are_importable_from_their_published_places_and_nothing_is_said_of_it() -> None:
    program = """
from rllm.trainer import *
from rllm import AgentTrainer as of_the_package
from rllm.trainer.agent_trainer import AgentTrainer as of_the_file
from rllm.trainer.distill import AgentDistillTrainer as of_the_other_file
import rllm.trainer
assert AgentTrainer is of_the_package is of_the_file
assert AgentDistillTrainer is of_the_other_file
assert {"AgentTrainer", "AgentDistillTrainer", "AgentSFTTrainer"} <= {*dir(rllm.trainer)}
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
