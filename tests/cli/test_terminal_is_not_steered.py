"""Text of models, servers, files and programs, full of what steers terminals, through every command."""

import ast
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import Result

import rllm as package
from rllm.cli.main import rllm as front_door
from rllm.errors.redaction import escaped
from rllm.store.episodes import EpisodeStore
from rllm.tracking.console import LiveView
from rllm.tracking.screen import Screen

sys.path.insert(0, str(Path(__file__).parent))
from http_thread import serving

Rllm = Callable[..., Result]
SEEN = "owned"
STEERS = "\x1b\x07\x08\r\x9b\x90\x9d\u202e\u2066\u200f\u2028\x7f"
FOREIGN = (
    f"\x1b]0;{SEEN}\x07\x1b[2J\x9b31m\x90q\x9d8;;\u202e\u2066\u200f\u2028\x08\r\x7f[/x][link=http://a]:smile:"
)
SOURCES = Path(str(package.__file__)).parent


class Server:
    """Answers with foreign text; refuses with it where it is asked about `3`."""

    def __init__(self) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.tell({"data": [{"id": FOREIGN}]})

            def do_POST(self) -> None:
                asked = self.rfile.read(int(self.headers["content-length"]))
                if b"3 + 1" in asked:
                    self.tell({"error": {"message": FOREIGN}}, 400)
                    return
                message = {"role": "assistant", "content": FOREIGN}
                self.tell({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

            def tell(self, value: Any, status: int = 200) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    with serving(server.http):
        yield server


@pytest.fixture
def hostile(finished_run: Any, rllm: Rllm, server: Server, tmp_path: Path) -> int:
    """A directory of hostile files; the number of an episode of `run`."""
    shutil.copytree(finished_run.path, tmp_path / "run")
    with EpisodeStore.open(tmp_path / "run" / "store.sqlite") as store:
        episodes = list(store.episodes(limit=2))
        for episode in episodes:
            episode.task_id = FOREIGN
            for trajectory in episode.trajectories:
                trajectory.name, trajectory.info = FOREIGN, {"error": {"type": FOREIGN, "message": FOREIGN}}
                trajectory.task = {"question": FOREIGN}
                for step in trajectory.steps:
                    step.observation = step.action = step.model_response = FOREIGN
                    step.info = {FOREIGN: FOREIGN}
        store.save_episodes(FOREIGN, 0, episodes)
        (number, *_) = store.row_ids(FOREIGN)
    rows = [
        {"question": f"{each} + 1{FOREIGN}", "answer": FOREIGN, FOREIGN: FOREIGN, "category": FOREIGN}
        for each in range(4)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    swe = {"instance_id": FOREIGN, "source": FOREIGN, "problem_statement": FOREIGN, "FAIL_TO_PASS": [FOREIGN]}
    (tmp_path / "swe.jsonl").write_text(json.dumps(swe) + "\n")
    (tmp_path / "task.json").write_text(json.dumps({"answer": FOREIGN, "question": FOREIGN}))
    (tmp_path / "answer.txt").write_text(FOREIGN)
    (tmp_path / "loud.py").write_text(f"print({FOREIGN!r})\n")
    (tmp_path / "mine.py").write_text(PROGRAMS)
    (tmp_path / "loud.worker.md").write_text(CONTRACT)
    (tmp_path / "broken.worker.md").write_text(CONTRACT.replace("Purpose", FOREIGN))
    (tmp_path / "inputs.jsonl").write_text(json.dumps({"key": FOREIGN}) + "\n")
    rllm("worker", "run", "loud.worker.md", "--input", "inputs.jsonl", "--directory", "kept")
    rllm("model", "create", "bad")
    config = tmp_path / "bad" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": FOREIGN}))
    rllm("model", "create", "odd")
    config = tmp_path / "odd" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": [FOREIGN]}))
    rllm("dataset", "register", "sums", "rows.jsonl", "--description", FOREIGN, "--category", FOREIGN)
    for output in ("one", "two"):
        rllm("eval", "sums", "--base-url", server.url, "--model", "m", "--output", output)
    return number


CONTRACT = f"""---
id: loud
version: "1"
description: {json.dumps(FOREIGN)}
rllm: {{program: "mine.py:solve"}}
---
## worker.md contract
Purpose: {FOREIGN.replace(chr(10), " ")}
### Input schema
```json
{{"type": "object", "required": ["key"], "properties": {{"key": {{"type": "string"}}}}}}
```
### Output schema
```json
{{"type": "object"}}
```
### Constraints
- idempotency_key: key
"""

PROGRAMS = f"""
FOREIGN = {FOREIGN!r}
import rllm
from rllm.agents import BaseAgent

class Loud(BaseAgent):
    __doc__ = FOREIGN

class Grader:
    name, task_fields = "loud", ()
    def grade(self, answer, task):
        raise ValueError(FOREIGN)
    def close(self):
        pass

@rllm.rollout
def solve(task, config):
    raise RuntimeError(FOREIGN)

def score(task, episode):
    raise RuntimeError(FOREIGN)

def estimator(rewards, **options):
    raise RuntimeError(FOREIGN)
"""


def scenarios(number: int, url: str) -> dict[str, list[tuple[bool, tuple[str, ...]]]]:
    """Command -> words behind it, and whether something foreign is to be seen in what it prints."""
    of_server = ("--base-url", url, "--model", "m")
    bad = ("--set", "model.path=bad", "--output", "new")
    return {
        "train": [
            (True, ("frozenlake", *bad)),
            (True, ("mine.py:solve", "--evaluator", "mine.py:score", "--dataset", "rows.jsonl", *bad)),
        ],
        "sft": [(True, ("--run", "run", *bad))],
        "dpo": [(False, ("rows.jsonl", *bad))],
        "distill": [(True, ("frozenlake", "--teacher", "bad", *bad))],
        "eval": [
            (True, ("sums", *of_server, "--output", "three")),
            (True, ("sums", *of_server, "--agent", "mine.py:solve", "--output", "four")),
            (True, ("sums", *of_server, "--evaluator", "mine.py:score", "--output", "five")),
            (True, ("sums", "--model", "bad")),
            (False, ("--compare", "one", "two")),
            (True, ("--rescore", "one")),
        ],
        "chat": [(True, ("--model", FOREIGN))],
        "cluster status": [(False, ("--address", FOREIGN))],
        "cluster check": [(False, ("--address", FOREIGN))],
        "benchmark list": [(False, ("--search", FOREIGN))],
        "benchmark info": [(True, ("sums",))],
        "dataset list": [(True, ())],
        "dataset pull": [(True, (FOREIGN,))],
        "dataset info": [(True, ("sums",))],
        "dataset inspect": [(True, ("sums",)), (True, ("sums", "--as-tasks"))],
        "dataset register": [(True, ("again", "rows.jsonl", "--answer", FOREIGN))],
        "dataset build swe": [(True, (f"{SEEN}\x1b[2J", "--out", "built"))],
        "dataset from-runs": [(True, ("kept", "--out", "learn.jsonl", "--filter", f"'{FOREIGN}' = 1"))],
        "dataset from-eval": [(True, (f"{SEEN}\x1b[2J", "--out", "learn.jsonl"))],
        "dataset export": [(True, ("sums", f"{SEEN}-\x1b[2J.jsonl"))],
        "dataset remove": [(True, ("sums", "--split", FOREIGN))],
        "grade": [
            (True, ("exact", "--task", "task.json", "--answer", "answer.txt")),
        ],
        "sandbox run": [(True, ("loud.py", "--backend", "subprocess", "--allow-root"))],
        "sandbox list": [(False, ())],
        "sandbox reap": [(False, ())],
        "serve environment": [(False, (FOREIGN,))],
        "serve fleet": [(True, ("bad", "--server", f"http://{FOREIGN}"))],
        "serve gateway": [(True, ("--upstream", f"http://{FOREIGN}"))],
        "serve model": [(True, ("bad", "--port", "0"))],
        "worker init": [(True, (f"{SEEN}\x1b[2J",))],
        "worker validate": [(True, ("broken.worker.md",))],
        "worker list": [(True, (".",))],
        "worker show": [(True, ("loud.worker.md",))],
        "worker run": [(True, ("loud.worker.md", "--input", "inputs.jsonl", "--directory", "others"))],
        "worker batch": [(True, ("loud.worker.md", "inputs.jsonl", "--directory", "others"))],
        "view": [(True, (FOREIGN,))],
        "worker serve": [(True, ("broken.worker.md",))],
        "worker mcp": [(True, ("broken.worker.md",))],
        "worker runs": [(True, ("kept",))],
        "worker stdio": [(True, ("broken.worker.md",))],
        "worker promote": [(True, ("broken.worker.md", "one", "--if-better", "inputs.jsonl"))],
        "worker graph": [(False, ("loud.worker.md",))],
        "runs list": [(False, (".",))],
        "runs show": [
            (True, ("run",)),
            (True, ("run", "--episode", str(number))),
            (True, ("run", "--phase", FOREIGN)),
            (True, ("one", "--episode", "1")),
            (False, ("one", "--phase", "sampled")),
            (False, ("one",)),
        ],
        "runs compare": [(False, ("run", "run"))],
        "runs replay": [(False, ("run",))],
        "model create": [(True, (f"{SEEN}\x1b[2J",))],
        "model info": [(True, ("odd",)), (True, ("bad",))],
        "model pull": [(True, (FOREIGN,))],
        "model import": [(True, (FOREIGN, "into"))],
        "model export": [(True, (FOREIGN, "--gguf", "out.gguf"))],
        "model push": [(True, (FOREIGN, "me/name"))],
        "model setup": [(True, ("mine", "--base-url", url))],
        "model list": [(True, ())],
        "model show": [(True, (FOREIGN,))],
        "model swap": [(True, (FOREIGN,))],
        "model test": [(True, ("mine",))],
        "model remove": [(True, (FOREIGN,))],
        "agent list": [(False, ())],
        "agent info": [(True, ("mine.py:Loud",))],
        "agent register": [(True, (FOREIGN, "mine.py:Loud"))],
        "agent unregister": [(True, (FOREIGN,))],
        "init": [(True, (f"{SEEN}\x1b[2J-too",))],
        "doctor": [(False, ())],
        "doctor web": [(False, ())],  # RLLM_CHROMIUM is foreign text
        "doctor algorithm": [(True, ("mine.py:estimator", "--kind", "estimator"))],
        "doctor tasks": [(True, ("swe.jsonl",))],
        "doctor grader": [(True, ("mine.py:Grader", "--task", "task.json", "--oracle", "answer.txt"))],
    }


def commands(group: click.Command, words: str = "") -> list[str]:
    if not isinstance(group, click.Group):
        return [words]
    context = click.Context(group)
    found = [words] if group.invoke_without_command else []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        found += commands(command, f"{words} {name}".strip())
    return found


def steering(text: str) -> str:
    return "".join(sorted(set(text) & set(STEERS)))


def test_no_command_prints_what_steers_a_terminal(
    hostile: int, rllm: Rllm, server: Server, monkeypatch: pytest.MonkeyPatch, bubblewrap: str
) -> None:
    known = scenarios(hostile, server.url)
    assert sorted(known) == sorted(commands(front_door)), "every command is walked"
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("RLLM_CHROMIUM", FOREIGN)
    wrong: list[str] = []
    for command, calls in known.items():
        for shows, words in calls:
            for form in ((), ("--json",)):
                result = rllm(*command.split(), *words, *form)
                printed = result.stdout + result.stderr
                if steering(printed):
                    wrong.append(f"{command} {words} {form}: {steering(printed)!r}")
                if shows and not form and SEEN not in printed:
                    wrong.append(f"{command} {words}: {printed[-600:]}")
    assert not wrong, "\n".join(wrong)


def test_a_traceback_and_a_warning_of_others_steer_nothing_either(
    hostile: int, start_rllm: Callable[..., Any], tmp_path: Path
) -> None:
    others = f"import logging, threading\nlogging.warning({FOREIGN!r})\n{PROGRAMS}"
    thread = (
        "loud = threading.Thread(target=estimator, args=((),), name=FOREIGN)\nloud.start()\nloud.join()\n"
    )
    unraisable = "class Dying:\n    def __del__(self):\n        raise ValueError(FOREIGN)\nDying()\n"
    (tmp_path / "mine.py").write_text(others + thread + unraisable)
    words = ("grade", "mine.py:Grader", "--task", "task.json", "--answer", "answer.txt")
    stdout, stderr = start_rllm(*words, cwd=tmp_path).communicate()
    assert "Traceback" in stderr
    assert stderr.count(SEEN) >= 5  # of the warning, the thread and its name, the unraisable and the grader
    assert not steering(stdout + stderr)


def test_what_is_escaped_says_what_was_there() -> None:
    assert escaped("a\tb\n\x1b[2J\x9b\u202e") == "a\tb\n\\x1b[2J\\x9b\\u202e"
    assert not steering(escaped(FOREIGN))
    assert escaped(escaped(FOREIGN)) == escaped(FOREIGN)
    assert escaped("naïve 漢字 🙂") == "naïve 漢字 🙂"


def test_a_screen_with_colours_prints_its_own_codes_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    view = LiveView(3, title=FOREIGN, console=Screen())
    with view:
        view.begin(FOREIGN)
        view.log(0, FOREIGN, {"success": 0.5, f"failed.{FOREIGN}": 1.0})
    Screen().print(FOREIGN, style="bold")
    printed = capsys.readouterr().out
    own = re.compile(r"\x1b\[[0-9;]*[mABCK]|\x1b\[\?25[lh]|\r|\x1b\[2K|\x1b\[1A")
    assert SEEN in printed
    assert not steering(own.sub("", printed))


def test_nobody_prints_past_the_screen() -> None:
    """`Screen` and the front door's `_print_error` escape; whoever prints otherwise would not."""
    past: list[str] = []
    for path in SOURCES.rglob("*.py"):
        room = path.relative_to(SOURCES)
        source = path.read_text()
        for node in ast.walk(ast.parse(source)) if re.search(r"Console|print|write|echo", source) else ():
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
                continue
            called = ast.unparse(node.func)
            prints = called in ("Console", "rich.print", "sys.stdout.write", "sys.stderr.write")
            prints |= room.parts[0] == "cli" and called in ("print", "click.echo", "click.secho")
            if prints and str(room) not in PRINTERS:
                past.append(f"{room}:{node.lineno} {called}")
    assert not past


PRINTERS = {"cli/main.py", "cli/command.py", "cli/serve.py", "cli/chat.py"}
"""Who prints JSON, versions and errors; the chat escapes the pieces of an answer itself."""
