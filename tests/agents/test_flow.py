import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rllm
from rllm.agents.flow import AgentFlow, as_flow, load_flow
from rllm.errors import ConfigError
from rllm.types.task import AgentConfig, Task

TASK = Task(id="t", instruction="What?")
CONFIG = AgentConfig("http://localhost/v1", "m", "s")


@rllm.rollout
def bare(task: Task, config: AgentConfig) -> None:
    """What it does."""


@rllm.rollout(name="solver")
async def named(task: Task, config: AgentConfig) -> None: ...


def test_a_decorated_function_is_still_callable_and_has_a_name() -> None:
    assert isinstance(bare, AgentFlow)
    assert (bare.name, bare.is_async, bare.__doc__) == ("bare", False, "What it does.")
    assert bare(TASK, CONFIG) is None
    assert bare(task=TASK, config=CONFIG) is None
    assert bare.run(TASK, CONFIG) is None
    assert (named.name, named.is_async) == ("solver", True)


async def test_an_async_one_is_awaited() -> None:
    assert await named.run(TASK, CONFIG) is None


class Both:
    name = "both"
    max_concurrent = 2

    def run(self, task: Task, config: AgentConfig) -> str:
        return "run"

    async def arun(self, task: Task, config: AgentConfig) -> str:
        return "arun"


class Blocking:
    def run(self, task: Task, config: AgentConfig) -> str:
        return "run"


class Callable:
    async def __call__(self, task: Task, config: AgentConfig) -> None: ...


def test_functions_objects_and_classes_are_programs(subtests: pytest.Subtests) -> None:
    for program, name, is_async in [
        (lambda task, config: None, "<lambda>", False),
        (Both, "both", True),
        (Both(), "both", True),
        (Blocking(), "Blocking", False),
        (Callable(), "Callable", True),
        (bare, "bare", False),
    ]:
        with subtests.test(program=program, name=name, is_async=is_async):
            flow = as_flow(program)
            assert (flow.name, flow.is_async) == (name, is_async)
            assert flow.max_concurrent == (2 if name == "both" else None)


class NeedsSandbox(Blocking):
    needs_env = True


class NeedsArguments(Blocking):
    def __init__(self, size: int) -> None: ...


def alone(task: Task) -> None: ...


def generator(task: Task, config: AgentConfig) -> Any:
    yield 1


@pytest.mark.parametrize(
    ("program", "named"),
    [
        (3, r"3 \(a int\) is no program"),
        (alone, r"alone cannot be called with \(task, config\)"),
        (generator, "generator is a generator"),
        (NeedsSandbox, "NeedsSandbox"),
        (NeedsArguments, "NeedsArguments"),
    ],
)
def test_what_is_no_program_is_refused_by_name(program: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        as_flow(program)


SOURCE = """
from helper_beside_it import NAME
import rllm

loaded = []

@rllm.rollout(name=NAME)
def solve(task, config):
    return None

def another(task, config):
    return None
"""


@pytest.fixture
def program_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper_beside_it.py").write_text("NAME = 'from a file'\n")
    (tmp_path / "my_flow.py").write_text(SOURCE)
    yield tmp_path / "my_flow.py"
    for name in [name for name in sys.modules if name.startswith(("rllm_user_", "helper_beside", "my_flow"))]:
        del sys.modules[name]


def test_a_file_is_imported_once_and_finds_its_neighbours(program_file: Path) -> None:
    flow = load_flow("my_flow.py:solve")
    assert flow.name == "from a file"
    assert load_flow(f"{program_file}:solve") is flow
    assert load_flow("my_flow.py:another").name == "another"
    module = sys.modules[flow.__module__]
    assert isinstance(module, ModuleType)
    assert load_flow("my_flow:solve").name == "from a file", "a module of the current directory"


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("my_flow.py:slove", "my_flow.py has no program `slove`; did you mean `solve`?"),
        ("my_flow.py:zzz", "it holds solve, another"),
        ("my_flow.py", "does not say which program; write my_flow.py:NAME. It holds solve, another."),
        ("my_flw.py:solve", "There is no file my_flw.py for the program. Did you mean my_flow.py?"),
        ("no.such.module:solve", "There is no module `no.such.module` for the program"),
        ("my_flow:slove", "did you mean `solve`?"),
        ("unknown-entry", "There is no program `unknown-entry`; write package.module:NAME"),
        ("my_flow.py:loaded", "is no program"),
    ],
)
def test_a_name_that_leads_nowhere_says_where_it_ends(program_file: Path, name: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_flow(name)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("import not_a_library", "broken.py needs `not_a_library`, which is not installed"),
        ("x = 1 / 0", "broken.py cannot be imported: ZeroDivisionError: division by zero"),
        ("def f(:", "broken.py cannot be imported: SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_imported_says_why(program_file: Path, source: str, named: str) -> None:
    program_file.with_name("broken.py").write_text(source)
    with pytest.raises(ConfigError) as caught:
        load_flow("broken.py:solve")
    assert named in str(caught.value)
