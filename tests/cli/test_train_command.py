import hashlib
import json
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from rllm.models.builtin import create_model
from rllm.store.run_directory import RunDirectory

Rllm = Callable[..., Result]


def contents(directory: Path) -> dict[str, str]:
    """File to hash, but for the lock, which every start takes, and what SQLite keeps beside a store."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != "lock" and not path.name.endswith(("-shm", "-wal"))
    }


def refused(result: Result, *words: str) -> bool:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    message = " ".join(result.stderr.split())
    assert [word for word in words if word not in message] == [], message
    return True


def test_a_run_ends_with_one_json_object_that_is_its_summary(finished_run: Any) -> None:
    assert finished_run.returncode == 0, finished_run.stderr
    result = json.loads(finished_run.stdout)
    assert result.pop("run") == str(finished_run.path)
    assert result == json.loads((finished_run.path / "summary.json").read_text())
    for name in ("untrained", "before", "after"):
        low, high = result[name]["success_interval"]
        assert 0.0 <= low <= result[name]["success"] <= high <= 1.0
    assert "Traceback" not in finished_run.stderr
    assert "train" in finished_run.stderr, "the live view goes to stderr"


def test_a_finished_run_prints_its_result_again_and_is_left_as_it_is(finished_run: Any, rllm: Rllm) -> None:
    before = contents(finished_run.path)
    result = rllm(*finished_run.words, "--output", finished_run.path)
    assert result.exit_code == 0
    for line in ("untrained", "warm start", "trained", "sampled", "greedy", "Skill", "curve.png"):
        assert line in result.stdout
    assert "Success on 4 held-out tasks (4 distinct)" in result.stdout
    assert "below 200" in result.stdout
    assert "Skill was gained" not in result.stdout, "four lakes prove nothing"
    assert f"rllm eval frozenlake --model {finished_run.path}" in result.stdout
    assert f"rllm runs show {finished_run.path} --episode" in result.stdout
    assert "--fresh" in result.stderr
    assert contents(finished_run.path) == before


def test_a_stopped_run_goes_on_to_the_result_it_would_have_had(
    finished_run: Any, stopped_run: Path, rllm: Rllm
) -> None:
    result = rllm(*finished_run.words, "--output", stopped_run, "--json")
    assert result.exit_code == 0
    assert "it goes on" in result.stderr
    resumed, whole = json.loads(result.stdout), json.loads(finished_run.stdout)
    for name in ("untrained", "before", "after"):
        assert resumed[name]["success"] == whole[name]["success"]


def test_another_configuration_is_refused_by_a_run_that_is_there(finished_run: Any, rllm: Rllm) -> None:
    words = [*finished_run.words, "--set", "optimizer.learning_rate=0.5", "--output", finished_run.path]
    assert refused(rllm(*words), "optimizer.learning_rate", "0.5 here")


def test_a_dry_run_with_other_settings_is_never_refused_by_a_run_that_is_there(
    finished_run: Any, rllm: Rllm
) -> None:
    words = [*finished_run.words, "--output", finished_run.path, "--dry-run", "--json"]
    assert json.loads(rllm(*words).stdout)["conflict"] is None
    changed = rllm(*words, "--set", "optimizer.learning_rate=0.5")
    assert changed.exit_code == 0
    plan = json.loads(changed.stdout)
    assert plan["config"]["optimizer"]["learning_rate"] == 0.5
    assert "optimizer.learning_rate" in plan["conflict"]
    assert "of its own" in rllm(*words[:-1], "--set", "optimizer.learning_rate=0.5").stdout


def test_a_dry_run_prints_the_resolved_tree_and_writes_nothing(rllm: Rllm, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[optimizer]\nlearning_rate = 0.25\n")
    words = ("train", "frozenlake", "--config", "mine.toml", "--set", "steps=7", "--seed", "3", "--dry-run")
    shown = rllm(*words)
    assert shown.exit_code == 0
    for line in (
        "runs/frozenlake-seed3",
        "steps = 7",
        "learning_rate = 0.25",
        "derived",
        "episodes_per_step",
    ):
        assert line in shown.stdout
    plan = json.loads(rllm(*words, "--json").stdout)
    assert plan["config"]["seed"] == 3
    assert plan["config"]["optimizer"]["learning_rate"] == 0.25
    assert plan["derived"]["episodes_in_total"] == 7 * plan["derived"]["episodes_per_step"]
    assert plan["run"] == "runs/frozenlake-seed3"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


def test_a_dry_run_refuses_every_name_that_a_run_would_not_find(rllm: Rllm, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def weigh(rewards, context):\n    return rewards - rewards.mean()\n")
    (tmp_path / "empty").mkdir()
    misspelt = {
        "algorithm.loss=mine.py:wiegh": "wiegh",
        "algorithm.loss=yours.py:weigh": "yours.py",
        "algorithm.estimator=mine.py:wiegh": "wiegh",
        "model.path=builtin:tyni": "builtin:tyni",
        "model.path=bultin:tiny": "bultin:tiny",
        "model.path=nowhere": "nowhere is no model directory",
        "model.path=empty": "empty is no model directory",
        "model.device=cdua": "cdua",
    }
    for setting, named in misspelt.items():
        words = ("train", "frozenlake", "--set", setting)
        assert refused(rllm(*words, "--dry-run"), named) == refused(rllm(*words), named), setting
    folders = {path.name for path in tmp_path.iterdir() if path.is_dir()} - {"__pycache__"}  # of mine.py
    assert folders in ({"empty"}, {"empty", "runs"})
    assert (
        rllm("train", "frozenlake", "--set", "algorithm.estimator=mine.py:weigh", "--dry-run").exit_code == 0
    )


def test_one_rank_alone_tries_the_directory_so_that_no_rank_removes_what_another_made(
    rllm: Rllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    words = ("train", "frozenlake", "--dry-run", "--output", "/dev/null/run")
    monkeypatch.setenv("RANK", "0")
    assert "/dev/null/run cannot be made" in rllm(*words).stderr
    monkeypatch.setenv("RANK", "1")
    assert rllm(*words).exit_code == 0


def test_a_world_without_training_settings_says_what_to_name(rllm: Rllm) -> None:
    said = rllm("train", "tic-tac-toe", "--dry-run")
    assert said.exit_code == 0
    assert "`tic-tac-toe` is for measuring" in said.stderr
    assert "`warm_start.steps`" in said.stderr
    assert rllm("train", "tic-tac-toe", "--set", "steps=3", "--dry-run").stderr == ""
    assert rllm("train", "frozenlake", "--dry-run").stderr == ""


def test_fresh_takes_the_first_free_name_and_deletes_nothing(rllm: Rllm, tmp_path: Path) -> None:
    words = ("train", "frozenlake", "--fresh", "--dry-run", "--json")
    names = []
    for _ in range(3):
        names.append(json.loads(rllm(*words).stdout)["run"])
        (tmp_path / names[-1]).mkdir(parents=True)
    assert names == ["runs/frozenlake-seed0", "runs/frozenlake-seed0-2", "runs/frozenlake-seed0-3"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("frozenlaek",), "did you mean `frozenlake`?"),
        (("frozenlake", "--set", "optimizer.learning_rat=1"), "did you mean `optimizer.learning_rate`?"),
        (("frozenlake", "--set", "rollout.group_size=1"), "set it to 2 or more"),
        (("frozenlake", "--set", "steps=many"), "`steps` is 'many'"),
        (("frozenlake", "--set", "task.environment_args.size=99"), "`size` is 99"),
        (("frozenlake", "--set", "task.environment=lake"), "There is no environment `lake`"),
        (("frozenlake", "--config", "absent.toml"), "absent.toml"),
        (("frozenlake", "--set", "nonsense"), "section.key=value"),
        (("frozenlake", "--set", "model.path=absent"), "absent is no model directory"),
        (
            ("frozenlake", "--set", "model.path=builtin:huge"),
            "`model.path` is 'builtin:huge'; write one of",
        ),
        (("frozenlake", "--set", "inference.max_context=20"), "`inference.max_context` is 20"),
        (("frozenlake", "--set", "inference.max_context=99999"), "`inference.max_context` is 99999"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[1:]) or value[0],
)
def test_what_cannot_be_honoured_is_refused_and_leaves_no_run_behind(
    words: tuple[str, ...], message: str, rllm: Rllm, tmp_path: Path
) -> None:
    assert refused(rllm("train", *words, "--output", "lake"), message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("tokenizer.json", "has no tokenizer"),
        ("model.safetensors", "has no weights"),
        ("config.json", "is no model directory"),
    ],
)
def test_a_model_directory_that_lacks_a_file_is_refused(
    file: str, message: str, rllm: Rllm, tmp_path: Path
) -> None:
    create_model(tmp_path / "model")
    (tmp_path / "model" / file).unlink()
    words = ("train", "frozenlake", "--set", "model.path=model", "--set", "threads=1", "--output", "lake")
    assert refused(rllm(*words), "model", message)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_whose_weights_are_cut_off_is_refused(rllm: Rllm, tmp_path: Path) -> None:
    create_model(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    words = ("train", "frozenlake", "--set", "model.path=model", "--set", "threads=1", "--output", "lake")
    assert refused(rllm(*words), "model.safetensors cannot be read")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_directory_that_was_there_before_stays_when_its_run_is_refused(rllm: Rllm, tmp_path: Path) -> None:
    (tmp_path / "lake").mkdir()
    assert refused(rllm("train", "frozenlake", "--set", "inference.max_context=20", "--output", "lake"))
    assert list((tmp_path / "lake").iterdir()) == []


def test_a_model_directory_is_not_taken_for_a_run(rllm: Rllm, tmp_path: Path) -> None:
    create_model(tmp_path / "model")
    before = contents(tmp_path / "model")
    assert refused(rllm("train", "frozenlake", "--output", "model"), "--output")
    assert refused(rllm("runs", "show", "model"), "it is a model directory")
    assert contents(tmp_path / "model") == before


def test_a_run_that_another_process_writes_is_refused(
    finished_run: Any,
    stopped_run: Path,
    start_rllm: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
) -> None:
    with RunDirectory.create_or_open(stopped_run):
        before = contents(stopped_run)
        process = start_rllm(*finished_run.words, "--output", stopped_run, cwd=tmp_path)
        stdout, stderr = process.communicate()
        assert contents(stopped_run) == before
    assert (process.returncode, stdout) == (2, "")
    assert "written by process" in stderr


def test_a_corrupt_checkpoint_is_refused_and_nothing_is_changed(
    finished_run: Any, stopped_run: Path, rllm: Rllm
) -> None:
    newest = max((stopped_run / "checkpoints").iterdir())
    weights = newest / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    before = contents(stopped_run)
    words = [*finished_run.words, "--output", stopped_run, "--json"]
    result = rllm(*words)
    assert result.exit_code == 2
    error = json.loads(result.stderr.splitlines()[-1])["error"]
    assert error["type"] == "CheckpointError"
    assert str(newest) in error["message"]
    assert contents(stopped_run) == before
    shutil.rmtree(newest)  # as the message says
    assert rllm(*words).exit_code == 0


# Ctrl-C is what a run on rows is stopped with, in test_sft_command.py: one way out for both.
@pytest.mark.parametrize("by", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_an_interrupted_run_says_how_to_go_on_and_does(
    start_rllm: Callable[..., subprocess.Popen[str]],
    tiny_settings: list[str],
    rllm: Rllm,
    tmp_path: Path,
    by: signal.Signals,
) -> None:
    words = ["train", "frozenlake", *tiny_settings, "--set", "steps=100000", "--output", "lake"]
    process = start_rllm(*words, cwd=tmp_path)
    assert process.stderr is not None
    while not process.stderr.readline().startswith("train"):
        assert process.poll() is None, "it was to run until it is interrupted"
    process.send_signal(by)
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stdout) == (130, "")
    assert "Go on from the last checkpoint with: rllm train frozenlake --output lake" in stderr
    assert "Traceback" not in stderr
    (listed,) = json.loads(rllm("runs", "list", ".", "--json").stdout)["runs"]
    assert (listed["state"], listed["pid"]) == ("stopped", None)


def test_the_flags_of_eval_are_keys_of_training(rllm: Rllm) -> None:
    flags = (
        *("--agent", "conversation", "--split", "validation", "--max-examples", "50", "--attempts", "6"),
        *(
            "--concurrency",
            "7",
            "--threads",
            "1",
            "--sampling",
            "temperature=0.9",
            "--sampling",
            "max_tokens=3",
        ),
    )
    told = rllm("train", "countdown", *flags, "--set", "rollout.group_size=5", "--dry-run", "--json")
    assert told.exit_code == 0, told.stderr
    config = json.loads(told.stdout)["config"]
    assert config["task"]["num_train_tasks"] == 50
    assert (config["task"]["agent"], config["evaluation"]["split"]) == ("conversation", "validation")
    rollout = config["rollout"]
    assert (rollout["group_size"], rollout["num_parallel"]) == (5, 7), "--set wins"
    assert (rollout["temperature"], rollout["max_tokens_per_turn"], config["threads"]) == (0.9, 3, 1)
    refused = rllm("train", "countdown", "--sampling", "stop=x", "--dry-run")
    assert refused.exit_code == 2
    assert "temperature, top_p, top_k, max_tokens" in refused.stderr


def test_a_dry_run_refuses_what_one_process_cannot_do(rllm: Rllm, tmp_path: Path) -> None:
    shard = ("--set", "distributed.strategy=shard")
    assert refused(rllm("train", "frozenlake", *shard, "--output", tmp_path, "--dry-run"), "one process")
    two = rllm("train", "frozenlake", *shard, "--nproc", "2", "--output", tmp_path, "--dry-run", "--json")
    assert two.exit_code == 0, two.stderr
    (trainer,) = json.loads(two.stdout)["processes"]
    assert (trainer["name"], trainer["number"], trainer["cores"]) == ("trainer", 2, 0)
    assert trainer["ports"][0] == "a free port of 127.0.0.1 (rank 0, where ranks meet)"
    tensor = ("--set", "distributed.tensor_parallel=2")
    assert refused(rllm("train", "frozenlake", *tensor, "--output", tmp_path, "--dry-run"), "multiple")


def test_a_model_that_cannot_fit_is_refused_by_a_dry_run_and_a_run_unless_it_is_forced(
    rllm: Rllm, tmp_path: Path
) -> None:
    """The plan may be one for another machine."""
    create_model(tmp_path / "large", "tiny")
    path = tmp_path / "large" / "config.json"
    sizes = {"hidden_size": 65_536, "head_dim": 65_536, "num_hidden_layers": 900}
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    words = ("train", "frozenlake", "--model", tmp_path / "large")
    assert rllm(*words, "--dry-run", "--force").exit_code == 0
    assert refused(rllm(*words), "GB", "the machine has", "`lora.rank`")
    planned = rllm(*words, "--dry-run")  # the plan is printed all the same
    assert planned.exit_code == 2
    assert "`lora.rank`" in planned.stderr


def test_a_context_beyond_the_model_s_is_refused_by_a_dry_run_too(rllm: Rllm) -> None:
    words = ("train", "frozenlake", "--set", "inference.max_context=4096")
    expected = ("`inference.max_context` is 4096", "the model has 2048 positions", "set it to 2048 or less")
    assert refused(rllm(*words, "--dry-run"), *expected) == refused(rllm(*words), *expected)


LETTERS = """
import re, rllm
from openai import OpenAI

