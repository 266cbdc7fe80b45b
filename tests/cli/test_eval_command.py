import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from tests.view.conftest import answers_in

from rllm.store.episodes import EpisodeStore

Rllm = Callable[..., Result]

FEW = ("--num-tasks", "3", "--threads", "1")


def test_a_run_and_its_model_directory_are_the_same_model(finished_run: Any, rllm: Rllm) -> None:
    of_run = rllm("eval", "frozenlake", "--model", finished_run.path, *FEW, "--json")
    of_model = rllm("eval", "frozenlake", "--model", finished_run.path / "model", *FEW, "--json")
    assert of_run.exit_code == of_model.exit_code == 0
    report, other = json.loads(of_run.stdout), json.loads(of_model.stdout)
    assert report["model"] == other["model"] == str(finished_run.path / "model")
    assert report["stamp"] == other["stamp"]
    for way in ("sampled", "greedy"):
        counts = report[way]
        assert {**counts, "latency_s": None} == {**other[way], "latency_s": None}
        assert counts["attempted"] == 3
        assert counts["attempted"] == counts["scored"] + counts["truncated"] + counts["failed"]


def test_the_report_shows_every_count_and_what_to_type_next(finished_run: Any, rllm: Rllm) -> None:
    result = rllm("eval", "frozenlake", "--model", finished_run.path, *FEW, "--split", "validation")
    assert result.exit_code == 0
    for word in (
        "validation tasks",
        "sampled",
        "greedy",
        "attempted",
        "scored",
        "truncated",
        "failed",
        "95 %",
    ):
        assert word in result.stdout
    assert "Next:\n  rllm runs show evals/" in result.stdout


def test_a_run_without_a_trained_model_is_refused(rllm: Rllm, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    result = rllm("eval", "frozenlake", "--model", "run")
    assert result.exit_code == 2
    assert "no trained model" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("frozenlake", "--model", "absent"), "There is no model `absent`"),
        (("frozenlake", "--model", "."), "neither a run nor a model directory"),
        (("frozenlaek", "--model", "absent"), "did you mean `frozenlake`?"),
        (("frozenlake",), "No model is named"),
        (("frozenlake", "--model", "builtin:tiny", "--split", "tset"), "no split `tset`"),
        (("frozenlake", "--model", "builtin:tiny", "--k", "2"), "pass@2 of 1 attempts"),
        (
            ("frozenlake", "--model", "builtin:tiny", "--sampling", "temprature=1"),
            "did you mean `temperature`",
        ),
        (("frozenlake", "--model", "builtin:tiny", "--sampling", "top_p=2"), "`top_p` is 2.0"),
        (("frozenlake", "--model", "builtin:tiny", "--agent", "frozen_lake"), "did you mean `frozenlake`"),
        (("frozenlake", "--model", "builtin:tiny", "--evaluator", "math"), "would be ignored"),
        (("frozenlake", "--model", "builtin:tiny", "--resume"), "no evaluation in"),
        (("--compare", "only-one"), "two stored evaluations"),
        (("--rescore",), "one stored evaluation"),
        (("frozenlake", "--model", "absent", "--num-tasks", "0"), "--num-tasks"),
        (("frozenlake", "--model", "builtin:tiny", "--output", "/proc/x/y"), "/proc/x/y cannot be made"),
        (("half", "--model", "builtin:tiny"), "it has instruction.md, and lacks task.toml, tests/test.sh"),
        (("nowhere/tasks", "--model", "builtin:tiny"), "nor is there such a directory"),
        (("empty", "--model", "builtin:tiny"), "empty holds no task"),
        (("./half/instruction.md", "--model", "builtin:tiny"), "is a file; a task is a directory"),
        (
            ("chats.jsonl", "--model", "builtin:tiny"),
            "chats.jsonl is a file without software-engineering rows",
        ),
    ],
)
def test_bad_words_are_refused(words: tuple[str, ...], message: str, rllm: Rllm, tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "instruction.md").write_text("Do.")
    (tmp_path / "empty").mkdir()
    (tmp_path / "chats.jsonl").write_text('{"messages": []}\n')
    result = rllm("eval", *words)
    assert result.exit_code == 2
    assert message in result.stderr


