"""Kept Dockerfiles, built here and looked at in a sandbox: a handful always, all of them as a slow test."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rllm.data.task_images import image_of
from rllm.errors import ConfigError
from rllm.sandbox import Limits, Root, open_sandbox
from rllm.sandbox.interpreter import interpreter
from rllm.sandbox.launch import is_privileged
from rllm.sandbox.layer_build import missing, registries_are_reachable
from rllm.sandbox.system_layer import machine_release

KEPT = Path(__file__).parent / "dockerfiles"
FAST = ("copy", "deletes", "here-document", "refused-fails", "stages", "user", "variables")
LIMITS = Limits(wall_s=60, cpu_s=60, memory_mb=512, disk_mb=64, processes=64)


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache for all: what their Dockerfiles begin with alike is built once."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLLM_HOME", str(folder))
        yield folder


def comment_of(text: str, name: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith(f"# {name}: ")]
    return lines[0].partition(": ")[2] if lines else ""


def skip_without(needs: str) -> None:
    release = machine_release()
    is_debian = (release.get("ID"), release.get("VERSION_ID")) == ("debian", "12")
    lacking = {
        "run": missing() or ("" if shutil.which("dpkg") else "this system has no dpkg"),
        "root": "" if is_privileged() else "this run is as a plain user",
        "python": "" if interpreter().version.startswith("3.11") else "the system's Python is no 3.11",
        "debian-12": "" if is_debian else "this system is no Debian 12",
    }
    for each in needs.split():
        reachable = each != "network" or registries_are_reachable()
        if not reachable or lacking.get(each):
            pytest.skip(lacking.get(each) or "no package registry can be reached")


def play(name: str, folder: Path, request: pytest.FixtureRequest) -> None:
    text = (KEPT / f"{name}.Dockerfile").read_text("utf-8")
    skip_without(comment_of(text, "needs"))
    shutil.copytree(KEPT / "context", folder, dirs_exist_ok=True)
    (folder / "Dockerfile").write_text(text)
    refusal = comment_of(text, "refused")
    if refusal:
        with pytest.raises(ConfigError, match=refusal.replace("\\n", "\n")):
            image_of(folder / "Dockerfile")
        return
    request.getfixturevalue("bubblewrap")
    image = image_of(folder / "Dockerfile")
    root = Root(layers=tuple(map(str, image.layers)), owner=image.user)
    with open_sandbox("bubblewrap", limits=LIMITS, root=root) as sandbox:
        done = sandbox.exec(["bash", "-c", comment_of(text, "check")], env=image.variables, cwd=image.workdir)
    assert done.exit_code == 0, f"{name}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("name", FAST)
def test_a_kept_dockerfile_does_here_what_it_says(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    play(name, tmp_path, request)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted(each.stem for each in KEPT.glob("*.Dockerfile") if each.stem not in FAST)
)
def test_every_kept_dockerfile_does_here_what_it_says(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    play(name, tmp_path, request)


def test_a_build_sees_nothing_of_this_machine_but_its_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without("run")
    monkeypatch.setenv("SECRET_KEY", "key")
    (tmp_path / "secret").write_text("key")
    connect = 'import socket; socket.create_connection(("1.1.1.1", 53), 5)'
    lines = (
        "FROM debian",
        f"ENV LD_PRELOAD={tmp_path}/library.so BASH_ENV={tmp_path}/start",
        f'RUN test ! -e {tmp_path} -a -z "$SECRET_KEY" -a ! -e /proc/{os.getpid()}/root/{tmp_path}',
        "RUN ! sh -c 'cat /proc/sys/kernel/panic > /proc/sys/kernel/panic' && ! mknod /disk b 254 0",
        "RUN ! mount -t tmpfs none /mnt && ! cat /etc/shadow | grep -v ':[*]:'",
        f"RUN --network=none python3 -c '{connect}'",
    )
    (tmp_path / "Dockerfile").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"(?s)Dockerfile:6: `RUN .*unreachable"):
        image_of(tmp_path / "Dockerfile")


def test_a_build_that_is_killed_leaves_nothing_that_is_used(tmp_path: Path, home: Path) -> None:
    skip_without("run")
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN touch /half && sleep 61.5 && touch /whole\n")
    program = (
        "from pathlib import Path; from rllm.data.task_images import image_of; "
        f"image_of(Path({str(tmp_path)!r}, 'Dockerfile'))"
    )
    driver = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    try:
        while not list(home.glob("layers/.part-*/build/up/root/half")):
            assert driver.poll() is None, driver.communicate()[1]
            time.sleep(0.05)
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.communicate()
    deadline_s = time.monotonic() + 5
    while sleepers():
        assert time.monotonic() < deadline_s, "what it started still runs"
        time.sleep(0.05)
    assert not list(home.glob("layers/[!.]*/layer/half"))
    (tmp_path / "Dockerfile").write_text("FROM debian\nWORKDIR /other\n")
    image_of(tmp_path / "Dockerfile")
    assert not list(home.glob("layers/.part-*"))
    assert str(home) not in Path("/proc/mounts").read_text("utf-8")


def sleepers() -> list[str]:
    sleeping: list[str] = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if re.fullmatch(rb"sleep\x0061\.5\x00", each.read_bytes()):
                sleeping.append(each.parent.name)
        except OSError:
            continue  # it ended meanwhile
    return sleeping
