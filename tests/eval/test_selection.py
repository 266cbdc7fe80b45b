"""Which of several attempts is handed in: each selector with players for which it is wrong."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rllm.build.asked import Asked
from rllm.build.evaluation import prepare
from rllm.build.providers import resolve_model
from rllm.cli.main import rllm
from rllm.environments.swe.selection import PatchAttempt, Selection, choose, normalized_patch
from rllm.errors import ConfigError
from rllm.eval.results import Result
from rllm.eval.selection import selection_report
from rllm.types.episode import Outcome
from rllm.types.messages import Message
from rllm.types.task import EpisodeId

sys.path.insert(0, str(Path(__file__).parents[1] / "rewards"))
sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
from http_thread import serving
from swe_projects import PATCH, repository, row, usable_backend

WRONG = PATCH.replace("a + b", "a + b + 1")
BREAKING = PATCH.replace(" def twice(a):", "-def twice(a):\n+def thrice(a):")


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    source, commit = repository(tmp_path)
    return row(source, base_commit=commit)


def candidates(*patches: str) -> list[PatchAttempt]:
    return [PatchAttempt(attempt=place, patch=each, has_failed=False) for place, each in enumerate(patches)]


async def chosen(
    by: str, task: dict[str, Any], patches: Sequence[str], ask: Callable[[str], str] = lambda question: ""
) -> Selection:
    async def answer(messages: list[Message], key: tuple[str | int, ...]) -> str:
        return ask(str(messages[-1]["content"]))

    return await choose(by, task, candidates(*patches), backend=usable_backend(), ask=answer)


def test_patches_that_change_the_same_are_one() -> None:
    moved = PATCH.replace("@@ -1,6 +1,6 @@", "@@ -2,6 +7,6 @@ def add").replace(
        "+    return a + b", "+    return a + b  "
    )
    other = PATCH.replace("calc/__init__", "other")
    assert normalized_patch(moved) == normalized_patch(PATCH)
    assert normalized_patch(PATCH + other) == normalized_patch(other + PATCH)
    assert len({normalized_patch(each) for each in (PATCH, WRONG, other, "")}) == 4


async def test_a_majority_may_be_wrong_and_a_tie_takes_the_first(task: dict[str, Any]) -> None:
    assert await chosen("majority", task, [PATCH, WRONG, WRONG]) == Selection(
        attempt=1, reason="2 of 3 votes"
    )
    tie = await chosen("majority", task, [WRONG, PATCH])
    assert (tie.attempt, tie.is_settled) == (0, False)
    nothing = await chosen("majority", task, ["", "", PATCH])
    assert nothing.attempt == 2, "who changed nothing has no vote"


async def test_a_model_may_be_wrong_or_say_nothing_that_can_be_read(task: dict[str, Any]) -> None:
    shown: list[str] = []

    def picks(answer: str) -> Callable[[str], str]:
        return lambda question: shown.append(question) or answer

    assert (await chosen("model", task, [WRONG, PATCH], picks("<think>1?</think> Patch 2"))).attempt == 1
    assert (await chosen("model", task, [WRONG, PATCH], picks("1"))).attempt == 0
    for answer in ("I cannot say", "7", "0"):
        unread = await chosen("model", task, [WRONG, PATCH], picks(answer))
        assert (unread.attempt, unread.is_settled) == (0, False), unread
    assert "`add(1, 2)` gives -1." in shown[0]
    assert "+    return a + b\n" in shown[0]
    assert "test_add" not in shown[0], "hidden tests are not shown"


async def test_patches_are_shown_in_the_order_of_the_attempts_that_made_them_first(
    task: dict[str, Any],
) -> None:
    unread = await chosen("model", task, [WRONG, PATCH, WRONG], lambda question: "I cannot say")
    assert (unread.attempt, unread.is_settled) == (0, False)
    assert (await chosen("model", task, [WRONG, PATCH, WRONG], lambda question: "2")).attempt == 1


@pytest.mark.slow
async def test_visible_tests_drop_what_breaks_them_and_cannot_tell_the_rest(task: dict[str, Any]) -> None:
    choice = await chosen("tests", task, [BREAKING, WRONG, PATCH, "no patch"])
    assert (choice.attempt, choice.is_settled) == (1, False)
    assert choice.reason == "1 visible tests pass, 0 fail"
    own_test = "def test_add():\n    from calc import add\n    assert add(2, 2) == 4\n"
    lines = "".join(f"+{line}\n" for line in own_test.splitlines())
    head = "diff --git a/tests/test_own.py b/tests/test_own.py\nnew file mode 100644\n--- /dev/null\n"
    tested = f"{PATCH}{head}+++ b/tests/test_own.py\n@@ -0,0 +1,3 @@\n{lines}"
    assert (await chosen("tests", task, [WRONG, tested])).attempt == 1


def added(path: str, text: str) -> str:
    lines = text.splitlines()
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    return f"{head}@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)


UNITTEST = (
    "import unittest\nfrom calc import {name}\n\n"
    "class A(unittest.TestCase):\n    def test_a(self):\n        {check}\n"
)
NODE = (
    "const calc = require('../calc.js');\n"
    "require('node:test')('{name}', () => {{ if (!({check})) throw Error(); }});\n"
)
TAP = "echo 1..1\nif {check}; then echo 'ok 1 - {name}'; else echo 'not ok 1 - {name}'; fi\n"
CALC = {
    "unittest": ("calc/__init__.py", "def add(a, b):\n    return a - b\ndef twice(a):\n    return 2 * a\n"),
    "node": ("calc.js", "exports.add = (a, b) => a - b;\nexports.twice = a => 2 * a;\n"),
    "tap": ("calc.sh", "add() { echo $(($1 - $2)); }\ntwice() { echo $((2 * $1)); }\n"),
}
"""A project with a bug in `add`."""
VISIBLE = {
    "unittest": (
        "tests/test_{}.py",
        UNITTEST,
        "self.assertEqual(add(2, 2), 4)",
        "self.assertEqual(twice(2), 4)",
    ),
    "node": ("test/{}.test.js", NODE, "calc.add(2, 2) === 4", "calc.twice(2) === 4"),
    "tap": ("t/{}.t", f". ./calc.sh\n{TAP}", '[ "$(add 2 2)" = 4 ]', '[ "$(twice 2)" = 4 ]'),
}
"""Where tests lie, how they look, and what one of `add` and one of `twice` checks."""
COMMANDS = {
    "unittest": ["python", "-m", "unittest", "tests.test_hidden"],
    "node": ["node", "--test"],
    "tap": ["prove", "-v", "-e", "/bin/sh", "t"],
}


@pytest.mark.parametrize("runner", CALC)
async def test_visible_tests_of_any_runner_have_their_say(
    runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A patch that breaks what worked, one that mends nothing, and one that brings a test of its own along;
    hidden tests, which the command names, are not there."""
    program = {"node": "node", "tap": "prove"}.get(runner)
    if program and not (shutil.which(program) or "").startswith("/usr/"):
        pytest.skip(f"sandboxes here have no {program}")
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    source = tmp_path / runner
    (file, program_text), (where, test, check_add, check_twice) = CALC[runner], VISIBLE[runner]
    texts = {file: program_text, where.format("twice"): test.format(name="twice", check=check_twice)}
    if runner == "unittest":
        texts["tests/__init__.py"] = ""
    for name, text in texts.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    hidden = {where.format("hidden"): test.format(name="add", check=check_add)}
    entry = row(source, test_command=COMMANDS[runner], test_files=hidden, patch="")
    neutral = added("notes.txt", "nothing\n")
    name = "twice" if runner == "unittest" else "own"
    breaking = added(where.format("own"), test.format(name=name, check=check_twice.replace("4", "5")))
    tested = added(where.format("own"), test.format(name=name, check=check_twice))
    choice = await chosen("tests", entry, [breaking, neutral, "no patch"])
    assert (choice.attempt, choice.reason) == (1, "1 visible tests pass, 0 fail")
    choice = await chosen("tests", entry, [breaking, neutral, tested])
    assert (choice.attempt, choice.reason) == (2, "2 visible tests pass, 0 fail")


