"""Whatever a document tells the reader to type is a command that exists, and the README's Python runs.

    documents ──► ```sh blocks ──► lines ──► commands ──► one way of proof each (PROOFS)
    README    ──► ```python blocks ──► one program, top to bottom

Nothing here trains or installs: `make X` is asked what it would do, `rllm ...` is parsed with `--help` or
resolved with `--dry-run`, `pip install` is compared with the extras there are. A command that nobody can
prove fails its test.
"""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TypeGuard

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
DOCUMENTS = [CHECKOUT / "README.md", CHECKOUT / "CONTRIBUTING.md", *sorted(CHECKOUT.glob("docs/**/*.md"))]

BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]+)(?P<how>[^\n]*)\n(?P<body>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)
SHELL_BY_ANOTHER_NAME = {"bash", "shell", "console", "zsh", "shell-session"}
BETWEEN_COMMANDS = {"&&", "||", ";", "|", "&"}
INTO_A_FILE = {">", ">>", "2>", "<"}

Rllm = Callable[[list[str]], str]

RESOLVED_BY_DRY_RUN = {"train"}
"""Subcommands of `rllm` that can say what they would do; the others are asked for their help."""


def blocks(document: Path, language: str) -> list[str]:
    """Without those whose commands are shown to be refused: the test of their page sees that they are. Nor
    those `in make TARGET`, beside libraries that are not here: that target runs them."""
    if not document.exists():
        return []
    return [
        match["body"]
        for match in BLOCK.finditer(document.read_text())
        if match["language"] == language
        and match["how"].strip() != "fails"
        and not match["how"].strip().startswith("in make ")
    ]


def commands_in(block: str) -> list[list[str]]:
    """The commands of one ```sh block as argument lists, without comments, assignments and redirections."""
    found: list[list[str]] = []
    for line in block.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars=True)
        lexer.wordchars += "=:,@%[]{}+~^"
        command: list[str] = []
        words = iter([*lexer, ";"])
        for word in words:
            if word in BETWEEN_COMMANDS:
                if command:
                    found.append(command)
                command = []
            elif word in INTO_A_FILE:
                next(words)
            elif command or not re.match(r"[A-Z_]+=", word):
                command.append(word)
    return found


def documented_commands() -> list[list[str]]:
    """Each command once, in reading order."""
    found = {
        tuple(command): None
        for document in DOCUMENTS
        for block in blocks(document, "sh")
        for command in commands_in(block)
    }
    return [list(command) for command in found]


