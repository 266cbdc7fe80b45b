"""Several data sets in one run: every row is played, and each set as often as its weight says."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.build.configs import ProgramNames, program_config
from rllm.build.rows import held_out_name, held_out_rows, training_rows
from rllm.build.training import _by_source, build_run
from rllm.data.mixture import MAX_TASKS, mix, parse_mixture
from rllm.errors import ConfigError
from rllm.rewards.evaluator import Evaluator
from rllm.types.episode import Episode
from rllm.types.evaluation import EvalOutput
from rllm.types.task import Task

FLOW = """
def solve(task, config):
    return None

def score(task, episode):
    return 1.0
"""


def tasks(count: int) -> list[Task]:
    return [Task(id=str(number), instruction="") for number in range(count)]


@given(
    st.dictionaries(
        st.text("abc", min_size=1), st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=4
    )
)
def test_every_row_comes_and_sets_come_by_their_weights(sets: dict[str, tuple[int, int]]) -> None:
    weights = {name: float(weight) for name, (_, weight) in sets.items()}
    together = mix({name: tasks(count) for name, (count, _) in sets.items()}, weights)
    assert len({task.id for task in together}) == len(together)
    counts = Counter(task.metadata["dataset"] for task in together)
    passes = max(count / weight for count, weight in sets.values())
    for name, (count, weight) in sets.items():
        assert abs(counts[name] - passes * weight) <= 0.5
        rows = Counter(
            task.id.removeprefix(f"{name}/").split("#")[0]
            for task in together
            if task.metadata["dataset"] == name
        )
        assert len(rows) == count
        assert max(rows.values()) - min(rows.values()) <= 1


def test_what_is_no_mixture_is_refused_with_its_part() -> None:
    assert parse_mixture("rows.jsonl") == parse_mixture("benchmark:gsm8k") == {}
    assert parse_mixture("a.jsonl=3, benchmark:gsm8k=0.5") == {"a.jsonl": 3.0, "benchmark:gsm8k": 0.5}
    for text, word in (
        ("a=1,b", "'b'"), ("a=x,b=1", "'a=x'"), ("a=0,b=1", "'a=0'"), ("a=nan,b=1", "'a=nan'"),
        ("a=inf", "'a=inf'"),
        ("a=1,", "''"), ("=1,a=1", "'=1'"), ("a=1,a=2", "a twice"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=word):
            parse_mixture(text)
    with pytest.raises(ConfigError, match="b has no"):
        mix({"a": tasks(1), "b": []}, {"a": 1.0, "b": 1.0})
    with pytest.raises(ConfigError, match="1,000,000"):
        mix({"a": tasks(100), "b": tasks(1)}, {"a": 1.0, "b": float(MAX_TASKS)})


def test_a_run_plays_and_judges_each_set_as_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flow.py").write_text(FLOW)
    for name, count in (("a", 2), ("b", 3)):
        rows = [{"question": f"{name}{number}"} for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = "a.jsonl=2,b.jsonl=1"
    names: dict[str, Any] = {
        "program": "flow.py:solve",
        "evaluator": "flow.py:score",
        "dataset": dataset,
        "val_dataset": "",
    }
    run = build_run(program_config(ProgramNames(**names)), tmp_path / "run")
    instructions = Counter(task.instruction for task in run.tasks.train)
    assert instructions == {"a0": 3, "a1": 3, "b0": 1, "b1": 1, "b2": 1}
    assert [task.id for task in training_rows(dataset)][:3] == ["a.jsonl/0", "a.jsonl/1", "a.jsonl/0#1"]
    assert held_out_name(dataset) == ""
    with pytest.raises(ConfigError, match="measured"):
        held_out_rows(dataset, 4)


def test_each_task_is_judged_as_its_own_set_does() -> None:
    judge = _by_source(
        {name: Evaluator(lambda task, episode, pay=pay: pay) for name, pay in (("a", 0.25), ("b", 1.0))}
    )
    for name, pay in (("a", 0.25), ("b", 1.0)):
        judgement = judge.evaluate({"dataset": name}, Episode(task_id=name))
        assert isinstance(judgement, EvalOutput)
        assert judgement.reward == pay
