"""Tasks in the form of Terminal-Bench 1, as the settings of a task directory (rllm.data.task_directory).

    TASK/  task.yaml  Dockerfile  docker-compose.yaml  run-tests.sh  tests/  [solution.sh]
      └──terminal_bench_settings──► what task.toml would say, and the instruction

Their tests say by pytest's summary how they ended: all of them pass, or the reward is 0. A run without a
summary leaves no reward.
"""

from pathlib import Path
from typing import Any

from rllm.errors import ConfigError

TASK_FILE = "task.yaml"
RUN_TESTS = "run-tests.sh"
_SUMMARY = """
import re
log = open('/logs/verifier/test-stdout.txt', errors='replace').read()
_, found, summary = log.rpartition('short test summary info')
ends = re.findall(r'^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\\\\b', summary, re.MULTILINE) if found else []
if ends:
    passed = all(each in ('PASSED', 'XFAIL') for each in ends)
    open('/logs/verifier/reward.txt', 'w').write(str(int(passed)))
"""
TEST_COMMAND = (
    "bash",
    "-c",
    f"export TEST_DIR=/tests; bash /tests/{RUN_TESTS} > /logs/verifier/test-stdout.txt 2>&1; "
    f'tail -c 2000 /logs/verifier/test-stdout.txt; python3 -c "{_SUMMARY}"',
)


def is_terminal_bench(path: Path) -> bool:
    return (path / TASK_FILE).is_file()


def terminal_bench_settings(path: Path) -> tuple[dict[str, Any], str]:
    """(what its task.toml would say, the instruction). Raises ConfigError for what cannot be run here."""
    where = path / TASK_FILE
    table = _yaml(where)
    if table.get("run_tests_in_same_shell"):
        raise ConfigError(
            f"{where}: `run_tests_in_same_shell` is true; tests run in a world that the agent never was in."
        )
    parser = table.get("parser_name", "pytest")
    if parser != "pytest":
        raise ConfigError(f"{where}: `parser_name` is {parser!r:.60}; logs of pytest are read.")
    instruction = table.get("instruction")
    if not isinstance(instruction, str) or not instruction.strip():
        raise ConfigError(f"{where}: `instruction` is {instruction!r:.60}; it must be a text.")
    for name in (RUN_TESTS, "tests"):
        if not (path / name).exists():
            raise ConfigError(f"{path} has no {name}; a task of Terminal-Bench 1 needs one.")
    _require_one_container(path)
    settings: dict[str, Any] = {
        "agent": _timeout(table, "max_agent_timeout_sec"),
        "verifier": _timeout(table, "max_test_timeout_sec"),
        "metadata": {name: table[name] for name in ("difficulty", "category", "tags") if name in table},
    }
    return settings, instruction


def _timeout(table: dict[str, Any], name: str) -> dict[str, Any]:
    return {"timeout_sec": table[name]} if name in table else {}


def _require_one_container(path: Path) -> None:
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        compose = path / name
        services = _yaml(compose).get("services", {}) if compose.is_file() else {}
        others = [each for each in services if each != "client"]
        if others:
            raise ConfigError(f"{compose}: the service `{others[0]}` needs a container engine.")


def _yaml(path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(f"{path}: reading YAML needs PyYAML; run: pip install 'rllm[worker]'") from error
    try:
        table = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{path} holds no table.")
    return table
