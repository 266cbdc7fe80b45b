"""Task directories played in a real sandbox, where this machine has one."""

import re
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

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
    ],
)
def test_tests_that_say_nothing_are_an_error_and_no_zero(task: Path, test: str, message: str) -> None:
    (task / "tests" / "test.sh").write_text(test)
    environment = TaskDirectoryEnv(task, backend=usable_backend())
    environment.reset()
    with pytest.raises(RewardError, match=f"{message}.*its tests need mending"):
        environment.step("Done.")
    environment.close()


def test_tests_that_give_a_reward_only_for_a_solution_are_no_excuse(task: Path) -> None:
    """`set -e` in test.sh: what is wrong ends the tests before they write."""
    (task / "tests" / "test.sh").write_text(
        "set -e\ncmp /app/sorted.txt <(sort /app/words.txt)\necho 1 > /logs/verifier/reward.txt\n"
    )
    environment = TaskDirectoryEnv(task, backend=usable_backend())
    environment.reset()
    _, reward, done, info = environment.step("Done.")
    assert (reward, done, info["rewards"]) == (0.0, True, {})
    assert "on the task's own solution they leave one" in info["reason"]


def test_the_tests_run_as_another_user_where_there_is_one(task: Path) -> None:
    (task / "tests" / "test.sh").write_text("id -u > /logs/verifier/reward.txt\n")
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
    with pytest.raises(ConfigError, match=r"None of the 1 tasks in .* can be run here.*no nginx here"):
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
    assert "Dockerfile:1: `FROM alpine` cannot be built here" in skipped["task-3"]
    assert "task.toml: `environment.gpus` is not there" in skipped["task-7"]
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
        with pytest.raises(SandboxError, match=r"its health check .* failed 2 times"):
            environment.reset()


def test_an_unknown_argument_is_refused(task: Path) -> None:
    with pytest.raises(ConfigError, match="does not know `speed`"):
        TaskDirectoryEnv.from_dict({"path": str(task), "speed": 3})


def test_a_task_that_is_solved_with_the_last_turn_is_solved_and_not_cut_off(task: Path) -> None:
    environment = TaskDirectoryEnv(task, backend=usable_backend(), max_turns=1)
    environment.reset()
    _, reward, done, info = environment.step("```sh\nsort words.txt > sorted.txt\n```")
    assert (reward, done, info.get(CUT_OFF), info["is_correct"]) == (1.0, True, None, True)
    environment.close()
