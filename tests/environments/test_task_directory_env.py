"""Task directories played in a real sandbox, where this machine has one."""

import re
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rllm.data.downloads import Download
from rllm.environments.base import CUT_OFF
from rllm.environments.task_directory import WORLD, TaskDirectoryEnv
from rllm.errors import AgentError, ConfigError, RewardError, SandboxError
from rllm.eval.catalogue import benchmark_named
from rllm.eval.plan import EvaluationPlan
from rllm.eval.tasks import benchmark_tasks, benchmark_world
from rllm.sandbox.backends import require_backend
from rllm.sandbox.launch import is_privileged

TEST = """\
#!/bin/bash
if [ "$(cat /app/sorted.txt 2>/dev/null)" = "$(sort /app/words.txt)" ] && [ "$MODE" = strict ]; then
  echo '{"reward": 1.0, "tidy": 0.5}' > /logs/verifier/reward.json
else
  echo 0 > /logs/verifier/reward.txt
fi
exit 3
"""


COUNTS = 'echo \'{"passed": 0, "failed": 5}\' > /logs/verifier/reward.json\n'


def declare_reward_range(task: Path, bounds: str) -> None:
    with (task / "task.toml").open("a") as settings:
        settings.write(f"[metadata]\nreward_range = {bounds}\n")


def usable_backend() -> str:
    for name in ("bubblewrap", "unshare"):
        try:
            require_backend(name)
        except ConfigError:
            continue
        return name
    pytest.skip("no sandbox on this machine")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "sort-words"
    for folder in ("environment", "tests", "solution"):
        (path / folder).mkdir(parents=True)
    (path / "task.toml").write_text('[verifier]\ntimeout_sec = 20\nenv = { MODE = "strict" }\n')
    (path / "instruction.md").write_text("Sort /app/words.txt into /app/sorted.txt.")
    (path / "environment" / "Dockerfile").write_text(
        "FROM debian\nWORKDIR /app\nCOPY words.txt .\nENV LC_ALL=C\n"
    )
    (path / "environment" / "words.txt").write_text("pear\napple\nfig\n")
    (path / "tests" / "test.sh").write_text(TEST)
    (path / "solution" / "solve.sh").write_text("sort /app/words.txt > /app/sorted.txt\n")
    return path


@pytest.fixture
def environment(task: Path) -> Iterator[TaskDirectoryEnv]:
    made = TaskDirectoryEnv(task, backend=usable_backend(), max_turns=3)
    yield made
    made.close()


def test_commands_run_where_the_task_says_and_tests_come_afterwards(environment: TaskDirectoryEnv) -> None:
    observation, info = environment.reset()
    assert "Sort /app/words.txt" in observation
    assert info == {"task": "sort-words"}
    shown, reward, done, info = environment.step(
        "Look:\n```sh\npwd; ls /app; ls /tests /solution; exit 4\n```"
    )
    assert (reward, done) == (0.0, False)
    assert "/app\nwords.txt\n" in shown
    assert "test.sh" not in shown
    assert "exit code 4" in shown
    environment.step("```bash\nsort words.txt > sorted.txt\n```")
    _, reward, done, info = environment.step("Done.")
    assert (reward, done) == (1.0, True)
    assert info == {"rewards": {"reward": 1.0, "tidy": 0.5}, "reason": "tests", "is_correct": True}
    with pytest.raises(AgentError, match="call reset first"):
        environment.step("again")


def test_an_unsolved_task_earns_nothing_and_turns_end(environment: TaskDirectoryEnv) -> None:
    environment.reset()
    for _ in range(2):
        assert not environment.step("```sh\ntrue\n```")[2]
    _, reward, done, info = environment.step("```sh\ntrue\n```")
    assert (reward, done, info[CUT_OFF], info["is_correct"]) == (0.0, True, True, False)


