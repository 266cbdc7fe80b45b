"""Looking at files and changing them, in a directory and in a sandbox, and never outside."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.errors import ConfigError
from rllm.sandbox import open_sandbox
from rllm.tools import ToolError
from rllm.tools.files import MAX_FILE_BYTES, FileEditor, FileViewer
from rllm.tools.workspaces import MAX_ENTRIES, DirectoryPlace, inner_path


@pytest.fixture(params=["directory", "sandbox"])
def editor(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FileEditor]:
    if request.param == "directory":
        yield FileEditor(tmp_path)
        return
    with open_sandbox(request.getfixturevalue("backend")) as sandbox:
        yield FileEditor(sandbox=sandbox)


def said(editor: FileEditor, command: str, path: str, **arguments: object) -> str:
    output = editor(command=command, path=path, **arguments)
    assert output.error is None, output.error
    return output.text


def refused(editor: FileEditor, command: str, path: str, **arguments: object) -> str:
    output = editor(command=command, path=path, **arguments)
    assert output.error is not None, output.text
    return output.error


def test_a_file_is_made_looked_at_and_changed(editor: FileEditor) -> None:
    text = "".join(f"line {number}\n" for number in range(1, 11))
    assert said(editor, "create", "src/a.txt", file_text=text) == "`src/a.txt` has been written: 10 lines."
    assert said(editor, "view", "src/a.txt", view_range=[2, 3]).split("\n") == [
        "[… 1 line above …]",
        "     2\tline 2",
        "     3\tline 3",
        "[… 7 lines below …]",
    ]
    assert "     5\tFIVE\n     6\tand a half" in said(
        editor, "str_replace", "src/a.txt", old_str="line 5\n", new_str="FIVE\nand a half\n"
    )
    assert "     1\tfirst\n     2\tline 1" in said(
        editor, "insert", "/src/a.txt", insert_line=0, new_str="first"
    )
    assert said(editor, "view", "src/a.txt", view_range=[11, -1]).endswith("    12\tline 10")
    assert said(editor, "view", ".") == "`.` holds:\nsrc/\nsrc/a.txt"


def test_text_goes_behind_the_last_line_also_where_that_has_no_end(editor: FileEditor) -> None:
    said(editor, "create", "a", file_text="one")
    said(editor, "insert", "a", insert_line=1, new_str="two")
    assert said(editor, "view", "a") == "     1\tone\n     2\ttwo"
    said(editor, "create", "a", file_text="")
    assert said(editor, "view", "a") == "`a` is empty."
    said(editor, "insert", "a", insert_line=0, new_str="one\n")
    assert said(editor, "view", "a") == "     1\tone"


def test_text_that_does_not_stand_exactly_once_is_not_replaced(editor: FileEditor) -> None:
    said(editor, "create", "a", file_text="x = 1\ny = 2\nx = 1\n")
    assert "2 times, in lines 1, 3" in refused(editor, "str_replace", "a", old_str="x = 1", new_str="")
    assert "in `a`." in refused(editor, "str_replace", "a", old_str="z", new_str="")
    assert "spaces" in refused(editor, "str_replace", "a", old_str="y =  2", new_str="")
    assert "is empty" in refused(editor, "str_replace", "a", old_str="", new_str="b")


@pytest.mark.parametrize(
    ("command", "path", "arguments", "error"),
    [
        ("view", "nowhere", {}, "nowhere"),
        ("view", "../a", {}, "`..`"),
        ("view", "a/../../b", {}, "`..`"),
        ("view", "", {}, "is empty"),
        ("view", "a\0b", {}, "is empty"),
        ("view", "file", {"view_range": [3, 4]}, "has lines 1 to 2"),
        ("view", "file", {"view_range": [2, 1]}, "before the first"),
        ("view", "file", {"view_range": [1]}, "two numbers"),
        ("create", "file", {}, "needs `file_text`"),
        ("create", ".", {"file_text": ""}, "directory"),
        ("create", "file/below", {"file_text": ""}, "file/below"),
        ("insert", "file", {"new_str": "x", "insert_line": 3}, "has lines 1 to 2"),
        ("insert", "file", {"new_str": "x"}, "has lines 1 to 2"),
        ("create", "big", {"file_text": "x" * (MAX_FILE_BYTES + 1)}, "at most 2 MiB"),
    ],
)
def test_a_wrong_command_says_what_is_wrong(
    editor: FileEditor, command: str, path: str, arguments: dict[str, object], error: str
) -> None:
    said(editor, "create", "file", file_text="one\ntwo\n")
    assert error in refused(editor, command, path, **arguments)
    assert said(editor, "view", "file") == "     1\tone\n     2\ttwo"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory with a secret beside the root, and ways out of the root."""
    (tmp_path / "secret").write_text("secret\n")
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").symlink_to(tmp_path / "secret")
    (root / "directory").symlink_to(tmp_path)
    (root / "gone").symlink_to(tmp_path / "new")
    os.mkfifo(root / "pipe")
    (root / "binary").write_bytes(b"\xff\xfe\x00")
    return root


