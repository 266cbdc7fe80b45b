from pathlib import Path

import pytest

from rllm.data.task_directory import (
    is_task_collection,
    is_task_directory,
    read_task_directory,
    task_directories,
)
from rllm.errors import ConfigError

TOML = """
schema_version = "1.4"
[task]
name = "org/sort"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 300.0
[verifier]
timeout_sec = 120
env = { KEY = "${TOKEN:-none}", PLACE = "here" }
[environment]
memory_mb = 2048
env = { MODE = "test" }
"""
DOCKERFILE = """\
FROM python:slim
# tools
RUN apt-get update && apt-get install -y --no-install-recommends \\
    tmux curl && \\
    rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY files/ /app/files/
COPY notes.txt .
ENV A=1 B="two words"
RUN mkdir -p /app/out /data/in
CMD ["bash"]
"""


def task_at(
    path: Path, toml: str = TOML, dockerfile: str = DOCKERFILE, instruction: str = "Sort it."
) -> Path:
    (path / "environment" / "files").mkdir(parents=True)
    (path / "tests").mkdir()
    (path / "task.toml").write_text(toml)
    (path / "instruction.md").write_text(instruction)
    (path / "environment" / "Dockerfile").write_text(dockerfile)
    (path / "environment" / "notes.txt").write_text("notes")
    (path / "environment" / "files" / "a.txt").write_text("a")
    (path / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    return path


def test_a_task_says_what_is_asked_and_what_there_is(tmp_path: Path) -> None:
    task = read_task_directory(task_at(tmp_path / "sort"))
    assert (task.name, task.instruction) == ("org/sort", "Sort it.")
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.memory_mb) == (300.0, 120.0, 2048)
    assert task.verifier_variables == {"KEY": "none", "PLACE": "here"}
    assert task.metadata == {"difficulty": "easy"}
    image = task.image(builds=False)
    assert (image.workdir, image.layers, len(image.runs)) == ("/app", (), 2)
    assert image.variables == {"A": "1", "B": "two words", "MODE": "test"}
    assert image.folders == ("/app", "/app/files")


def test_the_verifiers_variables_come_from_the_environment(tmp_path: Path) -> None:
    path = task_at(tmp_path / "t", toml='[verifier]\nenv = { KEY = "${TOKEN}" }\n')
    assert read_task_directory(path, {"TOKEN": "abc"}).verifier_variables == {"KEY": "abc"}
    with pytest.raises(ConfigError, match=r"verifier.*TOKEN"):
        read_task_directory(path, {})


def test_a_canary_at_the_top_is_not_part_of_the_instruction(tmp_path: Path) -> None:
    text = "<!-- BENCHMARK DATA canary GUID 123 -->\n# another canary line\n# A heading\nDo it.\n"
    assert read_task_directory(task_at(tmp_path / "t", instruction=text)).instruction == "# A heading\nDo it."