def test_a_reward_that_the_agent_planted_is_gone_before_the_tests(environment: TaskDirectoryEnv) -> None:
    environment.reset()
    environment.step(
        "```sh\nmkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt\n"
        "echo '{\"reward\": 1}' > /logs/verifier/reward.json; echo 'exit 0' > /tests/test.sh\n```"
    )
    assert environment.step("Done.")[1] == 0.0


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("exit 0\n", "left neither reward.json nor reward.txt"),
        ("echo yes > /logs/verifier/reward.txt\n", "holds 'yes', which is no reward"),
        ("echo nan > /logs/verifier/reward.txt\n", "a reward is a finite number"),
        ('echo \'{"reward": "1"}\' > /logs/verifier/reward.json\n', "a reward is a finite number"),
        ("echo '{}' > /logs/verifier/reward.json\n", "must be an object"),
        ("touch /logs/verifier/reward.txt\n", "holds '', which is no reward"),
        (
            COUNTS,
            "reward.json pays failed = 5, which is outside 0 to 1, the `metadata.reward_range` of task.toml",
        ),
        ("echo 1.5 > /logs/verifier/reward.txt\n", "reward.txt pays reward = 1.5, which is outside 0 to 1"),
        ("echo -1 > /logs/verifier/reward.txt\n", "reward.txt pays reward = -1, which is outside 0 to 1"),
        (f"{COUNTS}echo 2 > /logs/verifier/reward.txt\n", "reward.json and /logs/verifier/reward.txt pays"),
    ],
)
def test_tests_that_say_nothing_are_an_error_and_no_zero(task: Path, test: str, message: str) -> None:
    (task / "tests" / "test.sh").write_text(test)
    environment = TaskDirectoryEnv(task, backend=usable_backend())
    environment.reset()
    with pytest.raises(RewardError, match=f"{message}.*tests .*mending"):
        environment.step("Done.")
    environment.close()


@pytest.mark.parametrize(
    ("test", "bounds", "paid"),
    [
        (f"{COUNTS}echo 0 > /logs/verifier/reward.txt\n", "", 0.0),
        (f"{COUNTS}echo 0.5 > /logs/verifier/reward.txt\n", "", 0.5),
        ('echo \'{"reward": 0, "passed": 7}\' > /logs/verifier/reward.json\n', "", 0.0),
        ('echo \'{"style": 0.5, "speed": 1}\' > /logs/verifier/reward.json\n', "", 0.75),
        ("echo -3 > /logs/verifier/reward.txt\n", "[-5, 10]", -3.0),
        (COUNTS, "[0, 5]", 2.5),
    ],
)
def test_a_reward_is_within_the_range_that_its_task_declares(
    task: Path, test: str, bounds: str, paid: float
) -> None:
    (task / "tests" / "test.sh").write_text(test)
    if bounds:
        declare_reward_range(task, bounds)
    environment = TaskDirectoryEnv(task, backend=usable_backend())
    environment.reset()
    assert environment.step("Done.")[1] == paid
    environment.close()


@pytest.mark.parametrize("bounds", ["[1, 0]", "[0]", "1", '["0", "1"]', "[0, inf]"])
def test_a_range_of_rewards_that_is_none_is_refused(task: Path, bounds: str) -> None:
    declare_reward_range(task, bounds)
    with pytest.raises(ConfigError, match=r"task.toml: `metadata.reward_range` .* two numbers"):
        TaskDirectoryEnv(task, backend=usable_backend())


def test_tests_that_give_a_reward_only_for_a_solution_are_no_excuse(task: Path) -> None:
    """`set -e` in test.sh: what is wrong ends the tests before they write."""
    (task / "tests" / "test.sh").write_text(
        "set -e\ncmp /app/sorted.txt <(sort /app/words.txt)\necho 1 > /logs/verifier/reward.txt\n"
    )
    environment = TaskDirectoryEnv(task, backend=usable_backend())
    environment.reset()
    _, reward, done, info = environment.step("Done.")
    assert (reward, done, info["rewards"]) == (0.0, True, {})
    assert "own solution" in info["reason"]


@pytest.mark.parametrize("with_solution", [True, False])
def test_tests_that_leave_both_results_for_a_solution_pay_it(task: Path, with_solution: bool) -> None:
    """The one that counts is theirs, and no program's that they started."""
    (task / "tests" / "test.sh").write_text(
        "echo 0 > /logs/verifier/reward.txt\n"
        "cmp /app/sorted.txt <(sort /app/words.txt) && echo '{\"reward\": 1}' > /logs/verifier/reward.json\n"
    )
    if not with_solution:
        shutil.rmtree(task / "solution")
    environment = TaskDirectoryEnv(task, backend=usable_backend())
    environment.reset()
    environment.step("```sh\nsort words.txt > sorted.txt\n```")
    assert environment.step("Done.")[1] == 1.0


