"""The end of a browser, however its owner ends: nothing runs on, and nothing is left on the disk.

the loop of the browser ──► programs in sessions of their own, TMPDIR and HOME in one folder, no keys of ours
Keeper ◄── the process groups that run at present, one line each time they change
this process dies, by whatever signal ──► the keeper's pipe ends ──► it kills the groups, removes the folder
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
from typing import Any

_PROGRAM = """
while read -r line; do groups=$line; done
for each in $groups; do kill -9 -- "-$each" 2>/dev/null; done
rm -rf -- "$0"
[ -z "$groups" ] && exit
for each in 1 2 3 4 5 6 7 8 9 10; do sleep 1; rm -rf -- "$0"; done
"""
"""A shell's: $0 is the folder; each line names the groups that run. Without any we closed the browser
ourselves. Else a process that is being killed, or a Chromium that was only just being started, may write once
more."""
_PASSED_ON = ("PATH", "LANG", "LD_LIBRARY_PATH")
_PASSED_ON_STARTS = ("LC_", "FONTCONFIG_", "PLAYWRIGHT_", "PW_")
"""Variables that a browser needs; keys of model services are none of them."""


class Keeper:
    """A shell that waits for this process to end, in a session that no signal to us reaches."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="rllm-browser-")
        """Where all that the browser writes is."""
        self._groups: set[int] = set()
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _PROGRAM, self.folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def watch(self, group: int) -> None:
        """The processes of this group end with us."""
        self._groups.add(group)
        self._send()

    def kill(self, group: int) -> None:
        """End all processes of a group that is watched, at once."""
        if group in self._groups:
            # Forgotten here and then by the shell: a later kill
            # must not reach a group that has got the number since.
            self._groups.discard(group)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            self._send()

    def close(self) -> None:
        """Kill what still runs, and remove the folder."""
        for each in tuple(self._groups):
            self.kill(each)
        assert self._shell.stdin is not None, "the shell listens at a pipe"
        with contextlib.suppress(BrokenPipeError):
            self._shell.stdin.close()
        self._shell.wait()

    def _send(self) -> None:
        assert self._shell.stdin is not None, "the shell listens at a pipe"
        self._shell.stdin.write(f"{' '.join(map(str, sorted(self._groups)))}\n".encode())
        self._shell.stdin.flush()

    @property
    def environment(self) -> dict[str, str]:
        """Our variables that a browser is given."""
        variables = {
            name: value
            for name, value in os.environ.items()
            if name in _PASSED_ON or name.startswith(_PASSED_ON_STARTS)
        }
        return {**variables, "HOME": self.folder, "TMPDIR": self.folder}


class KeptLoop(asyncio.SelectorEventLoop):
    """A loop whose programs are watched by a keeper. Playwright's driver is the only one."""

    def __init__(self, keeper: Keeper) -> None:
        super().__init__()
        self._keeper = keeper
        self._driver: asyncio.SubprocessTransport | None = None

    @property
    def runs_driver(self) -> bool:
        """Whether the driver that was started last is alive."""
        return self._driver is not None and self._driver.get_returncode() is None

    def kill_driver(self) -> None:
        """End the driver, and what it started in its group."""
        if self._driver is not None:
            self._keeper.kill(self._driver.get_pid())

    async def subprocess_exec(self, *args: Any, env: Any = None, **options: Any) -> Any:
        """As asyncio's, in a session and an environment of the keeper's."""
        self.kill_driver()
        own = {name: value for name, value in (env or {}).items() if name.startswith("PW_")}
        environment = {**self._keeper.environment, **own}
        transport, protocol = await super().subprocess_exec(
            *args, env=environment, start_new_session=True, **options
        )
        self._driver = transport
        self._keeper.watch(transport.get_pid())
        return transport, protocol
