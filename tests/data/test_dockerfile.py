"""Dockerfiles read by Docker's rules; which images this machine's system stands for; what files they copy
where."""

import io
import os
import stat
import tarfile
from pathlib import Path

import pytest

from rllm.data.dockerfile import fill, fill_line, instructions_of, pairs_of
from rllm.data.image import Image
from rllm.data.image_bases import require_fitting
from rllm.data.task_images import image_of
from rllm.errors import ConfigError
from rllm.sandbox.interpreter import interpreter
from rllm.sandbox.layer_build import BuildStep
from rllm.sandbox.system_layer import machine_release

TEXT = """\
# syntax=docker/dockerfile:1
# escape=`
FROM debian

RUN apt-get update `
  # a comment in between

  && true
copy --chown=a:b --link a b/
RUN <<ONE cat >/x && <<-"TWO" sh
one
ONE
\tindented
\tTWO
ENV A=1 B="two words" C=\\$A
ENV OLD the rest  of it
CMD ["sh", "-c", "x y"]
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))


def dockerfile_at(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "Dockerfile").write_text(text)
    return folder / "Dockerfile"


def test_lines_are_joined_and_numbered_as_docker_does(tmp_path: Path) -> None:
    each = instructions_of(dockerfile_at(tmp_path / "c", TEXT))
    assert [(one.word, int(one.where.rpartition(":")[2])) for one in each] == [
        ("FROM", 3), ("RUN", 5), ("COPY", 9), ("RUN", 10), ("ENV", 15), ("ENV", 16), ("CMD", 17),
    ]  # fmt: skip
    assert each[1].text == "apt-get update && true"
    assert (each[2].flags, each[2].words) == ((("chown", "a:b"), ("link", "")), ["a", "b/"])
    assert each[3].documents == ("one\n", "indented\n")
    assert pairs_of(fill_line(each[4], {"A": "9"})) == {"A": "1", "B": "two words", "C": "$A"}
    assert pairs_of(each[5]) == {"OLD": "the rest  of it"}
    assert each[6].json_words == ["sh", "-c", "x y"]


def test_a_tab_ends_a_word_and_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    (one, two) = instructions_of(dockerfile_at(tmp_path / "c", "FROM debian\nRUN\techo 'a\u2028b\x0cc'\n"))
    assert (one.word, two.word, two.text) == ("FROM", "RUN", "echo 'a\u2028b\x0cc'")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$A-${A}", "1-1"),
        ("${E:-x}${E-x}${U-y}${U:-$A}", "xy$A"),
        ("${A:+set}${E:+set}${E+set}", "setset"),
        ("\\$A $U.", "$A ."),
        ("$AB$", "$"),
    ],
)
def test_variables_are_filled_in(text: str, value: str) -> None:
    assert fill(text, {"A": "1", "E": ""}) == value


def test_images_fit_by_their_major_version(tmp_path: Path) -> None:
    release = machine_release()
    if release.get("ID") != "debian":
        pytest.skip("the table of what fits is that of a Debian machine here")
    major, python = release["VERSION_ID"], ".".join(interpreter().version.split(".")[:2])
    for fitting in (
        *(
            "debian",
            "debian:latest",
            f"debian:{major}",
            f"debian:{major}.1-slim",
            f"docker.io/library/debian:{major}",
        ),
        *("python", "python:slim", f"python:{python}", f"python:{python}-slim", "python:3@sha256:abc"),
    ):
        require_fitting(fitting, "D:1")
    for other in (
        *("alpine", "node:20", "debian:7", "python:2.7", "python:3-alpine", "ubuntu:18.04", "scratch"),
        *("python:3.99", "python:3-windowsservercore", "nvidia/cuda:12.1-runtime-ubuntu22.04"),
    ):
        with pytest.raises(ConfigError, match=r"^D:1: `FROM "):
            require_fitting(other, "D:1")


def test_files_go_where_docker_puts_them(tmp_path: Path) -> None:
    context = tmp_path / "context"
    dockerfile = dockerfile_at(
        context,
        "ARG TAG=latest\nFROM debian:${TAG}\nARG PLACE=/srv/app\nENV HERE=$PLACE\nWORKDIR $HERE\nCOPY . .\n"
        "COPY one.txt renamed.txt\nCOPY *.txt many/\nCOPY one.txt /tmp\nCOPY folder /bin\n"
        "ADD packed.tar /data/\n"
        'COPY --chmod=700 ["one.txt", "with space"]\nWORKDIR deeper/../sub\n',
    )
    (context / "folder").mkdir()
    (context / "folder" / "inner").write_text("inner")
    (context / "one.txt").write_text("one")
    (context / "two.txt").write_text("two")
    (context / ".dockerignore").write_text("*.tar\n**/secret*\n!folder/secret-kept\nDockerfile\n")
    for name in ("secret", "secret-kept"):
        (context / "folder" / name).write_text(name)
    (context / ".git").mkdir()
    with tarfile.open(context / "packed.tar", "w") as tar:
        entry = tarfile.TarInfo("inside")
        entry.size = 3
        tar.addfile(entry, io.BytesIO(b"tar"))
    with pytest.raises(ConfigError, match=r"Dockerfile:11.*`packed.tar`"):
        image_of(dockerfile)
    (context / ".dockerignore").write_text(
        "**/secret*\n!folder/secret-kept\nDockerfile\npacked.*\n!packed.tar\n"
    )
    image = image_of(dockerfile)
    files = sorted(
        "/" + str(path.relative_to(layer))
        for layer in image.layers
        for path in layer.rglob("*")
        if path.is_file()
    )
    assert files == [
        "/data/inside", "/srv/app/.dockerignore", "/srv/app/folder/inner", "/srv/app/folder/secret-kept",
        "/srv/app/many/one.txt", "/srv/app/many/two.txt", "/srv/app/one.txt", "/srv/app/packed.tar",
        "/srv/app/renamed.txt", "/srv/app/two.txt", "/srv/app/with space", "/tmp/one.txt",
        "/usr/bin/inner", "/usr/bin/secret-kept",
    ]  # fmt: skip
    modes = [
        layer / "srv/app/with space" for layer in image.layers if (layer / "srv/app/with space").exists()
    ]
    assert modes[0].stat().st_mode & 0o777 == 0o700
    assert (image.workdir, image.variables) == ("/srv/app/sub", {"HERE": "/srv/app"})
    kept = image_of(dockerfile).layers
    (context / "two.txt").write_text("changed")
    changed = image_of(dockerfile).layers
    assert kept == image.layers
    assert (changed[-1], changed[0]) == (kept[-1], changed[0])
    assert changed[0] != kept[0]


def test_what_an_exception_keeps_of_an_ignored_directory_is_copied(tmp_path: Path) -> None:
    context = tmp_path / "context"
    dockerfile = dockerfile_at(context, "FROM debian\nCOPY . /all\nCOPY build /part\n")
    for name in ("build/deep/keep.txt", "build/deep/other.txt", "build/other.txt", "rest/other.txt"):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).write_text(name)
    (context / ".dockerignore").write_text("build\nrest\nDockerfile\n.dockerignore\n!build/deep/keep.txt\n")
    paths = {
        f"/{path.relative_to(layer)}" for layer in image_of(dockerfile).layers for path in layer.rglob("*")
    }
    assert {each for each in paths if each.endswith(".txt")} == {
        "/all/build/deep/keep.txt",
        "/part/deep/keep.txt",
    }
    assert "/all/rest" not in paths


def test_what_an_upper_layer_removed_or_replaced_is_not_read(tmp_path: Path) -> None:
    upper, lower = tmp_path / "upper", tmp_path / "lower"
    for name in ("opt/gone", "opt/folder/file", "opt/kept"):
        (lower / name).parent.mkdir(parents=True, exist_ok=True)
        (lower / name).write_text(name)
    (upper / "opt").mkdir(parents=True)
    (upper / "opt" / "folder").write_text("a file by now")
    image = Image(layers=(upper, lower))
    assert image.read("/opt/kept") == "opt/kept"
    assert image.read("/opt/folder/file") == ""
    try:
        os.mknod(upper / "opt" / "gone", stat.S_IFCHR, os.makedev(0, 0))
    except PermissionError:
        pytest.skip("this system lets nobody make the mark of a removed file")
    assert image.read("/opt/gone") == ""


def test_a_line_that_ran_without_a_registry_runs_again_when_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_online = False

    def build(folder: Path, below: list[Path], step: BuildStep) -> Path:
        (folder / "made").mkdir(parents=True)
        (folder / "made" / "online").write_text(str(step.has_network))
        return folder / "made"

    monkeypatch.setattr("rllm.data.task_images.make_system_layer", lambda layer: None)
    monkeypatch.setattr("rllm.data.task_images.build_layer", build)
    monkeypatch.setattr("rllm.data.task_images.registries_are_reachable", lambda: is_online)
    dockerfile = dockerfile_at(tmp_path / "c", "FROM debian\nRUN pip install x || true\n")
    offline = image_of(dockerfile).layers
    assert image_of(dockerfile).layers == offline
    is_online = True
    online = image_of(dockerfile).layers
    assert [(each[0] / "online").read_text() for each in (offline, online)] == ["False", "True"]
    is_online = False
    assert image_of(dockerfile).layers == online


def test_a_line_that_fails_leaves_nothing(tmp_path: Path) -> None:
    dockerfile = dockerfile_at(tmp_path / "c", "FROM debian\nCOPY broken.tar /a\nADD broken.tar /b\n")
    with tarfile.open(tmp_path / "c" / "broken.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("../../outside"))
    with pytest.raises(ConfigError, match=r"Dockerfile:3: `ADD broken.tar /b`"):
        image_of(dockerfile)
    assert len([each for each in os.listdir(tmp_path / "home/layers") if not each.endswith(".lock")]) == 1
    assert not (tmp_path / "outside").exists()
    for text, message in (("", "has no FROM"), ("RUN true\nFROM debian", ":1: `RUN` stands before FROM")):
        with pytest.raises(ConfigError, match=message):
            image_of(dockerfile_at(tmp_path / "c", text))
