"""`rllm train --set backend=tinker` against a real service, through the front door.

One run is killed, taken its adapter, robbed of its service, and goes on each time: it ends with one record of
every step.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from rllm.models.directory import load_model
from rllm.store.episodes import EpisodeStore

STEPS = 5
SETTINGS = (
    *("backend=tinker", "lora.rank=8", f"steps={STEPS}", "threads=1", "inference.max_context=256"),
    *("optimizer.name=adamw", "optimizer.learning_rate=3e-3", "optimizer.weight_decay=0"),
    *("warm_start.steps=2", "warm_start.episodes_per_step=8", "checkpoint.every_steps=1"),
    *("rollout.temperature=1", "rollout.tasks_per_step=2", "rollout.group_size=4", "rollout.max_turns=3"),
    *("evaluation.num_tasks=4", "evaluation.every_steps=0", "evaluation.split=validation"),
)
WAIT_S = 900.0


class Run:
    """A run in a process of its own."""

    def __init__(self, model: Path, output: Path, environment: dict[str, str]) -> None:
        self.output = output
        self._words = [sys.executable, "-m", "rllm", "train", "frozenlake", "--model", str(model)]
        self._words += ["--output", str(output)]
        self._words += [word for setting in SETTINGS for word in ("--set", setting)]
        self._environment = os.environ | environment

    def start(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            self._words, env=self._environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def wait_for_step(self, process: "subprocess.Popen[str]", step: int) -> None:
        """Until a step of reinforcement is on record."""
        end = time.monotonic() + WAIT_S
        while step not in [line["step"] for line in self.lines("train")]:
            assert process.poll() is None, process.communicate()[1][-3000:]
            assert time.monotonic() < end, self.lines("train")
            time.sleep(0.2)

    def lines(self, phase: str) -> list[dict[str, Any]]:
        path = self.output / "metrics.jsonl"
        whole = path.read_text().splitlines() if path.exists() else []
        return [line for line in map(_read, whole) if line.get("phase") == phase]

    def checkpoint(self) -> dict[str, Any]:
        """What the newest checkpoint says of the adapter."""
        newest = sorted((self.output / "checkpoints").glob("step-*"))[-1]
        return json.loads((newest / "service.json").read_text())


def _read(line: str) -> dict[str, Any]:
    try:
        return json.loads(line)
    except ValueError:  # it is being written
        return {}


def error_of(process: "subprocess.Popen[str]") -> str:
    """The one sentence that a run which failed ends with."""
    error = process.communicate(timeout=WAIT_S)[1]
    assert process.returncode == 1, error
    assert "Traceback" not in error, error
    ends = [line for line in error.splitlines() if line.startswith("error: ")]
    assert ends == error.splitlines()[-1:], error
    print(error)
    return ends[0]


def post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=30):
        pass


def test_a_run_goes_on_after_kill_9_after_an_error_and_after_the_loss_of_its_service(
    service: Any, model: Path, tmp_path: Path
) -> None:
    run = Run(model, tmp_path / "run", service.environment)

    first = run.start()
    run.wait_for_step(first, 0)
    first.send_signal(signal.SIGKILL)
    first.communicate()

    second = run.start()
    run.wait_for_step(second, 1)
    adapter = run.checkpoint()["path"].split("/")[2]
    post(f"{service.base_url}/api/v1/unload_model", {"model_id": adapter})
    assert f"{service.base_url} could not " in error_of(second)

    third = run.start()
    run.wait_for_step(third, 2)
    service.kill()
    message = error_of(third)
    assert f"{service.base_url} " in message

    service.start()
    assert subprocess.run(run._words, env=run._environment, check=False, timeout=WAIT_S).returncode == 0
    require_one_record(run)


def require_one_record(run: Run) -> None:
    """Of every step, as if nothing had happened."""
    train = run.lines("train")
    assert [line["step"] for line in train] == list(range(STEPS))
    # Two updates of the warm start, two of each step: none is lost, none is done twice.
    assert [line["policy_version"] for line in train] == [2 + 2 * (step + 1) for step in range(STEPS)]
    assert all(line["canary_gap"] < 1e-3 for line in train)
    with EpisodeStore.open(run.output / "store.sqlite", read_only=True) as store:
        for line in train:
            episodes = list(store.episodes("train", line["step"]))
            assert len(episodes) == 8
            steps = [step for each in episodes for one in each.trajectories for step in one.steps]
            sampled = [step.model_output for step in steps]
            assert sum(len(each.completion_ids) for each in sampled) == line["tokens.sampled"]
            versions = {version for each in sampled for version in each.policy_versions}
            assert versions == {line["policy_version"] - 2}
    assert json.loads((run.output / "adapter" / "service.json").read_text())["sampler"].startswith(
        "tinker://"
    )
    assert load_model(run.output / "model").num_parameters > 0
    summary = json.loads((run.output / "summary.json").read_text())
    assert summary["sampled_tokens"] == sum(line["tokens.sampled"] for line in train)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TINKER_BASE_URL", "", "TINKER_BASE_URL is not set"),
        (
            "TINKER_BASE_URL",
            "http://127.0.0.1:9",
            "No Tinker service answers at TINKER_BASE_URL=http://127.0",
        ),
        ("TINKER_API_KEY", "", "TINKER_API_KEY is not set"),
    ],
)
def test_without_a_service_nothing_begins(
    variable: str, value: str, message: str, service: Any, model: Path, tmp_path: Path
) -> None:
    run = Run(model, tmp_path / "run", service.environment | {variable: value})
    error = finished(run)
    assert message in error
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_model_that_the_service_does_not_serve_is_refused_with_those_it_serves(
    service: Any, model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "river"
    other.symlink_to(model)
    error = finished(Run(other, tmp_path / "run", service.environment))
    assert "no model `river`" in error
    assert str(model) in error


def test_another_tokenizer_under_the_name_of_the_model_is_refused(
    service: Any, model: Path, tmp_path: Path
) -> None:
    other = tmp_path / model.name
    other.mkdir()
    for path in model.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "tokenizer differs" in finished(Run(other, tmp_path / "run", service.environment))


def finished(run: Run) -> str:
    """What a run that was refused says."""
    process = run.start()
    error = process.communicate(timeout=WAIT_S)[1]
    assert process.returncode == 2, error
    return " ".join(error.split())
