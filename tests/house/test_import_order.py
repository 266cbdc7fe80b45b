"""A room imports only rooms before it: at a file's top, in a function, under TYPE_CHECKING, all the same.

    source tree ──► modules ──► every import, with its line ──► violations (file, line, what to do)

The order and the homes of the heavy libraries are those of docs/architecture.md. A file that uses
importlib may import any module of ours whose name stands in its strings, so it is held to all of them.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOMS = (
    *("errors", "files", "types", "config", "contracts", "algorithms", "rendering"),
    *("store", "sandbox", "data", "tracking", "models", "distributed", "inference"),
    *("tools", "rewards", "environments", "agents", "gateway"),
    *("workflows", "engine", "eval", "trainer", "integrations"),
    *("build", "worker", "view", "published", "cli", "__main__"),
)

NEWER_ROOMS = {
    "files": 1,
    "contracts": 2,
    "distributed": 3,
    "view": 12,
    "worker": 14,
    "integrations": 16,
    "published": len(ROOMS),
    "__main__": 1,
}
"""Rooms that were added since arrows are counted -> how many others each leans on at most. Five are wanted:
lower a number when you are below. `published` is names of all rooms, `__main__` another name of `cli`."""
MAX_ARROWS = 107
"""Pairs of the 23 first rooms of which one imports the other. Lower it when you are below."""
MAX_ARROWS_OF = {"trainer": 11, "cli": 9}
"""Of these first rooms, the number of others that each leans on at most. For the trainer 10 are wanted."""

HOMES_OF_LIBRARY = {
    "torch": (
        *(f"algorithms/{name}*" for name in ("losses", "kl", "correction", "surrogates", "tokens")),
        *(f"algorithms/{name}*" for name in ("preference", "loss_checks")),
        "models/*",
        "distributed/torch_ranks*",
        "inference/local*",
        *(f"trainer/backends/{name}*" for name in ("torch", "packed", "critic", "guard")),
        *(
            f"trainer/backends/{name}*"
            for name in ("logprobs", "measured", "scoring", "shard", "tensor_files")
        ),
        "trainer/update_checks*",
        "integrations/*",
    ),
    "gguf": ("models/gguf/*",),
    "peft": ("models/lora*",),
    "matplotlib": ("tracking/picture*",),
    "gymnasium": ("environments/*",),
    "aiohttp": ("gateway/*", "inference/openai*", "worker/http*", "worker/answers*"),
    "llguidance": ("inference/local/grammar*",),
    "pyarrow": ("data/parquet*",),
    "huggingface_hub": ("data/hub*", "models/huggingface*"),
    "bm25s": ("tools/local_search*",),
    "sacrebleu": ("rewards/translation*",),
    **dict.fromkeys(
        ("sympy", "math_verify", "latex2sympy2_extended"), ("rewards/math_symbols*", "rewards/math_formulas*")
    ),
    "mcp": ("tools/mcp*", "worker/mcp*"),
    "starlette": ("view/server*",),
    "inspect_ai": ("integrations/inspect/*",),
    "uvicorn": ("view/server*", "integrations/openenv/*"),
    "keyring": ("build/model_settings*",),
    "playwright": ("environments/web/*",),
    "ray": ("*/ray.py", "*/ray/*", "integrations/verl/*"),  # verl's workers and servers are Ray's actors
} | {
    name: (f"*/{name}.py", f"*/{name}/*")
    for name in (
        *("verl", "vllm", "tinker", "wandb", "tensorboard", "mlflow", "trackio"),
        *("verifiers", "openenv"),
    )
}


@dataclass(frozen=True)
class Import:
    """One import statement, or one call that imports."""

    line: int
    module: str
    """Dotted name of the module that is loaded."""


class SourceTree:
    """The modules of one package directory by dotted name, each as the parts that may import."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.package = root.name
        self.files = {self._module_name(path): path for path in sorted(root.rglob("*.py"))}
        self.nodes = {name: _telling(ast.parse(path.read_text())) for name, path in self.files.items()}
        self._imports: dict[str, list[Import]] = {}

    def _module_name(self, path: Path) -> str:
        parts = path.relative_to(self.root).with_suffix("").parts
        return ".".join((self.package, *(part for part in parts if part != "__init__")))

    def place(self, module: str, line: int) -> str:
        return f"{self.files[module].relative_to(self.root)}:{line}"

    def room(self, module: str) -> str:
        return module.split(".")[1] if "." in module else ""

    def imports(self, module: str) -> list[Import]:
        """Every absolute import in the file, wherever it stands."""
        if module not in self._imports:
            statements = list(self._import_statements(module))
            imports = [*statements, *self._import_calls(module)]
            if any(each.module.split(".")[0] == "importlib" for each in statements):
                imports += self._modules_in_strings(module)
            self._imports[module] = imports
        return self._imports[module]

    def _import_statements(self, module: str) -> Iterator[Import]:
        for node in self.nodes[module]:
            if isinstance(node, ast.Import):
                yield from (Import(node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                for alias in node.names:
                    yield Import(node.lineno, self._source(node.module, alias.name))

    def _import_calls(self, module: str) -> Iterator[Import]:
        """`importlib.import_module("a.b")` and `__import__("a.b")`."""
        for node in self.nodes[module]:
            if isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
                names = (each.value for each in node.args[:1] if isinstance(each, ast.Constant))
                yield from (Import(node.lineno, name) for name in names if isinstance(name, str))

    def _source(self, module: str, name: str) -> str:
        """`from a import b` loads a.b where that is a module, and a otherwise."""
        return f"{module}.{name}" if f"{module}.{name}" in self.files else module

    def _modules_in_strings(self, module: str) -> Iterator[Import]:
        for node in self.nodes[module]:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value.partition(":")[0]
                if name in self.files and "." in name:
                    yield Import(node.lineno, name)


def _telling(parsed: ast.Module) -> list[ast.AST]:
    """Imports, calls and strings: a tree is walked once, which takes long."""
    return [
        node
        for node in ast.walk(parsed)
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    ]


def _called(call: ast.Call) -> str:
    """The last part of the name that is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def rooms_out_of_order(tree: SourceTree) -> list[str]:
    found: dict[str, None] = {}  # a set in reading order: one import seen in two ways is one finding
    for module in tree.files:
        if module == tree.package:  # hands names on lazily; nothing in the house may import it
            continue
        room = tree.room(module)
        if room not in ROOMS:
            found[f"{tree.place(module, 1)}: `{room}` is no room of the house"] = None
            continue
        for each in tree.imports(module):
            if each.module.split(".")[0] != tree.package:
                continue
            place, target = tree.place(module, each.line), tree.room(each.module)
            if target not in ROOMS:
                found[f"{place}: import from the room itself, not `{each.module}`"] = None
            elif ROOMS.index(target) > ROOMS.index(room):
                found[f"{place}: `{room}` may not import `{target}`, which stands after it"] = None
    return list(found)


def arrows(tree: SourceTree) -> dict[tuple[str, str], list[str]]:
    """(room, imported room) -> the places that import, wherever in a file they stand."""
    places: dict[tuple[str, str], list[str]] = {}
    for module in tree.files:
        for each in tree.imports(module) if module != tree.package else ():
            rooms = tree.room(module), tree.room(each.module)
            if each.module.startswith(f"{tree.package}.") and rooms[0] != rooms[1]:
                places.setdefault(rooms, []).append(tree.place(module, each.line))
    return places


def relative_imports(tree: SourceTree) -> list[str]:
    return [
        f"{tree.place(module, node.lineno)}: relative import; write the absolute one"
        for module, nodes in tree.nodes.items()
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]


def circles(tree: SourceTree) -> list[str]:
    """Circles between files. Between rooms the order forbids them, so each of these lies within one room."""
    needed_by = {
        module: {each.module for each in tree.imports(module) if each.module in tree.files}
        for module in tree.files
        if module != tree.package
    }
    try:
        TopologicalSorter(needed_by).prepare()
    except CycleError as error:
        return [f"files import each other in a circle: {' ◄ '.join(error.args[1])}"]
    return []


def libraries_away_from_home(tree: SourceTree) -> list[str]:
    found: list[str] = []
    for module, path in tree.files.items():
        file = path.relative_to(tree.root).as_posix()
        for each in tree.imports(module):
            library = each.module.split(".")[0]
            homes = HOMES_OF_LIBRARY.get(library)
            if homes is not None and not any(fnmatch(file, home) for home in homes):
                found.append(f"{file}:{each.line}: `{library}` is imported only in {', '.join(homes)}")
    return found


@pytest.fixture(scope="module")
def house(checkout: Path) -> SourceTree:
    return SourceTree(checkout / "src" / "rllm")


def test_no_room_imports_one_that_stands_after_it(house: SourceTree) -> None:
    assert rooms_out_of_order(house) == []


def test_the_first_rooms_lean_on_no_more_others_than_before(house: SourceTree) -> None:
    counted = {rooms: places for rooms, places in arrows(house).items() if not NEWER_ROOMS.keys() & {*rooms}}
    rare = {rooms: places for rooms, places in counted.items() if len(places) <= 2}
    assert len(counted) <= MAX_ARROWS, (
        f"pass a value, or move a function to its room; these rest on little: {rare}"
    )


def test_trainer_and_commands_lean_on_no_more_first_rooms_than_before(house: SourceTree) -> None:
    leans_on = Counter(room for room, other in arrows(house) if other not in NEWER_ROOMS)
    assert {room: leans_on[room] for room, most in MAX_ARROWS_OF.items() if leans_on[room] > most} == {}


def test_a_newer_room_leans_on_no_more_others_than_before(house: SourceTree) -> None:
    leans_on = Counter(room for room, _ in arrows(house))
    assert {room: leans_on[room] for room, most in NEWER_ROOMS.items() if leans_on[room] > most} == {}


def test_every_import_is_absolute(house: SourceTree) -> None:
    assert relative_imports(house) == []


def test_no_files_import_each_other_in_a_circle(house: SourceTree) -> None:
    assert circles(house) == []


def test_heavy_libraries_are_imported_only_where_they_live(house: SourceTree) -> None:
    assert libraries_away_from_home(house) == []


def plant(root: Path, files: dict[str, str]) -> SourceTree:
    """A small house made of `files`: path under the package to source."""
    for name, source in ({"__init__.py": ""} | files).items():
        path = root / "rllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return SourceTree(root / "rllm")


@pytest.mark.parametrize(
    "source",
    [
        "import rllm.engine.rollout",
        "from rllm.engine import rollout",
        "from rllm import engine",
        "def late():\n    from rllm.engine.rollout import run",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rllm.engine.rollout import run",
        "import importlib\nimportlib.import_module('rllm.engine')",
        "from importlib import import_module as load\nHOMES = ['rllm.engine.rollout:run']\nload(HOMES[0])",
    ],
)
def test_the_check_sees_every_way_to_import_a_later_room(tmp_path: Path, source: str) -> None:
    tree = plant(tmp_path, {"types/task.py": source, "engine/__init__.py": "", "engine/rollout.py": ""})
    (found,) = rooms_out_of_order(tree)
    assert found.startswith("types/task.py:")
    assert found.endswith("`types` may not import `engine`, which stands after it")


def test_the_check_lets_a_room_import_earlier_rooms_and_itself(tmp_path: Path) -> None:
    tree = plant(
        tmp_path,
        {
            "errors.py": "import torch_like_name",
            "engine/__init__.py": "from rllm.engine.rollout import run",
            "engine/rollout.py": "from rllm import errors\nfrom rllm.errors import RllmError",
            "models/tiny.py": "import torch.nn.functional as F",
            "__init__.py": "from rllm.engine import run",
        },
    )
    assert (
        rooms_out_of_order(tree)
        == relative_imports(tree)
        == circles(tree)
        == libraries_away_from_home(tree)
        == []
    )


@pytest.mark.parametrize("source", ["import rllm", "from rllm import Task"])
def test_the_check_refuses_the_way_round_through_the_package_itself(tmp_path: Path, source: str) -> None:
    assert rooms_out_of_order(plant(tmp_path, {"cli/main.py": source})) == [
        "cli/main.py:1: import from the room itself, not `rllm`"
    ]


def test_the_check_refuses_a_room_that_is_not_in_the_plan(tmp_path: Path) -> None:
    assert rooms_out_of_order(plant(tmp_path, {"utils.py": ""})) == [
        "utils.py:1: `utils` is no room of the house"
    ]


def test_an_arrow_is_counted_once_however_many_files_import(tmp_path: Path) -> None:
    tree = plant(
        tmp_path,
        {
            "types/task.py": "",
            "engine/a.py": "from rllm.types.task import Task\nfrom rllm.engine import b",
            "engine/b.py": "def late():\n    import rllm.types.task",
        },
    )
    assert arrows(tree) == {("engine", "types"): ["engine/a.py:1", "engine/b.py:2"]}


def test_the_check_sees_relative_imports(tmp_path: Path) -> None:
    (found,) = relative_imports(plant(tmp_path, {"types/task.py": "def late():\n    from . import episode"}))
    assert found.startswith("types/task.py:2:")


def test_the_check_sees_a_circle_within_a_room(tmp_path: Path) -> None:
    tree = plant(
        tmp_path,
        {
            "engine/a.py": "from rllm.engine.b import x",
            "engine/b.py": "def late():\n    import rllm.engine.c",
            "engine/c.py": "from rllm.engine import a",
        },
    )
    (found,) = circles(tree)
    assert all(f"rllm.engine.{name}" in found for name in "abc")


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("trainer/loop.py", "def late():\n    import torch"),
        ("trainer/backends/base.py", "from torch import nn"),
        ("cli/train.py", "import matplotlib.pyplot as plt"),
        ("agents/lake.py", "import gymnasium"),
        ("engine/rollout.py", "import ray"),
    ],
)
def test_the_check_sees_a_heavy_library_away_from_home(tmp_path: Path, file: str, source: str) -> None:
    (found,) = libraries_away_from_home(plant(tmp_path, {file: source}))
    assert found.startswith(f"{file}:")
