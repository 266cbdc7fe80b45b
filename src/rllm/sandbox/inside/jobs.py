"""The jobs of a cell: run Python, run a program, or one of the file jobs of `files`. Runs inside the
sandbox."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import sys

from rllm.sandbox.inside import files

TYPE_CHECKING = False  # `typing` is a megabyte of every idle sandbox
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

REFUSED_CODE = 250
"""Exit code of a file job that failed; its stderr is {"errno", "message"}."""
GAVE_UP_CODE = 249
"""The exit code of a job that met an unforeseen case; its stderr says which."""


def do(order: dict[str, Any], payload: dict[str, Any], box: str, *, home: str, is_bare: bool) -> NoReturn:
    """Do the one job of this process and end it."""
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": home,
        "TMPDIR": os.path.join(os.path.dirname(box), "tmp") if is_bare else "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
    }
    if order["has_result"]:
        environment["RLLM_RESULT_FD"] = "3"
    environment.update(order["env"])
    environment.update(payload.get("env", {}))
    os.environ.clear()
    os.environ.update(environment)
    kind = order["job"]
    if kind == "python":
        run_python(payload, box)
    if kind == "exec":
        run_program(payload, environment)
    if kind == "changes":
        payload["states"] = order["states"]
    try:
        files.do(kind, payload, box, root=box if is_bare else "/")
    except OSError as error:
        answer = {"errno": error.errno or errno.EIO, "message": error.strerror or str(error)}
        os.write(2, json.dumps(answer).encode())
        os._exit(REFUSED_CODE)
    except BaseException as error:  # noqa: BLE001  this process has nobody else to tell
        os.write(2, f"{type(error).__name__}: {error}".encode())
        os._exit(GAVE_UP_CODE)
    os._exit(0)


def run_python(payload: dict[str, Any], box: str) -> NoReturn:
    """Run `source` as a script does: as `__main__`, with its files beside it."""
    import atexit  # these are there already where programs are run, and not needed where they are not
    import builtins
    import random
    import threading

    for path, text in payload["files"].items():
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        _write_file(path, text)
    script = os.path.join(box, "main.py")
    source = payload["source"]
    _write_file(script, source)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Python's own work after a fork that `kernel.fork` leaves out: new randomness, and the id of this thread.
    random.seed()
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    # Out of sight, and kept: to free them would touch, and so copy, many pages that are shared with the
    # warden.
    modules = [sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "rllm"]
    modules.append(sys.modules["__main__"])
    sys.path.insert(0, box)
    sys.argv[:] = [script, *payload.get("argv", [])]
    main = type(sys)("__main__")
    main.__dict__.update(__file__=script, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    builtins.__dict__.update(exit=_leave, quit=_leave)  # which `site` would make; it is not loaded
    threading.stack_size = _within_memory(threading.stack_size)
    # Tests of benchmarks print and read longer integers than Python does unless told to.
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    code = _code_of(source, script, main.__dict__)
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for its threads, as the interpreter does
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001  whatever a program's last act raises, it ends
        sys.excepthook(type(error), error, error.__traceback__)
        code = code or 120
    finally:
        os._exit(code & 0xFF)


def _leave(code: object = None) -> NoReturn:
    raise SystemExit(code)


def _within_memory(stack_size: Callable[..., int]) -> Callable[..., int]:
    """`threading.stack_size` for programs that ask for 512 MiB, as contests advise.

    The kernel counts a stack whole before any of it is used: no thread could start with one above the memory.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    most = limit // 4 // 4096 * 4096

    def stack_size_within(size: int = 0) -> int:
        return stack_size(size if limit == resource.RLIM_INFINITY else min(size, most))

    return stack_size_within


def _write_file(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    files.write_all(file, text.encode("utf-8", "surrogatepass"))
    os.close(file)


def _code_of(source: str, script: str, names: dict[str, Any]) -> int:
    """Execute and return the exit code that an interpreter would end with."""
    try:
        exec(compile(source, script, "exec", dont_inherit=True), names)
        return 0
    except SystemExit as stop:
        if stop.code is None:
            return 0
        if isinstance(stop.code, int):
            return stop.code
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001  an interpreter shows whatever flies out
        trace = error.__traceback__
        program_error = error.with_traceback(trace and trace.tb_next)
        sys.excepthook(type(program_error), program_error, program_error.__traceback__)
        return 1


def run_program(payload: dict[str, Any], environment: dict[str, str]) -> NoReturn:
    """Become the program. 127 where there is none, as a shell says."""
    # The interpreter ignores SIGPIPE and SIGXFSZ, and what is ignored stays so over an exec.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    command = payload["argv"]
    try:
        if payload["cwd"]:
            os.chdir(payload["cwd"])
        os.execvpe(command[0], command, environment)
    except (OSError, ValueError) as error:
        os.write(2, f"sandbox: {payload['cwd'] or command[0]}: {error}\n".encode(errors="replace"))
    os._exit(127)