def prove_make(command: list[str], rllm: Rllm) -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    done = subprocess.run(
        ["make", "--dry-run", *command[1:]],
        cwd=CHECKOUT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def prove_rllm(command: list[str], rllm: Rllm) -> None:
    arguments = command[1:]
    ending = "--dry-run" if arguments and arguments[0] in RESOLVED_BY_DRY_RUN else "--help"
    if ending not in arguments:
        arguments = [*arguments, ending]
    if ending == "--dry-run" and "--model" in arguments:  # which an earlier command of the page makes
        arguments[arguments.index("--model") + 1] = "builtin:tiny"
    Path("examples").symlink_to(CHECKOUT / "examples")
    if ending == "--dry-run":
        write_files_of_the_pages(arguments)
    before = sorted(os.listdir())
    rllm(arguments)
    assert sorted(set(os.listdir()) - {"__pycache__"}) == before, "asking must leave nothing behind"


def write_files_of_the_pages(arguments: list[str]) -> None:
    """`mine.py` of a command that names `mine.py:ranks` is the Python of a page that defines `ranks`; for
    `rows.jsonl` a task is written with which commands can be resolved."""
    if "rows.jsonl" in arguments:
        row = {"instance_id": "one", "source": ".", "problem_statement": "x", "FAIL_TO_PASS": ["t.py::t"]}
        Path("rows.jsonl").write_text(json.dumps(row))
    programs = [block for document in DOCUMENTS for block in blocks(document, "python")]
    functions: dict[str, list[str]] = {}
    for name, function in re.findall(r"(?<![/\w])(\w+\.py):(\w+)", " ".join(arguments)):
        functions.setdefault(name, []).append(f"def {function}(")
    for name, defined in functions.items():
        program = next(
            each for each in programs if _is_of(name, each) and all(start in each for start in defined)
        )
        written = [node.args[0] for node in ast.walk(ast.parse(program)) if _writes_text(node)]
        Path(name).write_text(ast.literal_eval(written[0]) if written else program)


def _is_of(name: str, program: str) -> bool:
    return "write_text(" not in program or f'Path("{name}").write_text(' in program


def _writes_text(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "write_text"


def prove_torchrun(command: list[str], rllm: Rllm) -> None:
    """What each rank runs; a page with such a command has a slow test that starts them all."""
    at = command.index("-m")
    assert command[at + 1] == "rllm"
    prove_rllm(command[at + 1 :], rllm)


def prove_python(command: list[str], rllm: Rllm) -> None:
    script = next((word for word in command[1:] if word.endswith(".py")), None)
    assert script is not None, f"`{shlex.join(command)}` names no script"
    assert (CHECKOUT / script).is_file(), f"there is no file {script}"


def prove_pip(command: list[str], rllm: Rllm) -> None:
    extras = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for match in re.finditer(r"\[([\w,-]+)\]", " ".join(command)):
        assert set(match[1].split(",")) <= extras.keys(), f"the extras are {sorted(extras)}"


def prove_nothing(command: list[str], rllm: Rllm) -> None:
    """For the commands of others, which need a network or change the directory."""


PROOFS: dict[str, Callable[[list[str], Rllm], None]] = {
    "make": prove_make,
    "rllm": prove_rllm,
    "python": prove_python,
    "python3": prove_python,
    "pip": prove_pip,
    "torchrun": prove_torchrun,
    "curl": prove_nothing,  # docs/gateway.md has them, and test_gateway_doc.py runs them
    "git": prove_nothing,
    **dict.fromkeys(
        ("npm", "claude", "codex", "mini"), prove_nothing
    ),  # seen to work when the page was written
    "cd": prove_nothing,
    "echo": prove_nothing,
    "source": prove_nothing,
}


@pytest.mark.parametrize("command", documented_commands(), ids=shlex.join)
def test_a_documented_command_exists(command: list[str], rllm: Rllm) -> None:
    name = Path(command[0]).name  # `.venv/bin/rllm` is `rllm`
    assert name in PROOFS, (
        f"nobody proves `{name}`: teach PROOFS in {Path(__file__).name} how, or leave it out"
    )
    PROOFS[name](command, rllm)


def test_the_readme_shows_how_to_train_and_how_to_test() -> None:
    commands = [command for block in blocks(CHECKOUT / "README.md", "sh") for command in commands_in(block)]
    assert ["make", "demo"] in commands
    assert ["make", "test"] in commands
    assert any(command[:2] == ["rllm", "train"] for command in commands)


def test_the_readme_is_read_in_a_minute() -> None:
    assert len((CHECKOUT / "README.md").read_text().split()) <= 600


def test_ci_runs_the_checks_the_site_and_the_tests_of_the_readme() -> None:
    lines = (CHECKOUT / ".ci" / "run").read_text().splitlines()
    assert [line for line in lines if line.startswith("make ")] == ["make check", "make docs", "make test"]


def test_shell_blocks_are_all_marked_alike_so_that_none_escapes() -> None:
    escaped = {
        f"{document.name}: ```{match['language']}"
        for document in DOCUMENTS
        if document.exists()
        for match in BLOCK.finditer(document.read_text())
        if match["language"] in SHELL_BY_ANOTHER_NAME
    }
    assert escaped == set(), "write ```sh"


def test_the_python_in_the_readme_trains_from_top_to_bottom(tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text("\n\n".join(blocks(CHECKOUT / "README.md", "python")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    before, after = (float(word) for word in done.stdout.split())
    assert before < 0.1
    assert after > before + 0.2


def test_commands_are_read_as_a_shell_reads_them() -> None:
    block = (
        "# a remark\n$ make demo  # and why\n"
        "PYTHON=python3.12 make test && rllm runs list --json > runs.json\n"
        "rllm train frozenlake \\\n    --set 'train.steps=3' --seed 1\n"
        "pip install -e '.[dev]'\n"
    )
    assert commands_in(block) == [
        ["make", "demo"],
        ["make", "test"],
        ["rllm", "runs", "list", "--json"],
        ["rllm", "train", "frozenlake", "--set", "train.steps=3", "--seed", "1"],
        ["pip", "install", "-e", ".[dev]"],
    ]


def test_a_make_target_that_does_not_exist_is_found(rllm: Rllm) -> None:
    with pytest.raises(AssertionError, match="No rule to make target"):
        prove_make(["make", "coffee"], rllm)


def test_an_extra_that_does_not_exist_is_found(rllm: Rllm) -> None:
    with pytest.raises(AssertionError, match="the extras are"):
        prove_pip(["pip", "install", "rllm[everything]"], rllm)
