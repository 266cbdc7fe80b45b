"""`rllm eval` with a model on a server: agents, programs and judges of one's own, and what goes wrong."""

import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from tests.view.conftest import answers_in

from rllm.eval.evaluation import results_in
from rllm.store.episodes import EpisodeStore

Rllm = Callable[..., Result]


@dataclass(slots=True)
class Told:
    """What the server was asked, and how it answers."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    headers: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    status_of: Callable[[str], int] = lambda question: 200
    wait_s: float = 0.0
    held: threading.Event | None = None
    """Questions wait for it, but for the trial before the first task."""
    at_once: int = 0
    most_at_once: int = 0
    lock: Any = field(default_factory=threading.Lock)

    @property
    def questions(self) -> list[str]:
        """Without the trial before the first task."""
        return [asked for asked in map(question_of, self.bodies) if "say hi" not in asked.lower()]


def question_of(body: dict[str, Any]) -> str:
    content = body["messages"][-1]["content"]
    return content if isinstance(content, str) else content[-1]["text"]


def answer_to(question: str, system: str) -> str:
    """Adds right where the second number is even; judges whatever it is shown as right."""
    if seal := re.search(r'"seal": "([0-9a-f]{8})"', system):
        return json.dumps({"seal": seal[1], "reason": "as I see it", "equivalent": True})
    numbers = [int(each) for each in re.findall(r"\d+", question)]
    wrong = len(numbers) == 2 and numbers[1] % 2
    return f"\\boxed{{{sum(numbers) + wrong}}}"


class Handler(BaseHTTPRequestHandler):
    """Chat completions and Anthropic's messages."""

    told: Told

    def do_GET(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.told.lock:
            self.told.bodies.append(body)
            self.told.headers.append(dict(self.headers))
            self.told.at_once += 1
            self.told.most_at_once = max(self.told.most_at_once, self.told.at_once)
        time.sleep(self.told.wait_s)
        if self.told.held is not None and "say hi" not in question_of(body).lower():
            self.told.held.wait()
        with self.told.lock:
            self.told.at_once -= 1
        status = self.told.status_of(question_of(body))
        if status != 200:
            self._tell({"error": {"message": "not today"}}, status)
            return
        system = next((each["content"] for each in body["messages"] if each["role"] == "system"), "")
        system += str(body.get("system", ""))  # where Anthropic's protocol has it
        said = answer_to(question_of(body), system)
        if self.path.endswith("/messages"):
            self._tell(
                {
                    "id": "m",
                    "type": "message",
                    "role": "assistant",
                    "model": body["model"],
                    "content": [{"type": "text", "text": said}],
                    "stop_reason": "end_turn",
                    "stop_sequence": None,
                    "usage": {"input_tokens": 10, "output_tokens": 5},
                }
            )
            return
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        self._tell(
            {
                "id": f"c{len(self.told.bodies)}",
                "object": "chat.completion",
                "model": body["model"],
                "choices": [choice],
                "usage": usage,
            }
        )

    def _tell(self, value: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: tests read stderr."""


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: who is no longer waited for says so."""


@pytest.fixture
def served() -> Iterator[Told]:
    told = Told()
    made = Server(("127.0.0.1", 0), type("Bound", (Handler,), {"told": told}))
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    told.url = f"http://127.0.0.1:{made.server_port}/v1"
    yield told
    made.shutdown()
    made.server_close()


@pytest.fixture
def sums(rllm: Rllm, tmp_path: Path) -> Path:
    """Eight registered questions, of which the server answers four right."""
    rows = [{"question": f"{each} + {each % 2} = ?", "answer": str(each + each % 2)} for each in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = rllm("dataset", "register", "sums", "rows.jsonl", "--evaluator", "math")
    assert made.exit_code == 0, made.stderr
    return tmp_path


def _eval(rllm: Rllm, served: Told, *words: str, name: str = "sums") -> dict[str, Any]:
    done = rllm("eval", name, "--base-url", served.url, "--model", "m", "--output", "e", *words, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_an_evaluator_of_a_file_judges_the_answers_and_a_row_that_it_cannot_judge_fails(
    rllm: Rllm, served: Told, sums: Path
) -> None:
    (sums / "judge.py").write_text(
        "async def score(task, episode):\n"
        "    said = episode.trajectories[0].steps[-1].model_response\n"
        "    if '3 + 1' in task['question']:\n"
        "        raise ZeroDivisionError('this row')\n"
        "    return (0.5, 'boxed' in said)\n"
    )
    report = _eval(rllm, served, "--evaluator", "judge.py:score")["sampled"]
    assert (report["attempted"], report["scored"], report["failed"]) == (8, 7, 1)
    assert (report["successes"], report["success"], report["success_without_failed"]) == (7, 7 / 8, 1.0)
    (failure,) = report["failures"]
    assert failure.startswith("infrastructure_failure: score could not judge: ZeroDivisionError: this row")
    assert len(served.questions) == 8
    shown = rllm("eval", "sums", "--base-url", served.url, "--model", "m", "--output", "e", "--evaluator",
                 "judge.py:score")  # fmt: skip
    assert "score could" in shown.stdout
    assert "same command" in shown.stdout
    assert len(served.questions) == 9


def test_a_server_that_hangs_fails_every_episode_with_exit_code_1_and_the_same_command_tries_again(
    rllm: Rllm, served: Told, sums: Path
) -> None:
    served.held = threading.Event()
    words = ("eval", "sums", "--base-url", served.url, "--model", "m", "--output", "e")
    hung = rllm(*words, "--model-timeout", "0.5")
    served.held.set()
    assert hung.exit_code == 1, hung.stderr
    assert "sampled ended: infrastructure_failure 8." in hung.stdout
    assert "8 × infrastructure_failure" in hung.stdout
    assert "no call for 0.5 s" in hung.stdout
    assert "--model-timeout" in hung.stdout
    assert len(served.questions) == 8
    told = _eval(rllm, served)["sampled"]
    assert (told["scored"], told["failed"], told["successes"]) == (8, 0, 4)
    assert told["endings"] == {"env_done": 8}


def test_a_program_behind_a_server_that_hangs_fails_in_the_same_way(
    rllm: Rllm, served: Told, sums: Path
) -> None:
    (sums / "flow.py").write_text(
        "import openai\n"
        "def solve(task, config):\n"
        "    client = openai.OpenAI(base_url=config.base_url, api_key='none')\n"
        "    messages = [{'role': 'user', 'content': task.metadata['question']}]\n"
        "    client.chat.completions.create(model=config.model, messages=messages)\n"
    )
    served.held = threading.Event()
    words = ("flow.py:solve", "--evaluator", "math", "--dataset", "rows.jsonl", "--base-url", served.url)
    hung = rllm("eval", *words, "--model", "m", "--model-timeout", "0.5", "--json")
    served.held.set()
    assert hung.exit_code == 1, hung.stderr
    (report,) = (
        each for each in json.loads(hung.stdout).values() if isinstance(each, dict) and "endings" in each
    )
    assert (report["attempted"], report["failed"]) == (8, 8)
    assert report["endings"] == {"infrastructure_failure": 8}


def test_a_file_that_was_just_measured_is_not_offered_for_training(
    rllm: Rllm, served: Told, sums: Path
) -> None:
    (sums / "flow.py").write_text(FLOW)
    words = ("flow.py:solve", "--evaluator", "math", "--dataset", "rows.jsonl", "--base-url", served.url)
    told = rllm("eval", *words, "--model", "m")
    assert "rllm runs show" in told.stdout
    assert "rllm train" not in told.stdout


@pytest.mark.parametrize("flag", ["--model-timeout", "--episode-timeout"])
def test_a_time_limit_is_above_zero(rllm: Rllm, sums: Path, flag: str) -> None:
    refused = rllm("eval", "sums", "--base-url", "http://127.0.0.1:9/v1", "--model", "m", flag, "0")
    assert refused.exit_code == 2
    assert flag in refused.stderr


def test_a_grader_by_another_name_judges_and_its_fields_are_looked_for_before_anything_is_asked(
    rllm: Rllm, served: Told, sums: Path, bubblewrap: str
) -> None:
    assert _eval(rllm, served, "--evaluator", "exact")["stamp"]["evaluator"] == "exact"
    asked = len(served.bodies)
    refused = rllm("eval", "sums", "--base-url", served.url, "--model", "m", "--evaluator", "code")
    assert refused.exit_code == 2
    assert re.search(r"sums: row 0 has no \w+", refused.stderr)
    assert len(served.bodies) == asked


def test_a_row_that_lacks_a_field_is_named_before_anything_is_asked(
    rllm: Rllm, served: Told, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n{"question": "2 + 2"}\n')
    registered = rllm("dataset", "register", "holes", "rows.jsonl", "--evaluator", "math")
    assert "row 1 has no `answer`" in registered.stderr
    (tmp_path / "flow.py").write_text("def solve(task, config):\n    return None\n")
    words = ("flow.py:solve", "--evaluator", "math", "--dataset", "rows.jsonl", "--base-url", served.url)
    refused = rllm("eval", *words, "--model", "m", "--json")
    assert refused.exit_code == 2
    assert "rows.jsonl: row 1" in json.loads(refused.stderr)["error"]["message"]
    assert served.bodies == []
    assert not (tmp_path / "evals").exists()


def test_a_judge_model_is_asked_and_a_grader_that_asks_none_refuses_it(
    rllm: Rllm, served: Told, sums: Path
) -> None:
    judge = ("--judge-model", "wise", "--judge-base-url", served.url)
    told = _eval(rllm, served, "--evaluator", "equality", *judge)
    assert told["sampled"]["successes"] == 8
    assert told["stamp"]["judge_model"] == f"wise at {served.url}"
    assert "wise" in {body["model"] for body in served.bodies}
    again = rllm("eval", "--rescore", "e", "--evaluator", "equality", *judge, "--json")
    assert json.loads(again.stdout)["changed"] == {}, again.stderr
    dead = rllm("eval", "--rescore", "e", "--evaluator", "equality", "--judge-model", "wise",
                "--judge-base-url", "http://127.0.0.1:9/v1")  # fmt: skip
    assert dead.exit_code == 1
    assert "wise at http://127.0.0.1:9/v1" in dead.stderr
    refused = rllm("eval", "sums", "--base-url", served.url, "--model", "m", *judge)
    assert refused.exit_code == 2
    assert "`math` asks no model" in refused.stderr
    asked = len(served.questions)
    words = ("eval", "sums", "--base-url", served.url, "--model", "m", "--evaluator", "equality")
    dead = rllm(*words, "--judge-model", "wise", "--judge-base-url", "http://127.0.0.1:9/v1")
    assert dead.exit_code == 1
    assert "wise at http://127.0.0.1:9/v1" in dead.stderr
    assert len(served.questions) == asked
    nobody = rllm("eval", "sums", "--base-url", served.url, "--model", "m", "--evaluator", "equality")
    assert nobody.exit_code == 2
    assert "--judge-model" in nobody.stderr


def test_a_judge_that_speaks_anthropics_protocol_says_what_is_right(
    rllm: Rllm, served: Told, sums: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "the-key")
    there = served.url.removesuffix("/v1")
    made = rllm("model", "setup", "wise", "--provider", "anthropic", "--model", "w", "--base-url", there)
    assert made.exit_code == 0, made.stderr
    told = _eval(rllm, served, "--evaluator", "equality", "--judge-model", "wise")
    assert told["sampled"]["successes"] == told["sampled"]["scored"] == 8
    # Tried when it was set up and before the first task; the other four are equal as they stand.
    assert sum(body["model"] == "w" for body in served.bodies) == 2 + 4
    assert {each["x-api-key"] for each in served.headers if "x-api-key" in each} == {"the-key"}


def test_a_judge_with_a_mistake_in_it_is_not_asked_for_ever_and_the_program_not_again(
    rllm: Rllm, served: Told, sums: Path
) -> None:
    (sums / "flow.py").write_text(FLOW)
    (sums / "judge.py").write_text("def score(task, episode):\n    return 1 / 0\n")
    words = ("eval", "sums", "--base-url", served.url, "--model", "m", "--evaluator", "judge.py:score")
    for agent in ("flow.py:solve", "conversation"):
        served.bodies.clear()
        words = (*words, "--attempts", "4", "--concurrency", "1", "--agent", agent)
        done = rllm(*words, "--output", f"of-{agent[:4]}", "--json")
        assert done.exit_code == 1
        assert "ZeroDivisionError: division by zero" in done.stderr
        assert "same command" in done.stderr
        assert 8 <= len(served.questions) <= 10


AGENT = '''
from rllm.agents.conversation import ConversationAgent

class Polite(ConversationAgent):
    """Asks kindly."""

    @property
    def chat_completions(self):
        return [{"role": "system", "content": "Please."}, *super().chat_completions]
'''
FLOW = """
import openai
import rllm

@rllm.rollout
def solve(task, config):
    with openai.OpenAI(base_url=config.base_url, api_key="-") as client:
        said = client.chat.completions.create(
            model=config.model, messages=[{"role": "user", "content": task.instruction}], max_tokens=50
        )
    assert said.choices[0].message.content
"""


def test_an_agent_class_of_a_file_acts(rllm: Rllm, served: Told, sums: Path) -> None:
    (sums / "agent.py").write_text(AGENT)
    told = _eval(rllm, served, "--agent", "agent.py:Polite")
    assert told["sampled"]["successes"] == 4
    assert served.bodies[-1]["messages"][0] == {"role": "system", "content": "Please."}
    world = rllm("eval", "countdown", "--base-url", served.url, "--model", "m", "--agent", "agent.py:Polite",
                 "--max-examples", "2", "--json")  # fmt: skip
    assert world.exit_code == 0, world.stderr
    assert json.loads(world.stdout)["sampled"]["attempted"] == 2


def test_a_program_acts_on_a_benchmark_and_is_judged_by_the_tasks_own_grader(
    rllm: Rllm, served: Told, sums: Path
) -> None:
    (sums / "flow.py").write_text(FLOW)
    report = _eval(rllm, served, "--agent", "flow.py:solve", "--attempts", "2")["sampled"]
    assert (report["attempted"], report["scored"], report["successes"]) == (16, 16, 8)
    assert report["majority_at_k"]["2"]["value"] == 0.5
    again = rllm("eval", "--rescore", "e", "--json")
    assert json.loads(again.stdout)["changed"] == {}
    assert json.loads(again.stdout)["reports"]["sampled"]["pass_at_k"]["2"]["value"] == 0.5
    refused = rllm("eval", "sums", "--base-url", served.url, "--model", "m", "--agent", "flow.py:solve",
                   "--sampling", "stop=x")  # fmt: skip
    assert "`stop`" in refused.stderr
    world = rllm("eval", "countdown", "--base-url", served.url, "--model", "m", "--agent", "flow.py:solve")
    assert "say who judges" in world.stderr


def test_a_program_takes_a_registered_data_set(rllm: Rllm, served: Told, sums: Path) -> None:
    (sums / "flow.py").write_text(FLOW)
    words = ("--evaluator", "math", "--dataset", "sums", "--sampling", "temperature=0.5")
    report = _eval(rllm, served, *words, name="flow.py:solve")["sampled"]
    assert (report["attempted"], report["successes"]) == (8, 4)
    assert served.bodies[-1]["temperature"] == 0.5
    refused = rllm("eval", "flow.py:solve", "--evaluator", "math", "--dataset", "sum", "--model", "m",
                   "--base-url", served.url)  # fmt: skip
    assert "`sums`" in refused.stderr


WORKFLOW = """
from rllm.workflows import Workflow
from rllm.types.episode import Step, Trajectory

class Twice(Workflow):
    async def run(self, task, uid, **kwargs):
        for role in ("draft", "final"):
            said = await self.rollout_engine.get_model_response(
                [{"role": "user", "content": task["question"]}], role=role
            )
            step = Step.from_model_output(said, [{"role": "user", "content": task["question"]}])
            self.commit(trajectory=Trajectory(name=role, steps=[step], reward=7.0))
"""


def test_a_workflow_acts_on_a_benchmark_and_does_not_judge_itself(
    rllm: Rllm, served: Told, sums: Path
) -> None:
    (sums / "work.py").write_text(WORKFLOW)
    report = _eval(rllm, served, "--agent", "work.py:Twice")["sampled"]
    assert (report["attempted"], report["scored"], report["successes"]) == (8, 8, 4)
    assert (report["mean_turns"], report["mean_reward"]) == (2.0, 1.0)
    assert json.loads(rllm("eval", "--rescore", "e", "--json").stdout)["changed"] == {}
    report = _eval(rllm, served, "--evaluator", "math", "--dataset", "sums", "--fresh", name="work.py:Twice")
    assert report["sampled"]["successes"] == 4


def test_what_is_done_is_told_without_a_terminal_and_not_to_machines(
    rllm: Rllm, served: Told, sums: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rllm.cli.eval.LINE_EVERY_S", 0.0)
    words = ("eval", "sums", "--base-url", served.url, "--model", "m", "--concurrency", "1")
    shown = rllm(*words, "--output", "shown")
    assert re.search(r"^4 of 8  \d\d\.\d% right, 20 tokens, .+ left$", shown.stderr, re.MULTILINE)
    assert rllm(*words, "--output", "quiet", "--json").stderr == ""
    assert {each.name for each in (sums / "quiet").iterdir()} == {
        *("config.json", "lock", "report.html", "store.sqlite", "summary.json")
    }


@pytest.mark.parametrize("agent", ["", "flow.py:solve"])
def test_a_model_that_speaks_anthropics_protocol_is_asked_in_it(
    agent: str, rllm: Rllm, served: Told, sums: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sums / "flow.py").write_text(FLOW)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "the-key")
    there = served.url.removesuffix("/v1")
    made = rllm("model", "setup", "theirs", "--provider", "anthropic", "--model", "m", "--base-url", there)
    assert made.exit_code == 0, made.stderr
    words = ["--agent", agent] if agent else []
    done = rllm("eval", "sums", "--model", "theirs", "--output", "e", *words, "--json")
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)["sampled"]
    assert (report["attempted"], report["successes"]) == (8, 4)
    assert report["tokens"] == {"prompt": 80, "completion": 40}
    assert "the-key" not in "".join(each.read_text("latin-1") for each in (sums / "e").iterdir())


def test_a_server_that_dies_on_the_way_is_counted_and_the_same_command_repairs_it(
    rllm: Rllm, served: Told, sums: Path
) -> None:
    served.status_of = lambda question: 500 if re.match("[45] ", question) else 200
    report = _eval(rllm, served)["sampled"]
    assert (report["attempted"], report["failed"], report["success_without_failed"]) == (8, 2, 0.5)
    assert all(name.startswith("infrastructure_failure: ") for name in report["failures"])
    served.status_of = lambda question: 200
    asked = len(served.questions)
    report = _eval(rllm, served)["sampled"]
    assert len(served.questions) == asked + 2
    assert (report["attempted"], report["failed"], report["success"]) == (8, 0, 0.5)
    answers = answers_in((sums / "e" / "report.html").read_text())
    rows = {name: each["rows"] for name, each in answers.items() if name.startswith("evaluation?by=attempt")}
    verdicts = {name.rpartition("verdict=")[2]: len(each) for name, each in rows.items() if "verdict" in name}
    assert verdicts == {"right": 4, "wrong": 4, "failed": 0}, "attempts that were made again are counted once"


@pytest.mark.parametrize(("status", "exit_code"), [(401, 2), (404, 2), (500, 1)])
def test_a_server_that_refuses_ends_it_before_the_first_task_and_leaves_nothing(
    status: int, exit_code: int, rllm: Rllm, served: Told, sums: Path
) -> None:
    served.status_of = lambda question: status
    (sums / "flow.py").write_text(FLOW)
    for words in ((), ("--agent", "flow.py:solve")):
        done = rllm("eval", "sums", "--base-url", served.url, "--model", "m", *words, "--json")
        assert done.exit_code == exit_code
        assert "Nothing was evaluated" in json.loads(done.stderr)["error"]["message"]
        assert done.stdout == ""
    assert served.questions == []
    assert not list((sums / "evals").glob("*"))


def test_no_more_are_asked_at_once_than_was_said(rllm: Rllm, served: Told, sums: Path) -> None:
    served.wait_s = 0.05
    _eval(rllm, served, "--concurrency", "3", "--attempts", "2")
    assert served.most_at_once == 3


def _start(start_rllm: Any, served: Told, where: Path, *words: str) -> "subprocess.Popen[str]":
    return start_rllm(
        "eval", "sums", "--base-url", served.url, "--model", "m", "--output", "e", *words, cwd=where
    )


def _wait_until(served: Told, asked: int, process: "subprocess.Popen[str]") -> None:
    while len(served.questions) < asked:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def test_killed_at_random_moments_and_interrupted_it_ends_as_if_it_had_not_been(
    rllm: Rllm, served: Told, sums: Path, start_rllm: Any
) -> None:
    """40 attempts at each of 8 tasks; killed with SIGKILL, stopped with Ctrl-C and SIGTERM, then finished."""
    words = ("--attempts", "40", "--concurrency", "8")
    served.wait_s = 0.02
    process = _start(start_rllm, served, sums, *words)
    _wait_until(served, 150, process)
    process.kill()
    process.communicate()
    with EpisodeStore.open(sums / "e" / "store.sqlite", read_only=True) as store:
        saved = store.count("sampled")
    assert saved >= 64
    for by in (signal.SIGINT, signal.SIGTERM):
        asked = len(served.questions)
        process = _start(start_rllm, served, sums, *words)
        _wait_until(served, asked + 40, process)
        locked = rllm("eval", "sums", "--base-url", served.url, "--model", "m", "--output", "e", *words)
        assert locked.exit_code == 2
        assert f"process {process.pid}" in locked.stderr
        process.send_signal(by)
        _, stderr = process.communicate()
        assert process.returncode == 130
        assert "with --output e" in stderr
        with EpisodeStore.open(sums / "e" / "store.sqlite", read_only=True) as store:
            assert store.count("sampled") > saved
            saved = store.count("sampled")
    served.wait_s = 0.0
    asked = len(served.questions)
    report = _eval(rllm, served, *words)
    assert len(served.questions) - asked == 320 - saved
    assert len(results_in(sums / "e")["sampled"]) == 320
    whole = json.loads(
        rllm("eval", "sums", "--base-url", served.url, "--model", "m", "--output", "whole", *words, "--json")
        .stdout
    )  # fmt: skip
    assert report["stamp"] == whole["stamp"]
    assert report["sampled"] | {"latency_s": None} == whole["sampled"] | {"latency_s": None}