def test_the_report_has_chance_the_choice_and_the_oracle() -> None:
    right = {"a": (True, False, False), "b": (False, False, True), "c": (False, False, False)}
    results = [
        [
            Result(
                episode=EpisodeId(task_id=name, attempt=place),
                outcome=Outcome.SCORED,
                is_correct=each,
                reward=float(each),
            )
            for place, each in enumerate(several)
        ]
        for name, several in right.items()
    ]
    choices = {name: Selection(attempt=0, reason="", is_settled=name != "b") for name in right}
    report = selection_report("majority", results, choices)
    assert report["pass_at_1"]["value"] == pytest.approx(2 / 9)
    assert report["selected"]["value"] == pytest.approx(1 / 3)
    assert report["pass_at_n"]["value"] == pytest.approx(2 / 3)
    assert report["unsettled"] == 1
    assert report["selected"]["interval"][0] < 1 / 3 < report["selected"]["interval"][1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"select": "oracle"}, "choose one of tests, majority, model"),
        ({"select": "tests", "attempts": 1}, "set --attempts to 2 or more"),
        ({"select": "tests", "benchmark": "frozenlake"}, "chooses among patches"),
        ({"select": "tests", "judge": resolve_model("builtin:tiny")}, "asks no model"),
    ],
)
def test_a_selector_that_has_nothing_to_choose_is_refused(
    words: dict[str, Any], message: str, task: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(task))
    request = {"benchmark": "rows.jsonl", "place": resolve_model("builtin:tiny"), "attempts": 3, **words}
    with pytest.raises(ConfigError, match=message):
        prepare(Asked(**request))