def test_an_evaluation_is_kept_and_gone_on_with_and_compared(
    finished_run: Any, rllm: Rllm, tmp_path: Path
) -> None:
    words = ("eval", "frozenlake", "--model", finished_run.path, *FEW)
    first = json.loads(rllm(*words, "--output", "one", "--json").stdout)
    assert "is finished" in rllm(*words, "--output", "one").stderr
    again = rllm(*words, "--output", "one", "--json")
    assert again.stderr == ""
    assert json.loads(again.stdout)["sampled"] == first["sampled"]
    with EpisodeStore.open(tmp_path / "one" / "store.sqlite", read_only=True) as store:
        assert store.count("sampled") == store.count("greedy") == 3
    refused = rllm(*words, "--output", "one", "--seed", "7")
    assert refused.exit_code == 2
    assert "`seed` was 0 and is 7" in refused.stderr
    fresh = json.loads(rllm(*words, "--output", "one", "--fresh", "--json").stdout)
    assert fresh["output"] != "one"
    told = rllm("eval", "--compare", "one", fresh["output"], "--json")
    found = json.loads(told.stdout)["comparisons"]
    assert {way: (each["tasks"], each["difference"]) for way, each in found.items()} == {
        "sampled": (3, 0.0),
        "greedy": (3, 0.0),
    }
    html = (tmp_path / "one" / "report.html").read_text()
    (shown, *_) = answers_in(html).values()
    assert shown["stamp"]["name"] == "frozenlake"
    assert {name: shown["report"][name] for name in ("success", "success_interval")} == {
        name: json.loads(again.stdout)["sampled"][name] for name in ("success", "success_interval")
    }
    assert not re.search(r"(src|href)=.?https?:", html)
    again = rllm("eval", "--rescore", "one")
    assert again.exit_code == 2
    assert "names no grader" in again.stderr


ANSWER = "So the answer is \\boxed{4}."


class ConstantServer(BaseHTTPRequestHandler):
    """Says the same to every question."""

    broken = False

    def do_GET(self) -> None:
        self._tell({"object": "list", "data": [{"id": "constant", "object": "model"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.broken:
            self.send_error(401)
            return
        choice = {"index": 0, "message": {"role": "assistant", "content": ANSWER}, "finish_reason": "stop"}
        self._tell(
            {
                "id": "c",
                "object": "chat.completion",
                "model": "constant",
                "choices": [choice],
                "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
            }
        )

    def _tell(self, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: tests read stderr."""


@pytest.fixture(params=[False, True], ids=["working", "refusing"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, bool]]:
    handler = type("Handler", (ConstantServer,), {"broken": request.param})
    made = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}/v1", request.param
    made.shutdown()
    made.server_close()
    thread.join()


def test_a_model_behind_a_server_is_measured_on_questions(
    server: tuple[str, bool], rllm: Rllm, tmp_path: Path
) -> None:
    url, refuses = server
    rows = [{"question": f"2 + {each} = ?", "answer": str(2 + each), "category": "sums"} for each in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = rllm("dataset", "register", "sums", "rows.jsonl", "--evaluator", "math")
    assert made.exit_code == 0, made.stderr
    words = ("eval", "sums", "--base-url", url, "--model", "constant", "--attempts", "2", "--output", "e")
    result = rllm(*words, "--prompt-price", "1", "--json")
    if refuses:
        assert result.exit_code == 2
        assert "refuses the key" in result.stderr
        return
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)["sampled"]
    assert (report["attempted"], report["successes"], report["tasks"]) == (12, 2, 6)
    assert report["tokens"] == {"prompt": 120, "completion": 60}
    assert report["cost"] == pytest.approx(120e-6)
    assert report["pass_at_k"]["2"]["value"] == pytest.approx(1 / 6)
    assert report["majority_at_k"]["2"]["value"] == pytest.approx(1 / 6)
    assert "rllm runs show e" in rllm(*words).stdout  # there is no split to train on
    (tmp_path / "judge.py").write_text("def always(task, episode):\n    return True\n")
    again = rllm("eval", "--rescore", "e", "--evaluator", "judge.py:always", "--json")
    assert json.loads(again.stdout)["reports"]["sampled"]["success"] == 1.0
    assert json.loads(again.stdout)["changed"] == {"sampled": 10}
    compared = rllm("eval", "--compare", "e", "e-rescored")
    assert "differ" in compared.stdout


def test_a_dead_server_ends_it_before_the_first_task(rllm: Rllm, tmp_path: Path) -> None:
    result = rllm("eval", "countdown", "--base-url", "http://127.0.0.1:9/v1", "--model", "m")
    assert result.exit_code == 1
    assert "Nothing was evaluated" in result.stderr
    assert "127.0.0.1:9" in result.stderr
