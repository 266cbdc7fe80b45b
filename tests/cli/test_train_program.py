import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from rllm.models.builtin import create_model
from rllm.store.episodes import EpisodeStore

Rllm = Callable[..., Result]

FLOW = """
import json
import urllib.request

import rllm


@rllm.rollout
def solve(task, config):
    messages = [{"role": "user", "content": task.instruction}]
    body = json.dumps({"model": config.model, "messages": messages, "max_tokens": 1}).encode()
    url = config.base_url + "/chat/completions"
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        json.load(reply)


@rllm.evaluator
def score(task, episode):
    return episode.trajectories[0].steps[0].model_response == task["answer"]


def fails(task, config):
    raise ValueError("a bug")
"""
WORKFLOW = """
from rllm.types.episode import Step, Trajectory
from rllm.workflows import Workflow


class Once(Workflow):
    async def run(self, task, uid, **kwargs):
        asked = [{"role": "user", "content": task["question"]}]
        said = await self.rollout_engine.get_model_response(asked, role="solver", max_tokens=2)
        right = said.text == task["grading"]["answer"]
        step = Step.from_model_output(said, asked)
        self.commit(trajectory=Trajectory(name="solver", steps=[step], reward=float(right)))
"""
OWN_AGENT = """
from rllm.agents.conversation import ConversationAgent


class Polite(ConversationAgent):
    pass


def score(task, episode):
    assert task["grading"]["answer"]
    return 0.25
"""
ROWS = [{"id": "up", "question": "Up", "answer": "Down"}, {"id": "down", "question": "Down", "answer": "Up"}]
PROGRAM = ("my_flow.py:solve", "--evaluator", "my_flow.py:score", "--dataset", "my.jsonl")
TINY = [
    word
    for assignment in (
        "steps=1",
        "rollout.tasks_per_step=2",
        "rollout.group_size=2",
        "evaluation.num_tasks=2",
        "threads=1",
    )
    for word in ("--set", assignment)
]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "my_flow.py").write_text(FLOW)
    (tmp_path / "my.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    return tmp_path


def said(result: Result) -> str:
    return " ".join(result.stderr.split())


def test_a_program_is_trained_measured_and_replayed_by_its_name(program: Path, rllm: Rllm) -> None:
    trained = rllm("train", *PROGRAM, *TINY, "--json")
    assert trained.exit_code == 0, trained.stderr
    assert json.loads(trained.stdout)["run"] == "runs/my_flow-solve-seed0"
    config = json.loads((program / "runs/my_flow-solve-seed0/config.json").read_text())
    assert config["task"]["program"] == "my_flow.py:solve"
    again = rllm("train", *PROGRAM, *TINY)
    assert "is finished" in again.stderr
    assert "before ended: sampled env_done 2; greedy env_done 2." in again.stdout
    assert not {"untrained", "warm"} & {*again.stdout.split()}, "one model has one row"
    assert "rllm eval my_flow.py:solve --evaluator my_flow.py:score --dataset my.jsonl --model runs/" in (
        again.stdout
    )
    measured = rllm("eval", *PROGRAM, "--model", "runs/my_flow-solve-seed0", "--threads", "1", "--json")
    assert measured.exit_code == 0, measured.stderr
    report = json.loads(measured.stdout)
    assert report["program"] == "my_flow.py:solve"
    assert report["sampled"]["attempted"] == report["greedy"]["scored"] == 2
    assert rllm("runs", "replay", "runs/my_flow-solve-seed0", "--json").exit_code == 0


def test_a_program_learns_from_a_registered_data_set_and_is_measured_on_what_it_holds_out(
    program: Path, rllm: Rllm
) -> None:
    (program / "rows.csv").write_text("question,answer\nUp,Down\nDown,Up\n")
    for split in ("train", "test"):
        made = rllm("dataset", "register", "turns", "rows.csv", "--split", split)
        assert made.exit_code == 0, made.stderr
    words = ("train", "my_flow.py:solve", "--evaluator", "my_flow.py:score", "--dataset")
    plan = json.loads(rllm(*words, "turns", *TINY, "--dry-run", "--json").stdout)
    assert (plan["config"]["task"]["dataset"], plan["config"]["task"]["val_dataset"]) == ("turns", "turns")
    trained = rllm(*words, "rows.csv", "--val-dataset", "turns", *TINY)
    assert trained.exit_code == 0, trained.stderr
    following = "rllm eval my_flow.py:solve --evaluator my_flow.py:score --dataset turns "
    following += "--model runs/my_flow-solve-seed0"
    assert following in trained.stdout
    assert rllm(*following.split()[1:], "--threads", "1").exit_code == 0


def test_programs_and_workflows_are_trained_on_a_benchmark_by_its_own_grader(
    program: Path, rllm: Rllm
) -> None:
    rows = [{"question": f"{number} + 1 = ?", "answer": number + 1} for number in range(40)]
    (program / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert rllm("dataset", "register", "sums", "sums.jsonl", "--split", "train").exit_code == 0
    (program / "work.py").write_text(WORKFLOW)
    for agent, label in (("my_flow.py:solve", "my_flow-solve"), ("work.py:Once", "work-Once")):
        trained = rllm("train", "sums", "--agent", agent, *TINY)
        assert trained.exit_code == 0, trained.stderr
        assert f"rllm eval sums --agent {agent} --model runs/{label}-seed0" in trained.stdout
        config = json.loads((program / f"runs/{label}-seed0/config.json").read_text())
        assert (config["task"]["program"], config["task"]["dataset"]) == (agent, "benchmark:sums")
        assert "is finished" in rllm("train", "sums", "--agent", agent, *TINY, "--resume").stderr
    ignored = rllm("train", "sums", "--agent", "work.py:Once", "--evaluator", "math")
    assert "its own trajectories" in said(ignored)
    world = rllm("train", "frozenlake", "--agent", "my_flow.py:solve")
    assert "--evaluator" in said(world)


def test_an_agent_and_an_evaluator_of_files_are_trained_on_a_benchmark(program: Path, rllm: Rllm) -> None:
    rows = [{"question": f"{number} + 1 = ?", "answer": number + 1} for number in range(40)]
    (program / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert rllm("dataset", "register", "sums", "sums.jsonl", "--split", "train").exit_code == 0
    (program / "mine.py").write_text(OWN_AGENT)
    words = ("train", "sums", "--agent", "mine.py:Polite", "--evaluator", "mine.py:score", *TINY)
    trained = rllm(*words, "--set", "rollout.max_tokens_per_turn=2")
    assert trained.exit_code == 0, trained.stderr
    assert "rllm eval sums --agent mine.py:Polite --evaluator mine.py:score --model runs/sums-seed0" in (
        trained.stdout
    )
    with EpisodeStore.open(program / "runs/sums-seed0/store.sqlite", read_only=True) as store:
        assert {each.trajectories[0].reward for each in store.episodes("train")} == {0.25}
    other = rllm(*words, "--set", "rollout.max_tokens_per_turn=2", "--evaluator", "exact")
    assert "task.environment_args.evaluator" in said(other)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("gsm8k", "--base-url", "http://127.0.0.1:9/v1", "--model", "m"),
            "rllm distill BENCHMARK --teacher",
        ),
        (("gsm8k", "--model", "ollama:qwen3"), "training changes weights, which have to be here"),
        (("frozenlake", "--evaluator", "math"), "would be ignored; leave it out"),
        (("arithmetic", "--agent", "maht"), "did you mean `math`?"),
        (("frozenlake", "--output", "/proc/x/y"), "/proc/x/y cannot be made"),
        (("frozenlake", "--resume", "--fresh"), "give one of them"),
    ],
)
def test_bad_words_that_eval_would_take_are_refused(rllm: Rllm, words: tuple[str, ...], message: str) -> None:
    result = rllm("train", *words)
    assert result.exit_code == 2, result.output
    assert message in said(result)


