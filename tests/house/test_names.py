"""Names say what a value is: no new bare participles, one meaning for each public class name.

Docstrings begin with an imperative or a noun phrase. The budgets only fall: lower one when you are below it.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

IRREGULAR = re.compile(
    "told|said|heard|found|seen|shown|kept|sent|given|taken|written|made|known|gone|held|lost|paid|caught|chosen"
    "|drawn|begun|broken|brought|driven|fallen|forgotten|grown|hidden|led|meant|ran|spent|spoken|taught|thrown|won"
)
STANDARD = {
    "cancelled",
    "closed",
    "done",
    "expected",
    "pretrained",
    "failed",
    "nested",
    "packed",
    "terminated",
    "truncated",
}
"""Terms of the field, and states of futures and environments, which are names in their own right."""
NO_PARTICIPLES = {"bed", "embed", "feed", "hundred", "indeed", "need", "red", "seed", "shed", "speed"}

PARTICIPLES = {
    "algorithms": 17,
    "build": 12,
    "cli": 6,
    "data": 2,
    "eval": 12,
    "gateway": 0,
    "inference": 5,
    "integrations": 3,
    "models": 13,
    "rewards": 4,
    "sandbox": 2,
    "tools": 12,
    "view": 6,
}
"""At most so many bare participles are bound in a room; 9 in every other one."""
MAX_WIDE_FUNCTIONS = 32
"""At most so many functions have eight or more parameters. Values that belong together are one value."""
DOUBLE_CLASS_NAMES = {"Environment"}
"""Public class names that still stand for two things."""


KINDS = (ast.Name, ast.Attribute, ast.arg, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Expr)
"""Kinds of nodes that bind a name or are a text."""


@cache
def is_participle(name: str) -> bool:
    word = name.strip("_")
    if "_" in word or not word.islower() or word in STANDARD | NO_PARTICIPLES:
        return False
    return IRREGULAR.fullmatch(word) is not None or word.endswith("ed")


def bound_names(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Variables, parameters, functions and attributes that a file binds, with their lines."""
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node.lineno
            case _:
                pass


@cache
def trees(checkout: Path) -> list[tuple[Path, list[ast.AST]]]:
    """The files of the package, relative to it, as nodes of their syntax trees of these kinds."""
    source = checkout / "src" / "rllm"
    return [
        (
            file.relative_to(source),
            [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, KINDS)],
        )
        for file in sorted(source.rglob("*.py"))
    ]


def test_no_room_has_more_bare_participles_than_before(checkout: Path) -> None:
    counts, places = Counter[str](), defaultdict[str, list[str]](list)
    for file, nodes in trees(checkout):
        for name, line in bound_names(nodes):
            if is_participle(name):
                counts[file.parts[0]] += 1
                places[file.parts[0]].append(f"{file}:{line} {name}")
    over = {room: places[room] for room, count in counts.items() if count > PARTICIPLES.get(room, 9)}
    assert over == {}, "name what the value is: `agent`, not `found`; `reply`, not `said`"


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without `self` and `cls`, `*args` and `**kwargs`."""
    parameters = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len(parameters) - (bool(parameters) and parameters[0].arg in ("self", "cls"))


def test_no_more_functions_are_wide_than_before(checkout: Path) -> None:
    wide = [
        f"{file}:{node.lineno} {node.name}"
        for file, nodes in trees(checkout)
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and num_parameters(node) >= 8
    ]
    assert len(wide) <= MAX_WIDE_FUNCTIONS, wide


def test_a_public_class_name_has_one_meaning(checkout: Path) -> None:
    homes = defaultdict[str, set[str]](set)
    for file, nodes in trees(checkout):
        for node in nodes:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(str(file))
    doubles = {name: files for name, files in homes.items() if len(files) > 1}
    assert doubles.keys() <= DOUBLE_CLASS_NAMES, {
        name: doubles[name] for name in doubles.keys() - DOUBLE_CLASS_NAMES
    }


def docstrings(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Texts behind the heads of modules, classes and functions, and behind values."""
    for node in nodes:
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text
            case _:
                pass


def test_docstrings_begin_with_an_imperative_or_a_noun_phrase(checkout: Path) -> None:
    interrogative = [
        f"{file}: {text}"
        for file, nodes in trees(checkout)
        for text in docstrings(nodes)
        if re.match(r"(What|Who|Of|How|Why)\b", text)
    ]
    assert interrogative == []


def test_parameters_are_counted_without_the_object_itself() -> None:
    (function,) = ast.parse("def step(self, a, /, b, *args, c=1, **rest): ...").body
    assert isinstance(function, ast.FunctionDef)
    assert num_parameters(function) == 3


def test_a_participle_is_known_by_its_form() -> None:
    assert [name for name in ("told", "_chosen", "parsed", "needed") if not is_participle(name)] == []
    assert [
        name for name in ("seed", "num_kept", "done", "Asked", "reply", "need") if is_participle(name)
    ] == []