def test_old_ways_to_write_memory_are_read(tmp_path: Path) -> None:
    path = task_at(tmp_path / "t", toml='[environment]\nmemory = "2G"\n')
    assert read_task_directory(path).memory_mb == 2048


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("COPY --from=builder /a /b", r"Dockerfile:2: `--from=builder`.*above"),
        ("COPY ../secret /app/", r"Dockerfile:2.*no `../secret` beside the Dockerfile"),
        ("COPY gone.txt /app/", r"Dockerfile:2.*no `gone.txt`"),
        (
            "ADD https://example.com/a.tar /app/",
            "Dockerfile:2: `https://example.com/a.tar` would be downloaded",
        ),
        ("ONBUILD RUN true", "Dockerfile:2: `ONBUILD` cannot be done"),
        ("RUN --mount=type=secret,id=a true", "Dockerfile:2: `--mount=type=secret,id=a` cannot be done"),
        ("FROM debian two", "Dockerfile:2: `FROM debian two` names no image"),
        ("FROM alpine AS two", "Dockerfile:2: `FROM alpine`"),
        ("RUNN true", "Dockerfile:2: `RUNN true`"),
        ("# note\n\nENV A", "Dockerfile:4: `ENV A` gives no value"),
        ("ENV A='open", "Dockerfile:2: .*No closing quotation"),
        ("SHELL bash -c", "Dockerfile:2: SHELL"),
        ("RUN cat <<EOF\nx", "Dockerfile:2: the here-document `EOF` has no end"),
    ],
)
def test_what_a_sandbox_cannot_emulate_is_refused_by_its_line(
    tmp_path: Path, line: str, message: str
) -> None:
    path = task_at(tmp_path / "t", dockerfile=f"FROM debian\n{line}\n")
    with pytest.raises(ConfigError, match=message):
        read_task_directory(path)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[environment]\ngpus = 1\n", "`environment.gpus`"),
        ('[environment]\nos = "windows"\n', "tasks run on linux alone"),
        ('[environment]\nnetwork_mode = "lan"\n', "`environment.network_mode` is 'lan'"),
        (
            '[verifier]\nenvironment_mode = "own"\n',
            r"`verifier.environment_mode`.*'own'",
        ),
        ("[verifier.environment]\ncpus = 1\n", "`verifier.environment`"),
        ('[agent]\nallowed_hosts = ["example.com"]\n', "`agent.allowed_hosts`"),
        (
            "[environment]\nmemory_mb = 900000000\n",
            r"`environment.memory_mb`.*900,000,000",
        ),
        ("[environment]\ncpus = 100000\n", r"`environment.cpus`.*100000"),
        ('[environment]\nskills_dir = "/s"\n', "`environment.skills_dir` is not there"),
        ("[environment.healthcheck]\nretries = 1\n", "`environment.healthcheck` has no `command`"),
        (
            '[environment.healthcheck]\ncommand = "true"\nretries = "x"\n',
            r"`environment.healthcheck.retries`.*'x'",
        ),
        (
            "[environment]\nstorage_mb = 90000\n",
            r"`environment.storage_mb`.*90,000",
        ),
        ('[[artifacts]]\nsource = "/a"\nexclude = ["b"]\n', "`artifacts.exclude`"),
        ('schema_version = "2.0"\n', "`schema_version` is 2.0; schema 1 is read"),
        ("[verifier]\ntimeout_sec = 0\n", r"`verifier.timeout_sec`.*0.*0"),
        ('[[steps]]\nname = "one"\n', "a step's `name` is 'one'; each has one of its own, and a folder"),
        (
            '[environment]\nnetwork_mode = "public"\n',
            "`environment.network_mode` is 'public', and sandboxes",
        ),
        (
            '[agent]\nnetwork_mode = "allowlist"\n',
            "`agent.network_mode` is 'allowlist'",
        ),
        ("[environment]\nallow_internet = true\n", "`environment.allow_internet` is True"),
        (
            '[[environment.mcp_servers]]\nname = "a"\nurl = "http://sidecar:8000"\n',
            "the `transport` of a is 'sse'",
        ),
        ("agent = 3\n", r"`agent`.*3"),
        ("[task\n", "task.toml cannot be read"),
    ],
)
def test_a_task_that_cannot_be_run_is_refused(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_task_directory(task_at(tmp_path / "t", toml=toml))


@pytest.mark.parametrize("missing", ["instruction.md", "tests/test.sh", "task.toml"])
def test_a_task_without_a_file_that_it_needs_is_refused(tmp_path: Path, missing: str) -> None:
    path = task_at(tmp_path / "t")
    (path / missing).unlink()
    with pytest.raises(ConfigError, match=f"has no {missing}"):
        read_task_directory(path)


def test_a_directory_of_tasks_is_found_by_what_is_in_it(tmp_path: Path) -> None:
    task_at(tmp_path / "b")
    task_at(tmp_path / "a")
    (tmp_path / "notes").mkdir()
    assert is_task_collection(tmp_path)
    assert is_task_directory(tmp_path / "a")
    assert not is_task_collection(tmp_path / "notes")
    assert not is_task_collection(tmp_path / "gone")
    assert task_directories(tmp_path) == [tmp_path / "a", tmp_path / "b"]
    assert task_directories(tmp_path / "a") == [tmp_path / "a"]
    with pytest.raises(ConfigError, match="holds no task"):
        task_directories(tmp_path / "notes")
