"""A root that programs can write to: real paths, over this machine's system or an unpacked image."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rllm.errors import ConfigError
from rllm.sandbox import Limits, Root, Sandbox, Scope, Status, open_sandbox

LIMITS = Limits(wall_s=20, cpu_s=20, memory_mb=256, disk_mb=32, processes=32)
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/proc", "/dev", "/sys")
PLANTED = "import os; os._exit(0)"


@pytest.fixture(params=["bubblewrap", "unshare"])
def backend(request: pytest.FixtureRequest, need: Callable[[str], str]) -> str:
    return need(request.param)


@pytest.fixture
def box(backend: str) -> Iterator[Sandbox]:
    with open_sandbox(backend, limits=LIMITS, root=Root(folders=("/app", "/usr/src/x"))) as opened:
        yield opened


def test_every_path_is_real_and_nothing_reaches_this_machine(box: Sandbox) -> None:
    before = os.stat("/usr/bin").st_mtime_ns
    done = box.exec(
        "mkdir /testbed; echo 1 | tee /testbed/a /app/b /usr/src/x/c /usr/bin/rllm-d; rm /usr/bin/env"
    )
    assert (done.status, done.stderr) == (Status.OK, "")
    assert box.exec("cat /testbed/a /app/b /usr/src/x/c /usr/bin/rllm-d; ls /usr/bin/env").stdout == "1\n" * 4
    assert (os.stat("/usr/bin").st_mtime_ns, os.path.exists("/testbed/a")) == (before, False)
    assert (box.read("/testbed/a"), box.read_only, box.workdir) == (b"1\n", (), "/")


def test_the_disk_limit_holds_for_all_of_it(box: Sandbox) -> None:
    places = "/app/f /usr/bin/f /tmp/f /dev/shm/f /f"
    done = box.exec(f"for f in {places}; do head -c 20M /dev/zero > $f; done; du -cm {places} | tail -1")
    assert "No space left" in done.stderr
    assert int(done.stdout.split()[0]) <= LIMITS.disk_mb


def test_no_file_job_loads_code_that_a_program_wrote(backend: str) -> None:
    library = subprocess.run(
        ["/usr/bin/python3", "-c", "import os; print(os.path.dirname(os.__file__))"],
        capture_output=True,
        text=True,
    ).stdout.strip()
    if not library.startswith("/usr/"):
        pytest.skip("the interpreter of sandboxes lies elsewhere")
    root = Root(folders=("/app", library, f"{library}/encodings"))
    with open_sandbox(backend, limits=LIMITS, root=root) as box:
        done = box.exec(
            f"cd {library}; for m in tarfile shutil struct copy pwd encodings/ascii encodings/idna; do "
            f"rm -f $m.py; echo '{PLANTED}' > $m.py; done; echo kept > /app/f; head -1 tarfile.py"
        )
        assert done.stdout == f"{PLANTED}\n", done.stderr
        assert box.read("/app/f") == b"kept\n"
        box.write("/app/g", "written")
        assert box.exec(["cat", "/app/g"]).stdout == "written"
        snapshot = box.snapshot(Scope(left_out=SYSTEM, link_homes=()))
    with open_sandbox(backend, limits=LIMITS, root=Root(), snapshot=snapshot) as other:
        assert other.read("/app/f") == b"kept\n"


def test_a_program_cannot_lock_its_sandbox(box: Sandbox) -> None:
    box.exec("chmod 000 /app / /tmp; true")
    assert box.exec("echo alive").stdout == "alive\n"
    with open_sandbox(box.backend, limits=LIMITS) as without_root:
        without_root.exec("chmod 000 . /tmp")
        assert without_root.exec("echo alive").stdout == "alive\n"


def test_a_snapshot_is_never_larger_than_the_disk(box: Sandbox) -> None:
    box.exec("head -c 30M /dev/zero > /app/file; for i in 1 2 3; do ln /app/file /app/name$i; done")
    with pytest.raises(OSError, match="more files"):
        box.snapshot(Scope(left_out=SYSTEM))


def test_without_an_overlay_the_system_stays_read_only(backend: str) -> None:
    with open_sandbox(backend, limits=LIMITS, root=Root(folders=("/app",), overlay=False)) as box:
        assert box.exec("touch /app/a /b").status is Status.OK
        assert box.exec("touch /usr/bin/x").status is Status.ERROR
        assert "/usr" in box.read_only


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest image: a shell, two programs, their libraries and a project."""
    tree = tmp_path_factory.mktemp("image")
    for program in ("/bin/sh", "/bin/cat", "/bin/ls"):
        found = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for path in (program, *re.findall(r"(/\S+)", found)):
            target = tree / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    (tree / "testbed").mkdir()
    (tree / "testbed" / "f").write_text("of the image\n")
    subprocess.run(["chmod", "-R", "a+rX", tree], check=True)
    return tree


@pytest.mark.parametrize("overlay", [True, False])
def test_an_unpacked_image_is_the_root_and_stays_as_it_is(backend: str, image: Path, overlay: bool) -> None:
    root = Root(tree=str(image), folders=("/testbed", "/new"), overlay=overlay)
    with open_sandbox(backend, limits=LIMITS, root=root) as box:
        done = box.exec("cat f; echo changed > f; echo x > /new/g; cat f; ls /usr", cwd="/testbed")
        assert done.stdout.startswith("of the image\nchanged\n"), done.stderr
        assert box.exec("cat /new/g /testbed/f").stdout == "x\nchanged\n"
        assert box.exec("/usr/bin/python3 -c 1").status is Status.ERROR
    assert (image / "testbed" / "f").read_text() == "of the image\n"
    assert not (image / "new").exists()


def test_what_cannot_be_is_refused(backend: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="file system"):
        open_sandbox("subprocess", root=Root())
    for folder in ("app", "/a/../b", "/"):
        with pytest.raises(ConfigError, match="absolute path"):
            Root(folders=(folder,))
    with pytest.raises(ConfigError, match="absolute path"):
        Root(tree=str(tmp_path / "gone"))
    with open_sandbox(backend) as box, pytest.raises(ConfigError, match="`root`"):
        box.snapshot(Scope())
