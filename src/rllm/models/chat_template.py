"""Chat templates are programs that come with a model, so they run in a process of their own, within limits.

    template, variables ──► template_process: memory bound by the kernel, processor time as well ──► text
                                          └─ out of either ──► ConfigError, and the next call gets a new one

One such process serves a whole program. It begins with the first template and ends with the program. The
templates of the built-in models are ours, so they are rendered on the spot: each exchange with a process lets
go of the interpreter, and while an engine computes it comes back late.
"""

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rllm.errors import ConfigError
from rllm.models.builtin_templates import CHAT_TEMPLATE, IMAGE_TEMPLATE

CPU_S = 3.0
"""Processor time of one rendering; a conversation of 100,000 characters takes a few milliseconds."""
MEMORY_BYTES = 512 << 20
"""All that the process may map."""
_SPARE_CHARACTERS = 1 << 22
_MAX_GROWTH = 16
"""Characters that a template may print for each that it is given, beside the spare ones."""
_SIZE_BYTES = 8
_ENVIRONMENT = re.compile(r"PATH|LD_LIBRARY_PATH|DYLD_\w+|PYTHON\w*|TZ|LANG|LC_\w+")
"""The variables that it inherits: those that Python needs to start, and no keys."""


def render_template(template: str, variables: Mapping[str, Any]) -> str:
    """`template` with messages, tools and the names of special tokens.

    Raises ConfigError for a template that refuses them, is broken, or needs more time or memory than it gets.
    """
    variables_json = json.dumps(variables, default=_placeholder)
    if template in (CHAT_TEMPLATE, IMAGE_TEMPLATE):
        # Through JSON here as well: a template sees the same plain data wherever it runs.
        return _render_here(template, json.loads(variables_json))
    limit = _SPARE_CHARACTERS + _MAX_GROWTH * len(variables_json)
    request = (
        f'{{"template": {json.dumps(template)}, "variables": {variables_json}, "max_characters": {limit}}}'
    )
    return _process.ask(request.encode())


def _render_here(template: str, variables: dict[str, Any]) -> str:
    from rllm.models.template_process import compiled

    try:
        return compiled(template).render(variables)
    except Exception as error:
        raise _refusal(str(error) or type(error).__name__) from error


def _refusal(complaint: str) -> ConfigError:
    return ConfigError(f"The model's chat template refuses the conversation: {complaint}.")


def _placeholder(value: Any) -> str:
    """Templates see plain data alone: an object's methods would be theirs to call."""
    return f"<{type(value).__name__}>"


class _TemplateProcess:
    """Started when it is first asked; asked by one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: bytes) -> str:
        with self._lock:
            process = self._running()
            try:
                kind, answer = _exchange(process, request)
            except (EOFError, BrokenPipeError) as error:
                raise ConfigError(_cause_of_death(self._end())) from error
            except BaseException:  # interrupted on the way: what it answers next would be of this request
                process.kill()
                self._end()
                raise
            if kind == b"M":  # what was too much for it may be all over its memory
                self._end()
        if kind == b"T":
            return answer.decode("utf-8", "surrogatepass")
        if kind == b"M":
            raise ConfigError(
                f"The model's chat template needs more than {MEMORY_BYTES >> 20} MiB for the conversation."
            )
        raise _refusal(answer.decode())

    def close(self) -> None:
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._end()  # somebody else ended it
        if self._process is None:
            program = Path(__file__).with_name("template_process.py")
            self._process = subprocess.Popen(
                # `-P` keeps this directory, whose files have common names, out of the program's imports.
                [sys.executable, "-P", str(program), str(CPU_S), str(MEMORY_BYTES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: value for name, value in os.environ.items() if _ENVIRONMENT.fullmatch(name)},
            )
        return self._process

    def _end(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # over what it did not read
                pipe.close()
        return process.wait()


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> tuple[bytes, bytes]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(len(request).to_bytes(_SIZE_BYTES) + request)
    process.stdin.flush()
    head = process.stdout.read(1 + _SIZE_BYTES)
    size = int.from_bytes(head[1:])
    answer = process.stdout.read(size)
    if len(head) < 1 + _SIZE_BYTES or len(answer) < size:
        raise EOFError
    return head[:1], answer


def _cause_of_death(status: int) -> str:
    if status == -signal.SIGPROF:
        return (
            f"The model's chat template takes more than {CPU_S:g} s of processor time for the conversation."
        )
    how = f"signal {-status}" if status < 0 else f"exit code {status}"
    return f"The process that renders the model's chat template ended with {how} over the conversation."


_process = _TemplateProcess()


def _begin_anew() -> None:
    """In a forked process: the one that was there answers the parent."""
    global _process
    _process = _TemplateProcess()


atexit.register(lambda: _process.close())
os.register_at_fork(after_in_child=_begin_anew)
