"""A command-line agent inside the sandbox of its task: that of the page, and some that go wrong."""

import re
import socket
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from playing import engine_of, mends, played, played_all

from rllm.agents.named import published_agent_successor
from rllm.build.actors import actor_named
from rllm.environments.harness import door
from rllm.environments.harness.installing import harness_directory
from rllm.environments.harness.spec import harness_named, shipped_names
from rllm.errors import AgentError, ConfigError, RequestRefused
from rllm.trainer.samples import training_batch
from rllm.types.call_budget import CallBudget
from rllm.types.episode import Outcome, TerminationReason
from rllm.types.task import Task

PAGE = Path(__file__).parents[2] / "docs" / "harnesses.md"


def block(language: str) -> str:
    """The page's one block in a language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return found


def harness_file(folder: Path, text: str) -> str:
    (folder / "my_agent.toml").write_text(text)
    return str(folder / "my_agent.toml")


async def test_a_command_line_agent_mends_the_issue_and_every_token_is_accounted_for(
    task: Task, tmp_path: Path
) -> None:
    """The agent and its file are those of the page."""
    (tmp_path / "my_agent.py").write_text(block("python"))
    model = mends("bash", "command", last="Done.")
    episode = await played(harness_file(tmp_path, block("toml")), task, model, tmp_path)
    assert (episode.outcome, episode.is_correct) == (Outcome.SCORED, True), episode.info
    assert "+    return a + b" in episode.artifacts["patch"]
    assert episode.info["harness"]["refused"] == []
    (trajectory,) = episode.trajectories
    assert (trajectory.name, trajectory.reward, len(trajectory.steps)) == ("my_agent", 1.0, 3)
    for earlier, later in pairwise(trajectory.steps):
        known = earlier.prompt_ids + earlier.response_ids
        assert later.prompt_ids[: len(known)] == known
    batch = training_batch([episode], {trajectory.uid: np.ones(3)})
    num_sampled = sum(len(step.response_ids) for step in trajectory.steps)
    assert (batch.token_counts["sampled"], batch.token_counts["trained"]) == (num_sampled, num_sampled)
    (sample,) = batch.samples
    assert sample.num_trainable == num_sampled < len(sample.token_ids_T)


FAILURES = {
    "crash": ("sys.exit('no such setting')", "ended with exit code 1. Its last output: no such setting"),
    "permission": ("input('Allow this command? [y/N] ')", "EOFError"),
    "terminal": ("open('/dev/tty')", "'/dev/tty'"),
    "elsewhere": (
        "import urllib.request; urllib.request.urlopen('http://api.example.com/v1')",
        "it asked for api.example.com, and reaches its model alone",
    ),
}


FORBIDDEN_ONCE = """
import json, sys, time, urllib.error, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": "Go on."}]}).encode()
def ask():
    return urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/chat/completions", body)).read()
try:
    ask()
except urllib.error.HTTPError as error:
    assert error.code == 403
    time.sleep(1.5)