@rllm.rollout
def solve(task, config):
    with OpenAI(base_url=config.base_url, api_key="any") as client:
        messages = [{"role": "user", "content": str(task.instruction)}]
        client.chat.completions.create(model=config.model, messages=messages, max_tokens=2)

@rllm.evaluator
def score(task, episode):
    return (episode.trajectories[0].steps[0].response_ids[0] % 5) / 4
"""


def test_a_preview_shows_answers_and_figures_and_keeps_nothing(rllm: Rllm, tmp_path: Path) -> None:
    (tmp_path / "letters.py").write_text(LETTERS)
    (tmp_path / "tasks.jsonl").write_text(
        "".join(f'{{"id": "{n}", "question": "say {n}"}}\n' for n in range(9))
    )
    words = ["train", "letters.py:solve", "--evaluator", "letters.py:score", "--dataset", "tasks.jsonl"]
    words += ["--set", "threads=1", "--output", "run", "--preview"]
    shown = rllm(*words)
    assert shown.exit_code == 0, shown.output
    for line in ("say 3", "of 8 attempts", "pass@8", "tasks with different rewards  ", "8 of 8", "can learn"):
        assert line in shown.stdout
    assert "rllm train letters.py:solve" in shown.stdout
    assert "--preview" not in shown.stdout.partition("Next:")[2]
    facts = json.loads(rllm(*words, "--json").stdout)
    kept = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert kept == {"letters.py", "tasks.jsonl"}
    assert facts["attempts"] == len(facts["episodes"]) == 64
    assert facts["pass_at_1"] == pytest.approx(
        sum(attempt["is_correct"] for attempt in facts["episodes"]) / 64
    )
    assert facts["verdict"] == "good"
    assert facts["memory"]["moments"]


def test_a_preview_is_refused_where_it_cannot_be_of_the_run(rllm: Rllm) -> None:
    assert refused(rllm("train", "frozenlake", "--preview", "--nproc", "2"), "--preview", "this run has 2")
    assert refused(rllm("train", "frozenlake", "--preview", "--dry-run"), "--preview", "--dry-run")