def test_a_dry_run_of_a_program_shows_what_it_would_do(program: Path, rllm: Rllm) -> None:
    words = ("train", *PROGRAM, "--model", "builtin:small", "--seed", "3", "--dry-run", "--json")
    plan = json.loads(rllm(*words).stdout)
    assert plan["run"] == "runs/my_flow-solve-seed3"
    assert plan["config"]["model"]["path"] == "builtin:small"
    assert plan["config"]["inference"]["lockstep"] is False
    assert not (program / "runs").exists()


def test_the_example_is_trained_by_the_command_in_its_readme(rllm: Rllm) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "openai_program"
    file = example / "opposites.py"
    command = (example / "README.md").read_text().partition("rllm train ")[2].partition("\n")[0]
    words = command.split()
    assert words[0] == "opposites.py:solve"
    paths = [str(example / word) if "." in word else word for word in words]
    plan = rllm("train", *paths, "--dry-run", "--json")
    assert plan.exit_code == 0, plan.stderr
    assert json.loads(plan.stdout)["derived"]["episodes_per_step"] == 14 * 16
    assert len(file.read_text().splitlines()) < 100


def test_no_pair_of_words_of_the_example_is_trained_on_and_tested() -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "openai_program"
    opposite = {"Up": "Down", "Left": "Right", "yes": "no", "Down": "Up", "Right": "Left", "no": "yes"}
    rows = [
        [json.loads(line) for line in (example / f"{name}.jsonl").read_text().splitlines()]
        for name in ("opposites", "opposites_test")
    ]
    num_tasks = tomllib.loads((example / "opposites.toml").read_text())["evaluation"]["num_tasks"]
    parts: dict[str, list[dict[str, str]]] = {
        "trained": rows[0],
        "reported": rows[1][:num_tasks],
        "curve": rows[1][num_tasks:],
    }
    pairs: dict[str, set[tuple[str, str]]] = {}
    for name, part in parts.items():
        known = pairs[name] = set[tuple[str, str]]()
        for row in part:
            word, other = row["word"], row["other"]
            assert row["answer"] == opposite[word]
            assert row["question"] in (
                f"Opposite of {word}, not of {other}?",
                f"Not of {other}: opposite of {word}?",
            )
            known.add((word, other))
        assert len({row["id"] for row in part}) == len({row["question"] for row in part}) == 2 * len(known)
        assert {word for word, _ in known} == set(opposite), "every word is asked for in all parts"
    assert len(set[tuple[str, str]]().union(*pairs.values())) == 30 == sum(map(len, pairs.values()))