class Players(BaseHTTPRequestHandler):
    """Attempts one after the other: two that are wrong in one way, and one that is right. Of two different
    patches it names the second."""

    begun = 0
    CHANGES = ("a + b + 1", "a + b + 1", "a + b")

    def do_POST(self) -> None:
        messages = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
        text = str(messages[-1]["content"])
        if "Which patch resolves" in text:
            answer = "2"
        elif "The issue:" in text:
            change = self.CHANGES[type(self).begun % 3]
            type(self).begun += 1
            command = f"sed -i 's/a - b/{change}/' calc/__init__.py"
            answer = f"<function=execute_bash>\n<parameter=command>{command}</parameter>\n</function>"
        elif "Steps remaining" in text:
            answer = "<function=finish>\n</function>"
        else:
            answer = "4"
        self._tell(answer)

    def do_GET(self) -> None:
        self._send({"object": "list", "data": [{"id": "players", "object": "model"}]})

    def _tell(self, answer: str) -> None:
        choice = {"index": 0, "message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        self._send(
            {"id": "c", "object": "chat.completion", "model": "players", "choices": [choice], "usage": usage}
        )

    def _send(self, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: tests read stderr."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Players,), {}))
    with serving(server):
        yield f"http://127.0.0.1:{server.server_port}/v1"


@pytest.mark.slow
def test_the_front_door_chooses_again_by_another_selector_without_another_attempt(
    task: dict[str, Any], url: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(task))
    words = [
        "eval",
        "rows.jsonl",
        "--base-url",
        url,
        "--model",
        "players",
        "--attempts",
        "3",
        "--concurrency",
        "1",
    ]
    selected: dict[str, float] = {}
    for by in ("majority", "tests", "model"):
        ended = CliRunner().invoke(rllm, [*words, "--output", "e", "--select", by, "--json"])
        assert ended.exit_code == 0, ended.output
        selection = json.loads(ended.stdout)["sampled"]["selection"]
        assert selection["pass_at_1"]["value"] == pytest.approx(1 / 3)
        assert selection["pass_at_n"]["value"] == 1.0
        selected[by] = selection["selected"]["value"]
    assert selected == {"majority": 0.0, "tests": 0.0, "model": 1.0}
    shown = CliRunner().invoke(rllm, [*words, "--output", "e", "--select", "model"])
    assert "selected by model" in shown.output
    assert "pass@3, an oracle's" in shown.output