def test_the_tests_run_as_another_user_where_there_is_one(task: Path) -> None:
    (task / "tests" / "test.sh").write_text("id -u > /logs/verifier/reward.txt\n")
    declare_reward_range(task, "[0, 4294967295]")
    environment = TaskDirectoryEnv(task, backend=usable_backend())
    environment.reset()
    agents = environment.step("```sh\nid -u\n```")[0].split()[0]
    (tests,) = environment.step("Done.")[3]["rewards"].values()
    assert (tests != float(agents)) == is_privileged()


def test_the_tasks_own_solution_is_right(task: Path) -> None:
    (made,) = WORLD.tasks("test", 5, path=str(task.parent))
    assert WORLD.demonstrate is not None
    environment = WORLD.env_class.from_dict({**made, "backend": usable_backend()})
    environment.reset()
    answers = WORLD.demonstrate(made, noise=0.0, rng=np.random.default_rng(0))
    rewards = [environment.step(answer)[1] for _, answer in answers]
    assert rewards[-1] == 1.0


def test_a_directory_is_a_benchmark_by_its_path(task: Path) -> None:
    benchmark = benchmark_named(str(task.parent))
    assert [each["task_id"] for each in benchmark_tasks(benchmark)] == ["sort-words"]
    assert benchmark_tasks(benchmark, seed=3) == benchmark_tasks(benchmark)
    with pytest.raises(ConfigError, match="no split `train`"):
        benchmark_tasks(benchmark, "train")


