"""Packages that a program was given are there to import, read-only; nothing beside them is."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rllm.errors import ConfigError
from rllm.sandbox import Limits, PythonRunner, Status, open_sandbox
from rllm.sandbox import packages as packages_of_sandboxes
from rllm.sandbox.interpreter import interpreter
from rllm.sandbox.packages import bindings_of, package_names
from rllm.tools.python import PythonInterpreter

LIMITS = Limits(wall_s=20, cpu_s=10, memory_mb=256, output_kb=64, disk_mb=8, processes=16)
WALLED = ("bubblewrap", "unshare")
SECRET = "7dc1-not-yours"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`install(name, files, requires)` puts a distribution where this process finds it."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def install(name: str, files: dict[str, str], requires: tuple[str, ...] = ()) -> None:
        about = f"{name.replace('-', '_')}-1.0.dist-info"
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        metadata = head + "".join(f"Requires-Dist: {each}\n" for each in requires)
        files = {**files, f"{about}/METADATA": metadata}
        files[f"{about}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{about}/RECORD"))
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)

    install.folder = folder  # pyright: ignore[reportFunctionMemberAccess]
    _forget()
    yield install
    _forget()


def _forget() -> None:
    bindings_of.cache_clear()
    interpreter.cache_clear()


def said(backend: str, source: str, *packages: str) -> str:
    with PythonRunner(backend, LIMITS, workers=1, packages=packages) as runner:
        ended = runner.run(source)
    return ended.stdout.strip() or f"{ended.status}: {ended.stderr[-300:]}"


@pytest.mark.parametrize("backend", [*WALLED, "subprocess"])
def test_numpy_computes_and_is_ready_before_the_program(backend: str, need: Callable[[str], str]) -> None:
    program = (
        "import os, sys\nready = 'numpy' in sys.modules\nimport numpy as np\n"
        "print(ready, round(float(np.linalg.det(np.eye(9) * 2))), len(os.listdir('/proc/self/task')))"
    )
    assert said(need(backend), program, "numpy") == "True 512 1"
    assert "No module named 'numpy'" in said(backend, program)


@pytest.mark.parametrize("backend", WALLED)
def test_only_the_package_s_own_files_are_there_and_nobody_can_write_them(
    backend: str, need: Callable[[str], str], site: Callable[..., None]
) -> None:
    site("toy", {"toy/__init__.py": "from toy.deep import word", "toy/deep/__init__.py": "word = 'here'"})
    site("other", {"other.py": ""})
    folder: Path = site.folder  # pyright: ignore[reportFunctionMemberAccess]
    (folder / "toy" / "deep" / "settings.env").write_text(SECRET)
    (folder / "toy-1.0.dist-info" / "direct_url.json").write_text(SECRET)
    (folder / "key.py").write_text(SECRET)
    program = (
        "import os, toy\nprint(toy.word)\n"
        "for top, _, files in sorted(os.walk('/packages')):\n    print(top, sorted(files))\n"
        "for path in ('/packages/toy/x', '/packages/x', toy.__file__):\n"
        "    try:\n        open(path, 'w')\n    except OSError as error:\n        print(error.errno)\n"
    )
    assert said(need(backend), program, "toy").split("\n") == [
        "here",
        "/packages []",
        "/packages/toy ['__init__.py']",
        "/packages/toy-1.0.dist-info ['METADATA', 'RECORD']",
        "/packages/toy/deep ['__init__.py']",
        *["30"] * 3,
    ]
    assert (folder / "toy" / "__init__.py").read_text() == "from toy.deep import word"


def test_what_a_package_requires_comes_along_and_what_it_does_not_stays(site: Callable[..., None]) -> None:
    requires = ("needed>=1,<9 ; python_version > '3'", "absent ; sys_platform == 'plan9'")
    site("toy", {"toy.py": ""}, (*requires, "extra-one[more]; extra == 'one'", "gone; extra == 'two'"))
    site("needed", {"needed.py": ""})
    site("extra-one", {"one.py": ""}, ("deepest ; extra == 'more'",))
    site("deepest", {"deepest.py": ""}, ("toy[one]",))  # a circle
    places = {each.place for each in bindings_of(("toy",), for_anybody=False)}
    assert {each for each in places if each.endswith(".py")} == {"toy.py", "needed.py"}
    places = {each.place for each in bindings_of(("toy[one]",), for_anybody=False)}
    assert {each for each in places if each.endswith(".py")} == {
        "toy.py",
        "needed.py",
        "one.py",
        "deepest.py",
    }


def test_of_a_shared_directory_only_the_asked_half_is_shown(site: Callable[..., None]) -> None:
    site("left", {"shared/left/__init__.py": "", "shared/left/a.py": ""})
    site("right", {"shared/right/__init__.py": ""})
    places = {each.place for each in bindings_of(("left",), for_anybody=False)}
    assert places == {"shared/left", "left-1.0.dist-info"}


def test_what_cannot_be_shown_is_refused_with_how_to_get_it(site: Callable[..., None]) -> None:
    site("toy", {"toy_module.py": ""}, ("lost",))
    site("linked", {"linked.pth": "/somewhere"})
    for name, message in {
        "nothing-here": "`nothing-here` is not installed .*pip install nothing-here",
        "toy": r"`lost`.*`toy`.*pip",
        "toy_module": "the module of that name is in `toy`",
        "linked": "editable form",
    }.items():
        with pytest.raises(ConfigError, match=message):
            bindings_of((name,), for_anybody=False)
    for wrong in ("numpy", ["numpy>=2"], [""], ["../numpy"], [3]):
        with pytest.raises(ConfigError, match="`packages`"):
            package_names(wrong)  # pyright: ignore[reportArgumentType]


def test_files_that_the_program_could_not_read_are_named(site: Callable[..., None]) -> None:
    site("toy", {"toy/__init__.py": "", "toy/private.py": ""})
    folder: Path = site.folder  # pyright: ignore[reportFunctionMemberAccess]
    os.chmod(folder / "toy" / "private.py", 0o600)
    with pytest.raises(ConfigError, match=r"private\.py` .*other users.*chmod -R o\+rX"):
        bindings_of(("toy",), for_anybody=True)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
            "a thread",
        ),
        ("1 / 0", "raised ZeroDivisionError"),
    ],
)
def test_a_package_that_cannot_be_ready_in_every_program_is_refused(
    code: str,
    message: str,
    need: Callable[[str], str],
    site: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site("toy", {"toy.py": code})
    monkeypatch.setattr(packages_of_sandboxes, "IMPORTED_AHEAD", ("toy",))
    with pytest.raises(ConfigError, match=message):
        said(need("bubblewrap"), "", "toy")


def test_a_program_may_have_packages_of_its_own(need: Callable[[str], str]) -> None:
    with PythonRunner(need("bubblewrap"), LIMITS, workers=1) as runner:
        program = "import numpy; print(numpy.arange(4).sum())"
        assert runner.run(program).status is Status.ERROR
        assert runner.run(program, packages=["numpy"]).stdout == "6\n"
        assert runner.run(program).status is Status.ERROR
        with pytest.raises(ConfigError, match="pip install nothing-here"):
            runner.run(program, packages=["nothing-here"])
        assert runner.run("print(1)").stdout == "1\n"


@pytest.mark.parametrize("backend", [*WALLED, "subprocess"])
def test_a_sandbox_s_python_finds_them_too(backend: str, need: Callable[[str], str]) -> None:
    with open_sandbox(need(backend), limits=LIMITS, packages=["numpy"]) as box:
        ended = box.exec(["python3", "-c", "import numpy; print(numpy.ones(3).sum())"])
        assert (ended.stdout, ended.stderr) == ("3.0\n", "")


def test_a_memory_limit_holds_for_arrays(need: Callable[[str], str]) -> None:
    with PythonRunner(need("bubblewrap"), LIMITS, workers=1, packages=["numpy"]) as runner:
        ended = runner.run("import numpy as np\nheld = [np.ones(2**20) for _ in range(100)]")
        assert ended.status is Status.OUT_OF_MEMORY


def test_docker_says_where_its_packages_belong(fake_docker: object) -> None:
    with pytest.raises(ConfigError, match="in the image"):
        open_sandbox("docker", packages=["numpy"])


def test_the_python_tool_says_what_it_has(need: Callable[[str], str]) -> None:
    tool = PythonInterpreter(need("bubblewrap"), session=True, packages=["numpy"])
    assert "numpy" in tool.description
    tool.forward(code="import numpy as np\nv = np.arange(3)")
    assert tool.forward(code="v * 2").output == "array([0, 2, 4])"
    with pytest.raises(ConfigError, match="pip install nothing-here"):
        PythonInterpreter("bubblewrap", packages=["nothing-here"])


def test_a_package_in_the_current_directory_is_found_from_anywhere(
    site: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    site("toy", {"toy/__init__.py": ""})
    folder: Path = site.folder  # pyright: ignore[reportFunctionMemberAccess]
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", ["", *[each for each in sys.path if each != str(folder)]])
    sources = [each.source for each in bindings_of(("toy",), for_anybody=False)]
    assert sorted(sources) == [str(folder / "toy"), str(folder / "toy-1.0.dist-info")]