def test_a_program_in_which_every_episode_fails_is_a_failure(program: Path, rllm: Rllm) -> None:
    create_model(program / "model")
    words = ("my_flow.py:fails", *PROGRAM[1:])
    result = rllm("eval", *words, "--model", "model", "--threads", "1", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["sampled"]["failed"] == 2
    trained = rllm("train", *words, *TINY)
    assert trained.exit_code == 1
    assert "2 of them with ValueError: a bug" in said(trained)
    assert "my_flow.py" in said(trained)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("my_flow.py:solve",), "needs --evaluator, such as --evaluator my_flow.py:score"),
        (("my_flow.py:solve", "--evaluator", "my_flow.py:score"), "needs --dataset"),
        (("my_flow.py:slove", *PROGRAM[1:]), "did you mean `solve`?"),
        (("my_flow.py", *PROGRAM[1:]), "It holds solve, score, fails."),
        ((*PROGRAM[:2], "my_flow.py:scroe", *PROGRAM[3:]), "has no evaluator `scroe`; did you mean `score`?"),
        ((*PROGRAM[:4], "absent.jsonl"), "There is no file absent.jsonl"),
        ((*PROGRAM[:4], "absent"), "There is no data set `absent` here"),
        ((*PROGRAM[:4], "broken.jsonl"), "broken.jsonl:2 is not valid JSON"),
        ((*PROGRAM[:4], "list.jsonl"), "list.jsonl:1 holds a list; each line must be a JSON object"),
        ((*PROGRAM[:4], "twice.jsonl"), "twice.jsonl has the task id 'a' in row 0 and in row 1"),
        ((*PROGRAM[:4], "empty.jsonl"), "empty.jsonl is empty"),
        ((*PROGRAM, "--val-dataset", "absent.jsonl"), "There is no file absent.jsonl"),
        ((*PROGRAM, "--set", "rollout.max_turns=3"), "`rollout.max_turns` is 3, which does nothing here"),
        (("frozenlake", "--dataset", "my.jsonl"), "`frozenlake` is a benchmark, which brings"),
        ((*PROGRAM, "--judge-model", "openai:gpt-5"), "--judge-model openai:gpt-5 would be ignored"),
        ((*PROGRAM, "--agent", "math"), "is what acts; leave --agent math out"),
        ((*PROGRAM, "--resume"), "There is no run in run to go on with"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_words_about_programs_are_refused(
    program: Path, rllm: Rllm, words: tuple[str, ...], message: str
) -> None:
    (program / "broken.jsonl").write_text('{"id": 1}\n{"id": \n')
    (program / "list.jsonl").write_text("[1]\n")
    (program / "twice.jsonl").write_text('{"id": "a"}\n{"uid": "a"}\n')
    (program / "empty.jsonl").write_text("\n")
    result = rllm("train", *words, "--output", "run")
    assert result.exit_code == 2, result.output
    assert message in said(result)
    assert not (program / "run").exists()


def test_a_program_runs_on_another_server_and_samples_as_it_asks(
    program: Path, rllm: Rllm, tmp_path: Path, other_server: Any
) -> None:
    words = ("eval", *PROGRAM, "--base-url", other_server.url, "--model", "theirs", "--json")
    result = rllm(*words)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["as asked"]["successes"] == 2
    assert {body["model"] for body in other_server.bodies} == {"theirs"}
    questions = {row["question"] for row in ROWS}  # before them it is asked whether it is there
    asked = [body for body in other_server.bodies if body["messages"][-1]["content"] in questions]
    assert len(asked) == len(ROWS)
    assert all("temperature" not in body for body in asked)
    assert rllm("eval", *PROGRAM).exit_code == 2


@pytest.fixture
def other_server() -> Any:
    """A server that knows the answers, in a thread of its own."""
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    answers = {row["question"]: row["answer"] for row in ROWS}
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def _reply(self, value: dict[str, Any]) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self._reply({"object": "list", "data": [{"id": "theirs", "object": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            bodies.append(body)
            message = {"role": "assistant", "content": answers.get(body["messages"][-1]["content"], "Hi.")}
            self._reply(
                {
                    "id": f"chatcmpl-{len(bodies)}",
                    "object": "chat.completion",
                    "created": 1,
                    "model": "theirs",
                    "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
                }
            )

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url, server.bodies = f"http://127.0.0.1:{server.server_port}/v1", bodies  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()
