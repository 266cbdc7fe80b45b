"""What a cell can be made for: run Python, run a program, read, write, pack or unpack files.

Every job runs with the rights of the program itself, also reading and writing files: a link leads nowhere
that the program could not go, and is not followed all the same. Runs inside the sandbox.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import stat
import sys

TYPE_CHECKING = False  # `typing` is a megabyte of every idle sandbox
if TYPE_CHECKING:
    from typing import Any, NoReturn

REFUSED_CODE = 250
"""Exit code of a file job that failed; its stderr is {"errno", "message"}."""
GAVE_UP_CODE = 249
"""Of a job that met what it did not foresee; its stderr says what."""
CHUNK = 1 << 20


def do(order: dict[str, Any], payload: dict[str, Any], box: str, *, is_bare: bool) -> NoReturn:
    """Do the one job of this process and end it."""
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": box,
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
    root = box if is_bare else "/"
    work = {"read": read, "write": write, "pack": pack, "unpack": unpack}[kind]
    try:
        work(payload["path"], box, root)
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
    random.seed()
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    # Out of sight, and kept: to free them would touch, and so copy, many pages that are shared with the
    # warden.
    kept = [sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "rllm"]
    kept.append(sys.modules["__main__"])
    sys.path.insert(0, box)
    sys.argv[:] = [script, *payload.get("argv", [])]
    main = type(sys)("__main__")
    main.__dict__.update(__file__=script, __builtins__=__builtins__)
    sys.modules["__main__"] = main
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


def _write_file(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    _write_all(file, text.encode("utf-8", "surrogatepass"))
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
        shown = error.with_traceback(trace and trace.tb_next)
        sys.excepthook(type(shown), shown, shown.__traceback__)
        return 1


def run_program(payload: dict[str, Any], environment: dict[str, str]) -> NoReturn:
    """Become the program. 127 where there is none, as a shell says."""
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


def read(path: str, box: str, root: str) -> None:
    """The bytes of a plain file to stdout."""
    folder, name = _folder_of(path, box, root, makes=False)
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise OSError(errno.EINVAL, f"`{path}` is not a plain file")
    _copy(file, 1)


def write(path: str, box: str, root: str) -> None:
    """stdin to a plain file, which is replaced: what a link of that name points to stays as it is."""
    folder, name = _folder_of(path, box, root, makes=True)
    part = f".{name}.part"[:255]
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with contextlib.suppress(FileNotFoundError):  # as it should be
        os.unlink(part, dir_fd=folder)
    file = os.open(part, flags, 0o644, dir_fd=folder)
    try:
        os.lseek(0, 0, os.SEEK_SET)
        _copy(0, file)
        os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        os.unlink(part, dir_fd=folder)
        raise


def pack(path: str, box: str, root: str) -> None:
    """A tar of a file or directory to stdout, and to the result channel what is not in it."""
    import tarfile

    folder, name = _folder_of(path, box, root, makes=False)
    left_out: list[str] = []
    with os.fdopen(1, "wb", closefd=False) as stream, tarfile.open(fileobj=stream, mode="w|") as tar:
        os.fchdir(folder)
        top = os.lstat(name)
        if not (stat.S_ISREG(top.st_mode) or stat.S_ISDIR(top.st_mode)):
            raise OSError(errno.EINVAL, f"`{path}` is neither a plain file nor a directory")
        stack = [(name, ".")]
        while stack:
            here, shown = stack.pop()
            try:
                entry = tar.gettarinfo(here, shown)
                if entry is None or not (entry.isreg() or entry.isdir() or entry.issym()):
                    left_out.append(shown)
                    continue
                if entry.isdir():
                    inside = [(f"{here}/{child}", f"{shown}/{child}") for child in sorted(os.listdir(here))]
                    stack.extend(reversed(inside))
                    tar.addfile(entry)
                elif entry.isreg():
                    with open(here, "rb") as file:
                        tar.addfile(entry, file)
                else:
                    tar.addfile(entry)
            except OSError as error:
                if error.errno in (errno.EPIPE, errno.ENOSPC):
                    raise
                left_out.append(shown)  # its program made it unreadable
    if left_out:
        os.write(3, json.dumps(left_out).encode()[:60_000])


def unpack(path: str, box: str, root: str) -> None:
    """A tar on stdin into a directory: directories, then files, then links, so that nothing goes through
    one."""
    import tarfile

    folder, name = _folder_of(path, box, root, makes=True)
    os.lseek(0, 0, os.SEEK_SET)
    links = []
    with os.fdopen(0, "rb", closefd=False) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
        for entry in tar:
            inside = os.path.normpath(entry.name)
            if inside.startswith(("..", "/")):
                raise OSError(errno.EINVAL, f"`{entry.name}` leads out of the archive")
            target = path if inside == "." else f"{path.rstrip('/')}/{inside}"
            where, last = _folder_of(target, box, root, makes=True) if inside != "." else (folder, name)
            if entry.issym():
                links.append((entry.linkname, where, last))
            elif entry.isdir():
                if last not in (".", ""):
                    _make_directory(last, where, entry.mode)
            elif entry.isreg():
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
                file = os.open(last, flags, entry.mode & 0o777, dir_fd=where)
                content = tar.extractfile(entry)
                while content is not None:
                    block = content.read(CHUNK)
                    if not block:
                        break
                    _write_all(file, block)
                os.close(file)
            if where != folder and not entry.issym():
                os.close(where)
        for linkname, where, last in links:
            os.symlink(linkname, last, dir_fd=where)


def _folder_of(path: str, box: str, root: str, *, makes: bool) -> tuple[int, str]:
    """An open directory and the last part of `path` in it. No part on the way may be a link.

    Raises OSError: ELOOP or ENOTDIR for a link, EACCES for a path outside `root`.
    """
    if "\0" in path:
        raise OSError(errno.EINVAL, "a path cannot hold a NUL")
    whole = os.path.normpath(os.path.join(box, path))
    if os.path.commonpath([whole, root]) != root:
        raise OSError(errno.EACCES, f"`{path}` is outside {root}")
    parts = [part for part in os.path.relpath(whole, root).split("/") if part != "."]
    here = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    for part in parts[:-1]:
        if makes:
            _make_directory(part, here, 0o755)
        below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
        os.close(here)
        here = below
    return here, parts[-1] if parts else "."


def _make_directory(name: str, folder: int, mode: int) -> None:
    with contextlib.suppress(FileExistsError):  # it is opened next, without following a link
        os.mkdir(name, mode & 0o777, dir_fd=folder)


def _copy(source: int, target: int) -> None:
    while True:
        block = os.read(source, CHUNK)
        if not block:
            return
        _write_all(target, block)


def _write_all(target: int, block: bytes) -> None:
    rest = memoryview(block)
    while rest:
        rest = rest[os.write(target, rest) :]