@pytest.mark.parametrize(
    "path", ["file", "directory/secret", "directory", "gone", "gone/x", "pipe", "binary"]
)
def test_links_pipes_and_what_is_no_text_lead_nowhere(outside: Path, path: str) -> None:
    editor = FileEditor(outside)
    refused(editor, "view", path)
    if path != "binary":
        refused(editor, "create", path, file_text="mine")
    refused(editor, "str_replace", path, old_str="secret", new_str="mine")
    assert "secret" not in said(editor, "view", ".")
    assert (outside.parent / "secret").read_text() == "secret\n"
    assert sorted(each.name for each in outside.parent.iterdir()) == ["root", "secret"]


def test_a_link_in_a_sandbox_leads_nowhere(backend: str) -> None:
    with open_sandbox(backend) as sandbox:
        sandbox.exec("mkdir d; echo hi > d/f; ln -s d/f link; ln -s d dlink; ln -s /etc out; mkfifo pipe")
        editor = FileEditor(sandbox=sandbox)
        for path in ("link", "out/passwd", "pipe"):
            refused(editor, "view", path)
        refused(editor, "create", "out/new", file_text="x")
        assert said(editor, "view", ".").split("\n")[1:] == ["d/", "d/f", "dlink", "link", "out", "pipe"]
        editor(command="create", path="link", file_text="x")
        assert said(editor, "view", "d/f") == "     1\thi"


@given(st.text("abc./\\ ~\0-*", max_size=12))
def test_no_path_names_anything_above_the_root(path: str) -> None:
    try:
        inner = inner_path(path)
    except ToolError:
        return
    assert not inner.is_absolute()
    assert ".." not in inner.parts


def test_the_viewer_shows_a_window_and_clips_long_lines(tmp_path: Path) -> None:
    (tmp_path / "long").write_text("x" * 10_000 + "\n" + "y\n" * 1000)
    viewer = FileViewer(tmp_path)
    first = viewer(path="long").text
    assert "[… 9,500 characters left out …]" in first
    assert first.endswith("   200\ty\n[… 801 lines below …]")
    assert viewer(path="long", first_line=1000).text.endswith("  1001\ty")
    assert viewer(path="long", first_line=5, last_line=6).text.count("\ty") == 2
    assert "has lines 1 to 1001" in str(viewer(path="long", first_line=2000).error)


def test_a_tool_without_its_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no directory"):
        DirectoryPlace(tmp_path / "none")


def test_a_large_directory_is_cut_with_a_mark(tmp_path: Path) -> None:
    for number in range(600):
        (tmp_path / f"f{number:03}").touch()
    listing = FileViewer(tmp_path)(path=".").text.split("\n")
    assert (len(listing), listing[-1]) == (502, "[… more …]")


def test_files_are_listed_beside_any_number_of_hidden_ones(tmp_path: Path) -> None:
    for number in range(MAX_ENTRIES + 1):
        (tmp_path / f".f{number:03}").touch()
    (tmp_path / "shown").touch()
    assert DirectoryPlace(tmp_path).entries(".", 1) == ["shown"]


def test_a_hard_link_to_a_file_outside_is_neither_read_nor_written(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    outside = tmp_path / "outside"
    outside.write_text("secret\n")
    os.link(outside, tmp_path / "root" / "inside")
    editor = FileEditor(tmp_path / "root")
    for command, arguments in {
        "view": {},
        "create": {"file_text": "mine"},
        "str_replace": {"old_str": "secret", "new_str": "mine"},
        "insert": {"insert_line": 0, "new_str": "mine"},
    }.items():
        assert "a hard link" in refused(editor, command, "inside", **arguments)
    assert "a hard link" in (FileViewer(tmp_path / "root")(path="inside").error or "")
    assert outside.read_text() == "secret\n"
    outside.unlink()  # now the file has no other name
    said(editor, "create", "inside", file_text="mine")
