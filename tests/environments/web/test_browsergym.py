"""BrowserGym's ids: refused where servers are missing, played by BrowserGym itself under its own Python."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from rllm.environments.worlds import world_named
from rllm.errors import ConfigError
from rllm.eval.catalogue import benchmark_named
from rllm.eval.tasks import benchmark_tasks

PYTHON = "RLLM_BROWSERGYM_PYTHON"
"""Of an environment that has BrowserGym and rllm; `make test-browsergym` makes one."""
PROGRAM = """
import json, re
from rllm.environments.worlds import world_named

world = world_named("browsergym/miniwob.click-test")
first, second = (world.env_class.from_dict(each) for each in world.tasks("test", 2))
said = [first.reset()[0], second.reset()[0]]
said += list(first.step('click("9999")')[:3])
button = re.search(r"\\[(\\d+)\\] button", said[0])[1]
said += list(first.step(f'click("{button}")')[1:3])
first.close()
second.close()
print(json.dumps(said))
"""


@pytest.mark.parametrize(
    ("name", "lack"),
    [
        ("webarena.310", "set WA_SHOPPING, WA_SHOPPING_ADMIN"),
        ("visualwebarena.1", "set VWA_CLASSIFIEDS"),
        ("workarena.servicenow.all-menu", "set SNOW_INSTANCE_URL"),
        ("nonsense.1", "its ids begin with"),
    ],
)
def test_an_id_is_refused_by_what_its_servers_lack(
    monkeypatch: pytest.MonkeyPatch, name: str, lack: str
) -> None:
    for variable in list(os.environ):
        if variable.startswith(("WA_", "VWA_", "SNOW_")):
            monkeypatch.delenv(variable)
    with pytest.raises(ConfigError, match=lack):
        benchmark_tasks(benchmark_named(f"browsergym/{name}"))


def test_splits_share_no_seed() -> None:
    world = world_named("browsergym/miniwob.click-test")
    seeds = [{task["seed"] for task in world.tasks(split, 50)} for split in ("train", "validation", "test")]
    assert len(set.union(*seeds)) == 150


def test_miniwob_is_played_by_browsergym_itself(chromium: str, tmp_path: Path) -> None:
    """Two environments of one process, which share Playwright's thread."""
    if PYTHON not in os.environ:
        pytest.skip("`make test-browsergym` has what this needs")
    program = tmp_path / "chromium-1117" / "chrome-linux" / "chrome"  # where Playwright 1.44 looks for it
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(str(chromium))} --no-sandbox "$@"\n')
    program.chmod(0o755)
    process = subprocess.run(
        [os.environ[PYTHON], "-c", PROGRAM],
        env={**os.environ, "PLAYWRIGHT_BROWSERS_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    first, second, after_error, *rest = json.loads(process.stdout.splitlines()[-1])
    assert first.startswith("Goal: Click the button.\n")
    assert second.startswith("Goal: Click the button.\n")
    assert 'Error: ValueError: Could not find element with bid "9999"' in after_error
    assert rest == [0.0, False, 1.0, True]