ask()
"""


async def test_a_call_that_the_model_itself_forbids_ends_no_harness(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "END_S", 0.3)
    answers: list[Any] = [RequestRefused("Not this.", status=403), "a few words"]
    (tmp_path / "asks.py").write_text(FORBIDDEN_ONCE)
    text = 'copy = ["asks.py"]\ncommand = ["python3", "{harness}/asks.py", "{base_url}", "{task}"]'
    episode = await played(
        harness_file(tmp_path, text + "\nbudget.turns = 9"), task, lambda messages: answers.pop(0), tmp_path
    )
    assert episode.info["harness"]["exit_code"] == 0, episode.info
    assert answers == []


class _OddSandbox:
    """Hands out no socket for datagrams."""

    def listen(self, port: int, *, datagrams: bool = False) -> socket.socket:
        return socket.create_server(("127.0.0.1", 0))


def test_a_door_that_cannot_serve_says_so_instead_of_waiting() -> None:
    with (
        pytest.raises(ValueError, match=r"UDP|datagram"),
        door.Door(cast(Any, _OddSandbox()), "http://127.0.0.1:1/v1"),
    ):
        pytest.fail("nobody answers there")


ASKS_ONCE = """
import json, sys, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": "Go on."}]}).encode()
urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/chat/completions", body)).read()
"""


@pytest.mark.parametrize("kind", FAILURES)
async def test_a_harness_that_goes_wrong_ends_with_its_cause(kind: str, task: Task, tmp_path: Path) -> None:
    program, cause = FAILURES[kind]
    text = f'command = ["python3", "-c", """{ASKS_ONCE}{program}""", "{{base_url}}", "{{task}}"]'
    episode = await played(harness_file(tmp_path, text), task, lambda messages: "words", tmp_path)
    assert (episode.outcome, episode.reward) == (Outcome.POLICY_FAILURE, 0.0)
    assert episode.info["error"]["type"] == "AgentError"
    assert cause in episode.info["error"]["message"]


SET_UP_FAULTS = {
    **{kind: ("python3", f"import sys; {program}", cause) for kind, (program, cause) in FAILURES.items()},
    "no interpreter": ("nodejs-99", "0", "nodejs-99"),
    "nothing asked": ("python3", "print('Goodbye.')", "ended with exit code 0. Its last output: Goodbye."),
    "hangs": ("python3", "import time; time.sleep(60)", "had not ended after 1 s"),
    "no memory": ("python3", "held = b'x' * (2 << 30)", "memory"),
}


@pytest.mark.parametrize("kind", SET_UP_FAULTS)
async def test_what_ends_before_its_first_call_ends_the_run_with_its_cause(
    kind: str, task: Task, tmp_path: Path
) -> None:
    """All episodes so far, one, failed like that."""
    program, code, cause = SET_UP_FAULTS[kind]
    text = f'command = ["{program}", "-c", """{code}""", "{{base_url}}", "{{task}}"]\nmemory_mb = 512\n'
    name = harness_file(tmp_path, text + ("wall_s = 1" if kind == "hangs" else ""))
    with pytest.raises(AgentError) as failure:
        await played(name, task, lambda messages: "", tmp_path)
    assert cause.lower() in str(failure.value).lower()


COUNTS_TOKENS = """
import json, sys, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Go on."}]}).encode()
urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/messages/count_tokens", body)).read()
sys.exit("no such setting")
"""


async def test_what_was_never_answered_is_no_failure_of_the_policy(task: Task, tmp_path: Path) -> None:
    """Its first prompt is too long, or it fails after it has counted the tokens of one."""

    def refuse(messages: Any) -> str:
        raise RequestRefused("The prompt has 40,000 tokens; the context holds 2,048.", status=400)

    for program, cause in (
        (ASKS_ONCE, "has 40,000 tokens; the context holds"),
        (COUNTS_TOKENS, "Nothing was asked"),
    ):
        (tmp_path / "asks.py").write_text(program)
        text = 'copy = ["asks.py"]\ncommand = ["python3", "{harness}/asks.py", "{base_url}", "{task}"]'
        with pytest.raises(AgentError, match=cause):
            await played(harness_file(tmp_path, text), task, refuse, tmp_path)


async def test_what_ends_before_its_first_call_is_no_failure_of_the_policy(
    task: Task, tmp_path: Path
) -> None:
    (tmp_path / "asks.py").write_text(
        f"import sys\nif 'twin' in sys.argv[2]: sys.exit('no Node')\n{ASKS_ONCE}"
    )
    text = 'copy = ["asks.py"]\ncommand = ["python3", "{harness}/asks.py", "{base_url}", "{task}"]'
    twin = Task(
        id="twin",
        metadata=task.metadata | {"entry": task.metadata["entry"] | {"problem_statement": "Its twin."}},
    )
    episodes = await played_all(
        harness_file(tmp_path, text), [task, twin], lambda messages: "words", tmp_path
    )
    ends = {each.task_id: (each.outcome, each.reward) for each in episodes}
    assert ends == {"calc-1": (Outcome.SCORED, 0.0), "twin": (Outcome.INFRASTRUCTURE_FAILURE, 0.0)}
    with pytest.raises(AgentError, match="no Node"):
        await played_all(
            harness_file(tmp_path, text), [task, twin], lambda _: "words", tmp_path, max_failed_fraction=0.0
        )


ELSEWHERE = """
import http.client, sys, urllib.parse
own = urllib.parse.urlsplit(sys.argv[1])
def status(target):
    line = http.client.HTTPConnection(own.netloc)
    line.request("GET", target)
    return line.getresponse().status
