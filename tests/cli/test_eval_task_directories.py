"""`rllm eval FOLDER` of ten tasks, two of which cannot be run here: eight are played, two are counted."""

import json
from collections.abc import Callable
from pathlib import Path

from click.testing import Result

TOML = "[verifier]\ntimeout_sec = 20\n"
DOCKERFILE = "FROM debian\nWORKDIR /app\nCOPY words.txt .\n"


def task_at(path: Path, *, toml: str = TOML, dockerfile: str = DOCKERFILE) -> None:
    for folder in ("environment", "tests"):
        (path / folder).mkdir(parents=True)
    (path / "task.toml").write_text(toml)
    (path / "instruction.md").write_text("Sort words.txt.")
    (path / "environment" / "Dockerfile").write_text(dockerfile)
    (path / "environment" / "words.txt").write_text("pear\napple\n")
    (path / "tests" / "test.sh").write_text("echo 0.25 > /logs/verifier/reward.txt\n")


def test_eight_of_ten_are_played_and_two_are_counted_with_their_reasons(
    rllm: Callable[..., Result], tmp_path: Path, bubblewrap: str
) -> None:
    for number in range(10):
        path = tmp_path / "ten" / f"task-{number}"
        network = '[environment]\nnetwork_mode = "public"\n' if number == 7 else ""
        image = "FROM alpine\n" if number == 3 else DOCKERFILE
        task_at(path, toml=TOML + network, dockerfile=image)
    words = ("eval", "ten", "--model", "builtin:tiny", "--sampling", "max_tokens=4", "--threads", "1")
    ended = rllm(*words, "--json")
    assert ended.exit_code == 0, ended.output
    report = json.loads(ended.stdout)
    sampled, skipped = report["sampled"], report["stamp"]["skipped"]
    assert (sampled["attempted"], sampled["scored"], sampled["mean_reward"]) == (8, 8, 0.25)
    assert sorted(skipped) == ["task-3", "task-7"]
    assert "`environment.network_mode` is 'public'" in skipped["task-7"]
    shown = " ".join(rllm(*words).output.split())
    assert "task-3:" in shown
    assert "Dockerfile:1: `FROM alpine`" in shown
