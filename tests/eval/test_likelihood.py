"""Choices that are compared by their likelihood, and worked examples before a question."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM, AutoTokenizer

from rllm.cli.main import rllm as front_door
from rllm.data.registry import DatasetRegistry
from rllm.errors import ConfigError
from rllm.eval.catalogue import benchmark_named
from rllm.eval.few_shot import example_places, with_examples
from rllm.eval.likelihood import READINGS
from rllm.eval.tasks import benchmark_tasks
from rllm.store.episodes import EpisodeStore

Rllm = Callable[..., Result]
CAPITALS = {
    "France": "Paris",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Egypt": "Cairo",
    "Cuba": "Havana",
    "Iran": "Tehran",
    "Chile": "Santiago",
    "Ghana": "Accra",
}


def _rows(countries: list[str], prefix: str = "") -> list[dict[str, Any]]:
    capitals = list(CAPITALS.values())
    rows: list[dict[str, Any]] = []
    for place, country in enumerate(countries):
        right = CAPITALS[country]
        others = [capitals[(place + shift) % 10] for shift in (2, 5, 7)]
        choices = sorted({right, *others})
        rows.append(
            {
                "question": f"{prefix}What is the capital of {country}?",
                "choices": choices,
                "answer": "ABCD"[choices.index(right)],
            }
        )
    return rows


@pytest.fixture
def rllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rllm:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    for split, countries in (("test", list(CAPITALS)[:6]), ("train", list(CAPITALS)[6:])):
        rows = _rows(countries)
        Path(f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def call(*words: str) -> Result:
        return CliRunner().invoke(front_door, list(words), prog_name="rllm", catch_exceptions=False)

    for split in ("test", "train"):
        words = (
            "dataset",
            "register",
            "capitals",
            f"{split}.jsonl",
            "--split",
            split,
            "--evaluator",
            "choice",
        )
        assert call(*words).exit_code == 0
    assert call("model", "create", "tiny").exit_code == 0
    return call


def _by_transformers(directory: str, context: str, choice: str) -> float:
    """The log-probability of a choice behind a context, by transformers alone."""
    tokenizer, model = (
        AutoTokenizer.from_pretrained(directory),
        AutoModelForCausalLM.from_pretrained(directory),
    )
    start = len(tokenizer.encode(context, add_special_tokens=False))
    ids = torch.tensor([tokenizer.encode(f"{context} {choice}", add_special_tokens=False)])
    with torch.no_grad():
        logprobs = model(ids).logits[0].log_softmax(-1)
    return float(logprobs[range(start - 1, ids.shape[1] - 1), ids[0, start:]].sum())


@pytest.mark.parametrize("few_shot", [0, 2])
def test_the_choice_is_the_likeliest_continuation_under_each_reading(rllm: Rllm, few_shot: int) -> None:
    ended = rllm(
        *("eval", "capitals", "--model", "tiny", "--likelihood", "character", "--output", "evaluated"),
        *("--few-shot", str(few_shot), "--json"),
    )
    assert ended.exit_code == 0
    report = json.loads(ended.stdout)
    assert set(report["likelihood"]["readings"]) == set(READINGS)
    assert report["stamp"]["likelihood"] == "character"
    assert report["stamp"].get("few_shot", 0) == few_shot
    with EpisodeStore.open(Path("evaluated/store.sqlite"), read_only=True) as store:
        episodes = list(store.episodes("likelihood"))
    assert len(episodes) == 6
    for episode in episodes:
        context = episode.task["context"]
        assert context.count("Question: ") == 1 + few_shot
        assert context.endswith("?\nAnswer:")
        step = episode.trajectories[0].steps[0]
        scored = {choice["text"]: choice for choice in step.info["choices"]}
        expected = {text: _by_transformers("tiny", context, text) for text in scored}
        assert {text: choice["logprob"] for text, choice in scored.items()} == pytest.approx(
            expected, abs=1e-3
        )
        per_character = {text: value / len(text) for text, value in expected.items()}
        assert step.model_response == max(per_character, key=lambda text: per_character[text])
        right = episode.task["choices"]["ABCD".index(episode.task["grading"]["answer"])]
        assert episode.is_correct == (step.model_response == right)
    # The same command resumes what is there, and finds nothing to do.
    assert (
        rllm(
            *("eval", "capitals", "--model", "tiny", "--likelihood", "character"),
            "--output",
            "evaluated",
            "--few-shot",
            str(few_shot),
        ).exit_code
        == 0
    )


def test_examples_come_from_the_training_split_by_the_seed_and_stand_before_the_question(rllm: Rllm) -> None:
    spec = benchmark_named("capitals")
    tasks = benchmark_tasks(spec, "test")
    shown = with_examples(tasks, spec, "test", 3, seed=1)
    assert shown == with_examples(tasks, spec, "test", 3, seed=1)
    assert shown != with_examples(tasks, spec, "test", 3, seed=2)
    trained = {row["question"] for row in DatasetRegistry.load_dataset("capitals", "train") or ()}
    for task, with_shown in zip(tasks, shown, strict=True):
        messages = with_shown["messages"]
        assert [each["role"] for each in messages] == ["user", "assistant"] * 3 + ["user"]
        assert {each["content"] for each in messages[:-1] if each["role"] == "user"} <= trained
        assert all(each["content"].startswith("<answer>") for each in messages[1::2])
        assert messages[-1]["content"] == task["question"]


def test_examples_of_the_measured_split_are_refused(rllm: Rllm, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"few-shot.*train is measured"):
        example_places(benchmark_named("capitals"), "train", 1, 0)
    with pytest.raises(ConfigError, match="has 4 rows"):
        example_places(benchmark_named("capitals"), "test", 5, 0)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("capitals", "--model", "tiny", "--likelihood", "sum", "--sampling", "temperature=1"), "--sampling"),
        (("capitals", "--model", "tiny", "--likelihood", "sum", "--attempts", "2"), "--attempts"),
        (
            ("capitals", "--model", "m", "--base-url", "http://127.0.0.1:9/v1", "--likelihood", "sum"),
            "server",
        ),
        (("frozenlake", "--model", "tiny", "--likelihood", "sum"), "world"),
        (("frozenlake", "--model", "tiny", "--few-shot", "1"), "world"),
        (("arithmetic", "--model", "tiny", "--likelihood", "sum"), "no choices|world"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_has_no_meaning_beside_it_is_refused_before_any_work(
    rllm: Rllm, words: tuple[str, ...], named: str
) -> None:
    ended = rllm("eval", *words)
    assert ended.exit_code == 2
    assert any(word in ended.output for word in named.split("|"))