def test_an_archive_of_task_directories_is_a_benchmark(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = task.parent / "tasks.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(task, "tasks-main/sort-words")
    got = Download(path=archive, sha256="0" * 64)
    monkeypatch.setattr("rllm.eval.tasks.download", lambda url, sha256="": got)
    benchmark = benchmark_named("terminal-bench")
    (made,) = benchmark_tasks(benchmark)
    assert benchmark_world(benchmark).tasks("test", 5) == [made]
    environment = TaskDirectoryEnv.from_dict(made)
    assert environment.task.instruction.startswith("Sort /app/words.txt")


@pytest.mark.usefixtures("bubblewrap")
def test_a_task_may_name_any_folder_and_its_paths_are_real(task: Path) -> None:
    (task / "environment" / "Dockerfile").write_text(
        "FROM debian\nWORKDIR /usr/src/app\nRUN mkdir -p /etc/service /testbed && touch /testbed/given\n"
        "COPY words.txt /etc/service/\n"
    )
    (task / "tests" / "test.sh").write_text(
        "[ -f /etc/service/words.txt ] && [ -f /testbed/app/x ] && [ -f /usr/src/app/y ] && echo 1 > "
        "/logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
    )
    environment = TaskDirectoryEnv(task, backend=usable_backend())
    environment.reset()
    shown = environment.step("```sh\npwd; mkdir /testbed/app; touch /testbed/app/x y; ls /etc/service\n```")[
        0
    ]
    assert "/usr/src/app\nwords.txt\n" in shown
    assert environment.step("Done.")[1] == 1.0


@pytest.mark.parametrize("artifact", ["", "/root/answer"])
def test_an_agents_home_is_left_behind_unless_the_task_names_what_is_in_it(task: Path, artifact: str) -> None:
    if artifact:
        (task / "task.toml").write_text(f'artifacts = ["{artifact}"]\n')
    (task / "tests" / "test.sh").write_text(
        "n=$(ls /root/answer /root/.local 2>/dev/null | grep -c '^f$'); echo $n > /logs/verifier/reward.txt\n"
    )
    environment = TaskDirectoryEnv(task, backend=usable_backend())
    environment.reset()
    environment.step("```sh\nmkdir -p ~/answer ~/.local; touch ~/answer/f ~/.local/f\n```")
    assert environment.step("Done.")[3]["rewards"] == {"reward": 1.0 if artifact else 0.0}


@pytest.mark.usefixtures("bubblewrap")
def test_a_task_of_a_collection_that_cannot_be_run_is_skipped_and_counted(task: Path) -> None:
    other = task.parent / "a-web-server"
    shutil.copytree(task, other)
    (other / "environment" / "Dockerfile").write_text("FROM debian\nRUN echo no nginx here; exit 3\n")
    benchmark = benchmark_named(str(task.parent))
    assert [each["task_id"] for each in benchmark_tasks(benchmark)] == ["sort-words"]
    assert WORLD.skipped is not None
    skipped = WORLD.skipped("test", **benchmark.task)
    assert list(skipped) == ["a-web-server"]
    assert re.search(r"Dockerfile:2: `RUN .*it ended with code 3: no nginx here", skipped["a-web-server"])
    plan = EvaluationPlan(name="n", model="m", agent="a", evaluator="e", ways={}, skipped=skipped)
    assert plan.to_dict()["skipped"] == skipped
    shutil.rmtree(task)
    with pytest.raises(ConfigError, match=r"None of the 1 .*no nginx here"):
        benchmark_tasks(benchmark)


def test_two_of_ten_tasks_are_unsupported_and_eight_are_played(task: Path) -> None:
    task.rename(task.parent / "task-0")
    for number in range(1, 10):
        other = task.parent / f"task-{number}"
        shutil.copytree(task.parent / "task-0", other)
        line = (
            "FROM alpine" if number == 3 else f"FROM debian\nWORKDIR /app\nCOPY words.txt .\nENV N={number}"
        )
        (other / "environment" / "Dockerfile").write_text(line)
    (task.parent / "task-7" / "task.toml").write_text("[environment]\ngpus = 1\n")
    benchmark = benchmark_named(str(task.parent))
    names = [each["task_id"] for each in benchmark_tasks(benchmark)]
    assert names == [f"task-{number}" for number in range(10) if number not in (3, 7)]
    assert WORLD.skipped is not None
    skipped = WORLD.skipped("test", **benchmark.task)
    assert "Dockerfile:1: `FROM alpine`" in skipped["task-3"]
    assert "task.toml: `environment.gpus`" in skipped["task-7"]
    environment = TaskDirectoryEnv(task.parent / "task-5", backend=usable_backend())
    environment.reset()
    assert environment.step("```sh\necho $N; ls\n```")[0].startswith("5\nwords.txt")
    environment.close()


@pytest.mark.parametrize("tries", [1, 3])
def test_a_health_check_is_waited_for(task: Path, tries: int) -> None:
    command = f"echo >> /app/tries; [ $(wc -l < /app/tries) -ge {tries} ]"
    (task / "task.toml").write_text(
        f"[environment.healthcheck]\ncommand = '{command}'\ninterval_sec = 0.01\nretries = 1\n"
    )
    environment = TaskDirectoryEnv(task, backend=usable_backend())
    if tries == 1:
        environment.reset()
        environment.close()
    else:
        with pytest.raises(SandboxError, match=r"health check .* 2 times"):
            environment.reset()


def test_a_health_check_may_fail_while_its_start_period_lasts(task: Path) -> None:
    """Then it is tried every `start_interval_sec`, and no retry is used up."""
    (task / "task.toml").write_text(
        "[environment.healthcheck]\ncommand = 'echo >> /app/tries; [ $(wc -l < /app/tries) -ge 4 ]'\n"
        "start_period_sec = 600\nstart_interval_sec = 0.01\nretries = 0\n"
    )
    environment = TaskDirectoryEnv(task, backend=usable_backend())
    environment.reset()
    assert "4 /app/tries" in environment.step("```sh\nwc -l /app/tries\n```")[0]
    environment.close()


def test_an_unknown_argument_is_refused(task: Path) -> None:
    with pytest.raises(ConfigError, match="does not know `speed`"):
        TaskDirectoryEnv.from_dict({"path": str(task), "speed": 3})


def test_a_task_that_is_solved_with_the_last_turn_is_solved_and_not_cut_off(task: Path) -> None:
    environment = TaskDirectoryEnv(task, backend=usable_backend(), max_turns=1)
    environment.reset()
    _, reward, done, info = environment.step("```sh\nsort words.txt > sorted.txt\n```")
    assert (reward, done, info.get(CUT_OFF), info["is_correct"]) == (1.0, True, None, True)
    environment.close()


STEPPED = """\
multi_step_reward_strategy = "mean"
artifacts = ["/app/notes.txt"]
[verifier]
timeout_sec = 20
[[steps]]
name = "first"
min_reward = 0.5
[[steps]]
name = "second"
[steps.verifier]
timeout_sec = 30
env = { MODE = "last" }
[steps.healthcheck]
command = "test -f /app/given.txt"
"""


@pytest.fixture
def stepped(task: Path) -> Path:
    """Two steps in one machine: what the first left is there in the second, with new files."""
    (task / "task.toml").write_text(STEPPED)
    (task / "instruction.md").unlink()
    (task / "tests" / "test.sh").unlink()
    (task / "tests" / "shared.sh").write_text("echo ${1} > /logs/verifier/reward.txt\n")
    tests = {
        "first": "bash /tests/shared.sh $(cat /app/one 2>/dev/null || echo 0)\n",
        "second": "[ $MODE = last ] && bash /tests/shared.sh $(cat /app/one /app/two | sort | tail -1)\n",
    }
    for name, test in tests.items():
        folder = task / "steps" / name
        for each in ("tests", "solution"):
            (folder / each).mkdir(parents=True)
        (folder / "instruction.md").write_text(f"Do the {name} thing.")
        (folder / "tests" / "test.sh").write_text(test)
        (folder / "solution" / "solve.sh").write_text("echo 1 > one; echo 1 > two\n")
    (task / "steps" / "second" / "workdir").mkdir()
    (task / "steps" / "second" / "workdir" / "given.txt").write_text("given\n")
    (task / "steps" / "second" / "workdir" / "setup.sh").write_text("cat given.txt one > both.txt\n")
    return task


def test_the_steps_of_a_task_go_on_in_one_machine_and_each_is_judged(stepped: Path) -> None:
    environment = TaskDirectoryEnv(stepped, backend=usable_backend())
    assert environment.reset()[0].startswith("Do the first thing.")
    environment.step("```sh\necho 1 > one; echo a note > notes.txt; ls given.txt\n```")
    observation, reward, done, _ = environment.step("Done.")
    assert (observation, reward, done) == ("Do the second thing.", 0.0, False)
    shown = environment.step("```sh\ncat both.txt; ls /tests setup.sh; echo 0.5 > two; echo 0.5 > one\n```")[
        0
    ]
    assert shown.startswith("given\n1\n")
    assert "given.txt" not in shown
    _, reward, done, info = environment.step("Done.")
    assert (reward, done, info["is_correct"]) == (0.75, True, False)
    assert info["steps"] == {"first": 1.0, "second": 0.5}
    assert info["artifacts"] == {"notes.txt": "a note\n"}


def test_a_step_that_goes_badly_is_the_last_one(stepped: Path) -> None:
    environment = TaskDirectoryEnv(stepped, backend=usable_backend())
    environment.reset()
    environment.step("```sh\necho 0.4 > one\n```")
    _, reward, done, info = environment.step("Done.")
    assert (reward, done, info["steps"]) == (0.2, True, {"first": 0.4, "second": 0.0})


def test_the_solutions_of_all_steps_are_played_and_the_last_reward_may_count_alone(stepped: Path) -> None:
    settings = (stepped / "task.toml").read_text()
    (stepped / "task.toml").write_text(settings.replace('"mean"', '"final"'))
    (made,) = WORLD.tasks("test", 5, path=str(stepped.parent))
    assert WORLD.demonstrate is not None
    turns = WORLD.demonstrate(made, noise=0.0, rng=np.random.default_rng(0))
    environment = WORLD.env_class.from_dict({**made, "backend": usable_backend()})
    shown = environment.reset()[0]
    last: tuple[Any, ...] = ()
    for expected, answer in turns:
        assert expected in (shown, "")
        last = environment.step(answer)
        shown = last[0]
    assert (last[1], last[2], last[-1]["is_correct"]) == (1.0, True, True)


OLD = """\
instruction: |
  Sort /app/words.txt into /app/sorted.txt.
difficulty: easy
parser_name: pytest
max_agent_timeout_sec: 60.0
max_test_timeout_sec: 60.0
"""
COMPOSE = "services:\n  client:\n    build: {dockerfile: Dockerfile}\n"
RUN_TESTS = """\
echo '=== short test summary info ==='
if cmp -s /app/sorted.txt <(sort /app/words.txt); then echo 'PASSED ../tests/test_outputs.py::test_sorted'
else echo 'FAILED ../tests/test_outputs.py::test_sorted - no'; fi
test -f $TEST_DIR/test_outputs.py
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A task in the form of Terminal-Bench 1; its tests print what pytest prints."""
    pytest.importorskip("yaml")
    path = tmp_path / "old" / "sort-words"
    (path / "tests").mkdir(parents=True)
    files = {
        "task.yaml": OLD,
        "docker-compose.yaml": COMPOSE,
        "Dockerfile": "FROM ghcr.io/laude-institute/t-bench/debian\nCOPY words.txt .\nENV LC_ALL=C\n",
        "words.txt": "pear\napple\nfig\n",
        "run-tests.sh": RUN_TESTS,
        "tests/test_outputs.py": "",
        "solution.sh": "sort /app/words.txt > /app/sorted.txt\n",
    }
    for name, text in files.items():
        (path / name).write_text(text)
    return path


def test_a_task_of_terminal_bench_1_is_played_and_read_by_the_summary_of_its_tests(old: Path) -> None:
    (made,) = WORLD.tasks("test", 5, path=str(old.parent))
    assert WORLD.demonstrate is not None
    environment = WORLD.env_class.from_dict({**made, "backend": usable_backend()})
    assert environment.reset()[0].startswith("Sort /app/words.txt")
    assert "words.txt" in environment.step("```sh\npwd; ls\n```")[0]
    assert environment.step("Done.")[1:3] == (0.0, True)
    environment.reset()
    rewards = [
        environment.step(answer)[1]
        for _, answer in WORLD.demonstrate(made, noise=0.0, rng=np.random.default_rng(0))
    ]
    assert rewards == [0.0, 1.0]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("task.yaml", OLD + "run_tests_in_same_shell: true\n", "`run_tests_in_same_shell` is true"),
        ("task.yaml", OLD.replace("pytest", "swebench"), "`parser_name` is 'swebench'"),
        ("task.yaml", "instruction: 3\n", "`instruction` is 3"),
        ("task.yaml", "a: [", "task.yaml cannot be read"),
        ("docker-compose.yaml", COMPOSE + "  db: {image: x}\n", "the service `db` needs a container engine"),
    ],
)
def test_what_an_old_task_asks_for_in_vain_is_refused_by_name(
    old: Path, name: str, text: str, message: str
) -> None:
    (old / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        TaskDirectoryEnv(old)


MCP_SERVER = """
import json, os, sys
ADD = {"name": "add", "description": "Add two numbers.",
       "inputSchema": {"properties": {"a": {"type": "number"}}}}
print("starting up")
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    method, params, result = message["method"], message["params"], {}
    if method == "tools/list":
        rest = params.get("cursor") == "2"
        result = {"tools": [{"name": "fail"}]} if rest else {"tools": [ADD], "nextCursor": "2"}
    elif method == "tools/call" and params["name"] == "add":
        total = sum(params["arguments"].values())
        text = f"{total} {os.environ['UNIT']} {os.getcwd()}"
        print(json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {}}))
        result = {"content": [{"type": "text", "text": text}]}
    elif method == "tools/call":
        result = {"content": [{"type": "text", "text": "no such thing"}], "isError": True}
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""
MCP_TABLE = """
[[environment.mcp_servers]]
name = "sums"
transport = "stdio"
command = "python3"
args = ["/srv/server.py"]
env = { UNIT = "apples" }
"""


def test_the_agent_has_the_tools_of_the_tasks_mcp_servers(task: Path) -> None:
    """They run in its machine, where a file that a tool writes is one of its own."""
    with (task / "task.toml").open("a") as settings:
        settings.write(MCP_TABLE)
    with (task / "environment" / "Dockerfile").open("a") as dockerfile:
        dockerfile.write("COPY server.py /srv/server.py\n")
    (task / "environment" / "server.py").write_text(MCP_SERVER)
    environment = TaskDirectoryEnv(task, backend=usable_backend(), max_turns=4)
    try:
        observation, info = environment.reset()
        assert [each["name"] for each in info["mcp_tools"]["sums"]] == ["add", "fail"]
        assert "`/run/mcp SERVER TOOL JSON`" in observation
        assert '- sums add {"a": {"type": "number"}}: Add two numbers.' in observation
        shown = environment.step('```sh\n/run/mcp sums add \'{"a": 2, "b": 3}\'\n```')[0]
        assert shown.startswith("5 apples /app\n"), shown
        shown = environment.step("```sh\n/run/mcp sums fail; /run/mcp sums add 'a'; /run/mcp other x\n```")[0]
        assert "no such thing" in shown
        assert "are no JSON" in shown
        assert "usage: /run/mcp" in shown
        environment.step("```sh\nsort words.txt > sorted.txt\n```")
        assert environment.step("Done.")[1] == 1.0
    finally:
        environment.close()


def test_a_server_that_does_not_start_is_no_fault_of_the_agents(task: Path) -> None:
    (task / "task.toml").write_text(MCP_TABLE)
    environment = TaskDirectoryEnv(task, backend=usable_backend())
    with pytest.raises(SandboxError, match="MCP server of its"):
        environment.reset()
