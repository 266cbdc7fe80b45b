"""Layers under a writable root: shared by many sandboxes, changed by none; states of files to return to."""

import hashlib
import io
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from rllm.errors import ConfigError, SandboxError
from rllm.sandbox import Limits, Root, Sandbox, SandboxPool, Scope, open_sandbox
from rllm.sandbox.inside.files import merged_states
from rllm.sandbox.process import WardenProcess

LIMITS = Limits(wall_s=30, cpu_s=20, memory_mb=256, disk_mb=48, processes=32)
WHOLE = Scope(folders=("/app", "/data"))
IN_PLACE = (
    "cd /app; echo more >> a; truncate -s 0 sub/b; ln a linked; echo through >> linked; chmod 777 sub/c; "
    "sed -i s/c/C/ sub/c; mv sub/d e; rm -r gone; mkdir gone; echo new > gone/f; touch /usr/local/mine; "
    'python3 -c \'import mmap; f = open("m", "r+b"); mmap.mmap(f.fileno(), 0)[0] = 90\''
)


@pytest.fixture
def backend(need: Callable[[str], str]) -> str:
    return need("bubblewrap")


@pytest.fixture
def layers(tmp_path: Path) -> tuple[str, ...]:
    """Two: the upper one hides a file of the lower one."""
    files = {
        "top/app/a": "upper\n",
        "top/data/x": "x\n",
        "low/app/a": "hidden\n",
        "low/app/m": "mapped\n",
        "low/app/sub/b": "b\n",
        "low/app/sub/c": "c\n",
        "low/app/sub/d": "d\n",
        "low/app/gone/f": "f\n",
        "low/app/gone/deep/g": "g\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    tmp_path.chmod(0o755)
    return str(tmp_path / "top"), str(tmp_path / "low")


def opened(backend: str, layers: tuple[str, ...], *, overlay: bool = True) -> Sandbox:
    root = Root(layers=layers, folders=("/app", "/data"), overlay=overlay)
    return open_sandbox(backend, limits=LIMITS, root=root)


@pytest.fixture
def box(backend: str, layers: tuple[str, ...]) -> Iterator[Sandbox]:
    with opened(backend, layers) as sandbox:
        if sandbox.read_only:
            pytest.skip("this kernel refuses overlays")
        yield sandbox


def tree_of(sandbox: Sandbox) -> dict[str, object]:
    """Path -> content, link or mode, by a full snapshot: it knows nothing of layers."""
    with tarfile.open(fileobj=io.BytesIO(sandbox.snapshot(WHOLE).tar)) as tar:
        found: dict[str, object] = {}
        for entry in tar:
            stream = tar.extractfile(entry) if entry.isreg() else None
            found[entry.name] = (entry.mode, entry.linkname, stream.read() if stream else None)
    return found


def digest_of(folder: str) -> str:
    done = subprocess.run(
        f"cd {folder} && find . -printf '%p %m %U %y %s %T@\\n' | sort "
        "&& find . -type f -exec sha256sum {} + | sort",
        shell=True,
        capture_output=True,
        check=True,
    )
    return hashlib.sha256(done.stdout).hexdigest()


@pytest.mark.parametrize(("name", "overlay"), [("bubblewrap", True), ("unshare", True), ("unshare", False)])
def test_writes_leave_the_layers_and_every_sibling_as_they_were(
    need: Callable[[str], str], layers: tuple[str, ...], name: str, overlay: bool
) -> None:
    backend = need(name)
    before = [digest_of(each) for each in layers]
    with opened(backend, layers, overlay=overlay) as first, opened(backend, layers, overlay=overlay) as other:
        given = tree_of(other)
        assert ("Read-only" in first.exec(IN_PLACE).stderr) == (not overlay)
        assert first.exec("cat /app/a /app/linked /app/sub/c /app/gone/f /app/m; ls /app/gone").stdout == (
            "upper\nmore\nthrough\n" * 2 + "C\nnew\nZapped\nf\n"
        )
        assert tree_of(other) == given
    assert [digest_of(each) for each in layers] == before


def test_the_files_of_layers_belong_to_the_program_and_cost_no_disk(box: Sandbox) -> None:
    assert box.exec("find /app /data ! -user $(id -u)").stdout == ""
    used = box.exec(
        "du -s --block-size=1 --one-file-system /dev/shm; df --output=used -B1 / | tail -1"
    ).stdout
    assert int(used.split()[-1]) < 200_000
    assert box.exec("cat /app/a /data/x; test -e /usr/bin/env && echo system").stdout == "upper\nx\nsystem\n"


def test_a_layer_may_change_the_system(backend: str, tmp_path: Path) -> None:
    (tmp_path / "usr/local/bin").mkdir(parents=True)
    program = tmp_path / "usr/local/bin/hey"
    program.write_text("#!/bin/sh\necho hey\n")
    program.chmod(0o755)
    with opened(backend, (str(tmp_path),)) as sandbox:
        assert sandbox.exec("hey; echo 1 > /usr/local/bin/hey; cat /usr/local/bin/hey").stdout == "hey\n1\n"
    with pytest.raises(SandboxError, match=r"layer .*/usr, .*overlays"):
        opened(backend, (str(tmp_path),), overlay=False)


def random_changes(draw: random.Random) -> str:
    """Shell lines that make, change, replace and remove files, directories and links."""
    places = [
        "/app/a",
        "/app/sub",
        "/app/sub/b",
        "/app/gone",
        "/app/gone/deep",
        "/app/n",
        "/app/n/o",
        "/data/x",
    ]
    lines: list[str] = []
    for number in range(draw.randint(1, 6)):
        place, other = draw.sample(places, 2)
        kinds = (
            f"echo {number} >> {place}",
            f"rm -rf {place}",
            f"rm -rf {place}; mkdir -p {place}; echo {number} > {place}/in",
            f"rm -rf {place}; ln -s {other} {place}",
            f"mv {place} {other}",
            f"chmod 7{draw.randint(0, 7)}5 {place}",
            f"mkdir -p {place}/p/q; echo {number} > {place}/p/q/r",
        )
        lines.append(f"({draw.choice(kinds)}) 2>/dev/null")
    return "; ".join([*lines, "true"])


@pytest.mark.parametrize("seed", [1])
def test_any_kept_state_can_be_returned_to_in_any_order(box: Sandbox, seed: int) -> None:
    draw = random.Random(seed)
    kept = [(box.keep_state(), tree_of(box))]
    for _ in range(6):
        if draw.random() < 0.4:
            state, tree = draw.choice(kept)
            box.return_to(state)
            assert tree_of(box) == tree
        box.exec(random_changes(draw))
        kept.append((box.keep_state(), tree_of(box)))
    for state, tree in draw.sample(kept, 4):
        box.return_to(state)
        assert tree_of(box) == tree


@pytest.mark.parametrize("seed", [3, 4])
def test_changes_alone_make_the_same_files_of_the_same_layers(
    box: Sandbox, layers: tuple[str, ...], seed: int
) -> None:
    draw = random.Random(seed)
    for _ in range(3):
        box.exec(random_changes(draw))
        box.keep_state()
    changes = box.snapshot(Scope(folders=WHOLE.folders, changes=True))
    assert not changes.is_whole
    with opened(box.backend, layers) as fresh:
        fresh.restore(changes)
        assert tree_of(fresh) == tree_of(box)


def test_a_file_that_was_rewritten_is_looked_at_once_a_state(tmp_path: Path) -> None:
    """Not once for each other file: a program may rewrite tens of thousands."""
    num_calls: list[int] = []

    def count(frame: FrameType, event: str, argument: object) -> None:
        num_calls[-1] += event == "c_call"

    for num_files in (50, 400):
        states = [tmp_path / f"{num_files}-{number}" for number in range(2)]
        for state in states:
            (state / "app").mkdir(parents=True)
            for number in range(num_files):
                (state / "app" / str(number)).write_text("")
        num_calls.append(0)
        sys.setprofile(count)
        try:
            present, absent = merged_states([str(state) for state in states])
        finally:
            sys.setprofile(None)
        assert {*present.values()} == {str(states[1] / "app" / str(number)) for number in range(num_files)}
        assert absent == {*present}
    assert num_calls[1] < 10 * num_calls[0]


def test_changes_stay_within_their_scope(box: Sandbox, layers: tuple[str, ...]) -> None:
    box.exec(
        "rm -rf /app; mkdir /app; echo 1 > /app/kept; rm -r /data; echo 2 > /out; echo 3 > /steer.py; "
        "ln -s /etc /app/l"
    )
    scope = Scope(
        left_out=("/app/sub", "/etc"), loose_suffixes_left_out=(".py",), link_homes=(), changes=True
    )
    with opened(box.backend, layers) as fresh:
        fresh.restore(box.snapshot(scope))
        shown = fresh.exec("ls / | grep -E 'out|steer|data'; ls /app /app/sub; id -u >/dev/null").stdout
    assert shown.split() == ["out", "/app:", "kept", "sub", "/app/sub:", "b", "c", "d"]


def test_no_answer_to_an_order_that_was_interrupted_is_taken_for_that_to_the_next(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctrl_c = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    ctrl_c.start()
    with pytest.raises(KeyboardInterrupt):
        box.exec("sleep 30")
    first = box.keep_state()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for act in (box.keep_state, lambda: box.listen(61001)):
        with monkeypatch.context() as patch:
            patch.setattr(WardenProcess, "_hear", interrupt)
            with pytest.raises(KeyboardInterrupt):
                act()
    assert box.exec("echo alive").stdout == "alive\n"
    with box.listen(61002) as door:
        assert door.getsockname()[1] == 61002
    assert (first.chain, box.keep_state().chain) == ((0,), (0, 1, 2))


def test_a_pool_keeps_sandboxes_with_layers_ready(backend: str, layers: tuple[str, ...]) -> None:
    with SandboxPool(backend, size=1, limits=LIMITS, root=Root(layers=layers)) as pool:
        for _ in range(2):
            with pool.take() as sandbox:
                assert sandbox.exec("cat /app/a; echo more >> /app/a").stdout == "upper\n"


def test_what_is_no_state_of_this_sandbox_is_refused(box: Sandbox, layers: tuple[str, ...]) -> None:
    with opened(box.backend, layers) as other, pytest.raises(ConfigError, match="is another's"):
        other.return_to(box.keep_state())
    with (
        open_sandbox(box.backend, limits=LIMITS) as plain,
        pytest.raises(ConfigError, match="keeps no states"),
    ):
        plain.keep_state()
    with pytest.raises(ConfigError, match="absolute path"):
        Root(layers=("/no/such",))
    with pytest.raises(ConfigError, match="leave `tree` out"):
        Root(layers=layers, tree=layers[0])


def test_states_end_at_their_limit_and_the_sandbox_goes_on(box: Sandbox) -> None:
    first = box.keep_state()
    for _ in range(99):
        box.keep_state()
    with pytest.raises(OSError, match="100 states"):
        box.keep_state()
    box.return_to(first)
    assert box.exec("cat /app/a").stdout == "upper\n"


def test_links_of_a_layer_lead_the_warden_nowhere(backend: str, tmp_path: Path) -> None:
    target = tmp_path / "outside"
    target.mkdir(mode=0o777)
    layer = tmp_path / "layer"
    layer.mkdir()
    for name in ("proc", "dev", "sys", "tmp", "root"):
        (layer / name).symlink_to("/run")
    (layer / "etc").mkdir()
    (layer / "etc/passwd").symlink_to("/proc/self/comm")
    (layer / "etc/group").symlink_to(target / "written")
    with opened(backend, (str(layer),)) as sandbox:
        assert (
            "agent" in sandbox.exec("cat /etc/passwd; test -c /dev/null && test -d /proc/self && echo").stdout
        )
        sandbox.keep_state()
        assert sandbox.exec("echo alive").stdout == "alive\n"
    assert os.listdir(target) == []


def test_nothing_is_left_five_seconds_after_the_driver_was_killed(
    backend: str, layers: tuple[str, ...]
) -> None:
    program = (
        "import sys\nfrom rllm.sandbox import Limits, Root, open_sandbox\n"
        f"boxes = [open_sandbox({backend!r}, limits=Limits(disk_mb=48, wall_s=90, cpu_s=90), "
        f"root=Root(layers={layers!r})) for _ in range(2)]\n"
        "boxes[0].keep_state()\nprint([each._warden.pid for each in boxes], flush=True)\n"
        "boxes[1].exec('sleep 63.5 & sleep 63.5')\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    wardens = [int(each) for each in re.findall(r"\d+", driver.stdout.readline())]
    while not sleepers():
        time.sleep(0.05)
    driver.kill()
    driver.communicate()
    killed_s = time.monotonic()
    while sleepers() or any(os.path.exists(f"/proc/{pid}/root/run") for pid in wardens):
        assert time.monotonic() - killed_s < 5, "what it started still runs"
        time.sleep(0.05)
    assert layers[1] not in Path("/proc/mounts").read_text("utf-8")


def sleepers() -> list[str]:
    names: list[str] = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            names += [each.parent.name] if each.read_bytes() == b"sleep\x0063.5\x00" else []
        except OSError:
            continue  # it ended meanwhile
    return names