others = ("http://api.example.com/v1", "/sessions", "/health", own.path + "/../../x", "/k/other/v1/models")
assert [status(target) for target in others] == [403] * 5
assert status(own.path + "/models") == 200
import socket
first = f"GET {own.path}/models HTTP/1.1\\r\\nHost: x\\r\\nConnection: keep-alive\\r\\n\\r\\n".encode()
second = b"GET /health HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n"
for both, status in ((first + second, b" 200 OK"), (first.replace(b"1.1", b"1.0") * 2, b" 403 ")):
    line = socket.create_connection((own.hostname, own.port))
    line.settimeout(20)
    line.sendall(both)
    answers = b""
    while piece := line.recv(65536):
        answers += piece
    assert answers.count(b"HTTP/1.1 ") == 1 and status in answers, answers
"""


async def test_nothing_is_reached_but_its_own_session(task: Task, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(ELSEWHERE + ASKS_ONCE)
    text = 'copy = ["other.py"]\ncommand = ["python3", "{harness}/other.py", "{base_url}", "{task}"]'
    episode = await played(harness_file(tmp_path, text), task, lambda messages: "words", tmp_path)
    assert episode.outcome is Outcome.SCORED, episode.info
    refused = episode.info["harness"]["refused"]
    assert refused[:3] == ["api.example.com", "/sessions", "/health"]
    assert len(refused) == 6
    assert refused[5].endswith("/models"), "by HTTP/1.0, which has no end of its own"


async def test_a_harness_that_waits_is_stopped_and_what_it_left_is_judged(task: Task, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(
        ASKS_ONCE + "print('Press a key', flush=True)\nimport time\ntime.sleep(60)\n"
    )
    text = (
        'copy = ["waits.py"]\ncommand = ["python3", "{harness}/waits.py", "{base_url}", "{task}"]\nwall_s = 5'
    )
    episode = await played(harness_file(tmp_path, text), task, lambda messages: "words", tmp_path)
    assert (episode.outcome, episode.termination_reason) == (Outcome.TRUNCATED, TerminationReason.TIMEOUT)
    assert episode.info["cause"] == "my_agent had not ended after 5 s. Its last output: Press a key"
    assert episode.info["evaluation"]["reason"] == "the patch is empty"


def test_a_door_stops_a_program_that_has_worked_for_its_time() -> None:
    is_stopped = threading.Event()

    class Inside:
        def listen(self, port: int, *, datagrams: bool = False) -> socket.socket:
            if not datagrams:
                return socket.create_server(("127.0.0.1", 0))
            made = socket.socket(type=socket.SOCK_DGRAM)
            made.bind(("127.0.0.1", 0))
            return made

        def stop(self) -> None:
            is_stopped.set()

    inside: Any = Inside()
    with door.Door(inside, "http://127.0.0.1:9/sessions/a/v1", work_s=0.01) as opened:
        is_stopped.wait()
        assert opened.is_out_of_time


ASKS = """
import json, sys, time, urllib.error, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": "Go on."}]}).encode()
while True:
    try:
        urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/chat/completions", body)).read()
    except urllib.error.HTTPError as error:
        assert error.code == 403 and b"budget_exhausted" in error.read()
        time.sleep(0.2)
"""


async def test_a_file_that_is_edited_while_a_run_goes_on_changes_the_next_run(
    task: Task, tmp_path: Path
) -> None:
    """All episodes of a run are of one harness."""
    (tmp_path / "says.py").write_text(ASKS_ONCE + "print('first')")
    text = 'copy = ["says.py"]\ncommand = ["python3", "{harness}/says.py", "{base_url}", "{task}"]'
    name = harness_file(tmp_path, text)
    async with engine_of(name, lambda messages: "words", tmp_path) as engine:
        before = [each async for each in engine.run([task])]
        (tmp_path / "says.py").write_text(ASKS_ONCE + "print('second')")
        after = [each async for each in engine.run([task])]
        (tmp_path / "says.py").unlink()
        after += [each async for each in engine.run([task])]
    assert [each.info["harness"]["output"].strip() for each in before + after] == ["first"] * 3


async def test_a_harness_that_has_used_up_its_turns_is_cut_off_and_what_it_left_is_judged(
    task: Task, tmp_path: Path
) -> None:
    """The agent of the page raises at the refusal; the mend of its second turn stands."""
    (tmp_path / "my_agent.py").write_text(block("python"))
    name = harness_file(tmp_path, block("toml") + "budget.turns = 2\n")
    episode = await played(name, task, mends("bash", "command", last="Done."), tmp_path)
    assert (episode.outcome, episode.termination_reason) == (
        Outcome.TRUNCATED,
        TerminationReason.MAX_TURNS_EXCEEDED,
    ), episode.info
    assert "(turns: 2 of 2)" in episode.info["cause"]
    assert episode.info["harness"]["exit_code"] == 1
    assert (episode.trajectories[0].reward, len(episode.trajectories[0].steps)) == (1.0, 2)
    assert episode.metrics["failed_calls"] == 1


async def test_a_harness_that_goes_on_asking_is_stopped(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of the run is the tighter one."""
    monkeypatch.setattr(door, "END_S", 0.5)
    (tmp_path / "asks.py").write_text(ASKS)
    text = 'copy = ["asks.py"]\ncommand = ["python3", "{harness}/asks.py", "{base_url}", "{task}"]'
    name = harness_file(tmp_path, text + "\nbudget.turns = 9")
    budget = CallBudget(tokens=10)
    episode = await played(name, task, lambda messages: "a few words", tmp_path, budget=budget)
    assert episode.outcome is Outcome.TRUNCATED, episode.info
    assert episode.termination_reason is TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED
    assert sum(len(step.response_ids) for step in episode.trajectories[0].steps) == 10
    assert episode.info["harness"]["status"] == "killed"
    assert episode.info["evaluation"]["reason"] == "the patch is empty"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('command = ["{task}"]\nbudget.turn = 3', "`budget.turn` limits nothing"),
        ('command = ["{task}"]\nbudget.turns = 0.5', "`budget.turns` is 0.5"),
        ('command = ["{task}"]\nbudget = 3', "must be a table with turns"),
        ('comand = ["a"]', "did you mean `command`"),
        ('command = ["a"]', "where the task goes"),
        ('stdin = "{task}"', "has no `command`"),
        ('command = "a {task}"', "must be a list of texts"),
        ('command = ["{task}"]\nwall_s = -1', "must be a number above 0"),
        ('command = ["{task}"]\ncopy = ["../x"]', "must be a file beside"),
        ('command = ["{task}"]\npip = ["a==1"]\npython = "3"', "must be a release such as 3.12"),
        ('command = ["{task}"]\npython = "3.12"', "there are none"),
        ('command = ["{task}"]\nbuild = ["a==1"]', "there are none"),
        ('command = ["{task}"]\npip = ["b==1"]\nbuild = ["a"]', "so name one version"),
        ('command = ["{task}"]\npip = ["b==1"]\nbuild = ["a==1.*"]', "so name one version"),
        ('command = ["{task}"]\npip = ["b==1"]\nbuild = ["a @ https://x/a==1"]', "so name one version"),
        ('command = ["{task}"]\npip = ["b==1"]\nbuild = ":all:"', "must be a list of texts"),
        ('command = ["{task}"]\nprompt = "Work."', "has no {issue}"),
        ('command = ["{task}"]\npip = ["--index-url x"]', "give names with versions"),
        ('command = ["{task}"]\n[files]\n"a" = "b"', "must be an absolute path"),
        ("command = [", "is no TOML file"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"my_agent\.toml") as refusal:
        harness_named(harness_file(tmp_path, text))
    assert message in str(refusal.value)


def test_a_python_that_is_not_here_is_refused_with_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    text = 'command = ["{harness}/bin/x", "{task}"]\npip = ["iniconfig==2.0.0"]\npython = "3.99"'
    spec = harness_named(harness_file(tmp_path, text))
    with pytest.raises(ConfigError, match=r"Python 3\.99.*pyenv install 3\.99"):
        harness_directory(spec)
    assert not (tmp_path / "home").exists(), "nothing half-made stays"


def test_the_page_names_what_ships() -> None:
    named = re.findall(r"^\| `([\w-]+)` \| [\d.]+ \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(named) == shipped_names()


def test_harnesses_are_found_by_name() -> None:
    for name in shipped_names():
        assert actor_named(f"harness:{name}").name == name
        assert f"`harness:{name}`" in published_agent_successor(f"harbor:{name}")
    with pytest.raises(ConfigError, match="did you mean `harness:mini-swe-agent`"):
        actor_named("harness:mini-swe")
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        actor_named("harness:nowhere.toml")
